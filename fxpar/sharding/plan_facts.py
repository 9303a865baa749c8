"""From a Decision to the Plan users see: specs by name, collectives, reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxpar.sharding.decide import Decision, route
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.op_modules import owners
from fxpar.sharding.plan import Collective, Moved, NodePlan, Plan
from fxpar.sharding.program import Op, user_line
from fxpar.sharding.reshard.needed import Reshard
from fxpar.sharding.reshard.steps import duration, front
from fxpar.sharding.search.unequal_shards import notes
from fxpar.sharding.spec import Spec

# So many reshards a plan tells of, those that cost most.
DEAREST = 5


def describe(
    decision: Decision,
    collectives: tuple[Collective, ...],
    reshards: Iterable[tuple[Reshard, int]],
    memory: tuple[tuple[str, int], ...],
    priced: Mesh,
) -> Plan:
    """The Plan of a Decision, with what its local graph says of one step.

    collectives: in order. reshards: with the bytes that each sends. memory: (kind,
    bytes) as ``Plan.memory``. priced: the mesh with the links that reshards are priced
    by, if any are known.
    """
    program, edges = decision.program, decision.edges
    signature = program.signature
    modules = owners(program)
    nodes = tuple(_node_plan(decision, op, modules[op.index]) for op in program.ops)

    fed = [
        (declared, v)
        for declared, v in zip(signature.inputs, program.inputs, strict=True)
        if v is not None
    ]
    plain = [
        decision.settled[v] if declared.rest is None else edges.specs[v]
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

    def named(pairs: Iterable[tuple[str, Spec]]) -> tuple[tuple[str, Spec], ...]:
        return tuple((name, spec.joined(mesh)) for name, spec in pairs)

    return Plan(
        mesh,
        _joined(plain, mesh),
        _joined((s for o, s in results if o.kind == "output" and s is not None), mesh),
        named(parameters),
        named((o.name, s) for o, s in results if o.kind == "gradient" and s),
        named((v.name, decision.settled[v.index]) for v in program.values),
        nodes,
        tuple(replace(c, axes=mesh.joined(c.axes)) for c in collectives),
        tuple(dict.fromkeys(str(op.target) for op in program.ops if not op.has_rule)),
        decision.reasons or tuple(_reasons(decision)),
        _notes(decision),
        memory=memory,
        dearest=_dearest(decision, reshards, priced),
    )


def _joined(specs: Iterable[Spec], mesh: Mesh) -> tuple[Spec, ...]:
    """Specs as users write them."""
    return tuple(spec.joined(mesh) for spec in specs)


def _notes(decision: Decision) -> tuple[str, ...]:
    """Those of the decision, which of a saved plan has said the last ones too."""
    return tuple(dict.fromkeys((*decision.notes, *notes(decision.mesh))))


def _node_plan(decision: Decision, op: Op, module: str) -> NodePlan:
    program, edges, mesh = decision.program, decision.edges, decision.mesh
    strategy = decision.strategies[op.index]
    values = [program.values[v] for v in op.tensors]
    return NodePlan(
        op.name,
        str(op.target),
        tuple((factor, mesh.joined(axes)) for factor, axes in strategy.factors),
        strategy.passes,
        _joined((edges.reads[op.index, i] for i in range(len(op.operands))), mesh),
        _joined((edges.specs[v] for v in op.results), mesh),
        _joined((decision.settled[v] for v in op.results), mesh),
        tuple(v.shape for v in values),
        tuple(str(v.dtype).removeprefix("torch.") for v in values),
        str(op.rule),
        user_line(op.node),
        module,
        op.operands,
    )


def _dearest(
    decision: Decision, reshards: Iterable[tuple[Reshard, int]], mesh: Mesh
) -> tuple[Moved, ...]:
    """What of a step's reshards costs most, those alike as one; without links, what
    sends most."""
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
    """Node and user line that made a reshard necessary."""
    program = decision.program
    if reshard.early and reshard.value in program.producers:
        op = program.ops[program.producers[reshard.value][0]]
    elif reshard.output is not None:
        return f"output {program.signature.outputs[reshard.output].name}"
    else:
        assert reshard.reader is not None, "a reshard has a reader or an output"
        op = program.ops[reshard.reader]
    return said(op)


def said(op: Op) -> str:
    """An op's name and user line."""
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
    """The way an axis came to a value, at most a few steps of it."""
    origin = decision.origins[v][axis]
    hops: list[str] = []
    while origin.op is not None and origin.source is not None and len(hops) < 4:
        source = decision.program.values[origin.source]
        hops.append(f"{source.name} through {origin.op}")
        origin = decision.origins[origin.source].get(axis, replace(origin, op=None))
    way = "".join(f"\n    from {hop}" for hop in hops)
    ellipsis = "\n    ..." if origin.op is not None else ""
    return f"  {axis}: {decision.origins[v][axis].seed}{way}{ellipsis}"
