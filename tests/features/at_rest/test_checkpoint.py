"""Checkpoints of sharded models: torch.distributed.checkpoint, between any meshes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor

import fxpar
from tests.helpers.models import build_loss
from tests.helpers.processes import RankError
from tests.helpers.spawn import shared_pool

WHOLE = states.StateDictOptions(full_state_dict=True)
EXPORT = states.StateDictOptions(full_state_dict=True, cpu_offload=True)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Tied embeddings, and a head of 4 classes; buffers in both.
MODELS = ("gpt2", "resnet")


def make(name: str, mesh: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of the same values in every process, and its optimizer."""
    model, _ = build_loss(name)
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step on gradients that are a function of the name alone: they need no model
    run, and are the same on every mesh."""
    for number, parameter in enumerate(model.parameters()):
        draw = torch.Generator().manual_seed(number)
        whole = torch.randn(parameter.shape, generator=draw)
        parameter.grad = like(whole, parameter)
    optimizer.step()
    optimizer.zero_grad()


def like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def scramble(model: nn.Module) -> None:
    """Other values everywhere, so that what is equal later was loaded."""
    with torch.no_grad():
        for x in [*model.parameters(), *model.buffers()]:
            x.zero_() if x.dtype == torch.bool else x.fill_(7)


def whole(state: object) -> object:
    """DTensors of a nested state gathered, tensors copied."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state


def same(a: object, b: object, path: str = "") -> None:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}/{i}")
    else:
        assert a == b, path


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save(name: str, mesh: str | None, path: str) -> dict:
    """One step, then a checkpoint. Returns what it holds, whole."""
    model, optimizer = make(name, mesh)
    step(name, model, optimizer)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=path, no_dist=mesh is None)
    return whole(state)


def load(name: str, mesh: str | None, path: str) -> dict:
    model, optimizer = make(name, mesh)
    scramble(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path, no_dist=mesh is None)
    states.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    held = whole(state_of(model, optimizer))
    for slot in optimizer.state.values():
        exp = slot["exp_avg"]
        assert isinstance(exp, DTensor) == (mesh is not None)
    step(name, model, optimizer)  # and it trains on
    return {"loaded": held, "next": whole(state_of(model, optimizer))}


def at(name: str, mesh: str | None, path: str, fn) -> dict:
    if mesh is None:
        return fn(name, None, path)
    results = shared_pool(4).run(fn, name, mesh, path)
    for other in results[1:]:
        same(results[0], other)
    return results[0]


MESHES = [
    ("dp=4", "dp=2,tp=2"),
    ("dp=4", None),
    (None, "dp=4"),
    ("dp=2,tp=2", "dp=4"),
    ("dp=2,tp=2", None),
]
QUICK = [("resnet", MESHES[4])]


def cases() -> Iterator[Any]:
    for name, meshes in itertools.product(MODELS, MESHES):
        marks = () if (name, meshes) in QUICK else pytest.mark.slow
        names = "->".join(mesh or "one" for mesh in meshes)
        yield pytest.param(name, meshes, id=f"{name}-{names}", marks=marks)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "meshes"), list(cases()))
def test_between_meshes(tmp_path: Path, name: str, meshes: tuple) -> None:
    saved_on, loaded_on = meshes
    saved = at(name, saved_on, str(tmp_path), save)
    got = at(name, loaded_on, str(tmp_path), load)
    same(got["loaded"], saved)
    model, optimizer = make(name, None)
    step(name, model, optimizer)
    same(state_of(model, optimizer)["model"], saved["model"])
    step(name, model, optimizer)
    same(state_of(model, optimizer), got["next"])


def kinds(name: str, mesh: str) -> dict[str, str]:
    model, _ = make(name, mesh)
    return {key: type(x).__name__ for key, x in model.state_dict().items()}


@pytest.mark.multiprocess
def test_state_dict_holds_dtensors() -> None:
    model, _ = make("resnet", None)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for got in shared_pool(4).run(kinds, "resnet", "dp=4"):
        assert list(got) == list(model.state_dict())  # the names of one device, too
        for key, kind in got.items():
            assert kind == ("DTensor" if key in parameters else "Tensor"), key


def export(name: str, mesh: str, path: str) -> tuple[dict, dict]:
    """A whole state dict on every rank, and on rank 0 alone as a file."""
    model, optimizer = make(name, mesh)
    step(name, model, optimizer)
    everywhere = states.get_model_state_dict(model, options=WHOLE)
    there = states.get_model_state_dict(model, options=EXPORT)
    if there:
        torch.save(there, path)
    return everywhere, there


