"""What each step of ``fxpar.pipeline`` runs, and the state that it changes.

In: a state whose graph is as the step before left it. Out: the same state, its graph
changed or another. Every rank does the same but in ``look_up_plan`` and ``keep_plan``,
which know a disk, and ``bind``. The order is ``fxpar.pipeline``'s.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import FxparWarning, PlanError, ScheduleError, compose
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.choose_schedule import choose_or_warn
from fxpar.fusion.kernels.fuse_regions import fuse_graph, say
from fxpar.fusion.kernels.implementations import GroupFacts
from fxpar.fusion.kernels.interpret import device_of
from fxpar.fusion.kernels.run_fused import facts_of, provider_of
from fxpar.fusion.schedule import Schedule
from fxpar.fusion.verbs import fuse_nodes
from fxpar.passes import (
    graph_bodies,
    manual_regions,
    normalize,
    reshard_after_forward,
    size_nodes,
)
from fxpar.passes import insert_reshards as resharding
from fxpar.passes.body_seeds import refuse_draws
from fxpar.passes.builder import Builder, copy_of
from fxpar.passes.forward_backward import as_run
from fxpar.passes.keep_batch_apart import keep_batch_apart
from fxpar.passes.keep_sorted import keep_sorted as keep_rows_sorted
from fxpar.passes.localize import partition
from fxpar.passes.loop_steps import count_steps
from fxpar.passes.lower import lower_graph
from fxpar.passes.microbatches import cut_microbatches
from fxpar.passes.normalize_experts import experts_in_place
from fxpar.passes.order_collectives import PhaseGraph
from fxpar.passes.outline_layers import outline_layers
from fxpar.passes.peak_memory import by_kind
from fxpar.passes.step_collectives import facts_of as facts_of_step
from fxpar.runtime import binding, plan_store
from fxpar.runtime.groups import Ranks, bandwidth_of
from fxpar.runtime.stage_times import PLAN, SEARCH, stage
from fxpar.runtime.train_step import step_writes
from fxpar.sharding import plan_facts, shard_sizes
from fxpar.sharding.choose_mesh import decide_on, fastest
from fxpar.sharding.decide import Decision
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import OPEN, Program, read, with_open_sizes
from fxpar.sharding.propagate.conventions import batch_axes, expert_axes
from fxpar.sharding.recall_plan import recall
from fxpar.sharding.reshard.all_pairs import MOST
from fxpar.sharding.rules.unknown_ops import report_unknown
from fxpar.sharding.search.run_search import SearchOptions, has_too_many_axes
from fxpar.sharding.spec import Spec

log = logging.getLogger("fxpar")


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

    @property
    def specs(self) -> Mapping[fx.Node, Sequence[Spec]]:
        """Of the tensors that nodes make, once they are decided."""
        return {}


@dataclass(kw_only=True)
class JointState(PipelineState):
    """The program while it is planned."""

    fake_mode: Any
    # The one-device graph.
    normalized: fx.Graph
    # Whether sizes are symbols in it.
    open: bool = False
    program: Program = field(init=False)
    # A plan to apply again: that of the request, or one from disk.
    recalled: Plan | None = None
    # Of these that whose schedule stands, too, where one would be chosen.
    known: Plan | None = None
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
    plan: Plan = field(init=False)

    @property
    def specs(self) -> Mapping[fx.Node, Sequence[Spec]]:
        program, specs = self.decided.program, defaultdict[fx.Node, list[Spec]](list)
        for (node, _), value in sorted(
            program.value_of.items(), key=lambda made: made[0][1]
        ):
            specs[node].append(self.decided.settled[value])
        return specs

    @property
    def decided(self) -> Decision:
        assert self.decision is not None, "the step plan comes first"
        return self.decision

    @property
    def rewriter(self) -> Builder:
        return Builder(self.graph, self.fake_mode)


@dataclass(kw_only=True)
class RankState(PipelineState):
    """The local graph while one rank is put into it."""

    fake_mode: Any
    ranks: Ranks
    # The graph goes to Inductor.
    inductor: bool
    # Its coordinates are looked up when it runs.
    late: bool
    # Positions of the inputs that results are written to, and of those whose written
    # values are copied.
    written: list[int]
    copied: list[int]


@dataclass(kw_only=True)
class PhaseState(PipelineState):
    """A forward or a backward while its communication is ordered."""

    phase: PhaseGraph
    # "forward" or "backward".
    which: str
    # None where nothing was planned: no regions are fused.
    mesh: Mesh | None
    # The graph goes to Inductor.
    inductor: bool = False
    # What runs as generated kernels.
    regions: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.request.label}/{self.which}"


def absorb_regions(state: JointState) -> None:
    """Manual regions are checked, their collectives named."""
    request = state.request
    if state.open and any(n.target in manual_regions.EDGES for n in state.graph.nodes):
        raise PlanError("the sizes in manual regions are known")
    manual_regions.absorb_regions(
        state.graph, state.fake_mode, request.mesh, is_open=bool(request.meshes)
    )


def show_bodies(state: JointState) -> None:
    graph_bodies.show_bodies(state.graph, state.graph.owning_module)
    if state.open and any(map(graph_bodies.body_of, state.graph.nodes)):
        raise PlanError("the sizes in branches and loops are known")


def refuse_body_draws(state: JointState) -> None:
    """Bodies draw what seeds say, which they take as operands."""
    refuse_draws(state.graph)


def count_loop_steps(state: JointState) -> None:
    """Loops whose number of steps depends on data get a nominal one."""
    count_steps(state.graph, state.fake_mode)


def split_batch(state: JointState) -> None:
    """A batch that its axes do not divide stays a dim of its own."""
    if state.open:  # they divide those that a plan may split
        return
    mesh = state.request.mesh
    axes = batch_axes(mesh)

    def splits(rows: int) -> bool:
        even = shard_sizes.is_even(rows, mesh, axes)
        return not even and shard_sizes.may_split(rows, mesh, axes)

    keep_batch_apart(state.graph, state.rewriter, splits)


def place_experts(state: JointState) -> None:
    """Tokens sorted by expert are computed where they lie."""
    mesh, notes = state.request.mesh, []
    axes = expert_axes(mesh)

    def groups(experts: int) -> int:
        count = mesh.count(axes)
        if experts % count:
            notes.append(
                f"{experts} experts are not split over {'+'.join(axes)} ({count} "
                "ranks): each rank has all of them"
            )
        return 1 if experts % count else count

    notes += experts_in_place(state.graph, state.rewriter, groups)
    state.notes += tuple(dict.fromkeys(notes))


def drop_dead(state: JointState) -> None:
    state.graph.eliminate_dead_code()
    state.graph.lint()


def look_up_plan(state: JointState) -> None:
    """The plan of the request, or of the disk, if there is one."""
    request = state.request = _searchable(state.request)
    asked = request.mode
    state.program = _program(state)
    if isinstance(asked, Plan):
        state.recalled = state.known = asked
    elif _is_kept(state):
        assert isinstance(asked, SearchOptions)
        state.key = plan_store.key_of(state.program, state.graph, request)
        found = plan_store.load(state.key, asked.seconds)
        if found is not None:
            state.recalled, chosen = found
            state.known = state.recalled if chosen and not request.tune else None
            note = state.recalled.notes[-1]
            log.info("a plan found before, nothing is searched: %s", note)
    plan = state.recalled
    if plan and plan.mesh.axes in [mesh.axes for mesh in request.meshes]:
        state.request = request.on(plan.mesh)


def _is_kept(state: JointState) -> bool:
    """Whether its plan is looked for on disk; where sizes are open, it is not."""
    kept = state.request.cached and plan_store.allowed() and not state.open
    return kept and isinstance(state.request.mode, SearchOptions)


def _searchable(request: Request) -> Request:
    """The request; to propagate, where its mesh has too many axes for a search."""
    if not isinstance(request.mode, SearchOptions) or not has_too_many_axes(
        request.mesh
    ):
        return request
    what = f"a search takes at most {MOST} axes of more than one rank: the plan"
    fix = "join axes of the mesh, or set FXPAR_PLAN=propagate"
    text = compose(f"{what} for {request.mesh} is propagated", fix=fix)
    warnings.warn(text, FxparWarning, stacklevel=2)
    return replace(request, mode="propagate")


def _program(state: JointState) -> Program:
    """The program of the graph, where sizes are open at those it was traced with."""
    graph = state.graph
    if state.open:
        graph = size_nodes.at_hints(graph, state.fake_mode)
    return read(graph, state.request.laid)


def expand_moments(state: JointState) -> None:
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


def join_pool_gradients(state: JointState) -> None:
    """Of pools whose rows or columns are split where nothing is searched, or hints say
    so: a search does not begin with a form that only such a plan takes."""
    request = state.request
    nodes = normalize.pool_gradients_of(state.graph)
    if not nodes or state.recalled or request.meshes:
        return
    first = decide_on(state.program, replace(request, mode="propagate"))
    _join(state, normalize.split_pool_gradients(first))


def _join(state: JointState, nodes: Sequence[fx.Node]) -> None:
    if nodes:
        normalize.join_pool_gradients(nodes, state.rewriter)
        state.graph.eliminate_dead_code()
        state.program = read(state.graph, state.request.laid)
        state.decision = None


def _searches(request: Request) -> bool:
    return isinstance(request.mode, SearchOptions)


def _expand(state: JointState, moments: Sequence[fx.Node]) -> None:
    if moments:
        moments = [node.meta.get(OPEN, node) for node in moments]
        normalize.expand_moments(moments, state.rewriter)
        state.graph.eliminate_dead_code()
        state.program = _program(state)
        state.decision = None


def make_plan(state: JointState) -> None:
    """Recall, search or propagate."""
    request, plan = state.request, state.recalled
    if plan is not None:
        # Moments that the plan does not contain were expanded before it was made.
        known = {node.name for node in plan.nodes}
        pools = normalize.pool_gradients_of(state.graph)
        _join(state, [node for node in pools if node.name not in known])
        moments = normalize.moments_of(state.program)
        _expand(state, [node for node in moments if node.name not in known])
        state.decision = recall(_program(state), request.mesh, plan)
    elif request.meshes or state.decision is None:
        with stage(SEARCH if _searches(request) else PLAN):
            choose = fastest if request.meshes else decide_on
            state.decision = choose(state.program, request)
        if request.meshes:
            state.request = request.on(state.decision.mesh)
    mesh = state.decision.mesh
    report_unknown(state.decision.program, mesh, request.strict)


def insert_reshards(state: JointState) -> None:
    state.graph = resharding.insert_reshards(state.graph, _open_decision(state))


# Ranks with shards of unlike sizes would fill their buckets with other collectives.
_UNEVEN = Schedule.of("buckets(bytes=0)")


def localize(state: JointState) -> None:
    state.graph = partition(state.graph, _open_decision(state), state.fake_mode)
    if not state.decided.is_even:
        state.schedule = _UNEVEN


def keep_sorted(state: JointState) -> None:
    """Rows stay sorted by expert between products."""
    build = Builder(state.graph, state.fake_mode, state.decided.mesh)
    keep_rows_sorted(state.graph, build)


def _open_decision(state: JointState) -> Decision:
    """What was decided, of the nodes of the graph with its open sizes. Raises PlanError
    where sizes have to be known."""
    if not state.open:
        return state.decided
    if not state.decided.is_even:
        raise PlanError("shards that are not alike have sizes that are known")
    if state.request.microbatches > 1:
        raise PlanError("parts of a batch have sizes that are known")
    return replace(state.decided, program=with_open_sizes(state.decided.program))


def cut_batch(state: JointState) -> None:
    """The rank's batch in parts, one after the other."""
    parts = state.request.microbatches
    if parts > 1:
        state.graph, notes = cut_microbatches(
            state.graph, state.decided, parts, state.fake_mode
        )
        state.notes = (*state.notes, *notes)


