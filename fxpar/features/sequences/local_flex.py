"""Makes local forms of flex_attention, whose score and mask functions get global
indices.

In: a local call of flex_attention or of its backward. Out: its results. Batch, heads,
queries and keys are numbered by global index, so that the functions see the same
numbers as on one device. A block mask is split along queries and keys in whole blocks:
each rank has the lists of its own blocks of queries, and keeps in them the blocks of
its own keys; the lists by block of keys, which a backward reads, keep its own queries.
A ring cuts calls in the same way (``overlap_attention``).

Where keys are split a forward also gives each query's log-sum-exp (-inf: no weight), by
which the ranks' outputs are merged (``merge_attention``). The op's own log-sum-exp is
to base 2. Never: a block is split between ranks, or the body of a function changed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxpar.features.sequences import merge_attention
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, Size
from fxpar.graph.graph_bodies import body_of, module_of, new_body
from fxpar.sharding.factors import Axes
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten

_LOG_2 = math.log(2)

# Positions of batch, head, query and key among the inputs of a function of scores, and
# of one of masks.
SCORE, MASK = (1, 2, 3, 4), (0, 1, 2, 3)
# (operand, its dim) of batch, head, query and key, the order of a score function's and
# a mask function's arguments.
_INDEXED = ((0, 0), (0, 1), (0, 2), (1, 2))


def _with_global_index(
    call: LocalCall, node: fx.Node, places: tuple[int, ...]
) -> fx.Node:
    """Return a score or mask function whose batch, head, query and key arguments are
    shifted by this rank's starts. ``places``: positions of these arguments."""

    def start(axes: Axes, rows: int) -> Callable[[Builder], Size]:
        return lambda build: build.own_start(rows, axes)

    dims = ((call.operands[i].dims[d], call.shapes[i][d]) for i, d in _INDEXED)
    starts = {
        place: start(axes, rows)
        for place, (axes, rows) in zip(places, dims, strict=False)
        if axes
    }
    return shifted(call.build, node, starts, call.node.name)


def forward(
    call: LocalCall, q: Any, k: Any, v: Any, score: Any, mask: Any, scale: Any,
    options: dict[str, Any], *captured: Any,
) -> Any:  # fmt: skip
    if call.operands[0].dims[2]:
        q = _of_its_own(call, q)
    score, mask = _with_global_index(call, score, SCORE), _own_mask(call, mask)
    options = _of_parts(call, options)
    node = call.same(q, k, v, score, mask, scale, options, *captured)
    axes = call.operands[1].dims[2]
    return _merged(call, node, axes) if call.build.mesh.count(axes) > 1 else node


def _of_parts(call: LocalCall, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a kernel, which gives weights too if keys are split."""
    if call.build.mesh.count(call.operands[1].dims[2]) == 1:
        return options
    return weighted_options(options)


def _merged(call: LocalCall, node: fx.Node, axes: Axes) -> tuple[fx.Node, ...]:
    """Return this rank's summand of the output over all keys, the log-sum-exp over all
    keys, and the largest score, from an attention to its own keys (``node``)."""
    build = call.build
    out, logs, most = merge_attention.items(build, node)
    lse = natural(build, logs, out)
    out, total, shift = merge_attention.of_ranks(build, out, lse, axes)
    total = to_base_2(build, total, shift)
    if any(user.args[1] == 2 and user.users for user in call.node.users):
        most = merge_attention.gathered(build, most, axes)
        most = build.call(aten.amax.default, most, [0])
    return out, total, most


def _of_its_own(call: LocalCall, q: fx.Node) -> fx.Node:
    """Return queries in memory of their own, in the same dim order: on CPU Inductor
    (2.13) refuses a view of a tensor of three dims."""
    value, build = q.meta["val"], call.build
    if value.device.type != "cpu":
        return q
    order = sorted(range(4), key=value.stride, reverse=True)
    dense = build.call(aten.permute.default, q, order)
    dense = build.copied(dense)
    return build.call(aten.permute.default, dense, [order.index(d) for d in range(4)])


def backward(call: LocalCall, *args: Any) -> Any:
    *tensors, forward, joint, mask, scale, options = args[:12]
    functions = (_with_global_index(call, body, SCORE) for body in (forward, joint))
    mask = _own_mask(call, mask, backward=True)
    options = _of_parts(call, options)
    node = call.same(*tensors, *functions, mask, scale, options, *args[12:])
    *results, captured = node.meta["val"]
    operands = args[12] if len(args) > 12 else ()
    pairs = zip(operands, call.node.meta["val"][-1], captured, strict=True)
    gradients = tuple(_captured_gradient(call, *pair) for pair in pairs)
    node.meta["val"] = (*results, gradients)
    return node


def _captured_gradient(call: LocalCall, captured: Any, whole: Any, local: Any) -> Any:
    """Return the gradient of a captured tensor if it has one on one device: a fake run
    gives gradients only of tensors that require them in that run."""
    if whole is None or local is not None:
        return local
    with call.build.fake_mode:
        return torch.empty_like(captured.meta["val"])


def _own_mask(
    call: LocalCall, mask: tuple[Any, ...], *, backward: bool = False
) -> tuple[Any, ...]:
    """Return the mask of this rank's queries and keys. Lists by block of queries are
    split already, and name blocks of keys; lists by block of keys are read by a
    backward only."""
    build, own = call.build, list(mask)
    own[-1] = _with_global_index(call, mask[-1], MASK)
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


# Parts of queries and keys, and what they give


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
    blocks = build.copied(blocks)
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
