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
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import arguments_of
from fxpar.features.sequences.local_attention import call_by_name
from fxpar.features.sequences.merge_attention import items, of_ranks
from fxpar.graph.builder import Builder, Size
from fxpar.sharding.factors import Axes
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten


class _OwnDocuments:
    """Holds what a rank has of each document, by places among its own queries and keys,
    and a mask's two calls on it."""

    def __init__(self, call: LocalCall, arguments: dict[str, Any], query: int) -> None:
        """``query``: position of the queries among the operands, before the keys."""
        self.build = build = call.build
        begins = arguments["cu_seq_q"], arguments["cu_seq_k"]
        self.causal = _is_aligned(arguments)
        placed = [_placed(call, x, query + i) for i, x in enumerate(begins)]
        # Where documents begin among the rank's queries, and among its keys.
        self.queries, self.keys = (own for _, own in placed)
        self.first_query, self.first_key = (
            _slice(build, own, 0, -1) for _, own in placed
        )
        self.end_of_queries, self.end_of_keys = (
            _slice(build, own, 1, None) for _, own in placed
        )
        # The place of a document's last query minus that of its last key, here or not.
        ends = (_slice(build, places, 1, None) for places, _ in placed)
        self.shift = build.call(aten.sub.Tensor, *ends)
        device = begins[0].meta["val"].device
        self.rows, columns = (
            build.iota(call.operand_shape(query + i)[0], device) for i in range(2)
        )
        # For each key, whether it is in a document.
        self.in_document = _within(build, columns, self.keys)
        # The document of each query.
        end = self.end_of_queries
        document = build.call(aten.searchsorted.Tensor, end, self.rows, right=True)
        last = end.meta["val"].shape[0] - 1
        self.document = build.call(aten.clamp_max.default, document, last)
        # For each query, whether it sees a key here.
        self.sees_keys = build.call(
            aten.bitwise_and.Tensor,
            self._sees_keys_here(),
            _within(build, self.rows, self.queries),
        )
        self.calls, self.in_tail = self._calls(call, arguments)

    def _calls(
        self, call: LocalCall, arguments: dict[str, Any]
    ) -> tuple[list[fx.Node], fx.Node | None]:
        """Call the op on this rank's parts of documents; for a causal mask, a second
        time on queries that see all of their document's keys here. Return the calls,
        and for each query, whether it is in the second."""
        build = self.build
        if not self.causal:
            own = arguments | {"cu_seq_q": self.queries, "cu_seq_k": self.keys}
            return [call_by_name(call, own)], None
        border, seen = self._diagonal()
        own = arguments | {
            "cu_seq_q": _in_turn(build, self.first_query, border, self.end_of_queries),
            "cu_seq_k": _in_turn(build, self.first_key, seen, self.end_of_keys),
        }
        tails = own | {
            "is_causal": False,
            "window_size": None,
            "cu_seq_k": _in_turn(
                build, self.first_key, self.first_key, self.end_of_keys
            ),
        }
        calls = [call_by_name(call, each) for each in (own, tails)]
        border = self._of_row(border)
        return calls, build.call(aten.ge.Tensor, self.rows, border)

    def _sees_keys_here(self) -> fx.Node:
        """Return for each query of a document whether a key that it sees is here."""
        call = self.build.call
        first, end = map(self._of_row, (self.first_key, self.end_of_keys))
        if self.causal:
            own_end = call(aten.sub.Tensor, self.rows, self._of_row(self.shift))
            own_end = call(aten.add.Tensor, own_end, 1)
            end = call(aten.minimum.default, end, own_end)
        return call(aten.gt.Tensor, end, first)

    def _diagonal(self) -> tuple[fx.Node, fx.Node]:
        """Return two places in each document: where the queries end that do not see all
        of its keys here, and where the keys end that the last of these queries sees."""
        call = self.build.call
        border = call(aten.add.Tensor, self.end_of_keys, self.shift)
        border = call(aten.minimum.default, border, self.end_of_queries)
        border = call(aten.maximum.default, border, self.first_query)
        seen = call(aten.sub.Tensor, border, self.shift)
        seen = call(aten.minimum.default, seen, self.end_of_keys)
        return border, call(aten.maximum.default, seen, self.first_key)

    def _of_row(self, x: fx.Node) -> fx.Node:
        """Return a value of each document as one of each query of it."""
        return self.build.call(aten.index_select.default, x, 0, self.document)

    def of_each(self, results: Sequence[fx.Node]) -> fx.Node:
        """Return the rows of a result of the calls, [queries, ...], each from the call
        that its query is in."""
        first, *tails = results
        for tail in tails:
            in_tail = _column(self.build, self.in_tail, first.meta["val"].dim() - 1)
            first = self.build.call(aten.where.self, in_tail, tail, first)
        return first


