"""One op call being made local: what a local form gets to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, Size
from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Rule
from fxpar.sharding.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """One op call being made local."""

    # Adds nodes to the local graph.
    build: Builder
    # The call as it is before.
    node: fx.Node
    # Of the op, with sizes.
    rule: Rule
    # Specs of the operands, in order of the rule.
    operands: tuple[Spec, ...]
    # Specs of the results.
    results: tuple[Spec, ...]
    # Their global shapes, operands then results.
    shapes: tuple[tuple[int, ...], ...]
    # Rows that a rank is made to hold of a dim of which it has fewer.
    least: int = 0

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Global shape of result ``i``."""
        return self.shapes[len(self.operands) + i]

    def local_shape(self, i: int = 0) -> tuple[Size, ...]:
        """Shape this rank holds of result ``i``."""
        return self._own(self.results[i], self.result_shape(i))

    def operand_shape(self, i: int) -> tuple[Size, ...]:
        """Shape this rank holds of operand ``i``."""
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
        """The dims of which some rank holds nothing."""
        return [d for d in range(len(shape)) if self.is_empty(spec, shape, d)]

    def is_empty(self, spec: Spec, shape: tuple[int, ...], dim: int) -> bool:
        """Whether some rank holds nothing of a dim that has something."""
        axes = spec.dims[dim]
        least = shard_sizes.smallest(shape[dim], self.build.mesh, axes)
        return least == 0 < shape[dim]

    def same(self, *args: Any, **kwargs: Any) -> fx.Node:
        """The op itself on these arguments."""
        return self.build.call(self.node.target, *args, **kwargs)

    def full(
        self, shape: Sequence[Size], value: bool | int | float, like: fx.Node
    ) -> fx.Node:
        """A tensor of one value, of the dtype and on the device of another."""
        x = like.meta["val"]
        options = {"dtype": x.dtype, "device": x.device}
        return self.build.call(aten.full.default, list(shape), value, **options)

    def where(self, condition: fx.Node, x: fx.Node, other: bool | int | float) -> Any:
        """``x`` where the condition holds, else the scalar ``other``."""
        return self.build.where(condition, x, other)


# (call, *local args, **local kwargs) -> node
Localizer = Callable[..., Any]
