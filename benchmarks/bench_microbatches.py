"""Memory of a training step against the number of microbatches, beside FSDP2.

    python benchmarks/bench_microbatches.py [--layers 2] [--parts 1,2,4] [--json FILE]

Both sides train the same Llama on the same batch on two gloo ranks, one after the other
in the same processes. fxpar: ``train_step`` with ``microbatches``, forward, backward
and AdamW as one program. FSDP2: the loop its users write: each part's loss divided by
their number, ``backward``, gradients reduced with the last part
(``set_requires_gradient_sync``), layers compiled. ``peak`` is what a step allocates at
most beyond parameters and optimizer state; ``sent`` bytes of collectives; losses must
agree.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import conditions, llama, on_ranks, write
from _traffic import watched

BATCH, LENGTH = 16, 128
RANKS, WARMUP = 2, 2


def fsdp2(layers: int, parts: int) -> Callable[[Any], float]:
    """A step of FSDP2 with accumulation by hand."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = llama(layers)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step(ids: Any) -> float:
        total = 0.0
        for i, part in enumerate(ids.chunk(parts)):
            model.set_requires_gradient_sync(i == parts - 1)
            loss = model(input_ids=part, labels=part).loss / parts
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def fxpar_step(layers: int, parts: int) -> Callable[[Any], float]:
    """A step of fxpar as one program."""
    import torch

    import fxpar

    model: Any = fxpar.shard(llama(layers), mesh=f"dp={RANKS}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"inputs": "local", "microbatches": parts, "plan": "propagate"}
    whole = fxpar.train_step(
        model,
        lambda m, ids: m(input_ids=ids, labels=ids).loss,
        optimizer,
        options=options,
    )
    return lambda ids: float(whole(ids))


SIDES = {"fsdp2": fsdp2, "fxpar": fxpar_step}


def measure(name: str, layers: int, parts: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch._dynamo.reset()
    step = SIDES[name](layers, parts)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(2048, (BATCH // RANKS, LENGTH), generator=generator)
    losses = [step(ids) for _ in range(WARMUP)]
    watch = watched(lambda: step(ids))
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    sent = sum(size for _, size in watch.calls)
    return {"peak": watch.peak, "sent": sent, "losses": (mean / RANKS).tolist()}


def worker(layers: int, counts: list[int], out: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = {
        f"{name}, {parts}": measure(name, layers, parts)
        for parts in counts
        for name in SIDES
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--parts", default="1,2,4")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    counts = [int(word) for word in args.parts.split(",")]
    if args.worker:
        worker(args.layers, counts, args.worker)
        return
    before = conditions()
    figures = on_ranks(__file__, RANKS, "--layers", args.layers, "--parts", args.parts)
    for parts in counts:
        one, other = (figures[f"{name}, {parts}"] for name in ("fxpar", "fsdp2"))
        print(
            f"microbatches {parts}: peak fxpar {one['peak'] / 2**20:.1f} MiB, fsdp2 "
            f"{other['peak'] / 2**20:.1f} MiB, sent {one['sent'] / 2**20:.1f} and "
            f"{other['sent'] / 2**20:.1f} MiB, losses {one['losses']} {other['losses']}"
        )
    model = {"layers": args.layers, "batch": BATCH, "length": LENGTH, "ranks": RANKS}
    data = {"conditions": before, "model": model, "figures": figures}
    write(args.json, "bench_microbatches", data)


if __name__ == "__main__":
    main()
