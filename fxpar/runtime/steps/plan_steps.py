"""Normalize a traced graph, plan it, and write the plan as data: steps of the pipeline.

In: a ``JointState`` with the graph as it was traced. Out: the same state, its graph
normalized, with moments in the form that is planned, its decision and at the end its
``Plan``. Never: a difference between ranks, except that ``look_up_plan`` and
``keep_plan`` read and write the disk. The order of the steps is ``fxpar.pipeline``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from fxpar import _torch
from fxpar._fast.python_memory import old_objects_kept
from fxpar.errors import (
    PlanError,
    warn,
)
from fxpar.fusion.overlap_candidates import shapes_of
from fxpar.graph.pipeline_ops import OF_STAGES
from fxpar.passes.normalize import normalize_ops as normalize
from fxpar.passes.normalize.split_merged_batch import split_merged_batch
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.check_user_rules import check_user_rules
from fxpar.passes.simulate.launches import facts_of as facts_of_step
from fxpar.passes.simulate.simulate_step import by_kind
from fxpar.runtime.caches import plan_store
from fxpar.runtime.stage_times import PLAN, SEARCH, stage
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding import plan_facts, shard_sizes
from fxpar.sharding.candidates import balanced, choose, split_evenly
from fxpar.sharding.decide import Decision, decide_on
from fxpar.sharding.manual_axes import over_manual_axes, planned_plan
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.ops import has_user_rules
from fxpar.sharding.ops.unknown_ops import report_unknown
from fxpar.sharding.pipeline_axis import with_planned_axis
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import OPEN, Program, phase_of
from fxpar.sharding.propagate.conventions import batch_axes, sequence_axes
from fxpar.sharding.read_program import read
from fxpar.sharding.refine_mesh import refine
from fxpar.sharding.reshard.all_pairs import MOST
from fxpar.sharding.rest_over_stages import over_stages
from fxpar.sharding.search.run_search import (
    SearchOptions,
    has_too_many_axes,
)

log = logging.getLogger("fxpar")


def on_whole_mesh(decision: Decision, request: Request) -> Decision:
    """Return the decision for the ranks of one stage and one place along manual axes as
    one for the mesh of all ranks."""
    pipeline, manual = request.pipeline, request.manual
    ops = decision.program.ops
    update = {op.index for op in ops if phase_of(op.node) == "update"}
    if manual is not None:
        decision = over_manual_axes(decision, manual, request.signature, update)
    if pipeline is not None:
        decision = over_stages(decision, pipeline, update)
    return decision


def look_up_plan(graph: fx.Graph, state: JointState) -> None:
    """Follow the plan that the request or the disk has, if there is one."""
    request = state.request = _searchable(state.request)
    state.program = _program(state)
    if isinstance(request.mode, Plan):
        state.plan_with_schedule = _follow(state, request.mode)
        return
    if not request.meshes and request.mesh.can_be_cut:
        request = _on(state, refine(state.program, request))
    mode = request.mode
    is_kept = request.options.cache_plans and plan_store.is_on()
    if not is_kept or not isinstance(mode, SearchOptions):
        return
    state.key = plan_store.key_of(state.program, state.graph, request)
    stored = plan_store.load(state.key, mode.seconds)
    if stored is None:
        return
    whole, schedule_chosen = stored
    try:
        plan = _follow(state, whole)
    except PlanError as error:
        log.info("the stored plan does not fit, so it is searched again: %s", error)
        state.recalled, state.request = None, request
        state.program = _program(state)
        return
    log.info("a stored plan is used, nothing is searched: %s", plan.notes[-1])
    if schedule_chosen and not request.options.tune:
        state.plan_with_schedule = plan


def _follow(state: JointState, whole: Plan) -> Plan:
    """Make the decision that a plan describes, on its mesh and with its stages and
    microbatches, and return it as planned. Raises PlanError if it does not fit."""
    request = state.request
    plan = state.recalled = _as_planned(whole, request)
    if whole.stages and request.microbatches is None:
        request = state.request = replace(request, microbatches=whole.microbatches)
    staged = map(with_planned_axis, request.staged)
    open_axes = [mesh.unrefined.axes for mesh in (*request.meshes, *staged)]
    own_axes = request.mesh.unrefined.axes
    if whole.mesh.unrefined.axes in open_axes:
        _on(state, whole.mesh)
    elif plan.mesh.is_refined and plan.mesh.unrefined.axes == own_axes:
        _on(state, plan.mesh)
    # Moments that the plan does not contain were expanded before it was made.
    planned_names = {node.name for node in plan.nodes}
    moments = normalize.moments_of(state.program)
    moments = [node for node in moments if node.name not in planned_names]
    _expand(state, moments)
    state.decision = plan_facts.recall(_program(state), state.request.mesh, plan)
    return plan


def _as_planned(plan: Plan, request: Request) -> Plan:
    """Return a plan of the whole mesh as one of the mesh that is planned on."""
    plan = plan.of_one_stage()
    return planned_plan(plan, request.manual.axes) if request.manual else plan


def _on(state: JointState, mesh: Mesh) -> Request:
    """Put another mesh into the state's request, and return the request."""
    if mesh is not state.request.mesh:
        state.request = _searchable(state.request.on(mesh))
        signature = state.request.as_planned
        state.program = replace(state.program, signature=signature)
    return state.request


