"""``inputs="local"``, ranks whose parts of a batch are not of one size: the numbers of
the global batch, or an error on all ranks that names the tensor and both sizes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import FxparWarning, InputMismatchError
from fxpar.runtime.calls.uneven_batch import Parts, share_of
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

WIDTH = 6


def compiled(fn: Any, dynamic: bool | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    given = {"codegen": "eager", "inputs": "local"} | options
    return torch.compile(fn, backend="fxpar", options=given, dynamic=dynamic)


class Normed(nn.Module):
    """BatchNorm in the middle: its buffers are of the global batch. Of one sample it
    raises by itself, so that there is another norm for these."""

    def __init__(self, inside: bool, batch_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(WIDTH, 8), nn.LayerNorm(8)
        if batch_norm:
            self.norm = nn.BatchNorm1d(8)
        self.down, self.inside = nn.Linear(8, 3), inside

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.down(torch.relu(self.norm(self.up(x))))
        return F.cross_entropy(z, y) if self.inside else z


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, 3, [rows], generator=generator)


def train(sizes: list[list[int]], inside: bool, local: bool) -> dict[str, Any]:
    """Steps on batches of which rank r holds ``sizes[step][r]`` samples."""
    model = Normed(inside, min(map(min, sizes)) > 1)
    run = compiled(model) if local else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step, counts in enumerate(sizes):
        x, y = batch(sum(counts), step)
        if local:
            me = dist.get_rank()
            x, y = x.split(counts)[me].clone(), y.split(counts)[me].clone()
        out = run(x, y)
        loss = out if inside else F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert inside or out.shape[0] == len(y)
    return {"losses": losses, **{k: v.clone() for k, v in model.state_dict().items()}}


@pytest.mark.parametrize("inside", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([[4, 4], [3, 3], [4, 3], [4, 4]], id="both sizes were seen"),
        pytest.param(
            [[3, 5], [4, 4]], id="unlike from the first", marks=pytest.mark.slow
        ),
        pytest.param(
            [[4, 4], [4, 1], [1, 4], [1, 1]], id="one sample", marks=pytest.mark.slow
        ),
        pytest.param([[4, 4], [4, 0]], id="no sample"),
    ],
)
def test_numbers_are_those_of_the_global_batch(sizes: Any, inside: bool) -> None:
    want = train(sizes, inside, False)
    for got in shared_pool(2).run(train, sizes, inside, True, timeout=100.0):
        losses = got.pop("losses")
        if inside:
            assert losses == pytest.approx(want["losses"], rel=1e-5)
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], msg=lambda m: f"{name}: {m}")  # noqa: B023


class Counted(nn.Module):
    """A sum over the batch and what it counts, whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 3).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.up(x)
        return F.cross_entropy(z, y, reduction="sum"), (y < 3).sum() * 2


def over_count(rows: list[int], local: bool) -> Any:
    """(loss, count, gradients) of a batch after one of equal parts."""
    model = Counted()
    run = compiled(model) if local else model
    for counts in ([4, 4], rows):
        x, y = batch(sum(counts), len(counts))
        x = x.double()
        if local:
            me = dist.get_rank()
            x, y = x.split(counts)[me].clone(), y.split(counts)[me].clone()
        total, count = run(x, y)
        model.zero_grad()
        loss = total / count
        loss.backward()
    return loss.item(), count.item(), [p.grad.clone() for p in model.parameters()]


def test_a_count_leaves_as_an_equal_share() -> None:
    """Of 2 x 7: so that the sum, the mean over ranks, over the count is that of all."""
    loss, count, grads = over_count([4, 3], False)
    got = shared_pool(2).run(over_count, [4, 3], True, timeout=100.0)
    assert [mine for _, mine, _ in got] == [count // 2] * 2
    for mine, _, others in got:
        assert mine == pytest.approx(loss, rel=1e-12)
        for x, y in zip(others, grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 7, -7, [[5, 6], [7, 8]]])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_add_up(count: Any, ranks: int) -> None:
    whole = torch.tensor(count)
    parts = [Parts((1,) * ranks, i, "") for i in range(ranks)]
    shares = torch.stack([share_of(whole, each) for each in parts])
    assert torch.equal(shares.sum(0), whole)
    assert (shares.amax(0) - shares.amin(0)).max() <= 1


