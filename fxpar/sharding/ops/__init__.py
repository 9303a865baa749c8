"""Holds the table of ops, ATen overload -> row; ``rule_of`` looks up, users add with
``rule``.

One module per family of ops has a dict ``ROWS``: an op's rule, its local form, and its
other facts (``op_facts``). An op that Inductor always decomposes is in no graph that is
planned: it has a row only if passes add it, or graphs that users trace for a schedule
have it. Ops that are registered only once some part of torch is imported are keyed by
name, ``"prims::inductor_random"``. Features add local forms, of attention and experts.
In: rows of the families, of passes and of users. Out: the row, or the sized Rule, of a
call.
Never: fails on a missing row: ``rule_of`` returns None and the planner makes the op's
operands whole, or raises under ``FXPAR_STRICT=1``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fxpar import _torch
from fxpar.errors import RuleError
from fxpar.sharding.factors import Rule
from fxpar.sharding.op_table import MARKS, Row, evaluate, look_up, parse_rule
from fxpar.sharding.ops import (
    attention,
    convolution,
    embedding,
    indexing,
    linalg,
    matmul,
    order,
    own_op_rules,
    pointwise,
    pools,
    reduction,
    resampling,
    slicing,
    sources,
    statistics,
    views,
)

FAMILIES = (
    pointwise,
    matmul,
    linalg,
    reduction,
    order,
    views,
    slicing,
    indexing,
    embedding,
    convolution,
    pools,
    resampling,
    attention,
    sources,
    statistics,
    own_op_rules,
)

# Families whose kernels reject empty tensors, and get a row of zeros instead; and
# families that reject that too, or must not get it.
_EMPTY: dict[Any, str] = {
    **dict.fromkeys((convolution, pools, resampling, attention), "fill"),
    **dict.fromkeys((linalg, statistics), "never"),
}


_ROWS: dict[Any, Row] = {
    op: replace(row, empty=row.empty or _EMPTY.get(module))
    for module in FAMILIES
    for op, row in module.ROWS.items()
}

# The rows by op: rules, local forms (features add theirs), and facts.
TABLE = {op: row for op, row in _ROWS.items() if row.rule is not None}
LOCAL = {op: row.local for op, row in _ROWS.items() if row.local is not None}
FACTS = {op: row.facts for op, row in _ROWS.items() if row.facts}

# Rows of functions that passes put into a graph (``add_rows``).
_OF_PASSES: dict[Any, Row] = {}

_USER: dict[str, Row] = {}

_POINTWISE = Row(pointwise.broadcast)


def has_user_rules() -> bool:
    """Return whether ``fxpar.rule`` was called in this process."""
    return bool(_USER)


def rule(name: str, factors: str | Callable[..., Any], **marks: Any) -> None:
    """Give a custom op a rule: ``fxpar.rule("mylib::op", "b s d, d -> b s d")``.

    ``name``: the op as registered with torch.library, with or without an overload.
    ``factors``: the rule, or a function of the op's arguments that returns it.
    ``marks``: fields of ``Row`` (``linear``, ``monotone``, ``movement``, ``reduce``,
    ``shape``, ``even``, ``empty``). Raises RuleError on a malformed name or rule.
    """
    namespace, colons, op = name.partition("::")
    if not (colons and namespace and op):
        raise RuleError(f"op name {name!r} is malformed", fix='write "namespace::op"')
    if isinstance(factors, str):
        parse_rule(factors)
    unknown = set(marks) - MARKS
    if unknown:
        raise RuleError(
            f"unknown marks {sorted(unknown)} for {name}", fix=f"use {sorted(MARKS)}"
        )
    for mark in ("linear", "monotone", "movement"):
        text = marks.get(mark) or ""
        if not (isinstance(text, str) and re.fullmatch(r"(\d+([+|]\d+)*)?", text)):
            raise RuleError(
                f"{mark}={text!r} for {name} names no arguments",
                fix=f'name them by position: {mark}="0", "0|1" for each of two, "0+1" '
                "for both at once",
            )
    _USER[name] = Row(factors, **{"empty": "never", **marks})


def user_row_of(target: Any) -> Row | None:
    """Return the row that ``fxpar.rule`` gave an op overload."""
    if not _USER or not isinstance(target, _torch.inductor.OpOverload):
        return None
    full = target.name()
    return _USER.get(full) or _USER.get(full.partition(".")[0])


def row_of(target: Any) -> Row | None:
    """Return the row of an op overload, the user's before the table's."""
    if target in TABLE and not _USER:
        return TABLE[target]
    row = user_row_of(target) or _OF_PASSES.get(target) or look_up(TABLE, target)
    is_op = isinstance(target, _torch.inductor.OpOverload)
    return _row_by_tag(target) if row is None and is_op else row


@cache
def _row_by_tag(target: Any) -> Row | None:
    """Return the row of an op of torch whose tag says that it is pointwise; None of any
    other, and of one that writes, draws numbers or has several results."""
    if target.namespace not in ("aten", "prims"):
        return None
    tags, schema = target.tags, _torch.objects.schema_of(target)
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return None
    gives = [str(result.type) for result in schema.returns]
    return _POINTWISE if gives == ["Tensor"] and not schema.is_mutable else None


def add_rows(rows: Mapping[Any, Row]) -> None:
    """Add rows of functions that a pass put into a graph, for when it is planned
    again."""
    _OF_PASSES.update(rows)


def rule_of(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Rule | None:
    """Return the sized rule of one call, or None if there is none.

    Arguments and result are the call's own with fake tensors. Raises RuleError if a row
    does not fit the call it is given.
    """
    entry = row_of(target)
    if entry is None:
        return None
    return evaluate(entry, args, dict(kwargs), result)
