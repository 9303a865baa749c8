"""``inputs="local"``: what leaves a graph and grows with the batch leaves as under
DistributedDataParallel: a sum as the mean over ranks, a count as the rank's own, a mean
as it is. Every case is trained for two steps on two ranks in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import FxparWarning
from fxpar.runtime.calls.compiled_graph import plans
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

RANKS, PAD = 2, 0
Batch = tuple[torch.Tensor, ...]


class Net(nn.Module):
    """``inside(net, *batch)`` is the forward, so that a loss may be part of it."""

    def __init__(self, inside: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5)
        self.weight = nn.Parameter(torch.tensor(0.3))
        self.inside = inside
        self.double()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, *batch: torch.Tensor) -> Any:
        return self.inside(self, *batch)


def samples(step: int) -> Batch:
    """Inputs, labels and weights of 8 sentences of 4 tokens; the last tokens of some
    are padding, of as many in each half of the batch."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(1, 5, (8, 4), generator=draw)
    y[[1, 6], 2:] = PAD
    w = torch.rand(8, generator=draw, dtype=torch.float64) + 0.5
    w[4:] = w[:4].flip(0)  # as much in each half
    return x, y, w


def uneven(step: int) -> Batch:
    """As ``samples``, with more padding on one rank than on the other."""
    x, y, w = samples(step)
    y[:3, 1:] = PAD
    return x, y, w * torch.arange(1, 9)


def tokens(net: Net, x: torch.Tensor, y: torch.Tensor, how: str = "sum") -> Any:
    logits = net.logits(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), ignore_index=PAD, reduction=how)


