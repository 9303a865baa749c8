"""The search on Llama shapes: how long, how much memory, how far from the best at most.

    python benchmarks/bench_search.py [--short] [--json FILE]

Parameters and inputs are fake tensors in bfloat16; forward and backward of the loss are
planned together for H100s, parameters free to lie as the plan wants, within 80 GB a
rank. ``price`` is the time to formulate the problem, ``solve`` the solver's; tracing is
left out. Beside the searched plan stand plans of experts, written as hints and
propagated, under the same cost model; inf where one is not a point of the space.
Each row runs in a process of its own, on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
from typing import Any

from _common import conditions, llama, write

# scale, layers, mesh, batch, length
ROWS = [
    ("8b", 32, "dp=8", 8, 4096),
    ("8b", 32, "dp=8,tp=8", 64, 4096),
    ("70b", 80, "dp=16,tp=8", 64, 4096),
    ("8b", 32, "pp=4,dp=8,tp=8", 256, 4096),
]
SHORT = [("8b", 2, "dp=8,tp=8", 64, 4096)]
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
EXPERTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp+tp": {
        **{f"*{name}.weight": ("tp", None) for name in COLUMNS},
        **{f"*{name}.weight": (None, "tp") for name in ("o_proj", "down_proj")},
    },
}


def run(scale: str, layers: int, mesh: str, batch: int, length: int) -> dict[str, Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxpar
    from fxpar.errors import FxparError
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.mesh import Mesh
    from fxpar.sharding.search.formulate import cost_of
    from fxpar.sharding.search.run_search import SearchOptions, search

    class Loss(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            return self.model(input_ids=ids, labels=ids).loss

    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        model = Loss(llama(layers, scale=scale))
        ids = torch.zeros(batch, length, dtype=torch.long)
    expert = "dp+tp" if "tp" in mesh else "dp"
    given = fxpar.plan(
        model,
        ids,
        mesh=mesh,
        mode="propagate",
        hints=EXPERTS[expert],
        grad=True,
        schedule="none",  # none is searched: this is about strategies
    )
    decision = given.result.decision
    found = search(
        decision.program, Mesh.parse(mesh), SearchOptions(lookup("h100")), {}
    )
    try:
        theirs = cost_of(found.formulation, decision.strategies).cost
    except FxparError:
        theirs = math.inf
    solution, problem = found.solution, found.formulation.problem
    return {
        "ops": len(decision.program.ops),
        "choices": len(problem.costs),
        "strategies": sum(map(len, problem.costs)),
        "price": found.built,
        "solve": solution.seconds,
        "gap": solution.gap,
        "cost": solution.cost,
        "peak": solution.peak,
        "expert": expert,
        "expert_over_found": theirs / solution.cost,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print("ROW", json.dumps(run(*json.loads(args.row))))
        return
    before, out = conditions(), []
    for row in SHORT if args.short else ROWS:
        command = [sys.executable, __file__, "--row", json.dumps(row)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("ROW")]
        if not lines:
            sys.exit(f"{row} failed:\n{done.stderr[-2000:]}")
        found = json.loads(lines[0].removeprefix("ROW"))
        scale, layers, mesh, batch, length = row
        out.append({"model": scale, "layers": layers, "mesh": mesh, **found})
        print(
            f"{scale} x{layers} {mesh:15} batch {batch}x{length}: {found['ops']} ops, "
            f"{found['strategies']} strategies, price {found['price']:.1f} s, solve "
            f"{found['solve']:.1f} s, gap {found['gap'] * 100:.3f}%, peak of a rank "
            f"{found['peak'] / 2**30:.1f} GiB, {found['expert']} costs "
            f"{found['expert_over_found']:.3f} of it, {found['rss'] / 2**30:.2f} GiB",
            flush=True,
        )
    write(args.json, "bench_search", {"conditions": before, "rows": out})


if __name__ == "__main__":
    main()
