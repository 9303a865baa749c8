"""Steps of fxpar compared with DDP, FSDP2 and tensor parallelism on GPUs, all compiled.

    python benchmarks/gpu_peers.py [--ranks 2] [--devices 1] [--limit SECONDS]
        [--sides NAME ...] [--json FILE] [--try]

A Llama of 8 layers and width 1024 in bfloat16, AdamW. Ranks share one device by NCCL
over sockets (``tests/helpers/shared_gpu.py``): links are slow then, and kernels take
turns, so ratios say more than seconds; with as many devices as ranks each has its own.
Sides are those of ``bench_first_step``: on a mesh dp ``ddp``, ``fsdp2``, ``fxpar`` (as
the README says), ``as_ddp`` (parameters whole), ``program`` (``fxpar.train_step``); on
a mesh tp ``tp``, ``fxpar_tp``, ``as_tp`` (parameters in the peer's layout),
``program_tp``.

Cells run in order, each as one process for each rank, which ends when its time is over;
a cell is skipped if no time is left for it:

- ``dp`` and ``tp``: all sides of a mesh in the same processes. First steps, each with
  empty caches of its own (``cold``: seconds from before the model is made); the peak
  memory of a rank in forward and backward (in a whole step of ``train_step``) and that
  of the plan; then, if losses agree, steps in turn: medians with quartiles, and ratios
  to the mesh's peers.
- each side by itself: ``warm``, a first step with the caches that the cold one left.

A side that fails is left out, with its error. The table is written after every cell, as
JSON and as markdown. ``--try`` runs all of it on the CPU with gloo, a tiny model and no
generated kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_parts
from _common import ROOT, conditions, spread
from gpu_parts import Outcome, add_arguments, write_json, write_text

from tests.helpers.shared_gpu import NCCL, OVERLAPPING

if TYPE_CHECKING:
    from _peers import Case, Step
    from gpu_here import Here

# name of a mesh -> its sides, the peers first
MESHES = {
    "dp": ("ddp", "fsdp2", "fxpar", "as_ddp", "program"),
    "tp": ("tp", "fxpar_tp", "as_tp", "program_tp"),
}
PEER_SIDES = {"dp": ("ddp", "fsdp2"), "tp": ("tp",)}
LIMIT, TRY_LIMIT = 480.0, 2400.0
SPARE = 5.0  # seconds kept for the end
# (most, least) seconds of a cell: for each side of a mesh, and for a side by itself.
OF_MESH, OF_SIDE = (55.0, 12.0), (50.0, 12.0)
SLOWER = 4.0  # factor of a try-out's limits over those of a GPU
WARMUP, ROUNDS, MOST = 3, 5, 15
STEADY = 40.0  # seconds of a mesh's rounds, of which there are ROUNDS to MOST
# Largest relative difference of losses: bfloat16 sums in another order.
NEAR = 2e-2
PATIENCE = datetime.timedelta(seconds=300)
# A user's settings; ``gpu_parts`` has others, for parts that measure kernels.
AS_USERS = {"FXPAR_PLAN": "search", "FXPAR_SCHEDULE": "auto"}


# The run.


def run(args: argparse.Namespace) -> int:
    """Run all cells, one after the other, and return the exit status: 1 if a side
    failed."""
    begun = time.monotonic()
    limit = args.limit or (TRY_LIMIT if args.try_out else LIMIT)
    slower = SLOWER if args.try_out else 1.0
    cells = cells_of(args.sides)
    environment = environment_of(args)
    done: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(
        prefix="gpu_peers_", ignore_cleanup_errors=True
    ) as word:
        mode = "try" if args.try_out else "gpu"
        place = Path(word), environment

        def start(name: str) -> gpu_parts.Running:
            return gpu_parts.start(Path(__file__), name, mode, args.ranks, *place)

        ready = start(next(iter(cells)))
        for name, following in zip(cells, [*cells, ""][1:], strict=True):
            now = ready
            most, least = (slower * x for x in cells[name])
            if following:
                ready = start(following)  # it imports what it needs meanwhile
            left = limit - (time.monotonic() - begun) - SPARE
            if left < least:
                gpu_parts.end(now)
                done[name] = Outcome("skipped", 0.0)
            else:
                done[name] = gpu_parts.finish(now, min(most, left))
            print(f"{name}: {said(done[name])}", flush=True)
            write(args, done, time.monotonic() - begun)
    rows = rows_of(done)
    print(markdown(rows, done))
    lost = any(outcome.status not in ("done", "skipped") for outcome in done.values())
    return int(lost or any("failed" in row for row in rows.values()))


def cells_of(sides: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the cells, meshes before sides, with the (most, least) seconds of each."""
    cells: dict[str, tuple[float, float]] = {}
    for mesh, names in MESHES.items():
        count = len(set(names) & {*sides})
        if count:
            cells[mesh] = count * OF_MESH[0], count * OF_MESH[1]
    order = [name for names in MESHES.values() for name in names]
    # What counts most goes first, so that a lack of time hits what counts least.
    order.sort(key=lambda name: (not name.startswith("fxpar"), name.startswith("as_")))
    return cells | {f"warm-{name}": OF_SIDE for name in order if name in sides}


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a rank's process, with "{rank}" for its number."""
    cores = max(1, (os.cpu_count() or 1) // args.ranks)
    out = AS_USERS | {"TORCHINDUCTOR_COMPILE_THREADS": str(cores)}
    out |= {"GPU_PEERS_SIDES": " ".join(args.sides)}
    if args.try_out:
        return out
    if args.devices < args.ranks:
        if args.devices > 1:
            raise SystemExit("ranks share one device, or each has its own")
        return out | NCCL | OVERLAPPING
    return out | {"LOCAL_RANK": "{rank}"}


def said(outcome: Outcome) -> str:
    """Describe in a line how a cell ended."""
    if outcome.status == "skipped":
        return "skipped, no time was left"
    lines = [line.strip() for line in outcome.tail.splitlines() if line.strip()]
    why = f"; {lines[-1][:200]}" if lines and outcome.status != "late" else ""
    return f"{outcome.status}, {outcome.seconds:.0f} s{why}"


def write(args: argparse.Namespace, done: Mapping[str, Outcome], wall: float) -> None:
    """Write the results so far, as JSON and markdown."""
    rows = rows_of(done)
    place = Path(args.json)
    data = {
        "command": " ".join(["python", "benchmarks/gpu_peers.py", *sys.argv[1:]]),
        "mode": "try" if args.try_out else "gpu",
        "seconds": wall,
        "ranks": args.ranks,
        "devices": args.devices,
        "sides": rows,
        "cells": {name: asdict(outcome) for name, outcome in done.items()},
    }
    write_json(place, data)
    write_text(place.with_suffix(".md"), markdown(rows, done))


def rows_of(done: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Merge the rows that cells reported into one for each side."""
    rows: dict[str, dict[str, Any]] = {}
    for outcome in done.values():
        for row in outcome.rows:
            if "side" in row:
                side = rows.setdefault(row["side"], {})
                side |= {k: v for k, v in row.items() if k != "side"}
    return rows


HEAD = (
    "| mesh | side | first step, cold, s | warm, s | step, ms | over its peers | "
    "rank's peak, MiB | the plan's |"
)


def markdown(rows: Mapping[str, Mapping[str, Any]], done: Mapping[str, Outcome]) -> str:
    """Format the table, what was skipped or failed, and the machine it ran on."""
    lines = [HEAD, "|" + "---|" * HEAD.count(" |")]
    for mesh, names in MESHES.items():
        for name in names:
            if name in rows:
                lines.append("| " + " | ".join(_texts(mesh, name, rows[name])) + " |")
    lines.append("")
    for name, outcome in done.items():
        if outcome.status != "done":
            lines.append(f"- {name}: {said(outcome)}")
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"- {name} failed: {row['failed']}")
    facts = next(
        (r["facts"] for o in done.values() for r in o.rows if "facts" in r), {}
    )
    lines.append("- " + ", ".join(f"{k} {v}" for k, v in facts.items()))
    return "\n".join(lines) + "\n"


def _texts(mesh: str, name: str, row: Mapping[str, Any]) -> list[str]:
    """Return the texts of a row of the table."""

    def number(key: str, form: str, scale: float = 1.0) -> str:
        return format(row[key] / scale, form) if row.get(key) is not None else "-"

    def quartiles(x: Mapping[str, float], form: str, scale: float = 1.0) -> str:
        q1, middle, q3 = (format(x[k] * scale, form) for k in ("q1", "median", "q3"))
        return f"{middle} [{q1}, {q3}]"

    step = quartiles(row["step"], ".1f", 1e3) if "step" in row else "-"
    over = [f"{peer} {quartiles(x, '.2f')}" for peer, x in row.get("over", {}).items()]
    return [
        mesh,
        name,
        number("cold", ".1f"),
        number("warm", ".1f"),
        step,
        ", ".join(over) or "-",
        number("peak", ".1f", 2**20),
        number("plan_peak", ".1f", 2**20),
    ]


# A cell's processes.


def cell(name: str) -> Callable[[Here], None]:
    """Return the function that a cell's processes call."""
    import transformers  # noqa: F401  (imports are no part of a first step)

    import fxpar.backend  # noqa: F401

    if name in MESHES:
        return lambda here: compare(here, name)
    return lambda here: warm(here, name.removeprefix("warm-"))


def case_of(here: Here) -> Case:
    """Return what is trained: on a GPU, or tiny in a try-out."""
    from _peers import Case

    rows = 2 * here.ranks
    real = {"layers": 8, "length": 1024, "scale": "1024", "dtype": "bfloat16"}
    tiny = {"layers": 2, "length": 32, "scale": "tiny", "dtype": "bfloat16"}
    codegen = here.pick("inductor", "eager")
    sizes = here.pick(real, tiny)
    return Case(
        here.ranks, batch=rows, device=str(here.device), codegen=codegen, **sizes
    )


def begin(here: Here) -> None:
    """Join the group of all ranks, and run the first collective and kernel, which are
    not to be measured."""
    import torch
    import torch.distributed as dist

    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"):
        from fxpar.runtime.ranks import groups

        # Ranks that share a device are an error elsewhere.
        groups.check_sharing = lambda hosts, devices: None
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if here.is_gpu else "gloo", timeout=PATIENCE
    )
    x = torch.ones(64, 64, device=here.device)
    dist.all_reduce(x @ x)
    here.sync()


@contextlib.contextmanager
def caches_of(side: str) -> Iterator[None]:
    """Let compilers use caches in a folder of a side, shared by all ranks."""
    from torch._inductor.utils import clear_caches

    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ[name] for name in names}
    own = f"{before[names[0]]}-{side}"
    os.environ |= {names[0]: own, names[1]: f"{own}/triton"}
    clear_caches()
    try:
        yield
    finally:
        os.environ |= before


