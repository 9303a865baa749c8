"""A model cut into pipeline stages that nobody wrote, and trained by 1F1B.

    FXPAR_MESH="pp=2" torchrun --nproc-per-node 2 examples/pipeline_found.py

prints

    stage 0: 0.0.weight to 1.2.bias
    stage 1: 2.0.weight to 3.2.bias
    losses fall: True

The cuts make stages that take equally long. With ``FXPAR_MESH=auto`` the search decides
by itself whether stages pay.
"""

import os

import torch
from torch import nn

import fxpar


def build() -> nn.Sequential:
    """Four equal blocks; nothing in them knows of stages."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


model, x = build(), torch.randn(16, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
options = {"plan": "propagate", "microbatches": 4, "pipeline": "1f1b"}
step = fxpar.train_step(model, loss_fn, optimizer, options=options)
losses = [step(x).item() for _ in range(3)]

if os.environ.get("RANK", "0") == "0":
    for stage in fxpar.plans()[-1].stages:
        print(f"stage {stage.index}: {stage.parameters[0]} to {stage.parameters[-1]}")
    print("losses fall:", losses == sorted(losses, reverse=True))
