"""Local forms of flex_attention, whose score and mask functions count globally.

Batch, heads and queries are counted by global index, so that the functions see what
they see on one device. A block mask is split along queries in whole blocks: a forward
reads its lists by block of queries, which each rank has of its own; a backward those by
block of keys too, of which it keeps its own queries (``own_blocks``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.passes.builder import Builder, Size
from fxpar.passes.graph_bodies import body_of, module_of, new_body
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.sharding.factors import Axes

aten = torch.ops.aten

# Where a score function has batch, head and query among its arguments, and a mask
# function.
_SCORE, _MASK = (1, 2, 3), (0, 1, 2)


def _with_global_index(
    call: LocalCall, node: fx.Node, places: tuple[int, int, int]
) -> fx.Node:
    """A function of scores, its batch, head and query moved on by where this rank's
    begin."""
    body = body_of(node)
    assert body is not None
    inputs = body.graph.find_nodes(op="placeholder")
    shifted_inputs = [
        (inputs[place], call.operands[0].dims[d], call.shapes[0][d])
        for d, place in enumerate(places)
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
    call: LocalCall, q: Any, k: Any, v: Any, score: Any, mask: Any, *settings: Any
):
    mask = (*mask[:-1], _with_global_index(call, mask[-1], _MASK))
    if call.operands[0].dims[2]:
        mask = (call.operand_shape(0)[2], *mask[1:])
        q = _of_its_own(call, q)
    return call.same(q, k, v, _with_global_index(call, score, _SCORE), mask, *settings)


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


def _backward(call: LocalCall, *args: Any):
    *tensors, forward, joint, mask = args[:10]
    functions = (_with_global_index(call, body, _SCORE) for body in (forward, joint))
    mask = (*mask[:-1], _with_global_index(call, mask[-1], _MASK))
    axes, rows = call.operands[0].dims[2], call.shapes[0][2]
    if axes:
        mask = (call.operand_shape(0)[2], *mask[1:])
        block = mask[-3]
        if block < rows:
            mask = _with_own_blocks(call, mask, axes, rows // block)
    return call.same(*tensors, *functions, mask, *args[10:])


def _with_own_blocks(
    call: LocalCall, mask: tuple[Any, ...], axes: Axes, count: int
) -> tuple[Any, ...]:
    """A mask of ``count`` blocks of queries whose lists by block of keys name this
    rank's alone, from its first on; lists by block of queries are this rank's."""
    first, own = call.build.own_start(count, axes), call.build.own_size(count, axes)
    lists: list[Any] = []
    for number, index in zip(mask[6:10:2], mask[7:10:2], strict=True):
        both = (None, None)
        if number is not None:
            both = own_blocks(call.build, number, index, first, own)
        lists += both
    return (*mask[:6], *lists, *mask[10:])


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


def op_by_op(target: Any) -> Any:
    """What to call for an op outside of Inductor: the op itself, save for the backward
    of flex_attention, which (torch 2.13) gives gradients of captured tensors only where
    these require them as they are run."""
    if _torch.aot.higher_order_name(target) == "higher_order::flex_attention_backward":

        def run(*args: Any) -> Any:
            return _with_gradients(target, *args)

        return run
    return target


def _with_gradients(target: Any, *args: Any) -> Any:
    joint, captured = args[8], args[12] if len(args) > 12 else ()
    (results,) = joint.graph.output_node().args
    operands = [
        x if grad is None else x.detach().requires_grad_()
        for x, grad in zip(captured, results[5:], strict=True)
    ]
    with torch.no_grad():
        return target(*args[:12], tuple(operands), *args[13:])


LOCAL: dict[Any, Localizer] = {
    "higher_order::flex_attention": _forward,
    "higher_order::flex_attention_backward": _backward,
}
