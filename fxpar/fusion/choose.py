"""Chooses a schedule for a local graph by cost.

In: a local graph with steps, the hardware. Out: a ``Chosen``: the schedule, the graph
after it, what a step is predicted to take before and after, and near misses with the
reason. Candidates come from ``sequence``, which is exact for the sum of seconds; one is
taken if the simulated step is not slower with it, memory deciding between equals. All
ranks choose alike: nothing here depends on the clock or on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion.beside import Site, sites
from fxpar.fusion.later import LATER, line_of, settings_of
from fxpar.fusion.rows import Rows, rows_of
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.sequence import Cut, Prices, at_most, cut
from fxpar.fusion.varying import varying
from fxpar.fusion.verbs import Unexpected, apply
from fxpar.passes import steps
from fxpar.passes.arithmetic import flops_of, is_view, nbytes_of, tensors_in
from fxpar.passes.phases import as_run
from fxpar.passes.schedule import DEFAULT, Settings
from fxpar.passes.simulate import Timeline, simulate
from fxpar.sharding.collectives import along
from fxpar.sharding.hardware import Hardware
from fxpar.sharding.mesh import Mesh

# A schedule that saves no more than this share of a step is not worth its name.
_LEAST = 1e-3

# What saves this share of what it costs comes near to pay.
_NEAR = 0.5

# A schedule with which a step takes no more than so many times as long comes near.
_CLOSE = 1.25

# Chunks are tried where they could save this share of a step.
_TRIED = 0.01

# So many kinds of products are tried in chunks, in graphs of at most so many nodes:
# every attempt simulates a step.
_GROUPS, _LARGE = 4, 10_000

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

# In so many chunks a product may run, tried in this order.
CHUNKS = (4, 2)


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


def choose(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> Chosen:
    """The best schedule found; an empty one if none pays."""
    state = _Search(graph, hardware.on(mesh), hardware)
    before = state.now
    for axes in dict.fromkeys(_reduced_along(graph)):
        candidates, left = _candidates(state.graph, state.mesh, axes, hardware)
        state.near += left
        # The best region by itself, all others, which layers repeat, together.
        for some in (candidates[:1], candidates[1:]):
            if some:
                state.attempt(
                    _lines(some, len(state.schedule.lines)), _said(axes, some)
                )
    if len(graph.nodes) <= _LARGE:
        _overlapped(state)
        _by_phase(state)
    return Chosen(
        state.schedule,
        state.graph,
        (before.seconds, state.now.seconds),
        (before.peak_bytes, state.now.peak_bytes),
        tuple(dict.fromkeys(state.near)),
        state.others(),
    )


class _Search:
    """The schedule so far, the graph after it, and how long a step takes with it.
    ``simulated``: of each that may be tried on the mesh."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> None:
        self.first = self.graph = graph
        self.mesh, self.hardware = mesh, hardware
        self.schedule = Schedule()
        self.near: list[str] = []
        self.now = _timeline(graph, mesh, hardware)
        self.simulated = {self.schedule: self.now}

    def others(self) -> tuple[Schedule, ...]:
        """All that were simulated but the one taken, and those that need much more
        memory than it, the fastest first."""
        most = _with_room(self.now)
        found = sorted(self.simulated, key=lambda s: self.simulated[s].seconds)
        fits = (s for s in found if self.simulated[s].peak_bytes <= most)
        return tuple(s for s in fits if s != self.schedule)

    def attempt(self, lines: Schedule, what: str) -> bool:
        """Add lines if a step is better with them; else note why not."""
        try:
            then = self.simulate(self.schedule + lines)
        except Unexpected:
            raise
        except ScheduleError as error:
            self.near.append(f"{what}: {error.what}")
            return False
        if then is not None and then.seconds < _CLOSE * self.now.seconds:
            self.near.append(
                f"{what} would take {then.seconds * 1e3:.4g} ms a step instead of "
                f"{self.now.seconds * 1e3:.4g} ms, and {then.peak_bytes} bytes instead "
                f"of {self.now.peak_bytes}"
            )
        return then is None

    def simulate(self, schedule: Schedule, most: int | None = None) -> Timeline | None:
        """Take a schedule if a step is better with it, and takes ``most`` bytes; else
        how its steps would be."""
        after = apply(schedule, self.first, self.mesh)
        then = _timeline(after, self.mesh, self.hardware, settings_of(schedule))
        if most is not None and then.peak_bytes > most:
            return then
        self.simulated[schedule] = then
        if not _is_better(then, self.now):
            return then
        self.schedule, self.graph, self.now = schedule, after, then
        return None


def _overlapped(state: _Search) -> None:
    """Products in chunks beside their collectives, those of equal shapes together, what
    could save most first."""
    groups: dict[Any, list[Site]] = {}
    work = _work(state.hardware)
    for site in sites(state.graph, work, _moved(state)):
        groups.setdefault(site.alike, []).append(site)
    least = _TRIED * state.now.seconds
    most = sorted(groups.values(), key=lambda g: -sum(s.seconds for s in g))
    for group in most[:_GROUPS]:
        if sum(site.seconds for site in group) / 2 < least:
            return
        for chunks in CHUNKS:
            lines = Schedule(tuple(site.line(chunks) for site in group))
            what = f"{len(group)} of {group[0].line(chunks)}"
            if state.attempt(lines, what):
                break


