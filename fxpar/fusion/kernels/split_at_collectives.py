"""A program cut at its collectives.

In: a program. Out: its steps in order: programs without collectives (a ``Part``) and
collectives (a ``Move``), which hand values on by name. What does not depend on a
collective and is not needed for one is computed as late as it can be, beside what reads
it. It copies lines and makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fxpar.fusion.kernels.region_program import Line, Program, Ref, Tensor, contiguous

WAIT = "_c10d_functional.wait_tensor.default"
ALL_REDUCE = "_c10d_functional.all_reduce.default"
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
ALL_GATHER = "_c10d_functional.all_gather_into_tensor.default"
MOVES = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})


@dataclass(frozen=True)
class Move:
    """A collective with its wait: ``result`` is made of ``operand``. Both are
    contiguous. ``line``: the collective's own."""

    line: Line
    operand: str
    result: str

    @property
    def kind(self) -> str:
        """One of "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"."""
        return self.line.op.split(".")[1]


@dataclass(frozen=True)
class Part:
    """What is computed between two collectives."""

    program: Program


@cache
def stages_of(program: Program) -> tuple[Part | Move, ...]:
    """The steps of a program."""
    moves = [line for line in program.lines if line.op in MOVES]
    stage = _stages(program)
    steps: list[Part | Move] = []
    for k in range(len(moves) + 1):
        lines = [
            line
            for line in program.lines
            if stage[line.name] == k and line.op not in MOVES and line.op != WAIT
        ]
        if lines:
            steps.append(Part(_part(program, lines)))
        if k < len(moves):
            steps.append(_move(program, moves[k]))
    return tuple(steps)


def _stages(program: Program) -> dict[str, int]:
    """The number of collectives that are done when a line runs."""
    least: dict[str, int] = {}  # by what it reads
    moved = 0
    for line in program.lines:
        after = max((least.get(name, 0) for name in line.refs), default=0)
        if line.op == WAIT:
            after += 1
        elif line.op in MOVES:
            assert after <= moved, "a collective needs one that is after it"
            after, moved = moved, moved + 1
        least[line.name] = after
    late: dict[str, int] = {}  # by what reads it
    end = moved
    outputs = {t.name for t in program.outputs}
    for line in reversed(program.lines):
        free = least[line.name] == 0 and line.op not in MOVES
        if free and line.name in late and line.name not in outputs:
            least[line.name] = late[line.name]
        here = least[line.name]
        for name in line.refs:
            late[name] = min(late.get(name, end), here)
    return least


def _move(program: Program, line: Line) -> Move:
    wait = next(w for w in program.lines if w.op == WAIT and line.name in w.refs)
    operand = line.args[0]
    assert isinstance(operand, Ref)
    return Move(line, operand.name, wait.name)


def _part(program: Program, lines: Sequence[Line]) -> Program:
    """Lines as a program: what others read of them are its outputs."""
    inside = {line.name for line in lines}
    read = {name: None for line in lines for name in line.refs if name not in inside}
    inputs = {t.name: t for t in program.inputs}
    results = {t.name: t for t in program.outputs}
    wanted = {
        name
        for other in program.lines
        if other.name not in inside
        for name in other.refs
    }
    outputs = [
        results.get(line.name, _tensor(line))
        for line in lines
        if line.name in wanted or line.name in results
    ]
    given = [inputs.get(name) or _tensor(program.values[name]) for name in read]
    # A collective reads what lies in memory row by row.
    moved = {n for x in program.lines if x.op in MOVES for n in x.refs}
    outputs = [_tensor(t) if t.name in moved else t for t in outputs]
    return Program(
        tuple(given), tuple(lines), tuple(outputs), program.numbers, program.ranks
    )


def _tensor(value: Line | Tensor) -> Tensor:
    return Tensor(value.name, value.shape, contiguous(value.shape), value.dtype)
