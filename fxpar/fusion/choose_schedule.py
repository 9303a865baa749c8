"""Chooses a schedule for a local graph by predicted cost.

In: a local graph with steps, the mesh, the hardware. Out: a ``Chosen``: the schedule,
the graph after it, the predicted seconds of a step before and after, and near misses
with the reason. Never depends on the clock or on the rank, so that all ranks choose the
same.

Ops to run on slices come from ``sequence_parallel``, which is exact for the sum of
seconds, once for each dim that could be split; the best by simulation are kept. For
each of these ``overlap_candidates`` finds lines for every kind of collective, in a
window around it, and the whole step is simulated again. If layers repeat, all that is
done on a few (``fewer_layers``), and the lines found are repeated for all. A schedule
is taken if the step is not slower with it; between equals memory decides, then the
number of collectives. ``Attempts`` simulates schedules one after the other, and keeps
the best so far, and the others with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar._fast.python_memory import old_objects_kept
from fxpar.errors import (
    ScheduleError,
    warn,
)
from fxpar.fusion.apply_schedule import Unexpected, apply
from fxpar.fusion.fewer_layers import (
    FewerLayers,
    NotOfLayers,
    fewer_layers,
    lines_of_layers,
)
from fxpar.fusion.node_legality import UnevenOp, close, has_uneven_ops
from fxpar.fusion.overlap_candidates import (
    Machine,
    OverlapCandidate,
    Window,
    dims_of,
    improved,
    shapes_of,
    window,
)
from fxpar.fusion.schedule import OF_PERMUTES, PROPOSALS, Line, Schedule
from fxpar.fusion.sequence_parallel import alternatives, candidates, described, lines_of
from fxpar.fusion.varying_axes import varying
from fxpar.graph import collective_nodes
from fxpar.graph.builder import copy_of
from fxpar.passes.order.forward_backward import Orders, as_run, split_phases, tag
from fxpar.passes.simulate.launches import launches_of
from fxpar.passes.simulate.simulate_step import Event, Timeline, simulate
from fxpar.sharding.cost.collectives import FULL
from fxpar.sharding.cost.fused_kernels import Launches
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import has_any, names_of_ops
from fxpar.sharding.program import depending_on_tangents
from fxpar.units import difference, short_bytes, short_seconds

# Chunks are tried for a kind of collective whose waits take half of this share of a
# step, buckets if the waits of all take the whole share.
_TRIED = 0.01

# In graphs of more nodes neither chunks nor buckets are tried.
_LARGE = 10_000

# How many ways to slice are kept for later stages, besides the best and the plain one.
_CASES = 3

# For how many kinds of collectives, the largest, a later start is tried.
_SUNK = 4

# How many times chunks of a collective may overlap with the one that reads it.
_PAIRED = 2

# The windows predicted a step well if it takes no longer than this times their
# prediction.
_AS_SAID = 1.005

# The share of a step that the lines of a schedule must save in all, which is the error
# of a simulation. Settings need not: they make fewer calls, or the same ones earlier.
_PAYS = 0.01

# Settings tried for forward and backward, each on top of those taken before: bytes of a
# bucket; bytes of a bucket of what a backward gathers again at peak memory, as shares
# of the room there is; and gathers started ahead.
_BUCKETS = 4 << 20, 8 << 20, 16 << 20, 64 << 20
_AGAIN = 0.5, 0.75
_AHEAD = 2, 4


# A schedule that saves no more than this share of a step is not worth taking.
LEAST = 1e-3

# A schedule is a near miss if a step takes less than this many times as long with it.
_CLOSE = 1.25

# The share by which buckets and gathers in flight may raise a step's peak memory, and
# the share of a device's memory that they may always take: 1 MiB of 16 GiB.
_ROOM, LITTLE = 0.1, 2**-14


@dataclass(frozen=True)
class SimulatedRun:
    """Holds a local graph that was simulated."""

    graph: fx.Graph  # in the order in which it runs
    launches: Launches  # the launches of the graph
    timeline: Timeline


class Attempts:
    """Holds the schedule so far and the timeline of a step with it, and tries others.

    ``simulated``: the timeline with each schedule that may be tried on the mesh;
    ``left``: others that may, by the seconds of a step with fewer layers;
    ``near_misses``: notes on near misses. ``tags``: options of
    ``forward_backward.tag``; ``gathers``: whether parameters are gathered at all;
    ``local``: the graph to run, of which the first is a copy that has only shapes.
    """

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        hardware: Hardware,
        tags: Mapping[str, bool],
        local: fx.Graph | None = None,
    ) -> None:
        self.first, self.mesh, self.hardware = graph, mesh, hardware
        self.tags, self.local = tags, local or graph
        self.gathers = any(x.meta.get("fxpar_parameter") for x in graph.nodes)
        self.machine = Machine(mesh, hardware)
        self.near_misses: list[str] = []
        self.left: list[Schedule] = []
        self.simulated: dict[Schedule, Timeline] = {}
        self.formed: dict[Any, tuple[Window, OverlapCandidate]] = {}
        self._last: tuple[tuple[Line, ...], Orders] | None = None
        self._last_run: tuple[Schedule, SimulatedRun] | None = None
        self.schedule = Schedule()
        self.now = self.simulated[self.schedule] = self.timeline(self.schedule)
        self.run = self._run_of(self.schedule)

    def others(self) -> tuple[Schedule, ...]:
        """Return all simulated schedules but the one taken and those that need much
        more memory than it, the fastest first; then ``left``."""
        return tuple(dict.fromkeys([*self.by_seconds(), *self.left]))

    def most_bytes(self) -> int:
        """Return the peak that another schedule may have."""
        peak = self.now.peak_bytes
        return peak + max(int(_ROOM * peak), self.little())

    def little(self) -> int:
        """Return the bytes that another schedule may always take."""
        return int(LITTLE * self.hardware.memory)

    def by_seconds(self) -> tuple[Schedule, ...]:
        """Return the simulated schedules but the one taken and those that need much
        more memory, the fastest first."""
        most = self.most_bytes()
        schedules = sorted(self.simulated, key=lambda s: self.simulated[s].seconds)
        fits = (s for s in schedules if self.simulated[s].peak_bytes <= most)
        return tuple(s for s in fits if s != self.schedule)

    def graph(self, schedule: Schedule) -> fx.Graph:
        """Return the graph after some lines, communication as steps."""
        return apply(schedule, self.first, self.mesh, lowered=False)

    def timeline(self, schedule: Schedule) -> Timeline:
        """Return the simulated timeline of a step. Raises ScheduleError."""
        if schedule in self.simulated:
            return self.simulated[schedule]
        orders = self._lowered(schedule)
        graph = as_run(orders.parts, settings=schedule.settings)
        launches = launches_of(graph)
        line = simulate(graph, self.mesh, self.hardware, launches=launches)
        self._last_run = schedule, SimulatedRun(graph, launches, line)
        return line

    def _run_of(self, schedule: Schedule) -> SimulatedRun | None:
        """Return the simulation of a schedule, if it was the last one."""
        if self._last_run is None or self._last_run[0] != schedule:
            return None
        return self._last_run[1]

    def orders(self) -> Orders:
        """Return the orders that settings give the lines so far."""
        return self._lowered(self.schedule)

    def _lowered(self, schedule: Schedule) -> Orders:
        """Return the graph after the lines of a schedule, with collectives as they run,
        for settings to order. The last one asked for is remembered."""
        if self._last is None or self._last[0] != schedule.lines:
            lowered = apply(schedule, self.first, self.mesh, lowered=True)
            tag(lowered, **self.tags)
            self._last = schedule.lines, Orders(split_phases(lowered))
        return self._last[1]

    def attempt(self, schedule: Schedule, what: str) -> Timeline | None:
        """Take a schedule if a step is better with it than with the one so far; else
        note why not. Return its timeline; None if it is refused."""
        try:
            then = self.timeline(schedule)
        except Unexpected:
            raise
        except ScheduleError as error:
            self.near_misses.append(f"{what}: {error.what}")
            return None
        self.simulated[schedule] = then
        if not self.take(schedule, then) and then.seconds < _CLOSE * self.now.seconds:
            self.near_misses.append(
                f"{what}: a step would take "
                f"{difference(then.seconds, self.now.seconds, short_seconds)}, a rank "
                f"hold {difference(then.peak_bytes, self.now.peak_bytes, short_bytes)}"
            )
        return then

    def take(self, schedule: Schedule, then: Timeline) -> bool:
        """Take a schedule if a step is better with it. Return whether it was taken."""
        if not is_better(then, self.now):
            return False
        self.simulated[schedule] = then
        self.keep(schedule)
        return True

    def keep(self, schedule: Schedule) -> None:
        """Make a simulated schedule the current one."""
        self.schedule, self.now = schedule, self.simulated[schedule]
        self.run = self._run_of(schedule)


def is_better(then: Timeline, now: Timeline, least: float = LEAST) -> bool:
    """Return whether ``then`` saves more than the share ``least`` of the seconds of
    ``now``, or is not slower and saves memory, or calls of collectives."""
    saved = 1 - then.seconds / now.seconds if now.seconds else 0.0
    costs = [(x.peak_bytes, sum(t.calls for t in x.traffic)) for x in (then, now)]
    return saved > least or (saved >= -LEAST and costs[0] < costs[1])


@dataclass(frozen=True)
class Chosen:
    """Holds the best schedule of a local graph, and its predicted effect."""

    schedule: Schedule  # empty if none pays
    graph: fx.Graph  # the local graph with the schedule applied
    seconds: tuple[float, float]  # predicted seconds of a step, before and after
    peak: tuple[int, int]  # bytes of memory, before and after
    near_misses: tuple[str, ...] = ()  # near misses, each with the reason
    # Schedules that were simulated and not taken, the fastest first.
    others: tuple[Schedule, ...] = ()
    uneven_ops: int = 0  # number of ops on unequal shards, which stay as they are
    # The simulation of the schedule; None if it was not kept.
    run: SimulatedRun | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes of a plan on the schedule."""
        (seconds, then), (peak, after) = self.seconds, self.peak
        saved = (
            f"schedule: with it a step takes {difference(then, seconds, short_seconds)}"
            f" and a rank holds {difference(after, peak, short_bytes)}"
        )
        stay = f"schedule: {self.uneven_ops} ops on unequal shards stay as they are"
        return (saved,) * bool(self.schedule) + (stay,) * bool(self.uneven_ops)


