"""Predicts the step of a searched plan in stages: cut where it is cheapest, run by a
schedule; and guesses it before a search.

In: a SearchResult on the mesh of one stage, priced for one part of the batch
(``batch_parts``), and the Pipeline. Out: ``StagedStep``: seconds of a step by the
schedule's own order of actions, of the equal parts that each stage computes, the
messages between places, and work done once for all parts; bytes that each place holds.

A ``StageChain`` is the row of the forward's ops that stages are cut out of, with the
place in it of every other op and of every value. Inputs that the plan lays out ("own")
stay at the places that read them; those that are whole at rest ("whole") are sent to
all places; those split along the axis ("split") are gathered at the stage that reads
them, and split again.

``cut_chain`` cuts by dynamic programming on seconds and bytes. A pipeline of ``m``
microbatches takes the sum of its stages' seconds and ``m - 1`` times the slowest (Alpa,
arXiv 2201.12023, equation 2); sending overlaps with compute, and counts as the slowest
where it takes longer. A stage that holds few microbatches may wait for one of them to
come back, messages included. The slowest stage is first made as fast as possible; then,
for some slower limits, the cuts across which least is sent are tried. A stage that
needs more memory than its place has is not allowed.

``estimate_stages`` needs no search, and gives searches their order: the arithmetic,
shared by all ranks; the wait of the pipeline; and the least exchange of ranks that
split the weights of a stage. Ranks of a stage split weights as far as memory asks (a
weight and the sum of its gradients are held where they are used), and the batch as far
as a microbatch has rows. Never: chooses anything but the cuts, or changes the result.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.hints import pins_unfit
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.pipeline_axis import Pipeline
from fxpar.sharding.pipeline_schedule import Action
from fxpar.sharding.program import Program, backward_of, phase_of
from fxpar.sharding.propagate.conventions import parameter_roots
from fxpar.sharding.search.batch_parts import STATIC, BatchCut, PartProgram
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.search.memory_constraints import Entry
from fxpar.sharding.search.run_search import SearchResult
from fxpar.sharding.solver import Solution

MESSAGE = 4 << 20


# -- cuts -----------------------------------------------------------------------------

# The most positions at which a cut is tried.
MOST = 192
# Factors by which the slowest stage may be slower than necessary, to send less.
_SLACK = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5)


# Bytes, and the ops of the chain that need them in memory.
Held = tuple[float, tuple[int, ...]]


@dataclass(frozen=True)
class StageMemory:
    """Holds the memory that ops of a chain need on a rank, by which stages are
    judged."""

    # By stage, the bytes that its place has for it.
    room: tuple[float, ...]
    # By stage, the microbatches whose activations it holds at a time.
    in_flight: tuple[float, ...]
    # Held throughout a step.
    throughout: Sequence[Held]
    # Held for one microbatch, until its backward.
    saved: Sequence[Held]
    # By op, the bytes that live only while it runs, or while its backward does.
    passing: Sequence[float]
    # Bytes that every place holds in addition; ``room`` does not include them.
    every: float = 0.0

    def bytes_of(self, ends: np.ndarray) -> list[np.ndarray]:
        """Return for each stage an array [i, j] of the bytes that it holds if it is
        made of the ops from ``ends[i]`` to ``ends[j]``."""
        throughout, saved = (_held(x, ends) for x in (self.throughout, self.saved))
        peak = np.zeros((len(ends), len(ends)))
        for i, begin in enumerate(ends[:-1].tolist()):
            runs = np.maximum.accumulate(self.passing[begin : ends[-1]])
            peak[i, i + 1 :] = runs[ends[i + 1 :] - begin - 1]
        return [throughout + flying * saved + peak for flying in self.in_flight]


def of_places(
    memory: StageMemory, cuts: Sequence[int], places: Sequence[int]
) -> tuple[float, ...]:
    """Return the bytes that each place holds. ``places``: of each stage; ``cuts``: as
    ``cut_chain`` returns them."""
    nbytes = memory.bytes_of(np.array([0, *cuts, len(memory.passing)]))
    sums = [memory.every] * (max(places) + 1)
    for stage, place in enumerate(places):
        sums[place] += float(nbytes[stage][stage, stage + 1])
    return tuple(sums)


def _held(items: Sequence[Held], ends: np.ndarray) -> np.ndarray:
    """Return an array [i, j] of the bytes of the items that a stage from ``ends[i]`` to
    ``ends[j]`` needs: each item once, where one of its ops is in the stage."""
    changes = np.zeros((len(ends) + 1, len(ends) + 1))
    for nbytes, ops in items:
        at = np.searchsorted(ends, sorted(set(ops)), side="right")
        for begin, end in itertools.pairwise([0, *at.tolist()]):
            changes[begin, end] += nbytes
            changes[end, end] -= nbytes
    return changes.cumsum(0).cumsum(1)[:-1, :-1]


def cut_chain(
    seconds: Sequence[float],
    crossing: Sequence[float],
    stages: int,
    microbatches: int,
    pins: Mapping[int, int] | None = None,
    memory: StageMemory | None = None,
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return where each stage but the first begins, as ``stages - 1`` growing
    positions; an empty tuple if no cut is possible.

    ``seconds``: of each op, of one microbatch; ``crossing``: seconds of sending if a
    stage begins at an op, infinite where none may; at least ``stages - 1`` are finite.
    ``pins``: op -> its stage. ``memory``: memory of the ops and room of the stages
    (Alpa, section 5.2). ``speeds``: of each stage, relative; empty: all equal.
    """
    assert 1 <= stages <= len(seconds), "a stage has an op"
    places = np.array(_candidates(crossing, stages, bool(pins)))
    begins = [_may_begin(places, stage, pins or {}) for stage in range(stages)]
    before = np.concatenate(([0.0], np.cumsum(seconds)))
    sent = np.array([0.0, *(crossing[p] for p in places[1:-1].tolist()), 0.0])
    # [i, j]: seconds of a stage from place i to place j.
    work = before[places][None, :] - before[places][:, None]
    work[np.tril_indices(len(places))] = np.inf
    pace = speeds or (1.0,) * stages
    works = [
        np.where(begin[:, None], work / speed, np.inf)
        for begin, speed in zip(begins, pace, strict=True)
    ]
    if memory is not None:
        pairs = zip(works, memory.bytes_of(places), memory.room, strict=True)
        works = [np.where(nbytes <= room, x, np.inf) for x, nbytes, room in pairs]
    least = _slowest(works)
    if not math.isfinite(least):
        return ()
    best, best_ends = np.inf, list[int]()
    for slack in _SLACK:
        bound = least * slack * (1 + 1e-9)
        ends = _cheapest([np.where(x <= bound, sent, np.inf) for x in works])
        stage_seconds = [
            float(x[i, j])
            for x, (i, j) in zip(works, itertools.pairwise(ends), strict=True)
        ]
        slowest, crossed = max(stage_seconds), [float(sent[i]) for i in ends]
        cycle = max(slowest, *crossed, *_rounds(stage_seconds, max(crossed), memory))
        total = sum(crossed) + (microbatches - 1) * cycle + slowest
        if total < best:
            best, best_ends = total, ends
    return tuple(int(places[i]) for i in best_ends[1:-1])


