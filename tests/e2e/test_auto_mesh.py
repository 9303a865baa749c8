"""FXPAR_MESH=auto on four ranks: one mesh for all of a process, chosen on rank 0, and
the numbers of one device; the plan of a first run is what the second takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import InputMismatchError, MeshError
from fxpar.runtime.ranks.groups import join
from fxpar.sharding.cost.hardware_table import Level
from tests.helpers.machines import machine
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

# Four ranks along one axis split these sizes unevenly, along two axes evenly.
RANKS, ROWS, WIDTH, HIDDEN, CLASSES, STEPS = 4, 10, 34, 70, 6, 2

# Small problems are proved at once; the clock should not decide which are tried.
LONG = {"search_seconds": 100}


@pytest.fixture(autouse=True)
def _renewed() -> Iterator[None]:
    """A mesh is chosen for the life of a process group."""
    shared_pool(RANKS).renew()
    yield
    torch._dynamo.reset()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    machine().save(tmp_path / "slow.json")
    return {
        "FXPAR_MESH": "auto",
        "FXPAR_PLAN": "search",
        "FXPAR_HARDWARE": str(tmp_path / "slow.json"),
        "FXPAR_CODEGEN": "eager",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches"),
    }


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES)
    ).double()


def data(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    return x, torch.randn(rows, CLASSES, dtype=torch.float64)


def trained(
    program: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the last gradients, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(program(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    grads = {name: p.grad for name, p in model.named_parameters()}
    whole = {
        name: g.full_tensor() if isinstance(g, DTensor) else g
        for name, g in grads.items()
        if g is not None
    }
    return losses, whole


def alone(rows: int = ROWS) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()
    return trained(model, model, *data(rows))


def same(got: Any, want: Any) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-7, atol=1e-10)


def together(sharded: bool) -> tuple[Any, list[str], list[str], list[str]]:
    """What training gives, then an inference; the meshes, hashes and notes of plans."""
    torch._dynamo.reset()
    before, model = len(fxpar.plans()), build()
    x, y = data()
    if sharded:
        model = fxpar.shard(model, sample=((x,), {}))
    program = torch.compile(model, backend="fxpar", options=LONG)
    got = trained(program, model, x, y)
    with torch.no_grad():
        program(x)
    plans = fxpar.plans()[before:]
    notes = [note for plan in plans for note in plan.notes]
    return got, [str(p.mesh) for p in plans], [p.hash for p in plans], notes


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "at rest"])
def test_one_mesh_and_the_numbers_of_one_device(
    sharded: bool, env: dict[str, str], tmp_path: Path
) -> None:
    pool, want = shared_pool(RANKS), alone()
    results = pool.run(together, sharded, env=env, timeout=200.0)
    for got, meshes, hashes, _ in results:
        same(got, want)
        assert meshes[0] == meshes[1] and fxpar.Mesh.parse(meshes[0]).size == RANKS
        assert (meshes, hashes) == results[0][1:3]
    chosen = [note for note in results[0][3] if "chosen of" in note]
    assert len(chosen) == (0 if sharded else 1)  # of the sample, or the first graph
    kept = sorted((tmp_path / "caches" / "fxpar").glob("*.json"))
    assert len(kept) == 2 + sharded

    pool.renew()
    for got, meshes, hashes, notes in pool.run(together, sharded, env=env):
        same(got, want)
        assert (meshes, hashes) == results[0][1:3]
        assert sum(note.startswith("stored plan") for note in notes) == 2
    assert sorted((tmp_path / "caches" / "fxpar").glob("*.json")) == kept


def fed_parts() -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Each rank feeds rows of its own."""
    torch._dynamo.reset()
    model, (x, y) = build(), data(2 * ROWS)
    rank, part = torch.distributed.get_rank(), 2 * ROWS // RANKS
    mine = slice(rank * part, (rank + 1) * part)
    program = torch.compile(model, backend="fxpar", options=LONG)
    losses, grads = trained(program, model, x[mine], y[mine])
    return losses, grads, str(fxpar.plans()[-1].mesh)


def test_every_rank_may_feed_its_own_part(env: dict[str, str]) -> None:
    """Then nothing is left to choose."""
    want = alone(2 * ROWS)
    env |= {"FXPAR_INPUTS": "local"}
    results = shared_pool(RANKS).run(fed_parts, env=env, timeout=200.0)
    mean = [
        sum(losses) / RANKS for losses in zip(*(r[0] for r in results), strict=True)
    ]
    for _, grads, mesh in results:
        same((mean, grads), want)
        assert mesh == "dp=4"


