"""Holds candidates of a search as data, and picks the best: meshes, stages,
microbatches.

In: a Program, and a Request whose mesh is named, or open among ``meshes`` and
``staged``. Out: the Decision, with ``rivals`` on any mesh and notes of the others that
were tried, and the Request for its mesh. Choices that need another graph (bodies of
manual regions, axes of experts, schedules) are compared in ``fxpar.choose_plan``.
Meshes without stages share the seconds of a search, those with stages get as many
again.
Never: looks at graphs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.errors import (
    FxparError,
    HintError,
    MeshError,
    PlanError,
    SpecError,
    TooLargeError,
)
from fxpar.sharding.cost.program_kernels import kernels_of
from fxpar.sharding.decide import (
    Decision,
    constraints_of,
    cut_in_time,
    decide_on,
    with_rivals,
)
from fxpar.sharding.hints import pinned_stages
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_schedule import stage_places
from fxpar.sharding.plan_request import Request, distinct
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.conventions import batch_axes, batch_inputs
from fxpar.sharding.refine_mesh import head_counts, refine, rounded
from fxpar.sharding.search.batch_parts import BatchCut, PartProgram
from fxpar.sharding.search.memory_constraints import Entry, entries
from fxpar.sharding.search.price_stages import (
    StagedStep,
    estimate_stages,
    least_staged,
    price_stages,
)
from fxpar.sharding.search.run_search import (
    STOPPED,
    SearchOptions,
    SearchResult,
    is_large,
    nearest,
)
from fxpar.sharding.search.too_large import least_held, nothing_fits
from fxpar.sharding.search.unequal_shards import best_shares
from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.message_passing import warm
from fxpar.units import percent_more, short_bytes, sizes_as_text

# Plans whose times differ by a smaller share count as equal: then the first is better,
# which has fewer axes.
EQUAL = 1e-3
# By how much stages must be faster, and twice as many microbatches: neither price
# counts overlap, parts of a pipeline's step are not priced, and microbatches are
# unrolled.
PAYS = 0.05
# Microbatches for each place of a pipeline, the first that the batch allows.
PARTS_A_PLACE = (8, 4, 2, 1)

# Shares of the seconds after which a round begins no more searches: the first round
# without stages, the first with stages, and rounds of other numbers of microbatches.
_GLANCES, _STAGED_GLANCES, _OTHER_PARTS = 0.75, 0.55, 0.75
# Least seconds of a search, however late it begins.
_SHORT = 1.0
# A mesh whose estimate is this many times a known plan's seconds waits.
_FAR = 1.25

# Most plans on other meshes that are compared by their predicted steps, and most plans
# in all, the best included, for a large program.
_RIVALS, _LARGE_RIVALS = 3, 3

# Errors that say that a mesh has no plan: of hints and specs that name axes, of memory.
_UNFIT = (HintError, MeshError, PlanError, SpecError)


@dataclass(frozen=True, eq=False)
class Subject:
    """Holds the program that candidates are plans of, and the facts known about it."""

    # In global shapes; for stages with equal shards.
    program: Program
    # Its mesh is open or named.
    request: Request

    @property
    def options(self) -> SearchOptions:
        assert isinstance(self.request.mode, SearchOptions), "candidates are searched"
        return self.request.mode

    @cached_property
    def cut(self) -> BatchCut | None:
        """Return the factors and dims that follow the batch; None if there is no
        batch."""
        return cut_in_time(self.program)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Return the numbers of heads that weights have."""
        return head_counts(self.program)

    @cached_property
    def live(self) -> list[Entry]:
        """Return the tensors in memory and when they live, for the whole batch."""
        return entries(self.program, kernels_of(self.program))

    @cached_property
    def arithmetic(self) -> float:
        """Return the least seconds of the arithmetic of a step on one device."""
        works = kernels_of(self.program).works
        hardware = self.options.hardware
        flops = [(w, hardware.peak(w.dtype, w.family)) for w in works]
        return sum(w.flops / (x.flops * x.efficiency) for w, x in flops if w.flops)

    def part(self, program: Program, request: Request, count: int) -> PartProgram:
        """Return the program in ``count`` microbatches, all of them priced where there
        are no stages. Activations of one are freed before the next where forward and
        backward are one program."""
        assert self.cut is not None, "there is a batch"
        places, flying, paid = 1, 1 if request.step else count, count
        if request.pipeline is not None:
            places, paid = request.pipeline.places, 1
            waits = request.order_of(count) in ("gpipe", "looped_bfs")
            flying = count if waits else min(places, count)
        return PartProgram(program, self.cut, count, places, flying, paid)

    def least_held(self, request: Request, count: int) -> list[tuple[Entry, float]]:
        """Return the tensors, with bytes, that a rank holds at its peak under any plan,
        with the batch in ``count`` microbatches; 0: with the whole batch."""
        part = self.part(self.program, request, count) if count else None
        return least_held(self.program, self.live, request.mesh.size, part)