def apply_schedule(state: JointState) -> None:
    """The verbs of the schedule that is given, saved or chosen."""
    request, mesh, before = state.request, state.decided.mesh, state.graph
    state.unscheduled = before if request.tune else None
    if state.open:
        _leave_unscheduled(state)
        return
    saved = state.known
    if not state.decided.is_even:
        _refuse_uneven(request.schedule)
        return
    if request.schedule == "auto" and saved is None:
        if request.hardware is None or mesh.size == 1:
            return
        hardware = request.hardware.at_speed(mesh.slowest)
        chosen = choose_or_warn(before, mesh, hardware)
        if chosen is None:
            return
        state.near, state.others = chosen.near, tuple(map(str, chosen.others))
        state.schedule, after = chosen.schedule, chosen.graph
        state.notes += (chosen.note,) if chosen.schedule else ()
    else:
        text = "" if request.schedule == "none" else request.schedule
        if saved is not None and text == "auto":
            text, state.near = saved.schedule, saved.near
        state.schedule = Schedule.of(text)
        after = apply(state.schedule, before, mesh) if state.schedule else before
    if state.schedule:
        fuse_nodes.inline(after)
        state.graph = after


_UNSCHEDULED = "no schedule is chosen: sizes are left open"


def _leave_unscheduled(state: JointState) -> None:
    """Of a graph with open sizes: chunks and slices are of sizes that are known. What
    was asked for by name is refused, so that the sizes are fixed."""
    asked = state.request.schedule
    if asked not in ("auto", "none"):
        raise ScheduleError(f"a schedule is for sizes that are known: {asked!r}")
    told = state.recalled.notes if state.recalled else ()
    if asked == "auto" and state.decided.mesh.size > 1 and _UNSCHEDULED not in told:
        state.notes = (_UNSCHEDULED,)