def each(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss per sentence."""
    return tokens(net, x, y, "none").view(y.shape).sum(1)


# What the model gives, and what the script makes of it: the loss of this rank.


def mean_inside(net, x, y, w):
    return tokens(net, x, y, "mean")


def sum_inside(net, x, y, w):
    return tokens(net, x, y)


def sum_and_count(net, x, y, w):
    return tokens(net, x, y), y.ne(PAD).sum()


def over_count(out, batch):
    return out[0] / out[1]


def sum_and_float_count(net, x, y, w):
    return tokens(net, x, y), y.ne(PAD).sum().float()


def over_all_counts(out, batch):
    """As fairseq does: gradients are averaged, so it multiplies by the ranks."""
    total = out[1].clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return out[0] / total * dist.get_world_size()


def over_own_rows(out, batch):
    return out / len(batch[1])


def mean_by_hand(net, x, y, w):
    kept = y.ne(PAD)
    return (tokens(net, x, y, "none") * kept.flatten()).sum() / kept.sum().clamp(min=1)


def mean_with_epsilon(net, x, y, w):
    return tokens(net, x, y) / (y.ne(PAD).sum() + 1e-6)


def mean_by_size(net, x, y, w):
    return each(net, x, y).sum() / x.shape[0] + tokens(net, x, y) / y.numel()


def several(net, x, y, w):
    one = each(net, x, y)
    return {"mean": one.mean(), "sum": one.sum(), "each": one, "square": one.pow(2)}


def add_several(out, batch):
    loss = out["mean"] + 0.1 * out["sum"] + (out["each"] * batch[2]).mean()
    return loss + out["square"].sum() / 7


def weighted(net, x, y, w):
    return (each(net, x, y) * w).sum()


def weighted_mean(net, x, y, w):
    return (each(net, x, y) * w).sum() / w.sum()


def penalized(net, x, y, w):
    penalty = net.up.weight.square().sum() + net.down.bias.square().sum()
    return 0.5 * (tokens(net, x, y) + 0.1 * penalty) - tokens(net, x, y, "mean")


def added_in_place(net, x, y, w):
    loss = tokens(net, x, y)
    loss += 0.1 * net.logits(x).square().mean()
    loss += net.up.weight.norm()
    return loss / 3


def stacked(net, x, y, w):
    return torch.stack([tokens(net, x, y), net.up.weight.square().sum()]).sum()


def learned_weight(net, x, y, w):
    return torch.exp(-net.weight) * tokens(net, x, y) + net.weight


def logits_and_sum(net, x, y, w):
    return net.logits(x), net.logits(x).square().sum()


def mean_outside(out, batch):
    logits, extra = out
    loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=PAD)
    return loss + 0.01 * extra


def sum_outside(out, batch):
    logits, extra = out
    return logits.log_softmax(-1)[..., 1].sum() + 0.01 * extra


def two_graphs(net, x, y, w):
    loss, count = tokens(net, x, y), y.ne(PAD).sum()
    torch._dynamo.graph_break()
    return loss / count + 0.1 * loss / y.ne(PAD).sum()


def as_it_is(out, batch):
    return out


LIKE_DDP = {
    "mean": (mean_inside, as_it_is),
    "sum": (sum_inside, as_it_is),
    "sum over a count outside": (sum_and_count, over_count),
    "sum over a float count outside": (sum_and_float_count, over_count),
    "sum over the count of all ranks": (sum_and_count, over_all_counts),
    "sum over rows counted outside": (sum_inside, over_own_rows),
    "token mean by hand": (mean_by_hand, as_it_is),
    "token mean with an epsilon": (mean_with_epsilon, as_it_is),
    "sum over a size": (mean_by_size, as_it_is),
    "several losses": (several, add_several),
    "weighted sum": (weighted, as_it_is),
    "weighted mean": (weighted_mean, as_it_is),
    "sum and penalty and mean": (penalized, as_it_is),
    "summed in place": (added_in_place, as_it_is),
    "stacked": (stacked, as_it_is),
    "learned weight": (learned_weight, as_it_is),
    "mean outside, sum inside": (logits_and_sum, mean_outside),
    "sum outside, sum inside": (logits_and_sum, sum_outside),
    "across a graph break": (two_graphs, as_it_is),
}
QUICK = {"mean", "sum over a count outside", "several losses", "across a graph break"}


def options(**more: str) -> dict[str, str]:
    return {"mesh": "dp=2", "codegen": "eager", "inputs": "local"} | more


def trained(
    how: str,
    inside: Callable[..., Any],
    outside: Callable[..., Any],
    make: Callable[[int], Batch] = samples,
    more: dict[str, str] | None = None,
) -> tuple[list[float], list[torch.Tensor]]:
    """(mean loss over ranks of each step, gradients of the last step and parameters),
    by fxpar, with parameters sharded or not, by ddp, or by one device on the whole
    batch."""
    net = Net(inside)
    run: Any = net
    if how == "ddp":
        run = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    elif how == "fxpar":
        torch._dynamo.reset()
        run = torch.compile(net, backend="fxpar", options=options(**(more or {})))
    elif how == "sharded":
        torch._dynamo.reset()
        net = fxpar.shard(net, mesh="dp=2")
        run = torch.compile(net, backend="fxpar", options=options(**(more or {})))
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
    for step in range(2):
        batch = make(step)
        if how != "one":
            batch = tuple(x.chunk(RANKS)[dist.get_rank()].clone() for x in batch)
        loss = outside(run(*batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen = loss.detach().clone()
        if how != "one":
            dist.all_reduce(seen)
            seen /= RANKS
        losses.append(seen.item())
    grads = [torch.zeros(()) if p.grad is None else p.grad for p in net.parameters()]
    return losses, [whole(x) for x in (*grads, *net.parameters())]


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    return x.full_tensor() if isinstance(x, DTensor) else x


def both(*args: Any) -> list[Any]:
    """On one rank: what fxpar gives, and what DDP gives."""
    return [trained("fxpar", *args), trained("ddp", *args[:3])]


def case(name: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxparWarning)
        warnings.filterwarnings("ignore", "code at a graph break is in no graph")
        return both(*LIKE_DDP[name])


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,))
        for name in LIKE_DDP
    ],
)
def test_losses_and_gradients_are_those_of_ddp(name: str) -> None:
    ranks = shared_pool(RANKS).run(case, name)
    for (losses, tensors), (want, like) in ranks:
        assert losses == pytest.approx(want, rel=1e-9)
        close(tensors, like)
    close(ranks[0][0][1], ranks[1][0][1])


# Parts that are not alike


def compared(*args: Any) -> dict[str, Any]:
    return {how: trained(how, *args) for how in ("fxpar", "ddp", "one")}


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"plan": "search"}, marks=pytest.mark.slow),
        pytest.param({"codegen": "inductor"}, marks=pytest.mark.slow),
    ],
    ids=["propagate", "search", "inductor"],
)
def test_each_rank_may_divide_by_its_own_count(more: dict[str, str]) -> None:
    """The mean of what each rank divides by its own count, as DDP has it, though a
    sentence then weighs more where others are short."""
    env = {"FXPAR_HARDWARE": "a100"}
    args = (sum_and_count, over_count, uneven, more)
    for rank in shared_pool(RANKS).run(both, *args, timeout=200.0, env=env):
        close(rank[0][1], rank[1][1])


def over_labels(out, batch):
    return out / batch[1].ne(PAD).sum()


def test_samples_meet_the_tangents_of_their_rank_though_all_compute_them() -> None:
    args = (sum_inside, over_labels, uneven, {"plan": "replicate"})
    for (_, got), (_, want) in shared_pool(RANKS).run(both, *args, timeout=200.0):
        close(got, want)


def learned_and_count(net, x, y, w):
    penalty = net.up.weight.square().sum()
    return learned_weight(net, x, y, w) + penalty, y.ne(PAD).sum()


@pytest.mark.parametrize(
    "plan",
    [
        "propagate",
        pytest.param("search", marks=pytest.mark.slow),
        pytest.param("replicate", marks=pytest.mark.slow),
    ],
)
def test_gradients_agree_though_tangents_do_not(plan: str) -> None:
    """What a rank's gradient of a result does not meet in its own part of the batch
    meets the mean of all ranks' gradients."""
    args = ("fxpar", learned_and_count, over_count, uneven, {"plan": plan})
    env = {"FXPAR_HARDWARE": "a100"}
    one, two = shared_pool(RANKS).run(trained, *args, timeout=200.0, env=env)
    close(one[1], two[1])


def on_batch_and_features(net, x, y, w):
    """Penalties whose gradients sum over dims of parameters, and a mean of samples."""
    product = net.down.weight @ net.up.weight
    penalty = product.square().sum() + net.up.weight.norm() + net.up.bias.exp().mean()
    return tokens(net, x, y) + penalty * net.weight, y.ne(PAD).sum()


@pytest.mark.parametrize(
    ("inside", "plan", "like"),
    [
        pytest.param(on_batch_and_features, "propagate", "ddp", marks=pytest.mark.slow),
        pytest.param(on_batch_and_features, "search", "ddp", marks=pytest.mark.slow),
        (learned_and_count, "propagate", "fxpar"),
        pytest.param(learned_and_count, "search", "fxpar", marks=pytest.mark.slow),
    ],
)
def test_shards_of_parameters_meet_the_mean_of_tangents(
    inside: Callable[..., Any], plan: str, like: str
) -> None:
    """Though each rank holds other rows of what a penalty inside the model is of."""
    env = {"FXPAR_HARDWARE": "a100"}
    args = (inside, over_count, uneven, {"plan": plan})
    for how in ("sharded", like):
        ranks = shared_pool(RANKS).run(trained, how, *args, timeout=200.0, env=env)
        close(ranks[0][1], ranks[1][1])
        if how == "sharded":
            sharded = ranks[0][1]
    close(sharded, ranks[0][1])


def test_a_token_mean_is_that_of_the_whole_batch() -> None:
    """Not the mean of the means of ranks: what does not grow is global."""
    args = (mean_inside, as_it_is, uneven)
    for rank in shared_pool(RANKS).run(compared, *args, timeout=200.0):
        assert rank["fxpar"][0] == pytest.approx(rank["one"][0], rel=1e-9)
        close(rank["fxpar"][1], rank["one"][1])
        assert rank["ddp"][0] != pytest.approx(rank["one"][0], rel=1e-3)


def contrastive(net, x, y, w):
    z = F.normalize(net.logits(x).mean(1), dim=-1)
    return F.cross_entropy(z @ z.flip(-1).T / 0.1, torch.arange(z.shape[0]))


def contrastive_sum(net, x, y, w):
    z = F.normalize(net.logits(x).mean(1), dim=-1)
    scores = z @ z.flip(-1).T / 0.1
    return F.cross_entropy(scores, torch.arange(z.shape[0]), reduction="sum")


def halved(out, batch):
    return out / RANKS if len(batch[1]) == 8 else out


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (contrastive, as_it_is),
        pytest.param(contrastive_sum, halved, marks=pytest.mark.slow),
    ],
)
def test_a_contrastive_loss_takes_the_whole_batch(inside: Any, outside: Any) -> None:
    """As DDP with features gathered from all ranks; its sum is the mean over ranks."""
    for rank in shared_pool(RANKS).run(compared, inside, outside, timeout=200.0):
        assert rank["fxpar"][0] == pytest.approx(rank["one"][0], rel=1e-9)
        close(rank["fxpar"][1], rank["one"][1])


