"""FlexFlow's search, a random walk, against the solver of the search.

    python benchmarks/mcmc.py [--short] [--only NAME] [--json FILE]

``costs``: the additive problem, in which nothing overlaps, of real traced graphs and of
one made up. The walk starts at data parallelism, or at the first strategy of each node
where there is none; its proposals give a random node a random strategy, parameters
together with their gradients, and take some 100 ns each, far less than a simulation.
``over`` is its best cost over the solver's, after as many seconds as that took and then
after ten times as many. ``heat``: seconds by which a change is worse that is accepted
once in e times; 0.2 ms in FlexFlow's code.

``steps``: seconds of a step that overlaps: of data parallelism, of the search's plan,
of the best of a few in the simulator ``overlap``, and of where a walk in it leads from
there, and from data parallelism; first as ``overlap`` has it, then as
``passes.simulate`` has the lowered plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, conditions, llama
from _lower import lowered, timeline

MESHES = ("dp=8", "dp=2,fsdp=4")
NAMES = ("mlp", "llama small x4", "llama 8b x2", "resnet-50", "made up")
FLEXFLOW = 2e-4
SHARES = (1e-3, 1e-4, 1e-5, 1e-6)  # heats, of the solver's cost
LONGER = (1.0, 10.0)  # times the solver's seconds
PROPOSALS = 5000


def _chain(size, at, unary, first, other, table, pool, choice, cost, heat, count, seed):
    """So many proposals from a choice, changed in place; (cost, least cost)."""
    np.random.seed(seed)
    least = cost
    for _ in range(count):
        i = np.random.randint(len(size))
        k, now = np.random.randint(size[i]), choice[i]
        more = unary[at[i] + k] - unary[at[i] + now]
        for e in range(first[i], first[i + 1]):
            j = other[e]
            more += pool[table[e] + k * size[j] + choice[j]]
            more -= pool[table[e] + now * size[j] + choice[j]]
        if more <= 0.0 or np.random.random() < np.exp(-more / heat):
            choice[i] = k
            cost += more
            least = min(least, cost)
    return cost, least


def costs(problem: Any, start: Sequence[int], seconds: float) -> dict[str, Any]:
    """The solver's cost against the walk's, from ``start``."""
    from numba import njit

    from fxpar.sharding.solver import evaluate, solve
    from fxpar.sharding.solver.flat_arrays import cost_of, flatten
    from fxpar.sharding.solver.network import build

    problem = replace(problem, memory=(), limit=None)
    solve(problem, 0.1)  # loads the kernels
    solution = solve(problem, seconds, tolerance=1e-4)
    flat = flatten(build(replace(problem, tied=None)))
    given = np.array(start, np.int64)[flat.nodes]
    arrays = (flat.size, flat.at, flat.unary, flat.first, flat.other, flat.table)
    chain = njit(_chain)
    chain(*arrays, flat.pool, given.copy(), 0.0, 1.0, 1, 0)
    begun, rows = evaluate(problem, start)[0], []
    heats = [FLEXFLOW, *(share * solution.cost for share in SHARES)]
    for heat in heats:
        choice = given.copy()
        cost = least = cost_of(flat, choice)
        clock, count, over = time.perf_counter(), 0, []
        for times in LONGER:
            end = clock + max(times * solution.seconds, 0.01)
            while time.perf_counter() < end:
                cost, found = chain(
                    *arrays, flat.pool, choice, cost, heat, 20_000, count
                )
                least, count = min(least, found), count + 20_000
            over.append(least / solution.cost)
        rows.append({"heat": heat, "over": over, "proposals": count})
    return {
        "nodes": len(problem.costs),
        "strategies": sum(map(len, problem.costs)),
        "cost": solution.cost,
        "gap": solution.gap,
        "solve_seconds": solution.seconds,
        "start_over": begun / solution.cost,
        "walks": rows,
    }


def joined(found: Any, choice: Sequence[int]) -> tuple[Any, list[int]]:
    """The problem with parameters and their gradients as one node, and a choice."""
    from random_walk import Moves

    from fxpar.sharding.solver.problem import tie

    together = Moves(found, list(choice)).together
    problem, to = tie(replace(found.problem, tied=tuple(g[0] for g in together)))
    out = [0] * len(problem.costs)
    for i, k in zip(to, choice, strict=True):
        out[i] = k
    return problem, out


def traced(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A model and its inputs, to be planned for 8 devices."""
    import torch
    from nets import resnet
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Loss(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            return self.model(input_ids=ids, labels=ids).loss

    def words(rows: int, length: int) -> tuple[Any, ...]:
        return (torch.zeros(rows, length, dtype=torch.long),)

    with FakeTensorMode():
        if name == "resnet-50":
            labels = torch.zeros(256, dtype=torch.long)
            return resnet((3, 4, 6, 3)), (torch.zeros(256, 3, 224, 224), labels)
        torch.set_default_dtype(torch.bfloat16)
        if name == "llama small x4":
            return Loss(llama(4)), words(16, 2048)
        if name == "llama 8b x2":
            return Loss(llama(2, scale="8b")), words(8, 2048)
        parts: list[nn.Module] = []
        for _ in range(4):
            parts += [nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)]
        return nn.Sequential(*parts), (torch.zeros(8192, 4096),)


