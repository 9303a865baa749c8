"""This module is where torch.compile and ``train_step`` enter fxpar.

``torch.compile(model, backend="fxpar")`` calls ``fxpar`` with each Dynamo graph;
``train_step`` has a backend of its own for the forward of a step. Ranks meet at the
first call, and ``compilation`` then compiles the graph.

In: a Dynamo graph, its example inputs and options. Out: the callable that Dynamo runs
in place of the graph. Never: an algorithm; an FxparError raised inside Dynamo, which
would wrap it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.compilation import (
    compile_graph,
    compile_plain,
    is_plain,
    said_by_rank_0,
)
from fxpar.config import Options
from fxpar.errors import FxparError, OptionError
from fxpar.features.at_rest import dynamo_graphs, used_layouts
from fxpar.features.regions.manual_regions import on_one_rank, raise_refused
from fxpar.features.regions.shard_map import mesh_of
from fxpar.features.train_step.step import TrainStep
from fxpar.features.train_step.trace import GradientOptions
from fxpar.runtime import tracing
from fxpar.runtime.caches.program_identity import lean_graph, name_inputs, placeholders
from fxpar.runtime.calls import compiled_graph, outside_graphs
from fxpar.runtime.calls.call_variants import (
    FORWARD,
    Calls,
    CompileGraph,
    CompileJob,
    forget,
)
from fxpar.runtime.calls.compiled_graph import take_eager_gradients
from fxpar.runtime.ranks.groups import Ranks, join


def fxpar(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph for this rank of the mesh. ``mode``: as the option
    ``inductor``; ``torch.compile`` takes one of the two.

    Errors of fxpar are raised when the compiled function is first called, as they are,
    instead of inside Dynamo's wrapping of backend errors.
    """
    try:
        if mode is not None:
            options = {**(options or {}), "inductor": mode}
        traced, gm = gm, _torch.flat_regions.without_regions(gm)
        job_options, ranks = _joined(gm, options)
        dynamo_graphs.refuse_written_parameters(gm)
        if is_plain(job_options, ranks):
            return compile_plain(on_one_rank(traced), examples, job_options)
        gm = _prepared(gm, examples, ranks)
        compared = dynamo_graphs.compare_parameters(gm)
        views = []
        if job_options.outputs == "global":
            views = compiled_graph.views_of_results(gm)
        once = compiled_graph.return_once(gm, views) if views else gm
        call = _called(once, examples, job_options, ranks, compile_graph, FORWARD)
        return compared(compiled_graph.with_views(gm, views, call) if views else call)
    except FxparError as error:
        return compiled_graph.raiser(error)


fxpar.reset = forget  # type: ignore[attr-defined]
_torch.dynamo.on_compile(fxpar, outside_graphs.watch)
_torch.layer_regions.serve(fxpar)


def train_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    options: dict[str, Any] | None = None,
) -> TrainStep:
    """Return a callable that runs forward, backward and the optimizer's step as one
    program over the mesh.

    ``step = fxpar.train_step(model, loss_fn, optimizer)``, then ``loss = step(*batch)``
    for every batch: ``loss_fn(model, *batch)`` gives the loss, a scalar, or a tuple
    that begins with it. Parameters, buffers and optimizer state are the user's own,
    changed in place; a model of ``fxpar.shard`` is updated part by part. ``clip``:
    gradients are scaled to this global norm if theirs is larger. ``accumulate``: the
    parameters are updated at every so many calls, with the mean of their gradients.
    ``scaler``: scales the loss, and leaves out an update whose gradients are not
    finite; its ``update()`` is called. ``options``: as for
    ``torch.compile(backend="fxpar")``.

    Raises PlanError if the optimizer needs a closure; calls raise it if the forward is
    not one graph, or the optimizer cannot be traced. OptionError, also on options that
    say how gradients or results leave a graph, which here they do not.
    """
    step_options = Options.read(options)
    for name in ("reduce_dtype", "outputs"):
        if getattr(step_options, name) != getattr(Options, name):
            raise OptionError(
                f"fxpar.train_step has no option {name!r}",
                fix="leave it out, or torch.compile the model instead",
            )

    def backend(step: TrainStep) -> Callable[..., Any]:
        def compile_forward(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
            try:
                gm = _torch.flat_regions.without_regions(gm)
                job_options, ranks = _joined(gm, options)
                gm = _prepared(gm, examples, ranks)
                return _called(gm, examples, job_options, ranks, step.stage, step)
            except FxparError as error:
                return compiled_graph.raiser(error)

        return compile_forward

    gradient_options = GradientOptions(clip, accumulate, scaler)
    mesh = partial(mesh_of, step_options)
    begin = outside_graphs.begins(model, options)
    return TrainStep(model, loss_fn, optimizer, gradient_options, backend, mesh, begin)


def _prepared(
    gm: fx.GraphModule, examples: Sequence[Any], ranks: Ranks
) -> fx.GraphModule:
    """Return the Dynamo graph with attention with dropout in a form that can be split;
    in local mode, give its in-place collectives the gradients of eager code."""
    gm = tracing.without_kernels(gm)
    if ranks.manual is not None:
        take_eager_gradients(gm)
    kinds = {x.device.type for x in examples if isinstance(x, torch.Tensor)}
    with said_by_rank_0(ranks.whole.rank):
        tracing.warn_of_products(gm, kinds)
    return gm


def _joined(
    gm: fx.GraphModule, options: dict[str, Any] | None
) -> tuple[Options, Ranks]:
    """Return the options for a Dynamo graph and this process's place on the mesh.

    Raises RegionError for a manual region that was refused while it was traced.
    """
    raise_refused(gm)
    job_options = Options.read(options)
    homes = dynamo_graphs.homes(gm)
    if homes and job_options.mesh is None:
        job_options = replace(job_options, mesh=homes[0].mesh)
    ranks = join(job_options)
    dynamo_graphs.follow_dtypes(homes, job_options)
    outside_graphs.warn_around(ranks)
    return job_options, ranks


def _called(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    options: Options,
    ranks: Ranks,
    compile_as: CompileGraph,
    owner: object,
) -> Callable[..., Any]:
    """Return what Dynamo calls for a graph, which is compiled when ranks meet at its
    first call. Dynamo may be asked to trace it again."""
    lean, positions, numbers = lean_graph(gm, examples)
    dynamo_graphs.forget_homes(lean)
    examples = [_fed(examples[i], i in numbers) for i in positions]
    named_inputs = name_inputs(lean.graph, examples)
    compiled_graph.refuse_nested(lean, named_inputs, examples)
    job = CompileJob(options, ranks, named_inputs)
    used_layouts.settle(lean, examples, job)
    call: Callable[..., Any] = Calls(lean, examples, job, compile_as, owner)
    if numbers:
        return lambda *args: call(*(_fed(args[i], i in numbers) for i in positions))
    if len(positions) == len(placeholders(gm)):
        return call
    return lambda *args: call(*(args[i] for i in positions))


def _fed(x: Any, number: bool) -> Any:
    """Return an input as the graph takes it: a ``number``, which Dynamo feeds as a
    tensor, as a Python number; a fake tensor gives one of unknown value."""
    return x.item() if number else x