def choose_or_warn(
    begin: Callable[[], Attempts], *, lines: bool = True
) -> Chosen | None:
    """Return the result of ``choose``; if it fails, warn and return None: a program
    runs without a schedule."""
    try:
        return choose(begin(), lines=lines)
    except Exception as error:
        failed(error)
        return None


def failed(error: Exception) -> None:
    """Warn that no schedule could be chosen and the program runs without. An op that no
    verb takes is a limit, anything else a bug of ours."""
    if isinstance(error, ScheduleError) and not isinstance(error, Unexpected):
        what, where = f"no schedule is chosen: {error.what}", error.where
        fix = "set FXPAR_SCHEDULE=none to look for none; numbers are right either way"
    else:
        what, where = f"no schedule is chosen: {type(error).__name__}: {error}", None
        fix = "report it, and set FXPAR_SCHEDULE=none"
    warn(what, where=where, fix=fix)


def begin(
    graph: fx.Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    keep_gathered: bool = False,
    save_readers: bool = False,
) -> Attempts:
    """Return the simulation of a local graph without a schedule, for ``choose``. The
    options are those of ``forward_backward.tag``."""
    if has_uneven_ops(graph):
        values = [node.meta.get("val") for node in graph.nodes]
        graph = copy_of(graph)
        close(graph, mesh, _torch.fake.mode_of(values))
    tags = {"keep_gathered": keep_gathered, "save_readers": save_readers}
    with old_objects_kept(), _torch.fake.shapes_alone():
        return Attempts(shapes_of(graph), hardware.on(mesh), hardware, tags, graph)


