"""The plan: a spec for every value, what was chosen, and why. Frozen data.

Printable, JSON round-trip, stable hash. ``decide`` makes the decisions, ``describe``
writes them down as a Plan.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fxpar.errors import PlanError
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.pipeline_axis import PipelineStage, pipeline_axis, without_stages
from fxpar.sharding.read_plan import Saved
from fxpar.sharding.spec import Spec

FORMAT = 1


@dataclass(frozen=True)
class Collective:
    """One collective a rank takes part in. ``kind``: all_reduce, all_gather,
    reduce_scatter, all_to_all or permute. ``bytes``: of the tensor it completes on one
    rank, or, for a reduce_scatter, of what goes in. ``source``: node and user line."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    source: str


@dataclass(frozen=True)
class NodePlan:
    """One op: its strategy, the specs it reads, makes, and its results settle in.

    ``module``: as ``owners`` writes it, ``forward/layers.0.mlp``; None if unknown.
    ``reads``: the value each operand is, as its place in ``Plan.values``; empty if
    unknown."""

    name: str
    op: str
    factors: tuple[tuple[str, tuple[str, ...]], ...]
    passes: tuple[tuple[str, str, int], ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    settled: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    rule: str
    line: str | None = None
    module: str | None = None
    reads: tuple[int, ...] = ()


def _without(
    factors: Iterable[tuple[str, tuple[str, ...]]], axis: str
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Axes of factors without one of them."""
    pairs = [(name, tuple(a for a in axes if a != axis)) for name, axes in factors]
    return tuple((name, axes) for name, axes in pairs if axes)


# Of a NodePlan, what ``hash`` leaves out: what the ranks run does not depend on it, or
# it is in the program.
_ASIDE = ("line", "module", "reads")


@dataclass(frozen=True)
class Moved:
    """Reshards that one line of the user's causes, alike: from one spec to another, by
    the same steps. ``steps``: such as ("all_gather dp",). ``bytes``: of all ``calls``,
    each as in ``Collective``. ``seconds``: None if no hardware is known."""

    source: Spec
    target: Spec
    steps: tuple[str, ...]
    calls: int
    bytes: int
    seconds: float | None
    line: str


@dataclass(frozen=True)
class Plan:
    """A spec for every value of one graph on one mesh.

    ``inputs``/``outputs``: specs of the user's tensor arguments and results.
    ``parameters``/``gradients``: specs by name. ``values``: spec of every named value.
    ``unknown``: ops without a rule, whose operands were made whole. ``memory``: (kind,
    bytes of a rank) when it holds most, as simulated, with the optimizer's state.
    ``collectives``: of one step in the order they run, before small ones are joined;
    what forward and backward both do stands twice. ``dearest``: what
    resharding costs most. ``schedule``: the lines of ``fusion.schedule`` that were done
    to the local graph; ``experts``: axes that experts are split over, where the
    search chose them; ``bodies``: of manual regions, where it chose others than the
    first; ``near``: what came near to be, and why it is not. ``regions``:
    of a compiled graph, what runs as generated kernels, how, and why so.
    """

    mesh: Mesh
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    parameters: tuple[tuple[str, Spec], ...]
    gradients: tuple[tuple[str, Spec], ...]
    values: tuple[tuple[str, Spec], ...]
    nodes: tuple[NodePlan, ...]
    collectives: tuple[Collective, ...]
    unknown: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)
    memory: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    dearest: tuple[Moved, ...] = field(default=(), compare=False)
    schedule: str = ""
    experts: tuple[str, ...] = ()
    bodies: tuple[int, ...] = ()
    near: tuple[str, ...] = field(default=(), compare=False)
    regions: tuple[str, ...] = field(default=(), compare=False)
    # Of a mesh with an axis of stages, in the order of the forward.
    stages: tuple[PipelineStage, ...] = ()

    def of_one_stage(self) -> Plan:
        """The plan on the mesh that one stage runs on: its specs without the stages."""
        axis = pipeline_axis(self.mesh)
        if axis is None:
            return self
        bare = tuple((name, spec.without({axis})) for name, spec in self.values)
        nodes = tuple(replace(x, factors=_without(x.factors, axis)) for x in self.nodes)
        mesh = without_stages(self.mesh)
        return replace(self, mesh=mesh, stages=(), values=bare, nodes=nodes)

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        return {**dict(self.values), **dict(self.parameters)}

    def spec(self, name: str) -> Spec:
        """Spec of a value or parameter by name. Raises PlanError if unknown."""
        try:
            return self._specs[name]
        except KeyError:
            near = [known for known in self._specs if name in known][:5]
            raise PlanError(
                f"the plan has no value named {name!r}",
                fix=f"names are such as {near or list(self._specs)[:5]}",
            ) from None

    def why(self, name: str) -> str:
        """Why a value has its spec: for each axis the seed and the way it came."""
        spec = self.spec(name)
        found = dict(self.reasons).get(name)
        return f"{name}: {spec}\n{found or '  whole: no axis reached it'}"

    @cached_property
    def hash(self) -> str:
        """Stable digest of everything that decides which program the ranks run."""
        data = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(data.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; timings, reasons, modules and source lines are left out: they may
        differ between runs of the same plan."""
        plain = _plain
        nodes = [
            {k: plain(v) for k, v in asdict_shallow(node).items() if k not in _ASIDE}
            for node in self.nodes
        ]
        data: dict[str, Any] = {"schedule": self.schedule} if self.schedule else {}
        data |= {"experts": list(self.experts)} if self.experts else {}
        data |= {"bodies": list(self.bodies)} if self.bodies else {}
        if self.stages:
            stages = [_plain(asdict_shallow(stage)) for stage in self.stages]
            data["stages"] = [
                {k: v for k, v in stage.items() if not k.endswith("_seconds")}
                for stage in stages
            ]
        return data | {
            "format": FORMAT,
            "mesh": str(self.mesh),
            "inputs": plain(self.inputs),
            "outputs": plain(self.outputs),
            "parameters": plain(self.parameters),
            "gradients": plain(self.gradients),
            "values": plain(self.values),
            "nodes": nodes,
            "unknown": plain(self.unknown),
            "collectives": [
                {k: plain(v) for k, v in asdict(c).items() if k != "source"}
                for c in self.collectives
            ],
        }

    def to_record(self) -> dict[str, Any]:
        """JSON-ready: ``to_dict`` with what ``hash`` does not cover: links, reasons,
        notes, source lines and modules."""
        data = self.to_dict()
        if any(link != Link() for link in self.mesh.links):
            data["links"] = [asdict(link) for link in self.mesh.links]
        data["reasons"] = list(self.reasons)
        data["notes"] = list(self.notes)
        data["sources"] = [c.source for c in self.collectives]
        data["lines"] = [node.line for node in self.nodes]
        data["modules"] = [node.module for node in self.nodes]
        data["reads"] = [node.reads for node in self.nodes]
        data["memory"] = list(self.memory)
        data["near"] = list(self.near)
        data["regions"] = list(self.regions)
        for stage, saved in zip(self.stages, data.get("stages", ()), strict=True):
            saved["forward_seconds"] = stage.forward_seconds
            saved["backward_seconds"] = stage.backward_seconds
        data["dearest"] = [_plain(asdict_shallow(moved)) for moved in self.dearest]
        return data

    def save(self, path: str | Path) -> None:
        """Write ``to_json``."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        """``to_record`` as text."""
        return json.dumps(self.to_record(), indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote. Raises PlanError if it cannot be read, naming the
        place in the file that is broken."""
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
        """Inverse of ``to_record``, and of ``to_dict``, which is without links.

        Raises PlanError naming the place that is not as these wrote it.
        """
        saved = Saved(data)
        mesh = _mesh(saved)

        def specs(name: str) -> tuple[Spec, ...]:
            return saved[name].each(lambda x: x.spec(mesh))

        def named(name: str) -> tuple[tuple[str, Spec], ...]:
            return saved[name].each(
                lambda x: x.pair(Saved.text, lambda y: y.spec(mesh))
            )

        def texts(name: str) -> tuple[str, ...]:
            return saved.get(name, ()).each(Saved.text)

        values = named("values")
        return cls(
            mesh,
            specs("inputs"),
            specs("outputs"),
            named("parameters"),
            named("gradients"),
            values,
            _nodes(saved, mesh, [name for name, _ in values]),
            _collectives(saved, mesh),
            saved["unknown"].each(Saved.text),
            saved.get("reasons", ()).each(lambda x: x.pair(Saved.text, Saved.text)),
            texts("notes"),
            memory=saved.get("memory", ()).each(
                lambda x: x.pair(Saved.text, Saved.count)
            ),
            dearest=saved.get("dearest", ()).each(lambda x: _moved(x, mesh)),
            schedule=saved.get("schedule", "").text(),
            experts=texts("experts"),
            bodies=saved.get("bodies", ()).each(Saved.count),
            near=texts("near"),
            regions=texts("regions"),
            stages=saved.get("stages", ()).each(_stage),
        )

    def diff(self, other: Plan) -> str:
        """What differs from another plan: specs, one line per value, then what a rank
        communicates and holds; empty if nothing."""
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
        """Mesh, specs of parameters, and collectives by kind and axes with bytes."""
        from fxpar.sharding.plan_text import summary_text

        return summary_text(self)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one HTML page that needs no network and no other file."""
        from fxpar.explain.html import render

        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        from fxpar.sharding.plan_text import plan_text

        return plan_text(self)


def _compared(plan_a: Plan, plan_b: Plan) -> Iterator[tuple[str, int, int]]:
    """(what, bytes of one plan, of the other): collectives by kind and axes, memory by
    kind, where both are known."""
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


def _plain(x: Any) -> Any:
    """Ready for JSON: specs as text."""
    if isinstance(x, Spec):
        return str(x)
    if isinstance(x, dict):
        return {key: _plain(y) for key, y in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(y) for y in x]
    return x


def _mesh(saved: Saved) -> Mesh:
    """The mesh, with links if the file has them."""
    mesh = saved["mesh"].read(Mesh.parse)
    if "links" in saved.value:
        mesh = replace(mesh, links=saved["links"].each(_link, len(mesh.axes)))
    return mesh


def _nodes(saved: Saved, mesh: Mesh, values: Sequence[str]) -> tuple[NodePlan, ...]:
    """The ops, with what is saved beside them: lines, modules and reads."""
    names = set(values)
    nodes = saved["nodes"].items()
    beside = {
        name: (saved.get(name, ()).value and saved[name].items(len(nodes)))
        or [Saved(empty, name)] * len(nodes)
        for name, empty in (("lines", None), ("modules", None), ("reads", ()))
    }
    rows = zip(nodes, *beside.values(), strict=True)
    return tuple(
        replace(
            _node(node, mesh, names),
            line=line.text_or_none(),
            module=module.text_or_none(),
            reads=_reads(read, node, len(values)),
        )
        for node, line, module, read in rows
    )


def _node(saved: Saved, mesh: Mesh, values: Collection[str]) -> NodePlan:
    name = saved["name"].text()
    shapes = saved["shapes"].each(lambda x: x.each(Saved.count))
    operands = len(saved["operands"].items())
    results = len(shapes) - operands
    if results < 0:
        raise saved["shapes"].refuse(f"{operands} operands alone have a shape each")
    for result_name in [f"{name}.{i}" for i in range(results)]:
        if result_name not in values and not (results == 1 and name in values):
            raise saved["name"].refuse(
                f"no value is named {result_name if results > 1 else name}"
            )

    def specs(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[Spec, ...]:
        items = saved[name].items(len(shapes))
        pairs = zip(items, shapes, strict=True)
        return tuple(item.spec(mesh, len(shape)) for item, shape in pairs)

    def axes(x: Saved) -> tuple[str, ...]:
        return x.each(lambda y: y.axis(mesh))

    def passed(x: Saved) -> tuple[str, str, int]:
        axis, reduction, passage = x.items(3)
        return axis.axis(mesh), reduction.text(), passage.count()

    return NodePlan(
        name=name,
        op=saved["op"].text(),
        factors=saved["factors"].each(lambda x: x.pair(Saved.text, axes)),
        passes=saved["passes"].each(passed),
        operands=specs("operands", shapes[:operands]),
        results=specs("results", shapes[operands:]),
        settled=specs("settled", shapes[operands:]),
        shapes=shapes,
        dtypes=saved["dtypes"].each(Saved.text, len(shapes)),
        rule=saved["rule"].text(),
    )


def _reads(saved: Saved, node: Saved, values: int) -> tuple[int, ...]:
    count = len(node["operands"].items()) if saved.value else None
    return saved.each(lambda x: x.count(below=values), count)


def _collectives(saved: Saved, mesh: Mesh) -> tuple[Collective, ...]:
    collectives = saved["collectives"].items()
    saved_sources = saved.get("sources", ())
    sources = (
        saved_sources.each(Saved.text, len(collectives))
        if saved_sources.value
        else [""] * len(collectives)
    )
    return tuple(
        Collective(
            c["kind"].text(),
            c["axes"].each(lambda x: x.axis(mesh)),
            c["bytes"].count(),
            source,
        )
        for c, source in zip(collectives, sources, strict=True)
    )


def _moved(saved: Saved, mesh: Mesh) -> Moved:
    """Inverse of ``_plain`` on what a Moved holds."""
    return Moved(
        source=saved["source"].spec(mesh),
        target=saved["target"].spec(mesh),
        steps=saved["steps"].each(Saved.text),
        calls=saved["calls"].count(),
        bytes=saved["bytes"].count(),
        seconds=None if saved["seconds"].value is None else saved["seconds"].number(),
        line=saved["line"].text(),
    )


def _stage(saved: Saved) -> PipelineStage:
    """Inverse of ``asdict_shallow`` on a stage."""
    return PipelineStage(
        saved["index"].count(),
        saved["place"].count(),
        saved["ops"].each(Saved.text),
        saved["parameters"].each(Saved.text),
        saved.get("forward_seconds", 0.0).number(),
        saved.get("backward_seconds", 0.0).number(),
        saved["bytes"].count(),
        saved["sent_bytes"].count(),
    )


def _link(saved: Saved) -> Link:
    """Inverse of ``asdict`` on a link."""
    inner = saved["inner"]
    return Link(
        bandwidth=saved["bandwidth"].number(),
        latency=saved["latency"].number(),
        overhead=saved["overhead"].number(),
        tree=saved["tree"].switch(),
        inside=saved["inside"].count(),
        inner=None if inner.value is None else _link(inner),
        kinds=saved["kinds"].each(lambda x: x.pair(Saved.text, _link)),
        copy_launch=saved.get("copy_launch", 0.0).number(),
        copy_byte=saved.get("copy_byte", 0.0).number(),
    )


def asdict_shallow(record: Any) -> dict[str, Any]:
    """Fields of a dataclass by name, values as they are."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
