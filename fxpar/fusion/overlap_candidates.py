"""Finds the ways of ``overlap`` to run an op overlapping with its own collective.

``window`` cuts a collective and the compute around it out of a graph, so that trying
lines for that collective costs the same for a program of any size. In: a local graph
with steps, one of its collectives. Out: a ``Window``, a separate graph of the ops
computed for the collective alone, the collective, and the ops computed from it up to
the next collectives, including those over other axes. Its nodes have the names they
have in the whole graph, so that its lines apply there too; values it reads from outside
are inputs which vary over the mesh as those values do. Windows of equal ``form`` are
priced once.

``improved``. In: a window around one collective, with a product. Out: the lines with
which the window is simulated to be fastest. Tried for a product are, along each dim,
chunks in all numbers of ``CHUNKS`` that divide it, and rings in both directions,
with the product next to the collective, or with all ops from an earlier product on; an
all-reduce also as a reduce-scatter and a gather, each with ways of its own. A way is
not tried if a lower bound of its seconds, from sizes alone, shows that it cannot win.
Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import combinations, pairwise, product
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import tensors_in
from fxpar.errors import ScheduleError
from fxpar.fusion.apply_schedule import Unexpected, apply
from fxpar.fusion.node_legality import CallableRegion
from fxpar.fusion.schedule import Argument, Line, Schedule
from fxpar.fusion.verbs.overlap import between
from fxpar.graph import collective_nodes
from fxpar.graph.graph_bodies import body_of
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.simulate_step import simulate
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import bytes_of, is_contraction, is_view, kernel_seconds
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import followed
from fxpar.sharding.spec import Spec

# Nodes looked at before and after a collective; nodes taken at most before it or after
# a gather, and after another where windows are to be small.
_FAR, _MOST, _OTHERS = 200, 32, 8

# Passes that move collectives of parameters, which all seem to be in a window.
_OUTSIDE = ("bucket", "prefetch")

# Nodes that may end a window.
_MOVED = collective_nodes.RESHARDS

Varies = Mapping[fx.Node, frozenset[str]]


@dataclass(frozen=True)
class Window:
    """Holds a part of a graph around one collective, as a separate graph."""

    # Its inputs are what the part reads, its results what others read from it.
    graph: fx.Graph
    name: str  # name of the collective's node in ``graph``

    @property
    def collective(self) -> fx.Node:
        return next(node for node in self.graph.nodes if node.name == self.name)

    @property
    def others(self) -> list[fx.Node]:
        """Return the collectives over other axes, which read what is computed from this
        one."""
        collectives = (node for node in self.graph.nodes if node.target in _MOVED)
        return [node for node in collectives if node.name != self.name]

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Return a key that is equal for windows in which equal lines, but for names,
        do the same."""
        place = {node: i for i, node in enumerate(self.graph.nodes)}

        def form_of(node: fx.Node) -> Any:
            args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")
            values = tensors_in(node.meta.get("val"))
            shapes = tuple((tuple(v.shape), v.stride(), v.dtype) for v in values)
            body = body_of(node)
            target = str(node.target) if body is None else str(body.graph)
            target = "" if node.op == "placeholder" else target
            varies = node.meta.get("fxpar_spec") if node.op == "placeholder" else None
            return target, str(args), shapes, varies, node.name == self.name

        return tuple(map(form_of, self.graph.nodes))

    def after(self, lines: Schedule, name: str, mesh: Mesh) -> Window:
        """Return the window around the collective called ``name``, after some lines."""
        return Window(apply(lines, self.graph, mesh, lowered=False), name)

    def seconds(self, lines: Schedule, mesh: Mesh, hardware: Hardware) -> float:
        """Return the simulated seconds of the window alone, after some lines. Raises
        ScheduleError."""
        lowered = apply(lines, self.graph, mesh, lowered=True)
        simulated = simulate(as_run(lowered, disable=_OUTSIDE), mesh, hardware)
        return simulated.seconds

    def renamed(self, lines: Schedule, other: Window, suffix: str) -> Schedule:
        """Return lines for another window of this form as lines for this one. Names of
        their results get ``suffix``, so that no two windows give the same name."""
        pairs = zip(other.graph.nodes, self.graph.nodes, strict=True)
        names = {theirs.name: mine.name for theirs, mine in pairs}
        results = {name for line in lines.lines for name in line.gives}
        names |= {name: f"{name}_{suffix}" for name in results}

        def line(old: Line) -> Line:
            renamed = old.renamed(lambda name: names.get(name, name))
            return replace(renamed, gives=tuple(names[name] for name in old.gives))

        return Schedule(tuple(map(line, lines.lines)))