def choose(state: Attempts, *, lines: bool = True) -> Chosen:
    """Return the best schedule found; an empty one if none pays.

    state: as ``begin`` returns it. lines: whether to try verbs, or settings alone.
    """
    before, run_before, graph = state.now, state.run, state.local
    with old_objects_kept(), _torch.fake.shapes_alone():
        fewer = fewer_layers(state.first)
        if lines and (fewer is None or not _lines_for_layers(state, fewer)):
            _lines(state)
        if not is_better(state.now, before, _PAYS):
            state.keep(Schedule())
            state.run = run_before
        if len(graph.nodes) <= _LARGE or fewer is not None:
            _by_phase(state)
    return Chosen(
        state.schedule,
        apply(state.schedule, graph, state.mesh) if state.schedule.lines else graph,
        (before.seconds, state.now.seconds),
        (before.peak_bytes, state.now.peak_bytes),
        tuple(dict.fromkeys(state.near_misses)),
        state.others(),
        sum(isinstance(node.target, UnevenOp) for node in graph.nodes),
        state.run,
    )


def _lines(state: Attempts) -> None:
    """Try verbs, and leave the best lines found in ``state``."""
    cases, split = _sliced(state)
    if len(state.first.nodes) <= _LARGE:
        cases = _proposed(state, cases)
        _sunk(state)  # to overlap work that a ring would leave before its waits
        _overlapped(state, list(dict.fromkeys([state.schedule, *cases])), split)
        _sunk(state)
        _hops_overlapped(state)


