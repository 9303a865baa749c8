"""Steps of the pipeline from the plan to what one rank runs.

In: a state whose graph is as the step before left it: the program with its plan, one
rank of it, a forward or a backward by itself. Out: the same state, its graph changed or
another. Every rank does the same but in ``bind``. The order is ``fxpar.pipeline``'s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from fxpar import _torch
from fxpar.errors import PlanError, ScheduleError
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.choose_schedule import choose_or_warn
from fxpar.fusion.kernels.fuse_regions import fuse_graph, say
from fxpar.fusion.kernels.implementations import GroupFacts
from fxpar.fusion.kernels.interpret import device_of
from fxpar.fusion.kernels.run_fused import facts_of, provider_of
from fxpar.fusion.schedule import Schedule
from fxpar.fusion.verbs import fuse_nodes
from fxpar.graph import size_nodes
from fxpar.graph.builder import Builder, copy_of
from fxpar.passes import insert_reshards as resharding
from fxpar.passes import writes_as_results
from fxpar.passes.decompose import decompose
from fxpar.passes.experts import first_rows, local_experts
from fxpar.passes.experts.exact_exchange import exact_exchanges as send_exactly
from fxpar.passes.experts.keep_sorted import keep_sorted as keep_rows_sorted
from fxpar.passes.local.localize import partition
from fxpar.passes.local.share_exchanges import share_exchanges as share_rows
from fxpar.passes.local.softmax_pairs import exchange_pairs
from fxpar.passes.lower import lower_graph
from fxpar.passes.order import forward_backward
from fxpar.passes.order.copy_together import copy_together
from fxpar.passes.order.outline_layers import outline_layers
from fxpar.passes.order.rejoin_rows import rejoin_rows
from fxpar.passes.stages.microbatches import cut_microbatches
from fxpar.runtime.ranks.groups import bandwidth_of
from fxpar.runtime.steps import binding
from fxpar.runtime.steps.pipeline_state import JointState, PhaseState, RankState
from fxpar.runtime.steps.stage_steps import parts_of
from fxpar.sharding.decide import Decision
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.read_program import with_open_sizes


def insert_reshards(state: JointState) -> None:
    state.graph = resharding.insert_reshards(state.graph, _open_decision(state))


def localize(state: JointState) -> None:
    state.graph = partition(state.graph, _open_decision(state), state.fake_mode)


def sort_by_expert(state: JointState) -> None:
    """Rows of each part of a batch are sorted by expert."""
    build = Builder(state.graph, state.fake_mode, state.decided.mesh)
    local_experts.sort_by_expert(state.graph, build)


def keep_sorted(state: JointState) -> None:
    """Rows stay sorted by expert between products."""
    build = Builder(state.graph, state.fake_mode, state.decided.mesh)
    keep_rows_sorted(state.graph, build)


def exact_exchanges(state: JointState) -> None:
    """Rows are sent to their experts by exact numbers."""
    build = Builder(state.graph, state.fake_mode, state.decided.mesh)
    send_exactly(state.graph, build)


def mark_first_rows(state: JointState) -> None:
    """Of rows of experts, those behind a rank's last are known not to be read."""
    first_rows.mark_first_rows(state.graph)


def compute_first_rows(state: PhaseState) -> None:
    """Rows of experts are computed up to a rank's last."""
    first_rows.compute_first_rows(state.graph, state.phase.rewriter)


def _open_decision(state: JointState) -> Decision:
    """What was decided, of the nodes of the graph with its open sizes. Raises PlanError
    where sizes have to be known."""
    if not state.open:
        return state.decided
    if not state.decided.is_even:
        raise PlanError("shards that are not alike have sizes that are known")
    if (state.request.microbatches or 1) > 1:
        raise PlanError("parts of a batch have sizes that are known")
    return replace(state.decided, program=with_open_sizes(state.decided.program))


def cut_batch(state: JointState) -> None:
    """The rank's batch in parts, one after the other."""
    parts, microbatches = parts_of(state.request), state.request.microbatches
    staged = bool(state.stages) or state.request.pipeline is None
    if parts > 1 and staged:
        state.graph, notes = cut_microbatches(
            state.graph,
            state.decided,
            parts,
            state.fake_mode,
            required=microbatches is not None,
        )
        state.notes = (*state.notes, *notes)


def pair_reductions(state: JointState) -> None:
    """What normalizes a softmax along a split dim is sent at once, where that pays."""
    hardware, mesh = state.request.hardware, state.decided.mesh
    if hardware is None or mesh.size == 1 or not state.decided.is_even:
        return
    build = Builder(state.graph, state.fake_mode, mesh)
    exchange_pairs(state.graph, build, hardware.at_speed(mesh.slowest).on(mesh))


def share_exchanges(state: JointState) -> None:
    """Slices of one tensor are cut from rows exchanged once, where that pays."""
    mesh = state.decided.mesh
    if mesh.size > 1 and not state.open:
        build = Builder(state.graph, state.fake_mode, mesh)
        share_rows(state.graph, build, mesh)


