"""Prices resharding between all specs of a value at once, and finds the steps.

In: a value's shape and specs. Out: ``matrix``, seconds from each to each, inf where a
value cannot be brought there; ``path``, the steps of one of them. All specs of tensors
of equally many dims are the nodes of a graph whose edges are single moves (slice, mask,
gather, all-to-all, permute, reductions), priced as ``steps`` prices them. A path may
use axes that neither end has: over unlike links a value that is whole along the fast
axis is sliced there, gathered over the slow one in parts, and gathered again.
``one_pair`` never does, but cuts axes in pieces where sizes make that necessary; of the
two ``route`` takes the cheaper, so no plan costs more than its matrices say. ``matrix``
asks it too where axes of unlike sizes of two dims change places, and of specs that are
no nodes. Pairs with unequal shards of some dims have a graph without the moves that
would cut those elsewhere (``is_possible``). Never: moves a value.

Source: Floyd and Warshall's all-pairs shortest paths, one row and column at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fxpar.errors import SpecError
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard import one_pair
from fxpar.sharding.reshard.steps import (
    ALONE,
    KINDS,
    Alone,
    Dims,
    Layout,
    Move,
    Pending,
    Step,
    Token,
    Tokens,
    as_step,
    axes_of_tokens,
    count,
    curve_of,
    front,
    is_possible,
    moves,
    seconds,
    written,
)
from fxpar.sharding.shard_sizes import is_even
from fxpar.sharding.spec import Spec

# The most axes of more than one rank: with more there are too many specs to list.
MOST = 3

# (from, to, share of the whole value that a rank holds before, move)
Hop = tuple[int, int, float, Move]
# (kind, axes, for each dim it names whether it comes after the front)
_Priced = tuple[str, Tokens, tuple[bool, ...]]
# Axes of a spec, shards of each dim, axes of each dim.
_SplitSpec = tuple[frozenset[str], tuple[int, ...], tuple[Axes, ...]]


def matrix(
    sources: Sequence[Spec],
    targets: Sequence[Spec],
    mesh: Mesh,
    shape: Sequence[int],
    itemsize: int,
    alone: Alone = ALONE,
) -> np.ndarray:
    """Return (len(sources), len(targets)) seconds. ``alone``: whether the first copy,
    and the last, is a kernel of its own."""
    begin = _ends(tuple(sources), mesh, tuple(shape))
    end = _ends(tuple(targets), mesh, tuple(shape))
    rows, columns = begin.places, end.places
    twice = _are_of_two_kinds(begin, end)
    at, to = np.nonzero(twice)  # reduced in between
    middle = begin.reduced[at]
    uneven = np.bitwise_or.outer(begin.uneven, end.uneven)
    out = np.empty((len(sources), len(targets)))
    for dims in np.unique(uneven).tolist():
        graph = _Graph.of(mesh, shape, itemsize, dims)
        seconds = graph.between(rows, columns, alone)
        every = graph.closure()
        seconds[at, to] = every[rows[at], middle] + every[middle, columns[to]]
        np.copyto(out, seconds, where=uneven == dims)
    outside = np.logical_or.outer(rows < 0, columns < 0)
    outside |= not mesh.is_shared_equally
    swaps = _swaps(begin, end) & ~outside & ~twice & (uneven == 0) & np.isfinite(out)
    for i, j in np.argwhere(outside | swaps).tolist():
        pair = sources[i], targets[j]
        try:
            other = one_pair.search(*pair, mesh, tuple(shape), itemsize)[1]
        except SpecError:  # the value cannot be brought there
            other = math.inf
        out[i, j] = other if outside[i, j] else min(out[i, j], other)
    for i, j in np.argwhere(out == 0.0).tolist() if all(alone) else ():
        out[i, j] = written(sources[i], targets[j], mesh, shape, itemsize)
    return out


@dataclass(frozen=True)
class _Ends:
    """Holds specs of a value, as the graph has them."""

    places: np.ndarray  # number of each spec among the nodes; -1: it is none
    reduced: np.ndarray  # number among the nodes of each spec without its partial axes
    uneven: np.ndarray  # of each spec a number: bit d, whether shards of dim d differ
    kinds: tuple[frozenset[str], ...]  # kinds of the reductions of each spec
    # (index, (axes, shards of each dim, axes of each dim)) of each spec that splits
    # several dims and has nothing partial.
    split_specs: tuple[tuple[int, _SplitSpec], ...]


@lru_cache(maxsize=1 << 12)
def _ends(specs: tuple[Spec, ...], mesh: Mesh, shape: tuple[int, ...]) -> _Ends:
    """Return the specs as the graph has them. Cached: values of one shape have the same
    specs again and again."""
    place = _places(mesh, len(shape))
    return _Ends(
        np.array([place.get(_node(s, mesh), -1) for s in specs], int),
        np.array([place.get(_node(s.without_partial(), mesh), -1) for s in specs], int),
        np.array(
            [
                sum(
                    (not is_even(size, mesh, axes)) << d
                    for d, (size, axes) in enumerate(zip(shape, s.dims, strict=True))
                )
                for s in specs
            ],
            int,
        ),
        tuple(s.kinds for s in specs),
        tuple(
            (i, (frozenset(spec.axes), shards, spec.dims))
            for i, spec in enumerate(specs)
            for shards in [tuple(map(mesh.count, spec.dims))]
            if not spec.partial and math.prod(shards) != max(shards, default=1)
        ),
    )


def _sums(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the least sum by way of any spec."""
    out = np.full((one.shape[0], other.shape[1]), np.inf)
    for k in range(one.shape[1]):
        np.minimum(out, one[:, k, None] + other[None, k, :], out=out)
    return out


