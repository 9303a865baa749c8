"""Gives rules to pointwise ops: every dim of the result is a factor, broadcast dims are
not.

Also to copies and casts, and to backward formulas of activations, which are linear in
the gradient.
In: calls of these ops. Out: their rules.
Never: lets a partial value through an op that is not exact for its reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.sharding.factors import LINEAR, MONOTONE, MOVEMENT, Passage, Rule
from fxpar.sharding.op_table import aligned, make, rows, tensors_of
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten


def broadcasting(shapes: Sequence[Sequence[int]], results: int = 1) -> Rule:
    """Return the rule of operands aligned from the right; a dim that is stretched gets
    no factor."""
    result, operands = aligned(shapes, "d")
    return make(operands, [result] * results)


def broadcast(*args: Any, **kwargs: Any) -> Rule:
    """Return the rule of any operands and one result."""
    return broadcasting([t.shape for t in tensors_of((args, kwargs))])


def broadcast_two(*args: Any, **kwargs: Any) -> Rule:
    """Return the rule of any operands and two results."""
    return broadcasting([t.shape for t in tensors_of((args, kwargs))], results=2)


def _passing(reductions: Callable[..., Sequence[str]], *operands: int) -> Callable:
    """Return a pointwise rule function where ``operands`` may be partial with the
    reductions that ``reductions`` returns for the call."""

    def rule_of_call(*args: Any, **kwargs: Any) -> Rule:
        passing = tuple(reductions(*args, **kwargs))
        passages = (Passage(operands, passing),) if passing else ()
        return replace(broadcast(*args, **kwargs), passages=passages)

    return rule_of_call


def _exact(source: torch.dtype, target: torch.dtype) -> Sequence[str]:
    """Return the reductions that pass through a cast.

    Integers wrap, fp8 saturates and float16 has no room for every summand, so only
    casts that keep order pass a max, and only casts between wider numbers a sum.
    """
    if source == target:
        return MOVEMENT
    if target.is_complex or source.is_complex:
        return LINEAR if target.is_complex else ()
    if target.is_floating_point:
        wide = target.itemsize > 1 and target != torch.float16 and source != torch.bool
        if source.is_floating_point and source.itemsize == 1:
            return MONOTONE
        return LINEAR + MONOTONE if wide else MONOTONE
    if target == torch.bool or source.is_floating_point:
        return ()
    signs = source.is_signed, target.is_signed
    grows = source.itemsize < target.itemsize and signs != (True, False)
    return MONOTONE if source == torch.bool or grows else ()


def _cast(x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return _exact(x.dtype, dtype or x.dtype)


def _extremum(reduction: str, x: torch.Tensor, y: torch.Tensor) -> Rule:
    """Return the rule of a maximum of two: monotone in each, and passes maxima of both
    at once."""
    each = (Passage((i,), MONOTONE) for i in range(2))
    return replace(broadcast(x, y), passages=(Passage((0, 1), (reduction,)), *each))


# Nothing passes through these while partial. Others of the kind have a tag, by which
# they need no row (``ops.row_of``).
NONLINEAR = """
    floor_divide floor_divide.Scalar _add_relu.Tensor
"""

# Of the namespace prims.
NONLINEAR_PRIMS = """
    acos acosh asin atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0
    bessel_j1 bitwise_and bitwise_or bitwise_xor cosh eq erf_inv erfc erfcx fmod gcd ge
    gt isfinite le lgamma log10 lt ndtri ne pow remainder shift_left
    shift_right_arithmetic spherical_bessel_j0 tan zeta
"""
INCREASING_PRIMS = "asinh atan cbrt ceil exp2 expm1 floor round sinh trunc"
PLAIN_PRIMS = "neg real imag conj_physical"
COPIES_PRIMS = "clone conj device_put view_of"

# Increasing on all numbers, and NaN where the operand is NaN.
INCREASING = """
    asinh atan ceil clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min
    clamp_min.Tensor exp2 expm1 floor relu round sinh trunc
"""

PLAIN = """
    neg _conj_physical _neg_view