def apply_schedule(state: JointState) -> None:
    """The verbs of the schedule that is given, saved or chosen."""
    request, mesh, before = state.request, state.decided.mesh, state.graph
    state.unscheduled = before if request.tune else None
    if state.open:
        _schedule_open(state)
        return
    recalled = state.plan_with_schedule
    if request.pipeline is not None:
        return
    if request.schedule == "auto" and recalled is None:
        if request.hardware is None or mesh.size == 1:
            return
        hardware = request.hardware.at_speed(mesh.slowest)
        chosen = choose_or_warn(before, mesh, hardware)
        if chosen is None:
            return
        state.near, state.others = chosen.near, tuple(map(str, chosen.others))
        state.schedule, after, state.run = chosen.schedule, chosen.graph, chosen.run
        state.notes += chosen.notes
    else:
        text = "" if request.schedule == "none" else request.schedule
        if recalled is not None and text == "auto":
            text, state.near = recalled.schedule, recalled.near
        state.schedule = Schedule.of(text)
        after = apply(state.schedule, before, mesh) if state.schedule else before
    if state.schedule:
        fuse_nodes.inline(after)
        state.graph = after


_SETTINGS_ALONE = (
    "schedule: chosen of buckets and prefetching alone, since sizes are left open"
)


def _schedule_open(state: JointState) -> None:
    """The settings of a schedule for a graph with open sizes, chosen for those it was
    traced with. Verbs cut sizes that are known: a schedule with lines of them is
    refused, so that the sizes are fixed."""
    request, mesh = state.request, state.decided.mesh
    recalled = state.plan_with_schedule
    text = "" if request.schedule == "none" else request.schedule
    if text == "auto" and recalled is None:
        if request.hardware is None or mesh.size == 1:
            return
        hinted = size_nodes.at_hints(state.graph, state.fake_mode)
        hardware = request.hardware.at_speed(mesh.slowest)
        chosen = choose_or_warn(hinted, mesh, hardware, lines=False)
        if chosen is None:
            return
        state.schedule, state.near = chosen.schedule, chosen.near
        state.notes += (*chosen.notes, _SETTINGS_ALONE)
        return
    if recalled is not None and text == "auto":
        text, state.near = recalled.schedule, recalled.near
    state.schedule = Schedule.of(text)
    if state.schedule.lines:
        raise ScheduleError(f"a schedule's verbs are for sizes that are known: {text}")


def lower(state: JointState) -> None:
    if state.graph is state.unscheduled:
        state.graph = copy_of(state.graph)
    state.graph = lower_graph(state.graph, state.decided.mesh, state.fake_mode)


def regather(state: JointState) -> None:
    forward_backward.save_of_stages(state.graph)
    if not state.request.keep_gathered:
        forward_backward.regather(state.graph)
    if not state.decided.is_even or state.request.manual is not None:
        forward_backward.save_alike(state.graph)


def bind(state: RankState) -> None:
    ranks = state.ranks
    state.graph = binding.bind(
        state.graph,
        ranks.mesh,
        ranks.rank,
        ranks.group,
        state.fake_mode,
        inductor=state.inductor,
        at_run_time=state.at_run_time,
        manual=state.request.manual.axes if state.request.manual else (),
    )


def decompose_added(state: RankState) -> None:
    """What passes added as Inductor takes it."""
    if state.inductor:
        decompose(state.graph, state.fake_mode)


def rejoin(state: RankState) -> None:
    """What Inductor keeps for a backward in a layout that is slow to read."""
    if state.inductor:
        rejoin_rows(state.graph)


def put_writes(state: RankState) -> None:
    phase = "update" if state.request.step else None
    writes_as_results.put(state.graph, state.writes, phase)
    writes_as_results.keep_read(state.graph, state.copied)


def fuse_regions(state: PhaseState) -> None:
    """Collectives with what is around them as one op: those that the schedule says and,
    with ``options={"fuse": ...}``, those that pay."""
    request, which = state.request, state.which
    if state.mesh is None:
        return  # nothing was planned
    folder = f"{request.dump}/{state.label}" if request.dump else None
    beyond_schedule = request.fuse != "none" and state.even
    values = [n.meta.get("val") for n in state.graph.find_nodes(op="placeholder")]
    device = device_of([x for x in values if isinstance(x, torch.Tensor)])
    kernels = request.fuse in ("none", "triton")
    facts = cache(partial(_facts, state.mesh, kernels, device))
    fused = fuse_graph(
        state.graph,
        facts_of=facts,
        dump=folder,
        beyond_schedule=beyond_schedule,
        tune=request.tune,
    )
    state.regions += [f"{which}: {text}" for text in fused.lines]
    if request.leads and (beyond_schedule or fused.programs or fused.unfused):
        say(fused, f"{request.name}/{which}", request.debug)


def outline_repeated(state: PhaseState) -> None:
    """Layers that repeat as calls of one body, where Inductor is to compile it."""
    if state.inductor:
        outline_layers(state.graph, even=state.even)


def join_copies(state: PhaseState) -> None:
    """What lies in memory is copied into buckets at once."""
    if state.inductor:
        copy_together(state.graph)


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
