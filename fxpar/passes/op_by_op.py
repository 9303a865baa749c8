"""Replaces ops that torch runs in compiled code only, where ops run one by one.

In: the target of a call, and the dtype that it names. Out: the function to call in its
place, with the same arguments and the same results; for most ops the target itself.
Never changes a graph.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpar import _torch

_IOTA = torch.ops.prims.iota.default

# torch makes an identity matrix of the smallest dtype that counts its rows; on CPU it
# (2.13) has no iota in these dtypes.
_WIDE = (torch.uint16, torch.uint32, torch.uint64)


def op_by_op(target: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the function to call for an op."""
    if target is _IOTA and dtype in _WIDE:
        return count
    if _torch.aot.higher_order_name(target) == "higher_order::flex_attention_backward":

        def run(*args: Any) -> Any:
            return _with_gradients(target, *args)

        return run
    return target


def count(length: int, *, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """Return ``length`` evenly spaced integers, as ``prims.iota``, in any dtype."""
    return _IOTA(length, dtype=torch.int64, **options).to(dtype)


def _with_gradients(target: Any, *args: Any) -> Any:
    """Run the backward of flex_attention, which (torch 2.13) computes gradients of
    captured tensors only if they require gradients when it runs."""
    joint, captured = args[8], args[12] if len(args) > 12 else ()
    (results,) = joint.graph.output_node().args
    operands = [
        x if grad is None else x.detach().requires_grad_()
        for x, grad in zip(captured, results[5:], strict=True)
    ]
    with torch.no_grad():
        return target(*args[:12], tuple(operands), *args[13:])
