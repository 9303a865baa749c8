"""Predicts the step of a searched plan in stages: cut where it is cheapest, run by a
schedule.

In: a SearchResult on the mesh of one stage, priced for one part of the batch
(``batch_parts``), and the Pipeline. Out: ``StagedStep``: seconds of a step by the
schedule's own order of actions, of the equal parts that each stage computes, the
messages between places, and work done once for all parts; bytes that each place holds
(``stage_chain``). Never: chooses anything but the cuts, or changes the result.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware import Hardware
from fxpar.sharding.cut_stages import cut_chain, of_places
from fxpar.sharding.hints import pins_unfit
from fxpar.sharding.pipeline_axis import Pipeline
from fxpar.sharding.pipeline_schedule import Action
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.search.run_search import SearchResult
from fxpar.sharding.search.stage_chain import StageChain, exchange_seconds, stage_memory
from fxpar.sharding.solver import Solution

# The place of ops of no stage: the update of a training step.
UPDATE = -1


@dataclass(frozen=True)
class StagedStep:
    """Is a predicted step in stages. All lists are of stages, in order."""

    # The schedule's name.
    schedule: str
    # Number of microbatches.
    parts: int
    # Seconds of the forward of one part.
    forward: tuple[float, ...]
    # Seconds of the backward of one part.
    backward: tuple[float, ...]
    # Seconds of the slowest place once a step: weights gathered, gradients reduced and
    # sent to other places, the update.
    once: float
    # Seconds that the longest message takes.
    sending: float
    # Seconds of a step.
    seconds: float
    # Share of the step in which places wait, on average.
    bubble: float
    # Bytes that a rank of each place holds at most.
    memory: tuple[float, ...]
    # Names of the ops at which stages begin, but the first.
    begins: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.forward)
        return (
            f"{count} stages, {self.schedule}, {self.parts} microbatches, waiting "
            f"{self.bubble:.0%} of a step"
        )


def price_stages(
    result: SearchResult,
    pipeline: Pipeline,
    schedule: str,
    hardware: Hardware,
    budget: float = math.inf,
    pinned: Mapping[str, int] | None = None,
) -> StagedStep | None:
    """Return the step in stages; None if there are fewer ops on the batch than stages.

    ``pipeline``: gives each place its speed. ``schedule``: a name of
    ``pipeline_schedule.SCHEDULES``; ``budget``: bytes of a rank, exceeded if no cut
    fits; ``pinned``: parameter name -> the stage of its readers. Raises PlanError if
    the schedule has no order for that number of parts, HintError if no cut keeps all
    pins.
    """
    form, parts = result.formulation, result.formulation.parts
    assert parts is not None, "the batch is cut"
    chain = StageChain(form.program, parts.cut)
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
    rows = schedules.rows_of(schedule, pipeline.places, parts.count, trains=trains)
    flying = list(map(_in_flight, rows))
    memory = stage_memory(result, chain, places, flying, budget)
    crossing, pins = chain.between_ops(crossing, count), chain.pins(pinned or {})
    speeds = pipeline.speeds(places)
    cuts = cut_chain(total, crossing, count, parts.count, pins, memory, speeds)
    cuts = cuts or cut_chain(total, crossing, count, parts.count, pins, None, speeds)
    if len(cuts) < count - 1:
        raise pins_unfit(pinned or {}, chain.length, count)
    forward, backward = (
        [x / speed for x, speed in zip(_by_stage(row, cuts), speeds, strict=True)]
        for row in (cost.forward, cost.backward)
    )
    borders = [0.0, *(sent[i] for i in cuts), 0.0]
    losses = [hardware.beside * (a + b) for a, b in itertools.pairwise(borders)]
    forward = list(map(operator.add, forward, losses))
    backward = list(map(operator.add, backward, losses)) if trains else backward
    exchanges = exchange_seconds(result, chain, cuts, places, link)
    update = sum(cost.update) * _updated_share(parts)
    once = [
        seconds + exchange + update / speed
        for seconds, exchange, speed in zip(
            _at_places(_by_stage(cost.once, cuts), places),
            exchanges,
            pipeline.speeds(range(pipeline.places)),
            strict=True,
        )
    ]
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
        of_places(memory, cuts, places),
        tuple(form.program.ops[chain.ops[i]].name for i in cuts),
    )


def _updated_share(parts: PartProgram) -> float:
    """Return the share of the update that a place computes: its part, if parameters are
    split at rest along the axis of stages."""
    is_split = "split" in parts.along_stages.values()
    return 1 / parts.places if is_split else 1.0


def least_staged(
    part: float, places: int, parts: int, schedule: str = schedules.AUTO
) -> float:
    """Return seconds that no cut into stages beats, if one part of the whole program
    takes ``part`` seconds: equal stages, nothing sent, and no wait but for a pipeline
    that fills and empties (Alpa, arXiv 2201.12023, equation 2)."""
    waits = places - 1 if schedules.SCHEDULES[schedule].fills else 0
    return part * (waits + parts) / places


@dataclass(frozen=True)
class _Costs:
    """Holds seconds by place in the row of ops."""

    # Seconds of one part's forward.
    forward: list[float]
    # Seconds of one part's backward.
    backward: list[float]
    # Seconds of work done once for all parts.
    once: list[float]
    # Seconds of the update of a training step, which is of no stage.
    update: list[float]


def _costs(form: Formulation, solution: Solution, chain: StageChain) -> _Costs:
    parts, program = form.parts, form.program
    assert parts is not None
    out = _Costs(*([0.0] * chain.length for _ in range(4)))

    def add(seconds: float, place: int, late: bool, share: float) -> None:
        if place == UPDATE:
            out.update[0] += seconds / share
        elif share < 1.0:
            out.once[place] += seconds / share
        else:
            (out.backward if late else out.forward)[place] += seconds

    places: list[tuple[int, bool, float]] = []
    for i, node in enumerate(form.nodes):
        if node.kind == "op":
            share = parts.op_share(node.of)
            place = UPDATE if node.of in chain.update else chain.at[node.of]
            late = node.of in chain.late
            seconds = float(form.problem.costs[i][solution.choice[i]])
            if i in form.adding:  # done with every part, whatever the op's share
                adding = float(form.adding[i][solution.choice[i]])
                add(adding, place, late, 1.0)
                seconds -= adding
            seconds += form.launches_of(node.of)
        else:
            ends = {"input": program.inputs, "output": program.outputs}.get(node.kind)
            v = node.of if ends is None else ends[node.of]
            assert v is not None, "of a tensor"
            maker = program.producers.get(v, (-1,))[0]
            share, late, seconds = parts.value_share(v), maker in chain.late, 0.0
            place = UPDATE if maker in chain.update else chain.place_of(v)
        places.append((place, late, share))
        add(seconds, place, late, share)
    for edge in form.problem.edges:
        i, j = edge.i, edge.j
        table = form.problem.tables[edge.table]
        seconds = float(table[solution.choice[i], solution.choice[j]])
        if not seconds:
            continue
        # The stage that makes a value for the update pays for bringing it there.
        end = j if form.nodes[j].kind == "op" and places[j][0] != UPDATE else i
        place, late, _ = places[end]
        values = [places[k][2] for k in (i, j) if form.nodes[k].kind != "op"]
        share = min(values) if values else _moved_share(form, i, j)
        add(seconds, place, late, share)
    return out


def _moved_share(form: Formulation, i: int, j: int) -> float:
    """Return how many times moving a value from one op to another is paid for a
    part."""
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


def _in_flight(row: Sequence[Action]) -> float:
    """Return the most parts whose activations a place holds at a time, as a share of
    one part on all of its stages."""
    stages = len({action.stage for action in row})
    last = {schedules.BACKWARD, schedules.WEIGHTS}
    steps = (
        1 if a.kind == schedules.FORWARD else -1 if a.kind in last else 0 for a in row
    )
    return max(itertools.accumulate(steps), default=0) / max(stages, 1)
