"""What a rank holds and sends of long sequences that are split over ranks.

    python benchmarks/bench_context.py [--ranks 2] [--lengths 2048 8192] [--short]
    python benchmarks/bench_context.py --predict

A small Llama, batch 1, forward and backward, on gloo. ``whole``: torch.compile on
the whole sequence, on one rank, which is what splitting replaces; ``torch``: the ring
of torch's ``context_parallel``, balanced (``_torch_ring``); ``gathered``: fxpar with
keys and values gathered; ``chosen``: with the schedule that it chooses. All live in the
same processes; their steps alternate, and a time is the median of the slowest rank's.
``peak`` is what a step allocates at most beyond parameters; ``sent`` what a
rank's collectives hold. ``--predict``: Llama 8B on 8 H100 at 32k to 256k tokens, beside
what torchtitan publishes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from _common import conditions, llama, on_ranks, write
from _traffic import watched

WARMUP = 2
# name: the schedule of fxpar, or what else a side is.
SIDES = {"whole": "one rank", "torch": "ring", "gathered": "none", "chosen": "auto"}


def side(schedule: str, ranks: int, length: int, layers: int) -> Callable[[], float]:
    """A step of one side, which gives the loss."""
    import torch
    from _torch_ring import TorchRing

    model: Any = llama(layers)
    model.config.max_position_embeddings = length
    torch.manual_seed(0)
    ids = torch.randint(2048, (1, length))
    if schedule == "ring":
        ring = TorchRing(model)

        def ring_step() -> float:
            model.zero_grad()
            return ring.step(ids)

        return ring_step
    if schedule == "one rank":
        called = torch.compile(model, dynamic=False)
    else:
        options = {"mesh": f"cp={ranks}", "plan": "propagate", "schedule": schedule}
        called = torch.compile(model, backend="fxpar", dynamic=False, options=options)

    def step() -> float:
        model.zero_grad()
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    return step


def timed(step: Callable[[], float], alone: bool) -> float:
    """Seconds of a step, of the slowest rank; ``alone``: of the first one, while the
    others wait."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    if not alone or dist.get_rank() == 0:
        step()
    seconds = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def compared(length: int, ranks: int, layers: int, pairs: int) -> dict[str, Any]:
    """Figures of all sides at one length; those of what a rank holds and sends are this
    rank's."""
    import torch
    import torch.distributed as dist

    first = dist.get_rank() == 0
    steps, figures = {}, {name: dict[str, Any]() for name in SIDES}
    for name, schedule in SIDES.items():
        torch._dynamo.reset()
        alone = name == "whole"
        steps[name] = step = side(schedule, ranks, length, layers)
        for _ in range(WARMUP if first or not alone else 0):
            figures[name]["loss"] = step()
        if first or not alone:
            seen = watched(step)
            sent = sum(n for _, n in seen.calls)
            figures[name] |= {"peak": seen.peak, "sent": sent}
        dist.barrier()
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(pairs):
        for name, step in steps.items():
            times[name].append(timed(step, alone=name == "whole"))
    for name, each in times.items():
        over_torch = [a / b for a, b in zip(each, times["torch"], strict=True)]
        figures[name] |= {"times": each, "seconds": statistics.median(each)}
        figures[name]["over_torch"] = statistics.median(over_torch)
    return figures


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    figures = {
        str(length): compared(length, ranks, args.layers, args.pairs)
        for length in args.lengths
    }
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(figures))
    dist.destroy_process_group()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    given = "--layers", args.layers, "--pairs", args.pairs
    figures = on_ranks(__file__, args.ranks, *given, "--lengths", *args.lengths)
    for length, sides in figures.items():
        for name, row in sides.items():
            print(
                f"{length:>6} tokens  cp={args.ranks}  {name:8} "
                f"{row['seconds']:7.3f} s  over torch {row['over_torch']:5.2f}  "
                f"peak {row['peak'] / 2**20:8.1f} MiB  "
                f"sent {row['sent'] / 2**20:7.1f} MiB  loss {row['loss']:.6f}"
            )
    return figures


