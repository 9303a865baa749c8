"""Runs flex_attention on parts of its queries and keys.

Its functions of scores and masks count from where a part begins (``shifted``), its
lists name the blocks of a part (``own_blocks``), and its log-sum-exps, which are to
base 2, are converted for merging and back (``natural``, ``to_base_2``). In: nodes of a
call and its options. Out: new nodes. Never: changes the body of a function that it was
given.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, Size
from fxpar.graph.graph_bodies import body_of, module_of, new_body

aten = torch.ops.aten

_LOG_2 = math.log(2)

# Positions of batch, head, query and key among the inputs of a function of scores, and
# of one of masks.
SCORE, MASK = (1, 2, 3, 4), (0, 1, 2, 3)


def shifted(
    build: Builder,
    node: fx.Node,
    starts: Mapping[int, Callable[[Builder], Size]],
    name: str,
) -> fx.Node:
    """Return a function with the inputs at these places moved on by where a part
    begins; a start is computed in the function itself. ``name``: of the new function.
    """
    body = body_of(node)
    assert body is not None
    inputs = body.graph.find_nodes(op="placeholder")
    read = {inputs[at]: start for at, start in starts.items() if inputs[at].users}
    if not read:
        return node
    inner = Builder(fx.Graph(), build.fake_mode, build.mesh)
    copies: dict[fx.Node, Any] = {}
    for body_node in body.graph.nodes:
        copies[body_node] = inner.graph.node_copy(body_node, copies.__getitem__)
        copies[body_node].meta = dict(body_node.meta)
        if body_node is inputs[-1]:
            for x, start in read.items():
                copies[x] = inner.call(aten.add.Tensor, copies[x], start(inner))
    return new_body(build, node, module_of(body, inner.graph), name)


def own_blocks(
    build: Builder, number: fx.Node, index: fx.Node, first: Size, count: Size
) -> tuple[fx.Node, fx.Node]:
    """Return lists of blocks with only the ``count`` blocks from ``first`` on, counted
    from ``first``, in their old order. The first ``number`` entries of each ``index``
    are valid."""
    call, value = build.call, index.meta["val"]
    places = build.iota(value.shape[-1], value.device)
    listed = call(aten.lt.Tensor, places, call(aten.unsqueeze.default, number, -1))
    own = call(aten.sub.Tensor, index, first)
    for inside in (call(aten.ge.Scalar, own, 0), call(aten.lt.Scalar, own, count)):
        listed = call(aten.bitwise_and.Tensor, listed, inside)
    flags = build.cast(listed, torch.int32)
    order = call(aten.sort.stable, flags, stable=True, dim=-1, descending=True)
    order = call(operator.getitem, order, 1)
    blocks = call(aten.gather.default, build.where(listed, own, 0), -1, order)
    blocks = call(aten.slice.Tensor, blocks, value.dim() - 1, 0, count)
    blocks = call(aten.clone.default, blocks, memory_format=torch.contiguous_format)
    total = call(aten.sum.dim_IntList, flags, [-1])
    return build.cast(total, number.meta["val"].dtype), blocks


def weighted_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a kernel on a part of the keys: it gives log-sum-exps, and
    handles queries that see no key of the part."""
    return options | {"OUTPUT_LOGSUMEXP": True, "ROWS_GUARANTEED_SAFE": False}


def natural(build: Builder, logs: fx.Node, out: fx.Node) -> fx.Node:
    """Return the log-sum-exp of an attention whose output is ``out``: ``-inf`` only
    where keys are hidden. To base 2, scores of the least number there is give ``-inf``
    too, while the output is a mean of values."""
    lse = build.call(aten.mul.Tensor, logs, _LOG_2)
    least = torch.finfo(lse.meta["val"].dtype).min
    unseen = build.call(aten.eq.Scalar, lse, -math.inf)
    attended = build.call(aten.any.dim, build.call(aten.ne.Scalar, out, 0), -1)
    least_scores = build.call(aten.bitwise_and.Tensor, unseen, attended)
    return build.where(build.call(aten.bitwise_not.default, least_scores), lse, least)


def to_base_2(build: Builder, total: fx.Node, largest: fx.Node) -> fx.Node:
    """Return a log-sum-exp over all keys as the op gives it; ``largest``: the largest
    of those over parts, ``-inf`` for queries that see no key."""
    total = build.call(aten.mul.Tensor, total, 1 / _LOG_2)
    sees_keys = build.call(aten.ne.Scalar, largest, -math.inf)
    return build.where(sees_keys, total, -math.inf)
