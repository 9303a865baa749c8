"""Stages along a pipeline axis, where a search may choose them: mesh and microbatches.

In: a Program, a Request with ``staged`` meshes, and the Decision on the best mesh
without stages. Out: the faster of both, and its Request. Every mesh is glanced at: a
plan that is the same in all repeated layers takes a fraction of a search, and its
stages are the more equal for it. The best are tried with other numbers of microbatches,
and searched. What cannot win is not tried: no pipeline beats its bubble with perfectly
shared arithmetic. ``try_stages`` has one mesh; never looks at graphs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpar.errors import PlanError
from fxpar.sharding.choose_mesh import ALIKE, fastest, names_axes, search_of
from fxpar.sharding.cost.program_kernels import ProgramKernels
from fxpar.sharding.cut_in_time import cut_in_time
from fxpar.sharding.decide import Decision
from fxpar.sharding.decide_request import parts_of, split_evenly
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.search.batch_parts import BatchCut, SharedKernels
from fxpar.sharding.search.estimate_stages import estimate_stages
from fxpar.sharding.search.least_memory import whole_entries
from fxpar.sharding.search.mesh_candidates import unlike
from fxpar.sharding.search.price_stages import least_staged
from fxpar.sharding.search.run_search import STOPPED, SearchOptions
from fxpar.sharding.solver import work_clock
from fxpar.sharding.try_stages import (
    StagedChoice,
    StagedProgram,
    StagedTrial,
    attempt,
    attempt_in_memory,
    parts_in_memory,
)
from fxpar.units import percent_more

# By how much stages must be faster, and twice as many microbatches: nothing overlaps in
# either price, a pipeline has more that is not in it, and microbatches are unrolled.
PAYS = 0.05

# Shares of the seconds: after the first no mesh is glanced at for the first time, after
# the second none with other numbers of microbatches.
_GLANCES, _PARTS = 0.55, 0.75

# Seconds of a search that begins late, at least.
_SHORT = 1.0

# With an estimate so many times as long as a plan that is there, a mesh waits.
_FAR = 1.25

# Microbatches for each place, as many as the batch has for all axes of its own.
PARTS_A_PLACE = (8, 4, 2, 1)


def choose_with_stages(program: Program, request: Request) -> tuple[Decision, Request]:
    """The decision on the best mesh of a request, and the request for it. With stages
    where these are faster by ``PAYS``, or where nothing else fits.

    Raises as ``choose_mesh.fastest``.
    """
    best, plan_error, kernels = None, None, SharedKernels()
    try:
        best = fastest(program, request, kernels)
    except PlanError as error:
        if not request.staged:
            raise
        plan_error = error
    unstaged = None if best is None else search_of(best)
    bar = math.inf if unstaged is None else unstaged.predicted * (1 - PAYS)
    staged, stage_notes = fastest_staged(program, request, bar, kernels)
    if staged is not None:
        mesh = staged.request.whole_mesh
        note = f"mesh {mesh} chosen: {staged.step}"
        if unstaged is not None:
            more = percent_more(unstaged.predicted, staged.step.seconds)
            note += f"; a step is estimated on {unstaged.mesh} {more}"
        notes = (*staged.decision.notes, note, *stage_notes)
        staged_request = replace(staged.request, mode=request.mode)
        rivals = () if best is None else (best, *best.rivals)
        return replace(staged.decision, notes=notes, rivals=rivals), staged_request
    if best is None:
        assert plan_error is not None
        raise plan_error
    others = (replace(x, notes=(*x.notes, *stage_notes)) for x in best.rivals)
    notes = (*best.notes, *stage_notes)
    return replace(best, notes=notes, rivals=tuple(others)), request.on(best.mesh)


def fastest_staged(
    program: Program,
    request: Request,
    bar: float,
    shared: SharedKernels | None = None,
) -> tuple[StagedChoice | None, tuple[str, ...]]:
    """The fastest plan in stages that takes less than ``bar`` seconds, and what there
    is to know of the others.

    ``shared``: kernels of the program that are known. Within the seconds asked for,
    pricing included, but for the first mesh.
    """
    options = request.mode
    if not request.staged or not isinstance(options, SearchOptions):
        return None, ()
    with work_clock.within(options.seconds):
        choice, notes = _fastest_staged(program, request, options, bar, shared)
        return choice, (*notes, *([STOPPED] if work_clock.is_stopped() else []))


def _fastest_staged(
    program: Program,
    request: Request,
    options: SearchOptions,
    bar: float,
    shared: SharedKernels | None,
) -> tuple[StagedChoice | None, tuple[str, ...]]:
    begun, program = work_clock.now(), split_evenly(program)
    program = replace(program, balances=False)
    kernels = {key: x.of_alike_shards for key, x in (shared or {}).items()}
    live = whole_entries(program, keep_gathered=request.keep_gathered, shared=kernels)
    least = _least_seconds(next(iter(kernels.values())), options)
    if least / request.mesh.size >= bar:
        return None, (f"stages: none of {len(request.staged)} meshes can be faster",)
    cut = cut_in_time(program)
    if cut is None:
        return None, ("stages: no batch to cut into microbatches",)
    staged = StagedProgram(program, cut, live, kernels)
    compared = replace(options, ranked=False, by_hand=False)
    long = replace(compared, seconds=options.seconds / 4, tolerance=ALIKE)
    glance = replace(long, alike=True, seconds=options.seconds / 30)
    ends = [begun + share * options.seconds for share in (_GLANCES, _PARTS, 1.0)]
    tries = _open_tries(staged, request, glance, least)
    tries = _glanced(tries, staged, request, glance, least, bar, ends[0])
    if request.microbatches is None:
        tries = _with_other_parts(tries, staged, glance, least, bar, ends[1])
    tries = _searched(tries, staged, request, long, bar, ends[2])
    best = _best(tries)
    if best is None or best.step.seconds >= bar:
        return None, (_listed(tries, bar / (1 - PAYS)),)
    return best.told, (_listed(tries, best.step.seconds),)


@dataclass(frozen=True)
class _MeshTry:
    """A mesh with stages, and what is known of it."""

    # That may be chosen.
    mesh: Mesh
    # Microbatches to begin with.
    parts: int
    # Seconds of a step, by ``estimate_stages``.
    estimate: float
    # The best; None: none was made.
    trial: StagedTrial | None = None
    # No plan on it can be faster than what is there.
    loses: bool = False

    @property
    def choice(self) -> StagedChoice | None:
        return self.trial.choice if self.trial else None

    @property
    def seconds(self) -> float:
        """Of a step of the best plan."""
        return self.choice.step.seconds if self.choice else math.inf

    def after(self, trial: StagedTrial) -> _MeshTry:
        """With the better of both trials."""
        seconds = trial.choice.step.seconds if trial.choice else math.inf
        is_better = self.choice is None or seconds < self.seconds
        return replace(self, trial=trial) if is_better else self


def _best(tries: Sequence[_MeshTry]) -> StagedChoice | None:
    return min(tries, key=lambda x: x.seconds).choice if tries else None


def _bar(tries: Sequence[_MeshTry], bar: float) -> float:
    """Seconds that the next plan has to beat."""
    return min([bar, *(x.seconds for x in tries)])


def _open_tries(
    staged: StagedProgram, request: Request, options: SearchOptions, least: float
) -> list[_MeshTry]:
    """The meshes that may be tried, those of the shortest estimate first."""
    guess = estimate_stages(staged.program, staged.cut, staged.live, least)
    out = []
    for mesh in unlike_stages(staged.program, request):
        on, parts = request.on(mesh), _parts(mesh, staged.cut, request)
        fit = parts_in_memory(staged, on, options, parts) if parts else 0
        seconds = (
            guess.seconds(mesh, fit, options.hardware, options.budget) if fit else 0
        )
        no_room = StagedTrial(None, "has too little memory for any plan")
        if parts:
            out.append(_MeshTry(mesh, fit, seconds, None if fit else no_room))
    return sorted(out, key=lambda x: x.estimate)


def _glanced(
    tries: Sequence[_MeshTry],
    staged: StagedProgram,
    request: Request,
    options: SearchOptions,
    least: float,
    bar: float,
    end: float,
) -> list[_MeshTry]:
    """Each mesh with a plan that is the same in all layers, until work comes to
    ``end``; but for those whose estimate is much longer than what is there. ``least``:
    seconds of the arithmetic on one device."""
    out = list(tries)
    for i, x in enumerate(out):
        most = staged.cut.rows if request.microbatches is None else x.parts
        here = _bar(out, bar)
        waiting = _waiting(x.mesh, most, request.on(x.mesh).pipeline_order)
        if x.trial or least * waiting >= here:
            out[i] = replace(x, loses=not x.trial)
            continue
        is_first = not any(y.choice for y in out)
        if is_first or (work_clock.left(end) > 0 and x.estimate < _FAR * here):
            on = request.on(x.mesh)
            out[i] = x.after(attempt_in_memory(staged, on, options, x.parts, end))
    return out


def _with_other_parts(
    tries: Sequence[_MeshTry],
    staged: StagedProgram,
    options: SearchOptions,
    least: float,
    bar: float,
    end: float,
) -> list[_MeshTry]:
    """Meshes with twice as many microbatches, as often as that pays: more of them wait
    less, and hold less, so that faster plans may fit and stages be more equal. Those
    that have no more than they began with also with half as many, as often as that is
    faster: a kernel takes less for a row where it has more. Those that promise most
    come first. ``least``: seconds of the arithmetic on one device."""
    out = list(tries)
    fewer = functools.partial(_with_fewer, least=least)
    for times, share, promise in ((2.0, 1 - PAYS, _doubled), (0.5, 1.0, fewer)):
        for i in sorted(range(len(out)), key=lambda i: promise(out[i])):
            while promise(out[i]) < _bar(out, bar) * share:
                other = _with_parts(out[i], times, staged, options, share, end)
                if other is out[i]:
                    break
                out[i] = other
    return out


def _doubled(x: _MeshTry) -> float:
    """Seconds of a step with twice as many microbatches, at best, on equal stages: a
    plan for them would do for two at a time now, but for memory, in twice its
    seconds."""
    if x.choice is None:
        return math.inf
    search, step = search_of(x.choice.decision), x.choice.step
    part, places = search.unlimited / 2, x.mesh.axes[0][1]
    return least_staged(part, places, 2 * step.parts, step.schedule)


def _with_fewer(x: _MeshTry, least: float) -> float:
    """Seconds of a step with half as many microbatches, a quarter, and so on, at best,
    on equal stages: none takes less than one with fewer rows does now, nor than its
    arithmetic. ``least``: seconds of that of all of them on one device."""
    if x.choice is None or not 2 < x.choice.step.parts <= x.parts:
        return math.inf
    search, step = search_of(x.choice.decision), x.choice.step
    places = x.mesh.axes[0][1]
    counts = itertools.takewhile(
        lambda count: count > 1, (step.parts >> i for i in itertools.count(1))
    )
    arithmetic = least * places / x.mesh.size
    return min(
        least_staged(
            max(search.predicted, arithmetic / count), places, count, step.schedule
        )
        for count in counts
    )


def _with_parts(
    x: _MeshTry,
    times: float,
    staged: StagedProgram,
    options: SearchOptions,
    share: float,
    end: float,
) -> _MeshTry:
    """A mesh with so many times as many microbatches, if the batch has them and a step
    takes less than this ``share`` of what it took."""
    assert x.choice is not None, "a plan to compare with"
    parts = int(x.choice.step.parts * times)
    if work_clock.left(end) < 0 or staged.cut.rows % parts:
        return x
    bar = share * x.seconds
    return x.after(attempt(staged, x.choice.request, options, parts, bar))


def _searched(
    tries: Sequence[_MeshTry],
    staged: StagedProgram,
    request: Request,
    options: SearchOptions,
    bar: float,
    end: float,
) -> list[_MeshTry]:
    """Meshes with a plan whose layers may differ, the best first, until the clock shows
    ``end``: of those that have a plan, and those of which nothing is known."""
    out = list(tries)
    for i in sorted(range(len(out)), key=lambda i: (out[i].seconds, out[i].estimate)):
        x, seconds = out[i], work_clock.left(end)
        unfit = x.trial is not None and not (x.trial.choice or x.trial.too_large)
        if x.loses or unfit or (seconds < 0 and _best(out)):
            continue
        here = replace(options, seconds=min(options.seconds, max(seconds, _SHORT)))
        if x.choice is None:
            on = request.on(x.mesh)
            trial = attempt_in_memory(staged, on, here, x.parts, end, _bar(out, bar))
        else:
            on, parts = x.choice.request, x.choice.step.parts
            before = search_of(x.choice.decision)
            trial = attempt(staged, on, here, parts, _bar(out, bar), before)
            x = replace(x, trial=x.trial and x.trial.above(trial.bound))
        out[i] = x.after(trial)
    return out


def _listed(tries: Sequence[_MeshTry], seconds: float) -> str:
    """Return a note of the meshes tried, relative to a plan of ``seconds``."""
    with_trial = [x for x in tries if x.trial]
    texts = ", ".join(
        f"{x.mesh} {x.trial.compared(seconds)}" for x in with_trial if x.trial
    )
    losers = sum(x.loses for x in tries)
    left = len(tries) - len(with_trial) - losers
    counts = [f"{len(with_trial)} of {len(tries)} meshes tried"]
    counts += [f"{losers} cannot be faster"] if losers else []
    counts += [f"{left} left out for want of time"] if left else []
    return f"stages: {texts}{'; ' if texts else ''}{', '.join(counts)}"


def unlike_stages(program: Program, request: Request) -> list[Mesh]:
    """The meshes with stages to try: where nothing names an axis, one of those that
    differ in the order of a stage's axes only."""
    if names_axes(program, request):
        return list(request.staged)
    assert isinstance(request.mode, SearchOptions)
    by_places: dict[int, list[Mesh]] = {}
    for mesh in request.staged:
        by_places.setdefault(mesh.axes[0][1], []).append(mesh)
    hardware = request.mode.hardware
    return [mesh for alike in by_places.values() for mesh in unlike(alike, hardware)]


def _least_seconds(kernels: ProgramKernels, options: SearchOptions) -> float:
    """Seconds of the arithmetic of a step on one device, at its fastest."""
    works = kernels.works
    hardware = options.hardware
    flops = ((work, hardware.peak(work.dtype, family=work.family)) for work in works)
    return sum(w.flops / (peak.flops * peak.efficiency) for w, peak in flops if w.flops)


def _parts(mesh: Mesh, cut: BatchCut, request: Request) -> int:
    """Microbatches to try on a mesh; 0: there is no number."""
    if request.microbatches is not None:
        return parts_of(cut.rows, request.microbatches)
    places = mesh.axes[0][1]
    counts = [places * n for n in PARTS_A_PLACE if cut.rows % (places * n) == 0]
    feeds = mesh.axes[1][1] if len(mesh.axes) > 1 else 1
    fit = (n for n in counts if cut.rows // n % feeds == 0)
    return next(fit, counts[-1] if counts else 0)


def _waiting(mesh: Mesh, parts: int, schedule: str) -> float:
    """What arithmetic on one device is multiplied by, at least."""
    places = mesh.axes[0][1]
    least = least_staged(1.0, places, parts, schedule)
    return least * places / (parts * mesh.size)
