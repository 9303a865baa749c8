"""Searched plans on four ranks: one rank searches, all run its plan, with the losses
and gradients of one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import fxpar
from fxpar.sharding import plan_request
from tests.helpers.machines import machine
from tests.helpers.models import NAMES
from tests.helpers.programs import mlp
from tests.helpers.spawn import shared_pool
from tests.helpers.training import STEPS, compare, one_device, train

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def check(name: str, mesh: str, path: Path, sharded: bool) -> None:
    machine().save(path / "slow.json")
    pool, env = shared_pool(4), {"FXPAR_PLAN": "search"}
    env |= {"FXPAR_HARDWARE": str(path / "slow.json")}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(path)}  # no plan is there
    if mesh == "auto":  # chosen for the life of a process group
        pool.renew()
    options = {"mesh": mesh, "codegen": "eager", "search_seconds": 5}
    rest = ("sample" if mesh == "auto" else "sharded") if sharded else "whole"
    runs = pool.run(train, name, options, STEPS, rest, env=env, timeout=400.0)
    if mesh == "auto":
        pool.renew()
    compare(runs, one_device(name))
    for run in runs:
        assert run.plans and run.plans == runs[0].plans


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "sharded"), [("llama", "dp=2,tp=2", True)])
def test_search(name: str, mesh: str, sharded: bool, tmp_path: Path) -> None:
    check(name, mesh, tmp_path, sharded)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_five_models(name: str, mesh: str, sharded: bool, tmp_path: Path) -> None:
    check(name, mesh, tmp_path, sharded)


ROWS = torch.linspace(-1, 1, 32 * 16, dtype=torch.float64).view(32, 16)


def loss_of(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: model(x).square().mean()


def by_default(hardware: str) -> tuple[float, str]:
    """The loss, and what the plan says of itself, with nothing but a mesh."""
    torch._dynamo.reset()
    options = {"mesh": "dp=2", "hardware": hardware, "codegen": "eager"}
    loss = torch.compile(loss_of(mlp()), backend="fxpar", options=options)(ROWS)
    return loss.item(), fxpar.plans()[-1].notes[0]


def test_search_is_the_default(tmp_path: Path) -> None:
    machine().save(tmp_path / "slow.json")
    path = str(tmp_path / "slow.json")
    env = {"FXPAR_PLAN": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    want = loss_of(mlp())(ROWS).item()
    for loss, note in shared_pool(2).run(by_default, path, env=env, timeout=200.0):
        assert note.startswith("search: ")
        assert loss == pytest.approx(want, rel=1e-9)


def laid_out(mesh: str, hardware: str) -> tuple[dict[str, str], float]:
    """Where parameters rest that the search laid out for a sample, and the loss."""
    torch._dynamo.reset()
    model = mlp(2)
    given = {"FXPAR_PLAN": "search", "FXPAR_HARDWARE": hardware}
    given["TORCHINDUCTOR_CACHE_DIR"] = str(Path(hardware).parent)  # no plan is there
    with mock.patch.dict(os.environ, given):
        model = fxpar.shard(model, mesh=mesh, sample=((ROWS,), {}))
        options = {"mesh": mesh, "codegen": "eager"}
        loss = torch.compile(loss_of(model), backend="fxpar", options=options)(ROWS)
    loss.backward()
    rests = {name: str(p.placements) for name, p in model.named_parameters()}
    return rests, loss.item()


@pytest.mark.slow
def test_a_sample_lays_parameters_out(tmp_path: Path) -> None:
    machine().save(tmp_path / "slow.json")
    path = str(tmp_path / "slow.json")
    results = shared_pool(4).run(laid_out, "dp=2,tp=2", path, timeout=200.0)
    want = loss_of(mlp(2))(ROWS).item()
    for rests, loss in results:
        assert rests == results[0][0]
        assert loss == pytest.approx(want, rel=1e-9)
    assert len(set(results[0][0].values())) > 1


def failing(hardware: str) -> str:
    """What a rank says when no plan fits."""
    model = torch.nn.Linear(64, 64)
    options = {"mesh": "dp=4", "plan": "search", "hardware": hardware, "memory": 1.0}
    program = torch.compile(model, backend="fxpar", options=options)
    try:
        program(torch.ones(4, 64))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_search_that_fails_fails_on_every_rank(tmp_path: Path) -> None:
    machine().save(tmp_path / "slow.json")
    said = shared_pool(4).run(failing, str(tmp_path / "slow.json"), timeout=100.0)
    assert "no plan fits" in said[0]
    assert all("rank 0" in text and "no plan fits" in text for text in said[1:])


def test_the_mode_names_its_hardware(tmp_path: Path) -> None:
    from fxpar.config import Options

    asked = plan_request.plan_mode("search", Options.read({"hardware": "h100"}), 2)
    assert asked.hardware.name == "h100"
