"""Holds the plan as frozen data: a spec for every value, the choices made, the reasons.

In: fields that ``plan_facts`` fills from the decisions of ``decide``, or a file. Out:
text, JSON that reads back as an equal plan, a stable hash.

``plan_from`` reads a plan from a file, each field by its type. Whether a plan fits a
program, ``plan_facts.recall`` checks. Never: decides anything.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from fxpar.cache_files import write_asked
from fxpar.errors import FxparError, PlanError
from fxpar.sharding.mesh import Link, Mesh, axis_of
from fxpar.sharding.pipeline_axis import PipelineStage, pipeline_axis, without_stages
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import without_axes
from fxpar.units import digest, short_seconds

FORMAT = 1

T = TypeVar("T")

# The name of an axis of the plan's mesh.
Axis = Annotated[str, "axis"]


@dataclass(frozen=True)
class Collective:
    """Describes one collective that a rank takes part in."""

    # all_reduce, all_gather, reduce_scatter, all_to_all or permute; between stages also
    # send, broadcast or scatter.
    kind: str
    # The axes that it goes over.
    axes: tuple[Axis, ...]
    # Size of the complete tensor on one rank; for a reduce_scatter, of its input.
    bytes: int
    # Node, and the user's line; "" if unknown.
    source: str = ""


@dataclass(frozen=True)
class NodePlan:
    """Describes one op: its strategy, and the specs of its operands and results."""

    # Its node's name.
    name: str
    # As the graph calls it.
    op: str
    # Axes by factor of the rule.
    factors: tuple[tuple[str, tuple[Axis, ...]], ...]
    # (axis, reduction, number of the passage) of partial operands that pass through.
    passes: tuple[tuple[Axis, str, int], ...]
    # Specs it reads.
    operands: tuple[Spec, ...]
    # Specs it makes.
    results: tuple[Spec, ...]
    # Specs in which its results settle.
    settled: tuple[Spec, ...]
    # Global, of operands and results.
    shapes: tuple[tuple[int, ...], ...]
    # As text, of operands and results.
    dtypes: tuple[str, ...]
    # As text.
    rule: str
    # The user's source line; None if unknown.
    line: str | None = None
    # ``forward/layers.0.mlp``, as ``plan_facts`` writes it; None if unknown.
    module: str | None = None
    # The position in ``Plan.values`` of each operand; empty if unknown.
    reads: tuple[int, ...] = ()

    @cached_property
    def record(self) -> dict[str, Any]:
        """Return the op ready for JSON, as in ``Plan.to_dict``; read only. Cached, as
        plans that differ only in notes have the same ops."""
        fields = asdict_shallow(self).items()
        return {
            name: _plain_once(x) if type(x) is tuple else _plain(x)
            for name, x in fields
            if name not in _ASIDE
        }


# Fields of a NodePlan that ``hash`` leaves out: they are in the program, or do not
# change what ranks run.
_ASIDE = ("line", "module", "reads")
# Fields of a Plan that ``hash`` covers, those that may be left out, and others that are
# saved.
_ALWAYS = ["inputs", "outputs", "parameters", "gradients", "values", "unknown"]
_ALWAYS += ["collectives"]
_IF_ANY = ["schedule", "experts", "sent_rows", "bodies", "stages"]
_UNHASHED = ["reasons", "notes", "memory", "room", "step_seconds", "near", "regions"]
_UNHASHED += ["collectives", "dearest"]


@dataclass(frozen=True)
class Moved:
    """Describes equal reshards that one line of the user's causes: from one spec to
    another, by the same steps."""

    # The spec before.
    source: Spec
    # The spec after.
    target: Spec
    # Such as ("all_gather dp",).
    steps: tuple[str, ...]
    # Number of reshards.
    calls: int
    # Total of all calls, each counted as in ``Collective``.
    bytes: int
    # Total of all calls; None if no hardware is known.
    seconds: float | None
    # The user's source line.
    line: str


@dataclass(frozen=True)
class Plan:
    """Holds a spec for every value of one graph on one mesh."""

    # With its links.
    mesh: Mesh
    # Specs of the user's tensor arguments.
    inputs: tuple[Spec, ...]
    # Specs of its results.
    outputs: tuple[Spec, ...]
    # Specs by name.
    parameters: tuple[tuple[str, Spec], ...]
    # Specs by name of the parameter.
    gradients: tuple[tuple[str, Spec], ...]
    # Spec of every named value.
    values: tuple[tuple[str, Spec], ...]
    # In order of the graph.
    nodes: tuple[NodePlan, ...]
    # Those of one step in the order they run, before small ones are joined; collectives
    # that forward and backward both run are listed twice.
    collectives: tuple[Collective, ...]
    # Ops without a rule, whose operands were made whole.
    unknown: tuple[str, ...] = ()
    # (value, why it has its spec).
    reasons: tuple[tuple[str, str], ...] = ()
    # Observations made while planning, as text.
    notes: tuple[str, ...] = ()
    # Seconds by step of the pipeline.
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)
    # (kind, bytes of a rank) at its simulated peak, with the optimizer's state.
    memory: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    # Memory of a rank in bytes; None if no hardware is known.
    room: int | None = field(default=None, compare=False)
    # The most expensive reshards.
    dearest: tuple[Moved, ...] = field(default=(), compare=False)
    # The lines of ``fusion.schedule`` that were applied to the local graph.
    schedule: str = ""
    # Axes that experts are split over, where the search chose them.
    experts: tuple[Axis, ...] = ()
    # For each mixture of experts split over manual axes, the rows that a rank sends; 0
    # if each rank has all experts.
    sent_rows: tuple[int, ...] = ()
    # Chosen bodies of manual regions, where the search chose others than the first.
    bodies: tuple[int, ...] = ()
    # Predicted seconds of a step, if plans were compared by them.
    step_seconds: float | None = field(default=None, compare=False)
    # Near misses: rewrites that were not made, and why.
    near: tuple[str, ...] = field(default=(), compare=False)
    # In a compiled graph, the parts that run as generated kernels, how, and why.
    regions: tuple[str, ...] = field(default=(), compare=False)
    # On a mesh with an axis of stages, its stages in the order of the forward.
    stages: tuple[PipelineStage, ...] = ()
    # Requested or searched for the stages; None: the usual number.
    microbatches: int | None = None
    # The file that it was read from; empty: none.
    path: str = field(default="", compare=False)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of a rank at its peak, with the optimizer's state; 0 if
        unknown."""
        return sum(size for _, size in self.memory)

    @property
    def fits(self) -> bool:
        """Return whether the peak fits in the memory of a rank; true if either is
        unknown."""
        return self.room is None or self.held_bytes <= self.room

    def traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return (kind, axes) -> (calls, bytes) of the collectives of a step."""
        out: dict[tuple[str, str], tuple[int, int]] = {}
        for c in self.collectives:
            calls, size = out.get(key := (c.kind, "+".join(c.axes)), (0, 0))
            out[key] = calls + 1, size + c.bytes
        return out

    def by_axis(self) -> list[tuple[str, int, int, int, int]]:
        """Return (axis, ranks, ops that it splits, parameters that it splits, bytes
        sent along it) for each whole axis."""
        ops, parameters, sent = (Counter[str]() for _ in range(3))
        for node in self.nodes:
            ops.update({axis_of(a) for _, axes in node.factors for a in axes})
        for _, spec in self.parameters:
            parameters.update({*map(axis_of, spec.sharded_axes)})
        for c in self.collectives:
            sent.update(dict.fromkeys(map(axis_of, c.axes), c.bytes))
        return [
            (axis, size, ops[axis], parameters[axis], sent[axis])
            for axis, size in self.mesh.unrefined.axes
        ]

    def predicted_texts(self) -> list[str]:
        """Return the predicted seconds of a step as text, nothing if unknown."""
        seconds = self.step_seconds
        return [] if seconds is None else [f"{short_seconds(seconds)} a step"]

    def layers(self) -> str:
        """Return memory and time by layer, or why there is none: a loaded plan has no
        program."""
        return "no table by layer: a loaded plan has no program; plan with mode=FILE"

    def of_one_stage(self) -> Plan:
        """Return the plan on the mesh that one stage runs on, with specs without the
        axis of stages."""
        axis = pipeline_axis(self.mesh)
        if axis is None:
            return self
        return replace(self.without({axis}), mesh=without_stages(self.mesh))

    def without(self, axes: Collection[str]) -> Plan:
        """Return the plan whose specs do not name these axes, on the same mesh."""

        def bare(named: tuple[tuple[str, Spec], ...]) -> tuple[tuple[str, Spec], ...]:
            return tuple((name, spec.without(axes)) for name, spec in named)

        return replace(
            self,
            values=bare(self.values),
            gradients=bare(self.gradients),
            outputs=tuple(spec.without(axes) for spec in self.outputs),
            nodes=tuple(
                replace(x, factors=without_axes(x.factors, axes)) for x in self.nodes
            ),
        )

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        return {**dict(self.values), **dict(self.parameters)}

    def spec(self, name: str) -> Spec:
        """Return the spec of a value or parameter by name. Raises PlanError if
        unknown."""
        try:
            return self._specs[name]
        except KeyError:
            similar = [full_name for full_name in self._specs if name in full_name][:5]
            raise PlanError(
                f"the plan has no value named {name!r}",
                fix=f"names are such as {similar or list(self._specs)[:5]}",
            ) from None

    def why(self, name: str) -> str:
        """Return why a value has its spec: for each axis the seed and the way it
        came."""
        spec = self.spec(name)
        reason = dict(self.reasons).get(name)
        return f"{name}: {spec}\n{reason or '  whole: no axis reached it'}"

    @cached_property
    def hash(self) -> str:
        """Return a stable digest of everything that decides which program the ranks
        run."""
        data = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return digest(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan ready for JSON; without timings, reasons, modules and source
        lines, which may differ between runs of the same plan."""
        data = {name: _plain(x) for name in _IF_ANY if (x := getattr(self, name))}
        for stage in data.get("stages", ()):
            del stage["forward_seconds"], stage["backward_seconds"]
        if self.stages and self.microbatches is not None:
            data["microbatches"] = self.microbatches
        data |= {name: _plain(getattr(self, name)) for name in _ALWAYS}
        for collective in data["collectives"]:
            del collective["source"]
        nodes = [node.record for node in self.nodes]
        return data | {"format": FORMAT, "mesh": str(self.mesh), "nodes": nodes}

    def to_record(self) -> dict[str, Any]:
        """Return ``to_dict`` with the fields that ``hash`` does not cover: links,
        reasons, notes, source lines, modules and others."""
        data = self.to_dict()
        data |= {name: _plain(getattr(self, name)) for name in _UNHASHED}
        data["nodes"] = [
            {**node.record, **{name: getattr(node, name) for name in _ASIDE}}
            for node in self.nodes
        ]
        if self.stages:
            data["stages"] = _plain(self.stages)
        if any(link != Link() for link in self.mesh.links):
            data["links"] = _plain(self.mesh.links)
        return data

    def save(self, path: str | Path) -> None:
        """Write ``to_json``. Raises OptionError if it cannot be written."""
        write_asked(path, self.to_json())

    def to_json(self) -> str:
        """Return ``to_record`` as text."""
        return json.dumps(self.to_record(), indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan that ``save`` wrote. Raises PlanError if it cannot be read,
        naming the broken place in the file."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(
                f"cannot read the plan file {path}: {error}",
                fix="FXPAR_PLAN takes search, propagate, replicate, or a file of "
                "plan.save()",
            ) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(
                f"{path} is not a plan of this version of fxpar",
                fix="plan again, and save it: plan.save(path)",
            )
        try:
            return replace(cls.from_dict(data), path=str(path))
        except PlanError as error:
            raise PlanError(f"{path}: {error.what}", fix=error.fix) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan of ``to_record``, or of ``to_dict``, which has no links.

        Raises PlanError naming the malformed place.
        """
        return plan_from(data)

    def diff(self, other: Plan) -> str:
        """Return the differences from another plan: specs, one line per value, then
        bytes that a rank communicates and holds; empty if there are none."""
        own_specs, other_specs = dict(self.values), dict(other.values)
        meshes = str(self.mesh), str(other.mesh)
        lines = [] if meshes[0] == meshes[1] else [f"mesh: {' | '.join(meshes)}"]
        for name in dict.fromkeys([*own_specs, *other_specs]):
            a, b = own_specs.get(name), other_specs.get(name)
            if a != b:
                lines.append(f"{name}: {a} | {b}")
        lines += [
            f"{kind}: {before:,} | {after:,} bytes"
            for kind, before, after in _compared(self, other)
            if before != after
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """Return mesh, specs of parameters, and collectives by kind and axes with
        bytes."""
        from fxpar.sharding.plan_text import summary_text

        return summary_text(self)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one HTML page that needs no network and no other file."""
        from fxpar.explain.html import render

        write_asked(path, render(self))

    def __str__(self) -> str:
        from fxpar.sharding.plan_text import plan_text

        return plan_text(self)


