"""Finds steps over rows whose order nothing reads, to run them for each part of the
batch, and gives these steps their rules and local forms.

If ranks gather rows in order, those of one part of the batch are in a piece from every
rank, so that no part can be gathered by itself. Between the gather of tokens and the
sum that returns their results, only products by expert and ops that compute rows one by
one read them: there rows may be stored part after part. In: a local graph with its
steps, before it is planned over parts. Out: ``RowsOfParts``, the values with such rows,
and the steps around them, which ``mark`` turns into ``over_parts``: from the rows of
one part they make the rows of that part. In a graph in parts they are plain steps
again.

Never: marks a step where some reader or source of the rows depends on places, or is not
known; runs an op itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar.graph import collective_nodes as steps
from fxpar.passes.row_wise import by_row_rule, call_of
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.op_table import Row, Word, make, words_of
from fxpar.sharding.ops import LOCAL, add_rows
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.row_moves import Exchange

# The metadata that a step keeps of the reshard that it belongs to.
NOTED = "fxpar_noted"


def over_parts(x: Any, kind: str, *settings: Any) -> NoReturn:
    """Is a step over rows of parts, with the settings of the step on one part, and how
    many ranks there are."""
    raise RuntimeError("steps over rows of parts run as steps of each part")


# Kind -> the step that it is on one part. Those that make more rows gather all ranks'
# rows, along one dim, or with another dim split; the others give this rank's rows of
# the reduction of all, or with another dim gathered.
Steps = dict[str, Callable[..., Any]]
_MORE: Steps = {"gather_rows": steps.all_gather, "exchange_rows": steps.all_to_all}
_FEWER: Steps = {"scatter_rows": steps.reduce_scatter, "return_rows": steps.all_to_all}
STEP_OF = _MORE | _FEWER


def _resized_words(x: torch.Tensor, *settings: Any) -> tuple[list[Word], list[Word]]:
    """Return words of the operand and of the result. The dims that a step names have
    other sizes in the result: they stay whole."""
    before, after = list[Word](words_of(x)), list[Word](words_of(x))
    for d in settings:
        if isinstance(d, int):
            before[d], after[d] = f"before{d}!", f"after{d}!"
    return before, after


def _resized_dims_rule(x: torch.Tensor, *settings: Any) -> Rule:
    before, after = _resized_words(x, *settings)
    return make([before], [after])


def _over_parts_rule(x: torch.Tensor, kind: str, *settings: Any) -> Rule:
    """Return a rule in which the side with the rows of all ranks has the rows of one
    part together."""
    *own, _, ranks = settings
    dims = [setting for setting in own if isinstance(setting, int)]
    before, after = _resized_words(x, *dims)
    dim, few, many = dims[0 if kind in _MORE else -1], "rows", ("rows", "ranks!")
    before[dim], after[dim] = (few, many) if kind in _MORE else (many, few)
    rows = x.shape[dim] // (1 if kind in _MORE else ranks)
    return make([before], [after], {"rows": rows, "ranks": ranks})


# Steps that may leave a dim as it is.
_ALONG = (steps.all_reduce, steps.all_gather, steps.reduce_scatter, steps.all_to_all)

add_rows(
    dict.fromkeys(
        (*_ALONG, steps.mask, steps.permute, steps.slice_), Row(_resized_dims_rule)
    )
    | {
        steps.move_rows: Row(
            lambda x, text, *_: _resized_dims_rule(x, Exchange.parse(text).moves.dim)
        )
    }
    | {over_parts: Row(_over_parts_rule)}
)


def _step(call: LocalCall, x: fx.Node, *args: Any) -> fx.Node:
    """Return a step over axes of the mesh on a part."""
    target = call.node.target
    if target is over_parts:
        target, args = STEP_OF[args[0]], args[1:-1]
    node = call.build.graph.call_function(target, (x, *args))
    value = call.node.meta["val"]
    with call.build.fake_mode:
        node.meta["val"] = value.new_empty(call.local_shape())
    call.build.stamp(node)
    node.meta[NOTED] = call.node.meta[NOTED]
    return node


LOCAL.update(dict.fromkeys((*steps.NODES.values(), over_parts), _step))


# How many of the first operands of a product by expert have rows.
_PRODUCTS = {"fxpar.own_expert_mm.default": 1, "fxpar.own_expert_outer.default": 2}


@dataclass
class RowsOfParts:
    """Holds values with rows stored part after part, and the steps around them."""

    # Value -> the dim of its rows.
    dims: dict[fx.Node, int] = field(default_factory=dict)
    # Step -> the kind of ``STEP_OF`` that it becomes.
    steps: dict[fx.Node, str] = field(default_factory=dict)

    def mark(self, mesh: Mesh) -> None:
        """Turn the steps into those over rows of parts, in place."""
        for node, kind in self.steps.items():
            x, *settings = node.args
            node.args = (x, kind, *settings, mesh.count(steps.axes_of(node)))
            node.target = over_parts

    def unmark(self) -> None:
        """Turn them into plain steps again."""
        for node, kind in self.steps.items():
            x, _, *settings, _ = node.args
            node.target, node.args = STEP_OF[kind], (x, *settings)

    def is_cut_along(self, decision: Decision, axis: str) -> bool:
        """Return whether all of the rows are cut along ``axis``, as they are stored and
        as they are read; else they would be in two orders."""
        value_of, edges = decision.program.value_of, decision.edges
        values = {value_of[call_of(node)]: d for node, d in self.dims.items()}
        moved = any(reshard.value in values for reshard in edges.reshards)
        cuts = (edges.specs[v].dims[d][:1] for v, d in values.items())
        return not moved and all(axes == (axis,) for axes in cuts)


def rows_of_parts(graph: fx.Graph, mesh: Mesh, parts: int) -> RowsOfParts:
    """Return the rows from other ranks that products by expert read, where no place
    counts."""
    out = RowsOfParts()
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for operand in node.args[: _PRODUCTS.get(str(node.target), 0)]:
            if operand in seen:
                continue
            region = _OneOrder()
            if region.grow(operand, 0) and region.fits(mesh, parts):
                out.steps.update(region.steps)
                cut = region.dims.keys() - region.constants
                out.dims.update((x, region.dims[x]) for x in cut)
            seen.update(region.dims)
    return out


@dataclass
class _OneOrder:
    """Holds values whose rows are in one order."""

    # Value -> the dim of its rows.
    dims: dict[fx.Node, int] = field(default_factory=dict)
    # Step that moves the rows -> its kind over rows of parts.
    steps: dict[fx.Node, str] = field(default_factory=dict)
    # Values that are the same in all rows.
    constants: set[fx.Node] = field(default_factory=set)
    # Sizes of the factors that are cut in parts.
    sizes: set[int] = field(default_factory=set)
    # Values whose readers and source are still to be visited.
    _queue: list[fx.Node] = field(default_factory=list)

    def grow(self, node: fx.Node, dim: int) -> bool:
        """Add a value and all that need the same order. Return whether no reader and no
        source of them depends on places."""
        self._add(node, dim)
        while self._queue:
            node = self._queue.pop()
            readers = all(self._reader(user, node) for user in node.users)
            if not readers or not self._source(*call_of(node), node):
                return False
        return True

    def fits(self, mesh: Mesh, parts: int) -> bool:
        """Return whether the steps are over the same axes, and all sizes are multiples
        of ranks times parts."""
        axes = {steps.axes_of(node) for node in self.steps}
        return len(axes) == 1 and not any(
            size % (mesh.count(*axes) * parts) for size in self.sizes
        )

    def _add(self, node: fx.Node, dim: int) -> bool:
        if node not in self.dims:
            self.dims[node] = dim
            self._queue.append(node)
        return self.dims[node] == dim

    def _mark(self, node: fx.Node, kind: str) -> bool:
        self.steps[node] = kind
        return True

    def _source(self, source: fx.Node, result: int, node: fx.Node) -> bool:
        """Return whether the op that makes a value depends on no places along its
        rows."""
        dim = self.dims[node]
        if steps.is_step(source):
            if source.target is steps.all_gather and source.args[1] == dim:
                return self._mark(source, "gather_rows")
            if source.target is steps.all_to_all and source.args[1] == dim:
                return self._mark(source, "exchange_rows")
            operand: Any = source.args[0]
            return _is_along(source, dim) and self._add(operand, dim)
        if op_facts_of(source.target).constant == "filled":
            self.constants.add(node)
            return True
        rule = by_row_rule(source)
        if rule is None or not self._call(source, rule, rule.results[result][dim]):
            return False
        rows = set(rule.results[result][dim])
        if not any(rows.intersection(d) for dims in rule.operands for d in dims):
            self.constants.add(node)
        return True

    def _reader(self, user: fx.Node, node: fx.Node) -> bool:
        """Return whether a reader of a value depends on no places along its rows."""
        dim = self.dims[node]
        if steps.is_step(user):
            if user.target is steps.reduce_scatter and user.args[1] == dim:
                return self._mark(user, "scatter_rows")
            if user.target is steps.all_to_all and user.args[2] == dim:
                return self._mark(user, "return_rows")
            return _is_along(user, dim) and self._add(user, dim)
        rule = by_row_rule(user)
        if rule is None:
            return False
        operands = zip(tensor_nodes(user), rule.operands, strict=True)
        return all(
            self._call(user, rule, dims[dim]) for x, dims in operands if x is node
        )

    def _call(self, node: fx.Node, rule: Rule, word: tuple[str, ...]) -> bool:
        """Add all tensors of a call that have the rows of one dim. Return whether it
        computes rows one by one, or adds them up in any order."""
        rows = _first(rule, word)
        if (
            rows is None
            or rows in rule.whole
            or any(f == rows for _, f in rule.equal_over)
        ):
            return False
        self.sizes.add(rule.size[rows])
        values = [
            ([x], d) for x, d in zip(tensor_nodes(node), rule.operands, strict=True)
        ]
        values += zip(_results(node, len(rule.results)), rule.results, strict=True)
        for nodes, dims in values:
            for d, factors in enumerate(dims):
                if rows not in factors:
                    continue
                if _first(rule, factors) != rows or not all(
                    self._add(x, d) for x in nodes
                ):
                    return False
        return True


def _first(rule: Rule, word: tuple[str, ...]) -> str | None:
    """Return the most major factor of a dim that has more than one place."""
    return next((f for f in word if rule.size[f] > 1), None)


def _results(node: fx.Node, count: int) -> list[list[fx.Node]]:
    """Return, for each of ``count`` results of a call, the nodes that stand for it."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [[node]]
    return [[user for user in node.users if user.args[1] == i] for i in range(count)]


def _is_along(step: fx.Node, dim: int) -> bool:
    """Return whether a step leaves the rows along a dim in place."""
    return step.target in _ALONG and dim not in step.args[1:-1]