def counts(net, x, y, w):
    hits = net.logits(x).argmax(-1) == y
    kept = y.ne(PAD)
    rows = torch.stack([hits.sum(), kept.sum()])
    sums = rows, hits.sum() + kept.sum() * 2, F.one_hot(y, 5).sum((0, 1))
    return *sums, y.numel(), len(x) / 2, x.shape[1] * len(x) > 8


def counted() -> tuple[Any, Any, tuple[str, ...]]:
    torch._dynamo.reset()
    net = Net(counts)
    run = torch.compile(net, backend="fxpar", options=options())
    batch = [x.chunk(RANKS)[dist.get_rank()].clone() for x in uneven(0)]
    return run(*batch), net(*batch), plans()[-1].notes


def test_counts_are_those_of_the_rank() -> None:
    """Sums of flags, and sizes."""
    ranks = shared_pool(RANKS).run(counted)
    for (*got, rows, half, many), (*want, of_rows, of_half, of_many), notes in ranks:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert (rows, half, many) == (of_rows, of_half, of_many) == (16, 2.0, True)
        assert sum("each rank's own" in note for note in notes) == 3
    assert not torch.equal(ranks[0][0][0], ranks[1][0][0])


def rows_of_parameters(net, x, y, w):
    """Beside a loss, rows of parameters, which ``fxpar.shard`` splits as parts lie."""
    return tokens(net, x, y, "mean"), net.up.weight.norm(dim=1), net.down.bias * 2


