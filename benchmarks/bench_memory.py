"""Memory of one rank in a training step, fxpar compared with its peers.

    python benchmarks/bench_memory.py [--layers 4] [--scale small] [--ranks 2]
        [--peer NAME ...] [--json FILE]

Peers and ``fxpar``, which does what the README says, are those of ``bench_step``; a
peer and fxpar on its mesh run in the same processes, one after the other, on the same
Llama and batch. ``state`` is parameters, gradients and AdamW's state as one rank holds
them; ``whole`` what one device holds. ``peak`` is what forward and backward allocate at
most beyond parameters and optimizer state, gradients included: the running sum of the
allocator's own events, so that neither compiling nor Python counts; the median of five
steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from _common import LLAMAS, conditions, on_ranks, write
from _peers import AXIS, PEERS, Case, Step, fxpar_side, state_bytes
from _traffic import watched

# Steps before those watched, and how many are watched: buffers of collectives that run
# meanwhile are freed a little earlier or later.
WARMUP, ROUNDS = 2, 5


def figures_of(step: Step, case: Case) -> dict[str, int]:
    for index in range(WARMUP):
        step(index)
    held, kept = state_bytes(step)
    passes = step.passes
    assert passes is not None
    peaks = []
    for index in range(WARMUP, WARMUP + ROUNDS):
        peaks.append(watched(functools.partial(passes, index)).peak)
        step.optimizer.zero_grad()
    peak = int(statistics.median(peaks))
    whole = 4 * sum(p.nbytes for p in case.model().parameters())
    # A gradient is as large as its parameter.
    return {"state": 2 * held + kept, "peak": peak, "whole": whole}


def worker(peer: str, layers: int, scale: str, out: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = Case(dist.get_world_size(), layers=layers, scale=scale)
    made = {
        peer: lambda: PEERS[peer](case, "layers", False),
        "fxpar": lambda: fxpar_side(peer, case, {"schedule": "auto"}),
    }
    figures = {name: figures_of(make(), case) for name, make in made.items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scale", choices=sorted(LLAMAS), default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--peer", choices=sorted(PEERS), action="append")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.peer[0], args.layers, args.scale, args.worker)
        return
    before, cases = conditions(), {}
    for peer in args.peer or sorted(PEERS):
        words = ("--layers", args.layers, "--scale", args.scale, "--peer", peer)
        figures = cases[peer] = on_ranks(__file__, args.ranks, *words)
        for name, found in figures.items():
            print(
                f"{AXIS[peer]}={args.ranks}  {name:6} state "
                f"{found['state'] / 2**20:7.1f} MiB "
                f"({found['state'] / found['whole'] * args.ranks:.3f} of its share of "
                f"one device)  peak of a step {found['peak'] / 2**20:7.1f} MiB"
            )
        ratio = figures["fxpar"]["peak"] / figures[peer]["peak"]
        print(f"peak ratio {ratio:.3f}", flush=True)
    model = asdict(Case(args.ranks, layers=args.layers, scale=args.scale))
    data = {"conditions": before, "model": model, "cases": cases}
    write(args.json, "bench_memory", data)


if __name__ == "__main__":
    main()
