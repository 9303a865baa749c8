"""This module lists every step from the traced graph to what is compiled, in order.

``JOINT`` takes forward and backward in one graph from traced to local, ``RANK``
specializes that graph for one rank, and ``PHASE`` takes a forward or a backward alone,
after AOTAutograd has separated them. A step is a row, a ``Pass``: its name, a function
(graph, context) -> graph, the stage that the graph is in afterwards, and whether
FXPAR_DISABLE may leave it out.

In: a graph, and a ``Request`` with what the user asked for. Out: a ``JointState`` with
what was decided; then the graph of one rank. Never: an order of steps that depends on
the program; a step that differs between ranks, except in ``RANK``; an algorithm.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar._torch.fake import can_have_symbols
from fxpar.explain import status_line
from fxpar.explain.dump import op_counts, show_stage, show_step
from fxpar.features import FEATURES
from fxpar.features.feature import with_features
from fxpar.graph import size_nodes
from fxpar.passes.decompose import decompose
from fxpar.passes.normalize import normalize_ops as normalize
from fxpar.passes.normalize.normalize_matmul import undo_views_around_matmul
from fxpar.passes.order.copy_buckets import copy_together
from fxpar.passes.order.delay_work import sink_waits
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.hand_over import hand_over, separate_results
from fxpar.passes.order.order_collectives import (
    LAST,
    ORDER,
    Pass,
    Run,
    Settings,
    of_build,
)
from fxpar.passes.writes_as_results import Write, drop_kept
from fxpar.runtime import stage_times
from fxpar.runtime.ranks.groups import Ranks
from fxpar.runtime.stage_times import stage
from fxpar.runtime.steps import (
    lowering_steps,
    plan_steps,
    tune_schedule,
)
from fxpar.runtime.steps.pipeline_state import (
    JointState,
    PhaseState,
    PipelineState,
    RankState,
    on_cpu_by_default,
)
from fxpar.sharding.op_facts import has_any, name_of, names_of_ops
from fxpar.sharding.ops import FACTS
from fxpar.sharding.plan_request import Request


def _always(name: str, run: Run, stage: str = "", setting: str = "") -> Pass:
    return Pass(name, run, optional=False, stage=stage, setting=setting)


@cache
def _ops_with(fact: str) -> frozenset[str]:
    """Return the names of the ops whose rows state a fact."""
    stated = (op for op, facts in FACTS.items() if facts.get(fact))
    return frozenset(
        op.replace("::", ".") if isinstance(op, str) else name_of(op) for op in stated
    )


def _has_ops_of(step: Pass, names: Collection[str]) -> bool:
    """Return whether a step has something to do for a graph with ops of these names."""
    return has_any(names, step.ops) or not _ops_with(step.fact).isdisjoint(names)


def _place(name: str) -> int:
    """Return the position of a step in ``JOINT``."""
    return next(i for i, step in enumerate(JOINT) if step.name == name)


# Forward and backward in one graph, the same on every rank: traced -> local.
JOINT = with_features(
    "traced",
    (
        Pass(
            "random_by_index",
            of_build(normalize.random_by_index),
            ops="prims.inductor_seeds prims.inductor_random prims.inductor_randint",
        ),
        Pass("undo_views_around_matmul", of_build(undo_views_around_matmul)),
        Pass("keep_batch_dim", plan_steps.split_batch, fact="reshapes"),
        Pass(
            "split_fused_projections",
            of_build(normalize.split_fused_projections),
            fact="splits",
        ),
        Pass("stack_by_dim", of_build(normalize.stack_by_dim), ops="aten.cat"),
        Pass("sum_one_hot", of_build(normalize.sum_one_hot), ops="aten.scatter"),
        Pass(
            "clone_constants",
            of_build(normalize.clone_constants),
            fact="constant",
        ),
        _always("drop_dead", plan_steps.drop_dead, "normalized"),
        _always("look_up_plan", plan_steps.look_up_plan),
        Pass(
            "expand_moments",
            plan_steps.expand_moments,
            ops="aten.var aten.var_mean",
        ),
        _always("plan", plan_steps.make_plan, "planned"),
        _always("insert_reshards", lowering_steps.insert_reshards, "resharded"),
        _always("localize", lowering_steps.localize),
        Pass("schedule", lowering_steps.apply_schedule, stage="rewritten"),
        _always("lower", lowering_steps.lower),
        Pass("sink_waits", lambda graph, _: sink_waits(graph)),
        _always("reshard_after_forward", lowering_steps.regather, "local"),
        _always("describe", plan_steps.describe),
        _always("keep_plan", plan_steps.keep_plan),
    ),
    FEATURES,
)

# The graph is specialized for one rank: local -> bound.
RANK = with_features(
    "local",
    (
        _always("bind", lowering_steps.bind),
        _always(
            "decompose",
            lambda graph, s: decompose(graph, s.fake_mode),
            setting="inductor",
        ),
        _always("put_writes", lowering_steps.put_writes, "bound"),
    ),
    FEATURES,
)

# A forward or a backward alone, as AOTAutograd separated them: bound -> scheduled.
# ``ORDER`` has the rows that a prediction runs too: collectives are dropped where
# nobody reads them, in buckets, waited for late, gathers early, scatters not too many
# at once.
# Results that are equal get memory of their own. Gradients leave a backward where they
# are made, and are reduced meanwhile.
PHASE = with_features(
    "bound",
    (
        Pass(
            "drop_kept",
            lambda graph, _: drop_kept(graph),
            ops="fxpar.kept_for_backward",
            optional=False,
        ),
        *ORDER,
        Pass("fuse_regions", lowering_steps.fuse_regions),
        *LAST,
        _always(
            "separate_results",
            lambda graph, s: separate_results(graph, s.memories),
        ),
        _always(
            "hand_over",
            lambda graph, s: hand_over(graph, s.gradients),
            setting="gradients",
        ),
        _always(
            "compare_places",
            lowering_steps.compare_places,
            setting="request.manual",
        ),
        Pass("outline_layers", lowering_steps.outline_repeated, setting="inductor"),
        Pass(
            "copy_together",
            lambda graph, _: copy_together(graph),
            setting="inductor",
        ),
    ),
    FEATURES,
)

# The stage of ``stage_times`` that seconds of ``JOINT`` are counted for, if it is not
# PARTITION.
_FIRST_PLANNING = [step.name for step in JOINT].index("look_up_plan")
COUNTED = {
    **dict.fromkeys((x.name for x in JOINT[:_FIRST_PLANNING]), stage_times.NORMALIZE),
    **dict.fromkeys(
        (*(x.name for x in JOINT[_FIRST_PLANNING:][:3]), "describe", "keep_plan"),
        stage_times.PLAN,
    ),
    "schedule": stage_times.SCHEDULE,
}

STEPS = (*JOINT, *RANK, *PHASE)
# The names of all steps that a progress line may show.
WAIT = "waiting for the other ranks"
INDUCTOR = {phase: f"Inductor, {phase}" for phase in ("forward", "backward")}
STEP_NAMES = (
    *(step.name for step in (*JOINT, *RANK)),
    *(name for last in INDUCTOR.values() for name in (*(s.name for s in PHASE), last)),
    WAIT,
)
STAGES = ("traced", *(step.stage for step in STEPS if step.stage))


def run_steps(rows: Sequence[Pass], state: PipelineState) -> None:
    """Run each step in turn that is not left out, time it, and show what it changed."""
    request = state.request
    printed = request.options.debug >= 2 and request.is_leader
    names: frozenset[str] | None = None
    for step in rows:
        graph = state.graph
        is_on = not (step.optional and step.name in request.options.disable)
        if is_on and step.setting:
            is_on = bool(operator.attrgetter(step.setting)(state))
        if is_on and (step.ops or step.fact):
            names = names_of_ops(graph) if names is None else names
            is_on = _has_ops_of(step, names)
        if is_on:
            names = None
            before = op_counts(graph) if printed else Counter[str]()
            counted = COUNTED.get(step.name, stage_times.PARTITION)
            counted = counted if step in JOINT else stage_times.PHASE
            status_line.begin(step.name, counted)
            with stage(counted) as step_seconds, on_cpu_by_default():
                state.graph = step.run(graph, state) or graph
            seconds = state.seconds[step.name] = step_seconds.seconds
            if printed:
                after = op_counts(state.graph)
                show_step(state.label, step.name, seconds, before, after)
        # A schedule that does nothing gives no stage of its own.
        if step.stage and (step.stage != "rewritten" or state.graph is not graph):
            show(state, step.stage)


def show(state: PipelineState, stage: str) -> None:
    """Dump or print the graph as it now is, if that is asked for."""
    options = state.request.options
    if options.debug >= 3 or options.dump:
        show_stage(
            state.graph,
            stage,
            state.label,
            state.stage_number,
            debug=options.debug,
            dump=options.dump,
            specs=state.specs if stage == "planned" else None,
        )
    state.stage_number += 1


def rows_after(name: str, last: str | None = None) -> tuple[Pass, ...]:
    """Return the steps of ``JOINT`` after the step ``name``, up to the step ``last``,
    else to the end."""
    return JOINT[_place(name) + 1 : None if last is None else _place(last) + 1]


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
        open=can_have_symbols(fake_mode) and size_nodes.is_open(graph),
    )
    show(state, "traced")
    run_steps(JOINT[: _place("plan") + 1], state)
    return state


def finished(state: JointState, rows: Sequence[Pass]) -> JointState:
    """Run ``rows``, the last steps of ``JOINT``, and return the state, without what
    only planning reads.

    Raises PlanError and ScheduleError.
    """
    run_steps(rows, state)
    state.plan = replace(state.plan, timings=state.seconds)
    state.rivals, state.attempts, state.run = (), None, None
    return state


def with_schedule(result: JointState, schedule: str) -> JointState:
    """Return the result, which was requested with ``tune``, with another schedule and
    all else as it was chosen.

    Raises ScheduleError.
    """
    assert result.unscheduled is not None
    plan = result.plan
    request = result.request.with_options(
        schedule=schedule or "none", debug=0, dump=None
    )
    state = JointState(
        graph=result.unscheduled,
        request=request,
        fake_mode=result.fake_mode,
        normalized=result.normalized,
        decision=result.decision,
        notes=plan.notes,
        sent_rows=plan.sent_rows,
    )
    return finished(state, rows_after("order_stages"))


def tuned(result: JointState, ranks: Ranks, root: torch.nn.Module) -> JointState:
    """Return the result with the schedule measured as the fastest on the mesh. ``root``
    holds the graph's constants.

    Raises PlanError on all ranks if none could be measured, RankMismatchError if a rank
    does not come.
    """
    name, disable = result.request.name, result.request.options.disable
    texts = tune_schedule.candidates((str(result.schedule), *result.others), name)
    if len(texts) < 2 or ranks.mesh.size == 1:
        return result.noted(tune_schedule.NOTHING)
    results: dict[int, JointState] = {}
    graphs: dict[int, fx.Graph] = {}
    failed: dict[int, str] = {}
    for i, text in enumerate(texts):
        try:
            results[i] = with_schedule(result, text)
            settings = results[i].schedule.settings
            graphs[i] = as_run(results[i].local, disable=disable, settings=settings)
        except Exception as error:
            failed[i] = tune_schedule.text_of(error)
    best, notes = tune_schedule.fastest(
        texts,
        graphs,
        failed,
        ranks,
        root,
        result.fake_mode,
        name=name,
        inductor=result.inductor,
    )
    fastest = results[best]
    fastest.request, fastest.stage_number = result.request, result.stage_number
    fastest.plan = replace(fastest.plan, near=result.plan.near)
    return fastest.noted(*notes)


def bound(
    result: JointState,
    ranks: Ranks,
    *,
    writes: Sequence[Write] = (),
    copied: Sequence[int] = (),
) -> fx.Graph:
    """Return the graph of one rank. ``writes``: its last results are written to inputs;
    ``copied``: positions of inputs whose written values are copied."""
    shares = dict(zip(result.plan.mesh.names, result.plan.mesh.shares, strict=True))
    cut = {axis: shares[axis] for axis in ranks.mesh.names if axis in shares}
    ranks = replace(ranks, mesh=ranks.mesh.with_shares(cut))
    # Generated kernels of fused regions take only numbers.
    fuses = result.request.options.fuse != "none" or any(
        line.verb == "fuse" for line in result.schedule.lines
    )
    state = RankState(
        graph=result.local,
        request=result.request,
        stage_number=result.stage_number,
        fake_mode=result.fake_mode,
        ranks=ranks,
        at_run_time=result.inductor and not fuses,
        writes=tuple(writes),
        copied=list(copied),
    )
    run_steps(RANK, state)
    return state.graph


def scheduled(
    graph: fx.Graph,
    request: Request,
    result: JointState | None,
    *,
    backward: bool,
    memories: Mapping[int, Hashable] | None = None,
    gradients: Mapping[int, int] | None = None,
    at_rest: Sequence[str] = (),
) -> list[str]:
    """Run the steps of ``PHASE`` on a forward or a backward, in place, and return its
    regions, which run as generated kernels. ``result``: None where nothing was planned;
    ``memories``, ``gradients``, ``at_rest``: as in ``PhaseState``."""
    settings = result.schedule.settings if result else Settings()
    state = PhaseState(
        graph=graph,
        request=request,
        backward=backward or request.step,
        settings=settings,
        which="backward" if backward else "forward",
        mesh=result.plan.mesh if result else None,
        even=result is None or result.decided.is_even,
        memories=None if backward else memories or {},
        gradients=gradients or {},
        at_rest=tuple(at_rest),
    )
    run_steps(PHASE, state)
    graph.lint()
    return state.regions
