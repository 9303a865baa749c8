"""This module has ``fxpar.plan``, which traces a function on one process and plans it
for any mesh.

In: a function, its arguments (tensors may be on the meta device or fake) and a mesh.
Out: a ``TracedPlan``, the Plan with the traced program attached: ``simulate`` runs the
local graph for all ranks of the mesh in lockstep, ``reference`` the one-device graph;
``predicted`` has the cost of a step on the hardware, ``to_trace`` shows it. Never: need
of a process group or an accelerator.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar._fast.python_memory import in_one_block
from fxpar._torch.distributed import default_group, own_rank
from fxpar.cache_files import write_asked
from fxpar.choose_plan import fastest_plan
from fxpar.config import PREFIX, Options
from fxpar.errors import DeviceError, HintError, MeshError, OptionError, PlanError
from fxpar.explain import status_line
from fxpar.explain.by_layer import layer_rows, layers_text
from fxpar.explain.html import render
from fxpar.explain.timeline import chrome_trace
from fxpar.graph.graph_bodies import module_of
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.emulate_collectives import gather
from fxpar.passes.simulate.launches import facts_of
from fxpar.passes.simulate.lockstep import run_global
from fxpar.passes.simulate.simulate_step import Timeline, predict_step
from fxpar.pipeline import STEP_NAMES
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.steps.verify import run_on_ranks
from fxpar.runtime.tracing import Outcome, TracedCall, read_signature, traced_for
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.hints import Entries, load
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import pipeline_axis, split_off
from fxpar.sharding.plan import Plan, asdict_shallow
from fxpar.sharding.plan_request import (
    Auto,
    Request,
    known_machine,
    machine,
    plan_mode,
    read_auto,
)
from fxpar.sharding.program import Input, Output, Signature
from fxpar.sharding.search.alternatives import alternatives, alternatives_text
from fxpar.sharding.search.unequal_shards import Ratios, ratios
from fxpar.sharding.spec import Spec
from fxpar.units import short_bytes, short_seconds


def specs_of(
    specs: Sequence[Any] | None, count: int, name: str, counted: str
) -> list[Spec | None]:
    """Return the specs that a user gave, one per tensor, None where one is open.
    ``name``: of the argument that gave them; ``counted``: the things that it has one
    entry for each of, in the plural. Raises HintError."""
    if specs is None:
        return [None] * count
    if len(specs) != count:
        raise HintError(
            f"{name} has {len(specs)} entries for {count} {counted}",
            fix="give one entry per tensor; None leaves it open",
        )
    for spec in specs:
        if isinstance(spec, str) or not isinstance(spec, Spec | Sequence | None):
            raise HintError(
                f"{name} has {spec!r} for a tensor",
                fix='give an entry per dim: ("dp", None)',
            )
    return [
        spec if spec is None or isinstance(spec, Spec) else Spec(*spec)
        for spec in specs
    ]


def with_all_dims(signature: Signature, graph: fx.Graph, mesh: Mesh) -> Signature:
    """Return the signature with a spec of all dims where one was given: dims left out
    are not split, and a part that is all of an axis is the axis. Raises HintError if a
    tensor has fewer dims."""
    (output,) = graph.find_nodes(op="output")

    def of_all_dims(end: Any, node: Any) -> Any:
        if end.at_rest is None:
            return end
        shape, dims = node.meta["val"].shape, end.at_rest.dims
        if len(dims) > len(shape):
            raise HintError(
                f"spec given for {end.name}: {len(dims)} entries for a tensor of "
                f"{len(shape)} dims",
                fix="give at most one entry per dim; dims left out are not split",
            )
        missing = [()] * (len(shape) - len(dims))
        at_rest = Spec.of([*dims, *missing], end.at_rest.partial)
        return replace(end, at_rest=at_rest.joined(mesh))

    inputs, outputs = (
        tuple(map(of_all_dims, ends, nodes))
        for ends, nodes in (
            (signature.inputs, graph.find_nodes(op="placeholder")),
            (signature.outputs, output.args[0]),
        )
    )
    return replace(signature, inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class Predicted:
    """Holds the predicted cost of a step on each rank."""

    # The name of the hardware that it is predicted for.
    hardware: str
    # Seconds of a step.
    seconds: float
    # Seconds in which kernels run.
    compute: float
    # Seconds that communication keeps kernels waiting.
    exposed: float
    # Seconds of communication that overlap with kernels.
    hidden: float
    # Bytes sent, by axes ("dp", "dp+tp").
    sent: tuple[tuple[str, int], ...]
    # Bytes at the peak without the optimizer's state, which no step's graph has.
    peak_bytes: int
    # Bytes at the peak with the optimizer's state, the sum of ``Plan.memory``.
    held_bytes: int

    def __str__(self) -> str:
        sent = ", ".join(f"{short_bytes(n)} over {axes}" for axes, n in self.sent)
        step, compute, exposed, hidden = map(
            short_seconds, (self.seconds, self.compute, self.exposed, self.hidden)
        )
        return (
            f"{step} a step on {self.hardware}: {compute} compute, {exposed} waiting "
            f"for communication, {hidden} of communication hidden; sends "
            f"{sent or 'nothing'}; peak memory {short_bytes(self.held_bytes)}"
        )


@dataclass(frozen=True)
class TracedPlan(Plan):
    """Is a Plan with the program that it was made for."""

    # The pipeline's result, to simulate.
    result: JointState = field(kw_only=True, compare=False, repr=False)
    # The traced call, to bind arguments.
    call: TracedCall = field(kw_only=True, compare=False, repr=False)
    # The traced module.
    module: fx.GraphModule = field(kw_only=True, compare=False, repr=False)

    @cached_property
    def hardware(self) -> Hardware:
        """Return the hardware. Raises OptionError and DeviceError, as ``machine``."""
        return machine(self.result.request.options, self.mesh.size)

    @cached_property
    def timeline(self) -> Timeline:
        """Return one step of the slowest rank, as ``predict_step`` gives it.

        Raises as ``hardware`` does.
        """
        return predict_step(
            self.result.local,
            self.mesh,
            self.hardware,
            settings=self.result.schedule.settings,
            disable=self.result.request.options.disable,
            fused=self.result.inductor,
        )

    @cached_property
    def predicted(self) -> Predicted:
        """Return the totals of ``timeline``."""
        line = self.timeline
        return Predicted(
            self.hardware.name,
            line.seconds,
            line.compute_seconds,
            line.exposed_seconds,
            line.hidden_seconds,
            tuple(line.sent.items()),
            line.peak_bytes,
            self.held_bytes or line.peak_bytes,
        )

    def predicted_texts(self) -> list[str]:
        """Return ``predicted`` as text, nothing if the hardware is unknown."""
        try:
            return [str(self.predicted)]
        except (DeviceError, PlanError):  # PlanError: the user's own collectives
            return []

    def layers(self) -> str:
        """Return memory and time by layer of the model, as a table with the sums that
        the plan predicts; for a plan in stages or of unequal ranks, why there is none.

        Raises as ``hardware`` does.
        """
        if pipeline_axis(self.mesh) is not None:
            return (
                "no table by layer: stages have different layers; the stages are "
                "listed above"
            )
        if not self.mesh.is_shared_equally:
            return "no table by layer: ranks have unequal shares of each layer"
        result, disable = self.result, self.result.request.options.disable
        settings = result.schedule.settings
        graph = as_run(result.local, disable=disable, settings=settings)
        signature, fused = result.decided.program.signature, result.inductor
        rows = layer_rows(graph, self, signature, self.hardware, fused=fused)
        return layers_text(rows)

    def diff(self, other: Plan) -> str:
        """Return ``Plan.diff``, and the predicted seconds of a step, if both plans were
        traced and the hardware is known."""
        lines = [super().diff(other)]
        if lines[0] and isinstance(other, TracedPlan):
            with contextlib.suppress(DeviceError):
                times = self.predicted.seconds, other.predicted.seconds
                lines.append("a step: " + " | ".join(map(short_seconds, times)))
        return "\n".join(lines)

    def why(self, name: str) -> str:
        """Return ``Plan.why``; for a searched plan also what the value costs, what else
        the op that makes it could do, or other layouts of it if it is an input, and
        what the whole plan would then cost, solved again."""
        text = super().why(name)
        search = self.result.decided.search
        value = self.result.decided.program.named(name)
        if search is None or value is None:
            return text
        return (
            f"{text}\n{alternatives_text(search, value, alternatives(search, value))}"
        )

    def why_not(self, name: str, spec: Spec | Sequence[Any] | str) -> str:
        """Return what a searched plan would cost if ``name`` were made with ``spec``.

        Raises PlanError for a plan that was not searched, an unknown name, an input,
        and a spec that no strategy of its op makes.
        """
        self.spec(name)
        search = self.result.decided.search
        value = self.result.decided.program.named(name)
        if search is None or value is None:
            raise PlanError(
                "only a searched plan knows its alternatives",
                fix='plan again with mode="search"',
            )
        if not isinstance(spec, Spec):
            spec = Spec.parse(spec) if isinstance(spec, str) else Spec(*spec)
        spec = spec.refined(self.mesh)
        return alternatives_text(search, value, alternatives(search, value, spec=spec))

    def ratios(self) -> Ratios:
        """Return the best sizes of shards for the speeds of the mesh
        (``FXPAR_MESH="dp=2{1.0,0.5}"``), with the time of a step, and that with equal
        shards; printable.

        Raises as ``hardware`` does.
        """
        _, done = facts_of(self.result.local)
        reshards = [reshard for reshard, _ in done]
        return ratios(self.result.decided, self.hardware, reshards)

    def to_trace(self, path: str | Path) -> None:
        """Write ``timeline`` as a Chrome trace, which https://ui.perfetto.dev shows."""
        name = f"a rank of {self.mesh} on {self.hardware.name}"
        trace = chrome_trace(self.timeline, dict(self.values), name)
        write_asked(path, json.dumps(trace))

    def to_html(self, path: str | Path) -> None:
        """Write ``Plan.to_html``, with ``timeline`` if the hardware is known."""
        timeline = None
        with contextlib.suppress(DeviceError):
            timeline = self.timeline
        write_asked(path, render(self, timeline))

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the local graph on every rank of the mesh, in lockstep in this process.

        Arguments are global values of the traced shapes. Returns what the function
        returns, in global values; planned with ``grad=True``, ``(result, gradients)``:
        by parameter or argument name, of the sum of all results. Raises AssertionError
        if ranks that must agree do not.
        """
        return self._returned(self.outcome(*args, **kwargs))

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``simulate`` must: run the normalized one-device graph."""
        return self._returned(self.reference_outcome(*args, **kwargs))

    def outcome(self, *args: Any, **kwargs: Any) -> Outcome:
        """Simulate; return gradients and new values of buffers, too."""
        result, call = self.result, self.call
        edges, program = result.decided.edges, result.decided.program
        local = module_of(self.module, result.local)
        outs = run_on_ranks(local, result.decided, call.inputs(args, kwargs))
        merged = [
            outs[0][k]
            if spec is None
            else gather([o[k] for o in outs], spec, self.mesh)
            for k, spec in enumerate(edges.outputs)
        ]
        return call.outcome(program.signature, merged)

    def reference_outcome(self, *args: Any, **kwargs: Any) -> Outcome:
        """Run the reference; return gradients and new values of buffers, too."""
        whole = module_of(self.module, self.result.normalized)
        values = run_global(whole, self.mesh, self.call.inputs(args, kwargs))
        return self.call.outcome(self.result.decided.program.signature, values)

    def _returned(self, outcome: Outcome) -> Any:
        grad = self.call.grad
        return (outcome.result, outcome.gradients) if grad else outcome.result


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: str | Mesh,
    in_specs: Sequence[Any] | None = None,
    out_specs: Sequence[Any] | None = None,
    hints: Mapping[str, Entries] | str | None = None,
    mode: str | None = None,
    grad: bool = False,
    schedule: str | None = None,
    **kwargs: Any,
) -> TracedPlan:
    """Plan ``fn(*args, **kwargs)`` for ``mesh`` and return the plan.

    fn: a module, or a function; modules it closes over keep their parameters.
    mesh: as FXPAR_MESH: "dp=2,tp=4", or for a search to choose it "auto:8" (ranks) or
      "auto:4x8" (nodes of so many devices).
    in_specs, out_specs: one entry per tensor argument or result: a Spec, a tuple as in
      ``Spec(...)``, or None for open.
    hints: pattern -> entries per dim, or a TOML file (``fxpar.sharding.hints``).
    mode: as FXPAR_PLAN. grad: plan forward and backward together; gradients are of the
      parameters and of the arguments that require grad (all floating and complex
      ones, if nothing does). schedule: as FXPAR_SCHEDULE.

    Raises MeshError, SpecError, HintError, RuleError, OptionError, PlanError.
    """
    _refuse_options(fn, kwargs)
    overrides = {} if schedule is None else {"schedule": str(schedule)}
    return plan_call(
        fn,
        args,
        kwargs,
        overrides,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        hints=hints,
        mode=mode,
        grad=grad,
    )


