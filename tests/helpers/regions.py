"""Programs with manual regions: every collective, one device's numbers beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives

import fxpar
from fxpar import Spec


@dataclass(frozen=True)
class RegionCase:
    """A function for one rank along tp, and what one device computes."""

    fn: Callable[..., Any]
    ins: Sequence[Any]
    outs: Sequence[Any]
    shapes: Sequence[Sequence[int]]
    # (whole arguments, number of ranks) -> the global results; None: ``fn`` itself.
    whole: Callable[..., Any] | None = None

    def model(self, *args: torch.Tensor) -> Any:
        """Automatic code before and behind the region."""
        mapped = fxpar.shard_map(self.fn, self.ins, self.outs, axes="tp")
        return self._outside(mapped, args)

    def expected(self, ranks: int, *args: torch.Tensor) -> Any:
        whole = self.whole
        if whole is None:
            return self._outside(self.one_rank, args)
        return self._outside(lambda *xs: whole(*xs, ranks), args)

    def one_rank(self, *args: torch.Tensor) -> Any:
        return fxpar.shard_map(self.fn, self.ins, self.outs, axes="tp")(*args)

    def _outside(self, inner: Callable[..., Any], args: Sequence[torch.Tensor]) -> Any:
        out = inner(*(torch.sin(x) for x in args))
        return tuple(map(torch.cos, out)) if isinstance(out, tuple) else torch.cos(out)

    def arguments(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        make = torch.randn
        return [
            make(*shape, dtype=torch.float64, requires_grad=True)
            for shape in self.shapes
        ]


def parts(x: torch.Tensor, ranks: int, dim: int = 0) -> list[torch.Tensor]:
    return list(x.chunk(ranks, dim))


def _heads(x: torch.Tensor) -> torch.Tensor:
    """My part of the sequence, all heads -> all of it, my heads."""
    n, (b, s, h) = fxpar.axis_size("tp"), x.shape
    x = x.reshape(b, s, n, h // n).permute(2, 0, 1, 3).contiguous()
    x = collectives.all_to_all_single(x, None, None, "tp")
    return x.permute(1, 0, 2, 3).reshape(b, s * n, h // n).exp()


def _ring(x: torch.Tensor) -> torch.Tensor:
    n, travels, out = fxpar.axis_size("tp"), x, torch.zeros_like(x)
    for _ in range(n):
        out = out + torch.sin(travels * x)
        travels = fxpar.permute(travels, [(i + 1) % n for i in range(n)], "tp")
    return out


def _ring_whole(x: torch.Tensor, ranks: int) -> torch.Tensor:
    cut = parts(x, ranks)
    return torch.cat([sum(torch.sin(a * b) for b in cut) for a in cut])


def _two(x: torch.Tensor, y: torch.Tensor) -> Any:
    """``x`` is whole, ``y`` split: the gradient of ``x`` differs between ranks."""
    total = collectives.all_reduce(
        (y.unsqueeze(0) * x.unsqueeze(1)).sum(1), "sum", "tp"
    )
    return total, y * total.sum(0)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    most = collectives.all_reduce(x.detach().amax(1, True), "max", "tp")
    e = (x - most).exp()
    return e / collectives.all_reduce(e.sum(1, True), "sum", "tp")


def _index(x: torch.Tensor) -> torch.Tensor:
    return x * (fxpar.axis_index("tp") + 1)


def _index_whole(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.cat([part * (i + 1) for i, part in enumerate(parts(x, ranks))])


def _scattered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return collectives.reduce_scatter_tensor(torch.relu(x @ w), "sum", 1, "tp").sin()


def _scattered_whole(x: torch.Tensor, w: torch.Tensor, ranks: int) -> torch.Tensor:
    return sum(
        torch.relu(a @ b)
        for a, b in zip(parts(x, ranks, 1), parts(w, ranks), strict=True)
    ).sin()


def _average(x: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(x.detach().square(), "avg", "tp") + x


def _average_whole(x: torch.Tensor, ranks: int) -> torch.Tensor:
    mean = sum(part.detach().square() for part in parts(x, ranks)) / ranks
    return torch.cat([part + mean for part in parts(x, ranks)])


TP = ("tp",)
CASES = {
    "mlp": RegionCase(
        lambda x, w1, w2: collectives.all_reduce(torch.relu(x @ w1) @ w2, "sum", "tp"),
        (None, (None, "tp"), TP),
        (None,),
        ((8, 4), (4, 8), (8, 4)),
    ),
    "gather": RegionCase(
        lambda x: collectives.all_gather_tensor(x * 2, 0, "tp").exp(),
        (TP,),
        (None,),
        ((8, 4, 2),),
    ),
    "gather_dim_1": RegionCase(
        lambda x: collectives.all_gather_tensor(x * 2, 1, "tp").exp(),
        ((None, "tp"),),
        (None,),
        ((4, 8, 2),),
    ),
    "scatter": RegionCase(
        _scattered,
        ((None, "tp"), TP),
        ((None, "tp"),),
        ((4, 8), (8, 8)),
        _scattered_whole,
    ),
    "heads": RegionCase(_heads, ((None, "tp"),), ((None, None, "tp"),), ((4, 8, 8),)),
    "ring": RegionCase(_ring, (TP,), (TP,), ((8, 4),), _ring_whole),
    "two": RegionCase(
        _two,
        (None, TP),
        (None, TP),
        ((4, 6), (8, 6)),
        lambda x, y, _: (t := (y * x.unsqueeze(1)).sum(1), y * t.sum(0)),
    ),
    "softmax": RegionCase(_softmax, ((None, "tp"),), ((None, "tp"),), ((4, 8),)),
    "index": RegionCase(_index, (TP,), (TP,), ((8, 4),), _index_whole),
    "average": RegionCase(_average, (TP,), (TP,), ((8, 4),), _average_whole),
    "partial": RegionCase(
        lambda x: x * x,
        (TP,),
        (Spec(None, None, partial={"tp": "sum"}),),
        ((8, 4),),
        lambda x, n: sum(part * part for part in parts(x, n)),
    ),
}


class RegionModel(nn.Module):
    """A model with parameters and one manual region that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up = nn.Parameter(torch.randn(8, 16))
        self.down = nn.Parameter(torch.randn(16, 8))
        self.last = nn.Linear(8, 4)

    def mlp(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        def on_rank(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
            hidden = nn.functional.gelu(x @ up) * scale
            return collectives.all_reduce(hidden @ down, "sum", "tp")

        specs = (None, (None, "tp"), Spec("tp", None))
        return fxpar.shard_map(on_rank, specs, (None,), axes="tp")(
            x, self.up, self.down
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.mlp(x, 0.5)
        x = x + self.mlp(x.sin(), 2.0)
        return self.last(x)
