"""The strategies of an op: every assignment of mesh axes to its factors.

In: an op's rule and a mesh. Out: Strategies. An axis splits one factor, passes through
as a partial sum, or is left unused (the op is repeated along it); several axes may
split one factor. So sample, operator, attribute and parameter dims are all in the space
(FlexFlow's SOAP), and partial results beside them. What no Spec expresses is left out,
and of strategies that read and make the same specs only the first is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from fxpar.sharding.factors import (
    Axes,
    Rule,
    Strategy,
    expressible,
    operand_spec,
    result_spec,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec

# What one axis does in one op: the factor it splits, the passage it takes, or nothing.
Part = str | int | None


@lru_cache(maxsize=1 << 14)
def strategies(rule: Rule, mesh: Mesh) -> tuple[Strategy, ...]:
    """All strategies of an op with this rule, the one that leaves all whole first."""
    axes = [axis for axis in orders(mesh)[0] if mesh.sizes[axis] > 1]
    found: dict[tuple[Spec, ...], Strategy] = {}
    options = [_parts(rule, mesh, axis) for axis in axes]
    for parts in itertools.product(*options):
        for strategy in _strategies(dict(zip(axes, parts, strict=True)), mesh):
            if _fits(rule, strategy, mesh):
                found.setdefault(specs(rule, strategy), strategy)
    return tuple(found.values())


def specs(rule: Rule, strategy: Strategy) -> tuple[Spec, ...]:
    """Of the operands, then of the results as they are made."""
    operands = [operand_spec(rule, strategy, i) for i in range(len(rule.operands))]
    results = [result_spec(rule, strategy, i) for i in range(len(rule.results))]
    return (*operands, *results)


def orders(mesh: Mesh) -> tuple[Axes, ...]:
    """The orders in which axes share a dim: as in the mesh, and with batch axes minor,
    as parameters rest."""
    batch = batch_axes(mesh)
    minor = tuple(sorted(mesh.names, key=lambda axis: axis in batch))
    return tuple(dict.fromkeys((mesh.names, minor)))


def _parts(rule: Rule, mesh: Mesh, axis: str) -> list[Part]:
    size = mesh.sizes[axis]
    factors = [f for f in rule.free if rule.size[f] % size == 0]
    passages = [
        p
        for p, passage in enumerate(rule.passages)
        if passage.operands and "sum" in passage.reductions
    ]
    return [None, *factors, *passages]


def _strategies(parts: dict[str, Part], mesh: Mesh) -> Iterator[Strategy]:
    passes = tuple((a, "sum", p) for a, p in parts.items() if isinstance(p, int))
    made = set()
    for order in orders(mesh):
        axes_of: dict[str, list[str]] = {}
        for axis in order:
            part = parts.get(axis)
            if isinstance(part, str):
                axes_of.setdefault(part, []).append(axis)
        factors = tuple(sorted((f, tuple(axes)) for f, axes in axes_of.items()))
        if factors not in made:
            made.add(factors)
            yield Strategy(factors, passes)


def _fits(rule: Rule, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether every tensor can lie so, and results are partial by one reduction."""
    axes_of = strategy.axes_of
    if any(rule.size[f] % mesh.count(axes) for f, axes in strategy.factors):
        return False
    if not all(expressible(t, axes_of, rule.size, mesh) for t in rule.tensors):
        return False
    for spec in specs(rule, strategy):
        if len({"sum" if op == "avg" else op for _, op in spec.partial}) > 1:
            return False
    return True
