"""The mesh with the fastest plan, of those that a request leaves open.

In: a Program and a Request with ``meshes``. Out: the Decision on the best, with a note
of what the others would take. ``decide_request`` decides on one mesh. Never searches
longer than asked for, but for pricing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpar.errors import FxparError, HintError, MeshError, PlanError, SpecError
from fxpar.sharding.decide import Decision, with_rivals
from fxpar.sharding.decide_request import (
    BatchInParts,
    batch_in_parts,
    constraints_of,
    decide_in_parts,
    decide_on,
    parts_of,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.refine_mesh import refine, rounded
from fxpar.sharding.search.batch_parts import SharedKernels
from fxpar.sharding.search.least_memory import least_held, whole_entries
from fxpar.sharding.search.mesh_candidates import unlike
from fxpar.sharding.search.rank_candidates import is_large, nearest
from fxpar.sharding.search.run_search import (
    AGAIN,
    STOPPED,
    SearchOptions,
    SearchResult,
)
from fxpar.sharding.search.too_large import nothing_fits
from fxpar.sharding.search.unequal_shards import best_shares
from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.message_passing import warm
from fxpar.units import percent_more

# Plans whose times differ by less count as equal: then fewer axes are better.
ALIKE = 1e-3

# Most plans on other meshes that are compared by their predicted steps, and most plans
# in all, the best included, for a large program.
_RIVALS, _LARGE_RIVALS = 3, 3

# The share of all seconds in which meshes are glanced at.
_TRIED = 0.75

# What a mesh may do to a plan that it has none: hints and specs name axes, memory.
_UNFIT = (HintError, MeshError, PlanError, SpecError)


def balanced(
    decision: Decision, request: Request, axes: Sequence[str], rows: int
) -> Decision:
    """A searched decision on unlike ranks, or one with the shares along ``axes`` with
    which its ranks would finish together, if that is faster. ``rows``: of the batch.
    """
    mesh, mode, search = decision.mesh, request.mode, decision.search
    assert isinstance(mode, SearchOptions) and search is not None
    best = best_shares(decision, mode.hardware)
    shares = {axis: best[axis] for axis in axes if axis in best}
    rebalanced = rounded(mesh.unrefined.with_shares(shares), axes, rows)
    if all(rebalanced.weights_of(axis) == mesh.weights_of(axis) for axis in axes):
        return decision
    rebalanced_decision = decide_on(
        decision.program, request.on(rebalanced.refined(mesh.names))
    )
    assert rebalanced_decision.search is not None
    return (
        rebalanced_decision
        if rebalanced_decision.search.predicted < search.predicted
        else decision
    )


def open_meshes(program: Program, request: Request) -> tuple[Mesh, ...]:
    """The meshes to search: where nothing names an axis, one of those that differ in
    the order of their axes only.

    Raises MeshError if nothing searches.
    """
    if not isinstance(request.mode, SearchOptions):
        raise MeshError(
            f"FXPAR_MESH=auto is chosen by a search, FXPAR_PLAN is {request.mode}",
            fix="set FXPAR_PLAN=search, or name the axes: FXPAR_MESH=dp="
            f"{request.mesh.size}",
        )
    if names_axes(program, request):
        return request.meshes
    return unlike(request.meshes, request.mode.hardware)


def names_axes(program: Program, request: Request) -> bool:
    """Whether anything but the plan says which axis splits what."""
    signature = request.laid
    rests = [declared.rest for declared in signature.inputs]
    rests += [declared.rest for declared in signature.outputs]
    split = any(rest is not None and not rest.is_whole for rest in rests)
    used = any(declared.use is not None for declared in signature.inputs)
    return bool(split or used or request.hints or constraints_of(program))


def _attempt(
    program: Program,
    request: Request,
    mesh: Mesh,
    options: SearchOptions,
    batch: BatchInParts | None = None,
    before: SearchResult | None = None,
) -> Decision:
    """A search on one mesh; of a shorter search before, it goes on from that.
    ``batch``: that is cut."""
    mesh_request = replace(request.on(mesh), mode=options)
    mesh_request = mesh_request.on(refine(program, mesh_request))
    program = replace(program, signature=mesh_request.laid)
    if batch is None:
        return decide_on(program, mesh_request, before)
    return decide_in_parts(program, mesh_request, batch, before)


@dataclass(frozen=True)
class _MeshTrial:
    """What is known of a mesh: seconds of the plan found, and of no plan less."""

    # That is tried.
    mesh: Mesh
    # Of the plan.
    seconds: float = math.inf
    # No plan takes less.
    bound: float = 0.0
    # Why there is no plan.
    error: FxparError | None = None

    def compared(self, best: float) -> str:
        """Format the seconds relative to a plan of ``best`` seconds."""
        if self.error is not None:
            return f"{self.mesh} {str(self.error.what).splitlines()[0]}"
        is_tried = math.isfinite(self.seconds)
        took = percent_more(self.seconds, best) if is_tried else "not tried"
        return f"{self.mesh} {took}"


def fastest(
    program: Program, request: Request, shared: SharedKernels | None = None
) -> Decision:
    """The decision on the mesh with the fastest plan found, with ``rivals`` set and a
    note of every candidate.

    Half of the seconds go to a glance at each mesh, in the order given, which ends as
    soon as it is proved to be no faster than the best so far. Pricing takes time too:
    a mesh for which, if it takes as long as the longest so far, three quarters of all
    seconds would not do is not tried. All other seconds go to the best, unless its plan
    is proved to be. ``shared``: filled, as ``whole_entries`` does. Raises MeshError if
    nothing searches, PlanError if ranks that share everything lack memory, and what
    ``decide_on`` does if no mesh has a plan.
    """
    meshes = open_meshes(program, request)
    warm()
    assert isinstance(request.mode, SearchOptions)
    with work_clock.within(request.mode.seconds):
        return _fastest(program, request, meshes, request.mode, shared)


def _fastest(
    program: Program,
    request: Request,
    meshes: Sequence[Mesh],
    options: SearchOptions,
    shared: SharedKernels | None,
) -> Decision:
    begun = work_clock.now()
    # Meshes are compared by one ruler.
    options = replace(options, ranked=False)
    batch = batch_in_parts(program, request, shared)
    _check_memory(program, request, options, shared, batch)
    glance, longest, end = options, 0.0, begun + _TRIED * options.seconds
    if len(meshes) > 1:
        share = options.seconds / 2 / len(meshes)
        glance = replace(options, seconds=share, by_hand=False)
    trials: list[_MeshTrial] = []
    searched: list[Decision] = []
    best: Decision | None = None
    for mesh in meshes:
        now = work_clock.now()
        if best is not None and work_clock.left(end) < longest:
            trials.append(_MeshTrial(mesh))
            continue
        try:
            decision = _attempt(program, request, mesh, glance, batch)
        except _UNFIT as error:
            trials.append(_MeshTrial(mesh, bound=math.inf, error=error))
            continue
        longest = max(longest, work_clock.now() - now)
        search = search_of(decision)
        trials.append(_MeshTrial(mesh, search.predicted, search.bound))
        searched.append(decision)
        if best is None or search.predicted < search_of(best).predicted * (1 - ALIKE):
            best = decision
            glance = replace(glance, enough=search.predicted)
    if best is None:
        return _search_largest(trials, options, program, request, batch)
    left = work_clock.left(begun + options.seconds)
    best = _search_longer(best, trials, left, program, request, batch)
    assert isinstance(request.mode, SearchOptions)
    return (
        _with_rivals(best, searched, trials, request) if request.mode.ranked else best
    )


def _with_rivals(
    best: Decision,
    searched: Sequence[Decision],
    trials: Sequence[_MeshTrial],
    request: Request,
) -> Decision:
    """Return the decision with rivals, on any mesh, that may be faster."""
    options = request.mode
    assert isinstance(options, SearchOptions)
    others = [x for x in searched if x.mesh.axes != best.mesh.axes]
    constraints, hints = constraints_of(best.program), request.hints
    by_search = {id(search_of(x)): x for x in (best, *others)}
    decisions: list[Decision] = []
    # To lower a plan of a large program takes as long as to search it.
    large = is_large(search_of(best))
    for x in nearest([search_of(best), *map(search_of, others)])[: 1 + _RIVALS]:
        decision = by_search[id(x)]
        if decision is best or not large:
            decision = with_rivals(decision, hints, constraints, options)
        decisions += [decision, *decision.rivals]
    by_search = {id(x.search): x for x in decisions if x.search is not None}
    near = [
        by_search[id(x)] for x in nearest([search_of(x) for x in by_search.values()])
    ]
    near = [
        *near[: _LARGE_RIVALS if large else 2 * _RIVALS],
        *(x for x in decisions if x.search is None),
    ]
    notes = best.notes[-1:] if STOPPED in best.notes else ()
    rivals = [
        replace(
            x,
            rivals=(),
            notes=(*x.notes, _note(x, trials), *notes),
        )
        for x in near
        if x.search is not best.search
    ]
    return replace(best, rivals=tuple(rivals))


def _check_memory(
    program: Program,
    request: Request,
    options: SearchOptions,
    shared: SharedKernels | None,
    batch: BatchInParts | None,
) -> None:
    """Raises PlanError if no plan on any mesh of so many ranks fits in memory."""
    ranks, limit = request.mesh.size, options.budget
    live = whole_entries(program, keep_gathered=request.keep_gathered, shared=shared)
    part = None
    if batch is not None:
        part = batch.part(program, parts_of(batch.cut.rows, batch.most))
    held = least_held(program, live, ranks, part)
    if sum(nbytes for _, nbytes in held) > limit:
        raise nothing_fits(program, limit, held, ranks, least=True)


def search_of(decision: Decision) -> SearchResult:
    """The search that decided."""
    assert decision.search is not None, "what is chosen was searched"
    return decision.search


def _search_longer(
    best: Decision,
    trials: Sequence[_MeshTrial],
    left: float,
    program: Program,
    request: Request,
    batch: BatchInParts | None,
) -> Decision:
    """The best mesh searched within the seconds that are ``left``."""
    first_search, mode = search_of(best), request.mode
    assert isinstance(mode, SearchOptions)
    if not first_search.is_proved and len(trials) > 1 and left > 0:
        seconds = left / (1 + AGAIN)
        longer_options = replace(mode, ranked=False, seconds=seconds)
        longer = _attempt(
            program, request, first_search.mesh, longer_options, batch, first_search
        )
        if search_of(longer).predicted <= first_search.predicted:
            best = longer
    search = search_of(best)
    rivals = min((x.bound for x in _others(search.mesh, trials)), default=math.inf)
    search = replace(search, rivals=rivals)
    notes = (*best.notes, _note(best, trials))
    if work_clock.is_stopped() and STOPPED not in notes:
        notes = (*notes, STOPPED)
    return replace(best, search=search, notes=notes)


def _others(mesh: Mesh, trials: Sequence[_MeshTrial]) -> list[_MeshTrial]:
    """Return the trials on other meshes, the fastest first."""
    others = (x for x in trials if x.mesh.axes != mesh.unrefined.axes)
    return sorted(others, key=lambda trial: trial.seconds)


def _note(decision: Decision, trials: Sequence[_MeshTrial]) -> str:
    """Return the note of a plan on its mesh and on the others that were tried."""
    note = f"mesh {decision.mesh} chosen of {len(trials)}"
    axes = decision.mesh.unrefined.axes
    best = min(trial.seconds for trial in trials if trial.mesh.axes == axes)
    if decision.search is not None:
        best = decision.search.predicted
    listed = ", ".join(x.compared(best) for x in _others(decision.mesh, trials))
    return f"{note}; a step is estimated on {listed}" if listed else note


def _search_largest(
    trials: Sequence[_MeshTrial],
    options: SearchOptions,
    program: Program,
    request: Request,
    batch: BatchInParts | None,
) -> Decision:
    """No glance found a plan. The mesh of most axes has most plans: all of the time
    goes to it, unless hints fit none."""
    searches = [trial for trial in trials if isinstance(trial.error, PlanError)]
    if not searches:
        error = trials[-1].error
        assert error is not None
        raise error
    return _attempt(program, request, searches[-1].mesh, options, batch)
