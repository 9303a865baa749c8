"""Every schedule of a few lines, tried: what ``auto`` is held against.

In: a block, a small program of one rank, and hardware. Out: the schedule of at most so
many lines with which a step is simulated to be fastest. Knows nothing of how ``auto``
searches: lines are made of the table of verbs and of all nodes that could be named, and
what is refused is refused by the verbs. Graphs that several schedules lead to are
followed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion.apply_schedule import Unexpected, apply
from fxpar.fusion.overlap_candidates import shapes_of
from fxpar.fusion.schedule import Schedule
from fxpar.graph import collective_nodes
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.simulate_step import Timeline, simulate
from fxpar.sharding.cost.hardware_table import Hardware, lookup
from fxpar.sharding.mesh import Mesh
from tests.helpers.toys import Toy

# Numbers that lines may have.
CHUNKS = (2, 3, 4, 8)
SETTINGS = ("buckets(bytes=0)", "buckets(bytes=67108864)", "prefetch(ahead=2)")

# Of the sets of nodes that a line could name: no more at one gather.
MOST = 48


@dataclass(frozen=True)
class Block:
    """``program`` takes inputs of these specs and of global shapes that ``shapes``
    gives for a size: large to be timed, small to be run."""

    name: str
    program: Callable[..., Any]
    mesh: str
    specs: tuple[str, ...]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    large: int
    small: int

    def toy(self, size: int, dtype: torch.dtype) -> Toy:
        given = tuple(zip(self.specs, self.shapes(size), strict=True))
        return Toy(self.program, *given, mesh=self.mesh, dtype=dtype)


def graph_of(toy: Toy) -> fx.Graph:
    """Its communication as steps, as ``auto`` is given a graph; values are shapes."""
    return shapes_of(apply("", toy.before, toy.mesh, inputs=toy.specs, lowered=False))


def timeline(graph: fx.Graph, mesh: Mesh, hardware: Hardware, text: str) -> Timeline:
    """A step of a graph to which all lines but those for forward and backward were
    done."""
    lowered = apply("", graph, mesh, lowered=True)
    settings = Schedule.parse(text).settings
    return simulate(as_run(lowered, settings=settings), mesh, hardware)


def fastest(
    graph: fx.Graph, mesh: Mesh, hardware: Hardware, lines: int, kept: int | None = None
) -> tuple[float, str, int]:
    """(seconds, the schedule's text, how many graphs were timed) of the best schedule
    of at most so many lines. ``kept``: the last line comes on top of so many of the
    fastest schedules of one line less alone."""
    known = {form_of(graph): ""}
    best, count = (_seconds(graph, mesh, hardware, ""), ""), 1
    now: list[tuple[float, str, fx.Graph]] = [(best[0], "", graph)]
    for left in reversed(range(lines)):
        if left == 0:
            now = sorted(now, key=lambda one: one[0])[:kept]
        then = []
        for _, text, before in now:
            for line in every_line(before, mesh):
                try:
                    after = apply(line, before, mesh, lowered=False)
                except Unexpected:
                    raise
                except ScheduleError:
                    continue
                form = form_of(after)
                if form in known:
                    continue
                said = known[form] = f"{text}{line}\n"
                seconds = _seconds(after, mesh, hardware, "")
                best = min(best, (seconds, said))
                if left:
                    then.append((seconds, said, after))
                count += 1
            for line in SETTINGS:
                more = _seconds(before, mesh, hardware, line)
                best = min(best, (more, f"{text}{line}\n"))
                count += 1
        now = then
    return *best, count


def _seconds(graph: fx.Graph, mesh: Mesh, hardware: Hardware, text: str) -> float:
    return timeline(graph, mesh, hardware, text).seconds


def form_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Equal for graphs that differ in names alone."""
    place = {node: i for i, node in enumerate(graph.nodes)}

    def said(node: fx.Node) -> Any:
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")
        inside = getattr(node.target, "graph", None)
        of = str(node.target) if inside is None else form_of(inside)
        chunk = bool(node.meta.get("fxpar_chunk"))
        return node.op if node.op == "placeholder" else (of, str(args), chunk)

    return tuple(map(said, graph.nodes))


def every_line(graph: fx.Graph, mesh: Mesh) -> Iterator[str]:
    """All lines for a graph; verbs refuse most."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = [node for node in calls if node.target in collective_nodes.COLLECTIVE]
    for node in found:
        yield from _of_reduction(node, mesh)
        yield from (f"{verb}({node.name})" for verb in ("hoist", "sink", "drop"))
        yield from _reordered(node)
        yield from _overlapped(node)
    yield from _joined(found)
    yield from _cut(graph, mesh)
    for node in calls:
        for user in node.users:
            if user in calls:
                yield f"fuse([{node.name}, {user.name}])"


def _dims(node: fx.Node) -> range:
    value = node.meta["val"]
    return range(value.dim() if isinstance(value, torch.Tensor) else 0)


def _of_reduction(node: fx.Node, mesh: Mesh) -> Iterator[str]:
    if node.target is not collective_nodes.all_reduce:
        return
    for dim in _dims(node):
        yield f"split({node.name}, dim={dim})"
        for one, other in itertools.permutations(collective_nodes.axes_of(node), 2):
            line = f"inner={one}, outer={other}, dim={dim}"
            yield f"hierarchical({node.name}, {line})"


def _cut(graph: fx.Graph, mesh: Mesh) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "output" or node.target in collective_nodes.COLLECTIVE:
            continue
        for axis, dim in itertools.product(mesh.names, _dims(node)):
            yield f"cut({node.name}, axes={axis}, dim={dim})"


def _joined(found: list[fx.Node]) -> Iterator[str]:
    for size in (2, 3):
        for some in itertools.combinations(found, size):
            if len({node.target for node in some}) == 1:
                names = ", ".join(node.name for node in some)
                yield f"merge({names})"
                yield f"bucket([{names}])"


def _reordered(node: fx.Node) -> Iterator[str]:
    for some in itertools.islice(_regions(node), MOST):
        yield f"reorder([{', '.join(n.name for n in some)}], {node.name})"


def _regions(node: fx.Node) -> Iterator[list[fx.Node]]:
    """Sets of what a value leads to, each with what of it its nodes read."""
    reach = _reached(node, across=True)
    seen = {frozenset[fx.Node]()}
    rest = [frozenset[fx.Node]()]
    while rest:
        have = rest.pop(0)
        for more in reach:
            needs = {n for n in more.all_input_nodes if n in reach}
            larger = have | {more}
            if more not in have and needs <= have and larger not in seen:
                seen.add(larger)
                rest.append(larger)
                yield sorted(larger)


def _reached(node: fx.Node, across: bool = False) -> list[fx.Node]:
    """What is computed from a value, up to the next collectives. ``across``: those
    along other axes too."""
    found, at = {node}, node.next
    mine = set(collective_nodes.axes_of(node))
    while at.op != "output":
        stops = at.target in collective_nodes.COLLECTIVE
        if stops and across:
            stops = not mine.isdisjoint(collective_nodes.axes_of(at))
        if found.intersection(at.all_input_nodes) and not stops:
            found.add(at)
        at = at.next
    return sorted(found - {node})


def _overlapped(node: fx.Node) -> Iterator[str]:
    """With what comes before, back to the inputs, and with what comes behind."""
    before, rest = dict[fx.Node, None](), list(node.all_input_nodes)
    while rest:
        one = rest.pop()
        if one.op == "call_function" and one not in before:
            before[one] = None
            rest += one.all_input_nodes
    behind = _reached(node)
    products = [n for n in behind if "mm" in n.name]
    pairs = [(n.name, node.name) for n in before]
    pairs += [(node.name, n.name) for n in behind]
    if len(products) > 1:
        pairs.append((node.name, f"[{', '.join(n.name for n in products)}]"))
    hows = [f"ring={ways}" for ways in (1, 2)]
    for chunks, dim in itertools.product(CHUNKS, _dims(node)):
        hows.append(f"chunks={chunks}, dim={dim}")
    for (one, other), how in itertools.product(pairs, hows):
        yield f"overlap({one}, {other}, {how})"


def hardware_of(name: str) -> Hardware:
    """ "h100", or "slow": the same with a network of a twentieth."""
    found = lookup("h100")
    if name == "slow":
        levels = tuple(
            replace(x, bandwidth=x.bandwidth / 20, latency=x.latency * 3)
            for x in found.levels
        )
        return replace(found, levels=levels)
    return found
