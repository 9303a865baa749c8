"""Local forms of flex_attention, whose score and mask functions count globally.

Batch, heads, queries and keys are counted by global index, so that the functions see
what they see on one device. A block mask is split along queries and along keys in whole
blocks: of its lists by block of queries each rank has those of its own, and keeps of
them the blocks of its own keys (``own_blocks``); of its lists by block of keys, which a
backward reads, its own queries.

Where keys are split a forward gives each query's log-sum-exp, of which -inf is no
weight, and what ranks have is merged by it (``merge_attention``). That of the op is to
base 2.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from fxpar.passes import collective_nodes
from fxpar.passes.attention import merge_attention
from fxpar.passes.builder import Builder, Size
from fxpar.passes.graph_bodies import body_of, module_of, new_body
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.sharding.factors import Axes

aten = torch.ops.aten

_LOG_2 = math.log(2)

# (operand, its dim) of batch, head, query and key, as a score function and a mask
# function have them.
_INDEXED = ((0, 0), (0, 1), (0, 2), (1, 2))

# Where a score function has these among its arguments, and a mask function.
_SCORE, _MASK = (1, 2, 3, 4), (0, 1, 2, 3)


def _with_global_index(
    call: LocalCall, node: fx.Node, places: tuple[int, ...]
) -> fx.Node:
    """A function of scores, its batch, head, query and key moved on by where this
    rank's begin."""
    body = body_of(node)
    assert body is not None
    inputs = body.graph.find_nodes(op="placeholder")
    shifted_inputs = [
        (inputs[place], call.operands[i].dims[d], call.shapes[i][d])
        for place, (i, d) in zip(places, _INDEXED, strict=False)
    ]
    shifted_inputs = [
        (x, axes, rows) for x, axes, rows in shifted_inputs if x.users and axes
    ]
    if not shifted_inputs:
        return node
    build = Builder(fx.Graph(), call.build.fake_mode, call.build.mesh)
    copies: dict[fx.Node, Any] = {}
    for body_node in body.graph.nodes:
        copies[body_node] = build.graph.node_copy(body_node, copies.__getitem__)
        copies[body_node].meta = dict(body_node.meta)
        if body_node is inputs[-1]:
            for x, axes, rows in shifted_inputs:
                start = build.own_start(rows, axes)
                copies[x] = build.call(torch.ops.aten.add.Tensor, copies[x], start)
    module = module_of(body, build.graph)
    return new_body(call.build, node, module, call.node.name)


def _forward(
    call: LocalCall, q: Any, k: Any, v: Any, score: Any, mask: Any, scale: Any,
    options: dict[str, Any], *captured: Any,
) -> Any:  # fmt: skip
    if call.operands[0].dims[2]:
        q = _of_its_own(call, q)
    score, mask = (
        _with_global_index(call, score, _SCORE),
        _own_mask(call, mask),
    )
    options = _of_parts(call, options)
    node = call.same(q, k, v, score, mask, scale, options, *captured)
    axes = call.operands[1].dims[2]
    return _merged(call, node, axes) if call.build.mesh.count(axes) > 1 else node


