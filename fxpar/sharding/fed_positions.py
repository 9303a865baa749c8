"""Positions that ranks feed, and that are looked up among the rows of the batch.

Where each rank feeds its own part of a batch, positions in an argument count its own
rows. The program is that of all parts, joined: there they would say rows of the first
rank. In: one program as two ATen graphs, traced with a batch and with one twice as
large, as in ``batch_growth``: a dim that is twice as long holds the batch, and no table
of classes, which may be as long by chance. Nothing is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
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


LOOKUPS: Mapping[str, Callable[[fx.Node], Iterator[Lookup]]] = {
    **_each("gather index_select scatter scatter_add scatter_reduce", _along),
    **_each("index_add index_copy index_fill index_reduce", _along),
    **_each("index _unsafe_index index_put _unsafe_index_put", _by_list),
    "embedding": _first,
    **_each("_embedding_bag _embedding_bag_forward_only", _bags),
}

# Ops whose results are positions where their operands are.
_KEEPS = _each(
    "view reshape _unsafe_view expand unsqueeze squeeze permute t transpose select "
    "slice split split_with_sizes unbind cat stack flip repeat clone alias detach "
    "lift_fresh_copy contiguous _to_copy convert_element_type where masked_fill add "
    "sub clamp clamp_min clamp_max remainder minimum maximum abs neg gather index "
    "index_select",
    None,
)


def fed_positions(once: fx.Graph, twice: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """(a lookup along a dim that holds the batch, the placeholder of ``once`` that its
    positions were fed by); None if there is none."""
    fed: dict[fx.Node, fx.Node] = {}
    grows: dict[fx.Node, list[bool]] = {}
    for a, b in zip(once.nodes, twice.nodes, strict=False):
        if a.op != b.op or a.op not in ("placeholder", "call_function"):
            continue
        grows[a] = _longer_dims(a, b)
        if a.op == "placeholder":
            if _counts(a) and any(grows[a]):
                fed[a] = a
            continue
        name = name_of(a.target)
        for source, dim, index in LOOKUPS.get(name, _none)(a):
            longer = grows.get(source, [])
            if index in fed and longer and longer[dim]:
                return a, fed[index]
        origin = _origin(a, name, fed, grows)
        if origin is not None:
            fed[a] = origin
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
