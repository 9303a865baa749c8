"""Which mesh: the factorisations of the ranks into axes, and the one with the fastest
plan.

In: ``"auto"``, ``"auto:8"`` or ``"auto:4x8"`` (nodes x devices) with the hardware; a
way to search on one mesh. Out: meshes, fewest axes first, and the Decision on the best
with a note of what the others would take. Never searches longer than asked for, pricing
apart, and knows nothing of process groups.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fxpar.errors import FxparError, HintError, MeshError, PlanError, SpecError
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.solver.message_passing import warm

if TYPE_CHECKING:
    from fxpar.sharding.decide import Decision
    from fxpar.sharding.search.run_search import Asked, Found

_FORM = 'write FXPAR_MESH="auto", or "auto:4x8" for 4 nodes of 8 devices'
_AUTO = re.compile(r"auto(?::([1-9]\d*)(?:x([1-9]\d*))?)?")

# Names of the outer axis, one between, the inner one. Where each rank feeds its own
# part of the batch, every axis is one of the batch by its name.
NAMES = ("dp", "cp", "tp")
LOCAL_NAMES = ("dp", "zero", "fsdp")

# Plans of so nearly the same time are alike: then fewer axes are better.
ALIKE = 1e-3

# What a mesh may do to a plan that it has none: hints and specs name axes, memory.
_UNFIT = (HintError, MeshError, PlanError, SpecError)


@dataclass(frozen=True)
class Auto:
    """A mesh to be chosen. ``ranks``: None: as many as there are. ``devices``: of a
    node; None: as the hardware has them."""

    ranks: int | None = None
    devices: int | None = None


def read_auto(mesh: Any) -> Auto | None:
    """What ``"auto"`` and its like ask for; None of any other mesh.

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
    """The hardware with so many devices in a node. One whose network has a single level
    knows no nodes and stays as it is."""
    if devices is None or len(hardware.levels) == 1:
        return hardware
    *inner, node, between = hardware.levels
    inside = [replace(x, devices=math.gcd(x.devices, devices)) for x in inner]
    levels = (*inside, replace(node, devices=devices), between)
    return replace(hardware, levels=levels)


def candidates(
    ranks: int, hardware: Hardware, *, local: bool = False
) -> tuple[Mesh, ...]:
    """Every ordered factorisation of the ranks into at most three axes, of which none
    lies partly in a node: an axis is inside nodes, between nodes, or all there is.

    ``local``: each rank feeds its own part of the batch.
    """
    names = LOCAL_NAMES if local else NAMES
    chosen = {1: names[:1], 2: (names[0], names[2]), 3: names}
    node = hardware.levels[-2].devices if len(hardware.levels) > 1 else 0
    several = node and ranks > node and ranks % node == 0
    return tuple(
        Mesh(tuple(zip(chosen[count], sizes, strict=True)))
        for count in chosen
        for sizes in _splits(ranks, count)
        if count == 1 or not several or _keeps_to_nodes(sizes, node)
    )


