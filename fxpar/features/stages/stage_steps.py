"""Cut a program into pipeline stages, and take one rank's part: steps of the pipeline.

In: a state whose request has a ``Pipeline``, or microbatches. Out: the same state: its
nodes know their stages; then the graph of all stages, in the order of the schedule; for
one rank the program at its place. Never: a difference between ranks, except in
``take_place``.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.errors import PlanError, ScheduleError, compose
from fxpar.features.stages.assign_stages import StageCosts, assign_stages
from fxpar.features.stages.lay_out_stages import lay_out_stages
from fxpar.features.stages.microbatches import cut_microbatches
from fxpar.features.stages.program_at_place import program_at
from fxpar.graph.builder import PART
from fxpar.graph.pipeline_ops import is_laid_out
from fxpar.runtime.caches.known_programs import groups_of
from fxpar.runtime.steps.pipeline_state import JointState, RankState
from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.decide import UNNAMED, Decision
from fxpar.sharding.hints import pinned_stages
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.pipeline_axis import Pipeline
from fxpar.sharding.program import backward_of, user_line


def find_stages(graph: fx.Graph, state: JointState) -> None:
    """Assign each node its stage. Raises PlanError if there is nothing to cut, unless
    the graph may be one of several that Dynamo broke a program into; ScheduleError if a
    schedule of compute and collectives is given."""
    request, decision = state.request, state.decided
    assert request.pipeline is not None, "the step is on"
    _refuse_uneven(decision, request.pipeline)
    if request.options.schedule not in ("auto", "none"):
        raise ScheduleError(
            "a schedule of compute and collectives is for programs without stages",
            fix="leave the schedule out, or the axis of stages",
        )
    hardware = request.hardware or lookup(UNNAMED)
    mesh = hardware.on(decision.mesh)
    priced = StageCosts(hardware, mesh, request.pipeline, request.parts)
    places = schedules.stage_places(request.pipeline_order, request.pipeline.places)
    inputs, axis = decision.program.signature.inputs, request.pipeline.axis
    names = [x.name for x in inputs if x.kind in ("parameter", "input")]
    pinned = pinned_stages(request.hints, names, axis, len(places))
    try:
        state.stages = assign_stages(
            graph,
            decision.program,
            priced,
            places,
            pinned,
            decision.stages_begin,
        )
    except PlanError as error:
        if request.rank is None or request.step:
            raise
        state.notes = (*state.notes, _no_stages(state, error.what))


def _no_stages(state: JointState, what: str) -> str:
    """Return the note about a graph without stages, one of several into which Dynamo
    may have broken a program: all ranks run it."""
    lines = (user_line(n) for n in state.graph.nodes if n.op == "call_function")
    return compose(
        f"this graph is not cut into stages, all ranks run the whole of it: {what}",
        where=next(filter(None, lines), None),
        fix="trace it in one piece with what is before it "
        "(torch.compile(fullgraph=True) names the graph break), or leave it so",
    )


def _refuse_uneven(decision: Decision, pipeline: Pipeline) -> None:
    """Raise PlanError that names a value with uneven shards, if there is one."""
    uneven = decision.first_uneven
    if uneven is None:
        return
    value, spec = uneven
    makers = (op.node for op in decision.program.ops if value.index in op.results)
    maker = next(makers, None)
    raise PlanError(
        f"the program is cut into stages, and its shards of {value.name} "
        f"{spec.format(value.shape)} are unequal",
        where=maker and user_line(maker),
        fix="choose mesh sizes that divide the dims, or leave out the axis "
        f"{pipeline.axis}",
    )


def cut_batch(graph: fx.Graph, state: JointState) -> fx.Graph:
    """Return a graph that runs the rank's batch in parts, one after the other."""
    parts, required = state.request.parts, state.request.microbatches is not None
    if parts == 1 or (state.request.pipeline is not None and not state.stages):
        return graph
    mode = state.fake_mode
    cut, notes = cut_microbatches(graph, state.decided, parts, mode, required=required)
    state.notes = (*state.notes, *notes)
    return cut


def order_stages(graph: fx.Graph, state: JointState) -> fx.Graph:
    """Return the graph of all stages, in the order of the pipeline schedule."""
    request, pipeline = state.request, state.request.pipeline
    if not state.stages:
        return graph
    assert pipeline is not None, "the step is on"
    parts = 1 + max((n.meta.get(PART, 0) for n in graph.nodes), default=0)
    name = request.order_of(parts)
    trains = bool(backward_of(graph))
    rows = schedules.rows_of(name, pipeline.places, parts, trains=trains)
    forward = [stage.forward_seconds for stage in state.stages]
    backward = [stage.backward_seconds for stage in state.stages]
    slots = schedules.timed(rows, forward, backward)
    _refuse_writes(graph)
    staged = lay_out_stages(
        graph,
        pipeline,
        [stage.place for stage in state.stages],
        [slot.action for slot in slots],
        state.fake_mode,
        state.decided.mesh,
    )
    wait = schedules.bubble(slots, pipeline.places)
    text = f"stages: {len(state.stages)} along {pipeline.axis}, {name}, {parts} "
    text += f"microbatches: ranks wait {wait:.0%} of a step for one another"
    state.notes = (*state.notes, text)
    return staged


def _refuse_writes(graph: fx.Graph) -> None:
    """Raise PlanError if an op writes in place, as a later op may read the value."""
    for node in graph.nodes:
        if op_facts_of(node.target).mutates:
            raise PlanError(
                f"{node.name} writes to what the program reads again, and is cut into "
                "stages",
                where=user_line(node),
                fix="write to it last, or leave out the axis of stages",
            )


def take_place(graph: fx.Graph, state: RankState) -> fx.Graph:
    """Return the program at this rank's place along the pipeline axis. All ranks make
    the groups before, in one order."""
    pipeline: Any = state.request.pipeline
    if not is_laid_out(graph):
        return graph
    ranks = state.ranks
    for axes in (*groups_of(graph), ranks.mesh.names):
        ranks.group(axes)
    return program_at(graph, ranks.mesh.index(ranks.rank, [pipeline.axis]))
