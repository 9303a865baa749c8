"""How one value may lie: all specs of a shape, and which of them hints allow.

In: shapes, hints (``Seed``), a mesh. Out: Specs without partial axes, of axes of more
than one rank. Prices nothing and chooses nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fxpar.errors import HintError
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Value
from fxpar.sharding.propagate.propagation import Seed
from fxpar.sharding.search import op_strategies
from fxpar.sharding.spec import Spec


def lying(shape: Sequence[int], mesh: Mesh) -> list[Spec]:
    """Every spec without partial axes that divides ``shape`` evenly, whole first."""
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    found: dict[Spec, None] = {}
    for places in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        where = dict(zip(axes, places, strict=True))
        for order in op_strategies.orders(mesh):
            dims = [
                tuple(axis for axis in order if where.get(axis) == d)
                for d in range(len(shape))
            ]
            if all(
                n % mesh.count(split) == 0 for n, split in zip(shape, dims, strict=True)
            ):
                found[Spec.of(dims)] = None
    return list(found)


def allowed(
    value: Value, seeds: Sequence[Seed], specs: Iterable[Spec], mesh: Mesh
) -> list[Spec]:
    """Those of ``specs`` that keep to the hints on a value; if none does, any that do.

    Raises HintError if hints on the value contradict each other.
    """
    found = [s for s in specs if all(keeps(seed, s, mesh) for seed in seeds)]
    if found or not seeds:
        return found
    also = [*lying(value.shape, mesh), *_joined(seeds, mesh)]
    found = [s for s in also if all(keeps(seed, s, mesh) for seed in seeds)]
    if not found:
        raise HintError(
            f"{' and '.join(seed.origin for seed in seeds)} contradict each other "
            f"on {value.name}",
            fix="leave some of their dims open with '?'",
        )
    return found


def keeps(seed: Seed, spec: Spec, mesh: Mesh) -> bool:
    """Whether a spec is what a hint asks: closed dims exactly, open ones at least."""
    asked = stripped(Spec.of(seed.dims), mesh)
    return not spec.partial and all(
        have == want if shut else have[: len(want)] == want
        for have, want, shut in zip(spec.dims, asked.dims, seed.closed, strict=True)
    )


def _joined(seeds: Sequence[Seed], mesh: Mesh) -> list[Spec]:
    """The spec that has what all hints ask for, in their order of axes."""
    parts = zip(*(seed.dims for seed in seeds), strict=True)
    dims = [max(part, key=len) for part in parts]
    used = [axis for dim in dims for axis in dim]
    if len(set(used)) < len(used):
        return []
    return [stripped(Spec.of(dims), mesh)]


def stripped(spec: Spec, mesh: Mesh) -> Spec:
    """A spec without axes of one rank, of which the space has none."""
    return spec.without({axis for axis in mesh.names if mesh.sizes[axis] == 1})
