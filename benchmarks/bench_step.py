"""Step time of fxpar against what a user would write today, measured side by side.

    python benchmarks/bench_step.py [--short] [--peer ddp|fsdp2|tp|sp] [--ranks 2|4]
        [--jobs N] [--plans] [--json FILE]

- ``ddp``, mesh dp: DistributedDataParallel + torch.compile, each rank reading its part
  of the batch; fxpar reads the same (inputs=local).
- ``fsdp2``, mesh dp: fully_shard on every layer and the root, every layer compiled
  (as torchtitan does) or the whole model (``--compile whole``).
- ``tp``, mesh tp: DTensor tensor parallelism (parallelize_module, the layout of
  Hugging Face's own plan for Llama, inputs of a block prepared once) + torch.compile.
- ``sp``, mesh tp: the same with Megatron's sequence parallelism and the embedding split
  by words.

All sides live in the same processes and see the same model, data, optimizer and number
of threads: the peer, as most write it and with the optimizer's step compiled too
(``update``); ``fxpar``, which does what the README says: beside DDP one line, whose
parameters stay whole, else ``fxpar.shard`` with neither hints nor a sample; a search,
the schedule it chooses; ``plain``: that without a schedule; ``as_peer``: for tensor
parallelism with the peer's layout at rest, by hints; ``program``:
``fxpar.train_step``, forward, backward and update as one. Steps alternate, the order
swapping from round to round, so that drift of the machine hits all sides; what counts
is the ratio within a round. A step's time is that of the slowest rank. Losses must
agree, or there is no figure. ``--jobs``: rounds of so many jobs count together, each of
which measures the machine anew, as at a first start, and may choose another plan for
it; calls and bytes are those of the last. ``--plans``: the sides are the peer and what
``fxpar.shard`` leads to with and without a sample, searched and propagated, in a wider
model of four layers. The profiler counts bytes and calls that a step sends, and the
most memory it takes beyond parameters and optimizer state, in the same way for all
sides.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from _common import conditions, on_ranks, spread, write
from _peers import (
    AXIS,
    LAYOUTS,
    PEERS,
    Case,
    Step,
    disagreement,
    fxpar_side,
    in_turn,
    one_program,
)
from _quiet import Quiet
from _traffic import watched

# (name of a ratio, as it is said, side, side it is measured by)
RATIOS = (
    ("ratio", "fxpar/peer", "fxpar", "peer"),
    ("ratio_plain", "plain/peer", "plain", "peer"),
    ("ratio_of_plain", "fxpar/plain", "fxpar", "plain"),
    ("ratio_as_peer", "as_peer/peer", "as_peer", "peer"),
    ("ratio_program", "program/peer", "program", "peer"),
    ("ratio_of_update", "program/update", "program", "update"),
    ("ratio_sample", "sample/peer", "sample", "peer"),
    ("ratio_propagate", "propagate/peer", "propagate", "peer"),
    ("ratio_propagate_sample", "propagate_sample/peer", "propagate_sample", "peer"),
)
PLANS = {  # side -> (plan, whether fxpar.shard is given a batch)
    "fxpar": ("search", False),
    "sample": ("search", True),
    "propagate": ("propagate", False),
    "propagate_sample": ("propagate", True),
}
WARMUP = 3
AGREE = 1e-4  # relative difference of losses; the seeds of a mistake are far larger


def sides_of(args: argparse.Namespace, case: Case) -> dict[str, Step]:
    """Each side's step, none of them compiled yet."""
    peer = args.peer[0]
    if args.plans:
        out = {"peer": PEERS[peer](case, args.compile, False)}
        for name, (plan, sample) in PLANS.items():
            out[name] = _planned(peer, case, plan, sample)
        return out
    out = {
        "peer": PEERS[peer](case, args.compile, False),
        "update": PEERS[peer](case, args.compile, True),
    }
    for name, schedule, side in (
        ("fxpar", "auto", fxpar_side),
        ("plain", "none", fxpar_side),
        ("as_peer", "auto", functools.partial(fxpar_side, as_peer=True)),
        ("program", "auto", one_program),
    ):
        if name == "as_peer" and peer not in LAYOUTS:
            continue
        options: dict[str, Any] = {"schedule": schedule}
        if args.hardware:
            options["hardware"] = args.hardware
        if args.tune and name == "fxpar":
            options["tune"] = True
        out[name] = side(peer, case, options)
    return out


def case_of(args: argparse.Namespace, ranks: int) -> Case:
    wide: dict[str, Any] = {"layers": 4, "batch": 4, "length": 64, "scale": "512"}
    return Case(ranks, codegen=args.codegen, **(wide if args.plans else {}))


def _planned(peer: str, case: Case, plan: str, sample: bool) -> Step:
    """Return fxpar's step; a sample's layout is that of the plan, which
    ``fxpar.shard`` takes from the environment."""
    with mock.patch.dict(os.environ, FXPAR_PLAN=plan):
        return fxpar_side(peer, case, {"plan": plan}, sample=sample)