class Padded(nn.Module):
    """Sequences: nothing but sums crosses ranks on axes of the batch."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.inside = inside

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embed(ids)))
        if not self.inside:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def other_lengths(lengths: list[list[int]], inside: bool, mesh: str) -> Any:
    """Gradients of steps in which rank r pads to ``lengths[step][r]``."""
    model = Padded(inside)
    run = compiled(model, mesh=mesh)
    me, out = dist.get_rank(), []
    for step, each in enumerate(lengths):
        ids = [tokens(step, r, n) for r, n in enumerate(each)]
        result = run(ids[me])
        loss = result if inside else F.cross_entropy(result[:, 0], ids[me][:, 0])
        model.zero_grad()
        loss.backward()
        out.append({k: p.grad.clone() for k, p in model.named_parameters()})
    return out


def tokens(step: int, rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 11, [4, length], generator=generator)


def means(lengths: list[list[int]], inside: bool) -> Any:
    """A cross entropy inside counts the targets of all ranks; one outside is each
    rank's own mean, of which the mean is taken."""
    out = []
    for step, each in enumerate(lengths):
        model = Padded(inside)
        for rank, n in enumerate(each):
            ids = tokens(step, rank, n)
            result = model(ids)
            loss = result if inside else F.cross_entropy(result[:, 0], ids[:, 0])
            share = (n - 1) / sum(m - 1 for m in each) if inside else 1 / len(each)
            (loss * share).backward()
        out.append({k: p.grad.clone() for k, p in model.named_parameters()})
    return out


LENGTHS = [[7, 7], [9, 5], [5, 9], [7, 7], [6, 9]]


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_other_lengths_where_only_sums_cross(inside: bool) -> None:
    want = means(LENGTHS, inside)
    for got in shared_pool(2).run(other_lengths, LENGTHS, inside, "dp=2", timeout=100):
        for mine, theirs in zip(got, want, strict=True):
            for name, x in mine.items():
                torch.testing.assert_close(x, theirs[name])