def _swaps(begin: _Ends, end: _Ends) -> np.ndarray:
    """Return for which pairs axes of unlike sizes of two dims change places. That is
    cheapest in pieces of axes, which are no nodes of the graph."""
    out = np.zeros((len(begin.kinds), len(end.kinds)), bool)
    for i, (axes, shards, dims) in begin.split_specs:
        for j, (others, other_shards, other_dims) in end.split_specs:
            if axes == others and shards != other_shards:
                changed = sum(a != b for a, b in zip(dims, other_dims, strict=True))
                out[i, j] = changed == 2
    return out


def _are_of_two_kinds(begin: _Ends, end: _Ends) -> np.ndarray:
    """Return for which pairs the reductions of both ends are not of one kind."""
    if len(frozenset[str]().union(*begin.kinds, *end.kinds)) < 2:
        return np.zeros((len(begin.kinds), len(end.kinds)), bool)
    return np.array([[len(a | b) > 1 for b in end.kinds] for a in begin.kinds])


def path(
    source: Spec, target: Spec, mesh: Mesh, shape: Sequence[int], itemsize: int
) -> tuple[Step, ...] | None:
    """Return the cheapest steps between two specs, if they are nodes of the graph; None
    also on a mesh of more than ``MOST`` axes, and on one whose shares are not equal.

    Deterministic: among equals the fewest steps, then the first.
    """
    many = sum(size > 1 for size in mesh.sizes.values()) > MOST
    if many or not mesh.is_shared_equally:
        return None
    place, nodes = _places(mesh, len(shape)), _nodes(mesh, len(shape))
    node, end = place.get(_node(source, mesh)), place.get(_node(target, mesh))
    ops = {op for _, op in (*source.partial, *target.partial)}
    if node is None or end is None or len(ops) > 1:
        return None
    op = next(iter(ops), "sum")
    ends = _ends((source, target), mesh, tuple(shape))
    graph = _Graph.of(mesh, shape, itemsize, int(np.bitwise_or.reduce(ends.uneven)))
    cost, first = graph.closure(), graph.first
    inner = [d > first for d in range(len(shape))]
    if not np.isfinite(cost[node, end]):
        return None
    out, visited = list[Step](), set[int]()
    while node != end:
        best = None
        visited.add(node)  # links that cost nothing lead round in circles
        for _, to, share, move in _leaving(mesh, len(shape))[node]:
            if to in visited or not is_possible(move, graph.uneven, mesh):
                continue
            spent = seconds(move, mesh, graph.nbytes * share, inner)
            total = spent + cost[to, end] if np.isfinite(cost[node, to]) else math.inf
            rank = (total * (1 - 1e-9), not KINDS[move.kind].local)
            if best is None or rank < best[0]:
                best = (rank, to, move)
        if best is None:
            return None
        _, to, move = best
        before, after = (_spec(nodes[n], mesh, op) for n in (node, to))
        out.append(as_step(move, range(len(shape)), before, after, op, mesh))
        node = to
    if out:
        out[-1] = replace(out[-1], spec=target)  # axes of one rank were left out
    return tuple(out)


