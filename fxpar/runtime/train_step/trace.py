"""Trace forward, backward and the optimizer's own ``step`` as one graph.

In: a forward (``forward``), fakes of what it is called with, an optimizer. Out: an ATen
graph in global shapes that gives the results and writes new parameters, buffers and
optimizer state in place. Never: planning, compiling, a read of or change to a value of
the user's.

Each node says in ``meta["custom"]["fxpar_phase"]`` whether it is of the "forward", the
"backward" or the "update"; passes and code generation keep that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.runtime.tracing import raised_at
from fxpar.runtime.train_step.forward import (
    Forward,
    StepInput,
    fake_of,
    loss_of,
    spec_of,
)
from fxpar.runtime.train_step.gradients import (
    StepCall,
    add_accumulated,
    average,
    unless,
    unscale,
)
from fxpar.runtime.train_step.optimizer import (
    NUMBER,
    Numbers,
    Slot,
    TracedComparison,
    TracedState,
    choosing,
    is_number,
    refuse_changes,
    slots,
    slots_of,
    stand_in,
    step_of,
)
from fxpar.runtime.train_step.unseen_values import attributes, is_flag
from fxpar.sharding.program import PHASE, phase_of

# Keys in ``meta["custom"]`` of a node: the number that autograd gave it, and whether it
# is an op of the forward inside a checkpointed region.
_NUMBER, _CHECKPOINTED = "fxpar_number", "fxpar_checkpointed"


@dataclass(frozen=True)
class TracedStep:
    """Is a traced step."""

    # Its inputs: those of the forward, ``read``, gradients of earlier calls and the
    # scale as ``StepCall`` says. Its results: ``count`` of the forward, new values of
    # ``result_slots``, and, where the loss is scaled, a number that is positive if a
    # gradient is not finite.
    module: fx.GraphModule
    # Slots of the optimizer that it reads.
    read: tuple[Slot, ...]
    # Name, kind and layout of each input.
    ends: tuple[StepInput, ...]
    # Fake values of its inputs.
    fakes: tuple[Any, ...]
    # Positions of inputs that it writes.
    written: frozenset[int]
    # Number of results of the forward; the first is the loss.
    count: int
    # Slots that it gives new values.
    result_slots: tuple[Slot, ...]
    # Global shapes of those values.
    shapes: tuple[tuple[int, ...], ...]
    # Comparisons that the optimizer made of numbers.
    answers: tuple[TracedComparison, ...]
    # Values that a step gives whatever its inputs are.
    fixed: Mapping[Slot, Any]
    # Numbers that a step changes though they are no inputs, so that it holds for one
    # step only.
    counted: frozenset[Slot]


@dataclass
class _Findings:
    """Collects results of the trace of a step, as ``TracedStep`` holds them."""

    # Results of the forward.
    count: int = 0
    # Slots that the step gives new values.
    result_slots: list[Slot] = field(default_factory=list)
    # Values that the step gives whatever its inputs are.
    fixed: dict[Slot, Any] = field(default_factory=dict)
    # Comparisons that the optimizer made of numbers.
    answers: list[TracedComparison] = field(default_factory=list)
    # Numbers that the step changes though they are no inputs.
    counted: set[Slot] = field(default_factory=set)


def trace(
    forward: Forward,
    args: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    places: Mapping[int, int],
    numbers: Mapping[Slot, Any],
    how: StepCall,
) -> TracedStep:
    """Trace one step.

    ``args``: of the forward. ``places``: by the position of a parameter in the
    optimizer, its position among ``args``. ``numbers``: those that become inputs, with
    their values.

    Raises PlanError naming what the optimizer does that cannot be traced.
    """
    mode, findings = _torch.fake.new_fake_mode(symbols=True), _Findings()
    read = _read(optimizer, places, numbers) if how.updates else {}
    scales = [torch.ones((), device="cpu")] * how.scaled
    extra_inputs = [*(args[i] for i in how.accumulated), *scales]
    fakes = [
        fake_of(x, mode) for x in (*args, *map(as_tensor, read.values()), *extra_inputs)
    ]

    def step(*flat: Any) -> list[torch.Tensor]:
        forward_args, trailing = list(flat[: len(args)]), iter(flat[len(args) :])
        values = {slot: next(trailing) for slot in read}
        accumulated = {i: next(trailing) for i in how.accumulated}
        scale = next(trailing, None)
        for i in forward.trained:
            forward_args[i] = forward_args[i].detach().requires_grad_()
        results = _differentiate(forward, forward_args, how.calls, scale)
        findings.count = len(results)
        rest_specs = {
            i: forward.ends[i].at_rest for i in forward.trained if how.averages
        }
        average(forward_args, rest_specs, in_parts=True)
        add_accumulated(forward_args, accumulated, write=not how.updates)
        if not how.updates:
            _stamp("update")
            return results
        average(forward_args, rest_specs, in_parts=False)  # once for all calls
        bad = None if scale is None else unscale(forward_args, places.values(), scale)
        written = [forward_args[i] for i in places.values()]
        written += [x for slot, x in values.items() if slot not in numbers]
        with unless(bad, written):
            new_values = _update(
                forward,
                forward_args,
                optimizer,
                places,
                values,
                numbers,
                how.clip,
                findings,
            )
        _stamp("update")
        return [*results, *new_values, *([] if bad is None else [bad])]

    module = _torch.aot.trace_flat(step, fakes, mode)
    _tidy(module)
    _keep_meta(module)
    results = module.graph.output_node().args[0][findings.count :][
        : len(findings.result_slots)
    ]
    ends = [_end(slot, x, forward, places, optimizer) for slot, x in read.items()]
    ends += [_gradient_end(forward.ends[i]) for i in how.accumulated]
    ends += [StepInput("scaler.scale", "input")] * how.scaled
    return TracedStep(
        module,
        tuple(read),
        (*forward.ends, *ends),
        tuple(fakes),
        frozenset(
            i
            for i, x in enumerate(fakes[: len(args) + len(read)])
            if isinstance(x, torch.Tensor) and _torch.objects.version_of(x)
        ),
        findings.count,
        tuple(findings.result_slots),
        tuple(tuple(node.meta["val"].shape) for node in results),
        tuple(findings.answers),
        findings.fixed,
        frozenset(findings.counted),
    )


def _read(
    optimizer: torch.optim.Optimizer,
    places: Mapping[int, int],
    numbers: Mapping[Slot, Any],
) -> dict[Slot, Any]:
    """Return the values that the optimizer's step reads as inputs, by slot."""
    return {
        slot: x
        for slot, x in slots(optimizer)
        if (slot.place == "group" or slot.index in places)
        and (isinstance(x, torch.Tensor) or slot in numbers)
    }