def _searchable(request: Request) -> Request:
    """Return the request, set to propagate if its mesh has too many axes to search."""
    if not isinstance(request.mode, SearchOptions) or not has_too_many_axes(
        request.mesh
    ):
        return request
    what = f"a search takes at most {MOST} axes of more than one rank: the plan"
    fix = "join axes of the mesh, or set FXPAR_PLAN=propagate"
    warn(f"{what} for {request.mesh} is propagated", fix=fix)
    return replace(request, mode="propagate")


def _program(state: JointState) -> Program:
    """Return the program of the graph; open sizes are those it was traced with."""
    keeps_gathered = not state.request.options.reshard_after_forward
    program = read(state.at_hints, state.request.as_planned)
    program = replace(program, keeps_gathered=keeps_gathered)
    request = state.request
    if request.pipeline is not None or request.even:
        program = split_evenly(program)
    verbs = can_choose_schedule(request) and not state.open
    return replace(program, balances=verbs and request.pipeline is None)


def can_choose_schedule(request: Request) -> bool:
    """Return whether a schedule will be chosen (``apply_schedule``)."""
    left_out = "schedule" in request.options.disable
    return (
        request.options.schedule == "auto"
        and request.hardware is not None
        and not left_out
    )


def expand_moments(graph: fx.Graph, state: JointState) -> None:
    """Expand moments (``var``, ``var_mean``) into two sums.

    Before a search all are expanded: it would not split what their rules keep whole.
    Otherwise only those of which a first decision splits a dim that must be whole.
    """
    request, program = state.request, state.program
    moments = normalize.moments_of(program)
    if not moments or state.recalled or (request.meshes and not _is_searched(request)):
        return
    if not _is_searched(request):
        state.decision = decide_on(program, request)
        moments = normalize.split_moments(state.decision)
    _expand(state, moments)


def _expand(state: JointState, moments: Sequence[fx.Node]) -> None:
    """Expand moments of the state's graph, and forget its decision."""
    if moments:
        nodes = [node.meta.get(OPEN, node) for node in moments]
        normalize.expand_moments(nodes, state.build)
        state.graph.eliminate_dead_code()
        state.program = _program(state)
        state.decision = None


def _is_searched(request: Request) -> bool:
    return isinstance(request.mode, SearchOptions)


def make_plan(graph: fx.Graph, state: JointState) -> None:
    """Make the decision, unless it is recalled: search it or propagate it."""
    request = state.request
    if state.recalled is None and (request.meshes or state.decision is None):
        with stage(SEARCH if _is_searched(request) else PLAN), old_objects_kept():
            if request.meshes or _is_searched(request):
                state.decision, state.request = choose(state.program, request)
            else:
                state.decision = decide_on(state.program, request)
            if state.open_shares and _is_searched(request):
                open_ = state.open_shares
                state.decision = balanced(state.decision, request, open_, state.rows)
        if state.open_shares:
            state.request = request.on(state.decision.mesh)
    decision = state.decided
    if not all(op.has_rule for op in decision.program.ops):
        report_unknown(decision.program, decision.mesh, request.options.strict)
    if has_user_rules():
        check_user_rules(decision)
    state.decision = on_whole_mesh(decision, state.request)
    for rival in () if state.open_shares else decision.rivals:
        on_mesh = request.on(rival.mesh) if request.meshes else state.request
        state.rivals += ((on_whole_mesh(rival, on_mesh), on_mesh),)


