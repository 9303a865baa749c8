"""Makes the local forms of attention whose queries or keys are split along the
sequence.

A causal mask counts places in the whole sequence: such a call becomes
``fxpar::causal_attention``, which is given where this rank's queries and keys begin.
Where keys are split, each rank attends to its own, and the results are merged by
log-sum-exp: ranks exchange the log-sum-exps of their keys, and each scales its output
to a summand of the whole. A backward takes the log-sum-exp of all keys, and needs no
merge: its gradients of queries are summands.

In: a call with the specs of its operands. Out: the local nodes of its results. Never:
keys or values sent to another rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import arguments_of
from fxpar.features.sequences import causal_attention, merge_attention
from fxpar.graph.builder import Size, value_of
from fxpar.passes.lower import restrided
from fxpar.sharding.op_facts import BIASES
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten
ours = torch.ops.fxpar

# [batch, heads, sequence, features]
_SEQUENCE = 2


def in_order(target: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
    """Return the arguments of a call by position and by keyword, from all by name."""
    declared = _torch.objects.schema_of(target).arguments
    positional = tuple(arguments[a.name] for a in declared if not a.kwarg_only)
    return positional, {a.name: arguments[a.name] for a in declared if a.kwarg_only}


def _is_split(call: LocalCall, query: int) -> tuple[bool, bool]:
    """Return whether ranks hold different queries, and different keys; ``query``:
    position of the queries among the operands, before that of the keys."""
    count = call.build.mesh.count
    rows, keys = (call.operands[query + i].dims[_SEQUENCE] for i in range(2))
    return count(rows) > 1, count(keys) > 1


def _starts(call: LocalCall, query: int) -> tuple[Size, Size]:
    """Return the places of this rank's first query and first key in the whole
    sequence."""
    rows, keys = (
        call.build.own_start(
            call.shapes[i][_SEQUENCE], call.operands[i].dims[_SEQUENCE]
        )
        for i in (query, query + 1)
    )
    return rows, keys


def _ahead(call: LocalCall, query: int) -> Size:
    """Return the place of this rank's first query minus that of its first key."""
    return call.build.compute(operator.sub, *_starts(call, query))


def _with_one_mask(
    call: LocalCall, arguments: dict[str, Any], query: int
) -> dict[str, Any]:
    """Return the arguments of a call that is causal and has a mask with both as one
    mask, by places in the whole sequence; other arguments as they are."""
    name = next((n for n in BIASES if arguments.get(n) is not None), None)
    if name is None or not arguments["is_causal"]:
        return arguments
    build, mask = call.build, arguments[name]
    places = []
    for i, start in enumerate(_starts(call, query)):
        count = call.operand_shape(query + i)[_SEQUENCE]
        places.append(build.iota(count, mask.meta["val"].device, start=start))
    mask = merge_attention.of_places(build, mask, *places)
    if name == "attn_bias":
        mask = merge_attention.aligned(build, mask)
    return arguments | {name: mask, "is_causal": False}


