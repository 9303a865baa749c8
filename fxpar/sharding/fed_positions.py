"""Positions that ranks feed, and that are looked up among the rows of the batch.

Where each rank feeds its own part of a batch, positions in an argument count its own
rows. The program is that of all parts, joined: there they would say rows of the first
rank. In: one program as two ATen graphs, traced with a batch and with one twice as
large, as in ``batch_growth``: a dim that is twice as long holds the batch, and no table
of classes, which may be as long by chance. Nothing is computed.

Positions are what is looked up by, what is compared with a count of the batch's rows
(``arange(len(x)) < ends``), where bags and segments begin, and what is searched as one
sorted row: the parts of ranks, joined, are not sorted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.sharding.growth_powers import name_of
from fxpar.sharding.program import tensor_nodes

# A tensor and its dim that an index counts in; the index.
Lookup = tuple[fx.Node, int, fx.Node]


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


def _along(node: fx.Node) -> Iterator[Lookup]:
    source, dim, index = node.args[:3]
    yield source, dim, index


def _by_list(node: fx.Node) -> Iterator[Lookup]:
    source: Any = node.args[0]
    indices: Any = node.args[1]
    yield from ((source, d, x) for d, x in enumerate(indices) if x is not None)


def _first(node: fx.Node) -> Iterator[Lookup]:
    source, index = node.args[:2]
    yield source, 0, index


def _bags(node: fx.Node) -> Iterator[Lookup]:
    """Where bags begin, too, is a position among the indices."""
    yield from _first(node)
    indices, begins = node.args[1:3]
    yield indices, 0, begins


def _segments(node: fx.Node) -> Iterator[Lookup]:
    source: Any = node.args[0]
    yield source, 0, node.kwargs.get("offsets")


def _documents(node: fx.Node) -> Iterator[Lookup]:
    """Where packed documents begin among queries and keys."""
    for rows, begins in zip(node.args[:2], node.args[3:5], strict=False):
        yield rows, 0, begins


def _documents_in_one_row(node: fx.Node) -> Iterator[Lookup]:
    for rows, begins in zip(node.args[:2], node.args[4:6], strict=False):
        yield rows, 1, begins


LOOKUPS: Mapping[str, Callable[[fx.Node], Iterator[Lookup]]] = {
    **_each("gather index_select scatter scatter_add scatter_reduce", _along),
    **_each("index_add index_copy index_fill index_reduce", _along),
    **_each("index _unsafe_index index_put _unsafe_index_put", _by_list),
    "embedding": _first,
    **_each("_embedding_bag _embedding_bag_forward_only", _bags),
    "segment_reduce": _segments,
    **_each("_varlen_attn _flash_attention_forward", _documents),
    "_efficient_attention_forward": _documents_in_one_row,
}

# Ops that search a sorted row: the position of that among their arguments.
SEARCHES: Mapping[str, int] = {"searchsorted": 0, "bucketize": 1}
_COMPARISONS = _each("eq ne lt le gt ge", None)

# Ops whose results are positions where their operands are.
_KEEPS = _each(
    "view reshape _unsafe_view expand unsqueeze squeeze permute t transpose select "
    "slice split split_with_sizes unbind cat stack flip repeat clone alias detach "
    "lift_fresh_copy contiguous _to_copy convert_element_type where masked_fill add "
    "sub clamp clamp_min clamp_max remainder minimum maximum abs neg gather index "
    "index_select",
    None,
)


# Those of them whose results count rows of the batch where all their operands do.
_COUNTS_ON = _each(
    "view reshape _unsafe_view expand unsqueeze squeeze permute t transpose slice flip "
    "clone alias detach contiguous _to_copy convert_element_type add sub mul",
    None,
)


def fed_positions(once: fx.Graph, twice: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """(a lookup along a dim that holds the batch, the placeholder of ``once`` that its
    positions were fed by); None if there is none."""
    for node, values in _walk(once, twice):
        place = _looked_up(node, name_of(node.target), values)
        if place is not None:
            return node, place
    return None


def compared_ids(once: fx.Graph, twice: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """(a comparison of each row of the batch with each other one, the placeholder of
    ``once`` that holds what is compared); None if there is none. Whether that are
    classes, or documents that each rank counts by itself, is not known."""
    for node, values in _walk(once, twice):
        each_other = sum(values.grows[node]) > 1 and name_of(node.target) in (
            "eq",
            "ne",
        )
        origins = {values.fed.get(x) for x in tensor_nodes(node)} if each_other else ()
        if len(origins) == 1 and (place := next(iter(origins))) is not None:
            return node, place
    return None


def are_alike(
    once: fx.Graph, twice: fx.Graph, pairs: Sequence[tuple[fx.Node, fx.Node]]
) -> bool:
    """Whether the same is known of both values of each pair, nodes of ``once``."""
    *_, (_, values) = _walk(once, twice)
    return all(values.known_of(a) == values.known_of(b) for a, b in pairs)


def _walk(once: fx.Graph, twice: fx.Graph) -> Iterator[tuple[fx.Node, _Values]]:
    """The calls of ``once``, in order, with what is known of the values before them."""
    values = _Values({}, {}, set(), {}, {})
    for a, b in zip(once.nodes, twice.nodes, strict=False):
        if a.op != b.op or a.op not in ("placeholder", "call_function"):
            continue
        values.grows[a] = _longer_dims(a, b)
        if a.op == "call_function":
            yield a, values
            values.note(a, name_of(a.target))
        elif _counts(a) and any(values.grows[a]):
            values.fed[a] = a


@dataclass
class _Values:
    """What is known of the values of a program so far."""

    # Whether each dim holds the batch.
    grows: dict[fx.Node, list[bool]]
    # Of positions, the placeholder that they come from.
    fed: dict[fx.Node, fx.Node]
    # Those that count the rows of the whole batch.
    counters: set[fx.Node]
    # Of positions that are a slice along the batch, where it begins.
    begins: dict[fx.Node, Any]
    # Differences of neighbours among positions, which add up to positions.
    steps: dict[fx.Node, fx.Node]

    def known_of(self, node: fx.Node) -> Any:
        is_counter = node in self.counters
        tables = (self.grows, self.fed, self.begins, self.steps)
        return is_counter, *(table.get(node) for table in tables)

    def note(self, node: fx.Node, name: str) -> None:
        """Take in the next node."""
        operands = tensor_nodes(node)
        if name in ("iota", "arange"):
            self.counters |= {node} if any(self.grows[node]) else set()
        elif name in _COUNTS_ON and operands and self.counters.issuperset(operands):
            self.counters.add(node)
        origin = _origin(node, name, self.fed, self.grows)
        if name == "cumsum":
            origin = self.steps.get(operands[0])
        if origin is None:
            return
        if name == "sub" and len({self.begins.get(x) for x in operands}) > 1:
            self.steps[node] = origin
            return
        self.fed[node] = origin
        if name == "slice" and self.grows[operands[0]][node.args[1]]:
            self.begins[node] = node.args[2]
        elif len(operands) == 1 and operands[0] in self.begins:
            self.begins[node] = self.begins[operands[0]]


def _looked_up(node: fx.Node, name: str, values: _Values) -> fx.Node | None:
    """The placeholder of positions by which a node reads or writes rows."""
    fed, grows = values.fed, values.grows
    for source, dim, index in LOOKUPS.get(name, _none)(node):
        longer = grows.get(source, [])
        if index in fed and longer and longer[dim]:
            return fed[index]
    if name in SEARCHES:
        row: Any = node.args[SEARCHES[name]]
        return fed[row] if row in fed and grows[row][-1] else None
    lengths = node.kwargs.get("lengths") if name == "segment_reduce" else None
    if lengths in values.steps:
        return values.steps[lengths]
    operands = tensor_nodes(node)
    outer = name == "sub" and sum(grows[node]) > 1
    if (outer or name in _COMPARISONS) and not values.counters.isdisjoint(operands):
        return next((fed[x] for x in operands if x in fed and any(grows[x])), None)
    return None


def _none(node: fx.Node) -> Iterator[Lookup]:
    return iter(())


def _longer_dims(a: fx.Node, b: fx.Node) -> list[bool]:
    values = [node.meta.get("val") for node in (a, b)]
    if not all(isinstance(x, torch.Tensor) for x in values):
        return []
    return [m != n for m, n in zip(values[0].shape, values[1].shape, strict=False)]


def _counts(node: fx.Node) -> bool:
    value = node.meta.get("val")
    whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    return whole and value.dtype != torch.bool and not value.dtype.is_complex


def _origin(
    node: fx.Node,
    name: str,
    fed: Mapping[fx.Node, fx.Node],
    grows: Mapping[fx.Node, list[bool]],
) -> fx.Node | None:
    """The placeholder that positions of a node come from; None where they are none, or
    are counted in the whole batch as well, as by an arange."""
    if name not in _KEEPS and node.target is not operator.getitem:
        return None
    read = [node.args[0]] if name in LOOKUPS else tensor_nodes(node)
    read = [x for x in read if isinstance(x, fx.Node)]
    counted = [x for x in read if x not in fed and _counts(x) and any(grows[x])]
    origins = [fed[x] for x in read if x in fed]
    return origins[0] if origins and not counted else None
