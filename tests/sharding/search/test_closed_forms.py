"""Plans of which the cost is published as a formula: found exactly.

Source: Alpa (OSDI 2022), the tests of its intra-operator pass: a collective costs
``alpha + beta * bytes on the wire``, and a small constant that breaks ties; work costs
nothing, but no product may be repeated. Here products are so slow that none is.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.passes.simulate.launches import facts_of
from fxpar.sharding.cost.hardware_table import (
    Hardware,
    Level,
    Peak,
    ProductDims,
    lookup,
    of_kind,
)
from fxpar.sharding.cost.op import dims_of, dims_of_factors, flops_of
from fxpar.sharding.cost.program_kernels import flops_of_op, kernels_of, seconds
from fxpar.sharding.decide import decide_on
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from fxpar.sharding.strategy import Strategy
from tests.helpers.programs import local_graph

ITEM = (
    2  # products are bfloat16, of which the machine has another rate than of the rest
)

# What Alpa adds to each kind.
EXTRA = {
    "all_reduce": 0.01,
    "all_gather": 0.1,
    "reduce_scatter": 0.001,
    "all_to_all": 0.001,
}


def all_reduce(nbytes: float, n: int = 4, alpha: float = 1, beta: float = 1) -> float:
    return alpha + beta * 2 * (n - 1) / n * nbytes + EXTRA["all_reduce"]


def all_to_all(nbytes: float, n: int = 4, alpha: float = 1, beta: float = 1) -> float:
    """``nbytes`` of the whole tensor; Alpa doubles it on four devices."""
    return alpha + beta * (n - 1) / n**2 * nbytes * n / 2 + EXTRA["all_to_all"]


def level(devices: int, n: int, alpha: float, beta: float) -> Level:
    factor = dict.fromkeys(EXTRA, 1.0) | {"all_to_all": n / 2}
    kinds = tuple(
        (kind, of_kind(alpha + more, 0.0, 1 / (beta * factor[kind])))
        for kind, more in EXTRA.items()
    )
    return Level(devices, 1 / beta, 0.0, alpha, kinds=kinds)


def machine(levels: tuple[Level, ...], rate: float) -> Hardware:
    """Only products take time, ``rate`` flops in a second."""
    peaks = (("bfloat16", Peak(rate)), ("float32", Peak(1e30)))
    return Hardware("alpa", peaks, 1e30, 1e30, 0.0, 0.0, levels)


@dataclass(frozen=True)
class Answer:
    """``communication``: what the found plan costs beside products all split."""

    found: SearchResult
    communication: float
    slack: float  # how far below it the optimum may be
    collectives: tuple[Any, ...]

    def counts(self, nbytes: int) -> Counter:
        """Collectives of so many bytes, by kind."""
        return Counter(c.kind for c in self.collectives if c.bytes == nbytes)


def best(
    model: nn.Module,
    *args: torch.Tensor,
    mesh: str = "x=4",
    levels: tuple[Level, ...] | None = None,
    hints: dict[str, Any] | None = None,
    memory: float = math.inf,
) -> Answer:
    """The plan found for forward and backward of a loss."""
    plan = fxpar.plan(model, *args, mesh=mesh, mode="replicate", grad=True)
    program, on = plan.result.decision.program, Mesh.parse(mesh)
    flops = [f for f in (flops_of_op(op) for op in program.ops) if f]
    rate = min(flops) / 1e7  # the smallest product, repeated, costs more than any plan
    hardware = machine(levels or (level(0, on.size, 1, 1),), rate)
    asked = SearchOptions(hardware, 300.0, memory)
    decision = decide_on(program, Request(on, program.signature, hints or {}, asked))
    sent, _ = facts_of(local_graph(decision))
    found = decision.search
    solution = found.solution
    products = sum(flops) / on.size / rate
    return Answer(
        found,
        solution.cost - products,
        solution.cost - solution.bound,
        sent,
    )


def near(answer: Answer, seconds: float) -> None:
    """The plan costs this, and none can cost less: both proved to half of what one
    collective costs."""
    assert answer.slack < 0.5
    assert answer.communication == pytest.approx(seconds, abs=0.5)


# Rows of products


class Products(nn.Module):
    """Square products in a row, and a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def products(layers: int, rows: int, width: int) -> tuple[nn.Module, torch.Tensor]:
    model = Products(layers, width).to(torch.bfloat16)
    return model, torch.randn(rows, width).to(torch.bfloat16)


