"""Finds the parts of packed documents on a rank that has a part of their keys.

In: the places where documents begin among all queries and all keys. Out: where they
begin among this rank's, so that kernels give what its queries see of its keys. A causal
mask is aligned with the last query and the last key of a document: query ``i`` sees the
keys up to ``i`` minus a shift. If a document's keys go on at the next rank, the queries
after the diagonal of the last own key see all own keys, so they are a document of their
own, in a second call, which is not causal; the queries before end at the diagonal. Each
query is in one of the two calls. Never: uses what kernels write for a query that sees
no key; ``sees_keys`` counts by place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxpar.graph.builder import Builder
from fxpar.sharding.factors import Axes
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten


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
        behind = build.call(
            aten.add.Tensor, build.call(aten.sub.Tensor, rows, shift), 1
        )
        end = build.call(aten.minimum.default, end, behind)
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
