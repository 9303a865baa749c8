"""A small net, its loss and its batches, and the optimizers that train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import device

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """BatchNorm, a tied weight, a parameter nobody uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before the normalization: its gradient is nothing but rounding.
        self.up, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)
        self.mix, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again.weight = self.mix.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(F.gelu(self.norm(self.up(x)))) * self.frozen
        return self.down(self.again(x).tanh() * self.scale)


def build() -> Net:
    torch.manual_seed(0)
    return device.put(Net())


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    drawn = [
        (torch.randn(size, 8, generator=made), torch.randn(size, 4, generator=made))
        for _ in range(count)
    ]
    return device.put(drawn)


class Lamb(torch.optim.Optimizer):
    """As users write them: state made in the first step, numbers in it, ``data``."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "decay": 0.01})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.data
                if not state:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p.data)
                    state["v"] = torch.zeros_like(p.data)
                state["step"] += 1
                state["m"] = state["m"] * beta1 + grad * (1 - beta1)
                state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                m = state["m"] / (1 - beta1 ** state["step"])
                update = m / (state["v"].sqrt() + 1e-6)
                if group["decay"] != 0:
                    update.add_(p.data, alpha=group["decay"])
                ratio = p.data.norm() / update.norm()
                p.data.add_(update * ratio, alpha=-group["lr"])


class Counts(torch.optim.Optimizer):
    """Counts its steps in a group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["count"])


OPTIMIZERS: dict[str, tuple[Make, int]] = {
    # The programs that are compiled for it: two if the first step makes state.
    "sgd": (lambda p: torch.optim.SGD(p, 0.1), 1),
    "nesterov": (
        lambda p: torch.optim.SGD(
            p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01
        ),
        1,
    ),
    "dampening": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5), 2),
    "adam": (
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
        1,
    ),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.01), 1),
    "foreach": (lambda p: torch.optim.AdamW(p, 0.01, foreach=True), 1),
    "tensor": (lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False), 1),
    "adagrad": (lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1), 1),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5), 1),
    "radam": (lambda p: torch.optim.RAdam(p, 0.01), 1),
    "lamb": (Lamb, 2),
    "counts": (Counts, 1),
}
