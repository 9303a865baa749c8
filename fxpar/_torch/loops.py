"""Traces ops of higher order: rewrites their calls, gives loops a number of steps that
depends on data, and replaces ops in their bodies.

In: calls of such ops while a graph is traced. Out: calls or values in their place.
Never: a call rewritten outside of the contexts below.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from fxpar._torch.masked_writes import masks_as_choices

STACKED = "higher_order::while_loop_stack_output"
# Like STACKED, with a given number of steps in place of the unknown one.
COUNTED = "higher_order::fxpar_counted_loop"


def stacked_loop() -> Any:
    """Return the op of STACKED: it stacks the results of each step of a loop; of no
    step what the loop starts from."""
    from torch._higher_order_ops.while_loop import while_loop_stack_output_op

    return while_loop_stack_output_op


@functools.cache
def counted_loop() -> Any:
    """Return the op of COUNTED. It takes the test, the body, the carried values, what
    else both take, and ``steps``: for fake tensors it gives so many steps, for others
    what ``stacked_loop`` gives."""
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
    """Let the backward of a loop traced in ``mode`` take a step by a number in a tensor
    (``select(0, i.item())``) inside, which the user's code may not."""
    from torch._higher_order_ops.while_loop import WhileLoopAutogradOp as function

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


# (an op's name, arguments of its call) -> (arguments to trace instead, how many of its
# last results are not the user's).
Rewrite = Callable[[str, tuple[Any, ...]], tuple[tuple[Any, ...], int]]

_REWRITES: dict[str, Rewrite] = {}  # by op


def rewrite_calls(names: Sequence[str], rewrite: Rewrite) -> None:
    """Let calls of these ops be rewritten where they are traced, before they are
    differentiated."""
    _REWRITES.update(dict.fromkeys(names, rewrite))


@contextlib.contextmanager
def calls_rewritten() -> Iterator[None]:
    """Rewrite calls that are traced inside by ``rewrite_calls``: before they are
    differentiated, and in inference mode, where they are not, before they are made
    functional. Writes to masked places are rewritten too (``masked_writes``)."""
    from torch._C import DispatchKey
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    with masks_as_choices(), contextlib.ExitStack() as stack:
        for op in [getattr(torch.ops.higher_order, name) for name in _REWRITES]:
            autograd = op.py_kernels[DispatchKey.Autograd]
            functional = op.python_key_table[FunctionalTensorMode]
            kernels = {DispatchKey.Autograd: functools.partial(_traced, op, autograd)}
            modes = {
                FunctionalTensorMode: functools.partial(_functional, op, functional)
            }
            stack.callback(op._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(op.py_kernels, kernels))
            stack.enter_context(mock.patch.dict(op.python_key_table, modes))
            op._dispatch_cache.clear()
        yield


def _functional(
    op: Any, kernel: Callable[..., Any], mode: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``_traced`` with the kernel that a mode has."""
    return _traced(op, functools.partial(kernel, mode), *args, **kwargs)


def _traced(op: Any, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an op by one of its kernels, rewritten if it is traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is None:  # its values are asked for, not its graph
        return kernel(*args, **kwargs)
    return _rewritten(op, kernel, *args, **kwargs)


def _rewritten(op: Any, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, own = _REWRITES[op.name()](op.name(), args)
    results = kernel(*args, **kwargs)
    return results[: len(results) - own] if own else results


def run_body(body: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Return the results of a body, its nodes with the user's lines where it is
    traced."""
    from torch._higher_order_ops.utils import _maybe_run_with_interpreter

    return _maybe_run_with_interpreter(body)(*inputs)


def evaluate_body(body: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Return the results of a body on fake tensors; nothing is traced meanwhile."""
    from torch._dispatch.python import suspend_functionalization
    from torch._guards import detect_fake_mode
    from torch._higher_order_ops.utils import _from_fun
    from torch._subclasses.functional_tensor import disable_functional_mode
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.no_grad(), suspend_functionalization(), disable_functional_mode():
        with disable_proxy_modes_tracing():
            plain = [_from_fun(x) for x in inputs]
        mode = detect_fake_mode(plain)
        symbols = None if mode is None else mode.shape_env
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            if mode is not None:
                stack.enter_context(mode)
            if symbols is not None:
                stack.enter_context(symbols.ignore_fresh_unbacked_symbols())
            return body(*plain)


_REPLACING: list[Any] = []  # modes, the innermost last


@contextlib.contextmanager
def ops_replaced(
    replace: Callable[..., Any], calls: Callable[[str, tuple[Any, ...]], None]
) -> Iterator[None]:
    """Replace, inside and below autograd, a call of an op by
    ``replace(op, args, kwargs)``, unless that is NotImplemented; inside ``replace``
    too. Calls of higher order are rewritten where they are traced; ``calls`` gets the
    others. Only the innermost such context counts."""
    from torch._ops import HigherOrderOperator
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Replace(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if _REPLACING[-1] is not self:
                return op(*args, **kwargs)
            if isinstance(op, HigherOrderOperator):
                if op.name() in _REWRITES and get_proxy_mode() is not None:
                    return _rewritten(op, op, *args, **kwargs)
                calls(op.name(), args)
                return op(*args, **kwargs)
            with self:
                result = replace(op, args, kwargs)
            return op(*args, **kwargs) if result is NotImplemented else result

    _REPLACING.append(Replace())
    try:
        with _REPLACING[-1]:
            yield
    finally:
        _REPLACING.pop()


def takes_a_step(steps: torch.Tensor) -> None:
    """Let symbols know that the results of ``stacked_loop`` have at least one step."""
    torch._check(steps.shape[0] >= 1)


def bind_symbols(node: fx.Node, mode: Any) -> None:
    """Note in a node's metadata which new symbols its fake value has."""
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

    node.meta.pop("unbacked_bindings", None)
    bindings = compute_unbacked_bindings(mode.shape_env, node.meta["val"])
    if bindings:
        node.meta["unbacked_bindings"] = bindings
