"""Splits a region program at its collectives, for several kernels or for one.

In: a program. Out: its steps in order (``stages_of``): programs without collectives
(``ComputeStep``) and collectives (``CollectiveStep``), which pass values on by name; or
a ``SplitProgram``, from which one kernel is made. Lines that do not depend on a
collective and are not needed for one run as late as they can, together with their
readers. Never makes a new statement: it copies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fxpar.fusion.kernels.index_arithmetic import CannotEmit
from fxpar.fusion.kernels.region_program import (
    Ref,
    RegionProgram,
    Statement,
    Tensor,
    contiguous,
)

WAIT = "_c10d_functional.wait_tensor.default"
ALL_REDUCE = "_c10d_functional.all_reduce.default"
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
ALL_GATHER = "_c10d_functional.all_gather_into_tensor.default"
MOVES = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})


@dataclass(frozen=True)
class CollectiveStep:
    """Is a collective with its wait."""

    line: Statement  # the line of the collective itself
    operand: str  # name of the value that it moves; contiguous
    result: str  # name of its wait's result; contiguous

    @property
    def kind(self) -> str:
        """Return one of "all_reduce", "reduce_scatter_tensor",
        "all_gather_into_tensor"."""
        return self.line.op.split(".")[1]


@dataclass(frozen=True)
class ComputeStep:
    """Is the compute between two collectives."""

    program: RegionProgram  # the lines between them, as a separate program


@cache
def stages_of(program: RegionProgram) -> tuple[ComputeStep | CollectiveStep, ...]:
    """Return the steps of a program."""
    moves = [line for line in program.lines if line.op in MOVES]
    stage = _stages(program)
    steps: list[ComputeStep | CollectiveStep] = []
    for k in range(len(moves) + 1):
        lines = [
            line
            for line in program.lines
            if stage[line.name] == k and line.op not in MOVES and line.op != WAIT
        ]
        if lines:
            steps.append(ComputeStep(_part(program, lines)))
        if k < len(moves):
            steps.append(_move(program, moves[k]))
    return tuple(steps)


def _stages(program: RegionProgram) -> dict[str, int]:
    """Return, for each line, the number of collectives that are done when it runs."""
    least: dict[str, int] = {}  # by its operands
    started = 0
    for line in program.lines:
        after = max((least.get(name, 0) for name in line.refs), default=0)
        if line.op == WAIT:
            after += 1
        elif line.op in MOVES:
            assert after <= started, "a collective needs one that is after it"
            after, started = started, started + 1
        least[line.name] = after
    last_stage: dict[str, int] = {}  # by its readers
    end = started
    outputs = {t.name for t in program.outputs}
    for line in reversed(program.lines):
        free = least[line.name] == 0 and line.op not in MOVES
        if free and line.name in last_stage and line.name not in outputs:
            least[line.name] = last_stage[line.name]
        stage = least[line.name]
        for name in line.refs:
            last_stage[name] = min(last_stage.get(name, end), stage)
    return least


def _move(program: RegionProgram, line: Statement) -> CollectiveStep:
    wait = next(w for w in program.lines if w.op == WAIT and line.name in w.refs)
    operand = line.args[0]
    assert isinstance(operand, Ref)
    return CollectiveStep(line, operand.name, wait.name)


def _part(program: RegionProgram, lines: Sequence[Statement]) -> RegionProgram:
    """Return lines as a program; its outputs are the values that others read."""
    inside = {line.name for line in lines}
    read = {name: None for line in lines for name in line.refs if name not in inside}
    inputs = {t.name: t for t in program.inputs}
    results = {t.name: t for t in program.outputs}
    read_outside = {
        name
        for other in program.lines
        if other.name not in inside
        for name in other.refs
    }
    outputs = [
        results.get(line.name, row_major(line))
        for line in lines
        if line.name in read_outside or line.name in results
    ]
    operands = [inputs.get(name) or row_major(program.values[name]) for name in read]
    # A collective's operand is stored row by row.
    collective_operands = {n for x in program.lines if x.op in MOVES for n in x.refs}
    outputs = [row_major(t) if t.name in collective_operands else t for t in outputs]
    return RegionProgram(
        tuple(operands), tuple(lines), tuple(outputs), program.numbers, program.ranks
    )


def row_major(value: Statement | Tensor) -> Tensor:
    """Return a value as a tensor that is stored row by row."""
    return Tensor(value.name, value.shape, contiguous(value.shape), value.dtype)


@dataclass(frozen=True)
class SplitProgram:
    """Is a program split for one kernel with all of it."""

    moves: tuple[CollectiveStep, ...]  # in order
    # Before, between and after ``moves``, one more than these; may have no lines.
    parts: tuple[RegionProgram, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of the collectives, in order."""
        return tuple(move.kind for move in self.moves)


