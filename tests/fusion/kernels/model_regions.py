"""Regions of real models, as the backend makes them, on one rank of a fake group.

``python -m tests.fusion.kernels.model_regions OUT MESH NAME...`` compiles forward and
backward, checks every region's kernels beside its program, and writes what it found.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar import backend
from fxpar.fusion.kernels import launch
from fxpar.fusion.kernels.fuse import Fused
from fxpar.fusion.kernels.outline import Outline
from fxpar.fusion.kernels.program import Program, Tensor, dtype_of
from fxpar.fusion.kernels.stages import Part, stages_of
from tests.fusion.kernels.interpreted import compared, poisoned
from tests.models import build_loss


def fused_graphs(name: str, mesh: str) -> list[tuple[str, Fused]]:
    """What was made of each graph of a model: ("forward" or "backward", what)."""
    found: list[tuple[str, Fused]] = []

    def keep(fused: Fused, graph: str, debug: int) -> None:
        found.append((graph.partition("/")[2], fused))

    torch._dynamo.reset()
    model, batch = build_loss(name)
    options = {"mesh": mesh, "codegen": "eager", "fuse": "interpret"}
    with (
        mock.patch.object(backend, "say", keep),
        mock.patch.object(backend.agree, "agree"),
        mock.patch.object(backend.inputs.Checks, "run"),
    ):
        torch.compile(model, backend="fxpar", options=options)(**batch).backward()
    return found


def value_of(t: Tensor, draw: torch.Generator) -> torch.Tensor:
    """A random tensor for an input: positive, since some are taken the root of."""
    dtype = dtype_of(t.dtype)
    if dtype.is_floating_point:
        x = torch.rand(t.shape, generator=draw) + 0.1
    else:
        x = torch.randint(0, 2, t.shape, generator=draw)
    made = torch.empty_strided(t.shape, t.stride, dtype=dtype)
    return made.copy_(x) if made.numel() else made


def checked(program: Program) -> dict[str, Any]:
    """Each part's kernel beside the part itself."""
    draw = torch.Generator().manual_seed(1)
    out: dict[str, Any] = {"error": 0.0, "kernel": True}
    for step in stages_of(program):
        if isinstance(step, Part):
            inputs = [value_of(t, draw) for t in step.program.inputs]
            numbers = tuple(range(program.numbers))
            whole = Outline(step.program, (), (), numbers, "", {})
            case = compared(whole, inputs, None)
            out["kernel"] &= case["kernel"]
            out["error"] = max(out["error"], case.get("error", float("inf")))
    return out


def main(path: str, mesh: str, *names: str) -> None:
    launch.empty = poisoned
    os.environ.setdefault("FXPAR_PLAN", "propagate")
    os.environ.setdefault("FXPAR_SCHEDULE", "none")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found = []
    for name in names:
        for which, fused in fused_graphs(name, mesh):
            cases = [checked(p) for p in dict.fromkeys(fused.programs)]
            row = {"regions": len(fused.programs), "cases": cases, "near": fused.near}
            row["bytes"] = [fused.before, fused.after]
            found.append({"name": name, "which": which} | row)
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
