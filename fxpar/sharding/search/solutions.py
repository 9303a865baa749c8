"""Solutions of a Formulation: read as strategies, or found for given strategies.

In: a Formulation and a choice of the solver, or strategies of all ops, e.g. an
expert's, made from hints. Out: a strategy per op and the spec each value settles in,
or the cheapest way to connect the given ones. Points of one space are so compared by
one ruler: a search that is right is never above any of them. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors import PlanError
from fxpar.sharding.search import search_space
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.solver import Solution, solve
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy


def decode(
    formulation: Formulation, choice: Sequence[int]
) -> tuple[list[Strategy], list[Spec]]:
    """(strategy per op, spec each value settles in) of a choice."""
    program, nodes = formulation.program, formulation.nodes
    strategies = [Strategy(op.rule.pinned) for op in program.ops]
    settled: list[Spec | None] = [None] * len(program.values)
    spec_of: dict[int, Spec] = {}
    need: dict[int, Spec] = {}
    for node, k in zip(nodes, choice, strict=True):
        specs = [formulation.pool[n] for n in node.specs[k]]
        if node.kind == "op":
            op = program.ops[node.of]
            strategies[node.of] = node.strategies[k]
            for v, spec in zip(op.tensors, specs, strict=True):
                if v in op.results:
                    spec_of[v] = spec
            for v, spec in zip(op.operands, specs, strict=False):
                need.setdefault(v, spec)
        elif node.kind == "input" and (resting := program.inputs[node.of]) is not None:
            settled[resting] = specs[0]
        elif node.kind == "output" and (out := program.outputs[node.of]) is not None:
            need.setdefault(out, specs[0])
    for v, (forward, _) in formulation.settling.items():
        if settled[v] is None:
            (number,) = nodes[forward].specs[choice[forward]]
            settled[v] = formulation.pool[number]
    lie = []
    for value in program.values:
        spec = settled[value.index]
        if spec is None:
            spec = spec_of.get(value.index, Spec.whole(len(value.shape)))
            if spec.partial:
                spec = need.get(value.index, spec)
        lie.append(spec)
    return strategies, lie


def cost_of(
    formulation: Formulation, strategies: Sequence[Strategy], seconds: float = 5.0
) -> Solution:
    """The solution with every op pinned to its strategy; where values settle is free.

    Raises PlanError if a strategy is not in the space (axes split a dim in another
    order, or an op passes on what is no sum).
    """
    pins: dict[int, int] = {}
    for i, node in enumerate(formulation.nodes):
        if node.kind != "op":
            continue
        op = formulation.program.ops[node.of]
        wanted = search_space.specs(op.rule, strategies[node.of])
        rows = [[formulation.pool[n] for n in row] for row in node.specs]
        try:
            pins[i] = rows.index(list(wanted))
        except ValueError:
            raise PlanError(
                f"{op.name} takes {strategies[node.of]}, which is not searched"
            ) from None
    return solve(formulation.problem, seconds, fixed=pins)
