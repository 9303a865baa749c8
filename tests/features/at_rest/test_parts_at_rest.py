"""Parameters that rest on parts of an axis: four ranks, two key heads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor, Replicate, Shard

import fxpar
from fxpar.errors import HintError
from tests.helpers.grouped_heads import batch, layer
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

HINTS = {
    "*.q.weight": ("tp", None),
    "*.[kv].weight": ("tp:2", None),
    "*.o.weight": (None, "tp"),
}
WHOLE = states.StateDictOptions(full_state_dict=True)


def compiled(model: nn.Module, **how: Any) -> Any:
    options = {"codegen": "eager", "plan": "propagate", **how}
    return torch.compile(model, backend="fxpar", options=options)


def trained(model: nn.Module, run: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps with clipped gradients, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = run(batch()).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), float(whole(norm))]
    return losses, {name: whole(p.detach()) for name, p in model.named_parameters()}


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def as_one_device(hints: Any, mesh: str, codegen: str = "eager") -> None:
    plain = layer(2)
    want = trained(plain, plain)
    model = layer(2)
    if hints is not None:
        model = fxpar.shard(model, mesh=mesh, hints=hints)
    run = compiled(model, mesh=mesh, codegen=codegen)
    torch.testing.assert_close(trained(model, run), want, rtol=1e-9, atol=1e-9)
    plan = fxpar.plans()[-1]
    assert str(plan.mesh).endswith("tp=2*2")
    # What rests split for memory alone may be used split along another dim.
    if hints != {}:
        assert "all_to_all" not in {c.kind for c in plan.collectives}


def rested() -> None:
    model = fxpar.shard(layer(2), mesh="tp=4", hints=HINTS)
    weight = model.attention.k.weight
    assert weight.placements == (Shard(0), Replicate())
    assert weight.device_mesh.mesh_dim_names == ("tp:(1)2", "tp:(2)2")
    assert weight.to_local().shape == (8, 64)
    query = model.attention.q.weight
    assert query.placements == (Shard(0), Shard(0))
    assert query.device_mesh == weight.device_mesh
    plain = layer(2).state_dict()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(whole(x), plain[name])
    other = copy.deepcopy(plain)
    model.load_state_dict({name: x + 1 for name, x in other.items()})
    torch.testing.assert_close(whole(model.attention.k.weight), plain_k(plain) + 1)


def plain_k(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return state["attention.k.weight"]


def test_parameters_rest_on_parts() -> None:
    shared_pool(4).run(rested)


def test_a_model_at_rest_on_parts_trains_as_on_one_device() -> None:
    shared_pool(4).run(as_one_device, HINTS, "tp=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hints", "codegen"), [(None, "eager"), ({}, "eager"), (HINTS, "inductor")]
)
def test_heads_on_parts_train_as_on_one_device(hints: Any, codegen: str) -> None:
    """Whole parameters, parameters split for memory, and compiled."""
    shared_pool(4).run(as_one_device, hints, "tp=4", codegen)


def between_meshes(folder: str) -> None:
    """Saved from parts, loaded on another mesh, and back."""
    model = fxpar.shard(layer(2), mesh="tp=4", hints=HINTS)
    want = layer(2).state_dict()
    dcp.save(states.get_model_state_dict(model), checkpoint_id=f"{folder}/parts")
    other = fxpar.shard(layer(2), mesh="dp=2,tp=2")
    for made, at, to in ((other, "parts", "grid"), (model, "grid", None)):
        with torch.no_grad():
            for p in made.parameters():
                p.fill_(7)
        state = states.get_model_state_dict(made)
        dcp.load(state, checkpoint_id=f"{folder}/{at}")
        states.set_model_state_dict(made, state)
        got = states.get_model_state_dict(made, options=WHOLE)
        torch.testing.assert_close(dict(got), dict(want))
        if to is not None:
            dcp.save(states.get_model_state_dict(made), checkpoint_id=f"{folder}/{to}")


@pytest.mark.slow
def test_checkpoints_of_parts(tmp_path: Path) -> None:
    shared_pool(4).run(between_meshes, str(tmp_path))


def misfits() -> None:
    fxpar.shard(layer(2), mesh="tp=4", hints={"*.k.weight": ("tp:3", None)})


def test_parts_that_the_mesh_does_not_have_are_refused() -> None:
    for error in shared_pool(4).errors(misfits):
        assert isinstance(error, HintError) and error.fix
        assert "has no part 'tp:(1)3'" in str(error)
