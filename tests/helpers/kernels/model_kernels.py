"""Regions of real models with their collectives inside one kernel, on processes that
wait for each other, beside what one process computes of all ranks' inputs in float64.

``python -m tests.helpers.kernels.model_kernels OUT RANKS FILE...``: FILE is what
``model_regions`` found. As ``collective_cases``, with other programs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.helpers.kernels.interpreted import apart, poisoned

from fxpar.fusion.kernels import run_kernels, templates
from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.region_program import Program
from tests.helpers.kernels import collective_cases as cases
from tests.helpers.kernels.model_regions import programs_of, value_of, ways_of


@dataclass(frozen=True)
class Found:
    """A program as a case."""

    program: Program
    shots: int
    switch: bool = False
    dtype: torch.dtype = torch.float32


def programs_in(paths: Sequence[str]) -> list[Program]:
    """Of the regions in files of ``model_regions``, each once."""
    texts = (Path(path).read_text() for path in paths)
    return programs_of(graph for text in texts for graph in json.loads(text))


def inputs_of(case: Any, ranks: int, rank: int, turn: int) -> list[torch.Tensor]:
    """Other ones on each rank; a seed is a seed."""
    draw = torch.Generator().manual_seed(100 * turn + rank)
    return [value_of(t, draw) for t in case.program.inputs]


def jobs_of(found: Sequence[Program], ranks: int) -> tuple[dict[str, Any], list[str]]:
    """By name what to run, and why some programs have no kernel."""
    jobs, refused = {}, []
    for program in found:
        if ranks == 1 and len(ways_of(program)) > 1:  # an all-reduce fits any number
            program = dataclasses.replace(program, ranks=1)
        if program.ranks != ranks:
            continue
        for name, how in ways_of(program).items():
            try:
                templates.template_of(program, programs=cases.PROGRAMS, **how)
            except CannotEmit as error:
                refused.append(str(error))
                continue
            numbers = (tuple(range(program.numbers)),) * ranks
            order = tuple(range(len(program.inputs)))
            case: Any = Found(program, **how)
            jobs[f"{program.title} {name}"] = cases.Job(case, program, order, numbers)
    return jobs, refused


def plain(job: Any) -> float:
    """How far the program itself, in float32, is from float64 at most."""
    narrow = dataclasses.replace(job.case, dtype=torch.bfloat16)  # computed in float32
    errors = []
    for turn in range(cases.ROUNDS):
        want = cases.oracle(job, turn)
        got = cases.oracle(dataclasses.replace(job, case=narrow), turn)
        for mine, his in zip(got, want, strict=True):
            errors += [apart(a.to(b.dtype), b) for a, b in zip(mine, his, strict=True)]
    return max(errors)


def main(path: str, ranks: str, *files: str) -> None:
    run_kernels.empty = poisoned
    torch.set_num_threads(1)
    cases.inputs_of, cases.SECONDS = inputs_of, 1500
    count = int(ranks)
    jobs, refused = jobs_of(programs_in(files), count)
    with tempfile.TemporaryDirectory() as folder:
        cases.start(jobs, count, "sound", f"{folder}/rank")
        out = cases.compared(jobs, count, f"{folder}/rank")
    for name, job in jobs.items():
        out[name]["plain"] = plain(job)
    Path(path).write_text(json.dumps({"cases": out, "refused": refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])
