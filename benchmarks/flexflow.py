"""FlexFlow's study (Jia, Zaharia and Aiken, SysML 2019, sections 7 and 8), predicted:
the plan that a search finds for six networks against data parallelism.

    python benchmarks/flexflow.py [--short] [--only NET] [--json FILE]

On the paper's clusters: 4 nodes of 4 P100, 16 nodes of 4 K80. Parameters and inputs are
fake tensors in float32; forward and backward of the loss are planned together, batches
grow with the GPUs. Both plans are lowered, and their steps simulated with overlap
(``passes.simulate``); ``serial`` are steps in which nothing overlaps, as the search has
them, and as the paper's own simulator (v1.0, scripts/simulator.cc) adds up the updates
of parameters. Bytes are what all GPUs send; of parameters, as the paper counts
them, 2 (N - 1) times their size for N replicas.

Recurrent networks have 40 steps in the paper. One step here stands for ``JOINED`` of
them, as one task of the paper's code does, with as many times the samples: a GPU
multiplies and sends the same, in fewer and larger products.

A row a process; rows that the JSON file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import random_walk
from _common import ROOT, conditions
from _lower import lowered, timeline

CELLS = [("p100", 4), ("p100", 16), ("k80", 4), ("k80", 16), ("k80", 64)]
# Named so that data parallelism is over all of them.
MESHES = {4: "dp=2,fsdp=2", 16: "dp=4,fsdp=4", 64: "dp=16,fsdp=4"}
JOINED = 8
RECURRENT = ("RNNTC", "RNNLM", "NMT")
NETS = ("AlexNet", "Inception-v3", "ResNet-101", *RECURRENT)
# Of the walk in the simulator.
PROPOSALS = 1000
PLANS = ("search", "ranked", "walked")


def synchronized(decision: Any) -> tuple[float, dict[str, int]]:
    """(bytes that all GPUs send so that parameters stay equal, 2 (n - 1) of each for
    its n replicas; replicas of each parameter)."""
    program, edges, mesh = decision.program, decision.edges, decision.mesh
    total, replicas = 0.0, {}
    for out, v in zip(program.signature.outputs, program.outputs, strict=True):
        if out.kind != "gradient" or v is None:
            continue
        value, spec = program.values[v], edges.specs[v]
        while not spec.partial and v in program.producers:
            op = program.ops[program.producers[v][0]]
            if len(op.operands) != 1:
                break
            (v,) = op.operands
            spec = edges.specs[v]
        n = mesh.count([axis for axis, _ in spec.partial])
        again = mesh.size / n / mesh.count(spec.sharded_axes)  # groups that do the same
        total += 2 * (n - 1) * value.nbytes * again
        replicas[out.name] = n
    return total, replicas


def facts(decision: Any, local: Any, machine: Any) -> dict[str, Any]:
    """A lowered plan's step on a machine."""
    mesh = decision.mesh
    line = timeline(local, mesh, machine)
    parameters, replicas = synchronized(decision)
    return {
        "seconds": line.seconds,
        "compute": line.compute_seconds,
        "exposed": line.exposed_seconds,
        "bytes": mesh.size * sum(line.sent.values()),
        "parameter_bytes": parameters,
        "left": sorted(k for k, n in replicas.items() if n < mesh.size),
        "parameters": len(replicas),
    }


def simulations(found: Any, count: int = 1000) -> dict[str, float]:
    """Simulator calls a second, of one op changed and of everything."""
    import random

    from simulated_choice import Overlap

    step, chance = Overlap(found.formulation, found.solution.choice), random.Random(0)
    nodes = [
        i for i, cost in enumerate(found.formulation.problem.costs) if len(cost) > 1
    ]
    changes = [
        {
            (i := chance.choice(nodes)): chance.randrange(
                len(found.formulation.nodes[i].specs)
            )
        }
        for _ in range(count)
    ]
    for change in changes:  # steps of reshards are kept
        step.seconds_with(change)
    begun = time.perf_counter()
    for change in changes:
        step.seconds_with(change)
    delta = count / (time.perf_counter() - begun)
    begun = time.perf_counter()
    for _ in range(5):
        step.change(dict(enumerate(found.solution.choice)))
    full = 5 / (time.perf_counter() - begun)
    return {"delta_per_second": delta, "full_per_second": full}


