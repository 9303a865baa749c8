"""Reads the JSON of a saved plan; what does not fit is named by its place.

A ``Saved`` is a value of the file and where it stands, as ``nodes[3].factors[0]``. Its
methods give what the value stands for, and raise PlanError where it is something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fxpar.errors import FxparError, PlanError
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

T = TypeVar("T")

_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Saved:
    """A value of a saved plan and its place; all methods raise PlanError."""

    value: Any
    place: str = ""

    def refuse(self, why: str) -> PlanError:
        """The error that names the place."""
        return PlanError(
            f"the saved plan is broken at {self.place or 'its top'}: {why}",
            fix="save the plan again: plan.save(path), or FXPAR_DUMP",
        )

    def _want(self, what: str) -> PlanError:
        shown = repr(self.value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        return self.refuse(f"{what} should stand there, not {shown}")

    def __getitem__(self, key: str) -> Saved:
        """An entry of a table."""
        if not isinstance(self.value, dict):
            raise self._want("a table")
        place = f"{self.place}.{key}" if self.place else key
        if key not in self.value:
            raise Saved(None, place).refuse("it is missing")
        return Saved(self.value[key], place)

    def get(self, key: str, default: Any) -> Saved:
        """An entry of a table that may be without it."""
        if isinstance(self.value, dict) and key not in self.value:
            return Saved(default, f"{self.place}.{key}" if self.place else key)
        return self[key]

    def items(self, count: int | None = None) -> list[Saved]:
        """The elements of a list, of so many if ``count`` says."""
        if not isinstance(self.value, (list, tuple)):
            raise self._want("a list")
        if count is not None and len(self.value) != count:
            raise self.refuse(f"{count} entries belong there, not {len(self.value)}")
        return [Saved(x, f"{self.place}[{i}]") for i, x in enumerate(self.value)]

    def each(self, read: Callable[[Saved], T], count: int | None = None) -> tuple:
        """What ``read`` makes of each element of a list."""
        return tuple(read(item) for item in self.items(count))

    def pair(self, first: Callable[[Saved], T], second: Callable[[Saved], Any]) -> Any:
        """What is made of a list of two."""
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
        """A whole number from 0, less than ``below``."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self._want("a whole number")
        if self.value < 0 or (below is not None and self.value >= below):
            raise self._want(
                f"a number from 0 to {'...' if below is None else below - 1}"
            )
        return self.value

    def number(self) -> float:
        """A number from 0; infinity is one."""
        known = isinstance(self.value, (int, float)) and self.value is not True
        if not known or self.value is False or not self.value >= 0:
            raise self._want("a number from 0")
        return self.value

    def read(self, parse: Callable[[str], T]) -> T:
        """What ``parse`` makes of text."""
        text = self.text()
        try:
            return parse(text)
        except FxparError as error:
            raise self.refuse(error.what) from error

    def axis(self, mesh: Mesh) -> str:
        """The name of an axis of the mesh."""
        name = self.text()
        if not mesh.has(name):
            raise self.refuse(f"mesh {mesh} has no axis {name!r}")
        return name

    def spec(self, mesh: Mesh, dims: int | None = None) -> Spec:
        """A spec on the mesh, of a tensor of ``dims``."""
        spec = self.read(Spec.parse)
        for axis in spec.axes:
            if not mesh.has(axis):
                raise self.refuse(f"{spec} names axis {axis!r}, mesh {mesh} has none")
        if dims is not None and len(spec.dims) != dims:
            raise self.refuse(f"{spec} has {len(spec.dims)} dims, the tensor {dims}")
        return spec
