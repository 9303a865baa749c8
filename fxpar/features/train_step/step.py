"""Run a whole training step as one compiled program: ``fxpar.train_step``.

In: a model, a loss function, an optimizer. Out: a callable that runs forward, backward
and update on the user's own parameters, buffers and optimizer state; an error for what
one program would not do as separate calls do. Dynamo traces the forward, with its
guards, so that what it read in Python is checked at every call; the graph it hands over
is traced again with its backward and the optimizer's own ``step`` (``trace``), and goes
through the pipeline of any graph. Never: another optimizer object or class, so that
``state_dict``, schedulers and eager steps in between see the same objects.

A graph is kept for what it was traced with: the shapes of the forward, which state
there is, and the settings of the groups. The learning rate is an input from the start;
any other number becomes one when it is first seen to change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar._torch.objects import parameters_of
from fxpar.compilation import compile_graph, compile_plain, is_plain
from fxpar.errors import (
    PlanError,
    warn,
)
from fxpar.features.at_rest.crossings import with_part
from fxpar.features.at_rest.dtensor_ops import orthogonalize_whole
from fxpar.features.at_rest.dynamo_graphs import Forward, fake_of, globally, spec_of
from fxpar.features.regions.manual_regions import on_one_rank
from fxpar.features.train_step.optimizer import (
    Slot,
    attributes,
    is_number,
    prepare,
    refuse,
    refuse_unseen,
    slots,
    write,
)
from fxpar.features.train_step.trace import (
    GradientOptions,
    StepCall,
    TracedStep,
    as_tensor,
    loss_of,
)
from fxpar.passes.repeated_segments import repeated_segments
from fxpar.runtime.calls.call_variants import CompileJob
from fxpar.runtime.calls.compiled_graph import refusing_data
from fxpar.runtime.ranks.presence import is_alone
from fxpar.runtime.tracing import traced_for
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Input
from fxpar.sharding.spec import Spec

LossFn = Callable[..., Any]
# The Dynamo backend that hands graphs to ``TrainStep.stage``.
Backend = Callable[["TrainStep"], Callable[..., Any]]


class TrainStep:
    """Is a step on a batch, ``step(*args, **kwargs)``, made by ``fxpar.train_step``."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer,
        options: GradientOptions,
        backend: Backend,
        mesh: Callable[[], Mesh | None],
        begin: Callable[[], None],
    ) -> None:
        """Prepare the step. ``begin`` is called before each step."""
        refuse(optimizer)
        refuse_unseen(optimizer)
        options.check()
        orthogonalize_whole()
        model = getattr(model, "_orig_mod", model)
        self.model, self.optimizer, self.options = model, optimizer, options
        self.mesh, self.begin = mesh, begin  # the forward is traced for the mesh
        self.calls = 0  # since the last update
        # of the calls since the last update
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            return loss_fn(model, *args, **kwargs)

        own = backend(self)
        _torch.layer_regions.serve(own)
        self._forward = _torch.dynamo.compile_as_one(forward, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, detached, as it was before the update; where ``loss_fn``
        returns more, all that it returns.

        Raises PlanError if the step is not one graph, if Dynamo compiled it too often,
        or inside ``fxpar.alone``.
        """
        if is_alone():
            raise PlanError(
                "fxpar.train_step inside fxpar.alone(): a step is one program of all "
                "ranks",
                fix="call it on every rank, outside; evaluate the model itself alone",
            )
        self.begin()
        try:
            with torch.enable_grad(), traced_for(self.mesh):
                results = self._forward(*args, **kwargs)
        except Exception as error:
            if _torch.dynamo.is_recompile_limit(error):
                raise PlanError(
                    "fxpar.train_step was compiled as often as "
                    "torch._dynamo.config.recompile_limit allows, for other values "
                    "that it reads in Python each time",
                    fix="give it what changes as a tensor (TORCH_LOGS=recompiles says "
                    "what that is), or raise that limit",
                ) from error
            why = _torch.dynamo.why_not_one_graph(error)
            if why is None:
                raise
            raise PlanError(
                f"the forward of fxpar.train_step is not one graph: {why[0]}",
                where=why[1],
                fix="take out of loss_fn and the model what breaks the graph, or "
                "torch.compile the model and call optimizer.step()",
            ) from error
        self.calls = (self.calls + 1) % self.options.accumulate
        return results

    def stage(
        self, job: CompileJob, gm: fx.GraphModule, examples: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return what to run for a forward that Dynamo traced, on concrete shapes.
        ``examples``: values of its inputs."""
        forward = globally(gm, job.named_inputs, examples)
        forward = replace(forward, kinds=tuple(repeated_segments(forward.module)))
        return _Stage(self, forward, examples, job)


class _Stage:
    """Is a forward with its backward, in a variant for each state of the optimizer."""

    def __init__(
        self,
        owner: TrainStep,
        forward: Forward,
        examples: Sequence[Any],
        job: CompileJob,
    ) -> None:
        self.owner, self.forward, self.job = owner, forward, job
        mode = _torch.fake.new_fake_mode(symbols=True)
        self.examples = [fake_of(x, mode) for x in examples]
        with refusing_data(forward.module):
            self.reached = reached(forward, self.examples)
        self.inputs: set[Slot] = set()  # numbers of the groups that are inputs
        self.fixed: set[Slot] = set()  # those that cannot be
        self.last: dict[Slot, Any] = {}  # numbers of the groups when last traced
        self.variants: dict[Any, list[TracedStep]] = {}

    def __call__(self, *args: Any) -> Any:
        optimizer = self.owner.optimizer
        refuse(optimizer)
        refuse_hooks(self.forward, args)
        places = self._places(args)
        how = self._step_call(args)
        slot_values = dict(slots(optimizer))
        step = self._find(slot_values, places, how)
        if step is None:
            refuse_unseen(optimizer)
            if how.updates:
                prepare(optimizer, [args[i] for i in self.reached])
            slot_values = dict(slots(optimizer))
            step = self._find(slot_values, places, how)
            if step is None:
                step = self._make(args, places, slot_values, how)
        return self._run(step, args, slot_values)

    def _step_call(self, args: Sequence[Any]) -> StepCall:
        """Return what this call does. Gradients of zero are made for parameters that
        this forward is the first to reach, if they are to be kept.

        Raises PlanError if a gradient is kept of a parameter that is no input.
        """
        owner, options = self.owner, self.owner.options
        updates = owner.calls + 1 == options.accumulate
        trained = [args[i] for i in self.forward.trained]
        if not updates:
            with torch.no_grad():
                for i in self.reached:
                    if args[i] not in owner.gradients:
                        owner.gradients[args[i]] = torch.zeros_like(args[i])
        elif untrained := set(map(id, owner.gradients)) - set(map(id, trained)):
            names = [
                name for name, p in owner.model.named_parameters() if id(p) in untrained
            ]
            raise PlanError(
                f"{names[0] if names else 'a parameter'} has a gradient of an earlier "
                "call, and the forward of the call that updates does not use it",
                fix="let every batch of an update use the same parameters, or "
                "torch.compile the model and call optimizer.step()",
            )
        accumulated = (i for i in self.forward.trained if args[i] in owner.gradients)
        averages = self.job.ranks.manual is not None
        return StepCall(options, updates, tuple(accumulated), averages)

    def _places(self, args: Sequence[Any]) -> dict[int, int]:
        """Map a parameter's position in the optimizer to that among the inputs."""
        optimizer = self.owner.optimizer
        inputs = {id(args[i]): i for i in self.forward.trained}
        order = enumerate(parameters_of(optimizer))
        places = {i: inputs[id(p)] for i, p in order if id(p) in inputs}
        if self.reached.isdisjoint(places.values()):
            raise PlanError(
                f"{type(optimizer).__name__} holds no parameter that the loss depends "
                "on",
                fix="make it from model.parameters(), after fxpar.shard if the model "
                "is sharded",
            )
        return places

    def _is_input(self, slot: Slot, x: Any) -> bool:
        """Return whether a value is a number that enters the graph as a tensor."""
        return is_number(x) and (slot.place == "state" or slot in self.inputs)

    def _key(
        self, slot_values: Mapping[Slot, Any], places: Mapping[int, int], how: StepCall
    ) -> Any:
        """Return all that a graph was traced with, except numbers that are inputs."""
        if not how.updates:
            return how
        optimizer = self.owner.optimizer

        def frozen(slot: Slot, x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                layout = x.placements if isinstance(x, DTensor) else x.stride()
                return tuple(x.shape), x.dtype, x.device, layout
            return type(x) if self._is_input(slot, x) else repr(x)

        signature = tuple(
            (slot, frozen(slot, x))
            for slot, x in slot_values.items()
            if slot.place == "group" or slot.index in places
        )
        sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
        settings = tuple(attributes(optimizer).items())
        return signature, sizes, tuple(places.items()), settings, how

    def _find(
        self, slot_values: Mapping[Slot, Any], places: Mapping[int, int], how: StepCall
    ) -> TracedStep | None:
        """Return a step that was traced for the same state and numbers, None if there
        is none."""
        for step in self.variants.get(self._key(slot_values, places, how), ()):
            if all(x.has_same_answer(slot_values[x.slot]) for x in step.answers):
                return step
        return None

    def _make(
        self,
        args: Sequence[Any],
        places: Mapping[int, int],
        slot_values: Mapping[Slot, Any],
        how: StepCall,
    ) -> TracedStep:
        """Trace and compile a step, and keep it."""
        with refusing_data(self.forward.module):
            step = self._trace(places, slot_values, how)
        values = [*args, *(slot_values[slot] for slot in step.read)]
        refuse_shared_memory(step.ends, values, step.written)
        new = zip(step.result_slots, step.shapes, strict=True)
        specs = [spec_of(self._holder(slot, shape)) for slot, shape in new]
        rest_specs = {
            step.count + k: spec for k, spec in enumerate(specs) if spec is not None
        }
        step.run = self._compiled(step, rest_specs)
        key = self._key(slot_values, places, how)
        self.variants.setdefault(key, []).append(step)
        return step

    def _compiled(
        self, step: TracedStep, rest_specs: Mapping[int, Spec]
    ) -> Callable[..., Any]:
        """Return the checked, compiled function of a traced step. ``rest_specs``: those
        that results must have, by position."""
        job = self.job
        if is_plain(job.options, job.ranks):
            plain = on_one_rank(step.module)
            compiled: Callable[..., Any] = compile_plain(plain, step.fakes, job.options)
            return compiled
        job = replace(job, named_inputs=step.ends, rest_specs=rest_specs, writes=True)
        return compile_graph(job, step.module, step.fakes)

    def _holder(self, slot: Slot, shape: Sequence[int]) -> Any:
        """Return the sharded parameter whose spec new state of a shape has, or None."""
        if slot.place == "group":
            return None
        p = parameters_of(self.owner.optimizer)[slot.index]
        return p if isinstance(p, DTensor) and tuple(p.shape) == tuple(shape) else None

    def _trace(
        self, places: Mapping[int, int], slot_values: Mapping[Slot, Any], how: StepCall
    ) -> TracedStep:
        """Trace the step with as many numbers as inputs as need be and can be."""
        groups = {
            s: x for s, x in slot_values.items() if s.place == "group" and is_number(x)
        }
        varying = {slot for slot in groups if slot.key == "lr"}
        varying |= {slot for slot, x in groups.items() if self.last.get(slot, x) != x}
        self.last = groups
        while True:
            added = varying - self.inputs - self.fixed
            self.inputs |= added
            try:
                step = self._traced(places, slot_values, how)
            except PlanError as error:
                if not added:
                    raise
                self.inputs -= added
                self.fixed |= added
                step = self._traced(places, slot_values, how)
                self._warn_fixed(added, error)
            varying = set(step.counted)
            if not varying:
                return step
            if varying <= self.fixed:
                raise PlanError(
                    f"{type(self.owner.optimizer).__name__} counts steps in "
                    f"{min(slot.key for slot in varying)!r} of a group, which a graph "
                    "of one step cannot",
                    fix="let it compute with tensors alone, as x ** 0.5 for "
                    "math.sqrt(x)",
                )

    def _traced(
        self, places: Mapping[int, int], slot_values: Mapping[Slot, Any], how: StepCall
    ) -> TracedStep:
        """Return the step as traced with the numbers that are inputs now."""
        numbers = {
            slot: x
            for slot, x in slot_values.items()
            if self._is_input(slot, x)
            and (slot.place == "group" or slot.index in places)
        }
        optimizer = self.owner.optimizer
        return TracedStep(self.forward, self.examples, optimizer, places, numbers, how)

    def _warn_fixed(self, fixed: set[Slot], error: PlanError) -> None:
        """Warn that numbers are constants of the compiled step."""
        names = ", ".join(sorted({slot.key for slot in fixed}))
        warn(
            f"{names} of {type(self.owner.optimizer).__name__} is a constant of the "
            f"compiled step: every new value compiles again ({error.what})",
            where=error.where,
            fix="let the optimizer compute with it as with a tensor",
        )

    def _run(
        self, step: TracedStep, args: Sequence[Any], slot_values: Mapping[Slot, Any]
    ) -> Any:
        """Run a step on this rank's parts, update the optimizer, and return the results
        of the forward."""
        how, owner = step.how, self.owner
        scales = owner.options.has_scaler
        gradients = [owner.gradients[args[i]] for i in how.accumulated]
        with torch.no_grad():
            state = [as_tensor(slot_values[slot]) for slot in step.read]
            values = [*args, *state, *gradients]
            if scales:
                scaler: Any = owner.options.scaler
                one = torch.ones((), device=args[self.forward.trained[0]].device)
                values.append(scaler.scale(one))
            parts = (x.to_local() if isinstance(x, DTensor) else x for x in values)
            results = step.run(*parts)
        if how.updates:
            owner.gradients = {}
            written = [args[i] for i in self.forward.trained]
            written += [
                x
                for slot in step.read
                if isinstance(x := slot_values[slot], torch.Tensor)
            ]
            torch.autograd.graph.increment_version(written)
            if not (scales and self._has_overflowed(results[-1])):
                self._updated(step, results, slot_values)
        return tuple(results[: step.count])

    def _has_overflowed(self, bad: torch.Tensor) -> bool:
        """Return whether the update was left out, and report it to the scaler."""
        scaler: Any = self.owner.options.scaler
        overflow = (bad > 0).float()
        _torch.dtensor.record_overflow(scaler, self.owner.optimizer, overflow)
        scaler.update()
        return bool(overflow.item())

    def _updated(
        self,
        step: TracedStep,
        results: Sequence[torch.Tensor],
        slot_values: Mapping[Slot, Any],
    ) -> None:
        """Give the optimizer the values that the step does not write in place."""
        optimizer, new_values = self.owner.optimizer, results[step.count :]
        places = set[int]()
        with torch.no_grad():
            for slot, shape, x in zip(
                step.result_slots, step.shapes, new_values, strict=False
            ):
                # Inductor leaves out copies, as two momenta of one gradient begin.
                x = x.clone() if x.data_ptr() in places else x
                places.add(x.data_ptr())
                write(optimizer, slot, self._new(slot, shape, x, slot_values.get(slot)))
            for slot, value in step.fixed.items():
                write(optimizer, slot, value)
        # Schedulers see that ``optimizer.step()`` was called, and hooks run.
        _torch.objects.after_step(optimizer)

    def _new(
        self, slot: Slot, shape: Sequence[int], x: torch.Tensor, before: Any
    ) -> Any:
        """Return a new value as the optimizer keeps it: a number, or a tensor in the
        layout of its parameter."""
        if is_number(before):
            return type(before)(x.item())
        holder = self._holder(slot, shape)
        return x if holder is None else with_part(holder, x)


def reached(forward: Forward, args: Sequence[Any]) -> set[int]:
    """Return the positions of the trained parameters that the loss depends on, found
    without computing.

    Raises PlanError if the loss is no scalar, or depends on none.
    """
    mode = _torch.fake.new_fake_mode(symbols=True)
    fakes = [fake_of(x, mode) for x in args]
    with mode, torch.enable_grad():
        for i in forward.trained:
            fakes[i].requires_grad_()
        results = _torch.traced_once.run(forward.module, forward.kinds, *fakes)
        loss = loss_of(results, forward)
    leaves = {id(leaf) for leaf in _torch.aot.leaves_under(loss, lambda _: False)}
    return {i for i in forward.trained if id(fakes[i]) in leaves}


def refuse_shared_memory(
    ends: Sequence[Input], args: Sequence[Any], written: Collection[int]
) -> None:
    """Raise PlanError if an input that a step writes shares memory with another: a
    graph takes each as a separate value, so the other would not change with it."""
    extents = [_extent(x) for x in args]
    for i in sorted(written):
        storage, first, last = extents[i] or (0, 0, -1)
        for j, (other, begin, end) in enumerate(x or (-1, 0, -1) for x in extents):
            if i == j or storage != other or first > end or begin > last:
                continue
            raise PlanError(
                f"{ends[i].name} and {ends[j].name} share memory, and the step writes "
                f"to {ends[i].name}",
                fix="keep one of them, and take the other from it in the forward, or "
                "torch.compile the model and call optimizer.step()",
            )


def _extent(x: Any) -> tuple[int, int, int] | None:
    """Return storage, first and last element's address in bytes; None if empty."""
    x = x.to_local() if isinstance(x, DTensor) else x
    if not isinstance(x, torch.Tensor) or not x.numel():
        return None
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    first = x.data_ptr()
    return x.untyped_storage().data_ptr(), first, first + reach * x.element_size()


def refuse_hooks(forward: Forward, args: Sequence[Any]) -> None:
    """Raise PlanError if a trained parameter has hooks: its gradient never leaves the
    graph. Hooks of ``fxpar.no_sync`` are allowed, as they have nothing to do here."""
    for i in forward.trained:
        before, after = _torch.objects.hooks_of(args[i])
        modules = (str(hook.__module__) for hook in (*before, *after))
        if not all(module.startswith("fxpar.") for module in modules):
            raise PlanError(
                f"parameter {forward.ends[i].name} has a hook on its gradient, which "
                "fxpar.train_step does not show",
                fix="remove the hook, or torch.compile the model and call "
                "optimizer.step()",
            )
