"""The one way from spec to spec: its steps and its seconds.

``steps`` finds the cheapest route from one spec to another; ``price`` says what that
route costs. Where links are known and axes are few, the
routes of ``all_pairs`` compete with those of ``one_pair``: over unlike links, axes that
neither spec has can share the work. Among equals those of ``one_pair`` win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.reshard import all_pairs, one_pair
from fxpar.sharding.reshard.steps import Step, duration, front, written
from fxpar.sharding.spec import Spec


def steps(
    source: Spec, target: Spec, mesh: Mesh, shape: Sequence[int], itemsize: int = 4
) -> tuple[Step, ...]:
    """The cheapest steps from ``source`` to ``target`` for a global ``shape``.

    Deterministic; empty if nothing has to be done. Raises SpecError if a spec does not
    fit mesh and shape, or a partial axis is to change its reduction.
    """
    return _route(source, target, mesh, tuple(shape), itemsize)[0]


def price(
    source: Spec, target: Spec, mesh: Mesh, shape: Sequence[int], itemsize: int = 4
) -> float:
    """Predicted seconds of ``steps``. Cached: costs a dictionary look-up."""
    if source == target:
        return 0.0
    seconds = _route(source, target, mesh, tuple(shape), itemsize)[1]
    return seconds or written(source, target, mesh, shape, itemsize)


@lru_cache(maxsize=1 << 18)
def _route(
    source: Spec, target: Spec, mesh: Mesh, shape: tuple[int, ...], itemsize: int
) -> tuple[tuple[Step, ...], float]:
    """Steps and seconds."""
    route, seconds = one_pair.search(source, target, mesh, shape, itemsize)
    if all(link == Link() for link in mesh.links):
        return route, seconds
    other = all_pairs.path(source, target, mesh, shape, itemsize)
    if other is not None:
        local = math.prod(shape) * itemsize / mesh.count(source.sharded_axes)
        shorter = duration(other, mesh, local, front(shape))
        if shorter < duration(route, mesh, local, front(shape)) * (1 - 1e-9):
            return other, shorter
    return route, seconds
