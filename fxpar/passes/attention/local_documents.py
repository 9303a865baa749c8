"""Makes the local forms of attention over packed documents with queries or keys split.

In: a call on [tokens, heads, features] with the places where documents begin, of
queries and of keys. Out: the same op on this rank's queries and on all keys, given
where documents begin among its own: one that begins elsewhere begins at its first
query, and one that ends elsewhere ends at its last. Where keys are split too, the
results over this rank's keys (``document_parts``) are merged by log-sum-exp with those
over other keys, as in ``local_attention``. Never: keys or values sent to another rank.

A causal mask or a window is aligned with the last key of a document, so a document that
is cut after this rank's last query is cut by as many keys. No query sees the keys after
these, and what a kernel writes for them in a backward is no gradient. For a window that
reaches beyond its query, a rank's queries are followed by as many rows of zeros in
place of the next ones: keys are cut after these, and the results of these rows are
dropped.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, Size
from fxpar.passes.attention import document_parts, merge_attention
from fxpar.passes.attention.document_parts import DocumentParts
from fxpar.passes.attention.local_attention import arguments_of, call_by_name
from fxpar.sharding.factors import Axes
from fxpar.sharding.ops import LOCAL
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten


def _own_documents(
    call: LocalCall, arguments: dict[str, Any], query: int
) -> dict[str, Any] | None:
    """Return the arguments with where documents begin among this rank's queries and
    among the keys that these see; None if ranks hold the same queries. ``query``:
    position of the queries among the operands."""
    build, spec = call.build, call.operands[query]
    axes, rows = spec.dims[0], call.shapes[query][0]
    if build.mesh.count(axes) == 1:
        return None
    queries, keys = arguments["cu_seq_q"], arguments["cu_seq_k"]
    start, own = build.own_start(rows, axes), build.own_size(rows, axes)
    begins = build.call(aten.sub.Tensor, queries, start)
    reach = _reach(arguments)
    reach = min(reach, rows) if isinstance(rows, int) else reach
    count, end = (
        build.compute(operator.add, x, reach) for x in (own, build.own_end(rows, axes))
    )
    own_begins = build.call(aten.clamp.default, begins, 0, count)
    if not _is_aligned(arguments):
        seen_keys = keys
    elif keys is queries:
        seen_keys = build.call(aten.clamp_max.default, keys, end)
    else:
        behind = build.call(aten.sub.Tensor, queries, end)
        behind = build.call(aten.clamp_min.default, behind, 0)
        seen_keys = build.call(aten.sub.Tensor, keys, behind)
        seen_keys = build.call(aten.cummax.default, seen_keys, 0)
        seen_keys = build.call(operator.getitem, seen_keys, 0)
        seen_keys = build.cast(seen_keys, keys.meta["val"].dtype)
    followed = {
        name: _followed(build, arguments[name], dim, reach)
        for name, dim in _BY_QUERY.items()
        if reach and name in arguments
    }
    return arguments | followed | {"cu_seq_q": own_begins, "cu_seq_k": seen_keys}


# The dim of queries in each argument that has a row for each.
_BY_QUERY = {"query": 0, "grad_out": 0, "out": 0, "lse": 1}


def _reach(arguments: dict[str, Any]) -> int:
    """Return how many keys a query sees after its own place."""
    return max(0, (arguments["window_size"] or (-1, -1))[1])


def _followed(build: Builder, x: fx.Node, dim: int, rows: int) -> fx.Node:
    """Return ``x`` followed by this many rows of zeros."""
    amounts = [rows if d == dim else 0 for d in range(x.meta["val"].dim())]
    return build.pad(x, amounts)


def _cut(call: LocalCall, x: fx.Node, dim: int, rows: Size) -> fx.Node:
    """Return a result without the rows that follow this rank's."""
    call_op = call.build.call
    x = call_op(aten.slice.Tensor, x, dim, 0, rows)
    return call_op(aten.clone.default, x, memory_format=torch.contiguous_format)


def _is_aligned(arguments: dict[str, Any]) -> bool:
    """Return whether the keys that a query sees count from the end of its document."""
    window = arguments["window_size"] or (-1, -1)
    return arguments["is_causal"] or tuple(window) != (-1, -1)