def worker(args: argparse.Namespace) -> None:
    """What each rank runs: build all sides, warm up, alternate, write the figures."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sides = sides_of(args, case_of(args, dist.get_world_size()))
    first = {}
    for name, step in sides.items():
        begun = time.perf_counter()
        step(0)
        first[name] = time.perf_counter() - begun
    worst = max(disagreement(sides, range(1, WARMUP)).values())
    if worst > AGREE:
        raise SystemExit(f"losses differ by {worst:.1e} relative: no comparison")
    seen = {name: watched(lambda s=step: s(WARMUP)) for name, step in sides.items()}

    quiet = Quiet(args.lock if rank == 0 else None, args.hold)
    times = in_turn(sides, args.pairs, WARMUP, quiet.alone)
    if rank == 0:
        data = {
            "times": [
                [[None if math.isnan(t) else t for t in side] for side in round_]
                for round_ in times.tolist()
            ],
            "loss_difference": worst,
            "first_step": first,
            "sent": {name: each.figures() for name, each in seen.items()},
        }
        Path(args.worker).write_text(json.dumps(data))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    peer: str, ranks: int, words: list[str], compiled: str, jobs: int
) -> dict[str, Any]:
    """Run the ranks of one comparison; its figures."""
    cores = max(1, (os.cpu_count() or 1) // ranks)
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads}
    words = ["--peer", peer, *words]
    each = []
    for _ in range(jobs):
        with tempfile.TemporaryDirectory() as cache:
            own = {"TORCHINDUCTOR_CACHE_DIR": cache} if jobs > 1 else {}
            both = environment | own
            out = on_ranks(__file__, ranks, *words, timeout=1800, environment=both)
        each.append(out)
    data = each[-1] | {"times": [round_ for out in each for round_ in out["times"]]}
    data["loss_difference"] = max(out["loss_difference"] for out in each)
    if jobs > 1:
        data["sent_by_job"] = [out["sent"] for out in each]
    figures: dict[str, Any] = {"peer": peer, "mesh": f"{AXIS[peer]}={ranks}"}
    figures["compiled"] = compiled if peer == "fsdp2" else "whole"
    for j, what in enumerate(("forward_backward", "step")):
        columns = {
            name: [round_[i][j] for round_ in data["times"]]
            for i, name in enumerate(data["sent"])
        }
        seconds = {name: each for name, each in columns.items() if each[0] is not None}
        figures[what] = {
            f"{name}_seconds": spread(each) for name, each in seconds.items()
        } | {
            key: _ratio(seconds[ours], seconds[theirs])
            for key, _, ours, theirs in RATIOS
            if {ours, theirs} <= seconds.keys()
        }
    return figures | data


def _ratio(ours: Any, theirs: Any) -> dict[str, float]:
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['mesh']} beside {figures['peer']}")
    step = figures["step"]
    for name, sent in figures["sent"].items():
        print(
            f"  {name:7} {step[f'{name}_seconds']['median'] * 1e3:7.1f} ms  "
            f"{sent['collectives']:3} collectives of {sent['bytes'] / 2**20:7.2f} MiB "
            f"({sent['moved'] / 2**20:7.2f} moved), {sent['small_collectives']} small  "
            f"peak {sent['peak'] / 2**20:6.1f} MiB  {sent['by_kind']}"
        )
    for what in ("forward_backward", "step"):
        shown = ", ".join(
            f"{said} {case['median']:.3f} [{case['q1']:.3f}, {case['q3']:.3f}]"
            for key, said, *_ in RATIOS
            if key in figures[what]
            for case in [figures[what][key]]
        )
        print(f"  {what}: {shown} of {figures[what]['ratio']['n']} rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="7 rounds instead of 30")
    parser.add_argument("--peer", choices=sorted(PEERS), action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--pairs", type=int, help="rounds")
    parser.add_argument("--jobs", type=int, default=1, help="each with so many rounds")
    parser.add_argument("--codegen", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--compile", choices=["layers", "whole"], default="layers")
    parser.add_argument("--hardware", help="what schedules are chosen for")
    parser.add_argument("--tune", action="store_true", help="and measured")
    parser.add_argument("--lock", help="a file other jobs lock while they compute")
    parser.add_argument("--hold", action="store_true", help="keep the cores meanwhile")
    parser.add_argument("--plans", action="store_true", help="fxpar's plans by option")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.pairs = args.pairs or (7 if args.short else 30)
    if args.worker:
        worker(args)
        return
    before = conditions()
    words = ["--pairs", str(args.pairs), "--codegen", args.codegen]
    words += ["--compile", args.compile]
    for name in ("hardware", "lock"):
        words += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    words += [f"--{name}" for name in ("tune", "hold", "plans") if getattr(args, name)]
    cases = []
    for ranks in args.ranks or [2]:
        for peer in args.peer or sorted(PEERS):
            cases.append(measure(peer, ranks, words, args.compile, args.jobs))
            show(cases[-1])
    data = {"conditions": before, "model": asdict(case_of(args, 0))}
    write(args.json, "bench_step", data | {"cases": cases})


if __name__ == "__main__":
    main()