@pytest.mark.parametrize("layers", [2])
def test_data_parallel_products_reduce_each_gradient(layers: int) -> None:
    width = 16
    answer = best(*products(layers, 4096, width))
    weight, bias = width * width * ITEM, width * ITEM
    loss = all_reduce(ITEM)
    near(answer, layers * (all_reduce(weight) + all_reduce(bias)) + loss)
    assert answer.counts(weight) == {"all_reduce": layers}


@pytest.mark.parametrize("layers", [2, 4])
def test_tensor_parallel_products_reduce_every_other_result(layers: int) -> None:
    rows, width = 8, 256
    answer = best(*products(layers, rows, width))
    near(answer, (layers - 1) * all_reduce(rows * width * ITEM))
    assert answer.counts(rows * width * ITEM) == {"all_reduce": layers - 1}


# Megatron


class Layer(nn.Module):
    """A transformer's layer as BERT has it, norms after the sums."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = (
            f(x).view(b, s, self.heads, -1).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        scores = torch.softmax(q @ k.mT * (width / self.heads) ** -0.5, -1)
        y = self.o((scores @ v).transpose(1, 2).reshape(b, s, width))
        x = self.first(x + y)
        return self.second(x + self.down(F.gelu(self.up(x))))


class Again(torch.autograd.Function):
    """A layer that keeps its input alone and runs again in the backward."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        needs = ctx.needs_input_grad[1]
        with torch.enable_grad():
            x = x.detach().requires_grad_(needs)
            y = ctx.layer(x)
            wanted = [*ctx.layer.parameters()]
            found = torch.autograd.grad(y, [x, *wanted] if needs else wanted, grad)
        return None, *(found if needs else (None, *found))


