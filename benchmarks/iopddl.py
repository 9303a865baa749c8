"""fxpar's solver on problems of the ASPLOS 2025 / EuroSys 2025 contest on
intra-operator parallelism (google/iopddl), real dumps of a production sharding search.

    python benchmarks/iopddl.py FOLDER_OR_FILES... [--seconds S] [--json PATH]

Files are those of the contest, .json or .json.gz. Each problem has a process of its
own, so that its peak memory is its own. The seconds allowed are the contest's;
reading the file and loading the compiled kernels are not counted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import re
import resource
import time
from pathlib import Path
from typing import Any

import _common
import numpy as np

from fxpar.sharding.solver import Edge, Infeasible, Live, Problem, evaluate, solve

# Best cost known to us and the contest's seconds; other problems have no "best known".
KNOWN = {
    "A": (6_548_641_531, 60),
    "B": (532_843, 60),
    "G": (217_039, 120),
    "K": (2_274_276_676, 180),
    "P": (662_197_407_330, 240),
    "V": (1_632_051, 300),
}
SECONDS = 60.0
COLUMNS = ("problem", "nodes", "cost", "best", "ratio", "gap", "seconds", "MiB")


def _allowed(costs: Any) -> np.ndarray:
    """Costs of a file, in which 1e18 and more is for what is not allowed."""
    array = np.array(costs, float)
    return np.where(array >= 1e18, np.inf, array)


def read(path: Path) -> Problem:
    """The Problem in a contest file; equal tables become one."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        data = json.load(file)
    data = data.get("problem", data)
    nodes, edges = data["nodes"], data.get("edges", {"nodes": [], "costs": []})
    costs = [_allowed(cost) for cost in nodes["costs"]]
    known: dict[tuple, int] = {}
    tables: list[np.ndarray] = []
    pairs: list[Edge] = []
    for ends, cost in zip(edges["nodes"], edges["costs"], strict=True):
        i, j = ends[0], ends[-1]
        values = _allowed(cost)
        if i == j and len(values) == len(costs[i]):
            values = np.diag(values)  # a cost on one node, without the square
        table = values.reshape(len(costs[i]), len(costs[j]))
        key = (table.shape, table.tobytes())
        if key not in known:
            known[key] = len(tables)
            tables.append(table)
        pairs.append(Edge(i, j, known[key]))
    live = []
    intervals = nodes.get("intervals") or [(0, 0)] * len(costs)
    usages = nodes.get("usages") or [()] * len(costs)
    for i, (interval, usage) in enumerate(zip(intervals, usages, strict=True)):
        if len(usage) and interval[0] < interval[1]:
            live.append(Live(i, *interval, np.array(usage, float)))
    limit = data.get("usage_limit")
    return Problem(tuple(costs), tuple(pairs), tuple(tables), tuple(live), limit)


def measure(path: Path, seconds: float | None) -> dict[str, Any]:
    """Solve one file; the row of the table."""
    name = re.sub(r"\.json(\.gz)?$", "", path.name).rsplit("-", 1)[-1]
    best, allowed = KNOWN.get(name, (None, SECONDS))
    problem = read(path)
    row: dict[str, Any] = {"problem": name, "nodes": len(problem.costs), "best": best}
    row["allowed"] = seconds or allowed
    solve(Problem((np.zeros(1),)))  # loads the kernels
    begun = time.perf_counter()
    try:
        found = solve(problem, row["allowed"] - 0.5)
    except Infeasible as error:
        row["error"] = str(error)
        return row
    row["seconds"] = time.perf_counter() - begun
    cost, peak = evaluate(problem, found.choice)
    assert cost == found.cost and found.bound <= cost
    assert problem.limit is None or peak <= problem.limit
    row |= {"cost": cost, "bound": found.bound, "gap": found.gap, "peak": peak}
    row["ratio"] = cost / best if best else None
    spent = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    # Less than "seconds" where others used the cores; a running worker's are left out.
    row["cpu_seconds"] = sum(use.ru_utime + use.ru_stime for use in spent)
    row["MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def shown(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return "-"
    forms = {"cost": "{:,.0f}", "best": "{:,.0f}", "ratio": "{:.4f}", "gap": "{:.3%}"}
    forms |= {"seconds": "{:.1f}", "MiB": "{:.0f}", "nodes": "{:,}"}
    return forms.get(column, "{}").format(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders of them")
    parser.add_argument("--seconds", type=float, help="for each, not the contest's")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    files: list[Path] = []
    for path in options.paths:
        files += sorted(path.glob("*.json*")) if path.is_dir() else [path]
    widths = (9, 8, 20, 20, 8, 9, 8, 7)
    print(*(c.rjust(w) for c, w in zip(COLUMNS, widths, strict=True)))
    rows = []
    context = multiprocessing.get_context("spawn")
    for file in files:
        with context.Pool(1) as pool:
            row = pool.apply(measure, (file, options.seconds))
        rows.append(row)
        cells = (shown(row, c).rjust(w) for c, w in zip(COLUMNS, widths, strict=True))
        print(*cells, row.get("error", ""), flush=True)
    conditions = _common.conditions()
    given = " ".join(path.name for path in options.paths)  # where they lie says nothing
    conditions["command"] = f"python benchmarks/iopddl.py {given}"
    figures = {"conditions": conditions, "rows": rows}
    _common.write(options.json, "iopddl", figures)


if __name__ == "__main__":
    main()