@pytest.mark.slow
@pytest.mark.multiprocess
def test_full_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    model, optimizer = make("gpt2", None)
    step("gpt2", model, optimizer)
    want = dict(model.state_dict())
    results = shared_pool(4).run(export, "gpt2", "dp=2,tp=2", str(path))
    for rank, (everywhere, there) in enumerate(results):
        same(dict(everywhere), want)
        assert bool(there) == (rank == 0)
    other, _ = make("gpt2", None)
    scramble(other)
    other.load_state_dict(torch.load(path))
    same(dict(other.state_dict()), want)


def full_optimizer(name: str, mesh: str) -> tuple[dict, dict]:
    """A full state dict out and in again, model and optimizer, on one mesh."""
    model, optimizer = make(name, mesh)
    step(name, model, optimizer)
    before = states.get_state_dict(model, optimizer, options=WHOLE)
    step(name, model, optimizer)
    states.set_state_dict(
        model,
        optimizer,
        model_state_dict=before[0],
        optim_state_dict=before[1],
        options=WHOLE,
    )
    after = states.get_state_dict(model, optimizer, options=WHOLE)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert isinstance(next(iter(optimizer.state.values()))["exp_avg"], DTensor)
    return whole(list(before)), whole(list(after))


@pytest.mark.multiprocess
def test_full_state_dict_with_optimizer_and_back() -> None:
    for before, after in shared_pool(2).run(full_optimizer, "gpt2", "tp=2"):
        same(before, after)


def broadcast(name: str, mesh: str, path: str) -> dict:
    """A file that only rank 0 reads."""
    from fxpar import _torch

    model, _ = make(name, mesh)
    scramble(model)
    given = torch.load(path) if _torch.distributed.default_group().rank() == 0 else {}
    states.set_model_state_dict(
        model,
        given,
        options=states.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True
        ),
    )
    return whole(dict(model.state_dict()))


@pytest.mark.multiprocess
def test_rank_0_reads_for_all(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    model, _ = make("gpt2", None)
    torch.save(model.state_dict(), path)
    for got in shared_pool(4).run(broadcast, "gpt2", "dp=2,tp=2", str(path)):
        same(got, dict(model.state_dict()))


def load_plain(name: str, mesh: str, assign: bool) -> tuple[dict, list[str], list[str]]:
    """``load_state_dict`` of what one device saved."""
    plain, _ = make(name, None)
    step(name, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    model, _ = make(name, mesh)
    scramble(model)
    before = dict(plain.state_dict())
    result = model.load_state_dict(before, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(not isinstance(x, DTensor) for x in before.values())  # left as it was
    fresh, _ = make(name, mesh)
    return whole(dict(model.state_dict())), placements(model), placements(fresh)


def placements(model: nn.Module) -> list[str]:
    # Tied ones each: assign=True unties them, as it does on one device.
    tensors = model.state_dict().values()
    return [str(x.placements) for x in tensors if isinstance(x, DTensor)]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_takes_whole_tensors(assign: bool) -> None:
    model, optimizer = make("gpt2", None)
    step("gpt2", model, optimizer)
    want = dict(model.state_dict())
    for got, lies, before in shared_pool(4).run(
        load_plain, "gpt2", "dp=2,tp=2", assign
    ):
        same(got, want)
        assert lies == before


def other_shape(how: str, path: str) -> None:
    """Take the values of a wider model."""
    model = fxpar.shard(Two(8), mesh="dp=2,tp=2")
    if how == "dcp":
        dcp.load({"model": states.get_model_state_dict(model)}, checkpoint_id=path)
    elif how == "plain":
        model.load_state_dict(Two(16).state_dict())
    else:
        wide = fxpar.shard(Two(16), mesh="dp=2,tp=2")
        model.load_state_dict(wide.state_dict())


class Two(nn.Sequential):
    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, width), nn.Linear(width, 4))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "how", ["dcp", "plain", pytest.param("dtensor", marks=pytest.mark.slow)]
)
def test_other_shapes_are_named(tmp_path: Path, how: str) -> None:
    dcp.save({"model": Two(16).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(RankError) as error:
        shared_pool(4).run(other_shape, how, str(tmp_path))
    text = str(error.value)
    assert "0.weight" in text and "[16, 4]" in text and "[8, 4]" in text
