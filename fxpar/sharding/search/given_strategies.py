"""What another plan costs under the same cost model.

In: a Formulation and strategies of all ops, e.g. an expert's, made from hints. Out: the
cheapest way to connect them, as the solver's Solution. Points of one space are so
compared by one ruler: a search that is right is never above any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors import PlanError
from fxpar.sharding.factors import Strategy
from fxpar.sharding.search import op_strategies
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.solver import Solution, solve


def cost_of(
    found: Formulation, strategies: Sequence[Strategy], seconds: float = 5.0
) -> Solution:
    """The solution with every op pinned to its strategy; where values settle is free.

    Raises PlanError if a strategy is not in the space (axes split a dim in another
    order, or an op passes on what is no sum).
    """
    pins: dict[int, int] = {}
    for i, node in enumerate(found.nodes):
        if node.kind != "op":
            continue
        op = found.program.ops[node.of]
        wanted = op_strategies.specs(op.rule, strategies[node.of])
        rows = [[found.pool[n] for n in row] for row in node.specs]
        try:
            pins[i] = rows.index(list(wanted))
        except ValueError:
            raise PlanError(
                f"{op.name} takes {strategies[node.of]}, which is not searched"
            ) from None
    return solve(found.problem, seconds, fixed=pins)
