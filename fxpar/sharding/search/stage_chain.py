"""Puts the forward of a program in a row of ops, out of which stages are cut, and
counts the bytes that stages hold, and those sent along their axis once a step.

In: a Program and which of its ops follow the batch. Out: a ``StageChain``: these ops of
the forward in a row, the place in it of every other op and of every value, the bytes
that cross each place. With a SearchResult for one part of the batch and the places of
stages: the ``StageMemory`` that they are cut by, and the seconds in which places
exchange weights, gradients and results. Inputs that the plan lays out ("own") stay at
the places that read them; those that are whole at rest ("whole") are sent to all
places; those split along the axis ("split") are gathered at the stage that reads them,
and split again. Never: chooses a cut.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from fxpar.sharding.cost import collectives
from fxpar.sharding.cut_stages import Held, StageMemory
from fxpar.sharding.mesh import Link
from fxpar.sharding.program import Program, backward_of, phase_of
from fxpar.sharding.search.batch_parts import STATIC, BatchCut
from fxpar.sharding.search.run_search import SearchResult

MESSAGE = 4 << 20


def stage_memory(
    result: SearchResult,
    chain: StageChain,
    places: Sequence[int],
    flying: Sequence[float],
    budget: float,
) -> StageMemory:
    """Return the memory that stages hold. ``places``: of each stage; ``flying``: of
    each place, the most microbatches in flight; ``budget``: bytes of a rank."""
    form, parts = result.formulation, result.formulation.parts
    assert parts is not None, "the batch is cut"
    throughout, saved, every = list[Held](), list[Held](), 0.0
    changes = np.zeros(len(chain.program.ops) + 3)
    for entry, live in zip(form.memory_entries, form.problem.memory, strict=True):
        share = parts.share(entry)
        nbytes = float(live.usage[result.solution.choice[live.node]]) / share
        if entry.kind == "saved":
            saved.append((nbytes, (chain.place_of(entry.value),)))
        elif entry.kind in STATIC:
            every += nbytes * parts.share_at_every(entry)
            own = nbytes * parts.share_at_stage(entry)
            readers = chain.readers(entry.value) or (chain.place_of(entry.value),)
            throughout += [(own, readers)] if own else []
        else:
            changes[live.begin] += nbytes
            changes[live.end] -= nbytes
    passing = np.zeros(chain.length)
    alive = changes.cumsum()
    for op in chain.program.ops:
        if op.index not in chain.update:
            place = chain.at[op.index]
            passing[place] = max(passing[place], alive[op.index])
    rounds = len(places) // (max(places) + 1)
    room = (budget - every) / rounds
    return StageMemory(
        (room,) * len(places),
        tuple(flying[place] for place in places),
        throughout,
        saved,
        passing.tolist(),
        every,
    )


def exchange_seconds(
    result: SearchResult,
    chain: StageChain,
    cuts: Sequence[int],
    places: Sequence[int],
    link: Link,
) -> list[float]:
    """Return, for each place, the seconds in which it sends and receives, once a step,
    inputs that are whole or split along the axis of stages, and results."""
    parts, program = result.formulation.parts, chain.program
    assert parts is not None, "the batch is cut"
    count = max(places) + 1
    sent, received, messages = ([0.0] * count for _ in range(3))

    def size(v: int) -> float:
        axes = result.settled[v].sharded_axes
        return parts.whole.values[v].nbytes / result.mesh.count(axes)

    def broadcast(nbytes: float, source: int) -> None:
        sent[source] += nbytes
        for place in range(count):
            received[place] += nbytes if place != source else 0.0
            messages[place] += nbytes / MESSAGE

    def deal(nbytes: float, source: int) -> None:
        sent[source] += nbytes * (count - 1) / count
        for place in range(count):
            received[place] += nbytes / count if place != source else 0.0
            messages[place] += nbytes / MESSAGE

    def put_together(nbytes: float, target: int) -> None:
        received[target] += nbytes * (count - 1) / count
        for place in range(count):
            sent[place] += nbytes / count if place != target else 0.0
            messages[place] += nbytes / count / MESSAGE

    for v, along in layouts_to_send(chain, parts.along_stages).items():
        source = places[bisect_right(cuts, chain.place_of(v))]
        (deal if along == "split" else broadcast)(size(v), source)
    for weight, along in parts.along_stages.items():
        if along == "split" and weight not in program.producers:
            for stage in {bisect_right(cuts, at) for at in chain.readers(weight)}:
                put_together(size(weight), places[stage])
    link = collectives.between_two(link)
    fixed = link.latency + link.overhead
    return [
        max(out, arrived) / link.bandwidth + math.ceil(number) * fixed
        for out, arrived, number in zip(sent, received, messages, strict=True)
    ]


def layouts_to_send(chain: StageChain, along_stages: dict[int, str]) -> dict[int, str]:
    """Return values that a stage sends to other places once a step, with "whole" or
    "split" for what each gets: results, gradients, and values that an update reads."""
    program, along_of = chain.program, dict[int, str]()
    for result, v in zip(program.signature.outputs, program.outputs, strict=True):
        if v is None or v not in program.producers:
            continue
        along = "own" if result.is_free else "whole"
        if result.kind == "gradient":
            along = along_stages.get(v, "own")
        if program.producers[v][0] not in chain.update and along != "own":
            along_of[v] = along
    split = "split" in along_stages.values()
    for index in chain.update:
        for v in program.ops[index].operands:
            maker = program.producers.get(v, (-1,))[0]
            if maker >= 0 and maker not in chain.update:
                along_of[v] = "split" if split else "whole"
    return along_of


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
