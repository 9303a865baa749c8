"""Whole numbers that stand for floats in a collective, ordered as torch orders these.

Backends take of a NaN and a number either, by which of them comes first; torch gives
NaN. Here NaN is beyond all others: the bits of a float, those below the sign turned
round where it is negative, are ordered as the floats are.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.graph.builder import Builder

aten = torch.ops.aten

# Whole numbers as wide as a float, that backends reduce.
_WIDE = {torch.float32: torch.int32, torch.float64: torch.int64}
KEYS = frozenset(_WIDE.values())


def dtype_of_keys(dtype: torch.dtype) -> torch.dtype:
    """Of what stands for floats of this dtype."""
    return _WIDE.get(dtype, torch.int32)


def keys_of(build: Builder, x: fx.Node, op: str) -> fx.Node:
    """What stands for ``x`` in a reduction by max or min."""
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
    """The numbers of this dtype that keys stand for."""
    wide = _float_of(keys.meta["val"].dtype)
    return build.cast(build.call(aten.view.dtype, _turned(build, keys), wide), dtype)


def _float_of(keys: torch.dtype) -> torch.dtype:
    return next(wide for wide, whole in _WIDE.items() if whole == keys)


def _turned(build: Builder, bits: fx.Node) -> fx.Node:
    """Bits of negative numbers in the other order; of what that gives, as before."""
    below_sign = torch.iinfo(bits.meta["val"].dtype).max
    turned = build.call(aten.bitwise_xor.Scalar, bits, below_sign)
    is_negative = build.call(aten.lt.Scalar, bits, 0)
    return build.call(aten.where.self, is_negative, turned, bits)
