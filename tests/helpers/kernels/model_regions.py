"""Regions of real models, as the backend makes them, on one rank of a fake group.

Forward and backward are compiled; of the mesh "dp=2 step" a whole training step with a
sharded optimizer, in which each gradient's reduction is asked to be one region with the
update behind it. Regions as programs of several ranks are jobs of ``collective_cases``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpar
from fxpar.fusion.kernels.fuse_regions import Fused, fuse_graph
from fxpar.fusion.kernels.implementations import FUSED
from fxpar.fusion.kernels.region_program import (
    MOVES,
    CannotEmit,
    Outline,
    RegionProgram,
    Tensor,
    dtype_of,
    stages_of,
)
from fxpar.fusion.kernels.select_region import after
from fxpar.fusion.kernels.templates import template_of
from fxpar.graph.builder import REGION
from fxpar.runtime.steps import lowering_steps
from fxpar.sharding.mesh import Mesh
from tests.helpers.forked import run_forked
from tests.helpers.kernels import collective_cases as cases
from tests.helpers.kernels.compare_kernels import apart, compared
from tests.helpers.models import NAMES, build_loss

F32 = 1e-6  # relative to the largest number of a result


def fused_graphs(name: str, mesh: str) -> list[tuple[str, Fused]]:
    """What was made of each graph of a model: ("forward" or "backward", what)."""
    found: list[tuple[str, Fused]] = []

    def keep(fused: Fused, graph: str, debug: int) -> None:
        found.append((graph.partition("/")[2], fused))

    torch._dynamo.reset()
    model, batch = build_loss(name)
    options = {"mesh": mesh, "codegen": "eager", "fuse": "interpret"}
    with mock.patch.object(lowering_steps, "say", keep):
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
        mock.patch.object(lowering_steps, "say", keep),
        mock.patch.object(lowering_steps, "fuse_graph", asked),
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


@dataclass(frozen=True)
class GraphRegions:
    """The regions of one graph of a model."""

    name: str  # of the model
    which: str  # "forward", "backward" or "step"
    regions: int
    near_misses: list[str]
    bytes: tuple[int, int]  # that kernels move, before and after
    texts: list[str]  # of programs, each once

    @property
    def programs(self) -> list[RegionProgram]:
        return [RegionProgram.parse(text) for text in self.texts]


@functools.cache
def regions_of(mesh: str) -> list[GraphRegions]:
    """Of the graphs of all models, on one rank of a mesh."""
    (graphs,) = run_forked(_regions_of, 1, mesh, seconds=1500)
    return graphs


def _regions_of(folder: Path, rank: int, ranks: int, mesh: str) -> list[GraphRegions]:
    mesh, _, step = mesh.partition(" ")
    size = Mesh.parse(mesh).size
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    out = []
    for name in NAMES:
        graphs = fused_step(name) if step else fused_graphs(name, mesh)
        for which, fused in graphs:
            out.append(
                GraphRegions(
                    name,
                    which,
                    len(fused.programs),
                    list(fused.near_misses),
                    (fused.before, fused.after),
                    [program.text for program in dict.fromkeys(fused.programs)],
                )
            )
    return out


def programs_of(meshes: Iterable[str]) -> list[RegionProgram]:
    """Of the regions of all models on meshes, each once."""
    graphs = (graph for mesh in meshes for graph in regions_of(mesh))
    texts = (text for graph in graphs for text in graph.texts)
    return [RegionProgram.parse(text) for text in dict.fromkeys(texts)]


def check_parts(program: RegionProgram) -> None:
    """Each part's kernel beside the part itself."""
    draw = torch.Generator().manual_seed(1)
    for step in stages_of(program):
        if isinstance(step, RegionProgram):
            inputs = [value_of(t, draw) for t in step.inputs]
            numbers = tuple(range(program.numbers))
            whole = Outline(step, (), (), numbers, "", {})
            kernels = compared(whole, inputs)
            assert kernels.kernels and kernels.error <= F32, step.title


def ways_of(program: RegionProgram) -> dict[str, Any]:
    """How one kernel can do the collective: rungs, and what ``template_of`` takes."""
    moves = [line.op.split(".")[1] for line in program.lines if line.op in MOVES]
    if moves != ["all_reduce"] or program.ranks == 1:
        return {"one_shot": {"shots": 1}}
    return {name: {"shots": n, "switch": s} for name, (n, s) in FUSED.items()}


@dataclass(frozen=True)
class RegionCase:
    """A region as a case of ``collective_cases``."""

    program: RegionProgram
    shots: int
    switch: bool = False
    dtype: torch.dtype = torch.float32

    def inputs_of(self, ranks: int, rank: int, turn: int) -> list[torch.Tensor]:
        """Other ones on each rank; a seed is a seed."""
        draw = torch.Generator().manual_seed(100 * turn + rank)
        return [value_of(t, draw) for t in self.program.inputs]


def jobs_of(
    programs: Iterable[RegionProgram], ranks: int
) -> tuple[dict[str, cases.Job], list[str]]:
    """Jobs by name, and why some programs have no kernel."""
    jobs, refused = {}, []
    for program in programs:
        if ranks == 1 and len(ways_of(program)) > 1:  # an all-reduce fits any number
            program = dataclasses.replace(program, ranks=1)
        if program.ranks != ranks:
            continue
        for name, how in ways_of(program).items():
            try:
                template_of(program, programs=cases.PROGRAMS, **how)
            except CannotEmit as error:
                refused.append(str(error))
                continue
            numbers = (tuple(range(program.numbers)),) * ranks
            order = tuple(range(len(program.inputs)))
            case: Any = RegionCase(program, **how)
            jobs[f"{program.title} {name}"] = cases.Job(case, program, order, numbers)
    return jobs, refused


def rounding_of(job: cases.Job) -> float:
    """How far the program itself, in float32, is from float64 at most."""
    narrow = dataclasses.replace(job.case, dtype=torch.bfloat16)  # computed in float32
    errors = []
    for turn in range(cases.ROUNDS):
        want = cases.oracle(job, turn)
        got = cases.oracle(dataclasses.replace(job, case=narrow), turn)
        for mine, his in zip(got, want, strict=True):
            errors += [apart(a.to(b.dtype), b) for a, b in zip(mine, his, strict=True)]
    return max(errors)
