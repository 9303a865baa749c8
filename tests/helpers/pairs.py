"""Few rows of a table: those in which every two values that can stand together do, or
every value does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairs_of(row: Row) -> set[tuple[tuple[int, Hashable], ...]]:
    """Every two of its values, with their columns."""
    return set(itertools.combinations(enumerate(row), 2))


def covering(
    columns: Sequence[Sequence[Hashable]],
    can_be: Callable[[Row], bool],
    tries: int = 60,
) -> list[Row]:
    """Few rows that have all pairs of values which any row that ``can_be`` has; the
    same ones each time. ``tries``: rows that are looked at for each that is taken."""
    rng = random.Random(0)
    rows = [row for row in itertools.product(*columns) if can_be(row)]
    missing = set[Any]().union(*map(pairs_of, rows))
    taken = []
    while missing:
        best = max(
            rng.sample(rows, tries), key=lambda row: len(pairs_of(row) & missing)
        )
        if pairs_of(best) & missing:
            taken.append(best)
            missing -= pairs_of(best)
    return taken


def diagonal(*columns: Sequence[Any], turns: int = 1) -> list[Any]:
    """All rows of a product of columns, for ``parametrize``; all are slow but as many
    ``turns`` of a diagonal, which has every value."""
    longest = max(map(len, columns))
    quick = {
        tuple((i + k * (i // longest)) % len(each) for k, each in enumerate(columns))
        for i in range(longest * turns)
    }
    places = itertools.product(*(range(len(each)) for each in columns))
    return [
        pytest.param(
            *(each[i] for each, i in zip(columns, row, strict=True)),
            marks=() if row in quick else pytest.mark.slow,
        )
        for row in places
    ]
