"""What the solver chose, read as a plan.

In: a Formulation and a choice of the solver. Out: a strategy per op and the spec each
value settles in. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.sharding.factors import Strategy
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.spec import Spec


def decode(
    found: Formulation, choice: Sequence[int]
) -> tuple[list[Strategy], list[Spec]]:
    """(strategy per op, spec each value settles in) of a choice."""
    program, nodes = found.program, found.nodes
    strategies = [Strategy() for _ in program.ops]
    settled: list[Spec | None] = [None] * len(program.values)
    made: dict[int, Spec] = {}
    need: dict[int, Spec] = {}
    for node, k in zip(nodes, choice, strict=True):
        specs = [found.pool[n] for n in node.specs[k]]
        if node.kind == "op":
            op = program.ops[node.of]
            strategies[node.of] = node.strategies[k]
            for v, spec in zip(op.tensors, specs, strict=True):
                if v in op.results:
                    made[v] = spec
            for v, spec in zip(op.operands, specs, strict=False):
                need.setdefault(v, spec)
        elif node.kind == "input" and (given := program.inputs[node.of]) is not None:
            settled[given] = specs[0]
        elif node.kind == "output" and (out := program.outputs[node.of]) is not None:
            need.setdefault(out, specs[0])
    for v, (forward, _) in found.settling.items():
        if settled[v] is None:
            (number,) = nodes[forward].specs[choice[forward]]
            settled[v] = found.pool[number]
    lie = []
    for value in program.values:
        spec = settled[value.index]
        if spec is None:
            spec = made.get(value.index, Spec.whole(len(value.shape)))
            if spec.partial:
                spec = need.get(value.index, spec)
        lie.append(spec)
    return strategies, lie
