"""Rows of interpolation that weighs all rows an output row covers (``antialias=True``).

Output row i is a weighted sum of rows around ``scale * (i + 1 / 2)``, as many as a
filter reaches, which grows with the scale. A rank reads those of its own output rows
(``Rule.windows``), or adds to them. The local forms, and the filters, are in
``fxpar/passes/local/local_antialiasing.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from fxpar.sharding.factors import Reach, RowWindow, Rule, parse_rule
from fxpar.sharding.rules.table import keys, names, row, text

# How many rows the filter of each kind covers where nothing is made smaller.
COVERED = {"bilinear": 2, "bicubic": 4, "lanczos": 6}
# Slopes of windows are fractions of this at most.
_FINEST = 1 << 12


@dataclass(frozen=True)
class Resampled:
    """How one dim is resampled."""

    # Of the dim.
    rows: int
    # Of what is made of it.
    count: int
    # Rows of the dim from one output row to the next.
    scale: float
    # How far a filter reaches from an output row's middle.
    support: float

    @property
    def stays(self) -> bool:
        """Whether each row is what it was."""
        return self.rows == self.count and self.scale == 1.0

    @property
    def reach(self) -> Reach:
        """The rows that each output row covers, and no fewer."""
        slope = Fraction(self.scale).limit_denominator(_FINEST)
        step, of = slope.numerator, slope.denominator
        ends = []
        for i in range(self.count):
            middle, on_slope = self.scale * (i + 0.5), step * i // of
            low = math.floor(middle - self.support + 0.5)
            high = math.floor(middle + self.support + 0.5)
            ends.append((low - on_slope, high - on_slope))
        first = min(low for low, _ in ends)
        return Reach(step, of, first * of, max(high for _, high in ends) - first)


def resampled(
    kind: str,
    rows: int,
    count: int,
    align_corners: bool,
    scale: float | None,
) -> Resampled:
    """How a dim of so many rows becomes one of ``count``; ``scale``: how many times as
    many, if it was given."""
    if align_corners:
        step = (rows - 1) / (count - 1) if count > 1 else 0.0
    else:
        step = 1 / scale if scale is not None and scale > 0 else rows / count
    return Resampled(rows, count, step, COVERED[kind] / 2 * max(step, 1.0))


def both_dims(
    kind: str,
    rows: Sequence[int],
    counts: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> list[Resampled]:
    """How rows and columns are resampled."""
    both = [*scales, None, None]
    return [
        resampled(kind, n, count, align_corners, scale)
        for n, count, scale in zip(rows, counts, both[:2], strict=True)
    ]


def _rule(dims: Sequence[Resampled], lead: int, x: int, other: int) -> Rule:
    """``x`` and ``other``: which tensor has the rows, and which is made of them, or, of
    a backward, makes them."""
    words: dict[int, list[str]] = {x: names(lead), other: names(lead)}
    windows = []
    for d, dim in enumerate(dims):
        splits = min(dim.rows, dim.count) > 1
        for position in (x, other):
            words[position].append(f"o{d}" if splits else "_")
        if splits and not dim.stays:
            ends = dim.rows, dim.count, dim.reach
            windows.append(RowWindow(x, lead + d, other, *ends))
    rule = parse_rule(text(words[0], results=[words[1]]))
    return replace(rule, windows=tuple(windows))


def _may_split(x: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whole numbers are rounded in between; weights go by sizes that are known."""
    return x.is_floating_point() and all(isinstance(n, int) for n in sizes)


def _forward(kind: str, x: torch.Tensor, size: Sequence[int], *how: Any) -> Rule | str:
    rows = x.shape[-2:]
    if not _may_split(x, [*rows, *size]):
        return _whole(kind, x)
    return _rule(both_dims(kind, rows, size, *how), x.dim() - 2, 0, 1)


def _backward(
    kind: str,
    grad: torch.Tensor,
    size: Sequence[int],
    shape: Sequence[int],
    *how: Any,
) -> Rule | str:
    rows = shape[-2:]
    if not _may_split(grad, [*rows, *size]):
        return _whole(kind, grad)
    return _rule(both_dims(kind, rows, size, *how), grad.dim() - 2, 1, 0)


def _whole(kind: str, x: torch.Tensor, *_: Any) -> str:
    """In its rows and columns; so of sizes that are told by factors, too, which is no
    op of a traced graph."""
    words = [*names(x.dim() - 2), "_", "_"]
    return text(words, results=[words])


ROWS = {
    key: row(partial(make, kind), linear="0")
    for kind in COVERED
    for name, make in (("", _forward), (".vec", _whole), ("_backward", _backward))
    for key in keys(f"_upsample_{kind}2d_aa{name}")
}
