"""Computes how a dim of any size is cut over axes: the size of a shard, and where it
begins.

As DTensor's ``Shard``: axis by axis, major first. An axis of k ranks cuts the m rows
that the axes before it left into chunks of ceil(m / k), as ``torch.chunk``; the last
ones are shorter, or empty. Where the axes divide the dim all shards are equal. An axis
with shares (``Mesh.shares``) cuts in their proportion, each end rounded.
In: rows, a mesh, axes. Out: numbers of rows, positions.
Never: pads a shard; shards may be unequal, or empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from fxpar.sharding.mesh import Mesh

# Rows of a dim per rank from which on it cannot be a dim of heads.
LONG = 8


def chunk(rows: int, count: int, i: int) -> tuple[int, int]:
    """Return (first row, rows) of chunk ``i`` of ``count``."""
    size = -(-rows // count)
    start = min(i * size, rows)
    return start, min(size, rows - start)


def piece(rows: int, mesh: Mesh, axis: str, i: int) -> tuple[int, int]:
    """Return (first row, rows) that rank ``i`` of an axis gets of ``rows``."""
    weights = mesh.weights_of(axis)
    if weights is None:
        return chunk(rows, mesh.axis_size(axis), i)
    start, end = _ends(rows, weights)[i : i + 2]
    return start, end - start


@lru_cache(maxsize=1 << 12)
def _ends(rows: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each piece of ``rows`` begins, and where the last one ends."""
    total = sum(weights)
    sums = (0, *itertools.accumulate(weights))
    return tuple((2 * rows * n + total) // (2 * total) for n in sums)


def shard(rows: int, mesh: Mesh, axes: Sequence[str], rank: int) -> tuple[int, int]:
    """Return (first row, rows) that a rank holds of a dim of ``rows`` split over
    axes."""
    start = 0
    for axis in axes:
        begins, rows = piece(rows, mesh, axis, mesh.index(rank, (axis,)))
        start += begins
    return start, rows


def has_shares(mesh: Mesh, axes: Sequence[str]) -> bool:
    """Return whether one of the axes cuts in unequal shares."""
    return not mesh.is_shared_equally and any(map(mesh.weights_of, axes))


def _sizes(rows: int, mesh: Mesh, axes: Sequence[str]) -> set[int]:
    """Return the sizes of all shards."""
    sizes = {rows}
    for axis in axes:
        places = range(mesh.axis_size(axis))
        sizes = {piece(n, mesh, axis, i)[1] for n in sizes for i in places}
    return sizes


def largest(rows: int, mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the rows of the largest shard: coordinate 0's, unless an axis has
    shares."""
    if has_shares(mesh, axes):
        return max(_sizes(rows, mesh, axes))
    for axis in axes:
        count = mesh.axis_size(axis)
        rows = rows // count if rows % count == 0 else -(-rows // count)
    return rows


def smallest(rows: int, mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the rows of the smallest shard. Of 7 over 2 and 3 ranks it is the third of
    the first 4 rows, which has none; of an open size it is that of the last
    coordinates."""
    if has_shares(mesh, axes) or isinstance(rows, int) and rows % mesh.count(axes):
        return min(_sizes(rows, mesh, axes))
    for axis in axes:
        count = mesh.axis_size(axis)
        rows = chunk(rows, count, count - 1)[1]
    return rows


def is_even(rows: int, mesh: Mesh, axes: Sequence[str]) -> bool:
    """Return whether all shards are equal."""
    if has_shares(mesh, axes):
        # For an open size it is unknown.
        return isinstance(rows, int) and len(_sizes(rows, mesh, axes)) == 1
    return rows % mesh.count(axes) == 0


def is_exact(rows: int, mesh: Mesh, axes: Sequence[str]) -> bool:
    """Return whether nothing is rounded: n times as many rows have shards n times as
    large."""
    if not has_shares(mesh, axes):
        return rows % mesh.count(axes) == 0
    for i, axis in enumerate(axes):
        weights = mesh.weights_of(axis) or (1,) * mesh.axis_size(axis)
        for n in _sizes(rows, mesh, axes[:i]):
            if any(n * weight % sum(weights) for weight in weights):
                return False
    return True


def can_split(
    rows: int, mesh: Mesh, axes: Sequence[str], *, even: bool = False
) -> bool:
    """Return whether a plan may split a dim over these axes unasked: where all shards
    are equal; with unequal shards, unless ``even``, where each rank has a row, and
    there are many rows for each rank or one of the axes alone does not divide them
    either."""
    if is_even(rows, mesh, axes) or even:
        return is_even(rows, mesh, axes)
    if has_shares(mesh, axes):
        return smallest(rows, mesh, axes) > 0
    if rows < mesh.count(axes):
        return False
    is_long = rows >= LONG * mesh.count(axes)
    return is_long or any(rows % mesh.axis_size(axis) for axis in mesh.joined(axes))


def is_in_chunks(rows: int, mesh: Mesh, axes: Sequence[str]) -> bool:
    """Return whether DTensor's ``Shard`` over the axes gives these shards: equal
    ones, or chunks of whole axes in mesh order. (An axis cuts 5 rows into 2, 2, 1,
    0; its parts, 2 by 2, into 2, 1, 1, 1. DTensor (2.13) cannot make unequal strided
    shards.)"""
    if is_even(rows, mesh, axes):
        return True
    if has_shares(mesh, axes) or any(":" in axis for axis in axes):
        return False
    return tuple(axes) == tuple(mesh.ordered(axes))


def idle(rows: int, mesh: Mesh, axes: Sequence[str]) -> float:
    """Return the share of the time of equal ranks that is lost where shards are
    unequal."""
    padded_rows = largest(rows, mesh, axes) * mesh.count(axes)
    return 1 - rows / padded_rows if padded_rows else 0.0
