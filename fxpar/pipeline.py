"""The pipeline: every step from the traced graph to what is compiled, in order.

``JOINT`` takes forward and backward in one graph from traced to local, ``RANK`` puts
one rank into it, ``PHASE`` takes a forward or a backward by itself, once AOTAutograd
parted them. A step is a row: its name, what it runs, the stage that the graph then is
in, whether FXPAR_DISABLE may leave it out. Data goes in (``Request``) and comes out
(``Result``).
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import FxparWarning, compose
from fxpar.explain.dump import op_counts, show_stage, show_step
from fxpar.fusion import fuse_nodes
from fxpar.fusion.apply_schedule import (
    MovedCollectives,
    apply,
    moved_collectives,
    with_moved,
)
from fxpar.fusion.choose_schedule import choose_or_warn
from fxpar.fusion.kernels.fuse_regions import fuse_graph, say
from fxpar.fusion.kernels.implementations import Facts
from fxpar.fusion.kernels.interpret import device_of
from fxpar.fusion.kernels.run_fused import facts_of, provider_of
from fxpar.fusion.schedule import Schedule
from fxpar.passes import normalize
from fxpar.passes.forward_backward import as_run
from fxpar.passes.graph_bodies import show_bodies
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.passes.localize import partition
from fxpar.passes.lower import lower_graph
from fxpar.passes.normalize_matmul import undo_views_around_matmul
from fxpar.passes.normalize_shifts import find_shifts
from fxpar.passes.order_collectives import PASSES, Phase, Settings
from fxpar.passes.reshard_after_forward import regather
from fxpar.passes.rewriter import Rewriter, copy_of
from fxpar.passes.sink_waits import sink_waits
from fxpar.runtime import consensus, plan_store, presence, tune_schedule
from fxpar.runtime.binding import bind
from fxpar.runtime.groups import Ranks, bandwidth_of
from fxpar.runtime.train_step.step_writes import keep_copies, put_writes
from fxpar.sharding.choose_mesh import decide_on, fastest
from fxpar.sharding.decide import Decision
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_facts import describe
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program, read
from fxpar.sharding.recall_plan import recall
from fxpar.sharding.reshard.all_pairs import MOST
from fxpar.sharding.rules.unknown_ops import report_unknown
from fxpar.sharding.search.run_search import Asked, has_too_many_axes

log = logging.getLogger("fxpar")


@dataclass(frozen=True)
class Result:
    """What planning gives."""

    plan: Plan
    # The one-device graph that the plan is of.
    normalized: fx.Graph
    # What each rank runs, the same text on all.
    local: fx.Graph
    decision: Decision
    # What was done to the local graph, and is done to forward and backward.
    schedule: Schedule = field(default_factory=Schedule)
    # The local graph before its schedule, if the request is to be tuned.
    unscheduled: fx.Graph | None = None
    # Schedules that come near, as texts, the best first.
    others: tuple[str, ...] = ()
    # So many stages were dumped.
    shown: int = 0

    def noted(self, *notes: str) -> Result:
        """With more notes in the plan."""
        return replace(self, plan=replace(self.plan, notes=(*self.plan.notes, *notes)))


@dataclass(kw_only=True)
class PipelineState:
    """What steps change."""

    # As the last step left it.
    graph: fx.Graph
    request: Request
    # So many stages were dumped.
    shown: int = 0
    # Of each step, by its name.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Where stages are dumped, and what logs begin with."""
        return self.request.label


