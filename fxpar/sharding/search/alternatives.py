"""Answers questions to a search: the other strategies of an op, and the time of a step
with each.

In: the result of a search and a value. Out: alternatives with the cost of the whole
plan, solved again and not guessed: the op is pinned and everything else may change.
Never: changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.errors import PlanError
from fxpar.sharding.search.run_search import SearchResult
from fxpar.sharding.solver import Infeasible, solve
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy
from fxpar.units import difference, percent_more, short_seconds

# How many strategies are solved again: the best with everything else as it is.
TRIED = 4
# Seconds of work of each at most.
_SECONDS = 2.0


@dataclass(frozen=True)
class Alternative:
    """Is another strategy of an op, with the seconds of a step that uses it."""

    # None for an input, which has a layout only.
    strategy: Strategy | None
    # Specs of the op's results, or of the input.
    specs: tuple[Spec, ...]
    # Seconds of a step of the best plan with it; inf if no plan has it.
    seconds: float

    def compared(self, best: float) -> str:
        """Format the alternative relative to a plan of ``best`` seconds."""
        specs = ", ".join(map(str, self.specs))
        if self.strategy is None:
            text = f"at rest in {specs}"
        else:
            split = (f"{f} over {'+'.join(axes)}" for f, axes in self.strategy.factors)
            parts = [", ".join(split) or "nothing split"]
            passed = (axis for axis, *_ in self.strategy.passes)
            parts += [f"{axis} passed on as partial" for axis in passed]
            text = f"{'; '.join(parts)} ({specs})"
        if self.seconds == math.inf:
            return f"{text}: no plan has it"
        more = difference(self.seconds, best, short_seconds)
        return f"{text}: a step takes {more}, {percent_more(self.seconds, best)}"


def alternatives(
    result: SearchResult, value: int, *, spec: Spec | None = None
) -> list[Alternative]:
    """Return other strategies of the op that makes a value, or other layouts of an
    input, the best first: those with ``spec``, or, without one, the few that look best.

    Raises PlanError if ``spec`` is none that the op can make or the input may have.
    """
    formulation = result.formulation
    number, column = _node(result, value)
    if number is None:
        return []
    node = formulation.nodes[number]
    numbers, choice = node.specs[:, column], result.solution.choice[number]
    rows = [k for k in range(len(numbers)) if k != choice]
    if spec is not None:
        rows = [k for k in rows if formulation.pool[numbers[k]] == spec]
        if not rows and formulation.pool[numbers[choice]] != spec:
            raise _impossible(result, value, spec, numbers)
    computing, resharding = _as_it_stands(result, number)
    total = computing + resharding
    rows = sorted(rows, key=lambda k: (total[k], k))[:TRIED]
    first = (
        0 if node.kind == "input" else len(formulation.program.ops[node.of].operands)
    )
    out, start = [], list(result.solution.choice)
    for k in rows:
        strategy = node.strategies[k] if node.strategies else None
        specs = tuple(formulation.pool[n] for n in node.specs[k, first:])
        try:
            start[number] = k
            pinned = {number: k}
            cost = solve(formulation.problem, _SECONDS, fixed=pinned, start=start).cost
        except Infeasible:
            cost = math.inf
        out.append(Alternative(strategy, specs, cost + formulation.launches))
    return sorted(out, key=lambda a: a.seconds)


def _node(result: SearchResult, value: int) -> tuple[int | None, int]:
    """Return the node that decides how a value is made, and its column there; None for
    a constant, for which there is no choice."""
    program, nodes = result.formulation.program, result.formulation.nodes
    if value in program.producers:
        of, place = program.producers[value]
        key, column = ("op", of), len(program.ops[of].operands) + place
    elif value in program.inputs:
        key, column = ("input", program.inputs.index(value)), 0
    else:
        return None, 0
    return next(i for i, n in enumerate(nodes) if (n.kind, n.of) == key), column


def _impossible(
    result: SearchResult, value: int, spec: Spec, numbers: np.ndarray
) -> PlanError:
    program, pool = result.formulation.program, result.formulation.pool
    possible = ", ".join(dict.fromkeys(str(pool[n]) for n in numbers))
    if value in program.producers:
        op = program.ops[program.producers[value][0]]
        return PlanError(
            f"no strategy of {op.name} makes {spec}", fix=f"ask for {possible}"
        )
    name = program.values[value].name
    return PlanError(
        f"{name} is an input that cannot have {spec}", fix=f"ask for {possible}"
    )


def _as_it_stands(result: SearchResult, node: int) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds by strategy of a node, with all other nodes as they were chosen:
    of its own work, and of resharding its operands and results."""
    problem, choice = result.formulation.problem, result.solution.choice
    computing = np.array(problem.costs[node], float)
    resharding = np.zeros_like(computing)
    for i, j, table in problem.edges:
        if i == node:
            resharding = resharding + problem.tables[table][:, choice[j]]
        if j == node:
            resharding = resharding + problem.tables[table][choice[i], :]
    return computing, resharding


def alternatives_text(
    result: SearchResult, value: int, choices: Sequence[Alternative]
) -> str:
    """Format the price of a value in the plan, then alternatives, one a line, all
    estimated before communication overlaps."""
    name = result.formulation.program.values[value].name
    node, _ = _node(result, value)
    if node is None:
        return f"{name}: it is a constant"
    choice = result.solution.choice[node]
    computing, resharding = (
        short_seconds(part[choice]) for part in _as_it_stands(result, node)
    )
    step = f"{name}: estimated without overlap, resharding it takes {resharding}"
    if result.formulation.nodes[node].kind != "input":
        step = (
            f"{name}: estimated without overlap, computing it takes {computing} and "
            f"resharding what its op reads and makes {resharding}"
        )
    if not choices:
        return f"{step}; there is no other choice"
    lines = [f"  {other.compared(result.predicted)}" for other in choices]
    return "\n".join([f"{step}; else", *lines])
