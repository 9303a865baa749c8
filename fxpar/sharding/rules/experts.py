"""Rows of products by expert, and of what brings rows to their experts.

Of ``groups`` groups of experts a rank has one or more, and the rows that count there
(``fxpar/passes/experts/expert_ops.py``, ``dispatch_ops.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Passage, Rule
from fxpar.sharding.rules.row_builders import Word, make, rows, words_of


def _words(
    experts: int, count: int, ids: int, groups: int
) -> tuple[Word, Word, Word, Any]:
    """(word of the rows, of the experts, of the ids, sizes of their factors)."""
    if groups == 1:
        return "s", "e!", "s", {"s": count, "e": experts}
    sizes = {"g": groups, "s": count // groups, "e": experts // groups}
    by_row: Word = ("g", "s")
    return by_row, ("g", "e!"), by_row if ids == count else "s", sizes


def _columns(name: str, count: int) -> list[Word]:
    """A word for each of so many dims of columns."""
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]


def _expert_mm(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, groups: int, _: float
) -> Rule:
    given = weight.shape[0], x.shape[0], ids.shape[0], groups
    by_row, experts, chosen, sizes = _words(*given)
    k, n = _columns("k", x.dim() - 1), _columns("n", weight.dim() - x.dim())
    operands = [[by_row, *k], [experts, *k, *n], [chosen]]
    return make(operands, [[by_row, *n]], sizes)


def _expert_outer(
    x: torch.Tensor,
    y: torch.Tensor,
    ids: torch.Tensor,
    count: int,
    groups: int,
    _: float,
) -> Rule:
    given = count, x.shape[0], ids.shape[0], groups
    by_row, experts, chosen, sizes = _words(*given)
    k, n = _columns("k", x.dim() - 1), _columns("n", y.dim() - 1)
    operands = [[by_row, *k], [by_row, *n], [chosen]]
    return make(operands, [[experts, *k, *n]], sizes)


def _own_expert_mm(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *_: Any
) -> Rule:
    k, n = _columns("k", x.dim() - 1), _columns("n", weight.dim() - x.dim())
    return make([["s", *k], ["e!", *k, *n], ["s"]], [["s", *n]])


def _own_expert_outer(
    x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, *_: Any
) -> Rule:
    k, n = _columns("k", x.dim() - 1), _columns("n", y.dim() - 1)
    return make([["s", *k], ["s", *n], ["s"]], [["e!", *k, *n]])


def _dispatch_slots(
    ids: torch.Tensor, experts: int, groups: int, sources: int, room: int
) -> Rule:
    by_row: Word = ("s", "r!")
    sizes = {"s": sources, "r": ids.shape[0] // sources}
    results: list[list[Word]] = [["g!", "s", "c!"], [by_row], ["s"]]
    rule = make([[by_row]], results, sizes)
    return replace(rule, evenly=frozenset("s"))


def _dispatch_rows(x: torch.Tensor, taken: torch.Tensor, _: int, fill: int) -> Rule:
    """Summands may be sent where slots without a row are zero."""
    sources, columns = taken.shape[1], words_of(x)[1:]
    sizes = {"s": sources, "t": x.shape[0] // sources}
    operands: list[list[Word]] = [[("s", "t!"), *columns], ["g!", "s", "c!"]]
    sums = [Passage((0,))] if x.is_floating_point() and not fill else []
    rule = make(operands, [["g!", "s", "c!", *columns]], sizes, passages=sums)
    return replace(rule, evenly=frozenset("s"))


def _combine_rows(y: torch.Tensor, slots: torch.Tensor) -> Rule:
    sources, columns = y.shape[1], words_of(y)[3:]
    by_row: Word = ("s", "r!")
    sizes = {"s": sources, "r": slots.shape[0] // sources}
    rule = make([["g!", "s", "c!", *columns], [by_row]], [[by_row, *columns]], sizes)
    return replace(rule, evenly=frozenset("s"))


def _within(x: torch.Tensor, most: torch.Tensor, *_: Any) -> Rule:
    """The most of each part lies as the dim 1 that parts are."""
    words = words_of(x)
    return make([words, words[1 : 1 + most.dim()]], [words])


ROWS = {
    **rows("expert_mm", _expert_mm, "fxpar", linear="0|1"),
    **rows("expert_outer", _expert_outer, "fxpar", linear="0|1"),
    **rows("own_expert_mm", _own_expert_mm, "fxpar", linear="0|1"),
    **rows("own_expert_outer", _own_expert_outer, "fxpar", linear="0|1"),
    **rows("dispatch_slots", _dispatch_slots, "fxpar"),
    **rows("dispatch_rows", _dispatch_rows, "fxpar"),
    **rows("combine_rows", _combine_rows, "fxpar", linear="0"),
    **rows("within", _within, "fxpar"),
}
