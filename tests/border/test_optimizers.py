"""Optimizers that are more than pointwise: matrices orthogonalized or factored, norms
read in Python. Parameters after several steps are those of one device, in float64, on
plain and on sharded parameters, in a loop and in ``fxpar.train_step``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fxpar
from fxpar.errors import FxparError
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.usefixtures("propagated")

STEPS = 4


class Shampoo(torch.optim.Optimizer):
    """Whole matrices: roots of sums of outer products, by their eigenvectors."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad
                if not state:
                    eyes = (torch.eye(n, dtype=p.dtype) * 1e-3 for n in p.shape)
                    state["left"], state["right"] = eyes
                state["left"] = state["left"] + g @ g.mT
                state["right"] = state["right"] + g.mT @ g
                update = root(state["left"]) @ g @ root(state["right"])
                p.sub_(group["lr"] * update)


def root(m: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(m)
    return vectors @ torch.diag(values.clamp_min(1e-12) ** -0.25) @ vectors.mT


class Reads(torch.optim.SGD):
    """Branches on the value of a tensor, which no graph of all steps can."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad.norm().item() > 1.0:
                p.sub_(p.grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": lambda p: torch.optim.Muon(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "shampoo": Shampoo,
    "reads": Reads,
}


def build() -> nn.Module:
    torch.manual_seed(0)
    linear = functools.partial(nn.Linear, bias=False)
    layers = linear(8, 16), nn.ReLU(), linear(16, 12), nn.Tanh(), linear(12, 8)
    return nn.Sequential(*layers).double()


def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    shape = (8, 8)
    return [
        (torch.randn(shape).double(), torch.randn(shape).double()) for _ in range(STEPS)
    ]


def loop(call: Any, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches():
        loss_fn(call, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(name: str, how: str) -> float:
    """The largest difference of a parameter from one device."""
    warnings.simplefilter("ignore")
    alone, model = build(), build()
    loop(alone, OPTIMIZERS[name](alone.parameters()))
    if how != "plain step":
        model = fxpar.shard(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    options = {"codegen": "eager"}
    if how == "loop":
        loop(torch.compile(model, backend="fxpar", options=options), optimizer)
    else:
        step = fxpar.train_step(model, loss_fn, optimizer, options=options)
        for x, y in batches():
            step(x, y)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return max((p - whole(q)).abs().max().item() for p, q in pairs)


def whole(p: Any) -> torch.Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


CASES = [
    pytest.param("muon", "loop", marks=pytest.mark.slow),  # see its bfloat16 below
    ("muon", "step"),
    pytest.param("muon", "plain step", marks=pytest.mark.slow),
    ("adafactor", "loop"),
    pytest.param("rprop", "loop", marks=pytest.mark.slow),
    pytest.param("rprop", "step", marks=pytest.mark.slow),
    pytest.param("adafactor", "step", marks=pytest.mark.slow),
    pytest.param("adafactor", "plain step", marks=pytest.mark.slow),
    pytest.param("shampoo", "step", marks=pytest.mark.slow),
    pytest.param("shampoo", "plain step", marks=pytest.mark.slow),
]
MESHES = [
    ("dp=2", 2),
    pytest.param("dp=4", 4, marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2", 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "ranks"), MESHES)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_parameters_are_those_of_one_device(
    name: str, how: str, mesh: str, ranks: int
) -> None:
    """Those of Muon too, whose bfloat16 rounds otherwise if products of its matrices
    are summed over ranks, or parted from what is added to them."""
    pool = shared_pool(ranks)
    for off in pool.run(trained, name, how, env={"FXPAR_MESH": mesh}):
        assert off < 1e-12


def set_by_a_mask(lies: str) -> bool:
    """What elements are once those that a mask chooses are set to a number."""
    fxpar.shard(build())  # which all ops on DTensors come with
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    placements = {"alike": Shard(0), "otherwise": Shard(1)}
    parts = distribute_tensor(x, mesh, [Shard(0)])
    mask = distribute_tensor(x > 0, mesh, [placements[lies]])
    parts[mask] = 2.0
    return torch.equal(parts.full_tensor(), x.masked_fill(x > 0, 2.0))


def test_elements_are_set_by_a_mask() -> None:
    for lies in ("alike", "otherwise"):
        results = shared_pool(2).run(set_by_a_mask, lies, env={"FXPAR_MESH": "dp=2"})
        assert results == [True, True]


def test_a_branch_on_a_value_is_refused() -> None:
    errors = shared_pool(2).errors(trained, "reads", "step", env={"FXPAR_MESH": "dp=2"})
    for error in errors:
        assert isinstance(error, FxparError)
        assert "the step of Reads cannot be traced: it reads the value" in str(error)
        assert "p.grad.norm().item() > 1.0" in str(error)
