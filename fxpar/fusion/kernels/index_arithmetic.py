"""Computes where an element of one tensor is stored in another, and the space that a
kernel runs over.

An element is named by its number in row-major order. A ``Map`` gives the number (or the
offset in memory) in the source of a view, from the number in the view: a sum of terms
``number // divide % modulus * multiply``, one for each run of dims that stay together.
In: shapes, strides and arguments of views. Out: maps, and their text.

A kernel runs over ``count`` elements, flat, or row by row where rows are reduced. In: a
program without collectives. Out: its ``Space``, or CannotEmit, which names the line and
the reason. Never depends on anything but shapes, so that all ranks decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpar.fusion.kernels.expressions import BY_COLUMN, SUMS
from fxpar.fusion.kernels.region_program import (
    RegionProgram,
    Statement,
    contiguous,
    op_named,
)
from fxpar.sharding.op_facts import stated_facts

# Elements of a row that one block may hold.
LONGEST = 16384
FLAT_BLOCK = 1024


class CannotEmit(Exception):
    """Says that kernels of one space cannot have a line: ``line``, ``why``."""

    def __init__(self, line: str, why: str) -> None:
        super().__init__(f"{line}: {why}")
        self.line, self.why = line, why


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


CAST = "prims.convert_element_type.default"


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
    op for op in VIEWS if op == "getitem" or stated_facts(op).get("keeps_order")
)


def view_map(line: Statement, source: Shape) -> Map:
    """Return the map of a view of a tensor of shape ``source``: torch tells where it
    shows each element."""
    if line.op in SAME_ORDER:
        return strided(line.shape, contiguous(line.shape))
    view = op_named(line.op)(torch.empty(source, device="meta"), *line.args[1:])
    return strided(view.shape, view.stride(), view.storage_offset())
