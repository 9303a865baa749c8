"""From a Decision to the Plan users see: specs by name, collectives, reasons."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from fxpar.sharding import shift_messages
from fxpar.sharding.cost.memory_report import footprint
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.op_modules import owners
from fxpar.sharding.plan import Collective, Moved, NodePlan, Plan
from fxpar.sharding.program import Op, backward_ops, user_line
from fxpar.sharding.propagate.at_rest import gathered_again
from fxpar.sharding.reshard.needed import Reshard
from fxpar.sharding.reshard.steps import duration
from fxpar.sharding.search.unequal_shards import note
from fxpar.sharding.spec import Spec

# So many reshards a plan tells of, those that cost most.
DEAREST = 5


def describe(decision: Decision, *, keep_gathered: bool = False) -> Plan:
    """The Plan of a Decision. ``keep_gathered``: parameters at rest are gathered once,
    not again in the backward."""
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
        decision.settled[v] if declared.rest is None else edges.made[v]
        for declared, v in fed
        if declared.kind == "input"
    ]
    parameters = [
        (declared.name, (edges.made if declared.is_sharded else decision.settled)[v])
        for declared, v in fed
        if declared.kind in ("parameter", "buffer")
    ]
    results = list(zip(signature.outputs, edges.outputs, strict=True))
    return Plan(
        decision.mesh,
        tuple(plain),
        tuple(s for out, s in results if out.kind == "output" and s is not None),
        tuple(parameters),
        tuple((o.name, s) for o, s in results if o.kind == "gradient" and s),
        tuple((v.name, decision.settled[v.index]) for v in program.values),
        nodes,
        collectives_of(decision, keep_gathered=keep_gathered),
        tuple(dict.fromkeys(str(op.target) for op in program.ops if not op.known)),
        decision.reasons or tuple(_reasons(decision)),
        _notes(decision),
        memory=footprint(decision, keep_gathered=keep_gathered),
        dearest=dearest(decision, keep_gathered=keep_gathered),
    )


def _notes(decision: Decision) -> tuple[str, ...]:
    """Those of the decision, which of a saved plan has said the last one too."""
    said = note(decision.mesh)
    return tuple(dict.fromkeys((*decision.notes, *([said] if said else []))))


def _node_plan(decision: Decision, op: Op, module: str) -> NodePlan:
    program, edges = decision.program, decision.edges
    strategy = decision.strategies[op.index]
    values = [program.values[v] for v in op.tensors]
    return NodePlan(
        op.name,
        str(op.target),
        strategy.factors,
        strategy.passes,
        tuple(edges.reads[op.index, i] for i in range(len(op.operands))),
        tuple(edges.made[v] for v in op.results),
        tuple(decision.settled[v] for v in op.results),
        tuple(v.shape for v in values),
        tuple(str(v.dtype).removeprefix("torch.") for v in values),
        str(op.rule),
        user_line(op.node),
        module,
        op.operands,
    )


def collectives_of(
    decision: Decision, *, keep_gathered: bool = False
) -> tuple[Collective, ...]:
    """Every collective of the plan in program order of the reshards, and of what ops
    send themselves."""
    reshards = reshards_of(decision, keep_gathered=keep_gathered)
    places = itertools.accumulate(map(_place, reshards), max)
    found = [
        (place, collective)
        for place, reshard in zip(places, reshards, strict=True)
        for collective in _collectives(decision, reshard)
    ]
    sent = [
        (float(op.index), Collective("permute", axes, nbytes, said(op)))
        for op, strategy in zip(decision.program.ops, decision.strategies, strict=True)
        for axes, nbytes in shift_messages.sent(op, strategy, decision.mesh)
    ]
    merged = heapq.merge(found, sent, key=lambda item: item[0])
    return tuple(collective for _, collective in merged)


def dearest(
    decision: Decision, mesh: Mesh | None = None, *, keep_gathered: bool = False
) -> tuple[Moved, ...]:
    """What resharding costs most, those alike as one. ``mesh``: with the links to price
    by; default: the decision's. Without links they are ranked by bytes."""
    mesh = mesh or decision.mesh
    known = any(link != Link() for link in mesh.links)
    calls: dict[tuple[Spec, Spec, tuple[str, ...], str], tuple[int, int, float]] = {}
    for reshard in reshards_of(decision, keep_gathered=keep_gathered):
        sent = sum(c.bytes for c in _collectives(decision, reshard))
        if not sent:
            continue
        value, way = decision.program.values[reshard.value], route(decision, reshard)
        local = value.nbytes / mesh.count(reshard.source.sharded_axes)
        taken = duration(way, mesh, local) if known else 0.0
        name, _, line = cause(decision, reshard).partition(" (")
        steps = tuple(f"{step.kind} {step.names}" for step in way)
        key = reshard.source, reshard.target, steps, line.removesuffix(")") or name
        count, total, seconds = calls.get(key, (0, 0, 0.0))
        calls[key] = count + 1, total + sent, seconds + taken
    found = sorted(calls.items(), key=lambda item: (-item[1][2], -item[1][1]))
    return tuple(
        Moved(source, target, steps, count, total, seconds if known else None, line)
        for (source, target, steps, line), (count, total, seconds) in found[:DEAREST]
    )


def reshards_of(
    decision: Decision, *, keep_gathered: bool = False
) -> tuple[Reshard, ...]:
    """Every reshard of a step in program order; those of parameters that forward and
    backward gather stand twice, unless they are kept."""
    reshards = decision.edges.reshards
    again = [] if keep_gathered else _again(decision)
    ordered = heapq.merge(
        zip(itertools.accumulate(map(_place, reshards), max), reshards, strict=True),
        sorted(again, key=lambda found: found[0]),
        key=lambda found: found[0],
    )
    return tuple(reshard for _, reshard in ordered)


def _place(reshard: Reshard) -> float:
    return math.inf if reshard.reader is None else reshard.reader


def _collectives(decision: Decision, reshard: Reshard) -> Iterator[Collective]:
    mesh, value = decision.mesh, decision.program.values[reshard.value]
    before, source = reshard.source, cause(decision, reshard)
    for step in route(decision, reshard):
        if not step.local:
            shards = min(mesh.count(spec.sharded_axes) for spec in (before, step.spec))
            yield Collective(step.kind, step.axes, value.nbytes // shards, source)
        before = step.spec


def _again(decision: Decision) -> list[tuple[float, Reshard]]:
    """Reshards of parameters at rest that the backward does once more: (its first
    reader there, the reshard for that reader)."""
    program, edges = decision.program, decision.edges
    ours, backward = gathered_again(program), backward_ops(program)
    leaves: dict[int, set[int]] = {}  # ops that read what an op makes of parameters
    for op in reversed(program.ops):
        if op.results and ours.issuperset(op.results):
            readers = {reader for v in op.results for reader, _ in program.uses[v]}
            leaves[op.index] = set().union(*(leaves.get(r, {r}) for r in readers))
    read_by: dict[tuple[int, Spec], set[int]] = {}
    for (index, i), spec in edges.reads.items():
        v = program.ops[index].operands[i]
        if v in ours:
            read_by.setdefault((v, spec), set()).update(leaves.get(index, {index}))
    out = []
    for reshard in edges.reshards:
        found = read_by.get((reshard.value, reshard.target), set())
        late = found & backward
        if late and late < found:
            out.append((float(min(late)), replace(reshard, reader=min(late))))
    return out


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
        elif decision.found is not None:
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
    more = "\n    ..." if origin.op is not None else ""
    return f"  {axis}: {decision.origins[v][axis].seed}{way}{more}"
