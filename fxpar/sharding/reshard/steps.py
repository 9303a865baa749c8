"""Defines the steps a reshard is made of: one table of their kinds, and ``Step``.

In: specs before and after, a mesh, bytes. Out: ``KINDS`` says of each kind what it does
to a spec and to the local shape, how much it sends and copies, and whether it
communicates at all: slice and mask are local, every other step is one collective over
the ranks that differ on its axes, priced as in ``cost.collectives``, with the copies
around it as in ``mesh.Link``: kernels that read and write memory. A slice or mask is
such a kernel where its reshard sends nothing; before and after collectives it is
assumed to be part of others. What torch makes of a kind is in ``passes.lower``, under
the same names. Axes may be parts (see ``mesh``). ``str(step)`` is what golden tests and
explanations show. Never: chooses a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fxpar.sharding.cost.collectives import Curve, along
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class StepKind:
    """Says what steps of one kind do. The dims of a step are those it names, in
    order."""

    text: str  # how a step is written, with its axes, dims (d), reduction and specs
    # (k, bytes a rank holds before) -> bytes it sends, of k ranks; None: no collective.
    sent: Callable[[int, float], float] | None = None
    gathered: int | None = None  # index of the step's dim that its axes leave
    split: int | None = None  # index of the dim they go to, at its minor end
    reduces: bool = False  # whether the axes are partial before
    masks: bool = False  # whether they are partial after

    @property
    def local(self) -> bool:
        """Return whether it needs no communication."""
        return self.sent is None

    def growth(self, k: int) -> float:
        """Return local bytes after, as a multiple of those before."""
        if (self.gathered is None) == (self.split is None):
            return 1.0
        return 1 / k if self.gathered is None else float(k)

    def copied(self, k: int, moved: Sequence[bool]) -> tuple[float, float]:
        """Return the bytes copied before its collective and after it, as multiples of
        those before.

        A collective cuts and joins blocks that are stored one after the other: a dim
        that it splits is brought into that form, one that it gathers out of it.
        ``moved``: for each dim it names whether blocks of it are stored otherwise.
        """
        copies_before = self.split is not None and moved[self.split]
        copies_after = self.gathered is not None and moved[self.gathered]
        return float(copies_before), self.growth(k) * copies_after

    def shape(self, before: Sequence[int], dims: Sequence[int], k: int) -> list[int]:
        """Return the local shape after a step that names ``dims``, over k ranks."""
        shape = list(before)
        if self.gathered is not None:
            shape[dims[self.gathered]] *= k
        if self.split is not None:
            shape[dims[self.split]] //= k
        return shape


def _part(k: int, nbytes: float) -> float:
    return (k - 1) * nbytes / k


# Whether a copy before a collective, and one after it, is a kernel of its own, as it
# is next to a contraction; with light ops Inductor makes it one kernel.
Alone = tuple[bool, bool]
ALONE: Alone = (True, True)

# Reductions whose identity is written where a rank is not the first; of equal values
# the largest, smallest and mean are that value.
MASKED = ("sum", "product")

KINDS: dict[str, StepKind] = {
    # Each rank keeps its part of a dim.
    "slice": StepKind("slice {axes} on {d[0]}", split=0),
    # Whole -> partial: the first rank along the axes keeps the value, the others hold
    # the identity of the reduction (for avg, max and min the value itself).
    "mask": StepKind("mask {axes} ({op})", masks=True),
    "all_reduce": StepKind(
        "all_reduce {axes} ({op})",
        lambda k, nbytes: 2 * (k - 1) * nbytes / k,
        reduces=True,
    ),
    "reduce_scatter": StepKind(
        "reduce_scatter {axes} on {d[0]} ({op})", _part, split=0, reduces=True
    ),
    # The axes, a minor suffix of the first dim, go to the second.
    "all_to_all": StepKind(
        "all_to_all {axes}: {d[0]}->{d[1]}", _part, gathered=0, split=1
    ),
    # The axes, a minor suffix of the dim, are gathered.
    "all_gather": StepKind(
        "all_gather {axes} on {d[0]}", lambda k, nbytes: (k - 1) * nbytes, gathered=0
    ),
    # Any change that keeps the local shape: whole shards change ranks.
    "permute": StepKind(
        "permute {before} -> {after}", lambda k, nbytes: nbytes if k > 1 else 0
    ),
}


@dataclass(frozen=True)
class Step:
    """Is one step of a reshard of one value."""

    kind: str  # a key of ``KINDS``
    spec: Spec
    axes: tuple[str, ...]  # in mesh order for reductions and permutes
    dims: tuple[int, ...] = ()  # the dims it names, as its kind counts them
    op: str = ""  # the reduction of a partial value
    before: Spec | None = None  # the spec before a permute

    @property
    def local(self) -> bool:
        """Return whether it needs no communication."""
        return KINDS[self.kind].local

    def growth(self, mesh: Mesh) -> float:
        """Return local bytes after, as a multiple of those before."""
        return KINDS[self.kind].growth(mesh.count(self.axes))

    def sent(self, mesh: Mesh, nbytes: float) -> float:
        """Return the bytes that a rank sends which holds ``nbytes`` before."""
        send = KINDS[self.kind].sent
        return send(mesh.count(self.axes), nbytes) if send else 0.0

    @property
    def names(self) -> str:
        return "+".join(self.axes)

    def __str__(self) -> str:
        before = self.before and self.before.without_partial()
        after = self.spec.without_partial()
        return KINDS[self.kind].text.format(
            axes=self.names, d=self.dims, op=self.op, before=before, after=after
        )


def permutation(step: Step, mesh: Mesh) -> tuple[int, ...]:
    """Return for each member of a permute's group, in mesh order, the member whose
    shard it needs.

    The same for every group, and a permutation: a shard that several members hold goes
    from each of them to one. A member that already holds the shard it needs keeps it.
    """
    assert step.before is not None, step
    group = mesh.group(0, step.axes)
    holders: dict[tuple[int, ...], list[int]] = {}
    needs: dict[tuple[int, ...], list[int]] = {}
    for i, rank in enumerate(group):
        holders.setdefault(_shard(step.before, mesh, rank), []).append(i)
        needs.setdefault(_shard(step.spec, mesh, rank), []).append(i)
    out = list(range(len(group)))
    for shard, members in needs.items():
        stay = set(members) & set(holders[shard])
        moving = iter(i for i in holders[shard] if i not in stay)
        for i in members:
            if i not in stay:
                out[i] = next(moving)
    return tuple(out)


def _shard(spec: Spec, mesh: Mesh, rank: int) -> tuple[int, ...]:
    return tuple(mesh.index(rank, axes) for axes in spec.dims)


def front(shape: Sequence[int]) -> int:
    """Return the dim whose blocks are stored one after the other in memory: the first
    that has more than one element."""
    return next((d for d, size in enumerate(shape) if size > 1), 0)


@lru_cache(maxsize=1 << 14)
def curve(
    kind: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    late: tuple[bool, ...],
    alone: Alone = ALONE,
) -> Curve:
    """Return seconds over bytes of a collective with the copies around it. ``late``:
    for each dim the step names whether it comes after the ``front`` of the shape."""
    collective, step = along(kind, mesh, axes), KINDS[kind]
    unordered = bool(late) and mesh.ordered(axes) != axes
    copied = step.copied(mesh.count(axes), [unordered or x for x in late])
    copies = [times for times, x in zip(copied, alone, strict=True) if times and x]
    if not copies:
        return collective
    link = _copying(mesh, axes)
    if link.copy_near:
        return replace(collective, copies=tuple(copies), link=link)
    lines = (
        replace(
            line,
            alpha=line.alpha + len(copies) * link.copy_launch,
            beta=line.beta + sum(copies) * link.copy_byte,
        )
        for line in collective.lines
    )
    return Curve(tuple(lines))


def _copying(mesh: Mesh, axes: Sequence[str]) -> Link:
    """Return the link along some axes with the slowest copies."""
    links = (mesh.link(axis) for axis in axes)
    return max(links, key=lambda link: (link.copy_byte, link.copy_launch))


def written(
    source: Spec, target: Spec, mesh: Mesh, shape: Sequence[int], itemsize: int
) -> float:
    """Return the seconds of the kernel that a reshard without collectives is: slices of
    dims after the ``front`` are copied, masked values are written."""
    first, before = front(shape), set(source.axes)
    axes = [
        axis
        for d, dim in enumerate(target.dims)
        for axis in dim
        if d > first and axis not in before
    ]
    axes += [axis for axis, op in target.partial if axis not in before and op in MASKED]
    share = math.prod(shape) * itemsize / mesh.count(target.sharded_axes)
    return _kernel(mesh, axes, share)


def _kernel(mesh: Mesh, axes: Sequence[str], nbytes: float) -> float:
    """Return the seconds of a kernel that copies ``nbytes`` on account of some axes."""
    axes = [axis for axis in axes if mesh.axis_size(axis) > 1]
    if not axes:
        return 0.0
    return _copying(mesh, axes).copy_seconds(nbytes)


def cost(step: Step, mesh: Mesh, nbytes: float, first: int = 0) -> float:
    """Return the seconds that one step takes from ``nbytes`` on each rank, 0 if it is
    local; ``first``: the ``front`` of the shape."""
    if step.local:
        return 0.0
    late = tuple(d > first for d in step.dims)
    return curve(step.kind, mesh, step.axes, late).seconds(nbytes)


def duration(steps: Sequence[Step], mesh: Mesh, nbytes: float, first: int = 0) -> float:
    """Return the seconds of steps one after the other, from ``nbytes`` on each rank;
    ``first`` as for ``cost``."""
    total, copied = 0.0, list[str]()
    for step in steps:
        total += cost(step, mesh, nbytes, first)
        nbytes *= step.growth(mesh)
        if step.op in MASKED or any(d > first for d in step.dims):
            copied += step.axes
    return total or _kernel(mesh, copied, nbytes)
