"""Questions to a search: what else an op could do, and what that would cost in all.

In: what a search found and a value. Out: alternatives with the cost of the whole plan,
solved again around them, not guessed: the op is pinned and everything else may change.
Changes nothing of what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.errors import PlanError
from fxpar.sharding.factors import Strategy
from fxpar.sharding.search.find import Found
from fxpar.sharding.solver import Infeasible, resolve
from fxpar.sharding.spec import Spec

# Strategies solved again, those that look best with everything else as it is.
TRIED = 4


@dataclass(frozen=True)
class Alternative:
    """``seconds``: of a step of the whole plan with it; inf if no plan has it."""

    strategy: Strategy
    made: tuple[Spec, ...]
    seconds: float

    def compared(self, best: float) -> str:
        """As text, beside a plan of ``best`` seconds."""
        axes = ", ".join(f"{f} over {'+'.join(a)}" for f, a in self.strategy.factors)
        parts = [axes or "nothing split"]
        parts += [f"{axis} passed on as partial" for axis, *_ in self.strategy.passes]
        made = ", ".join(map(str, self.made))
        more = (self.seconds / best - 1) * 100
        return f"{'; '.join(parts)} ({made}): {self.seconds * 1e3:.4g} ms, {more:+.3g}%"


def alternatives(
    found: Found, value: int, *, spec: Spec | None = None, seconds: float = 2.0
) -> list[Alternative]:
    """What the op that makes a value could do instead, the best first: strategies that
    give it ``spec``, or, without one, the few that look best.

    Raises PlanError for an input, or if no strategy of the op makes the spec.
    """
    program, formulation = found.formulation.program, found.formulation
    if value not in program.producers:
        name = program.values[value].name
        raise PlanError(f"{name} is an input: no op makes it", fix="ask for a result")
    index, place = program.producers[value]
    op = program.ops[index]
    node = next(
        i for i, n in enumerate(formulation.nodes) if n.kind == "op" and n.of == index
    )
    column = formulation.nodes[node].specs[:, len(op.operands) + place]
    chosen = found.solution.choice[node]
    rows = [k for k in range(len(column)) if k != chosen]
    if spec is not None:
        rows = [k for k in rows if formulation.pool[column[k]] == spec]
        if not rows and formulation.pool[column[chosen]] != spec:
            known = dict.fromkeys(str(formulation.pool[n]) for n in column)
            raise PlanError(
                f"no strategy of {op.name} makes {spec}",
                fix=f"it can make {', '.join(known)}",
            )
    here = _as_it_stands(found, node)
    rows = sorted(rows, key=lambda k: (here[k], k))[:TRIED]
    out = []
    for k in rows:
        strategy = formulation.nodes[node].strategies[k]
        made = tuple(
            formulation.pool[n]
            for n in formulation.nodes[node].specs[k, len(op.operands) :]
        )
        out.append(Alternative(strategy, made, _total(found, node, k, seconds)))
    return sorted(out, key=lambda a: a.seconds)


def _total(found: Found, node: int, k: int, seconds: float) -> float:
    """Seconds of the best plan in which a node takes strategy ``k``."""
    problem = found.formulation.problem
    try:
        again = resolve(problem, {node: k}, found.solution, seconds)
    except Infeasible:
        return float("inf")
    return again.cost + found.formulation.launches


def _as_it_stands(found: Found, node: int) -> np.ndarray:
    """Cost of each strategy of a node with all others as they were chosen."""
    problem, choice = found.formulation.problem, found.solution.choice
    out = np.array(problem.costs[node], float)
    for i, j, table in problem.edges:
        if i == node:
            out = out + problem.tables[table][:, choice[j]]
        if j == node:
            out = out + problem.tables[table][choice[i], :]
    return out


def said(found: Found, value: int, others: Sequence[Alternative]) -> str:
    """Alternatives as text, one a line."""
    name = found.formulation.program.values[value].name
    if not others:
        return f"{name}: there is no other strategy"
    lines = [f"  {other.compared(found.predicted)}" for other in others]
    return "\n".join([f"{name}: {found.predicted * 1e3:.4g} ms a step; else", *lines])