def shapes_of(graph: fx.Graph) -> fx.Graph:
    """Return a copy whose values are on the meta device, on which ops cost least:
    trying schedules needs shapes alone. Values of equal shape are one tensor."""
    shapes = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    empty = cache(partial(torch.empty_strided, device="meta"))

    def on_meta(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return copies[value]
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, torch.Tensor):
            size, stride = tuple(map(int, value.shape)), value.stride()
            return empty(size, stride, dtype=value.dtype)
        return value

    for node in graph.nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), on_meta)
        copy = shapes.create_node(node.op, node.target, args, kwargs, node.name)
        copies[node] = copy
        copy.meta.update(node.meta)
        if "val" in node.meta:
            copy.meta["val"] = fx.node.map_aggregate(node.meta["val"], on_meta)
        if isinstance(node.target, CallableRegion):
            copy.target = type(node.target)(shapes_of(node.target.graph))
    return shapes


def window(
    node: fx.Node, varies: Varies, backward: Collection[fx.Node], *, both: bool = True
) -> Window:
    """Return the window around one collective.

    backward: nodes of the backward; a window is of the forward or of the backward.
    both: take as many nodes after any collective as after a gather.
    """
    most = _MOST if both or node.target is collective_nodes.all_gather else _OTHERS
    members = _before(node, backward) | _after(node, backward, most)
    # The results of a region are read through its getitems alone.
    regions = [m for m in members if isinstance(m.target, CallableRegion)]
    members |= {item for region in regions for item in region.users}
    read = [m for m in members if any(user not in members for user in m.users)]
    return cut_out(members, read, node, varies)


def cut_out(
    members: Collection[fx.Node],
    results: Collection[fx.Node],
    node: fx.Node,
    varies: Varies,
) -> Window:
    """Return a window of ``members``, which hold the collective ``node`` and which no
    path leaves and enters again; it returns ``results``."""
    ordered = sorted(members)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for member in ordered:
        for read in member.all_input_nodes:
            if read in members or read in copies:
                continue
            if body_of(read) is not None:
                copies[read] = graph.node_copy(read)
            else:
                copies[read] = _input_like(graph, read, len(copies), varies)
    for member in ordered:
        copies[member] = graph.node_copy(member, copies.__getitem__)
    graph.output(tuple(copies[m] for m in sorted(results)))
    return Window(graph, copies[node].name)


def _input_like(graph: fx.Graph, node: fx.Node, i: int, varies: Varies) -> fx.Node:
    """Add an input that varies over the mesh as a node does."""
    placeholder = graph.placeholder(f"given_{i}")
    placeholder.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
    rank = next((v.dim() for v in tensors_in(node.meta.get("val"))), 0)
    partial = dict.fromkeys(sorted(varies[node]), "sum")
    placeholder.meta["fxpar_spec"] = Spec.of([()] * rank, partial)
    return placeholder


def _before(node: fx.Node, backward: Collection[fx.Node]) -> set[fx.Node]:
    """Return the collective, and the ops since the collectives before that are computed
    for it alone."""
    members, at = {node}, node.prev
    for _ in range(_FAR):
        if at.op in ("root", "placeholder"):
            break
        alone = bool(at.users) and members.issuperset(at.users)
        if alone and _can_join(at, node, backward) and len(members) < _MOST:
            members.add(at)
        at = at.prev
    return members


