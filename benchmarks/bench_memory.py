"""What one rank holds and needs in a training step, beside FSDP2 + torch.compile.

    python benchmarks/bench_memory.py [--layers 4] [--ranks 2] [--json FILE]

Both sides run in the same processes, one after the other, on the same Llama and batch.
``state`` is parameters, gradients and AdamW's state as one rank holds them; ``whole``
what one device holds. ``peak`` is what a step allocates at most beyond parameters and
optimizer state, gradients included: the running sum of the allocator's own events, so
that neither compiling nor Python counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _common import conditions, llama, on_ranks, write
from _traffic import watched

BATCH, LENGTH = 8, 128
WARMUP = 2


def local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def state_bytes(model: Any, optimizer: Any) -> int:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    import torch

    held = list(model.parameters())
    held += [p.grad for p in model.parameters() if p.grad is not None]
    held += [
        x
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, torch.Tensor)
    ]
    return sum(local(x).numel() * x.dtype.itemsize for x in held)


def side(name: str, layers: int) -> dict[str, int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import fxpar

    model: Any = llama(layers)
    count = dist.get_world_size()
    whole = 4 * sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    if name == "fsdp2":
        mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("dp",))
        for layer in model.model.layers:
            layer.compile(dynamic=False)
            fully_shard(layer, mesh=mesh)
        called = fully_shard(model, mesh=mesh)
    else:
        model = fxpar.shard(model, mesh=f"dp={count}")
        options = {"inputs": "local"}
        called = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(2048, (BATCH // count, LENGTH), generator=generator)

    def step() -> None:
        called(input_ids=ids, labels=ids).loss.backward()

    for _ in range(WARMUP):
        optimizer.zero_grad()
        step()
        optimizer.step()
    state = state_bytes(model, optimizer)
    optimizer.zero_grad()
    return {"state": state, "peak": watched(step).peak, "whole": whole}


def worker(layers: int, out: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = {name: side(name, layers) for name in ("fsdp2", "fxpar")}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.layers, args.worker)
        return
    before = conditions()
    figures = on_ranks(__file__, args.ranks, "--layers", args.layers)
    for name, found in figures.items():
        print(
            f"dp={args.ranks}  {name:6} state {found['state'] / 2**20:7.1f} MiB "
            f"({found['state'] / found['whole'] * args.ranks:.3f} of its share of one "
            f"device)  peak of a step {found['peak'] / 2**20:7.1f} MiB"
        )
    print(f"peak ratio {figures['fxpar']['peak'] / figures['fsdp2']['peak']:.3f}")
    model = {"layers": args.layers, "batch": BATCH, "length": LENGTH}
    data = {"conditions": before, "model": model, "ranks": args.ranks}
    write(args.json, "bench_memory", data | {"figures": figures})


if __name__ == "__main__":
    main()
