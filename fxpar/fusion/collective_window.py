"""Cuts a collective and the compute around it out of a graph, so that trying lines for
that collective costs the same for a program of any size.

In: a local graph with steps, one of its collectives. Out: a ``Window``, a separate
graph of the ops computed for the collective alone, the collective, and the ops computed
from it up to the next collectives, including those over other axes. Its nodes have the
names they have in the whole graph, so that its lines apply there too; values it reads
from outside are inputs which vary over the mesh as those values do. Windows of equal
``form`` are priced once. Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import fx

from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.node_legality import CallableRegion
from fxpar.fusion.schedule import Line, Schedule
from fxpar.graph import collective_nodes
from fxpar.graph.graph_bodies import body_of
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.simulate_step import simulate
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import tensors_in
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

# Nodes looked at before and after a collective; nodes taken at most before it, after a
# gather, and after any other.
_FAR, _MOST, _READERS, _OTHERS = 200, 32, 32, 8

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
        arguments = node.args, node.kwargs
        if _is_plain(*arguments):
            args, kwargs = fx.node.map_arg(arguments, copies.__getitem__)
        else:
            args, kwargs = fx.node.map_aggregate(arguments, on_meta)
        copy = shapes.create_node(node.op, node.target, args, kwargs, node.name)
        copies[node] = copy
        copy.meta.update(node.meta)
        if "val" in node.meta:
            copy.meta["val"] = fx.node.map_aggregate(node.meta["val"], on_meta)
        if isinstance(node.target, CallableRegion):
            copy.target = type(node.target)(shapes_of(node.target.graph))
    return shapes


# Types of arguments that are the same on the meta device.
_PLAIN = {fx.Node, int, float, bool, str, type(None), torch.dtype}


def _is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments are nodes, and constants that are the same on any
    device."""
    for argument in (*args, *kwargs.values()):
        several = argument if isinstance(argument, (list, tuple)) else (argument,)
        if not _PLAIN.issuperset(map(type, several)):
            return False
    return True


def window(
    node: fx.Node, varies: Varies, backward: Collection[fx.Node], *, both: bool = True
) -> Window:
    """Return the window around one collective.

    backward: nodes of the backward; a window is of the forward or of the backward.
    both: take as many nodes after any collective as after a gather.
    """
    most = _READERS if both or node.target is collective_nodes.all_gather else _OTHERS
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
