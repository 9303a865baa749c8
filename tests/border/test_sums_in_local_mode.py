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

import fxpar
from fxpar.errors import FxparWarning
from fxpar.runtime.graphs import plans
from tests.spawn import shared_pool

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
    penalty = sum(p.square().sum() for p in net.parameters())
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
    by fxpar, by ddp, or by one device on the whole batch."""
    net = Net(inside)
    run: Any = net
    if how == "ddp":
        run = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    elif how == "fxpar":
        torch._dynamo.reset()
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
    return losses, [x.detach().clone() for x in (*grads, *net.parameters())]


def both(*args: Any) -> list[Any]:
    """On one rank: what fxpar gives, and what DDP gives."""
    return [trained("fxpar", *args), trained("ddp", *args[:3])]


def all_cases() -> dict[str, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxparWarning)
        warnings.filterwarnings("ignore", "graph. ends in a graph break")
        return {name: both(*case) for name, case in LIKE_DDP.items()}


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module")
def cases() -> list[dict[str, list[Any]]]:
    return shared_pool(RANKS).run(all_cases, timeout=400.0)


@pytest.mark.parametrize("name", LIKE_DDP)
def test_losses_and_gradients_are_those_of_ddp(name: str, cases: Any) -> None:
    for rank in cases:
        (losses, tensors), (want, like) = rank[name]
        assert losses == pytest.approx(want, rel=1e-9)
        close(tensors, like)
    close(cases[0][name][0][1], cases[1][name][0][1])
