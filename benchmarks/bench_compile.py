"""What planning costs: seconds per stage for a Llama of 8B width, by layers and ranks.

    python benchmarks/bench_compile.py [--short] [--json FILE]

Parameters and inputs are fake tensors, so nothing is allocated; forward and backward
are planned together. The graph of one depth is the same for every mesh (the batch
divides over the largest), so rows of equal layers differ by the ranks alone.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from typing import Any

from _common import conditions, llama, write

MESHES = {8: "dp=2,tp=4", 512: "dp=64,tp=8", 65536: "dp=8192,tp=8"}
BATCH, LENGTH = 8192, 128


def plan_once(layers: int, mesh: str) -> dict[str, Any]:
    """Build the model on fake tensors and plan it; seconds by stage."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxpar

    with FakeTensorMode():
        model = llama(layers, scale="8b")
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    begun = time.perf_counter()
    plan = fxpar.plan(
        model, input_ids=ids, labels=ids, mesh=mesh, mode="propagate", grad=True
    )
    return {
        "total": time.perf_counter() - begun,
        "stages": dict(plan.timings),
        "ops": len(plan.nodes),
        "collectives": len(plan.collectives),
    }


def measure(layers: int, mesh: str, repeat: int) -> dict[str, Any]:
    """Medians over repeats, each from scratch."""
    runs = []
    for _ in range(repeat):
        gc.collect()
        runs.append(plan_once(layers, mesh))
    stages = {
        stage: statistics.median(run["stages"][stage] for run in runs)
        for stage in runs[0]["stages"]
    }
    return {
        **runs[0],
        "stages": stages,
        "total": statistics.median(run["total"] for run in runs),
        "totals": [run["total"] for run in runs],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """One line per case; stages are columns, in the order they ran."""
    stages = list(rows[0]["stages"])
    head = ["layers", "ranks", "ops", *stages, "total s", "peak MiB"]
    table = [head] + [
        [
            str(row["layers"]),
            str(row["ranks"]),
            str(row["ops"]),
            *(f"{row['stages'][stage]:.2f}" for stage in stages),
            f"{row['total']:.2f}",
            f"{row['peak_mib']:.0f}",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(word.rjust(w) for word, w in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="8 layers, two meshes")
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    depths = (8,) if args.short else (8, 16, 32)
    meshes = (8, 65536) if args.short else tuple(MESHES)
    repeat = args.repeat or (1 if args.short else 3)

    before = conditions()
    plan_once(1, MESHES[8])  # imports and caches that a process pays for once
    rows = []
    for layers in depths:
        for ranks in meshes:
            row = {"layers": layers, "ranks": ranks, "mesh": MESHES[ranks]}
            rows.append(row | measure(layers, MESHES[ranks], repeat))
            print(f"  {layers} layers, {ranks} ranks: {rows[-1]['total']:.2f} s")
    show(rows)
    data = {"conditions": before, "batch": BATCH, "length": LENGTH, "rows": rows}
    write(args.json, "bench_compile", data)


if __name__ == "__main__":
    main()
