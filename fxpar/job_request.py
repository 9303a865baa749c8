"""The request that is put to the pipeline for one graph to compile.

In: a ``CompileJob``, all that is known of the graph but the graph itself. Out: a
``Request``; ``request_of`` gives what stands before the graph is traced,
``planned_request`` adds the graph's signature and the meshes and plan to choose from.
Never reads the graph.
"""

from __future__ import annotations

from dataclasses import replace

from fxpar.runtime.calls.compile_variants import CompileJob
from fxpar.sharding.hints import load
from fxpar.sharding.pipeline_axis import split_off, with_planned_axis
from fxpar.sharding.pipeline_schedule import AUTO_APART
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import (
    Request,
    choices,
    known_machine,
    named_machine,
    plan_mode,
    staged_choices,
)
from fxpar.sharding.program import Signature


def request_of(job: CompileJob, name: str) -> Request:
    """What is asked of the pipeline, before the graph is known."""
    options = job.options
    pipeline = "auto" if job.ranks.open else options.pipeline
    mesh, stages = split_off(job.ranks.mesh, pipeline)
    # Elsewhere than in a training step forward and backward are two calls.
    schedule = options.pipeline if job.writes else AUTO_APART
    if stages is not None:
        whole = with_planned_axis(job.ranks.whole.mesh)
        stages = replace(stages, mesh=whole, schedule=schedule)
    return Request(
        mesh,
        Signature((), ()),
        manual=job.ranks.manual,
        strict=options.strict,
        disable=options.disable,
        keep_gathered=not options.reshard_after_forward,
        microbatches=options.microbatches,
        pipeline=stages,
        pipeline_schedule=schedule,
        expert_room=options.expert_room,
        expert_exchange=options.expert_exchange,
        sent_room=job.sent_room,
        schedule=options.schedule,
        tune=options.tune,
        cached=options.cache_plans,
        fuse=options.fuse,
        step=job.writes,
        name=name,
        rank=job.ranks.rank,
        debug=options.debug,
        dump=options.dump,
    )


def planned_request(
    job: CompileJob, request: Request, signature: Signature, known_plan: Plan | None
) -> Request:
    """What is asked on the mesh, or for a mesh to be chosen; of a plan that is known
    from an earlier start, that it is followed."""
    options, ranks = job.options, job.ranks
    size = ranks.whole.mesh.size
    mode = known_plan or plan_mode(options.plan, options, size, request.name)
    return replace(
        request,
        signature=signature,
        hints=load(options.hints),
        mode=mode,
        meshes=choices(ranks.mesh, mode) if ranks.open else (),
        staged=staged_choices(ranks.mesh, mode) if ranks.open else (),
        hardware=known_machine(options, size),
        named_hardware=named_machine(options),
    )