"""

# Backward formulas whose first tensor is the gradient, in which they are linear.
GRADIENTS = """
    gelu_backward hardshrink_backward sigmoid_backward silu_backward
    softshrink_backward tanh_backward threshold_backward
"""

COPIES = """
    detach_copy lift_fresh _conj _conj_copy
"""


def _local_copy_strided(call: LocalCall, x: fx.Node, stride: Any) -> fx.Node:
    """Return a copy whose dims have the same order in memory as in the whole."""
    shape, build = call.local_shape(), call.build
    local, step = list(stride), build.product(())
    for d in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        local[d] = step
        step = build.product((step, build.compute(max, shape[d], 1)))
    return call.same(x, local)


def _with_prims(names: str, prims: str) -> str:
    """Return names of aten ops and of prims, as ``rows`` takes them."""
    return " ".join([names, *(f"prims::{name}" for name in prims.split())])


ROWS = {
    **rows(_with_prims(NONLINEAR, NONLINEAR_PRIMS), broadcast),
    **rows("cos sin prims::cos prims::sin", broadcast, work="sin"),
    **rows("gelu", broadcast, work="erf"),
    **rows("log log1p prims::log prims::log1p", broadcast, work="log"),
    **rows(
        "reciprocal rsqrt sqrt prims::reciprocal prims::rsqrt prims::sqrt",
        broadcast,
        work="root",
    ),
    **rows(_with_prims(INCREASING, INCREASING_PRIMS), broadcast, monotone="0"),
    **rows("erf prims::erf", broadcast, monotone="0", work="erf"),
    **rows("exp sigmoid prims::exp", broadcast, monotone="0", work="exp"),
    **rows("tanh prims::tanh", broadcast, monotone="0", work="tanh"),
    **rows("frexp.Tensor prims::frexp", broadcast_two),
    **rows("maximum prims::maximum", partial(_extremum, "max")),
    **rows("minimum prims::minimum", partial(_extremum, "min")),
    **rows(
        "add.Tensor sub.Tensor rsub.Tensor addcdiv lerp.Scalar lerp.Tensor complex "
        "prims::add prims::sub",
        broadcast,
        linear="0+1",
    ),
    **rows("mul.Tensor prims::mul", broadcast, linear="0|1", facts="scales"),
    **rows(
        "div.Tensor div.Scalar prims::div",
        broadcast,
        linear="0",
        work="root",
        facts="scales",
    ),
    **rows(
        "div.Tensor_mode div.Scalar_mode",
        _passing(lambda *_, rounding_mode: () if rounding_mode else LINEAR, 0),
        work="root",
        facts="scales",
    ),
    **rows(_with_prims(PLAIN, PLAIN_PRIMS), broadcast, linear="0"),
    **rows("mul.Scalar", broadcast, linear="0", facts="scales"),
    **rows(GRADIENTS, broadcast, linear="0"),
    **rows("polar", broadcast, linear="0"),
    **rows("addcmul", broadcast, linear="0+1|0+2"),
    **rows("where.self prims::where", broadcast, movement="1+2", monotone="1|2"),
    **rows(_with_prims(COPIES, COPIES_PRIMS), broadcast, movement="0"),
    **rows("alias", broadcast, movement="0", facts="keeps_order renames by_row"),
    **rows("clone", broadcast, movement="0", facts="keeps_order copies moves sinks"),
    **rows("detach", broadcast, movement="0", facts="keeps_order renames"),
    **rows("lift_fresh_copy", broadcast, movement="0", facts="keeps_order moves"),
    **rows("_lazy_clone", broadcast, movement="0", facts="moves"),
    **rows("_to_copy", _passing(_cast, 0), facts="copies casts"),
    **rows("copy", _passing(lambda x, y, *_, **__: _exact(y.dtype, x.dtype), 1)),
    **rows("prims::fma", broadcast, linear="0+2|1+2"),
    **rows(
        "prims::copy_strided",
        lambda x, stride: broadcast(x),
        movement="0",
        local=_local_copy_strided,
    ),
    **rows(
        "prims::convert_element_type",
        _passing(lambda x, dtype: _exact(x.dtype, dtype), 0),
        facts="casts",
    ),
}
