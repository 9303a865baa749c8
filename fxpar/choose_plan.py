"""This module compares plans of one graph and gives all ranks the same one.

Where a search may choose what the pipeline takes as given (bodies of manual regions,
axes that experts are split over), plans of copies are predicted first. A search depends
on the clock: one rank searches, the others follow its plan.

In: a traced graph and a ``Request``. Out: the ``JointState`` that ``fxpar.pipeline``
gives for it. Never: steps of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from torch import fx

from fxpar import pipeline
from fxpar.errors import HintError, PlanError
from fxpar.features import FEATURES
from fxpar.graph import size_nodes
from fxpar.graph.builder import copy_of
from fxpar.passes.simulate.check_user_rules import check_user_rules
from fxpar.passes.simulate.simulate_step import (
    Timeline,
    optimizer_bytes,
    predict_step,
)
from fxpar.pipeline import run_steps
from fxpar.runtime.calls.open_sizes import OpenSizesRefused
from fxpar.runtime.ranks import meeting, presence
from fxpar.runtime.steps.lowering_steps import begin_choice
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.steps.plan_steps import can_choose_schedule
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.decide import UNNAMED, Decision
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import has_any, names_of_ops
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import OPEN
from fxpar.sharding.read_program import with_sizes_closed
from fxpar.sharding.search.run_search import SearchOptions
from fxpar.units import short_seconds

# The last step of the pipeline before a schedule is chosen, the last one before a plan
# is described, and the least share of a step's kernels that a schedule leaves.
_UNSCHEDULED, _LOWERED, _SHARE = "order_stages", "reshard_after_forward", 0.9
# The share of the seconds that a search takes for a choice that makes another graph.
_TRIAL = 0.5
# Among plans whose steps take at most so many times as long as the shortest, the one
# that holds the fewest bytes is taken, if it holds at most such a share of the bytes
# that the shortest holds.
_TIE, _LESS = 1.001, 0.99
# Up to which share the bytes of collectives may differ in steps as long for a schedule
# to gain as much.
_SAME = 0.05


def fastest_plan(graph: fx.Graph, fake_mode: Any, request: Request) -> JointState:
    """Return the pipeline's result with the choices predicted to be the fastest.

    Raises as ``pipeline.decided`` and ``pipeline.finished`` do.
    """
    request, notes = _with_choices(graph, fake_mode, request)
    return _finished(pipeline.decided(graph, fake_mode, request)).noted(*notes)


def _finished(state: JointState) -> JointState:
    """Return the result for a decision, or for the rival with the shortest predicted
    step, of those that are as short the one that holds the least. A rival gets no
    schedule if it would take longer even with all communication hidden, or is like one
    that got one. Plans of open sizes are compared at their hints and without a
    schedule: lowering with symbols leaves guards on them, also of plans that are not
    taken, on the one rank that searches."""
    rivals = [x for x in state.rivals if not state.open or x[0].is_even]
    if not rivals:
        return pipeline.finished(state, pipeline.rows_after("plan"))
    trials: list[tuple[Timeline, JointState, Decision]] = []
    distinct: dict[Any, tuple[Decision, Request]] = {}
    for each in ((state.decided, state.request), *rivals):
        plan = each[0].mesh, each[0].strategies, each[0].settled
        distinct.setdefault(plan, each)
    for decision, request in distinct.values():
        quiet = request.with_options(debug=0, dump=None)
        trial = _trial_of(state, decision, quiet)
        if state.open:
            hinted, _ = next(iter(decision.program.value_of))
            trial.open, trial.graph = False, hinted.graph
            closed = with_sizes_closed(decision.program)
            trial.decision = replace(decision, program=closed)
            trial.request = quiet.with_options(schedule="none")
        try:
            run_steps(pipeline.rows_after("plan", _UNSCHEDULED), trial)
            trials.append((_timeline_unscheduled(trial), trial, decision))
        except PlanError:
            continue  # it cannot be lowered, or not be predicted
    if not trials:
        return pipeline.finished(state, pipeline.rows_after("plan"))
    held = [_held(line, trial) for line, trial, _ in trials]
    budget = _options(state).budget
    room = budget if min(held) <= budget else held[0]
    trials = [x for x, nbytes in zip(trials, held, strict=True) if nbytes <= room]
    seconds, scheduled = math.inf, list[tuple[Timeline, int]]()
    finished: list[tuple[JointState, Decision]] = []
    steps: list[tuple[float, int]] = []
    times: dict[tuple[Mesh, tuple[float, int]], float] = {}
    for line, trial, decision in sorted(trials, key=lambda x: x[0].seconds):
        key = line.seconds, line.peak_bytes
        least = line.seconds / _TIE
        if trial.request.options.schedule != "none":
            least = _SHARE * (line.seconds - line.exposed_seconds)
            if (search := trial.decided.search) is not None:
                # It counts attentions that a schedule balances as balanced.
                least = min(least, _SHARE * search.predicted)
        nbytes = _held(line, trial)
        if least <= seconds and not any(
            nbytes > _LESS * fewer and _is_like(line, shorter)
            for shorter, fewer in scheduled
        ):
            scheduled.append((line, nbytes))
            run_steps(pipeline.rows_after(_UNSCHEDULED, _LOWERED), trial)
            line = _timeline(trial) if trial.schedule else line
            finished.append((trial, decision))
            steps.append((line.seconds, _held(line, trial)))
            seconds = min(seconds, line.seconds)
        times.setdefault((trial.decided.mesh, key), line.seconds)
    listed = ", ".join(f"{mesh} {short_seconds(x)}" for (mesh, _), x in times.items())
    index = shortest_step(steps)
    best, decision = finished[index]
    best.notes += (f"search: plans compared by their predicted steps: {listed}",)
    best.step_seconds, _ = steps[index]
    if decision is not state.decided:
        check_user_rules(decision)
    options = state.request.options
    best.request = replace(best.request, options=options)
    if options.debug < 2 and not options.dump and not state.open:
        return pipeline.finished(best, pipeline.rows_after(_LOWERED))
    final_state = _trial_of(state, decision, best.request)
    final_state.notes, final_state.step_seconds = best.notes, best.step_seconds
    return pipeline.finished(final_state, pipeline.rows_after("plan"))


def _is_like(line: Timeline, shorter: Timeline) -> bool:
    """Return whether a schedule has as much to gain in a step as in a shorter one: it
    is as long, and sends as much by the same collectives."""
    ours, others = (
        {(x.kind, x.axes): x.sent for x in each.traffic} for each in (line, shorter)
    )
    return (
        line.seconds <= _TIE * shorter.seconds
        and ours.keys() == others.keys()
        and all(math.isclose(ours[x], others[x], rel_tol=_SAME) for x in ours)
    )


def shortest_step(steps: Sequence[tuple[float, int]]) -> int:
    """Return which of some steps, of so many seconds and bytes, is to be taken."""
    first = min(range(len(steps)), key=steps.__getitem__)
    shortest, most = steps[first]
    as_short = (i for i, (seconds, _) in enumerate(steps) if seconds <= _TIE * shortest)
    least = min(as_short, key=lambda i: steps[i][::-1])
    return least if steps[least][1] <= _LESS * most else first


def _held(line: Timeline, state: JointState) -> int:
    """Return bytes of a rank at its peak: with the optimizer's state, but for a
    pipeline."""
    if state.request.pipeline is not None:
        return line.peak_bytes
    signature = state.decided.program.signature
    return line.peak_bytes + sum(optimizer_bytes(state.graph, signature).values())


def _options(state: JointState) -> SearchOptions:
    assert isinstance(state.request.mode, SearchOptions), "what is compared is searched"
    return state.request.mode


def _trial_of(state: JointState, decision: Decision, request: Request) -> JointState:
    """Return a copy of a state with another decision and request, to run further steps
    on."""
    trial = copy(state)
    trial.decision, trial.request, trial.rivals = decision, request, ()
    trial.seconds = dict(state.seconds)
    return trial


def _timeline_unscheduled(state: JointState) -> Timeline:
    """Predict a step without a schedule; ``state`` keeps its graph. Where one can be
    chosen, the choice begins with this prediction."""
    request, mesh = state.request, state.decided.mesh
    has_choice = can_choose_schedule(request) and request.pipeline is None
    is_one_order = mesh.is_shared_equally and not request.options.disable
    if has_choice and is_one_order and mesh.size > 1:
        # What fails here fails again where the schedule is chosen, which warns of it.
        with contextlib.suppress(Exception):
            state.attempts = begin_choice(state)
            return state.attempts.now
    copied = _trial_of(state, state.decided, state.request)
    copied.graph = copy_of(state.graph)
    run_steps(pipeline.rows_after("schedule", _LOWERED), copied)
    return _timeline(copied)


def _timeline(state: JointState) -> Timeline:
    """Predict a step of a lowered graph, or return what the choice of its schedule has
    predicted."""
    hardware = state.request.hardware or _options(state).hardware
    settings, disable = state.schedule.settings, state.request.options.disable
    mesh, run = state.decided.mesh, state.run
    if run is not None and mesh.is_shared_equally and not disable:
        return run.timeline
    return predict_step(state.graph, mesh, hardware, settings=settings, disable=disable)


def planned(graph: fx.Graph, fake_mode: Any, request: Request) -> JointState:
    """Return what ``fastest_plan`` does; a search depends on the clock, so rank 0
    searches and the others follow its plan, mesh and links.

    Raises as ``fastest_plan`` does, and RankMismatchError if rank 0 does not come.
    """
    tag = f"the plan of {request.name}"
    if not isinstance(request.mode, SearchOptions):
        return fastest_plan(graph, fake_mode, request)
    request = _on_hardware(request)
    if request.is_leader:
        with presence.works(f"searches {tag}"):
            result = _led(graph, fake_mode, request, tag)
        meeting.gather(tag, json.dumps(result.plan.to_record()))
        return result
    text, *_ = meeting.gather(tag, "")
    record = json.loads(text)
    if "refused" in record:
        raise OpenSizesRefused(record["refused"])
    plan = Plan.from_dict(record)
    return fastest_plan(graph, fake_mode, replace(request, mode=plan))


def searched(graph: fx.Graph, fake_mode: Any, request: Request) -> JointState:
    """Return what ``fastest_plan`` does on rank 0, which plans for all, without sending
    it to the others."""
    return fastest_plan(graph, fake_mode, _on_hardware(request))


def is_still_right(
    graph: fx.Graph, fake_mode: Any, request: Request, rival: Plan, times: float
) -> bool:
    """Return whether no plan is predicted to be ``times`` as fast as ``rival``, a plan
    for a graph of the same program, at the sizes that the graph was traced with. All
    ranks return what rank 0 found: a search depends on the clock.
    """
    tag, says = f"the comparison of plans of {request.name}", ""
    if request.is_leader:
        trial_request = _on_hardware(request).with_options(schedule="none")
        with meeting.reporting(), presence.works(f"decides {tag}"):
            now, then = (
                _predicted(size_nodes.at_hints(graph, fake_mode), fake_mode, trial)
                for trial in (trial_request, replace(trial_request, mode=rival))
            )
        is_better = now < math.inf and times * now <= then
        says = "falls" if is_better else "stands"
    return meeting.gather(tag, says)[0] == "stands"


def _predicted(graph: fx.Graph, fake_mode: Any, request: Request) -> float:
    """Return the seconds of a step that the pipeline predicts for a graph at its hints;
    infinite if it cannot follow a given plan, or the plan cannot leave its sizes open.
    """
    for node in graph.nodes:
        del node.meta[OPEN]
    try:
        result = fastest_plan(graph, fake_mode, request)
    except (PlanError, HintError):
        return math.inf
    if not result.decided.is_even:
        return math.inf
    hardware, mesh = request.hardware or lookup(UNNAMED), result.plan.mesh
    return predict_step(
        result.local, mesh, hardware, disable=request.options.disable
    ).seconds


def _on_hardware(request: Request) -> Request:
    """Return the request; for a search, its mesh has the links of the hardware."""
    options = request.mode
    if not isinstance(options, SearchOptions):
        return request
    return replace(request, mesh=options.hardware.on(request.mesh))


def _led(graph: fx.Graph, fake_mode: Any, request: Request, tag: str) -> JointState:
    """Return the result of ``fastest_plan`` on rank 0. If that fails for a program with
    open sizes, which are then fixed, the other ranks learn of it."""
    try:
        return fastest_plan(graph, fake_mode, request)
    except Exception as error:
        if not size_nodes.is_open(graph):
            raise
        what = f"{type(error).__name__}: {error}"
        meeting.gather(tag, json.dumps({"refused": what}))
        raise OpenSizesRefused(what) from error


def _with_choices(
    graph: fx.Graph, fake_mode: Any, request: Request
) -> tuple[Request, list[str]]:
    """Return the request with bodies of manual regions and axes that experts are split
    over, which change the graph, and notes of why. They are those of a given plan; a
    search takes, one choice after the other, those with the shortest predicted step."""
    mode, notes = request.mode, list[str]()
    if isinstance(mode, Plan):
        experts = mode.experts or None
        return replace(request, bodies=mode.bodies, experts_over=experts), notes
    if not isinstance(mode, SearchOptions) or request.meshes:
        return request, notes
    names, seconds_of = names_of_ops(graph), partial(_seconds_of, graph, fake_mode)
    for feature in FEATURES:
        if feature.choices and has_any(names, feature.choices[0]):
            choose = import_module(feature.choices[1]).choose
            request, reasons = choose(graph, request, seconds_of)
            notes += reasons
    return request, notes


def _seconds_of(graph: fx.Graph, fake_mode: Any, request: Request) -> float:
    """Return the seconds of a step of the plan that a short search finds for a copy of
    a graph; infinite where none fits."""
    mode, copied = request.mode, copy_of(graph)
    assert isinstance(mode, SearchOptions), "what is compared is searched"
    shorter = replace(mode, seconds=mode.seconds * _TRIAL, ranked=False)
    request = replace(request, mode=shorter)
    request = request.with_options(debug=0, dump=None, cache_plans=False)
    copied.owning_module = graph.owning_module
    try:
        search = pipeline.decided(copied, fake_mode, request).decided.search
    except PlanError:
        return math.inf
    return search.predicted if search is not None else math.inf
