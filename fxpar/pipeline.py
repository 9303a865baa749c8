"""The pipeline: every step from the traced graph to what is compiled, in order.

``JOINT`` takes forward and backward in one graph from traced to local, ``RANK`` puts
one rank into it, ``PHASE`` takes a forward or a backward by itself, once AOTAutograd
parted them. A step is a row: its name, what it runs, the stage that the graph then is
in, whether FXPAR_DISABLE may leave it out. Data goes in (``Request``) and comes out
(``Result``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpar.explain import status_line
from fxpar.explain.dump import op_counts, show_stage, show_step
from fxpar.fusion.schedule import Schedule
from fxpar.graph import size_nodes
from fxpar.graph.builder import Builder
from fxpar.passes.attention.normalize_masks import causal_masks
from fxpar.passes.experts.normalize_fused_experts import split_fused_experts
from fxpar.passes.normalize import normalize_ops as normalize
from fxpar.passes.normalize.backward_scans import find_backward_scans
from fxpar.passes.normalize.joint_cuts import join_cuts
from fxpar.passes.normalize.normalize_matmul import undo_views_around_matmul
from fxpar.passes.normalize.normalize_shifts import find_shifts
from fxpar.passes.normalize.repeated_rows import part_repeats
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.hand_over import hand_over
from fxpar.passes.order.order_collectives import (
    DELAY,
    ORDER,
    PhaseGraph,
    PhasePass,
    Settings,
)
from fxpar.passes.order.sink_waits import sink_waits
from fxpar.passes.writes_as_results import Write
from fxpar.runtime import stage_times
from fxpar.runtime.default_device import on_cpu_by_default
from fxpar.runtime.ranks.groups import Ranks
from fxpar.runtime.stage_times import stage
from fxpar.runtime.steps import (
    lowering_steps,
    normalize_steps,
    plan_steps,
    stage_steps,
    tune_schedule,
)
from fxpar.runtime.steps.compare_places import compare_places
from fxpar.runtime.steps.pipeline_state import (
    JointState,
    PhaseState,
    PipelineState,
    RankState,
)
from fxpar.sharding.decide import Decision
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request


@dataclass(frozen=True)
class PipelineStep:
    """One step of the pipeline."""

    # In FXPAR_DISABLE, and where it is printed.
    name: str
    # Takes a PipelineState and changes it.
    run: Callable[[Any], None]
    # The stage that the graph is in after it, as docs/concepts.md calls it; "" where
    # another step ends the stage.
    stage: str = ""
    # FXPAR_DISABLE may leave it out.
    optional: bool = False

    @property
    def counted(self) -> str:
        """The stage of ``stage_times`` that its seconds are counted for."""
        if self in PHASE or self in RANK:
            return stage_times.PHASE
        if self.name in COUNTED:
            return COUNTED[self.name]
        names = [step.name for step in JOINT]
        begun = names.index(self.name) < names.index("look_up_plan")
        return stage_times.NORMALIZE if begun else stage_times.PARTITION


def _always(name: str, run: Callable[[Any], None], stage: str = "") -> PipelineStep:
    return PipelineStep(name, run, stage)


def _may(name: str, run: Callable[[Any], None], stage: str = "") -> PipelineStep:
    return PipelineStep(name, run, stage, optional=True)


def _rewrite(
    function: Callable[[fx.Graph, Builder], None],
) -> Callable[[JointState], None]:
    return lambda state: function(state.graph, state.rewriter)


def _of_phase(row: PhasePass, stage: str = "") -> PipelineStep:
    return PipelineStep(row.name, lambda s: row.run(s.phase), stage, row.optional)


# Forward and backward in one graph, the same on every rank: traced -> local.
JOINT = (
    _always("show_bodies", normalize_steps.show_bodies),
    _may("share_by_speed", normalize_steps.share_by_speed),
    _always("absorb_regions", normalize_steps.absorb_regions),
    _always("refuse_body_draws", normalize_steps.refuse_body_draws),
    _always("count_loop_steps", normalize_steps.count_loop_steps),
    _may("random_by_index", _rewrite(normalize.random_by_index)),
    _may("causal_masks", _rewrite(causal_masks)),
    _may("find_shifts", _rewrite(find_shifts)),
    _may("find_backward_scans", _rewrite(find_backward_scans)),
    _may("part_repeats", _rewrite(part_repeats)),
    _may("interleave_rows", normalize_steps.interleave_rows),
    _may("take_rows_in_turn", normalize_steps.take_rows_in_turn),
    _may("join_cuts", _rewrite(join_cuts)),
    _may("experts_in_place", normalize_steps.place_experts),
    _may("undo_views_around_matmul", _rewrite(undo_views_around_matmul)),
    _may("keep_batch_apart", normalize_steps.split_batch),
    _may("split_fused_projections", _rewrite(normalize.split_fused_projections)),
    _may("split_fused_experts", _rewrite(split_fused_experts)),
    _may("stack_by_dim", _rewrite(normalize.stack_by_dim)),
    _may("sum_one_hot", _rewrite(normalize.sum_one_hot)),
    _may("clone_constants", _rewrite(normalize.clone_constants)),
    _always("drop_dead", normalize_steps.drop_dead, "normalized"),
    _always("look_up_plan", plan_steps.look_up_plan),
    _may("join_pool_gradients", plan_steps.join_pool_gradients),
    _may("expand_moments", plan_steps.expand_moments),
    _always("plan", plan_steps.make_plan, "planned"),
    _always("insert_reshards", lowering_steps.insert_reshards, "resharded"),
    _always("localize", lowering_steps.localize),
    _may("share_exchanges", lowering_steps.share_exchanges),
    _always("find_stages", stage_steps.find_stages),
    _always("cut_batch", lowering_steps.cut_batch),
    _always("sort_by_expert", lowering_steps.sort_by_expert),
    _may("keep_sorted", lowering_steps.keep_sorted),
    _may("exact_exchanges", lowering_steps.exact_exchanges),
    _may("mark_first_rows", lowering_steps.mark_first_rows),
    _may("pair_reductions", lowering_steps.pair_reductions),
    _always("order_stages", stage_steps.order_stages),
    _may("schedule", lowering_steps.apply_schedule, "rewritten"),
    _always("lower", lowering_steps.lower),
    _may("sink_waits", lambda state: sink_waits(state.graph)),
    _always("reshard_after_forward", lowering_steps.regather, "local"),
    _always("describe", plan_steps.describe),
    _always("keep_plan", plan_steps.keep_plan),
)

# One rank is put into it: local -> bound.
RANK = (
    _always("take_place", stage_steps.take_place),
    _always("bind", lowering_steps.bind),
    _always("decompose", lowering_steps.decompose_added),
    _may("rejoin_rows", lowering_steps.rejoin),
    _always("put_writes", lowering_steps.put_writes, "bound"),
)


def hand_over_gradients(state: PhaseState) -> None:
    """Gradients leave a backward where they are made, and are reduced meanwhile."""
    hand_over(state.graph, state.gradients)


# A forward or a backward by itself, as AOTAutograd parted them: bound -> scheduled.
# Collectives are ordered by the rows that a prediction has, too: dropped where nobody
# reads them, in buckets, waited for late, gathers early, scatters not too many at once.
PHASE = (
    *map(_of_phase, ORDER),
    _may("fuse_regions", lowering_steps.fuse_regions),
    _of_phase(DELAY, "scheduled"),
    _always("hand_over", hand_over_gradients),
    _always("compare_places", compare_places),
    _may("outline_layers", lowering_steps.outline_repeated),
    _may("copy_together", lowering_steps.join_copies),
    _may("compute_first_rows", lowering_steps.compute_first_rows),
)

# Whose seconds are shown by themselves; before them the program is normalized, after
# them it is partitioned.
COUNTED = {
    **dict.fromkeys(
        ("look_up_plan", "join_pool_gradients", "expand_moments", "plan"),
        stage_times.PLAN,
    ),
    **dict.fromkeys(("describe", "keep_plan"), stage_times.PLAN),
    "schedule": stage_times.SCHEDULE,
}

STEPS = (*JOINT, *RANK, *PHASE)
# The names of all that a program may go through, as its progress is shown.
WAIT = "waiting for the other ranks"
INDUCTOR = {phase: f"Inductor, {phase}" for phase in ("forward", "backward")}
STEP_NAMES = (
    *(step.name for step in (*JOINT, *RANK)),
    *(name for last in INDUCTOR.values() for name in (*(s.name for s in PHASE), last)),
    WAIT,
)
STAGES = ("traced", *(step.stage for step in STEPS if step.stage))


@dataclass(frozen=True)
class Result:
    """What planning gives."""

    # As it is saved and shown.
    plan: Plan
    # The one-device graph that the plan is of.
    normalized: fx.Graph
    # What each rank runs, the same text on all.
    local: fx.Graph
    # Specs, strategies and reshards, from which the plan is written.
    decision: Decision
    # What was done to the local graph, and is done to forward and backward.
    schedule: Schedule = field(default_factory=Schedule)
    # The local graph before its schedule, if the request is to be tuned.
    unscheduled: fx.Graph | None = None
    # Schedules that come near, as texts, the best first.
    others: tuple[str, ...] = ()
    # So many stages were dumped.
    stage_number: int = 0

    def noted(self, *notes: str) -> Result:
        """With more notes in the plan."""
        return replace(self, plan=replace(self.plan, notes=(*self.plan.notes, *notes)))


def run_steps(rows: Sequence[PipelineStep], state: PipelineState) -> None:
    """Each step in turn that is not left out; times it, and shows what it changed."""
    request = state.request
    printed = request.debug >= 2 and request.leads
    for step in rows:
        graph = state.graph
        if not (step.optional and step.name in request.disable):
            before = op_counts(graph) if printed else Counter[str]()
            status_line.begin(step.name)
            with stage(step.counted) as step_seconds, on_cpu_by_default():
                step.run(state)
            seconds = state.seconds[step.name] = step_seconds.seconds
            if printed:
                after = op_counts(state.graph)
                show_step(state.label, step.name, seconds, before, after)
        # A schedule that does nothing gives no stage of its own.
        if step.stage and (step.stage != "rewritten" or state.graph is not graph):
            show(state, step.stage)


def show(state: PipelineState, stage: str) -> None:
    """Dump or print the graph as it now is, if that is asked for."""
    request = state.request
    show_stage(
        state.graph,
        stage,
        state.label,
        state.stage_number,
        debug=request.debug,
        dump=request.dump,
        specs=state.specs if stage == "planned" else None,
    )
    state.stage_number += 1


def rows_after(name: str, last: str | None = None) -> tuple[PipelineStep, ...]:
    """Return the steps of ``JOINT`` after the step ``name``, up to the step ``last``,
    else to the end."""
    names = [step.name for step in JOINT]
    end = len(names) if last is None else names.index(last) + 1
    return JOINT[names.index(name) + 1 : end]


def decided(graph: fx.Graph, fake_mode: Any, request: Request) -> JointState:
    """Run the steps of ``JOINT`` on a traced graph (changed in place by normalizing)
    until its plan is decided.

    Raises HintError, RuleError, PlanError, and UnknownOpError under ``strict``.
    """
    state = JointState(
        graph=graph,
        request=request,
        fake_mode=fake_mode,
        normalized=graph,
        open=size_nodes.is_open(graph),
    )
    show(state, "traced")
    names = [step.name for step in JOINT]
    run_steps(JOINT[: names.index("plan") + 1], state)
    return state


def finished(state: JointState, rows: Sequence[PipelineStep]) -> Result:
    """Run ``rows``, the last steps of ``JOINT``, and return the result.

    Raises PlanError and ScheduleError.
    """
    run_steps(rows, state)
    return Result(
        replace(state.plan, timings=state.seconds),
        state.normalized,
        state.graph,
        state.decided,
        state.schedule,
        state.unscheduled,
        state.others,
        state.stage_number,
    )


def with_schedule(
    result: Result, schedule: str, fake_mode: Any, request: Request
) -> Result:
    """Return the result with another schedule and all else as it was chosen;
    ``request`` had ``tune``.

    Raises ScheduleError.
    """
    assert result.unscheduled is not None
    plan = result.plan
    chosen = replace(request, bodies=plan.bodies, experts_over=plan.experts or None)
    quiet = replace(chosen, schedule=schedule or "none", debug=0, dump=None)
    state = JointState(
        graph=result.unscheduled,
        request=quiet,
        fake_mode=fake_mode,
        normalized=result.normalized,
        decision=result.decision,
        notes=plan.notes,
        sent_rows=plan.sent_rows,
    )
    return finished(state, rows_after("order_stages"))


def tuned(
    result: Result,
    request: Request,
    fake_mode: Any,
    ranks: Ranks,
    root: torch.nn.Module,
    *,
    inductor: bool,
) -> Result:
    """The result with the schedule that is the fastest on the mesh. ``root`` holds the
    graph's constants.

    Raises PlanError on all ranks if none could be measured, RankMismatchError if a rank
    does not come.
    """
    name = request.name
    texts = tune_schedule.candidates((str(result.schedule), *result.others), name)
    if len(texts) < 2 or ranks.mesh.size == 1:
        return result.noted(tune_schedule.NOTHING)
    results: dict[int, Result] = {}
    graphs: dict[int, fx.Graph] = {}
    failed: dict[int, str] = {}
    for i, text in enumerate(texts):
        try:
            results[i] = with_schedule(result, text, fake_mode, request)
            settings = results[i].schedule.settings
            local, disable = results[i].local, request.disable
            graphs[i] = as_run(local, disable=disable, settings=settings)
        except Exception as error:
            failed[i] = tune_schedule.text_of(error)
    best, notes = tune_schedule.fastest(
        texts, graphs, failed, ranks, root, fake_mode, name=name, inductor=inductor
    )
    plan = replace(results[best].plan, near=result.plan.near)
    return replace(results[best], plan=plan, stage_number=result.stage_number).noted(
        *notes
    )


def bound(
    result: Result,
    request: Request,
    fake_mode: Any,
    ranks: Ranks,
    *,
    inductor: bool,
    writes: Sequence[Write] = (),
    copied: Sequence[int] = (),
) -> fx.Graph:
    """The graph of one rank. ``writes``: its last results are written to inputs;
    ``copied``: positions of inputs whose written values are copied."""
    shares = dict(zip(result.plan.mesh.names, result.plan.mesh.shares, strict=True))
    cut = {axis: shares[axis] for axis in ranks.mesh.names if axis in shares}
    ranks = replace(ranks, mesh=ranks.mesh.with_shares(cut))
    state = RankState(
        graph=result.local,
        request=request,
        stage_number=result.stage_number,
        fake_mode=fake_mode,
        ranks=ranks,
        inductor=inductor,
        at_run_time=inductor and not _fuses(request, result.schedule),
        writes=tuple(writes),
        copied=list(copied),
    )
    run_steps(RANK, state)
    return state.graph


def _fuses(request: Request, schedule: Schedule) -> bool:
    """Whether regions may be fused, whose generated kernels take numbers alone."""
    return request.fuse != "none" or any(line.verb == "fuse" for line in schedule.lines)


def scheduled(
    graph: fx.Graph,
    request: Request,
    result: Result | None,
    *,
    backward: bool,
    inductor: bool = False,
    gradients: Mapping[int, int] | None = None,
    at_rest: Sequence[str] = (),
) -> list[str]:
    """Run the steps of ``PHASE`` on a forward or a backward, in place; what of it runs
    as generated kernels. ``result``: None where nothing was planned; ``inductor``: the
    graph goes there; ``gradients``, ``at_rest``: as of ``PhaseState``."""
    settings = result.schedule.settings if result else Settings()
    state = PhaseState(
        graph=graph,
        request=request,
        phase=PhaseGraph(graph, backward or request.step, settings),
        which="backward" if backward else "forward",
        mesh=result.plan.mesh if result else None,
        even=result is None or result.decision.is_even,
        inductor=inductor,
        gradients=gradients or {},
        at_rest=tuple(at_rest),
    )
    run_steps(PHASE, state)
    graph.lint()
    return state.regions
