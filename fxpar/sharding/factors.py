"""Describes an op's sharding by a rule of factors, an einsum-like row.

``"m k, k n -> m n"`` names the factors of every dim of every tensor operand and result.
A mesh axis given to a factor splits every dim that has it. From that alone follow the
specs of operands and results:

- a factor missing from an operand: that operand is whole over the axis;
- a factor missing from a result: that result is partial over the axis, reduced by the
  factor's reduction (``sum`` unless the row says otherwise);
- ``k!``: the factor must stay whole; ``_``: a dim without a factor (size 1, or whole);
- ``(a b)``: a compound dim, major to minor, as views make it. A minor factor may be
  split only where every factor before it is split completely, else a rank would hold
  strided pieces of the dim, which a Spec does not express;
- ``+ m n, m k, k n -> m n``: an operand marked ``+`` is added into the result. Over the
  axes of a contracted factor it lacks (here ``k``) it must itself be partial, else each
  rank would add it once more;
- ``c ~k`` in a result: the result lacks ``k`` without reducing over it; all ranks
  along ``k`` compute equal results. ``~`` as the last result stands for any further
  results (a seed, a reserve, an empty tensor): whole, and equal over every factor.

A partial operand may pass *through* an op instead of being reduced before it where a
``Passage`` says so: every operand of the group is partial, all others are whole, and
every result is then partial with the same reduction.

In: the factors of a rule, and shapes of a call. Out: a ``Rule`` with factor sizes.
Never: knows a mesh, or which axis splits a factor.

Sources: GSPMD (arXiv 2105.04663, section 3), Shardy's OpShardingRule and its factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.errors import RuleError

Dims = tuple[tuple[str, ...], ...]
Axes = tuple[str, ...]


def sides(equation: str) -> list[list[str]]:
    """Return the factors of both operands and of the result of a product, e.g. of
    ``"m k, k n -> m n"``."""
    return [word.split() for word in equation.replace("->", ",").split(",")]


# Reductions that may pass through an op of each kind.
LINEAR = ("sum", "avg")
MONOTONE = ("max", "min")
MOVEMENT = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True)
class Passage:
    """Names operands that, if all are partial, make every result partial in the same
    way."""

    # Their positions among the op's operands.
    operands: tuple[int, ...]
    # The reductions with which they may be partial.
    reductions: tuple[str, ...] = LINEAR


@dataclass(frozen=True)
class Gathered:
    """Describes a summary of a shard, which ranks gather from all shards of a factor:
    the total of a scan, the candidates of a choice, the weights of the shard's
    summands."""

    # The factor.
    factor: str
    # Position, among ``Rule.tensors``, of the tensor that is gathered.
    position: int
    # Rows per shard, if the tensor has the factor.
    rows: int = 1
    # Bytes of an element; 0: as in the tensor.
    itemsize: int = 0


@dataclass(frozen=True)
class RowPiece:
    """Says which rows of an operand become which rows of a result, in order."""

    # Number of the operand.
    source: int
    # Number of the result.
    target: int
    # Number of rows.
    count: int
    # Position of the first in the operand.
    first: int = 0
    # Distance between them in the operand; backwards if negative.
    step: int = 1
    # Position of the first in the result.
    at: int = 0
    # Distance between them in the result.
    stride: int = 1


@dataclass(frozen=True)
class Reach:
    """Describes the rows of a dim that each row of a result reads, its window: row i
    reads from row ``(first + step * i) // of`` on."""

    # Rows of the dim by which windows advance per ``of`` rows of the result.
    step: int
    # Rows of the result per ``step``.
    of: int = 1
    # Where the window of row 0 begins, times ``of``; negative in padding.
    first: int = 0
    # Rows of a window.
    span: int = 1
    # Where the windows of the first rows of the result begin, instead of the formula.
    head: tuple[int, ...] = ()
    # Where the windows of the last rows of the result begin, instead of the formula.
    tail: tuple[int, ...] = ()

    # Of windows that all follow the formula, with ``of`` 1:

    @property
    def overhang(self) -> int:
        """Return the rows that the last window of a shard reaches beyond the shard;
        negative where the last windows that start within the shard end before it
        does."""
        return self.first + self.span - self.step

    def count(self, rows: int, ceil: bool = False) -> int:
        """Return the number of windows of a dim of ``rows`` rows, padded at both ends;
        with ``ceil`` including one that ends after the padding, if it starts before
        that."""
        steps = rows - 2 * self.first - self.span
        if not ceil:
            return steps // self.step + 1
        more = -(-steps // self.step)
        return more + (more * self.step < rows - self.first)

    def fits(self, many: int, few: int) -> bool:
        """Return whether equal shards of rows and of windows match."""
        return few * self.step == many and -self.overhang < self.step

    def is_counting_all(self, padding: bool) -> bool:
        """Return whether every window of a dim that it fits counts all its rows.
        ``padding``: whether rows of the padding are counted."""
        return self.overhang <= -self.first * padding and (padding or not self.first)


@dataclass(frozen=True)
class RowWindow:
    """Describes the rows of a dim that a rank reads for its shard of another tensor; of
    a result, the rows of which the rank computes a part, which is added to their
    owners' rows."""

    # Position, among ``Rule.tensors``, of the tensor with these rows.
    position: int
    # The tensor's dim.
    dim: int
    # Number of rows of the dim.
    rows: int
    # Number of rows of the other tensor.
    count: int
    # The rows of the dim that each row of the other tensor reads, or adds to.
    reach: Reach
    # Rows before and after a shard that its windows reach, where all shards of the
    # other tensor are equal: its halo, which permutes send. None: shards of this tensor
    # do not match the other's.
    halo: tuple[int, int] | None = None


@dataclass(frozen=True)
class RowMoves:
    """Describes an op that moves rows of a dim: the source of each row of its
    results."""

    # The dim's number, in all operands and results.
    dim: int
    # Rows of the dim in each operand.
    sources: tuple[int, ...]
    # Rows of the dim in each result.
    targets: tuple[int, ...]
    # The rows moved; no row of a result twice.
    pieces: tuple[RowPiece, ...]
    # The value of all other rows.
    fill: bool | int | float = 0
    # A rank gets, instead of its shard of the result, the window of rows that the shard
    # reads; None: its shard.
    reach: Reach | None = None
    # Whether instead a rank holds such a window of the operand, and overlapping rows of
    # windows are added.
    adds: bool = False
    # How often the result repeats the pieces; a rank then gets no more rows than the
    # pieces have, and repeats them.
    turns: int = 1


@dataclass(frozen=True)
class Rule:
    """Holds the factors of one op call. Operands and results are its tensors, in
    order."""

    # Factors of each dim of each operand, major to minor.
    operands: tuple[Dims, ...]
    # Factors of each dim of each result, major to minor.
    results: tuple[Dims, ...]
    # (factor, size); complete once ``with_sizes`` has run.
    sizes: tuple[tuple[str, int], ...] = ()
    # Factors that no axis may split.
    whole: frozenset[str] = frozenset()
    # (factor, reduction of results that are partial over it); others have "sum".
    reductions: tuple[tuple[str, str], ...] = ()
    # Groups of operands that may stay partial through the op.
    passages: tuple[Passage, ...] = ()
    # Positions of operands added into the result: partial where a contracted factor
    # that they lack is split.
    accumulates: tuple[int, ...] = ()
    # (result, factor): the result lacks the factor, yet is not partial over it.
    equal_over: frozenset[tuple[int, str]] = frozenset()
    # Whether the op may have further results, whole and equal over every factor.
    open: bool = False
    # (factor, axes that always split it): factors of a manual region
    # (``ops.own_op_rules``).
    pinned: tuple[tuple[str, Axes], ...] = ()
    # Pinned factors that no tensor has, over which the results are partial.
    summed: frozenset[str] = frozenset()
    # Factors whose shards must be equal.
    evenly: frozenset[str] = frozenset()
    # (factor, rows) that every rank must have of it, unless all shards are equal.
    least: tuple[tuple[str, int], ...] = ()
    # Behaviour of the op on a rank that holds nothing of a factor: "run", on nothing;
    # "fill", it runs on a row of zeros that is cut off its results, with no sum over
    # it; "never", no such rank is allowed.
    empty: str = "run"
    # Summaries that ranks gather from all shards, where the factor is split.
    gathered: tuple[Gathered, ...] = ()
    # Rows that ranks exchange, dim by dim. Tensors have different numbers of rows of
    # these dims, and one factor: its size is the smallest of the numbers but 0.
    moves: tuple[RowMoves, ...] = ()
    # Rows of dims whose shards need more rows, or other rows: here too tensors have
    # different numbers of rows of one factor.
    windows: tuple[RowWindow, ...] = ()

    @cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def reduction(self) -> dict[str, str]:
        return dict(self.reductions)

    @cached_property
    def tensors(self) -> tuple[Dims, ...]:
        """Return operands, then results."""
        return self.operands + self.results

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Return every factor once, in order of appearance."""
        return tuple(dict.fromkeys(f for t in self.tensors for d in t for f in d))

    @cached_property
    def free(self) -> tuple[str, ...]:
        """Return the factors that an axis may split."""
        shut = self.whole.union(f for f, _ in self.pinned)
        return tuple(f for f in self.factors if f not in shut)

    @cached_property
    def pin(self) -> dict[str, str]:
        """Return axis -> the factor that it always splits."""
        return {axis: factor for factor, axes in self.pinned for axis in axes}

    @cached_property
    def sends(self) -> bool:
        """Return whether ranks may send messages inside the op."""
        return bool(self.moves or self.windows or self.gathered or self.pinned)

    @cached_property
    def moved(self) -> frozenset[str]:
        """Return the factors whose rows ranks exchange."""
        dims = {moves.dim for moves in self.moves}
        moved = (f for t in self.tensors for d in dims for f in t[d])
        read = (f for w in self.windows for f in self.tensors[w.position][w.dim])
        return frozenset(read).union(moved)

    @cached_property
    def exchanged(self) -> frozenset[str]:
        """Return the factors whose shards are not computed separately: ranks exchange
        rows or weights."""
        return self.moved.union(mark.factor for mark in self.gathered)

    @cached_property
    def contracted(self) -> frozenset[str]:
        """Return factors of operands that some result lacks, over which it is
        partial."""
        return frozenset().union(*self.contracted_by)

    @cached_property
    def contracted_by(self) -> tuple[frozenset[str], ...]:
        """Return for each result the factors whose axes make it partial."""
        have = frozenset(f for t in self.operands for d in t for f in d)
        have |= self.summed
        return tuple(
            have
            - {f for d in result for f in d}
            - {f for j, f in self.equal_over if i == j}
            for i, result in enumerate(self.results)
        )

    @cached_property
    def where(self) -> dict[str, tuple[int, ...]]:
        """Return factor -> positions in ``tensors`` that have it."""
        out: dict[str, list[int]] = {}
        for i, dims in enumerate(self.tensors):
            for factor in dict.fromkeys(f for dim in dims for f in dim):
                out.setdefault(factor, []).append(i)
        return {factor: tuple(places) for factor, places in out.items()}

    def with_sizes(self, shapes: Sequence[Sequence[int]]) -> Rule:
        """Return the rule with factor sizes, from the shapes of operands and results.

        Raises RuleError if ranks or sizes disagree with the rule.
        """
        if self.open and len(shapes) > len(self.tensors):
            return self._closed(shapes).with_sizes(shapes)
        if len(shapes) != len(self.tensors):
            raise RuleError(
                f"rule '{self}' has {len(self.tensors)} tensors, the op {len(shapes)}"
            )
        sizes = dict(self.sizes)
        for dims, shape in zip(self.tensors, shapes, strict=True):
            if len(dims) != len(shape):
                raise RuleError(f"rule '{self}': {len(dims)} dims for {list(shape)}")
            for dim, n in zip(dims, shape, strict=True):
                _solve(sizes, dim, int(n), self)
        return replace(self, sizes=tuple(sizes.items()))

    def _closed(self, shapes: Sequence[Sequence[int]]) -> Rule:
        """Return the rule with the further results that an open rule leaves unnamed."""
        further = tuple(((),) * len(shape) for shape in shapes[len(self.tensors) :])
        n = len(self.results)
        equal_over = {(n + i, f) for i in range(len(further)) for f in self.factors}
        return replace(
            self,
            results=self.results + further,
            equal_over=self.equal_over | equal_over,
            open=False,
        )

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        """Return the rule as text; cached, as all calls of one kind share one rule."""

        def tensor(dims: Dims) -> str:
            words = []
            for dim in dims:
                names = [f + "!" * (f in self.whole) for f in dim]
                words.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
            return " ".join(word if word != "()" else "_" for word in words)

        operands = [
            f"+ {tensor(t)}" if i in self.accumulates else tensor(t)
            for i, t in enumerate(self.operands)
        ]
        results = [
            " ".join(
                [
                    tensor(t),
                    *(f"~{f}" for f in self.factors if (i, f) in self.equal_over),
                ]
            )
            for i, t in enumerate(self.results)
        ]
        return f"{', '.join(operands)} -> {', '.join(results + ['~'] * self.open)}"


def _solve(sizes: dict[str, int], dim: tuple[str, ...], n: int, rule: Rule) -> None:
    """Enter the factor sizes that one dim of size ``n`` fixes."""
    if dim and dim[0] in rule.moved:
        numbers = (n, sizes.get(dim[0], n))
        sizes[dim[0]] = min(filter(None, numbers), default=0)
        return
    unknown = [f for f in dim if f not in sizes]
    product = 1
    for f in dim:
        product *= sizes.get(f, 1)
    if not dim:
        return
    if len(unknown) > 1:
        raise RuleError(f"rule '{rule}': the sizes of {unknown} cannot be derived")
    if unknown:
        if product == 0 or n % product:
            raise RuleError(f"rule '{rule}': {n} is no multiple of {product}")
        sizes[unknown[0]] = n // product
    elif product != n:
        raise RuleError(f"rule '{rule}': factors {dim} make {product}, the dim is {n}")
