"""Random regions: functions of a few tensors, of ops that kernels know."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.kernels.samples import SHAPES, make

Values = list[torch.Tensor]

# Each stays near one, so that errors do not grow.
_ONE: list[Callable[[Any], Any]] = [
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.relu,
    torch.erf,
    torch.neg,
    torch.nn.functional.gelu,
    torch.nn.functional.silu,
    lambda x: (x.abs() + 0.5).rsqrt(),
    lambda x: (x.abs() + 0.5).log(),
    lambda x: (-x.abs()).exp(),
    lambda x: x.clamp(-0.7, 0.8),
    lambda x: torch.where(x > 0.1, x, 0.5),
    lambda x: x / (1 + x.abs()),
]
_TWO: list[Callable[[Any, Any], Any]] = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.minimum,
    lambda a, b: torch.lerp(a.expand(b.shape), b, 0.3) if a.dim() else a + b,
    lambda a, b: torch.where(a < b, a, b),
    lambda a, b: torch.where((a > 0) & (b < 0.5), a, b),
    lambda a, b: torch.where((a > 0.1) | (b < 0), a, b),
    lambda a, b: torch.where((a > 0.1) ^ (b < 0), b, 0.5),
]
_ROWS: list[Callable[[Any], Any]] = [
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.sum(-1, keepdim=True) / x.shape[-1],
    lambda x: x.amax(-1, keepdim=True),
    lambda x: x.var(-1, keepdim=True, correction=0),
    lambda x: x.softmax(-1),
]
_VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x.reshape(-1, x.shape[-1]).reshape(x.shape),
    lambda x: torch.cat((x[..., 12:], x[..., :12]), -1),
    lambda x: torch.nn.functional.pad(x[..., 2:-1], (1, 2)),
    lambda x: x.flip(0) if x.dim() < 0 else x.transpose(0, 1).transpose(0, 1),
]
_NAMES = ("x", "y", "row", "col", "number", "positive")


def region(seed: int) -> tuple[Callable[..., Any], Values]:
    """A function, the same whenever it is called, and its arguments."""
    draw = random.Random(seed)
    count = draw.randint(2, len(_NAMES))
    names = ["x", *draw.sample(_NAMES[1:], count - 1)]
    by_rows, columns = draw.random() < 0.6, draw.random() < 0.3

    def fn(*given: torch.Tensor) -> Any:
        again = random.Random(seed + 1)
        values = [*given]
        full = SHAPES["x"]
        for _ in range(again.randint(3, 14)):
            kind = again.random()
            whole = [v for v in values if v.shape == full]
            if kind < 0.4:
                made = again.choice(_ONE)(again.choice(values))
            elif kind < 0.8:
                made = again.choice(_TWO)(again.choice(values), again.choice(whole))
            elif kind < 0.92 and by_rows:
                made = again.choice(_ROWS)(again.choice(whole))
            else:
                made = again.choice(_VIEWS)(again.choice(whole))
            values.append(made)
        made = [v for v in values[len(given) :] if v.shape == full]
        results = made[-1:] or [values[0] + 1]
        results += again.sample(made[:-1], min(len(made) - 1, 1)) if made else []
        if columns:
            results.append(results[0].sum((0, 1)))
        return tuple(results)

    return fn, [make(name) for name in names]