def steps(plan: Any, theirs: Sequence[int]) -> dict[str, Any]:
    """Steps with overlap: [as ``overlap`` has it, lowered] of each plan."""
    from random_walk import ranked, walk

    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.search.rank_candidates import Overlap, with_choice

    found, machine = plan.result.decision.search, lookup("h100")
    form = found.formulation
    begun = time.perf_counter()
    _, best = min(ranked(found, 2.0))
    spent = time.perf_counter() - begun
    begun = time.perf_counter()
    walked = walk(form, best, PROPOSALS)
    each = (time.perf_counter() - begun) / PROPOSALS
    choices = {
        "data": tuple(theirs),
        "search": found.solution.choice,
        "ranked": best,
        "walked": walked.choice,
        "walked from data": walk(form, theirs, PROPOSALS).choice,
    }
    out: dict[str, Any] = {"rank_seconds": spent, "proposals_per_second": 1 / each}
    for key, choice in choices.items():
        _, local = lowered(plan, with_choice(found, choice))
        there = timeline(local, found.mesh, machine).seconds
        out[key] = [Overlap(form, choice).seconds, there]
    return out


def run(name: str, mesh: str, seconds: float) -> dict[str, Any]:
    import fxpar
    from fxpar.sharding.search.formulate import cost_of

    if name == "made up":
        from tests.helpers.solver_problems import layered

        problem = layered(30, 8, 20, noise=0.05)
        return costs(problem, [0] * len(problem.costs), seconds)
    os.environ["FXPAR_HARDWARE"] = "h100"
    model, inputs = traced(name)
    data = fxpar.plan(model, *inputs, mesh=mesh, mode="propagate", grad=True)
    plan = fxpar.plan(model, *inputs, mesh=mesh, mode="search", grad=True)
    found = plan.result.decision.search
    theirs = cost_of(found.formulation, data.result.decision.strategies).choice
    problem, start = joined(found.formulation, theirs)
    return {**costs(problem, start, seconds), "steps": steps(plan, theirs)}


def show(row: dict[str, Any]) -> str:
    best = min(row["walks"], key=lambda walk: walk["over"][-1])
    text = (
        f"{row['name']:15} {row['mesh']:12} {row['nodes']} nodes, solver "
        f"{row['solve_seconds']:.2f} s, gap {row['gap'] * 100:.2g}%; start "
        f"{row['start_over']:.3f}, walk in equal time, in 10 times as much: "
    )
    text += f"{best['over'][0]:.4f} {best['over'][1]:.4f} (the best of heats), "
    text += (
        f"{row['walks'][0]['over'][0]:.4f} {row['walks'][0]['over'][1]:.4f} (0.2 ms)"
    )
    for key, value in row.get("steps", {}).items():
        if isinstance(value, list):
            text += f"\n    {key:17} {value[0] * 1e3:8.3f} {value[1] * 1e3:8.3f} ms"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="the smallest only")
    parser.add_argument("--only", help="one name")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print("ROW", json.dumps(run(*json.loads(args.row), seconds=20.0)))
        return
    path = Path(args.json or ROOT / ".benchmarks" / "mcmc.json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["name"], row["mesh"]) for row in rows}
    names = [args.only] if args.only else NAMES[:1] if args.short else NAMES
    before = conditions()
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        for mesh in ("-",) if name == "made up" else MESHES:
            if (name, mesh) in known:
                continue
            command = [sys.executable, __file__, "--row", json.dumps([name, mesh])]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True
            )
            lines = [x for x in done.stdout.splitlines() if x.startswith("ROW")]
            if not lines:
                print(f"{name} on {mesh} failed:\n{done.stderr[-2000:]}", flush=True)
                continue
            found = json.loads(lines[0].removeprefix("ROW"))
            rows.append({"name": name, "mesh": mesh, **found})
            print(show(rows[-1]), flush=True)
            figures = {"conditions": before, "rows": rows}
            path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