def parameters_out() -> list[Any]:
    torch._dynamo.reset()
    net = fxpar.shard(Net(rows_of_parameters), mesh="dp=2")
    run = torch.compile(net, backend="fxpar", options=options())
    batch = [x.chunk(RANKS)[dist.get_rank()].clone() for x in samples(0)]
    return [x.detach() for x in (*run(*batch), *Net(rows_of_parameters)(*batch))]


def test_rows_of_parameters_are_no_parts_of_the_batch() -> None:
    for _, norms, biases, _, of_norms, of_biases in shared_pool(RANKS).run(
        parameters_out
    ):
        close([norms, biases], [of_norms, of_biases])


def by_token(net, x, y, w):
    return net.logits(x).transpose(0, 1)


def said_of_whole() -> tuple[list[str], torch.Size]:
    torch._dynamo.reset()
    run = torch.compile(Net(by_token), backend="fxpar", options=options())
    batch = [x.chunk(RANKS)[dist.get_rank()].clone() for x in samples(0)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FxparWarning)
        shapes = {run(*batch).shape for _ in range(2)}
    return [str(w.message) for w in said if w.category is FxparWarning], shapes.pop()


def test_a_result_that_holds_the_batch_elsewhere_leaves_whole_and_is_said() -> None:
    (said, shape), (others, _) = shared_pool(RANKS).run(said_of_whole)
    (text,) = (x for x in said if "leaves whole" in x)
    assert shape == (4, 8, 5) and "along its dim 1" in text
    assert "net.logits(x).transpose(0, 1)" in text
    assert not any("leaves whole" in x for x in others)


# What no rank can do by itself


def square(net, x, y, w):
    return tokens(net, x, y).square()


def exponential(net, x, y, w):
    return torch.exp(0.01 * tokens(net, x, y)) + tokens(net, x, y, "mean")


def logarithm(net, x, y, w):
    return torch.log(tokens(net, x, y))


