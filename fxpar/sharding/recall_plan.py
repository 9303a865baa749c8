"""Applies a saved plan to a program again, where it fits.

Names may differ in their numbers, which count nodes that a trace adds for open sizes.
In: a Program, a Mesh, a saved Plan. Out: the Decision the plan holds.
Never: gives other numbers because a file is of another program, or was changed by hand:
a strategy that an op cannot run, or a spec that a value cannot have, is a PlanError
that names the op or value.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import zip_longest

from fxpar.errors import PlanError, SpecError
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import NodePlan, Plan
from fxpar.sharding.program import Op, Program, user_line
from fxpar.sharding.reshard.route import connect
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, fits, operand_spec, result_spec

# Number at the end of a node's name; an op's several results are "name.2".
_NUMBER = re.compile(r"_\d+(?=$|\.)")

_AGAIN = "plan again: a plan fits the code, shapes and versions it was made for"


def recall(program: Program, mesh: Mesh, plan: Plan) -> Decision:
    """Return a saved plan as a Decision for a program, with the links it was made with,
    since these decide how reshards are lowered, and with its shares.

    Raises PlanError where the plan is for another mesh or another program.
    """
    if plan.mesh.axes != mesh.axes:
        raise PlanError(
            f"the plan is for mesh {plan.mesh}, this run has {mesh}",
            fix="plan again for this mesh",
        )
    plan = _renamed(program, plan)
    mesh = replace(mesh, links=plan.mesh.links, shares=plan.mesh.shares)
    strategies = [
        _strategy(op, node, mesh)
        for op, node in zip(program.ops, plan.nodes, strict=True)
    ]
    settled = _settled(program, mesh, plan)
    edges = connect(program, strategies, settled, mesh)
    return Decision(
        program,
        mesh,
        tuple(strategies),
        tuple(settled),
        edges,
        tuple({} for _ in program.values),
        plan.notes,
        reasons=plan.reasons,
        stages_begin=tuple(stage.begin for stage in plan.stages[1:]),
    )


def _renamed(program: Program, plan: Plan) -> Plan:
    """Return the plan with the names that the program has for its ops and values.
    Raises PlanError if they differ in more than numbers."""
    ops = [op.name for op in program.ops]
    if ops == [node.name for node in plan.nodes]:
        return plan
    values = [value.name for value in program.values]
    pairs = [
        *zip_longest(ops, (node.name for node in plan.nodes), fillvalue=""),
        *zip_longest(values, (name for name, _ in plan.values), fillvalue=""),
    ]
    if any(_NUMBER.sub("", a) != _NUMBER.sub("", b) for a, b in pairs):
        raise PlanError("the plan is for another program: its ops differ", fix=_AGAIN)
    names = {old: new for new, old in pairs}
    return replace(
        plan,
        nodes=tuple(replace(node, name=names[node.name]) for node in plan.nodes),
        values=tuple((names[name], spec) for name, spec in plan.values),
        reasons=tuple((names.get(name, name), why) for name, why in plan.reasons),
    )


def _strategy(op: Op, node: NodePlan, mesh: Mesh) -> Strategy:
    """Return the strategy that the plan has for the op. Raises PlanError if the op
    cannot run it."""
    factors = tuple((factor, mesh.parts(axes)) for factor, axes in node.factors)
    strategy = Strategy(factors, node.passes)
    why = _misfit(op.rule, strategy, mesh) or _difference(op, node)
    if why:
        raise PlanError(
            f"the plan does not fit op {op.name} ({op.target}): {why}",
            where=user_line(op.node),
            fix=_AGAIN,
        )
    return strategy


def _difference(op: Op, node: NodePlan) -> str | None:
    """Return why the plan was made for another op of this name; None if it was not."""
    if node.op != str(op.target):
        return f"it was made for {node.op}"
    return None


def _misfit(rule: Rule, strategy: Strategy, mesh: Mesh) -> str | None:
    """Return why an op with this rule cannot run a strategy; None if it can."""
    used = [axis for _, axes in strategy.factors for axis in axes]
    used += [axis for axis, *_ in strategy.passes]
    twice = [axis for axis in used if used.count(axis) > 1]
    if twice or len(strategy.axes_of) < len(strategy.factors):
        return f"it uses {f'axis {twice[0]}' if twice else 'a factor'} twice"
    pinned = dict(rule.pinned)
    if any(strategy.axes_of.get(f) != axes for f, axes in rule.pinned):
        return f"inside its manual region it has {rule.pinned}"
    for factor in strategy.axes_of:
        if factor not in rule.free and factor not in pinned:
            factors = ", ".join(rule.free) or "none"
            return f"it splits {factor!r}, and what can be split is {factors}"
    for _, reduction, passage in strategy.passes:
        if passage >= len(rule.passages):
            return f"it has no way {passage} for partial values to pass"
        if reduction not in rule.passages[passage].reductions:
            return f"values partial by {reduction!r} do not pass it"
    if not fits(rule, strategy.axes_of, mesh):
        return "its dims do not divide so"
    try:
        for i in range(len(rule.operands)):
            operand_spec(rule, strategy, i)
        for i in range(len(rule.results)):
            result_spec(rule, strategy, i)
    except SpecError as error:
        return error.what
    return None


def _settled(program: Program, mesh: Mesh, plan: Plan) -> list[Spec]:
    """Return the spec each value settles in. Raises PlanError if a value cannot have
    it."""
    specs, settled = dict(plan.values), []
    for value in program.values:
        if value.name not in specs:
            raise PlanError(f"the plan has no spec for value {value.name}", fix=_AGAIN)
        try:
            specs[value.name].check(mesh, value.shape)
        except SpecError as error:
            raise PlanError(
                f"the plan does not fit value {value.name}: {error.what}", fix=_AGAIN
            ) from error
        settled.append(specs[value.name].refined(mesh))
    return settled