def _compared(plan_a: Plan, plan_b: Plan) -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes of one plan, of the other): collectives by kind and axes,
    memory by kind, where both are known."""
    sent = [
        {" ".join(key): size for key, (_, size) in plan.traffic().items()}
        for plan in (plan_a, plan_b)
    ]
    memory = (
        [dict(plan_a.memory), dict(plan_b.memory)]
        if plan_a.memory and plan_b.memory
        else []
    )
    for pair in (sent, memory):
        for kind in dict.fromkeys(itertools.chain(*pair)):
            a, b = (sums.get(kind, 0) for sums in pair)
            yield kind, a, b


_AS_IT_IS = frozenset((str, int, float, bool, type(None)))


def _plain(x: Any) -> Any:
    """Return a value ready for JSON: specs as text, other dataclasses as tables."""
    if type(x) in _AS_IT_IS:
        return x
    if isinstance(x, Spec):
        return _text_of(x)
    if isinstance(x, dict):
        return {key: _plain(y) for key, y in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(y) for y in x]
    return _plain(asdict_shallow(x)) if is_dataclass(x) else x


@lru_cache(maxsize=1 << 14)
def _text_of(spec: Spec) -> str:
    return str(spec)


@lru_cache(maxsize=1 << 14)
def _plain_once(x: tuple[Any, ...]) -> Any:
    """Return ``_plain`` of a tuple that equal ops share; read only."""
    return _plain(x)


def asdict_shallow(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without converting values."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


_SHOWN = 60  # characters of a value in a message


class _Misread(Exception):
    """Says what is wrong with a value of a saved plan, and the keys that lead to it."""

    def __init__(self, why: str, *keys: str | int) -> None:
        self.why, self.keys = why, keys

    def inside(self, key: str | int) -> _Misread:
        """Return the error for the table or list that has the value at a key."""
        return _Misread(self.why, key, *self.keys)


def _unlike(what: str, x: Any, *keys: str | int) -> _Misread:
    text = repr(x)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return _Misread(f"{what} is expected, not {text}", *keys)


def plan_from(data: Mapping[str, Any]) -> Plan:
    """Return the plan of a record: the inverse of ``Plan.to_record`` and
    ``Plan.to_dict``.

    Raises PlanError naming the malformed place, as nodes[3].factors[0].
    """
    try:
        if not isinstance(data, dict):
            raise _unlike("a table", data)
        # The mesh comes first, as the rest is read on it.
        mesh = _entry(data, "mesh", Mesh, Mesh(()))
        if "links" in data:
            links = _entry(data, "links", tuple[Link, ...], mesh)
            _want_count(len(mesh.axes), links, "links")
            mesh = replace(mesh, links=links)
        plan: Plan = _record(Plan, data, mesh, mesh=mesh, timings={})
        values = {name for name, _ in plan.values}
        for i, node in enumerate(plan.nodes):
            _check(node, values, "nodes", i)
        return plan
    except _Misread as error:
        place = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in error.keys)
        raise PlanError(
            f"the saved plan is broken at {place[1:] or 'its top'}: {error.why}",
            fix="save the plan again: plan.save(path), or FXPAR_DUMP",
        ) from error.__cause__


def _record(kind: Any, x: Any, mesh: Mesh, /, **values: Any) -> Any:
    """Return a dataclass whose fields, but the ``values``, are a table of the file."""
    if not isinstance(x, dict):
        raise _unlike("a table", x)
    for name, (field_kind, is_required) in _fields(kind).items():
        if name not in values and (is_required or name in x):
            values[name] = _entry(x, name, field_kind, mesh)
    return kind(**values)


def _entry(table: Mapping[str, Any], key: str, kind: Any, mesh: Mesh) -> Any:
    if key not in table:
        raise _Misread("it is missing", key)
    try:
        return _read(kind, table[key], mesh)
    except _Misread as error:
        raise error.inside(key) from error.__cause__


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a dataclass, and whether it has no default."""
    hints = get_type_hints(kind, include_extras=True)
    return {x.name: (hints[x.name], x.default is MISSING) for x in fields(kind)}