# (tokens, ranks that split the sequence) on 8 GPUs.
LONG = ((32768, 1), (65536, 2), (131072, 4), (262144, 8))


# Tokens per second and GPU that torchtitan publishes for Llama 8B on 8 H100 (HBM2e), by
# ranks that split the sequence: benchmarks/llama3_h100_202412. In float8, with FSDP and
# activation checkpointing; of the prediction neither FSDP nor the update is part.
PUBLISHED = {1: 3890, 2: 2540, 4: 1071, 8: 548}
LAYERS = 32

# What FlashAttention-2, torch's kernel, reaches on an H100 with heads of 128, forward
# and backward: 335 TFLOP/s (Dao, arXiv 2307.08691, section 4.1).
FLASH_2 = 335e12
# (machine, schedule) of predictions. ``h100``: at the rates measured on one;
# ``float8``: products in float8, attention as FlashAttention-2 runs it.
CASES = tuple(itertools.product(("h100", "float8"), ("none", "auto")))


def machine(name: str) -> Any:
    """An H100 as built in, or with the peaks of what torchtitan runs."""
    from fxpar.sharding.cost.hardware_table import Peak, lookup

    h100 = lookup("h100")
    if name == "h100":
        return h100
    peaks = dict(h100.peaks)
    peaks["bfloat16"] = peaks["float8"]
    for family in ("attention", "attention backward"):
        peaks[f"bfloat16 {family}"] = Peak(FLASH_2)
    return replace(h100, peaks=tuple(peaks.items()))


def predicted() -> list[dict[str, Any]]:
    """Llama 8B, forward and backward, by ``CASES``: steps of one layer and of two, the
    seconds of all, tokens per second and GPU, and those where layers are computed again
    in the backward."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for (length, ranks), (name, schedule) in itertools.product(LONG, CASES):
            file = Path(folder, f"{name}.json")
            machine(name).save(file)
            os.environ["FXPAR_HARDWARE"] = str(file)
            rows.append({"machine": name, **_predicted(length, ranks, schedule)})
            row = rows[-1]
            print(
                f"{length:>7} tokens  cp={ranks}  {name:6} {schedule:5} "
                f"layer {row['layer']:.3f} s  step {row['step']:6.2f} s  "
                f"{row['tokens_per_second']:5.0f} tokens/s/GPU, recomputed "
                f"{row['recomputed']:5.0f}, {row['over_published']:.2f} of published",
                flush=True,
            )
    return rows


def _predicted(length: int, ranks: int, schedule: str) -> dict[str, Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxpar

    torch.set_default_dtype(torch.bfloat16)

    def plans(grad: bool) -> list[Any]:
        """Predictions of one layer and of two."""
        steps = []
        for layers in (1, 2):
            with FakeTensorMode():
                model: Any = llama(layers, scale="8b")
                ids = torch.zeros(8 // ranks, length, dtype=torch.int64)
            how = {"mode": "propagate", "grad": grad, "schedule": schedule}
            how |= {"input_ids": ids, "labels": ids}
            plan = fxpar.plan(model, mesh=f"dp={8 // ranks},cp={ranks}", **how)
            steps.append(plan.predicted)
        return steps

    (first, second), forwards = plans(True), plans(False)
    layer = second.seconds - first.seconds
    forward = forwards[1].seconds - forwards[0].seconds
    step = first.seconds + (LAYERS - 1) * layer
    again = step + LAYERS * forward
    return {
        "tokens": length,
        "cp": ranks,
        "schedule": schedule,
        "layer": layer,
        "forward": forward,
        "exposed": second.exposed - first.exposed,
        "peak": first.peak_bytes,
        "step": step,
        "tokens_per_second": length // ranks / step,
        "recomputed": length // ranks / again,
        "over_published": length // ranks / again / PUBLISHED[ranks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--pairs", type=int, default=5, help="steps of each side")
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
