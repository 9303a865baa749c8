"""Makes the local forms of attention over packed documents with queries or keys split.

In: a call on [tokens, heads, features] with the places where documents begin, of
queries and of keys. Out: the same op on this rank's queries and on all keys, given
where documents begin among its own: one that begins elsewhere begins at its first
query, and one that ends elsewhere ends at its last. Where keys are split too, the
results over this rank's keys are merged by log-sum-exp with those
over other keys, as in ``local_attention``. Never: keys or values sent to another rank.

A causal mask or a window is aligned with the last key of a document, so a document that
is cut after this rank's last query is cut by as many keys. No query sees the keys after
these, and what a kernel writes for them in a backward is no gradient. For a window that
reaches beyond its query, a rank's queries are followed by as many rows of zeros in
place of the next ones: keys are cut after these, and the results of these rows are
dropped.

With split keys, a causal mask is aligned with the last query and the last key of a
document: query ``i`` sees the keys up to ``i`` minus a shift. If a document's keys go
on at the next rank, the queries after the diagonal of the last own key see all own
keys, so they are a document of their own, in a second call, which is not causal; the
queries before end at the diagonal. Each query is in one of the two calls, and what
kernels write for a query that sees no key is not used: ``sees_keys`` counts by place.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.features.sequences import merge_attention
from fxpar.features.sequences.local_attention import arguments_of, call_by_name
from fxpar.graph.builder import Builder, Size
from fxpar.sharding.factors import Axes
from fxpar.sharding.ops.local_call import LocalCall


@dataclass(frozen=True)
class DocumentParts:
    """Says where documents, or their parts, begin on one rank."""

    # Where documents begin among its queries, and the end; a causal mask makes two of
    # each.
    queries: fx.Node
    # The same among its keys.
    keys: fx.Node
    # The same for the second call, of queries that see all of their document's keys
    # here; None where nothing is causal.
    keys_of_tails: fx.Node | None
    # For each query, whether it is in that call.
    in_tail: fx.Node | None
    # For each query, whether it sees a key here.
    sees_keys: fx.Node
    # For each key, whether it is in a document.
    in_document: fx.Node


@dataclass(frozen=True)
class OwnDocuments:
    """Says what a rank has of each document, by places among its own queries and
    keys."""

    # First query.
    first_query: fx.Node
    # One after the last query.
    end_of_queries: fx.Node
    # First key.
    first_key: fx.Node
    # One after the last key.
    end_of_keys: fx.Node
    # The place of a document's last query minus that of its last key, here or not.
    shift: fx.Node


def parts_of(
    call: LocalCall, queries: fx.Node, keys: fx.Node, query: int, causal: bool
) -> DocumentParts:
    """Return the documents that begin at these places, [documents + 1], on this rank;
    ``query``: position of the queries among the operands, before the keys."""
    build, device = call.build, queries.meta["val"].device
    placed = [_placed(call, x, query + i) for i, x in enumerate((queries, keys))]
    edges = [own for _, own in placed]
    last_query, last_key = (_slice(build, places, 1, None) for places, _ in placed)
    own = OwnDocuments(
        first_query=_slice(build, edges[0], 0, -1),
        end_of_queries=_slice(build, edges[0], 1, None),
        first_key=_slice(build, edges[1], 0, -1),
        end_of_keys=_slice(build, edges[1], 1, None),
        shift=build.call(aten.sub.Tensor, last_query, last_key),
    )
    rows, columns = (
        build.iota(call.operand_shape(query + i)[0], device) for i in range(2)
    )
    document = build.call(
        aten.searchsorted.Tensor, own.end_of_queries, rows, right=True
    )
    last = own.end_of_queries.meta["val"].shape[0] - 1
    document = build.call(aten.clamp_max.default, document, last)
    sees_keys = build.call(
        aten.bitwise_and.Tensor,
        _sees_keys(build, own, rows, document, causal),
        _within(build, rows, edges[0]),
    )
    in_document = _within(build, columns, edges[1])
    if not causal:
        return DocumentParts(edges[0], edges[1], None, None, sees_keys, in_document)
    border, seen = _diagonal(build, own)
    return DocumentParts(
        _in_turn(build, own.first_query, border, own.end_of_queries),
        _in_turn(build, own.first_key, seen, own.end_of_keys),
        _in_turn(build, own.first_key, own.first_key, own.end_of_keys),
        build.call(aten.ge.Tensor, rows, _of_row(build, border, document)),
        sees_keys,
        in_document,
    )


def _placed(call: LocalCall, places: fx.Node, operand: int) -> tuple[fx.Node, fx.Node]:
    """Return places counted from this rank's first row, and the same clamped to its
    rows."""
    build, rows = call.build, call.shapes[operand][0]
    axes = call.operands[operand].dims[0]
    places = build.call(aten.sub.Tensor, places, build.own_start(rows, axes))
    own = build.call(aten.clamp.default, places, 0, build.own_size(rows, axes))
    return places, own


def _sees_keys(
    build: Builder, own: OwnDocuments, rows: fx.Node, document: fx.Node, causal: bool
) -> fx.Node:
    """Return for each query whether a key that it sees is here."""
    first, end = (_of_row(build, x, document) for x in (own.first_key, own.end_of_keys))
    if causal:
        shift = _of_row(build, own.shift, document)
        causal_end = build.call(
            aten.add.Tensor, build.call(aten.sub.Tensor, rows, shift), 1
        )
        end = build.call(aten.minimum.default, end, causal_end)
    return build.call(aten.gt.Tensor, end, first)


def _diagonal(build: Builder, own: OwnDocuments) -> tuple[fx.Node, fx.Node]:
    """Return two places in each document: where the queries end that do not see all of
    its keys here, and where the keys end that the last of these queries sees."""
    border = build.call(aten.add.Tensor, own.end_of_keys, own.shift)
    border = build.call(aten.minimum.default, border, own.end_of_queries)
    border = build.call(aten.maximum.default, border, own.first_query)
    seen = build.call(aten.sub.Tensor, border, own.shift)
    seen = build.call(aten.minimum.default, seen, own.end_of_keys)
    return border, build.call(aten.maximum.default, seen, own.first_key)


def key_axes(call: LocalCall, query: int) -> Axes:
    """Return the axes along which ranks hold different keys."""
    axes = call.operands[query + 1].dims[0]
    return axes if call.build.mesh.count(axes) > 1 else ()


def _of_row(build: Builder, x: fx.Node, document: fx.Node) -> fx.Node:
    """Return a value of each document as one of each row of it."""
    return build.call(aten.index_select.default, x, 0, document)


def _slice(build: Builder, x: fx.Node, start: int, end: int | None) -> fx.Node:
    return build.call(aten.slice.Tensor, x, 0, start, end)


def _within(build: Builder, places: fx.Node, edges: fx.Node) -> fx.Node:
    """Return whether places are in any document that begins at these edges."""
    first, last = (build.call(aten.select.int, edges, 0, i) for i in (0, -1))
    inside = (
        build.call(aten.ge.Tensor, places, first),
        build.call(aten.lt.Tensor, places, last),
    )
    return build.call(aten.bitwise_and.Tensor, *inside)


def _in_turn(
    build: Builder, begins: fx.Node, borders: fx.Node, ends: fx.Node
) -> fx.Node:
    """Return where documents begin if each is cut in two at its border."""
    pairs = build.call(aten.stack.default, [begins, borders], 1)
    pairs = build.call(aten.view.default, pairs, [-1])
    last = _slice(build, ends, -1, None)
    return build.call(aten.cat.default, [pairs, last])


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
        past_end = build.call(aten.sub.Tensor, queries, end)
        past_end = build.call(aten.clamp_min.default, past_end, 0)
        seen_keys = build.call(aten.sub.Tensor, keys, past_end)
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


def forward(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    arguments = arguments_of(call.node.target, args, kwargs)
    if axes := key_axes(call, 0):
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
    total = build.copied(total)
    return out, total, state


def _calls(
    call: LocalCall, arguments: dict[str, Any], query: int
) -> tuple[DocumentParts, list[fx.Node]]:
    """Call the op on this rank's parts of documents; for a causal mask, a second time
    on queries that see all of their document's keys here."""
    causal = _is_aligned(arguments)
    starts = arguments["cu_seq_q"], arguments["cu_seq_k"]
    parts = parts_of(call, *starts, query, causal)
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


def backward(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    arguments = arguments_of(call.node.target, args, kwargs)
    if key_axes(call, 1):
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
