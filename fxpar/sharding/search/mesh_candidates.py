"""Lists mesh candidates: the factorisations of the ranks into axes.

In: ``"auto"``, ``"auto:8"`` or ``"auto:4x8"`` (nodes x devices) with the hardware. Out:
meshes, fewest axes first. Never: needs a process group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpar.errors import MeshError
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import is_pipeline

_FORM = 'write FXPAR_MESH="auto", or "auto:4x8" for 4 nodes of 8 devices'
_AUTO = re.compile(r"auto(?::([1-9]\d*)(?:x([1-9]\d*))?)?")

# Names of the outer, the middle and the inner axis. Where each rank feeds its own
# part of the batch, every axis is one of the batch by its name.
NAMES = ("dp", "cp", "tp")
# The most places that stages are tried on.
MOST_PLACES = 32


@dataclass(frozen=True)
class Auto:
    """Is a mesh to be chosen."""

    # Number of ranks; None: as many as there are.
    ranks: int | None = None
    # Devices of a node; None: as the hardware has them.
    devices: int | None = None


def read_auto(mesh: Any) -> Auto | None:
    """Return the request that text such as ``"auto:4x8"`` makes; None for any other
    mesh.

    Raises MeshError if text begins so and cannot be read.
    """
    if not isinstance(mesh, str) or not mesh.strip().startswith("auto"):
        return None
    text = mesh.strip()
    match = _AUTO.fullmatch(text)
    if match is None:
        if "=" in text:  # an axis of such a name
            return None
        raise MeshError(f"cannot read mesh {mesh!r}", fix=_FORM)
    first, devices = (int(n) if n else None for n in match.groups())
    return Auto(first * (devices or 1) if first else None, devices)


def in_nodes(hardware: Hardware, devices: int | None) -> Hardware:
    """Return the hardware with ``devices`` in a node. Hardware whose network has a
    single level knows no nodes and stays as it is."""
    if devices is None or len(hardware.levels) == 1:
        return hardware
    *inner, node, between = hardware.levels
    inside = [replace(x, devices=math.gcd(x.devices, devices)) for x in inner]
    levels = (*inside, replace(node, devices=devices), between)
    return replace(hardware, levels=levels)


def candidates(ranks: int, hardware: Hardware) -> tuple[Mesh, ...]:
    """Return every ordered factorisation of the ranks into at most three axes, each of
    which is inside nodes, between nodes, or all there is."""
    names_by_count = {1: NAMES[:1], 2: (NAMES[0], NAMES[2]), 3: NAMES}
    node = hardware.levels[-2].devices if len(hardware.levels) > 1 else 0
    several = node and ranks > node and ranks % node == 0
    return tuple(
        Mesh(tuple(zip(names_by_count[count], sizes, strict=True)))
        for count in names_by_count
        for sizes in _splits(ranks, count)
        if count == 1 or not several or _is_within_nodes(sizes, node)
    )


def staged_candidates(ranks: int, hardware: Hardware) -> tuple[Mesh, ...]:
    """Return meshes with an outer axis of stages and every candidate of at most two
    axes inside a stage."""
    return tuple(
        Mesh((("pp", places), *(axis for axis in inner.axes if axis[1] > 1)))
        for places in range(2, min(ranks, MOST_PLACES) + 1)
        if ranks % places == 0
        for inner in candidates(ranks // places, hardware)
        if len(inner.axes) <= 2
    )


def _splits(ranks: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield ordered factorisations into ``count`` sizes above 1; 1 itself into one."""
    if count == 1:
        yield (ranks,)
        return
    for first in range(2, ranks // 2 + 1):
        if ranks % first == 0:
            for others in _splits(ranks // first, count - 1):
                yield (first, *others)


def _is_within_nodes(sizes: Sequence[int], node: int) -> bool:
    stride = 1
    for size in reversed(sizes):
        if stride % node and node % (stride * size):
            return False
        stride *= size
    return True


def distinct(meshes: Sequence[Mesh], hardware: Hardware) -> tuple[Mesh, ...]:
    """Return the meshes without those that differ from an earlier one only in the order
    of axes with one kind of link: where nothing names an axis, their plans take the
    same time."""
    first: dict[Any, Mesh] = {}
    for mesh in meshes:
        links = hardware.links(mesh)
        axes = [
            (is_pipeline(name), size, link)
            for (name, size), link in zip(mesh.axes, links, strict=True)
        ]
        first.setdefault(tuple(sorted(axes, key=repr)), mesh)
    return tuple(first.values())
