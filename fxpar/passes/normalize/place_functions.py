"""Defines functions that give an element from its place in a tensor alone.

A value computed from positions that count up is affine in the place (``Affine``), and a
comparison of such values is one of two constants, by inequalities (``TwoValued``).
In: such functions and sizes, which may be open. Out: functions. Never reads a tensor or
a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

Number: TypeAlias = int | float | bool


@dataclass(frozen=True)
class Affine:
    """Is ``constant + sum(step * place)`` over the dims of a tensor."""

    # One for each dim; 0 for a dim of one element.
    steps: tuple[int, ...]
    # The value at place 0 of all dims.
    constant: Number


@dataclass(frozen=True)
class TwoValued:
    """Is one value where all of some affine functions are at least 0, else another."""

    # The affine functions.
    bounds: frozenset[Affine]
    # The value where all bounds are at least 0.
    yes: Number
    # The value elsewhere.
    no: Number


PlaceFunction: TypeAlias = Affine | TwoValued


def normal(
    function: PlaceFunction | None, sizes: Sequence[Any]
) -> PlaceFunction | None:
    """Return the same function without steps along dims of one element and without
    bounds that all elements keep."""
    if isinstance(function, Affine):
        return on_sizes(function, sizes)
    if function is None:
        return None
    bounds = set[Affine]()
    for bound in function.bounds:
        bound = on_sizes(bound, sizes)
        least, most = range_of(bound, sizes)
        if most is not None and most < 0:
            return Affine((0,) * len(sizes), function.no)
        if least is None or least < 0:
            bounds.add(bound)
    if not bounds or function.yes == function.no:
        return Affine((0,) * len(sizes), function.yes)
    return replace(function, bounds=frozenset(bounds))


def on_sizes(function: Affine, sizes: Sequence[Any]) -> Affine:
    """Return a function of the last dims as a function of all dims."""
    steps = (0,) * (len(sizes) - len(function.steps)) + function.steps
    is_one = (isinstance(n, int) and n == 1 for n in sizes)
    return replace(
        function, steps=tuple(0 if o else s for s, o in zip(steps, is_one, strict=True))
    )


def range_of(
    function: Affine, sizes: Sequence[Any]
) -> tuple[Number | None, Number | None]:
    """Return the least and the largest value; None for both if a size that matters is
    open."""
    least = most = function.constant
    for step, n in zip(function.steps, sizes, strict=True):
        if step and not isinstance(n, int):
            return None, None
        far = step * max(n - 1, 0) if step else 0
        least, most = least + min(far, 0), most + max(far, 0)
    return least, most


def with_opposite_bound(choice: TwoValued) -> TwoValued:
    """Return the same choice by the inequality that holds where its bound does not."""
    (bound,) = choice.bounds  # integers: not at least 0 means at most -1
    opposite = combined(Affine((), -1), bound, -1)
    return TwoValued(frozenset([opposite]), choice.no, choice.yes)


def is_equal_size(one: Any, other: Any) -> bool:
    """Return whether two sizes are known to be equal."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


def combined(one: Affine, other: Affine, times: Number = 1) -> Affine:
    """Return ``one + times * other``."""
    rank = max(len(one.steps), len(other.steps))
    a, b = ((0,) * (rank - len(f.steps)) + f.steps for f in (one, other))
    steps = tuple(x + int(times) * y for x, y in zip(a, b, strict=True))
    return Affine(steps, one.constant + times * other.constant)


def is_constant(function: PlaceFunction | None) -> TypeGuard[Affine]:
    """Return whether a function is affine without steps, so the same everywhere."""
    return isinstance(function, Affine) and not any(function.steps)


def shifted(function: Affine, dim: int, by: int, step: int = 1) -> Affine:
    """Return the function of a slice of ``dim`` from element ``by``, with ``step``."""
    steps = list(function.steps)
    constant = function.constant + steps[dim] * by
    steps[dim] *= step
    return Affine(tuple(steps), constant)


def map_bounds(
    x: PlaceFunction | None, mapping: Callable[[Affine], Affine | None]
) -> PlaceFunction | None:
    """Return ``mapping`` of a function, or a choice with all its bounds mapped; None if
    one of these is None."""
    if not isinstance(x, TwoValued):
        return None if x is None else mapping(x)
    bounds = [mapping(bound) for bound in x.bounds]
    bounds_mapped = frozenset(bound for bound in bounds if bound is not None)
    return None if None in bounds else replace(x, bounds=bounds_mapped)
