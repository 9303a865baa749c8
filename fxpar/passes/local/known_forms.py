"""Local forms of ops, known from an op of the same kind on values of the same form.

Layers that repeat make the same nodes again and again. Where a local form looks at
values alone (``local_ops.is_by_values``), the nodes that it appends are a function of
the op's kind, rule and strategy, and of the local values that it reads, with those that
they show in other shapes: these are the key. The first op of a kind is made local; of
its nodes those of the others are copies, on what they read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch import known_values
from fxpar._torch.node_copies import add_node
from fxpar.passes.builder import OURS, PROVENANCE, Builder
from fxpar.passes.local.local_ops import Local, is_by_values, local_op
from fxpar.sharding.program import Op, Program
from fxpar.sharding.rules.op_facts import op_facts_of
from fxpar.sharding.strategy import Strategy

# What is noted of a node that was appended.
_NOTED = {"val", "fxpar_origin", *PROVENANCE, *OURS}


class _NoKind(Exception):
    """A call is of no kind that is kept."""


@dataclass(frozen=True)
class _NodeForm:
    """A node that a local form appended, as it was."""

    # Others stand for it among the arguments of the others.
    node: fx.Node
    # Of those that it was made with.
    args: tuple[Any, ...]
    # As ``args``, by name.
    kwargs: dict[str, Any]
    # Of its value, as ``known_values`` has it.
    value: Any
    # Whether it says where it comes from.
    is_stamped: bool


@dataclass(frozen=True)
class _LocalForm:
    """What the first op of a kind was made."""

    # What it read, as ``KnownForms._near`` says.
    near: tuple[fx.Node, ...]
    # In order.
    nodes: tuple[_NodeForm, ...]
    # Of these, or of what it read: the node of the result, or several.
    result: Any


class KnownForms:
    """Local forms of one local graph."""

    def __init__(self, build: Builder, program: Program) -> None:
        self.build, self.program = build, program
        self._forms: dict[Any, _LocalForm | None] = {}
        self._near_nodes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        # Of local nodes, equal for values of one form that show values of one form.
        self._numbers: dict[fx.Node, int] = {}
        self._number_of: dict[Any, int] = {}

    def local_op(self, node: fx.Node, op: Op, strategy: Strategy, local: Local) -> Any:
        """As ``local_ops.local_op``."""
        try:
            key, near = self._key(node, op, strategy, local)
        except _NoKind:
            return local_op(self.build, node, op, self.program, strategy, local)
        form = self._forms.get(key)
        if form is not None:
            return self._copied(form, near)
        last = next(iter(reversed(self.build.graph.nodes)), None)
        result = local_op(self.build, node, op, self.program, strategy, local)
        if key not in self._forms:
            self._forms[key] = self._form(near, last, result)
        return result

    def _key(
        self, node: fx.Node, op: Op, strategy: Strategy, local: Local
    ) -> tuple[Any, tuple[fx.Node, ...]]:
        """Equal for calls whose local nodes are alike, and what a call reads. Raises
        _NoKind."""
        if not is_by_values(op.target, op.rule, strategy):
            raise _NoKind
        near: list[fx.Node] = []
        numbers: list[int] = []
        for operand in map(local, node.all_input_nodes):
            if not isinstance(operand, fx.Node):
                raise _NoKind
            numbers.append(self._number(operand))
            near += self._near(operand)
        operands = op.operands
        read_at = tuple(map(operands.index, operands))
        same = tuple(map(near.index, near)) if len(near) > 1 else ()
        key = op.kind, op.rule, strategy, read_at, same, tuple(numbers)
        return key, tuple(near)

    def _near(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """A local node, and what it shows in another shape, as ``Builder.reshape``
        looks for it."""
        near = self._near_nodes.get(node)
        if near is None:
            source = _shown(node)
            near = (node, *(self._near(source) if source is not None else ()))
            self._near_nodes[node] = near
        return near

    def _number(self, node: fx.Node) -> int:
        """Equal for local nodes that a form which looks at values may not tell apart.
        Raises _NoKind."""
        number = self._numbers.get(node)
        if number is None:
            value, source = node.meta.get("val"), _shown(node)
            if not isinstance(value, torch.Tensor):
                raise _NoKind
            facts = known_values.facts_of(value, self.build.fake_mode)
            if facts is None:
                raise _NoKind
            key = facts, None if source is None else self._number(source)
            number = self._number_of.setdefault(key, len(self._number_of))
            self._numbers[node] = number
        return number

    def _form(
        self, near: tuple[fx.Node, ...], last: fx.Node | None, result: Any
    ) -> _LocalForm | None:
        """What was appended behind ``last``; None if that is not known to be all."""
        present, nodes = set(near), list[_NodeForm]()
        behind = itertools.takewhile(
            lambda node: node is not last, reversed(self.build.graph.nodes)
        )
        for node in reversed(list(behind)):
            is_plain = not node.meta.keys() - _NOTED
            if not is_plain or not present.issuperset(node.all_input_nodes):
                return None
            read = _tensors_read(node)
            value_form = known_values.form_of(
                node.meta.get("val"), self.build.fake_mode, read
            )
            if value_form is None:
                return None
            stamped = "fxpar_origin" in node.meta
            nodes.append(_NodeForm(node, node.args, node.kwargs, value_form, stamped))
            present.add(node)
        results = result if isinstance(result, tuple) else (result,)
        if not present.issuperset(x for x in results if x is not None):
            return None
        return _LocalForm(near, tuple(nodes), result)

    def _copied(self, form: _LocalForm, near: tuple[fx.Node, ...]) -> Any:
        """The result of nodes like those of a form, appended on what a call reads."""
        build = self.build
        to = dict(zip(form.near, near, strict=True))
        for each in form.nodes:
            args = fx.node.map_arg(each.args, to.__getitem__)
            kwargs = each.kwargs and fx.node.map_arg(each.kwargs, to.__getitem__)
            target = each.node.target
            node = add_node(build.graph, "call_function", target, args, kwargs)
            read = _tensors_read(node)
            node.meta["val"] = known_values.made(each.value, build.fake_mode, read)
            if each.is_stamped:
                build.stamp(node)
            to[each.node] = node
        return fx.node.map_arg(form.result, to.__getitem__)


def _tensors_read(node: fx.Node) -> list[torch.Tensor]:
    values = (x.meta["val"] for x in node.all_input_nodes)
    return [x for x in values if isinstance(x, torch.Tensor)]


def _shown(node: fx.Node) -> fx.Node | None:
    """What a node shows in another shape."""
    if not op_facts_of(node.target).reshapes:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None
