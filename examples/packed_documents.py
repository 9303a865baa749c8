"""Documents packed into one sequence, split over two ranks along that sequence.

    FXPAR_MESH="cp=2" FXPAR_PLAN=propagate \
        torchrun --nproc-per-node 2 examples/packed_documents.py

prints

    a rank holds 16 of 32 tokens: x over [_, cp, _]
    the loss of one device: True
    the gradients of one device: True

The mask is ordinary code of the model. fxpar splits it along the queries, and each rank
gathers the keys that it needs.
"""

import os

import torch
from torch import nn

import fxpar


class Attention(nn.Module):
    """Causal attention in which a token sees its own document only."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.heads = heads

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        seen = places[:, None] >= places
        seen = seen & (documents[:, :, None] == documents[:, None])
        y = nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None])
        return y.transpose(1, 2).flatten(2)


torch.manual_seed(0)
model, x = Attention(), torch.randn(2, 32, 32)
documents = (torch.arange(32) // 11).expand(2, -1).contiguous()
expected = model(x, documents).square().mean()
gradient = torch.autograd.grad(expected, model.qkv.weight)[0]
loss = torch.compile(model, backend="fxpar")(x, documents).square().mean()
loss.backward()

if os.environ.get("RANK", "0") == "0":
    spec = fxpar.plans()[0].spec("x")
    print(f"a rank holds 16 of 32 tokens: x over {spec}")
    print("the loss of one device:", torch.allclose(loss, expected))
    same = torch.allclose(model.qkv.weight.grad, gradient, atol=1e-6)
    print("the gradients of one device:", same)
