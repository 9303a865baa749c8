"""Encodes floats as integers (keys) with the same order, for a max or min over ranks.

Of a NaN and a number, backends return either one, depending on which comes first; torch
returns NaN. A key is the bits of a float, those below the sign inverted where it is
negative, so that keys are ordered as the floats are; NaN has the most extreme key.

In: a node, and the reduction. Out: the node of its keys, or of the numbers of keys.
Never adds a collective.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.graph.builder import Builder

aten = torch.ops.aten

# Float -> the integer dtype of the same width, which backends reduce.
_WIDE = {torch.float32: torch.int32, torch.float64: torch.int64}
KEYS = frozenset(_WIDE.values())


def dtype_of_keys(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the keys for floats of this dtype."""
    return _WIDE.get(dtype, torch.int32)


def keys_of(build: Builder, x: fx.Node, op: str) -> fx.Node:
    """Return the keys of ``x`` for a reduction by max or min."""
    keys = dtype_of_keys(x.meta["val"].dtype)
    limits = torch.iinfo(keys)
    x = build.cast(x, _float_of(keys))
    key = _turned(build, build.call(aten.view.dtype, x, keys))
    beyond = limits.max if op == "max" else limits.min
    device = x.meta["val"].device
    nan = build.call(aten.full.default, [], beyond, dtype=keys, device=device)
    is_nan = build.call(aten.isnan.default, x)
    return build.call(aten.where.self, is_nan, nan, key)


def numbers_of(build: Builder, keys: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the numbers that keys encode, in this dtype."""
    wide = _float_of(keys.meta["val"].dtype)
    return build.cast(build.call(aten.view.dtype, _turned(build, keys), wide), dtype)


def _float_of(keys: torch.dtype) -> torch.dtype:
    return next(wide for wide, whole in _WIDE.items() if whole == keys)


def _turned(build: Builder, bits: fx.Node) -> fx.Node:
    """Return the bits with those below the sign inverted in negative numbers; the
    function is its own inverse."""
    below_sign = torch.iinfo(bits.meta["val"].dtype).max
    turned = build.call(aten.bitwise_xor.Scalar, bits, below_sign)
    is_negative = build.call(aten.lt.Scalar, bits, 0)
    return build.call(aten.where.self, is_negative, turned, bits)
