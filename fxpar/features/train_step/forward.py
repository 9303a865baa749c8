"""Check the forward of a training step before its trace.

In: a forward on global parameters (``dynamo_graphs``), and the values it is called
with. Out: the parameters that its loss depends on; an error for what a step as one
program would not do as separate calls do. Never: a computation on values, or a change
to a user's value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.features.at_rest.dynamo_graphs import Forward, fake_of
from fxpar.runtime.caches.program_identity import NamedInput
from fxpar.sharding.program import user_line


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
        results = _torch.traced_once.run_each(forward.module, forward.kinds, *fakes)
        loss = loss_of(results, forward)
    ids = {id(fakes[i]): i for i in forward.trained}
    positions, seen, functions = set(), set(), [loss.grad_fn]
    while functions:
        function = functions.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        positions.add(ids.get(id(getattr(function, "variable", None)), -1))
        functions += [before for before, _ in function.next_functions]
    return positions - {-1}


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


def refuse_shared_memory(
    ends: Sequence[NamedInput], args: Sequence[Any], written: Collection[int]
) -> None:
    """Raise PlanError if an input that a step writes shares memory with another: a
    graph takes each as a separate value, so the other would not change with it."""
    extents = [_extent(x) for x in args]
    for i in sorted(written):
        for j, extent in enumerate(extents):
            if i == j or not _has_overlap(extents[i], extent):
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


def _has_overlap(
    a: tuple[int, int, int] | None, b: tuple[int, int, int] | None
) -> bool:
    """Return whether two extents share memory."""
    return (
        a is not None
        and b is not None
        and a[0] == b[0]
        and a[1] <= b[2]
        and b[1] <= a[2]
    )


def refuse_hooks(forward: Forward, args: Sequence[Any]) -> None:
    """Raise PlanError if a trained parameter has hooks: its gradient never leaves the
    graph. Hooks of ``fxpar.no_sync`` are allowed, as they have nothing to do here."""
    for i in forward.trained:
        hooks = _torch.objects.gradient_hooks(args[i])
        if any(not str(hook.__module__).startswith("fxpar.") for hook in hooks):
            raise PlanError(
                f"parameter {forward.ends[i].name} has a hook on its gradient, which "
                "fxpar.train_step does not show",
                fix="remove the hook, or torch.compile the model and call "
                "optimizer.step()",
            )
