"""A Dynamo graph compiled for one rank: the joint graph goes through the pipeline.

In: a graph and its ``CompileJob``: the options, this process's place on the mesh. Out:
the compiled callable with its checks. The graph goes through AOTAutograd and Inductor
by ``compile_fx``; in between, on the joint graph, ``JointPass`` runs ``fxpar.pipeline``
and leaves this rank's graph in its place. What an earlier start compiled is taken from
disk (``known_programs``). No algorithms.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from fxpar import _torch, pipeline
from fxpar._fast.old_objects import old_objects_kept
from fxpar._fast.python_frames import in_one_block
from fxpar._fast.quick_graphs import quick_graphs
from fxpar.config import Options
from fxpar.explain import status_line
from fxpar.joint_pass import JointPass
from fxpar.passes.experts.across_places import manual_expert_axes
from fxpar.passes.local import own_shard
from fxpar.passes.normalize import random
from fxpar.passes.repeated_segments import repeated_segments
from fxpar.passes.stages import sums_of_parts
from fxpar.runtime.caches import known_programs
from fxpar.runtime.caches.known_programs import KnownProgram, PlanMisfit
from fxpar.runtime.caches.program_identity import NamedInput
from fxpar.runtime.calls import compiled_graph
from fxpar.runtime.calls.compile_variants import CompileJob
from fxpar.runtime.calls.open_sizes import (
    DivisorsAsked,
    OpenSizesRefused,
    PlanStands,
    refusal_of,
    size_range,
)
from fxpar.runtime.ranks import check_inputs as inputs
from fxpar.runtime.ranks import consensus
from fxpar.runtime.ranks.groups import Ranks, join, next_graph
from fxpar.runtime.stage_times import TRACE, stage
from fxpar.runtime.train_step.forward import StepInput
from fxpar.runtime.train_step.trace import TracedStep
from fxpar.sharding.pipeline_axis import pipeline_axis
from fxpar.sharding.program import user_line
from fxpar.sharding.spec import Spec

log = logging.getLogger("fxpar")


def is_plain(options: Options, ranks: Ranks) -> bool:
    """Whether there is nothing to do for fxpar."""
    inductor = options.codegen == "inductor" and options.microbatches in (None, 1)
    return ranks.whole.mesh.size == 1 and inductor


@contextlib.contextmanager
def _told_to_others() -> Iterator[None]:
    """A failure on this rank ends the others' wait for it."""
    try:
        yield
    except (OpenSizesRefused, DivisorsAsked, PlanStands):  # by all
        raise
    except Exception as error:
        consensus.abort(error)
        raise


@contextlib.contextmanager
def _refused_alike() -> Iterator[None]:
    """Ranks that compile a program with open sizes do so, or all raise
    OpenSizesRefused."""
    try:
        yield
    except (DivisorsAsked, OpenSizesRefused, PlanStands):
        raise
    except Exception as error:
        if consensus.was_told(error):
            raise
        raise OpenSizesRefused(refusal_of(error)) from error


def compile_step(
    job: CompileJob, step: TracedStep, rests: Mapping[int, Spec]
) -> Callable[..., Any]:
    """The checked, compiled function of a traced training step."""
    if is_plain(job.options, job.ranks):
        plain = compiled_graph.without_hints(step.module)
        settings = dict(job.options.inductor)
        return _torch.aot.compile_fx(plain, step.fakes, inductor_settings=settings)
    job = replace(job, named_inputs=step.ends, rests=rests, writes=True)
    return compile_graph(job, step.module, step.fakes)


