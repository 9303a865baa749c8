"""Two ways to split rows that ranks do not divide: each rank's own size, or padding.

    python benchmarks/uneven_ways.py [--repeat N] [--json FILE]

Each program is written twice: as a user has it, for which a rank computes on what it
holds; and with the dim padded to what ranks divide and masks wherever padding would
count, as XLA's partitioner does it. Both run forward and backward through fxpar on two
ranks, and must give the same loss. ``ops``: of the local graph that compute; ``flops``:
of matrix products, of the rank that does most and of all ranks; ``bytes``: sent by a
rank in a step; ``texts``: different graphs to compile, over all ranks; ``ms``: of a
step in Inductor's code, the slower rank's, median.

``words``: a head of 50,257 words and its loss, ``tp=2``. ``batch``: 5 rows through two
layers with a norm over the batch, ``dp=2``. ``heads``: attention with 3 heads,
``tp=2``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _common import conditions, write
from torch import nn

import fxpar
from fxpar.runtime.steps.binding import bind
from fxpar.sharding.mesh import Mesh

WORDS, ROWS, BATCH, WIDTH, LENGTH = 50257, 64, 5, 512, 64
WAYS = ("own sizes", "padded")


def padded_to_even(n: int) -> int:
    return n + n % 2


class Words(nn.Module):
    mesh, shape = "tp=2", (ROWS, 128)
    hints = {"head": ("tp", None)}

    def __init__(self, is_padded: bool) -> None:
        super().__init__()
        n = padded_to_even(WORDS) if is_padded else WORDS
        self.is_padded = is_padded
        self.head = nn.Parameter(torch.zeros(n, self.shape[1]))
        drawn = torch.randn(WORDS, self.shape[1], generator=seeded()) / 16
        self.head.data[:WORDS] = drawn
        self.register_buffer("labels", torch.arange(ROWS) * 700)
        self.register_buffer("counts", torch.arange(n) < WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.head.T
        if self.is_padded:
            logits = torch.where(self.counts, logits, -math.inf)
        return F.cross_entropy(logits, self.labels)


class Batch(nn.Module):
    mesh, shape = "dp=2", (BATCH, WIDTH)
    hints = {"x": ("dp", None)}

    def __init__(self, is_padded: bool) -> None:
        super().__init__()
        self.is_padded = is_padded
        draw = seeded()
        self.one, self.two = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw) / 16)
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_padded:
            h = x @ self.one
            h = (h - h.mean(0)) * torch.rsqrt(h.var(0, correction=0) + 1e-5)
            return (F.gelu(h) @ self.two).square().mean()
        counts = (torch.arange(x.shape[0]) < BATCH)[:, None].to(x.dtype)
        h = x @ self.one
        apart = h - (h * counts).sum(0) / BATCH
        variance = (apart.square() * counts).sum(0) / BATCH
        y = F.gelu(apart * torch.rsqrt(variance + 1e-5)) @ self.two
        return (y.square() * counts).sum() / (BATCH * WIDTH)


class Heads(nn.Module):
    mesh, shape = "tp=2", (2, LENGTH, 192)
    hints = dict.fromkeys(("q", "k", "v", "out"), ("tp", None, None))

    def __init__(self, is_padded: bool) -> None:
        super().__init__()
        n, width, draw = (4 if is_padded else 3), self.shape[2], seeded()
        for name in ("q", "k", "v", "out"):
            table = torch.zeros(n, width, 64)
            table[:3] = torch.randn(3, width, 64, generator=draw) / 16
            setattr(self, name, nn.Parameter(table))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            torch.einsum("bsd,hde->bhse", x, w) for w in (self.q, self.k, self.v)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bhse,hde->bsd", h, self.out).square().mean()


PROGRAMS = {"words": Words, "batch": Batch, "heads": Heads}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def fed(program: Any, is_padded: bool) -> torch.Tensor:
    x = torch.randn(program.shape, generator=seeded())
    if is_padded and program is Batch:
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x


def counted(name: str, is_padded: bool) -> dict[str, Any]:
    """What a plan of the program has, without running it."""
    program = PROGRAMS[name]
    how = {"mesh": program.mesh, "mode": "propagate", "hints": program.hints}
    x = fed(program, is_padded)
    plan = fxpar.plan(program(is_padded), x, grad=True, **how)
    mesh = Mesh.parse(program.mesh)
    fake_mode = next(n.meta["val"].fake_mode for n in plan.result.local.nodes)
    graphs = [
        bind(plan.result.local, mesh, rank, str, fake_mode, inductor=False)
        for rank in range(2)
    ]
    loss, *_ = plan.simulate(x)
    flops = [sum(map(flops_of, graph.nodes)) for graph in graphs]
    texts = {
        "\n".join(
            f"{n.target} {getattr(n.meta.get('val'), 'shape', '')}" for n in g.nodes
        )
        for g in graphs
    }
    return {
        "ops": sum(is_compute(node) for node in graphs[0].nodes),
        "flops": max(flops),
        "flops of all": sum(flops),
        "bytes": sum(each.bytes for each in plan.collectives),
        "texts": len(texts),
        "loss": float(loss),
    }


def is_compute(node: Any) -> bool:
    return node.op == "call_function" and "aten." in str(node.target)


def flops_of(node: Any) -> int:
    """Of a matrix product, from the shapes of its operands."""
    if not any(op in str(node.target) for op in ("aten.mm", "aten.bmm", "aten.addmm")):
        return 0
    a, b = (n.meta["val"] for n in node.all_input_nodes[-2:])
    return 2 * a.numel() * b.shape[-1]


def rank_steps(name: str, repeat: int) -> dict[str, list[float]]:
    """Seconds of steps of both ways in turns, on this rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    program, runs = PROGRAMS[name], {}
    for way in WAYS:
        is_padded = way == "padded"
        options = {"mesh": program.mesh, "plan": "propagate", "hints": program.hints}
        model = torch.compile(program(is_padded), backend="fxpar", options=options)
        runs[way] = model, fed(program, is_padded)
        for _ in range(3):
            model(runs[way][1]).backward()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way, (model, x) in runs.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(10):
                model(x).backward()
            seconds[way].append((time.perf_counter() - begun) / 10)
    return seconds


def quartiles(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [1000 * each for each in (middle, low, high)]


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    from tests.helpers.spawn import shared_pool

    return shared_pool(2).run(function, *args, timeout=600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    before, rows = conditions(), []
    for name in PROGRAMS:
        ranks = on_two_ranks(rank_steps, name, args.repeat)
        for way in WAYS:
            slower = [max(each) for each in zip(*(r[way] for r in ranks), strict=True)]
            row = {"program": name, "way": way, **counted(name, way == "padded")}
            row["ms"] = quartiles(slower)
            rows.append(row)
            print(row, flush=True)
        losses = [row["loss"] for row in rows[-2:]]
        assert math.isclose(*losses, rel_tol=1e-4), losses
    write(args.json, "uneven_ways", {"conditions": before, "rows": rows})


if __name__ == "__main__":
    main()
