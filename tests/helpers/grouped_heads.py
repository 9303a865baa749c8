"""A layer of a transformer whose query heads share fewer key heads, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HEADS, WIDTH, LENGTH = 8, 64, 4


class Attention(nn.Module):
    """Grouped-query attention; ``how`` a key head meets its query heads."""

    def __init__(self, kv: int, heads: int = HEADS, how: str = "gqa") -> None:
        super().__init__()
        self.size, self.groups, self.how = WIDTH // HEADS, heads // kv, how
        double = {"bias": False, "dtype": torch.float64}
        self.q = nn.Linear(WIDTH, heads * self.size, **double)
        self.k = nn.Linear(WIDTH, kv * self.size, **double)
        self.v = nn.Linear(WIDTH, kv * self.size, **double)
        self.o = nn.Linear(heads * self.size, WIDTH, **double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (
            f(x).view(b, s, -1, self.size).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        if self.how == "repeat":
            k, v = (y.repeat_interleave(self.groups, 1) for y in (k, v))
        elif self.how == "expand":
            k, v = (
                y[:, :, None].expand(b, -1, self.groups, s, self.size).flatten(1, 2)
                for y in (k, v)
            )
        gqa = self.how == "gqa" and self.groups > 1
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.up = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


def batch(size: int = 4) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(size, LENGTH, WIDTH, dtype=torch.float64)


def layer(kv: int, **how: Any) -> Layer:
    torch.manual_seed(0)
    return Layer(Attention(kv, **how))