@dataclass(kw_only=True)
class JointState(PipelineState):
    """The program while it is planned."""

    fake_mode: Any
    # The one-device graph.
    normalized: fx.Graph
    program: Program = field(init=False)
    # A plan to apply again: that of the request, or one from disk.
    recalled: Plan | None = None
    # Of the plan on disk.
    key: str = ""
    decision: Decision | None = None
    # The local graph before its schedule, if the request is to be tuned.
    unscheduled: fx.Graph | None = None
    schedule: Schedule = field(default_factory=Schedule)
    # What came near to be the schedule, and others that were simulated.
    near: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Collectives that the schedule took away, and those it brought.
    moved: MovedCollectives = (Counter(), Counter())
    plan: Plan = field(init=False)

    @property
    def decided(self) -> Decision:
        assert self.decision is not None, "the step plan comes first"
        return self.decision

    @property
    def rewriter(self) -> Rewriter:
        return Rewriter(self.graph, self.fake_mode)


@dataclass(kw_only=True)
class RankState(PipelineState):
    """The local graph while one rank is put into it."""

    fake_mode: Any
    ranks: Ranks
    # The graph goes to Inductor.
    inductor: bool
    # Positions of the inputs that results are written to, and of those whose written
    # values are copied.
    written: list[int]
    copied: list[int]


@dataclass(kw_only=True)
class PhaseState(PipelineState):
    """A forward or a backward while its communication is ordered."""

    phase: Phase
    # "forward" or "backward".
    which: str
    # None where nothing was planned: no regions are fused.
    mesh: Mesh | None
    # What runs as generated kernels.
    regions: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.request.label}/{self.which}"


@dataclass(frozen=True)
class PipelineStep:
    """One step of the pipeline."""

    # In FXPAR_DISABLE, and where it is printed.
    name: str
    run: Callable[[Any], None]
    # The stage that the graph is in after it, as docs/concepts.md calls it.
    stage: str = ""
    # FXPAR_DISABLE may leave it out.
    optional: bool = False


def _rewrite(
    function: Callable[[fx.Graph, Rewriter], None],
) -> Callable[[JointState], None]:
    return lambda state: function(state.graph, state.rewriter)


def _show_bodies(state: JointState) -> None:
    show_bodies(state.graph, state.graph.owning_module)


def _drop_dead(state: JointState) -> None:
    state.graph.eliminate_dead_code()
    state.graph.lint()


def _look_up_plan(state: JointState) -> None:
    """The plan of the request, or of the disk, if there is one."""
    request = state.request = _searchable(state.request)
    asked = request.mode
    state.program = read(state.graph, request.laid)
    if isinstance(asked, Plan):
        state.recalled = asked
    elif isinstance(asked, Asked) and request.cached and plan_store.allowed():
        state.key = plan_store.key_of(state.program, state.graph, request)
        state.recalled = plan_store.load(state.key, asked.seconds)
        if state.recalled is not None:
            note = state.recalled.notes[-1]
            log.info("a plan found before, nothing is searched: %s", note)
    plan = state.recalled
    if plan and plan.mesh.axes in [mesh.axes for mesh in request.meshes]:
        state.request = request.on(plan.mesh)


def _searchable(request: Request) -> Request:
    """The request; to propagate, where its mesh has too many axes for a search."""
    if not isinstance(request.mode, Asked) or not has_too_many_axes(request.mesh):
        return request
    what = f"a search takes at most {MOST} axes of more than one rank: the plan"
    fix = "join axes of the mesh, or set FXPAR_PLAN=propagate"
    text = compose(f"{what} for {request.mesh} is propagated", fix=fix)
    warnings.warn(text, FxparWarning, stacklevel=2)
    return replace(request, mode="propagate")


def _expand_moments(state: JointState) -> None:
    """Before a search all: it would not split what their rules keep whole. Else those
    of which a first decision splits what must be whole."""
    request, program = state.request, state.program
    moments = normalize.moments_of(program)
    if not moments or state.recalled or (request.meshes and not _searches(request)):
        return
    if not _searches(request):
        state.decision = decide_on(program, request)
        moments = normalize.split_moments(state.decision)
    _expand(state, moments)


def _searches(request: Request) -> bool:
    return isinstance(request.mode, Asked)