def _spec(node: Layout, mesh: Mesh, op: str = "sum") -> Spec:
    dims, pending = node
    partial = [
        (axis, op) for axis in axes_of_tokens([token for token, _ in pending], mesh)
    ]
    return Spec.of([axes_of_tokens(tokens, mesh) for tokens in dims], partial)


def _node(spec: Spec, mesh: Mesh) -> Layout | None:
    """Return the node of a spec in the graph, where all reductions are of one kind;
    None if it has none."""
    if len(spec.kinds) > 1:
        return None
    whole = _axes(mesh)
    if any(a not in whole and mesh.axis_size(a) > 1 for a in spec.axes):
        return None  # a part of an axis
    dims = tuple(tuple(whole[a] for a in axes if a in whole) for axes in spec.dims)
    return dims, _summed(whole[a] for a in spec.partial_axes if a in whole)


def _axes(mesh: Mesh) -> dict[str, Token]:
    """Return the axes of more than one rank, as tokens."""
    sizes = enumerate(mesh.axes)
    return {name: (i, 1, size) for i, (name, size) in sizes if size > 1}


def _summed(tokens: Iterable[Token]) -> Pending:
    return tuple((token, "sum") for token in sorted(tokens))


@lru_cache(maxsize=64)
def _nodes(mesh: Mesh, ndim: int) -> list[Layout]:
    """Return all specs of a tensor of ``ndim`` dims, in every order of axes."""
    nodes: dict[Layout, None] = {}
    for order in itertools.permutations(_axes(mesh).values()):
        for places in itertools.product([None, -1, *range(ndim)], repeat=len(order)):
            where = list(zip(order, places, strict=True))
            dims = tuple(tuple(a for a, p in where if p == d) for d in range(ndim))
            nodes[dims, _summed(a for a, p in where if p == -1)] = None
    return list(nodes)


@lru_cache(maxsize=64)
def _places(mesh: Mesh, ndim: int) -> dict[Layout | None, int]:
    return {node: i for i, node in enumerate(_nodes(mesh, ndim))}


class _Anywhere:
    """Guides a search that has all specs for goals: whole axes, every order."""

    def __init__(self, mesh: Mesh, ndim: int) -> None:
        self.axes = tuple(_axes(mesh).values())
        self.peers: dict[tuple, list[Dims]] = {}
        for dims, pending in _nodes(mesh, ndim):
            self.peers.setdefault((tuple(map(count, dims)), pending), []).append(dims)

    def reduced(self, op: str, pending: Pending) -> Iterator[Tokens]:
        """Yield every set of axes."""
        tokens = [token for token, _ in pending]
        for n in range(1, len(tokens) + 1):
            yield from itertools.combinations(tokens, n)

    def scattered(
        self, op: str, d: int, dims: Dims, pending: Pending
    ) -> Iterator[Tokens]:
        """Yield every set of axes in every order."""
        tokens = [token for token, _ in pending]
        for n in range(1, len(tokens) + 1):
            yield from itertools.permutations(tokens, n)

    def added(self, dims: Dims, pending: Pending) -> Iterator[tuple[Token, int | None]]:
        """Yield every unused axis, as partial and on every dim."""
        used = {token for tokens in dims for token in tokens}
        used |= {token for token, _ in pending}
        for token in self.axes:
            if token not in used:
                for d in (None, *range(len(dims))):
                    yield token, d

    def arranged(self, dims: Dims, pending: Pending) -> Iterator[Dims]:
        """Yield every other layout of equal local shape."""
        for other in self.peers[tuple(map(count, dims)), pending]:
            if other != dims:
                yield other

    def staying(self, d: int, have: Tokens) -> int:
        """Return 0: any axis may leave."""
        return 0

    def fits(self, d: int, dims: Dims, more: int) -> bool:
        """Return True: a ``_Graph`` leaves out layouts that do not fit a shape."""
        return True