def run_once(inside: Callable[..., Any]) -> tuple[float, float, list[str]]:
    """(the result, that of one device on the whole batch, what was warned of)."""
    torch._dynamo.reset()
    net = Net(inside)
    run = torch.compile(net, backend="fxpar", options=options())
    batch = samples(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(*(x.chunk(RANKS)[dist.get_rank()].clone() for x in batch))
    said = [str(w.message) for w in caught if issubclass(w.category, FxparWarning)]
    return got.item(), net(*batch).item(), said


def test_what_is_not_known_to_grow_is_that_of_the_whole_batch() -> None:
    (got, want, said), (_, _, other) = shared_pool(RANKS).run(run_once, exponential)
    assert got == pytest.approx(want, rel=1e-9)
    assert len(said) == 1 and not other  # on rank 0 only
    assert "is what one device has for the whole batch, 2 times" in said[0]
    assert "(exp takes it neither by sum nor by mean)" in said[0]
    assert "test_sums_in_local_mode.py" in said[0] and "fix: " in said[0]


def test_other_powers_of_a_sum_are_divided_and_said() -> None:
    (got, want, said), _ = shared_pool(RANKS).run(run_once, square)
    assert got == pytest.approx(want / RANKS**2, rel=1e-9)
    assert len(said) == 1 and "as the batch to the power 2" in said[0]


def test_the_logarithm_of_a_sum_does_not_grow() -> None:
    (got, want, said), _ = shared_pool(RANKS).run(run_once, logarithm)
    assert got == pytest.approx(want, rel=1e-9) and not said


# What is written in place


def added_to(net, x, y, w):
    total = x.sum(0)
    total.add_(x.mean(0))
    return total.sum()


def added_to_zeros(net, x, y, w):
    total = torch.zeros_like(x[0])
    total += x.sum(0)
    total.add_(1)
    return total.sum()


def copied_before(net, x, y, w):
    total = x.sum(0)
    before = total.clone()
    total.add_(x.mean(0))
    return (before + total).sum()


def set_at_an_index(net, x, y, w):
    total = x.sum(0)
    total[0] = 5.0
    return total.sum()


@pytest.mark.parametrize("inside", [added_to, added_to_zeros, copied_before])
def test_a_sum_that_is_added_to_is_the_mean_over_ranks(inside: Any) -> None:
    x = samples(0)[0].double()
    total, mean = x.sum(0) / RANKS, x.mean(0)
    sums = {
        added_to: total + mean,
        added_to_zeros: total + 1,
        copied_before: 2 * total + mean,
    }
    for got, _, said in shared_pool(RANKS).run(run_once, inside):
        assert got == pytest.approx(sums[inside].sum().item(), rel=1e-9) and not said


def test_a_sum_that_is_set_in_part_is_that_of_the_whole_batch() -> None:
    (got, want, said), _ = shared_pool(RANKS).run(run_once, set_at_an_index)
    assert got == pytest.approx(want, rel=1e-9)
    assert len(said) == 1 and "is what one device has for the whole batch" in said[0]


# Other doors


def steps(how: str, inside: Callable[..., Any]) -> tuple[list[float], Any, Any]:
    """As ``trained``, by ``fxpar.train_step`` or with parameters sharded at rest."""
    torch._dynamo.reset()
    net, losses = Net(inside), []
    if how == "shard":
        net = fxpar.shard(net, mesh="dp=2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    more = options()
    if how == "train_step":
        step = fxpar.train_step(net, lambda net, *b: net(*b), optimizer, options=more)
    else:
        run = torch.compile(net, backend="fxpar", options=more)
    for k in range(2):
        batch = [x.chunk(RANKS)[dist.get_rank()].clone() for x in samples(k)]
        if how == "train_step":
            losses.append(step(*batch).item())
            continue
        loss = run(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
    return losses, [p.detach().clone() for p in whole], plans()[-1].notes


def doors(how: str) -> Any:
    return steps(how, penalized), trained("ddp", penalized, as_it_is)


@pytest.mark.parametrize(
    "how", ["train_step", pytest.param("shard", marks=pytest.mark.slow)]
)
def test_a_whole_step_and_sharded_parameters_mean_the_same(how: str) -> None:
    for (losses, got, notes), (want, like) in shared_pool(RANKS).run(doors, how):
        assert losses == pytest.approx(want, rel=1e-9)
        close(got, like[len(got) :])
        assert any("with the batch in part: the mean over 2 ranks" in x for x in notes)


def in_global_mode() -> tuple[float, float, Any]:
    torch._dynamo.reset()
    net, batch = Net(sum_inside), samples(0)
    run = torch.compile(net, backend="fxpar", options=options(inputs="global"))
    return run(*batch).item(), net(*batch).item(), plans()[-1].notes


def test_global_mode_is_left_alone() -> None:
    for got, want, notes in shared_pool(RANKS).run(in_global_mode):
        assert got == pytest.approx(want, rel=1e-9)
        assert not any(note.startswith("result ") for note in notes)
