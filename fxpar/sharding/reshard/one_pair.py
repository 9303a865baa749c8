"""Changes the spec of one value: finds the cheapest steps from one spec to another.

In: two specs, a mesh, a shape. Out: steps and seconds. A route is made of the steps of
Shardy's reshard-to-collectives (slice, permute, all-to-alls, all-gather) and of GSPMD's
reductions; a cheapest-first search over those that may lead to the target orders and
places each, so that nothing is replicated that need not be, and gathering stays an
alternative where it is cheaper.

An axis moves in pieces (as parts) where sizes make that necessary, e.g.
``[x, y] -> [y, x]`` for x=4, y=2. Never: uses axes that neither spec has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fxpar.errors import SpecError
from fxpar.sharding import shard_sizes
from fxpar.sharding.cost.collectives import bound
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.steps import (
    Dims,
    Layout,
    Move,
    Pending,
    Step,
    Token,
    Tokens,
    agree,
    arrange,
    as_step,
    axes_of_tokens,
    count,
    cut,
    front,
    is_possible,
    joined,
    missing,
    moves,
    seconds,
)
from fxpar.sharding.spec import Spec

# With more axes out of place than this, distance to the goal guides the search: tens of
# milliseconds rather than seconds, for routes a few percent dearer on average.
_EXACT = 6

Moves = tuple[Move, ...]


@lru_cache(maxsize=1 << 18)
def search(
    source: Spec, target: Spec, mesh: Mesh, shape: tuple[int, ...], itemsize: int
) -> tuple[tuple[Step, ...], float]:
    """Return the cheapest steps, and their seconds.

    Raises SpecError if a spec does not fit mesh and shape, or a partial axis is to
    change its reduction.
    """
    source.check(mesh, shape)
    target.check(mesh, shape)
    nbytes = float(math.prod(shape) * itemsize)
    if not mesh.is_shared_equally:
        nbytes *= _padding(source, target, mesh, shape)
    uneven = tuple(
        not all(shard_sizes.is_even(size, mesh, axes) for axes in pair)
        for size, *pair in zip(shape, source.dims, target.dims, strict=True)
    )
    room = tuple(
        mesh.size if odd else math.gcd(size, mesh.size)
        for size, odd in zip(shape, uneven, strict=True)
    )
    if not mesh.is_shared_equally:
        uneven = (True,) * len(shape)  # on the way, if not at its ends
    problem, dims = _pose(source, target, mesh, room, uneven, front(shape))
    others = [axes for d, axes in enumerate(source.dims) if d not in dims]
    share = nbytes / math.prod(map(mesh.count, others))
    route = _solve(problem, share)
    return _steps(route, dims, source, target, mesh), _cost(route, problem, share)


def _padding(source: Spec, target: Spec, mesh: Mesh, shape: tuple[int, ...]) -> float:
    """Return how many times as large as a mean shard those are that collectives
    carry."""
    out = 1.0
    for rows, *pair in zip(shape, source.dims, target.dims, strict=True):
        axes = max(pair, key=len)
        if rows and shard_sizes.has_shares(mesh, axes):
            largest = shard_sizes.largest(rows, mesh, axes)
            out *= largest * mesh.count(axes) / rows
    return out


def _pose(
    source: Spec,
    target: Spec,
    mesh: Mesh,
    room: tuple[int, ...],
    uneven: tuple[bool, ...],
    first: int,
) -> tuple[_Problem, list[int]]:
    """Return the problem to search, and the dims it is about.

    ``room``: the most shards each dim can be cut into (the part of its size that a mesh
    can divide). ``uneven``: the dims whose shards are not equal. ``first``: the
    ``front`` of the shape.
    """
    before, after = dict(source.partial), dict(target.partial)
    for spec in (source, target):
        if len(spec.kinds) > 1:
            raise SpecError(
                f"{spec} does not say which reduction comes first",
                fix="reduce one of them before the other arises",
            )
    for axis in before.keys() & after.keys():
        if before[axis] != after[axis]:
            raise SpecError(
                f"axis {axis!r} is partial({before[axis]}) in {source}, but "
                f"partial({after[axis]}) in {target}",
                fix="reduce it first: reshard to a spec without that partial axis",
            )
    position = {name: i for i, name in enumerate(mesh.names)}

    def tokens(axes: Sequence[str]) -> Tokens:
        axis_tokens = ((position[a], 1, mesh.sizes[a]) for a in axes)
        return tuple(token for token in axis_tokens if token[2] > 1)

    start, goal = tuple(map(tokens, source.dims)), tuple(map(tokens, target.dims))
    remaining = [axis for axis in before if axis in after]
    pending = tuple(
        (token, op)
        for a, op in source.partial
        if a not in after
        for token in tokens([a])
    )
    busy = frozenset(position[axis] for axis in remaining)
    dims = _concerned(start, goal, room, pending, mesh)
    copies = any(link.copy_launch or link.copy_byte for link in mesh.links)
    # Dims in a fixed order and without those that stay: equal problems are solved once.
    problem = _Problem(
        mesh,
        tuple(start[d] for d in dims),
        tuple(goal[d] for d in dims),
        tuple(room[d] for d in dims),
        pending,
        busy,
        tuple(d > first and copies for d in dims),
        tuple(uneven[d] for d in dims),
    )
    return problem, dims


def _concerned(
    start: Dims, goal: Dims, room: Sequence[int], pending: Pending, mesh: Mesh
) -> list[int]:
    """Return the dims a search has to look at: those that change. A reduction over
    unlike links gets one more, so that it can scatter on it, reduce, and gather."""
    dims = [d for d in range(len(start)) if start[d] != goal[d]]
    rest = [d for d in range(len(start)) if start[d] == goal[d]]
    links = {mesh.links[token[0]] for token, _ in pending}
    if rest and len(links) > 1:
        dims.append(max(rest, key=lambda d: room[d] // count(start[d])))
    return sorted(dims, key=lambda d: (start[d], goal[d], room[d]))


@dataclass(frozen=True)
class _Problem:
    """Is the problem to reach one layout from another, with nothing pending."""

    mesh: Mesh
    start: Dims  # tokens of each dim that the problem is about, at first
    goal: Dims  # tokens of the same dims at last
    room: tuple[int, ...]  # the most shards of each dim; any fewer must divide it
    pending: Pending  # the partial axes at first
    busy: frozenset[int]  # positions of axes that stay partial: values differ
    # Whether each dim comes after the front of the shape and copies of it cost time.
    inner: tuple[bool, ...]
    uneven: tuple[bool, ...]  # whether shards of each dim are not equal

    @cached_property
    def bandwidth(self) -> float:
        return bound(self.mesh)[1]

    def misplaced(self, dims: Dims, pending: Pending) -> int:
        """Return how many axes are not where they should be."""
        out = len(pending)
        for have, want in zip(dims, self.goal, strict=True):
            out += len(have) + len(want) - 2 * agree(have, want)
        return out

    def reduced(self, op: str, pending: Pending) -> Iterator[Tokens]:
        """Yield all axes, those that no dim needs, and each by itself."""
        goal_tokens = {token for want in self.goal for token in want}
        every = tuple(token for token, o in pending if o == op)
        idle = tuple(token for token in every if token not in goal_tokens)
        yield from dict.fromkeys(
            tokens for tokens in (every, idle, *((t,) for t in every)) if tokens
        )

    def scattered(
        self, op: str, d: int, dims: Dims, pending: Pending
    ) -> Iterator[Tokens]:
        """Yield each axis by itself, runs that the dim needs next, and all axes."""
        every = tuple(token for token, o in pending if o == op)
        runs: list[Tokens] = [(token,) for token in every]
        rest = self.goal[d][agree(dims[d], self.goal[d]) :]
        for n in range(2, len(rest) + 1):
            if set(rest[:n]) <= set(every):
                runs.append(rest[:n])
        yield from dict.fromkeys((*runs, every))

    def added(self, dims: Dims, pending: Pending) -> Iterator[tuple[Token, int]]:
        """Yield tokens that the goal has and the layout has not, on any dim: each
        whole, and as much of it as multiplies the dim's shards to the goal's, the rest
        going elsewhere."""
        partial = {token[0] for token, _ in pending}
        for token in missing(dims, self.goal):
            if token[0] in partial:
                continue
            for d, have in enumerate(dims):
                more = math.gcd(count(self.goal[d]) // count(have), token[2])
                for size in dict.fromkeys((token[2], more)):
                    if size > 1:
                        yield cut(token, size)[0], d

    def arranged(self, dims: Dims, pending: Pending) -> Iterator[Dims]:
        """Yield the layout nearest to the goal."""
        partial = {token[0] for token, _ in pending}
        nearest = arrange(dims, self.goal, self.busy | partial)
        if nearest is not None and nearest != dims:
            yield nearest

    def staying(self, d: int, have: Tokens) -> int:
        """Return how many axes the goal has there too."""
        return agree(have, self.goal[d])

    def fits(self, d: int, dims: Dims, more: int) -> bool:
        """Return whether mesh and size allow ``more`` times as many shards."""
        return self.room[d] % (count(dims[d]) * more) == 0


@lru_cache(maxsize=1 << 16)
def _solve(problem: _Problem, nbytes: float) -> Moves:
    """Return the cheapest moves for a value of ``nbytes``: A* search, the bound being
    the bytes that still have to be gathered. Among equals the fewest moves, then the
    first."""
    start, goal = (problem.start, problem.pending), (problem.goal, ())
    whole = math.prod(map(count, problem.goal))
    latency = bound(problem.mesh)[0]
    nudge = 1e-9 * (nbytes / problem.bandwidth + latency)
    haste = 0.0
    if problem.misplaced(*start) > _EXACT:
        haste = 0.25 * (latency + nbytes / problem.mesh.size / problem.bandwidth)

    def local(dims: Dims) -> float:
        return nbytes / math.prod(map(count, dims))

    def ahead(dims: Dims, pending: Pending) -> float:
        out = max(0.0, nbytes / whole - local(dims)) / problem.bandwidth
        if pending or any(
            agree(h, w) < len(h) for h, w in zip(dims, problem.goal, strict=True)
        ):
            out += latency
        return out + haste * problem.misplaced(dims, pending)

    best: dict[Layout, float] = {start: 0.0}
    came: dict[Layout, tuple[Layout, Move]] = {}
    order = 0
    queue: list[tuple[float, int, int, float, Layout]]
    queue = [(ahead(*start), 0, order, 0.0, start)]
    while (state := queue[0][-1]) != goal:
        spent = heapq.heappop(queue)[-2]
        if spent > best[state]:
            continue
        for move in moves(problem, *state):
            if not is_possible(move, problem.uneven, problem.mesh):
                continue
            next_state = (move.dims, move.pending)
            took = seconds(move, problem.mesh, local(state[0]), problem.inner)
            total = spent + nudge + took
            if total < best.get(next_state, math.inf):
                best[next_state], came[next_state] = total, (state, move)
                order += 1
                rank = problem.misplaced(*next_state)
                heapq.heappush(
                    queue, (total + ahead(*next_state), rank, order, total, next_state)
                )
    path: list[Move] = []
    while state != start:
        state, move = came[state]
        path.append(move)
    return tuple(reversed(path))


def _cost(route: Moves, problem: _Problem, nbytes: float) -> float:
    """Return the seconds of a route."""
    dims, total = problem.start, 0.0
    for move in route:
        share = nbytes / math.prod(map(count, dims))
        total += seconds(move, problem.mesh, share, problem.inner)
        dims = move.dims
    return total


def _merged(route: Moves) -> Iterator[Move]:
    """Yield the moves, neighbouring slices of one dim as one move."""
    last: Move | None = None
    for move in route:
        if last and (move.kind, last.kind, move.at) == ("slice", "slice", last.at):
            move = replace(move, tokens=joined(last.tokens + move.tokens))
        elif last:
            yield last
        last = move
    if last:
        yield last


def _steps(
    route: Moves, dims: Sequence[int], source: Spec, target: Spec, mesh: Mesh
) -> tuple[Step, ...]:
    """Return moves as steps, with names of axes and numbers of dims, masks at the
    end."""
    remaining = {axis: op for axis, op in source.partial if axis in target.partial_axes}
    out: list[Step] = []
    spec = source
    for move in _merged(route):
        entries = list(spec.dims)
        for d, tokens in zip(dims, move.dims, strict=True):
            entries[d] = axes_of_tokens(tokens, mesh)
        partial = remaining | {mesh.names[token[0]]: op for token, op in move.pending}
        before, spec = spec, Spec(*entries, partial=partial)
        out.append(as_step(move, dims, before, spec, move.op, mesh))
    masks: dict[str, list[str]] = {}
    for axis, op in target.partial:
        if axis not in remaining and mesh.sizes[axis] > 1:
            masks.setdefault(op, []).append(axis)
    for op, axes in masks.items():
        partial = dict(spec.partial) | dict.fromkeys(axes, op)
        spec = Spec(*spec.dims, partial=partial)
        out.append(Step("mask", spec, mesh.ordered(axes), op=op))
    if out:
        # Axes of size 1 were left out on the way.
        out[-1] = replace(out[-1], spec=target)
    return tuple(out)
