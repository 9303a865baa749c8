"""Layers: which ops of a graph repeat, found by structure.

In: the ops of a graph, in order, with a label each, equal for ops that are the same but
for what they read. Out: rows of layers, in which each op has the label of the one a
layer before; and where a layer of a row begins. Names and modules do not count. It is
found in the graph of Dynamo, of which AOTAutograd traces one layer of a kind
(``passes.repeated_segments``), in a Program, where the search ties choices
(``sharding.search.ties``), in a local graph, where schedules are tried on few layers
(``fusion.fewer_layers``), and in forward and backward, of which Inductor compiles one
(``passes.order.layer_segments``). Never changes a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from fxpar._torch.objects import tensors_of

# Bytes to which kernels may want what they read aligned.
ALIGNED = 16

# Distances tried: the most frequent ones between ops of one label.
_TRIED = 16


class RepeatedOps(NamedTuple):
    """What repeats: ops [begin, end), at a distance."""

    begin: int
    end: int
    distance: int


def is_aligned(x: torch.Tensor) -> bool:
    """Whether a tensor begins where kernels may read many elements at once."""
    return x.storage_offset() * x.dtype.itemsize % ALIGNED == 0


def sizes_of(node: fx.Node) -> Any:
    """Of the tensors that a node gives, all but their elements."""
    return tuple(
        (x.dtype, tuple(x.shape), x.stride(), x.device, is_aligned(x))
        for x in tensors_of(node)
    )


def label_of(
    node: fx.Node, value_of: Callable[[fx.Node], Any] = sizes_of, target: Any = None
) -> Any:
    """Equal for nodes of one op and equal constants, on equal values, wherever they
    read these. ``value_of``: equal for nodes that give equal values. ``target``: the op
    if the node's target does not say it."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: ...)
    values = tuple(map(value_of, (node, *node.all_input_nodes)))
    return target or node.target, repr(args), repr(kwargs), values


def labels_of(
    nodes: Iterable[fx.Node],
    value_of: Callable[[fx.Node], Any] = sizes_of,
    target_of: Callable[[fx.Node], Any] = lambda node: node.target,
) -> np.ndarray:
    """``label_of`` each node, as a number."""
    numbers: dict[Any, int] = {}

    @cache
    def number_of(node: fx.Node) -> int:
        return numbers.setdefault(value_of(node), len(numbers))

    return numbered(label_of(node, number_of, target_of(node)) for node in nodes)


def numbered(labels: Iterable[Any]) -> np.ndarray:
    """A number for each label, equal for those that are."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], int)


def with_reads(nodes: Sequence[fx.Node], labels: np.ndarray) -> np.ndarray:
    """Labels in which those of what an op reads count too, and of what that reads, so
    that few ops of one layer have the same."""
    place = {node: i for i, node in enumerate(nodes)}
    last = len(nodes)  # of what is not among the nodes
    reads = [[place.get(r, last) for r in node.all_input_nodes] for node in nodes]
    for _ in range(3):
        at = [*labels.tolist(), -1]
        labels = numbered(
            (at[i], *[at[j] for j in read]) for i, read in enumerate(reads)
        )
    return labels


def rows_of_layers(
    labels: np.ndarray, finer: np.ndarray | None = None, *, overlap: bool = False
) -> list[RepeatedOps]:
    """Rows in which labels repeat, no op in two of them. ``finer``: labels of which
    fewer are equal, to find them by; where they begin and end, what is around ops
    differs, and they are as long as labels repeat; if they may ``overlap``, also where
    that is in another row."""
    rows = rows_at_all_distances(labels if finer is None else finer)
    return without_overlaps(rows, labels, but_at_ends=overlap)


def rows_at_all_distances(
    labels: np.ndarray, finer: np.ndarray | None = None
) -> Iterator[RepeatedOps]:
    """As ``rows_of_layers``, an op perhaps in several rows. ``finer``: to find
    distances by."""
    for distance in _distances(labels if finer is None else finer):
        for begin, end in _runs(labels[distance:] == labels[:-distance]):
            if end - begin >= distance:
                yield RepeatedOps(begin, end + distance, distance)


def without_overlaps(
    rows: Iterable[RepeatedOps], labels: np.ndarray, *, but_at_ends: bool = False
) -> list[RepeatedOps]:
    """Rows, but those with an op of an earlier one, as long as labels repeat; see
    ``rows_of_layers``."""
    free, chosen = np.ones(len(labels), bool), list[RepeatedOps]()
    for row in rows:
        if free[row.begin : row.end].all():
            free[row.begin : row.end] = False
            chosen.append(row)
    if but_at_ends:
        free[:] = True
    for i, (begin, end, distance) in enumerate(chosen):
        repeats = labels[distance:] == labels[:-distance]
        while begin and free[begin - 1] and repeats[begin - 1]:
            begin -= 1
        while end < len(labels) and free[end] and repeats[end - distance]:
            end += 1
        free[begin:end] = but_at_ends
        chosen[i] = RepeatedOps(begin, end, distance)
    return chosen


def _distances(labels: np.ndarray) -> list[int]:
    """Between an op and the next one of its label, those that occur most first; among
    those of which one is a multiple of the other, the smaller first."""
    last: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for i, label in enumerate(labels.tolist()):
        if label in last:
            counts[i - last[label]] += 1
        last[label] = i
    common = [distance for distance, _ in counts.most_common(_TRIED)]
    long = [distance for distance in common if counts[distance] >= distance]
    return sorted(long, key=lambda distance: (-counts[distance], distance))


def _runs(same: np.ndarray) -> list[tuple[int, int]]:
    """Maximal [begin, end) in which all are True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(int), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def first_border(
    nodes: Sequence[fx.Node],
    row: RepeatedOps,
    least: int,
    ends: np.ndarray | None = None,
    starts: Collection[Any] = (),
) -> int:
    """Where the first layer of a row begins, so that few values go from one to the
    next: the later by less than a layer, the fewer layers, of which ``least`` stay.
    Where ``starts``, ops that start collectives, are under way fewer still; ``ends``:
    how far an op that begins at a place may reach."""
    begin, end, distance = row
    place, middle = {node: i for i, node in enumerate(nodes)}, begin + distance
    # Of each place in the second layer: collectives that are under way there, and what
    # is made before and read there or later, by less than a layer.
    under_way, crossing = np.zeros((2, distance + 1), int)
    for i in range(begin, min(begin + 2 * distance, end)):
        last = max((place[user] for user in nodes[i].users if user in place), default=i)
        low, high = max(i + 1, middle), min(last + 1, middle + distance)
        if low < high and last - i <= distance:
            for counts in (crossing, under_way)[: 1 + (nodes[i].target in starts)]:
                counts[low - middle] += 1
                counts[high - middle] -= 1
    late, live = np.cumsum(under_way).tolist(), np.cumsum(crossing).tolist()
    ways = []
    for later in range(distance):
        layers = (end - begin - later) // distance
        if layers >= least:
            at = middle + later
            is_whole = ends is not None and bool(ends[at] > at)
            ways.append((late[later], is_whole, live[later], -layers, later))
    return begin + min(ways)[-1] if ways else begin
