"""Every single step from a layout: the one generator that searches of routes share.

In: a layout as tokens (see ``tokens``) and a ``Guide``, which says what a search looks
at: all that can be done (``all_pairs``), or what may lead to one goal
(``one_pair``). Out: moves, each with the layout after it, which follows from its row of
``steps.KINDS``. ``as_step`` names what a move is in axes and dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from fxpar.sharding.cost.collectives import Curve
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard import steps
from fxpar.sharding.reshard.steps import KINDS, Step
from fxpar.sharding.reshard.tokens import Dims, Token, Tokens, count, involved, joined
from fxpar.sharding.spec import Spec

# Partial axes and their reductions.
Pending = tuple[tuple[Token, str], ...]
Layout = tuple[Dims, Pending]


@dataclass(frozen=True)
class Move:
    """A step while searching."""

    # A key of ``steps.KINDS``.
    kind: str
    tokens: Tokens
    # The dims it names, as its kind counts them.
    at: tuple[int, ...]
    # The reduction of a partial value.
    op: str
    # The layout after the move.
    dims: Dims
    pending: Pending


class Guide(Protocol):
    """What a search tries from a layout."""

    def reduced(self, op: str, pending: Pending) -> Iterable[Tokens]:
        """Sets of partial axes of one reduction, to be reduced at once."""

    def scattered(
        self, op: str, d: int, dims: Dims, pending: Pending
    ) -> Iterable[Tokens]:
        """The same, in the order in which they shall split dim ``d``."""

    def added(self, dims: Dims, pending: Pending) -> Iterable[tuple[Token, int | None]]:
        """Unused axes, each with the dim it may split; None makes it partial."""

    def arranged(self, dims: Dims, pending: Pending) -> Iterable[Dims]:
        """Other layouts with as many shards on each dim."""

    def staying(self, d: int, have: Tokens) -> int:
        """How many axes at the major end of a dim stay."""

    def fits(self, d: int, dims: Dims, more: int) -> bool:
        """Whether a dim can be cut into so many times more shards."""


def moves(guide: Guide, dims: Dims, pending: Pending) -> Iterator[Move]:
    """Every move from a layout that a guide allows: reductions, slices and masks,
    permutes, all-to-alls and gathers."""
    for op in dict.fromkeys(op for _, op in pending):
        for tokens in guide.reduced(op, pending):
            yield _move("all_reduce", tokens, dims, pending, (), op)
        for d in range(len(dims)):
            for tokens in guide.scattered(op, d, dims, pending):
                if guide.fits(d, dims, count(tokens)):
                    yield _move("reduce_scatter", tokens, dims, pending, (d,), op)
    for token, onto in guide.added(dims, pending):
        if onto is None:
            yield _move("mask", (token,), dims, pending, (), "sum")
        elif guide.fits(onto, dims, token[2]):
            yield _move("slice", (token,), dims, pending, (onto,))
    for other in guide.arranged(dims, pending):
        yield Move("permute", involved(dims, other), (), "", other, pending)
    for d, have in enumerate(dims):
        for i in range(guide.staying(d, have), len(have)):
            suffix = have[i:]
            for e in range(len(dims)):
                if e != d and guide.fits(e, dims, count(suffix)):
                    yield _move("all_to_all", suffix, dims, pending, (d, e))
            yield _move("all_gather", suffix, dims, pending, (d,))


def _move(
    kind: str,
    tokens: Tokens,
    dims: Dims,
    pending: Pending,
    at: tuple[int, ...] = (),
    op: str = "",
) -> Move:
    """A move and the layout after it."""
    row, after = KINDS[kind], list(dims)
    if row.gathered is not None:
        d = at[row.gathered]
        after[d] = after[d][: -len(tokens)]
    if row.split is not None:
        d = at[row.split]
        after[d] = joined((*after[d], *tokens))
    if row.reduces:
        pending = tuple(p for p in pending if p[0] not in tokens)
    if row.masks:
        pending = tuple(sorted((*pending, *((token, op) for token in tokens))))
    return Move(kind, tokens, at, op, tuple(after), pending)


def named(tokens: Sequence[Token], mesh: Mesh) -> tuple[str, ...]:
    """Tokens as names of axes and their parts."""
    return tuple(mesh.sub_axis(mesh.names[i], above, n) for i, above, n in tokens)


def as_step(
    move: Move, dims: Sequence[int], before: Spec, after: Spec, op: str, mesh: Mesh
) -> Step:
    """The step that a move is, between two specs. ``dims``: the tensor's dim of each of
    the layout's. ``op``: its reduction."""
    row, axes = KINDS[move.kind], named(move.tokens, mesh)
    return Step(
        move.kind,
        after,
        axes if move.at else mesh.ordered(axes),
        tuple(dims[d] for d in move.at),
        op if row.reduces or row.masks else "",
        before if move.kind == "permute" else None,
    )


def seconds(move: Move, mesh: Mesh, nbytes: float, behind: Sequence[bool]) -> float:
    """Seconds of a move from ``nbytes`` on each rank. ``behind``: of each dim of the
    layout whether it is behind the ``front`` of the shape."""
    if KINDS[move.kind].local:
        return 0.0
    late = tuple(behind[d] for d in move.at)
    return curve(move.kind, move.tokens, mesh, late).seconds(nbytes)


@lru_cache(maxsize=1 << 14)
def curve(
    kind: str,
    tokens: Tokens,
    mesh: Mesh,
    late: tuple[bool, ...],
    alone: steps.Alone = steps.ALONE,
) -> Curve:
    """Seconds over bytes of a collective along tokens, as ``steps.curve`` has them."""
    return steps.curve(kind, mesh, named(tokens, mesh), late, alone)
