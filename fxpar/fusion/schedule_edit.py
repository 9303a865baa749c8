"""A local graph while a schedule is applied to it: what every verb gets to see.

``Edit`` holds the graph, in which all communication is a step, the names that lines of
the schedule gave, and how to build. ``lift`` makes steps of the collectives of a graph
that was lowered, or written by hand. Verbs change the graph through it alone. It is a
copy: a verb that raises ``ScheduleError`` may leave it half changed, and nobody reads
it then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import ScheduleError
from fxpar.fusion import node_legality
from fxpar.fusion.memory_order import Replaced, trace_anew
from fxpar.fusion.varying_axes import varying
from fxpar.graph import (
    collective_nodes,
    custom_ops,
)
from fxpar.graph.builder import Builder
from fxpar.passes.lower import LOWERINGS
from fxpar.passes.writes_as_results import Write
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import user_line

c10d = torch.ops._c10d_functional

Axes = tuple[str, ...]


@dataclass
class Edit:
    """A local graph to which a schedule is applied, line by line."""

    # Changed in place.
    graph: fx.Graph
    # Makes new nodes in it; holds the mesh.
    build: Builder
    # Inputs that may be kept in slices.
    permit: frozenset[str] = frozenset()
    # Whether the graphs it exchanges messages with are at hand, to be changed alike.
    staged: bool = False
    # What keeps its order, as of ``order``.
    ordered: Counter[str] = field(default_factory=Counter)
    # What the last results are written to.
    written: tuple[Write, ...] = ()
    # Values that a verb has put in the place of others.
    replaced: list[Replaced] = field(default_factory=list)
    # What lines of the schedule call nodes.
    names: dict[str, fx.Node] = field(default_factory=dict)
    # Nodes by name, as ``look`` saw them.
    _index: dict[str, fx.Node] = field(default_factory=dict)

    @property
    def mesh(self) -> Any:
        return self.build.mesh

    def node(self, name: str) -> fx.Node:
        """The node that a line means. Raises ScheduleError if there is none."""
        target = self.names.get(name)
        node = self._index.get(target.name if target is not None else name)
        if node is not None and target in (None, node):
            return node
        near = [
            candidate
            for candidate in self._index
            if name.rstrip("_0123456789") in candidate
        ]
        raise ScheduleError(
            f"the graph has no node named {name!r}",
            fix=f"names are such as {(near or list(self._index))[:5]}",
        )

    def look(self) -> None:
        """Note what the graph's nodes are called now."""
        self._index = {node.name: node for node in self.graph.nodes}

    def call(self, node: fx.Node, name: str) -> None:
        """Give a node the name that a line gives it, if no other has it."""
        self.names[name] = node
        if all(other.name != name for other in self.graph.nodes):
            _torch.objects.rename(node, name)

    def varies(self) -> dict[fx.Node, frozenset[str]]:
        """Node -> axes it varies over."""
        return varying(self.graph)

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[Builder]:
        """What is built inside stands before ``node`` and comes from it."""
        with self.graph.inserting_before(node), self.build.at(node):
            yield self.build

    @contextmanager
    def after(self, node: fx.Node, origin: fx.Node | None = None) -> Iterator[Builder]:
        """What is built inside stands right behind ``node``."""
        with self.graph.inserting_before(node.next), self.build.at(origin or node):
            yield self.build

    def swap(self, old: fx.Node, new: fx.Node) -> None:
        """Readers of ``old`` read ``new``; ``old`` goes, and what only it read."""
        self.read_instead(old, new, [user for user in old.users if user is not new])
        self.erase([old])

    def read_instead(
        self, old: fx.Node, new: fx.Node, readers: Collection[fx.Node]
    ) -> None:
        """These readers of ``old`` read ``new``."""
        self.replaced.append(Replaced(new, old.meta.get("val"), tuple(readers)))
        for reader in readers:
            reader.replace_input_with(old, new)

    def trace_anew(self) -> None:
        """Give what reads a value in the place of another, which may lie in memory
        otherwise, fake values of now. Raises ScheduleError."""
        for replaced in self.replaced:
            trace_anew(self.build, replaced)
        self.replaced.clear()

    def erase(self, nodes: Iterable[fx.Node]) -> None:
        """Erase nodes that nobody reads, and of what only they read all but what has
        an effect besides."""
        pending, present = list(nodes), set(self.graph.nodes)
        while pending:
            node = pending.pop()
            is_read = node.users or node.op in ("placeholder", "output")
            if node in present and not is_read:
                pending += filter(node_legality.is_free, node.all_input_nodes)
                self.graph.erase_node(node)
                present.discard(node)


