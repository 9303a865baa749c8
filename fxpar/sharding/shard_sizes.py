"""How a dim of any size is cut over axes: how long a shard is, and where it begins.

As DTensor's ``Shard``: axis by axis, major first. An axis of k ranks cuts the m rows
that the axes before it left into chunks of ceil(m / k), as ``torch.chunk``; the last
ones are shorter, or empty. Where the axes divide the dim all shards are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.sharding.mesh import Mesh


def chunk(rows: int, count: int, i: int) -> tuple[int, int]:
    """(first row, rows) of chunk ``i`` of ``count``."""
    size = -(-rows // count)
    start = min(i * size, rows)
    return start, min(size, rows - start)


def shard(rows: int, mesh: Mesh, axes: Sequence[str], rank: int) -> tuple[int, int]:
    """(first row, rows) of what a rank holds of a dim of ``rows`` split over axes."""
    start = 0
    for axis in axes:
        begins, rows = chunk(rows, mesh.axis_size(axis), mesh.index(rank, (axis,)))
        start += begins
    return start, rows


def largest(rows: int, mesh: Mesh, axes: Sequence[str]) -> int:
    """Rows of the largest shard, that of coordinate 0."""
    for axis in axes:
        count = mesh.axis_size(axis)
        rows = rows // count if rows % count == 0 else -(-rows // count)
    return rows


def smallest(rows: int, mesh: Mesh, axes: Sequence[str]) -> int:
    """Rows of the smallest shard, that of the last coordinates."""
    for axis in axes:
        count = mesh.axis_size(axis)
        rows = chunk(rows, count, count - 1)[1]
    return rows


def is_even(rows: int, mesh: Mesh, axes: Sequence[str]) -> bool:
    """Whether all shards are alike."""
    return rows % mesh.count(axes) == 0


def may_split(rows: int, mesh: Mesh, axes: Sequence[str]) -> bool:
    """Whether a plan may split a dim so where nobody asked for it: evenly, or if there
    is a row for each rank and one of the axes alone would not divide it either."""
    if is_even(rows, mesh, axes):
        return True
    if rows < mesh.count(axes):
        return False
    return any(rows % mesh.axis_size(axis) for axis in mesh.joined(axes))


def idle(rows: int, mesh: Mesh, axes: Sequence[str]) -> float:
    """Share of the ranks' time that is lost where shards are not alike."""
    held = largest(rows, mesh, axes) * mesh.count(axes)
    return 1 - rows / held if held else 0.0
