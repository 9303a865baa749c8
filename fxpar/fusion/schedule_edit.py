"""Holds a local graph while a schedule is applied to it: all that a verb sees.

In: a copy of a local graph, whose communication is steps, or collectives of which
``lift`` makes steps if it was lowered, or written by hand. Out: an ``Edit``: the graph,
the names that lines of the schedule gave, and the builder. Verbs change the graph
through it alone; one that raises ``ScheduleError`` may leave it half changed, and it is
never read then.

Readers of a value whose memory layout differs from the value it replaced are traced
anew: their fake values have the new strides, and an op that depends on the memory
layout of an operand (a view that its strides do not allow, ``as_strided``, random
numbers drawn one after the other) reads a copy in the old layout. All other ops depend
on indices alone, so that no number changes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._fast import known_values
from fxpar.errors import ScheduleError
from fxpar.fusion import node_legality
from fxpar.fusion.node_legality import CallableRegion
from fxpar.fusion.varying_axes import varying
from fxpar.graph import (
    collective_nodes,
    custom_ops,
)
from fxpar.graph.builder import Builder, value_of
from fxpar.passes.lower import LOWERINGS, restrided
from fxpar.passes.writes_as_results import Write
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import is_drawn_from_generator, op_facts_of
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.program import user_line


@dataclass(frozen=True)
class Replaced:
    """Is a value that replaced another."""

    node: fx.Node  # the node that is read now
    was: Any  # the fake value that was read before
    readers: tuple[fx.Node, ...]  # its readers


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [x.stride() for x in tensors_of(value)]


class _Tracer:
    """Traces ops again. ``was``: the fake values that changed nodes had."""

    def __init__(self, build: Builder, was: dict[fx.Node, Any]) -> None:
        self.build, self.was = build, was
        self._copies: dict[fx.Node, fx.Node] = {}

    def run(self, readers: Any) -> None:
        """Trace readers of changed values again, in order, and readers of what changes
        then."""
        pending = list(dict.fromkeys(readers))
        queued = set(pending)
        heapify(pending)
        while pending:
            node = heappop(pending)
            before = node.meta.get("val")
            value = self._value(node)
            if _strides(before) == _strides(value):
                continue
            self.was[node], node.meta["val"] = before, value
            node.meta.pop("tensor_meta", None)
            for reader in node.users:
                if reader not in queued:
                    queued.add(reader)
                    heappush(pending, reader)

    def _value(self, node: fx.Node) -> Any:
        """Return the fake value of an op on its operands of now."""
        if isinstance(node.target, CallableRegion):
            return self._of_region(node)
        if node.target is operator.getitem:
            return value_of(node.args[0])[node.args[1]]
        if collective_nodes.is_step(node) or not _is_op(node):
            return node.meta.get("val")
        if not _is_by_strides(node) and not is_drawn_from_generator(node):
            args = value_of(node.args), value_of(node.kwargs)
            try:
                return known_values.result(self.build.fake_mode, node.target, *args)
            except (RuntimeError, ValueError):
                pass  # a view that strides do not allow
        self._lay_operands(node)
        return node.meta["val"]

    def _lay_operands(self, node: fx.Node) -> None:
        """Let an op read its operands in their old memory layout."""
        for operand in node.all_input_nodes:
            if operand not in self.was:
                continue
            like = self.was[operand]
            if operand not in self._copies:
                with self.build.before(node):
                    self._copies[operand] = restrided(self.build, operand, like)
            copy = self._copies[operand]
            dense = copy.meta["val"].stride() == like.stride()
            if _is_by_strides(node) and not dense:
                raise ScheduleError(
                    f"{node.name} reads {operand.name} by strides that skip memory",
                    where=user_line(node),
                    fix="index or slice the tensor instead of torch.as_strided",
                )
            node.replace_input_with(operand, copy)

    def _of_region(self, node: fx.Node) -> Any:
        graph = node.target.graph
        build = Builder(graph, self.build.fake_mode, self.build.mesh)
        inner = _Tracer(build, {})
        inputs = graph.find_nodes(op="placeholder")
        for read, placeholder in zip(node.args, inputs, strict=True):
            if read in self.was:
                inner.was[placeholder] = self.was[read]
                placeholder.meta["val"] = read.meta["val"]
        inner.run(reader for changed in inner.was for reader in changed.users)
        return tuple(value_of(graph.output_node().args[0]))


def _is_by_strides(node: fx.Node) -> bool:
    return op_facts_of(node.target).by_strides


def _is_op(node: fx.Node) -> bool:
    return _torch.objects.schema_of(node.target) is not None


c10d = torch.ops._c10d_functional

Axes = tuple[str, ...]


@dataclass
class Edit:
    """Is a local graph to which a schedule is applied, line by line."""

    graph: fx.Graph  # changed in place
    build: Builder  # makes new nodes in it; holds the mesh
    permit: frozenset[str] = frozenset()  # names of inputs that may be kept in slices
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
        """Give readers of replaced values, whose memory layout may differ, and readers
        of these in turn, new fake values. Nodes must be in order. Raises ScheduleError
        on an op that cannot read them."""
        for start in self.replaced:
            node, was = start.node, start.was
            if _strides(was) != _strides(node.meta["val"]):
                readers = (r for r in start.readers if node in r.all_input_nodes)
                _Tracer(self.build, {node: was}).run(readers)
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
