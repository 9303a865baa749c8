"""Random programs of views, reductions, pointwise ops and products, on meta tensors.

``MixedProgram(seed)`` is called with its ``arguments``; every op is drawn anew, of the
last value or an earlier one. For what is only planned, never run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = (64, 128, 256, 512, 1024)
LARGEST = 1 << 24  # elements of a value

# A function of a value, and shapes of what else it reads.
Drawn = tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]


class MixedProgram:
    """A function of ``arguments``, drawn op by op."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.dtype = self.rng.choice(DTYPES)
        self.arguments: list[torch.Tensor] = []
        self.steps: list[tuple[Callable[..., torch.Tensor], int, list[int]]] = []
        batch = [self.rng.choice((4, 16))] * self.rng.randint(0, 1)
        values = [self._argument((*batch, self._size(), self._size()))]
        steps = self.rng.randint(3, 8)
        while len(self.steps) < steps:
            last = len(values) - 1
            i = last if self.rng.random() < 0.8 else self.rng.randint(0, last)
            if values[i].dim() < 2:
                i = 0
            draw = self.rng.choice((_view, _reduction, _pointwise, _product))
            fn, shapes = draw(self.rng, values[i])
            others = [torch.empty(s, device="meta") for s in shapes]
            if 0 < fn(values[i].float(), *others).numel() <= LARGEST:
                given = [self._argument(shape) for shape in shapes]
                places = range(len(self.arguments) - len(given), len(self.arguments))
                self.steps.append((fn, i, [*places]))
                values.append(fn(values[i], *given))

    def __call__(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [arguments[0]]
        for fn, i, places in self.steps:
            values.append(fn(values[i], *(arguments[p] for p in places)))
        read = {i for _, i, _ in self.steps}
        return tuple(x for i, x in enumerate(values) if i not in read)

    def _size(self) -> int:
        return self.rng.choice(SIZES)

    def _argument(self, shape: Sequence[int]) -> torch.Tensor:
        self.arguments.append(torch.empty(shape, dtype=self.dtype, device="meta"))
        return self.arguments[-1]


def _view(rng: random.Random, x: torch.Tensor) -> Drawn:
    d = rng.randrange(x.dim())
    forms: list[Callable[..., Any]] = [lambda x: x.transpose(-1, -2)]
    if x.shape[d] % 2 == 0:
        forms += [lambda x: x.unflatten(d, (2, -1)), lambda x: x.chunk(2, d)[1]]
    if x.dim() > 2:
        forms.append(lambda x: x.flatten(0, 1))
    return rng.choice(forms), []


def _reduction(rng: random.Random, x: torch.Tensor) -> Drawn:
    d = rng.randrange(x.dim())
    forms: list[Callable[..., Any]] = [
        lambda x: x.sum(d),
        lambda x: x.amax(d),
        lambda x: x - x.mean(d, keepdim=True),
        lambda x: x.softmax(d),
        lambda x: F.layer_norm(x, x.shape[-1:]),
    ]
    return rng.choice(forms), []


def _pointwise(rng: random.Random, x: torch.Tensor) -> Drawn:
    if rng.random() < 0.5:
        return rng.choice((torch.relu, F.gelu, torch.tanh)), []
    shape = tuple(x.shape[rng.randrange(x.dim()) :])
    return rng.choice((torch.add, torch.mul)), [shape]


def _product(rng: random.Random, x: torch.Tensor) -> Drawn:
    return torch.matmul, [(x.shape[-1], rng.choice(SIZES))]
