"""What a row of the rule table is, and how it becomes the rule of one op call.

A row maps an ATen overload to its factors: text (``"m k, k n -> m n"``) or, where
attributes matter, a function of the call's own arguments (tensors stand as fake
tensors) that returns text or a Rule. ``linear`` / ``monotone`` / ``movement`` name, by
argument position, the operands that may be partial together: ``"0+1"`` both at once,
``"0|1"`` either one with the other whole; a position that holds no tensor in a call
voids its group. ``shape`` is the position of the argument that spells the result's
shape, which partitioning makes local. ``even``: its shards must all be of one size;
``empty``: what it does with one that is empty (``Rule.empty``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpar import _torch
from fxpar.errors import RuleError
from fxpar.sharding.factors import (
    LINEAR,
    MONOTONE,
    MOVEMENT,
    Passage,
    Rule,
    parse_rule,
)

RuleFunction = Callable[..., "Rule | str | None"]


@dataclass(frozen=True)
class Row:
    """One row. ``rule`` returning None means: this call has no rule, make it whole."""

    rule: str | RuleFunction
    linear: str | None = None
    monotone: str | None = None
    movement: str | None = None
    reduce: str | None = None
    shape: int | None = None
    even: bool = False
    empty: str | None = None


def row(rule: str | RuleFunction, **marks: Any) -> Row:
    """A row of the table; see the fields of Row."""
    return Row(rule, **marks)


def operand_positions(args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[int]]:
    """For each argument, positional then keyword, the operand indices it holds."""
    out, n = [], 0
    for arg in [*args, *kwargs.values()]:
        tensors = [
            x for x in _torch.fake.tree_leaves(arg) if isinstance(x, torch.Tensor)
        ]
        out.append(list(range(n, n + len(tensors))))
        n += len(tensors)
    return out


def _passages(
    entry: Row, positions: list[list[int]], whole_numbers: bool
) -> tuple[Passage, ...]:
    """The marks' passages. ``whole_numbers``: of the results alone; rounding to them is
    monotone at best, never linear."""
    out = []
    for text, reductions in (
        (None if whole_numbers else entry.linear, LINEAR),
        (entry.monotone, MONOTONE),
        (entry.movement, MOVEMENT),
    ):
        for group in text.split("|") if text else []:
            places = [int(p) for p in group.split("+")]
            held = [positions[p] if p < len(positions) else [] for p in places]
            if all(held):
                out.append(Passage(tuple(i for h in held for i in h), reductions))
    return tuple(out)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensors of an op's arguments or result, in order."""
    return [x for x in _torch.fake.tree_leaves(value) if isinstance(x, torch.Tensor)]


def evaluate(
    entry: Row, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Rule | None:
    """The sized rule of one call, or None if the row has none for it.

    ``args``/``kwargs``: the call's arguments with fake tensors; ``result``: its fake
    result. Raises RuleError if the row does not fit the call.
    """
    made = entry.rule(*args, **kwargs) if callable(entry.rule) else entry.rule
    if made is None:
        return None
    rule = parse_rule(made) if isinstance(made, str) else made
    if entry.reduce:
        reductions = dict.fromkeys(rule.contracted, entry.reduce) | rule.reduction
        rule = replace(rule, reductions=tuple(reductions.items()))
    results = tensors_of(result)
    operands = tensors_of((args, kwargs))
    whole = any(map(_is_whole, results)) and not all(map(_counts, operands + results))
    passages = _passages(entry, operand_positions(args, kwargs), whole)
    even = rule.even or entry.even
    empty = entry.empty or rule.empty
    passages = rule.passages + passages
    rule = replace(rule, passages=passages, even=even, empty=empty)
    shapes = [tuple(t.shape) for t in [*operands, *results]]
    return rule.with_sizes(shapes)


def _is_whole(x: torch.Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def _counts(x: torch.Tensor) -> bool:
    """Whether elements are whole numbers, which sums of sums are exact in."""
    return _is_whole(x) and x.dtype != torch.bool


def names(n: int, prefix: str = "d") -> list[str]:
    """``n`` factor names."""
    return [f"{prefix}{i}" for i in range(n)]


def text(*tensors: Sequence[str], results: Sequence[Sequence[str]]) -> str:
    """Rule text from words per dim."""
    left = ", ".join(" ".join(t) for t in tensors)
    return f"{left} -> {', '.join(' '.join(t) for t in results)}"


def require(condition: bool, message: str) -> None:
    """Raise RuleError unless the row's own assumption holds."""
    if not condition:
        raise RuleError(message)
