"""Turn a planned program into the graph that one rank runs: steps of the pipeline.

In: a state whose graph is as the step before left it: the program with its plan, one
rank of it, or a forward or a backward by itself. Out: the same state, its graph changed
or replaced. Never: a difference between ranks, except in ``bind``. The order of the
steps is ``fxpar.pipeline``'s.

Where each place along manual axes runs a program of its own, collectives between places
(gathers of parameters, means of their gradients) pair by their order alone. So a graph
that has such collectives sends a digest of them at each run before the first one, by a
message without a collective (``compare_places``): places that branched to other
parameters, or that run another number of calls or backwards, raise RankMismatchError.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import define_op
from fxpar.errors import PlanError, RankMismatchError, ScheduleError
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.choose_schedule import Attempts, begin, choose_or_warn
from fxpar.fusion.kernels.fuse_regions import fuse_graph, say
from fxpar.fusion.kernels.implementations import GroupFacts
from fxpar.fusion.kernels.region_op import facts_of, provider_of
from fxpar.fusion.kernels.run_kernels import device_of
from fxpar.fusion.node_legality import inline
from fxpar.fusion.schedule import Schedule
from fxpar.graph.builder import copy_of
from fxpar.graph.custom_ops import group_of_call
from fxpar.passes import localize as local_graphs
from fxpar.passes import writes_as_results
from fxpar.passes.lower import lower_graph
from fxpar.passes.order import forward_backward
from fxpar.passes.order.outline_layers import outline_layers
from fxpar.passes.simulate.launches import communicates, crossings
from fxpar.runtime.ranks import meeting, worlds
from fxpar.runtime.ranks.groups import axes_of_group, bandwidth_of
from fxpar.runtime.steps import binding
from fxpar.runtime.steps.pipeline_state import JointState, PhaseState, RankState
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import user_line
from fxpar.sharding.read_program import with_open_sizes
from fxpar.units import digest


def insert_reshards(graph: fx.Graph, state: JointState) -> fx.Graph:
    """Return the graph with a reshard wherever an op reads a value in another spec."""
    return local_graphs.insert_reshards(graph, _open_decision(state))


def localize(graph: fx.Graph, state: JointState) -> fx.Graph:
    """Return the local graph: the same program in the shapes of one rank."""
    return local_graphs.partition(graph, _open_decision(state), state.fake_mode)


def _open_decision(state: JointState) -> Decision:
    """Return the decision, of the nodes of the graph with its open sizes. Raises
    PlanError where sizes have to be known."""
    if not state.open:
        return state.decided
    if not state.decided.is_even:
        raise PlanError("unequal shards need fixed sizes")
    if state.request.is_in_parts:
        raise PlanError("stages and microbatches need fixed sizes")
    return replace(state.decided, program=with_open_sizes(state.decided.program))


def apply_schedule(graph: fx.Graph, state: JointState) -> fx.Graph:
    """Apply the verbs of the schedule that is given, saved or chosen.

    With open sizes a schedule has settings alone, chosen for the sizes that were
    traced: verbs cut sizes that are known, and a schedule with lines of them raises
    ScheduleError, so that the sizes are fixed.
    """
    request, mesh = state.request, state.decided.mesh
    recalled, after = state.plan_with_schedule, graph
    state.unscheduled = graph if request.options.tune else None
    if request.pipeline is not None:
        return graph
    if request.options.schedule == "auto" and recalled is None:
        if request.hardware is None or mesh.size == 1:
            return graph
        chosen = choose_or_warn(
            lambda: state.attempts or begin_choice(state), lines=not state.open
        )
        if chosen is None:
            return graph
        state.schedule, state.near_misses = chosen.schedule, chosen.near_misses
        state.notes += (*chosen.notes, *((_SETTINGS_ALONE,) if state.open else ()))
        if not state.open:
            state.others, after = tuple(map(str, chosen.others)), chosen.graph
            # Ops on unequal shards are closed for the choice, not in what runs.
            state.run = chosen.run if state.decided.is_even else None
    else:
        text = "" if request.options.schedule == "none" else request.options.schedule
        if recalled is not None and text == "auto":
            text, state.near_misses = recalled.schedule, recalled.near
        state.schedule = Schedule.of(text)
        if state.open and state.schedule.lines:
            what = (
                "a schedule's verbs need fixed sizes, and the graph has dynamic "
                f"ones: {text}"
            )
            raise ScheduleError(what)
        if state.schedule and not state.open:
            after = apply(state.schedule, graph, mesh)
    if not state.schedule or state.open:
        return graph
    inline(after)
    return after


def begin_choice(state: JointState) -> Attempts:
    """Simulate the local graph without a schedule, for the choice of one. Raises
    ScheduleError and PlanError."""
    hardware, mesh = state.request.hardware, state.decided.mesh
    assert hardware is not None, "a schedule is chosen for known hardware"
    machine = hardware.at_speed(mesh.slowest)
    return begin(state.at_hints, mesh, machine, **_tags(state))


_SETTINGS_ALONE = (
    "schedule: only buckets and prefetching are chosen, since sizes are dynamic"
)


def lower(graph: fx.Graph, state: JointState) -> fx.Graph:
    """Lower all steps of the graph to collectives, in place; of a graph that is to be
    tuned, in a copy."""
    graph = copy_of(graph) if graph is state.unscheduled else graph
    return lower_graph(graph, state.decided.mesh, state.fake_mode)


def regather(graph: fx.Graph, state: JointState) -> None:
    """Tag what the forward saves, and what the backward computes or gathers again."""
    forward_backward.tag(graph, **_tags(state))


def _tags(state: JointState) -> dict[str, bool]:
    """Return the options of ``forward_backward.tag``."""
    return {
        "keep_gathered": not state.request.options.reshard_after_forward,
        "save_readers": not state.decided.is_even or state.request.manual is not None,
    }


def bind(graph: fx.Graph, state: RankState) -> fx.Graph:
    """Return the bound graph of this rank."""
    ranks = state.ranks
    return binding.bind(
        graph,
        ranks.mesh,
        ranks.rank,
        ranks.group,
        state.fake_mode,
        inductor=state.inductor,
        at_run_time=state.at_run_time,
        manual=state.request.manual.axes if state.request.manual else (),
    )


def put_writes(graph: fx.Graph, state: RankState) -> None:
    """Turn the last results into writes to inputs, and keep values read after them."""
    if state.writes:
        phase = "update" if state.request.step else None
        writes_as_results.put(graph, state.writes, phase)
    writes_as_results.keep_read(graph, state.copied)


def fuse_regions(graph: fx.Graph, state: PhaseState) -> None:
    """Fuse collectives with the ops around them into one op: those that the schedule
    names and, with ``options={"fuse": ...}``, those that pay."""
    request, which = state.request, state.which
    if state.mesh is None:
        return  # nothing was planned
    folder = f"{request.options.dump}/{state.label}" if request.options.dump else None
    beyond_schedule = request.options.fuse != "none" and state.even
    values = [n.meta.get("val") for n in graph.find_nodes(op="placeholder")]
    device = device_of([x for x in values if isinstance(x, torch.Tensor)])
    kernels = request.options.fuse in ("none", "triton")
    facts = cache(partial(_facts, state.mesh, kernels, device))
    fused = fuse_graph(
        graph,
        facts_of=facts,
        dump=folder,
        beyond_schedule=beyond_schedule,
        tune=request.options.tune,
    )
    state.regions += [f"{which}: {text}" for text in fused.lines]
    if request.is_leader and (beyond_schedule or fused.programs or fused.unfused):
        say(fused, f"{request.name}/{which}", request.options.debug)


def outline_repeated(graph: fx.Graph, state: PhaseState) -> None:
    """Turn layers that repeat into calls of one body, where Inductor compiles them."""
    outline_layers(graph, even=state.even)


def _facts(mesh: Mesh, kernels: bool, device: torch.device, group: str) -> GroupFacts:
    """Return the facts of a process group by which implementations of kernels are
    chosen. On CPU, where there are no such kernels, they are as if ranks shared
    memory."""
    bandwidth = bandwidth_of(mesh, group)
    ranks = _torch.distributed.group_named(group).size()
    if device.type != "cuda" or not kernels:
        return GroupFacts(ranks, kernels, True, bandwidth)
    provider = provider_of(group, device)
    if provider is None:
        return GroupFacts(ranks, kernels, False, bandwidth)
    return facts_of(provider, bandwidth)


def _compare(
    first: torch.Tensor, launches: str, what: str, mesh: str, manual: str
) -> None:
    with worlds.inside(None):
        words = meeting.meet("collectives between places", launches, what)
    if len(set(words)) == 1:
        return
    places = Mesh.parse(mesh)
    for rank, word in enumerate(words):
        peer = places.group(rank, manual.split("+"))[0]
        if words[peer] != word:
            error = RankMismatchError(
                f"in {what} rank {rank} gathers or reduces other parameters than rank "
                f"{peer}: they took other branches, or broke their graphs elsewhere",
                fix="use the same parameters in the same order on every rank, or leave "
                "them whole (no fxpar.shard)",
            )
            raise meeting.as_reported(error)


# Compilers take ``first`` for written to, so that they leave the op before its readers.
define_op(
    "fxpar::compare_places(Tensor(a!) first, str launches, str what, str mesh, "
    "str manual) -> ()",
    lambda *_: None,
    _compare,
)


def compare_places(graph: fx.Graph, state: PhaseState) -> None:
    """Add an op that compares collectives between places at each run, if any."""
    manual = state.request.manual
    if manual is None:
        return
    launched = [node for node in graph.nodes if _is_between_places(node, manual.axes)]
    # Ranks of all stages, which run different programs, meet before any message: a rank
    # that waits here sends none.
    staged = state.request.pipeline is not None
    if not launched and not staged:
        return
    lines = [*state.at_rest, *crossings(graph, even=state.even, among=launched)]
    where = next(filter(None, map(user_line, graph.nodes)), "")
    what = f"the {state.which} of the graph at {where}" if where else state.which
    inputs = (
        graph.find_nodes(op="placeholder") if staged else launched[0].all_input_nodes
    )
    at = inputs[-1].next if staged else launched[0]
    operand = next(n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor))
    with graph.inserting_before(at):
        call = graph.call_function(
            torch.ops.fxpar.compare_places.default,
            (
                operand,
                digest("\n".join(lines)),
                what,
                str(manual.mesh),
                "+".join(manual.axes),
            ),
        )
    call.meta["val"] = None


def _is_between_places(node: fx.Node, axes: Axes) -> bool:
    """Return whether a node is a collective whose group has ranks of several places."""
    if not communicates(node):
        return False
    return not set(axes).isdisjoint(axes_of_group(group_of_call(node)) or axes)
