"""Train on one device and on ranks, and compare losses, gradients and buffers.

``loop`` is the one training loop of the tests; ``train`` runs it for a model of
``helpers.models``, whole or at rest sharded, compiled or as it is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec
from tests.helpers.models import (
    DRAWS_RANDOM,
    ODD_NAMES,
    build_double,
    build_loss,
    double,
)

STEPS = 10
BATCH = ("dp", "ep", "fsdp")  # axes along which ranks feed parts
MESHES = {"dp=2": 2, "dp=4": 4, "dp=2,tp=2": 2}  # with the parts of a batch

LOSS = 1e-5  # relative
GRADIENT = 1e-4  # relative to the largest value of a gradient
FLOOR = 1e-6  # of the largest gradient: some are zero but for rounding

# ReLU jumps where a value is zero but for rounding, and the gradient with it: the one
# model that has it is trained in float64, where rounding does not reach that far.
DOUBLE = frozenset({"resnet", *ODD_NAMES})


def part(batch: dict[Any, torch.Tensor], parts: int) -> dict[Any, torch.Tensor]:
    """This rank's part; ranks that differ on other axes feed the same one."""
    rank = torch.distributed.get_rank()
    i = rank * parts // torch.distributed.get_world_size()
    return {k: v.chunk(parts)[i].clone() for k, v in batch.items()}


def place_of(mesh: str) -> tuple[int, int]:
    """This rank's place along the batch axes of a mesh, and how many there are."""
    place, places = 0, 1
    below = torch.distributed.get_world_size()
    for axis, size in re.findall(r"(\w+)=(\d+)", mesh):
        below //= int(size)
        if axis in BATCH:
            place *= int(size)
            place += torch.distributed.get_rank() // below % int(size)
            places *= int(size)
    return place, places


def whole(x: Any) -> torch.Tensor:
    """A tensor's global value, a copy. Not by ``full_tensor()``, whose gathers (gloo,
    torch 2.13) may corrupt memory, unless summands are to be added."""
    if not isinstance(x, DTensor):
        return x.detach().clone()
    if any(placement.is_partial() for placement in x.placements):
        return x.full_tensor().detach().clone()
    mesh = Mesh.from_device_mesh(x.device_mesh)
    spec = Spec.from_placements(x.placements, mesh, x.dim())
    layout = str(spec), "", str(mesh), "", -1
    part = x.to_local().detach()
    return torch.ops.fxpar.to_global(part, list(x.shape), *layout)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Global values of all gradients that there are, by name."""
    named = model.named_parameters()
    return {name: whole(p.grad) for name, p in named if p.grad is not None}


def loop(
    program: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    model: nn.Module | None = None,
    clip: float | None = None,
    after: Callable[[], Any] = lambda: None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, one update each, and gradients of the first step if ``model`` is given.

    ``batches``: keyword arguments of the program, or positional ones. ``clip``: norm
    of gradients. ``after``: called behind every update. Gradients of the last step
    are left.
    """
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for batch in batches:
        optimizer.zero_grad()
        loss = program(**batch) if isinstance(batch, dict) else program(*batch)
        loss.backward()
        if model is not None and not losses:
            first = gradients(model)
        if clip is not None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses, first


@dataclass(frozen=True)
class Run:
    """What a training run gave on one rank."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]  # global ones of the first step
    state: dict[str, torch.Tensor]  # buffers at the end
    plans: tuple[str, ...] = ()  # hashes of the plans that were compiled


def train(
    name: str,
    options: dict[str, Any] | None,
    steps: int = STEPS,
    rest: str = "whole",
) -> Run:
    """Train a model, compiled with ``options``, or as it is if they are None.

    ``rest``: how its parameters lie between steps: "whole", "sharded", or "sample", as
    the search lays them out for the batch.
    """
    with double() if name in DOUBLE else contextlib.nullcontext():
        model, batch = (build_loss, build_double)[name in DOUBLE](name)
        compiled, before = model, len(fxpar.plans())
        if options is not None:
            torch._dynamo.reset()
            if rest != "whole":
                sample = ((), batch) if rest == "sample" else None
                model = fxpar.shard(model, mesh=options["mesh"], sample=sample)
                assert all(isinstance(p, DTensor) for p in model.parameters())
            compiled = torch.compile(model, backend="fxpar", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(5)
        losses, first = loop(compiled, optimizer, [batch] * steps, model=model)
    hashes = tuple(plan.hash for plan in fxpar.plans()[before:])
    return Run(losses, first, dict(model.named_buffers()), hashes)


@cache
def one_device(name: str, steps: int = STEPS) -> Run:
    """Plain PyTorch; with dropout the same backend alone, since eager PyTorch draws
    other random numbers than compiled code does."""
    return train(name, {"codegen": "eager"} if name in DRAWS_RANDOM else None, steps)


def compare(runs: list[Run], want: Run) -> None:
    """Every rank's run with that of one device."""
    largest = max(x.abs().max().item() for x in want.gradients.values())
    for run in runs:
        assert run.losses == pytest.approx(want.losses, rel=LOSS, abs=0.0)
        assert run.losses == runs[0].losses
        assert set(run.gradients) == set(want.gradients)
        for name, x in want.gradients.items():
            error = (run.gradients[name] - x).abs().max().item()
            bound = max(GRADIENT * x.abs().max().item(), FLOOR * largest)
            assert error <= bound, f"{name}: {error:.3g}, allowed {bound:.3g}"
        for name, x in want.state.items():
            torch.testing.assert_close(run.state[name], x, rtol=1e-4, atol=1e-6)
