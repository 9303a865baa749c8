"""Render a Plan as one HTML page: no network, no other file, nothing but ``page.html``.

In: a Plan and, if there is one, its predicted timeline. Out: the page as text. Facts
that a Plan alone lacks (sizes of inputs, which reshard a collective belongs to) are
taken from the Decision that a traced plan holds; the page of a plan that was loaded
leaves them out. Ops are a tree of modules (``tree``), identical layers folded into one.
Never: planning, tracing or running.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from fxpar.errors import DeviceError
from fxpar.passes.simulate.simulate_step import Timeline
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.plan import Collective, NodePlan, Plan
from fxpar.sharding.plan_facts import cause
from fxpar.sharding.plan_text import memory_warnings, short_dtype
from fxpar.sharding.spec import Spec

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "__PLAN__"
DEAREST = 200

# A kind of a plan's memory that a timeline leaves out.
OPTIMIZER = "optimizer state"

_GROUPS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "output": "outputs",
}


def render(plan: Plan, timeline: Timeline | None = None) -> str:
    """Return the page of a plan."""
    data = json.dumps(page_data(plan, timeline), separators=(",", ":"))
    # Inside a script element nothing may look like the end of it.
    safe = data.replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, safe)


def page_data(plan: Plan, timeline: Timeline | None = None) -> dict[str, Any]:
    """Return what the page shows, ready for JSON: ``rows`` (inputs, ops, outputs),
    ``values`` and ``edges`` as lists, their texts numbers in ``texts``; ``tree`` of row
    numbers."""
    page = _page(plan)
    text, line = _Texts(), timeline
    # Most bytes first.
    totals = sorted(plan.traffic().items(), key=lambda x: -x[1][1])
    return {
        "hash": plan.hash,
        "mesh": plan.mesh.unrefined.axes,
        "ranks": plan.mesh.size,
        "traced": _decision(plan) is not None,
        "rows": [row.plain(text) for row in page.rows],
        "values": [value.plain(text) for value in page.values],
        "edges": [edge.plain(text) for edge in page.edges],
        "tree": [_plain(item) for item in _tree(page)],
        "reasons": {text(name): text(why) for name, why in plan.reasons},
        "totals": [[*key, *sums] for key, sums in totals],
        "dearest": _dearest(plan),
        "memory": dict(plan.memory),
        "says": [*memory_warnings(plan), *plan.predicted_texts()],
        "step": line and [line.seconds, line.compute_seconds, line.exposed_seconds],
        "room": plan.room,
        "axes": plan.by_axis(),
        "layers": _layers(plan),
        "unknown": plan.unknown,
        "notes": plan.notes,
        "seconds": dict(plan.timings),
        "timeline": line and _timeline(line, text, dict(plan.memory).get(OPTIMIZER, 0)),
        "texts": text.all,
    }


class _Texts:
    """Holds each text once; a call returns its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: Any) -> int:
        return self.numbers.setdefault(str(text), len(self.numbers))

    @property
    def all(self) -> list[str]:
        return list(self.numbers)


@dataclass
class _ValueRow:
    """Is a value of the page: its shape, and what makes it."""

    name: str  # as ``Plan.values`` names it
    settled: Spec  # the spec that it settles in, which ops read or reshard
    raw_spec: Spec  # the spec in which it is made
    row: int = -1  # index of the row that makes it
    shape: tuple[int, ...] | None = None  # global shape; None where not known
    dtype: str | None = None  # as torch prints it; None where not known

    def plain(self, text: _Texts) -> list[Any]:
        dtype = text(short_dtype(self.dtype)) if self.dtype else -1
        specs = text(self.settled), text(self.raw_spec)
        return [text(self.name), dtype, self.shape, *specs, self.row]


@dataclass
class _Row:
    """Is an input, an op or an output."""

    name: str
    op: str  # as the graph calls it; or "input", "output"
    module: str | None  # its module's path
    line: str | None = None  # the user's line
    # (index of a value, -1 if not known; the spec in which it is read).
    reads: list[tuple[int, Spec]] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)  # values, by index
    about: str = ""  # further text

    def plain(self, text: _Texts) -> list[Any]:
        reads = [x for v, spec in self.reads for x in (v, text(spec))]
        line = text(self.line) if self.line else -1
        name, op, about = map(text, (self.name, self.op, self.about))
        return [name, op, line, reads, self.makes, about]


