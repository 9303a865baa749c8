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


def row_call(node: fx.Node, row_dims: Mapping[fx.Node, int]) -> RowCall | None:
    """Return the call as one that computes rows one by one. ``row_dims``: operand ->
    the dim of its rows. None if it does not treat these dims so."""
    rule = by_row_rule(node)
    if rule is None:
        return None
    pairs = list(zip(tensor_nodes(node), rule.operands, strict=True))
    row_factors = {
        dims[row_dims[operand]] for operand, dims in pairs if operand in row_dims
    }
    if len(row_factors) != 1:
        return None
    (dim,) = row_factors
    if len(dim) != 1 or dim[0] in rule.whole:
        return None
    operand_dims: list[int | None] = []
    for operand, dims in pairs:
        if operand in row_dims:
            if dims[row_dims[operand]] != dim:
                return None
            operand_dims.append(row_dims[operand])
        elif any(dim[0] in part for part in dims):
            if dim not in dims or operand.target is not aten.full.default:
                return None
            operand_dims.append(dims.index(dim))
        else:
            operand_dims.append(None)
    if not all(dim in dims for dims in rule.results):
        return None
    result_dims = tuple(dims.index(dim) for dims in rule.results)
    return RowCall(node, tuple(operand_dims), result_dims)


def rows_read(node: fx.Node, dim: int, result: int = 0) -> dict[fx.Node, int] | None:
    """Return the operands from which a call computes the rows along a dim of a result
    one by one -> the dims of their rows; None if it does not."""
    rule = by_row_rule(node)
    if rule is None:
        return None
    factor = rule.results[result][dim]
    if not factor:
        return None
    pairs = list(zip(tensor_nodes(node), rule.operands, strict=True))
    row_dims = {
        operand: dims.index(factor)
        for operand, dims in pairs
        if factor in dims and operand.target is not aten.full.default
    }
    return row_dims if row_dims and row_call(node, row_dims) is not None else None


def row_result(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Return the dim of a call's one result whose rows are computed, one by one, from
    those along a dim of an operand; None if they are not, or there are several results.
    """
    value, rule = node.meta.get("val"), None
    if node.op == "call_function" and isinstance(value, torch.Tensor):
        rule = by_row_rule(node)
    if rule is None:
        return None
    pairs = zip(tensor_nodes(node), rule.operands, strict=True)
    factors = {dims[dim] for x, dims in pairs if x is operand}
    result_dims = [d for d, factor in enumerate(rule.results[0]) if {factor} == factors]
    if len(result_dims) != 1 or operand not in (rows_read(node, result_dims[0]) or {}):
        return None
    return result_dims[0]


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
