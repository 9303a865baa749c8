"""What a rank holds and sends of long sequences that are split over ranks.

    python benchmarks/bench_context.py [--ranks 2] [--lengths 2048 8192] [--short]
    python benchmarks/bench_context.py --predict

A small Llama, batch 1, forward and backward, on gloo. ``whole``: torch.compile on
the whole sequence, on one rank, which is what splitting replaces; ``gathered``: fxpar
with keys and values gathered; ``chosen``: with the schedule that it chooses, a ring
where that is predicted to be faster. Torch's own ``context_parallel`` has no
attention on CPU (2.13), so it is not in the table. ``peak`` is what a step allocates at
most beyond parameters; ``sent`` what a rank's collectives hold. ``--predict``: Llama 8B
on 8 H100 at 32k to 256k tokens, which runs nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from _common import conditions, llama, on_ranks, write
from _traffic import watched

WARMUP, STEPS = 2, 3
# name: the schedule; None: stock torch.compile on one rank.
SIDES: dict[str, str | None] = {"whole": None, "gathered": "none", "chosen": "auto"}


def side(schedule: str | None, ranks: int, length: int, layers: int) -> dict[str, Any]:
    """Figures of this rank."""
    import torch

    model: Any = llama(layers)
    model.config.max_position_embeddings = length
    if schedule is None:
        called = torch.compile(model, dynamic=False)
    else:
        options = {"mesh": f"cp={ranks}", "plan": "propagate", "schedule": schedule}
        called = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    torch.manual_seed(0)
    ids = torch.randint(2048, (1, length))

    def step() -> float:
        model.zero_grad()
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    for _ in range(WARMUP):
        step()
    begun = time.perf_counter()
    losses = [step() for _ in range(STEPS)]
    seconds = (time.perf_counter() - begun) / STEPS
    seen = watched(step)
    return {
        "seconds": seconds,
        "loss": losses[0],
        "peak": seen.peak,
        "sent": sum(n for _, n in seen.calls),
    }


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for length in args.lengths:
        for name, schedule in SIDES.items():
            if schedule is not None or rank == 0:
                torch._dynamo.reset()
                figures = side(schedule, ranks, length, args.layers)
                found.setdefault(str(length), {})[name] = figures
            dist.barrier()
    if rank == 0:
        Path(args.worker).write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    figures = on_ranks(
        __file__, args.ranks, "--layers", args.layers, "--lengths", *args.lengths
    )
    for length, sides in figures.items():
        for name, found in sides.items():
            print(
                f"{length:>6} tokens  cp={args.ranks}  {name:8} "
                f"{found['seconds']:7.3f} s  peak {found['peak'] / 2**20:8.1f} MiB  "
                f"sent {found['sent'] / 2**20:7.1f} MiB  loss {found['loss']:.6f}"
            )
    return figures


# (tokens, ranks that split the sequence) on 8 GPUs.
LONG = ((32768, 1), (65536, 2), (131072, 4), (262144, 8))


def predicted() -> list[dict[str, Any]]:
    """One layer of Llama 8B, in bfloat16: what attention and the rest take, and what is
    sent, with keys gathered and as chosen."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxpar

    os.environ["FXPAR_HARDWARE"] = "h100"
    torch.set_default_dtype(torch.bfloat16)
    rows = []
    for length, ranks in LONG:
        with FakeTensorMode():
            model: Any = llama(1, scale="8b")
            ids = torch.zeros(8 // ranks, length, dtype=torch.int64)
        for schedule in ("none", "auto"):
            plan = fxpar.plan(
                model,
                mesh=f"dp={8 // ranks},cp={ranks}",
                mode="propagate",
                grad=True,
                schedule=schedule,
                input_ids=ids,
                labels=ids,
            )
            rows.append({"tokens": length, "cp": ranks, "schedule": schedule})
            rows[-1] |= {
                "seconds": plan.predicted.seconds,
                "exposed": plan.predicted.exposed,
                "peak": plan.predicted.peak_bytes,
            }
            print(f"{length:>7} tokens  cp={ranks}  {schedule:5} {plan.predicted}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--short", action="store_true", help="one length, one layer")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.short:
        args.lengths, args.layers = [2048], 1
    if args.worker:
        worker(args)
        return
    before = conditions()
    figures: Any = predicted() if args.predict else measured(args)
    data = {"conditions": before, "ranks": args.ranks, "layers": args.layers}
    write(args.json, "bench_context", data | {"figures": figures})


if __name__ == "__main__":
    main()
