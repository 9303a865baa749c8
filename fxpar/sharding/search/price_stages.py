"""What a searched plan takes in stages: cut where it is cheapest, run by a schedule.

In: a SearchResult on the mesh of one stage, priced for one part of the batch
(``batch_parts``), and the Pipeline. Out: ``StagedStep``: seconds of a step by the
schedule's own order of actions, of the equal parts that each stage computes, the
messages between places, and what is done once for all parts; bytes that each place
holds. Chooses nothing but where to cut, as ``passes.stages.assign_stages`` does later
on the local graph, and changes nothing.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware import Hardware
from fxpar.sharding.cut_stages import cut_chain
from fxpar.sharding.pipeline_axis import Pipeline
from fxpar.sharding.pipeline_schedule import Action
from fxpar.sharding.program import Program, backward_of
from fxpar.sharding.search.batch_parts import STATIC, BatchCut
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.search.run_search import SearchResult
from fxpar.sharding.solver import Solution


@dataclass(frozen=True)
class StagedStep:
    """A step in stages, predicted. All lists are of stages, in order."""

    # The schedule's name.
    schedule: str
    # Microbatches.
    parts: int
    # Seconds of one part.
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    # Seconds of the slowest place once a step: weights gathered, gradients reduced, the
    # update.
    once: float
    # Seconds that the longest message takes.
    sending: float
    # Seconds of a step.
    seconds: float
    # Share of it in which places wait, on average.
    bubble: float
    # Bytes that a rank of each place holds at most.
    memory: tuple[float, ...]

    def __str__(self) -> str:
        count = len(self.forward)
        return (
            f"{count} stages, {self.schedule}, {self.parts} microbatches: "
            f"{self.seconds * 1e3:.4g} ms a step, {self.bubble:.0%} of it waiting"
        )


def price_stages(
    result: SearchResult, pipeline: Pipeline, schedule: str, hardware: Hardware
) -> StagedStep | None:
    """The step in stages; None if there are fewer ops on the batch than stages.

    ``schedule``: a name of ``pipeline_schedule.SCHEDULES``. Raises PlanError where it
    has no order for so many parts.
    """
    form, parts = result.formulation, result.formulation.parts
    assert parts is not None, "the batch is cut"
    chain = _Chain(form.program, parts.cut)
    places = schedules.stage_places(schedule, pipeline.places)
    count = len(places)
    if chain.length < count:
        return None
    cost = _costs(result.formulation, result.solution, chain)
    link = hardware.on(pipeline.mesh).link(pipeline.axis)
    sent = [collectives.message(link, nbytes) for nbytes in chain.crossing(result)]
    trains = any(cost.backward)
    crossing = [(1 + trains) * x for x in sent]
    total = [a + b for a, b in zip(cost.forward, cost.backward, strict=True)]
    cuts = cut_chain(total, chain.between_ops(crossing, count), count, parts.count)
    forward, backward = _by_stage(cost.forward, cuts), _by_stage(cost.backward, cuts)
    once = _at_places(_by_stage(cost.once, cuts), places)
    rows = schedules.rows_of(schedule, pipeline.places, parts.count, trains=trains)
    sending = max((sent[i] for i in cuts), default=0.0)

    slots = schedules.timed(
        rows, lambda action: schedules.seconds_of(action, forward, backward), sending
    )
    end = max(slot.end for slot in slots) + max(once)
    busy = sum(forward) + sum(backward)
    return StagedStep(
        schedule,
        parts.count,
        tuple(forward),
        tuple(backward),
        max(once),
        sending,
        end,
        1.0 - (busy * parts.count + sum(once)) / (end * pipeline.places),
        _memory(form, result.solution, chain, cuts, places, rows),
    )


def least_staged(part: float, places: int, parts: int) -> float:
    """Seconds that no cut into stages beats, if one part of the whole program takes
    ``part``: each stage the same, nothing sent (Alpa, arXiv 2201.12023, equation 2)."""
    return part * (places + parts - 1) / places


class _Chain:
    """Ops of the forward on the batch in a row, and the place in it of all others."""

    def __init__(self, program: Program, cut: BatchCut) -> None:
        self.program = program
        late = backward_of(program.ops[0].node.graph) if program.ops else set()
        self.late = {op.index for op in program.ops if op.node in late}
        self.ops = [
            op.index
            for op in program.ops
            if cut.factors[op.index] and op.index not in self.late
        ]
        self.length = len(self.ops)
        self.at: dict[int, int] = {op: i for i, op in enumerate(self.ops)}
        self._place_others()

    def _place_others(self) -> None:
        """An op of the backward stands where the op does that it differentiates, and
        never behind what it continues; an op of weights alone before its reader."""
        program, at = self.program, self.at
        by_number: dict[int, int] = {}
        for index in self.ops:
            number = program.ops[index].node.meta.get("seq_nr")
            if number is not None:
                by_number.setdefault(number, at[index])
        for op in program.ops:
            if op.index in at or op.index not in self.late:
                continue
            made = [program.producers[v][0] for v in op.operands if self._is_made(v)]
            continued = [at[i] for i in made if i in self.late and i in at]
            read = [at[i] for i in made if i not in self.late and i in at]
            limit = min(continued, default=self.length - 1)
            mine = by_number.get(op.node.meta.get("seq_nr", -1))
            if mine is None:
                mine = limit if continued else max(read, default=limit)
            at[op.index] = min(mine, limit)
        for op in reversed(program.ops):
            if op.index not in at:
                readers = [i for v in op.results for i, _ in program.uses[v]]
                at[op.index] = min((at[i] for i in readers), default=0)

    def _is_made(self, v: int) -> bool:
        return v in self.program.producers

    def place_of(self, v: int) -> int:
        """Of the op that makes a value, or that reads it first."""
        if self._is_made(v):
            return self.at[self.program.producers[v][0]]
        return min((self.at[i] for i, _ in self.program.uses[v]), default=0)

    def crossing(self, result: SearchResult) -> list[float]:
        """Bytes on a rank that are sent if a stage begins at each op of the row."""
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
        """What crossing takes, if not inside of what was one op of the user's."""
        numbers = [self.program.ops[i].node.meta.get("seq_nr") for i in self.ops]
        pairs = zip(crossing, numbers, [None, *numbers], strict=False)
        out = [
            math.inf if number is not None and number == before else cost
            for cost, number, before in pairs
        ]
        enough = sum(map(math.isfinite, out[1:])) >= count - 1
        return out if enough else list(crossing)