def _after(node: fx.Node, backward: Collection[fx.Node], most: int) -> set[fx.Node]:
    """Return the collective, and the ops computed from it up to the next collectives;
    with those of them over other axes, since both can run at once. No path leaves the
    set and enters it again."""
    members, outside, at = {node}, set[fx.Node](), node.next
    axes = set(collective_nodes.axes_of(node))
    for _ in range(_FAR):
        if at.op == "output":
            break
        read = at.all_input_nodes
        if not outside.isdisjoint(read):
            outside.add(at)
        elif not members.isdisjoint(read):
            room = (at in backward) == (node in backward) and len(members) < most
            ends = at.target in _MOVED and axes.isdisjoint(collective_nodes.axes_of(at))
            joins = _can_join(at, node, backward)
            if room and (joins or ends):
                members.add(at)
            if not (room and joins):
                outside.add(at)
        at = at.next
    return members


def _can_join(at: fx.Node, node: fx.Node, backward: Collection[fx.Node]) -> bool:
    same = (at in backward) == (node in backward)
    return (
        same
        and at.op == "call_function"
        and at.target not in collective_nodes.COLLECTIVE
    )


# Numbers of chunks in which a product may run.
CHUNKS = (2, 3, 4, 6, 8, 12, 16)

# Regions of more nodes after a gather run in chunks only up to their first products.
_LONG = 12

# A way that saves less than this share of a window is not worth trying.
_LEAST = 1e-3

_LAST = (
    collective_nodes.reduce_scatter,
    collective_nodes.all_reduce,
    collective_nodes.permute,
)


@dataclass(frozen=True)
class OverlapCandidate:
    """Holds the best lines for a window."""

    lines: Schedule  # empty if nothing saves enough
    seconds: float  # seconds that they save of the window, by its simulation


@dataclass(frozen=True)
class Machine:
    """Holds what prices depend on."""

    mesh: Mesh  # with the links of the hardware
    hardware: Hardware  # costs of ops on one device

    def transfer_seconds(self, node: fx.Node, share: float = 1.0) -> float:
        """Return seconds of a collective on a share of what ``node`` moves."""
        return collective_nodes.step_seconds(node, self.mesh, share)

    def hop_seconds(self, node: fx.Node, share: float) -> float:
        """Return seconds of a permute of a share of what ``node`` moves."""
        size = bytes_of(node.all_input_nodes[0])
        curve = along("permute", self.mesh, collective_nodes.axes_of(node))
        return float(curve.seconds(size * share))

    def work(self, node: fx.Node, parts: int = 1) -> float:
        """Return a lower bound of the seconds of one of ``parts`` equal parts of an
        op."""
        if collective_nodes.is_step(node):
            return 0.0
        launch = self.hardware.launch if is_contraction(node.target) else 0.0
        return launch + kernel_seconds(node, self.hardware, 1 / parts)

    def stages(self, region: Sequence[fx.Node], parts: int = 1) -> list[float]:
        """Return seconds of one of ``parts`` equal parts of each collective of a
        region."""
        collectives = (
            node for node in region if node.target in collective_nodes.COLLECTIVE
        )
        return [self.transfer_seconds(node, 1 / parts) for node in collectives]


def improved(window: Window, machine: Machine, least: float) -> OverlapCandidate:
    """Return the lines with which a window is fastest, and what they save; no lines if
    they save no more than ``least`` seconds."""
    mesh, hardware = machine.mesh, machine.hardware
    base = window.seconds(Schedule(), mesh, hardware)
    best = _best(window, machine, base, least)
    node = window.collective
    if node.target is not collective_nodes.all_reduce:
        return best
    reachable = machine.transfer_seconds(node)  # the most that overlapping saves
    for dim in dims_of(node):
        if reachable - best.seconds <= least:
            break
        gives = "scattered", "gathered"
        lines = Schedule((Line("split", (node.name,), (("dim", dim),), gives),))
        try:
            then = window.after(lines, "scattered", mesh)
            seconds = then.seconds(Schedule(), mesh, hardware)
            first = _best(then, machine, seconds, least)
            then = then.after(first.lines, "gathered", mesh)
            now = seconds - first.seconds
            second = _best(then, machine, now, least)
        except Unexpected:
            raise
        except ScheduleError:
            continue
        saved = base - now + second.seconds
        if saved > max(best.seconds, least):
            best = OverlapCandidate(lines + first.lines + second.lines, saved)
    return best


