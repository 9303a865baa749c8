"""Trace forward, backward and the optimizer's own ``step`` as one graph.

In: a forward on global parameters (``dynamo_graphs``), fakes of what it is called with,
an optimizer, and what is done to gradients in between: those of earlier calls added,
the scale of the loss taken out, the update left out where one is not finite, as
``backward()`` called several times and ``torch.amp.GradScaler`` do. Out: an ATen graph
in global shapes that gives the results and writes new parameters, buffers and optimizer
state in place. Never: planning, compiling, a read of or change to a value of the
user's.

Each node says in ``meta["custom"]["fxpar_phase"]`` whether it is of the "forward", the
"backward" or the "update"; passes and code generation keep that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import parameters_of
from fxpar.errors import OptionError, PlanError
from fxpar.features.at_rest.dynamo_graphs import Forward, fake_of, spec_of
from fxpar.features.train_step.optimizer import (
    NUMBER,
    Numbers,
    Slot,
    TracedComparison,
    attributes,
    choosing,
    is_flag,
    is_number,
    refuse_changes,
    slots,
    slots_of,
    stand_in,
    step_of,
    text_of,
)
from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers its ops)
from fxpar.graph.builder import keep_meta
from fxpar.runtime.tracing import raised_at
from fxpar.sharding.program import PHASE, Input, user_line
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class GradientOptions:
    """Holds what the user asks of a step."""

    clip: float | None = None  # the largest global norm of the gradients
    accumulate: int = 1  # how many calls an update takes the mean gradient of
    # Scales the loss, where gradients may overflow.
    scaler: torch.amp.GradScaler | None = None

    def check(self) -> None:
        """Raise OptionError for values that are out of range or of a wrong type."""
        clip, calls = self.clip, self.accumulate
        if clip is not None and not (is_number(clip) and clip > 0):
            raise OptionError(
                f"clip cannot be {clip!r}", fix="give the largest norm, as clip=1.0"
            )
        if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
            raise OptionError(
                f"accumulate cannot be {calls!r}",
                fix="give the number of calls per update, as accumulate=4",
            )
        if self.scaler is not None and not isinstance(
            self.scaler, torch.amp.GradScaler
        ):
            raise OptionError(
                f"scaler cannot be {self.scaler!r}",
                fix="give a torch.amp.GradScaler",
            )

    @property
    def has_scaler(self) -> bool:
        """Return whether the loss is scaled, and an update left out if a gradient is
        not finite."""
        return self.scaler is not None and self.scaler.is_enabled()


@dataclass(frozen=True)
class StepCall:
    """Holds what a step does in addition to forward and backward."""

    options: GradientOptions  # what the user asks
    updates: bool = True  # whether this is the last call before an update
    # Positions of parameters whose gradients of earlier calls are inputs, and are
    # written unless this is the last call.
    accumulated: tuple[int, ...] = ()
    averages: bool = False  # whether gradients become means over ranks


def add_accumulated(
    forward_args: Sequence[Any], accumulated: Mapping[int, torch.Tensor], write: bool
) -> None:
    """Add gradients of earlier calls, ``accumulated`` by position of the parameter;
    ``write``: hold the sums for the next call."""
    with torch.no_grad():
        for i, before in accumulated.items():
            gradient = forward_args[i].grad
            total = before if gradient is None else before + gradient
            forward_args[i].grad = total
            if write and gradient is not None:
                before.copy_(total)


def average(
    forward_args: Sequence[Any],
    rest_specs: Mapping[int, Spec | None],
    *,
    in_parts: bool,
) -> None:
    """Make gradients means over the ranks of manual axes.

    rest_specs: by position of a trained parameter, its spec at rest, None for a plain
    tensor. in_parts: average the gradients of sharded parameters, which stay sharded;
    else those of the others.
    """
    with torch.no_grad():
        for i, at_rest in rest_specs.items():
            x = forward_args[i]
            if x.grad is not None and in_parts == (at_rest is not None):
                spec = str(at_rest or Spec.whole(x.dim()))
                x.grad = torch.ops.fxpar.mean_over_ranks(x.grad, spec)


def unscale(
    forward_args: Sequence[Any], updated: Iterable[int], scale: torch.Tensor
) -> torch.Tensor:
    """Divide all gradients by the scale, and return how many numbers in those of the
    parameters at ``updated`` are not finite: a sum, which ranks add once for all of
    them."""
    with torch.no_grad():
        inverse = scale.double().reciprocal().float()
        bad = torch.zeros((), device=scale.device)
        for i in updated:
            gradient = forward_args[i].grad
            if gradient is not None:
                bad = bad + (~torch.isfinite(gradient)).float().sum()
        for x in forward_args:
            if isinstance(x, torch.Tensor) and x.is_leaf and x.grad is not None:
                wide = torch.promote_types(x.dtype, torch.float32)
                x.grad = (x.grad.to(wide) * inverse.to(wide)).to(x.dtype)
        return bad


@contextlib.contextmanager
def unless(bad: torch.Tensor | None, written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore tensors written inside to their old values if ``bad`` is positive."""
    if bad is None:
        yield
        return
    with torch.no_grad():
        before = [
            (x, x.detach().clone(), _torch.objects.version_of(x)) for x in written
        ]
        yield
        for x, old, version in before:
            if _torch.objects.version_of(x) != version:
                x.copy_(torch.where(bad > 0, old, x))


