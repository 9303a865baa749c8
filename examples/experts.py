"""A mixture of experts, with the experts on the ranks of an axis ``ep``.

    FXPAR_MESH="ep=2" FXPAR_PLAN=propagate \
        torchrun --nproc-per-node 2 examples/experts.py

prints

    experts of a rank: 4 of 8
    the loss of one device: True

No token is dropped. The model is code for one device: it sorts tokens by expert,
as Mixtral and Qwen3-MoE of Hugging Face do.
"""

import os

import torch
from torch import nn

import fxpar


class Mixture(nn.Module):
    """Two of eight experts for each token."""

    def __init__(self, experts: int = 8, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 32) / 4)
        self.down = nn.Parameter(torch.randn(experts, 32, width) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
        key, order = torch.sort(ids.view(-1))
        experts = self.up.shape[0]
        counts = torch.histc(key.float(), experts, 0, experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = torch.relu(torch._grouped_mm(x[order // 2], self.up, ends))
        rows = torch._grouped_mm(rows, self.down, ends)
        rows = rows * weights.view(-1)[order][:, None]
        return x.index_add(0, order // 2, rows)


torch.manual_seed(0)
model, x = Mixture().bfloat16(), torch.randn(64, 16).bfloat16()
with torch.no_grad():
    expected = model(x).float().square().mean()
model = fxpar.shard(model)  # a rank keeps its own experts
loss = torch.compile(model, backend="fxpar")(x).float().square().mean()
loss.backward()

if os.environ.get("RANK", "0") == "0":
    print("experts of a rank:", model.up.to_local().shape[0], "of", len(model.up))
    print("the loss of one device:", torch.allclose(loss, expected, rtol=1e-2))
