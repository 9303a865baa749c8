"""Plans of one graph compared, and the one plan that all ranks have.

In: a traced graph and a ``Request``. Out: what ``fxpar.pipeline`` gives for it. Where a
search may choose what the pipeline takes as given (bodies of manual regions, axes that
experts are split over), plans of copies are predicted first. A search depends on the
clock: one rank searches, the others follow its plan. No steps of its own.
"""

from __future__ import annotations

import json
import math
from copy import copy
from dataclasses import replace
from typing import Any

from torch import fx

from fxpar import _torch, pipeline
from fxpar.errors import HintError, PlanError
from fxpar.fusion.collective_window import shapes_of
from fxpar.passes import size_nodes
from fxpar.passes.builder import copy_of
from fxpar.passes.experts import expert_axes
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.regions.region_bodies import choices as body_choices
from fxpar.passes.simulate.check_user_rules import check_user_rules
from fxpar.passes.simulate.simulate_step import Timeline, simulate
from fxpar.pipeline import JOINT, Result, run_steps
from fxpar.runtime.calls.open_sizes import OpenSizesRefused
from fxpar.runtime.ranks import consensus, presence
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.decide import UNNAMED, Decision
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import OPEN
from fxpar.sharding.search.run_search import SearchOptions

# The last step of the pipeline before the plan is told, and the share of its kernels'
# seconds that a schedule leaves at least.
_LOWERED, _COMPUTE = "reshard_after_forward", 0.9


def fastest_plan(graph: fx.Graph, fake_mode: Any, request: Request) -> Result:
    """What the pipeline gives with the choices that are predicted to be the fastest.

    Raises as ``pipeline.parallelize`` does.
    """
    request, of_bodies = _with_bodies(graph, fake_mode, request)
    request, of_experts = _over_axes(graph, fake_mode, request)
    state = pipeline.decided(graph, fake_mode, request)
    state, last = _fastest_of(state)
    result = pipeline.finished(state, pipeline.rows_after(last))
    return result.noted(*of_bodies, *of_experts)


def _fastest_of(state: JointState) -> tuple[JointState, str]:
    """Of a decision and its rivals the one whose step is predicted to be the fastest,
    with its schedule: its state, and the last step that was run on it.

    Where a rival would take longer though its communication took no time, no schedule
    is looked for.
    """
    decision, request = state.decided, state.request
    if not decision.rivals:
        return state, "plan"
    quiet = replace(request, debug=0, dump=None)
    trials = []
    for each in (decision, *decision.rivals):
        trial = _with_decision(state, quiet, each)
        run_steps(pipeline.rows_after("plan", "pair_reductions"), trial)
        copied = _with_decision(trial, quiet, each)
        copied.graph = copy_of(trial.graph)
        run_steps(pipeline.rows_after("schedule", _LOWERED), copied)
        trials.append((_timeline(copied), trial))
    plain = [line.seconds for line, _ in trials]
    seconds = [math.inf] * len(trials)
    for i in sorted(range(len(trials)), key=plain.__getitem__):
        line, trial = trials[i]
        if _COMPUTE * (line.seconds - line.exposed_seconds) < min(seconds):
            run_steps(pipeline.rows_after("pair_reductions", _LOWERED), trial)
            seconds[i] = _timeline(trial).seconds
    best = min(range(len(trials)), key=seconds.__getitem__)
    times = [x if x < math.inf else y for x, y in zip(seconds, plain, strict=True)]
    if best:
        check_user_rules(trials[best][1].decided)
        listed = ", ".join(f"{x * 1e3:.4g}" for x in times)
        note = f"search: of {len(times)} plans that take {listed} ms a step the fastest"
        state.notes = (*state.notes, note)
    if request.debug >= 2 or request.dump:
        chosen = _with_decision(state, request, trials[best][1].decided)
        return chosen, "plan"
    trials[best][1].request = request
    if best:
        trials[best][1].notes = (*trials[best][1].notes, note)
    return trials[best][1], _LOWERED


def _with_decision(
    state: JointState, request: Request, decision: Decision
) -> JointState:
    """A state to go on with, apart from the one it is of."""
    other = copy(state)
    other.request, other.decision = request, replace(decision, rivals=())
    other.seconds = dict(state.seconds)
    return other


def _timeline(state: JointState) -> Timeline:
    """A step of a lowered graph as it would run."""
    request, graph, mesh = state.request, state.graph, state.decided.mesh
    options = request.mode
    assert isinstance(options, SearchOptions), "what is compared was searched"
    hardware = (request.hardware or options.hardware).at_speed(mesh.slowest)
    if state.open:
        graph = size_nodes.at_hints(graph, state.fake_mode)
    with _torch.fake.shapes_alone():
        settings, disable = state.schedule.settings, request.disable
        run = as_run(shapes_of(graph), disable=disable, settings=settings)
    return simulate(run, hardware.on(mesh), hardware)


def planned(graph: fx.Graph, fake_mode: Any, request: Request) -> Result:
    """What ``fastest_plan`` gives; of a search, what it gives on rank 0: it depends on
    the clock, so one rank searches and the others follow its plan, mesh and links.

    Raises as ``fastest_plan`` does, and RankMismatchError if rank 0 does not come.
    """
    tag = f"the plan of {request.name}"
    if not isinstance(request.mode, SearchOptions):
        return fastest_plan(graph, fake_mode, request)
    request = _on_hardware(request)
    if request.leads:
        with presence.works(f"searches {tag}"):
            result = _led(graph, fake_mode, request, tag)
        consensus.gather(tag, json.dumps(result.plan.to_record()))
        return result
    text, *_ = consensus.gather(tag, "")
    record = json.loads(text)
    if "refused" in record:
        raise OpenSizesRefused(record["refused"])
    plan = Plan.from_dict(record)
    return fastest_plan(graph, fake_mode, replace(request, mode=plan))


