"""Prices one collective on given links: alpha-beta, by algorithm.

In: the kind of a collective, the axes it runs over, bytes. Out: seconds, as a
``Curve``: the least of a few straight lines, one for each algorithm a library may take;
for a ``message`` between two ranks, one line. Bytes are always those a rank holds
before the collective, as in ``steps``. Never: runs anything or chooses a plan.

A group is a row of ``Stage``, innermost first: its ranks inside a node, then the nodes,
joined by ever slower links. A ring or tree passes from node to node over all the links
that the ranks of the group have there together, so that m ranks in a node make the link
between nodes m times as fast; an all-to-all crosses once for each rank, and has only
its own. NCCL's own model (``src/graph/tuning.cc``) is of this form, and has the tree
below for all-reduce alone; its protocols and in-switch reductions are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fxpar.sharding.mesh import Link, Mesh, axis_of

# Bytes of a full bucket of collectives that are joined, as if each rank held them
# whole. A larger tensor is sent alone: there the bandwidth of the link counts and not
# its latency.
FULL = 1 << 20


@dataclass(frozen=True)
class Stage:
    """Is a level of a group."""

    # Number of units: ranks, or groups of the stages before.
    size: int
    # The link that joins them.
    link: Link


@dataclass(frozen=True)
class AlphaBeta:
    """Is the time of one algorithm over bytes: a straight line."""

    # Seconds, whatever it carries.
    alpha: float
    # Seconds for each byte that a rank holds before it.
    beta: float


@dataclass(frozen=True)
class Curve:
    """Is time over bytes: the least of some lines, and copies before and after it."""

    # One for each algorithm that a library may take; in a tie the first is taken.
    lines: tuple[AlphaBeta, ...]
    # Bytes of each copy, as a share of what a rank holds before the collective.
    copies: tuple[float, ...] = ()
    # Gives the seconds of a copy.
    link: Link = Link()

    def seconds(self, nbytes: Any) -> Any:
        """Return seconds for ``nbytes`` on each rank: a number, or an array of them."""
        copied = sum(self.link.copy_seconds(x * nbytes) for x in self.copies)
        times = [line.alpha + line.beta * nbytes + copied for line in self.lines]
        if len(times) == 1:
            return times[0]
        if isinstance(nbytes, (int, float)):
            return min(times)
        import numpy as np

        return np.min(times, 0)

    def line(self, nbytes: float) -> AlphaBeta:
        """Return the line of the algorithm that is fastest for ``nbytes``."""
        return min(self.lines, key=lambda line: line.alpha + line.beta * nbytes)


@lru_cache(maxsize=1 << 14)
def along(kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Curve:
    """Return the curve of a collective along axes, or parts of axes, of a mesh.

    Cached: costs a look-up. Raises KeyError on an unknown kind, MeshError on an axis.
    """
    stages: list[Stage] = []
    for axis in reversed(mesh.ordered(axes)):
        stages += _part(mesh, axis)
    return _curve(kind, _merged(stages))


def bound(mesh: Mesh) -> tuple[float, float]:
    """Return bounds that no collective on a mesh beats: (seconds it takes at least,
    bytes/s at which a rank receives at most)."""
    links = [stage.link for link in mesh.links for stage in _levels(1, link)]
    links += [own for link in links for _, own in link.kinds]
    return (
        min(link.overhead + link.latency for link in links),
        max(link.bandwidth for link in links),
    )


def message(link: Link, nbytes: float) -> float:
    """Return the seconds of one message from a rank to another along a link."""
    link = between_two(link)
    return link.latency + link.overhead + nbytes / link.bandwidth


def between_two(link: Link) -> Link:
    """Return the link as messages from one rank to another have it, which are
    permutes."""
    return dict(link.kinds).get("permute", link)


def _levels(size: int, link: Link) -> Iterator[Stage]:
    """Yield the stages of one whole axis. If only its links matter, any ``size`` will
    do."""
    inside = 1
    if link.inner is not None:
        inside = link.inside
        yield from _levels(inside, link.inner)
    yield Stage(max(1, size // inside), replace(link, inside=1, inner=None))


def _part(mesh: Mesh, axis: str) -> Iterator[Stage]:
    """Yield the stages of an axis, or of a part: some of those of the axis. Where a
    part does not fit a node evenly, the rest of it is assumed to leave the node."""
    name, ranks_left = axis_of(axis), mesh.axis_size(axis)
    if ranks_left == 1:
        return
    # Distance between neighbours on the part, in ranks of the axis.
    skip = mesh.group(0, [axis])[1] // mesh.group(0, [name])[1]
    levels = list(_levels(mesh.axis_size(name), mesh.link(axis)))
    for i, stage in enumerate(levels):
        below = math.gcd(skip, stage.size)
        skip //= below
        ranks = math.gcd(ranks_left, stage.size // below)
        if i == len(levels) - 1:
            ranks = ranks_left
        ranks_left //= ranks
        yield Stage(ranks, stage.link)


def _merged(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return neighbours on the same kind of link as one stage, single units left
    out."""
    out: list[Stage] = []
    for stage in stages:
        if stage.size == 1:
            continue
        if out and out[-1].link == stage.link:
            stage = Stage(out.pop().size * stage.size, stage.link)
        out.append(stage)
    return tuple(out)


