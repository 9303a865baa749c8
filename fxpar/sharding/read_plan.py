"""Reads a plan from its JSON, and names the place of anything that does not fit.

A ``Saved`` is a value of the file with its place, as ``nodes[3].factors[0]``. Its
methods return the value in the type that they name, and raise PlanError where it has
another. ``plan_from`` reads a whole plan by them.
In: the parsed JSON. Out: a Plan, or a PlanError.
Never: checks a plan against a program; ``recall_plan`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fxpar.errors import FxparError, PlanError
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.pipeline_axis import PipelineStage
from fxpar.sharding.plan import Collective, Moved, NodePlan, Plan
from fxpar.sharding.spec import Spec

T = TypeVar("T")

_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Saved:
    """Holds a value of a saved plan and its place; all methods raise PlanError."""

    # As parsed from JSON.
    value: Any
    # Its place in the plan, as ``nodes[0].name``; "" for the whole plan.
    place: str = ""

    def refuse(self, why: str) -> PlanError:
        """Return the error that names the place."""
        return PlanError(
            f"the saved plan is broken at {self.place or 'its top'}: {why}",
            fix="save the plan again: plan.save(path), or FXPAR_DUMP",
        )

    def _want(self, what: str) -> PlanError:
        value_text = repr(self.value)
        value_text = (
            value_text if len(value_text) <= _SHOWN else f"{value_text[:_SHOWN]}..."
        )
        return self.refuse(f"{what} is expected, not {value_text}")

    def __getitem__(self, key: str) -> Saved:
        """Return an entry of a table."""
        if not isinstance(self.value, dict):
            raise self._want("a table")
        place = f"{self.place}.{key}" if self.place else key
        if key not in self.value:
            raise Saved(None, place).refuse("it is missing")
        return Saved(self.value[key], place)

    def get(self, key: str, default: Any) -> Saved:
        """Return an entry of a table, or the default if it has none."""
        if isinstance(self.value, dict) and key not in self.value:
            return Saved(default, f"{self.place}.{key}" if self.place else key)
        return self[key]

    def items(self, count: int | None = None) -> list[Saved]:
        """Return the elements of a list, of which there must be ``count`` if that is
        given."""
        if not isinstance(self.value, (list, tuple)):
            raise self._want("a list")
        if count is not None and len(self.value) != count:
            raise self.refuse(f"{count} entries are expected, not {len(self.value)}")
        return [Saved(x, f"{self.place}[{i}]") for i, x in enumerate(self.value)]

    def each(self, read: Callable[[Saved], T], count: int | None = None) -> tuple:
        """Return the result of ``read`` for each element of a list."""
        return tuple(read(item) for item in self.items(count))

    def pair(self, first: Callable[[Saved], T], second: Callable[[Saved], Any]) -> Any:
        """Return the two elements of a list, each as its function reads it."""
        a, b = self.items(2)
        return first(a), second(b)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._want("text")
        return self.value

    def text_or_none(self) -> str | None:
        return None if self.value is None else self.text()

    def switch(self) -> bool:
        if not isinstance(self.value, bool):
            raise self._want("true or false")
        return self.value

    def count(self, below: int | None = None) -> int:
        """Return a whole number from 0, less than ``below``."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self._want("a whole number")
        if self.value < 0 or (below is not None and self.value >= below):
            raise self._want(
                f"a number from 0 to {'...' if below is None else below - 1}"
            )
        return self.value

    def count_or_none(self) -> int | None:
        """Return a whole number from 0, or None."""
        return None if self.value is None else self.count()

    def number_or_none(self) -> float | None:
        """Return a number from 0, or None."""
        return None if self.value is None else self.number()

    def number(self) -> float:
        """Return a number from 0, which may be infinity."""
        is_number = isinstance(self.value, (int, float)) and self.value is not True
        if not is_number or self.value is False or not self.value >= 0:
            raise self._want("a number from 0")
        return self.value

    def read(self, parse: Callable[[str], T]) -> T:
        """Return the result of ``parse`` on text."""
        text = self.text()
        try:
            return parse(text)
        except FxparError as error:
            raise self.refuse(error.what) from error

    def axis(self, mesh: Mesh) -> str:
        """Return the name of an axis of the mesh."""
        name = self.text()
        if not mesh.has(name):
            raise self.refuse(f"mesh {mesh} has no axis {name!r}")
        return name

    def spec(self, mesh: Mesh, dims: int | None = None) -> Spec:
        """Return a spec on the mesh, of a tensor of ``dims``."""
        spec = self.read(Spec.parse)
        for axis in spec.axes:
            if not mesh.has(axis):
                raise self.refuse(f"{spec} names axis {axis!r}, mesh {mesh} has none")
        if dims is not None and len(spec.dims) != dims:
            raise self.refuse(f"{spec} has {len(spec.dims)} dims, the tensor {dims}")
        return spec


