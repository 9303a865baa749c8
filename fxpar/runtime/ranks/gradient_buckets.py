"""This module makes buckets of gradients, each of which one collective reduces.

In: parameters, in the order in which their gradients are reduced. Out: buckets; after
the reduction a ``.grad`` that was None is a view of the bucket's memory, so that
nothing is copied back. Never: a second use of memory that a ``.grad`` is a view of.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import GradientError
from fxpar.runtime.ranks import check_inputs

# Bytes of the first bucket and of the others, as DDP's.
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20


@dataclass(frozen=True)
class MeanOver:
    """Names the ranks over which the mean of a gradient is taken."""

    group: str  # name of the process group
    count: int  # number of its ranks


@dataclass(eq=False)
class Watched:
    """Is a parameter whose gradient is reduced."""

    name: str  # as messages and agreements call it
    ref: weakref.ref[nn.Parameter]  # the parameter
    over: MeanOver  # the ranks that its gradient is reduced over
    early: bool = True  # whether its gradient may be reduced before the backward ends
    place: int | None = None  # its number on all ranks; None until they agree
    bucket: Bucket | None = None  # bucket of its gradient; None until some rank has one
    index: int = 0  # position in its bucket
    has_hook: bool = False  # whether a hook notes its gradients
    is_left: bool = False  # whether other code, as DDP, reduces its gradient by now

    def text(self) -> str:
        """Return the text that must be equal on all ranks."""
        p = self.ref()
        if p is None:
            return f"{self.name}: has ended"
        local = local_of(p)
        return f"{self.name}: {p.dtype} {list(p.shape)} {strides_of(local)}"

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's part of its gradient, None if there is none. Raises
        GradientError if it is sparse."""
        p = self.ref()
        if p is None or p.grad is None or self.is_left:
            return None
        if p.grad.layout != torch.strided:
            raise GradientError(
                f"the gradient of parameter {self.name} is sparse",
                fix="use sparse=False",
            )
        return local_of(p.grad)

    def take(self) -> torch.Tensor | None:
        """Return ``.grad`` and set it to None."""
        p = self.ref()
        if p is None or p.grad is None or self.is_left:
            return None
        gradient, p.grad = p.grad, None
        return gradient

    def give(self, mean: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Set ``.grad`` to ``gradient`` with the values of ``mean``; None: to
        ``mean``."""
        p = self.ref()
        if p is None:
            return
        if gradient is not None:
            local_of(gradient).copy_(mean)
        elif isinstance(p, DTensor):
            gradient = _torch.dtensor.with_local(p, mean.detach())
        else:
            gradient = mean.detach()
        if p.grad is not gradient:
            p.grad = gradient


def local_of(x: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return _torch.dtensor.local_of(x) if isinstance(x, DTensor) else x


def strides_of(local: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: those of its parameter, if without gaps."""
    return tuple(torch.empty_like(local, device="meta").stride())


@dataclass(eq=False)
class BucketMemory:
    """Holds the memory of a bucket's gradients."""

    flat: torch.Tensor  # all gradients, one after the other; 1-D
    slots: list[torch.Tensor]  # a view for each, with its parameter's strides
    unused: int  # the ``memory_uses`` of ``flat`` while no ``.grad`` is a view of it

    def is_free(self) -> bool:
        """Return whether nothing else holds a view of it."""
        return _torch.objects.memory_uses(self.flat) == self.unused


@dataclass(eq=False)
class Bucket:
    """Holds gradients of one dtype, device and group that one collective reduces."""

    members: list[Watched]  # the parameters, in their order in memory
    mask: int  # places of the members, as bits
    # Shape and strides of each gradient, as ranks agreed.
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    dtype: torch.dtype
    device: torch.device
    # Up to two, used in turns: ``.grad`` may be views of one.
    memories: list[BucketMemory] = field(default_factory=list)

    @property
    def over(self) -> MeanOver:
        """Return the ranks that reduce it."""
        return self.members[0].over

    def memory(self) -> BucketMemory:
        """Return memory for the gradients of a backward, with any values."""
        for memory in self.memories:
            if memory.is_free():
                return memory
        sizes = [torch.Size(shape).numel() for shape, _ in self.shapes]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        starts = accumulate(sizes, initial=0)
        slots = [
            flat.as_strided(shape, strides, start)
            for (shape, strides), start in zip(self.shapes, starts, strict=False)
        ]
        memory = BucketMemory(flat, slots, _torch.objects.memory_uses(flat))
        self.memories = [*self.memories[-1:], memory]
        return memory

    def forget(self) -> None:
        """Free the memory once all parameters are gone on this rank."""
        if all(member.ref() is None for member in self.members):
            self.memories.clear()


def split_into_buckets(
    parameters: Sequence[Watched], *, first: bool
) -> Iterator[Bucket]:
    """Yield buckets of parameters, in the order in which they fill if gradients come in
    the order of ``parameters``. ``first``: whether this makes the first buckets."""
    limit = FIRST_BUCKET if first else BUCKET
    filling: dict[Any, list[Watched]] = {}
    sizes: dict[Any, int] = {}
    for watched in parameters:
        p = watched.ref()
        assert p is not None, "ranks agreed on a parameter that ended on this one"
        key = p.dtype, p.device, watched.over
        filling.setdefault(key, []).append(watched)
        sizes[key] = sizes.get(key, 0) + local_of(p).nbytes
        if sizes[key] >= limit:
            del sizes[key]
            yield _bucket(filling.pop(key))
            limit = BUCKET
    for members in filling.values():
        yield _bucket(members)


def _bucket(members: list[Watched]) -> Bucket:
    locals_ = [local_of(p) for m in members if (p := m.ref()) is not None]
    shapes = [(tuple(x.shape), strides_of(x)) for x in locals_]
    mask = sum(1 << m.place for m in members if m.place is not None)
    like = locals_[0]
    bucket = Bucket(members, mask, shapes, like.dtype, like.device)
    for i, member in enumerate(members):
        member.bucket, member.index = bucket, i
    return bucket


class LaunchedSum:
    """Is an all-reduce that was launched."""

    def __init__(self, flat: torch.Tensor, over: MeanOver) -> None:
        group = _torch.distributed.group_named(over.group)
        transport = check_inputs.transport(flat.device)
        self._flat = flat
        self._message = flat if flat.device == transport else flat.to(transport)
        self._work: Any = dist.all_reduce(self._message, group=group, async_op=True)

    def wait(self) -> None:
        """Return once the sum has replaced the summand."""
        self._work.wait()
        if self._message is not self._flat:
            self._flat.copy_(self._message)
