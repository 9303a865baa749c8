"""Defines the steps a reshard is made of: one table of their kinds, ``Step``, and the
``Move``, a step while a search looks for a route.

In: specs before and after, a mesh, bytes. Out: ``KINDS`` says of each kind what it does
to a spec and to the local shape, how much it sends and copies, and whether it
communicates at all: slice and mask are local, every other step is one collective over
the ranks that differ on its axes, priced as in ``cost.collectives``, with the copies
around it as in ``mesh.Link``: kernels that read and write memory. A slice or mask is
such a kernel where its reshard sends nothing; before and after collectives it is
assumed to be part of others. What torch makes of a kind is in ``passes.lower``, under
the same names. Axes may be parts (see ``mesh``). ``str(step)`` is what golden tests and
explanations show.

A layout has one tuple of tokens per dim, major to minor. A token ``(position, above,
size)`` is the part ``(above)size`` of the mesh axis at ``position``; a whole axis is
``(position, 1, n)``. Adjacent parts of an axis are always joined. ``moves`` yields
every single step from a layout that a ``Guide`` allows: all that are possible
(``all_pairs``), or those that may lead to one goal (``one_pair``). Each has the layout
after it, which follows from its row of ``KINDS``; ``as_step`` names its axes and dims.
Never: chooses a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from fxpar.sharding.cost.collectives import Curve, along
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class StepKind:
    """Says what steps of one kind do. The dims of a step are those it names, in
    order."""

    text: str  # how a step is written, with its axes, dims (d), reduction and specs
    # (k, bytes a rank holds before) -> bytes it sends, of k ranks; None: no collective.
    sent: Callable[[int, float], float] | None = None
    gathered: int | None = None  # index of the step's dim that its axes leave
    split: int | None = None  # index of the dim they go to, at its minor end
    reduces: bool = False  # whether the axes are partial before
    masks: bool = False  # whether they are partial after

    @property
    def local(self) -> bool:
        """Return whether it needs no communication."""
        return self.sent is None

    def growth(self, k: int) -> float:
        """Return local bytes after, as a multiple of those before."""
        if (self.gathered is None) == (self.split is None):
            return 1.0
        return 1 / k if self.gathered is None else float(k)

    def copied(self, k: int, moved: Sequence[bool]) -> tuple[float, float]:
        """Return the bytes copied before its collective and after it, as multiples of
        those before.

        A collective cuts and joins blocks that are stored one after the other: a dim
        that it splits is brought into that form, one that it gathers out of it.
        ``moved``: for each dim it names whether blocks of it are stored otherwise.
        """
        copies_before = self.split is not None and moved[self.split]
        copies_after = self.gathered is not None and moved[self.gathered]
        return float(copies_before), self.growth(k) * copies_after

    def shape(self, before: Sequence[int], dims: Sequence[int], k: int) -> list[int]:
        """Return the local shape after a step that names ``dims``, over k ranks."""
        shape = list(before)
        if self.gathered is not None:
            shape[dims[self.gathered]] *= k
        if self.split is not None:
            shape[dims[self.split]] //= k
        return shape


def _part(k: int, nbytes: float) -> float:
    return (k - 1) * nbytes / k


# Whether a copy before a collective, and one after it, is a kernel of its own, as it
# is next to a contraction; with light ops Inductor makes it one kernel.
Alone = tuple[bool, bool]
ALONE: Alone = (True, True)

# Reductions whose identity is written where a rank is not the first; of equal values
# the largest, smallest and mean are that value.
MASKED = ("sum", "product")

KINDS: dict[str, StepKind] = {
    # Each rank keeps its part of a dim.
    "slice": StepKind("slice {axes} on {d[0]}", split=0),
    # Whole -> partial: the first rank along the axes keeps the value, the others hold
    # the identity of the reduction (for avg, max and min the value itself).
    "mask": StepKind("mask {axes} ({op})", masks=True),
    "all_reduce": StepKind(
        "all_reduce {axes} ({op})",
        lambda k, nbytes: 2 * (k - 1) * nbytes / k,
        reduces=True,
    ),
    "reduce_scatter": StepKind(
        "reduce_scatter {axes} on {d[0]} ({op})", _part, split=0, reduces=True
    ),
    # The axes, a minor suffix of the first dim, go to the second.
    "all_to_all": StepKind(
        "all_to_all {axes}: {d[0]}->{d[1]}", _part, gathered=0, split=1
    ),
    # The axes, a minor suffix of the dim, are gathered.
    "all_gather": StepKind(
        "all_gather {axes} on {d[0]}", lambda k, nbytes: (k - 1) * nbytes, gathered=0
    ),
    # Any change that keeps the local shape: whole shards change ranks.
    "permute": StepKind(
        "permute {before} -> {after}", lambda k, nbytes: nbytes if k > 1 else 0
    ),
}


@dataclass(frozen=True)
class Step:
    """Is one step of a reshard of one value."""

    kind: str  # a key of ``KINDS``
    spec: Spec
    axes: tuple[str, ...]  # in mesh order for reductions and permutes
    dims: tuple[int, ...] = ()  # the dims it names, as its kind counts them
    op: str = ""  # the reduction of a partial value
    before: Spec | None = None  # the spec before a permute

    @property
    def local(self) -> bool:
        """Return whether it needs no communication."""
        return KINDS[self.kind].local

    def growth(self, mesh: Mesh) -> float:
        """Return local bytes after, as a multiple of those before."""
        return KINDS[self.kind].growth(mesh.count(self.axes))

    @property
    def names(self) -> str:
        return "+".join(self.axes)

    def __str__(self) -> str:
        before = self.before and self.before.without_partial()
        after = self.spec.without_partial()
        return KINDS[self.kind].text.format(
            axes=self.names, d=self.dims, op=self.op, before=before, after=after
        )


def permutation(step: Step, mesh: Mesh) -> tuple[int, ...]:
    """Return for each member of a permute's group, in mesh order, the member whose
    shard it needs.

    The same for every group, and a permutation: a shard that several members hold goes
    from each of them to one. A member that already holds the shard it needs keeps it.
    """
    assert step.before is not None, step
    group = mesh.group(0, step.axes)
    holders: dict[tuple[int, ...], list[int]] = {}
    needs: dict[tuple[int, ...], list[int]] = {}
    for i, rank in enumerate(group):
        holders.setdefault(_shard(step.before, mesh, rank), []).append(i)
        needs.setdefault(_shard(step.spec, mesh, rank), []).append(i)
    out = list(range(len(group)))
    for shard, members in needs.items():
        stay = set(members) & set(holders[shard])
        moving = iter(i for i in holders[shard] if i not in stay)
        for i in members:
            if i not in stay:
                out[i] = next(moving)
    return tuple(out)


def _shard(spec: Spec, mesh: Mesh, rank: int) -> tuple[int, ...]:
    return tuple(mesh.index(rank, axes) for axes in spec.dims)


def front(shape: Sequence[int]) -> int:
    """Return the dim whose blocks are stored one after the other in memory: the first
    that has more than one element."""
    return next((d for d, size in enumerate(shape) if size > 1), 0)


@lru_cache(maxsize=1 << 14)
def curve(
    kind: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    late: tuple[bool, ...],
    alone: Alone = ALONE,
) -> Curve:
    """Return seconds over bytes of a collective with the copies around it. ``late``:
    for each dim the step names whether it comes after the ``front`` of the shape."""
    collective, step = along(kind, mesh, axes), KINDS[kind]
    unordered = bool(late) and mesh.ordered(axes) != axes
    copied = step.copied(mesh.count(axes), [unordered or x for x in late])
    copies = [times for times, x in zip(copied, alone, strict=True) if times and x]
    if not copies:
        return collective
    return replace(collective, copies=tuple(copies), link=_copying(mesh, axes))


def _copying(mesh: Mesh, axes: Sequence[str]) -> Link:
    """Return the link along some axes with the slowest copies."""
    links = (mesh.link(axis) for axis in axes)
    return max(links, key=lambda link: (link.copy_byte, link.copy_launch))


def written(
    source: Spec, target: Spec, mesh: Mesh, shape: Sequence[int], itemsize: int
) -> float:
    """Return the seconds of the kernel that a reshard without collectives is: slices of
    dims after the ``front`` are copied, masked values are written."""
    first, before = front(shape), set(source.axes)
    axes = [
        axis
        for d, dim in enumerate(target.dims)
        for axis in dim
        if d > first and axis not in before
    ]
    axes += [axis for axis, op in target.partial if axis not in before and op in MASKED]
    share = math.prod(shape) * itemsize / mesh.count(target.sharded_axes)
    return _kernel(mesh, axes, share)


def _kernel(mesh: Mesh, axes: Sequence[str], nbytes: float) -> float:
    """Return the seconds of a kernel that copies ``nbytes`` on account of some axes."""
    axes = [axis for axis in axes if mesh.axis_size(axis) > 1]
    if not axes:
        return 0.0
    return _copying(mesh, axes).copy_seconds(nbytes)


def cost(step: Step, mesh: Mesh, nbytes: float, first: int = 0) -> float:
    """Return the seconds that one step takes from ``nbytes`` on each rank, 0 if it is
    local; ``first``: the ``front`` of the shape."""
    if step.local:
        return 0.0
    late = tuple(d > first for d in step.dims)
    return curve(step.kind, mesh, step.axes, late).seconds(nbytes)


def duration(steps: Sequence[Step], mesh: Mesh, nbytes: float, first: int = 0) -> float:
    """Return the seconds of steps one after the other, from ``nbytes`` on each rank;
    ``first`` as for ``cost``."""
    total, copied = 0.0, list[str]()
    for step in steps:
        total += cost(step, mesh, nbytes, first)
        nbytes *= step.growth(mesh)
        if step.op in MASKED or any(d > first for d in step.dims):
            copied += step.axes
    return total or _kernel(mesh, copied, nbytes)


Token = tuple[int, int, int]
Tokens = tuple[Token, ...]
Dims = tuple[Tokens, ...]


def count(tokens: Tokens) -> int:
    """Return the number of shards that the tokens make."""
    return math.prod([size for *_, size in tokens])


def joined(tokens: Sequence[Token]) -> Tokens:
    """Return the same tokens with adjacent parts of an axis made one."""
    out: list[Token] = []
    for token in tokens:
        if out and out[-1][0] == token[0] and out[-1][1] * out[-1][2] == token[1]:
            token = (token[0], out[-1][1], out.pop()[2] * token[2])
        out.append(token)
    return tuple(out)


def cut(token: Token, size: int) -> tuple[Token, Token | None]:
    """Return the major part of that size, and the remaining part (None if there is
    none)."""
    axis, major, n = token
    rest = (axis, major * size, n // size) if n > size else None
    return (axis, major, size), rest


def agree(have: Tokens, want: Tokens) -> int:
    """Return how many tokens of ``have`` are where ``want`` has them, from the major
    end.

    Parts of an axis agree if they are its major parts in order.
    """
    queue, equal = list(reversed(want)), 0
    for token in have:
        if not queue:
            break
        if queue[-1] == token:
            queue.pop()
        else:
            goal = queue.pop()
            if goal[:2] != token[:2] or goal[2] % token[2]:
                break
            remainder = cut(goal, token[2])[1]
            if remainder:
                queue.append(remainder)
        equal += 1
    return equal


def _subtract(token: Token, covered: Sequence[Token]) -> list[Token]:
    """Return the parts of a token that are not among ``covered``, major first; without
    those that another way of cutting the axis makes inexpressible."""
    axis, at, n = token
    end, out = at * n, []
    for _, major, size in sorted(u for u in covered if u[0] == axis):
        if major * size <= at or major >= end:
            continue
        if major > at and major % at == 0:
            out.append((axis, at, major // at))
        at = major * size
    if at < end and end % at == 0:
        out.append((axis, at, end // at))
    return out


def missing(dims: Dims, goal: Dims) -> list[Token]:
    """Return tokens of ``goal`` that ``dims`` does not have on any dim."""
    have = [token for dim in dims for token in dim]
    return [part for dim in goal for token in dim for part in _subtract(token, have)]


def involved(before: Dims, after: Dims) -> Tokens:
    """Return the axes on which ranks have to communicate to go from one layout to the
    other.

    Tokens that head or end a dim in both stay out. An axis that is cut differently in
    the two counts as a whole.
    """
    parts: dict[int, set[Token]] = {}
    for source, target in zip(before, after, strict=True):
        while source and target and source[0] == target[0]:
            source, target = source[1:], target[1:]
        while source and target and source[-1] == target[-1]:
            source, target = source[:-1], target[:-1]
        for token in source + target:
            parts.setdefault(token[0], set()).add(token)
    out: list[Token] = []
    for axis in sorted(parts):
        tokens = sorted(parts[axis])
        for this, after_it in zip(tokens, tokens[1:], strict=False):
            if this[1] * this[2] > after_it[1]:
                first = tokens[0][1]
                end = max(major * size for _, major, size in tokens)
                tokens = [(axis, first, end // first)]
                break
        out += tokens
    return joined(out)


def arrange(dims: Dims, goal: Dims, barred: Set[int]) -> Dims | None:
    """Return the layout nearest to ``goal`` with as many shards on each dim as
    ``dims``.

    Nearest: each dim begins as the goal does. The other axes of a dim are those that
    other dims need, the one to leave first at the minor end, and above them axes that
    will be gathered. Axes are cut where sizes require. ``barred`` axes stay out. None
    if the sizes do not allow it.
    """
    capacity = [count(tokens) for tokens in dims]
    placed: list[list[Token]] = [[] for _ in dims]
    unplaced: list[list[Token]] = []
    for d, tokens in enumerate(goal):
        queue = list(tokens)
        while queue and queue[0][0] not in barred:
            size = math.gcd(queue[0][2], capacity[d])
            if size == 1:
                break
            head, tail = cut(queue.pop(0), size)
            placed[d].append(head)
            capacity[d] //= size
            if tail:
                queue.insert(0, tail)
                break
        unplaced.append(queue)
    leaving = _lodge(dims, unplaced, capacity, barred)
    used = [t for tokens in placed for t in tokens]
    used += [t for blocks in leaving for block in blocks for t in block]
    free = [[p for t in tokens for p in _subtract(t, used)] for tokens in dims]
    # Fill with tokens that the dim already has, then with those that others can spare.
    for d, spare_tokens in enumerate(free):
        placed[d] += _fill(spare_tokens, d, capacity)
    spare = [part for spare_tokens in free for part in spare_tokens]
    for d in range(len(dims)):
        placed[d] += _fill(spare, d, capacity)
    out = tuple(
        joined([*head, *(t for block in blocks for t in block)])
        for head, blocks in zip(placed, leaving, strict=True)
    )
    return out if max(capacity, default=1) == 1 and _is_consistent(out) else None


def _lodge(
    dims: Dims, unplaced: list[list[Token]], capacity: list[int], barred: Set[int]
) -> list[list[list[Token]]]:
    """Put tokens each dim still needs on dims with capacity to spare, from where they
    can follow by all-to-all. Return blocks per dim, the first to leave last."""
    blocks: list[list[list[Token]]] = [[] for _ in dims]
    for e, queue in enumerate(unplaced):
        at = None
        while queue and queue[0][0] not in barred:
            token = queue.pop(0)
            fits = [math.gcd(token[2], c) * (d != e) for d, c in enumerate(capacity)]
            if max(fits) <= 1:
                break
            if at is None or fits[at] <= 1:
                # The largest piece; among equals where the axis is already.
                at = max(
                    range(len(dims)), key=lambda d: (fits[d], token in dims[d], -d)
                )
                blocks[at].insert(0, [])
            head, tail = cut(token, fits[at])
            blocks[at][0].append(head)
            capacity[at] //= fits[at]
            if tail:
                queue.insert(0, tail)
    return blocks


def _fill(pool: list[Token], d: int, capacity: list[int]) -> list[Token]:
    """Take tokens off the pool, whole or cut, until dim ``d`` has enough; return
    them."""
    out, remaining = [], []
    for token in pool:
        size = math.gcd(token[2], capacity[d])
        if size == 1:
            remaining.append(token)
            continue
        head, tail = cut(token, size)
        out.append(head)
        capacity[d] //= size
        if tail:
            remaining.append(tail)
    pool[:] = remaining
    return out


def _is_consistent(dims: Dims) -> bool:
    """Return whether all parts of each axis come from one way of cutting it."""
    end: dict[int, int] = {}
    for axis, major, size in sorted(token for tokens in dims for token in tokens):
        if major % end.get(axis, 1):
            return False
        end[axis] = major * size
    return True


# Partial axes and their reductions.
Pending = tuple[tuple[Token, str], ...]
Layout = tuple[Dims, Pending]


@dataclass(frozen=True)
class Move:
    """Is a step while searching."""

    kind: str  # a key of ``KINDS``
    tokens: Tokens  # the axes it is over, or parts of them
    at: tuple[int, ...]  # the dims it names, as its kind counts them
    op: str  # the reduction of a partial value
    dims: Dims  # the tokens of each dim after the move
    pending: Pending


class Guide(Protocol):
    """Says which moves a search tries from a layout."""

    def reduced(self, op: str, pending: Pending) -> Iterable[Tokens]:
        """Return sets of partial axes of one reduction, to be reduced at once."""

    def scattered(
        self, op: str, d: int, dims: Dims, pending: Pending
    ) -> Iterable[Tokens]:
        """Return sets as ``reduced``, in the order in which they are to split dim
        ``d``."""

    def added(self, dims: Dims, pending: Pending) -> Iterable[tuple[Token, int | None]]:
        """Return unused axes, each with the dim it may split; None makes it partial."""

    def arranged(self, dims: Dims, pending: Pending) -> Iterable[Dims]:
        """Return other layouts with as many shards on each dim."""

    def staying(self, d: int, have: Tokens) -> int:
        """Return how many axes at the major end of a dim stay."""

    def fits(self, d: int, dims: Dims, more: int) -> bool:
        """Return whether a dim can be cut into ``more`` times as many shards."""


def moves(guide: Guide, dims: Dims, pending: Pending) -> Iterator[Move]:
    """Yield every move from a layout that a guide allows: reductions, slices and masks,
    permutes, all-to-alls and gathers."""
    for op in dict.fromkeys(op for _, op in pending):
        for tokens in guide.reduced(op, pending):
            yield _move("all_reduce", tokens, dims, pending, (), op)
        for d in range(len(dims)):
            for tokens in guide.scattered(op, d, dims, pending):
                if guide.fits(d, dims, count(tokens)):
                    yield _move("reduce_scatter", tokens, dims, pending, (d,), op)
    for token, onto in guide.added(dims, pending):
        if onto is None:
            yield _move("mask", (token,), dims, pending, (), "sum")
        elif guide.fits(onto, dims, token[2]):
            yield _move("slice", (token,), dims, pending, (onto,))
    for other in guide.arranged(dims, pending):
        yield Move("permute", involved(dims, other), (), "", other, pending)
    for d, have in enumerate(dims):
        for i in range(guide.staying(d, have), len(have)):
            suffix = have[i:]
            for e in range(len(dims)):
                if e != d and guide.fits(e, dims, count(suffix)):
                    yield _move("all_to_all", suffix, dims, pending, (d, e))
            yield _move("all_gather", suffix, dims, pending, (d,))


def is_possible(move: Move, uneven: Sequence[bool], mesh: Mesh) -> bool:
    """Return whether a move is possible where shards of ``uneven`` dims are not equal:
    it moves whole axes, one after another; a part of an axis, or two axes at once,
    would cut them elsewhere."""
    if not any(uneven):
        return True
    sizes = mesh.axes
    if move.kind == "permute" or any(n != sizes[i][1] for i, _, n in move.tokens):
        return False
    one_by_one = KINDS[move.kind].local or len(move.tokens) == 1
    return one_by_one or not any(uneven[d] for d in move.at)


def _move(
    kind: str,
    tokens: Tokens,
    dims: Dims,
    pending: Pending,
    at: tuple[int, ...] = (),
    op: str = "",
) -> Move:
    """Return a move with the layout after it."""
    row, after = KINDS[kind], list(dims)
    if row.gathered is not None:
        d = at[row.gathered]
        after[d] = after[d][: -len(tokens)]
    if row.split is not None:
        d = at[row.split]
        after[d] = joined((*after[d], *tokens))
    if row.reduces:
        pending = tuple(p for p in pending if p[0] not in tokens)
    if row.masks:
        pending = tuple(sorted((*pending, *((token, op) for token in tokens))))
    return Move(kind, tokens, at, op, tuple(after), pending)


def axes_of_tokens(tokens: Sequence[Token], mesh: Mesh) -> tuple[str, ...]:
    """Return the names of the axes, and parts of axes, that tokens are."""
    return tuple(mesh.sub_axis(mesh.names[i], major, n) for i, major, n in tokens)


def as_step(
    move: Move, dims: Sequence[int], before: Spec, after: Spec, op: str, mesh: Mesh
) -> Step:
    """Return the step that a move is, between two specs. ``dims``: the tensor's dim of
    each of the layout's. ``op``: its reduction."""
    row, axes = KINDS[move.kind], axes_of_tokens(move.tokens, mesh)
    return Step(
        move.kind,
        after,
        axes if move.at else mesh.ordered(axes),
        tuple(dims[d] for d in move.at),
        op if row.reduces or row.masks else "",
        before if move.kind == "permute" else None,
    )


def seconds(move: Move, mesh: Mesh, nbytes: float, inner: Sequence[bool]) -> float:
    """Return the seconds of a move from ``nbytes`` on each rank. ``inner``: for each
    dim of the layout whether it comes after the ``front`` of the shape."""
    if KINDS[move.kind].local:
        return 0.0
    late = tuple(inner[d] for d in move.at)
    return curve_of(move.kind, move.tokens, mesh, late).seconds(nbytes)


@lru_cache(maxsize=1 << 14)
def curve_of(
    kind: str,
    tokens: Tokens,
    mesh: Mesh,
    late: tuple[bool, ...],
    alone: Alone = ALONE,
) -> Curve:
    """Return the seconds over bytes of a collective along tokens, as ``curve``
    does."""
    return curve(kind, mesh, axes_of_tokens(tokens, mesh), late, alone)