@dataclass(frozen=True)
class _Costs:
    """Seconds by place in the row: of one part, and once for all of them."""

    forward: list[float]
    backward: list[float]
    once: list[float]


def _costs(form: Formulation, solution: Solution, chain: _Chain) -> _Costs:
    parts, program = form.parts, form.program
    assert parts is not None
    out = _Costs(*([0.0] * chain.length for _ in range(3)))

    def add(seconds: float, place: int, late: bool, share: float) -> None:
        if share < 1.0:
            out.once[place] += seconds / share
        else:
            (out.backward if late else out.forward)[place] += seconds

    works = form.kernels.works
    launch = form.launches / max(1, sum(work.launches for work in works))
    places: list[tuple[int, bool, float]] = []
    for i, node in enumerate(form.nodes):
        if node.kind == "op":
            share = parts.op_share(node.of)
            place, late = chain.at[node.of], node.of in chain.late
            seconds = float(form.problem.costs[i][solution.choice[i]])
            seconds += launch * works[node.of].launches * share
        else:
            ends = {"input": program.inputs, "output": program.outputs}.get(node.kind)
            v = node.of if ends is None else ends[node.of]
            assert v is not None, "of a tensor"
            maker = program.producers.get(v, (-1,))[0]
            share, place = parts.value_share(v), chain.place_of(v)
            late, seconds = maker in chain.late, 0.0
        places.append((place, late, share))
        add(seconds, place, late, share)
    for edge in form.problem.edges:
        i, j = edge.i, edge.j
        table = form.problem.tables[edge.table]
        seconds = float(table[solution.choice[i], solution.choice[j]])
        if not seconds:
            continue
        end = j if form.nodes[j].kind == "op" else i
        place, late, _ = places[end]
        values = [places[k][2] for k in (i, j) if form.nodes[k].kind != "op"]
        share = min(values) if values else _moved_share(form, i, j)
        add(seconds, place, late, share)
    return out


def _moved_share(form: Formulation, i: int, j: int) -> float:
    """The share of a part of what goes from one op to another."""
    assert form.parts is not None
    maker, reader = (form.program.ops[form.nodes[k].of] for k in (i, j))
    both = set(maker.results) & set(reader.operands)
    return min(map(form.parts.value_share, both), default=1.0)


def _by_stage(values: Sequence[float], cuts: Sequence[int]) -> list[float]:
    ends = [0, *cuts, len(values)]
    return [sum(values[a:b]) for a, b in itertools.pairwise(ends)]


def _at_places(values: Sequence[float], places: Sequence[int]) -> list[float]:
    out = [0.0] * (max(places) + 1)
    for value, place in zip(values, places, strict=True):
        out[place] += value
    return out


def _memory(
    form: Formulation,
    solution: Solution,
    chain: _Chain,
    cuts: Sequence[int],
    places: Sequence[int],
    rows: Sequence[Sequence[Action]],
) -> tuple[float, ...]:
    """Bytes that a rank of each place holds at most: of its stages all that is there
    throughout, activations of the parts in flight, and the most that passes."""
    assert form.parts is not None
    flying = [_in_flight(row) for row in rows]
    throughout = [0.0] * len(rows)
    passing: list[dict[int, float]] = [defaultdict(float) for _ in rows]
    uniform = form.parts
    for entry, live in zip(form.memory_entries, form.problem.memory, strict=True):
        usage = float(live.usage[solution.choice[live.node]])
        place = places[bisect_right(cuts, chain.place_of(entry.value))]
        if entry.kind in STATIC:
            throughout[place] += usage * uniform.places
        elif entry.kind == "saved":
            one = usage * uniform.places / uniform.in_flight
            throughout[place] += one * flying[place]
        else:
            passing[place][live.begin] += usage
            passing[place][live.end] -= usage
    return tuple(h + _peak(p) for h, p in zip(throughout, passing, strict=True))


def _peak(changes: dict[int, float]) -> float:
    sums = itertools.accumulate(changes[t] for t in sorted(changes))
    return max(sums, default=0.0)


def _in_flight(row: Sequence[Action]) -> float:
    """The most parts whose activations a place holds at a time, as a share of one part
    on all of its stages."""
    stages = len({action.stage for action in row})
    last = {schedules.BACKWARD, schedules.WEIGHTS}
    steps = (
        1 if a.kind == schedules.FORWARD else -1 if a.kind in last else 0 for a in row
    )
    return max(itertools.accumulate(steps), default=0) / max(stages, 1)
