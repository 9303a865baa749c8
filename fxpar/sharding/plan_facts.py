"""Makes the Plan that users see from a Decision, specs by name, collectives, reasons,
modules; and the Decision that a saved Plan holds.

An op belongs to a module, ``forward/layers.0.mlp`` or ``backward/layers.0.mlp``; the
path is empty for an op that belongs to none.

Tracing notes the modules a node was called in. An op of the backward belongs to the
module of the forward op that autograd made it for, which has the same ``seq_nr``; a sum
of gradients, to the path that the ops before and after it share, or to the layer of the
one before.

``describe``. In: a Decision with its Program, and facts of its local graph. Out: a
Plan. ``recall``. In: a Program, a Mesh, a saved Plan; names may differ in their
numbers, which count nodes that a trace adds for open sizes. Out: the Decision the plan
holds. Never: decides anything; gives other numbers because a file is of another
program, or was changed by hand: a strategy that an op cannot run, or a spec that a
value cannot have, is a PlanError that names the op or value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile, zip_longest
from typing import Any

from torch import fx

from fxpar.errors import PlanError, SpecError
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.factors import Rule
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.plan import Collective, Moved, NodePlan, Plan
from fxpar.sharding.program import Op, Program, backward_of, user_line
from fxpar.sharding.reshard.route import Reshard, connect
from fxpar.sharding.reshard.steps import duration, front
from fxpar.sharding.search.unequal_shards import notes
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, fits, specs

Path = tuple[str, ...]

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_ROOT = re.compile(r"^L\['\w+'\]")
_KEY = re.compile(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]")


def owners(program: Program) -> list[str]:
    """Return phase and module path of each op, in order."""
    ops = program.ops
    nodes = backward_of(ops[0].node.graph) if ops else set()
    in_backward = [op.node in nodes for op in ops]
    paths = [module_path(op.node) for op in ops]
    path_of_call: dict[Any, Path | None] = {}
    for op in ops:
        if not in_backward[op.index]:
            paths[op.index] = paths[op.index] or ()
            # The first op with a number is the one that autograd saw: later ones, which
            # need no gradient, carry the number of the last that did.
            path_of_call.setdefault(op.node.meta.get("seq_nr"), paths[op.index])
    backward = [op.index for op in ops if in_backward[op.index]]
    for i in backward:
        # A sum of gradients has the number of the op that autograd saw last.
        if paths[i] is None and not ops[i].node.meta.get("is_gradient_acc"):
            paths[i] = path_of_call.get(ops[i].node.meta.get("seq_nr"))
    for i, path in zip(backward, _filled([paths[i] for i in backward]), strict=True):
        paths[i] = path
    return [
        ("backward/" if is_late else "forward/") + ".".join(path or ())
        for is_late, path in zip(in_backward, paths, strict=True)
    ]


def module_path(node: fx.Node) -> Path | None:
    """Return the path of the innermost module that tracing noted, without
    ``L['self']``."""
    stack = next((node.meta[key] for key in _STACKS if node.meta.get(key)), None)
    if not stack:
        return None
    text, _ = list(stack.values())[-1]
    text = _KEY.sub(r".\1", _ROOT.sub("", text))
    return tuple(part for part in text.split(".") if part)


def _filled(paths: Sequence[Path | None]) -> list[Path]:
    """Return the paths with those that lack between their nearest neighbours."""
    neighbors: list[Path] = [(), *(path for path in paths if path is not None), ()]
    holders = {path[:end] for path in paths if path for end in range(len(path))}
    out: list[Path] = []
    count = 0
    for path in paths:
        count += path is not None
        if path is None:
            path = _between(neighbors[count], neighbors[count + 1], holders)
        out.append(path)
    return out


def _between(before: Path, after: Path, holders: Collection[Path]) -> Path:
    """Return the path that both share, or, longer than it, the layer of the first: of
    the ``holders`` of modules one whose name is a number."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    shared = tuple(part for part, _ in same)
    inner = (before[:end] for end in range(len(shared) + 1, len(before) + 1))
    layers = (path for path in inner if path[-1].isdigit() and path in holders)
    return next(layers, shared)