@lru_cache(maxsize=64)
def _leaving(mesh: Mesh, ndim: int) -> list[list[Hop]]:
    """Return every move between specs of tensors of ``ndim`` dims, by the spec it
    begins at."""
    place, guide = _places(mesh, ndim), _Anywhere(mesh, ndim)
    out: list[list[Hop]] = []
    for dims, pending in _nodes(mesh, ndim):
        share = 1 / math.prod(map(count, dims))
        start = len(out)
        out.append(
            [
                (start, place[move.dims, move.pending], share, move)
                for move in moves(guide, dims, pending)
            ]
        )
    return out


@dataclass(frozen=True)
class _Graph:
    """Is the graph of all specs of a value, with the seconds of its moves."""

    mesh: Mesh
    room: tuple[int, ...]  # the most shards of each dim; any fewer must divide it
    nbytes: float  # of the whole value
    first: int  # the ``front`` of the shape
    uneven: tuple[bool, ...]  # whether shards of each dim are not equal

    @classmethod
    def of(cls, mesh: Mesh, shape: Sequence[int], itemsize: int, uneven: int) -> _Graph:
        """Return the graph where bit d of ``uneven`` says whether shards of dim d are
        not equal."""
        odd = tuple(bool(uneven >> d & 1) for d in range(len(shape)))
        room = tuple(
            mesh.size if is_odd else math.gcd(size, mesh.size)
            for size, is_odd in zip(shape, odd, strict=True)
        )
        return cls(mesh, room, float(math.prod(shape) * itemsize), front(shape), odd)

    def closure(self) -> np.ndarray:
        """Return (N, N) seconds between all specs; inf where one does not divide the
        shape."""
        return _closure(self)

    def between(
        self, rows: np.ndarray, columns: np.ndarray, alone: Alone
    ) -> np.ndarray:
        """Return ``closure`` for rows and columns; the copy before the first move, or
        the one after the last, may be part of another kernel."""
        every = self.closure()
        before, after = alone
        from_here = every[rows]
        if not before:
            from_here = _sums(self.hops((False, True))[rows], every)
        if after:
            return from_here[:, columns]
        last = self.hops((True, False))[:, columns]
        return np.minimum(
            _sums(from_here, last), self.hops(alone)[np.ix_(rows, columns)]
        )

    def hops(self, alone: Alone) -> np.ndarray:
        """Return (N, N) seconds between all specs by one move at most."""
        nodes = _nodes(self.mesh, len(self.room))
        fits = np.array(
            [
                all(
                    n % count(tokens) == 0
                    for n, tokens in zip(self.room, dims, strict=True)
                )
                for dims, _ in nodes
            ]
        )
        out = np.full((len(nodes), len(nodes)), np.inf)
        np.fill_diagonal(out, np.where(fits, 0.0, np.inf))
        groups = _grouped(self.mesh, self.first, self.uneven)
        for (kind, tokens, late), (i, j, share) in groups.items():
            cost: np.ndarray | float = 0.0
            if kind:
                curve = curve_of(kind, tokens, self.mesh, late, alone)
                cost = curve.seconds(self.nbytes * share)
            cost = np.where(fits[i] & fits[j], cost, np.inf)
            np.minimum.at(out, (i, j), cost)
        return out


@lru_cache(maxsize=4096)
def _closure(graph: _Graph) -> np.ndarray:
    out = graph.hops(ALONE)
    for k in np.flatnonzero(np.isfinite(out.diagonal())):
        np.minimum(out, out[:, k, None] + out[None, k, :], out=out)
    out.setflags(write=False)
    return out


@lru_cache(maxsize=64)
def _grouped(
    mesh: Mesh, first: int, uneven: tuple[bool, ...]
) -> dict[_Priced, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return moves by the key of their price: (from, to, share) of all of one kind,
    axes and copies. Local moves have no kind."""
    groups: dict[_Priced, list[Hop]] = {}
    for hop in itertools.chain.from_iterable(_leaving(mesh, len(uneven))):
        move = hop[-1]
        if not is_possible(move, uneven, mesh):
            continue
        key: _Priced = "", (), ()
        if not KINDS[move.kind].local:
            key = move.kind, move.tokens, tuple(d > first for d in move.at)
        groups.setdefault(key, []).append(hop)
    return {
        key: (
            np.array([hop[0] for hop in hops]),
            np.array([hop[1] for hop in hops]),
            np.array([hop[2] for hop in hops]),
        )
        for key, hops in groups.items()
    }
