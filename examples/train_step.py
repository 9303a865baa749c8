"""A whole training step as one program: forward, backward, clipping and update.

    FXPAR_MESH="dp=2" torchrun --nproc-per-node 2 examples/train_step.py

prints

    programs: 1
    the losses of an ordinary loop on one device: True
"""

import copy
import os

import torch

import fxpar


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
)
x, y = torch.randn(8, 8), torch.randn(8, 4)

one_device = copy.deepcopy(model)
optimizer = torch.optim.AdamW(one_device.parameters(), lr=0.1)
expected = []
for _ in range(3):
    loss = loss_fn(one_device, x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(one_device.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    expected.append(loss.detach())

model = fxpar.shard(model)  # parameters and optimizer state split, too
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
step = fxpar.train_step(model, loss_fn, optimizer, clip=1.0)
losses = [step(x, y) for _ in range(3)]

if os.environ.get("RANK", "0") == "0":
    print("programs:", len(fxpar.plans()))
    same = torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-4)
    print("the losses of an ordinary loop on one device:", same)
