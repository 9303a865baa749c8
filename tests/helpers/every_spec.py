"""Every spec there is, for exhaustive tests."""

from __future__ import annotations

import itertools

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec


def every_spec(mesh: Mesh, ndim: int, op: str | None = None) -> list[Spec]:
    """All specs of a tensor: each axis on a dim, unused, or (given ``op``) partial, and
    the axes of each dim in every order."""
    places = [*range(ndim), None] + (["partial"] if op else [])
    found: dict[Spec, None] = {}
    for chosen in itertools.product(places, repeat=len(mesh.names)):
        place = dict(zip(mesh.names, chosen, strict=True))
        for names in itertools.permutations(mesh.names):
            dims = [[a for a in names if place[a] == d] for d in range(ndim)]
            partial = {a: op for a in mesh.names if place[a] == "partial"}
            found[Spec(*dims, partial=partial)] = None
    return list(found)