def refuse(verb: str, node: fx.Node, why: str, fix: str | None = None) -> ScheduleError:
    """The error of a verb that would change a number."""
    what = f"{verb}: {node.name} {why}"
    todo = fix or f"leave out the line, or see {verb} in docs/schedules.md"
    return ScheduleError(what, where=user_line(node), fix=todo)


def check_staged(verb: str, edit: Edit, node: fx.Node) -> None:
    """Raise ScheduleError if the other end of a message is not at hand."""
    if not edit.staged:
        raise refuse(
            verb,
            node,
            "would not fit what the other stage does",
            fix="give the graphs of all stages to fxpar.fusion.apply_stages",
        )


def lift(
    graph: fx.Graph, build: Builder, groups: Mapping[str, Axes] | None = None
) -> bool:
    """Make steps of the functional collectives of a graph, in place; whether there were
    any. ``groups``: axes of process groups by name; symbolic ones name their own. What
    no step stands for stays (``node_legality.admit`` refuses it).

    Raises ScheduleError on a group whose axes are unknown.
    """
    has_collectives = False
    for node in list(graph.nodes):
        if node.target not in _LIFT:
            continue
        axes = _axes(node, groups or {}, build.mesh)
        target, arguments = _LIFT[node.target]
        args = arguments(node)
        with graph.inserting_before(node), build.at(node):
            step = collective_nodes.step(build, target, node.args[0], *args, axes)
        if target is collective_nodes.recv:
            step.meta["fxpar_sent"] = frozenset(build.mesh.names)  # it may be anything
        name = node.name
        _replace_waited(graph, node, step)
        step.name = name  # which lines of a schedule call it by
        has_collectives = True
    if has_collectives:
        graph.lint()
    return has_collectives


def _axes(node: fx.Node, groups: Mapping[str, Axes], mesh: Mesh) -> Axes:
    """In mesh order, in which the members of every group stand."""
    name = custom_ops.group_of_call(node)
    if name not in groups and not name.startswith(custom_ops.GROUP_PREFIX):
        raise ScheduleError(
            f"{node.name} communicates in group {name!r}, whose axes are unknown",
            fix='pass groups={name: axes}, or trace with a group named "fxpar:tp"',
        )
    axes = tuple(groups[name]) if name in groups else custom_ops.group_axes(name)
    ordered = mesh.ordered(axes)
    if len(set(axes)) < len(axes):
        what = f"{node.name} communicates twice along one axis: {axes}"
        raise ScheduleError(what, fix=f"name axes of {mesh}, each once")
    return ordered


def _replace_waited(graph: fx.Graph, node: fx.Node, step: fx.Node) -> None:
    """Readers of the collective's result, behind one or more waits, read the step."""
    for user in list(node.users):
        if user.target is c10d.wait_tensor.default:
            _replace_waited(graph, user, step)
    node.replace_all_uses_with(step, delete_user_cb=lambda user: user is not step)
    graph.erase_node(node)


# functional collective -> the node function of its step, and how its arguments are read
_LIFT: dict[Any, tuple[Callable[..., Any], Callable[[fx.Node], tuple[Any, ...]]]] = {
    lowering.ops[0]: (collective_nodes.NODES[kind], lowering.arguments)
    for kind, lowering in LOWERINGS.items()
    if lowering.arguments is not None
}
