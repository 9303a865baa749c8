"""Ranks plans that may be faster than the cheapest once communication overlaps.

In: the result of a search. Out: ``rivals``, further results of the same problem, and
those of several that may be the fastest (``nearest``). The additive problem knows no
overlap: it pays for a gradient's reduction though the backward hides it. So plans that
are the best with such communication at a discount are tried as well, and plans are
ranked at one. The steps of those that are near are predicted in ``fxpar.choose_plan``.
Never: leaves the memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from fxpar.errors import PlanError
from fxpar.sharding.search.formulate import Formulation, cost_of, decode
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from fxpar.sharding.solver import Infeasible, Problem, evaluate, solve
from fxpar.sharding.strategy import Strategy

Found = TypeVar("Found")

# Shares of its price that communication costs where it may be hidden. Not zero: the
# compute that hides it may be too short.
DISCOUNTS = (0.5, 0.2, 0.02)
# The one at which plans are ranked.
_SHARE = DISCOUNTS[1]

# Programs with more ops than _LARGE are large: their plans are ranked by full prices.
# Plans that are estimated to take _FAR times as long as the cheapest are dropped, an
# expert's plan only if the program has more than _FEW ops.
_LARGE, _FAR, _FEW = 2500, 1.25, 200


def rivals(result: SearchResult, options: SearchOptions) -> list[SearchResult]:
    """Return plans that may be faster than the cheapest one once communication
    overlaps: those that are best with hidden communication at a discount."""
    discounts = (_SHARE,) if is_large(result) else DISCOUNTS
    choices = cheaper(result, discounts, min(1.0, options.seconds / 10))
    cheap = [_with_first(result, choice) for choice in choices]
    closest = nearest([result, *cheap], lambda x: x)
    return [x for x in cheap if x in closest]


def priced_as(
    result: SearchResult, strategies: Sequence[Strategy]
) -> SearchResult | None:
    """Return the search result with these strategies of all ops; None if they are not
    in the search space, or do not fit in memory."""
    limit = result.formulation.problem.limit
    try:
        solution = cost_of(result.formulation, strategies, 1.0)
    except (Infeasible, PlanError):
        return None
    if limit is not None and solution.peak > limit:
        return None
    return _with_first(result, solution.choice)


def _with_first(result: SearchResult, choice: Sequence[int]) -> SearchResult:
    return replace(with_choice(result, choice), first=result.solution)


def is_large(result: SearchResult) -> bool:
    """Return whether lowering a plan takes longer than a search."""
    return len(result.strategies) > _LARGE


def nearest(
    plans: Sequence[Found], search_of: Callable[[Found], SearchResult]
) -> list[Found]:
    """Return the plans that may be the fastest, sorted by estimate: the price with
    communication that compute may hide at a discount, or the seconds of that
    communication, if it takes longer."""
    results = list(map(search_of, plans))
    pairs = zip(results, map(_hidden_seconds, results), strict=True)
    saved = 1 - _SHARE
    times = [max(x.predicted - saved * hidden, hidden) for x, hidden in pairs]
    most = _FAR * min(x.predicted for x in results)
    order = sorted(range(len(plans)), key=times.__getitem__)
    return [plans[i] for i in order if times[i] <= most]


def can_be_faster(result: SearchResult, other: SearchResult | None) -> bool:
    """Return whether an expert's plan can be faster than the one found. ``other``: the
    result of ``priced_as`` for it."""
    if len(result.strategies) <= _FEW:
        return True
    if other is None:
        return not is_large(result)
    return other.predicted - _hidden_seconds(other) <= _FAR * result.predicted


def _hidden_seconds(result: SearchResult) -> float:
    """Return the price of communication that compute may hide, none for a large
    program."""
    if is_large(result):
        return 0.0
    form, choice = result.formulation, result.solution.choice
    edges = zip(form.problem.edges, form.hidden, strict=True)
    return sum(
        float(form.problem.tables[table][choice[i], choice[j]])
        for (i, j, table), is_hidden in edges
        if is_hidden
    )


def with_choice(result: SearchResult, choice: Sequence[int]) -> SearchResult:
    """Return the result as if the search had taken this choice of its problem."""
    strategies, settled = decode(result.formulation, choice)
    cost, peak = evaluate(result.formulation.problem, choice)
    gap = max(0.0, (cost - result.solution.bound) / abs(cost)) if cost else 0.0
    solution = replace(
        result.solution, choice=tuple(choice), cost=cost, peak=peak, gap=gap
    )
    return replace(
        result, strategies=tuple(strategies), settled=tuple(settled), solution=solution
    )


def cheaper(
    result: SearchResult, discounts: Sequence[float], seconds: float
) -> list[tuple[int, ...]]:
    """Return the plans that are best with communication that compute may hide
    (gradients that nothing computes with, parameters gathered ahead) at these shares of
    its price; those that fit in memory and are not known yet."""
    problem = result.formulation.problem
    choices: dict[tuple[int, ...], None] = {}
    for share in discounts:
        priced = replace(discounted(result.formulation, share), limit=None)
        try:
            solution = solve(priced, seconds, tolerance=1e-4)
            if problem.limit is not None and solution.peak > problem.limit:
                priced = replace(priced, limit=problem.limit)
                solution = solve(priced, seconds, tolerance=1e-4)
        except Infeasible:
            continue
        choices[solution.choice] = None
    return [choice for choice in choices if choice != result.solution.choice]


def discounted(formulation: Formulation, share: float) -> Problem:
    """Return the problem with communication that compute may hide at a share of its
    price."""
    problem, tables = formulation.problem, list(formulation.problem.tables)
    cheap: dict[int, int] = {}
    edges = []
    for edge, is_hidden in zip(problem.edges, formulation.hidden, strict=True):
        if is_hidden and edge.table not in cheap:
            cheap[edge.table] = len(tables)
            tables.append(tables[edge.table] * share)
        edges.append(edge._replace(table=cheap[edge.table]) if is_hidden else edge)
    return replace(problem, edges=tuple(edges), tables=tuple(tables))