@dataclass(frozen=True)
class _Ranks:
    """Holds stages as a kind of collective sees them, innermost first."""

    # Units that each stage joins.
    sizes: list[int]
    # The link that joins them, for this kind of collective.
    links: list[Link]
    # Ranks of the group in one unit of a stage.
    within: list[int]
    # Bytes/s of those ranks together.
    lanes: list[float]
    # Ranks of the group.
    count: int

    def around(self) -> float:
        """Return the latency once around the ring, without the last step: units of
        inner stages are passed once for each unit of the outer ones."""
        return sum(
            (n - 1) * self.count / (n * m) * link.latency
            for n, m, link in zip(self.sizes, self.within, self.links, strict=True)
        )


def _ring(group: _Ranks, rounds: int) -> tuple[float, float]:
    """Return alpha and beta of the ring: each round sends (N-1)/N of the bytes in N-1
    steps (Patarasuk and Yuan, 2009)."""
    volume = rounds * (group.count - 1) / group.count
    return rounds * group.around(), volume / min(group.lanes)


def _tree(group: _Ranks) -> tuple[float, float] | None:
    """Return alpha and beta of two complementary trees of half the bytes each, up and
    down (Sanders, Speck and Träff, 2009), chains inside nodes; None where the library
    has none."""
    if not any(link.tree for link in group.links):
        return None
    alpha = beta = 0.0
    for n, link, lanes in zip(group.sizes, group.links, group.lanes, strict=True):
        depth = math.ceil(math.log2(n)) if link.tree else n - 1
        alpha += 2 * depth * link.latency
        # With two ranks, one only sends up and the other only down.
        beta = max(beta, min(2, n - 1) / lanes)
    return alpha, beta


def _gather(group: _Ranks) -> tuple[float, float]:
    """Return alpha and beta of a ring in which all parts but a rank's own arrive: N-1
    times its bytes."""
    return group.around(), (group.count - 1) / min(group.lanes)


def _exchange(group: _Ranks) -> tuple[float, float]:
    """Return alpha and beta where every rank sends 1/N of its bytes to each other one,
    all stages at once."""
    alpha = beta = 0.0
    for n, link, m in zip(group.sizes, group.links, group.within, strict=True):
        peers = (n - 1) * m
        alpha += peers * link.latency
        beta = max(beta, peers / group.count / link.bandwidth)
    return alpha, beta


def _shift(group: _Ranks) -> tuple[float, float]:
    """Return alpha and beta where every rank sends all it holds to one other, over the
    slowest link at worst."""
    return (
        max(link.latency for link in group.links),
        1 / min(link.bandwidth for link in group.links),
    )


_Algorithm = Callable[[_Ranks], "tuple[float, float] | None"]

# Algorithms that a library may run for each kind. The ring is first, and wins a tie.
_ALGORITHMS: dict[str, tuple[_Algorithm, ...]] = {
    "all_reduce": (lambda group: _ring(group, 2), _tree),
    "all_gather": (_gather,),
    "reduce_scatter": (lambda group: _ring(group, 1),),
    "all_to_all": (_exchange,),
    "permute": (_shift,),
}

KINDS = tuple(_ALGORITHMS)


@lru_cache(maxsize=1 << 12)
def _curve(kind: str, stages: tuple[Stage, ...]) -> Curve:
    if not stages:
        return Curve((AlphaBeta(0.0, 0.0),))
    links = [dict(stage.link.kinds).get(kind, stage.link) for stage in stages]
    sizes = [stage.size for stage in stages]
    within = [math.prod(sizes[:i]) for i in range(len(sizes))]
    lanes = [link.bandwidth * m for link, m in zip(links, within, strict=True)]
    group = _Ranks(sizes, links, within, lanes, math.prod(sizes))
    overhead = max(link.overhead for link in links)
    numbers = (algorithm(group) for algorithm in _ALGORITHMS[kind])
    return Curve(tuple(AlphaBeta(overhead + x[0], x[1]) for x in numbers if x))