@dataclass(frozen=True)
class Candidate:
    """Holds a mesh, with stages or without, and the best known plan on it."""

    # Unrefined and with its stages; the request's mesh may be refined, without stages.
    mesh: Mesh
    # The request that the plan answers.
    request: Request
    # The first number of microbatches of stages to try.
    parts: int = 1
    # Guessed seconds of a step.
    estimate: float = 0.0
    # A lower bound on the seconds of a step under any plan.
    least: float = 0.0
    # The plan; None before a search, and where the search finds none.
    decision: Decision | None = None
    # Only with stages.
    step: StagedStep | None = None
    # Why there is no plan.
    error: FxparError | None = None

    @property
    def is_tried(self) -> bool:
        return self.decision is not None or self.error is not None

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step; infinite without a plan."""
        if self.decision is None:
            return math.inf
        return self.step.seconds if self.step else search_of(self.decision).predicted

    @property
    def bound(self) -> float:
        """Return a lower bound on the seconds of any plan, with stages for one
        microbatch."""
        if self.decision is None:
            return math.inf if self.error else 0.0
        return search_of(self.decision).bound

    def compared(self, best: float) -> str:
        """Return text that compares the seconds with a plan of ``best`` seconds."""
        if self.error is not None:
            return f"{self.mesh} {str(self.error.what).splitlines()[0]}"
        took = percent_more(self.seconds, best) if self.decision else "not tried"
        return f"{self.mesh} {took}"


def choose(program: Program, request: Request) -> tuple[Decision, Request]:
    """Return the decision on the best mesh of a request, and the request for that mesh:
    in stages where these are faster by ``PAYS``, or where nothing else fits.

    Raises MeshError if the mesh is open and the mode is not a search, PlanError if
    memory is too small with everything shared over all ranks, and as ``decide_on`` if
    no mesh has a plan.
    """
    if not request.meshes:
        return _on_named_mesh(Subject(program, request)), request
    if not isinstance(request.mode, SearchOptions):
        raise MeshError(
            f"FXPAR_MESH=auto is chosen by a search, FXPAR_PLAN is {request.mode}",
            fix="set FXPAR_PLAN=search, or name the axes: FXPAR_MESH=dp="
            f"{request.mesh.size}",
        )
    warm()
    best = None
    with work_clock.within(2 * request.mode.seconds):
        try:
            best = _fastest(Subject(program, request))
        except PlanError:
            staged, notes = fastest_staged(program, request, math.inf)
            if staged is None:
                raise
        else:
            bar = search_of(best).predicted * (1 - PAYS)
            staged, notes = fastest_staged(program, request, bar)
    if staged is None:
        assert best is not None
        others = (replace(x, notes=(*x.notes, *notes)) for x in best.rivals)
        best = replace(best, notes=(*best.notes, *notes), rivals=tuple(others))
        return best, request.on(best.mesh)
    decision, rivals = staged.decision, () if best is None else (best, *best.rivals)
    assert decision is not None and staged.step is not None
    note = f"mesh {staged.request.whole_mesh} chosen: {staged.step}"
    if best is not None:
        more = percent_more(search_of(best).predicted, staged.step.seconds)
        note += f"; a step is estimated on {best.mesh} {more}"
    decision = replace(decision, notes=(*decision.notes, note, *notes), rivals=rivals)
    return decision, replace(staged.request, mode=request.mode)


# -- the loop ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Round:
    """Describes a search of several candidates, the most promising first."""

    # The options of each search of the round.
    options: SearchOptions
    # Seconds of work, from the start of the first round, after which no search begins.
    end: float
    # Seconds that a step may take after the search; None: leave the candidate out.
    promise: Callable[[Candidate], float | None]
    # Factor on the number of microbatches; if not 1, repeated as long as it pays.
    times: float = 1.0
    # A promise must be at most this share of the shortest seconds so far.
    gain: float = math.inf


def _improved(
    subject: Subject,
    candidates: Sequence[Candidate],
    rounds: Sequence[_Round],
    bar: float = math.inf,
) -> list[Candidate]:
    """Return the candidates after all rounds.

    Each round searches its candidates in the order of their promises, so that cheap
    glances at all come before long searches of the best. Everything is compared by the
    predicted seconds of a step; the bound is the shortest of ``bar`` and the plans so
    far. A candidate is left out if no plan on it takes less than the bound (``least``),
    if it promises too little against the bound, or if it would end too late, judged by
    the longest search of its round; until there is a plan only the first reason counts.
    A search ends as soon as it has proved that it finds nothing below the bound.
    """
    begun, out = work_clock.now(), list(candidates)
    for row in rounds:
        longest = 0.0
        promises = {i: row.promise(x) for i, x in enumerate(out)}
        order = [(p, i) for i, p in promises.items() if p is not None]
        for _, i in sorted(order):
            while (promise := row.promise(out[i])) is not None:
                x, bound = out[i], min([bar, *(x.seconds for x in out)])
                left, now = work_clock.left(begun + row.end), work_clock.now()
                has_plan = any(x.decision for x in out)
                waits = left < longest or promise > row.gain * bound
                if x.least >= bound or (has_plan and waits):
                    break
                out[i] = _after(subject, x, row, left, bound)
                longest = max(longest, work_clock.now() - now)
                if row.times == 1.0 or out[i] is x:
                    break
    return out


def _after(
    subject: Subject, x: Candidate, row: _Round, left: float, bar: float
) -> Candidate:
    """Return a candidate after a search; the same if the search finds nothing better.
    ``left``: seconds until the round ends."""
    seconds = min(row.options.seconds, max(left, _SHORT))
    options = replace(row.options, seconds=seconds)
    parts = int(x.step.parts * row.times) if x.step else x.parts
    before = search_of(x.decision) if x.decision and row.times == 1.0 else None
    rest = subject.cut.rows % parts if x.step and subject.cut else 0
    if rest or (before and before.is_proved):
        return x
    after = _searched(subject, x, options, parts, bar, before)
    # With stages a glance of equal seconds wins: its equal layers balance stages
    # better.
    is_as_short = x.step is None and after.seconds == x.seconds
    if not x.decision or after.seconds < min(row.gain, 1.0) * x.seconds or is_as_short:
        return after
    if before is None or after.decision is None:
        return x
    proved = before.with_bound(max(before.bound, after.bound))
    return replace(x, decision=replace(x.decision, search=proved))


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate of the shortest step, the first of equal ones; None if none
    has a plan."""
    best = None
    for x in candidates:
        if x.decision and (best is None or x.seconds < best.seconds * (1 - EQUAL)):
            best = x
    return best


