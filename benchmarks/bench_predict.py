"""What plans are predicted to take, against what they take: on CPU, by gloo ranks.

    python benchmarks/bench_predict.py calibrate measure report [--cells WORD]
        [--folder FOLDER] [--lock FILE] [--hold] [--pin] [--json FILE] [--svg FILE]

- ``calibrate``: this machine with every number of ranks that cells have, all at work
  at once, into ``hardware_<ranks>.json``: ranks share the cores, so that rates differ.
- ``measure``: each cell (model, mesh, plan) by torchrun, compiled by Inductor, one
  thread a rank: the median of forward and backward over steps after the warm-up, the
  slowest rank's. A cell that is in FOLDER already is not measured again.
- ``report``: each cell predicted by ``fxpar.plan``, from the calibrated files alone;
  rank correlation, errors, and a plot. A cell whose compiled step sends something else
  than the plan that was predicted is listed, and not counted.

Cells of ``HELD_MODELS`` and ``HELD_MESHES`` (``predict_cells``) were not looked at
while the model of costs was made; they are reported apart.

A measurement is good on a quiet machine only: what share of the cores other processes
took meanwhile is measured with it, and where it is above ``NOISE`` the cell is measured
again, up to ``TRIES`` times; the quietest counts. ``--lock`` and ``--hold``: see
``_quiet``. ``--pin``: each rank keeps to one core, neighbours to the same, in
calibration and measurement. Where ranks are more than cores, one that waits else lends
its core to those it waits for, which no machine with a device for each rank does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _common import ROOT, conditions, write
from _quiet import Quiet, busy_seconds
from _scatter import plot
from predict_cells import CELLS, Cell, build

STEPS, WARMUP = 21, 4
NOISE, TRIES = 0.03, 8
# What each number of ranks is calibrated on.
CALIBRATED = {1: None, 2: "dp=2", 4: "dp=2,tp=2"}


def measured(step: Callable[[], float], quiet: Quiet) -> dict[str, Any]:
    """The quietest of a few measurements: seconds of each step, the slowest rank's;
    ``cpu``: those that all ranks computed in a step; ``noise``: the share of the cores
    that others took."""
    import torch
    import torch.distributed as dist

    best: dict[str, Any] = {"noise": float("inf")}
    for _ in range(TRIES):
        with quiet.alone():
            dist.barrier()
            step()
            begun, before, own = time.monotonic(), busy_seconds(), time.process_time()
            taken = torch.tensor([step() for _ in range(STEPS)], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            mine = torch.tensor(time.process_time() - own, dtype=torch.float64)
            dist.all_reduce(mine)
            wall, after = time.monotonic() - begun, busy_seconds()
        noise = 0.0
        if before is not None and after is not None:
            noise = (after - before - float(mine)) / wall / (os.cpu_count() or 1)
        verdict = torch.tensor(noise, dtype=torch.float64)
        dist.broadcast(verdict, 0)
        if float(verdict) < best["noise"]:
            cpu = float(mine) / STEPS
            best = {"noise": float(verdict), "seconds": taken.tolist(), "cpu": cpu}
        if best["noise"] <= NOISE:
            break
    return best


def worker(cell: Cell, args: argparse.Namespace) -> None:
    """What each rank runs: compile, warm up, measure, write the figures."""
    import torch
    import torch.distributed as dist

    import fxpar

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    quiet = Quiet(args.lock if rank == 0 else None, args.hold)
    model, batch = build(cell.model)
    options = {"mesh": cell.mesh, "plan": cell.mode}
    hints = cell.hints(model)
    options |= {"hints": hints, "hardware": args.hardware}
    # fxpar.plan lets parameters rest as the plan has them; so must what is measured.
    if cell.plan == "megatron":
        model = fxpar.shard(model, mesh=cell.mesh, hints=hints)
    if cell.plan == "search":
        os.environ |= {"FXPAR_PLAN": "search", "FXPAR_HARDWARE": args.hardware}
        model = fxpar.shard(model, mesh=cell.mesh, sample=((), batch))
    compiled = torch.compile(model, backend="fxpar", dynamic=False, options=options)

    def step() -> float:
        dist.barrier()
        begun = time.perf_counter()
        compiled(**batch).backward()
        taken = time.perf_counter() - begun
        model.zero_grad()
        return taken

    for _ in range(WARMUP):
        step()
    found = measured(step, quiet)
    (plan,) = fxpar.plans()
    found["sent"] = traffic(plan)
    if rank == 0:
        Path(args.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def traffic(plan: Any) -> dict[str, int]:
    """Bytes of a plan's collectives, by kind and axes: whether two plans are alike."""
    out: dict[str, int] = {}
    for made in plan.collectives:
        key = f"{made.kind} {'+'.join(made.axes)}"
        out[key] = out.get(key, 0) + made.bytes
    return dict(sorted(out.items()))


def alike(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two plans send the same, but for what weighs next to nothing."""
    whole = sum(one.values()) or 1
    keys = {*one, *other}
    return sum(abs(one.get(k, 0) - other.get(k, 0)) for k in keys) < 0.02 * whole


def pin(args: argparse.Namespace) -> None:
    """Keep this rank to its core, if asked to, before it has threads."""
    if args.pin:
        rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank * len(cores) // ranks]})


def launch(args: argparse.Namespace, ranks: int, *words: str) -> None:
    """Run this file in so many ranks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, *words]
    command += ["--hardware", str(_hardware(args.folder, ranks))]
    command += ["--lock", args.lock] if args.lock else []
    command += [f"--{word}" for word in ("hold", "pin") if getattr(args, word)]
    subprocess.run(command, env=environment, check=True, timeout=1800)


