"""Stages along a pipeline axis, where a search may choose them: mesh and microbatches.

In: a Program, a Request with ``staged`` meshes, and the Decision on the best mesh
without stages. Out: the faster of both, and its Request. The plan of a stage is
searched once for each mesh and number of microbatches, for one part of the batch on all
stages together, and cut (``search.price_stages``). What cannot win is not searched: no
pipeline beats its bubble with perfectly shared arithmetic. Never looks at graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpar.errors import HintError, MeshError, PlanError, SpecError
from fxpar.sharding.choose_mesh import ALIKE, decide_on, fastest, ms, search_of
from fxpar.sharding.cost.program_kernels import kernels_of
from fxpar.sharding.cut_in_time import cut_in_time
from fxpar.sharding.decide import Decision
from fxpar.sharding.hints import pinned_stages
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_schedule import stage_places
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.refine_mesh import refine
from fxpar.sharding.search.batch_parts import BatchCut, PartProgram
from fxpar.sharding.search.least_memory import least_bytes, whole_entries
from fxpar.sharding.search.memory_constraints import Entry
from fxpar.sharding.search.price_stages import StagedStep, least_staged, price_stages
from fxpar.sharding.search.run_search import SearchOptions, SearchResult

# By how much stages must be faster: nothing overlaps in either price, and a pipeline
# has more that is not in it.
PAYS = 0.05

# Microbatches for each place, as many as the batch has for all axes of its own.
PARTS_A_PLACE = (8, 4, 2, 1)

_UNFIT = (HintError, MeshError, SpecError)


class _TooLarge(PlanError):
    """No plan in so many parts fits in memory."""


@dataclass(frozen=True)
class StagedChoice:
    """A plan in stages: what is asked for, and what was found."""

    # What is asked for, on the mesh chosen.
    request: Request
    # The plan on the mesh of a stage, searched for one microbatch.
    decision: Decision
    # What a step is predicted to take with it.
    step: StagedStep


def choose_with_stages(program: Program, request: Request) -> tuple[Decision, Request]:
    """The decision on the best mesh of a request, and the request for it. With stages
    where these are faster by ``PAYS``, or where nothing else fits.

    Raises as ``choose_mesh.fastest``.
    """
    best, plan_error = None, None
    try:
        best = fastest(program, request)
    except PlanError as error:
        if not request.staged:
            raise
        plan_error = error
    unstaged = None if best is None else search_of(best)
    bar = math.inf if unstaged is None else unstaged.predicted * (1 - PAYS)
    staged, stage_notes = fastest_staged(program, request, bar, unstaged)
    if staged is not None:
        mesh = staged.request.whole_mesh
        note = f"mesh {mesh} chosen: {staged.step}"
        if unstaged is not None:
            note += f"; {unstaged.mesh} {ms(unstaged.predicted)}"
        notes = (*staged.decision.notes, note, *stage_notes)
        staged_request = replace(staged.request, mode=request.mode)
        return replace(staged.decision, notes=notes), staged_request
    if best is None:
        assert plan_error is not None
        raise plan_error
    best = replace(best, notes=(*best.notes, *stage_notes))
    return best, request.on(best.mesh)


def decide_in_stages(program: Program, request: Request, parts: int) -> Decision:
    """The decision on a named mesh with stages: searched for a stage of one of
    ``parts`` microbatches, as many as the batch has; else as ``decide_on``."""
    pipeline, options = request.pipeline, request.mode
    if pipeline is None or not isinstance(options, SearchOptions):
        return decide_on(program, request)
    cut = cut_in_time(program)
    count = _parts_of(cut, parts) if cut else 1
    if cut is None or count == 1:
        return decide_on(program, request)
    decision = decide_on(
        program, request, parts=_one_part(program, request, cut, count)
    )
    step = _priced(decision, request, options)
    if step is None:
        return decision
    notes = [f"stages: predicted {step}"]
    if max(step.memory) > options.budget:
        notes.append(_too_large(step, options.budget))
    return replace(decision, notes=(*decision.notes, *notes), stages_begin=step.begins)


def split_evenly(program: Program) -> Program:
    """The program whose ranks get alike shards, as stages need."""
    ops = [replace(op, rule=replace(op.rule, even=True)) for op in program.ops]
    return replace(program, ops=ops, even=True, balances=False)


def _parts_of(cut: BatchCut, most: int) -> int:
    """Microbatches of a batch: ``most``, or the next fewer that it has."""
    return max(n for n in range(1, most + 1) if cut.rows % n == 0)


def _priced(
    decision: Decision, request: Request, options: SearchOptions
) -> StagedStep | None:
    """What a searched plan takes in the stages that a request asks for."""
    pipeline, signature = request.pipeline, decision.program.signature
    assert pipeline is not None, "of a mesh with stages"
    schedule = request.pipeline_order
    count = len(stage_places(schedule, pipeline.places))
    names = [x.name for x in signature.inputs if x.kind in ("parameter", "input")]
    pinned = pinned_stages(request.hints, names, pipeline.axis, count)
    return price_stages(
        search_of(decision),
        pipeline,
        schedule,
        options.hardware,
        options.budget,
        pinned,
    )


def _too_large(step: StagedStep, budget: float) -> str:
    largest, room = max(step.memory) / 2**30, budget / 2**30
    return (
        f"a rank needs {largest:.3g} GiB in the largest of {len(step.forward)} stages, "
        f"and has {room:.3g} GiB: take more microbatches, or more stages"
    )


def _one_part(
    program: Program, request: Request, cut: BatchCut, parts: int
) -> PartProgram:
    assert request.pipeline is not None, "of a mesh with stages"
    places = request.pipeline.places
    flying = parts if request.pipeline_order == "gpipe" else min(places, parts)
    free = request.free_along_stages
    return PartProgram(program, cut, parts, places, flying, free)


def fastest_staged(
    program: Program,
    request: Request,
    bar: float,
    unstaged: SearchResult | None = None,
) -> tuple[StagedChoice | None, tuple[str, ...]]:
    """The fastest plan in stages that takes less than ``bar`` seconds, and what there
    is to know of the others. ``unstaged``: a search without stages.

    Within the seconds asked for, pricing included, but for the first mesh.
    """
    options = request.mode
    if not request.staged or not isinstance(options, SearchOptions):
        return None, ()
    begun, program = time.perf_counter(), split_evenly(program)
    least = _least_seconds(program, options, unstaged)
    if all(_waiting(mesh, _most_parts(mesh)) * least >= bar for mesh in request.staged):
        return None, (f"stages: none of {len(request.staged)} meshes can be faster",)
    cut = cut_in_time(program)
    if cut is None:
        return None, ("stages: no batch to cut into microbatches",)
    counts = ((mesh, _parts(mesh, cut, request)) for mesh in request.staged)
    rows = sorted(
        ((mesh, parts) for mesh, parts in counts if parts),
        key=lambda row: (_waiting(*row), row[0].axes[0][1]),
    )
    end = begun + options.seconds
    live = whole_entries(program, keep_gathered=request.keep_gathered)
    options = replace(
        options, ranked=False, seconds=options.seconds / 4, tolerance=ALIKE
    )
    best: StagedChoice | None = None
    texts, skipped = list[str](), 0
    for mesh, parts in rows:
        is_over = time.perf_counter() > end
        if least * _waiting(mesh, parts) >= bar or (is_over and texts):
            skipped += 1
            continue
        staged_request = request.on(mesh)
        choice, text = _attempt_in_memory(
            program, staged_request, options, cut, live, parts, bar, end
        )
        texts.append(f"{mesh} {text}")
        if choice is not None:
            best, bar = choice, choice.step.seconds
    best = best and _with_fewer_parts(program, request, best, options, cut, end)
    listed = f"stages: {', '.join(texts)}" if texts else "stages"
    return best, (f"{listed}; {skipped} meshes not searched",)


def _attempt_in_memory(
    program: Program,
    request: Request,
    options: SearchOptions,
    cut: BatchCut,
    live: Sequence[Entry],
    parts: int,
    bar: float,
    end: float,
) -> tuple[StagedChoice | None, str]:
    """As ``_attempt``, with twice as many microbatches as often as memory asks, until
    the clock shows ``end``."""
    open_ = request.microbatches is None
    while _least_bytes(program, live, request, cut, parts) > options.budget:
        if not open_ or cut.rows % (2 * parts):
            return None, "has too little memory for any plan"
        parts *= 2
    while True:
        try:
            return _attempt(program, request, options, cut, parts, bar)
        except _TooLarge as error:
            is_over = time.perf_counter() > end
            if is_over or not open_ or cut.rows % (2 * parts):
                return None, str(error.what).splitlines()[0]
        parts *= 2


def _least_bytes(
    program: Program,
    live: Sequence[Entry],
    request: Request,
    cut: BatchCut,
    parts: int,
) -> float:
    """Bytes of a rank in so many microbatches, at least."""
    part = _one_part(program, request, cut, parts)
    return least_bytes(program, live, request.mesh.size, part)


def _with_fewer_parts(
    program: Program,
    request: Request,
    best: StagedChoice,
    options: SearchOptions,
    cut: BatchCut,
    end: float,
) -> StagedChoice:
    """The choice with half as many microbatches, as long as that is faster, until the
    clock shows ``end``."""
    if request.microbatches is not None:
        return best
    while best.step.parts % 2 == 0 and best.step.parts > 2:
        if time.perf_counter() > end:
            break
        best_request, bar = best.request, best.step.seconds
        parts = best.step.parts // 2
        try:
            choice, _ = _attempt(program, best_request, options, cut, parts, bar)
        except _TooLarge:
            break
        if choice is None:
            break
        best = choice
    return best


def _attempt(
    program: Program,
    request: Request,
    options: SearchOptions,
    cut: BatchCut,
    parts: int,
    bar: float,
) -> tuple[StagedChoice | None, str]:
    """A plan in stages that takes less than ``bar`` seconds, and what was found.

    Raises _TooLarge if none fits in memory.
    """
    pipeline = request.pipeline
    assert pipeline is not None, "of a mesh with stages"
    places = pipeline.places
    enough = bar / least_staged(1.0, places, parts)
    request = replace(request, mode=replace(options, enough=enough), microbatches=parts)
    try:
        request = request.on(refine(program, request))
        program = replace(program, signature=request.laid)
        part = _one_part(program, request, cut, parts)
        decision = decide_on(program, request, parts=part)
        search = search_of(decision)
        if search.bound >= enough:
            least = least_staged(search.bound, places, parts)
            return None, f"takes {ms(least)} at least"
        step = _priced(decision, request, options)
    except PlanError as error:
        if error.what.startswith("no plan fits"):
            raise _TooLarge(error.what) from None
        return None, str(error.what).splitlines()[0]
    except _UNFIT as error:
        return None, str(error.what).splitlines()[0]
    if step is None:
        return None, "has more stages than the program has ops on the batch"
    if max(step.memory) > options.budget:
        raise _TooLarge(f"needs {max(step.memory) / 2**30:.3g} GiB a rank")
    if not decision.is_even:
        return None, "has shards that are not alike"
    if step.seconds >= bar:
        return None, ms(step.seconds)
    decision = replace(decision, stages_begin=step.begins)
    return StagedChoice(request, decision, step), ms(step.seconds)


def _least_seconds(
    program: Program, options: SearchOptions, unstaged: SearchResult | None
) -> float:
    """Seconds of the arithmetic of a step on one device, at its fastest."""
    works = (
        unstaged.formulation.kernels.works if unstaged else kernels_of(program).works
    )
    hardware = options.hardware
    flops = ((work, hardware.peak(work.dtype, family=work.family)) for work in works)
    return sum(w.flops / (peak.flops * peak.efficiency) for w, peak in flops if w.flops)


def _most_parts(mesh: Mesh) -> int:
    return mesh.axes[0][1] * PARTS_A_PLACE[0]


def _parts(mesh: Mesh, cut: BatchCut, request: Request) -> int:
    """Microbatches to try on a mesh; 0: there is no number."""
    if request.microbatches is not None:
        return _parts_of(cut, request.microbatches)
    places = mesh.axes[0][1]
    counts = [places * n for n in PARTS_A_PLACE if cut.rows % (places * n) == 0]
    feeds = mesh.axes[1][1] if len(mesh.axes) > 1 else 1
    fit = (n for n in counts if cut.rows // n % feeds == 0)
    return next(fit, counts[-1] if counts else 0)


def _waiting(mesh: Mesh, parts: int) -> float:
    """What arithmetic on one device is multiplied by, at least."""
    places = mesh.axes[0][1]
    return least_staged(1.0, places, parts) * places / (parts * mesh.size)
