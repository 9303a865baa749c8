"""A batch of which ranks hold parts of unlike sizes, as every rank computes it: whole.

In: the compiled program of the global batch, which takes and gives whole values. Out:
the same for one rank's rows: what is fed in parts is gathered, results that hold the
batch are cut to this rank's rows. Gradients cross as they do where parts are equal: a
rank differentiates what it computed of its own rows, and counts by its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fxpar import _compat
from fxpar.runtime.groups import group_of
from fxpar.runtime.inputs import LOCAL_MARK
from fxpar.sharding.conventions import batch_axes
from fxpar.sharding.mesh import Mesh


@dataclass(frozen=True)
class Parts:
    """``counts``: rows of each part; ``index``: the part of this rank; ``group``: name
    of the process group of the ranks that hold one part each."""

    counts: tuple[int, ...]
    index: int
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
    counts rows -> its global value; ``rows``: positions of results that are cut."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        fed: Mapping[int, Parts],
        numbers: Mapping[int, int],
        rows: Collection[int],
        parts: Parts,
    ) -> None:
        self.compiled, self.fed, self.numbers = compiled, fed, numbers
        self.rows, self.parts = rows, parts

    def __call__(self, *args: Any) -> Any:
        given = [
            _gathered(x, self.fed[i]) if i in self.fed else self.numbers.get(i, x)
            for i, x in enumerate(args)
        ]
        results = []
        for i, x in enumerate(self.compiled(*given)):
            if isinstance(x, torch.Tensor):
                if i in self.rows:
                    x = _OwnRows.apply(x, self.parts.of(x.shape[0]))
                setattr(x, LOCAL_MARK, i in self.rows)
            results.append(x)
        return tuple(results)


def gather_rows(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The rows of all parts. All ranks of the group call it."""
    most = max(parts.counts)
    flat = x.new_zeros((most, *x.shape[1:]))
    flat[: parts.own] = x
    made = [torch.empty_like(flat) for _ in parts.counts]
    words = [each.view(-1).view(torch.uint8) for each in (flat, *made)]
    dist.all_gather(words[1:], words[0], group=_compat.group_named(parts.group))
    return torch.cat([each[:n] for each, n in zip(made, parts.counts, strict=True)])


def _gathered(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _AllRows.apply(x, parts)
    whole = gather_rows(x.detach(), parts)
    return whole.requires_grad_(x.requires_grad)


class _AllRows(torch.autograd.Function):
    """Parts to the whole. Back comes the gradient of this rank's own mean."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return gather_rows(x, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        parts, (gradient,) = ctx.parts, gradients
        own = gradient.narrow(0, parts.start, parts.own)
        return own * (parts.total / max(parts.own, 1)), None


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
