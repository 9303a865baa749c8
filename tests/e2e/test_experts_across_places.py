"""Experts on the ranks of an axis along which each feeds a part of its own: numbers are
those of DistributedDataParallel, whatever rows ranks feed and experts they choose."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fxpar
from fxpar.errors import RoomError
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.propagate.conventions import batch_axes
from tests.helpers.routed import Routed, batch_of, gathered_over_experts
from tests.helpers.spawn import ranks_of
from tests.helpers.training import whole

pytest.importorskip("transformers.integrations.moe")
pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

# Rows of each place, one step after the other; places are counted around.
ROWS = [(8,), (5, 7, 6, 9), (8,), (3, 12, 4, 2)]
Numbers = list[tuple[float, dict[str, torch.Tensor]]]


def place_of(mesh: str) -> int:
    parsed = Mesh.parse(mesh)
    return parsed.index(dist.get_rank(), batch_axes(parsed))


def steps(run: Any, model: torch.nn.Module, batches: list[Any]) -> Numbers:
    """Losses and gradients."""
    out = []
    for batch in batches:
        model.zero_grad()
        loss = run(*batch)
        loss.backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        out.append((loss.item(), grads))
    return out


def both(
    mesh: str, rows: list[tuple[int, ...]], options: dict[str, Any], dynamic: Any
) -> tuple[Numbers, Numbers, list[Plan]]:
    """What DDP gives and what fxpar gives; the plans."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, place = Routed().double(), place_of(mesh)
    batches = [batch_of(each[place % len(each)], place) for each in rows]
    peer = copy.deepcopy(model)
    want = steps(DistributedDataParallel(peer), peer, batches)
    model, before = fxpar.shard(model, mesh=mesh), len(fxpar.plans())
    options = {"mesh": mesh, "inputs": "local", "plan": "propagate", **options}
    run = torch.compile(model, backend="fxpar", dynamic=dynamic, options=options)
    got = steps(run, model, batches)
    return want, got, fxpar.plans()[before:]


def check(
    mesh: str,
    codegen: str = "eager",
    dynamic: bool | None = False,
    rows: list[tuple[int, ...]] = ROWS,
    **more: Any,
) -> list[Plan]:
    options = {"codegen": codegen, **more}
    results = ranks_of(mesh).run(both, mesh, rows, options, dynamic, timeout=600.0)
    for want, got, _ in results:
        for (loss, grads), (own_loss, own_grads) in zip(want, got, strict=True):
            assert own_loss == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(own_grads, grads, rtol=1e-10, atol=1e-12)
    return results[0][2]


@pytest.mark.parametrize(
    "mesh", ["ep=2", pytest.param("dp=1,ep=2", marks=pytest.mark.slow)]
)
def test_rows_go_to_experts(mesh: str) -> None:
    plans = check(mesh, rows=[ROWS[0], ROWS[-1]])
    assert all(plan.sent_rows[0] for plan in plans)
    assert not any(map(gathered_over_experts, plans))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, codegen",
    [
        ("dp=2,ep=2", "eager"),
        ("dp=2,ep=2", "inductor"),
        ("ep=2,tp=2", "eager"),
        ("ep=4", "inductor"),
    ],
)
def test_on_four_ranks(mesh: str, codegen: str) -> None:
    plans = check(mesh, codegen)
    assert not any(map(gathered_over_experts, plans))


@pytest.mark.slow
def test_slots_are_sent() -> None:
    plans = check("ep=2", expert_exchange="all_to_all")
    assert not any(map(gathered_over_experts, plans))


@pytest.mark.slow
def test_weights_are_gathered_where_that_is_asked_for() -> None:
    plans = check("ep=2", expert_exchange="gather")
    assert all(map(gathered_over_experts, plans))
    assert not any(plan.sent_rows for plan in plans)


@pytest.mark.slow
def test_weights_are_gathered_where_a_rank_has_no_rows() -> None:
    """All ranks do alike; at the next step rows are sent."""
    plans = check("ep=2", rows=[(4, 0), (4, 4)])
    assert sorted(map(gathered_over_experts, plans)) == [False, True]


@pytest.mark.slow
def test_sizes_that_are_open() -> None:
    """On some ranks or on all: all then gather weights."""
    check("ep=2", dynamic=None)
    check("ep=2", dynamic=True)
    plans = check("ep=2", dynamic=None, rows=[(8, 8), (8, 5), (8, 6), (8, 7)])
    assert any(map(gathered_over_experts, plans))


def overflowing(mesh: str) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxpar.shard(Routed().double(), mesh=mesh)
    options = {"mesh": mesh, "inputs": "local", "codegen": "eager"}
    options |= {"expert_exchange": "all_to_all", "expert_room": 1.0}
    run = torch.compile(model, backend="fxpar", options=options)
    try:
        run(*batch_of(8, place_of(mesh))).backward()
    except RoomError as error:
        return str(error)
    return ""


def test_all_ranks_are_told_of_an_overflow() -> None:
    for said in ranks_of("ep=2").run(overflowing, "ep=2"):
        assert "rows, and expert_room leaves room for" in said


def trained(mesh: str, codegen: str) -> tuple[list[Any], list[Any]]:
    """Losses and parameters of training steps: DDP's and ours."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, place = Routed().double(), place_of(mesh)
    batches = [batch_of(each[place % len(each)], place) for each in ROWS]
    peer = copy.deepcopy(model)
    replicated = DistributedDataParallel(peer)
    optimizer, want, got = torch.optim.AdamW(peer.parameters(), lr=1e-2), [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = replicated(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 0.05)
        optimizer.step()
        want.append(loss.detach())
    model = fxpar.shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"mesh": mesh, "inputs": "local", "codegen": codegen}
    options["plan"] = "propagate"
    step = fxpar.train_step(
        model,
        lambda module, *batch: module(*batch),
        optimizer,
        clip=0.05,
        options=options,
    )
    got = [step(*batch) for batch in batches]
    want += [whole(p) for p in peer.parameters()]
    return want, [*map(whole, got), *(whole(p) for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, codegen", [("ep=2", "inductor"), ("dp=2,ep=2", "eager")]
)
def test_training_steps(mesh: str, codegen: str) -> None:
    for want, got in ranks_of(mesh).run(trained, mesh, codegen, timeout=600.0):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
