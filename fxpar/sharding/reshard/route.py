"""Finds the steps and seconds from spec to spec, and the reshards a plan needs: one
list, each value resharded once per target spec.

``steps`` finds the cheapest route from one spec to another; ``price`` returns its
seconds. Where links are known and axes are few, the routes of ``all_pairs`` and of
``one_pair`` compete: over unlike links, axes that neither spec has can share the work.
Among equals ``one_pair`` wins.

``connect``. In: a Program, a strategy per op, the spec each value settles in, the specs
of inputs and outputs. Out: ``Edges``: for every use of a value the spec it is read in,
and the ordered reshards that make those versions. A version is made from the cheapest
one that exists by then, so a value gathered for one reader is not gathered again for
the next. Never: changes the Program, a strategy or a spec that values settle in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.pipeline_axis import pipeline_axis, without
from fxpar.sharding.program import Program, Value
from fxpar.sharding.reshard import all_pairs, one_pair
from fxpar.sharding.reshard.steps import Step, duration, front, written
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, operand_spec, result_spec


def steps(
    source: Spec,
    target: Spec,
    mesh: Mesh,
    shape: Sequence[int],
    itemsize: int = 4,
    unequal_axes: Axes = (),
) -> tuple[Step, ...]:
    """Return the cheapest steps from ``source`` to ``target`` for a global ``shape``.
    ``unequal_axes``: axes along which ranks have unlike values, though no spec says so:
    they cannot share the work.

    Deterministic; empty if nothing has to be done. Raises SpecError if a spec does not
    fit mesh and shape, or a partial axis is to change its reduction.
    """
    return _route(source, target, mesh, tuple(shape), itemsize, unequal_axes)[0]


def price(
    source: Spec, target: Spec, mesh: Mesh, shape: Sequence[int], itemsize: int = 4
) -> float:
    """Return the predicted seconds of ``steps``. Cached: costs a dictionary look-up."""
    if source == target:
        return 0.0
    seconds = _route(source, target, mesh, tuple(shape), itemsize)[1]
    return seconds or written(source, target, mesh, shape, itemsize)


def price_of(value: Value, source: Spec, target: Spec, mesh: Mesh) -> float:
    """Return ``price`` of a value of a program."""
    return price(source, target, mesh, value.shape, value.dtype.itemsize)


@lru_cache(maxsize=1 << 18)
def _route(
    source: Spec,
    target: Spec,
    mesh: Mesh,
    shape: tuple[int, ...],
    itemsize: int,
    unequal_axes: Axes = (),
) -> tuple[tuple[Step, ...], float]:
    """Return steps and seconds. Along an axis of stages only values split there are
    sent: ranks at other places run other steps."""
    route, seconds = one_pair.search(source, target, mesh, shape, itemsize)
    stages = pipeline_axis(mesh)
    alone = (*unequal_axes, stages) if stages else unequal_axes
    if not {*source.axes, *target.axes}.isdisjoint(alone):
        return route, seconds
    mesh = without(mesh, alone)
    if all(link == Link() for link in mesh.links):
        return route, seconds
    other = all_pairs.path(source, target, mesh, shape, itemsize)
    if other is not None:
        local = math.prod(shape) * itemsize / mesh.count(source.sharded_axes)
        shorter = duration(other, mesh, local, front(shape))
        if shorter < duration(route, mesh, local, front(shape)) * (1 - 1e-9):
            return other, shorter
    return route, seconds


@dataclass(frozen=True)
class Reshard:
    """Brings a value from one spec to another, for the op or output that first asks."""

    value: int  # index in ``Program.values``
    source: Spec  # the spec that it has
    target: Spec  # the spec that it gets
    reader: int | None  # index of the op that first asks; None: an output does
    output: int | None  # number of the output that first asks; None: an op does
    # Whether it settles the producer's result, and so is placed right after the
    # producer; any other is placed before its reader.
    early: bool


@dataclass
class Edges:
    """Holds the specs in which values are made and read, and the reshards between."""

    specs: list[Spec]  # spec of each value as its op gives it
    reads: dict[tuple[int, int], Spec] = field(default_factory=dict)  # by (op, operand)
    outputs: list[Spec | None] = field(default_factory=list)  # None: no tensor
    # In an order in which they can be inserted.
    reshards: list[Reshard] = field(default_factory=list)


def _has_one_route(source: Spec, target: Spec) -> bool:
    """Return whether no axis changes its reduction, which takes two reshards: one that
    reduces it, one that makes it partial again."""
    before = dict(source.partial)
    return all(before.get(axis, op) == op for axis, op in target.partial)


# The op, or else the output, that asks for a version of a value: their numbers.
_Asker = tuple[int | None, int | None]


class _Versions:
    """Holds the specs in which each value exists so far."""

    def __init__(
        self,
        program: Program,
        raw_specs: list[Spec],
        settled: Sequence[Spec],
        mesh: Mesh,
        unequal_axes: Axes = (),
        manual: Axes = (),
    ) -> None:
        """Begin with the specs in which values are made. ``unequal_axes``, ``manual``:
        sets of axes each of which has reshards of its own; for a value that both split,
        those of the first come first."""
        self.program, self.mesh = program, mesh
        self.manual = frozenset(manual)
        self.unequal_axes = [frozenset(axes) for axes in (unequal_axes, manual) if axes]
        self.raw_specs, self.settled = raw_specs, settled
        self.exist: list[list[Spec]] = [[spec] for spec in raw_specs]
        self.reshards: list[Reshard] = []

    def _price(self, v: int, source: Spec, target: Spec) -> float:
        if not _has_one_route(source, target):
            return math.inf
        return price_of(self.program.values[v], source, target, self.mesh)

    def get(self, v: int, need: Spec, asker: _Asker) -> None:
        """Make version ``need`` of a value unless it exists."""
        if need in self.exist[v]:
            return
        for axes in self.unequal_axes:
            if not axes.isdisjoint(need.axes):
                if axes == self.manual and self._keep(v, need, asker):
                    return
                source = self._before(v, need, axes, asker)
                self._add(v, source, need, asker)
                return
        exist = self.exist[v]
        for axes in self.unequal_axes:
            if not any(axes.isdisjoint(spec.axes) for spec in exist):
                self._add(v, exist[0], exist[0].clear_of(axes), asker)
            exist = [x for x in self.exist[v] if axes.isdisjoint(x.axes)]
        exist, settled = self._candidates(v), self.settled[v]
        if need in exist:
            return
        if not any(_has_one_route(spec, need) for spec in exist):
            self.get(v, need.without_partial(), asker)
        direct = min(self._price(v, spec, need) for spec in exist)
        mixed = not all(axes.isdisjoint(settled.axes) for axes in self.unequal_axes)
        if settled not in exist and settled != need and not mixed:
            # Settling first pays if the spec that others will read is on the way.
            through = min(self._price(v, spec, settled) for spec in exist)
            through += self._price(v, settled, need)
            if through <= direct * (1 + 1e-9):
                self._make(v, settled, asker)
        self._make(v, need, asker)

    def _keep(self, v: int, need: Spec, asker: _Asker) -> bool:
        """Make a version split along manual axes as the value was made, or along some
        of them, if ``need`` is such a version: along the others it is gathered first.
        Return whether it is."""
        origin = self.raw_specs[v]
        shared = self.manual.intersection(need.sharded_axes)
        others = {axis for axis in (*origin.axes, *need.axes) if axis not in shared}
        if origin.partial or origin.without(others) != need.clear_of(others):
            return False
        part = origin.without(self.manual - shared)
        if part not in self.exist[v]:
            self._add(v, origin, part, asker)
        if part != need:
            self._add(v, part, need, asker)
        return True

    def _before(
        self,
        v: int,
        need: Spec,
        axes: frozenset[str],
        asker: _Asker,
    ) -> Spec:
        """Return the version that ``axes`` are added to: one that they do not split
        yet, or, if they are to reduce it, a partial one, so that the reshard is a
        reduce-scatter."""
        first = self.raw_specs[v]
        unreduced = [pair for pair in first.partial if pair[0] in axes]
        if not unreduced:
            bare = need.clear_of(axes)
            self.get(v, bare, asker)
            return bare
        source = need.clear_of([axis for axis, _ in unreduced])
        source = Spec.of(source.dims, (*source.partial, *unreduced))
        if source not in self.exist[v]:
            self._add(v, first, source, asker)
        return source

    def _make(self, v: int, target: Spec, asker: _Asker) -> None:
        exist = self._candidates(v)
        source = min(exist, key=lambda spec: self._price(v, spec, target))
        self._add(v, source, target, asker)

    def _candidates(self, v: int) -> list[Spec]:
        """Return versions that others are made from."""
        unequal_axes = frozenset[str]().union(*self.unequal_axes)
        return [spec for spec in self.exist[v] if unequal_axes.isdisjoint(spec.axes)]

    def _add(self, v: int, source: Spec, target: Spec, asker: _Asker) -> None:
        early = source == self.raw_specs[v] and target == self.settled[v]
        early &= v in self.program.producers  # an input moves where it is first read
        self.exist[v].append(target)
        self.reshards.append(Reshard(v, source, target, *asker, early))


def connect(
    program: Program,
    strategies: Sequence[Strategy],
    settled: Sequence[Spec],
    mesh: Mesh,
    *,
    unequal_axes: Axes = (),
    manual: Axes = (),
    averaged: Collection[int] = (),
) -> Edges:
    """Return all reads and reshards of a plan, inputs and outputs as the signature
    wants.

    ``unequal_axes``, ``manual``: axes along which values are moved by reshards of their
    own; ``averaged``: values that are operands of a mean over ranks along the
    ``manual`` axes.
    """
    signature = program.signature
    specs: list[Spec] = list(settled)
    for op, strategy in zip(program.ops, strategies, strict=True):
        for i, v in enumerate(op.results):
            specs[v] = result_spec(op.rule, strategy, i)
    for v in averaged:  # of experts, ranks have sums of their own already
        means = [(axis, "avg") for axis in manual if axis not in specs[v].sharded_axes]
        specs[v] = Spec.of(specs[v].dims, (*specs[v].partial, *means))
    for declared, value in program.tensor_inputs:
        if declared.at_rest is not None:
            specs[value] = declared.at_rest
    rest_specs = [
        None if v is None else out.spec(settled[v])
        for out, v in zip(signature.outputs, program.outputs, strict=True)
    ]
    for k, (result, rest_spec) in enumerate(
        zip(program.outputs, rest_specs, strict=True)
    ):
        if result is None or rest_spec is None or signature.outputs[k].layout != "even":
            continue
        rest_specs[k] = rest_spec.evened(mesh, program.values[result].shape)
    for i, k in signature.tangents:
        tangent, rest_spec = program.inputs[i], rest_specs[k]
        if tangent is not None and rest_spec is not None:
            specs[tangent] = rest_spec
    for constant in program.values:
        if (
            constant.index not in program.producers
            and constant.index not in program.inputs
        ):
            specs[constant.index] = Spec.whole(len(constant.shape))  # a constant
    versions = _Versions(program, specs, settled, mesh, unequal_axes, manual)
    edges = Edges(specs, reshards=versions.reshards)
    for op, strategy in zip(program.ops, strategies, strict=True):
        for i, v in enumerate(op.operands):
            need = operand_spec(op.rule, strategy, i)
            versions.get(v, need, (op.index, None))
            edges.reads[op.index, i] = need
    for k, (out, rest_spec) in enumerate(zip(program.outputs, rest_specs, strict=True)):
        if out is not None and rest_spec is not None:
            versions.get(out, rest_spec, (None, k))
        edges.outputs.append(rest_spec)
    return edges


def reshard_seconds(program: Program, edges: Edges, mesh: Mesh) -> float:
    """Return the seconds of all reshards, one after the other."""
    values = program.values
    return sum(
        price_of(values[x.value], x.source, x.target, mesh) for x in edges.reshards
    )
