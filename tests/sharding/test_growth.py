"""How values grow with the batch: said of programs, and measured by feeding the batch
twice, which is the definition."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpar import _torch
from fxpar.sharding.batch_growth import Growth, growths
from fxpar.sharding.fed_positions import compared_ids, fed_positions

ROWS, WIDTH = 6, 4


class Program(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: torch.Tensor) -> Any:
        out = self.fn(*args)
        return out if isinstance(out, tuple) else (out,)


def batch(times: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    y = torch.randint(0, WIDTH, (ROWS,), generator=draw)
    w = torch.rand(WIDTH, WIDTH, generator=draw, dtype=torch.float64) + 0.1
    return [torch.cat([x] * times), torch.cat([y] * times), w]


def grown(fn: Callable[..., Any]) -> list[Growth]:
    """Of each result of ``fn(x, y, w)``; ``w`` is no batch."""
    return growths(*graphs_of(fn))


def graphs_of(fn: Callable[..., Any]) -> tuple[fx.Graph, fx.Graph]:
    """Traced with the batch, and with twice of it."""
    graphs = []
    for times in (1, 2):
        mode = _torch.fake.new_fake_mode()
        fakes = [_torch.fake.as_fake(t, mode) for t in batch(times)]
        module = _torch.aot.export_forward(Program(fn), fakes, mode)
        graphs.append(module.graph)
    return graphs[0], graphs[1]


def measured(fn: Callable[..., Any]) -> float:
    """The power by which a scalar result grows when the batch is fed twice."""
    once, twice = fn(*batch()), fn(*batch(2))
    return math.log2((twice / once).item())


def entropy(x, y, w, **how):
    return F.cross_entropy(x @ w, y, **how)


# Programs that keep to the definition: whatever power is said is measured.
EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda x, y, w: x.square().mean(),
    "sum": lambda x, y, w: x.square().sum(),
    "no batch": lambda x, y, w: w.norm(),
    "entropy mean": entropy,
    "entropy sum": lambda x, y, w: entropy(x, y, w, reduction="sum"),
    "entropy weighted": lambda x, y, w: entropy(x, y, w, weight=w[0]),
    "entropy ignored": lambda x, y, w: entropy(x, y, w, ignore_index=0),
    "smoothed": lambda x, y, w: entropy(x, y, w, label_smoothing=0.1),
    "mse": lambda x, y, w: F.mse_loss(x @ w, x),
    "mse sum": lambda x, y, w: F.mse_loss(x @ w, x, reduction="sum"),
    "by size": lambda x, y, w: x.square().sum() / x.shape[0],
    "logsigmoid": lambda x, y, w: -F.logsigmoid(x).mean(),
    "logsigmoid sum": lambda x, y, w: -F.logsigmoid(x).sum(),
    "at most zero": lambda x, y, w: (-x.square().sum()).clamp_max(0.0),
    "by numel": lambda x, y, w: x.square().sum() * (1 / x.numel()),
    "by a number": lambda x, y, w: x.square().sum() / 12,
    "by a count": lambda x, y, w: x.square().sum() / y.ne(0).sum(),
    "by a clamped count": lambda x, y, w: x.square().sum() / y.ne(0).sum().clamp(min=1),
    "count": lambda x, y, w: y.ne(0).sum(),
    "hits": lambda x, y, w: ((x @ w).argmax(-1) == 1).sum() + y.ne(0).sum(),
    "accuracy": lambda x, y, w: ((x @ w).argmax(-1) == y).double().mean() + 1,
    "gram": lambda x, y, w: (x.T @ x).abs().sum(),
    "gram over size": lambda x, y, w: (x.T @ x / len(x)).square().sum(),
    "moments": lambda x, y, w: x.var(0, correction=0).sum() + x.mean(0).norm(),
    "pairs": lambda x, y, w: (x @ x.T).square().sum(),
    "pairs mean": lambda x, y, w: (x @ x.T).square().mean(),
    "square": lambda x, y, w: x.square().sum().square(),
    "root": lambda x, y, w: x.square().sum().sqrt(),
    "norm": lambda x, y, w: x.norm(),
    "root over size": lambda x, y, w: x.square().sum() ** (1 / 2) / len(x),
    "reciprocal": lambda x, y, w: w.sum() / y.ne(0).sum(),
    "per class": lambda x, y, w: F.one_hot(y, WIDTH).sum(0).max(),
    "scattered": lambda x, y, w: (
        torch.zeros(WIDTH, dtype=x.dtype).index_add(0, y, x.square().sum(1)).max()
    ),
    "put in order": lambda x, y, w: (
        torch.zeros_like(x).index_add(0, x[:, 0].argsort(), x.square()).mean()
    ),
    "added to in order": lambda x, y, w: (
        torch.ones_like(x).index_add(0, x[:, 0].argsort(), x.square()).square().sum()
    ),
    "looked up": lambda x, y, w: F.embedding(y, w).sum(),
    "gathered": lambda x, y, w: (x @ w).square().gather(1, y[:, None]).sum(),
    "maximum": lambda x, y, w: x.max() + x.abs().amax(0).sum(),
    "einsum": lambda x, y, w: torch.einsum("bi,bj,ij->", x.abs(), x.abs(), w),
    "masked": lambda x, y, w: x.abs().masked_fill(y.eq(0)[:, None], 0.0).sum(),
    "chosen": lambda x, y, w: torch.where(y.eq(0)[:, None], x.abs(), 0.5).sum(),
    "joined": lambda x, y, w: torch.cat([x.abs(), x.abs() * 2]).sum(),
    "norm layer": lambda x, y, w: F.layer_norm(x, (WIDTH,)).square().sum(),
    "batch norm": lambda x, y, w: (
        F.batch_norm(x, None, None, training=True).exp().sum()
    ),
    "attention": lambda x, y, w: (
        F.scaled_dot_product_attention(*(x.view(-1, 1, 2, 2),) * 3).square().sum()
    ),
    "softmax over it": lambda x, y, w: (x.softmax(0) * x.abs()).sum(),
    "softmax of it": lambda x, y, w: x.softmax(0).square().sum(),
    "reshaped": lambda x, y, w: (
        x.view(-1, 2, 2).transpose(1, 2).reshape(-1).abs().sum()
    ),
    "two sums": lambda x, y, w: x.abs().sum() * x.square().sum() / x.exp().sum(),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_said_is_measured(name: str) -> None:
    (said,) = grown(EXACT[name])
    assert said.power is not None and not said.mixed, said.why
    assert said.power == pytest.approx(measured(EXACT[name]), abs=1e-9)


# Programs drawn at random, of ops that keep to the definition.

EACH = [torch.exp, torch.tanh, torch.square, lambda v: v / (1 + v.abs()), torch.abs]
REDUCE = [torch.sum, torch.mean, torch.amax, lambda v, d: v.square().sum(d).sqrt()]
JOIN = [torch.mul, torch.div, lambda a, b: a * b.sqrt(), lambda a, b: a / b.square()]


def drawn(seed: int) -> Callable[..., torch.Tensor]:
    """Sums, means, maxima and norms of random functions of the samples, multiplied and
    divided by each other."""

    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        draw = random.Random(seed)

        def rows() -> torch.Tensor:
            v = x @ w
            for _ in range(draw.randrange(4)):
                v = draw.choice(EACH)(v)
                kind = draw.randrange(6)
                if kind == 0:
                    v = v - v.mean(0)
                elif kind == 1:
                    v = v * y.ne(0)[:, None]
                elif kind == 2:
                    v = v @ (v.T @ v)
                elif kind == 3:
                    v = v / v.abs().sum(draw.randrange(2), keepdim=True)
                elif kind == 4:
                    v = F.embedding(y, w) * v + w[0]
            return v

        def scalar() -> torch.Tensor:
            v = rows().abs()
            for _ in range(2):
                v = draw.choice(REDUCE)(v, draw.randrange(v.dim()))
            return v

        out = scalar()
        for _ in range(draw.randrange(3)):
            out = draw.choice(JOIN)(out, scalar())
        return out

    return fn


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 300), marks=pytest.mark.slow)]
)
def test_drawn_programs_grow_as_is_said(seeds: range) -> None:
    known = 0
    for seed in seeds:
        (said,) = grown(drawn(seed))
        power = measured(drawn(seed))
        if said.power is not None and not said.mixed and math.isfinite(power):
            known += 1
            assert said.power == pytest.approx(power, abs=1e-6), seed
    assert known > len(seeds) / 2


# Sums of terms that grow unlike each other: the greatest power, and that it is mixed.
MIXED: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "penalty": (lambda x, y, w: x.abs().sum() + w.square().sum(), 1.0),
    "mean and sum": (lambda x, y, w: x.abs().sum() - x.abs().mean(), 1.0),
    "plus one": (lambda x, y, w: x.abs().sum() + 1.0, 1.0),
    "stacked": (lambda x, y, w: torch.stack([x.abs().sum(), w.sum()]).sum(), 1.0),
    "over a count plus one": (lambda x, y, w: x.sum() / (y.ne(0).sum() + 1), 0.0),
}


@pytest.mark.parametrize("name", MIXED)
def test_sums_of_unlike_terms(name: str) -> None:
    fn, power = MIXED[name]
    (said,) = grown(fn)
    assert (said.power, said.mixed) == (power, True)


# Samples that meet each other other than in sums do not make a value grow.
COUPLED: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "contrastive": (
        lambda x, y, w: F.cross_entropy(x @ x.T, torch.arange(len(x))),
        0.0,
    ),
    "contrastive sum": (
        lambda x, y, w: F.cross_entropy(x @ x.T, torch.arange(len(x)), reduction="sum"),
        1.0,
    ),
    "log of a sum": (lambda x, y, w: x.exp().sum().log(), 0.0),
    "logsumexp": (lambda x, y, w: x.logsumexp(0).sum(), 0.0),
    "sorted": (lambda x, y, w: x.sort(0).values.square().mean(), 0.0),
    "variance": (lambda x, y, w: x.var(0).sum(), 0.0),
    "others": (lambda x, y, w: (x - x.roll(1, 0)).square().sum(), 1.0),
    "random": (lambda x, y, w: F.dropout(x.abs()).sum(), 1.0),
    "halves": (lambda x, y, w: (x[::2] * x[1::2]).sum(), 1.0),
}


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_meet(name: str) -> None:
    fn, power = COUPLED[name]
    (said,) = grown(fn)
    assert (said.power, said.mixed) == (power, False), said.why


UNKNOWN: dict[str, Callable[..., torch.Tensor]] = {
    "at most one": lambda x, y, w: x.square().sum().clamp_max(1.0),
    "exponential": lambda x, y, w: x.abs().sum().exp(),
    "bounded": lambda x, y, w: x.sum().tanh(),
    "scan": lambda x, y, w: x.cumsum(0).mean(),
    "product": lambda x, y, w: x.abs().prod(),
    "positions": lambda x, y, w: (torch.arange(len(x)) * x[:, 0]).sum(),
    "a branch": lambda x, y, w: x.sum() if len(x) > ROWS else x.abs().sum(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_says_why(name: str) -> None:
    (said,) = grown(UNKNOWN[name])
    assert said.power is None and said.why


def test_an_op_without_a_rule_is_not_known() -> None:
    @torch.library.custom_op("growth_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    of_batch, of_weights = grown(lambda x, y, w: (twice(x).sum(), twice(w).sum()))
    assert of_batch.power is None and "growth_test.twice" in of_batch.why
    assert of_weights == Growth()


def similar(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T


# Where ``y``, which ranks feed, says which rows of the batch are read or written.
FED: dict[str, Callable[..., Any]] = {
    "rows": lambda x, y, w: x[y],
    "rows by a computed index": lambda x, y, w: x[(y + 1).clamp(max=3).view(-1, 1)],
    "one of two indices": lambda x, y, w: x[y, y],
    "index_select": lambda x, y, w: x.index_select(0, y),
    "gather": lambda x, y, w: x.gather(0, y[:, None].expand(-1, 2)),
    "columns that are samples": lambda x, y, w: similar(x).gather(1, y[:, None]),
    "targets among the samples": lambda x, y, w: F.cross_entropy(similar(x), y),
    "sums by place": lambda x, y, w: torch.zeros_like(x).index_add(0, y, x),
    "written": lambda x, y, w: torch.index_put(x, [y], x, accumulate=True),
    "scattered": lambda x, y, w: similar(x).scatter(1, y[:, None], 0.0),
    "embedding": lambda x, y, w: F.embedding(y, x),
    "bags": lambda x, y, w: F.embedding_bag(y, w, y.clamp(max=0)),
    "segments": lambda x, y, w: torch.segment_reduce(x, "mean", offsets=y),
    "lengths of segments": lambda x, y, w: torch.segment_reduce(
        x, "mean", lengths=y.diff()
    ),
    "searched": lambda x, y, w: torch.searchsorted(y, torch.arange(len(x))),
    "sorted into": lambda x, y, w: torch.bucketize(x[:, 0].long(), y),
    "compared with rows": lambda x, y, w: torch.arange(len(x))[:, None] >= y,
    "taken from rows": lambda x, y, w: torch.arange(len(x))[:, None] - y > 0,
    "groups of rows": lambda x, y, w: F.one_hot(y, len(x)).T.double() @ x,
    "repeated by differences": lambda x, y, w: x[1:].repeat_interleave(
        y.diff(), 0, output_size=3 * len(x)
    ),
}
# Where it counts in something else, or in all rows alike.
OTHERS: dict[str, Callable[..., Any]] = {
    "classes": lambda x, y, w: F.cross_entropy(x @ w, y),
    "a table": lambda x, y, w: w[y] + F.embedding(y, w),
    "a table as long as the batch": lambda x, y, w: torch.eye(ROWS)[y],
    "a place of each row": lambda x, y, w: x[torch.arange(len(x)), y],
    "counted from each row": lambda x, y, w: x.flatten()[torch.arange(len(x)) * 4 + y],
    "computed": lambda x, y, w: x[x[:, 0].argsort()],
    "an order of it": lambda x, y, w: x[y.argsort()],
    "counts": lambda x, y, w: torch.zeros(4).index_add(0, y, torch.ones(len(x))),
    "lengths": lambda x, y, w: x.repeat_interleave(y, 0, output_size=3 * len(x)),
    "searched in a table": lambda x, y, w: torch.searchsorted(w[0].cumsum(0), y),
    "searched once sorted": lambda x, y, w: torch.bucketize(y, y.sort().values),
    "compared with columns": lambda x, y, w: torch.arange(4) < y[:, None],
    "compared with places in each": lambda x, y, w: torch.arange(len(x)) % 3 < y,
    "compared with each other": lambda x, y, w: y[:, None] == y,
    "neighbours that differ": lambda x, y, w: (y.diff() != 0).cumsum(0),
}


@pytest.mark.parametrize("name", FED)
def test_positions_that_are_fed_are_noticed(name: str) -> None:
    lookup_and_place = fed_positions(*graphs_of(FED[name]))
    assert lookup_and_place is not None
    lookup, place = lookup_and_place
    assert lookup.op == "call_function"
    assert not place.meta["val"].dtype.is_floating_point


@pytest.mark.parametrize("name", OTHERS)
def test_other_positions_are_none_in_the_batch(name: str) -> None:
    assert fed_positions(*graphs_of(OTHERS[name])) is None


@pytest.mark.parametrize(
    ("fn", "noticed"),
    [
        (lambda x, y, w: (y[:, None] == y).double() @ x, True),
        (lambda x, y, w: x * (y.view(1, -1) != y.view(-1, 1)).sum(1, True), True),
        (lambda x, y, w: (y[:, None] == torch.arange(4)).double() @ w, False),
        (lambda x, y, w: (x[:, :, None] == x[:, None]).sum(), False),
        (lambda x, y, w: (x.argmax(1)[:, None] == x.argmax(1)).double() @ x, False),
        (lambda x, y, w: x * (y[1:] == y[:-1]).sum(), False),
    ],
)
def test_ids_that_are_compared_with_each_other(fn: Any, noticed: bool) -> None:
    assert (compared_ids(*graphs_of(fn)) is not None) == noticed