@in_one_block
@old_objects_kept()
@quick_graphs()
def compile_graph(
    job: CompileJob, gm: fx.GraphModule, examples: Sequence[Any]
) -> compiled_graph.Compiled:
    """The checked, compiled function of a Dynamo graph, on concrete shapes or on open
    ones.

    A failure is told to the other ranks before it is raised here. With open sizes all
    ranks raise OpenSizesRefused where they cannot be kept open, DivisorsAsked where the
    plan splits some of them, PlanStands where that of the job's rival is kept.
    """
    broken_at = _torch.dynamo.graph_break_line(gm)
    if job.ranks.open:  # the mesh may have been chosen since
        job = replace(job, ranks=join(job.options))
    number, with_room = next_graph(), _with_room(job, gm, examples)
    for anew in (False, True):
        entry = _look_up(job, gm, examples, number, anew=anew)
        compiled = _compile_by(entry, job, gm, examples, number, broken_at, with_room)
        if compiled is not None:
            return compiled
    compiled = _compile_by(None, job, gm, examples, number, broken_at, with_room)
    assert compiled is not None, "no plan is known that may not fit"
    return compiled


def _with_room(
    job: CompileJob, gm: fx.GraphModule, examples: Sequence[Any]
) -> compiled_graph.WithRoom | None:
    """What compiles a graph for the room that ranks agree on, of rows that they send to
    experts; None if it sends none, or that is agreed on."""
    experts = manual_expert_axes(job.ranks.manual)
    if not experts or job.sent_room is not None:
        return None
    if job.options.expert_exchange == "gather":
        return None
    source = _torch.dynamo.copy_graph(gm)  # compiling consumes a graph

    fakes = examples if job.writes else None

    def with_room(room: int, args: Sequence[Any]) -> compiled_graph.Compiled:
        copy = _torch.dynamo.copy_graph(source)
        return compile_graph(replace(job, sent_room=room), copy, fakes or list(args))

    return with_room


def _compile_by(
    entry: KnownProgram | None,
    job: CompileJob,
    gm: fx.GraphModule,
    examples: Sequence[Any],
    number: int,
    broken_at: str | None,
    with_room: compiled_graph.WithRoom | None,
) -> compiled_graph.Compiled | None:
    """What ``compile_graph`` gives; None on all ranks if what is known of the program
    does not fit it on one of them."""
    inductor = job.options.codegen == "inductor"
    is_led = entry is not None and known_programs.is_led(entry, examples)
    leads = is_led and job.ranks.rank == 0
    follows = is_led and not leads
    if inductor:
        _load_inductor()
    if entry is not None and follows:
        entry = _await_leader(job, entry, number)
    _refuse_as_known(entry)
    step = JointPass(job, number, broken_at, entry, leads=leads)
    showing = status_line.status_of(
        f"graph{number}",
        pipeline.STEP_NAMES,
        on=job.options.progress and job.ranks.rank == 0,
    )
    open_way = _refused_alike() if job.open else contextlib.nullcontext()
    with (
        showing,
        _told_to_others(),
        compiled_graph.refusing_data(gm),
        stage(TRACE),
        open_way,
    ):
        try:
            with step.leading():
                compiled = _compiled(job, gm, examples, entry, step)
            step.report_known_plan()
            if job.open is not None:
                step.sizes = size_range(job.open, step.written())
        except PlanMisfit as misfit:
            log.info(
                "graph%d: its plan does not fit, it is made anew: %s", number, misfit
            )
            compiled = None
        status_line.begin(pipeline.WAIT)
        if not step.agree_on_launches(compiled=compiled is not None):
            return None
    assert compiled is not None
    step.keep()
    step.say_seconds("forward")
    return compiled_graph.Compiled(
        compiled,
        _checks(job, step),
        step.compiled_plan,
        step.results(),
        [x.name for x in job.named_inputs],
        job.options,
        step.ranks,
        broken_at,
        step.sizes,
        _made_at(gm),
        step.written(),
        with_room,
    )


def _compiled(
    job: CompileJob,
    gm: fx.GraphModule,
    examples: Sequence[Any],
    entry: KnownProgram | None,
    step: JointPass,
) -> Callable[..., Any]:
    """What AOTAutograd and Inductor make of a Dynamo graph, ``step`` in between."""
    return _torch.aot.compile_fx(
        gm,
        examples,
        joint_pass=step,
        lower=step.lower,
        inner=None if job.options.codegen == "inductor" else run_op_by_op,
        key=_cache_key(job, entry),
        cached=entry is not None,
        local_border=job.options.outputs == "dtensor",
        symbolic=job.open is not None,
        repeated=None if job.open is not None else repeated_segments,
        inductor_settings=dict(job.options.inductor),
    )