@in_one_block
def plan_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    mesh: str | Mesh,
    in_specs: Sequence[Any] | None = None,
    out_specs: Sequence[Any] | None = None,
    hints: Mapping[str, Entries] | str | None = None,
    mode: str | None = None,
    grad: bool = False,
    shard: bool = True,
) -> TracedPlan:
    """Plan a call as ``plan`` does, with ``overrides`` of the environment's options by
    name. ``shard``: whether parameters are sharded at rest as the plan splits them, as
    after ``fxpar.shard``; otherwise every rank holds them whole.

    Raises as ``plan``.
    """
    options = Options.read({"mesh": mesh, **overrides})
    auto = read_auto(mesh)
    mesh = _mesh_of_ranks(auto) if auto else Mesh.parse(mesh)
    chosen = plan_mode(mode or options.plan, options, mesh.size)
    call = TracedCall(fn, tuple(args), dict(kwargs), grad)
    leads = options.progress and not own_rank()
    with status_line.status_of("plan", STEP_NAMES, on=leads), traced_for(lambda: mesh):
        module, fake_mode = call.trace()
    input_specs = specs_of(in_specs, call.count, "in_specs", "tensor arguments")

    def make_input(kind: str, payload: Any, node: fx.Node) -> Input:
        end = call.declare(kind, payload, node, input_specs)
        if kind == "parameter" and not shard:
            return replace(end, at_rest=Spec.whole(node.meta["val"].dim()))
        return end

    result_specs = specs_of(out_specs, call.result_count, "out_specs", "tensor results")
    result_specs += [None] * len(call.reassigned)

    def make_output(kind: str, name: str, of: int | None) -> Output:
        k = int(name.removeprefix("output_")) if kind == "output" else None
        at_rest = result_specs[k] if k is not None else None
        return Output(name, kind, of, at_rest)

    signature = read_signature(module.graph, make_input, make_output)
    if not shard:
        signature = _gradients_as_parameters(signature)
    signature = with_all_dims(signature, module.graph, mesh)
    asked_for = "auto" if auto else options.pipeline
    planned, pipeline = split_off(mesh, asked_for)
    request = Request(
        planned,
        signature,
        options=replace(options, cache_plans=False),
        microbatches=options.microbatches,
        hints=load(hints if hints is not None else options.hints),
        mode=chosen,
        pipeline=pipeline,
        hardware=known_machine(options, mesh.size),
    )
    if auto:
        request = request.with_open_mesh(mesh)
    with status_line.status_of("plan", STEP_NAMES, on=leads):
        result = fastest_plan(module.graph, fake_mode, request)
    final_plan = result.plan
    if options.memory is not None:
        final_plan = replace(final_plan, room=int(options.memory))
    return TracedPlan(
        **asdict_shallow(final_plan), result=result, call=call, module=module
    )