def _of_parts(call: LocalCall, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a kernel. Of parts of the keys it gives weights, and sees queries that
    see no key of a part."""
    if call.build.mesh.count(call.operands[1].dims[2]) == 1:
        return options
    return options | {"OUTPUT_LOGSUMEXP": True, "ROWS_GUARANTEED_SAFE": False}


def _merged(call: LocalCall, node: fx.Node, axes: Axes) -> tuple[fx.Node, ...]:
    """This rank's summand of the output over all keys, their log-sum-exp, and the
    largest score, of the output of an attention to its own keys."""
    build = call.build
    out, logs, most = (build.call(operator.getitem, node, i) for i in range(3))
    lse = _of_seen(build, build.call(aten.mul.Tensor, logs, _LOG_2), out)
    of_ranks = merge_attention.gathered(build, lse, axes)
    dtype = out.meta["val"].dtype
    out, total = merge_attention.of_ranks(build, out, lse, of_ranks)
    total = build.call(aten.mul.Tensor, total, 1 / _LOG_2)
    largest = build.call(aten.amax.default, of_ranks, [0])
    sees_keys = build.call(aten.ne.Scalar, largest, -math.inf)
    total = build.where(sees_keys, total, -math.inf)
    if any(user.args[1] == 2 and user.users for user in call.node.users):
        most = merge_attention.gathered(build, most, axes)
        most = build.call(aten.amax.default, most, [0])
    return build.cast(out, dtype), total, most


def _of_seen(build: Builder, lse: fx.Node, out: fx.Node) -> fx.Node:
    """A log-sum-exp that is ``-inf`` of hidden keys alone: to base 2 that of scores
    that are the least number there is is none, while the output is a mean of values."""
    least = torch.finfo(lse.meta["val"].dtype).min
    unseen = build.call(aten.eq.Scalar, lse, -math.inf)
    attended = build.call(aten.any.dim, build.call(aten.ne.Scalar, out, 0), -1)
    least_scores = build.call(aten.bitwise_and.Tensor, unseen, attended)
    return build.where(build.call(aten.bitwise_not.default, least_scores), lse, least)


def _of_its_own(call: LocalCall, q: fx.Node) -> fx.Node:
    """Queries in memory of their own, laid out alike: on CPU Inductor (2.13) takes no
    view of a tensor of three dims."""
    value, build = q.meta["val"], call.build
    if value.device.type != "cpu":
        return q
    order = sorted(range(4), key=value.stride, reverse=True)
    dense = build.call(aten.permute.default, q, order)
    dense = build.call(aten.clone.default, dense, memory_format=torch.contiguous_format)
    return build.call(aten.permute.default, dense, [order.index(d) for d in range(4)])


def _backward(call: LocalCall, *args: Any) -> Any:
    *tensors, forward, joint, mask, scale, options = args[:12]
    functions = (_with_global_index(call, body, _SCORE) for body in (forward, joint))
    mask = _own_mask(call, mask, backward=True)
    options = _of_parts(call, options)
    return call.same(*tensors, *functions, mask, scale, options, *args[12:])


def _own_mask(
    call: LocalCall, mask: tuple[Any, ...], *, backward: bool = False
) -> tuple[Any, ...]:
    """A mask of this rank's queries and keys. Lists by block of queries are of these
    already, and name blocks of keys; those by block of keys a backward alone reads."""
    build, own = call.build, list(mask)
    own[-1] = _with_global_index(call, mask[-1], _MASK)
    queries, keys = (call.operands[i].dims[2] for i in range(2))
    for i, axes in enumerate((queries, keys)):
        own[i] = call.operand_shape(i)[2] if axes else mask[i]
    query_blocks, key_blocks = (
        call.shapes[i][2] // mask[place] for i, place in enumerate((-3, -2))
    )
    ranges = {2: (keys, key_blocks), 4: (keys, key_blocks)}
    if backward:
        ranges |= {6: (queries, query_blocks), 8: (queries, query_blocks)}
    for at, (axes, blocks) in ranges.items():
        if mask[at] is None:
            continue
        lists = list(mask[at : at + 2])
        if at >= 6 and keys and key_blocks > 1:
            lists = [
                collective_nodes.step(build, collective_nodes.slice_, x, 2, keys)
                for x in lists
            ]
        if axes and blocks > 1:
            first, count = (f(blocks, axes) for f in (build.own_start, build.own_size))
            lists = [*own_blocks(build, lists[0], lists[1], first, count)]
        own[at : at + 2] = lists
    return tuple(own)


def own_blocks(
    build: Builder, number: fx.Node, index: fx.Node, first: Size, count: Size
) -> tuple[fx.Node, fx.Node]:
    """Lists of blocks, ``number`` of each ``index`` being valid, as lists of those that
    are ``count`` from the ``first`` on, counted from there, in the order they had."""
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


LOCAL: dict[Any, Localizer] = {
    "higher_order::flex_attention": _forward,
    "higher_order::flex_attention_backward": _backward,
}