def describe(graph: fx.Graph, state: JointState) -> None:
    """Write the plan as data, with facts of its step read off the graph."""
    hardware, mesh = state.request.named_hardware, state.decided.mesh
    if hardware is not None:
        mesh = hardware.on(mesh)
    # A user's plan file may have been predicted for another machine.
    step_seconds = state.step_seconds
    if state.recalled is not None and _is_searched(state.request):
        step_seconds = state.recalled.step_seconds
    collectives, reshards = facts_of_step(state.at_hints)
    memory, notes = _memory(state)
    plan = plan_facts.describe(state.decided, collectives, reshards, memory, mesh)
    state.plan = replace(
        plan,
        stages=state.stages,
        microbatches=state.request.microbatches if state.stages else None,
        schedule=str(state.schedule),
        room=_room(state.request),
        experts=state.request.experts_over or (),
        bodies=state.request.bodies,
        sent_rows=state.sent_rows,
        step_seconds=step_seconds,
        near=state.near_misses,
        # A plan that is followed brings the notes of the rank that searched.
        notes=tuple(dict.fromkeys((*plan.notes, *state.notes, *notes))),
    )


def _room(request: Request) -> int | None:
    """Return the memory of a rank in bytes, None if no hardware is known."""
    if isinstance(request.mode, SearchOptions):
        return int(request.mode.budget)
    hardware = request.hardware or request.named_hardware
    return None if hardware is None else int(hardware.memory)


def _memory(state: JointState) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return the bytes that a rank holds at the peak, by kind, and notes: where they
    are not known, there are none, and a note says why."""
    settings, disable = state.schedule.settings, state.request.options.disable
    pipeline, peaks, run = state.request.pipeline, [], state.run
    signature = state.decided.program.signature
    if run is not None and not disable:
        return by_kind(run.graph, signature, run.launches), ()
    graphs = [state.at_hints]
    if pipeline is not None:
        program_at = OF_STAGES["program_at"]
        graphs = [program_at(graphs[0], place) for place in range(pipeline.places)]
    try:
        for graph in graphs:
            with _torch.fake.shapes_alone():
                shapes = shapes_of(graph)
                graph = as_run(shapes, disable=disable, settings=settings)
            peaks.append(by_kind(graph, signature))
        return max(peaks, key=lambda kinds: sum(n for _, n in kinds)), ()
    except PlanError as error:  # of the user's own collectives
        return (), (f"memory is not known: {error.what}",)


def keep_plan(graph: fx.Graph, state: JointState) -> None:
    """Save a plan that was searched on disk."""
    searched, mode = state.decided.search, state.request.mode
    if state.key and searched is not None and isinstance(mode, SearchOptions):
        chosen = can_choose_schedule(state.request) and not state.request.options.tune
        plan_store.save(state.key, state.plan, searched, mode.seconds, chosen=chosen)


def split_batch(graph: fx.Graph, state: JointState) -> None:
    """Keep a batch as a dim if its axes do not divide it or its sequence is split."""
    mesh = state.request.mesh
    axes, along, unequal = batch_axes(mesh), sequence_axes(mesh), mesh.unlike
    # A plan may split open sizes only where the axes divide them.
    if state.open or not (axes or along):
        return
    can_split = partial(shard_sizes.can_split, even=state.request.pipeline is not None)

    def splits(rows: int, next_size: int) -> bool:
        if along and rows > 1 and can_split(next_size, mesh, along):
            return True
        # A search may choose the shares of ranks of different speed.
        even = shard_sizes.is_exact(rows, mesh, axes) and set(axes).isdisjoint(unequal)
        return not even and can_split(rows, mesh, axes)

    split_merged_batch(graph, state.build, splits)


def drop_dead(graph: fx.Graph, _: JointState) -> None:
    """Remove nodes that nothing reads."""
    graph.eliminate_dead_code()
    graph.lint()