def _rounds(
    stage_seconds: Sequence[float], sending: float, memory: StageMemory | None
) -> Iterator[float]:
    """Yield for each stage the seconds from one microbatch to the next if it waits for
    the microbatches that it holds: one goes to the last stage and comes back before
    another is taken."""
    if memory is None:
        return
    for stage, flying in enumerate(memory.in_flight):
        there_and_back = sum(stage_seconds[stage:]) + sending * (
            len(stage_seconds) - 1 - stage
        )
        yield there_and_back / max(flying, 1.0)


def _may_begin(places: np.ndarray, stage: int, pins: Mapping[int, int]) -> np.ndarray:
    """Return whether a stage may begin at each place."""
    if stage == 0:
        return places == 0
    first = 1 + max((i for i, at in pins.items() if at < stage), default=-1)
    last = min((i for i, at in pins.items() if at >= stage), default=places[-1])
    return (places >= first) & (places <= last)


def _candidates(crossing: Sequence[float], stages: int, every: bool) -> list[int]:
    """Return both ends and, of equal stretches between, the place at which least is
    sent, or ``every`` place."""
    inner = [i for i in range(1, len(crossing)) if math.isfinite(crossing[i])]
    count = len(crossing) if every else max(MOST, 2 * stages)
    stretches = (x.tolist() for x in np.array_split(inner, count) if len(x))
    least = (min(places, key=crossing.__getitem__) for places in stretches)
    return [0, *least, len(crossing)]