def crossing_values(lengths: list[int]) -> Any:
    """The whole batch in one order, which takes all rows on every rank."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sort(dim=0).values * 2

    run = compiled(fn)
    run(torch.ones(4, 5))
    return run(torch.ones(4, lengths[dist.get_rank()]))


def test_other_lengths_where_values_cross_name_the_tensor() -> None:
    for error in shared_pool(2).errors(crossing_values, [5, 7], timeout=60.0):
        assert isinstance(error, InputMismatchError), error
        assert "[4, 5] on rank 0, [4, 7] on rank 1" in str(error)
        assert "input x has other sizes" in str(error) and "fix: " in str(error)


def both_differ() -> None:
    run = compiled(lambda x: x * 2)
    run(torch.ones(4, 5))
    run(torch.ones(4, 5) if dist.get_rank() else torch.ones(3, 6))


def global_sizes() -> None:
    run = compiled(lambda x: x * 2, inputs="global")
    run(torch.ones(4, 5))
    run(torch.ones(4 - dist.get_rank(), 5))


@pytest.mark.parametrize("fn", [both_differ, global_sizes])
def test_sizes_that_cannot_be(fn: Any) -> None:
    for error in shared_pool(2).errors(fn, timeout=60.0):
        assert isinstance(error, InputMismatchError), error
        assert "input x has other sizes on other ranks" in str(error)
        assert "at: " in str(error) and "test_batch_sizes.py" in str(error)


def uneven_rows() -> list[Any]:
    """Rows, their gradients, and one warning."""
    run = compiled(lambda x: (x * x, (x * x).mean()))
    me, counts = dist.get_rank(), [3, 5]
    whole = torch.arange(16.0).view(8, 2)
    x = whole.split(counts)[me].clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            rows, mean = run(x)
    rows.mean().backward()
    torch.testing.assert_close(rows, x * x)
    torch.testing.assert_close(mean, (whole * whole).mean())
    # of the rank's own mean, as DistributedDataParallel would show it
    torch.testing.assert_close(x.grad, 2 * x.detach() / x.numel())
    return [str(w.message) for w in caught if w.category is FxparWarning]


def test_uneven_rows_stay_local_and_a_warning_says_what_it_costs() -> None:
    first, second = shared_pool(2).run(uneven_rows, timeout=60.0)
    assert second == [] and len(first) == 1
    assert "parts of the batch have 3, 5 samples" in first[0]


class Chosen(nn.Module):
    """A loss of the tokens that have a label, which code in no graph picks."""

    def __init__(self, *, at_once: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, 3)
        self.at_once = at_once
        self.double()

    @torch.compiler.disable
    def pick(self, keep: torch.Tensor, *rows: torch.Tensor) -> tuple[Any, ...]:
        return tuple(x[keep] for x in rows)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, keep = torch.tanh(self.body(x)), y >= 0
        if self.at_once:
            h, y = self.pick(keep, h, y)
        else:
            (h,) = self.pick(keep, h)
            (y,) = self.pick(keep, y + 0 * h.sum().long())
        return F.cross_entropy(self.head(h), y)


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    """Of 8 tokens: of the first 4 two have a label, of the others all."""
    x, y = batch(8, 0)
    y[:2] = -1
    return x.double(), y


def chosen(*, at_once: bool = True) -> dict[str, torch.Tensor]:
    """Loss and gradients, where each rank feeds half of the tokens."""
    model, me = Chosen(at_once=at_once), dist.get_rank()
    loss = compiled(model)(*(x.chunk(2)[me].clone() for x in labelled()))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def test_rows_that_a_mask_picks_are_those_of_one_batch() -> None:
    """Before the mask ranks have as many tokens, behind it not: what is computed of
    both takes gradients of the one loss, that of all tokens with a label."""
    model = Chosen()
    loss = model(*labelled())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for got in shared_pool(2).run(chosen, timeout=60.0):
        torch.testing.assert_close(got, {"loss": loss.detach(), **gradients})


def chosen_in_turn() -> None:
    chosen(at_once=False)


def test_rows_in_other_shares_are_told() -> None:
    for error in shared_pool(2).errors(chosen_in_turn, timeout=60.0):
        assert isinstance(error, InputMismatchError), error
        assert "no parts of one batch" in str(error)
        assert "2, 4" in str(error) and "4, 4" in str(error)
        assert "test_batch_sizes.py" in str(error)


def slices(offset: int) -> int:
    """Plans made while a rank reads slices of one tensor."""
    model = Normed(True, True)
    run = compiled(model)
    x, y = batch(64, 0)
    before = len(fxpar.plans())
    for i in range(4):
        start = offset + 4 * i if dist.get_rank() else 0
        run(x[start : start + 4], y[start : start + 4]).backward()
    return len(fxpar.plans()) - before


@pytest.mark.parametrize("offset", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_where_a_slice_begins_is_no_reason_to_plan(offset: int) -> None:
    counts = shared_pool(2).run(slices, offset, timeout=60.0)
    assert counts[0] == counts[1] <= 1


def one_rank_traces_again() -> int:
    """What Dynamo keeps is thrown away on one rank."""
    model = Normed(True, True)
    run = compiled(model)
    before = len(fxpar.plans())
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            torch._dynamo.reset()
        run(*batch(4, step)).backward()
    return len(fxpar.plans()) - before


def test_a_rank_that_compiles_again_takes_the_others_along() -> None:
    counts = shared_pool(2).run(one_rank_traces_again, timeout=60.0)
    assert counts[0] == counts[1] <= 2


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Tokens look at each other; then sums are divided by how many tokens there are."""
    scores = (x @ x.transpose(1, 2)).softmax(-1) @ x
    places = torch.arange(x.shape[1], dtype=x.dtype)
    return (scores * places[:, None]).sum() / x.shape[1] / x.shape[0]


def square(counts: list[int]) -> list[tuple[float, float]]:
    """Losses of batches with as many tokens as samples; those of all samples."""
    run, out = compiled(mixed, dynamic=True), []
    for step, count in enumerate(counts):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(2 * count, count, 3, generator=draw, dtype=torch.float64)
        part = x.chunk(2)[dist.get_rank()].clone()
        out.append((run(part).item(), mixed(x).item()))
    return out


def test_as_many_tokens_as_samples_are_not_the_batch() -> None:
    """Dynamo would make one symbol of the two sizes."""
    for losses in shared_pool(2).run(square, [4, 6]):
        for got, want in losses:
            assert got == pytest.approx(want, rel=1e-12)
