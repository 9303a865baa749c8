"""Times of the planner's inner functions, by pytest-benchmark. `make bench` runs it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_table import parse_rule
from fxpar.sharding.program import Input, Output, Program, Signature
from fxpar.sharding.propagate.propagation import Propagation, Seed
from fxpar.sharding.read_program import read
from fxpar.sharding.reshard import one_pair, route
from fxpar.sharding.spec import Spec

MESHES = ["dp=2,tp=4", "dp=64,tp=8", "dp=8192,tp=8"]


def chain(layers: int) -> Program:
    """``relu(x @ w1) @ w2`` per layer."""

    def forward(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = torch.relu(x @ up) @ down
        return (x,)

    weights = [torch.empty(s) for s in ((64, 256), (256, 64)) * layers]
    x = torch.empty(65536, 64)
    graph = make_fx(forward, tracing_mode="fake")(x, *weights).graph
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    inputs = [
        Input(name, "parameter" if i else "input") for i, name in enumerate(names)
    ]
    return read(graph, Signature(tuple(inputs), (Output("out"),)))


def pairs() -> list[tuple[Spec, Spec]]:
    """Every change between ways to lay two axes on two dims."""
    entries = [None, "dp", "tp", ("dp", "tp"), ("tp", "dp")]
    specs = []
    for a, b in itertools.product(entries, repeat=2):
        used = [x for e in (a, b) for x in ([e] if isinstance(e, str) else e or [])]
        if len(used) == len(set(used)):
            specs.append(Spec(a, b))
    return list(itertools.product(specs, repeat=2))


def test_parse_rule(benchmark) -> None:
    benchmark(parse_rule, "b (h d), h d -> b h d")


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_of_every_reshard(benchmark, mesh: str) -> None:
    """From cold: answers are cached, so each round forgets them first."""
    parsed, cases = Mesh.parse(mesh), pairs()

    def forget() -> None:
        for function in (*vars(route).values(), *vars(one_pair).values()):
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    def all_of_them() -> None:
        for source, target in cases:
            route.steps(source, target, parsed, (65536, 65536))

    benchmark.pedantic(all_of_them, setup=forget, rounds=20)


@pytest.mark.parametrize("mesh", MESHES)
def test_propagate(benchmark, mesh: str) -> None:
    """Sixteen layers from two seeds, the batch and the first weight."""
    program, parsed = chain(16), Mesh.parse(mesh)
    seeds = [
        Seed(program.inputs[0], (("dp",), ()), (False, False), "batch", batch=True),
        Seed(program.inputs[1], ((), ("tp",)), (False, False), "columns"),
    ]

    def propagate() -> Propagation:
        engine = Propagation(program, parsed)
        engine.seed(seeds)
        return engine

    engine = benchmark(propagate)
    assert engine.state.spec(program.outputs[0]).dims[0] == ("dp",)