def _splits(ranks: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations into ``count`` sizes above 1; 1 itself into one."""
    if count == 1:
        yield (ranks,)
        return
    for first in range(2, ranks // 2 + 1):
        if ranks % first == 0:
            for rest in _splits(ranks // first, count - 1):
                yield (first, *rest)


def _keeps_to_nodes(sizes: Sequence[int], node: int) -> bool:
    stride = 1
    for size in reversed(sizes):
        if stride % node and node % (stride * size):
            return False
        stride *= size
    return True


def unlike(meshes: Sequence[Mesh], hardware: Hardware) -> tuple[Mesh, ...]:
    """Of meshes that differ only in the order of axes with one kind of link the first:
    where nothing names an axis, they have plans of one time."""
    kept: dict[Any, Mesh] = {}
    for mesh in meshes:
        links = hardware.links(mesh)
        axes = [(size, link) for (_, size), link in zip(mesh.axes, links, strict=True)]
        kept.setdefault(tuple(sorted(axes, key=repr)), mesh)
    return tuple(kept.values())


# A search on one mesh; of a shorter search found before, it goes on from that.
Attempt = Callable[[Mesh, "Asked", "Found | None"], "Decision"]


@dataclass(frozen=True)
class _Tried:
    """What is known of a mesh: seconds of the plan found, and of no plan less."""

    mesh: Mesh
    seconds: float = math.inf
    bound: float = 0.0
    error: FxparError | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.mesh} {str(self.error.what).splitlines()[0]}"
        known = math.isfinite(self.seconds)
        return f"{self.mesh} {_ms(self.seconds) if known else 'not tried'}"


def fastest(meshes: Sequence[Mesh], asked: Asked, attempt: Attempt) -> Decision:
    """The decision on the mesh with the fastest plan found, with ``rivals`` set and a
    note of every candidate.

    Half of the seconds go to a glance at each mesh, in the order given, which ends as
    soon as it is proved to be no faster than the best so far. Pricing takes time too:
    once all seconds have passed, what is left is not tried. The rest goes to the best,
    unless its plan is proved to be. Raises what ``attempt`` does if no mesh has a plan.
    """
    warm()
    asked = replace(asked, ranked=False)  # meshes are compared by one ruler
    begun, spent = time.perf_counter(), 0.0
    share = asked.seconds / 2 / len(meshes) if len(meshes) > 1 else asked.seconds
    glance = replace(asked, seconds=share)
    tried: list[_Tried] = []
    best: Decision | None = None
    for mesh in meshes:
        if best is not None and time.perf_counter() - begun > asked.seconds:
            tried.append(_Tried(mesh))
            continue
        try:
            decision = attempt(mesh, glance, None)
        except _UNFIT as error:
            tried.append(_Tried(mesh, bound=math.inf, error=error))
            continue
        found = found_of(decision)
        spent += found.took
        tried.append(_Tried(mesh, found.predicted, found.bound))
        if best is None or found.predicted < found_of(best).predicted * (1 - ALIKE):
            best = decision
            glance = replace(glance, enough=found.predicted)
    if best is None:
        return _hopeless(tried, asked, attempt)
    return _finished(best, tried, spent, asked, attempt)


def found_of(decision: Decision) -> Found:
    """The search that decided."""
    assert decision.found is not None, "what is chosen was searched"
    return decision.found


def _finished(
    best: Decision,
    tried: Sequence[_Tried],
    spent: float,
    asked: Asked,
    attempt: Attempt,
) -> Decision:
    """The best mesh searched with the time that is left."""
    before = found_of(best)
    if not before.is_proved and len(tried) > 1:
        left = max(asked.seconds - spent, asked.seconds / 2)
        longer = attempt(before.mesh, replace(asked, seconds=left), before)
        spent += found_of(longer).took
        if found_of(longer).predicted <= before.predicted:
            best = longer
    found = found_of(best)
    others = [t for t in tried if t.mesh.axes != found.mesh.axes]
    rivals = min((t.bound for t in others), default=math.inf)
    found = replace(found, took=spent, rivals=rivals)
    note = f"mesh {found.mesh} chosen of {len(tried)}: {_ms(found.predicted)} a step"
    if others:
        listed = sorted(others, key=lambda t: t.seconds)
        note += f"; {', '.join(map(str, listed))}"
    return replace(best, found=found, notes=(*best.notes, note))


def _hopeless(tried: Sequence[_Tried], asked: Asked, attempt: Attempt) -> Decision:
    """No glance found a plan. The mesh of most axes has most plans: all of the time
    goes to it, unless hints fit none."""
    searched = [t for t in tried if isinstance(t.error, PlanError)]
    if not searched:
        error = tried[-1].error
        assert error is not None
        raise error
    return attempt(searched[-1].mesh, asked, None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