def plan_from(data: Mapping[str, Any]) -> Plan:
    """Return the plan of a record: the inverse of ``Plan.to_record`` and
    ``Plan.to_dict``.

    Raises PlanError naming the malformed place.
    """
    saved = Saved(data)
    mesh = _mesh(saved)

    def specs(name: str) -> tuple[Spec, ...]:
        return saved[name].each(lambda x: x.spec(mesh))

    def spec_pairs(name: str) -> tuple[tuple[str, Spec], ...]:
        return saved[name].each(lambda x: x.pair(Saved.text, lambda y: y.spec(mesh)))

    def texts(name: str) -> tuple[str, ...]:
        return saved.get(name, ()).each(Saved.text)

    values = spec_pairs("values")
    return Plan(
        mesh,
        specs("inputs"),
        specs("outputs"),
        spec_pairs("parameters"),
        spec_pairs("gradients"),
        values,
        _nodes(saved, mesh, [name for name, _ in values]),
        _collectives(saved, mesh),
        saved["unknown"].each(Saved.text),
        saved.get("reasons", ()).each(lambda x: x.pair(Saved.text, Saved.text)),
        texts("notes"),
        memory=saved.get("memory", ()).each(lambda x: x.pair(Saved.text, Saved.count)),
        room=saved.get("room", None).count_or_none(),
        dearest=saved.get("dearest", ()).each(lambda x: _moved(x, mesh)),
        schedule=saved.get("schedule", "").text(),
        experts=texts("experts"),
        sent_rows=saved.get("sent_rows", ()).each(Saved.count),
        bodies=saved.get("bodies", ()).each(Saved.count),
        step_seconds=saved.get("step_seconds", None).number_or_none(),
        near=texts("near"),
        regions=texts("regions"),
        stages=saved.get("stages", ()).each(_stage),
        microbatches=saved.get("microbatches", None).count_or_none(),
    )


def _mesh(saved: Saved) -> Mesh:
    """Return the mesh, with links if the file has them."""
    mesh = saved["mesh"].read(Mesh.parse)
    if "links" in saved.value:
        mesh = replace(mesh, links=saved["links"].each(_link, len(mesh.axes)))
    return mesh


def _nodes(saved: Saved, mesh: Mesh, values: Sequence[str]) -> tuple[NodePlan, ...]:
    """Return the ops, with the lists saved next to them: lines, modules and reads."""
    names = set(values)
    nodes = saved["nodes"].items()
    lists = {
        name: (saved.get(name, ()).value and saved[name].items(len(nodes)))
        or [Saved(empty, name)] * len(nodes)
        for name, empty in (("lines", None), ("modules", None), ("reads", ()))
    }
    rows = zip(nodes, *lists.values(), strict=True)
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
        raise saved["shapes"].refuse(
            f"at least {operands} shapes are expected, one for each operand"
        )
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
    """Return the Moved that ``_plain`` wrote."""
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
    """Return the stage that ``asdict_shallow`` wrote."""
    return PipelineStage(
        saved["index"].count(),
        saved["place"].count(),
        saved["ops"].each(Saved.text),
        saved["parameters"].each(Saved.text),
        saved.get("forward_seconds", 0.0).number(),
        saved.get("backward_seconds", 0.0).number(),
        saved["bytes"].count(),
        saved["sent_bytes"].count(),
        saved["begin"].text(),
    )


def _link(saved: Saved) -> Link:
    """Return the link that ``asdict`` wrote."""
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
        copy_near=saved.get("copy_near", ()).each(
            lambda x: x.pair(Saved.number, Saved.number)
        ),
    )
