"""Visits of ops of one kind that are known, and those made by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxpar
from fxpar.sharding.propagate.propagation import Propagation

MESH = "dp=2,tp=2"


def attention(x: Tensor, w: Tensor) -> Tensor:
    """Heads are views of a product, and so is what is made of them."""
    heads = (x @ w).view(*x.shape[:2], 4, -1).transpose(1, 2)
    weights = torch.softmax(heads @ heads.mT * 0.5, -1)
    return x + (weights @ heads).transpose(1, 2).reshape(x.shape)


def zeros(x: Tensor, w: Tensor) -> Tensor:
    return x * 0.0 + x * -0.0 + x * 0 + x @ w


def twice(x: Tensor, w: Tensor) -> Tensor:
    """Values that are read twice, and others like them that are not."""
    y = x @ w
    return torch.relu(y * y + y * x + x * x)


def shown(x: Tensor, w: Tensor) -> Tensor:
    """What is shown in another shape is read with itself, and with another."""
    flat, other = x.view(-1, x.shape[-1]), (x * 2).view(-1, x.shape[-1])
    own = flat.view(x.shape) * x + other.view(x.shape) * x
    return (own + x[:, :1]).mean(1, keepdim=True) + x @ w


LAYERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    layer.__name__: layer for layer in (attention, zeros, twice, shown)
}


def planned(layer: Callable[[Tensor, Tensor], Tensor], count: int) -> Any:
    def program(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = layer(x, w)
        return x.sum()

    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(count)]
    x = torch.randn(8, 6, 16)
    return fxpar.plan(program, x, *weights, mesh=MESH, mode="propagate", grad=True)


@pytest.mark.parametrize("name", LAYERS)
def test_known_visits_leave_the_state_that_visits_leave(name: str) -> None:
    states: list[Any] = []

    def seed(self: Propagation, seeds: Any) -> None:
        original(self, seeds)
        state = self.state
        states.append((state.dims, state.origins, state.indivisible))

    original = Propagation.seed
    with mock.patch.object(Propagation, "seed", seed):
        planned(LAYERS[name], 3)
        known, states = states, []
        with mock.patch.object(Propagation, "_visit", Propagation._apply):
            planned(LAYERS[name], 3)
    assert known == states
