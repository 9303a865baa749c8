"""Keeps a batch that is flattened with another dim a dim of its own.

Losses flatten ``[b, s, v]`` to ``[b*s, v]``. Where the axes of the batch divide ``b``
each rank's rows of the merged dim are a shard of it; where they do not, or other axes
split ``s``, shards of the merged dim would have other rows, and all of it be gathered
before. In: an ATen graph. Out: the same graph, in which ops that treat all rows of a
merged batch in the same way run before it is merged, forward and backward. Never: a
number changes, or a graph whose batch the axes divide and whose sequence none splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, shape_of
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.ops import pointwise

aten = torch.ops.aten

# Ops whose second argument is the shape of the result.
_SHAPED = {aten.expand.default}


def split_merged_batch(
    graph: fx.Graph, rewriter: Builder, splits: Callable[[int, int], bool]
) -> None:
    """Rewrite a graph in place. ``splits(b, s)``: whether a batch of ``b`` and the dim
    of ``s`` after it may be split so that the merged dim has other shards."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(
            node.meta.get("val"), torch.Tensor
        ):
            continue
        parts = {_merged_sizes(read, splits) for read in node.all_input_nodes} - {None}
        if len(parts) == 1:
            (pair,) = parts
            assert pair is not None
            with rewriter.before(node):
                _rewrite(node, pair, rewriter)
    graph.eliminate_dead_code()


def _merged_sizes(
    node: fx.Node, splits: Callable[[int, int], bool]
) -> tuple[int, int] | None:
    """Return (b, s) if a node merges its first two dims into one, else None."""
    if not op_facts_of(node.target).reshapes:
        return None
    source: Any = node.args[0]
    before, after = shape_of(source), shape_of(node)
    if len(before) < 2 or after != (before[0] * before[1], *before[2:]):
        return None
    batch, next_size = before[:2]
    return (batch, next_size) if next_size > 1 and splits(batch, next_size) else None


def _rewrite(node: fx.Node, pair: tuple[int, int], rewriter: Builder) -> None:
    """Replace a node by the same op on unmerged values and a merge of its result, if it
    can be."""
    shape = shape_of(node)
    if op_facts_of(node.target).reshapes:
        source: Any = node.args[0].args[0]
        if shape == shape_of(source):
            rewriter.replace(node, source)
        return
    arguments = _arguments(node, pair)
    if arguments is None:
        return
    rows, of_points = pair[0] * pair[1], _is_pointwise(node)
    unmerged = {
        read: _unmerged(read, pair, rewriter)
        for read in node.all_input_nodes
        if _is_merged(read, rows)
        # One of fewer dims broadcasts: its first dim is another, maybe of equal size.
        and not (of_points and len(shape_of(read)) < len(shape))
    }
    args, kwargs = fx.node.map_arg(
        (arguments, node.kwargs), lambda read: unmerged.get(read, read)
    )
    result = rewriter.call(node.target, *args, **kwargs)
    if not op_facts_of(node.target).of_all:
        result = rewriter.call(aten.reshape.default, result, list(shape))
    rewriter.replace(node, result)


def _is_merged(node: fx.Node, rows: int) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def _unmerged(read: fx.Node, pair: tuple[int, int], rewriter: Builder) -> fx.Node:
    """Return an operand with its first dim split in two."""
    shape = shape_of(read)
    source: Any = read.args[0] if read.args else None
    reshapes = op_facts_of(read.target).reshapes
    if reshapes and shape_of(source) == (*pair, *shape[1:]):
        return source
    if read.target is aten.full.default:
        return rewriter.call(
            aten.full.default, [*pair, *shape[1:]], read.args[1], **read.kwargs
        )
    return rewriter.call(aten.view.default, read, [*pair, *shape[1:]])


def _arguments(node: fx.Node, pair: tuple[int, int]) -> Sequence[Any] | None:
    """Return a node's arguments for operands with their first dim split in two; None if
    it does not treat all rows of that dim in the same way."""
    target, args = node.target, list(node.args)
    shape, rows, facts = shape_of(node), pair[0] * pair[1], op_facts_of(node.target)
    if facts.of_all:
        return args if len(args) == 1 else None
    if shape[:1] != (rows,):
        return None
    tensors = [read for read in node.all_input_nodes if "val" in read.meta]
    if target in _SHAPED:
        size: Any = args[1]
        same = len(shape) == len(shape_of(tensors[0])) and size[0] in (-1, rows)
        return [args[0], [*pair, *size[1:]], *args[2:]] if same else None
    place = facts.along
    if place is not None:
        if not all(_is_merged(read, rows) for read in tensors) or len(args) <= place:
            return None
        dims = _dims_after_batch(args[place], node)
        return None if dims is None else [*args[:place], dims, *args[place + 1 :]]
    if not _is_pointwise(node):
        return None
    # A tensor of as many dims has the rows; one of fewer dims has other dims only.
    has_batch_rows = all(
        len(shape_of(read)) < len(shape) or _is_merged(read, rows) for read in tensors
    )
    return args if has_batch_rows else None


def _is_pointwise(node: fx.Node) -> bool:
    """Return whether an op is pointwise; one that moves elements, such as a transpose,
    is not."""
    target: Any = node.target
    return torch.Tag.pointwise in target.tags or target in pointwise.ROWS


def _dims_after_batch(dims: Any, node: fx.Node) -> Any:
    """Return the dims of an op, each plus 1 for the split batch; None if the first dim
    is among them."""
    source: Any = node.args[0]
    ndim = len(shape_of(source)) + (node.target is aten.unsqueeze.default)
    positions = [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]
    if not positions or 0 in positions:
        return None
    shifted = [d + 1 for d in positions]
    return shifted[0] if isinstance(dims, int) else shifted
