"""Prices unequal shards for ranks of unequal speed, and compares them with equal ones.

In: a Decision on a mesh whose axes carry speeds, the hardware of speed 1.0, and the
reshards of a step. Out: ``Ratios``: for each axis the share of every rank, the seconds
of a step with equal shards and with these, and the sizes each split dim would be cut
into. Never: changes a plan; ``Mesh.shares`` are what runs.

One ratio holds for an axis, so that neighbours agree and nothing is resharded for it.
With it the ranks finish together the work that the axis splits, as in AccPar (Song et
al., HPCA 2020, section 5), unless collectives that wait for the largest shard ask for
less. Work that an axis does not split takes as long as on the slowest rank.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.sharding.cost import program_kernels
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import kernels_of
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import is_pipeline
from fxpar.sharding.reshard.route import Reshard
from fxpar.sharding.reshard.steps import cost, front

Axes = frozenset[str]

# Collectives whose ranks each bring or get one shard: the largest one decides.
_BY_SHARD = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class UnequalDim:
    """Is a dim that axes of unlike ranks split."""

    size: int  # rows of the dim
    axes: tuple[str, ...]  # axes that split it
    parts: tuple[int, ...]  # sizes of its shards, major to minor
    values: tuple[str, ...]  # names of values that have it


@dataclass(frozen=True)
class Ratios:
    """Holds shares of a dim by the speed of unlike ranks, and what they save."""

    mesh: Mesh  # with the speeds of its ranks
    hardware: str  # name of the hardware that steps are priced on
    # (axis, each rank's share of a dim it splits) for each axis of unlike ranks.
    shares: tuple[tuple[str, tuple[float, ...]], ...]
    even: float  # seconds of a step with equal shards, without overlap
    uneven: float  # the same with these shares
    cuts: tuple[UnequalDim, ...]  # largest dims first

    def __str__(self) -> str:
        if not self.shares:
            return f"all ranks of {self.mesh} are equally fast: equal shards are best"
        lines = [f"shards by speed for {self.mesh} on {self.hardware}:"]
        lines += [
            f"  {axis}: {_shares_text(shares, self.mesh.speeds_of(axis))}"
            for axis, shares in self.shares
        ]
        lines.append(
            f"a step: {self.even * 1e3:.4g} ms with equal shards, "
            f"{self.uneven * 1e3:.4g} ms with these "
            f"({self.even / self.uneven:.3g} times as fast)"
        )
        return "\n".join(lines + [_cut_text(cut) for cut in self.cuts])


def _shares_text(shares: Sequence[float], speeds: Sequence[float]) -> str:
    counts = Counter(zip(speeds, shares, strict=True))
    return ", ".join(
        f"{share:.3g} {f'on each of {n} ranks ' if n > 1 else ''}of speed {speed:g}"
        for (speed, share), n in counts.items()
    )


def _cut_text(cut: UnequalDim) -> str:
    parts = " + ".join(map(str, cut.parts[:8])) + " + ..." * (len(cut.parts) > 8)
    names = ", ".join(cut.values[:3]) + ", ..." * (len(cut.values) > 3)
    return f"  {cut.size} over {'+'.join(cut.axes)}: {parts}  ({names})"


def notes(mesh: Mesh) -> list[str]:
    """Return the notes of a plan on a mesh with unlike ranks or shares."""
    whole = mesh.unrefined
    out = [
        f"shares: along {axis} {':'.join(f'{n:g}' for n in shares)}"
        for axis, shares in zip(whole.names, whole.shares, strict=True)
        if shares and len(set(shares)) > 1
    ]
    # Along an axis of stages it is the depth of a stage that goes by speed.
    equal = [
        axis
        for axis in mesh.unlike
        if not mesh.weights_of(axis) and not is_pipeline(axis)
    ]
    ratio = math.prod(
        sum(mesh.speeds_of(axis))
        / len(mesh.speeds_of(axis))
        / min(mesh.speeds_of(axis))
        for axis in equal
    )
    if equal:
        out.append(
            f"ranks along {', '.join(equal)} differ in speed, but their shards "
            "are equal: all wait for the slowest, and computing takes up to "
            f"{ratio:.3g} times as long as with shards by speed (see "
            "plan.ratios())"
        )
    return out


def distinct_ranks(mesh: Mesh) -> list[tuple[int, float]]:
    """Return a rank of each kind, by speed and shares, and its relative speed."""
    whole = mesh.unrefined
    axes = [
        axis for axis in whole.names if mesh.weights_of(axis) or axis in mesh.unlike
    ]
    out = []
    for places in itertools.product(*(range(mesh.axis_size(axis)) for axis in axes)):
        speeds = {
            axis: whole.speeds_of(axis)[i] for axis, i in zip(axes, places, strict=True)
        }
        other_speeds = (
            min(whole.speeds_of(axis)) for axis in whole.names if axis not in axes
        )
        rank = whole.rank(dict(zip(axes, places, strict=True)))
        out.append((rank, math.prod(speeds.values()) * math.prod(other_speeds)))
    return out


def shares(alone: Sequence[float], largest: float = 0.0) -> tuple[float, ...]:
    """Return the shares x, of sum 1, for which ``max(x * alone) + largest * max(x)`` is
    least.

    alone: seconds that each rank would take for the whole. largest: seconds that the
    largest share would take for the whole, in work that waits for it. If 0, all finish
    together.
    """
    # x is min(1 / alone, cap) up to a factor. Between two of these caps the objective
    # is a quotient of linear functions of the cap, so the best is one of them.
    rates = 1 / np.asarray(alone, float)

    def seconds(cap: float) -> float:
        return (1 + largest * cap) / float(np.minimum(rates, cap).sum())

    cut = np.minimum(rates, min(set(rates.tolist()), key=seconds))
    return tuple((cut / cut.sum()).tolist())


@dataclass(frozen=True)
class StepSeconds:
    """Holds the seconds of a step of one rank, with equal shards and speed 1.0."""

    computing: Mapping[Axes, float]  # seconds by the unlike axes that split the op
    # Seconds by (unlike axes that split the tensor, those the collective runs along).
    moving: Mapping[tuple[Axes, Axes], float]
    fixed: float  # seconds of launches and of latencies of collectives

    def seconds(self, mesh: Mesh, ratio: Mapping[str, Sequence[float]]) -> float:
        """Return the seconds of the rank that takes longest, with ``ratio[axis]`` as
        shares."""
        axes = mesh.unlike
        shape = [1] * len(axes)
        speed = np.full(shape, mesh.slowest)
        grown: dict[str, np.ndarray] = {}
        for i, axis in enumerate(axes):
            along_axis = [*shape[:i], -1, *shape[i + 1 :]]
            speeds = np.array(mesh.speeds_of(axis))
            speed = speed * (speeds / speeds.min()).reshape(along_axis)
            grown[axis] = (np.array(ratio[axis]) * len(speeds)).reshape(along_axis)
        total = np.zeros(shape)
        for split, split_seconds in self.computing.items():
            if split:
                total = (
                    total + split_seconds * math.prod(grown[a] for a in split) / speed
                )
        for (split, over), split_seconds in self.moving.items():
            most = math.prod(float(grown[a].max()) for a in over)
            total = total + split_seconds * most * math.prod(grown[a] for a in split)
        whole = self.computing.get(frozenset(), 0.0) / mesh.slowest
        return self.fixed + whole + float(total.max())

    def best(self, mesh: Mesh) -> dict[str, tuple[float, ...]]:
        """Return the shares of each axis, chosen with equal shards along the others;
        equal ones where that is not faster."""
        even = _even(mesh)
        out = {}
        for axis in mesh.unlike:
            n, speeds = mesh.axis_size(axis), np.array(mesh.speeds_of(axis))
            relative = speeds * (mesh.slowest / speeds.min())
            work_ = sum(t for split, t in self.computing.items() if axis in split)
            own = sum(t for (split, _), t in self.moving.items() if axis in split)
            most = sum(t for (_, over), t in self.moving.items() if axis in over)
            alone = n * (work_ / relative + own)
            out[axis] = shares(alone, n * most) if work_ else even[axis]
        return min(out, even, key=lambda ratio: self.seconds(mesh, ratio))


def _even(mesh: Mesh) -> dict[str, tuple[float, ...]]:
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.unlike}
    return {axis: (1 / n,) * n for axis, n in sizes.items()}


def step_of(
    decision: Decision, hardware: Hardware, reshards: Iterable[Reshard]
) -> StepSeconds:
    """Return the seconds of the parts of a decision's step."""
    program, mesh = decision.program, hardware.on(decision.mesh)
    unequal = frozenset(mesh.unlike)
    works = kernels_of(program).works
    computing: dict[Axes, float] = defaultdict(float)
    for op, work, strategy in zip(program.ops, works, decision.strategies, strict=True):
        split = frozenset(a for _, axes in strategy.factors for a in axes) & unequal
        computing[split] += program_kernels.seconds(op, work, strategy, mesh, hardware)
    fixed = hardware.launch * sum(work.launches for work in works)
    moving: dict[tuple[Axes, Axes], float] = defaultdict(float)
    for reshard in reshards:
        before, value = reshard.source, program.values[reshard.value]
        nbytes, first = (
            value.nbytes / mesh.count(before.sharded_axes),
            front(value.shape),
        )
        for step in route(decision, reshard):
            if not step.local:
                line = along(step.kind, mesh, step.axes).line(nbytes)
                over = _whole(step.axes) & unequal
                split_axes = (_whole(before.sharded_axes) & unequal) - over
                most = over if step.kind in _BY_SHARD else frozenset()
                paid = cost(step, mesh, nbytes, first)  # with copies around it
                moving[split_axes, most] += paid - line.alpha
                fixed += line.alpha
            nbytes *= step.growth(mesh)
            before = step.spec
    return StepSeconds(computing, moving, fixed)