def _nested_ways(node: fx.Node, machine: Machine) -> Iterator[tuple[float, Schedule]]:
    """Yield the ways to run an all-reduce as one for the inner axes and one for the
    outer, which use separate links, with chunks that pass through one after the
    other."""
    now, starts = machine.transfer_seconds(node), list(_starts(node))
    for inner, outer in _halves(collective_nodes.axes_of(node)):
        for dim in dims_of(node, machine.mesh.count(inner)):
            steps = ("inner", "_and_".join(inner)), ("outer", "_and_".join(outer))
            gives = "scattered", "reduced", "gathered"
            options = (*steps, ("dim", dim))
            first = Line("hierarchical", (node.name,), options, gives)
            yield now - sum(_hops(node, machine, inner, outer, 1)), Schedule((first,))
            for (start, region), chunks in product(starts, CHUNKS):
                hops = _hops(node, machine, inner, outer, chunks)
                work = sum(machine.work(n) for n in region)
                part = sum(machine.work(n, chunks) for n in region)
                passes = max(max(hops), part) * (chunks - 1) + sum(hops) + part
                for along_dim in dims_of(node, chunks):
                    how = (("chunks", chunks), ("dim", along_dim))
                    second = Line("overlap", (start, "gathered"), how)
                    yield now + work - passes, Schedule((first, second))


def _hops(
    node: fx.Node,
    machine: Machine,
    inner: tuple[str, ...],
    outer: tuple[str, ...],
    chunks: int,
) -> tuple[float, float, float]:
    """Return seconds of each of the three collectives of a chunk."""
    mesh = machine.mesh
    size = bytes_of(node) / chunks
    part = size / mesh.count(inner)
    return (
        float(along("reduce_scatter", mesh, inner).seconds(size)),
        float(along("all_reduce", mesh, outer).seconds(part)),
        float(along("all_gather", mesh, inner).seconds(part)),
    )


