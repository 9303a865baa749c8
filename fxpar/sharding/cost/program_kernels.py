"""The kernels of a program, whatever plan is chosen: what each op moves, and when.

In: a Program. Out: ``ProgramKernels``. The graph is read as the simulation reads a
local one (``fused_kernels``), in global shapes and without collectives: the forward,
then the backward with what it computes again (``recompute``). So it is known which
values are written to memory at all, which op pays for what a kernel reads for several
of them, and when a kernel runs. Time counts ops. Never looks at specs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.sharding.cost.fused_kernels import (
    Buffer,
    KernelReader,
    Launch,
    TensorView,
)
from fxpar.sharding.cost.fused_work import Work, work_of
from fxpar.sharding.cost.op import is_light
from fxpar.sharding.cost.recompute import phases
from fxpar.sharding.program import Program, backward_ops, is_view, values_by_node

# Time of what does not happen.
NEVER = -1


@dataclass(frozen=True, eq=False)
class ProgramKernels:
    """What the kernels of a program move, and when."""

    program: Program
    # For each value the one whose memory it shows: itself, but of views.
    base: tuple[int, ...]
    # Bases of values that are in memory at all.
    written: frozenset[int]
    # Values of the forward that the backward computes anew.
    recomputed: frozenset[int]
    # Of each op, and when it reads its operands, in the forward and in the backward.
    works: tuple[Work, ...]
    reads: tuple[tuple[int, int], ...]
    # Of each value, whether it is read, by light ops alone.
    read_by_light: tuple[bool, ...]

    def made_by_light(self, v: int) -> bool:
        """Whether Inductor generates the op that makes a value, or what it views."""
        maker = self.program.producers.get(self.base[v])
        return maker is not None and is_light(self.program.ops[maker[0]].target)

    def reads_lightly(self, index: int) -> bool:
        """Whether Inductor generates the op, or all that read the view it is."""
        op = self.program.ops[index]
        return self.read_by_light[op.results[0]] if is_view(op) else is_light(op.target)


def kernels_of(program: Program, gathered: Collection[int] = ()) -> ProgramKernels:
    """``gathered``: values the backward makes anew in any case, those computed from
    resting parameters alone."""
    run = _Run(program, gathered)
    base = run.base()
    moved, launched = run.moved(base), Counter(run.leaders())
    works = tuple(
        work_of(op, program.values, tuple(moved[op.index]), launched[op.index])
        for op in program.ops
    )
    return ProgramKernels(
        program,
        tuple(base),
        frozenset(v for buffer, v in run.value_of.items() if buffer.written),
        frozenset(v for v in run.recomputed if base[v] == v),
        works,
        tuple(run.reads()),
        tuple(_read_by_light(program)),
    )


class _Run:
    """The graph of a program, read in the order it runs."""

    def __init__(self, program: Program, gathered: Collection[int]) -> None:
        self.program = program
        self.op_of = {op.node: op.index for op in program.ops}
        self.recomputed: set[int] = set()
        self.value_of: dict[Buffer, int] = {}
        self.launches: list[Launch] = []
        self.reader = KernelReader()
        # The op that runs at each place in the order; behind all where constants that
        # are returned are made.
        self.times: list[int] = []
        # Of the forward.
        self.early = 0
        if program.ops:
            self._read(program.ops[0].node.graph, gathered)

    def _read(self, graph: fx.Graph, gathered: Collection[int]) -> None:
        anew = values_by_node(self.program).items() if gathered else ()
        first, second = phases(graph, {node for node, v in anew if v in gathered})
        late = backward_ops(self.program)
        phase_ops = [
            [self.op_of.get(node, NEVER) for node in part] for part in (first, second)
        ]
        self.recomputed.update(
            v
            for op in phase_ops[1]
            if op != NEVER and op not in late
            for v in self.program.ops[op].results
        )
        self.early = len(first)
        self.times = [
            *_times(phase_ops[0], range(len(self.program.ops)), len(self.program.ops)),
            *_times(phase_ops[1], late, len(self.program.ops)),
            len(self.program.ops),
        ]
        for node in graph.nodes:
            if node.op == "placeholder":
                self.reader.step(node, -1.0, False)
        for i, node in enumerate(itertools.chain(first, second)):
            self.reader.step(node, float(i), i >= self.early)
        end = float(len(self.times) - 1)
        self.reader.step(graph.output_node(), end, bool(second))
        run = self.reader.launches()
        self.launches = run.launches
        for buffer in run.inputs:
            self.value_of[buffer] = self.program.value_of[buffer.node, 0]
        for launch in self.launches:
            count = Counter[fx.Node]()
            for buffer in launch.makes:
                place = buffer.node, count[buffer.node]
                self.value_of[buffer] = self.program.value_of[place]
                count[buffer.node] += 1

    def base(self) -> list[int]:
        """For each value the one whose memory it shows."""
        out = list(range(len(self.program.values)))
        for op in self.program.ops:
            shown = _flat(self.reader.values.get(op.node, []))
            for v, view in zip(op.results, shown, strict=False):
                if view.buffer is not None:
                    out[v] = self.value_of.get(view.buffer, v)
                else:
                    out[v] = self.program.value_of[view.node, 0]
        return out

    def leaders(self) -> list[int]:
        """The op that each kernel starts with."""
        ops = (
            [self.op_of[n] for n in x.nodes if n in self.op_of] for x in self.launches
        )
        return [min(each) for each in ops if each]

    def moved(self, base: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
        """Of each op (position, bytes): what it leaves in memory, and its part of what
        its kernel reads. That is read once: a reader that is split saves its part, not
        the whole, so ops pay in proportion to what they read."""
        program = self.program
        out: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for launch in self.launches:
            sizes = {self.value_of[b]: n for b, n in launch.reads.items()}
            readers_of: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            for op in (program.ops[self.op_of[n]] for n in launch.nodes):
                places: dict[int, tuple[int, int]] = {}
                for position, v in enumerate(op.operands):
                    if base[v] in sizes:
                        place = program.values[v].nbytes, -position
                        places[base[v]] = max(place, places.get(base[v], place))
                for b, (nbytes, position) in places.items():
                    readers_of[b].append((op.index, -position, nbytes))
            for b, readers in readers_of.items():
                rate = sizes[b] / max(sum(nbytes for *_, nbytes in readers), 1)
                for index, position, nbytes in readers:
                    out[index].append((position, nbytes * rate))
            for buffer in launch.writes:
                index, result = program.producers[self.value_of[buffer]]
                position = len(program.ops[index].operands) + result
                out[index].append((position, float(buffer.nbytes)))
        return out

    def reads(self) -> list[tuple[int, int]]:
        """For each op when it reads: (in the forward, in the backward)."""
        out = [[NEVER, NEVER] for _ in self.program.ops]
        for launch in self.launches:
            at = self.times[math.ceil(launch.order)]
            for node in launch.nodes:
                out[self.op_of[node]][int(launch.backward)] = at
        return [(early, late) for early, late in out]


def _flat(views: Sequence[object]) -> list[TensorView]:
    """The tensors of a call's result, in order."""
    out: list[TensorView] = []
    for view in views:
        if isinstance(view, list):
            out += _flat(view)
        elif isinstance(view, TensorView):
            out.append(view)
    return out


def _times(ops: Sequence[int], own: Collection[int], end: int) -> list[int]:
    """For each place the op that runs there or, of what is not ``own``, next."""
    out, now = [], end
    for op in reversed(ops):
        now = op if op in own else now
        out.append(now)
    return out[::-1]


def _read_by_light(program: Program) -> list[bool]:
    out = [v.index not in program.outputs for v in program.values]
    read = {v for op in program.ops for v in op.operands}
    for op in reversed(program.ops):
        light = is_light(op.target)
        if is_view(op):
            light = op.results[0] in read and out[op.results[0]]
        for v in op.operands:
            out[v] &= light
    return [v in read and light for v, light in enumerate(out)]
