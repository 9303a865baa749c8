"""One mesh with stages and one number of microbatches, as a search has it.

In: a ``StagedProgram``, a Request on the mesh, and how many microbatches. Out: a
``StagedChoice``, or why there is none: the plan of a stage, searched for one part of
the batch on all stages together, and cut (``search.price_stages``). Compares no meshes
(``choose_stages`` does), and never looks at graphs. ``decide_in_stages`` has no
choice: of a mesh that is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fxpar.errors import FxparError, HintError, MeshError, PlanError, SpecError
from fxpar.sharding.choose_mesh import search_of
from fxpar.sharding.cut_in_time import cut_in_time
from fxpar.sharding.decide import Decision
from fxpar.sharding.decide_request import (
    batch_in_parts,
    decide_in_parts,
    decide_on,
    parts_of,
)
from fxpar.sharding.hints import pinned_stages
from fxpar.sharding.pipeline_schedule import stage_places
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.refine_mesh import head_counts, refine
from fxpar.sharding.search.batch_parts import BatchCut, PartProgram, SharedKernels
from fxpar.sharding.search.least_memory import least_bytes
from fxpar.sharding.search.memory_constraints import Entry
from fxpar.sharding.search.price_stages import StagedStep, least_staged, price_stages
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from fxpar.sharding.solver import work_clock
from fxpar.units import percent_more, short_bytes, sizes_as_text

_UNFIT = (HintError, MeshError, SpecError)


@dataclass(frozen=True)
class StagedProgram:
    """What is tried on every mesh."""

    # All of its ranks get equal shards.
    program: Program
    # What of it follows the batch.
    cut: BatchCut
    # What lives when, of the whole batch.
    live: Sequence[Entry]
    # As ``PartProgram.whole_kernels``.
    kernels: SharedKernels = field(default_factory=dict)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The numbers of heads that its weights make."""
        return head_counts(self.program)


@dataclass(frozen=True)
class StagedChoice:
    """A plan in stages: what is asked for, and what was found."""

    # What is asked for, on the mesh chosen.
    request: Request
    # The plan on the mesh of a stage, searched for one microbatch.
    decision: Decision
    # What a step is predicted to take with it.
    step: StagedStep

    @property
    def told(self) -> StagedChoice:
        """The choice whose notes say how near to the best its plan is."""
        options, decision = self.request.mode, self.decision
        assert isinstance(options, SearchOptions)
        if not options.alike:
            return self
        notes = (str(search_of(decision)), *decision.notes)
        return replace(self, decision=replace(decision, notes=notes))


@dataclass(frozen=True)
class StagedTrial:
    """What a trial comes to."""

    # None: no plan, or none that is fast enough.
    choice: StagedChoice | None
    # Text of a note, after ``seconds``.
    text: str
    # Seconds of one part, no plan less.
    bound: float = 0.0
    # No plan of so many microbatches fits in memory.
    too_large: bool = False
    # Seconds of a step, if they are known.
    seconds: float | None = None

    def compared(self, best: float) -> str:
        """Format the trial relative to a plan of ``best`` seconds."""
        if self.seconds is None:
            return self.text
        return f"{percent_more(self.seconds, best)}{self.text}"

    def above(self, bound: float) -> StagedTrial:
        """With what another trial has proved of the same mesh and microbatches."""
        if self.choice is None or bound <= self.bound:
            return self
        decision = self.choice.decision
        search = search_of(decision).above(bound)
        choice = replace(self.choice, decision=replace(decision, search=search))
        return replace(self, choice=choice, bound=bound)


def one_part(
    program: Program,
    request: Request,
    cut: BatchCut,
    parts: int,
    kernels: SharedKernels | None = None,
) -> PartProgram:
    """Of so many parts of the batch one, on the stages of a request. ``kernels``: as
    ``PartProgram.whole_kernels``."""
    assert request.pipeline is not None, "of a mesh with stages"
    places = request.pipeline.places
    waits = request.order_of(parts) in ("gpipe", "looped_bfs")
    flying = parts if waits else min(places, parts)
    free = request.free_along_stages
    shared = {} if kernels is None else kernels
    return PartProgram(program, cut, parts, places, flying, free, shared)


def priced(
    decision: Decision, request: Request, options: SearchOptions
) -> StagedStep | None:
    """What a searched plan takes in the stages that a request asks for."""
    pipeline, signature = request.pipeline, decision.program.signature
    assert pipeline is not None, "of a mesh with stages"
    searched = search_of(decision)
    parts = searched.formulation.parts
    assert parts is not None, "the batch is cut"
    schedule = request.order_of(parts.count)
    count = len(stage_places(schedule, pipeline.places))
    names = [x.name for x in signature.inputs if x.kind in ("parameter", "input")]
    pinned = pinned_stages(request.hints, names, pipeline.axis, count)
    return price_stages(
        searched,
        pipeline,
        schedule,
        options.hardware,
        options.budget,
        pinned,
    )