def _refuse_uneven(text: str) -> None:
    """Raise ScheduleError if a schedule has verbs: they cut all shards alike."""
    if text not in ("auto", "none") and Schedule.of(text).lines:
        raise ScheduleError(
            "the schedule rewrites a program some of whose shards are not alike",
            fix="leave the schedule out, or choose mesh sizes that divide the dims",
        )


def lower(state: JointState) -> None:
    if state.graph is state.unscheduled:
        state.graph = copy_of(state.graph)
    state.graph = lower_graph(state.graph, state.decided.mesh, state.fake_mode)


def regather(state: JointState) -> None:
    if not state.request.keep_gathered:
        reshard_after_forward.regather(state.graph)


def describe(state: JointState) -> None:
    """The plan as data, facts of its step read off the graph."""
    hardware, mesh = state.request.named_hardware, state.decided.mesh
    if hardware is not None:
        mesh = hardware.on(mesh)
    sent, done = facts_of_step(_at_hints(state))
    held, notes = _memory(state)
    plan = plan_facts.describe(state.decided, sent, done, held, mesh)
    state.plan = replace(
        plan,
        schedule=str(state.schedule),
        near=state.near,
        notes=(*plan.notes, *state.notes, *notes),
    )


def _at_hints(state: JointState) -> fx.Graph:
    """The graph, where sizes are open at those it was traced with."""
    if not state.open:
        return state.graph
    return size_nodes.at_hints(state.graph, state.fake_mode)


