"""Finds the layers of a graph: ops that repeat, by structure.

In: the ops of a graph, in order, with a label each, equal for ops that are equal except
for their operands. Out: rows of layers, in which each op has the label of the op one
layer before; and where the first layer of a row begins. Names and modules do not count.
It is used on Dynamo's graph, where AOTAutograd traces one layer of a kind
(``passes.repeated_segments``), on a Program, where the search ties choices
(``sharding.search.run_search``), on a local graph, where schedules are tried on few
layers (``fusion.fewer_layers``), and on forward and backward, where Inductor compiles
one (``passes.order.outline_layers``). Never changes a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from fxpar._torch.objects import tensors_in

# Bytes to which kernels may want their operands aligned.
ALIGNED = 16

# Distances tried: the most frequent ones between ops of one label.
_TRIED = 16


class RepeatedOps(NamedTuple):
    """Is a row of layers: ops [begin, end), each repeated ``distance`` ops later."""

    begin: int
    end: int
    distance: int


def is_aligned(x: torch.Tensor) -> bool:
    """Return whether a tensor begins where kernels may read many elements at once."""
    return x.storage_offset() * x.dtype.itemsize % ALIGNED == 0


def sizes_of(node: fx.Node) -> Any:
    """Return dtype, shape, strides, device and alignment of each tensor of a node."""
    return tuple(
        (x.dtype, tuple(x.shape), x.stride(), x.device, is_aligned(x))
        for x in tensors_in(node.meta.get("val"))
    )


def label_of(
    node: fx.Node, value_of: Callable[[fx.Node], Any] = sizes_of, target: Any = None
) -> Any:
    """Return a key that is equal for nodes of one op with equal constants and equal
    values, whichever nodes they read. ``value_of``: a key of a node's value.
    ``target``: the op, if it is not the node's target."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: ...)
    values = tuple(map(value_of, (node, *node.all_input_nodes)))
    return target or node.target, repr(args), repr(kwargs), values


def labels_of(
    nodes: Iterable[fx.Node],
    value_of: Callable[[fx.Node], Any] = sizes_of,
    target_of: Callable[[fx.Node], Any] = lambda node: node.target,
) -> np.ndarray:
    """Return the ``label_of`` each node, as a number."""
    numbers: dict[Any, int] = {}

    @cache
    def number_of(node: fx.Node) -> int:
        return numbers.setdefault(value_of(node), len(numbers))

    return numbered(label_of(node, number_of, target_of(node)) for node in nodes)


def numbered(labels: Iterable[Any]) -> np.ndarray:
    """Return a number for each label, equal for equal labels."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], int)


def with_reads(nodes: Sequence[fx.Node], labels: np.ndarray) -> np.ndarray:
    """Return labels that include those of an op's operands and their operands, three
    levels deep, so that few ops of one layer have equal labels."""
    place = {node: i for i, node in enumerate(nodes)}
    last = len(nodes)  # for operands that are not among the nodes
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
    """Return rows in which labels repeat, no op in two of them, the longest first: a
    part that repeats within a layer does not hide the layers. ``finer``: labels of
    which fewer are equal, by which rows are found; since the surroundings of ops differ
    at both ends, rows are then extended as far as ``labels`` repeat. If they may
    ``overlap``, the most frequent distances come first, which are of one layer rather
    than of two, and rows are extended into others."""
    rows = rows_at_all_distances(labels if finer is None else finer)
    if overlap:
        return without_overlaps(rows, labels, but_at_ends=True)
    longest = sorted(rows, key=lambda row: (row.begin - row.end, row.distance))
    return without_overlaps(longest, labels)


def rows_at_all_distances(
    labels: np.ndarray, finer: np.ndarray | None = None
) -> Iterator[RepeatedOps]:
    """Yield rows as in ``rows_of_layers``, but an op may be in several. ``finer``:
    labels by which distances are found."""
    for distance in _distances(labels if finer is None else finer):
        for begin, end in _runs(labels[distance:] == labels[:-distance]):
            if end - begin >= distance:
                yield RepeatedOps(begin, end + distance, distance)


def without_overlaps(
    rows: Iterable[RepeatedOps], labels: np.ndarray, *, but_at_ends: bool = False
) -> list[RepeatedOps]:
    """Return the rows that share no op with an earlier one, each extended as far as
    labels repeat; see ``rows_of_layers``."""
    free, chosen = np.ones(len(labels), bool), list[RepeatedOps]()
    for begin, end, distance in rows:
        if not free[begin:end].all():
            continue
        free[begin:end] = False
        repeats = labels[distance:] == labels[:-distance]
        may_have = np.ones_like(free) if but_at_ends else free
        while begin and may_have[begin - 1] and repeats[begin - 1]:
            begin -= 1
        while end < len(labels) and may_have[end] and repeats[end - distance]:
            end += 1
        free[begin:end] &= but_at_ends
        chosen.append(RepeatedOps(begin, end, distance))
    return chosen


def _distances(labels: np.ndarray) -> list[int]:
    """Return distances between an op and the next one of its label, the most frequent
    first; among equally frequent ones the smaller first."""
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
    """Return the maximal [begin, end) in which all are True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(int), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def first_border(
    nodes: Sequence[fx.Node],
    row: RepeatedOps,
    least: int,
    ends: np.ndarray | None = None,
    starts: Collection[Any] = (),
) -> int:
    """Return where the first layer of a row begins, so that few values go from one
    layer to the next. It is less than a layer after the begin of the row and leaves
    ``least`` layers. ``starts``: ops that start collectives; borders with the fewest
    of these under way are preferred. ``ends``: for a place, how far a body that begins
    earlier may reach; borders where it may not go on are preferred next."""
    begin, end, distance = row
    place, middle = {node: i for i, node in enumerate(nodes)}, begin + distance
    # For each place in the second layer: the number of collectives that are under way
    # there, and of values computed before and read there or less than a layer later.
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
