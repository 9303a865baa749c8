"""Steps of optimizers: what ranks must have alike before they take one.

Each rank takes its step by itself. So in local mode gradients are compared when a
parameter first has one, those of code that was not compiled too; learning rates at
every step; and a closure of an optimizer that needs one (LBFGS, which searches along a
line) returns the mean of the ranks' losses, as gradients are the mean of theirs. Of
parameters in parts, which no two ranks hold alike, rates are compared in any mode.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fxpar import _torch
from fxpar.runtime.at_rest.homes import holds_parts
from fxpar.runtime.ranks import gradient_sketches, reduce_gradients
from fxpar.runtime.ranks.gradient_sketches import parameters

Trained = Callable[[], Mapping[int, str]]


@dataclass(eq=False)
class _CheckedParameters:
    """What was checked of an optimizer."""

    # Whether each rank holds a part of some that it trains.
    in_parts: bool
    # Ids of those that had a gradient.
    parameters: set[int] = field(default_factory=set)
    # Whether ranks compared them before its first step; so it trains shared ones.
    compared: bool = False


_checked: weakref.WeakKeyDictionary[Optimizer, _CheckedParameters] = (
    weakref.WeakKeyDictionary()
)


@functools.cache
def check_steps(trained: Trained) -> None:
    """From now on, check steps of optimizers. ``trained``: names of the parameters that
    compiled code in local mode trains, by id."""
    hook = functools.partial(_before_step, trained)
    register_optimizer_step_pre_hook(_torch.dynamo.not_compiled(hook))


def _before_step(
    trained: Trained,
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Raises GradientError before the first step of an optimizer of the model. Other
    ranks need not take other steps: what they have not alike is told at the next call.
    Gradients that a closure completes are checked behind it.
    """
    if any(map(callable, (*args, *kwargs.values()))):
        wrapped = functools.partial(_closure, trained, optimizer)
        args = tuple(wrapped(x) if callable(x) else x for x in args)
        kwargs = {k: wrapped(x) if callable(x) else x for k, x in kwargs.items()}
    elif reduce_gradients.takes_part():
        _check_gradients(trained, optimizer)
    return args, kwargs


def _reads_loss(kind: type[Optimizer]) -> bool:
    """Whether steps of optimizers of this class need a closure."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _closure(
    trained: Trained, optimizer: Optimizer, closure: Callable[[], Any]
) -> Callable[[], Any]:
    """A closure whose gradients are checked. Where the step needs its loss, that is the
    mean over the ranks, if the optimizer trains what they share: by its own loss each
    would take another step."""

    @functools.wraps(closure)
    def checked() -> Any:
        loss = closure()
        if not reduce_gradients.takes_part():
            return loss
        _check_gradients(trained, optimizer)
        names = trained()
        shares = any(id(p) in names for p in parameters(optimizer))
        if not shares or not _reads_loss(type(optimizer)):
            return loss
        return reduce_gradients.mean_loss(loss)

    return checked


def _check_gradients(trained: Trained, optimizer: Optimizer) -> None:
    trained_here = parameters(optimizer)
    checked = _checked.get(optimizer)
    if checked is None:
        checked = _checked[optimizer] = _CheckedParameters(holds_parts(optimizer))
    unchecked = {
        id(p)
        for p in trained_here
        if p.grad is not None and id(p) not in checked.parameters
    }
    gradients: dict[str, torch.Tensor] = {}
    if unchecked:
        names = trained()
        if not names and not checked.in_parts:
            return
        checked.parameters |= unchecked
        by_name = _by_name(optimizer, trained_here, names)
        if not checked.compared and not unchecked.isdisjoint(names):
            checked.compared = True
            reduce_gradients.require_equal(by_name)
        elif names:
            gradients = reduce_gradients.unreduced(by_name, unchecked)
    is_shared = checked.compared or checked.in_parts
    gradient_sketches.note(optimizer, gradients, is_shared=is_shared)


def _by_name(
    optimizer: Optimizer,
    trained_here: Sequence[torch.Tensor],
    names: Mapping[int, str],
) -> dict[str, torch.Tensor]:
    """Parameters of an optimizer by name; not those in shards."""
    kind = type(optimizer).__name__
    return {
        names.get(id(p)) or f"number {i} of the {kind}": p
        for i, p in enumerate(trained_here)
        if not isinstance(p, DTensor)
    }