def best_shares(decision: Decision, hardware: Hardware) -> dict[str, tuple[float, ...]]:
    """Return the shares of each unlike axis with which a step is fastest. ``hardware``:
    the hardware of speed 1.0."""
    decision = replace(decision, mesh=decision.mesh.shared_equally)
    step = step_of(decision, hardware, decision.edges.reshards)
    return step.best(decision.mesh)


def _whole(axes: Iterable[str]) -> Axes:
    """Return the axes that ``axes``, some of them parts of axes, belong to."""
    return frozenset(axis.partition(":")[0] for axis in axes)


def ratios(
    decision: Decision, hardware: Hardware, reshards: Iterable[Reshard]
) -> Ratios:
    """Return how a decision's shards would be cut by speed, and the gain over equal
    ones.

    ``hardware``: the hardware of speed 1.0. ``reshards``: of one step. Memory is not
    checked: a large share needs more of it.
    """
    mesh = decision.mesh.shared_equally
    decision = replace(decision, mesh=mesh)
    step = step_of(decision, hardware, reshards)
    best = step.best(mesh)
    return Ratios(
        mesh,
        hardware.name,
        tuple(best.items()),
        step.seconds(mesh, _even(mesh)),
        step.seconds(mesh, best),
        tuple(_cuts(decision, best)),
    )


def _cuts(decision: Decision, best: Mapping[str, Sequence[float]]) -> list[UnequalDim]:
    """Return an entry for every dim that an axis of unlike ranks splits."""
    mesh = decision.mesh
    names_by_dim: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for value in decision.program.values:
        spec = decision.settled[value.index]
        for size, axes in zip(value.shape, spec.dims, strict=True):
            if set(axes) & set(mesh.unlike):
                names_by_dim.setdefault((size, axes), []).append(value.name)
    out = []
    for (size, axes), names in names_by_dim.items():
        shares_by_axis = [
            best.get(a, (1 / mesh.axis_size(a),) * mesh.axis_size(a)) for a in axes
        ]
        share = [math.prod(xs) for xs in itertools.product(*shares_by_axis)]
        out.append(
            UnequalDim(size, axes, cut(size, share), tuple(dict.fromkeys(names)))
        )
    return sorted(out, key=lambda cut: (-cut.size, cut.axes))


def cut(size: int, share: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers of sum ``size``, near ``size * share``: each end is
    rounded."""
    ends = np.rint(np.cumsum(share) / math.fsum(share) * size).astype(int)
    return tuple(np.diff(ends, prepend=0).tolist())
