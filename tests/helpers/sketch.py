"""Bound graphs drawn by hand, node by node, and run on every rank of a small mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import fx
from torch._subclasses import FakeTensorMode

from fxpar.graph.builder import Builder
from fxpar.passes.order.bucket_collectives import Joinable, join_buckets
from fxpar.passes.simulate.launches import WAIT
from fxpar.passes.simulate.lockstep import run_lockstep
from fxpar.sharding.cost.collectives import FULL
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten

c10d = torch.ops._c10d_functional

GATHER, SCATTER = c10d.all_gather_into_tensor, c10d.reduce_scatter_tensor

REDUCE, INTO = c10d.all_reduce, torch.ops.fxpar.all_gather_into_tensor

MESH, DP, TP, COUNT = Mesh.parse("dp=2,tp=2"), "fxpar:dp", "fxpar:tp", 2

FLOATS = [torch.float64, torch.float32, torch.bfloat16]

# Of node names.
SHORT = {
    "_default": "",
    "all_gather_into_tensor": "gather",
    "all_reduce": "reduce",
    "wait_tensor": "wait",
}

Shape = tuple[int, ...]


class Sketch:
    """A bound graph that grows at its end, with fake values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.rewriter = Builder(self.graph, self.mode)
        self.read: list[tuple[Shape, torch.dtype]] = []

    def input(
        self, *shape: int, dtype: torch.dtype = torch.float64, name: str = "x"
    ) -> fx.Node:
        node = self.graph.placeholder(f"{name}{len(self.read)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.read.append((shape, dtype))
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.rewriter.call(target.default, *args)

    def gather(self, x: fx.Node, group: str = DP) -> fx.Node:
        return self.call(c10d.wait_tensor, self.call(GATHER, x, COUNT, group))

    def scatter(self, x: fx.Node, op: str = "sum", group: str = DP) -> fx.Node:
        return self.call(c10d.wait_tensor, self.call(SCATTER, x, op, COUNT, group))

    def reduce(self, x: fx.Node, op: str = "sum", group: str = DP) -> fx.Node:
        return self.call(c10d.wait_tensor, self.call(REDUCE, x, op, group))

    def output(self, *results: fx.Node) -> None:
        self.graph.output(results)

    def run(self) -> list[Any]:
        """Results on each rank, which all hold different inputs."""
        generator = torch.Generator().manual_seed(3)
        inputs = [
            [
                torch.randint(-9, 9, shape, generator=generator).to(dtype)
                for shape, dtype in self.read
            ]
            for _ in range(MESH.size)
        ]
        return run_lockstep(self.graph, MESH, inputs)

    def bucket(
        self, *, reductions: bool = True, most: int = FULL, gathers: int = FULL
    ) -> None:
        joinable = Joinable.of(self.graph, reductions=reductions)
        buckets = joinable.buckets(reduction=most, gather=gathers, again=gathers)
        join_buckets(self.graph, self.rewriter, buckets)

    def moved(self) -> list[tuple[str, Shape, Shape]]:
        """Each collective with the shapes of operand and result, in order."""
        return [
            (str(n.target).split(".")[1], shape(n.args[0]), shape(n))
            for n in self.graph.nodes
            if is_collective(n)
        ]

    def order(self) -> list[str]:
        """Names of what is called, short."""
        names = [n.name for n in self.graph.nodes if n.op == "call_function"]
        for long, short in SHORT.items():
            names = [name.replace(long, short) for name in names]
        return names


def shape(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def is_collective(node: fx.Node) -> bool:
    named = getattr(node.target, "namespace", "") == "_c10d_functional"
    return named and node.target is not WAIT


def check_equal(got: list[Any], want: list[Any]) -> None:
    """Bit-equal on every rank, in the same shapes and dtypes."""
    for mine, others in zip(got, want, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert torch.equal(a, b)
