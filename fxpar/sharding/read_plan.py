"""Reads a plan from its JSON, and names the place of anything that does not fit.

A ``Saved`` is a value of the file with its place, as ``nodes[3].factors[0]``. Its
methods return the value in the type that they name, and raise PlanError where it has
another. ``plan_from`` reads a whole plan by them, each field by its type.
In: the parsed JSON. Out: a Plan, or a PlanError.
Never: checks a plan against a program; ``recall_plan`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from fxpar.errors import FxparError, PlanError
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.plan import Axis, NodePlan, Plan
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
        """Return the result of ``read`` for each element of a list, as ``items``."""
        return tuple(read(item) for item in self.items(count))

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._want("text")
        return self.value

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

    def spec(self, mesh: Mesh) -> Spec:
        """Return a spec on the mesh."""
        spec = self.read(Spec.parse)
        for axis in spec.axes:
            if not mesh.has(axis):
                raise self.refuse(f"{spec} names axis {axis!r}, mesh {mesh} has none")
        return spec


def plan_from(data: Mapping[str, Any]) -> Plan:
    """Return the plan of a record: the inverse of ``Plan.to_record`` and
    ``Plan.to_dict``.

    Raises PlanError naming the malformed place.
    """
    saved = Saved(data)
    mesh = saved["mesh"].read(Mesh.parse)
    if "links" in saved.value:
        links = saved["links"].each(lambda x: _record(x, Link, mesh), len(mesh.axes))
        mesh = replace(mesh, links=links)
    plan: Plan = _record(saved, Plan, mesh, mesh=mesh, timings={})
    names = {name for name, _ in plan.values}
    for node, item in zip(plan.nodes, saved["nodes"].items(), strict=True):
        _check(node, item, names)
    return plan


# A value of the file, read on a mesh.
_Reader = Callable[[Saved, Mesh], Any]


def _record(saved: Saved, kind: Any, mesh: Mesh, /, **values: Any) -> Any:
    """Return a dataclass whose fields, but the ``values``, are a table of the file."""
    for name, (read, default) in _fields(kind).items():
        if name not in values:
            field = saved[name] if default is MISSING else saved.get(name, default)
            values[name] = read(field, mesh)
    return kind(**values)


@cache
def _fields(kind: type) -> dict[str, tuple[_Reader, Any]]:
    """Return the reader and the default of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {x.name: (_reader(hints[x.name]), x.default) for x in fields(kind)}


@cache
def _reader(kind: Any) -> _Reader:
    """Return what reads a value of a type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_dataclass(kind):
        return lambda saved, mesh: _record(saved, kind, mesh)
    inner = [x if x in (..., NoneType) else _reader(x) for x in get_args(kind)]
    first: Any = inner[0]
    if inner[-1] is NoneType:
        return lambda saved, mesh: None if saved.value is None else first(saved, mesh)
    if inner[-1] is ...:
        return lambda saved, mesh: saved.each(lambda x: first(x, mesh))
    return lambda saved, mesh: tuple(
        read(x, mesh) for read, x in zip(inner, saved.items(len(inner)), strict=True)
    )


_PLAIN: dict[Any, _Reader] = {
    str: lambda saved, _: saved.text(),
    int: lambda saved, _: saved.count(),
    float: lambda saved, _: saved.number(),
    bool: lambda saved, _: saved.switch(),
    Axis: Saved.axis,
    Spec: Saved.spec,
}


def _check(node: NodePlan, saved: Saved, values: Collection[str]) -> None:
    """Raise PlanError unless an op has as many specs as it has shapes, each of as many
    dims, and its results are among the ``values``."""
    shapes, operands = node.shapes, len(node.operands)
    results = len(shapes) - operands
    if results < 0:
        raise saved["shapes"].refuse(
            f"at least {operands} shapes are expected, one for each operand"
        )
    for result_name in [f"{node.name}.{i}" for i in range(results)]:
        if result_name not in values and not (results == 1 and node.name in values):
            raise saved["name"].refuse(
                f"no value is named {result_name if results > 1 else node.name}"
            )
    for name, part in (
        ("operands", shapes[:operands]),
        ("results", shapes[operands:]),
        ("settled", shapes[operands:]),
    ):
        items = saved[name].items(len(part))
        for item, spec, shape in zip(items, getattr(node, name), part, strict=True):
            if len(spec.dims) != len(shape):
                dims = f"{len(spec.dims)} dims, the tensor {len(shape)}"
                raise item.refuse(f"{spec} has {dims}")
    saved["dtypes"].items(len(shapes))
    if node.reads:
        saved["reads"].each(lambda x: x.count(below=len(values)), operands)
