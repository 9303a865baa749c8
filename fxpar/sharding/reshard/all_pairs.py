"""Resharding between all specs of a value at once: what it costs, by which steps.

In: a value's shape and specs. Out: ``matrix``, seconds from each to each, inf where a
value cannot be brought there; ``path``, the steps of one of them. All specs of tensors
of so many dims are the nodes of a graph whose edges are single steps (slice, mask,
gather, all-to-all, permute, reductions), priced as ``steps`` prices them. A path may
use axes that neither end has: over unlike links a value that is whole along the fast
axis is sliced there, gathered over the slow one in parts, and gathered again.
``reshard`` never does, but cuts axes in pieces where sizes make that necessary; of the
two the cheaper is lowered. ``matrix`` asks it too where axes of unlike sizes change
places, so no plan costs more than its matrices say.

Source: Floyd and Warshall's all-pairs shortest paths, one row and column at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fxpar.errors import SpecError
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.route import price
from fxpar.sharding.reshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Mask,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from fxpar.sharding.spec import Spec

# Axes of more than one rank. Of more there are too many specs to have all at once.
MOST = 3

Dims = tuple[tuple[str, ...], ...]
# A spec as a node: axes per dim, and the axes along which it is a partial sum.
Node = tuple[Dims, frozenset[str]]
# (from, to, kind, axes, share of the whole value that a rank holds before)
Hop = tuple[int, int, str, tuple[str, ...], float]


def matrix(
    sources: Sequence[Spec],
    targets: Sequence[Spec],
    mesh: Mesh,
    shape: Sequence[int],
    itemsize: int,
) -> np.ndarray:
    """(len(sources), len(targets)) seconds."""
    room = tuple(math.gcd(size, mesh.size) for size in shape)
    nbytes = float(math.prod(shape) * itemsize)
    place = _places(mesh, len(shape))
    rows = [place.get(_node(spec, mesh), -1) for spec in sources]
    columns = [place.get(_node(spec, mesh), -1) for spec in targets]
    every = _closure(mesh, room, nbytes)
    out = every[np.ix_(rows, columns)].copy()
    given = [place.get(_node(s.without_partial(), mesh), -1) for s in sources]
    for i, j in itertools.product(range(len(rows)), range(len(columns))):
        if rows[i] < 0 or columns[j] < 0:
            out[i, j] = _one(sources[i], targets[j], mesh, tuple(shape), itemsize)
        elif len(_kinds(sources[i], targets[j])) > 1:  # reduced in between
            out[i, j] = every[rows[i], given[i]] + every[given[i], columns[j]]
        elif _swaps(sources[i], targets[j], mesh) and np.isfinite(out[i, j]):
            found = _one(sources[i], targets[j], mesh, tuple(shape), itemsize)
            out[i, j] = min(out[i, j], found)
    return out


def _swaps(source: Spec, target: Spec, mesh: Mesh) -> bool:
    """Whether axes of unlike sizes change places, which is cheapest in pieces of axes:
    those are no nodes of the graph."""
    if source.partial or target.partial or set(source.axes) != set(target.axes):
        return False
    before, after = ([mesh.count(dim) for dim in s.dims] for s in (source, target))
    return before != after and all(
        math.prod(shards) != max(shards) for shards in (before, after)
    )


def path(
    source: Spec, target: Spec, mesh: Mesh, shape: Sequence[int], itemsize: int
) -> tuple[Step, ...] | None:
    """The cheapest steps between two specs, if they are nodes of the graph.

    Deterministic: among equals the fewest steps, then the first.
    """
    place, nodes = _places(mesh, len(shape)), _nodes(mesh, len(shape))
    here, end = place.get(_node(source, mesh)), place.get(_node(target, mesh))
    ops = _ops(source) | _ops(target)
    if here is None or end is None or len(ops) > 1:
        return None
    op = next(iter(ops), "sum")
    room = tuple(math.gcd(size, mesh.size) for size in shape)
    nbytes = float(math.prod(shape) * itemsize)
    cost = _closure(mesh, room, nbytes)
    if not np.isfinite(cost[here, end]):
        return None
    out: list[Step] = []
    while here != end:
        best = None
        for to, kind, axes, share in _leaving(mesh, len(shape))[here]:
            seconds = _hop_seconds(kind, axes, mesh, nbytes * share)
            total = seconds + cost[to, end] if np.isfinite(cost[here, to]) else math.inf
            rank = (total * (1 - 1e-9), bool(kind))
            if best is None or rank < best[0]:
                best = (rank, to, kind, axes)
        assert best is not None
        _, to, kind, axes = best
        out.append(_as_step(nodes[here], nodes[to], kind, axes, op))
        here = to
    if out:
        out[-1] = replace(out[-1], spec=target)  # axes of one rank were left out
    return tuple(out)


def _hop_seconds(kind: str, axes: tuple[str, ...], mesh: Mesh, nbytes: float) -> float:
    return along(kind, mesh, axes).seconds(nbytes) if kind else 0.0


def _spec(node: Node, op: str = "sum") -> Spec:
    return Spec.of(node[0], [(axis, op) for axis in sorted(node[1])])


def _as_step(a: Node, b: Node, kind: str, axes: tuple[str, ...], op: str) -> Step:
    """The step of ``steps`` that a hop is."""
    after = _spec(b, op)
    changed = [d for d in range(len(a[0])) if a[0][d] != b[0][d]]
    if kind == "permute":
        return Permute(after, axes, _spec(a, op))
    if kind == "all_reduce":
        return AllReduce(after, axes, op)
    if kind == "reduce_scatter":
        return ReduceScatter(after, axes, changed[0], op)
    if kind == "all_gather":
        return AllGather(after, axes, changed[0])
    if kind == "all_to_all":
        source, target = sorted(changed, key=lambda d: len(b[0][d]) - len(a[0][d]))
        return AllToAll(after, axes, source, target)
    if changed:
        return Slice(after, axes, changed[0])
    return Mask(after, axes, op)


def _one(
    source: Spec, target: Spec, mesh: Mesh, shape: tuple[int, ...], itemsize: int
) -> float:
    """The price of a pair of which one is not in the graph."""
    try:
        return price(source, target, mesh, shape, itemsize)
    except SpecError:
        return math.inf


def _ops(spec: Spec) -> set[str]:
    return {op for _, op in spec.partial}


def _kinds(*specs: Spec) -> set[str]:
    """Reductions, of which an average and a sum commute."""
    return {"sum" if op == "avg" else op for spec in specs for op in _ops(spec)}


def _node(spec: Spec, mesh: Mesh) -> Node | None:
    """What a spec is in the graph, where all reductions are of one kind."""
    if len(_kinds(spec)) > 1:
        return None
    dims = tuple(tuple(a for a in d if mesh.axis_size(a) > 1) for d in spec.dims)
    return dims, frozenset(a for a, _ in spec.partial if mesh.axis_size(a) > 1)


@lru_cache(maxsize=64)
def _nodes(mesh: Mesh, ndim: int) -> list[Node]:
    """All specs of a tensor of so many dims, in every order of axes."""
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    found: dict[Node, None] = {}
    for order in itertools.permutations(axes):
        for places in itertools.product([None, -1, *range(ndim)], repeat=len(order)):
            where = list(zip(order, places, strict=True))
            dims = tuple(tuple(a for a, p in where if p == d) for d in range(ndim))
            found[dims, frozenset(a for a, p in where if p == -1)] = None
    return list(found)


@lru_cache(maxsize=64)
def _places(mesh: Mesh, ndim: int) -> dict[Node | None, int]:
    return {node: i for i, node in enumerate(_nodes(mesh, ndim))}


@lru_cache(maxsize=64)
def _hops(mesh: Mesh, ndim: int) -> list[Hop]:
    """Every single step between specs of tensors of so many dims."""
    place = _places(mesh, ndim)
    nodes = _nodes(mesh, ndim)
    alike: dict[tuple, list[Node]] = {}
    for dims, partial in nodes:
        counts = tuple(mesh.count(axes) for axes in dims)
        alike.setdefault((counts, partial), []).append((dims, partial))
    out = []
    for node in nodes:
        share = 1 / math.prod(mesh.count(axes) for axes in node[0])
        counts = tuple(mesh.count(axes) for axes in node[0])
        moves = itertools.chain(
            _local(node, mesh),
            _moves(node, mesh),
            _permutes(node, alike[counts, node[1]], mesh),
        )
        for other, kind, axes in moves:
            out.append((place[node], place[other], kind, axes, share))
    return out


def _local(node: Node, mesh: Mesh) -> Iterator[tuple[Node, str, tuple[str, ...]]]:
    """Slices and masks."""
    dims, partial = node
    used = {a for d in dims for a in d} | partial
    for axis in mesh.names:
        if axis in used or mesh.sizes[axis] == 1:
            continue
        yield (dims, partial | {axis}), "", (axis,)
        for d, have in enumerate(dims):
            yield (_with(dims, {d: (*have, axis)}), partial), "", (axis,)


def _moves(node: Node, mesh: Mesh) -> Iterator[tuple[Node, str, tuple[str, ...]]]:
    """Gathers, all-to-alls and reductions, over one or more axes at once."""
    dims, partial = node
    for d, have in enumerate(dims):
        for i in range(len(have)):
            left, suffix = have[:i], have[i:]
            yield (_with(dims, {d: left}), partial), "all_gather", suffix
            for e, onto in enumerate(dims):
                if e != d:
                    moved = _with(dims, {d: left, e: (*onto, *suffix)})
                    yield (moved, partial), "all_to_all", suffix
    for n in range(1, len(partial) + 1):
        for axes in itertools.permutations(sorted(partial), n):
            rest = partial - set(axes)
            if list(axes) == sorted(axes):
                yield (dims, rest), "all_reduce", axes
            for d, have in enumerate(dims):
                scattered = _with(dims, {d: (*have, *axes)})
                yield (scattered, rest), "reduce_scatter", axes


def _permutes(
    node: Node, alike: Sequence[Node], mesh: Mesh
) -> Iterator[tuple[Node, str, tuple[str, ...]]]:
    """Whole shards changing ranks, between specs of equal local shapes."""
    for other in alike:
        moved = {
            a
            for have, want in zip(node[0], other[0], strict=True)
            if have != want
            for a in (*have, *want)
        }
        if moved:
            yield other, "permute", mesh.ordered(tuple(moved))


def _with(dims: Dims, new: dict[int, tuple[str, ...]]) -> Dims:
    return tuple(new.get(d, axes) for d, axes in enumerate(dims))


@lru_cache(maxsize=64)
def _leaving(mesh: Mesh, ndim: int) -> list[list[tuple]]:
    """Hops by where they begin: (to, kind, axes, share)."""
    out: list[list[tuple]] = [[] for _ in _nodes(mesh, ndim)]
    for begin, *rest in _hops(mesh, ndim):
        out[begin].append(tuple(rest))
    return out


@lru_cache(maxsize=4096)
def _closure(mesh: Mesh, room: tuple[int, ...], nbytes: float) -> np.ndarray:
    """(N, N) seconds between all specs; inf where one does not divide the shape."""
    nodes = _nodes(mesh, len(room))
    fits = np.array(
        [
            all(n % mesh.count(axes) == 0 for n, axes in zip(room, dims, strict=True))
            for dims, _ in nodes
        ]
    )
    out = np.full((len(nodes), len(nodes)), np.inf)
    np.fill_diagonal(out, np.where(fits, 0.0, np.inf))
    for (kind, axes), (i, j, share) in _grouped(mesh, len(room)).items():
        cost: np.ndarray | float = 0.0
        if kind:
            cost = along(kind, mesh, axes).seconds(nbytes * share)
        cost = np.where(fits[i] & fits[j], cost, np.inf)
        np.minimum.at(out, (i, j), cost)
    for k in np.flatnonzero(fits):
        np.minimum(out, out[:, k, None] + out[None, k, :], out=out)
    out.setflags(write=False)
    return out


@lru_cache(maxsize=64)
def _grouped(
    mesh: Mesh, ndim: int
) -> dict[tuple[str, tuple[str, ...]], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Hops by what prices them: (from, to, share) of all of one kind and axes."""
    groups: dict[tuple[str, tuple[str, ...]], list[Hop]] = {}
    for hop in _hops(mesh, ndim):
        groups.setdefault((hop[2], hop[3]), []).append(hop)
    return {
        key: (
            np.array([hop[0] for hop in hops]),
            np.array([hop[1] for hop in hops]),
            np.array([hop[4] for hop in hops]),
        )
        for key, hops in groups.items()
    }