def _untried(x: Candidate) -> float | None:
    """Return the promise of a candidate that was never searched; None for others."""
    return None if x.is_tried else x.estimate / _FAR


def _may_have_plan(x: Candidate) -> float | None:
    """Return the known seconds; None if no search can find a plan. Where memory was too
    small a longer search may find one."""
    is_unfit = x.error is not None and not isinstance(x.error, TooLargeError)
    return None if is_unfit else x.seconds


def _searched(
    subject: Subject,
    x: Candidate,
    options: SearchOptions,
    parts: int = 1,
    bar: float = math.inf,
    before: SearchResult | None = None,
) -> Candidate:
    """Return a candidate with the plan that a search finds, or with the error that says
    why there is none. ``parts``: microbatches of stages; a first plan doubles them
    until memory suffices. ``before``: a shorter search of the same candidate."""
    request, pipeline, least, step = x.request, x.request.pipeline, 1.0, None
    if pipeline is not None:
        request = replace(request, microbatches=parts)
        schedule = request.order_of(parts)
        least = least_staged(1.0, pipeline.places, parts, schedule)
    request = replace(request, mode=replace(options, enough=bar / least))
    try:
        request = request.on(refine(subject.program, request, subject.heads))
        program = replace(subject.program, signature=request.as_planned)
        if pipeline is None:
            decision = _decide_in_parts(subject, program, request, before)
        else:
            part = subject.part(program, request, parts)
            decision = decide_on(program, request, before, part)
            step = _step_that_fits(decision, request)
    except _UNFIT as error:
        cut, is_open = subject.cut, subject.request.microbatches is None
        more = pipeline and is_open and isinstance(error, TooLargeError)
        if more and not x.decision and cut and cut.rows % (2 * parts) == 0:
            return _searched(subject, x, options, 2 * parts, bar)
        return replace(x, decision=None, step=None, error=error)
    return replace(x, request=request, decision=decision, step=step, error=None)