def _halves(
    axes: tuple[str, ...],
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield all (inner, outer) partitions of axes."""
    for size in range(1, len(axes)):
        for inner in combinations(axes, size):
            yield inner, tuple(axis for axis in axes if axis not in inner)


def _best(
    window: Window, machine: Machine, base: float, least: float
) -> OverlapCandidate:
    """Return the best way to run the collective; no lines if it saves no more than
    ``least`` of ``base`` seconds."""
    best = OverlapCandidate(Schedule(), 0.0)
    least = max(least, _LEAST * base)
    ways = _ways(window.collective, machine)
    for most, lines in sorted(ways, key=lambda way: -way[0]):
        if most <= max(best.seconds, least):
            break
        try:
            seconds = window.seconds(lines, machine.mesh, machine.hardware)
        except Unexpected:
            raise
        except ScheduleError:
            continue
        if base - seconds > max(best.seconds, least):
            best = OverlapCandidate(lines, base - seconds)
    return best


def _ways(node: fx.Node, machine: Machine) -> Iterator[tuple[float, Schedule]]:
    """Yield (seconds that it saves at most, lines) for each way to run a
    collective overlapping with compute."""
    if node.target is collective_nodes.all_gather:
        for ends, region in _ends(node):
            names: Argument = ends[0] if len(ends) == 1 else ends
            yield from _in_parts(node, (node.name, names), region, machine)
    elif node.target in _LAST:
        for start, region in _starts(node):
            yield from _in_parts(node, (start, node.name), region, machine)
    if node.target is collective_nodes.all_reduce:
        yield from _nested_ways(node, machine)


def _in_parts(
    node: fx.Node,
    arguments: tuple[Argument, ...],
    region: Sequence[fx.Node],
    machine: Machine,
) -> Iterator[tuple[float, Schedule]]:
    """Yield the ways to run one region in chunks or in a ring."""
    now = machine.transfer_seconds(node) + sum(map(machine.work, region))
    now += sum(machine.stages(region))
    for chunks in CHUNKS:
        hop = machine.transfer_seconds(node, 1 / chunks)
        most = now - _at_least(region, machine, chunks, chunks, hop)
        for dim in dims_of(node, chunks):
            options = (("chunks", chunks), ("dim", dim))
            yield most, Schedule((Line("overlap", arguments, options),))
    if node.target in (collective_nodes.all_gather, collective_nodes.reduce_scatter):
        count = machine.mesh.count(collective_nodes.axes_of(node))
        share = 1.0 if node.target is collective_nodes.all_gather else 1 / count
        hop = machine.hop_seconds(node, share)
        most = now - _at_least(region, machine, count, count - 1, hop)
        yield most, Schedule((Line("overlap", arguments, (("ring", 2),)),))


def _at_least(
    region: Sequence[fx.Node], machine: Machine, parts: int, hops: int, hop: float
) -> float:
    """Return a lower bound of the seconds of a region in ``parts`` parts, overlapping
    with ``hops`` collectives of ``hop`` seconds each: either runs without a break, but
    for the first or last part of the other; or the longest of the collectives within
    the region does."""
    work = sum(machine.work(node, parts) for node in region)
    slowed = machine.hardware.beside * hop
    stages = machine.stages(region, parts)
    alone = max(hops * hop + work, parts * work + hops * slowed + (hop - slowed))
    return max(alone + sum(stages), parts * max(stages, default=0.0) + work)


def dims_of(node: fx.Node, chunks: int = 1) -> list[int]:
    """Return the dims of a collective that ``chunks`` divides on both sides."""
    sides = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    pairs = enumerate(zip(*sides, strict=True))
    return [d for d, sizes in pairs if all(n and n % chunks == 0 for n in sizes)]


def _starts(node: fx.Node) -> Iterator[tuple[str, list[fx.Node]]]:
    """Yield (a product, the nodes from it up to the collective, without the
    collective)."""
    before = sorted(_before(node, ()) - {node})
    for i, start in enumerate(reversed(before)):
        if is_contraction(start.target):
            yield start.name, before[len(before) - 1 - i :]


def _ends(node: fx.Node) -> Iterator[tuple[tuple[str, ...], list[fx.Node]]]:
    """Yield (names of the last readers of a gather, the nodes from the gather to
    them)."""
    neighbors = _neighbors(node)
    if neighbors:
        yield tuple(n.name for n in neighbors), neighbors
    if len(neighbors) > 1:
        for one in neighbors:
            yield (one.name,), [one]
    after = _after(node, (), _MOST)
    inside = {n for n in after if n.target not in collective_nodes.COLLECTIVE}
    region = sorted(inside)
    last = [n for n in region if any(u not in inside for u in n.users)]
    products = any(is_contraction(n.target) for n in region)
    if products and last and last != neighbors and len(region) <= _LONG:
        yield tuple(n.name for n in last), region
    for one, other in pairwise(neighbors):
        if len(neighbors) > 2:
            yield (one.name, other.name), [one, other]
    # Collectives over other axes that read what is computed from the gather.
    users = {user for one in (node, *region) for user in one.users}
    for end in sorted(u for u in users if u.target in collective_nodes.COLLECTIVE):
        yield (end.name,), between((node,), (end,))


def _neighbors(node: fx.Node) -> list[fx.Node]:
    """Return the products that read the gathered value, directly or through views."""
    readers = followed(
        node, lambda x: x.users, lambda x: x.op == "call_function" and is_view(x)
    )
    return sorted({reader for reader in readers if is_contraction(reader.target)})
