"""The steps a reshard is made of: one table of their kinds, and ``Step``, one of them.

``KINDS`` says of each kind what it does to a spec, to the local shape, how much it
sends, and whether it communicates at all: slice and mask are local and free, every
other step is one collective over the ranks that differ on its axes, priced as
``cost.collectives`` has it. What torch makes of a kind stands in ``passes.lower``,
under the same names. Axes may be sub-axes (see ``mesh``). ``str(step)`` is what golden
tests and explanations show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxpar.sharding.cost.collectives import along
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class StepKind:
    """What steps of one kind do. The dims of a step are those it names, in order."""

    # How a step is written, with its axes, dims (d), reduction and specs.
    text: str
    # (k, bytes a rank holds before) -> bytes it sends, of k ranks; None: no collective.
    sent: Callable[[int, float], float] | None = None
    # Which of the step's dims its axes leave, and to the minor end of which they go.
    gathered: int | None = None
    split: int | None = None
    # Whether the axes are partial before, or after.
    reduces: bool = False
    masks: bool = False

    @property
    def local(self) -> bool:
        """Whether it needs no communication."""
        return self.sent is None

    def growth(self, k: int) -> float:
        """Local bytes after, as a multiple of those before."""
        if (self.gathered is None) == (self.split is None):
            return 1.0
        return 1 / k if self.gathered is None else float(k)

    def shape(self, before: Sequence[int], dims: Sequence[int], k: int) -> list[int]:
        """The local shape after a step that names ``dims``, over k ranks."""
        shape = list(before)
        if self.gathered is not None:
            shape[dims[self.gathered]] *= k
        if self.split is not None:
            shape[dims[self.split]] //= k
        return shape


def _part(k: int, nbytes: float) -> float:
    return (k - 1) * nbytes / k


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
        "all_gather {axes} on {d[0]}",
        lambda k, nbytes: (k - 1) * nbytes,
        gathered=0,
    ),
    # Any change that keeps the local shape: whole shards change ranks.
    "permute": StepKind(
        "permute {before} -> {after}", lambda k, nbytes: nbytes if k > 1 else 0
    ),
}


@dataclass(frozen=True)
class Step:
    """One step of a reshard of one value."""

    # A key of ``KINDS``.
    kind: str
    # What holds after the step.
    spec: Spec
    # The axes it concerns; of reductions and permutes in mesh order.
    axes: tuple[str, ...]
    # The dims it names, as its kind counts them.
    dims: tuple[int, ...] = ()
    # The reduction of a partial value.
    op: str = ""
    # What held before a permute.
    before: Spec | None = None

    @property
    def local(self) -> bool:
        """Whether it needs no communication."""
        return KINDS[self.kind].local

    def growth(self, mesh: Mesh) -> float:
        """Local bytes after, as a multiple of those before."""
        return KINDS[self.kind].growth(mesh.count(self.axes))

    def sent(self, mesh: Mesh, nbytes: float) -> float:
        """Bytes that a rank sends which holds ``nbytes`` before."""
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
    """For each member of a permute's group, in mesh order, the member whose shard it
    needs.

    The same for every group, and a permutation: a shard that several members hold goes
    from each of them to one. Who already holds what it needs keeps it.
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


def cost(step: Step, mesh: Mesh, nbytes: float) -> float:
    """Seconds that one step takes from ``nbytes`` on each rank."""
    if step.local:
        return 0.0
    return along(step.kind, mesh, step.axes).seconds(nbytes)


def duration(steps: Sequence[Step], mesh: Mesh, nbytes: float) -> float:
    """Seconds of steps one after the other, from ``nbytes`` on each rank."""
    total = 0.0
    for step in steps:
        total += cost(step, mesh, nbytes)
        nbytes *= step.growth(mesh)
    return total