class Stack(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, *, again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.again = again

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            run = Again.apply if self.again else None
            x = run(layer, x, *layer.parameters()) if run else layer(x)
        return (x - y).square().mean()


def stack(layers: int, *, again: bool = False) -> tuple[Any, ...]:
    """Alpa's sizes: 8 sequences of 8 tokens, 128 wide."""
    model = Stack(layers, 128, 8, again=again).to(torch.bfloat16)
    x = torch.randn(8, 8, 128).to(torch.bfloat16)
    return model, x, x.clone()


STREAM = 8 * 8 * 128 * ITEM


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_a_layer_reduces_twice_each_way(layers: int) -> None:
    """The gradient of the first layer's input is not asked for."""
    answer = best(*stack(layers))
    near(answer, (4 * layers - 1) * all_reduce(STREAM))
    assert answer.counts(STREAM) == {"all_reduce": 4 * layers - 1}
    assert len(answer.collectives) == 4 * layers - 1


@pytest.mark.slow
def test_a_layer_run_again_reduces_at_most_twice_more() -> None:
    """Less than the 6L-1 published: what is computed again for the backward of the last
    norm need not be whole, so its all-reduce becomes a reduce-scatter."""
    answer = best(*stack(1, again=True))
    assert 3 * all_reduce(STREAM) < answer.communication < 5 * all_reduce(STREAM)
    assert answer.counts(STREAM)["reduce_scatter"] >= 1
    assert answer.counts(STREAM)["all_reduce"] < 5


@pytest.mark.slow
def test_where_memory_is_tight_weights_rest_in_parts() -> None:
    """Whole weights are cheapest here. Where they do not fit, some are gathered, and
    their gradients scattered: as many bytes as an all-reduce (ZeRO, section 7)."""
    layers, rows, width = 4, 640, 128
    model, x = products(layers, rows, width)
    free = best(model, x)
    assert not any(spec.axes for spec in _weights(free))
    memory = 0.8 * free.found.solution.peak
    tight = best(model, x, memory=memory)
    assert tight.found.solution.peak <= memory
    assert any(spec.axes for spec in _weights(tight))
    more = tight.communication - free.communication
    assert 0 < more < layers * 2  # seconds; an all-reduce of a weight takes 49,000
    assert tight.communication < (layers - 1) * all_reduce(rows * width * ITEM)


def _weights(answer: Answer) -> list[Any]:
    """Where matrices rest."""
    program = answer.found.formulation.program
    return [
        answer.found.settled[v]
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if declared.kind == "parameter" and len(program.values[v].shape) == 2
    ]


@pytest.mark.slow
def test_a_mesh_of_two_axes_is_never_above_both_at_once() -> None:
    """Tokens over the slow axis, weights over the fast one: gradients of half weights
    over x, Megatron's reductions of half streams over y."""
    model, x, y = stack(1)
    levels = level(2, 2, 2, 0.1), level(0, 2, 2, 1)
    slow = {"n": 2, "alpha": 2, "beta": 1}
    published = 3 * all_reduce(STREAM / 2, n=2, alpha=2, beta=0.1)
    published += all_reduce(ITEM, **slow)
    for name, p in model.named_parameters():
        split = 2 if p.dim() == 2 or name.split(".")[-2] in "q k v up" else 1
        published += all_reduce(p.numel() * ITEM / split, **slow)
    answer = best(model, x, y, mesh="x=2,y=2", levels=levels)
    assert answer.communication - answer.slack <= published
    assert answer.communication <= published + 0.5


# A mixture of experts


class Mixture(nn.Module):
    """Two experts for each token, dispatched by products (GShard, algorithm 1)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width, experts))
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width))
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.gate.shape[1]
        room = 2 * x.shape[1] // experts
        gates = torch.einsum("gsm,me->gse", x, self.gate).float().softmax(-1)
        weight, index = gates.topk(2, -1)
        chosen = (index[..., None] == torch.arange(experts)).sum(2)
        place = (chosen.cumsum(1) - 1) * chosen
        slots = (place[..., None] == torch.arange(room)) * (place < room)[..., None]
        combine = gates[..., None] * slots * chosen[..., None]
        combine = combine.to(x.dtype)
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), x)
        inner = torch.relu(torch.einsum("egcm,emf->egcf", sent, self.up))
        made = torch.einsum("egcf,efm->egcm", inner, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, made).float().square().mean()


@pytest.mark.slow
def test_a_mixture_of_experts_exchanges_tokens_four_times() -> None:
    groups, tokens, width, experts = 64, 16, 64, 16
    model = Mixture(width, experts).to(torch.bfloat16)
    x = torch.randn(groups, tokens, width).to(torch.bfloat16).requires_grad_()
    answer = best(model, x, hints={"x": ("x", None, None)})
    sent = 2 * groups * tokens * width * ITEM  # by all ranks
    published = 4 * all_to_all(sent) + all_reduce(width * experts * ITEM)
    near(answer, published + all_reduce(4))
    assert answer.counts(sent // 4) == {"all_to_all": 4}


# What is a product


def test_what_adds_at_indices_multiplies_nothing() -> None:
    """Else the backward of an embedding would seem the dearest of all."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 8)
            self.out = nn.Linear(8, 4, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(ids)).sum()

    ids = torch.zeros(4, 6, dtype=torch.long)
    plan = fxpar.plan(Words(), ids, mesh="x=2", mode="replicate", grad=True)
    program = plan.result.decision.program
    flops = {op.name: flops_of_op(op) for op in program.ops}
    added = [name for name in flops if "index_put" in name]
    assert added and not any(flops[name] for name in added)
    assert sum(f > 0 for f in flops.values()) == 3  # the product and its gradients
    assert {f for f in flops.values() if f} == {2.0 * 4 * 6 * 8 * 4}


def test_a_convolution_takes_what_a_simulation_says() -> None:
    """By a peak of its own; its window is contracted with the channels."""
    x, weight = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
    plan = fxpar.plan(F.conv2d, x, weight, mesh="x=2", mode="replicate")
    program = plan.result.decision.program
    (op,) = program.ops
    (work,) = kernels_of(program).works
    hardware = lookup("h100")
    peak = Peak(1e6, half_dim=2.0, half_contracted=5.0)
    peaks = (*hardware.peaks, ("float32 convolution", peak))
    taken = seconds(
        op, work, Strategy(), plan.mesh, replace(hardware, peaks=peaks, launch=0.0)
    )
    (convolution,) = (n for n in plan.result.local.nodes if flops_of(n))
    flops, dims = flops_of(convolution), dims_of(convolution)
    assert dims == ProductDims(2 * 6 * 6, 4, 3 * 9)
    assert taken == pytest.approx(flops / peak.rate(flops, dims))


def test_what_counts_products_is_no_dim_of_them() -> None:
    size = {"b": 7, "m": 2, "k": 3, "n": 5}
    assert dims_of_factors("bmk", "bkn", "bmn", size) == ProductDims(2, 5, 3)
    assert dims_of_factors("bmk", "bmn", "kn", size) == ProductDims(3, 5, 14)
