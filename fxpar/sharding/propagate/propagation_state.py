"""Defines seeds of propagation, and the axes of values with the origin of each.

In: axes of values, as hints and conventions give them. Out: ``Seed``, a spec given to a
value; ``State``, which propagation fills and later steps read. Never: applies a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import spec_of

# A priority before all those that users give.
FIRST = -1


@dataclass(frozen=True)
class Origin:
    """Says why an axis is on a value: the seed it came from and the last step it
    took."""

    # ``Seed.origin`` of the seed it came from.
    seed: str
    # The seed split dim 0 of an input, so this axis is data parallel.
    batch: bool = False
    # The seed split experts: rows go to where theirs are.
    experts: bool = False
    op: str | None = None  # the op that brought it here
    source: int | None = None  # the value it came from


@dataclass(frozen=True)
class Seed:
    """Is a spec given to a value."""

    # Index in ``Program.values``.
    value: int
    # Axes of each dim, major to minor.
    dims: tuple[Axes, ...]
    # Whether each dim takes no more axes.
    closed: tuple[bool, ...]
    # The hint or convention that gives it, in words for messages.
    origin: str
    # Seeds of lower numbers propagate first.
    priority: int = 0
    # Whether it splits dim 0 of an input, so that its axes are data parallel.
    batch: bool = False
    # Whether it splits experts.
    experts: bool = False
    # Priority of each dim; None: as the seed; (): no dim has its own.
    priorities: tuple[int | None, ...] = ()
    # Axes that split no dim.
    whole: Axes = ()
    # Whether no axis passes between the value and its readers.
    barrier: bool = False

    @property
    def turns(self) -> tuple[int, ...]:
        """Return the priority of each dim; for a value without dims the seed's
        priority."""
        own = (self.priority if p is None else p for p in self.priorities)
        return tuple(own) or (self.priority,) * max(1, len(self.dims))


@dataclass
class State:
    """Holds the axes per dim of each value, and the origin of each axis on it."""

    # The program of the values.
    program: Program
    # The mesh of the axes.
    mesh: Mesh
    # Axes by value and dim.
    dims: list[list[Axes]]
    # Whether a hint closes the dim to further axes.
    closed: list[list[bool]]
    # Origins by value and axis.
    origins: list[dict[str, Origin]]
    # Whether axes pass to the value, and from it, now.
    active: list[bool]
    # Axes by value that split no dim of it.
    whole: dict[int, frozenset[str]] = field(default_factory=dict)
    # Values that pass no axes to their readers, and take none from them.
    barred: set[int] = field(default_factory=set)
    # (value, dim, axis): an axis that wanted this dim but cannot split it.
    indivisible: dict[tuple[int, int, str], Origin] = field(default_factory=dict)

    def can_take(self, value: int, axis: str) -> bool:
        """Return whether neither another dim nor a hint keeps ``axis`` from splitting
        ``value``."""
        whole = self.whole.get(value, ())
        return axis not in self.origins[value] and axis not in whole

    def spec(self, value: int) -> Spec:
        return spec_of(tuple(self.dims[value]))
