"""Unlike devices: a rank slowed by a busy loop, with equal work and by speed.

    python benchmarks/bench_unlike.py [--stages] [--width N] [--rows N] [--layers N]
        [--pairs N] [--codegen eager|inductor] [--json FILE]

Two ranks, each pinned to its core; a process beside rank 1 keeps that core busy.
``speeds``: of each rank, measured with products while both run. A step is forward and
backward of a stack of products with a mean loss, in the same processes with the mesh
``dp=2{SPEEDS}[1,1]`` and with shares by speed, or with ``--stages`` on ``pp=2{SPEEDS}``
with half of the layers pinned to each stage, and with stages by speed, 8 microbatches;
steps alternate, a step takes as long as the slowest rank. ``ratio``: by speed over
equal, quartiles over pairs; ``predicted``: the same of ``plan.predicted``. Losses must
agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import conditions, on_ranks, write

PARTS = 8  # microbatches
LIMIT = 900  # seconds that the job may take
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def speeds(width: int) -> tuple[float, float]:
    """Relative speed of both ranks, the faster one's 1.0."""
    import torch
    import torch.distributed as dist

    x = torch.randn(width, width)
    dist.barrier()
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < 3.0:
        torch.mm(x, x)
        done += 1
    mine = torch.tensor([done / (time.perf_counter() - begun)])
    every = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(every, mine)
    most = max(map(float, every))
    first, second = (round(float(rate) / most, 2) for rate in every)
    return first, second


def setups(args: argparse.Namespace, shared: str) -> dict[str, dict[str, Any]]:
    """Options with equal work on both ranks, and with work by speed; ``shared``: the
    speeds, as a mesh has them."""
    if not args.stages:
        return {
            "equal": {"mesh": f"dp=2{shared}[1,1]"},
            "by_speed": {"mesh": f"dp=2{shared}"},
        }
    staged = {"mesh": f"pp=2{shared}"}
    # Layers and activations alternate in the stack.
    halves = {
        f"*{2 * i}.weight": f"pp={2 * i // args.layers}" for i in range(args.layers)
    }
    return {"equal": staged | {"hints": halves}, "by_speed": staged}


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import fxpar

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.sched_setaffinity(0, {rank})
    busy = [sys.executable, "-c", BUSY, "1"]
    beside = subprocess.Popen(busy) if rank == 1 else None
    try:
        first, second = speeds(args.width)
        torch.manual_seed(0)
        layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
        net = nn.Sequential(*(each for x in layers for each in (x, nn.ReLU())))
        x = torch.randn(args.rows, args.width)

        def loss(x: Any) -> Any:
            return net(x).pow(2).mean()

        def compiled(setup: dict[str, Any]) -> Callable[[], tuple[float, float]]:
            options = {**setup, "codegen": args.codegen, "plan": "propagate"}
            if args.stages:
                options["microbatches"] = PARTS
            run = torch.compile(loss, backend="fxpar", options=options, dynamic=False)

            def step() -> tuple[float, float]:
                dist.barrier()
                begun = time.perf_counter()
                value = run(x)
                value.backward()
                taken = torch.tensor(time.perf_counter() - begun)
                net.zero_grad()
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                return float(taken), float(value.detach())

            return step

        asked = setups(args, f"{{{first},{second}}}")
        steps, seconds = {}, dict[str, list[float]]()
        for name, setup in asked.items():
            torch._dynamo.reset()
            steps[name], seconds[name] = compiled(setup), []
            for _ in range(2):
                steps[name]()
        for _ in range(args.pairs):
            values = []
            for name, step in steps.items():
                taken, value = step()
                seconds[name].append(taken)
                values.append(value)
            assert abs(values[0] - values[1]) < 1e-5 * abs(values[0]), values
        if rank == 0:
            if args.stages:
                os.environ["FXPAR_MICROBATCHES"] = str(PARTS)
            predicted = {
                name: fxpar.plan(
                    loss, x, mode="propagate", grad=True, **setup
                ).predicted.seconds
                for name, setup in asked.items()
            }
            figures = {"speeds": (first, second), "seconds": seconds}
            Path(args.worker).write_text(
                json.dumps({**figures, "predicted": predicted})
            )
        dist.barrier()
    finally:
        if beside is not None:
            beside.kill()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--codegen", default="inductor")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    figures = on_ranks(__file__, 2, *sys.argv[1:], timeout=LIMIT)
    equal, shared = figures["seconds"].values()
    ratios = [b / a for a, b in zip(equal, shared, strict=True)]
    figures["ratio"] = statistics.quantiles(ratios, n=4)
    even, best = figures["predicted"].values()
    print(f"speeds {figures['speeds']}")
    print(f"equal {statistics.median(equal):.3f} s, predicted {even:.3f} s")
    print(f"by speed {statistics.median(shared):.3f} s, predicted {best:.3f} s")
    quartiles = ", ".join(f"{ratio:.3f}" for ratio in figures["ratio"])
    print(f"by speed over equal: {quartiles}; predicted {best / even:.3f}")
    if args.json:
        write(args.json, "unlike", {"conditions": conditions(), **figures})


if __name__ == "__main__":
    main()