# The number of most expensive reshards that a plan lists.
DEAREST = 5


def describe(
    decision: Decision,
    collectives: tuple[Collective, ...],
    reshards: Iterable[tuple[Reshard, int]],
    memory: tuple[tuple[str, int], ...],
    priced: Mesh,
) -> Plan:
    """Return the Plan of a Decision, with facts of its local graph for one step.

    collectives: in order. reshards: with the bytes that each sends. memory: (kind,
    bytes) as ``Plan.memory``. priced: the mesh with the links that reshards are priced
    by, if any are known.
    """
    program, edges = decision.program, decision.edges
    signature = program.signature
    modules = owners(program)
    nodes = _node_plans(decision, modules)

    fed = program.tensor_inputs
    plain = [
        decision.settled[v] if declared.at_rest is None else edges.specs[v]
        for declared, v in fed
        if declared.kind == "input"
    ]
    parameters = [
        (declared.name, (edges.specs if declared.is_sharded else decision.settled)[v])
        for declared, v in fed
        if declared.kind in ("parameter", "buffer")
    ]
    results = list(zip(signature.outputs, edges.outputs, strict=True))
    mesh = decision.mesh
    on_unlike = notes(mesh) if mesh.unlike or any(mesh.unrefined.shares) else []

    def written_pairs(
        pairs: Iterable[tuple[str, Spec]],
    ) -> tuple[tuple[str, Spec], ...]:
        return tuple((name, spec.joined(mesh)) for name, spec in pairs)

    return Plan(
        mesh,
        _as_written(plain, mesh),
        _as_written(
            (s for o, s in results if o.kind == "output" and s is not None), mesh
        ),
        written_pairs(parameters),
        written_pairs((o.name, s) for o, s in results if o.kind == "gradient" and s),
        written_pairs((v.name, decision.settled[v.index]) for v in program.values),
        nodes,
        tuple(replace(c, axes=mesh.joined(c.axes)) for c in collectives),
        tuple(dict.fromkeys(str(op.target) for op in program.ops if not op.has_rule)),
        decision.reasons or tuple(_reasons(decision)),
        # A saved plan has the notes of its mesh already.
        tuple(dict.fromkeys((*decision.notes, *on_unlike))),
        memory=memory,
        dearest=_dearest(decision, reshards, priced),
    )


def _as_written(specs: Iterable[Spec], mesh: Mesh) -> tuple[Spec, ...]:
    """Return specs as users write them."""
    return tuple(spec.joined(mesh) for spec in specs)


def _node_plans(decision: Decision, modules: Sequence[str]) -> tuple[NodePlan, ...]:
    """Return the plan of each op."""
    program, edges, mesh = decision.program, decision.edges, decision.mesh
    as_written = cache(lambda spec: spec.joined(mesh))

    def node_plan(op: Op) -> NodePlan:
        strategy = decision.strategies[op.index]
        tensors = [program.values[v] for v in op.tensors]
        reads = [edges.reads[op.index, i] for i in range(len(op.operands))]
        return NodePlan(
            op.name,
            str(op.target),
            tuple((name, mesh.joined(axes)) for name, axes in strategy.factors),
            strategy.passes,
            tuple(map(as_written, reads)),
            tuple(as_written(edges.specs[v]) for v in op.results),
            tuple(as_written(decision.settled[v]) for v in op.results),
            tuple(x.shape for x in tensors),
            tuple(str(x.dtype).removeprefix("torch.") for x in tensors),
            str(op.rule),
            user_line(op.node),
            modules[op.index],
            op.operands,
        )

    return tuple(map(node_plan, program.ops))