# -- one mesh ------------------------------------------------------------------------


def _on_named_mesh(subject: Subject) -> Decision:
    """Return the decision on a named mesh: with stages by a search for a stage of one
    of the microbatches that are requested, without stages for a step of all."""
    program, request = subject.program, subject.request
    if request.pipeline is None:
        return _decide_in_parts(subject, program, request)
    count = parts_of(subject.cut.rows, request.parts) if subject.cut else 1
    if count == 1:
        return decide_on(program, request)
    part, budget = subject.part(program, request, count), subject.options.budget
    decision = decide_on(program, request, parts=part)
    step = priced(decision, request)
    if step is None:
        return decision
    notes = [f"stages: {step}"]
    if max(step.memory) > budget:
        largest, room = sizes_as_text(max(step.memory), budget)
        notes.append(
            f"a rank needs {largest} in the largest of {len(step.forward)} stages, "
            f"and has {room}: take more microbatches, or more stages"
        )
    return replace(decision, notes=(*decision.notes, *notes), stages_begin=step.begins)


def _decide_in_parts(
    subject: Subject,
    program: Program,
    request: Request,
    before: SearchResult | None = None,
) -> Decision:
    """Return the decision without stages, by a search for a step of all microbatches
    that are requested: a part is priced at its own size, and a rank holds the parts
    that wait for their backward. Their number depends on the rows of a rank, and so on
    the plan: both the number that all rows allow and the number that a rank's rows
    allow, where the batch axes split them, are tried, and the faster is taken. Where
    neither plan is cut as it was priced the batch is searched as a whole. Raises as
    ``decide_on``."""
    mesh, most = request.mesh, request.microbatches or 1
    if most == 1 or subject.cut is None:
        return decide_on(program, request, before)
    even, rows = split_evenly(program), subject.cut.rows
    if before is not None:
        parts = before.formulation.parts
        return decide_on(program if parts is None else even, request, before, parts)
    ranks, best, failure = mesh.count(batch_axes(mesh)), None, None
    counts = [parts_of(rows, most)]
    counts += [parts_of(rows // ranks, most)] if rows % ranks == 0 else []
    limited = request
    for count in dict.fromkeys(counts):
        part = None if count == 1 else subject.part(even, request, count)
        try:
            decision = decide_on(program if part is None else even, limited, parts=part)
        except (HintError, PlanError) as error:
            failure = failure or error
            continue
        seconds = search_of(decision).predicted
        assert isinstance(limited.mode, SearchOptions)
        is_better = best is None or seconds < limited.mode.enough
        if is_better and _part_count(decision, most) == count:
            best = decision
            limited = replace(limited, mode=replace(limited.mode, enough=seconds))
    if best is not None:
        return best
    try:
        return decide_on(program, request)
    except PlanError as error:
        raise failure or error from None


def _part_count(decision: Decision, most: int) -> int:
    """Return how many parts the batch is cut into under a decision, as by
    ``stages.microbatches``: by the rows that a rank reads."""
    if not decision.is_even:
        return 1
    program, edges, mesh = decision.program, decision.edges, decision.mesh
    batch = set(batch_inputs(program, fed=True))
    specs = [(v, edges.specs[v]) for v in batch]
    specs += [(r.value, r.target) for r in edges.reshards if r.value in batch]
    rows = (program.values[v].shape[0] // mesh.count(x.dims[0]) for v, x in specs)
    return parts_of(min(rows, default=1), most)


def parts_of(rows: int, most: int) -> int:
    """Return ``most``, or the largest smaller number of microbatches that divides
    ``rows``."""
    return max(n for n in range(1, max(1, min(most, rows)) + 1) if rows % n == 0)


def split_evenly(program: Program) -> Program:
    """Return the program with all shards required to be equal, as parts of a batch
    need."""
    ops = [
        replace(op, rule=replace(op.rule, evenly=frozenset(op.rule.factors)))
        for op in program.ops
    ]
    return replace(program, ops=ops, even=True)


def search_of(decision: Decision) -> SearchResult:
    """Return the search that made a decision."""
    assert decision.search is not None, "what is chosen was searched"
    return decision.search


def balanced(
    decision: Decision, request: Request, axes: Sequence[str], rows: int
) -> Decision:
    """Return a searched decision on unequal ranks, or a faster one with the shares
    along ``axes`` with which its ranks would finish together. ``rows``: of the batch.
    """
    mesh, mode = decision.mesh, request.mode
    assert isinstance(mode, SearchOptions)
    best = best_shares(decision, mode.hardware)
    shares = {axis: best[axis] for axis in axes if axis in best}
    mesh_after = rounded(mesh.unrefined.with_shares(shares), axes, rows)
    if all(mesh_after.weights_of(axis) == mesh.weights_of(axis) for axis in axes):
        return decision
    after = decide_on(decision.program, request.on(mesh_after.refined(mesh.names)))
    return min(decision, after, key=lambda x: search_of(x).predicted)


# -- meshes without stages -----------------------------------------------------------


def _fastest(subject: Subject) -> Decision:
    """Return the decision with the fastest plan found on a mesh without stages, with
    ``rivals`` and a note of every candidate.

    Half of the seconds go to a glance at each mesh, in the given order; the rest goes
    to the best mesh, unless its plan is proved to be the best.
    """
    options, begun = replace(subject.options, ranked=False), work_clock.now()
    _check_memory(subject)
    seconds, meshes = options.seconds, _open(subject, subject.request.meshes)
    tries = [Candidate(mesh, subject.request.on(mesh)) for mesh in meshes]
    glance = replace(options, seconds=seconds / 2 / len(meshes))
    row = _Round(glance, _GLANCES * seconds, _untried)
    if len(meshes) == 1:
        row = _Round(options, seconds, _untried)
    tries = _improved(subject, tries, [row])
    best = _best(tries)
    if best is None:  # the mesh of most axes has most plans, unless hints fit none
        large = [x for x in tries if isinstance(x.error, PlanError)]
        best = _searched(subject, large[-1], options) if large else tries[-1]
    elif len(meshes) > 1:
        row = _Round(options, work_clock.left(begun + seconds), _may_have_plan)
        [best] = _improved(subject, [best], [row])
    if best.decision is None:
        assert best.error is not None
        raise best.error
    decision = best.decision
    bound = min((x.bound for x in tries if x.mesh != best.mesh), default=math.inf)
    stopped = work_clock.is_stopped() and STOPPED not in decision.notes
    notes = (*decision.notes, _note(decision, tries), *([STOPPED] if stopped else []))
    search = replace(search_of(decision), rivals=bound)
    decision = replace(decision, search=search, notes=notes)
    return (
        _with_rivals(decision, tries, subject) if subject.options.ranked else decision
    )


def _check_memory(subject: Subject) -> None:
    """Raise TooLargeError if no plan on any mesh of the request's size fits in
    memory."""
    request, limit = subject.request, subject.options.budget
    most, ranks = request.microbatches or 1, request.mesh.size
    count = parts_of(subject.cut.rows, most) if most > 1 and subject.cut else 0
    held = subject.least_held(request, count)
    if sum(nbytes for _, nbytes in held) > limit:
        raise nothing_fits(subject.program, limit, held, ranks, least=True)


def _open(subject: Subject, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
    """Return the meshes to search: where only the plan says which axis splits which
    dim, one of each set that differ only in the order of their axes."""
    signature, request = subject.request.as_planned, subject.request
    specs = [end.at_rest for end in signature.inputs]
    specs += [end.at_rest for end in signature.outputs]
    split = any(spec is not None and not spec.is_whole for spec in specs)
    used = any(declared.use is not None for declared in signature.inputs)
    if split or used or request.hints or constraints_of(subject.program):
        return meshes
    return distinct(meshes, subject.options.hardware)


def _with_rivals(
    best: Decision, tries: Sequence[Candidate], subject: Subject
) -> Decision:
    """Return the decision with rivals, on any mesh, that may be faster."""
    axes, options = best.mesh.unrefined.axes, subject.options
    others = [x.decision for x in tries if x.decision and x.mesh.axes != axes]
    decisions: list[Decision] = []
    # Lowering a plan of a large program takes as long as searching it.
    large = is_large(search_of(best))
    for x in nearest([best, *others], search_of)[: 1 + _RIVALS]:
        if x is best or not large:
            x = with_rivals(x, subject.request.hints, options)
        decisions += [x, *x.rivals]
    closest = nearest([x for x in decisions if x.search], search_of)
    closest = closest[: _LARGE_RIVALS if large else 2 * _RIVALS]
    closest += [x for x in decisions if not x.search]
    notes = best.notes[-1:] if STOPPED in best.notes else ()
    rivals = tuple(
        replace(x, rivals=(), notes=(*x.notes, _note(x, tries), *notes))
        for x in closest
        if x.search is not best.search
    )
    return replace(best, rivals=rivals)


def _note(decision: Decision, tries: Sequence[Candidate]) -> str:
    """Return the note that compares a plan's mesh with the others that were tried."""
    axes = decision.mesh.unrefined.axes
    best = min(x.seconds for x in tries if x.mesh.axes == axes)
    best = decision.search.predicted if decision.search else best
    others = sorted((x for x in tries if x.mesh.axes != axes), key=lambda x: x.seconds)
    note = f"mesh {decision.mesh} chosen of {len(tries)}"
    listed = ", ".join(x.compared(best) for x in others)
    return f"{note}; a step is estimated on {listed}" if listed else note


# -- meshes with stages --------------------------------------------------------------


def fastest_staged(
    program: Program, request: Request, bar: float
) -> tuple[Candidate | None, tuple[str, ...]]:
    """Return the fastest plan in stages that takes less than ``bar`` seconds, and notes
    of the others.

    A glance searches for a plan that is the same in all repeated layers: it takes a
    fraction of a search, and makes stages more equal. The best are tried with other
    numbers of microbatches, and searched. A mesh that cannot win is not tried: no
    pipeline beats its bubble with perfectly shared arithmetic.
    """
    if not request.staged:
        return None, ()
    program = replace(split_evenly(program), balances=False)
    subject = Subject(program, request)
    if subject.arithmetic / request.mesh.size >= bar:
        return None, (f"stages: none of {len(request.staged)} meshes can be faster",)
    if subject.cut is None:
        return None, ("stages: no batch to cut into microbatches",)
    options, seconds = subject.options, subject.options.seconds
    long = replace(options, ranked=False, seconds=seconds / 4, tolerance=EQUAL)
    glance = replace(long, equal_layers=True, seconds=seconds / 30)
    fewer = functools.partial(_in_fewer_parts, arithmetic=subject.arithmetic)
    end = _OTHER_PARTS * seconds
    rounds = [
        _Round(glance, _STAGED_GLANCES * seconds, _untried, gain=1.0),
        _Round(glance, end, _in_twice_the_parts, 2.0, 1 - PAYS),
        _Round(glance, end, fewer, 0.5, 1 - EQUAL),
        _Round(long, seconds, _may_have_plan),
    ]
    if request.microbatches is not None:
        del rounds[1:3]
    tries = _improved(subject, _with_stages(subject), rounds, bar)
    best, stopped = _best(tries), [STOPPED] if work_clock.is_stopped() else []
    if best is None or best.seconds >= bar:
        return None, (_note_of_stages(tries, bar / (1 - PAYS), bar), *stopped)
    note = _note_of_stages(tries, best.seconds, best.seconds)
    decision, step = best.decision, best.step
    assert decision is not None and step is not None
    # The text of the search has the bound that is proved by now.
    notes = (str(search_of(decision)), *decision.notes[1:])
    decision = replace(decision, notes=notes, stages_begin=step.begins)
    return replace(best, decision=decision), (note, *stopped)


def _with_stages(subject: Subject) -> list[Candidate]:
    """Return the candidates with stages, the shortest estimates first."""
    request, cut, hardware = subject.request, subject.cut, subject.options.hardware
    assert cut is not None, "there is a batch"
    budget = subject.options.budget
    guess = estimate_stages(subject.program, cut, subject.live, subject.arithmetic)
    out, is_open = list[Candidate](), request.microbatches is None
    no_room = PlanError("has too little memory for any plan")
    for mesh in _open(subject, request.staged):
        on, places = request.on(mesh), mesh.axes[0][1]
        first = parts = _first_parts(mesh, cut, request)
        while parts and budget < sum(n for _, n in subject.least_held(on, parts)):
            parts = 2 * parts if is_open and cut.rows % (2 * parts) == 0 else 0
        if not parts:
            out += [Candidate(mesh, on, error=no_room)] if first else []
            continue
        most = cut.rows if is_open else parts
        waiting = least_staged(1.0, places, most, on.pipeline_order) * places / most
        least = subject.arithmetic * waiting / mesh.size
        seconds = guess.seconds(mesh, parts, hardware, budget)
        out.append(Candidate(mesh, on, parts, seconds, least))
    return sorted(out, key=lambda x: x.estimate)


def _first_parts(mesh: Mesh, cut: BatchCut, request: Request) -> int:
    """Return the number of microbatches to begin with on a mesh; 0 if there is none."""
    if request.microbatches is not None:
        return parts_of(cut.rows, request.microbatches)
    places = mesh.axes[0][1]
    counts = [places * n for n in PARTS_A_PLACE if cut.rows % (places * n) == 0]
    feeds = mesh.axes[1][1] if len(mesh.axes) > 1 else 1
    fit = (n for n in counts if cut.rows // n % feeds == 0)
    return next(fit, counts[-1] if counts else 0)


def _in_twice_the_parts(x: Candidate) -> float | None:
    """Return a lower bound on the seconds of a step with twice as many microbatches, on
    equal stages: a plan for them could run two at a time now, memory permitting, in
    twice its seconds. More microbatches wait less and hold less, so that faster plans
    may fit."""
    if x.decision is None or x.step is None:
        return None
    part, places = search_of(x.decision).unlimited / 2, x.mesh.axes[0][1]
    return least_staged(part, places, 2 * x.step.parts, x.step.schedule)


def _in_fewer_parts(x: Candidate, arithmetic: float) -> float | None:
    """Return a lower bound on the seconds of a step with half as many microbatches, a
    quarter, and so on, on equal stages: a kernel takes less time per row where it has
    more rows, but no less than the whole kernel takes now, nor than its arithmetic.
    ``arithmetic``: seconds of the whole step's arithmetic on one device. None for
    meshes that have more microbatches than they began with."""
    if x.decision is None or x.step is None or not 2 < x.step.parts <= x.parts:
        return None
    step, places = x.step, x.mesh.axes[0][1]
    counts = [step.parts >> i for i in range(1, step.parts.bit_length() - 1)]
    part, least = search_of(x.decision).predicted, arithmetic * places / x.mesh.size
    return min(
        least_staged(max(part, least / count), places, count, step.schedule)
        for count in counts
    )


def priced(decision: Decision, request: Request) -> StagedStep | None:
    """Return the predicted step of a searched plan in the stages that a request asks
    for."""
    pipeline, signature = request.pipeline, decision.program.signature
    result, options = search_of(decision), request.mode
    assert pipeline is not None, "of a mesh with stages"
    assert isinstance(options, SearchOptions) and result.formulation.parts is not None
    schedule = request.order_of(result.formulation.parts.count)
    count = len(stage_places(schedule, pipeline.places))
    names = [x.name for x in signature.inputs if x.kind in ("parameter", "input")]
    pinned = pinned_stages(request.hints, names, pipeline.axis, count)
    return price_stages(
        result, pipeline, schedule, options.hardware, options.budget, pinned
    )


def _step_that_fits(decision: Decision, request: Request) -> StagedStep:
    """Return the predicted step in stages. Raises PlanError if there is no such step,
    or a rank lacks memory for it."""
    step = priced(decision, request)
    assert isinstance(request.mode, SearchOptions)
    if step is None:
        raise PlanError("has more stages than the program has ops on the batch")
    if max(step.memory) > request.mode.budget:
        raise TooLargeError(f"needs {short_bytes(max(step.memory))} a rank")
    if not decision.is_even:
        raise PlanError("has unequal shards")
    return step


def _note_of_stages(tries: Sequence[Candidate], seconds: float, bar: float) -> str:
    """Return a note of the meshes tried, compared with a plan of ``seconds``."""
    searched = [x for x in tries if x.is_tried]
    losers = sum(x.least >= bar for x in tries if not x.is_tried)
    left = len(tries) - len(searched) - losers
    texts = ", ".join(x.compared(seconds) for x in searched)
    counts = [f"{len(searched)} of {len(tries)} meshes tried"]
    counts += [f"{losers} cannot be faster"] if losers else []
    counts += [f"{left} left out for want of time"] if left else []
    return f"stages: {texts}{'; ' if texts else ''}{', '.join(counts)}"