def first_step(here: Here, side: str, case: Case) -> tuple[Step | None, str, float]:
    """Run the first step of a side, and return (step, "", seconds of the slowest rank),
    or (None, why it failed, seconds) if it fails on some rank."""
    import torch
    import torch.distributed as dist
    from _peers import SIDES

    step, why = None, ""
    begun = time.perf_counter()
    try:
        step = SIDES[side](case)
        step(0)
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    seconds = time.perf_counter() - begun
    worst = torch.tensor([seconds, float(bool(why))], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst[1] and not why:
        why = "another rank failed"
    return (None if why else step), why, float(worst[0])


def warm(here: Here, side: str) -> None:
    """Time a first step with the caches that an earlier one left."""
    begin(here)
    with caches_of(side):
        _, why, seconds = first_step(here, side, case_of(here))
    here.tell(side=side, **({"failed": why} if why else {"warm": seconds}))


def compare(here: Here, mesh: str) -> None:
    """Measure all sides of a mesh: first steps, memory, losses, steps in turn."""
    from _peers import disagreement

    begin(here)
    tell_facts(here)
    case, asked = case_of(here), os.environ["GPU_PEERS_SIDES"].split()
    sides: dict[str, Step] = {}
    for name in (x for x in MESHES[mesh] if x in asked):
        known = len(plans())
        with caches_of(name):
            step, why, seconds = first_step(here, name, case)
        if step is None:
            here.tell(side=name, failed=why)
            continue
        here.tell(side=name, cold=seconds)
        sides[name] = step
        made = plans()[known:]
        held = max(plan.held_bytes for plan in made) if made else None
        here.tell(side=name, peak=peak_of(here, step), plan_peak=held)
    if not sides:
        return
    begun = time.perf_counter()
    for name, difference in disagreement(sides, range(2, 2 + WARMUP)).items():
        here.tell(side=name, disagreement=difference)
        if difference > NEAR:
            here.tell(
                side=name,
                failed=f"its losses differ by {difference:.1e} from the first side's",
            )
            del sides[name]
    steady(here, mesh, sides, (time.perf_counter() - begun) / WARMUP)


def plans() -> list[Any]:
    """Return the plans made in this process."""
    import fxpar

    return fxpar.plans()


def tell_facts(here: Here) -> None:
    """Report the machine and versions of a measurement."""
    import torch

    facts = {k: v for k, v in conditions().items() if k != "command"}
    if here.is_gpu:
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    here.tell(facts=facts)


def peak_of(here: Here, step: Step) -> int:
    """Measure bytes of this rank at its peak in forward and backward: parameters, the
    optimizer's state, and all that is allocated meanwhile."""
    import torch
    from _peers import state_bytes

    run = step.passes or step.run
    if here.is_gpu:
        here.sync()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(1)
        here.sync()
        besides = torch.cuda.max_memory_allocated() - before
    else:
        from _traffic import watched

        besides = watched(lambda: run(1)).peak
    if step.passes:
        step.optimizer.step()
        step.optimizer.zero_grad()
    return sum(state_bytes(step)) + besides


def steady(here: Here, mesh: str, sides: Mapping[str, Step], round_: float) -> None:
    """Time steps in turn. ``round_``: about the seconds of a step of every side."""
    import torch
    import torch.distributed as dist
    from _peers import in_turn

    rounds = torch.tensor(min(MOST, max(ROUNDS, int(STEADY / max(round_, 1e-3)))))
    dist.all_reduce(rounds, dist.ReduceOp.MIN)
    times = in_turn(sides, int(rounds), 2 + WARMUP, contextlib.nullcontext)
    steps = {name: times[:, i, 1].tolist() for i, name in enumerate(sides)}
    for name, own in steps.items():
        over = {
            peer: spread([a / b for a, b in zip(own, steps[peer], strict=True)])
            for peer in PEER_SIDES[mesh]
            if peer in steps and peer != name
        }
        here.tell(side=name, step=spread(own), over=over)


def main() -> None:
    every = [name for names in MESHES.values() for name in names]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="GPUs that there are")
    parser.add_argument("--limit", type=float, help=f"seconds in all ({LIMIT:.0f})")
    parser.add_argument("--sides", nargs="+", choices=every, default=every)
    parser.add_argument("--json", default=str(ROOT / ".benchmarks" / "gpu_peers.json"))
    parser.add_argument("--try", dest="try_out", action="store_true", help="no GPU")
    add_arguments(parser)
    args = parser.parse_args()
    args.ranks = args.ranks or 2
    if args.part:
        gpu_parts.work(args, lambda: cell(args.part))
    raise SystemExit(run(args))


if __name__ == "__main__":
    main()