def deep() -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*blocks).double()


def staged(
    how: str, rows: int
) -> tuple[list[float], list[tuple[str, int, int]], list[str]]:
    """Losses of a deep model; of its plans the mesh, stages and microbatches; hashes.
    ``how``: "alone", compiled "whole", "at rest", or as a whole "step"."""
    torch._dynamo.reset()
    before, model = len(fxpar.plans()), deep()
    torch.manual_seed(4)
    x = torch.randn(rows, 128, dtype=torch.float64)
    if how == "at rest":
        model = fxpar.shard(model, sample=((x,), {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(run: Any, x: torch.Tensor) -> torch.Tensor:
        return run(x).square().mean()

    if how == "step":
        step = fxpar.train_step(model, loss_of, optimizer, options=LONG)
        losses = [step(x).item() for _ in range(STEPS)]
    else:
        run: Any = model
        if how != "alone":
            run = torch.compile(model, backend="fxpar", options=LONG)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(run, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    plans = fxpar.plans()[before:]
    facts = [(str(p.mesh), len(p.stages), p.microbatches) for p in plans]
    return losses, facts, [p.hash for p in plans]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "speed", "rows", "parts"),
    [("whole", 5e6, 64, 16), ("step", 5e6, 64, 16), ("at rest", 1e6, 256, None)],
)
def test_stages_are_chosen_where_they_pay(
    how: str,
    speed: float,
    rows: int,
    parts: int | None,
    env: dict[str, str],
    tmp_path: Path,
) -> None:
    """Gradients take as long to reduce as the step to compute, beside which messages
    cost nothing. The second start finds
    the plan on disk, its stages and microbatches too. At rest a sample chooses the mesh
    alone: microbatches are those of a named one."""
    links = (Level(0, speed, 0.0, 0.0),)
    slow = replace(machine(), bandwidth=1e11, levels=links, beside=0.0)
    slow.save(tmp_path / "slow.json")
    pool, (want, _, _) = shared_pool(2), staged("alone", rows)
    for _ in range(2):
        pool.renew()
        results = pool.run(staged, how, rows, env=env, timeout=200.0)
        for losses, facts, hashes in results:
            assert losses == pytest.approx(want, rel=1e-9)
            assert facts == [("pp=2,dp=1", 2, parts)] and hashes == results[0][2]


def compiled_after(given: str) -> list[str]:
    """Meshes of a model sharded on a given mesh, and of one compiled after it."""
    torch._dynamo.reset()
    before, (x, _) = len(fxpar.plans()), data()
    for model in (fxpar.shard(build(), mesh=given), build()):
        torch.compile(model, backend="fxpar")(x)
    return [str(plan.mesh) for plan in fxpar.plans()[before:]]


@pytest.mark.slow
def test_the_mesh_of_parameters_is_that_of_what_follows(env: dict[str, str]) -> None:
    for meshes in shared_pool(RANKS).run(compiled_after, "dp=2,tp=2", env=env):
        assert meshes == ["dp=2,tp=2"] * 2


def sharded_without_a_call() -> None:
    fxpar.shard(build())


def other_rows() -> None:
    torch._dynamo.reset()
    model, (x, _) = build(), data()
    torch.compile(model, backend="fxpar")(x + torch.distributed.get_rank())


def plain_call() -> None:
    torch._dynamo.reset()
    model, (x, _) = build(), data()
    torch.compile(model, backend="fxpar")(x)


def joined() -> None:
    from fxpar.config import Options

    join(Options.read())


@pytest.mark.parametrize(
    ("fn", "changed", "kind", "words"),
    [
        (sharded_without_a_call, {}, MeshError, "sample=(args, kwargs)"),
        (plain_call, {"FXPAR_PLAN": "propagate"}, MeshError, "set FXPAR_PLAN=search"),
        (other_rows, {}, InputMismatchError, "FXPAR_INPUTS=local"),
        (joined, {"FXPAR_MESH": "auto:8"}, MeshError, "mesh auto:8 has 8 ranks, but 4"),
    ],
)
def test_errors(
    fn: Any, changed: dict[str, str], kind: type, words: str, env: dict[str, str]
) -> None:
    for error in shared_pool(RANKS).errors(fn, env=env | changed):
        assert words in str(error)
        assert isinstance(error, kind)