def forward(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    arguments = arguments_of(call.node.target, args, kwargs)
    queries, keys = _is_split(call, 0)
    if not (queries or keys):
        return call.same(*args, **kwargs)
    unmerged, arguments = arguments, _with_one_mask(call, arguments, 0)
    values = call.node.meta["val"]
    if arguments["is_causal"]:
        operands = (arguments[name] for name in ("query", "key", "value"))
        op, ahead = ours.causal_attention.default, _ahead(call, 0)
        node = call.build.call(op, *operands, ahead, arguments["scale"])
        results = merge_attention.items(call.build, node)
        if isinstance(values, torch.Tensor):
            return restrided(call.build, results[0], values)
        further_results = [_unread(call, results[0], x) for x in values[2:]]
    else:
        if keys and arguments.get("attn_bias") is not None:
            arguments["attn_bias"] = merge_attention.aligned(
                call.build, arguments["attn_bias"]
            )
        is_changed = keys or arguments is not unmerged
        node = (
            call_by_name(call, arguments) if is_changed else call.same(*args, **kwargs)
        )
        if isinstance(values, torch.Tensor):
            return node
        lse = node.meta["val"][1]
        if not keys and tuple(lse.shape) == value_of(call.local_shape(1)):
            return node
        every = [
            call.build.call(operator.getitem, node, i)
            if isinstance(x, torch.Tensor)
            else x
            for i, x in enumerate(values)
        ]
        results, further_results = every[:2], every[2:]
    out, lse = results[0], _per_query(call, results[1], call.local_shape(0)[_SEQUENCE])
    if keys:
        masks = (arguments[n] for n in BIASES if arguments.get(n) is not None)
        out, lse = _merged(call, out, lse, next(masks, None))
    out = restrided(call.build, out, values[0])
    return (out, _as_kernel(call, lse, call.local_shape(1)), *further_results)


def _merged(
    call: LocalCall, out: fx.Node, lse: fx.Node, mask: fx.Node | None
) -> tuple[fx.Node, fx.Node]:
    """Return this rank's summand of the output over all keys, and their log-sum-exp."""
    build, axes = call.build, call.operands[1].dims[_SEQUENCE]
    if mask is not None:
        lse = merge_attention.of_visible(build, lse, mask)
        if "cudnn" in str(call.node.target):
            out = merge_attention.of_seen_rows(build, out, lse)
    return merge_attention.of_ranks(build, out, lse, axes)[:2]


def backward(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    arguments = arguments_of(call.node.target, args, kwargs)
    queries, keys = _is_split(call, 1)
    if not (queries or keys):
        return call.same(*args, **kwargs)
    unmerged, arguments = arguments, _with_one_mask(call, arguments, 1)
    lse = next(name for name in ("logsumexp", "log_sumexp") if name in arguments)
    rows = call.operand_shape(1)[_SEQUENCE]
    weights = _per_query(call, arguments[lse], rows)
    values = call.node.meta["val"]
    if not arguments["is_causal"]:
        if "efficient" not in str(call.node.target):
            if arguments is unmerged:
                return call.same(*args, **kwargs)
            return call_by_name(call, arguments)
        padded_rows = causal_attention.padding(value_of(rows))
        arguments[lse] = _padded(call, weights, padded_rows)
        if keys and arguments["attn_bias"] is not None:
            arguments["attn_bias"] = merge_attention.aligned(
                call.build, arguments["attn_bias"]
            )
        return call_by_name(call, arguments)
    grad = next(
        arguments[name] for name in ("grad_out", "grad_out_") if name in arguments
    )
    tensors = (arguments[name] for name in ("query", "key", "value", "out"))
    op, ahead = ours.causal_attention_backward.default, _ahead(call, 1)
    node = call.build.call(op, grad, *tensors, weights, ahead, arguments["scale"])
    item = partial(call.build.call, operator.getitem, node)
    gradients = (restrided(call.build, item(i), values[i]) for i in range(3))
    return (*gradients, *(None for _ in values[3:]))


def call_by_name(call: LocalCall, arguments: dict[str, Any]) -> fx.Node:
    """Call the op itself with arguments by name."""
    args, kwargs = in_order(call.node.target, arguments)
    return call.same(*args, **kwargs)


def _per_query(call: LocalCall, lse: fx.Node, rows: Size) -> fx.Node:
    """Return a kernel's log-sum-exp as [batch, heads, queries]."""
    value = lse.meta["val"]
    if value.dim() == 4:
        return call.build.call(aten.select.int, lse, 3, 0)
    if value.shape[2] == value_of(rows):
        return lse
    return call.build.call(aten.slice.Tensor, lse, 2, 0, rows)


def _as_kernel(call: LocalCall, lse: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """Return [batch, heads, queries] in a kernel's layout, of this shape."""
    if len(shape) == 4:
        return call.build.call(aten.unsqueeze.default, lse, 3)
    return _padded(call, lse, value_of(shape[2]) - lse.meta["val"].shape[2])


def _padded(call: LocalCall, lse: fx.Node, queries: int) -> fx.Node:
    """Return a log-sum-exp with this many more queries, which see nothing."""
    return call.build.pad_dim(lse, 2, 0, queries, math.inf)


def _unread(call: LocalCall, like: fx.Node, value: Any) -> Any:
    """Return a stand-in for a further result of a kernel, which no backward reads
    here."""
    if not isinstance(value, torch.Tensor):
        return value
    device = like.meta["val"].device
    return call.build.call(
        aten.empty.memory_format, list(value.shape), dtype=value.dtype, device=device
    )