def run(name: str, size: int, clusters: list[str], seconds: float) -> dict[str, Any]:
    """Rows of one network on so many GPUs, by cluster."""
    from nets import STEPS, nets
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxpar
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.search.formulate import cost_of

    joined = JOINED if name in RECURRENT else 1
    net, mesh = nets(STEPS // joined)[name], MESHES[size]
    with FakeTensorMode():
        model, inputs = net.make(), net.inputs(net.batch * joined * size)
    os.environ["FXPAR_HARDWARE"] = clusters[0]
    one = fxpar.plan(model, *inputs, mesh=mesh, mode="propagate", grad=True)
    out = {}
    for cluster in clusters:
        os.environ["FXPAR_HARDWARE"] = cluster
        machine = lookup(cluster)
        begun = time.perf_counter()
        plan = fxpar.plan(model, *inputs, mesh=mesh, mode="search", grad=True)
        spent = time.perf_counter() - begun
        found = plan.result.decision.search
        theirs = cost_of(found.formulation, one.result.decision.strategies)
        out[cluster] = {
            "ops": len(plan.nodes),
            "data": facts(one.result.decision, one.result.local, machine),
            **chosen(plan, machine, seconds, theirs.choice),
            "serial": [theirs.cost + found.formulation.launches, found.predicted],
            "gap": found.solution.gap,
            "price_seconds": found.built,
            "solve_seconds": found.solution.seconds,
            "plan_seconds": spent,
            **simulations(found),
        }
        best = min(out[cluster][key]["seconds"] for key in PLANS)
        out[cluster]["faster"] = out[cluster]["data"]["seconds"] / best
    return out


def chosen(
    plan: Any, machine: Any, seconds: float, data: Sequence[int]
) -> dict[str, Any]:
    """The search's plan, the one of a few that is best in the simulator (``data``: data
    parallelism's choice), and where a walk from there leads, all lowered."""
    from fxpar.sharding.search.run_search import with_choice

    found = plan.result.decision.search
    out = {"search": facts(plan.result.decision, plan.result.local, machine)}
    begun = time.perf_counter()
    ranked = random_walk.ranked(found, seconds, [data])
    spent = time.perf_counter() - begun
    shortest, best = min(ranked)
    walked = random_walk.walk(found.formulation, best, PROPOSALS)
    known = {found.solution.choice: out["search"]}
    for key, choice in (("ranked", best), ("walked", walked.choice)):
        if choice not in known:
            other = with_choice(found, choice)
            known[choice] = facts(*lowered(plan, other), machine)
        out[key] = known[choice]
    simulated = [ranked[0][0], shortest, walked.seconds]
    return {**out, "simulated": simulated, "rank_seconds": spent}


def show(row: dict[str, Any]) -> str:
    best = min((row[k] for k in PLANS), key=lambda x: x["seconds"])
    data, (theirs, ours) = row["data"], row["serial"]

    def over(key: str, scale: float) -> str:
        return f"{data[key] * scale:.4g} -> {best[key] * scale:.4g}"

    steps = " ".join(f"{row[k]['seconds'] * 1e3:.4g}" for k in PLANS)
    return (
        f"{row['net']:13} {row['cluster']} {row['gpus']:3}: {over('seconds', 1e3)} ms "
        f"({row['faster']:.2f}; {steps}), serial {theirs / ours:.2f}, "
        f"{over('bytes', 1e-9)} GB, of parameters {over('parameter_bytes', 1e-9)} GB, "
        f"gap {row['gap'] * 100:.2g}%, "
        f"{row['price_seconds'] + row['solve_seconds']:.0f} s to search, "
        f"{row['delta_per_second']:.0f} simulations/s, "
        f"{len(best['left'])} of {best['parameters']} parameters left"
    )


def measured(name: str, size: int, clusters: list[str]) -> dict[str, Any]:
    """``run`` in a process of its own."""
    command = [sys.executable, __file__, "--row", json.dumps([name, size, clusters])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW")]
    if not lines:
        print(f"{name} on {size} failed:\n{done.stderr[-2000:]}", flush=True)
        return {}
    return json.loads(lines[0].removeprefix("ROW"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="AlexNet on 4 P100")
    parser.add_argument("--only", help="one network")
    parser.add_argument("--gpus", type=int, help="so many only")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print("ROW", json.dumps(run(*json.loads(args.row), seconds=2.0)))
        return
    path = Path(args.json or ROOT / ".benchmarks" / "flexflow.json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["net"], row["cluster"], row["gpus"]) for row in rows}
    wanted = defaultdict(list)
    for net in [args.only] if args.only else NETS[:1] if args.short else NETS:
        for cluster, size in CELLS[:1] if args.short else CELLS:
            if (net, cluster, size) not in known and args.gpus in (None, size):
                wanted[net, size].append(cluster)
    before = conditions()
    path.parent.mkdir(parents=True, exist_ok=True)
    for (net, size), clusters in wanted.items():
        for cluster, found in measured(net, size, clusters).items():
            rows.append({"net": net, "cluster": cluster, "gpus": size, **found})
            print(show(rows[-1]), flush=True)
        path.write_text(
            json.dumps({"conditions": before, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
