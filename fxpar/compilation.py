"""This module compiles one Dynamo graph, from beginning to end, for this rank.

``compile_graph`` looks up what an earlier start kept of the program
(``known_programs``) and hands the graph to AOTAutograd, which calls back:
``Compilation.__call__`` with the joint graph, from which ``fxpar.pipeline`` makes this
rank's, and ``Compilation.lower`` with forward and backward, on their way to Inductor.
Ranks then agree on the collectives that they launch.

In: a ``CompileJob`` with options and ranks, and a Dynamo graph. Out: a ``Compiled``.
Never: an algorithm; a launch before all ranks agreed; a failure of one rank that leaves
the others waiting.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar import _torch, choose_plan, pipeline
from fxpar._fast.python_memory import in_one_block, old_objects_kept
from fxpar._fast.quick_graphs import quick_graphs
from fxpar.config import Options
from fxpar.errors import FxparWarning, PlanError
from fxpar.explain import status_line
from fxpar.explain.dump import report, show_seconds
from fxpar.features import register_lowerings, register_ops
from fxpar.graph import size_nodes
from fxpar.graph.builder import restore_meta
from fxpar.graph.graph_bodies import hold
from fxpar.passes import own_shard, writes_as_results
from fxpar.passes.boundaries import absorb
from fxpar.passes.normalize import random
from fxpar.passes.order.hand_over import memories
from fxpar.passes.repeated_segments import repeated_segments
from fxpar.passes.simulate.launches import crossings
from fxpar.runtime.caches import known_programs
from fxpar.runtime.caches.known_programs import (
    Generate,
    KnownProgram,
    Leader,
    PlanMisfit,
    compile_once,
)
from fxpar.runtime.calls.call_variants import CompileJob
from fxpar.runtime.calls.compiled_graph import (
    Compiled,
    WithRoom,
    refusing_data,
)
from fxpar.runtime.calls.open_sizes import (
    DivisorsAsked,
    OpenSizesRefused,
    PlanStands,
    SizeRange,
    refusal_of,
    size_range,
)
from fxpar.runtime.calls.outside_graphs import warnings_of_plans
from fxpar.runtime.ranks import check_inputs as inputs
from fxpar.runtime.ranks import meeting
from fxpar.runtime.ranks.check_inputs import agree_on_numbers
from fxpar.runtime.ranks.groups import Ranks, join, next_graph, settle
from fxpar.runtime.stage_times import TRACE, stage
from fxpar.runtime.stage_times import table as stage_table
from fxpar.runtime.steps.binding import is_of_all
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.steps.verify import feeds_of, verify
from fxpar.runtime.tracing import read_signature
from fxpar.sharding.hints import load
from fxpar.sharding.pipeline_axis import pipeline_axis, split_off, with_planned_axis
from fxpar.sharding.pipeline_schedule import AUTO_SEPARATE
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import (
    Request,
    known_machine,
    plan_mode,
)
from fxpar.sharding.program import Input, Output, Signature, user_line
from fxpar.sharding.spec import Spec

log = logging.getLogger("fxpar")

# Raised by all ranks together: none is waited for.
_OF_ALL = (OpenSizesRefused, DivisorsAsked, PlanStands)


def is_plain(options: Options, ranks: Ranks) -> bool:
    """Return whether fxpar has nothing to do: one rank, Inductor, no microbatches."""
    inductor = options.codegen == "inductor" and options.microbatches in (None, 1)
    return ranks.whole.mesh.size == 1 and inductor


def compile_plain(gm: fx.GraphModule, examples: Any, options: Options) -> Any:
    """Return what Inductor compiles from a graph for one device."""
    settings = dict(options.inductor)
    return _torch.aot.compile_fx(gm, examples, inductor_settings=settings)


@in_one_block
@old_objects_kept()
@quick_graphs()
def compile_graph(
    job: CompileJob, gm: fx.GraphModule, examples: Sequence[Any]
) -> Compiled:
    """Return the checked, compiled function of a Dynamo graph, on concrete shapes or on
    open ones.

    A failure is reported to the other ranks before it is raised here. With open sizes
    all ranks raise OpenSizesRefused where they cannot be kept open, DivisorsAsked where
    the plan splits some of them, PlanStands where the plan of the job's rival is kept.
    """
    broken_at = _torch.dynamo.graph_break_line(gm)
    _torch.dynamo.copy_detached_results(gm)
    if any(isinstance(x, DTensor) for x in examples):
        _torch.dynamo.separate_views(gm)
    if job.ranks.open:  # the mesh may have been chosen since
        job = replace(job, ranks=join(job.options))
    number, with_room = next_graph(), _with_room(job, gm, examples)
    for is_known, anew in ((True, False), (True, True), (False, True)):
        entry = _look_up(job, gm, examples, number, anew=anew) if is_known else None
        compilation = Compilation(job, number, broken_at, entry)
        compiled = compilation.compiled(gm, examples)
        if compiled is not None:
            return compilation.finished(compiled, gm, with_room)
    raise AssertionError("no plan is known that may not fit")


def _with_room(
    job: CompileJob, gm: fx.GraphModule, examples: Sequence[Any]
) -> WithRoom | None:
    """Return a function that compiles the graph again for a room, the number of rows
    that ranks may send to experts; None if it sends none, or the room is agreed on."""
    manual = job.ranks.manual
    if manual is None or not manual.expert_axes or job.sent_room is not None:
        return None
    if job.options.expert_exchange == "gather":
        return None
    source = _torch.dynamo.copy_graph(gm)  # compiling consumes a graph
    fakes = examples if job.writes else None

    def with_room(room: int, args: Sequence[Any]) -> Compiled:
        copy = _torch.dynamo.copy_graph(source)
        return compile_graph(replace(job, sent_room=room), copy, fakes or list(args))

    return with_room


def _look_up(
    job: CompileJob,
    gm: fx.GraphModule,
    examples: Sequence[Any],
    number: int,
    *,
    anew: bool,
) -> KnownProgram | None:
    """Return what an earlier start kept of the program, the same on all ranks, and make
    the process groups that it uses. ``anew``: ignore what was kept."""
    if job.options.codegen != "inductor":
        return None
    if pipeline_axis(job.ranks.mesh) is not None:
        return None
    if job.open is not None and job.rival:
        return None
    text = None
    if all(map(_torch.dtensor.has_mesh_in_operands, examples)):
        followed = job.recalled.hash if job.recalled else ""
        mesh = str(job.ranks.whole.mesh)
        rest_specs = sorted(job.rest_specs.items())
        # Each place keeps its own, under a number that others do not know.
        extras = job.writes, job.even, followed, mesh, job.sent_room, _place(job)
        text = known_programs.text_of(
            gm,
            job.named_inputs,
            examples,
            job.options,
            job.ranks,
            (*extras, *rest_specs),
        )
    with meeting.reporting(_OF_ALL):
        tag = f"the stored record of graph{number}"
        entry = known_programs.look_up(text, tag, anew=anew)
    _make_groups(job.ranks, entry)
    return entry


def _place(job: CompileJob) -> int:
    """Return which part of the batch this rank is fed, where places run programs of
    their own."""
    return job.ranks.world.place if job.ranks.world is not None else 0


def _make_groups(ranks: Ranks, entry: KnownProgram | None) -> None:
    for axes in entry.groups if entry else ():
        ranks.group(axes)


class Compilation:
    """Is one attempt to compile one graph: the request, the decision, the result."""

    def __init__(
        self,
        job: CompileJob,
        number: int,
        broken_at: str | None,
        entry: KnownProgram | None,
    ) -> None:
        self.job, self.number, self.broken_at = job, number, broken_at
        self.entry = entry
        # Set on rank 0 where the other ranks take over its plan and its compiled code.
        self.leader: Leader | None = None
        self.is_shared = False  # whether what is compiled here serves all ranks
        self.places: list[int | None] = []  # of graph inputs among the arguments
        self.declared: list[Input] = []
        self.rest_inputs: set[int] = set()  # inputs that are parameters of fxpar.shard
        self.root = torch.nn.Module()  # holds the graph's constants
        # The request to the pipeline, and its result.
        self.request = _request_of(job, f"graph{number}")
        self.result: JointState | None = None  # none where AOTAutograd cached it
        # Of results of the forward, by position, keys of their memory.
        self.memories: dict[int, Hashable] = {}
        self.regions: list[str] = []
        self.launches: list[str] = []  # collectives in order, forward then backward
        self.sizes: SizeRange | None = None  # that it holds for, where sizes are open
        self.is_agreed = False  # ranks know that they launch the same

    @property
    def is_inductor(self) -> bool:
        return self.job.options.codegen == "inductor"

    @property
    def is_plan_known(self) -> bool:
        """Return whether the plan of the program is known, and followed."""
        return self.entry is not None and self.entry.plan is not None

    def compiled(
        self, gm: fx.GraphModule, examples: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Return what AOTAutograd and Inductor compile from a Dynamo graph; None on all
        ranks if the known plan of the program does not fit it on one of them."""
        job, name = self.job, self.request.name
        if self.is_inductor:
            _load_inductor()
        if self.entry is not None and known_programs.is_led(self.entry, examples):
            if job.ranks.rank == 0:
                self.leader = Leader(name, self.entry, job.open is not None)
            else:
                self.entry = self._await_leader(self.entry)
        if self.entry is not None:
            _refuse_as_known(self.entry)
            register_ops()
        showing = job.options.progress and job.ranks.whole.rank == 0
        leader, compiled = self.leader, None
        led = leader.waited_for(self.decided) if leader else contextlib.nullcontext()
        with (
            status_line.status_of(name, pipeline.STEP_NAMES, on=showing),
            meeting.reporting(_OF_ALL),
            refusing_data(gm),
            stage(TRACE),
            _refusing_open_sizes() if job.open else contextlib.nullcontext(),
        ):
            try:
                with led:
                    compiled = self._traced(gm, examples)
                if self.result is None and self.entry and self.entry.plan:
                    self.launches = list(self.entry.launches)
                    self._report(self.entry.plan)
                if job.open is not None:
                    self.sizes = size_range(job.open, self.decided().written)
            except PlanMisfit as misfit:
                log.info(
                    "%s: the stored plan does not fit, so it is planned again: %s",
                    name,
                    misfit,
                )
                compiled = None
            status_line.begin(pipeline.WAIT)
            # A known plan may not fit on one rank, then it is planned anew on all.
            launches = self.launches if compiled is not None else None
            self.is_agreed = _agree_on_launches(
                f"graph{self.number}, compiled", launches
            )
        return compiled if self.is_agreed else None

    def _await_leader(self, entry: KnownProgram) -> KnownProgram | None:
        """Return the program once rank 0 has compiled it; None if it could not be
        planned, which this rank then finds out for itself."""
        with meeting.reporting(_OF_ALL):
            planned = known_programs.await_leader(self.request.name, entry)
            if planned is None or planned.refused or planned.divisors:
                return planned
            _make_groups(self.job.ranks, planned)
            return known_programs.await_leader(self.request.name, planned)

    def _traced(
        self, gm: fx.GraphModule, examples: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return what ``compiled`` does.

        Raises PlanMisfit where the known plan does not fit.
        """
        job, entry = self.job, self.entry
        # Places draw numbers of their own.
        key = f"{job.ranks.whole.mesh}|{_place(job)}|{job.options}|{job.sent_room}"
        return _torch.aot.compile_fx(
            gm,
            examples,
            joint_pass=self,
            lower=self.lower,
            inner=None if self.is_inductor else run_op_by_op,
            key=f"{key}|{entry.name_of(job.ranks.rank)}" if entry else key,
            cached=entry is not None,
            local_border=job.options.outputs == "dtensor",
            symbolic=job.open is not None,
            repeated=None if job.open is not None else repeated_segments,
            inductor_settings=dict(job.options.inductor),
        )

    def __call__(self, gm: fx.GraphModule) -> fx.Graph | None:
        """Return the graph to compile instead of ``gm``'s; None leaves it (a subgraph).

        Raises PlanMisfit where the known plan of the program cannot be followed.
        """
        first = next(iter(gm.graph.nodes))
        if "desc" not in first.meta:
            return None
        try:
            return self._parallelized(gm)
        except Exception as error:
            if not self.is_plan_known or meeting.is_known_to_all(error):
                raise
            raise PlanMisfit(f"{type(error).__name__}: {error}") from error

    def _parallelized(self, gm: fx.GraphModule) -> fx.Graph:
        job, options, ranks = self.job, self.job.options, self.job.ranks
        values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        fake_mode = _torch.fake.fake_mode_of(values) or _torch.fake.new_fake_mode()
        _torch.inductor.replace_random(gm, fake_mode)
        self.root = gm
        if job.open is not None:
            size_nodes.lift_sizes(gm.graph)
            if not size_nodes.is_open(gm.graph):
                raise OpenSizesRefused("tracing the program fixed all of them")
        writes = writes_as_results.lift(gm.graph)
        if job.writes:
            restore_meta(gm.graph)
        axes = ranks.manual.axes if ranks.manual else ()
        boundaries = absorb(gm.graph, fake_mode, ranks.whole.mesh, axes)
        self.rest_inputs = set(boundaries.inputs)
        signature = read_signature(gm.graph, self._input, self._output)
        self._refuse_parts()
        request = self.request = self._planned_request(boundaries.declare(signature))
        if (
            job.rival is not None
            and options.replan is not None
            and choose_plan.is_still_right(
                gm.graph, fake_mode, request, job.rival, options.replan
            )
        ):
            raise PlanStands(request.name)
        with said_by_rank_0(ranks.whole.rank):
            plan = choose_plan.searched if self.leader else choose_plan.planned
            result = self.result = plan(gm.graph, fake_mode, request)
        if job.open is not None and (divisors := job.open.divisors_asked()):
            if self.entry is not None and ranks.rank == 0:
                program = replace(self.entry, plan=result.plan, divisors=divisors)
                known_programs.keep(program)
            raise DivisorsAsked(divisors, result.plan)
        if ranks.open:
            ranks = settle(ranks, result.plan.mesh)
            self.job = replace(job, ranks=ranks)
            request = self.request = request.on(result.plan.mesh)
        if options.tune:
            result = self.result = pipeline.tuned(result, ranks.whole, gm)
        if self.leader:
            self.leader.tell(self.decided())
        elif not self.is_plan_known:
            meeting.agree(request.name, str(result.plan), key=result.plan.hash)
            agree_on_numbers(f"numbers of {request.name}", result.local, gm)
        self._report(result.plan)
        ends = [out.of for out in signature.outputs if out.kind == "mutation"]
        bound = pipeline.bound(
            result,
            ranks.whole,
            writes=writes,
            copied=[of for of in ends if of is not None],
        )
        self.memories = {
            i: memory
            for i, memory in memories(bound.output_node().args[0]).items()
            if signature.outputs[i].kind not in ("gradient", "mutation")
        }
        self.is_shared = self.leader is not None and is_of_all(bound)
        hold(gm, bound)
        return bound

    def _planned_request(self, signature: Signature) -> Request:
        """Return the request for the mesh, or for a mesh to be chosen; a plan that is
        known from an earlier start is followed."""
        options, ranks = self.job.options, self.job.ranks
        size = ranks.whole.mesh.size
        followed = self.entry.plan if self.entry else self.job.recalled
        name = self.request.name
        mode = followed or plan_mode(options.plan, options, size, name)
        request = replace(
            self.request,
            signature=signature,
            hints=load(options.hints),
            mode=mode,
            hardware=known_machine(options, size),
        )
        return request.with_open_mesh(ranks.mesh) if ranks.open else request

    def _refuse_parts(self) -> None:
        """Raise PlanError for a global value of parts of the batch in local mode."""
        for i in sorted(self.rest_inputs) if self.job.ranks.manual is not None else ():
            if self.declared[i].kind == "input":
                raise PlanError(
                    f"fxpar.global_value of {self.declared[i].name} is a value of "
                    "the whole batch, and with FXPAR_INPUTS=local each rank "
                    "computes on its own part",
                    fix="unset FXPAR_INPUTS: a DTensor says which part each rank has",
                )

    def _input(self, kind: str, payload: Any, node: fx.Node) -> Input:
        value = node.meta.get("val")
        declared = Input(f"{kind}_{node.name}", kind)
        if kind == "input":
            declared = self.job.named_inputs[payload]
        if kind != "tangent" and isinstance(value, torch.Tensor):
            whole = Spec.whole(value.dim())
            declared = replace(declared, at_rest=declared.at_rest or whole)
        self.places.append(payload if kind == "input" else None)
        self.declared.append(declared)
        return declared

    def _output(self, kind: str, name: str, of: int | None) -> Output:
        if self.job.writes and kind == "mutation" and of is not None:
            return Output(name, kind, of, self.declared[of].at_rest)
        rest_spec = None
        if kind == "output":
            rest_spec = self.job.rest_specs.get(int(name.removeprefix("output_")))
        open_ended = self.job.options.outputs == "dtensor" and kind == "output"
        return Output(name, kind, of, rest_spec, "even" if open_ended else "whole")

    def lower(self, graph: fx.Graph, which: str, generate: Generate) -> Any:
        """Return what runs a "forward" or a "backward", each scheduled alone.

        A backward that is lowered when it is first called, after its forward's
        agreement, has one of its own, so that all ranks return or raise. Raises
        RankMismatchError if they launch other collectives, or if one does not come.
        """
        with self.job.ranks.inside():
            if not self.is_agreed:
                return self._lower(graph, which, generate)
            forward = len(self.launches)
            with meeting.reporting():
                compiled = self._lower(graph, which, generate)
                # With a known plan, a rank may have it from AOTAutograd's cache.
                plan = self.result.plan if self.result is not None else None
                if not self.is_plan_known and plan and plan.collectives:
                    tag = f"the backward of graph{self.number}, compiled"
                    _agree_on_launches(tag, self.launches[forward:])
            return compiled

    def _lower(self, graph: fx.Graph, which: str, generate: Generate) -> Any:
        with old_objects_kept(), quick_graphs():
            self._schedule(graph, which)
            if not self.is_inductor:
                return generate(None)

            def compile_here(text: str | None) -> Any:
                status_line.rename(pipeline.INDUCTOR[which])
                return generate(text)

            # One rank compiles for all that have this graph.
            status_line.rename(f"waiting for the rank that compiles the {which}")
            compiled = compile_once(graph, f"{self.request.name}/{which}", compile_here)
            if which == "backward":
                self.say_seconds(which)
            return compiled

    def _schedule(self, graph: fx.Graph, which: str) -> None:
        """Run the steps of ``PHASE`` on a forward or a backward; keep its launches."""
        result = self.result
        self.regions += pipeline.scheduled(
            graph,
            self.request,
            result,
            backward=which == "backward",
            memories=self.memories,
            gradients=self._gradients(graph) if which == "backward" else {},
            at_rest=[self.declared[i].name for i in sorted(self.rest_inputs)],
        )
        even = result is None or result.decided.is_even
        if self.request.pipeline is None:  # whose ranks run different programs
            self.launches += crossings(graph, even=even)
        status_line.begin(pipeline.INDUCTOR[which])

    def _gradients(self, backward: fx.Graph) -> dict[int, int]:
        """Return, for each result of a backward that is the gradient of a whole
        parameter, its position -> the parameter's position among the arguments."""
        if self.result is None or self.request.manual is None:
            return {}
        count = len(backward.output_node().args[0])  # one for each argument, in order
        return {
            i: place
            for i, end in enumerate(self.declared[:count])
            if end.kind == "parameter" and i not in self.rest_inputs
            if (place := self.places[i]) is not None
        }

    def decided(self) -> KnownProgram:
        """Return what was decided of the program, now or by an earlier start, with what
        compiling added so far."""
        program, result = self.entry or KnownProgram("", ""), self.result
        if result is None:
            return replace(program, plan=program.plan and self._noted(program.plan))
        decision, outputs = result.decided, self.request.signature.outputs
        ends = zip(
            decision.program.signature.outputs, decision.edges.outputs, strict=True
        )
        places = (
            self.places[out.of]
            for out in outputs
            if out.kind == "mutation" and out.of is not None
        )
        return replace(
            program,
            plan=self._noted(result.plan),
            results={
                int(out.name.removeprefix("output_")): spec.joined(decision.mesh)
                for out, spec in ends
                if out.kind == "output" and spec is not None
            },
            launches=tuple(self.launches),
            groups=tuple(known_programs.groups_of(result.local)),
            shared=self.is_shared,
            written=tuple(sorted({i for i in places if i is not None})),
        )

    def _noted(self, plan: Plan) -> Plan:
        """Return the plan with the regions and notes known after compiling."""
        notes, order = self.job.notes, self.job.options.pipeline
        if plan.stages and not self.job.writes and order not in ("auto", AUTO_SEPARATE):
            text = f"pipeline={order!r} is for fxpar.train_step: forward and backward "
            text += f"are two calls here, so stages run {AUTO_SEPARATE!r}"
            notes = (*notes, text)
        if self.sizes is not None:
            notes = (*notes, f"valid for {self.sizes.text}")
        return replace(
            plan,
            regions=tuple(self.regions),
            notes=tuple(dict.fromkeys((*plan.notes, *notes))),
        )

    def finished(
        self,
        compiled: Callable[..., Any],
        gm: fx.GraphModule,
        with_room: WithRoom | None,
    ) -> Compiled:
        """Return what was compiled, with its checks; keep a new program on disk for the
        next start."""
        # Code with generated kernels is not kept: they are made when it is compiled.
        is_new = self.result is not None and not self.is_plan_known
        program = self.decided()
        if self.entry and is_new and not self.regions and self.job.ranks.rank == 0:
            known_programs.keep(program)
        self.say_seconds("forward")
        results = gm.graph.output_node().args[0]
        lines = (user_line(x) for x in reversed(results) if isinstance(x, fx.Node))
        return Compiled(
            compiled,
            self._checks(),
            program,
            replace(self.job, open=None),  # whose graph was consumed
            self.broken_at,
            self.sizes,
            next(filter(None, lines), None),
            with_room,
        )

    def _report(self, plan: Plan) -> None:
        ranks, name = self.job.ranks, self.request.name
        rank, count, warned = ranks.whole.rank, ranks.mesh.size, warnings_of_plans()
        report(plan, self.job.options, rank, count, name, self.broken_at, warned)

    def say_seconds(self, which: str) -> None:
        """Show the seconds that each stage took to compile a forward or a backward."""
        options, ranks = self.job.options, self.job.ranks
        show_seconds(self.request.name, which, stage_table(), options, ranks.whole.rank)

    def _checks(self) -> list[Callable[..., Any]]:
        """Return the checks of the arguments of the first call."""
        checks: list[Callable[..., Any]] = []
        if self.job.writes:
            checks.append(partial(inputs.check_arguments, self.job.named_inputs))
        return [*checks, self._verify] if self.job.options.verify else checks

    def _verify(self, args: Sequence[Any]) -> None:
        """Simulate all ranks (``FXPAR_VERIFY``) on the arguments of the first call."""
        if self.result is not None:
            local, normalized = self.result.local, self.result.normalized
            feeds = feeds_of(normalized, args, self.places)
            verify(local, normalized, self.result.decided, self.root, feeds)


def _agree_on_launches(tag: str, launches: Sequence[str] | None) -> bool:
    """Wait until all ranks come to ``tag`` with the same launches, and return whether
    all compiled: False, on all ranks, if the launches of one are None.

    Raises RankMismatchError if theirs differ, or if one fails or does not come.
    """
    text = "\n".join(launches or ())
    key = meeting.VOID if launches is None else None
    return meeting.agree(tag, text, key=key, what="the collectives they launch")


def _request_of(job: CompileJob, name: str) -> Request:
    """Return the request to the pipeline, before the graph is known."""
    options = job.options
    pipeline = "auto" if job.ranks.open else options.pipeline
    mesh, stages = split_off(job.ranks.mesh, pipeline)
    if not job.writes:  # forward and backward are two calls
        options = replace(options, pipeline="auto")
    if stages is not None:
        stages = replace(stages, mesh=with_planned_axis(job.ranks.whole.mesh))
    return Request(
        mesh,
        Signature((), ()),
        manual=job.ranks.manual,
        options=options,
        microbatches=options.microbatches,
        pipeline=stages,
        sent_room=job.sent_room,
        step=job.writes,
        even=job.even,
        name=name,
        rank=job.ranks.rank,
    )


def _load_inductor() -> None:
    """Import Inductor and register our lowerings; a rank does so before it waits for
    the one that compiles for it."""
    with stage(TRACE):
        _torch.inductor.load()
        random.register_lowering()
        own_shard.register_lowering()
        register_lowerings()


def run_op_by_op(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """Return the bound graph to run op by op, for ``codegen="eager"``."""
    return _torch.inductor.make_boxed(gm.forward)


@contextlib.contextmanager
def _refusing_open_sizes() -> Iterator[None]:
    """Turn a failure inside that other ranks do not know of into OpenSizesRefused."""
    try:
        yield
    except _OF_ALL:
        raise
    except Exception as error:
        if meeting.is_known_to_all(error):
            raise
        raise OpenSizesRefused(refusal_of(error)) from error


def _refuse_as_known(entry: KnownProgram) -> None:
    """Raise OpenSizesRefused or DivisorsAsked if an earlier start that left sizes open
    kept one."""
    if entry.refused:
        raise OpenSizesRefused(entry.refused)
    if entry.divisors:
        raise DivisorsAsked(entry.divisors, entry.plan)


@contextlib.contextmanager
def said_by_rank_0(rank: int) -> Iterator[None]:
    """Silence warnings of fxpar on ranks but 0: planning warns of the same on each."""
    if rank == 0:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)
        yield