def _forward(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    arguments = arguments_of(call.node.target, args, kwargs)
    if axes := document_parts.key_axes(call, 0):
        return _over_own_keys(call, arguments, axes)
    own = _own_documents(call, arguments, 0)
    if own is None:
        return call.same(*args, **kwargs)
    node = call_by_name(call, own)
    if not _reach(arguments):
        return node
    out, lse, state = (call.build.call(operator.getitem, node, i) for i in range(3))
    rows = call.operand_shape(0)[0]
    return _cut(call, out, 0, rows), _cut(call, lse, 1, rows), state


def _over_own_keys(
    call: LocalCall, arguments: dict[str, Any], axes: Axes
) -> tuple[fx.Node, ...]:
    """Return this rank's summand of the output over all keys, and their log-sum-exp."""
    build = call.build
    parts, calls = _calls(call, arguments, 0)
    out, lse, state = (build.call(operator.getitem, calls[0], i) for i in range(3))
    weights = build.call(aten.transpose.int, lse, 0, 1)
    if len(calls) > 1:
        in_tail, tails = parts.in_tail, calls[1]
        out = _of_each(build, in_tail, build.call(operator.getitem, tails, 0), out)
        tail = build.call(operator.getitem, tails, 1)
        tail = build.call(aten.transpose.int, tail, 0, 1)
        weights = _of_each(build, in_tail, tail, weights)
    out = build.where(_column(build, parts.sees_keys, 2), out, 0.0)
    weights = build.where(_column(build, parts.sees_keys, 1), weights, -math.inf)
    of_ranks = merge_attention.gathered(build, weights, axes)
    total = merge_attention.log_of_sum(build, of_ranks)
    dtype = out.meta["val"].dtype
    out = build.cast(merge_attention.weighted(build, out, weights, total), dtype)
    # Kernels give inf for a query that sees no key; backward, its weights are 0.
    sees_keys = build.call(aten.ne.Scalar, total, -math.inf)
    total = build.where(sees_keys, total, math.inf)
    total = build.call(aten.transpose.int, total, 0, 1)
    total = build.call(aten.clone.default, total, memory_format=torch.contiguous_format)
    return out, total, state


def _calls(
    call: LocalCall, arguments: dict[str, Any], query: int
) -> tuple[DocumentParts, list[fx.Node]]:
    """Call the op on this rank's parts of documents; for a causal mask, a second time
    on queries that see all of their document's keys here."""
    causal = _is_aligned(arguments)
    starts = arguments["cu_seq_q"], arguments["cu_seq_k"]
    parts = document_parts.parts_of(call, *starts, query, causal)
    own = arguments | {"cu_seq_q": parts.queries, "cu_seq_k": parts.keys}
    calls = [call_by_name(call, own)]
    if parts.keys_of_tails is not None:
        seen_whole = {"is_causal": False, "window_size": None}
        own = own | seen_whole | {"cu_seq_k": parts.keys_of_tails}
        calls.append(call_by_name(call, own))
    return parts, calls


def _column(build: Builder, rows: fx.Node, dims: int) -> fx.Node:
    """Return a value of each row with ``dims`` more dims of size 1, to broadcast."""
    return build.call(aten.view.default, rows, [-1, *(1 for _ in range(dims))])


def _of_each(build: Builder, chosen: Any, x: fx.Node, other: fx.Node) -> fx.Node:
    """Return rows of ``x`` where chosen, else of ``other``."""
    chosen = _column(build, chosen, x.meta["val"].dim() - 1)
    return build.call(aten.where.self, chosen, x, other)


def _by_own_keys(
    call: LocalCall, arguments: dict[str, Any]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return this rank's summand of the gradients of queries, and the gradients of its
    keys and values."""
    build = call.build
    parts, calls = _calls(call, arguments, 1)
    gradients = [[build.call(operator.getitem, x, i) for x in calls] for i in range(3)]
    first, *tails = gradients[0]
    queries = first
    for tail in tails:
        queries = _of_each(build, parts.in_tail, tail, queries)
    queries = build.where(_column(build, parts.sees_keys, 2), queries, 0.0)
    key, value = (_sum_of_own(build, x, parts) for x in gradients[1:])
    return queries, key, value


def _sum_of_own(build: Builder, summands: list[fx.Node], parts: Any) -> fx.Node:
    """Return the gradient of keys from those of each call; 0 for a key of no
    document."""
    total, *rest = summands
    for x in rest:
        total = build.call(aten.add.Tensor, total, x)
    return build.where(_column(build, parts.in_document, 2), total, 0.0)


def _backward(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    arguments = arguments_of(call.node.target, args, kwargs)
    if document_parts.key_axes(call, 1):
        return _by_own_keys(call, arguments)
    own = _own_documents(call, arguments, 1)
    if own is None:
        return call.same(*args, **kwargs)
    node = call_by_name(call, own)
    queries, keys, values = (
        call.build.call(operator.getitem, node, i) for i in range(3)
    )
    if _reach(arguments):
        queries = _cut(call, queries, 0, call.operand_shape(1)[0])
    return (queries, *(_of_seen(call, x, own["cu_seq_k"]) for x in (keys, values)))


def _of_seen(call: LocalCall, grad: fx.Node, begins: fx.Node) -> fx.Node:
    """Return gradients of keys, 0 for keys after the last document."""
    build, value = call.build, grad.meta["val"]
    places = build.iota(value.shape[0], value.device)
    end = build.call(aten.select.int, begins, 0, -1)
    is_seen = build.call(aten.lt.Tensor, places, end)
    is_seen = build.call(aten.view.default, is_seen, [-1, 1, 1])
    return build.where(is_seen, grad, 0.0)


LOCAL.update(
    {
        "torch_attn::_varlen_attn": _forward,
        "torch_attn::_varlen_attn_backward": _backward,
    }
)