def _lines_for_layers(state: Attempts, fewer: FewerLayers) -> bool:
    """Find the best lines on the graph with fewer layers and try them, repeated for all
    layers, in ``state``. Return whether they could be repeated and a step is better
    with them."""
    few = Attempts(fewer.graph, state.mesh, state.hardware, state.tags)
    _lines(few)
    try:
        best = lines_of_layers(few.schedule, fewer)
        others = [lines_of_layers(each, fewer) for each in few.by_seconds()]
    except NotOfLayers:
        return False
    if best and state.attempt(best, "what pays for some layers") is None:
        return False
    if best != state.schedule:
        return False
    stay = fewer.layers - fewer.removed
    state.near_misses += [
        f"with {stay} of {fewer.layers} layers: {miss}" for miss in few.near_misses
    ]
    state.left += [each for each in others if each != best]
    return True


def _sliced(state: Attempts) -> tuple[list[Schedule], set[str]]:
    """Try which ops run on slices, for all axes. Return the best schedules, the plain
    one too, and the names of all-reduces that were split in any."""
    cases, split = [Schedule()], set[str]()
    for axes in dict.fromkeys(_reduced_along(state.first)):
        attempts = {case: state.simulated[case] for case in cases}
        for case in cases:
            graph = state.graph(case) if case else state.first
            cuts, left = candidates(graph, state.mesh, axes, state.hardware)
            state.near_misses += left
            for some in alternatives(cuts):
                split.update(node.name for one in some for node in one.split)
                lines = case + lines_of(some, len(case.lines))
                then = state.attempt(lines, described(axes, some))
                if then is not None:
                    attempts[lines] = then
        few = sorted(attempts, key=lambda case: attempts[case].seconds)[:_CASES]
        cases = list(dict.fromkeys([state.schedule, *few, Schedule()]))
    return cases, split


def _proposed(state: Attempts, cases: list[Schedule]) -> list[Schedule]:
    """Try, on top of the best schedule, the lines that features propose. Return the
    cases with those that apply in front."""
    best = state.schedule
    names = names_of_ops(state.graph(best))
    propose = [each for ops, each in PROPOSALS if has_any(names, ops)]
    proposals = [item for each in propose for item in each(state).items()]
    for what, lines in proposals:
        if lines.lines:
            then = state.attempt(best + lines, f"{len(lines.lines)} {what}")
            cases = cases if then is None else [best + lines, *cases]
    return cases


