"""Holds one op call while it is made local: the argument of every local form.

In: a call with its rule, specs and global shapes. Out: shapes on this rank, and nodes
of the local graph.
Never: chooses a spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.graph.builder import Builder, Size
from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Rule
from fxpar.sharding.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """Holds one op call while it is made local."""

    # Adds nodes to the local graph.
    build: Builder
    # The call in the global graph.
    node: fx.Node
    # The op's rule, with sizes.
    rule: Rule
    # Specs of the operands, in order of the rule.
    operands: tuple[Spec, ...]
    # Specs of the results.
    results: tuple[Spec, ...]
    # Global shapes of the operands, then of the results.
    shapes: tuple[tuple[int, ...], ...]
    # The least number of rows of a dim that a rank is made to hold.
    least: int = 0

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Return the global shape of result ``i``."""
        return self.shapes[len(self.operands) + i]

    def local_shape(self, i: int = 0) -> tuple[Size, ...]:
        """Return the shape this rank holds of result ``i``."""
        return self._own(self.results[i], self.result_shape(i))

    def operand_shape(self, i: int) -> tuple[Size, ...]:
        """Return the shape this rank holds of operand ``i``."""
        return self._own(self.operands[i], self.shapes[i])

    def _own(self, spec: Spec, shape: tuple[int, ...]) -> tuple[Size, ...]:
        pairs = zip(shape, spec.dims, strict=True)
        own = tuple(self.build.own_size(size, axes) for size, axes in pairs)
        if not self.least:
            return own
        dims = self.empty_dims(spec, shape)
        most = partial(self.build.compute, max)
        return tuple(most(n, self.least) if d in dims else n for d, n in enumerate(own))

    def empty_dims(self, spec: Spec, shape: tuple[int, ...]) -> list[int]:
        """Return the dims of which some rank holds nothing."""
        return [d for d in range(len(shape)) if self.is_empty(spec, shape, d)]

    def is_empty(self, spec: Spec, shape: tuple[int, ...], dim: int) -> bool:
        """Return whether some rank holds no row of a dim that has rows."""
        axes = spec.dims[dim]
        least = shard_sizes.smallest(shape[dim], self.build.mesh, axes)
        return least == 0 < shape[dim]

    def same(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Return the op itself on these arguments."""
        return self.build.call(self.node.target, *args, **kwargs)

    def full(
        self, shape: Sequence[Size], value: bool | int | float, like: fx.Node
    ) -> fx.Node:
        """Return a tensor of one value, with the dtype and device of ``like``."""
        x = like.meta["val"]
        options = {"dtype": x.dtype, "device": x.device}
        return self.build.call(aten.full.default, list(shape), value, **options)

    def where(self, condition: fx.Node, x: fx.Node, other: bool | int | float) -> Any:
        """Return ``x`` where the condition holds, else the scalar ``other``."""
        return self.build.where(condition, x, other)


# (call, *local args, **local kwargs) -> node
Localizer = Callable[..., Any]


def form_of_feature(call: LocalCall, *_: Any, **__: Any) -> Any:
    """Raise PlanError: the local form of the op is one that a feature adds to the
    table, and without it numbers would be wrong."""
    raise PlanError(
        f"{call.node.target} has no local form yet: a feature of fxpar adds it",
        fix="import fxpar.features before making a graph local",
    )
