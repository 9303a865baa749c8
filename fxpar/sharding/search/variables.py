"""What stands between a Program and the solver's problem: variables and their specs.

In: specs. Out: ``Node`` (a variable: which spec each tensor has under each strategy),
``EdgeEnd`` (one end of an edge), ``Pool`` (numbers for specs). Plain data; prices
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fxpar.sharding.factors import Strategy
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class Node:
    """A variable. ``kind``: "op", "input", "constant", "output" or "value". ``of``:
    index of the op, input, output, or value. ``specs``: (K, tensors) number of the spec
    of each tensor of an op under each strategy; (K, 1) for the others. ``copies``: (K,)
    of a parameter that settles, whether that is a copy of what rests."""

    kind: str
    of: int
    specs: np.ndarray
    strategies: tuple[Strategy, ...] = ()
    copies: np.ndarray | None = None


@dataclass(frozen=True)
class EdgeEnd:
    """One end of an edge: a node, and which column of its specs concerns the value."""

    node: int
    column: int


class Pool:
    """Numbers for specs."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self._number: dict[Spec, int] = {}

    def number(self, spec: Spec) -> int:
        """That of one spec, new if it was not seen yet."""
        if spec not in self._number:
            self._number[spec] = len(self.specs)
            self.specs.append(spec)
        return self._number[spec]

    def numbers(self, specs: Iterable[Spec]) -> np.ndarray:
        """(K, 1), as ``Node.specs``."""
        return np.array([[self.number(spec)] for spec in specs], int).reshape(-1, 1)