_types_in = cache(get_args)


def _read(kind: Any, x: Any, mesh: Mesh) -> Any:
    """Return a value of a type on a mesh, as JSON has it. Raises _Misread."""
    if kind in _SINGLE:
        return _single(kind, x, mesh)
    types = _types_in(kind)
    if not types:
        return _record(kind, x, mesh)
    *kinds, last = types
    if last is NoneType:
        return None if x is None else _read(kinds[0], x, mesh)
    if not isinstance(x, (list, tuple)):
        raise _unlike("a list", x)
    if last is ...:
        kinds *= len(x)
    else:
        kinds.append(last)
        _want_count(len(kinds), x)
    items: list[Any] = []
    try:
        for item_kind, item in zip(kinds, x, strict=True):
            items.append(_read(item_kind, item, mesh))  # noqa: PERF401
    except _Misread as error:
        raise error.inside(len(items)) from error.__cause__
    return tuple(items)


def _want_count(count: int, items: Collection[Any], *keys: str | int) -> None:
    if len(items) != count:
        raise _Misread(f"{count} entries are expected, not {len(items)}", *keys)


# Few specs stand in a plan, each many times.
_parse_spec = lru_cache(maxsize=1 << 12)(Spec.parse)

# For each type of one value: as JSON has it, what that is called, and what makes the
# value of it.
_SINGLE: dict[Any, tuple[Any, str, Callable[[Any], Any] | None]] = {
    str: (str, "text", None),
    int: (int, "a whole number", None),
    float: ((int, float), "a number from 0", None),
    bool: (bool, "true or false", None),
    Axis: (str, "text", None),
    Spec: (str, "text", _parse_spec),
    Mesh: (str, "text", Mesh.parse),
}