def _memory(state: JointState) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """What a rank holds at the peak, by kind; or a note that says why nobody knows."""
    settings, disable = state.schedule.settings, state.request.disable
    graph = as_run(_at_hints(state), disable=disable, settings=settings)
    try:
        return by_kind(graph, state.decided.program.signature), ()
    except PlanError as error:  # of the user's own collectives
        return (), (f"memory is not known: {error.what}",)


def keep_plan(state: JointState) -> None:
    """Leave a plan that was searched on disk."""
    searched, asked = state.decided.found, state.request.mode
    if state.key and searched is not None and isinstance(asked, SearchOptions):
        request = state.request
        chosen = request.schedule == "auto" and "schedule" not in request.disable
        chosen = chosen and request.hardware is not None and not request.tune
        plan_store.save(state.key, state.plan, searched, asked.seconds, chosen=chosen)


def bind(state: RankState) -> None:
    ranks = state.ranks
    state.graph = binding.bind(
        state.graph,
        ranks.mesh,
        ranks.rank,
        ranks.group,
        state.fake_mode,
        inductor=state.inductor,
        late=state.late,
    )


def put_writes(state: RankState) -> None:
    step_writes.put_writes(state.graph, state.written)
    step_writes.keep_copies(state.graph, state.copied)


def fuse_regions(state: PhaseState) -> None:
    """Collectives with what is around them as one op: those that the schedule says and,
    with ``options={"fuse": ...}``, those that pay."""
    request, which = state.request, state.which
    if state.mesh is None:
        return
    folder = f"{request.dump}/{state.label}" if request.dump else None
    chosen = request.fuse != "none"
    values = [n.meta.get("val") for n in state.graph.find_nodes(op="placeholder")]
    device = device_of([x for x in values if isinstance(x, torch.Tensor)])
    kernels = request.fuse in ("none", "triton")
    facts = cache(partial(_facts, state.mesh, kernels, device))
    fused = fuse_graph(
        state.graph, facts_of=facts, dump=folder, found=chosen, tune=request.tune
    )
    state.regions += [f"{which}: {text}" for text in fused.lines]
    if request.leads and (chosen or fused.programs or fused.left):
        say(fused, f"{request.name}/{which}", request.debug)


def outline_repeated(state: PhaseState) -> None:
    """Layers that repeat as calls of one body, where Inductor is to compile it."""
    if state.inductor:
        outline_layers(state.graph)


def _facts(mesh: Mesh, kernels: bool, device: torch.device, group: str) -> GroupFacts:
    """Of a process group, for the ladder of kernels. On CPU, where there are none, as
    if ranks shared memory."""
    bandwidth, ranks = bandwidth_of(mesh, group), _torch.distributed.group_size(group)
    if device.type != "cuda" or not kernels:
        return GroupFacts(ranks, kernels, True, bandwidth)
    provider = provider_of(group, device)
    if provider is None:
        return GroupFacts(ranks, kernels, False, bandwidth)
    return facts_of(provider, bandwidth)
