"""Time to the end of the first step: fxpar and peers with torch.compile.

    python benchmarks/bench_first_step.py [--short] [--layers N] [--ranks N]
        [--repeat N] [--side SIDE ...] [--scale NAME] [--device cpu|cuda] [--json FILE]

A Llama of hidden size 256 (``--scale``: a key of ``_common.LLAMAS``), forward, backward
and AdamW. Each run is a job of its own: ``cold`` with empty caches, then ``warm``, the
same job again with the caches that the cold one left. ``ddp``, ``fsdp2``, ``tp`` and
``sp`` are the peers of ``bench_step``.

``fxpar`` does what the README says (``fxpar.shard`` with neither hints nor a sample, a
search, the schedule it chooses) on a mesh dp, where it reads the same part of a batch
as DDP (inputs=local), ``fxpar_tp`` on a mesh tp; in ``as_ddp`` and ``as_tp`` parameters
at rest have the peer's layout; ``program``, ``program_tp``: ``fxpar.train_step``. Sides
alternate, run by run.

``first``: seconds from before the model is made to the end of the first step, of the
slowest rank. ``cpu``: CPU seconds of all ranks and of what they started in that time,
which other jobs on the machine change little; ``step_cpu``: of these, from the first
call of the model on; ``job_cpu``: of the whole job, imports and helpers of the compiler
included. ``second``: seconds of the second step.
``stages``, of a side that fxpar compiles: seconds of each stage on rank 0, which
compiles, and, if there is one, on rank 1, which is handed what rank 0 made.

With ``--device cuda`` the model is bfloat16, sides are ``ddp``, ``fsdp2`` and
``fxpar``, layers 8 and 32, and each GPU has a rank; a single one has two, by NCCL over
sockets (``tests/helpers/shared_gpu.py``): that slows collectives, not compilers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import _peers
from _common import conditions, write

from tests.helpers.shared_gpu import NCCL, OVERLAPPING

STATES = ("cold", "warm")
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
LIMIT = 900  # seconds that one job may take
_SUBREAPER = 36  # of prctl: orphans become this process's children


def cpu_seconds() -> float:
    """Of this process and of the children that ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def seconds_of(table: str) -> dict[str, float]:
    """Of each stage, from the text of a table."""
    rows = [line.rsplit(None, 1) for line in table.splitlines()]
    return {name.strip(): float(taken) for name, taken in rows}


def worker(args: argparse.Namespace) -> None:
    """What each rank runs: two steps, the first of which compiles."""
    import torch
    import torch.distributed as dist
    import transformers  # noqa: F401  (imports are no part of a first step)

    import fxpar.compilation
    from fxpar._fast import switch
    from fxpar.runtime import stage_times

    switch.LEFT_OUT.update(args.leave_out or ())
    torch.set_num_threads(1)
    of_device = join(args.device)
    dist.barrier()
    begun, cpu = time.perf_counter(), cpu_seconds()
    one_table = mock.patch.object(fxpar.compilation, "stage_table", str)
    with one_table:  # of forward and backward
        ranks, layers = dist.get_world_size(), args.layers[0]
        case = _peers.Case(ranks, layers=layers, scale=args.scale, **of_device)
        step = _peers.SIDES[args.side[0]](case)
        made = cpu_seconds() - cpu
        *_, loss = step(0)
    first, used = time.perf_counter() - begun, cpu_seconds() - cpu
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, stage_times.table())
    _, second, again = step(1)
    figures = torch.tensor([first, second, used, used - made], dtype=torch.float64)
    slowest = figures.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(figures)
    if dist.get_rank() == 0:
        data = {
            "first": float(slowest[0]),
            "second": float(slowest[1]),
            "cpu": float(figures[2]),
            "step_cpu": float(figures[3]),
            "losses": [float(loss), float(again)],
        }
        if args.side[0] not in _peers.PEERS:
            data["stages"] = [seconds_of(table) for table in stages[:2]]
        Path(args.worker).write_text(json.dumps(data))
    dist.barrier()
    # The end of a process frees DDP's reducer, which holds Python's lock and waits for
    # a thread of gloo, which may wait for the lock (torch 2.13).
    os._exit(0)