@dataclass
class _Edge:
    """Is a reshard of the page."""

    row: int  # index of the row where it is shown
    early: bool  # whether it comes after the row, else before it
    steps: list[tuple[str, str, int]]  # (text, axes, bytes) of its collectives
    value: int = -1  # index of the value; -1 where only its collectives are known
    source: Spec | None = None  # None where only its collectives are known
    target: Spec | None = None  # as ``source``

    def plain(self, text: _Texts) -> list[Any]:
        steps = [[text(kind), text(axes), n] for kind, axes, n in self.steps]
        specs = [-1 if s is None else text(s) for s in (self.source, self.target)]
        return [self.row, int(self.early), steps, self.value, *specs]


@dataclass
class _Page:
    """Holds all rows, values and edges."""

    rows: list[_Row]  # in order of the program
    values: list[_ValueRow]  # by index, as rows and edges name them
    edges: list[_Edge]  # reshards, and collectives that belong to none


def _decision(plan: Plan) -> Decision | None:
    """Return the decision that a traced plan holds, None for a plan that was loaded."""
    return getattr(getattr(plan, "result", None), "decision", None)


def _page(plan: Plan) -> _Page:
    """Return the rows, values and edges of a plan."""
    decision = _decision(plan)
    values = [_ValueRow(name, spec, spec) for name, spec in plan.values]
    index = {value.name: v for v, value in enumerate(values)}
    ops = [_op_row(node, index, values) for node in plan.nodes]
    rows = _input_rows(plan, decision, values) + ops
    first = len(rows) - len(ops)
    rows += _output_rows(plan, decision)
    for number, row in enumerate(rows):
        for v in row.makes:
            values[v].row = number
    where = {row.name: first + i for i, row in enumerate(ops)}
    for i, row in enumerate(rows[first + len(ops) :], start=first + len(ops)):
        where.setdefault(f"output {row.name}", i)
    uncharged: Sequence[Collective] = plan.collectives
    edges: list[_Edge] = []
    if decision is not None:
        edges, uncharged = _reshards(decision, uncharged, first, where)
    for c in uncharged:
        row_number = where.get(c.source.partition(" (")[0])
        if row_number is not None:
            steps = [(c.kind, "+".join(c.axes), c.bytes)]
            edges.append(_Edge(row_number, False, steps))
    return _Page(rows, values, edges)


def _op_row(
    node: NodePlan, index: Mapping[str, int], values: Sequence[_ValueRow]
) -> _Row:
    """Return the row of an op, and note the specs, shapes and dtypes of its results."""
    n = len(node.operands)
    makes = []
    for i, (raw_spec, settled) in enumerate(
        zip(node.results, node.settled, strict=True)
    ):
        v = index.get(node.name if len(node.results) == 1 else f"{node.name}.{i}")
        if v is None:  # of a tuple with other results than tensors
            v = index[f"{node.name}.{i}"]
        value = values[v]
        value.raw_spec, value.settled = raw_spec, settled
        value.shape, value.dtype = node.shapes[n + i], node.dtypes[n + i]
        makes.append(v)
    split = ", ".join(f"{f} over {'+'.join(axes)}" for f, axes in node.factors if axes)
    about = f"{node.rule}\n{split}" if split else node.rule
    places = node.reads or [-1] * n
    reads = list(zip(places, node.operands, strict=True))
    return _Row(node.name, node.op, node.module, node.line, reads, makes, about)


def _input_rows(
    plan: Plan, decision: Decision | None, values: Sequence[_ValueRow]
) -> list[_Row]:
    """Return a row for every value that no op makes."""
    op_results = {node.name for node in plan.nodes}
    op_results |= {f"{x.name}.{i}" for x in plan.nodes for i in range(len(x.results))}
    kinds = {name: "parameter" for name, _ in plan.parameters}
    if decision is not None:
        program = decision.program
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True):
            if v is not None:
                kinds[program.values[v].name] = declared.kind
        for value, program_value in zip(values, program.values, strict=True):
            value.raw_spec = decision.edges.specs[program_value.index]
            value.shape = program_value.shape
            value.dtype = str(program_value.dtype).removeprefix("torch.")
    rows = []
    for v, value in enumerate(values):
        if value.name not in op_results:
            kind = kinds.get(value.name, "input")
            module = f"{_GROUPS.get(kind, 'inputs')}/{value.name.rpartition('.')[0]}"
            rows.append(_Row(value.name, kind, module, makes=[v]))
    return sorted(rows, key=lambda row: row.op != "parameter")