def _expand(state: JointState, moments: Sequence[fx.Node]) -> None:
    if moments:
        normalize.expand_moments(moments, state.rewriter)
        state.graph.eliminate_dead_code()
        state.program = read(state.graph, state.request.laid)
        state.decision = None


def _plan(state: JointState) -> None:
    """Recall, search or propagate."""
    request, plan = state.request, state.recalled
    if plan is not None:
        # Moments that the plan does not contain were expanded before it was made.
        known = {node.name for node in plan.nodes}
        moments = normalize.moments_of(state.program)
        _expand(state, [node for node in moments if node.name not in known])
        state.decision = recall(read(state.graph, request.laid), request.mesh, plan)
    elif request.meshes:
        state.decision = fastest(state.program, request)
        state.request = request.on(state.decision.mesh)
    elif state.decision is None:
        state.decision = decide_on(state.program, request)
    report_unknown(state.decision.program, request.strict)


def _insert_reshards(state: JointState) -> None:
    state.graph = insert_reshards(state.graph, state.decided)


def _localize(state: JointState) -> None:
    state.graph = partition(state.graph, state.decided, state.fake_mode)


def _schedule(state: JointState) -> None:
    """The verbs of the schedule that is given, saved or chosen."""
    request, mesh, before = state.request, state.decided.mesh, state.graph
    state.unscheduled = before if request.tune else None
    saved = request.mode if isinstance(request.mode, Plan) else None
    if request.schedule == "auto" and saved is None:
        if request.hardware is None or mesh.size == 1:
            return
        chosen = choose_or_warn(before, mesh, request.hardware.at_speed(mesh.slowest))
        if chosen is None:
            return
        state.near, state.others = chosen.near, tuple(map(str, chosen.others))
        state.schedule, after = chosen.schedule, chosen.graph
        state.notes = (chosen.note,) if chosen.schedule else ()
    else:
        text = "" if request.schedule == "none" else request.schedule
        if saved is not None and text == "auto":
            text = saved.schedule
        state.schedule = Schedule.of(text)
        after = apply(state.schedule, before, mesh) if state.schedule else before
    if state.schedule:
        fuse_nodes.inline(after)
        state.graph, state.moved = after, moved_collectives(before, after)


def _lower(state: JointState) -> None:
    if state.graph is state.unscheduled:
        state.graph = copy_of(state.graph)
    state.graph = lower_graph(state.graph, state.decided.mesh, state.fake_mode)


def _reshard_after_forward(state: JointState) -> None:
    if not state.request.keep_gathered:
        regather(state.graph)


def _describe(state: JointState) -> None:
    """The plan as data, with what the schedule changed."""
    keep = state.request.keep_gathered
    plan = describe(state.decided, keep_gathered=keep)
    state.plan = replace(
        plan,
        schedule=str(state.schedule),
        near=state.near,
        notes=(*plan.notes, *state.notes),
        collectives=with_moved(plan.collectives, state.moved),
    )


def _keep_plan(state: JointState) -> None:
    """Leave a plan that was searched on disk."""
    searched, asked = state.decided.found, state.request.mode
    if state.key and searched is not None and isinstance(asked, Asked):
        plan_store.save(state.key, state.plan, searched, asked.seconds)


JOINT = (
    PipelineStep("show_bodies", _show_bodies),
    PipelineStep("random_by_index", _rewrite(normalize.random_by_index), optional=True),
    PipelineStep("find_shifts", _rewrite(find_shifts), optional=True),
    PipelineStep(
        "undo_views_around_matmul", _rewrite(undo_views_around_matmul), optional=True
    ),
    PipelineStep(
        "split_fused_projections",
        _rewrite(normalize.split_fused_projections),
        optional=True,
    ),
    PipelineStep("sum_one_hot", _rewrite(normalize.sum_one_hot), optional=True),
    PipelineStep("clone_constants", _rewrite(normalize.clone_constants), optional=True),
    PipelineStep("drop_dead", _drop_dead, stage="normalized"),
    PipelineStep("look_up_plan", _look_up_plan),
    PipelineStep("expand_moments", _expand_moments, optional=True),
    PipelineStep("plan", _plan, stage="planned"),
    PipelineStep("insert_reshards", _insert_reshards, stage="resharded"),
    PipelineStep("localize", _localize),
    PipelineStep("schedule", _schedule, stage="rewritten", optional=True),
    PipelineStep("lower", _lower),
    PipelineStep("sink_waits", lambda state: sink_waits(state.graph), optional=True),
    PipelineStep("reshard_after_forward", _reshard_after_forward, stage="local"),
    PipelineStep("describe", _describe),
    PipelineStep("keep_plan", _keep_plan),
)


