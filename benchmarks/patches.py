"""What each patch of torch in ``fxpar/_fast`` saves of a first step, by leaving it out.

    python benchmarks/patches.py [--layers N] [--ranks N] [--repeat N] [--name NAME]
        [--json FILE]

The jobs of ``bench_first_step`` (a Llama of hidden size 64, ``fxpar.shard``, 2 ranks on
gloo, cold and then warm caches), each with one patch left out, and with none and all
left out (``FXPAR_FAST=0``). ``cpu``: CPU seconds of all ranks and of what they started,
to the end of the first step, the least of ``--repeat`` jobs; other jobs on the machine
change it little. ``of``: in multiples of what it is with every patch. A patch that
saves less than 3 % of a cold first step of 32 layers is to go. Prints the table as
Markdown.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
from typing import Any
from unittest import mock

import bench_first_step as first_step
from _common import conditions, write

ALL = "all"
NAMES = (
    *("layer_regions", "traced_once", "libraries", "quick_min_cut", "quick_graphs"),
    *("values_known", "old_objects_kept", "probes_remembered", "unread_texts"),
    "late_templates",
)


def measure(name: str, layers: int, ranks: int) -> dict[str, float]:
    """CPU seconds, by state of the caches, with a patch left out ("": none)."""
    switch = {"FXPAR_FAST": "0"} if name == ALL else {}
    out = (name,) if name and name != ALL else ()
    with mock.patch.dict(os.environ, switch), tempfile.TemporaryDirectory() as cache:
        return {
            state: first_step.run("fxpar", layers, ranks, cache, "tiny", out)["cpu"]
            for state in first_step.STATES
        }


def table(cases: list[dict[str, Any]]) -> str:
    """The figures as Markdown, a row for each patch."""
    columns = [(case, state) for case in cases for state in first_step.STATES]
    heads = [f"{case['layers']} layers, {state}" for case, state in columns]
    lines = ["| left out |", "|---|"]
    lines[0] += "".join(f" {head} (s) | of |" for head in heads)
    lines[1] += "---|---|" * len(heads)
    for name in cases[0]["cpu"]:
        row = f"| {f'`{name}`' if name else 'nothing'} |"
        for case, state in columns:
            cpu = case["cpu"][name][state]
            row += f" {cpu:.1f} | {cpu / case['cpu'][''][state]:.2f} |"
        lines.append(row)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, action="append")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--name", choices=(*NAMES, ALL), action="append")
    parser.add_argument("--json")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(first_step._SUBREAPER, 1)
    before, cases = conditions(), []
    names = ["", *(args.name or (*NAMES, ALL))]
    for layers in args.layers or [2, 32]:
        cpu: dict[str, dict[str, float]] = {}
        for _ in range(args.repeat):
            for name in names:
                once = measure(name, layers, args.ranks)
                least = cpu.setdefault(name, once)
                cpu[name] = {state: min(least[state], once[state]) for state in once}
                print(
                    f"{layers} layers without {name or 'nothing'}: {once}", flush=True
                )
        cases.append({"layers": layers, "ranks": args.ranks, "cpu": cpu})
    print(table(cases))
    write(args.json, "patches", {"conditions": before, "cases": cases})


if __name__ == "__main__":
    main()
