"""Formats a Plan as text: a line per op, then its collectives, memory and notes.

In: a Plan. Out: text. Never: computes a fact that the plan does not have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from fxpar.sharding.mesh import axis_of
from fxpar.sharding.pipeline_axis import PipelineStage
from fxpar.sharding.plan import Moved, NodePlan, Plan
from fxpar.sharding.spec import Spec
from fxpar.units import short_bytes, short_place, short_seconds, sizes_as_text

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "b"}


def short_dtype(name: str) -> str:
    """Return ``f32`` for float32 or torch.float32."""
    name = name.removeprefix("torch.")
    for long, short in _DTYPES.items():
        if name.startswith(long) and name[len(long) :].isdigit():
            return short + name[len(long) :]
    return name


def plan_text(plan: Plan) -> str:
    """Return the whole plan: ops with specs and user lines, then the summary."""
    lines = [*memory_warnings(plan), f"plan {plan.hash} for mesh {plan.mesh}", ""]
    lines += [_node_line(node) for node in plan.nodes]
    miss_lines = [f"near miss: {text}" for text in plan.near]
    regions = [f"region: {text}" for text in plan.regions]
    return "\n".join([*lines, "", summary_text(plan), *miss_lines, *regions])


def _tensors(
    specs: Sequence[Spec], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> str:
    return ", ".join(
        spec.format(shape, short_dtype(dtype))
        for spec, shape, dtype in zip(specs, shapes, dtypes, strict=True)
    )


def _node_line(node: NodePlan) -> str:
    n = len(node.operands)
    reads = _tensors(node.operands, node.shapes[:n], node.dtypes[:n])
    makes = _tensors(node.results, node.shapes[n:], node.dtypes[n:])
    line = f"{node.name} = {node.op}({reads}) -> {makes}"
    if node.settled != node.results:
        line += f" => {_tensors(node.settled, node.shapes[n:], node.dtypes[n:])}"
    return f"{line}  # {short_place(node.line)}" if node.line else line


def summary_text(plan: Plan) -> str:
    """Return the summary of a plan: first a line if memory is short, then the mesh,
    predictions, parameters by spec, collectives by kind and axes, the most expensive
    reshards, memory by kind, and notes."""
    lines = [*memory_warnings(plan), f"mesh: {plan.mesh} ({plan.mesh.size} ranks)"]
    lines += [f"predicted: {text}" for text in plan.predicted_texts()]
    lines += ["parameters:", *_by_spec(plan.parameters)]
    if plan.stages:
        lines += ["stages, each of one microbatch:", *map(_stage_line, plan.stages)]
    lines += ["collectives per step and rank:", *_by_kind(plan)]
    if plan.dearest:
        lines += ["dearest reshards:", *map(_moved, plan.dearest)]
    if plan.memory:
        most = short_bytes(plan.held_bytes)
        room = "" if plan.room is None else f" of {short_bytes(plan.room)}"
        lines.append(f"memory per rank at its peak: {most}{room}")
        lines += [f"  {kind:<23} {short_bytes(size):>10}" for kind, size in plan.memory]
    if plan.unknown:
        lines.append(f"ops without a rule, made whole: {', '.join(plan.unknown)}")
    if plan.schedule:
        lines += ["schedule:", *map(_short_line, plan.schedule.splitlines())]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def line_text(plan: Plan, batch: Collection[str] = ()) -> str:
    """Return in one line how much each axis splits and how much a step sends.
    ``batch``: axes along which each rank is fed a part of the batch."""
    texts, of_batch = [], {*map(axis_of, batch)}
    for axis, size, ops, parameters, _ in plan.by_axis():
        if size > 1:
            what = f"{ops} of {len(plan.nodes)} ops"
            what = "the batch" if axis in of_batch else what
            count = f", {parameters} of {len(plan.parameters)} parameters"
            texts.append(f"{axis} splits {what}{count * bool(parameters)}")
    sent = Counter(c.kind for c in plan.collectives)
    total = short_bytes(sum(c.bytes for c in plan.collectives))
    named = ", ".join(f"{n} {kind}" for kind, n in sent.most_common())
    texts.append(f"a rank sends {total} by {named}" if sent else "no collectives")
    return "; ".join(texts + [f"{x} predicted" for x in plan.predicted_texts()])


def memory_warnings(plan: Plan) -> list[str]:
    """Return the first line of a plan that needs more memory than a rank has; of any
    other plan nothing."""
    if plan.room is None or plan.fits:
        return []
    need, room = sizes_as_text(plan.held_bytes, plan.room)
    return [f"DOES NOT FIT: a rank needs {need} at its peak, and has {room}"]


def _by_spec(parameters: Iterable[tuple[str, Spec]]) -> list[str]:
    names_by_spec: dict[str, list[str]] = defaultdict(list)
    for name, spec in parameters:
        names_by_spec[str(spec)].append(name)
    out = []
    for text, names in names_by_spec.items():
        first_names = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        out.append(f"  {text:<16} {len(names):>4}  {first_names}")
    return out or ["  none"]


def _stage_line(stage: PipelineStage) -> str:
    forward, backward = map(
        short_seconds, (stage.forward_seconds, stage.backward_seconds)
    )
    return (
        f"  {stage.index} at {stage.place}: {len(stage.ops)} ops, forward {forward}, "
        f"backward {backward}, {len(stage.parameters)} parameters "
        f"({short_bytes(stage.bytes)}), sends {short_bytes(stage.sent_bytes)}"
    )


# The most names of a list that are shown.
_NAMES = 6


def _short_line(line: str) -> str:
    """Return a line of a schedule, with a long list of nodes cut short."""
    before, bracket, rest = line.partition("[")
    inside, _, after = rest.partition("]")
    names = inside.split(", ")
    if bracket and len(names) > _NAMES:
        first_names = ", ".join(names[:_NAMES])
        return f"  {before}[{first_names}, ... {len(names)} in all]{after}"
    return f"  {line}"


def _moved(moved: Moved) -> str:
    seconds = "" if moved.seconds is None else f"{short_seconds(moved.seconds):>8} "
    return (
        f"  {seconds}{short_bytes(moved.bytes):>10} {moved.calls:>4} calls  "
        f"{moved.source} -> {moved.target}  ({'; '.join(moved.steps)})  "
        f"# {short_place(moved.line)}"
    )


def _by_kind(plan: Plan) -> list[str]:
    out = [
        f"  {kind:<15} {axes:<8} {calls:>4} calls {short_bytes(size):>10}"
        for (kind, axes), (calls, size) in sorted(plan.traffic().items())
    ]
    return out or ["  none"]
