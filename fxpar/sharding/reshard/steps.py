"""The steps a reshard is made of, and what each costs.

A step changes the spec of one value; each knows the spec that holds after it. Slice and
Mask are local and free, every other step is one collective over the ranks that differ
on its axes. Axes may be sub-axes (see ``mesh``). ``str(step)`` is what golden tests and
explanations show.

Costs are alpha-beta, as ``collectives`` has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpar.sharding.cost.collectives import along
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class Step:
    """``spec`` holds after the step, which concerns ``axes``."""

    spec: Spec
    axes: tuple[str, ...]

    kind: ClassVar[str] = ""
    local: ClassVar[bool] = False  # needs no communication

    @staticmethod
    def sent(k: int) -> float:
        """Bytes one rank of k sends, as a multiple of its local bytes before."""
        return 0.0

    @staticmethod
    def growth(k: int) -> float:
        """Local bytes after, as a multiple of those before."""
        return 1.0

    @property
    def names(self) -> str:
        return "+".join(self.axes)


@dataclass(frozen=True)
class Slice(Step):
    """Each rank keeps its part of ``dim``: the axes go to its minor end."""

    dim: int

    kind: ClassVar[str] = "slice"
    local: ClassVar[bool] = True

    @staticmethod
    def growth(k: int) -> float:
        return 1 / k

    def __str__(self) -> str:
        return f"slice {self.names} on {self.dim}"


@dataclass(frozen=True)
class Mask(Step):
    """Whole -> partial: the first rank along the axes keeps the value, the others hold
    the identity of the reduction (for avg, max and min the value itself)."""

    op: str

    kind: ClassVar[str] = "mask"
    local: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"mask {self.names} ({self.op})"


@dataclass(frozen=True)
class AllReduce(Step):
    """Partial along the axes -> whole along them."""

    op: str

    kind: ClassVar[str] = "all_reduce"

    @staticmethod
    def sent(k: int) -> float:
        return 2 * (k - 1) / k

    def __str__(self) -> str:
        return f"all_reduce {self.names} ({self.op})"


@dataclass(frozen=True)
class ReduceScatter(Step):
    """Partial along the axes -> they split ``dim``, at its minor end."""

    dim: int
    op: str

    kind: ClassVar[str] = "reduce_scatter"

    @staticmethod
    def sent(k: int) -> float:
        return (k - 1) / k

    @staticmethod
    def growth(k: int) -> float:
        return 1 / k

    def __str__(self) -> str:
        return f"reduce_scatter {self.names} on {self.dim} ({self.op})"


@dataclass(frozen=True)
class AllToAll(Step):
    """The axes, a minor suffix of ``source_dim``, go to the minor end of
    ``target_dim``."""

    source_dim: int
    target_dim: int

    kind: ClassVar[str] = "all_to_all"

    @staticmethod
    def sent(k: int) -> float:
        return (k - 1) / k

    def __str__(self) -> str:
        return f"all_to_all {self.names}: {self.source_dim}->{self.target_dim}"


@dataclass(frozen=True)
class AllGather(Step):
    """The axes, a minor suffix of ``dim``, are gathered."""

    dim: int

    kind: ClassVar[str] = "all_gather"

    @staticmethod
    def sent(k: int) -> float:
        return float(k - 1)

    @staticmethod
    def growth(k: int) -> float:
        return float(k)

    def __str__(self) -> str:
        return f"all_gather {self.names} on {self.dim}"


@dataclass(frozen=True)
class Permute(Step):
    """Any change that keeps the local shape: whole shards change ranks.

    ``before`` is the spec it starts from. The axes are in mesh order.
    """

    before: Spec

    kind: ClassVar[str] = "permute"

    @staticmethod
    def sent(k: int) -> float:
        return 1.0

    def sources(self, mesh: Mesh) -> tuple[int, ...]:
        """For each member of a group, in mesh order, the member whose shard it needs.

        The same for every group, and a permutation: a shard that several members hold
        goes from each of them to one. Who already holds what it needs keeps it.
        """
        group = mesh.group(0, self.axes)
        holders: dict[tuple[int, ...], list[int]] = {}
        needs: dict[tuple[int, ...], list[int]] = {}
        for i, rank in enumerate(group):
            holders.setdefault(_shard(self.before, mesh, rank), []).append(i)
            needs.setdefault(_shard(self.spec, mesh, rank), []).append(i)
        out = list(range(len(group)))
        for shard, members in needs.items():
            stay = set(members) & set(holders[shard])
            moving = iter(i for i in holders[shard] if i not in stay)
            for i in members:
                if i not in stay:
                    out[i] = next(moving)
        return tuple(out)

    def __str__(self) -> str:
        after = self.spec.without_partial()
        return f"permute {self.before.without_partial()} -> {after}"


def _shard(spec: Spec, mesh: Mesh, rank: int) -> tuple[int, ...]:
    return tuple(mesh.index(rank, axes) for axes in spec.dims)


def cost(step: Step, mesh: Mesh, nbytes: float) -> float:
    """Seconds that one step takes from ``nbytes`` on each rank."""
    if step.local:
        return 0.0
    return along(step.kind, mesh, step.axes).seconds(nbytes)