def join(kind: str) -> dict[str, str]:
    """Join the group of all ranks; what this rank's ``Case`` has of its device."""
    import torch
    import torch.distributed as dist

    if kind == "cpu":
        dist.init_process_group("gloo")
        return {}
    rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if devices < int(os.environ["WORLD_SIZE"]):
        from fxpar.runtime.ranks import groups

        for name, word in {**NCCL, **OVERLAPPING}.items():
            os.environ[name] = word.format(rank=rank)
        # Ranks that share a device are an error elsewhere.
        groups.check_sharing = lambda hosts, devices: None
    device = f"cuda:{rank % devices}"
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    dist.all_reduce(torch.ones(1, device=device))  # NCCL's start is not measured
    return {"device": device, "dtype": DTYPES["cuda"]}


def run(
    side: str,
    layers: int,
    ranks: int,
    cache: str,
    scale: str = "small",
    leave_out: Sequence[str] = (),
    device: str = "cpu",
) -> dict[str, Any]:
    """One job; its figures. ``leave_out``: names of ``fxpar._fast.switch.shortcut``
    that are not taken."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "FXPAR_SCHEDULE": "auto",
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
    }
    cores = max(1, (os.cpu_count() or 1) // ranks)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--master-port", str(port), "--nproc-per-node", str(ranks)]
        command += [__file__, "--worker", out, "--side", side, "--layers", str(layers)]
        command += ["--scale", scale, "--device", device]
        command += [word for name in leave_out for word in ("--leave-out", name)]
        before = cpu_of_children()
        subprocess.run(command, env=environment, check=True, timeout=LIMIT)
        data = json.loads(Path(out).read_text())
    return data | {"job_cpu": cpu_of_children() - before}


def cpu_of_children() -> float:
    """CPU seconds of all jobs so far, of what they left behind too."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(
    sides: list[str], layers: int, ranks: int, repeat: int, scale: str, device: str
) -> dict[str, Any]:
    """Cold and warm runs of all sides in turns."""
    runs: dict[str, Any] = {side: {state: [] for state in STATES} for side in sides}
    for _ in range(repeat):
        for side in sides:
            with tempfile.TemporaryDirectory() as cache:
                for state in STATES:
                    figures = run(side, layers, ranks, cache, scale, device=device)
                    runs[side][state].append(figures)
    return {"layers": layers, "ranks": ranks, "runs": runs}


def show(case: dict[str, Any]) -> None:
    """Medians, and ratios to the first side."""
    print(f"{case['layers']} layers, {case['ranks']} ranks")
    least: dict[tuple[str, str], float] = {}
    for side, states in case["runs"].items():
        for state, runs in states.items():
            parts = []
            for what in ("first", "cpu", "step_cpu", "job_cpu", "second"):
                median = statistics.median(each[what] for each in runs)
                base = least.setdefault((state, what), median)
                parts.append(f"{what} {median:7.2f} s ({median / base:4.2f})")
            print(f"  {side:8} {state}  {'  '.join(parts)}  n={len(runs)}", flush=True)
            for rank, stages in enumerate(runs[-1].get("stages", ())):
                listed = ", ".join(f"{name} {s:.2f}" for name, s in stages.items() if s)
                print(f"    rank {rank}: {listed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="2 layers, 2 ranks, once")
    parser.add_argument("--layers", type=int, action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--side", choices=_peers.SIDES, action="append")
    parser.add_argument("--scale", choices=_peers.LLAMAS, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json")
    parser.add_argument("--leave-out", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # Linux; elsewhere job_cpu lacks helpers
    before, cases = conditions(), []
    usual: tuple[list[int], list[int], list[str]] = [2, 8], [1, 2, 4], ["ddp", "fxpar"]
    if args.device == "cuda":
        import torch

        devices = torch.cuda.device_count()
        usual = [8, 32], [max(2, devices)], ["ddp", "fsdp2", "fxpar"]
        before["gpu"] = torch.cuda.get_device_name()
    for layers in args.layers or ([2] if args.short else usual[0]):
        for ranks in args.ranks or ([2] if args.short else usual[1]):
            repeat = args.repeat or (1 if args.short else 3)
            sides, how = args.side or usual[2], (args.scale, args.device)
            cases.append(measure(sides, layers, ranks, repeat, *how))
            show(cases[-1])
    data = {
        "conditions": before,
        "model": asdict(
            _peers.Case(
                0, scale=args.scale, device=args.device, dtype=DTYPES[args.device]
            )
        ),
        "cases": cases,
    }
    write(args.json, "bench_first_step", data)


if __name__ == "__main__":
    main()
