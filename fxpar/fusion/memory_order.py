"""Repairs readers of a value whose memory layout differs from the value it replaced.

In: a local graph in which a verb has replaced values. Out: the same graph, traced anew
from there: fake values have the new strides, and an op that depends on the memory
layout of an operand (a view that its strides do not allow, ``as_strided``, random
numbers drawn one after the other) reads a copy in the old layout. Never changes a
number: all other ops depend on indices alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar._fast import known_values
from fxpar.errors import ScheduleError
from fxpar.fusion.node_legality import CallableRegion
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, value_of
from fxpar.passes.lower import restrided
from fxpar.sharding.op_facts import is_drawn_from_generator, op_facts_of
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.program import user_line


@dataclass(frozen=True)
class Replaced:
    """Is a value that replaced another."""

    # The node that is read now.
    node: fx.Node
    # The fake value that was read before.
    was: Any
    # Its readers.
    readers: tuple[fx.Node, ...]


def trace_anew(build: Builder, start: Replaced) -> None:
    """Give readers of the value, and readers of these in turn, their new fake values.
    Nodes must be in order. Raises ScheduleError on an op that cannot read it."""
    tracer = _Tracer(build, {start.node: start.was})
    if _strides(start.was) != _strides(start.node.meta["val"]):
        tracer.run(r for r in start.readers if start.node in r.all_input_nodes)


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
