"""Chooses a schedule for a local graph by cost.

In: a local graph with steps, the hardware. Out: a ``Chosen``: the schedule, the graph
after it, what a step is predicted to take before and after, and near misses with the
reason. What lies in slices comes from ``sequence_parallel``, which is exact for the sum
of seconds, once for each dim that could be split; the best by simulation are kept. For
each of these ``overlap_candidates`` finds lines for every kind of collective, in a
window around it, and the whole step is simulated again. A schedule is taken if the step
is not slower with it, memory deciding between equals. All ranks choose alike: nothing
here depends on the clock or on the rank.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar.errors import FxparWarning, ScheduleError, compose
from fxpar.fusion.apply_schedule import Unexpected, apply
from fxpar.fusion.collective_window import Window, shapes_of, window
from fxpar.fusion.fewer_layers import FewerLayers, fewer_layers
from fxpar.fusion.lines_of_layers import NotOfLayers, lines_of_layers
from fxpar.fusion.overlap_candidates import (
    Machine,
    OverlapCandidate,
    dims_of,
    improved,
)
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.sequence_parallel import alternatives, candidates, described, lines_of
from fxpar.fusion.varying_axes import varying
from fxpar.fusion.verbs.balance import balances_of
from fxpar.fusion.verbs.overlap_attention import rings_of
from fxpar.passes import collective_nodes
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.order_collectives import Settings, may_differ
from fxpar.passes.simulate.simulate_step import Timeline, simulate
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import depending_on_tangents

# A schedule that saves no more than this share of a step is not worth its name.
_LEAST = 1e-3

# A schedule with which a step takes no more than so many times as long comes near.
_CLOSE = 1.25

# Chunks are tried where collectives of one kind are waited for half of this share of a
# step, buckets where all are for all of it.
_TRIED = 0.01

# In graphs of more nodes neither is tried.
_LARGE = 10_000

# So many ways to slice are kept for what comes after, besides the best and the plain.
_CASES = 3

# Of so many kinds of collectives, the largest, a later start is tried.
_SUNK = 4

# So many times chunks of a collective may pass beside the one that reads it.
_PAIRED = 2

# A step that takes no longer than this share of what its windows say is as said.
_AS_SAID = 1.005

# What is tried of forward and backward, each on top of what was taken before.
_SETTINGS: tuple[dict[str, int], ...] = (
    {"bucket": 4 << 20},
    {"bucket": 16 << 20},
    {"bucket": 64 << 20},
    {"ahead": 2},
    {"ahead": 4},
)

# By what buckets and gathers under way may raise a step's peak memory at most: a share
# of it, or bytes that are little to any device.
_ROOM, _LITTLE = 0.1, 8 << 20


@dataclass(frozen=True)
class Chosen:
    """``seconds``: of a step, before and after; ``peak``: bytes of memory. ``near``:
    what was thought of and left, and why. ``others``: schedules that were simulated and
    not taken, the fastest first."""

    schedule: Schedule
    graph: fx.Graph
    seconds: tuple[float, float]
    peak: tuple[int, int]
    near: tuple[str, ...] = ()
    others: tuple[Schedule, ...] = ()

    @property
    def note(self) -> str:
        """What a plan notes of it."""
        (seconds, then), (peak, after) = self.seconds, self.peak
        return (
            f"schedule: a step is predicted to take {then * 1e3:.4g} ms instead of "
            f"{seconds * 1e3:.4g} ms, and {after} bytes instead of {peak}"
        )


def choose_or_warn(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> Chosen | None:
    """As ``choose``; None, with a warning, if that fails: a program runs without."""
    try:
        return choose(graph, mesh, hardware)
    except Exception as error:
        failed(error)
        return None


def failed(error: Exception) -> None:
    """Say that no schedule could be chosen: the program runs as it is without. What
    the graph holds that no verb takes is a limit, anything else ours to mend."""
    if isinstance(error, ScheduleError) and not isinstance(error, Unexpected):
        what, where = f"no schedule is chosen: {error.what}", error.where
        fix = "leave it so, or set FXPAR_SCHEDULE=none, which does not look for one"
    else:
        what, where = f"no schedule is chosen: {type(error).__name__}: {error}", None
        fix = "report it, and set FXPAR_SCHEDULE=none"
    text = compose(what, where=where, fix=fix)
    warnings.warn(text, FxparWarning, stacklevel=2)


def choose(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> Chosen:
    """The best schedule found; an empty one if none pays."""
    with _old_objects_kept(), _torch.fake.shapes_alone():
        shapes = shapes_of(graph)
        state = _Search(shapes, hardware.on(mesh), hardware)
        before = state.now
        fewer = fewer_layers(shapes)
        if fewer is None or not _lines_for_layers(state, fewer):
            _lines(state)
        if len(graph.nodes) <= _LARGE or fewer is not None:
            _by_phase(state)
    return Chosen(
        state.schedule,
        apply(state.schedule, graph, state.mesh),
        (before.seconds, state.now.seconds),
        (before.peak_bytes, state.now.peak_bytes),
        tuple(dict.fromkeys(state.near)),
        state.others(),
    )


def _lines(state: _Search) -> None:
    """The best lines found."""
    cases, split = _sliced(state)
    if len(state.first.nodes) <= _LARGE:
        cases = _attended(state, cases)
        _overlapped(state, cases, split)
        _sunk(state)
        _hops_overlapped(state)


def _lines_for_layers(state: _Search, fewer: FewerLayers) -> bool:
    """The best lines for a graph with fewer layers, said for all; whether that can be
    done, and a step is better with them."""
    few = _Search(fewer.graph, state.mesh, state.hardware)
    _lines(few)
    try:
        found = [lines_of_layers(each, fewer) for each in few.by_seconds()]
    except NotOfLayers:
        return False
    best = lines_of_layers(few.schedule, fewer)
    if best and state.attempt(best, "what pays for some layers") is None:
        return False
    if best != state.schedule:
        return False
    stay = fewer.layers - fewer.removed
    state.near += [f"with {stay} of {fewer.layers} layers: {near}" for near in few.near]
    state.left += [each for each in found if each != best]
    return True


@contextmanager
def _old_objects_kept() -> Iterator[None]:
    """Collect garbage among new objects alone: candidates are many, each a graph, and
    what is there before is larger than all of them."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Search:
    """The schedule so far, and how long a step takes with it. ``simulated``: of each
    that may be tried on the mesh; ``left``: others that may, by what a step of fewer
    layers takes."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> None:
        self.first, self.mesh, self.hardware = graph, mesh, hardware
        self.machine = Machine(mesh, hardware)
        self.near: list[str] = []
        self.left: list[Schedule] = []
        self.simulated: dict[Schedule, Timeline] = {}
        self.formed: dict[Any, tuple[Window, OverlapCandidate]] = {}
        self._last: tuple[tuple[Line, ...], fx.Graph] | None = None
        self.schedule = Schedule()
        self.now = self.simulated[self.schedule] = self.timeline(self.schedule)

    def others(self) -> tuple[Schedule, ...]:
        """All that were simulated but the one taken, and those that need much more
        memory than it, the fastest first."""
        return tuple(dict.fromkeys([*self.by_seconds(), *self.left]))

    def by_seconds(self) -> tuple[Schedule, ...]:
        """Those simulated but the one taken, and those that need much more memory."""
        most = _with_room(self.now)
        found = sorted(self.simulated, key=lambda s: self.simulated[s].seconds)
        fits = (s for s in found if self.simulated[s].peak_bytes <= most)
        return tuple(s for s in fits if s != self.schedule)

    def graph(self, schedule: Schedule) -> fx.Graph:
        """After some lines, communication as steps."""
        return apply(schedule, self.first, self.mesh, lowered=False)

    def timeline(self, schedule: Schedule) -> Timeline:
        """A step as it would run. Raises ScheduleError."""
        if schedule in self.simulated:
            return self.simulated[schedule]
        run = as_run(self._lowered(schedule), settings=schedule.settings)
        return simulate(run, self.mesh, self.hardware)

    def may_differ(self, settings: Settings) -> bool:
        """Whether a step may be another than the one so far, with other settings."""
        graph = self._lowered(self.schedule)
        return may_differ(graph, self.schedule.settings, settings)

    def _lowered(self, schedule: Schedule) -> fx.Graph:
        """After the lines of a schedule, collectives as they run; the last one asked
        for is remembered."""
        if self._last is None or self._last[0] != schedule.lines:
            lowered = apply(schedule, self.first, self.mesh, lowered=True)
            self._last = schedule.lines, lowered
        return self._last[1]

    def attempt(self, schedule: Schedule, what: str) -> Timeline | None:
        """Take a schedule if a step is better with it than with the one so far; else
        note why not. None if it is refused."""
        try:
            then = self.timeline(schedule)
        except Unexpected:
            raise
        except ScheduleError as error:
            self.near.append(f"{what}: {error.what}")
            return None
        self.simulated[schedule] = then
        if not self.take(schedule, then) and then.seconds < _CLOSE * self.now.seconds:
            self.near.append(
                f"{what} would take {then.seconds * 1e3:.4g} ms a step instead of "
                f"{self.now.seconds * 1e3:.4g} ms, and {then.peak_bytes} bytes instead "
                f"of {self.now.peak_bytes}"
            )
        return then

    def take(self, schedule: Schedule, then: Timeline) -> bool:
        """Whether a step is better with a schedule, which is then the one so far."""
        if not _is_better(then, self.now):
            return False
        self.schedule, self.now = schedule, then
        return True


def _sliced(state: _Search) -> tuple[list[Schedule], set[str]]:
    """What may lie in slices, for all axes: the best schedules, the plain one too; and
    the all-reduces that were split in any."""
    cases, split = [Schedule()], set[str]()
    for axes in dict.fromkeys(_reduced_along(state.first)):
        found = {case: state.simulated[case] for case in cases}
        for case in cases:
            graph = state.graph(case) if case else state.first
            cuts, left = candidates(graph, state.mesh, axes, state.hardware)
            state.near += left
            for some in alternatives(cuts):
                split.update(node.name for one in some for node in one.split)
                lines = case + lines_of(some, len(case.lines))
                then = state.attempt(lines, described(axes, some))
                if then is not None:
                    found[lines] = then
        few = sorted(found, key=lambda case: found[case].seconds)[:_CASES]
        cases = list(dict.fromkeys([state.schedule, *few, Schedule()]))
    return cases, split


def _attended(state: _Search, cases: list[Schedule]) -> list[Schedule]:
    """The cases, and the best so far with a ring for each attention that reads gathered
    keys, with queries that change places, and with both."""
    graph, best = state.graph(state.schedule), state.schedule
    rings, balances = rings_of(graph), balances_of(graph, state.mesh)
    ways = {"rings of keys and values": rings, "attentions balanced": balances}
    if rings.lines and balances.lines:
        both = balances + rings_of(state.graph(best + balances))
        ways["lines of balanced rings"] = both
    for said, lines in ways.items():
        if lines.lines:
            then = state.attempt(best + lines, f"{len(lines.lines)} {said}")
            cases = cases if then is None else [best + lines, *cases]
    return cases


def _overlapped(
    state: _Search, cases: Sequence[Schedule], split: Collection[str]
) -> None:
    """Products in chunks beside their collectives, and rings, on top of each case; the
    one that is predicted to be best is simulated first."""
    found = []
    for case in cases:
        groups = _groups(state, case, split)
        saved = sum(group.saved for group in groups)
        found.append((state.simulated[case].seconds - saved, case, groups))
    for predicted, case, groups in sorted(found, key=lambda f: f[0]):
        if not groups or predicted >= state.now.seconds * (1 - _LEAST):
            continue
        every = Schedule(tuple(line for g in groups for line in g.lines.lines))
        then = state.attempt(case + every, f"{len(groups)} kinds beside compute")
        if then is not None and then.seconds <= _AS_SAID * predicted:
            continue
        schedule = case
        for group in groups:
            before = state.simulated[schedule].seconds
            then = state.attempt(schedule + group.lines, group.said)
            if then is not None and then.seconds < before:
                schedule += group.lines


def _sunk(state: _Search) -> None:
    """Collectives right before their first readers, where others that are waited for
    stand between and then have the network first."""
    exposed = _exposed(state.now)
    alike: dict[Any, list[fx.Node]] = {}
    for node in state.graph(state.schedule).nodes:
        if node.target in collective_nodes.COLLECTIVE and any(
            exposed.get(_key(other), 0.0) > _TRIED * state.now.seconds
            for other in _before_readers(node)
        ):
            alike.setdefault(_key(node), []).append(node)
    for kind, nodes in sorted(alike.items(), key=lambda one: -one[0][-1])[:_SUNK]:
        lines = Schedule.of("\n".join(f"sink({node.name})" for node in nodes))
        what = f"{len(nodes)} of {kind[0]} right before what reads them"
        state.attempt(state.schedule + lines, what)


def _before_readers(node: fx.Node) -> Iterator[fx.Node]:
    """The collectives between a node and its first reader."""
    first = min(node.users, default=node)
    while (node := node.next) < first:
        if node.target in collective_nodes.COLLECTIVE:
            yield node


def _hops_overlapped(state: _Search) -> None:
    """Collectives in chunks beside those over other axes that read them: all of a kind,
    or the last alone, behind which there is no compute to hide it."""
    for _ in range(_PAIRED):
        first, exposed = state.schedule, _exposed(state.now)
        alike: dict[Any, list[tuple[fx.Node, fx.Node]]] = {}
        for node in state.graph(first).nodes:
            before = _hop_before(node)
            if before and exposed.get(_key(node), 0.0) > _TRIED * state.now.seconds:
                kinds = _key(before), _key(node)
                alike.setdefault(kinds, []).append((before, node))
        for (kind, then), pairs in alike.items():
            for some in (pairs, pairs[-1:])[: len(pairs)]:
                for dim in dims_of(some[0][1], 2):
                    how = f"chunks=2, dim={dim}"
                    lines = (f"overlap({a.name}, {b.name}, {how})" for a, b in some)
                    what = f"{len(some)} of {kind[0]} beside the {then[0]} behind"
                    state.attempt(first + Schedule.of("\n".join(lines)), what)
        if state.schedule == first:
            return


def _hop_before(node: fx.Node) -> fx.Node | None:
    """The collective over other axes that a collective alone reads."""
    if node.target not in collective_nodes.COLLECTIVE:
        return None
    before = node.all_input_nodes[0]
    if before.target not in collective_nodes.COLLECTIVE or len(before.users) > 1:
        return None
    axes = collective_nodes.axes_of(node)
    return before if set(axes).isdisjoint(collective_nodes.axes_of(before)) else None


@dataclass(frozen=True)
class _Group:
    """``lines`` for all windows of one form, which save so many seconds."""

    lines: Schedule
    saved: float
    said: str


def _groups(state: _Search, case: Schedule, split: Collection[str]) -> list[_Group]:
    """Of a case, what could save most first. ``split``: all-reduces that other cases
    split, which are tried so here where collectives over other axes come next alone."""
    now = state.simulated[case]
    exposed = _exposed(now)
    if not exposed:
        return []
    graph = state.graph(case)
    varies, late = varying(graph), depending_on_tangents(graph)
    least = _TRIED * now.seconds / 2
    alike: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if (
            node.target in collective_nodes.COLLECTIVE
            and exposed.get(_key(node), 0.0) > least
        ):
            alike.setdefault(_key(node), []).append(node)
    out = []
    for key, nodes in alike.items():
        forms: dict[Any, list[Window]] = {}
        for node in nodes:
            alone, here = True, window(node, varies, late)
            if node.name in split and not here.others:
                alone, here = False, window(node, varies, late, both=False)
            forms.setdefault((here.form, alone), []).append(here)
        for form, same in forms.items():
            if form not in state.formed:
                most = exposed[key] / len(nodes)
                small = least / len(same) / 2
                how = {"split": form[1]}
                new = improved(same[0], state.machine, min(small, most), **how)
                state.formed[form] = same[0], new
            first, best = state.formed[form]
            if best.lines:
                lines = Schedule()
                for here in same:
                    lines += here.renamed(best.lines, first, f"of_{here.name}")
                said = f"{len(same)} of {best.lines.lines[-1]}"
                out.append(_Group(lines, best.seconds * len(same), said))
    return sorted(out, key=lambda group: -group.saved)


def _key(node: fx.Node) -> tuple[Any, ...]:
    """Kind, axes and bytes of a collective, as of an event."""
    read = node.all_input_nodes[0].meta["val"], node.meta["val"]
    size = max(map(nbytes_of, read))
    return node.target.__name__, collective_nodes.axes_of(node), size


def _exposed(now: Timeline) -> dict[tuple[Any, ...], float]:
    """Seconds that collectives are waited for, by kind, axes and bytes."""
    of = {event.name: event for event in now.events if event.axes}
    out: dict[tuple[Any, ...], float] = {}
    for event in now.events:
        if event.of is not None:
            begun = of[event.of]
            key = begun.kind, begun.axes, begun.bytes
            out[key] = out.get(key, 0.0) + event.duration
    return out


def _by_phase(state: _Search) -> None:
    """Sizes of buckets and gathers under way, where communication is waited for. More
    hold more: a step may not need much more memory for it."""
    most = _with_room(state.now)
    room = most - state.now.peak_bytes
    for change in _SETTINGS:
        if state.now.exposed_seconds < _TRIED * state.now.seconds:
            return
        settings = replace(state.schedule.settings, **change)
        if settings.bucket is not None:
            settings = replace(settings, gathers=min(settings.bucket, room))
        if not state.may_differ(settings):
            continue
        schedule = replace(state.schedule, settings=settings)
        then = state.timeline(schedule)
        if then.peak_bytes <= most:
            state.simulated[schedule] = then
            state.take(schedule, then)


def _with_room(now: Timeline) -> int:
    """Bytes that a step may take at most instead."""
    return now.peak_bytes + max(int(_ROOM * now.peak_bytes), _LITTLE)


def _is_better(then: Timeline, now: Timeline) -> bool:
    saved = 1 - then.seconds / now.seconds if now.seconds else 0.0
    return saved > _LEAST or (saved >= -_LEAST and then.peak_bytes < now.peak_bytes)


def _reduced_along(graph: fx.Graph) -> Iterator[tuple[str, ...]]:
    for node in graph.find_nodes(
        op="call_function", target=collective_nodes.all_reduce
    ):
        yield collective_nodes.axes_of(node)