def _overlapped(
    state: Attempts, cases: Sequence[Schedule], split: Collection[str]
) -> None:
    """Try products in chunks that overlap with their collectives, and rings, on top of
    each case, the case with the best prediction first."""
    predictions = []
    for case in cases:
        groups = _groups(state, case, split)
        saved = sum(group.saved for group in groups)
        predictions.append((state.simulated[case].seconds - saved, case, groups))
    for predicted, case, groups in sorted(predictions, key=lambda f: f[0]):
        if not groups or predicted >= state.now.seconds * (1 - LEAST):
            continue
        every = Schedule(tuple(line for g in groups for line in g.lines.lines))
        then = state.attempt(
            case + every, f"{len(groups)} kinds overlapped with compute"
        )
        if then is not None and then.seconds <= _AS_SAID * predicted:
            continue
        schedule = case
        for group in groups:
            before = state.simulated[schedule].seconds
            then = state.attempt(schedule + group.lines, group.what)
            if then is not None and then.seconds < before:
                schedule += group.lines


def _sunk(state: Attempts) -> None:
    """Try to move collectives right before their first readers where other collectives,
    which are waited for, are between and so get the network first."""
    exposed = _exposed(state.now)
    of_kind: dict[Any, list[fx.Node]] = {}
    for node in state.graph(state.schedule).nodes:
        if node.target in collective_nodes.COLLECTIVE and any(
            exposed.get(_key(other), 0.0) > _TRIED * state.now.seconds
            for other in _before_readers(node)
        ):
            of_kind.setdefault(_key(node), []).append(node)
    for kind, nodes in sorted(of_kind.items(), key=lambda one: -one[0][-1])[:_SUNK]:
        lines = Schedule.of("\n".join(f"sink({node.name})" for node in nodes))
        what = f"{len(nodes)} of {kind[0]} right before what reads them"
        state.attempt(state.schedule + lines, what)