def _single(kind: Any, x: Any, mesh: Mesh) -> Any:
    json_type, what, parse = _SINGLE[kind]
    if not isinstance(x, json_type) or (isinstance(x, bool) and kind is not bool):
        raise _unlike(what, x)
    if kind in (int, float) and not x >= 0:  # infinity is one, NaN is not
        raise _unlike("a number from 0", x)
    try:
        value = parse(x) if parse else x
    except FxparError as error:
        raise _Misread(error.what) from error
    if kind is Axis and not mesh.has(value):
        raise _Misread(f"mesh {mesh} has no axis {value!r}")
    for axis in value.axes if kind is Spec else ():
        if not mesh.has(axis):
            raise _Misread(f"{value} names axis {axis!r}, mesh {mesh} has none")
    return value


def _check(node: NodePlan, values: Collection[str], *at: str | int) -> None:
    """Raise _Misread unless an op has as many specs as it has shapes, each of as many
    dims, and its results are among the ``values``."""
    shapes, operands = node.shapes, len(node.operands)
    results = len(shapes) - operands
    if results < 0:
        why = f"at least {operands} shapes are expected, one for each operand"
        raise _Misread(why, *at, "shapes")
    for result_name in [f"{node.name}.{i}" for i in range(results)]:
        if result_name not in values and not (results == 1 and node.name in values):
            named = result_name if results > 1 else node.name
            raise _Misread(f"no value is named {named}", *at, "name")
    for name, part in (
        ("operands", shapes[:operands]),
        ("results", shapes[operands:]),
        ("settled", shapes[operands:]),
    ):
        specs = getattr(node, name)
        _want_count(len(part), specs, *at, name)
        for i, (spec, shape) in enumerate(zip(specs, part, strict=True)):
            if len(spec.dims) != len(shape):
                dims = f"{len(spec.dims)} dims, the tensor {len(shape)}"
                raise _Misread(f"{spec} has {dims}", *at, name, i)
    _want_count(len(shapes), node.dtypes, *at, "dtypes")
    if node.reads:
        _want_count(operands, node.reads, *at, "reads")
        for i, position in enumerate(node.reads):
            if position >= len(values):
                up_to = f"a number from 0 to {len(values) - 1}"
                raise _unlike(up_to, position, *at, "reads", i)