def as_tensor(x: Any) -> torch.Tensor:
    """Return a tensor as it is, a number as a tensor."""
    if isinstance(x, torch.Tensor):
        return x
    return torch.tensor(x, dtype=NUMBER, device="cpu")


def _tidy(module: fx.GraphModule) -> None:
    """Replace detached values by the values, as nothing is differentiated any more.
    (Detach is an alias for torch 2.15.)"""
    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def _keep_meta(module: fx.GraphModule) -> None:
    """Keep what must not be overwritten when the graph is traced again, without
    autograd: the numbers that autograd gives ops, and which ops of the forward are in
    checkpointed regions. AOTAutograd (2.13) would compute these again itself, before
    anything is planned, and refuses random ops."""
    for node in module.graph.nodes:
        custom = node.meta.get("custom") or {}
        if "seq_nr" in node.meta:
            custom = custom | {_NUMBER: node.meta["seq_nr"]}
        if node.meta.pop("recompute", None) and phase_of(node) == "forward":
            custom = custom | {_CHECKPOINTED: True}
        node.meta["custom"] = custom


def restore_meta(graph: fx.Graph) -> None:
    """Give nodes of a step the numbers that autograd gave them, by which a backward op
    is known to differentiate a forward one, and the tags of checkpointed regions. In
    place."""
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if _NUMBER in custom:
            node.meta["seq_nr"] = custom[_NUMBER]
        if _CHECKPOINTED in custom:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _stamp(phase: str) -> None:
    """Mark the nodes traced since the last call with their phase."""
    for node in reversed(_torch.aot.nodes_being_traced()):
        custom = node.meta.get("custom") or {}
        if PHASE in custom:
            break
        node.meta["custom"] = custom | {PHASE: phase}
        if phase != "forward":
            node.meta["partitioner_tag"] = "is_backward"


def _differentiate(
    forward: Forward,
    forward_args: Sequence[Any],
    calls: int,
    scale: torch.Tensor | None,
) -> list[Any]:
    """Run forward and backward; gradients are left in ``grad`` of the parameters: those
    of the loss divided by ``calls``, times ``scale``."""
    with torch.enable_grad():
        run = _torch.traced_once.run
        results = list(run(forward.module, forward.kinds, *forward_args))
        loss = loss_of(results, forward)
        _stamp("forward")
        _torch.traced_once.keep_lines([loss])
        leaves = [forward_args[i] for i in forward.trained]
        if calls > 1:
            loss = loss / calls
        if scale is not None:
            loss = loss * scale
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    _stamp("backward")
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in results]


