"""Seeds of propagation, and the axes of values with the origin of each.

In: nothing. Out: ``Seed``, a spec given to a value; ``State``, which propagation fills
and what comes behind it reads. No rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import spec_of

# The priority of seeds before all that are given.
FIRST = -1


@dataclass(frozen=True)
class Origin:
    """Why an axis is on a value: the seed it came from and the last step it took."""

    # Its ``Seed.origin``.
    seed: str
    # The seed split dim 0 of an input, so this axis is data parallel.
    batch: bool = False
    # The seed split experts: rows go to where theirs are.
    experts: bool = False
    op: str | None = None  # the op that brought it here
    source: int | None = None  # the value it came from


@dataclass(frozen=True)
class Seed:
    """A spec given to a value."""

    # In ``Program.values``.
    value: int
    # Axes of each dim, major to minor.
    dims: tuple[Axes, ...]
    # Whether each dim takes no more axes.
    closed: tuple[bool, ...]
    # What gives it, in words for messages.
    origin: str
    # Those of lower numbers propagate first.
    priority: int = 0
    # It splits dim 0 of an input, by data.
    batch: bool = False
    # It splits experts.
    experts: bool = False


@dataclass
class State:
    """Axes per dim of each value, and the origin of each axis on it."""

    # That it is of.
    program: Program
    # Whose axes it has.
    mesh: Mesh
    # By value and dim.
    dims: list[list[Axes]]
    # Whether a hint closes the dim to further axes.
    closed: list[list[bool]]
    # By value and axis.
    origins: list[dict[str, Origin]]
    # Whether axes pass to the value, and from it, now.
    active: list[bool]
    # (value, dim, axis): an axis that wanted this dim but cannot split it.
    indivisible: dict[tuple[int, int, str], Origin] = field(default_factory=dict)

    def spec(self, value: int) -> Spec:
        return spec_of(tuple(self.dims[value]))