def _output_rows(plan: Plan, decision: Decision | None) -> list[_Row]:
    """Return a row for every output of the program."""
    ends_of_plan: list[tuple[str, str, int, Spec]] = []
    if decision is not None:
        outputs = decision.program.signature.outputs
        ends = zip(
            outputs, decision.program.outputs, decision.edges.outputs, strict=True
        )
        ends_of_plan = [
            (declared.name, declared.kind, v, spec)
            for declared, v, spec in ends
            if v is not None and spec is not None
        ]
    else:
        ends_of_plan = [
            (f"output_{i}", "output", -1, s) for i, s in enumerate(plan.outputs)
        ]
        ends_of_plan += [(name, "gradient", -1, spec) for name, spec in plan.gradients]
    rows = []
    for name, kind, v, spec in ends_of_plan:
        path = name.rpartition(".")[0] if kind == "gradient" else ""
        module = f"{_GROUPS.get(kind, 'outputs')}/{path}"
        rows.append(_Row(name, kind, module, reads=[(v, spec)]))
    return rows


def _reshards(
    decision: Decision,
    collectives: Sequence[Collective],
    first: int,
    where: Mapping[str, int],
) -> tuple[list[_Edge], list[Collective]]:
    """Return the reshards of a plan, and the collectives that belong to none of them:
    those of parameters that the backward gathers again."""
    program = decision.program
    waiting: dict[Any, deque[Collective]] = defaultdict(deque)
    for c in collectives:
        waiting[c.kind, c.axes, c.source].append(c)
    edges = []
    for reshard in decision.edges.reshards:
        source = cause(decision, reshard)
        steps = []
        for step in route(decision, reshard):
            queue = () if step.local else waiting[step.kind, step.axes, source]
            size = queue.popleft().bytes if queue else 0
            steps.append((step.kind, "+".join(step.axes), size))
        if reshard.early:
            row = first + program.producers[reshard.value][0]
        elif reshard.reader is not None:
            row = first + reshard.reader
        else:
            row = where[source]
        edge = _Edge(row, reshard.early, steps, reshard.value)
        edge.source, edge.target = reshard.source, reshard.target
        edges.append(edge)
    unused = {id(c) for queue in waiting.values() for c in queue}
    return edges, [c for c in collectives if id(c) in unused]


def _tree(page: _Page) -> list[ModuleGroup | int]:
    """Return the rows as a tree of modules, identical layers folded."""
    edges: dict[int, list[Any]] = defaultdict(list)
    for e in page.edges:
        edges[e.row].append((e.early, *e.steps, e.source, e.target))
    keys = []
    for number, row in enumerate(page.rows):
        values = [page.values[v] for v in row.makes]
        results = tuple((v.raw_spec, v.settled, v.shape, v.dtype) for v in values)
        reads = tuple(spec for _, spec in row.reads)
        short = row.name.rpartition(".")[2] if row.op in _GROUPS else ""
        keys.append((row.op, short, reads, results, tuple(edges[number])))
    return tree([row.module for row in page.rows], keys)


def _plain(item: ModuleGroup | int) -> Any:
    """Return the data of the page for an item of the tree."""
    if isinstance(item, int):
        return item
    return [item.label, int(item.is_repeated), [_plain(inner) for inner in item.items]]


def _layers(plan: Plan) -> str:
    """Return the table by layer, or why there is none."""
    try:
        return plan.layers()
    except DeviceError as error:
        return f"no table by layer: {error.what}"


def _dearest(plan: Plan) -> list[list[Any]]:
    """Return [kind, axes, calls, bytes of all calls, op of the first, line], most bytes
    first; one entry for calls of one kind and size that one line of the user's
    causes."""
    entries: dict[Any, list[Any]] = {}
    for c in plan.collectives:
        name, _, line = c.source.partition(" (")
        line = line.removesuffix(")")
        key = c.kind, c.axes, c.bytes, line or name
        entry = entries.setdefault(key, [c.kind, "+".join(c.axes), 0, 0, name, line])
        entry[2] += 1
        entry[3] += c.bytes
    return sorted(entries.values(), key=lambda entry: -entry[3])[:DEAREST]


