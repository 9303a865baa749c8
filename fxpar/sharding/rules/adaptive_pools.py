"""Rows of pools that cut a dim into so many parts, nearly alike.

Part i of ``few`` begins at row ``i * many // few`` and ends, rounded up, at ``(i + 1) *
many / few``, so neighbours may share a row. A rank reads the rows of its own parts
(``Rule.windows``); where parts are of one length, and ranks have as many, these are its
own. The local forms are in ``fxpar/passes/local/local_adaptive_pools.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxpar.sharding.factors import Reach, RowWindow, Rule, parse_rule
from fxpar.sharding.rules.table import Row, keys, names, row, text
from fxpar.sharding.rules.window_dims import each


def _reach(many: int, few: int) -> Reach:
    """The rows of each of ``few`` parts, as many as the longest has."""
    ends = range(1, few + 1)
    span = max(-(-i * many // few) - (i - 1) * many // few for i in ends)
    return Reach(many, few, span=span)


def _parts(
    many: Sequence[int], few: Sequence[int], first: int, position: int, other: int
) -> tuple[list[str], list[str], tuple[RowWindow, ...]]:
    """(words of dims that are cut, words of their parts, windows); ``first`` is the
    first of these dims, ``position`` and ``other`` tell the tensors that have them."""
    rows, parts, windows = [], [], []
    for d, (n, count) in enumerate(zip(many, few, strict=True)):
        are_known = isinstance(n, int) and isinstance(count, int)
        if not are_known or min(n, count) <= 1:
            rows.append("_")
            parts.append("_")
            continue
        rows.append(f"o{d}")
        parts.append(f"o{d}")
        halo = None if n % count else (0, 0)
        reach = _reach(n, count)
        windows.append(RowWindow(position, first + d, other, n, count, reach, halo))
    return rows, parts, tuple(windows)


def _forward(k: int, results: int, x: torch.Tensor, few: int | Sequence[int]) -> Rule:
    first = x.dim() - k
    rows, parts, windows = _parts(x.shape[first:], each(few, k), first, 0, 1)
    lead = names(first)
    words = text([*lead, *rows], results=[[*lead, *parts]] * results)
    return replace(parse_rule(words), windows=windows)


def _backward(k: int, grad: torch.Tensor, x: torch.Tensor, *index: Any) -> Rule:
    """``index``: where maxima lie."""
    first, end = x.dim() - k, 2 + len(index)
    rows, parts, windows = _parts(x.shape[first:], grad.shape[first:], first, end, 0)
    lead = names(first)
    read = [[*lead, *parts], [*lead, *rows], *[[*lead, *parts]] * len(index)]
    words = text(*read, results=[[*lead, *rows]])
    return replace(parse_rule(words), windows=windows)


def _of_each(pattern: str, ranks: Sequence[int], make: Any, **marks: Any) -> dict:
    """Rows for ``pattern`` with each number of spatial dims put in."""
    out: dict[Any, Row] = {}
    for k in ranks:
        out |= dict.fromkeys(keys(pattern.format(k)), row(partial(make, k), **marks))
    return out


def _average(k: int, *args: Any) -> Rule:
    return _forward(k, 1, *args)


def _maximum(k: int, *args: Any) -> Rule:
    return _forward(k, 2, *args)


ROWS = {
    **_of_each("adaptive_avg_pool{}d", (1, 2, 3), _average, linear="0"),
    **_of_each("_adaptive_avg_pool{}d", (2, 3), _average, linear="0"),
    **_of_each("_adaptive_avg_pool{}d_backward", (2, 3), _backward, linear="0"),
    **_of_each("adaptive_max_pool{}d", (2, 3), _maximum),
    **_of_each("adaptive_max_pool{}d_backward", (2, 3), _backward, linear="0"),
}