def _bind(state: RankState) -> None:
    ranks = state.ranks
    state.graph = bind(
        state.graph,
        ranks.mesh,
        ranks.rank,
        ranks.group,
        state.fake_mode,
        inductor=state.inductor,
    )


def _put_writes(state: RankState) -> None:
    put_writes(state.graph, state.written)
    keep_copies(state.graph, state.copied)


RANK = (
    PipelineStep("bind", _bind),
    PipelineStep("put_writes", _put_writes, stage="bound"),
)


def _fuse_regions(state: PhaseState) -> None:
    """Collectives with what is around them as one op: those that the schedule says and,
    with ``options={"fuse": ...}``, those that pay."""
    request, which = state.request, state.which
    if state.mesh is None:
        return
    folder = f"{request.dump}/{state.label}" if request.dump else None
    chosen = request.fuse != "none"
    values = [n.meta["val"] for n in state.graph.find_nodes(op="placeholder")]
    device = device_of([x for x in values if isinstance(x, torch.Tensor)])
    kernels = request.fuse in ("none", "triton")
    facts = cache(partial(_facts, state.mesh, kernels, device))
    fused = fuse_graph(
        state.graph, facts_of=facts, dump=folder, found=chosen, tune=request.tune
    )
    state.regions += [f"{which}: {text}" for text in fused.lines]
    if request.leads and (chosen or fused.programs or fused.left):
        say(fused, f"{request.name}/{which}", request.debug)


def _facts(mesh: Mesh, kernels: bool, device: torch.device, group: str) -> Facts:
    """Of a process group, for the ladder of kernels. On CPU, where there are none, as
    if ranks shared memory."""
    bandwidth, ranks = bandwidth_of(mesh, group), _torch.distributed.group_size(group)
    if device.type != "cuda" or not kernels:
        return Facts(ranks, kernels, True, bandwidth)
    provider = provider_of(group, device)
    if provider is None:
        return Facts(ranks, kernels, False, bandwidth)
    return facts_of(provider, bandwidth)


def _order(name: str) -> Callable[[PhaseState], None]:
    return lambda state: PASSES[name](state.phase)


PHASE = (
    PipelineStep("drop_unread", _order("drop_unread")),
    PipelineStep("bucket", _order("bucket"), optional=True),
    PipelineStep("sink_waits", _order("sink_waits"), optional=True),
    PipelineStep("prefetch", _order("prefetch"), optional=True),
    PipelineStep("drain", _order("drain"), optional=True),
    PipelineStep("give_outputs", _order("give_outputs")),
    PipelineStep("fuse_regions", _fuse_regions, optional=True),
    PipelineStep("delay", _order("delay"), stage="scheduled", optional=True),
)

STEPS = (*JOINT, *RANK, *PHASE)


def run_steps(steps: Sequence[PipelineStep], state: PipelineState) -> None:
    """Each step in turn that is not left out; times it, and shows what it changed."""
    request, debug = state.request, state.request.debug
    for step in steps:
        if step.name in request.disable and step.optional:
            continue
        begun, graph = time.perf_counter(), state.graph
        before = op_counts(graph) if debug >= 2 else Counter()
        step.run(state)
        seconds = time.perf_counter() - begun
        state.seconds[step.name] = state.seconds.get(step.name, 0.0) + seconds
        if debug >= 2 and request.leads:
            show_step(state.label, step.name, seconds, before, op_counts(state.graph))
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
        state.shown,
        debug=request.debug,
        dump=request.dump,
    )
    state.shown += 1


