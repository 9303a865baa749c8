"""A program cut at its collectives, for one kernel with all of it.

In: a program. Out: a ``Cut``: its collectives, and programs without any around them,
which hand all on that a kernel must write: what ``stages`` makes, but for values that
pass from one collective to the next, or through one to the caller, and for masks of
this rank's part. It copies lines and makes none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.region_program import Line, Program, Tensor, contiguous
from fxpar.fusion.kernels.split_at_collectives import Move, Part, stages_of


@dataclass(frozen=True)
class Cut:
    """A program cut at its collectives. ``parts``: before, between, behind ``moves``;
    where nothing is computed, a program without lines."""

    moves: tuple[Move, ...]
    parts: tuple[Program, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the collectives, in order."""
        return tuple(move.kind for move in self.moves)


def cut(program: Program) -> Cut:
    """The collectives of a program, and programs around them: each gives all that the
    next collective or others read, and results of collectives where they are results of
    the program."""
    moves: list[Move] = []
    parts: dict[int, Program] = {}
    for step in stages_of(program):
        if isinstance(step, Move):
            moves.append(step)
        else:
            assert isinstance(step, Part)
            parts[len(moves)] = step.program
    if {0, 1} <= parts.keys():
        parts[0], parts[1] = _settled(program, moves[0], parts[0], parts[1])
    wanted = {t.name for t in program.outputs}
    full = []
    for k in range(len(moves) + 1):
        part = parts.get(k, Program((), (), (), program.numbers, program.ranks))
        if k and moves[k - 1].result in wanted:
            part = _given(part, row_major(program, moves[k - 1].result))
        if k < len(moves) and moves[k].operand not in {t.name for t in part.outputs}:
            part = _given(part, _operand(program, moves, k))
        full.append(part)
    return Cut(tuple(moves), tuple(full))


def _settled(
    program: Program, move: Move, first: Program, then: Program
) -> tuple[Program, Program]:
    """What has the size of a collective's result and not of its operand is computed
    behind it: a mask of this rank's rows, that is a result itself."""
    operand, result = program.values[move.operand], program.values[move.result]
    fit = {t for t in first.outputs if t.count == result.count != operand.count}
    if not fit:
        return first, then
    rest = tuple(t for t in first.outputs if t not in fit)
    names = {t.name for t in fit}
    known = {line.name for line in then.lines}
    lines = [line for line in _cone(first, names) if line.name not in known]
    lines += then.lines
    made = {line.name for line in lines}
    inputs = {t.name: t for t in (*first.inputs, *then.inputs)}
    read = dict.fromkeys(name for line in lines for name in line.refs)
    outputs = (*(t for t in first.outputs if t in fit), *then.outputs)
    wanted = {t.name for t in program.outputs}
    return (
        dataclasses.replace(
            first, lines=_cone(first, {t.name for t in rest}), outputs=rest
        ),
        dataclasses.replace(
            then,
            inputs=tuple(inputs[name] for name in read if name not in made),
            lines=tuple(lines),
            outputs=tuple(t for t in outputs if t.name in wanted or t not in fit),
        ),
    )


def _cone(part: Program, names: set[str]) -> tuple[Line, ...]:
    """The lines that values are made by."""
    needed, out = set(names), []
    for line in reversed(part.lines):
        if line.name in needed:
            needed.update(line.refs)
            out.append(line)
    return tuple(reversed(out))


def row_major(program: Program, name: str) -> Tensor:
    """A value as it lies in memory row by row."""
    value = program.values[name]
    return Tensor(name, value.shape, contiguous(value.shape), value.dtype)


def _operand(program: Program, moves: Sequence[Move], k: int) -> Tensor:
    """What a collective is given that no line before it makes: an input, or the result
    of the one before."""
    name = moves[k].operand
    known = {t.name for t in program.inputs} | {move.result for move in moves[:k]}
    if name not in known:
        raise CannotEmit(name, "is given to a collective long after it is made")
    return next((t for t in program.inputs if t.name == name), row_major(program, name))


def _given(part: Program, t: Tensor) -> Program:
    """A part that also hands on what it is given."""
    inputs = part.inputs
    if t.name not in {x.name for x in inputs}:
        inputs = (*inputs, t)
    moved = dataclasses.replace(t, stride=contiguous(t.shape))
    return dataclasses.replace(part, inputs=inputs, outputs=(*part.outputs, moved))
