"""Rank candidate plans of a search by the simulated step, communication beside compute.

In: what a search found. Out: ``Polished``: a ``SearchResult`` whose simulated step, as
``simulate_choice`` has it, is no longer. The additive problem knows no overlap: it pays
for a gradient's reduction though the backward hides it. So plans that are the best with
such communication at a discount are tried as well. Never leaves the memory limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxpar.errors import PlanError
from fxpar.sharding.search.choice_tasks import layout
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from fxpar.sharding.search.simulate_choice import Overlap
from fxpar.sharding.search.solutions import cost_of, decode
from fxpar.sharding.solver import Infeasible, Problem, evaluate, solve
from fxpar.sharding.strategy import Strategy

# Shares of its price at which communication that may be hidden stands for overlap. Not
# for nothing: it has to fit beside the compute that hides it.
DISCOUNTS = (0.5, 0.2, 0.02)

# A simulated step must be shorter by this share: the simulation is a model, too.
_SAME = 0.02


@dataclass(frozen=True)
class Polished:
    """The plan with the shortest simulated step among candidates.

    search: the plan; its bound and gap are still those of the additive problem.
    candidates: simulated seconds of the plans that were compared, the search's first.
    """

    search: SearchResult
    candidates: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of the simulated step of ``search``."""
        return min(self.candidates)

    def __str__(self) -> str:
        return (
            f"polished in the simulator: {self.candidates[0] * 1e3:.4g} ms to "
            f"{self.seconds * 1e3:.4g} ms, the best of {len(self.candidates)} plans"
        )


def polish(
    result: SearchResult,
    *,
    discounts: Sequence[float] = DISCOUNTS,
    seconds: float = 2.0,
    extra_choices: Sequence[Sequence[int]] = (),
) -> Polished:
    """A plan whose simulated step takes no longer than that of ``result``.

    ``seconds``: for solving the problem again with each of the ``discounts``.
    ``extra_choices``: choices to compare besides, which must fit, e.g. of an expert
    (``solutions.cost_of``).
    """
    form = result.formulation
    choices = [
        result.solution.choice,
        *cheaper(result, discounts, seconds),
        *extra_choices,
    ]
    times = [Overlap(form, choice).seconds for choice in choices]
    best = min(range(len(choices)), key=times.__getitem__)
    return Polished(with_choice(result, choices[best]), tuple(times))


def ranked(
    result: SearchResult, options: SearchOptions, by_hand: Iterable[Sequence[Strategy]]
) -> tuple[SearchResult, list[str]]:
    """Of the plan found, those with hidden communication at a discount, and known
    strategies of all ops, the one with the shortest simulated step; and a note, if that
    is another than the one found."""
    extra_choices = []
    for strategies in by_hand:
        try:
            extra_choices.append(cost_of(result.formulation, strategies, 1.0).choice)
        except (Infeasible, PlanError):
            continue
    seconds = min(1.0, options.seconds / 10)
    best = polish(result, extra_choices=extra_choices, seconds=seconds)
    before, after = best.candidates[0], best.seconds
    if after >= before * (1 - _SAME):
        return result, []
    note = (
        f"search: another plan is taken, with communication beside compute its step is "
        f"simulated to take {after * 1e3:.4g} ms, that of the plan above "
        f"{before * 1e3:.4g} ms"
    )
    return replace(best.search, first=result.solution), [note]


def with_choice(result: SearchResult, choice: Sequence[int]) -> SearchResult:
    """What a search would have found, had it taken this choice of its problem."""
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
    """The plans that are best with communication that compute may hide (gradients that
    nothing computes with, parameters gathered ahead) at these shares of its price;
    those that fit in memory and are not known yet."""
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
    """The problem with what compute may hide at a share of its price."""
    problem, tables = formulation.problem, list(formulation.problem.tables)
    cheap: dict[int, int] = {}
    edges = []
    for edge, aside in zip(problem.edges, layout(formulation, ()).aside, strict=True):
        if aside and edge.table not in cheap:
            cheap[edge.table] = len(tables)
            tables.append(tables[edge.table] * share)
        edges.append(edge._replace(table=cheap[edge.table]) if aside else edge)
    return replace(problem, edges=tuple(edges), tables=tuple(tables))
