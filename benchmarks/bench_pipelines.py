"""A training step in two stages, beside torch.distributed.pipelining by hand.

    python benchmarks/bench_pipelines.py [--layers 4] [--parts 4] [--json FILE]

Both sides train the same Llama on the same batch on two gloo ranks, one after the other
in the same processes, by 1F1B. fxpar: ``train_step`` on ``pp=2``, the model as it is,
parameters whole on both ranks, so that gradients cross at the end of a step; and at
rest, of ``fxpar.shard``, where each rank updates its part. By hand: the model cut in
two halves of layers, ``PipelineStage`` and ``Schedule1F1B``, layers compiled, AdamW on
each rank's own half. ``seconds`` of a step, the median; ``peak`` is what a step
allocates at most beyond what was there, ``held`` the parameters and moments that are;
losses must agree.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import conditions, llama, on_ranks, write
from _traffic import watched

BATCH, LENGTH = 16, 128
RANKS, WARMUP, STEPS = 2, 3, 9


# A step, and the optimizer that it updates with.
Side = tuple[Callable[[Any], float], Any]


def by_hand(layers: int, parts: int) -> Side:
    """A step of torch.distributed.pipelining; the loss is the last rank's."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model: Any = llama(layers)
    inner, rank = model.model, dist.get_rank()
    half = layers // RANKS
    mine = inner.layers[rank * half : (rank + 1) * half]
    for layer in mine:
        layer.compile(dynamic=False)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.rotary = nn.ModuleList(mine), inner.rotary_emb
            self.embed = inner.embed_tokens if rank == 0 else None
            self.norm = inner.norm if rank else None
            self.head = model.lm_head if rank else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.embed is not None:
                x = self.embed(x)
            places = torch.arange(x.shape[1])[None]
            around = self.rotary(x, places)
            for layer in self.layers:
                x = layer(x, position_embeddings=around, position_ids=places)
            return x if self.head is None else self.head(self.norm(x))

    def loss_fn(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    stage = PipelineStage(Half(), rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, parts, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-4, foreach=False)

    def step(ids: Any) -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step, optimizer


def fxpar_step(layers: int, parts: int, *, at_rest: bool = False) -> Side:
    """A step of fxpar as one program."""
    import torch

    import fxpar

    model: Any = llama(layers)
    if at_rest:
        model = fxpar.shard(model, mesh=f"pp={RANKS}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"mesh": f"pp={RANKS}", "microbatches": parts, "pipeline": "1f1b"}
    whole = fxpar.train_step(
        model,
        lambda m, ids: m(input_ids=ids, labels=ids).loss,
        optimizer,
        options=options,
    )
    return lambda ids: float(whole(ids)), optimizer


SIDES = {
    "by hand": by_hand,
    "fxpar": fxpar_step,
    "fxpar at rest": functools.partial(fxpar_step, at_rest=True),
}


def held_by(optimizer: Any) -> int:
    """Bytes of parameters and moments on this rank."""
    import torch
    from torch.distributed.tensor import DTensor

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*parameters, *(x for s in optimizer.state.values() for x in s.values())]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.nbytes for x in local)


def measure(name: str, layers: int, parts: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch._dynamo.reset()
    step, optimizer = SIDES[name](layers, parts)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2048, (BATCH, LENGTH), generator=generator)
    losses, seconds = [], []
    for _ in range(WARMUP + STEPS):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(ids))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    peak = torch.tensor(float(watched(lambda: step(ids)).peak))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    held = torch.tensor(float(held_by(optimizer)))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return {
        "held": int(held),
        "seconds": statistics.median(seconds[WARMUP:]),
        "peak": int(peak),
        "losses": losses[:3],
    }


def worker(layers: int, parts: int, out: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = {name: measure(name, layers, parts) for name in SIDES}
    if dist.get_rank() == RANKS - 1:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.layers, args.parts, args.worker)
        return
    before = conditions()
    figures = on_ranks(__file__, RANKS, "--layers", args.layers, "--parts", args.parts)
    print(f"{args.parts} microbatches, {args.layers} layers")
    for name, side in figures.items():
        ratio = side["seconds"] / figures["by hand"]["seconds"]
        print(
            f"{name:13} {side['seconds']:.3f} s, ratio {ratio:.2f}; peak "
            f"{side['peak'] / 2**20:.1f} MiB, held {side['held'] / 2**20:.1f} MiB; "
            f"losses {side['losses']}"
        )
    model = {"layers": args.layers, "batch": BATCH, "length": LENGTH, "ranks": RANKS}
    data = {"conditions": before, "model": model, "figures": figures}
    write(args.json, "bench_pipelines", data)


if __name__ == "__main__":
    main()
