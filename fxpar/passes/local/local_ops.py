"""Ops whose local form is not simply the op on local operands.

Most ops compute their shard from the shards of their operands unchanged. The rows here
are the others: an index into a split dim must be shifted by the rank's offset and
masked where it points elsewhere, a size among the arguments must become the local one,
a random op must count by global index. Each function appends the local form of one call
to the graph and returns its node. Keys are op overloads, or names of ops that torch
registers late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.passes.attention import local_attention
from fxpar.passes.builder import Builder, Size
from fxpar.passes.experts import dispatch_ops, local_experts
from fxpar.passes.local import (
    exchange_rows,
    local_custom_ops,
    local_indexing,
    local_order,
    local_reductions,
    local_slices,
    local_views,
    local_windows,
)
from fxpar.passes.local.local_call import LocalCall, Localizer, aten
from fxpar.sharding.rules import row_of

__all__ = ["LOCAL", "LocalCall", "Localizer", "local_form"]

LOCAL: dict[Any, Localizer] = {
    **local_indexing.LOCAL,
    **local_order.LOCAL,
    **local_reductions.LOCAL,
    **local_slices.LOCAL,
    **local_views.LOCAL,
    **local_windows.LOCAL,
    **local_custom_ops.LOCAL,
    **local_experts.LOCAL,
    **dispatch_ops.LOCAL,
    **local_attention.LOCAL,
}


# Of a node with several results: by place, the dims that are cut, with their sizes.
CUTS = "fxpar_cuts"


def local_form(call: LocalCall, args: Any, kwargs: Any) -> Any:
    """Append one op on local arguments; the op's own name where nothing else is said,
    its shape argument, if its row marks one, made local. What a rank holds nothing of
    is a row of zeros to an op that cannot run on nothing; of several results it is cut
    off where they are read (``cut``)."""
    n = len(call.operands)
    empty = [
        call.empty_dims(spec, shape)
        for spec, shape in zip(call.operands + call.results, call.shapes, strict=True)
    ]
    if call.rule.empty != "fill" or not any(empty):
        return _local_form(call, args, kwargs)
    filled_call = replace(call, least=1)
    reads = _operands(args, kwargs)
    filled = {}
    for i, (read, dims) in enumerate(zip(reads, empty[:n], strict=True)):
        pairs = zip(filled_call.operand_shape(i), call.operand_shape(i), strict=True)
        padding = [call.build.missing(*pair) for pair in pairs]
        filled[read] = call.build.pad(read, padding) if dims else read
    args, kwargs = fx.node.map_arg((args, kwargs), lambda x: filled.get(x, x))
    result = _local_form(filled_call, args, kwargs)
    cuts = [
        [(d, call.local_shape(i)[d]) for d in dims] for i, dims in enumerate(empty[n:])
    ]
    if isinstance(result, tuple):
        ends = iter(cuts)
        return tuple(
            cut(call.build, x, next(ends)) if isinstance(x, fx.Node) else x
            for x in result
        )
    if isinstance(result.meta["val"], torch.Tensor):
        return cut(call.build, result, cuts[0])
    values = result.meta["val"]
    places = [k for k, x in enumerate(values) if isinstance(x, torch.Tensor)]
    result.meta[CUTS] = dict(zip(places, cuts, strict=True))
    return result


def cut(build: Builder, x: fx.Node, cuts: Sequence[tuple[int, Size]]) -> fx.Node:
    """``x`` without the rows that this rank does not hold."""
    for d, size in cuts:
        x = build.call(aten.slice.Tensor, x, d, 0, size)
    return x


def _operands(args: Any, kwargs: Any) -> list[fx.Node]:
    """The tensors that a call reads, in order."""
    out: list[fx.Node] = []

    def add(node: fx.Node) -> fx.Node:
        if isinstance(node.meta.get("val"), torch.Tensor):
            out.append(node)
        return node

    fx.node.map_arg((args, kwargs), add)
    return out


def _local_form(call: LocalCall, args: Any, kwargs: Any) -> fx.Node:
    target = call.node.target
    local = LOCAL.get(target)
    if local is None and isinstance(target, _torch.inductor.OpOverload):
        local = LOCAL.get(target.name())
    if local is None:
        local = LOCAL.get(_torch.aot.higher_order_name(target))
    if call.rule.moves and exchange_rows.crosses(call):
        return exchange_rows.exchange_rows(call, _operands(args, kwargs))
    if local is not None:
        return local(call, *args, **kwargs)
    row = row_of(target)
    if row is not None and row.shape is not None and row.shape < len(args):
        shape = list(call.local_shape())
        args = (*args[: row.shape], shape, *args[row.shape + 1 :])
    return call.build.call(target, *args, **kwargs)
