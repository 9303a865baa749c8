"""FlexFlow's study under its own cost of synchronized parameters, predicted.

    python benchmarks/flexflow_sync.py [--only NET] [--gpus N] [--json FILE]

As ``flexflow.py``, but for gradients: the simulator of the paper's code (v1.0,
scripts/simulator.cc) lets every replica push a gradient and pull the parameter one
after the other, once the step is computed, so that n replicas of B bytes take
2 (n - 1) B over one link: 100 and 56 GB/s, as the paper has them. Activations cost what
they do on the cluster, nothing overlaps. A search under that cost against data
parallelism under the same: seconds of a step, those for parameters in them, and bytes
of parameters as all GPUs send them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, conditions
from flexflow import CELLS, JOINED, MESHES, RECURRENT, synchronized

from fxpar.sharding.search import formulate
from fxpar.sharding.search.formulate import ALONE, ProblemBuilder

# Bytes/s of the link between nodes, in the paper's unit.
LINKS = {"p100": 100e9, "k80": 56e9}
NETS = ("AlexNet", "NMT")


class PushAndPull(ProblemBuilder):
    """Prices with a parameter's replicas one after the other over one link."""

    @cached_property
    def gradients(self) -> frozenset[int]:
        """Values that are the gradient of a parameter, or a summand or view of one."""
        program = self.program
        declared = zip(program.signature.outputs, program.outputs, strict=True)
        queue = [v for out, v in declared if out.kind == "gradient" and v is not None]
        known = set(queue)
        while queue:
            v = queue.pop()
            if v not in program.producers:
                continue
            operands = program.ops[program.producers[v][0]].operands
            numel = program.values[v].numel
            alike = {u for u in operands if program.values[u].numel == numel} - known
            if len(operands) == sum(program.values[u].numel == numel for u in operands):
                known |= alike
                queue += alike
        return frozenset(known)

    def like(self, v: int) -> tuple[Any, ...]:
        return *super().like(v), v in self.gradients

    def between(self, v: int, have: Any, need: Any, alone: Any = ALONE) -> np.ndarray:
        table = super().between(v, have, need, alone)
        if v not in self.gradients:
            return table
        pool, table = self.pool.specs, table.copy()
        for i, j in np.ndindex(table.shape):
            left = dict(pool[need[j]].partial)
            axes = [axis for axis, _ in pool[have[i]].partial if axis not in left]
            if axes:
                table[i, j] = self._pushed(v, pool[have[i]], axes)
        return table

    def _pushed(self, v: int, spec: Any, axes: list[str]) -> float:
        """Seconds until the replicas over the axes hold the sum."""
        mesh, n = self.mesh, self.mesh.count(axes)
        groups = mesh.size / n / mesh.count(spec.sharded_axes)
        nbytes = 2 * (n - 1) * self.program.values[v].nbytes * groups
        return nbytes / LINKS[self.hardware.name]


def run(name: str, size: int, cluster: str) -> dict[str, Any]:
    from nets import STEPS, nets
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxpar

    os.environ["FXPAR_HARDWARE"] = cluster
    formulate.ProblemBuilder = PushAndPull  # type: ignore[misc]
    joined = JOINED if name in RECURRENT else 1
    net, how = nets(STEPS // joined)[name], {"mesh": MESHES[size], "grad": True}
    with FakeTensorMode():
        model, inputs = net.make(), net.inputs(net.batch * joined * size)
    begun = time.perf_counter()
    data = fxpar.plan(model, *inputs, mode="propagate", **how).result.decision
    plan = fxpar.plan(model, *inputs, mode="search", **how).result.decision
    found, spent = plan.search, time.perf_counter() - begun
    theirs = formulate.cost_of(found.formulation, data.strategies)
    row: dict[str, Any] = {"gap": found.solution.gap, "plan_seconds": spent}
    seconds = theirs.cost + found.formulation.launches, found.predicted
    for key, decision, step in zip(
        ("data", "search"), (data, plan), seconds, strict=True
    ):
        nbytes, replicas = synchronized(decision)
        row[key] = {
            "seconds": step,
            "parameter_seconds": nbytes / LINKS[cluster],
            "parameter_bytes": nbytes,
            "left": sorted(k for k, n in replicas.items() if n < decision.mesh.size),
            "parameters": len(replicas),
        }
    row["faster"] = seconds[0] / seconds[1]
    return row


def measured(name: str, size: int, cluster: str) -> dict[str, Any]:
    """``run`` in a process of its own."""
    command = [sys.executable, __file__, "--row", json.dumps([name, size, cluster])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW")]
    if not lines:
        raise SystemExit(f"{name} on {size} {cluster} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("ROW"))


def show(row: dict[str, Any]) -> str:
    data, plan = row["data"], row["search"]
    return (
        f"| {row['net']} | {row['gpus']} {row['cluster'].upper()} "
        f"| {data['seconds'] * 1e3:.1f} ({data['parameter_seconds'] * 1e3:.1f}) "
        f"| {plan['seconds'] * 1e3:.1f} ({plan['parameter_seconds'] * 1e3:.1f}) "
        f"| {row['faster']:.2f} | {data['parameter_bytes'] / 1e9:.1f} "
        f"| {plan['parameter_bytes'] / 1e9:.1f} "
        f"| {len(plan['left'])} of {plan['parameters']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", help="one network")
    parser.add_argument("--gpus", type=int, help="so many only")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print("ROW", json.dumps(run(*json.loads(args.row))))
        return
    path = Path(args.json or ROOT / ".benchmarks" / "flexflow_sync.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, before = [], conditions()
    for net in [args.only] if args.only else NETS:
        for cluster, size in CELLS:
            if args.gpus in (None, size):
                row = {"net": net, "cluster": cluster, "gpus": size}
                rows.append(row | measured(net, size, cluster))
                print(show(rows[-1]), flush=True)
                text = json.dumps({"conditions": before, "rows": rows}, indent=1)
                path.write_text(text + "\n")


if __name__ == "__main__":
    main()
