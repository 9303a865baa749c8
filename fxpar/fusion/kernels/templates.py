"""Writes collectives inside a kernel, with the compute around them.

In: a program with one collective, or a reduce-scatter and the all-gather of a value
made of its result. Out: a ``Template``: one kernel in phases with barriers between
(``device_functions.barrier``). Each rank gives its operand by writing it into a buffer
that all ranks read.

    all-reduce, one shot    give | sum all ranks' values, go on
    all-reduce, two shot    give | sum the blocks that are this rank's | go on with
                            the sums of all
    all-reduce, multimem    give | have the switch sum the blocks that are this rank's,
                            and write the sums to all | go on
    reduce-scatter          give | sum this rank's part, go on
    all-gather              give | go on with all ranks' parts
    both                    give | sum, update, give | go on

Sums are in float32 and in the order of ranks, so values that should be equal on ranks
are equal to the bit. Program i of a rank waits for program i of the others alone; so in
each phase it reads only what program i of any rank wrote: a value that is read in
another order than it is given has no template. Never runs anything (``region_op``
does), and knows no rank: a rank's number is an argument.

After one-shot and two-shot all-reduce of PyTorch (CUDASymmetricMemoryOps) and kraken.
Two shots here deal out blocks in turn instead of slices, so that the programs of all
phases agree, and keep sums separate from their summands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxpar.fusion.kernels.emit import (
    Body,
    Kernel,
    Sink,
    Source,
    assembled,
    emit_body,
    is_wide,
    masked,
    number_source,
    phase,
    pointer_sink,
    pointer_source,
)
from fxpar.fusion.kernels.expressions import DTYPES
from fxpar.fusion.kernels.placement import (
    FLAT_BLOCK,
    Space,
    space_of,
)
from fxpar.fusion.kernels.region_program import (
    CannotEmit,
    CollectiveStep,
    RegionProgram,
    SplitProgram,
    Tensor,
    cut,
    dtype_of,
    row_major,
)
from fxpar.fusion.kernels.symmetric_memory import region_number

# Elements of the least block that parts of ranks are cut into: a warp's, 128 bits each.
_LEAST = 128
# Flat blocks are so many times as large where there is one for each program: peers'
# memory is far, so much of it has to be on its way at a time.
_LARGE = 2
# Bytes that one instruction of the switch sums.
_UNIT = 16
# The buffers of two collectives in one kernel begin at multiples of so many bytes.
_ALIGNED = 128

BOTH = ("reduce_scatter_tensor", "all_gather_into_tensor")
KINDS = frozenset(
    {("all_reduce",), ("reduce_scatter_tensor",), ("all_gather_into_tensor",), BOTH}
)
START = "left = lib.patience(signals_ptr, rank)"
NEXT = "left = lib.barrier(signals_ptr, rank, {ranks}, {region}, left)"


@dataclass(frozen=True)
class Template:
    """Is a kernel with its collectives inside."""

    # Its parameters are ``buffers_ptr`` and ``signals_ptr`` (int64, one address for
    # each rank), the kernel's reads and writes, its numbers, and the rank.
    kernel: Kernel
    nbytes: int  # bytes of each rank's buffer
    region: RegionProgram


def template_of(
    program: RegionProgram,
    *,
    shots: int,
    programs: int,
    random: str = "cpp",
    alone: Collection[str] = (),
    switch: bool = False,
) -> Template:
    """Return the kernel of a program with collectives.

    shots: 1 or 2, of an all-reduce. programs: the largest grid that runs at a time on
    every rank. alone: as in ``kernel_of``. switch: of two shots, the sums are made by
    ``multimem``.

    Raises CannotEmit.
    """
    split = cut(program)
    if split.kinds not in KINDS:
        raise CannotEmit(" and ".join(split.kinds), "there is no template of these")
    if switch and (split.kinds != ("all_reduce",) or shots != 2):
        raise CannotEmit(split.moves[0].result, "has no sums for the switch to make")
    return _TemplateBuilder(
        program, split, shots, programs, random, alone, switch
    ).build()


class _TemplateBuilder:
    """Builds the phases of one kernel, in order."""

    def __init__(
        self,
        program: RegionProgram,
        split: SplitProgram,
        shots: int,
        programs: int,
        random: str,
        alone: Collection[str],
        switch: bool,
    ) -> None:
        self.program, self.cut, self.random = program, split, random
        self.most, self.alone, self.switch = programs, alone, switch
        self.ranks, self.shots = program.ranks, shots
        self.wide = is_wide(program)
        self.is_scattered = self.cut.kinds != ("all_reduce",)  # a rank has a part of it
        self.space, self.whole = self._spaces()
        deal = self.ranks if self.shots == 2 and not self.is_scattered else 1
        self.programs = max(1, min(programs, -(-self.space.turns // deal)))
        self.starts: dict[str, int] = {}  # of the given operands, in bytes
        self.nbytes = 0
        self.bodies: list[Body] = []
        self.lines = [f"rank = n{program.numbers}", START]
        self.phase_outputs: dict[str, Tensor] = {}  # outputs of phases so far
        # Names among them that can be read again, by whether a phase runs over all
        # parts.
        self.by_blocks: dict[bool, set[str]] = {False: set(), True: set()}

    def build(self) -> Template:
        """Write all phases. Return the template."""
        for k, part in enumerate(self.cut.parts):
            if k:
                self._next()
                if self.shots == 2 and not self.is_scattered:
                    self._sum_own(self.cut.moves[0])
            self._part(k, part)
        kernel = assembled(
            f"region_{self.program.hash}_{'switch' if self.switch else self.shots}",
            self.program,
            self.bodies,
            self.lines,
            tuple(self.phase_outputs.values()),
            self.space,
            self.programs,
            ("buffers_ptr", "signals_ptr"),
            (f"n{self.program.numbers}",),
        )
        return Template(kernel, self.nbytes, self.program)

    def _next(self) -> None:
        region = region_number(self.program.hash, self.program.title)
        self.lines.append(NEXT.format(ranks=self.ranks, region=region))

    def _spaces(self) -> tuple[Space, Space]:
        """Return the spaces of a rank's part, and of all parts."""
        moves, values = self.cut.moves, self.program.values
        counts = {values[m.operand].count for m in moves}
        counts |= {values[m.result].count for m in moves}
        count = min(counts)
        if counts != {count, count * (self.ranks if self.is_scattered else 1)}:
            raise CannotEmit(moves[-1].result, "is not of the parts of all ranks")
        columns = {space_of(p).columns for p in self.cut.parts if p.outputs} - {0}
        if len(columns) > 1:
            raise CannotEmit(moves[0].result, "rows before and after it differ")
        if columns:
            (each,) = columns
            if count % each:
                raise CannotEmit(moves[0].result, "rows are split between ranks")
            space = Space(count, each)
        else:
            enough = count >= _LARGE * FLAT_BLOCK * self.most
            block = FLAT_BLOCK * (_LARGE if enough else 1)
            block = math.gcd(count, block) if self.is_scattered else block
            if block < _LEAST:
                why = f"parts of {count} elements are no multiple of {_LEAST}"
                raise CannotEmit(moves[0].result, why)
            space = Space(count, flat_block=block)
        if count < 2:
            raise CannotEmit(moves[0].result, "is one number")
        ranks = self.ranks if self.is_scattered else 1
        return space, dataclasses.replace(space, count=space.count * ranks)

    def _part(self, k: int, part: RegionProgram) -> None:
        """Write a phase: the compute after ``k`` collectives."""
        if not part.outputs:
            return
        kinds, moves = self.cut.kinds, self.cut.moves
        # All parts before a reduce-scatter and after a gather, else the rank's own.
        every = (
            k < len(moves) and kinds[k].startswith("reduce_scatter")
            or k > 0 and kinds[k - 1].startswith("all_gather")
        )  # fmt: skip
        sources: dict[str, Source] = {
            name: _same_place(name, pointer_source(name))
            for name in self.phase_outputs.keys() & self.by_blocks[every]
        }
        sources |= {name: number_source(name) for name in self.alone}
        sinks: dict[str, Sink] = {}
        if k:
            sources[moves[k - 1].result] = self._received(k - 1)
        available = sources.keys() | {t.name for t in self.program.inputs}
        missing = [t.name for t in part.inputs if t.name not in available]
        if missing:
            raise CannotEmit(missing[0], "is not made block by block")
        for t in part.outputs:
            self.phase_outputs[t.name] = t
        if k < len(moves):
            sinks[moves[k].operand] = self._give(k)
        space = self.whole if every and self.is_scattered else self.space
        body = emit_body(part, space, sources=sources, sinks=sinks, random=self.random)
        self._add(body, every)
        self.by_blocks[every] |= {t.name for t in part.outputs} - {*body.sums}

    def _add(self, body: Body, every: bool, blocks: str = "") -> None:
        self.bodies.append(body)
        if not every:
            how = {"blocks": blocks} if blocks else {}
            self.lines += phase(body, wide=self.wide, **how)
            return
        if body.sums:
            raise CannotEmit(body.sums[0], "is summed over the parts of all ranks")
        turns = self.space.turns
        blocks = f"range(part * {turns} + pid, (part + 1) * {turns}, PROGRAMS)"
        self.lines.append(f"for part in range({self.ranks}):")
        inside = phase(body, blocks=blocks, wide=self.wide)
        self.lines += [f"    {line}" for line in inside]

    def _give(self, k: int) -> Sink:
        """Return the sink to the own buffer, and to memory if others read it from
        there."""
        name = self.cut.moves[k].operand
        t = row_major(self.program.values[name])
        own = self._place(f"{name}_given", t)
        stored = {x.name for part in self.cut.parts[k + 1 :] for x in part.inputs}
        stored -= {move.result for move in self.cut.moves}
        stored -= {x.name for x in self.program.inputs}
        stored |= {x.name for x in self.program.outputs}
        plain = pointer_sink(name) if name in stored else None
        if plain is None:
            self.phase_outputs.pop(name)

        def write(offset: str, value: str, mask: str) -> Sequence[str]:
            _check(name, offset)
            lines = [f"tl.store({name}_given + {offset}, {value}{masked(mask)}"]
            return [*lines, *(plain.write(offset, value, mask) if plain else ())]

        return Sink(plain.parameters if plain else (), write, own)

    def _place(self, name: str, t: Tensor) -> tuple[str, ...]:
        """Make room in the buffer. Return the line that defines its address."""
        self.starts[name] = self.nbytes
        self.nbytes += -(-t.nbytes // _ALIGNED) * _ALIGNED
        return (f"{name} = {self._peer('rank', name, t.dtype)}",)

    def _peer(self, rank: str, name: str, dtype: str) -> str:
        return f"lib.peer(buffers_ptr, {rank}, {self.starts[name]}, {DTYPES[dtype]})"

    def _received(self, k: int) -> Source:
        """Return the source of the result of a collective."""
        move = self.cut.moves[k]
        if self.shots == 2 and not self.is_scattered:
            turn = "row" if self.space.columns else "block"
            owner = "rank" if self.switch else f"{turn} // PROGRAMS % {self.ranks}"
            return self._read_from(move, f"{move.operand}_summed", owner, "")
        if move.kind == "all_gather_into_tensor":
            start = f" - part * {self.space.count}"
            return self._read_from(move, f"{move.operand}_given", "part", start)
        start = f" + rank * {self.space.count}" if self.is_scattered else ""
        return self._read_sum(move, start)

    def _read_from(
        self, move: CollectiveStep, name: str, rank: str, start: str
    ) -> Source:
        """Return a source that reads one rank's buffer."""

        def read(offset: str, mask: str) -> tuple[Sequence[str], str]:
            _check(move.result, offset)
            dtype = self.program.values[move.result].dtype
            lines = [f"{name}_there = {self._peer(rank, name, dtype)}"]
            end = masked(mask, ", other=0")
            return lines, f"tl.load({name}_there + ({offset}{start}){end}"

        return Source((), read)

    def _read_sum(self, move: CollectiveStep, start: str) -> Source:
        """Return a source that sums all ranks' buffers, in their order."""
        summands, name = f"{move.operand}_given", move.result
        dtype = self.program.values[name].dtype
        each = range(self.ranks)
        before = [
            f"{name}_at_{r} = {self._peer(str(r), summands, dtype)}" for r in each
        ]
        widen = "" if dtype == "float32" else ".to(tl.float32)"

        def read(offset: str, mask: str) -> tuple[Sequence[str], str]:
            _check(name, offset)
            end = masked(mask, ", other=0")
            lines = [
                f"{name}_{r} = tl.load({name}_at_{r} + ({offset}{start}){end}{widen}"
                for r in each
            ]
            return lines, f"({' + '.join(f'{name}_{r}' for r in each)})"

        return Source((), read, tuple(before))

    def _sum_own(self, move: CollectiveStep) -> None:
        """Write the second shot: this rank sums its blocks, and all ranks wait for
        them."""
        t = row_major(self.program.values[move.result])
        summed = f"{move.operand}_summed"
        own = self._place(summed, t)
        if self.switch:
            self.lines += self._in_switch(t, f"{move.operand}_given", summed)
            self._next()
            return

        def write(offset: str, value: str, mask: str) -> Sequence[str]:
            return [f"tl.store({summed} + {offset}, {value}{masked(mask)}"]

        body = emit_body(
            RegionProgram((t,), (), (t,), 0, self.ranks),
            self.space,
            sources={t.name: self._read_sum(move, "")},
            sinks={t.name: Sink((), write, own)},
        )
        blocks = "range(pid + rank * PROGRAMS, {turns}, "
        self._add(body, False, f"{blocks}PROGRAMS * {self.ranks})")
        self._next()

    def _in_switch(self, t: Tensor, summands: str, summed: str) -> list[str]:
        """Return the lines in which the switch sums the same blocks, 16 bytes at a
        time."""
        per = _UNIT // dtype_of(t.dtype).itemsize
        each = self.space.columns or self.space.block
        if each % per or t.count % per:
            raise CannotEmit(t.name, f"has rows of {each}, no multiple of {per}")
        units = each // per
        block = 1 << (units - 1).bit_length()
        starts = self.starts[summands], self.starts[summed]
        sizes = self.ranks, units, block, t.count // per, DTYPES[t.dtype]
        call = ", ".join(map(str, (*starts, f"turn * {units}", *sizes)))
        first, step = "pid + rank * PROGRAMS", f"PROGRAMS * {self.ranks}"
        return [
            f"for turn in range({first}, {self.space.turns}, {step}):",
            f"    lib.switch_sum(buffers_ptr, {call})",
        ]


def _check(name: str, offset: str) -> None:
    """Raise CannotEmit unless others' memory is read in the order it is written in:
    block by block."""
    if offset != "at":
        raise CannotEmit(name, "is read in another order than it is communicated in")


def _same_place(name: str, source: Source) -> Source:
    """Return a source of a value of an earlier phase that raises CannotEmit for another
    order: programs see only what they wrote themselves."""

    def read(offset: str, mask: str) -> tuple[Sequence[str], str]:
        if offset not in ("at", "row"):
            raise CannotEmit(name, "is read in another order than it is made in")
        return source.read(offset, mask)

    return dataclasses.replace(source, read=read)