def _gradients_as_parameters(signature: Signature) -> Signature:
    """Return the signature with the layout of each parameter given to its gradient."""
    outputs = (
        replace(out, at_rest=signature.inputs[out.of].at_rest)
        if out.kind == "gradient" and out.of is not None
        else out
        for out in signature.outputs
    )
    return replace(signature, outputs=tuple(outputs))


def _refuse_options(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise OptionError for options among the program's own arguments, which a program
    that takes any keyword would swallow."""
    call = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return
    for row in fields(Options):
        value = kwargs.get(row.name)
        if row.name not in parameters and isinstance(value, (str, int, float)):
            variable = PREFIX + row.name.upper()
            raise OptionError(
                f"fxpar.plan does not take {row.name}={value!r}",
                fix=f"set {variable}"
                if row.metadata["env"]
                else "give it to torch.compile in options=",
            )


def _mesh_of_ranks(auto: Auto) -> Mesh:
    """Return a mesh of all ranks along one axis.

    Raises MeshError if their number is unknown.
    """
    group = default_group()
    if auto.ranks is None and group is None:
        raise MeshError(
            "mesh='auto' is for as many ranks as run, and there is no process group",
            fix="say how many: mesh='auto:8', or 'auto:4x8' for 4 nodes of 8 devices",
        )
    return Mesh((("dp", auto.ranks or group.size()),))