def parallelize(graph: fx.Graph, fake_mode: Any, request: Request) -> Result:
    """Run the steps of ``JOINT`` on a traced graph (changed in place by normalizing).

    Raises HintError, RuleError, PlanError, ScheduleError, and UnknownOpError under
    ``strict``.
    """
    state = JointState(
        graph=graph, request=request, fake_mode=fake_mode, normalized=graph
    )
    show(state, "traced")
    run_steps(JOINT, state)
    return _result(state)


def _result(state: JointState) -> Result:
    return Result(
        replace(state.plan, timings=state.seconds),
        state.normalized,
        state.graph,
        state.decided,
        state.schedule,
        state.unscheduled,
        state.others,
        state.shown,
    )


def with_schedule(
    result: Result, schedule: str, fake_mode: Any, request: Request
) -> Result:
    """What ``parallelize`` gave, with another schedule; ``request`` had ``tune``.

    Raises ScheduleError.
    """
    assert result.unscheduled is not None
    quiet = replace(request, schedule=schedule or "none", debug=0, dump=None)
    state = JointState(
        graph=result.unscheduled,
        request=quiet,
        fake_mode=fake_mode,
        normalized=result.normalized,
        decision=result.decision,
    )
    names = [step.name for step in JOINT]
    run_steps(JOINT[names.index("schedule") :], state)
    return _result(state)


def planned(graph: fx.Graph, fake_mode: Any, request: Request) -> Result:
    """What ``parallelize`` gives; of a search, what it gives on rank 0: it depends on
    the clock, so one rank searches and the others follow its plan, mesh and links.

    Raises as ``parallelize`` does, and RankMismatchError if rank 0 does not come.
    """
    asked, tag = request.mode, f"the plan of {request.name}"
    if not isinstance(asked, Asked):
        return parallelize(graph, fake_mode, request)
    request = replace(request, mesh=asked.hardware.on(request.mesh))
    if request.leads:
        with presence.works(f"searches {tag}"):
            result = parallelize(graph, fake_mode, request)
        consensus.gather(tag, json.dumps(result.plan.to_record()))
        return result
    text, *_ = consensus.gather(tag, "")
    plan = Plan.from_dict(json.loads(text))
    return parallelize(graph, fake_mode, replace(request, mode=plan))


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
    return replace(results[best], plan=plan, shown=result.shown).noted(*notes)


def bound(
    result: Result,
    request: Request,
    fake_mode: Any,
    ranks: Ranks,
    *,
    inductor: bool,
    written: Sequence[int] = (),
    copied: Sequence[int] = (),
) -> fx.Graph:
    """The graph of one rank. ``written``: positions of the inputs that results are
    written to; ``copied``: of those whose written values are copied."""
    state = RankState(
        graph=result.local,
        request=request,
        shown=result.shown,
        fake_mode=fake_mode,
        ranks=ranks,
        inductor=inductor,
        written=list(written),
        copied=list(copied),
    )
    run_steps(RANK, state)
    return state.graph


def scheduled(
    graph: fx.Graph, request: Request, result: Result | None, *, backward: bool
) -> list[str]:
    """Run the steps of ``PHASE`` on a forward or a backward, in place; what of it runs
    as generated kernels. ``result``: None where nothing was planned."""
    settings = result.schedule.settings if result else Settings()
    state = PhaseState(
        graph=graph,
        request=request,
        phase=Phase(graph, backward or request.step, settings),
        which="backward" if backward else "forward",
        mesh=result.plan.mesh if result else None,
    )
    run_steps(PHASE, state)
    return state.regions
