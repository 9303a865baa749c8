"""Rows of ops that go by the order of rows along a dim: scans, and choices of some.

Along the dim, too, they may be split: each rank scans its own rows, or chooses among
them, and ranks gather what stands for a shard (``Rule.gathered``): the total of a scan,
the candidates of a choice. Local forms are in ``passes.local.local_order``. What cannot
be put together so (sorts, medians, choices of half of the rows) needs the dim whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import GatheredRows, Rule
from fxpar.sharding.rules.reduction import over
from fxpar.sharding.rules.table import at, make, rows, words_of

# Bytes of an index.
_INDEX = 8


def scan(x: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> Rule:
    """Ops called as ``(x, dim, ...)`` whose rows are of those up to each."""
    words = words_of(x)
    rule = make([words], [words])
    if x.ndim == 0:
        return rule
    return replace(rule, gathered=(GatheredRows(0, at(dim, x.ndim), 1),))


def running_choice(x: torch.Tensor, dim: int) -> Rule:
    """Ops called as ``(x, dim)`` that give the largest or smallest row up to each, and
    where it is."""
    words = words_of(x)
    rule = make([words], [words] * 2)
    if x.ndim == 0:
        return rule
    dim = at(dim, x.ndim)
    last = GatheredRows(0, dim, 1), GatheredRows(0, dim, 1, _INDEX)
    return replace(rule, gathered=last, empty="never")


def choice(*, results: int = 1) -> Callable[..., Rule]:
    """Ops called as ``(x, dim, keepdim=False)`` that give one row of each column, or
    where it is."""

    def rule_of_call(
        x: torch.Tensor, dim: int | None = None, keepdim: bool = False, **_: Any
    ) -> Rule:
        if dim is None or x.ndim == 0:
            return over(results=results)(x, dim, keepdim)
        rows = 1 if keepdim else None
        return _top_rows(x, at(dim, x.ndim), rows, results)

    return rule_of_call


def topk(x: torch.Tensor, k: int, dim: int = -1, *_: Any) -> Rule:
    if x.ndim == 0:
        return make([[]], [[], []])
    dim = at(dim, x.ndim)
    return _with_candidates(_top_rows(x, dim, k, 2), dim, k)


def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    """The candidates of a shard are its ``k`` smallest rows."""
    if x.ndim == 0:
        return make([[]], [[], []])
    dim = at(dim, x.ndim)
    rule = _top_rows(x, dim, 1 if keepdim else None, 2, candidates=k)
    return _with_candidates(rule, dim, k)


def _with_candidates(rule: Rule, dim: int, k: int) -> Rule:
    """Ranks gather as many candidates of each shard, so all have ``k``, or all have as
    many rows."""
    return replace(rule, least=tuple((f, k) for f in rule.operands[0][dim]))


def _top_rows(
    x: torch.Tensor, dim: int, count: int | None, results: int, candidates: int = 0
) -> Rule:
    """``count`` rows of a dim, or None where the results lack it. Every rank chooses
    among the ``candidates`` of all, by default as many of a shard."""
    of_shard = candidates or count or 1
    # Of half of the rows each of two ranks would give all that it has.
    all_rows = of_shard > 1 and 2 * of_shard >= x.shape[dim]
    words = words_of(x, {dim} if all_rows else ())
    mark = [f"~{words[dim]}"] if words[dim] != "_" and not all_rows else []
    result = [
        "_" if i == dim else word
        for i, word in enumerate(words)
        if i != dim or count is not None
    ]
    rule = make([words], [[*result, *mark]] * results)
    if all_rows:
        return rule
    marks = GatheredRows(0, dim, of_shard), GatheredRows(0, dim, of_shard, _INDEX)
    return replace(rule, gathered=marks)


ROWS = {
    **rows("cumsum", scan, linear="0"),
    **rows("cumprod logcumsumexp", scan),
    **rows("cummax cummin", running_choice),
    **rows("argmax argmin", choice()),
    **rows("max.dim min.dim", choice(results=2)),
    **rows("topk", topk),
    **rows("kthvalue", kthvalue),
}