def _slowest(works: Sequence[np.ndarray]) -> float:
    """Return the least seconds that the slowest stage can take."""
    reach = works[0][0]
    for work in works[1:]:
        reach = np.maximum(reach[:, None], work).min(axis=0)
    return float(reach[-1])


def _cheapest(costs: Sequence[np.ndarray]) -> list[int]:
    """Return the places where stages begin and end that have the least sum of costs."""
    reach, came = costs[0][0], []
    for cost in costs[1:]:
        sums = reach[:, None] + cost
        came.append(sums.argmin(axis=0))
        reach = sums.min(axis=0)
    ends = [len(reach) - 1]
    for source in reversed(came):
        ends.append(int(source[ends[-1]]))
    return [0, *reversed(ends)]


# -- prices ---------------------------------------------------------------------------


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
    settled, count = result.settled, max(places) + 1
    sent, received, messages = ([0.0] * count for _ in range(3))

    def move(v: int, at: int, kind: str) -> None:
        """Add a value that goes from one place to all ("whole"), a part of it to each
        ("split"), or that comes there from all ("gathered")."""
        axes = settled[v].sharded_axes
        nbytes = parts.whole.values[v].nbytes / result.mesh.count(axes)
        each = nbytes if kind == "whole" else nbytes / count
        one, others = (received, sent) if kind == "gathered" else (sent, received)
        one[at] += nbytes if kind == "whole" else nbytes * (count - 1) / count
        for place in range(count):
            others[place] += each if place != at else 0.0
            messages[place] += (each if kind == "gathered" else nbytes) / MESSAGE

    for v, along in layouts_to_send(chain, parts.along_stages).items():
        move(v, places[bisect_right(cuts, chain.place_of(v))], along)
    for weight, along in parts.along_stages.items():
        if along == "split" and weight not in program.producers:
            for stage in {bisect_right(cuts, at) for at in chain.readers(weight)}:
                move(weight, places[stage], "gathered")
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
    for result, v in program.tensor_outputs:
        if v not in program.producers:
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
        self.nodes = [program.ops[i].node for i in self.ops]
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
        for declared, v in program.tensor_inputs:
            if declared.name not in pinned:
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


def between_ops(
    nodes: Sequence[fx.Node], crossing: Sequence[float], count: int
) -> list[float]:
    """Return the cost of each crossing into a node, inf inside of one op of the user's,
    if enough cuts are left for ``count`` stages."""
    numbers = [node.meta.get("seq_nr") for node in nodes]
    pairs = zip(crossing, numbers, [None, *numbers], strict=False)
    out = [
        math.inf if number is not None and number == before else cost
        for cost, number, before in pairs
    ]
    enough = sum(map(math.isfinite, out[1:])) >= count - 1
    return out if enough else list(crossing)


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
    crossing, pins = between_ops(chain.nodes, crossing, count), chain.pins(pinned or {})
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
    # A place computes its part, if parameters are split along the axis at rest.
    is_split = "split" in parts.along_stages.values()
    update = sum(cost.update) * (1 / parts.places if is_split else 1.0)
    once = [
        seconds + exchange + update / speed
        for seconds, exchange, speed in zip(
            np.bincount(places, _by_stage(cost.once, cuts)).tolist(),
            exchanges,
            pipeline.speeds(range(pipeline.places)),
            strict=True,
        )
    ]
    sending = max((sent[i] for i in cuts), default=0.0)

    slots = schedules.timed(rows, forward, backward, sending)
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
        if not values:  # a value of one op that another reads
            makes, reads = (program.ops[form.nodes[k].of] for k in (i, j))
            both = {*makes.results} & {*reads.operands}
            values = [parts.value_share(v) for v in both] or [1.0]
        share = min(values)
        add(seconds, place, late, share)
    return out