def parts_in_memory(
    staged: StagedProgram, request: Request, options: SearchOptions, parts: int
) -> int:
    """Microbatches, twice as many as often as ranks that share everything lack memory;
    0 if the batch has not so many."""
    open_, rows = request.microbatches is None, staged.cut.rows
    while _least_bytes(staged, request, parts) > options.budget:
        if not open_ or rows % (2 * parts):
            return 0
        parts *= 2
    return parts


def attempt_in_memory(
    staged: StagedProgram,
    request: Request,
    options: SearchOptions,
    parts: int,
    end: float,
    bar: float = math.inf,
) -> StagedTrial:
    """As ``attempt``, with twice as many microbatches as often as memory asks, until
    the work comes to ``end``."""
    open_, rows = request.microbatches is None, staged.cut.rows
    while True:
        trial = attempt(staged, request, options, parts, bar)
        over = not open_ or rows % (2 * parts) or work_clock.left(end) < 0
        if not trial.too_large or over:
            return trial
        parts *= 2


def _least_bytes(staged: StagedProgram, request: Request, parts: int) -> float:
    """Bytes of a rank in so many microbatches, at least."""
    part = one_part(staged.program, request, staged.cut, parts)
    return least_bytes(staged.program, staged.live, request.mesh.size, part)


def attempt(
    staged: StagedProgram,
    request: Request,
    options: SearchOptions,
    parts: int,
    bar: float = math.inf,
    before: SearchResult | None = None,
) -> StagedTrial:
    """A plan in stages that takes less than ``bar`` seconds. ``before``: a glance at
    the same."""
    pipeline = request.pipeline
    assert pipeline is not None, "of a mesh with stages"
    places, bound = pipeline.places, 0.0
    schedule = request.order_of(parts)
    enough = bar / least_staged(1.0, places, parts, schedule)
    request = replace(request, mode=replace(options, enough=enough), microbatches=parts)
    try:
        request = request.on(refine(staged.program, request, staged.heads))
        program = replace(staged.program, signature=request.laid)
        part = one_part(program, request, staged.cut, parts, staged.kernels)
        decision = decide_on(program, request, before, part)
        bound = search_of(decision).bound
        if bound >= enough:
            least = least_staged(bound, places, parts, schedule)
            return StagedTrial(None, " at least", bound, seconds=least)
        step = priced(decision, request, options)
    except PlanError as error:
        too_large = error.what.startswith("no plan fits")
        return StagedTrial(None, _first_line(error), bound, too_large)
    except _UNFIT as error:
        return StagedTrial(None, _first_line(error))
    if step is None:
        return StagedTrial(
            None, "has more stages than the program has ops on the batch"
        )
    if max(step.memory) > options.budget:
        text = f"needs {short_bytes(max(step.memory))} a rank"
        return StagedTrial(None, text, bound, too_large=True)
    if not decision.is_even:
        return StagedTrial(None, "has unequal shards")
    if step.seconds >= bar:
        return StagedTrial(None, "", bound, seconds=step.seconds)
    decision = replace(decision, stages_begin=step.begins)
    choice = StagedChoice(request, decision, step)
    return StagedTrial(choice, "", bound, seconds=step.seconds)


def _first_line(error: FxparError) -> str:
    return str(error.what).splitlines()[0]


def decide_in_stages(program: Program, request: Request, parts: int) -> Decision:
    """The decision on a named mesh: searched for a stage of one of ``parts``
    microbatches, as many as the batch has; without stages for a step of all that are
    asked for; else as ``decide_on``."""
    pipeline, options = request.pipeline, request.mode
    if pipeline is None or not isinstance(options, SearchOptions):
        batch = batch_in_parts(program, request)
        if batch is None:
            return decide_on(program, request)
        return decide_in_parts(program, request, batch)
    cut = cut_in_time(program)
    count = parts_of(cut.rows, parts) if cut else 1
    if cut is None or count == 1:
        return decide_on(program, request)
    decision = decide_on(program, request, parts=one_part(program, request, cut, count))
    step = priced(decision, request, options)
    if step is None:
        return decision
    notes = [f"stages: {step}"]
    if max(step.memory) > options.budget:
        notes.append(_too_large(step, options.budget))
    return replace(decision, notes=(*decision.notes, *notes), stages_begin=step.begins)


def _too_large(step: StagedStep, budget: float) -> str:
    largest, room = sizes_as_text(max(step.memory), budget)
    return (
        f"a rank needs {largest} in the largest of {len(step.forward)} stages, "
        f"and has {room}: take more microbatches, or more stages"
    )