def searched(graph: fx.Graph, fake_mode: Any, request: Request) -> Result:
    """What ``fastest_plan`` gives on rank 0, which plans for all and tells nobody."""
    return fastest_plan(graph, fake_mode, _on_hardware(request))


def stands(
    graph: fx.Graph, fake_mode: Any, request: Request, rival: Plan, times: float
) -> bool:
    """Whether at the sizes that a graph of open ones was traced with no plan is
    predicted to be ``times`` as fast as ``rival``, for a graph of the same program. On
    all ranks, what rank 0 found: a search depends on the clock.
    """
    tag, says = f"whether the plan of {request.name} stands", ""
    if request.leads:
        trial_request = replace(_on_hardware(request), schedule="none")
        try:
            with presence.works(f"decides {tag}"):
                now, then = (
                    _predicted(size_nodes.at_hints(graph, fake_mode), fake_mode, trial)
                    for trial in (trial_request, replace(trial_request, mode=rival))
                )
        except Exception as error:
            consensus.abort(error)
            raise
        is_better = now < math.inf and times * now <= then
        says = "falls" if is_better else "stands"
    return consensus.gather(tag, says)[0] == "stands"


def _predicted(graph: fx.Graph, fake_mode: Any, request: Request) -> float:
    """Seconds of a step of what the pipeline gives for a graph at its hints; infinite
    if it cannot follow a plan that is asked for, or its sizes cannot stay open by it.
    """
    for node in graph.nodes:
        del node.meta[OPEN]
    try:
        result = fastest_plan(graph, fake_mode, request)
    except (PlanError, HintError):
        return math.inf
    if not result.decision.is_even:
        return math.inf
    hardware, mesh = request.hardware or lookup(UNNAMED), result.plan.mesh
    graph = as_run(result.local, disable=request.disable)
    return simulate(graph, hardware.on(mesh), hardware).seconds


def _on_hardware(request: Request) -> Request:
    """The request, of a search on a mesh with the links of its hardware."""
    options = request.mode
    if not isinstance(options, SearchOptions):
        return request
    return replace(request, mesh=options.hardware.on(request.mesh))


def _led(graph: fx.Graph, fake_mode: Any, request: Request, tag: str) -> Result:
    """What ``fastest_plan`` gives on rank 0; where that fails for a program with open
    sizes, which are then fixed, the others are told."""
    try:
        return fastest_plan(graph, fake_mode, request)
    except Exception as error:
        if not size_nodes.is_open(graph):
            raise
        what = f"{type(error).__name__}: {error}"
        consensus.gather(tag, json.dumps({"refused": what}))
        raise OpenSizesRefused(what) from error


def _with_bodies(
    graph: fx.Graph, fake_mode: Any, request: Request
) -> tuple[Request, list[str]]:
    """The request with the bodies of manual regions: those of a plan, or where it is
    searched, one choice after the other, those predicted to be the fastest; notes of
    why."""
    mode = request.mode
    if isinstance(mode, Plan):
        return replace(request, bodies=mode.bodies), []
    counts = body_choices(graph)
    if not counts or not isinstance(mode, SearchOptions) or request.meshes:
        return request, []
    best, notes = (0,) * len(counts), []
    for i, count in enumerate(counts):
        seconds = {
            bodies: _seconds_with_bodies(
                graph, fake_mode, replace(request, bodies=bodies)
            )
            for bodies in ((*best[:i], body, *best[i + 1 :]) for body in range(count))
        }
        best = min(seconds, key=seconds.__getitem__)
        times = ", ".join(f"{s * 1e3:.4g}" for s in seconds.values())
        notes.append(
            f"body {best[i]} of {count} of manual region {i}: searched, a step takes "
            f"{times} ms with each"
        )
    return replace(request, bodies=best if any(best) else ()), notes


def _over_axes(
    graph: fx.Graph, fake_mode: Any, request: Request
) -> tuple[Request, list[str]]:
    """The request with the axes that experts are split over, where a plan has some or a
    search finds some that pay; notes of why."""
    if isinstance(request.mode, Plan):
        return replace(request, experts_over=request.mode.experts or None), []
    seconds = {
        axes: _seconds_with_bodies(
            graph, fake_mode, replace(request, experts_over=axes)
        )
        for axes in expert_axes.choices(graph, request)
    }
    if not seconds:
        return request, []
    axes, note = expert_axes.best(seconds)
    return replace(request, experts_over=axes), [note] if note else []


def _seconds_with_bodies(graph: fx.Graph, fake_mode: Any, request: Request) -> float:
    """Seconds of a step of the plan that a short search finds for a copy of a graph;
    infinite where none fits."""
    request = expert_axes.trial(request)
    copied = copy_of(graph)
    copied.owning_module = graph.owning_module
    state = JointState(
        graph=copied, request=request, fake_mode=fake_mode, normalized=copied
    )
    names = [step.name for step in JOINT]
    try:
        run_steps(JOINT[: names.index("plan") + 1], state)
    except PlanError:
        return math.inf
    search = state.decided.search
    return search.predicted if search is not None else math.inf