def _timeline(timeline: Timeline, text: _Texts, state: int) -> dict[str, Any]:
    """Return a timeline as data of the page. ``state``: bytes of the optimizer's state,
    which a rank holds all the time."""
    events = [
        [text(e.name), text(e.stream), text(e.kind)]
        + [round(e.start, 9), round(e.duration, 9)]
        + [text(e.origin or e.name), text(e.line or "")]
        for e in timeline.events
    ]
    memory = [[round(t, 9), n + state] for t, n in timeline.memory]
    held_values = [[x.name, x.bytes, x.line or ""] for x in timeline.held]
    return {"events": events, "memory": memory, "held": held_values}


@dataclass(frozen=True)
class ModuleGroup:
    """Is a module, or, where ``is_repeated`` is set, neighbouring layers that do the
    same."""

    label: str  # the module's name; for several the first and the last
    items: tuple[ModuleGroup | int, ...]  # groups and rows within, in order
    is_repeated: bool = False  # items are neighbouring layers that do the same


def tree(
    modules: Sequence[str | None], keys: Sequence[Hashable]
) -> list[ModuleGroup | int]:
    """Return the rows by phase and module. Rows without a module are at the top."""
    paths = []
    for i, module in enumerate(modules):
        phase, _, path = (module or "").partition("/")
        paths.append(([phase, *path.split(".")] if path else [phase] * bool(phase), i))
    numbers: dict[Hashable, int] = {}
    return _fold(_nest(paths), keys, numbers)[0]


def _nest(paths: Sequence[tuple[list[str], int]]) -> list[ModuleGroup | int]:
    """Return groups at their first row. Lists of layers are replaced by the layers."""
    members: dict[str, list[tuple[list[str], int]]] = {}
    order: list[str | int] = []
    for path, i in paths:
        if not path:
            order.append(i)
        elif path[0] not in members:
            order.append(path[0])
        if path:
            members.setdefault(path[0], []).append((path[1:], i))
    out: list[ModuleGroup | int] = []
    for item in order:
        out += [item] if isinstance(item, int) else _named(item, _nest(members[item]))
    return out


def _named(label: str, items: list[ModuleGroup | int]) -> list[ModuleGroup | int]:
    """Return a module's group, or its layers with the module's name in front."""
    groups = [item for item in items if isinstance(item, ModuleGroup)]
    if len(groups) == len(items) and all(g.label[0].isdigit() for g in groups):
        return [replace(g, label=f"{label}.{g.label}") for g in groups]
    if len(items) == 1 and groups:
        return [replace(groups[0], label=f"{label}.{groups[0].label}")]
    return [ModuleGroup(label, tuple(items))]


def _fold(
    items: Sequence[ModuleGroup | int],
    keys: Sequence[Hashable],
    numbers: dict[Hashable, int],
) -> tuple[list[ModuleGroup | int], list[int]]:
    """Return the items, runs of identical layers folded; and a number per item given,
    equal for those that do the same."""
    folded: list[ModuleGroup | int] = []
    same: list[int] = []
    for item in items:
        key: Hashable
        if isinstance(item, int):
            key = ("row", keys[item])
        else:
            inner, inside = _fold(item.items, keys, numbers)
            item = replace(item, items=tuple(inner))
            key = ("group", _stem(item.label), tuple(inside))
        folded.append(item)
        same.append(numbers.setdefault(key, len(numbers)))
    return list(_runs(folded, same)), same


def _runs(
    items: Sequence[ModuleGroup | int], same: Sequence[int]
) -> Iterator[ModuleGroup | int]:
    """Yield the items; neighbouring layers that do the same become one group."""
    pairs = zip(items, same, strict=True)
    for _, run in groupby(pairs, lambda pair: pair[1]):
        members = [item for item, _ in run]
        first, last = members[0], members[-1]
        # Neighbours of one stem differ by a number.
        if (
            isinstance(first, ModuleGroup)
            and isinstance(last, ModuleGroup)
            and len(members) > 1
        ):
            yield ModuleGroup(
                f"{first.label} … {last.label}", tuple(members), is_repeated=True
            )
        else:
            yield from members


def _stem(label: str) -> str:
    """Return a label without its numbers, by which equal layers differ."""
    return ".".join("#" if part.isdigit() else part for part in label.split("."))