def _update(
    forward: Forward,
    forward_args: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    places: Mapping[int, int],
    inputs: Mapping[Slot, torch.Tensor],
    numbers: Mapping[Slot, Any],
    clip: float | None,
    findings: _Findings,
) -> list[torch.Tensor]:
    """Clip and let the optimizer step; return new values it does not write in place."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    leaves = [forward_args[places[i]] if i in places else None for i in range(count)]
    values = {slot: _as_read(slot, x, numbers, leaves) for slot, x in inputs.items()}
    double, stand_ins = stand_in(optimizer, TracedState(leaves, values))
    flags = {slot: x for slot, x in slots_of(double, stand_ins).items() if is_flag(x)}
    by_id = {id(values[slot]): (slot, number) for slot, number in numbers.items()}
    narrow = {
        id(x): inputs[slot]
        for slot, x in values.items()
        if slot not in numbers and x is not inputs[slot]
    }
    mode = Numbers(by_id, narrow)
    with torch.no_grad(), _torch.aot.as_compiling():
        if clip is not None:
            trained = [forward_args[i] for i in forward.trained]
            torch.nn.utils.clip_grad_norm_(trained, clip, foreach=False)
        try:
            with mode, choosing(optimizer):
                step_of(optimizer)(double)
        except Exception as error:
            raise _untraceable(optimizer, error) from error
        if attributes(double) != attributes(optimizer):
            raise _counts(optimizer, double)
        findings.answers = mode.answers
        plain = dict(slots(optimizer))
        for slot, x in slots(double):
            if slot.place == "group" and is_number(x) and plain.get(slot) != x:
                findings.counted.add(slot)
        refuse_changes(optimizer, double, stand_ins)
        return _results(double, stand_ins, inputs, values | flags, numbers, findings)


def _as_read(
    slot: Slot,
    x: torch.Tensor,
    numbers: Mapping[Slot, Any],
    leaves: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Return what the stand-in gets for an input.

    A number is copied, since its value before the step is compared and the one after it
    is a result. A number that state keeps in a tensor comes in the precision that
    Python computes with, as ``item()`` would give it.
    """
    if slot in numbers:
        return x.clone()
    if slot.place == "state" and not x.dim() and x.is_floating_point():
        holder = leaves[slot.index]
        if slot.key == "step" or (holder is not None and holder.dim()):
            return x.to(NUMBER)
    return x


def _results(
    double: torch.optim.Optimizer,
    stand_ins: Mapping[int, torch.Tensor],
    inputs: Mapping[Slot, torch.Tensor],
    values: Mapping[Slot, Any],
    numbers: Mapping[Slot, Any],
    findings: _Findings,
) -> list[torch.Tensor]:
    """Write state that is an input, and return the other values of the stand-in that
    differ from those it was given (``values``)."""
    new_values = []
    for slot, x in slots_of(double, stand_ins).items():
        before = values.get(slot)
        if slot in numbers:
            if _is_changed(x, before):
                findings.result_slots.append(slot)
                new_values.append(as_tensor(x).to(NUMBER))
        elif not isinstance(x, torch.Tensor):
            is_new_flag = is_flag(x) and (slot not in values or x is not before)
            if is_new_flag or (slot.place == "state" and is_number(x)):
                findings.fixed[slot] = x
        elif before is None:
            findings.result_slots.append(slot)
            new_values.append(x.detach())
        elif x is not inputs[slot]:
            inputs[slot].copy_(x)
    return new_values


def _is_changed(x: Any, before: Any) -> bool:
    """Return whether a number was replaced or written to."""
    return x is not before or _torch.objects.version_of(x) > 0


def _end(
    slot: Slot,
    x: Any,
    forward: Forward,
    places: Mapping[int, int],
    optimizer: torch.optim.Optimizer,
) -> StepInput:
    """Return the input for a slot: state has its parameter's name, and its own spec."""
    key = slot.key if slot.item is None else f"{slot.key}.{slot.item}"
    if slot.place == "state":
        name = f"optimizer.{forward.ends[places[slot.index]].name}.{key}"
        return StepInput(name, "buffer", spec_of(x))
    group = f".{slot.index}" if len(optimizer.param_groups) > 1 else ""
    return StepInput(f"optimizer{group}.{key}", "input")


def _gradient_end(parameter: StepInput) -> StepInput:
    """Return the input for a gradient of earlier calls, split like its parameter."""
    return StepInput(f"gradient.{parameter.name}", "buffer", parameter.at_rest)


def _untraceable(optimizer: torch.optim.Optimizer, error: Exception) -> PlanError:
    """Return the error for an optimizer whose step cannot be traced."""
    kind = type(optimizer).__name__
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "_local_scalar_dense" in reason:
        reason = "it reads the value of a tensor"
    return PlanError(
        f"the step of {kind} cannot be traced: {reason}",
        where=raised_at(error),
        fix="let it compute with tensors alone (x ** 0.5 for math.sqrt(x), no "
        "float(), no branch on a value), or torch.compile the model and call "
        "optimizer.step()",
    )


def _counts(
    optimizer: torch.optim.Optimizer, double: torch.optim.Optimizer
) -> PlanError:
    """Return the error for an optimizer whose step changes one of its attributes."""
    before, after = attributes(optimizer), attributes(double)
    changed = [key for key in after if after[key] != before.get(key, after)]
    return PlanError(
        f"the step of {type(optimizer).__name__} changes its attribute {changed[0]!r}, "
        "which a graph of it cannot",
        fix="keep it in the state of a parameter, or in a group",
    )