def _by_stage(values: Sequence[float], cuts: Sequence[int]) -> list[float]:
    ends = [0, *cuts, len(values)]
    return [sum(values[a:b]) for a, b in itertools.pairwise(ends)]


def _in_flight(row: Sequence[Action]) -> float:
    """Return the most parts whose activations a place holds at a time, as a share of
    one part on all of its stages."""
    stages = len({action.stage for action in row})
    last = {schedules.BACKWARD, schedules.WEIGHTS}
    steps = (
        1 if a.kind == schedules.FORWARD else -1 if a.kind in last else 0 for a in row
    )
    return max(itertools.accumulate(steps), default=0) / max(stages, 1)


# The share of memory that weights and sums of their gradients may take: activations
# need some.
_ROOM = 0.8


@dataclass(frozen=True)
class StagesEstimate:
    """Holds the numbers of a program that an estimate needs."""

    # Seconds on one device.
    arithmetic: float
    # Bytes of weights and sums of gradients, which are held where they are used.
    used: float
    # Bytes of optimizer state and gradients, shared by all ranks of a stage.
    resting: float
    # Bytes that ranks that split all weights exchange in a step: for each weight the
    # smaller of its op's operands and results.
    exchanged: float
    # Rows of the batch.
    rows: int

    def seconds(
        self, mesh: Mesh, parts: int, hardware: Hardware, budget: float
    ) -> float:
        """Return the seconds of a step in ``parts`` microbatches. ``mesh``: the first
        axis is of stages; ``budget``: bytes of a rank."""
        (_, places), *axes = mesh.axes
        size, inner, on = mesh.size, mesh.size // places, hardware.on(mesh)
        room = _ROOM * budget - self.resting / size
        exchange, least = math.inf, self.used / places / max(room, 1.0)
        for count in range(len(axes) + 1):
            for chosen_axes in itertools.combinations(mesh.names[1:], count):
                ways = mesh.count(chosen_axes)
                groups = inner // ways
                if ways < inner and (ways < least or self.rows // parts % groups):
                    continue
                nbytes = self.exchanged / places / groups
                curve = collectives.along("all_reduce", on, chosen_axes)
                exchange = min(exchange, curve.seconds(nbytes))
        return least_staged(
            self.arithmetic / inner / parts + exchange * places / parts, places, parts
        )


def estimate_stages(
    program: Program, cut: BatchCut, live: Sequence[Entry], arithmetic: float
) -> StagesEstimate:
    """Return the estimate of a program. ``live``: entries of the whole batch;
    ``arithmetic``: seconds on one device."""
    entries = PartProgram(program, cut, 1).held(live)
    nbytes = {
        kind: float(sum(entry.nbytes for entry in entries if entry.kind == kind))
        for kind in ("parameter", "optimizer", "gradient", "accumulated")
    }
    return StagesEstimate(
        arithmetic,
        nbytes["parameter"] + nbytes["accumulated"],
        nbytes["optimizer"] + nbytes["gradient"],
        _exchanged(program),
        cut.rows,
    )


def _exchanged(program: Program) -> float:
    roots, backward = parameter_roots(program), program.backward
    total = 0.0
    for op in program.ops:
        if op.index in backward or not op.rule.contracted:
            continue
        others = [v for v in op.operands if v not in roots]
        if len(others) < len(op.operands) and others:
            sizes = [program.values[v].nbytes for v in (*others, *op.results)]
            total += min(sizes)
    return total if backward else total / 2