def _dearest(
    decision: Decision, reshards: Iterable[tuple[Reshard, int]], mesh: Mesh
) -> tuple[Moved, ...]:
    """Return the most expensive reshards of a step, equal ones joined; without links,
    those that send most."""
    has_links = any(link != Link() for link in mesh.links)
    calls: dict[tuple[Spec, Spec, tuple[str, ...], str], tuple[int, int, float]] = {}
    for reshard, sent in reshards:
        value, route_steps = (
            decision.program.values[reshard.value],
            route(decision, reshard),
        )
        local = value.nbytes / mesh.count(reshard.source.sharded_axes)
        call_seconds = (
            duration(route_steps, mesh, local, front(value.shape)) if has_links else 0.0
        )
        name, _, line = cause(decision, reshard).partition(" (")
        steps = tuple(f"{s.kind} {'+'.join(mesh.joined(s.axes))}" for s in route_steps)
        key = reshard.source, reshard.target, steps, line.removesuffix(")") or name
        count, total, seconds = calls.get(key, (0, 0, 0.0))
        calls[key] = count + 1, total + sent, seconds + call_seconds
    dearest = sorted(calls.items(), key=lambda item: (-item[1][2], -item[1][1]))
    return tuple(
        Moved(
            source.joined(mesh),
            target.joined(mesh),
            steps,
            count,
            total,
            seconds if has_links else None,
            line,
        )
        for (source, target, steps, line), (count, total, seconds) in dearest[:DEAREST]
    )


def cause(decision: Decision, reshard: Reshard) -> str:
    """Return the node and user line that made a reshard necessary."""
    program = decision.program
    if reshard.early and reshard.value in program.producers:
        op = program.ops[program.producers[reshard.value][0]]
    elif reshard.output is not None:
        return f"output {program.signature.outputs[reshard.output].name}"
    else:
        assert reshard.reader is not None, "a reshard has a reader or an output"
        op = program.ops[reshard.reader]
    line = user_line(op.node)
    return f"{op.name} ({line})" if line else op.name


def _reasons(decision: Decision) -> list[tuple[str, str]]:
    program, out = decision.program, []
    for value in program.values:
        origins = decision.origins[value.index]
        if origins:
            lines = [_chain(decision, value.index, axis) for axis in origins]
            out.append((value.name, "\n".join(lines)))
        elif decision.search is not None:
            out.append((value.name, "  whole: search"))
    return out


def _chain(decision: Decision, v: int, axis: str) -> str:
    """Return how an axis came to a value, at most a few steps of it."""
    origin = decision.origins[v][axis]
    hops: list[str] = []
    while origin.op is not None and origin.source is not None and len(hops) < 4:
        source = decision.program.values[origin.source]
        hops.append(f"{source.name} through {origin.op}")
        origin = decision.origins[origin.source].get(axis, replace(origin, op=None))
    way = "".join(f"\n    from {hop}" for hop in hops)
    ellipsis = "\n    ..." if origin.op is not None else ""
    return f"  {axis}: {decision.origins[v][axis].seed}{way}{ellipsis}"


# -- a plan applied again -------------------------------------------------------------

# Number at the end of a node's name; an op's several results are "name.2".
_NUMBER = re.compile(r"_\d+(?=$|\.)")

_AGAIN = "plan again: a plan fits the code, shapes and versions it was made for"


def recall(program: Program, mesh: Mesh, plan: Plan) -> Decision:
    """Return a saved plan as a Decision for a program, with the links it was made with,
    since these decide how reshards are lowered, and with its shares.

    Raises PlanError, which names the plan's file, where the plan is for another mesh or
    another program.
    """
    try:
        return _recalled(program, mesh, plan)
    except PlanError as error:
        what = f"{plan.path}: {error.what}" if plan.path else error.what
        raise PlanError(what, where=error.where, fix=error.fix) from error


def _recalled(program: Program, mesh: Mesh, plan: Plan) -> Decision:
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
    why = _misfit(op.rule, strategy, mesh)
    if not why and node.op != str(op.target):
        why = f"it was made for {node.op}"
    if why:
        raise PlanError(
            f"the plan does not fit op {op.name} ({op.target}): {why}",
            where=user_line(op.node),
            fix=_AGAIN,
        )
    return strategy


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
        specs(rule, strategy)
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
