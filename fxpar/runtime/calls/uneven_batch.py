"""A batch of which ranks hold parts of unlike sizes, as every rank computes it: whole.

In: the compiled program of the global batch, which takes and gives whole values. Out:
the same for one rank's rows: what is fed in parts is gathered, results that hold the
batch are cut to this rank's rows. A count over the batch leaves as an equal share of
the whole one, as a sum leaves as the mean over ranks; shares add up to it. Gradients
cross as they do where parts are equal: a rank differentiates what it computed of its
own rows, and counts by its samples; of other results the gradients that ranks give may
differ, and their mean is taken. What an earlier graph computed of parts in other shares
(rows that a mask chose of them) takes gradients as that graph counts its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.runtime.caches.program_identity import SUMMAND_MARK
from fxpar.runtime.ranks.check_inputs import LOCAL_MARK
from fxpar.runtime.ranks.groups import group_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.conventions import batch_axes


@dataclass(frozen=True)
class Parts:
    """The parts of a batch that ranks hold, in rows."""

    # Rows of each part.
    counts: tuple[int, ...]
    # The part of this rank.
    index: int
    # Name of the process group of the ranks that hold one part each.
    group: str

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def start(self) -> int:
        return sum(self.counts[: self.index])

    @property
    def own(self) -> int:
        return self.counts[self.index]

    def of(self, rows: int) -> Parts:
        """The parts of another value that has ``rows`` in all."""
        counts = tuple(n * rows // self.total for n in self.counts)
        return Parts(counts, self.index, self.group)


def parts_of(counts: Sequence[int], mesh: Mesh, rank: int) -> Parts:
    """Of a batch. All ranks call it: it may make a process group."""
    axes = batch_axes(mesh)
    return Parts(tuple(counts), mesh.index(rank, axes), group_of(mesh, axes))


class Whole:
    """``compiled``, the program of the whole batch, on parts. ``fed``: position of an
    argument that is a part -> its rows on each; ``numbers``: position of a number that
    counts rows -> its global value; ``summands``: positions of arguments that add up
    over the parts; ``rows``, ``counts``: positions of results that are cut, and of
    those that leave as shares."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        fed: Mapping[int, Parts],
        numbers: Mapping[int, int],
        summands: Collection[int],
        rows: Collection[int],
        counts: Collection[int],
        parts: Parts,
    ) -> None:
        self.compiled, self.fed, self.numbers = compiled, fed, numbers
        self.summands, self.rows, self.counts = summands, rows, counts
        self.parts = parts

    def __call__(self, *args: Any) -> Any:
        inputs = [self._input(i, x) for i, x in enumerate(args)]
        return tuple(self._result(i, x) for i, x in enumerate(self.compiled(*inputs)))

    def _input(self, i: int, x: Any) -> Any:
        if i in self.fed:
            return _gathered(x, self.fed[i])
        return _summed(x, self.parts) if i in self.summands else self.numbers.get(i, x)

    def _result(self, i: int, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if i in self.rows:
            x = _OwnRows.apply(x, self.parts.of(x.shape[0]))
        elif i in self.counts:
            x = share_of(x, self.parts)
        elif x.requires_grad and x.grad_fn is not None:
            x = _Alike.apply(x, self.parts)
        setattr(x, LOCAL_MARK, i in self.rows)
        setattr(x, SUMMAND_MARK, i in self.counts)
        return x


def share_of(count: torch.Tensor, parts: Parts) -> torch.Tensor:
    """This rank's share of whole numbers: all as equal as can be; they add up to it."""
    ranks = len(parts.counts)
    remainder = torch.remainder(count, ranks)
    even = torch.div(count, ranks, rounding_mode="floor")
    return even + (remainder > parts.index).to(count.dtype)


def _summed(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The sum of what all ranks hold."""
    total = x.detach().clone()
    dist.all_reduce(total, group=_torch.distributed.group_named(parts.group))
    return total


def gather_rows(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The rows of all parts. All ranks of the group call it."""
    most = max(parts.counts)
    flat = x.new_zeros((most, *x.shape[1:]))
    flat[: parts.own] = x
    gathered = [torch.empty_like(flat) for _ in parts.counts]
    words = [each.view(-1).view(torch.uint8) for each in (flat, *gathered)]
    dist.all_gather(
        words[1:], words[0], group=_torch.distributed.group_named(parts.group)
    )
    return torch.cat([each[:n] for each, n in zip(gathered, parts.counts, strict=True)])


def _gathered(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _AllRows.apply(x, parts, _weight_above(x, parts))
    whole = gather_rows(x.detach(), parts)
    return whole.requires_grad_(x.requires_grad)


def _weight_above(x: torch.Tensor, parts: Parts) -> float:
    """By how much a gradient of the whole counts as that of this rank's own loss, where
    it goes: by the parts of the graph that computed ``x``, if one did, with code in no
    graph between them perhaps."""
    stack, seen = [x.grad_fn], set[Any]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(above := getattr(node, "parts", None), Parts):
            return above.total / max(above.own, 1)
        if _torch.aot.is_backward_of_graph(node):
            return float(len(parts.counts))
        stack += [above for above, _ in node.next_functions]
    return parts.total / max(parts.own, 1)


class _AllRows(torch.autograd.Function):
    """Parts to the whole. Back comes the gradient of this rank's own loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: Parts, weight: float) -> torch.Tensor:
        ctx.own, ctx.weight = (parts.start, parts.own), weight
        return gather_rows(x, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient.narrow(0, *ctx.own) * ctx.weight, None, None


class _Alike(torch.autograd.Function):
    """A result that all ranks have alike. Back goes the mean of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        parts, (tangent,) = ctx.parts, tangents
        return _summed(tangent.contiguous(), parts) / len(parts.counts), None


class _OwnRows(torch.autograd.Function):
    """The whole to this rank's rows. Back goes the gradient of the mean of all rows, to
    which each rank's own mean counts by its rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return x.narrow(0, parts.start, parts.own).clone()

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        parts, (tangent,) = ctx.parts, tangents
        return gather_rows(tangent * (parts.own / parts.total), parts), None
