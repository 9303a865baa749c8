"""Finds which dims a reduction reduces, and the space that a kernel runs over.

A kernel runs over ``count`` elements, flat, or row by row where rows are reduced. In: a
program without collectives. Out: its ``Space``, or CannotEmit, which names the line and
the reason. Never depends on anything but shapes, so that all ranks decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.fusion.kernels.expressions import BY_COLUMN, SUMS
from fxpar.fusion.kernels.region_program import RegionProgram, Statement

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
