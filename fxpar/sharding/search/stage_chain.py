"""Puts the forward of a program in a row of ops, out of which stages are cut.

In: a Program and which of its ops follow the batch. Out: a ``StageChain``: these ops of
the forward in a row, the place in it of every other op and of every value, the bytes
that cross each place. Never: chooses or prices anything.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from fxpar.sharding.program import Program, backward_of, phase_of
from fxpar.sharding.search.batch_parts import BatchCut
from fxpar.sharding.search.run_search import SearchResult


class StageChain:
    """Is the row of forward ops on the batch, with the place in it of all other ops."""

    def __init__(self, program: Program, cut: BatchCut) -> None:
        self.program = program
        late = backward_of(program.ops[0].node.graph) if program.ops else set()
        # The update of a training step is of no stage.
        self.update = {op.index for op in program.ops if phase_of(op.node) == "update"}
        self.late = {op.index for op in program.ops if op.node in late} - self.update
        self.ops = [
            op.index
            for op in program.ops
            if cut.factors[op.index]
            and op.index not in self.late
            and op.index not in self.update
        ]
        self.length = len(self.ops)
        self.at: dict[int, int] = {op: i for i, op in enumerate(self.ops)}
        self.in_row = frozenset(self.ops)
        self._place_others()

    def _place_others(self) -> None:
        """Give all other ops a place: an op of the backward takes the place of the op
        it differentiates, but none later than the op it continues; an op of weights
        alone takes its reader's."""
        program, at = self.program, self.at
        by_number: dict[int, int] = {}
        for index in self.ops:
            number = program.ops[index].node.meta.get("seq_nr")
            if number is not None:
                by_number.setdefault(number, at[index])
        for op in program.ops:
            if op.index in at or op.index not in self.late:
                continue
            makers = [
                program.producers[v][0] for v in op.operands if self._is_computed(v)
            ]
            continued = [at[i] for i in makers if i in self.late and i in at]
            read = [at[i] for i in makers if i not in self.late and i in at]
            limit = min(continued, default=self.length - 1)
            mine = by_number.get(op.node.meta.get("seq_nr", -1))
            if mine is None:
                mine = limit if continued else max(read, default=limit)
            at[op.index] = min(mine, limit)
        for op in reversed(program.ops):
            if op.index not in at:
                readers = [i for v in op.results for i, _ in program.uses[v]]
                staged = (at[i] for i in readers if i not in self.update)
                at[op.index] = min(staged, default=0)

    def _is_computed(self, v: int) -> bool:
        return v in self.program.producers

    def place_of(self, v: int) -> int:
        """Return the place of the op that makes a value, or that reads it first."""
        if self._is_computed(v):
            return self.at[self.program.producers[v][0]]
        return min((self.at[i] for i, _ in self.program.uses[v]), default=0)

    def readers(self, v: int) -> tuple[int, ...]:
        """Return places of ops of the row that read a value, also through ops outside
        it."""
        places, stack, seen = set[int](), [v], set[int]()
        while stack:
            for index, _ in self.program.uses[stack.pop()]:
                if index in seen or index in self.late or index in self.update:
                    continue
                seen.add(index)
                if index in self.in_row:
                    places.add(self.at[index])
                else:
                    stack += self.program.ops[index].results
        return tuple(sorted(places))

    def pins(self, pinned: Mapping[str, int]) -> dict[int, int]:
        """Return the place of each op that reads a pinned parameter -> its stage; the
        last stage, if it reads several."""
        pins: dict[int, int] = {}
        program = self.program
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True):
            if v is None or declared.name not in pinned:
                continue
            for place in self.readers(v):
                pins[place] = max(pins.get(place, 0), pinned[declared.name])
        return pins

    def crossing(self, result: SearchResult) -> list[float]:
        """Return the bytes on a rank that are sent if a stage begins at each op of the
        row."""
        program, base = self.program, result.formulation.kernels.base
        last: dict[int, int] = defaultdict(lambda: -1)
        for op in program.ops:
            if op.index not in self.late:
                for v in op.operands:
                    last[base[v]] = max(last[base[v]], self.at[op.index])
        changes = [0.0] * (self.length + 1)
        for index in self.ops:
            for v in program.ops[index].results:
                if base[v] == v and last[v] > self.at[index]:
                    axes = result.settled[v].sharded_axes
                    nbytes = program.values[v].nbytes / result.mesh.count(axes)
                    changes[self.at[index] + 1] += nbytes
                    changes[last[v] + 1] -= nbytes
        return list(itertools.accumulate(changes[:-1]))

    def between_ops(self, crossing: Sequence[float], count: int) -> list[float]:
        """Return ``crossing`` with inf inside of one op of the user's, if enough cuts
        are left."""
        numbers = [self.program.ops[i].node.meta.get("seq_nr") for i in self.ops]
        pairs = zip(crossing, numbers, [None, *numbers], strict=False)
        out = [
            math.inf if number is not None and number == before else cost
            for cost, number, before in pairs
        ]
        enough = sum(map(math.isfinite, out[1:])) >= count - 1
        return out if enough else list(crossing)
