"""Local forms of fxpar's own ops: contractions, constraints, random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxpar.errors import PlanError
from fxpar.passes.local_call import Call, Localizer
from fxpar.passes.local_dot import emit_dot


def _dot(call: Call, lhs: fx.Node, rhs: fx.Node, equation: str) -> fx.Node:
    return emit_dot(call.build, lhs, rhs, equation)


def _constrain(call: Call, x: fx.Node, spec: Any) -> fx.Node:
    return x


def _random(call: Call, *args: Any) -> fx.Node:
    """The shard counts by global index: same seed, same numbers as one device."""
    *rest, size, starts = args
    axes = call.results[0].dims
    local = list(call.local_shape())
    offsets = [
        _further(call, start, a, n) if a else start
        for start, a, n in zip(starts, axes, local, strict=True)
    ]
    if rest and isinstance(rest[0], (list, tuple)):  # fxpar::random: size comes first
        rest = [local, *rest[1:]]
    else:  # fxpar::randint: low, high, size, seed
        rest = [*rest[:2], local, *rest[3:]]
    return call.build.call(call.node.target, *rest, size, offsets)


def _further(call: Call, start: Any, axes: Sequence[str], size: int) -> Any:
    """Where the slices over ``axes`` begin, of a dim that begins at ``start``: a
    number, or the offset of a dim that other axes split already."""
    if not isinstance(start, fx.Node):
        return call.build.offset(axes, size, start)
    _, before, stride, base = start.args
    if stride != size * call.build.mesh.count(axes):
        raise PlanError(f"{call.node.name} is cut across shards of {stride}")
    return call.build.offset((*before, *axes), size, base)


LOCAL: dict[Any, Localizer] = {
    "fxpar::dot": _dot,
    "fxpar::constrain": _constrain,
    "fxpar::random": _random,
    "fxpar::randint": _random,
}
