"""Holds the plan as frozen data: a spec for every value, the choices made, the reasons.

In: fields that ``plan_facts`` fills from the decisions of ``decide``, or a file. Out:
text, JSON that reads back as an equal plan, a stable hash.
Never: decides anything.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

from fxpar.cache_files import write_asked
from fxpar.errors import PlanError
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.pipeline_axis import PipelineStage, pipeline_axis, without_stages
from fxpar.sharding.spec import Spec
from fxpar.units import short_seconds

FORMAT = 1

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


def _without(
    factors: Iterable[tuple[str, tuple[str, ...]]], left_out: Collection[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the axes by factor without some of the axes."""
    pairs = [
        (name, tuple(a for a in axes if a not in left_out)) for name, axes in factors
    ]
    return tuple((name, axes) for name, axes in pairs if axes)


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
    experts: tuple[str, ...] = ()
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
                replace(x, factors=_without(x.factors, axes)) for x in self.nodes
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
        return hashlib.sha256(data.encode()).hexdigest()[:16]

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
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(f"{path}: {error.what}", fix=error.fix) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan of ``to_record``, or of ``to_dict``, which has no links.

        Raises PlanError naming the malformed place.
        """
        from fxpar.sharding.read_plan import plan_from

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
    sent: list[dict[str, int]] = [{}, {}]
    for plan, sums in zip((plan_a, plan_b), sent, strict=True):
        for c in plan.collectives:
            kind = f"{c.kind} {'+'.join(c.axes)}"
            sums[kind] = sums.get(kind, 0) + c.bytes
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