def _hardware(folder: str, ranks: int) -> Path:
    return Path(folder) / f"hardware_{ranks}.json"


def _file(folder: str, cell: Cell) -> Path:
    return Path(folder) / f"{cell.name.replace(' ', '_')}.json"


def calibrate(args: argparse.Namespace) -> None:
    for ranks in sorted({cell.ranks for cell in chosen(args.cells)}):
        if not _hardware(args.folder, ranks).exists():
            launch(args, ranks, "calibrator")


def calibrator(args: argparse.Namespace) -> None:
    """What each rank of a calibration runs."""
    import torch
    import torch.distributed as dist

    from fxpar.runtime.calibrate.measure import calibrate, describe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with Quiet(args.lock if rank == 0 else None, args.hold).alone():
        hardware = calibrate(CALIBRATED[size], limit=170.0)
    if rank == 0:
        hardware.save(args.hardware)
        print(describe(hardware), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> None:
    for cell in chosen(args.cells):
        target = _file(args.folder, cell)
        if target.exists():
            continue
        launch(args, cell.ranks, "worker", "--cells", cell.name, "--out", str(target))
        figures = json.loads(target.read_text())
        median = statistics.median(figures["seconds"])
        print(f"{cell.name:28} {median * 1e3:7.1f} ms", flush=True)


def chosen(word: str) -> list[Cell]:
    return [cell for cell in CELLS if word in cell.name]


def predicted(cell: Cell, folder: str) -> dict[str, Any]:
    """What the plan of a cell is predicted to take."""
    import fxpar

    os.environ["FXPAR_HARDWARE"] = str(_hardware(folder, cell.ranks))
    model, batch = build(cell.model)
    plan = fxpar.plan(
        model,
        mesh=cell.mesh,
        hints=cell.hints(model),
        mode=cell.mode,
        grad=True,
        **batch,
    )
    found = plan.predicted
    return {
        "seconds": found.seconds,
        "compute": found.compute,
        "exposed": found.exposed,
        "hidden": found.hidden,
        "sent": traffic(plan),
    }


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each cell that was measured: measured and predicted figures."""
    rows = []
    for cell in chosen(args.cells):
        if not _file(args.folder, cell).exists():
            continue
        real = json.loads(_file(args.folder, cell).read_text())
        guess = predicted(cell, args.folder)
        seconds = statistics.median(real["seconds"])
        row = {"model": cell.model, "mesh": cell.mesh, "plan": cell.plan}
        row |= {"held": cell.held, "measured": seconds, "noise": real["noise"]}
        row |= {"quartiles": statistics.quantiles(real["seconds"], n=4)[::2]}
        row |= {"predicted": guess["seconds"]}
        row |= {key: guess[key] for key in ("compute", "exposed", "hidden")}
        row |= {"error": guess["seconds"] / seconds - 1}
        row |= {"same_plan": alike(guess["sent"], real["sent"])}
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    mark = " (held out)" if row["held"] else ""
    mark += "" if row["same_plan"] else " (another plan)"
    return (
        f"| {row['model']}{mark} | {row['mesh']} | {row['plan']} "
        f"| {row['measured'] * 1e3:.1f} | {row['predicted'] * 1e3:.1f} "
        f"| {row['compute'] * 1e3:.1f} + {row['exposed'] * 1e3:.1f} "
        f"| {row['error']:+.0%} |"
    )


def ranking(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spearman's rank correlation, and absolute relative errors."""
    if len(rows) < 3:
        return {"cells": len(rows)}
    both = [[row[key] for row in rows] for key in ("measured", "predicted")]
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "cells": len(rows),
        "spearman": statistics.correlation(*map(ranking, both)),
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
    }


def report(args: argparse.Namespace) -> None:
    before = conditions()
    print("| model | mesh | plan | measured, ms | predicted, ms | compute + wait | |")
    print("|---|---|---|---|---|---|---|")
    rows = rows_of(args)
    same = [row for row in rows if row["same_plan"]]
    found = {
        "all": summary(same),
        "looked at": summary([row for row in same if not row["held"]]),
        "held out": summary([row for row in same if row["held"]]),
    }
    for which, figures in found.items():
        print(f"{which}: {figures}")
    if args.svg:
        Path(args.svg).write_text(plot(same))
    hardware = {
        str(ranks): json.loads(_hardware(args.folder, ranks).read_text())
        for ranks in CALIBRATED
        if _hardware(args.folder, ranks).exists()
    }
    data = {"conditions": before, "summary": found, "cells": rows, "pinned": args.pin}
    write(args.json, "bench_predict", data | {"hardware": hardware})


def main() -> None:
    stages = {"calibrate": calibrate, "measure": measure, "report": report}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=[*stages, "worker", "calibrator"])
    parser.add_argument("--cells", default="", help="only those with this in the name")
    parser.add_argument("--folder", default=str(ROOT / ".benchmarks" / "predict"))
    parser.add_argument("--lock", help="file that is locked while measuring")
    parser.add_argument("--hold", action="store_true", help="keep other jobs waiting")
    parser.add_argument("--pin", action="store_true", help="ranks keep to one core")
    parser.add_argument("--json")
    parser.add_argument("--svg")
    parser.add_argument("--hardware", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stages[0] in ("worker", "calibrator"):
        pin(args)
    if args.stages == ["worker"]:
        (cell,) = (cell for cell in CELLS if cell.name == args.cells)
        return worker(cell, args)
    if args.stages == ["calibrator"]:
        return calibrator(args)
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        stages[stage](args)


if __name__ == "__main__":
    main()
