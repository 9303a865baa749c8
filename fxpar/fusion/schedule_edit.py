"""Holds a local graph while a schedule is applied to it: all that a verb sees.

In: a copy of a local graph, whose communication is steps, or collectives of which
``lift`` makes steps if it was lowered, or written by hand. Out: an ``Edit``: the graph,
the names that lines of the schedule gave, and the builder. Verbs change the graph
through it alone; one that raises ``ScheduleError`` may leave it half changed, and it is
never read then.
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
    """Is a local graph to which a schedule is applied, line by line."""

    # Changed in place.
    graph: fx.Graph
    # Makes new nodes in it; holds the mesh.
    build: Builder
    # Names of inputs that may be kept in slices.
    permit: frozenset[str] = frozenset()
    # Whether the graphs it exchanges messages with are at hand, to be changed equally.
    staged: bool = False
    # Number of nodes that keep their order, by kind (``node_legality.number``).
    ordered: Counter[str] = field(default_factory=Counter)
    # Writes to inputs; the values written are the last results.
    written: tuple[Write, ...] = ()
    # Values that a verb has replaced, until ``trace_anew``.
    replaced: list[Replaced] = field(default_factory=list)
    # Nodes by the names that lines of the schedule gave.
    names: dict[str, fx.Node] = field(default_factory=dict)
    # Nodes by name, as of the last ``look``.
    _index: dict[str, fx.Node] = field(default_factory=dict)

    @property
    def mesh(self) -> Any:
        return self.build.mesh

    def node(self, name: str) -> fx.Node:
        """Return the node that a line names. Raises ScheduleError if there is none."""
        target = self.names.get(name)
        node = self._index.get(target.name if target is not None else name)
        if node is not None and target in (None, node):
            return node
        similar = [
            candidate
            for candidate in self._index
            if name.rstrip("_0123456789") in candidate
        ]
        raise ScheduleError(
            f"the graph has no node named {name!r}",
            fix=f"names are such as {(similar or list(self._index))[:5]}",
        )

    def look(self) -> None:
        """Note the present names of the graph's nodes."""
        self._index = {node.name: node for node in self.graph.nodes}

    def call(self, node: fx.Node, name: str) -> None:
        """Give a node the name that a line gives it, if no other has it."""
        self.names[name] = node
        if all(other.name != name for other in self.graph.nodes):
            _torch.objects.rename(node, name)

    def varies(self) -> dict[fx.Node, frozenset[str]]:
        """Return node -> axes it varies over."""
        return varying(self.graph)

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[Builder]:
        """Build, within the context, nodes right before ``node`` that originate from
        it."""
        with self.graph.inserting_before(node), self.build.at(node):
            yield self.build

    @contextmanager
    def after(self, node: fx.Node, origin: fx.Node | None = None) -> Iterator[Builder]:
        """Build, within the context, nodes right after ``node`` that originate from it,
        or from ``origin``."""
        with self.graph.inserting_before(node.next), self.build.at(origin or node):
            yield self.build

    def swap(self, old: fx.Node, new: fx.Node) -> None:
        """Let all readers of ``old`` read ``new``, and erase ``old`` with what only it
        read."""
        self.read_instead(old, new, [user for user in old.users if user is not new])
        self.erase([old])

    def read_instead(
        self, old: fx.Node, new: fx.Node, readers: Collection[fx.Node]
    ) -> None:
        """Let ``readers`` of ``old`` read ``new``."""
        self.replaced.append(Replaced(new, old.meta.get("val"), tuple(readers)))
        for reader in readers:
            reader.replace_input_with(old, new)

    def trace_anew(self) -> None:
        """Give readers of replaced values, whose memory layout may differ, new fake
        values. Raises ScheduleError."""
        for replaced in self.replaced:
            trace_anew(self.build, replaced)
        self.replaced.clear()

    def erase(self, nodes: Iterable[fx.Node]) -> None:
        """Erase nodes that nobody reads, and nodes that only these read, except those
        with another effect."""
        pending, present = list(nodes), set(self.graph.nodes)
        while pending:
            node = pending.pop()
            is_read = node.users or node.op in ("placeholder", "output")
            if node in present and not is_read:
                pending += filter(node_legality.is_free, node.all_input_nodes)
                self.graph.erase_node(node)
                present.discard(node)


def refuse(verb: str, node: fx.Node, why: str, fix: str | None = None) -> ScheduleError:
    """Return the error of a verb that would change a number."""
    what = f"{verb}: {node.name} {why}"
    page = "docs/reference/schedule_language.md"
    todo = fix or f"leave out the line, or see {verb} in {page}"
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
    """Make steps of the functional collectives of a graph, in place. Return whether
    there were any.

    groups: axes of process groups by name; symbolic ones name their own. Collectives
    for which there is no step stay (``node_legality.admit`` refuses them).

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
        step.name = name  # lines of a schedule call it by that name
        has_collectives = True
    if has_collectives:
        graph.lint()
    return has_collectives


def _axes(node: fx.Node, groups: Mapping[str, Axes], mesh: Mesh) -> Axes:
    """Return the axes of a collective in mesh order, which is the order of the members
    of every group."""
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
    """Let readers of the collective's result, after one or more waits, read the
    step."""
    for user in list(node.users):
        if user.target is c10d.wait_tensor.default:
            _replace_waited(graph, user, step)
    node.replace_all_uses_with(step, delete_user_cb=lambda user: user is not step)
    graph.erase_node(node)


# functional collective -> the node function of its step, and a reader of its arguments
_LIFT: dict[Any, tuple[Callable[..., Any], Callable[[fx.Node], tuple[Any, ...]]]] = {
    lowering.ops[0]: (collective_nodes.NODES[kind], lowering.arguments)
    for kind, lowering in LOWERINGS.items()
    if lowering.arguments is not None
}
