"""Computes where an element of one tensor is stored in another, the space that a kernel
runs over, and where in it each value of a program is needed.

An element is named by its number in row-major order. A ``Map`` gives the number (or the
offset in memory) in the source of a view, from the number in the view: a sum of terms
``number // divide % modulus * multiply``, one for each run of dims that stay together.

A kernel runs over ``count`` elements, flat, or row by row where rows are reduced. In: a
program without collectives. Out: its ``Space``, or CannotEmit, which names the line and
the reason. Never depends on anything but shapes, so that all ranks decide the same.

``Needs``. In: a program without collectives, and the space its kernel runs over. Out:
for every value the places at which it is needed, found backwards from the outputs. A
value that a view shows in another order is needed at other places than its neighbours;
a sum of a row once a row. An op with a result of parts of several tensors (it
concatenates, pads, or puts a slice into a tensor) has a ``Choice`` for each part, in
order: the first one with ranges that hold an element gives it, else the last one. Never
writes text but that of places (``emit`` writes the rest).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpar.fusion.kernels.expressions import BY_COLUMN, CAST, OPS, SUMS, kind_of
from fxpar.fusion.kernels.region_program import (
    CannotEmit,
    Ref,
    RegionProgram,
    Statement,
    Tensor,
    contiguous,
    op_named,
)
from fxpar.sharding.op_facts import op_facts_of

# Elements of a row that one block may hold.
LONGEST = 16384
FLAT_BLOCK = 1024


@dataclass(frozen=True)
class Space:
    """Is the elements that a kernel runs over, in blocks."""

    count: int  # number of elements
    columns: int = 0  # elements of a row, which is a block; 0: blocks are flat
    flat_block: int = FLAT_BLOCK  # elements of a flat block

    @property
    def rows(self) -> int:
        """Return the number of rows; 0 for a flat space."""
        return self.count // self.columns if self.columns else 0

    @property
    def block(self) -> int:
        """Return the elements of a block: a power of two."""
        if not self.columns:
            return self.flat_block
        return 1 << max(0, self.columns - 1).bit_length()

    @property
    def turns(self) -> int:
        """Return the number of blocks."""
        return self.rows or -(-self.count // self.block)

    @property
    def is_whole(self) -> bool:
        """Return whether all blocks are full, and nothing need be masked."""
        return self.count == self.turns * self.block


@dataclass(frozen=True)
class Reduction:
    """Says how rows times columns of elements are reduced."""

    # "row": each row; "column": each column; "all": everything, and there is one row.
    kind: str
    rows: int  # rows before it
    columns: int  # columns before it


def reduction_of(name: str, args: Sequence[Any], source: Sequence[int]) -> Reduction:
    """Return how an op of ``SUMS`` with these arguments reduces an operand of shape
    ``source``.

    Raises CannotEmit where dims in the middle, or at both ends, are reduced.
    """
    dims = args[1] if len(args) > 1 else None
    rank, total = len(source), math.prod(source)
    dims = (dims,) if isinstance(dims, int) else dims
    # A number alone may be reduced along dim 0 or -1.
    reduced = {d % max(1, rank) for d in dims} if dims else set(range(rank))
    reduced = {d for d in reduced if rank and source[d] > 1}
    remaining = [d for d in range(rank) if source[d] > 1 and d not in reduced]
    if not remaining:
        return Reduction("all", 1, total)
    count = math.prod(source[d] for d in remaining)
    if not reduced or max(remaining) < min(reduced):
        return Reduction("row", count, total // count)
    if max(reduced) < min(remaining):
        return Reduction("column", total // count, count)
    raise CannotEmit(name, "reduces dims that are not the last or the first ones")


def space_of(program: RegionProgram) -> Space:
    """Return the space of a program's kernel. Raises CannotEmit if its outputs and
    reductions do not agree."""
    common: Space | None = None
    for line in program.lines:
        if line.op not in SUMS:
            continue
        source = program.values[line.refs[0]].shape
        reduction = reduction_of(line.name, line.args, source)
        if reduction.kind == "all":
            continue
        if reduction.kind == "column" and line.op not in BY_COLUMN:
            raise CannotEmit(line.name, f"{line.op} along columns")
        space = Space(reduction.rows * reduction.columns, reduction.columns)
        if common is not None and common != space:
            raise CannotEmit(line.name, "reduces other rows than an op before it")
        if not 1 < space.columns <= LONGEST:
            raise CannotEmit(line.name, f"a row has {space.columns} elements")
        common = space
    return common or _space_of_outputs(program)


def reduction_of_output(program: RegionProgram, name: str) -> Statement | None:
    """Return the line of ``SUMS`` that an output is, directly or cast to another dtype;
    None otherwise, also if it was rounded to a third dtype in between."""
    line = program.values[name]
    dtypes = {line.dtype, "float32"}
    while isinstance(line, Statement) and line.op == CAST and line.dtype in dtypes:
        line = program.values[line.refs[0]]
    return line if isinstance(line, Statement) and line.op in SUMS else None


def _space_of_outputs(program: RegionProgram) -> Space:
    """Return the space if no rows are reduced: flat, or by rows if some outputs are one
    a row."""
    counts = set()
    for t in program.outputs:
        line = reduction_of_output(program, t.name)  # of everything
        shape = t.shape if line is None else program.values[line.refs[0]].shape
        counts.add(math.prod(shape))
    largest = max(counts)
    small = counts - {largest}
    if not small:
        return Space(largest)
    (rows, *further) = sorted(small)
    if further or largest % rows or largest // rows > LONGEST or rows == 1:
        names = [t.name for t in program.outputs if t.count in small]
        raise CannotEmit(names[0], "has neither all elements nor one a row")
    return Space(largest, largest // rows)


Shape = Sequence[int]


@dataclass(frozen=True)
class Map:
    """Maps the number of an element to another number, term by term."""

    # (divide, modulus or None, multiply), from the outermost dim in.
    terms: tuple[tuple[int, int | None, int], ...]
    offset: int = 0  # added to the sum of the terms

    @property
    def is_identity(self) -> bool:
        return self.terms == ((1, None, 1),) and not self.offset

    @property
    def is_constant(self) -> bool:
        """Return whether every element is read from one and the same."""
        return not self.terms

    def text(self, of: str) -> str:
        """Return the map as an expression of the number ``of``."""
        parts = []
        for divide, modulus, multiply in self.terms:
            part = of
            part += f" // {divide}" if divide != 1 else ""
            part += f" % {modulus}" if modulus is not None else ""
            parts.append(part + (f" * {multiply}" if multiply != 1 else ""))
        if self.offset or not parts:
            parts.append(str(self.offset))
        return " + ".join(parts)


def strided(shape: Shape, strides: Shape, offset: int = 0) -> Map:
    """Return the map: element of ``shape`` -> ``offset`` + sum of indices times
    ``strides``."""
    runs: list[list[int]] = []  # divide, size, multiply; from the inside out
    divide, total = 1, math.prod(shape)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        last = runs[-1] if runs else None
        if last and last[0] * last[1] == divide and last[2] * last[1] == stride:
            last[1] *= size
        else:
            runs.append([divide, size, stride])
        divide *= size
    terms = [
        (divide, None if divide * size == total else size, multiply)
        for divide, size, multiply in reversed(runs)
        if multiply
    ]
    return Map(tuple(terms), offset)


def broadcast(source: Shape, target: Shape) -> Map:
    """Return the map: element of ``target`` -> the one of ``source`` that fills it."""
    strides = contiguous(tuple(source))
    steps = [0 if n == 1 else s for n, s in zip(source, strides, strict=True)]
    return strided(target, [0] * (len(target) - len(source)) + steps)


# Views that kernels read through.
VIEWS = frozenset(
    {
        "aten.view.default",
        "aten.reshape.default",
        "aten._unsafe_view.default",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.alias.default",
        "aten.detach.default",
        "aten.clone.default",
        "aten.lift_fresh_copy.default",
        "aten.expand.default",
        "aten.permute.default",
        "aten.transpose.int",
        "aten.t.default",
        "aten.slice.Tensor",
        "aten.select.int",
        "getitem",
    }
)
# Views with their elements in the order of the operand's.
SAME_ORDER = frozenset(
    op for op in VIEWS if op == "getitem" or op_facts_of(op_named(op)).keeps_order
)


def view_map(line: Statement, source: Shape) -> Map:
    """Return the map of a view of a tensor of shape ``source``: torch tells where it
    shows each element."""
    if line.op in SAME_ORDER:
        return strided(line.shape, contiguous(line.shape))
    view = op_named(line.op)(torch.empty(source, device="meta"), *line.args[1:])
    return strided(view.shape, view.stride(), view.storage_offset())


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Choice:
    """Is one of the tensors that an element of a result may come from."""

    source: Ref | float  # a value, or a number that fills
    ranges: tuple[tuple[int, int, int], ...]  # (dim, first, end) of the result
    to: Map  # element of the result -> of the source


# Parts of one tensor: for every element a kernel tests each of them.
_MOST = 8


def _cat(line: Statement, shapes: Shapes) -> list[Choice]:
    parts = [x for x in line.args[0] if 0 not in shapes[x.name]]
    if len(parts) > _MOST:
        raise LookupError(f"{line.op} of {len(parts)} tensors")
    dim = (line.args[1] if len(line.args) > 1 else 0) % len(line.shape)
    choices, low = [], 0
    for x in parts:
        shape = shapes[x.name]
        strides = contiguous(shape)
        high = low + shape[dim]
        to = strided(line.shape, strides, -low * strides[dim])
        choices.append(Choice(x, ((dim, low, high),), to))
        low = high
    return choices


def _pad(line: Statement, shapes: Shapes) -> list[Choice]:
    x, pads = line.args[:2]
    fill = line.args[2] if len(line.args) > 2 else 0
    shape = shapes[x.name]
    strides = contiguous(shape)
    ranges, offset = [], 0
    for i in range(len(pads) // 2):
        dim = len(shape) - 1 - i
        low = pads[2 * i]
        ranges.append((dim, low, low + shape[dim]))
        offset -= low * strides[dim]
    to = strided(line.shape, strides, offset)
    return [Choice(x, tuple(ranges), to), Choice(fill, (), to)]


def _put_slice(line: Statement, shapes: Shapes) -> list[Choice]:
    base, x = line.args[:2]
    dim = (line.args[2] if len(line.args) > 2 else 0) % len(line.shape)
    ends = (*line.args[3:], None, None, None)
    start, _, step = slice(*ends[:3]).indices(line.shape[dim])
    if step != 1:
        raise LookupError(f"{line.op} in steps")
    strides = contiguous(shapes[x.name])
    to = strided(line.shape, strides, -start * strides[dim])
    ranges = ((dim, start, start + shapes[x.name][dim]),)
    return [Choice(x, ranges, to), _not_put(line, base)]


def _put_index(line: Statement, shapes: Shapes) -> list[Choice]:
    base, x, dim, index = line.args
    dim, strides = dim % len(line.shape), list(contiguous(shapes[x.name]))
    index %= line.shape[dim]
    strides.insert(dim, 0)
    to = strided(line.shape, strides)
    return [Choice(x, ((dim, index, index + 1),), to), _not_put(line, base)]


def _not_put(line: Statement, base: Ref) -> Choice:
    return Choice(base, (), strided(line.shape, contiguous(line.shape)))


_CHOICES: dict[str, Callable[[Statement, Shapes], list[Choice]]] = {
    "aten.cat.default": _cat,
    "aten.constant_pad_nd.default": _pad,
    "aten.slice_scatter.default": _put_slice,
    "aten.select_scatter.default": _put_index,
}

CHOICES = frozenset(_CHOICES)


# Ops without operands, needed at any place.
FILLED = frozenset({"aten.full.default", "aten.scalar_tensor.default"})
RANDOM = "fxpar.random.default"
SEED = "prims.inductor_lookup_seed.default"
IOTA = "prims.iota.default"
KNOWN = frozenset(OPS) | VIEWS | set(SUMS) | CHOICES | FILLED | {RANDOM, SEED, IOTA}

# Places at which one value may be needed.
_MOST_PLACES = 8


@dataclass(frozen=True)
class Place:
    """Is the number of an element as it is known in the kernel."""

    text: str  # its name or its number in the kernel
    mask: str = ""  # name of the mask of lanes that count
    block: bool = True  # whether lanes differ
    define: tuple[str, ...] = ()  # lines that define it, if it is not known at first
    parent: str = ""  # the place or mask that ``define`` reads, by name; "" if none


ZERO = Place("0", block=False)

# One of the parts of a value: the name of its mask ("" if everywhere), its source (a
# value, or a number), and the place at which the source is needed.
Part = tuple[str, Any, Place | None]


class Needs:
    """Finds the places at which values are needed. ``places_of``: by value, the names
    of places; ``places``: by name; ``chosen``: by value and place, its parts; ``sums``:
    outputs summed over blocks.

    Making one raises CannotEmit.
    """

    def __init__(self, program: RegionProgram, space: Space) -> None:
        self.program, self.space = program, space
        mask = "" if space.is_whole else "live"
        self.at = Place("at", mask)
        self.row = Place("row", block=False) if space.columns else None
        self.places = {p.text: p for p in (self.at, ZERO)}
        self.derived: dict[tuple[str, Map], Place] = {}
        if self.row is not None:
            col = Place("col", mask)
            self.places |= {"row": self.row, "col": col}
            if space.rows > 1:
                by_row = Map(((space.columns, None, 1),))
                by_column = Map(((1, space.columns, 1),))
                self.derived = {("at", by_row): self.row, ("at", by_column): col}
        self.places_of: dict[str, dict[str, None]] = {}
        self.chosen: dict[tuple[str, str], list[Part]] = {}
        self.sums: dict[str, Reduction] = {}
        self._outputs()
        for line in reversed(program.lines):
            for place in list(self.places_of.get(line.name, {})):
                self._operands(line, self.places[place])

    def derive(self, place: Place, to: Map) -> Place:
        """Return the place that a map makes of one."""
        if to.is_identity:
            return place
        if to.is_constant and not to.offset:
            return ZERO
        key = place.text, to
        if key not in self.derived:
            name = f"at_{len(self.places)}"
            line = f"{name} = {to.text(place.text)}"
            mask = "" if to.is_constant else place.mask
            block = place.block and not to.is_constant
            derived = Place(name, mask, block, (line,), place.text)
            self.places[name] = self.derived[key] = derived
        return self.derived[key]

    def _need(self, name: str, place: Place) -> None:
        at = self.places_of.setdefault(name, {})
        at[place.text] = None
        self.places.setdefault(place.text, place)
        if len(at) > _MOST_PLACES:
            raise CannotEmit(name, "is needed in too many orders")

    def _outputs(self) -> None:
        for t in self.program.outputs:
            value, space = reduction_of_output(self.program, t.name), self.space
            if value is not None:
                source = self.program.values[value.refs[0]]
                reduction = reduction_of(value.name, value.args, source.shape)
                if (
                    reduction.kind == "column"
                    or reduction.kind == "all"
                    and space.rows != 1
                ):
                    self._check_summed(value, reduction)
                    self.sums[t.name] = reduction
                    self._need(value.refs[0], self.at)
                    continue
            self._need(t.name, self.place_of(t))

    def _check_summed(self, line: Statement, reduction: Reduction) -> None:
        over = reduction.rows * reduction.columns
        fits = reduction.kind == "all" or reduction.columns == self.space.columns
        if line.op not in BY_COLUMN:
            raise CannotEmit(line.name, f"{line.op} of more than a row")
        if over != self.space.count or not fits or kind_of(line.dtype) != "float":
            raise CannotEmit(line.name, "sums up what is not the kernel's")

    def place_of(self, t: Tensor) -> Place:
        """Return where an output that is not summed over blocks is written. Raises
        CannotEmit."""
        if t.count == self.space.count:
            return self.at if t.count > 1 else ZERO
        if self.row is not None and t.count == self.space.rows:
            return self.row
        raise CannotEmit(t.name, "has neither all elements nor one a row")

    def _operands(self, line: Statement, place: Place) -> None:
        """Note where a line's operands are needed for its value at ``place``."""
        if kind_of(line.dtype) is None and line.dtype != "tuple":
            raise CannotEmit(line.name, f"is of dtype {line.dtype}")
        if line.op in SUMS:
            self._row_operand(line, place)
        elif line.op in VIEWS:
            (source,) = line.refs
            shape = self.program.values[source].shape
            row = self.program.values[source].dtype == "tuple"
            to = place if row else self.derive(place, view_map(line, shape))
            self._need(source, to)
        elif line.op in CHOICES:
            shapes = {n: self.program.values[n].shape for n in line.refs}
            self.chosen[line.name, place.text] = [
                self._choose(part, place, line)
                for part in formed(line, _CHOICES[line.op], line, shapes)
            ]
        elif line.op == SEED:
            self.places_of.setdefault(line.refs[0], {})
        elif line.op == RANDOM:
            self._need(line.refs[0], ZERO)
        elif line.op in OPS:
            for name in line.refs:
                shape = self.program.values[name].shape
                self._need(name, self.derive(place, broadcast(shape, line.shape)))
        elif line.op not in FILLED and line.op != IOTA:
            raise CannotEmit(line.name, f"{line.op} has no form in a generated kernel")

    def _row_operand(self, line: Statement, place: Place) -> None:
        source = self.program.values[line.refs[0]].shape
        reduction = reduction_of(line.name, line.args, source)
        space = Space(reduction.rows * reduction.columns, reduction.columns)
        one = place == ZERO or place is self.at or place.text == "row"
        whole = (
            reduction.kind != "column" and self.space.columns and space == self.space
        )
        if not whole or not (place.text == "row" or reduction.rows == 1 and one):
            raise CannotEmit(
                line.name, "is reduced, and needed elsewhere in the kernel"
            )
        self._need(line.refs[0], self.at)

    def _choose(self, part: Choice, place: Place, line: Statement) -> Part:
        """Return (mask or "", source, place) of one of the parts of a line."""
        conditions = []
        for dim, low, high in part.ranges:
            unit = [0] * len(line.shape)
            unit[dim] = 1
            index = strided(line.shape, unit).text(place.text)
            if low > 0:
                conditions.append(f"({index} >= {low})")
            if high < line.shape[dim]:
                conditions.append(f"({index} < {high})")
        mask = place.mask
        if conditions:
            mask = f"in_{len(self.places)}"
            both = [place.mask] if place.mask else []
            define = (f"{mask} = {' & '.join([*both, *conditions])}",)
            self.places[mask] = Place(mask, "", place.block, define, place.text)
        condition = mask if conditions else ""
        if not isinstance(part.source, Ref):
            return condition, part.source, None
        if not conditions:
            where = self.derive(place, part.to)
        else:
            name = f"at_{len(self.places)}"
            text = f"{name} = {part.to.text(place.text)}"
            where = Place(name, mask, place.block, (text,), mask)
            self.places[name] = where
        self._need(part.source.name, where)
        return condition, part.source, where


def formed(line: Statement, fn: Callable[..., Any], *args: Any) -> Any:
    """Return ``fn(*args)``; raise CannotEmit, which names the line, for a missing
    form."""
    try:
        return fn(*args)
    except LookupError as error:
        why = error.args[0] if error.args else line.op
        raise CannotEmit(line.name, f"there is no form of {why}") from None