def _by_phase(state: _Search) -> None:
    """Sizes of buckets and gathers under way, where communication is waited for. More
    hold more: a step may not need much more memory for it."""
    most = _with_room(state.now)
    room = most - state.now.peak_bytes
    for change in _SETTINGS:
        if state.now.exposed_seconds < _TRIED * state.now.seconds:
            return
        settings = replace(settings_of(state.schedule), **change)
        if settings.bucket is not None:
            settings = replace(settings, gathers=min(settings.bucket, room))
        others = [line for line in state.schedule.lines if line.verb not in LATER]
        state.simulate(Schedule(tuple(others)) + line_of(settings), most)


def _with_room(now: Timeline) -> int:
    """Bytes that a step may take at most instead."""
    return now.peak_bytes + max(int(_ROOM * now.peak_bytes), _LITTLE)


def _moved(state: _Search) -> Callable[[fx.Node], float]:
    def moved(node: fx.Node) -> float:
        size = sum(map(nbytes_of, tensors_in(node.all_input_nodes[0].meta["val"])))
        kind = getattr(node.target, "__name__", "")
        return float(along(kind, state.mesh, steps.axes_of(node)).seconds(size))

    return moved


def _is_better(then: Timeline, now: Timeline) -> bool:
    saved = 1 - then.seconds / now.seconds if now.seconds else 0.0
    return saved > _LEAST or (saved >= -_LEAST and then.peak_bytes < now.peak_bytes)


def _reduced_along(graph: fx.Graph) -> Iterator[tuple[str, ...]]:
    for node in graph.find_nodes(op="call_function", target=steps.all_reduce):
        yield steps.axes_of(node)


def _candidates(
    graph: fx.Graph, mesh: Mesh, axes: tuple[str, ...], hardware: Hardware
) -> tuple[list[Cut], list[str]]:
    """(what pays by the sum of seconds, best first; why other regions do not). None
    shares a reduction with a better one."""
    prices = _prices(mesh, axes, hardware)
    regions = rows_of(graph, mesh, axes, varying(graph))
    cuts = sorted(((cut(rows, prices), rows) for rows in regions), key=_saved)
    taken: set[fx.Node] = set()
    out, near = [], []
    for one, rows in cuts:
        if one.split and one.sliced and taken.isdisjoint(one.split):
            out.append(one)
            taken.update(one.split)
            continue
        work, more = at_most(rows, prices)
        if taken.isdisjoint(rows.reduced) and work > _NEAR * more:
            near.append(
                f"{'+'.join(axes)}: {len(rows.reduced)} all-reduces could be split "
                f"and {len(rows.ops)} ops run on slices, which saves "
                f"{work * 1e6:.4g} us of them and takes {more * 1e6:.4g} us more of "
                f"communication"
            )
    return out, near


def _saved(pair: tuple[Cut, Rows]) -> float:
    return -pair[0].saved


def _prices(mesh: Mesh, axes: tuple[str, ...], hardware: Hardware) -> Prices:
    count = mesh.count(axes)

    def collective(kind: str, value: fx.Node) -> float:
        size = sum(map(nbytes_of, tensors_in(value.meta["val"])))
        before = size / count if kind == "all_gather" else size
        return float(along(kind, mesh, axes).seconds(before))

    return Prices(_work(hardware), collective, 1 / count)


def _work(hardware: Hardware) -> Callable[[fx.Node], float]:
    """Seconds of an op beyond its launch."""

    def work(op: fx.Node) -> float:
        if is_view(op) or steps.is_step(op):
            return 0.0
        values = tensors_in(op.meta["val"])
        size, dtype = sum(map(nbytes_of, values)), values[0].dtype
        return hardware.seconds(size, flops_of(op), dtype=dtype) - hardware.launch

    return work


def _lines(cuts: Sequence[Cut], start: int) -> Schedule:
    """Cuts as verbs: every all-reduce split, then all ops across the gathers."""
    out: list[Line] = []
    for found in cuts:
        gathers = []
        for node, dim in found.split.items():
            number = start + len(out)
            gathers.append(f"gather_{number}")
            gives = f"scatter_{number}", gathers[-1]
            out.append(Line("split", (node.name,), (("dim", dim),), gives))
        names = tuple(op.name for op in found.sliced)
        out.append(Line("reorder", (names, *gathers)))
    return Schedule(tuple(out))


def _said(axes: tuple[str, ...], cuts: Sequence[Cut]) -> str:
    split = sum(len(found.split) for found in cuts)
    sliced = sum(len(found.sliced) for found in cuts)
    return (
        f"{'+'.join(axes)}: splitting {split} all-reduces and running {sliced} ops on "
        "slices"
    )


def _timeline(
    graph: fx.Graph, mesh: Mesh, hardware: Hardware, settings: Settings = DEFAULT
) -> Timeline:
    """A step as it would run."""
    copy = apply(Schedule(), graph, mesh, lowered=True)
    return simulate(as_run(copy, settings=settings), mesh, hardware)
