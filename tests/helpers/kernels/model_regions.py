"""Regions of real models, as the backend makes them, on one rank of a fake group.

``python -m tests.helpers.kernels.model_regions OUT MESH NAME...`` compiles forward and
backward, checks every region's kernels beside its program, and writes what it found,
programs too. MESH "dp=2 step": a whole training step with a sharded optimizer, in which
each gradient's reduction is asked to be one region with the update behind it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.helpers.kernels.interpreted import compared, poisoned
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpar
from fxpar import backend
from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.fuse_regions import Fused, fuse_graph
from fxpar.fusion.kernels.implementations import FUSED
from fxpar.fusion.kernels.region_program import Program, Tensor, dtype_of
from fxpar.fusion.kernels.select_region import after
from fxpar.fusion.kernels.split_at_collectives import MOVES, Part, stages_of
from fxpar.fusion.kernels.trace_region import Outline
from fxpar.passes.bucket_collectives import REGION
from fxpar.sharding.mesh import Mesh
from tests.helpers.models import build_loss


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


def asked(graph: fx.Graph, *args: Any, **kwargs: Any) -> Fused:
    """Each reduce-scatter with what is computed of it alone, as a schedule may ask."""
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    marked: set[fx.Node] = set()
    for start in graph.find_nodes(op="call_function", target=scatter):
        behind = {start}
        for node in after(start):
            if any(n in behind for n in node.all_input_nodes) and node not in marked:
                behind.add(node)
        for node in behind - {graph.output_node()}:
            node.meta["custom"] = (node.meta.get("custom") or {}) | {REGION: start.name}
        marked |= behind
    return fuse_graph(graph, *args, **kwargs)


def fused_step(name: str) -> list[tuple[str, Fused]]:
    """What was made of a training step on two ranks that share the optimizer's work."""
    found: list[tuple[str, Fused]] = []

    def keep(fused: Fused, graph: str, debug: int) -> None:
        found.append(("step", fused))

    torch._dynamo.reset()
    model, batch = build_loss(name)
    model = fxpar.shard(model, mesh="dp=2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"mesh": "dp=2", "codegen": "eager", "fuse": "interpret"}
    options |= {"inputs": "local", "disable": "bucket"}
    with (
        mock.patch.object(backend, "say", keep),
        mock.patch.object(backend, "fuse_graph", asked),
        mock.patch.object(backend.agree, "agree"),
        mock.patch.object(backend.inputs.Checks, "run"),
    ):
        step = fxpar.train_step(
            model, lambda m, **batch: m(**batch), optimizer, options=options
        )
        step(**batch)
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


def programs_of(found: Iterable[dict[str, Any]]) -> list[Program]:
    """Of the regions of graphs, as ``main`` writes them, each once."""
    texts = (case["program"] for graph in found for case in graph["cases"])
    return [Program.parse(text) for text in dict.fromkeys(texts)]


def ways_of(program: Program) -> dict[str, Any]:
    """How one kernel can do the collective: rungs, and what ``template_of`` takes."""
    moves = [line.op.split(".")[1] for line in program.lines if line.op in MOVES]
    if moves != ["all_reduce"] or program.ranks == 1:
        return {"one_shot": {"shots": 1}}
    return {name: {"shots": n, "switch": s} for name, (n, s) in FUSED.items()}


def main(path: str, mesh: str, *names: str) -> None:
    run_kernels.empty = poisoned
    os.environ.setdefault("FXPAR_PLAN", "propagate")
    os.environ.setdefault("FXPAR_SCHEDULE", "none")
    mesh, _, step = mesh.partition(" ")
    size = Mesh.parse(mesh).size
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    found = []
    for name in names:
        graphs = fused_step(name) if step else fused_graphs(name, mesh)
        for which, fused in graphs:
            programs = dict.fromkeys(fused.programs)
            cases = [checked(p) | {"program": p.text} for p in programs]
            row = {"regions": len(fused.programs), "cases": cases, "near": fused.near}
            row["bytes"] = [fused.before, fused.after]
            found.append({"name": name, "which": which} | row)
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
