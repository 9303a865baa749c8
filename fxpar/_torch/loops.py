"""Loops of a number of steps that depends on data, as torch differentiates them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

STACKED = "higher_order::while_loop_stack_output"
# As STACKED, of a number of steps that stands in the place of the unknown one.
COUNTED = "higher_order::fxpar_counted_loop"


def stacked_loop() -> Any:
    """The op of STACKED, which torch 2.11 does not have: what each step of a loop
    gives, stacked; of no step what the loop starts from."""
    from torch._higher_order_ops.while_loop import while_loop_stack_output_op

    return while_loop_stack_output_op


@functools.cache
def counted_loop() -> Any:
    """The op of COUNTED. It takes the test, the body, what is carried, what else both
    take, and ``steps``: of fake tensors it gives so many steps, of others what
    ``stacked_loop`` gives."""
    from torch._ops import HigherOrderOperator
    from torch._subclasses.fake_tensor import FakeTensor

    class CountedLoop(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__(COUNTED.removeprefix("higher_order::"))

        def __str__(self) -> str:
            return "while_loop"  # what the user wrote

        def __call__(
            self,
            test: Any,
            body: Any,
            carried: Sequence[torch.Tensor],
            others: Sequence[Any],
            steps: int,
        ) -> tuple[torch.Tensor, ...]:
            carried, others = tuple(carried), tuple(others)
            if any(isinstance(x, FakeTensor) for x in carried):
                return tuple(x.new_empty((steps, *x.shape)) for x in carried)
            return tuple(stacked_loop()(test, body, carried, others))

    return CountedLoop()


@contextlib.contextmanager
def steps_looked_up(mode: Any) -> Iterator[None]:
    """Inside, the backward of a loop traced in ``mode`` takes a step by a number that a
    tensor holds (``select(0, i.item())``), which the user's code may not."""
    try:
        from torch._higher_order_ops.while_loop import WhileLoopAutogradOp as function
    except ImportError:  # torch 2.11
        yield
        return
    traced = function.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        before, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
        try:
            return traced(ctx, *grads)
        finally:
            mode.allow_scalar_outputs = before

    function.backward = staticmethod(backward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.backward = staticmethod(traced)  # type: ignore[method-assign]


def takes_a_step(steps: torch.Tensor) -> None:
    """Let symbols know that what ``stacked_loop`` gives has one step at least."""
    torch._check(steps.shape[0] >= 1)


def bind_symbols(node: fx.Node, mode: Any) -> None:
    """Note in a node's metadata which symbols its fake value brings in."""
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

    node.meta.pop("unbacked_bindings", None)
    bindings = compute_unbacked_bindings(mode.shape_env, node.meta["val"])
    if bindings:
        node.meta["unbacked_bindings"] = bindings
