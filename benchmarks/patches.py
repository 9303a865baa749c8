"""What each patch of torch in ``fxpar/_fast`` saves of a first step, by leaving it out.

    python benchmarks/patches.py [--layers N] [--repeat N] [--way WAY] [--name NAME]
        [--json FILE]

A Llama of hidden size 256 and ``fxpar.shard`` on dp=2, with one patch left out, with
none, and with all (``FXPAR_FAST=0``): CPU seconds, the least of ``--repeat`` runs,
which other jobs on the machine change little. ``--way``: ``cold`` and ``warm`` are the
jobs of ``bench_first_step``, 2 ranks on gloo, with all that they start; ``alone`` is
one fake rank of ``bench_layers`` with empty caches, from Dynamo to C++ text, without a
compiler; ``cuda`` is the same up to Triton's text for an H100, without a GPU. Prints a
table as Markdown; ``of``: in multiples of what it is with every patch. One that saves
less than 3 % of a cold first step of 32 layers is to go.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
from typing import Any
from unittest import mock

import bench_first_step
import bench_layers
from _common import conditions, write

NOTHING, ALL = "nothing", "all"
NAMES = (
    *("layer_regions", "traced_once", "libraries", "quick_graphs"),
    *("values_known", "old_objects_kept", "probes_remembered"),
)
# Ways of one rank, by the device whose code is generated.
ALONE = {"alone": "cpu", "cuda": "cuda"}
WAYS = ("cold", "warm", *ALONE)


def measure(name: str, layers: int, way: str) -> dict[str, float]:
    """CPU seconds with a patch left out; those of a warm job come with a cold one's."""
    out = () if name in (NOTHING, ALL) else (name,)
    switch = {"FXPAR_FAST": "0"} if name == ALL else {}
    with mock.patch.dict(os.environ, switch):
        if way in ALONE:
            how = layers, "small", "dp=2", "shard", out, ALONE[way], False
            return {way: bench_layers.run(*how)["cpu"]}
        states = bench_first_step.STATES[: 1 + (way == "warm")]
        with tempfile.TemporaryDirectory() as cache:
            job = "fxpar", layers, 2, cache, "small", out
            return {state: bench_first_step.run(*job)["cpu"] for state in states}


def table(cases: list[dict[str, Any]]) -> str:
    """The figures as Markdown, a row for each patch."""
    columns = [(case, way) for case in cases for way in case["cpu"][NOTHING]]
    heads = [f"{case['layers']} layers, {way}" for case, way in columns]
    lines = ["| left out |" + "".join(f" {head} | of |" for head in heads)]
    lines.append("|---|" + "---|---|" * len(heads))
    for name in cases[0]["cpu"]:
        cells = []
        for case, way in columns:
            cpu = case["cpu"][name][way]
            cells += [f"{cpu:.1f}", f"{cpu / case['cpu'][NOTHING][way]:.2f}"]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, action="append")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, default="warm")
    parser.add_argument("--name", choices=(*NAMES, ALL), action="append")
    parser.add_argument("--json")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(bench_first_step._SUBREAPER, 1)
    before, cases = conditions(), []
    for layers in args.layers or [2, 32]:
        cpu: dict[str, dict[str, float]] = {}
        for _ in range(args.repeat):
            for name in (NOTHING, *(args.name or (*NAMES, ALL))):
                once = measure(name, layers, args.way)
                least = cpu.setdefault(name, once)
                cpu[name] = {way: min(least[way], once[way]) for way in once}
                print(f"{layers} layers, {name} left out: {once}", flush=True)
        cases.append({"layers": layers, "cpu": cpu})
    print(table(cases))
    write(args.json, "patches", {"conditions": before, "cases": cases})


if __name__ == "__main__":
    main()
