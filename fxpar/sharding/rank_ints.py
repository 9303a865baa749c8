"""Computes ints of a local graph that depend on the rank.

Functions of a mesh (text, as in ``Mesh.parse``) and of the axes over which they vary
are the only way by which the rank enters such a graph; binding folds them to constants.
In: the mesh as text, axes, sizes. Out: the int on the rank of ``as_rank``.
Never: communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fxpar import _torch
from fxpar.sharding import row_moves, shard_sizes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.row_moves import Exchange

_RANK: ContextVar[int | None] = ContextVar("fxpar_rank", default=None)


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Run the body as this rank of the mesh, which fixes the value of ``offset``."""
    token = _RANK.set(rank)
    try:
        yield
    finally:
        _RANK.reset(token)


def rank_here() -> int:
    """Return the rank to run as: the one of ``as_rank``, else this process's."""
    rank = _RANK.get()
    return _torch.distributed.own_rank() if rank is None else rank


def offset(
    mesh: str, axes: Sequence[str], stride: int, base: int = 0, around: int = 0
) -> int:
    """Return ``base + stride * i``, i being the shard of ``axes`` (major to minor) this
    rank holds, modulo ``around`` unless that is 0. ``mesh``: text as in Mesh.parse."""
    value = base + stride * Mesh.parse(mesh).index(_RANK.get() or 0, tuple(axes))
    return value % around if around else value


def own_size(mesh: str, axes: Sequence[str], rows: int) -> int:
    """Return the rows that this rank holds of a dim of ``rows`` split over axes (major
    to minor). ``mesh``: text as in Mesh.parse."""
    return shard_sizes.shard(rows, Mesh.parse(mesh), axes, _RANK.get() or 0)[1]


def own_start(mesh: str, axes: Sequence[str], rows: int) -> int:
    """Return the position of the first of the rows that ``own_size`` counts."""
    return shard_sizes.shard(rows, Mesh.parse(mesh), axes, _RANK.get() or 0)[0]


def part_size(mesh: str, axes: Sequence[str], rows: int, axis: str, i: int) -> int:
    """Return the rows that rank ``i`` along one more axis gets of the ``own_size``
    rows."""
    own = own_size(mesh, axes, rows)
    return shard_sizes.piece(own, Mesh.parse(mesh), axis, i)[1]


def window_rows(mesh: str, axes: Sequence[str], exchange: str) -> int:
    """Return the number of rows of this rank's window (``row_moves.window``)."""
    return _window(mesh, exchange)[2]


def window_start(mesh: str, axes: Sequence[str], exchange: str) -> int:
    """Return the position in the dim where that window begins."""
    return _window(mesh, exchange)[0]


def _window(mesh: str, exchange: str) -> tuple[int, int, int]:
    rank = _RANK.get() or 0
    return row_moves.window(Exchange.parse(exchange), Mesh.parse(mesh), rank)


# Ints that depend on the rank; their second argument is the axes over which they vary.
PLACES = (offset, own_size, own_start, part_size, window_rows, window_start)
# Functions of ``PLACES`` that describe shards of unequal sizes.
SIZES = (own_size, own_start, part_size, window_rows)


def place(target: Callable[..., int], args: Sequence[Any], rank: int) -> int:
    """Return the value of one of ``PLACES`` on a rank."""
    with as_rank(rank):
        return target(*args)
