"""Writes the text of a kernel around bodies, and says how it is launched.

In: a program without collectives. Out: a ``Kernel``: readable source of one Triton
function, its reads and writes in the order of its parameters, its grid and its warps.
Shapes are numbers in the text. Templates of collectives put several bodies into one
function by ``phase``, with code of their own in between. Never compiles anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fxpar.fusion.kernels.emit import Body, emit_body, number_source
from fxpar.fusion.kernels.reductions import Space
from fxpar.fusion.kernels.region_program import RegionProgram, Tensor

IMPORTS = """import triton
import triton.language as tl

from fxpar.fusion.kernels import device_functions as lib
"""

# Blocks that run at a time where each writes a part of a sum: these parts are read
# again, and fewer would not keep a device busy.
_SUMMING = 512
_WARP = 32
_INT32 = 2**31


@dataclass(frozen=True, eq=False)
class Kernel:
    """Holds the source of one kernel, and what it is called with."""

    name: str  # name of the function that ``text`` defines
    # Its source. Parameters, in order: pointers of ``reads``, then of ``writes``, the
    # values of ``alone``, those of ``numbers``, and PROGRAMS, the size of the grid.
    text: str
    reads: tuple[Tensor, ...]  # inputs that it reads, in the program's order
    writes: tuple[Tensor, ...]  # all outputs of the program
    # Outputs of which each program writes a part, [PROGRAMS, elements] in float32, to
    # be added up.
    sums: frozenset[str]
    numbers: tuple[int, ...]  # indices among the program's integers
    space: Space  # the elements that it runs over
    programs: int  # size of the grid
    warps: int  # warps of a block
    # Values that are read or written only element by element, and in one loop -> the
    # index of that loop.
    loops: Mapping[str, int]
    alone: tuple[str, ...] = ()  # inputs of one element that are given as numbers


def kernel_of(
    program: RegionProgram, *, random: str = "cpp", alone: Collection[str] = ()
) -> Kernel:
    """Return the kernel of a program without collectives, from pointers to pointers.
    ``alone``: inputs of one float each that are given as numbers.

    Raises CannotEmit.
    """
    alone = tuple(t.name for t in program.inputs if t.name in alone)
    sources = {name: number_source(name) for name in alone}
    body = emit_body(program, sources=sources, random=random)
    name = f"region_{program.hash}"
    sums = frozenset(body.sums)
    inside = phase(body, wide=is_wide(program))
    read = {p.removesuffix("_ptr") for p in body.parameters}
    alone = tuple(name for name in alone if f"{name}_value" in body.parameters)
    values = [f"{name}_value" for name in alone]
    parameters = [p for p in body.parameters if p.endswith("_ptr")]
    parameters += [*values, *(f"n{i}" for i in body.numbers)]
    return Kernel(
        name,
        function(name, parameters, inside, str(program)),
        tuple(t for t in program.inputs if t.name in read),
        program.outputs,
        sums,
        body.numbers,
        body.space,
        programs_of(body.space, bool(sums)),
        warps_of(body.space),
        loops_of([body]),
        alone,
    )


def loops_of(bodies: Sequence[Body]) -> dict[str, int]:
    """Return, for values that are read or written in one of several loops alone,
    element by element, the index of that loop."""
    loops: dict[str, int] = {}
    for i, body in enumerate(bodies):
        for name, alone in body.touched.items():
            one_loop = loops.setdefault(name, i) == i
            loops[name] = i if alone and one_loop else -1
    return {name: i for name, i in loops.items() if i >= 0}


def programs_of(space: Space, sums: bool) -> int:
    """Return the size of the grid."""
    return min(space.turns, _SUMMING) if sums else space.turns


def warps_of(space: Space) -> int:
    """Return the warps of a block: sixteen elements to a thread of a row, eight of a
    flat one."""
    each = 16 if space.columns else 8
    return max(1, min(16, space.block // (_WARP * each)))


def is_wide(program: RegionProgram) -> bool:
    """Return whether offsets in memory need more than 32 bits."""
    tensors = (*program.inputs, *program.outputs)
    return any(
        sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True)) >= _INT32
        for t in tensors
    )


def function(
    name: str, parameters: Sequence[str], lines: Sequence[str], about: str
) -> str:
    """Return the source of a module with one jitted function. ``lines``: of its
    body."""
    numbers = [p for p in parameters if p[0] == "n" and p[1:].isdigit()]
    signature = ", ".join([*parameters, "PROGRAMS: tl.constexpr"])
    # A number that differs between ranks must not give them different kernels.
    how = f"(do_not_specialize={numbers})" if numbers else ""
    note = "\n".join(f"# {line}".rstrip() for line in about.splitlines())
    inside = "\n".join(f"    {line}".rstrip() for line in lines)
    head = f"{note}\n\n{IMPORTS}\n\n@triton.jit{how}\ndef {name}({signature}):\n"
    return f"{head}{inside}\n"


def phase(
    body: Body, *, blocks: str = "range(pid, {turns}, PROGRAMS)", wide: bool = False
) -> list[str]:
    """Return the lines of a function that run a body over its blocks: those before the
    loop, the loop over ``blocks``, an expression, and those after it."""
    space = body.space
    lines = ["pid = tl.program_id(0)"]
    turn, cast = "row" if space.columns else "block", []
    if wide:
        cast = [f"{turn} = tl.cast(turn, tl.int64)"]
        turn = "turn"
    if space.columns:
        lines.append(f"col = tl.arange(0, {space.block})")
        if not space.is_whole:
            lines.append(f"live = col < {space.columns}")
        inside = [f"at = row * {space.columns} + col"]
    else:
        inside = [f"at = block * {space.block} + tl.arange(0, {space.block})"]
        if not space.is_whole:
            inside.append(f"live = at < {space.count}")
    lines += body.before
    lines.append(f"for {turn} in {blocks.format(turns=space.turns)}:")
    lines += [f"    {line}" for line in (*cast, *inside, *body.loop)]
    return [*lines, *body.after]
