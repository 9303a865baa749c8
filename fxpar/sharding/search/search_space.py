"""Lists the search space: strategies of an op, specs of a value, the solver's
variables.

In: an op's rule and a mesh. Out: Strategies. An axis splits one factor, passes through
as a partial sum, or is left unused (the op is repeated along it); several axes may
split one factor. So sample, operator, attribute and parameter dims are all in the space
(FlexFlow's SOAP), and partial results too. Splits that no Spec expresses are left out,
and of strategies that read and make the same specs only the first is kept.

In: a shape, hints (``Seed``) and a mesh. Out: Specs without partial axes, of axes of
more than one rank.

``Node`` is a variable (which spec each tensor has under each strategy), ``EdgeEnd`` one
end of an edge, ``Pool`` numbers specs. Never: prices or chooses anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxpar.errors import HintError
from fxpar.sharding.factors import Axes, Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Value
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.propagate.propagation import Seed
from fxpar.sharding.shard_sizes import can_split
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, fits, specs


@dataclass(frozen=True)
class Node:
    """Is a variable of the problem."""

    # "op", "input", "constant", "output", "value", or "copy" (the spec in which readers
    # get a value that a hint lays out).
    kind: str
    of: int  # index of the op, input, output, or value
    # (K, tensors) number of the spec of each tensor of an op under each strategy; (K,
    # 1) for the others.
    specs: np.ndarray
    # Strategies of an op, one for each row of ``specs``; none for other kinds.
    strategies: tuple[Strategy, ...] = ()
    # (K,) for a parameter that settles: whether it is a copy of the one at rest.
    copies: np.ndarray | None = None


@dataclass(frozen=True)
class EdgeEnd:
    """Is one end of an edge."""

    node: int
    column: int  # column of the node's specs that is of the value


class Pool:
    """Numbers specs."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self._number: dict[Spec, int] = {}

    def number(self, spec: Spec) -> int:
        """Return the number of one spec, a new one if it was not seen yet."""
        if spec not in self._number:
            self._number[spec] = len(self.specs)
            self.specs.append(spec)
        return self._number[spec]

    def numbers(self, specs: Iterable[Spec]) -> np.ndarray:
        """Return the numbers of specs as (K, 1), as in ``Node.specs``."""
        return np.array([[self.number(spec)] for spec in specs], int).reshape(-1, 1)


# The role of one axis in one op: the factor it splits, the passage it takes, or none.
Part = str | int | None


@lru_cache(maxsize=1 << 14)
def strategies(rule: Rule, mesh: Mesh) -> Mapping[tuple[Spec, ...], Strategy]:
    """Return all strategies of an op with this rule by the specs of its tensors, the
    one that leaves all whole first."""
    axes = [axis for axis in orders(mesh)[0] if mesh.sizes[axis] > 1]
    by_specs: dict[tuple[Spec, ...], Strategy] = {}
    options = [_parts(rule, mesh, axis) for axis in axes]
    for parts in itertools.product(*options):
        for strategy in _strategies(dict(zip(axes, parts, strict=True)), mesh):
            splits = strategy.factors
            if not all(can_split(rule.size[f], mesh, own) for f, own in splits):
                continue
            if not fits(rule, strategy.axes_of, mesh):
                continue
            tensors = specs(rule, strategy)
            if all(len(spec.kinds) < 2 for spec in tensors):
                by_specs.setdefault(tensors, strategy)
    return by_specs


def orders(mesh: Mesh) -> tuple[Axes, ...]:
    """Return the orders in which axes share a dim: as in the mesh, and with batch axes
    minor, as in parameters at rest."""
    batch = batch_axes(mesh)
    minor = tuple(sorted(mesh.names, key=lambda axis: axis in batch))
    return tuple(dict.fromkeys((mesh.names, minor)))


def _parts(rule: Rule, mesh: Mesh, axis: str) -> list[Part]:
    if axis in rule.pin:
        return [rule.pin[axis]]
    factors = [f for f in rule.free if can_split(rule.size[f], mesh, (axis,))]
    passages = [
        p
        for p, passage in enumerate(rule.passages)
        if passage.operands and "sum" in passage.reductions
    ]
    return [None, *factors, *passages]


def _strategies(parts: dict[str, Part], mesh: Mesh) -> Iterator[Strategy]:
    passes = tuple((a, "sum", p) for a, p in parts.items() if isinstance(p, int))
    splits = set()
    for order in orders(mesh):
        axes_of: dict[str, list[str]] = {}
        for axis in order:
            part = parts.get(axis)
            if isinstance(part, str):
                axes_of.setdefault(part, []).append(axis)
        factors = tuple(sorted((f, tuple(axes)) for f, axes in axes_of.items()))
        if factors not in splits:
            splits.add(factors)
            yield Strategy(factors, passes)


def specs_of_shape(shape: Sequence[int], mesh: Mesh) -> list[Spec]:
    """Return every spec without partial axes that may split ``shape``, whole first."""
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    unique: dict[Spec, None] = {}
    for places in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        where = dict(zip(axes, places, strict=True))
        for order in orders(mesh):
            dims = [
                tuple(axis for axis in order if where.get(axis) == d)
                for d in range(len(shape))
            ]
            if all(
                can_split(n, mesh, split) for n, split in zip(shape, dims, strict=True)
            ):
                unique[Spec.of(dims)] = None
    return list(unique)


def allowed(
    value: Value, seeds: Sequence[Seed], specs: Iterable[Spec], mesh: Mesh
) -> list[Spec]:
    """Return the ``specs`` that keep to the hints on a value; if none does, any that
    do.

    Raises HintError if hints on the value contradict each other.
    """
    hinted = [s for s in specs if all(is_as_hinted(seed, s, mesh) for seed in seeds)]
    if hinted or not seeds:
        return hinted
    also = [*specs_of_shape(value.shape, mesh), *_merged_seeds(seeds, mesh)]
    hinted = [s for s in also if all(is_as_hinted(seed, s, mesh) for seed in seeds)]
    if not hinted:
        raise HintError(
            f"{' and '.join(seed.origin for seed in seeds)} contradict each other "
            f"on {value.name}",
            fix="leave some of their dims open with '?'",
        )
    return hinted


def is_as_hinted(seed: Seed, spec: Spec, mesh: Mesh) -> bool:
    """Return whether a spec is as a hint asks: closed dims exactly, open ones at
    least."""
    hint = stripped(Spec.of(seed.dims), mesh)
    is_whole = not spec.partial and {*seed.whole}.isdisjoint(spec.axes)
    return is_whole and all(
        have == want if shut else have[: len(want)] == want
        for have, want, shut in zip(spec.dims, hint.dims, seed.closed, strict=True)
    )


def _merged_seeds(seeds: Sequence[Seed], mesh: Mesh) -> list[Spec]:
    """Return the spec that has the axes of all hints, in their order; none if one would
    split two dims."""
    parts = zip(*(seed.dims for seed in seeds), strict=True)
    dims = [max(part, key=len) for part in parts]
    used = [axis for dim in dims for axis in dim]
    if len(set(used)) < len(used):
        return []
    return [stripped(Spec.of(dims), mesh)]


def stripped(spec: Spec, mesh: Mesh) -> Spec:
    """Return a spec without axes of one rank, which the space leaves out."""
    return spec.without({axis for axis in mesh.names if mesh.sizes[axis] == 1})