def _made_at(gm: fx.GraphModule) -> str | None:
    """The user's line of the last result of a Dynamo graph."""
    results = gm.graph.output_node().args[0]
    lines = (user_line(x) for x in reversed(results) if isinstance(x, fx.Node))
    return next(filter(None, lines), None)


def _checks(job: CompileJob, step: JointPass) -> list[Callable[..., Any]]:
    """What looks at the arguments of the first call."""
    checks: list[Callable[..., Any]] = []
    if job.writes:
        # Inputs of which each rank holds a part go by another kind.
        named_inputs = [
            NamedInput(x.name, "part") if isinstance(x, StepInput) and x.rest else x
            for x in job.named_inputs
        ]
        checks.append(partial(inputs.check_arguments, named_inputs))
    return [*checks, step.verify] if job.options.verify else checks


def _look_up(
    job: CompileJob,
    gm: fx.GraphModule,
    examples: Sequence[Any],
    number: int,
    *,
    anew: bool,
) -> KnownProgram | None:
    """What is known of the program from an earlier start, on all ranks alike; the
    process groups that it uses are made. ``anew``: nothing that was kept is taken."""
    if job.options.codegen != "inductor":
        return None
    if pipeline_axis(job.ranks.mesh) is not None:
        return None
    if job.open is not None and (job.rival or not _torch.aot.can_compile_backward()):
        return None
    text = None
    if all(map(_torch.dtensor.brings_mesh, examples)):
        followed = job.recalled.hash if job.recalled else ""
        mesh = str(job.ranks.whole.mesh)
        rests = sorted(job.rests.items())
        extras = job.writes, followed, mesh, job.sent_room, *rests
        text = known_programs.text_of(
            gm, job.named_inputs, examples, job.options, job.ranks, extras
        )
    with _told_to_others():
        tag = f"what is known of graph{number}"
        entry = known_programs.look_up(text, tag, anew=anew)
    _make_groups(job, entry)
    return entry


def _load_inductor() -> None:
    """Import Inductor, with lowerings of our own: a rank does so before it waits for
    the one that compiles for it."""
    with stage(TRACE):
        _torch.inductor.load()
        random.register_lowering()
        own_shard.register_lowering()
        sums_of_parts.register_lowering()


def _await_leader(
    job: CompileJob, entry: KnownProgram, number: int
) -> KnownProgram | None:
    """The program once rank 0 has compiled it; None if it could not be planned, which
    this rank then finds out for itself."""
    graph = f"graph{number}"
    with _told_to_others():
        planned = known_programs.await_plan(graph, entry)
        if planned is None:
            return None
        if planned.refused or planned.divisors:
            return planned
        _make_groups(job, planned)
        return known_programs.await_compiled(graph, planned)


def _refuse_as_known(entry: KnownProgram | None) -> None:
    """Raise what is known to come of leaving sizes open: OpenSizesRefused,
    DivisorsAsked."""
    if entry is not None and entry.refused:
        raise OpenSizesRefused(entry.refused)
    if entry is not None and entry.divisors:
        raise DivisorsAsked(entry.divisors, entry.plan)


def _make_groups(job: CompileJob, entry: KnownProgram | None) -> None:
    for axes in entry.groups if entry else ():
        job.ranks.group(axes)


def _cache_key(job: CompileJob, entry: KnownProgram | None) -> str:
    """Of the program in torch's caches, besides its graph. Places draw numbers of their
    own."""
    place = job.ranks.world.place if job.ranks.world is not None else 0
    key = f"{job.ranks.whole.mesh}|{place}|{job.options}|{job.sent_room}"
    return f"{key}|{entry.name_of(job.ranks.rank)}" if entry else key


def run_op_by_op(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """``codegen="eager"``: the bound graph as it stands."""
    return _torch.inductor.make_boxed(gm.forward)
