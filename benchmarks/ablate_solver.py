"""What each phase of the solver is worth: problems solved with one phase left out.

    python benchmarks/ablate_solver.py FOLDER [--seconds S] [--cpu] [--only NAME]
        [--phases A,B] [--json FILE]

FOLDER holds problems of the contest (``iopddl.py``); Llamas of the 8B width (as in
``bench_search.py``), with and without a tight memory limit, are formulated here. Each
(problem, phase) runs in a process of its own; a phase that is left out returns what it
returns when it finds nothing, and phases that a problem never reaches are passed over.
Written: cost, bound, gap proved, seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from _common import conditions, cpu_seconds, llama, write

from fxpar.sharding.solver import (
    Infeasible,
    lagrangian,
    message_passing,
    milp,
    neighborhood_search,
    solve,
)

# layers, mesh, batch, memory limit over what the unlimited answer holds
LLAMAS = [
    (2, "dp=8,tp=8", 64, None),
    (32, "dp=8", 8, None),
    (32, "dp=8", 8, 0.6),
    (8, "dp=8,tp=8", 64, None),
    (8, "dp=8,tp=8", 64, 0.6),
]


def _no_prices(flat: Any, deadline: float, *, prices: Any = None, **_: Any) -> Any:
    prices = np.zeros(len(flat.room)) if prices is None else prices
    return lagrangian.Priced(prices, -math.inf, None, math.inf)


# What is put in place of a phase's function, by the phase's name.
PHASES: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "nothing": [],
    "reductions": [
        (sys.modules[f"{solve.__module__}"], "reduce", lambda net, until: None)
    ],
    "messages": [
        (
            message_passing,
            "pass_messages",
            lambda flat, until, **_: (None, math.inf, -math.inf),
        )
    ],
    "layers as one": [
        (sys.modules[f"{solve.__module__}"], "_is_repetitive", lambda problem: False)
    ],
    "prices": [(lagrangian, "raise_prices", _no_prices)],
    "pruned messages": [
        (
            sys.modules[f"{solve.__module__}"],
            "pass_pruned",
            lambda *_: (None, -math.inf),
        )
    ],
    "integer program": [
        (
            milp,
            "solve_program",
            lambda *_, **__: milp.MilpSolution(None, -math.inf, False),
        )
    ],
    "windows": [
        (
            neighborhood_search,
            "improve",
            lambda flat, choice, *_, **__: choice,
        )
    ],
    "least excess": [
        (
            lagrangian,
            "least_excess",
            lambda *_: lagrangian.Excess(None, math.inf, -math.inf),
        )
    ],
}


def formulated(layers: int, mesh: str, batch: int, tight: float | None) -> Any:
    """The Problem of a Llama of the 8B width."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxpar
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.mesh import Mesh
    from fxpar.sharding.search import run_search

    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        model = llama(layers, scale="8b")
        ids = torch.zeros(batch, 4096, dtype=torch.long)
    plan = fxpar.plan(
        model,
        input_ids=ids,
        labels=ids,
        mesh=mesh,
        mode="propagate",
        grad=True,
        schedule="none",
    )
    program = plan.result.decision.program
    asked = run_search.SearchOptions(lookup("h100"), seconds=20.0, ranked=False)
    result = run_search.search(program, Mesh.parse(mesh), asked, {})
    problem = result.formulation.problem
    return replace(problem, limit=None if tight is None else tight * _peak(result))


def _peak(result: Any) -> float:
    return float(result.solution.peak)


@contextlib.contextmanager
def without(phase: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name, instead in PHASES[phase]:
            stack.enter_context(mock.patch.object(module, name, instead))
        yield


@contextlib.contextmanager
def called() -> Iterator[set[str]]:
    """Phases whose functions are called meanwhile, by name."""
    used: set[str] = set()

    def noting(phase: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            used.add(phase)
            return fn(*args, **kwargs)

        return wrapped

    with contextlib.ExitStack() as stack:
        for phase, places in PHASES.items():
            for module, name, _ in places:
                fn = noting(phase, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, fn))
        yield used


def one(path: str, phase: str, seconds: float) -> dict[str, Any]:
    """Solve the pickled problem without the phase."""
    problem = pickle.loads(Path(path).read_bytes())
    with without(phase), called() as used:
        try:
            solution = solve(problem, seconds)
        except Infeasible:
            return {"cost": None, "bound": None, "seconds": seconds, "used": [*used]}
    return {
        "used": [*used],
        "cost": solution.cost,
        "bound": solution.bound,
        "gap": solution.gap,
        "seconds": solution.seconds,
    }


def problems(folder: Path, only: str) -> Iterator[tuple[str, Any]]:
    """(name, Problem) of those whose names hold ``only``."""
    from iopddl import read

    for path in sorted(folder.glob("*.json*")):
        name = path.name.split(".")[0].rsplit("-", 1)[-1]
        if only in name:
            yield name, read(path)
    for layers, mesh, batch, tight in LLAMAS:
        name = f"llama x{layers} {mesh}" + (f" limit x{tight}" if tight else "")
        if only in name:
            yield name, formulated(layers, mesh, batch, tight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", default="", help="problems whose names hold this")
    parser.add_argument(
        "--phases", default=",".join(PHASES), help="only these, by commas"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="seconds are of the processor, so that a busy machine measures the same",
    )
    parser.add_argument("--json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if args.cpu:
            time.perf_counter = cpu_seconds
        print("ROW", json.dumps(one(*args.one, args.seconds)))
        return
    before, rows = conditions(), []
    with tempfile.TemporaryDirectory() as folder:
        for name, problem in problems(args.folder, args.only):
            path = Path(folder) / "problem"
            path.write_bytes(pickle.dumps(problem))
            used: set[str] = {"nothing"}
            for phase in PHASES:
                if phase not in used or phase not in args.phases.split(","):
                    continue
                command = [sys.executable, __file__, str(args.folder)]
                command += ["--seconds", str(args.seconds), "--one", str(path), phase]
                command += ["--cpu"] * args.cpu
                done = subprocess.run(command, capture_output=True, text=True)
                lines = [x for x in done.stdout.splitlines() if x.startswith("ROW")]
                row = json.loads(lines[0][4:]) if lines else {"failed": done.stderr}
                used |= {*row.pop("used", [])}
                rows.append({"problem": name, "without": phase, **row})
                print(json.dumps(rows[-1])[:300], flush=True)
    write(args.json, "ablate_solver", {"conditions": before, "rows": rows})


if __name__ == "__main__":
    main()
