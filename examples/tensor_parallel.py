"""Tensor parallelism for a model of your own, without a plan by module.

    FXPAR_MESH="tp=2" FXPAR_PLAN=propagate \
        torchrun --nproc-per-node 2 examples/tensor_parallel.py

prints

    q.weight over [tp, _], out.weight over [_, tp]
    all_reduce over tp: 3
    the loss of one device: True
"""

import os

import torch
from torch import nn

import fxpar


class Block(nn.Module):
    """Attention and an MLP, as nobody has written a parallel plan for."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(x)))


torch.manual_seed(0)
model, x = Block(), torch.randn(4, 16, 32)
expected = model(x).square().mean()
loss = torch.compile(model, backend="fxpar")(x).square().mean()
loss.backward()

if os.environ.get("RANK", "0") == "0":
    (plan,) = fxpar.plans()
    names = "q.weight", "out.weight"
    print(", ".join(f"{name} over {plan.spec(name)}" for name in names))
    sums = [c for c in plan.collectives if c.kind == "all_reduce"]
    print("all_reduce over tp:", len(sums))  # two in the forward, one in the backward
    print("the loss of one device:", torch.allclose(loss, expected))