def _before_readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the collectives between a node and its first reader."""
    first = min(node.users, default=node)
    while (node := node.next) < first:
        if node.target in collective_nodes.COLLECTIVE:
            yield node


def _hops_overlapped(state: Attempts) -> None:
    """Try collectives in chunks that overlap with those over other axes that read them:
    all of a kind, or the last alone, after which there is no compute to hide it."""
    for _ in range(_PAIRED):
        first, exposed = state.schedule, _exposed(state.now)
        of_kinds: dict[Any, list[tuple[fx.Node, fx.Node]]] = {}
        for node in state.graph(first).nodes:
            before = _hop_before(node)
            if before and exposed.get(_key(node), 0.0) > _TRIED * state.now.seconds:
                kinds = _key(before), _key(node)
                of_kinds.setdefault(kinds, []).append((before, node))
        for (kind, then), pairs in of_kinds.items():
            for some in (pairs, pairs[-1:])[: len(pairs)]:
                for dim in dims_of(some[0][1], 2):
                    how = f"chunks=2, dim={dim}"
                    lines = (f"overlap({a.name}, {b.name}, {how})" for a, b in some)
                    what = (
                        f"{len(some)} of {kind[0]} overlapped with the {then[0]} after"
                    )
                    state.attempt(first + Schedule.of("\n".join(lines)), what)
        if state.schedule == first:
            return


def _hop_before(node: fx.Node) -> fx.Node | None:
    """Return the collective over other axes that only ``node``, a collective too,
    reads."""
    if node.target not in collective_nodes.COLLECTIVE:
        return None
    before = node.all_input_nodes[0]
    if before.target not in collective_nodes.COLLECTIVE or len(before.users) > 1:
        return None
    axes = collective_nodes.axes_of(node)
    return before if set(axes).isdisjoint(collective_nodes.axes_of(before)) else None


@dataclass(frozen=True)
class _Group:
    """Holds lines for all windows of one form."""

    lines: Schedule  # lines of each window, one window after another
    saved: float  # seconds of a step that they could save together
    what: str  # number of windows, and the last line of one, as text


def _groups(state: Attempts, case: Schedule, split: Collection[str]) -> list[_Group]:
    """Return lines that overlap collectives of a case with compute, the largest saving
    first. ``split``: names of all-reduces that other cases split; an all-reduce of them
    that has no collective over other axes in its window gets a smaller window."""
    now = state.simulated[case]
    exposed = _exposed(now)
    if not exposed:
        return []
    graph = state.graph(case)
    varies, backward = varying(graph), depending_on_tangents(graph)
    least = _TRIED * now.seconds / 2
    of_kind: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if (
            node.target in collective_nodes.COLLECTIVE
            and exposed.get(_key(node), 0.0) > least
        ):
            of_kind.setdefault(_key(node), []).append(node)
    out = []
    for key, nodes in of_kind.items():
        forms: dict[Any, list[Window]] = {}
        for node in nodes:
            here = window(node, varies, backward)
            if node.name in split and not here.others:
                here = window(node, varies, backward, both=False)
            forms.setdefault(here.form, []).append(here)
        for form, same in forms.items():
            if form not in state.formed:
                most = exposed[key] / len(nodes)
                small = least / len(same) / 2
                new = improved(same[0], state.machine, min(small, most))
                state.formed[form] = same[0], new
            first, best = state.formed[form]
            if best.lines:
                lines = Schedule()
                for here in same:
                    lines += here.renamed(best.lines, first, f"of_{here.name}")
                what = f"{len(same)} of {best.lines.lines[-1]}"
                out.append(_Group(lines, best.seconds * len(same), what))
    if sum(s for (kind, *_), s in exposed.items() if kind == "permute") > least:
        args = graph, state.mesh, state.hardware, varies
        for each in (candidate for find in OF_PERMUTES for candidate in find(*args)):
            count = len(each.lines.lines)
            what = f"{count} of {each.lines.lines[-1]}"
            out.append(_Group(each.lines, each.seconds * count, what))
    return sorted(out, key=lambda group: -group.saved)


def _key(node: fx.Node) -> tuple[Any, ...]:
    """Return kind, axes and bytes of a collective, equal to those of its event."""
    read = node.all_input_nodes[0].meta["val"], node.meta["val"]
    size = max(map(nbytes_of, read))
    return node.target.__name__, collective_nodes.axes_of(node), size


def _exposed(now: Timeline) -> dict[tuple[Any, ...], float]:
    """Return seconds that collectives are waited for, by kind, axes and bytes."""
    of: dict[str, Event] = {}
    out: dict[tuple[Any, ...], float] = {}
    for event in now.events:
        if event.axes:
            of[event.name] = event
        if event.of is not None:
            begun = of[event.of]
            key = begun.kind, begun.axes, begun.bytes
            out[key] = out.get(key, 0.0) + event.duration
    return out


def _by_phase(state: Attempts) -> None:
    """Try sizes of buckets and numbers of gathers in flight, where communication is
    waited for, the smaller first and larger ones while they pay. More of them hold more
    memory: where parameters are gathered a share of the peak memory, but for a few
    bytes, counts as much as the same share of the seconds. Settings that give an order
    already tried are skipped."""
    most, few = state.most_bytes(), state.now.peak_bytes + state.little()
    room = most - state.now.peak_bytes
    first, *rest = (int(share * room) for share in _AGAIN)
    changes: list[list[dict[str, int]]] = [
        [{"bucket": size, "again": first} for size in _BUCKETS],
        [{"again": size} for size in rest],
        [{"ahead": count} for count in _AHEAD],
    ]
    if state.now.exposed_seconds < _TRIED * state.now.seconds:
        return
    orders = state.orders()
    orders_tried = {orders.of(state.schedule.settings)}
    for steps in changes:
        for change in steps:
            now = state.now
            if now.exposed_seconds < _TRIED * now.seconds:
                return
            settings = replace(state.schedule.settings, **change)
            if settings.again is not None:
                again = min(settings.again, settings.bucket or FULL)
                settings = replace(settings, again=again)
            order = orders.of(settings)
            if order in orders_tried:
                continue
            orders_tried.add(order)
            schedule = replace(state.schedule, settings=settings)
            then = state.timeline(schedule)
            if then.peak_bytes > most:
                break
            state.simulated[schedule] = then
            product, before = (x.seconds * max(x.peak_bytes, few) for x in (then, now))
            if (state.gathers and product >= before) or not state.take(schedule, then):
                break


def _reduced_along(graph: fx.Graph) -> Iterator[tuple[str, ...]]:
    for node in graph.find_nodes(
        op="call_function", target=collective_nodes.all_reduce
    ):
        yield collective_nodes.axes_of(node)
