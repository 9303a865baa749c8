"""Says which ops treat the rows of a dim one by one, and calls such ops on other rows.

Rows along a dim may be reordered, or repeated, before an op that computes each row of
its results from the same row of its operands, and from nothing else along that dim. In:
nodes of a graph, of global or local shapes. Out: data, or a new call. Never: changes a
node.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.errors import RuleError
from fxpar.graph.builder import Builder, value_of
from fxpar.sharding.factors import Rule
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.ops import row_of, rule_of
from fxpar.sharding.program import tensor_nodes

aten = torch.ops.aten


def call_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return (the call that makes a value, which of its results it is)."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return source, int(node.args[1])
    return node, 0


@dataclass(frozen=True)
class RowCall:
    """Is a call that computes rows one by one."""

    # The call itself.
    node: fx.Node
    # The dim of the rows of each tensor operand; None: the operand is the same for
    # every row.
    operand_dims: tuple[int | None, ...]
    # The dim of the rows of each tensor that it gives.
    result_dims: tuple[int, ...]

    @property
    def row_dims(self) -> dict[fx.Node, int]:
        """Return the operands that differ by row -> the dims of their rows."""
        pairs = zip(tensor_nodes(self.node), self.operand_dims, strict=True)
        return {
            x: d
            for x, d in pairs
            if d is not None and x.target is not aten.full.default
        }

    def with_operands(
        self,
        build: Builder,
        operands: Mapping[fx.Node, fx.Node],
        rows: int | None = None,
    ) -> fx.Node:
        """Return the call on other operands, each of ``rows`` rows; None: as many as
        before."""
        pairs = zip(tensor_nodes(self.node), self.operand_dims, strict=True)
        constants = {
            operand: _constant_rows(build, operand, d, rows)
            for operand, d in pairs
            if rows is not None and d is not None and operand not in operands
        }
        operands = {**constants, **operands}
        args, kwargs = fx.node.map_arg(
            (self.node.args, self.node.kwargs), lambda x: operands.get(x, x)
        )
        row = row_of(self.node.target)
        place = row.shape if row is not None else None
        if rows is not None and place is not None:
            shape, d = list(args[place]), self.result_dims[0]
            shape[d] = rows if shape[d] != -1 else -1
            args = (*args[:place], shape, *args[place + 1 :])
        return build.call(self.node.target, *args, **kwargs)


def row_call(node: fx.Node, dim: int, of: fx.Node | int = 0) -> RowCall | None:
    """Return the call as one that computes rows one by one, those along a dim of an
    operand, or of the result at a position; None if it does not."""
    rule = by_row_rule(node)
    if rule is None:
        return None
    operands = tensor_nodes(node)
    if isinstance(of, int):
        factor = rule.results[of][dim]
    else:
        factor = rule.operands[operands.index(of)][dim]
    if len(factor) != 1 or factor[0] in rule.whole:
        return None
    words = (word for dims in rule.operands for word in dims if factor[0] in word)
    if any(word != factor for word in words):
        return None
    if not all(factor in dims for dims in rule.results):
        return None
    operand_dims = [d.index(factor) if factor in d else None for d in rule.operands]
    result_dims = tuple(dims.index(factor) for dims in rule.results)
    call = RowCall(node, tuple(operand_dims), result_dims)
    pairs = zip(operands, operand_dims, strict=True)
    return call if all(call.row_dims.get(x, d) == d for x, d in pairs) else None


def keeps_rows(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether a call computes the rows of its result, along dim 0, one by one
    from those of an operand."""
    call = row_call(node, 0, operand)
    return call is not None and operand in call.row_dims and call.result_dims == (0,)


def by_row_rule(node: fx.Node) -> Rule | None:
    """Return the rule of a call whose free factors are treated one by one; None for
    others."""
    facts = op_facts_of(node.target)
    if not facts.by_row or facts.random or facts.mutates:
        return None
    try:
        args, kwargs = value_of(node.args), value_of(node.kwargs)
        rule = rule_of(node.target, args, kwargs, node.meta["val"])
    except RuleError:
        return None
    if rule is None or rule.open or rule.windows:
        return None
    return rule if len(rule.operands) == len(tensor_nodes(node)) else None


def _constant_rows(build: Builder, node: fx.Node, dim: int, rows: int) -> fx.Node:
    """Return a constant with ``rows`` rows along a dim."""
    if node.meta["val"].shape[dim] == rows:
        return node
    shape = list(node.args[0])
    shape[dim] = rows
    return build.call(node.target, shape, *node.args[1:], **node.kwargs)
