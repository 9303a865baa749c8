"""Fewer key and value heads than ranks of ``tp``: two of them on four ranks.

    python examples/few_kv_heads.py

prints

    q.weight [tp, _]
    k.weight [tp:(1)2, _]
    the numbers of one device: True

This one process makes the plan and runs all four ranks. ``tp:(1)2`` is the outer
part of the axis: two halves of two ranks, each half with a head of its own.
"""

import torch
from torch import nn

import fxpar


class Attention(nn.Module):
    """Eight heads of queries, two of keys and values."""

    def __init__(self, width: int = 64, heads: int = 8, shared: int = 2) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(0)
model, x = Attention().double(), torch.randn(2, 16, 64).double()
plan = fxpar.plan(model, x, mesh="tp=4", mode="propagate")
for name in ("q.weight", "k.weight"):
    print(name, plan.spec(name))
print("the numbers of one device:", torch.allclose(plan.simulate(x), model(x)))