def _placed(call: LocalCall, places: fx.Node, operand: int) -> tuple[fx.Node, fx.Node]:
    """Return places counted from this rank's first row, and the same clamped to its
    rows."""
    build, rows = call.build, call.shapes[operand][0]
    axes = call.operands[operand].dims[0]
    places = build.call(aten.sub.Tensor, places, build.own_start(rows, axes))
    own = build.call(aten.clamp.default, places, 0, build.own_size(rows, axes))
    return places, own


def key_axes(call: LocalCall, query: int) -> Axes:
    """Return the axes along which ranks hold different keys."""
    axes = call.operands[query + 1].dims[0]
    return axes if call.build.mesh.count(axes) > 1 else ()


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
    followed = dict[str, fx.Node]()
    for name, dim in _BY_QUERY.items() if reach else ():
        if (x := arguments.get(name)) is not None:  # followed by rows of zeros
            followed[name] = build.pad_dim(x, dim, 0, reach)
    return arguments | followed | {"cu_seq_q": own_begins, "cu_seq_k": seen_keys}


# The dim of queries in each argument that has a row for each.
_BY_QUERY = {"query": 0, "grad_out": 0, "out": 0, "lse": 1}


def _reach(arguments: dict[str, Any]) -> int:
    """Return how many keys a query sees after its own place."""
    return max(0, (arguments["window_size"] or (-1, -1))[1])


def _cut(call: LocalCall, x: fx.Node, dim: int, rows: Size) -> fx.Node:
    """Return a result without the rows that follow this rank's."""
    return call.build.copied(call.build.call(aten.slice.Tensor, x, dim, 0, rows))


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
    out, lse, state = items(call.build, node)
    rows = call.operand_shape(0)[0]
    return _cut(call, out, 0, rows), _cut(call, lse, 1, rows), state


def _over_own_keys(
    call: LocalCall, arguments: dict[str, Any], axes: Axes
) -> tuple[fx.Node, ...]:
    """Return this rank's summand of the output over all keys, and their log-sum-exp."""
    build, own = call.build, _OwnDocuments(call, arguments, 0)
    outs, logs, states = zip(*(items(build, x) for x in own.calls), strict=True)
    weights = [build.call(aten.transpose.int, lse, 0, 1) for lse in logs]
    seen = own.sees_keys
    out = build.where(_column(build, seen, 2), own.of_each(outs), 0.0)
    lse = build.where(_column(build, seen, 1), own.of_each(weights), -math.inf)
    out, total, shift = of_ranks(build, out, lse, axes)
    # Kernels give inf for a query that sees no key; backward, its weights are 0.
    sees_keys = build.call(aten.ne.Scalar, shift, -math.inf)
    total = build.where(sees_keys, total, math.inf)
    total = build.call(aten.transpose.int, total, 0, 1)
    total = build.copied(total)
    return out, total, states[0]


def _column(build: Builder, rows: fx.Node, dims: int) -> fx.Node:
    """Return a value of each row with ``dims`` more dims of size 1, to broadcast."""
    return build.call(aten.view.default, rows, [-1, *(1 for _ in range(dims))])


def _by_own_keys(
    call: LocalCall, arguments: dict[str, Any]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return this rank's summand of the gradients of queries, and the gradients of its
    keys and values, 0 for a key of no document."""
    build, own = call.build, _OwnDocuments(call, arguments, 1)
    queries, *of_keys = zip(*(items(build, x) for x in own.calls), strict=True)
    query = build.where(_column(build, own.sees_keys, 2), own.of_each(queries), 0.0)
    in_document = _column(build, own.in_document, 2)
    add = partial(build.call, aten.add.Tensor)
    key, value = (
        build.where(in_document, reduce(add, summands), 0.0) for summands in of_keys
    )
    return query, key, value


def backward(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    arguments = arguments_of(call.node.target, args, kwargs)
    if key_axes(call, 1):
        return _by_own_keys(call, arguments)
    own = _own_documents(call, arguments, 1)
    if own is None:
        return call.same(*args, **kwargs)
    node = call_by_name(call, own)
    queries, keys, values = items(call.build, node)
    if _reach(arguments):
        queries = _cut(call, queries, 0, call.operand_shape(1)[0])
    return (queries, *(_of_seen(call, x, own["cu_seq_k"]) for x in (keys, values)))


def _of_seen(call: LocalCall, grad: fx.Node, begins: fx.Node) -> fx.Node:
    """Return gradients of keys, 0 for keys after the last document."""
    build, value = call.build, grad.meta["val"]
    places = build.iota(value.shape[0], value.device)
    end = build.call(aten.select.int, begins, 0, -1)
    is_seen = build.call(aten.lt.Tensor, places, end)
    return build.where(_column(build, is_seen, 2), grad, 0.0)