def cut(program: RegionProgram) -> SplitProgram:
    """Split a program for one kernel: each part gives all that the kernel must write.

    That includes values that pass from one collective to the next, or through one to
    the caller, and masks of this rank's part. Raises CannotEmit.
    """
    moves: list[CollectiveStep] = []
    parts: dict[int, RegionProgram] = {}
    for step in stages_of(program):
        if isinstance(step, CollectiveStep):
            moves.append(step)
        else:
            assert isinstance(step, ComputeStep)
            parts[len(moves)] = step.program
    if {0, 1} <= parts.keys():
        parts[0], parts[1] = _with_masks_moved(program, moves[0], parts[0], parts[1])
    output_names = {t.name for t in program.outputs}
    full = []
    for k in range(len(moves) + 1):
        part = parts.get(k, RegionProgram((), (), (), program.numbers, program.ranks))
        if k and moves[k - 1].result in output_names:
            part = _passing_on(part, row_major(program.values[moves[k - 1].result]))
        if k < len(moves) and moves[k].operand not in {t.name for t in part.outputs}:
            part = _passing_on(part, _operand(program, moves, k))
        full.append(part)
    return SplitProgram(tuple(moves), tuple(full))


def _with_masks_moved(
    program: RegionProgram,
    move: CollectiveStep,
    first: RegionProgram,
    then: RegionProgram,
) -> tuple[RegionProgram, RegionProgram]:
    """Return both parts, with outputs of the first that have the size of a collective's
    result and not of its operand moved to the second: a mask of this rank's rows that
    is a result itself."""
    operand, result = program.values[move.operand], program.values[move.result]
    fit = {t for t in first.outputs if t.count == result.count != operand.count}
    if not fit:
        return first, then
    other_outputs = tuple(t for t in first.outputs if t not in fit)
    names = {t.name for t in fit}
    present = {line.name for line in then.lines}
    lines = [line for line in _cone(first, names) if line.name not in present]
    lines += then.lines
    computed = {line.name for line in lines}
    inputs = {t.name: t for t in (*first.inputs, *then.inputs)}
    read = dict.fromkeys(name for line in lines for name in line.refs)
    outputs = (*(t for t in first.outputs if t in fit), *then.outputs)
    output_names = {t.name for t in program.outputs}
    return (
        dataclasses.replace(
            first,
            lines=_cone(first, {t.name for t in other_outputs}),
            outputs=other_outputs,
        ),
        dataclasses.replace(
            then,
            inputs=tuple(inputs[name] for name in read if name not in computed),
            lines=tuple(lines),
            outputs=tuple(t for t in outputs if t.name in output_names or t not in fit),
        ),
    )


def _cone(part: RegionProgram, names: set[str]) -> tuple[Statement, ...]:
    """Return the lines that compute some values."""
    names_read, lines = set(names), []
    for line in reversed(part.lines):
        if line.name in names_read:
            names_read.update(line.refs)
            lines.append(line)
    return tuple(reversed(lines))


def _operand(program: RegionProgram, moves: Sequence[CollectiveStep], k: int) -> Tensor:
    """Return the operand of a collective that no line before it makes: an input, or the
    result of the collective before. Raises CannotEmit."""
    name = moves[k].operand
    available = {t.name for t in program.inputs} | {move.result for move in moves[:k]}
    if name not in available:
        raise CannotEmit(name, "is given to a collective long after it is made")
    return next(
        (t for t in program.inputs if t.name == name), row_major(program.values[name])
    )


def _passing_on(part: RegionProgram, t: Tensor) -> RegionProgram:
    """Return a part that also passes on one of its inputs."""
    inputs = part.inputs
    if t.name not in {x.name for x in inputs}:
        inputs = (*inputs, t)
    handed_on = dataclasses.replace(t, stride=contiguous(t.shape))
    return dataclasses.replace(part, inputs=inputs, outputs=(*part.outputs, handed_on))
