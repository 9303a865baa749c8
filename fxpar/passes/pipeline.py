"""The pipeline: from a one-device graph to the graph each rank runs.

traced -> normalized -> planned -> resharded -> rewritten -> local, each a printable FX
graph, and all but the rewritten one, whose steps are not lowered, runnable.
``parallelize`` runs it; ``runtime.binding`` puts one rank into the local graph. Every
stage is handed to ``watch`` by name, which dumps it or draws it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.config import runs
from fxpar.errors import FxparWarning, MeshError, UnknownOpError, compose
from fxpar.passes.builder import Builder, copy_of
from fxpar.passes.graph_bodies import show_bodies
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.passes.localize import partition
from fxpar.passes.lower import lower_graph
from fxpar.passes.normalize import MOMENTS, NORMALIZE, expand_moments
from fxpar.passes.reshard_after_forward import regather
from fxpar.passes.sink_waits import sink_waits
from fxpar.sharding.decide import Decision, decide, searched
from fxpar.sharding.hints import Entries
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_facts import describe
from fxpar.sharding.program import Op, Program, Signature, read, user_line
from fxpar.sharding.recall_plan import recall
from fxpar.sharding.reshard.all_pairs import MOST
from fxpar.sharding.rules.example import example
from fxpar.sharding.search.mesh_candidates import fastest, unlike
from fxpar.sharding.search.run_search import Asked, Found, has_too_many_axes

__all__ = ["Request", "Result", "Scheduled", "Watch", "parallelize", "with_schedule"]

Watch = Callable[[str, fx.Graph], None]


@dataclass(frozen=True)
class Scheduled:
    """A local graph with steps after its schedule, and what to note in the plan.
    ``others``: schedules that come near, as texts, the best first."""

    graph: fx.Graph
    noted: Callable[[Plan], Plan] = lambda plan: plan
    others: tuple[str, ...] = ()


def _as_it_is(graph: fx.Graph, decision: Decision, saved: Plan | None) -> Scheduled:
    """No schedule."""
    return Scheduled(graph)


def _unwatched(stage: str, graph: fx.Graph) -> None:
    """Nobody looks at the stages."""


def _nothing_known(program: Program, graph: fx.Graph) -> None:
    """No plan was found before."""


@dataclass(frozen=True)
class Request:
    """What is asked of the pipeline. ``mode``: "propagate", "replicate", an Asked (to
    search), or a Plan. ``keep_gathered``: resting parameters are gathered once for
    forward and backward.

    ``meshes``: where a search chooses the mesh, those it may; ``mesh`` is then the
    first, and ``lay`` gives the signature on another. ``known``: asked before a search,
    with the normalized program, for a plan that was found before. ``reschedule``: gives
    the local graph, its reshards steps, after its schedule. ``keep_steps``: that graph
    is kept, for ``with_schedule``.
    """

    mesh: Mesh
    signature: Signature
    hints: Mapping[str, Entries] = field(default_factory=dict)
    mode: str | Asked | Plan = "propagate"
    strict: bool = False
    disable: frozenset[str] = frozenset()
    keep_gathered: bool = False
    watch: Watch = _unwatched
    meshes: tuple[Mesh, ...] = ()
    lay: Callable[[Mesh], Signature] | None = None
    known: Callable[[Program, fx.Graph], Plan | None] = _nothing_known
    reschedule: Callable[[fx.Graph, Decision, Plan | None], Scheduled] = _as_it_is
    keep_steps: bool = False

    def on(self, mesh: Mesh) -> Request:
        """The request for one of ``meshes``."""
        signature = self.signature if self.lay is None else self.lay(mesh)
        return replace(self, mesh=mesh, signature=signature, meshes=())


@dataclass(frozen=True)
class Result:
    """The plan, the local graph, and the normalized one-device graph it came from.
    ``steps``: the local graph before its schedule; ``others``: of ``Scheduled``."""

    plan: Plan
    normalized: fx.Graph
    local: fx.Graph
    decision: Decision
    steps: fx.Graph | None = None
    others: tuple[str, ...] = ()


def parallelize(graph: fx.Graph, fake_mode: Any, request: Request) -> Result:
    """Run all stages on a traced graph (changed in place by normalizing).

    Raises HintError, RuleError, PlanError, and UnknownOpError under ``strict``.
    """
    clock = _Clock()
    request.watch("traced", graph)
    show_bodies(graph, graph.owning_module)
    rewriter = Builder(graph, fake_mode)
    for normalize in NORMALIZE:
        if runs(normalize.__name__, request.disable):
            normalize(graph, rewriter)
    graph.eliminate_dead_code()
    graph.lint()
    request.watch("normalized", graph)
    clock.lap("normalize")
    decision = _plan(graph, rewriter, request)
    _report_unknown(decision.program, request.strict)
    request.watch("planned", graph)
    clock.lap("plan")
    resharded = insert_reshards(graph, decision)
    request.watch("resharded", resharded)
    steps = partition(resharded, decision, fake_mode)
    saved = request.mode if isinstance(request.mode, Plan) else None
    return _finish(steps, graph, decision, saved, fake_mode, request, clock)


def with_schedule(
    result: Result, schedule: str, fake_mode: Any, request: Request
) -> Result:
    """What ``parallelize`` gave, with another schedule; ``request`` had ``keep_steps``.

    Raises ScheduleError.
    """
    assert result.steps is not None
    saved = replace(result.plan, schedule=schedule)
    unwatched = replace(request, watch=_unwatched)
    return _finish(
        result.steps,
        result.normalized,
        result.decision,
        saved,
        fake_mode,
        unwatched,
        _Clock(),
    )


def _finish(
    steps: fx.Graph,
    normalized: fx.Graph,
    decision: Decision,
    saved: Plan | None,
    fake_mode: Any,
    request: Request,
    clock: _Clock,
) -> Result:
    """From the local graph with steps on: its schedule, and what runs."""
    scheduled = request.reschedule(steps, decision, saved)
    if scheduled.graph is not steps:
        request.watch("rewritten", scheduled.graph)
    elif request.keep_steps:
        scheduled = replace(scheduled, graph=copy_of(steps))
    local = lower_graph(scheduled.graph, decision.mesh, fake_mode)
    if runs("sink_waits", request.disable):
        sink_waits(local)
    if not request.keep_gathered:
        regather(local)
    request.watch("local", local)
    clock.lap("partition")
    plan = scheduled.noted(describe(decision, keep_gathered=request.keep_gathered))
    clock.lap("describe")
    plan = replace(plan, timings=clock.laps)
    kept = steps if request.keep_steps else None
    return Result(plan, normalized, local, decision, kept, scheduled.others)


def _plan(graph: fx.Graph, rewriter: Builder, request: Request) -> Decision:
    """Decide; where a plan splits dims that a moment needs whole, expand it, decide
    again. A search sees moments expanded: it would not split what their rules keep
    whole."""
    program = read(graph, request.signature)
    request = _searchable(request)
    plan = request.mode
    if isinstance(plan, Asked):
        plan = request.known(program, graph) or plan
    if isinstance(plan, Plan):
        if plan.mesh.axes in [mesh.axes for mesh in request.meshes]:
            request = request.on(plan.mesh)
        return _recalled(graph, rewriter, plan, request)
    if isinstance(plan, Asked) and runs("expand_moments", request.disable):
        moments = [op.node for op in program.ops if op.target in MOMENTS]
        if moments:
            expand_moments(moments, rewriter)
            graph.eliminate_dead_code()
            program = read(graph, request.signature)
    if request.meshes:
        decision = _chosen(program, request)
        request = request.on(decision.mesh)
    else:
        decision = _decide(program, request)
    split = _split_moments(decision)
    if split and runs("expand_moments", request.disable):
        expand_moments(split, rewriter)
        graph.eliminate_dead_code()
        decision = _decide(read(graph, request.signature), request)
    return decision


def _searchable(request: Request) -> Request:
    """The request; to propagate, where its mesh has too many axes for a search."""
    if not isinstance(request.mode, Asked) or not has_too_many_axes(request.mesh):
        return request
    what = f"a search takes at most {MOST} axes of more than one rank: the plan"
    fix = "join axes of the mesh, or set FXPAR_PLAN=propagate"
    text = compose(f"{what} for {request.mesh} is propagated", fix=fix)
    warnings.warn(text, FxparWarning, stacklevel=2)
    return replace(request, mode="propagate")


def _recalled(
    graph: fx.Graph,
    rewriter: Builder,
    plan: Plan,
    request: Request,
) -> Decision:
    """Apply a saved plan, expanding the moments that it does not contain."""
    program = read(graph, request.signature)
    known = {node.name for node in plan.nodes}
    gone = [
        op.node for op in program.ops if op.target in MOMENTS and op.name not in known
    ]
    if gone:
        expand_moments(gone, rewriter)
        graph.eliminate_dead_code()
        program = read(graph, request.signature)
    return recall(program, request.mesh, plan)


def _chosen(program: Program, request: Request) -> Decision:
    """The search's decision on the best of the meshes it may choose.

    Raises MeshError if nothing searches.
    """
    asked = request.mode
    if not isinstance(asked, Asked):
        raise MeshError(
            f"FXPAR_MESH=auto is chosen by a search, FXPAR_PLAN is {asked}",
            fix="set FXPAR_PLAN=search, or name the axes: FXPAR_MESH=dp="
            f"{request.mesh.size}",
        )
    meshes = request.meshes
    if not _names_axes(program, request):
        meshes = unlike(meshes, asked.hardware)

    def attempt(mesh: Mesh, asked: Asked, before: Found | None) -> Decision:
        here = replace(request.on(mesh), mode=asked)
        return _decide(replace(program, signature=here.signature), here, before)

    return fastest(meshes, asked, attempt)


def _names_axes(program: Program, request: Request) -> bool:
    """Whether anything but the plan says which axis splits what."""
    inputs, outputs = request.signature.inputs, request.signature.outputs
    rests = [end.rest for end in inputs] + [end.rest for end in outputs]
    split = any(rest is not None and not rest.is_whole for rest in rests)
    used = any(declared.use is not None for declared in inputs)
    return bool(split or used or request.hints or _constraints(program))


def _constraints(program: Program) -> list[tuple[int, list[str]]]:
    """Hints in the code."""
    return [
        (op.results[0], op.node.args[1].split(","))
        for op in program.ops
        if op.target is torch.ops.fxpar.constrain.default
    ]


def _decide(
    program: Program, request: Request, before: Found | None = None
) -> Decision:
    mesh, hints, mode = request.mesh, request.hints, request.mode
    constraints = _constraints(program)
    if isinstance(mode, Asked):
        return searched(
            program,
            mesh,
            hints,
            constraints,
            mode,
            keep_gathered=request.keep_gathered,
            before=before,
        )
    assert isinstance(mode, str)
    return decide(program, mesh, hints, constraints, mode=mode)


def _split_moments(decision: Decision) -> list[fx.Node]:
    """Moments whose operand lies split over a dim they reduce."""
    out = []
    for op in decision.program.ops:
        if op.target in MOMENTS:
            spec = decision.settled[op.operands[0]]
            whole = op.rule.whole
            dims = zip(op.rule.operands[0], spec.dims, strict=True)
            if any(axes and any(f in whole for f in dim) for dim, axes in dims):
                out.append(op.node)
    return out


def _report_unknown(program: Program, strict: bool) -> None:
    """One warning per unknown op, or UnknownOpError under ``strict``."""
    seen: dict[Any, list[Any]] = {}
    for op in program.ops:
        if not op.known:
            seen.setdefault(_called(op), []).append(op)
    for target, calls in seen.items():
        size = sum(program.values[v].nbytes for op in calls for v in op.operands)
        what = (
            f"{target} has no sharding rule: its operands are made whole on every rank "
            f"({len(calls)} calls, {size} bytes)"
        )
        where = user_line(calls[0].node)
        fix = _how_to_split(program, calls[0])
        if strict:
            raise UnknownOpError(what, where=where, fix=fix)
        warnings.warn(compose(what, where=where, fix=fix), FxparWarning, stacklevel=2)


def _called(op: Op) -> Any:
    """The op that is called: with an effect, the one it is kept in order for."""
    in_order = _torch.aot.higher_order_name(op.target) == "higher_order::with_effects"
    return op.node.args[1] if in_order else op.target


def _how_to_split(program: Program, op: Op) -> str:
    """What to do about an unknown op: a rule that fits its own tensors."""
    if not isinstance(op.target, _torch.inductor.OpOverload):
        return "keep it out of the compiled model if whole operands cost too much"
    operands, results = (
        [program.values[v].shape for v in side] for side in (op.operands, op.results)
    )
    fits = example(operands, results)
    if fits is None:
        return "nothing of it can be split: leave it, or compute it outside"
    call = f'fxpar.rule("{op.target.name()}", "{fits}")'
    return f'give it a rule, with "!" on dims it needs whole, such as {call}'


class _Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def placeholders(graph: fx.Graph) -> Sequence[fx.Node]:
    """The inputs of a graph."""
    return [node for node in graph.nodes if node.op == "placeholder"]
