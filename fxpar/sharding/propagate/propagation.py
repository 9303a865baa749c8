"""Propagates seeds to a spec for every value, by factor rules, to a fixed point.

In: a Program, a Mesh, a ``Seed`` for each hint and convention. Out: a ``State`` with
the axes of every dim of every value and, for each axis, its origin, which later steps
read. Never: changes the graph, or takes an axis away from a value.

Each op projects the axes of its tensors onto factors; a factor's axes flow to every
tensor that has the factor, as far as the dim is open, the axis unused in that tensor,
and the sizes allow it. Work is done in order of trust, a lower level always first:

0. ops that keep all factors (pointwise, views), from their large tensors only;
1. every op, but only factors that no result lacks;
2. contracted factors as well;
3. conflicts: where two factors want one axis, the axis that came from a batch dim
   stays, else the larger tensor keeps its axis (the smaller one is cheaper to move);
   small tensors may now push into large ones (broadcasts);
4. ops that go by the order of whole rows (sorts): an axis that splits such a dim goes
   to another one, so that an all-to-all brings the rows together, and no gather.

Seeds of a lower ``priority`` number, or dims of them, propagate to their fixed point
before the next ones are looked at. Axes are only ever added, so it ends. Sources: GSPMD
section 3.5 (levels), Shardy's propagation (factors, user > op > basic > aggressive
priority; priorities of dims, replicated axes, barriers).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fxpar.sharding.factors import Axes, Dims
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Op, Program
from fxpar.sharding.shard_sizes import can_split, is_even
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import is_expressible, project, spec_of

# A priority before all those that users give.
FIRST = -1


@dataclass(frozen=True)
class Origin:
    """Says why an axis is on a value: the seed it came from and the last step it
    took."""

    # ``Seed.origin`` of the seed it came from.
    seed: str
    # The seed split dim 0 of an input, so this axis is data parallel.
    batch: bool = False
    # The seed split experts: rows go to where theirs are.
    experts: bool = False
    op: str | None = None  # the op that brought it here
    source: int | None = None  # the value it came from


@dataclass(frozen=True)
class Seed:
    """Is a spec given to a value."""

    # Index in ``Program.values``.
    value: int
    # Axes of each dim, major to minor.
    dims: tuple[Axes, ...]
    # Whether each dim takes no more axes.
    closed: tuple[bool, ...]
    # The hint or convention that gives it, in words for messages.
    origin: str
    # Seeds of lower numbers propagate first.
    priority: int = 0
    # Whether it splits dim 0 of an input, so that its axes are data parallel.
    batch: bool = False
    # Whether it splits experts.
    experts: bool = False
    # Priority of each dim; None: as the seed; (): no dim has its own.
    priorities: tuple[int | None, ...] = ()
    # Axes that split no dim.
    whole: Axes = ()
    # Whether no axis passes between the value and its readers.
    barrier: bool = False

    @property
    def turns(self) -> tuple[int, ...]:
        """Return the priority of each dim; for a value without dims the seed's
        priority."""
        own = (self.priority if p is None else p for p in self.priorities)
        return tuple(own) or (self.priority,) * max(1, len(self.dims))


@dataclass
class State:
    """Holds the axes per dim of each value, and the origin of each axis on it."""

    # The program of the values.
    program: Program
    # The mesh of the axes.
    mesh: Mesh
    # Axes by value and dim.
    dims: list[list[Axes]]
    # Whether a hint closes the dim to further axes.
    closed: list[list[bool]]
    # Origins by value and axis.
    origins: list[dict[str, Origin]]
    # Whether axes pass to the value, and from it, now.
    active: list[bool]
    # Axes by value that split no dim of it.
    whole: dict[int, frozenset[str]] = field(default_factory=dict)
    # Values that pass no axes to their readers, and take none from them.
    barred: set[int] = field(default_factory=set)
    # (value, dim, axis): an axis that wanted this dim but cannot split it.
    indivisible: dict[tuple[int, int, str], Origin] = field(default_factory=dict)

    def can_take(self, value: int, axis: str) -> bool:
        """Return whether neither another dim nor a hint keeps ``axis`` from splitting
        ``value``."""
        whole = self.whole.get(value, ())
        return axis not in self.origins[value] and axis not in whole

    def append(self, value: int, d: int, axes: Axes, origin: Origin) -> None:
        """Append axes to a dim as far as the value can take them."""
        for axis in itertools.takewhile(lambda x: self.can_take(value, x), axes):
            self.dims[value][d] = (*self.dims[value][d], axis)
            self.origins[value][axis] = origin

    def spec(self, value: int) -> Spec:
        return spec_of(tuple(self.dims[value]))


LEVELS = 5
PASS, KEPT, ALL, RESOLVE, TURN = range(LEVELS)


class Propagation:
    """Is the fixed-point engine; ``seed`` and ``run`` may be called repeatedly."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        values = program.values
        self.program, self.mesh = program, mesh
        self.state = State(
            program,
            mesh,
            [[()] * len(v.shape) for v in values],
            [[False] * len(v.shape) for v in values],
            [{} for _ in values],
            [True] * len(values),
        )
        # (level, op) to look at, as a heap and as a set.
        self._heap: list[tuple[int, int]] = []
        self._queued: set[tuple[int, int]] = set()
        self._touching: list[list[int]] = [[] for _ in values]
        for op in program.ops:
            for v in dict.fromkeys(op.tensors):
                self._touching[v].append(op.index)
        sizes = [[values[v].numel for v in op.tensors] for op in program.ops]
        self._large = [[2 * n >= max(own) for n in own] for own in sizes]
        self._levels = list(map(self._levels_of, program.ops))
        self._ties: dict[int, list[int]] = {}
        # By value and dim, axes that wait for their turn, and whether it is closed.
        self._held: dict[tuple[int, int], tuple[Axes, bool]] = {}

    def tie(self, a: int, b: int) -> None:
        """Make two values of equal shape (a parameter, its gradient) share axes."""
        self._ties.setdefault(a, []).append(b)
        self._ties.setdefault(b, []).append(a)

    def seed(self, seeds: Iterable[Seed]) -> None:
        """Pin all seeds, then propagate them priority by priority."""
        seeds = list(seeds)
        for seed in seeds:
            self._pin(seed)
            self.state.active[seed.value] = False
        for priority in sorted({turn for seed in seeds for turn in seed.turns}):
            for seed in seeds:
                if priority in seed.turns:
                    self._release(seed, priority)
                    self.state.active[seed.value] = True
                    self._changed(seed.value)
            self.run()

    def _pin(self, seed: Seed) -> None:
        """Give a value its seed; a dim or an axis that an earlier seed took stays as it
        is."""
        state, v = self.state, seed.value
        if seed.whole:
            state.whole[v] = state.whole.get(v, frozenset()).union(seed.whole)
        if seed.barrier:
            state.barred.add(v)
        for d, axes in enumerate(seed.dims):
            if seed.experts and axes and state.dims[v][d] == axes:
                for axis in axes:
                    origin = state.origins[v][axis]
                    state.origins[v][axis] = replace(origin, experts=True)
            if state.dims[v][d] or state.closed[v][d]:
                continue
            origin = Origin(seed.origin, seed.batch and d == 0, seed.experts)
            state.append(v, d, axes, origin)
            state.closed[v][d] = seed.closed[d]
            if seed.turns[d] > min(seed.turns):
                # Until its turn no other dim gets these axes, and the dim no others.
                self._held[v, d] = state.dims[v][d], seed.closed[d]
                state.dims[v][d], state.closed[v][d] = (), True

    def _release(self, seed: Seed, priority: int) -> None:
        """Let the dims of a seed whose turn is ``priority`` propagate."""
        state, v = self.state, seed.value
        for d, turn in enumerate(seed.turns):
            if turn == priority and (v, d) in self._held:
                state.dims[v][d], state.closed[v][d] = self._held.pop((v, d))

    def extend(self, seeds: Iterable[tuple[int, Spec, str]], among: set[int]) -> None:
        """Append to each value the axes that its spec has after those it got, and
        propagate them ``among`` some values only. ``seeds``: (value, spec, origin)."""
        active, self.state.active = self.state.active, [False] * len(self.state.active)
        for v in among:
            self.state.active[v] = active[v]
        for v, spec, origin in seeds:
            for d, axes in enumerate(spec.dims):
                have = self.state.dims[v][d]
                extra = axes[len(have) :] if axes[: len(have)] == have else ()
                self.state.append(v, d, extra, Origin(origin))
            self._changed(v)
        self.run()
        self.state.active = active

    def run(self) -> None:
        """Work off the queues, lowest level first."""
        while self._heap:
            level, index = place = heapq.heappop(self._heap)
            self._queued.discard(place)
            self._apply(self.program.ops[index], level)

    def _changed(self, v: int) -> None:
        for index in self._touching[v]:
            for level in self._levels[index]:
                if (level, index) not in self._queued:
                    self._queued.add((level, index))
                    heapq.heappush(self._heap, (level, index))
        for other in self._ties.get(v, ()):
            self._bring_over(v, other)

    def _bring_over(self, v: int, other: int) -> None:
        """Add the axes of a tied value to the other."""
        if not (self.state.active[v] and self.state.active[other]):
            return
        changed = False
        for d, axes in enumerate(self.state.dims[v]):
            have = self.state.dims[other][d]
            if axes[: len(have)] == have and len(axes) > len(have):
                changed |= self._extend(
                    other, d, axes[len(have) :], v, "gradient of its parameter"
                )
        if changed:
            self._changed(other)

    def _extend(self, v: int, d: int, axes: Axes, source: int, op: str) -> bool:
        """Append axes to dim ``d`` of ``v`` while they fit; return whether any was
        added."""
        state, added = self.state, False
        for axis in axes:
            if state.closed[v][d] or not state.can_take(v, axis):
                break
            size = self.program.values[v].shape[d]
            origin = state.origins[source][axis]
            split = (*state.dims[v][d], axis)
            if not can_split(size, self.mesh, split, even=self.program.even):
                state.indivisible.setdefault((v, d, axis), origin)
                break
            state.dims[v][d] = (*state.dims[v][d], axis)
            seed, batch, experts = origin.seed, origin.batch, origin.experts
            state.origins[v][axis] = Origin(seed, batch, experts, op, source)
            added = True
        return added

    def _levels_of(self, op: Op) -> tuple[int, ...]:
        """Return the levels at which an op may do more than at a lower one."""
        turns = op_facts_of(op.target).orders and op.operands
        open_levels = (KEPT, ALL, RESOLVE) if op.rule.contracted else (PASS, RESOLVE)
        return (*open_levels, TURN) if turns else open_levels

    def _apply(self, op: Op, level: int) -> None:
        if level == TURN:
            self._turn(op)
            return
        rule, state = op.rule, self.state
        tensors = op.tensors
        views: list[dict[str, Axes]] = [
            project(dims, state.dims[v], rule.size, self.mesh, even=rule.evenly)
            if self._is_passing(op, i) and state.origins[v]
            else {}
            for i, (dims, v) in enumerate(zip(rule.tensors, tensors, strict=True))
        ]
        if level == RESOLVE:
            self._note_lost(op, views)
        agreed = self._agreed(op, level, views)
        if not agreed:
            return
        for i, v in enumerate(tensors):
            if not self._is_passing(op, i):
                continue
            changed = False
            for factor, (axes, source) in self._claimed(
                op, i, agreed, views[i], level
            ).items():
                changed |= self._grow(op, i, factor, axes, source, views[i])
            if changed:
                self._changed(v)

    def _is_passing(self, op: Op, i: int) -> bool:
        """Return whether axes pass between an op and its tensor ``i``."""
        v = op.tensors[i]
        read = i < len(op.operands)
        return self.state.active[v] and not (read and v in self.state.barred)

    def _turn(self, op: Op) -> None:
        """Move axes of a dim that an op needs whole, for its order, to the largest of
        its other dims that they divide."""
        rule, state, source = op.rule, self.state, op.operands[0]
        pairs = zip(rule.operands[0], state.dims[source], strict=True)
        whole_axes = [a for dim, axes in pairs if rule.whole & {*dim} for a in axes]
        others = [f for f in rule.free if f not in rule.contracted | rule.exchanged]
        for axis in whole_axes if self._is_passing(op, 0) else ():
            for v, dims in zip(op.results, rule.results, strict=True):
                fit = [
                    (rule.size[dim[0]], d)
                    for d, dim in enumerate(dims)
                    if dim
                    and dim[0] in others
                    and not state.dims[v][d]
                    and is_even(rule.size[dim[0]], self.mesh, (axis,))
                ]
                is_taken = not state.can_take(v, axis) or not state.active[v]
                if fit and not is_taken:
                    _, d = max(fit, key=lambda place: place[0])
                    if self._extend(v, d, (axis,), source, op.name):
                        self._changed(v)

    def _note_lost(self, op: Op, views: list[dict[str, Axes]]) -> None:
        """Remember axes that end at this op, since no factor takes them."""
        dealt_axes = {axis for view in views for axes in view.values() for axis in axes}
        for i, (dims, v, view) in enumerate(
            zip(op.rule.tensors, op.tensors, views, strict=True)
        ):
            if not self._is_passing(op, i) or not (view or self.state.origins[v]):
                continue
            for d, (dim, axes) in enumerate(zip(dims, self.state.dims[v], strict=True)):
                dealt = sum(len(view.get(factor, ())) for factor in dim)
                undealt = axes[dealt:] if len(dim) > 1 else ()
                for axis in () if dealt_axes.intersection(undealt) else undealt:
                    origin = self.state.origins[v][axis]
                    self.state.indivisible.setdefault((v, d, axis), origin)

    def _agreed(
        self, op: Op, level: int, views: list[dict[str, Axes]]
    ) -> dict[str, tuple[Axes, int]]:
        """Return, per factor, the axes its tensors agree on and the tensor they come
        from."""
        rule, out = op.rule, {}
        restrict = level < RESOLVE and not rule.contracted
        for factor in rule.free:
            if level < ALL and factor in rule.contracted:
                continue
            best: Axes = ()
            source = -1
            for i in rule.where[factor]:
                free = itertools.takewhile(
                    lambda axis: axis not in rule.pin, views[i].get(factor, ())
                )
                axes = tuple(free)
                if not axes or (restrict and not self._large[op.index][i]):
                    continue
                n = min(len(axes), len(best))
                if axes[:n] == best[:n]:
                    if len(axes) > len(best):
                        best, source = axes, i
                elif level == RESOLVE:
                    if self._rank(op, i, axes[0]) < self._rank(op, source, best[0]):
                        best, source = axes, i
                else:
                    shared = next(k for k in range(n) if axes[k] != best[k])
                    best = best[:shared]
            if best:
                out[factor] = (best, source)
        return out

    def _rank(self, op: Op, i: int, axis: str) -> tuple[bool, int, int]:
        """Return the sort key of a claim on an axis; the smallest wins."""
        v = op.tensors[i]
        origin = self.state.origins[v].get(axis)
        batch = origin is not None and origin.batch
        return (not batch, -self.program.values[v].nbytes, i)

    def _claimed(
        self,
        op: Op,
        i: int,
        agreed: dict[str, tuple[Axes, int]],
        view: dict[str, Axes],
        level: int,
    ) -> dict[str, tuple[Axes, int]]:
        """Return the part of ``agreed`` that tensor ``i`` can take: each axis for one
        factor only."""
        have = self.state.origins[op.tensors[i]]
        factors = dict.fromkeys(f for dim in op.rule.tensors[i] for f in dim)
        claims: dict[str, list[str]] = {}
        for factor in factors:
            for axis in agreed.get(factor, ((), -1))[0]:
                claims.setdefault(axis, []).append(factor)
        out = {}
        for factor in factors:
            if factor not in agreed:
                continue
            axes, source = agreed[factor]
            present = view.get(factor, ())
            if axes[: len(present)] != present or len(axes) <= len(present):
                continue
            take = []
            for axis in axes[len(present) :]:
                rivals = claims[axis]
                if axis in have or (len(rivals) > 1 and level < RESOLVE):
                    break
                if len(rivals) > 1 and factor != min(
                    rivals, key=lambda f: self._rank(op, agreed[f][1], axis)
                ):
                    break
                take.append(axis)
            if take:
                out[factor] = (tuple(take), source)
        return out

    def _grow(
        self,
        op: Op,
        i: int,
        factor: str,
        axes: Axes,
        source: int,
        view: dict[str, Axes],
    ) -> bool:
        """Add axes to a factor of tensor ``i`` if its dim can express them."""
        v, dims = op.tensors[i], op.rule.tensors[i]
        d = next(d for d, dim in enumerate(dims) if factor in dim)
        if not self._is_at_minor_end(op, dims, d, factor, v, view):
            origin = self.state.origins[op.tensors[source]][axes[0]]
            if origin.batch:
                self.state.indivisible.setdefault((v, d, axes[0]), origin)
            return False
        have, fit = view.get(factor, ()), list[str]()
        for axis in axes:
            split = {**view, factor: (*have, *fit, axis)}
            size, even = op.rule.size, op.rule.evenly
            if not can_split(
                size[factor], self.mesh, split[factor], even=self.program.even
            ) or not is_expressible((dims[d],), split, size, self.mesh, even=even):
                origin = self.state.origins[op.tensors[source]][axis]
                self.state.indivisible.setdefault((v, d, axis), origin)
                break
            fit.append(axis)
        if not self._extend(v, d, tuple(fit), op.tensors[source], op.name):
            return False
        view[factor] = view.get(factor, ()) + tuple(fit)
        return True

    def _is_at_minor_end(
        self,
        op: Op,
        dims: Dims,
        d: int,
        factor: str,
        v: int,
        view: dict[str, Axes],
    ) -> bool:
        """Return whether appending to dim ``d`` of ``v`` appends to this factor of
        it."""
        expressed = 0
        for f in dims[d]:
            axes = view.get(f, ())
            expressed += len(axes)
            if f == factor:
                return expressed == len(self.state.dims[v][d])
            if self.mesh.count(axes) != op.rule.size[f]:
                return False
        return False