class TracedStep:
    """Is a traced step, and what its trace learned of it.

    Its inputs: those of the forward, ``read``, gradients of earlier calls and the scale
    as ``StepCall`` says. Its results: ``count`` of the forward, new values of
    ``result_slots``, and, where the loss is scaled, a number that is positive if a
    gradient is not finite.
    """

    def __init__(
        self,
        forward: Forward,
        args: Sequence[Any],
        optimizer: torch.optim.Optimizer,
        places: Mapping[int, int],
        numbers: Mapping[Slot, Any],
        how: StepCall,
    ) -> None:
        """Trace one step.

        ``args``: of the forward. ``places``: by the position of a parameter in the
        optimizer, its position among ``args``. ``numbers``: those that become inputs,
        with their values.

        Raises PlanError naming what the optimizer does that cannot be traced.
        """
        self.forward, self.optimizer, self.places = forward, optimizer, places
        self.numbers, self.how, self.args = numbers, how, len(args)
        # The compiled step, called with this rank's parts of its inputs.
        self.run: Any = None
        self.count = 0  # results of the forward; the first is the loss
        # Slots that the step gives new values.
        self.result_slots: list[Slot] = []
        # Values that the step gives whatever its inputs are.
        self.fixed: dict[Slot, Any] = {}
        # Comparisons that the optimizer made of numbers.
        self.answers: list[TracedComparison] = []
        # Numbers that the step changes though they are no inputs, so that it holds for
        # one step only.
        self.counted: set[Slot] = set()
        # Values of the optimizer that it reads as inputs, by slot.
        read = {
            slot: x
            for slot, x in (slots(optimizer) if how.updates else ())
            if (slot.place == "group" or slot.index in places)
            and (isinstance(x, torch.Tensor) or slot in numbers)
        }
        self.read = tuple(read)
        scales = [torch.ones((), device="cpu")] * how.options.has_scaler
        extra = [*map(as_tensor, read.values()), *(args[i] for i in how.accumulated)]
        mode = _torch.fake.new_fake_mode(symbols=True)
        # Fake values of its inputs.
        self.fakes = tuple(fake_of(x, mode) for x in (*args, *extra, *scales))
        self.module = _torch.aot.trace_flat(self._step, self.fakes, mode)
        _tidy(self.module)
        keep_meta(self.module.graph)
        ends = [self._end(slot, x) for slot, x in read.items()]
        for parameter in (forward.ends[i] for i in how.accumulated):
            name = f"gradient.{parameter.name}"
            ends.append(Input(name, "buffer", parameter.at_rest))
        ends += [Input("scaler.scale", "input")] * how.options.has_scaler
        # Name, kind and layout of each input.
        self.ends = (*forward.ends, *ends)
        # Positions of inputs that it writes.
        self.written = frozenset(
            i
            for i, x in enumerate(self.fakes[: self.args + len(read)])
            if isinstance(x, torch.Tensor) and _torch.objects.version_of(x)
        )
        results = self.module.graph.output_node().args[0][self.count :]
        pairs = zip(results, self.result_slots, strict=False)
        # Global shapes of the new values.
        self.shapes = tuple(tuple(node.meta["val"].shape) for node, _ in pairs)

    def _step(self, *flat: Any) -> list[torch.Tensor]:
        """Run one step on inputs; what is learned of it is noted."""
        how, trained = self.how, self.forward.trained
        forward_args, trailing = list(flat[: self.args]), iter(flat[self.args :])
        inputs = {slot: next(trailing) for slot in self.read}
        accumulated = {i: next(trailing) for i in how.accumulated}
        scale = next(trailing, None)
        for i in trained:
            forward_args[i] = forward_args[i].detach().requires_grad_()
        calls = how.options.accumulate
        results = _differentiate(self.forward, forward_args, calls, scale)
        self.count = len(results)
        rest_specs = {i: self.forward.ends[i].at_rest for i in trained if how.averages}
        average(forward_args, rest_specs, in_parts=True)
        add_accumulated(forward_args, accumulated, write=not how.updates)
        if not how.updates:
            _stamp("update")
            return results
        average(forward_args, rest_specs, in_parts=False)  # once for all calls
        updated = self.places.values()
        bad = None if scale is None else unscale(forward_args, updated, scale)
        written = [forward_args[i] for i in updated]
        written += [x for slot, x in inputs.items() if slot not in self.numbers]
        with unless(bad, written):
            new_values = self._update(forward_args, inputs)
        _stamp("update")
        return [*results, *new_values, *([] if bad is None else [bad])]

    def _update(
        self, forward_args: Sequence[Any], inputs: Mapping[Slot, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Clip and let the optimizer step; return new values it does not write in
        place."""
        optimizer, places, numbers = self.optimizer, self.places, self.numbers
        count = len(parameters_of(optimizer))
        leaves = [
            forward_args[places[i]] if i in places else None for i in range(count)
        ]
        values = {slot: self._as_read(slot, x, leaves) for slot, x in inputs.items()}
        double, stand_ins = stand_in(optimizer, leaves, values)
        flags = {
            slot: x for slot, x in slots_of(double, stand_ins).items() if is_flag(x)
        }
        by_id = {id(values[slot]): (slot, number) for slot, number in numbers.items()}
        narrow = {
            id(x): inputs[slot]
            for slot, x in values.items()
            if slot not in numbers and x is not inputs[slot]
        }
        mode, clip = Numbers(by_id, narrow), self.how.options.clip
        # Before the step, as an object that both optimizers have is written to once.
        before, plain = attributes(optimizer), dict(slots(optimizer))
        texts = {
            slot: text_of(x)
            for slot, x in plain.items()
            if not (isinstance(x, torch.Tensor) or is_number(x) or is_flag(x))
        }
        with torch.no_grad(), _torch.aot.as_compiling():
            if clip is not None:
                trained = [forward_args[i] for i in self.forward.trained]
                torch.nn.utils.clip_grad_norm_(trained, clip, foreach=False)
            try:
                with mode, choosing(optimizer):
                    step_of(optimizer)(double)
            except Exception as error:
                raise _untraceable(optimizer, error) from error
            if attributes(double) != before:
                raise _counts(optimizer, before, attributes(double))
            self.answers = mode.answers
            self.counted |= {
                slot
                for slot, x in slots(double)
                if slot.place == "group" and is_number(x) and plain.get(slot) != x
            }
            refuse_changes(optimizer, double, stand_ins, texts)
            return self._results(slots_of(double, stand_ins), inputs, values | flags)

    def _as_read(
        self, slot: Slot, x: torch.Tensor, leaves: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return what the stand-in gets for an input.

        A number is copied, since its value before the step is compared and the one
        after it is a result. A number that state keeps in a tensor comes in the
        precision that Python computes with, as ``item()`` would give it.
        """
        if slot in self.numbers:
            return x.clone()
        if slot.place == "state" and not x.dim() and x.is_floating_point():
            holder = leaves[slot.index]
            if slot.key == "step" or (holder is not None and holder.dim()):
                return x.to(NUMBER)
        return x

    def _results(
        self,
        after: Mapping[Slot, Any],
        inputs: Mapping[Slot, torch.Tensor],
        before: Mapping[Slot, Any],
    ) -> list[torch.Tensor]:
        """Write state that is an input, and return the other values of the stand-in
        that differ from those it was given (``before``)."""
        new_values, plain = [], dict(slots(self.optimizer))
        for slot, x in after.items():
            old = before.get(slot)
            if slot in self.numbers:
                is_other = x is not old
                if is_other or _torch.objects.version_of(x) > 0:
                    self.result_slots.append(slot)
                    new_values.append(as_tensor(x).to(NUMBER))
            elif not isinstance(x, torch.Tensor):
                is_new = slot not in plain or (is_flag(x) and x is not old)
                if is_new or (slot.place == "state" and is_number(x)):
                    self.fixed[slot] = x
            elif old is None:
                self.result_slots.append(slot)
                new_values.append(x.detach())
            elif x is not inputs[slot]:
                inputs[slot].copy_(x)
        return new_values

    def _end(self, slot: Slot, x: Any) -> Input:
        """Return the input for a slot: state has its parameter's name, and its own
        spec."""
        key = slot.key if slot.item is None else f"{slot.key}.{slot.item}"
        if slot.place == "state":
            parameter = self.forward.ends[self.places[slot.index]].name
            return Input(f"optimizer.{parameter}.{key}", "buffer", spec_of(x))
        several = len(self.optimizer.param_groups) > 1
        group = f".{slot.index}" if several else ""
        return Input(f"optimizer{group}.{key}", "input")


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


def loss_of(results: Any, forward: Forward) -> torch.Tensor:
    """Return the first result. Raises PlanError if it is no scalar with a gradient."""
    loss = results[0] if results else None
    what = "what loss_fn gives first is the loss: "
    where = user_line(forward.module.graph.output_node().all_input_nodes[0])
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss)
        raise PlanError(
            f"{what}it should be a scalar, and is {shape}",
            where=where,
            fix="reduce it: loss.mean()",
        )
    if not loss.requires_grad:
        raise PlanError(
            f"{what}it depends on no parameter that requires a gradient",
            where=where,
            fix="compute it from the model's outputs, without detach or no_grad",
        )
    return loss


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
    optimizer: torch.optim.Optimizer,
    before: Mapping[str, str],
    after: Mapping[str, str],
) -> PlanError:
    """Return the error for an optimizer whose step changes one of its attributes."""
    changed = [key for key in after if after[key] != before.get(key, after)]
    return PlanError(
        f"the step of {type(optimizer).__name__} changes its attribute {changed[0]!r}, "
        "which a graph of it cannot",
        fix="keep it in the state of a parameter, or in a group",
    )
