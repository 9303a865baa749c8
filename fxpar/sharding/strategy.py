"""Describes the strategy of an op: which mesh axes split which factors of its rule.

From a rule and a strategy follow the specs of operands and results; ``project`` goes
the other way. ``fits`` says whether tensors can be laid out in contiguous shards by a
strategy.
In: a Rule, a Mesh, axes by factor. Out: specs, axes by factor, whether they fit.
Never: chooses a strategy.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Axes, Dims, Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class Strategy:
    """Says which axes split which factor, and which axes pass through as partial."""

    # (factor, axes major to minor).
    factors: tuple[tuple[str, Axes], ...] = ()
    # (axis, reduction, index into ``rule.passages``).
    passes: tuple[tuple[str, str, int], ...] = ()

    @cached_property
    def axes_of(self) -> dict[str, Axes]:
        return dict(self.factors)

    def without(self, axes: Container[str]) -> Strategy:
        """Return the strategy in which some axes neither split nor pass."""
        passes = tuple(x for x in self.passes if x[0] not in axes)
        return Strategy(without_axes(self.factors, axes), passes)


def without_axes(
    factors: Iterable[tuple[str, Axes]], axes: Container[str]
) -> tuple[tuple[str, Axes], ...]:
    """Return the axes by factor without some axes."""
    rest = ((f, tuple(a for a in split if a not in axes)) for f, split in factors)
    return tuple((f, split) for f, split in rest if split)


@lru_cache(maxsize=1 << 14)
def spec_of(dims: tuple[Axes, ...], partial: tuple[tuple[str, str], ...] = ()) -> Spec:
    """Return ``Spec.of``; equal arguments share one object."""
    return Spec.of(dims, partial)


def _dims(dims: Dims, axes: Mapping[str, Axes]) -> tuple[Axes, ...]:
    """Return the axes of each dim, given as factors."""
    return tuple(tuple(a for f in dim for a in axes.get(f, ())) for dim in dims)


@lru_cache(maxsize=1 << 14)
def operand_spec(rule: Rule, strategy: Strategy, i: int) -> Spec:
    """Return the spec that operand ``i`` must have under a strategy."""
    dims = _dims(rule.operands[i], strategy.axes_of)
    partial = [
        (axis, op) for axis, op, p in strategy.passes if i in rule.passages[p].operands
    ]
    if i in rule.accumulates:
        have = {f for dim in rule.operands[i] for f in dim}
        partial += [
            (axis, rule.reduction.get(f, "sum"))
            for f, split in strategy.factors
            if f in rule.contracted and f not in have
            for axis in split
        ]
    return spec_of(dims, tuple(partial))


@lru_cache(maxsize=1 << 14)
def result_spec(rule: Rule, strategy: Strategy, i: int) -> Spec:
    """Return the spec that result ``i`` has under a strategy, before any reduction."""
    dims = _dims(rule.results[i], strategy.axes_of)
    partial = [
        (axis, rule.reduction.get(f, "sum"))
        for f, split in strategy.factors
        if f in rule.contracted_by[i]
        for axis in split
    ]
    partial += [(axis, op) for axis, op, _ in strategy.passes]
    return spec_of(dims, tuple(partial))


def specs(rule: Rule, strategy: Strategy) -> tuple[Spec, ...]:
    """Return the specs of the operands, then of the results as they are made."""
    operands = [operand_spec(rule, strategy, i) for i in range(len(rule.operands))]
    results = [result_spec(rule, strategy, i) for i in range(len(rule.results))]
    return (*operands, *results)


def project(
    dims: Dims,
    spec: Spec | Sequence[Axes],
    size: Mapping[str, int],
    mesh: Mesh,
    *,
    even: Container[str] | None = None,
) -> dict[str, Axes]:
    """Return the axes per factor that a tensor's spec implies, as far as factors
    express it.

    A dim's axes are assigned major to minor: a factor takes axes while they divide the
    rows that are left of it; the next factor may take more only once this one is used
    up. A factor that makes up its whole dim takes any axes, unless its shards must be
    ``even`` (None: all must).
    """
    out: dict[str, Axes] = {}
    entries = spec.dims if isinstance(spec, Spec) else spec
    for dim, axes in zip(dims, entries, strict=True):
        unassigned = list(axes)
        for factor in dim:
            rows_left, factor_axes = size[factor], []
            alone = _can_differ(even, factor) and _is_alone(dim, factor, size)
            while unassigned and (
                alone or shard_sizes.is_exact(rows_left, mesh, unassigned[:1])
            ):
                rows_left = shard_sizes.largest(rows_left, mesh, unassigned[:1])
                factor_axes.append(unassigned.pop(0))
            if factor_axes:
                out[factor] = tuple(factor_axes)
            if rows_left != 1:
                break
    return out


def _is_alone(dim: Sequence[str], factor: str, size: Mapping[str, int]) -> bool:
    """Return whether a dim consists of one factor only, with more than one row."""
    return size[factor] > 1 and all(size[f] == 1 for f in dim if f != factor)


def _can_differ(even: Container[str] | None, factor: str) -> bool:
    """Return whether shards of a factor may have several sizes."""
    return even is not None and factor not in even


def fits(rule: Rule, axes_of: Mapping[str, Axes], mesh: Mesh) -> bool:
    """Return whether every tensor of a rule can be laid out by an assignment of axes to
    factors: in contiguous shards, of one size where the rule requires it, none of them
    empty where the op does not run on empty shards."""
    for window in rule.windows:
        (factor,) = rule.tensors[window.position][window.dim]
        least = shard_sizes.smallest(window.count, mesh, axes_of.get(factor, ()))
        if not least and rule.empty != "fill":
            return False
    for factor, least in rule.least:
        rows, axes = rule.size[factor], axes_of.get(factor, ())
        has_equal_shards = shard_sizes.is_even(rows, mesh, axes)
        if not has_equal_shards and shard_sizes.smallest(rows, mesh, axes) < least:
            return False
    # In windows a row of zeros gives zero, so a sum over it is right.
    summed = rule.contracted - rule.moved
    shut = {"run": frozenset(), "fill": summed, "never": rule.free}
    for factor in shut[rule.empty]:
        rows, axes = rule.size[factor], axes_of.get(factor, ())
        if rows and not shard_sizes.smallest(rows, mesh, axes):
            return False
    return all(
        is_expressible(dims, axes_of, rule.size, mesh, even=rule.evenly)
        for dims in rule.tensors
    )


def is_expressible(
    dims: Dims,
    axes_of: Mapping[str, Axes],
    size: Mapping[str, int],
    mesh: Mesh,
    *,
    even: Container[str] | None = None,
) -> bool:
    """Return whether an assignment of axes to factors gives each dim contiguous shards,
    all of one size. A factor that makes up its whole dim may have unequal shards,
    unless they must be ``even`` (None: all must); in a compound dim unequal shards
    would not be the shards of the product."""
    for dim in dims:
        complete = True
        for factor in dim:
            axes = axes_of.get(factor, ())
            if axes and not complete:
                return False
            may_differ, rows = _can_differ(even, factor), size[factor]
            alone = may_differ and _is_alone(dim, factor, size)
            if not alone and not shard_sizes.is_exact(rows, mesh, axes):
                return False
            if not may_differ and not shard_sizes.is_even(rows, mesh, axes):
                return False
            complete = complete and mesh.count(axes) == rows
    return True
