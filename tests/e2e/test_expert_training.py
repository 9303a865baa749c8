"""Training mixtures of experts of Hugging Face, unchanged, with experts on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpar
from tests.helpers.models import build_loss
from tests.helpers.spawn import ranks_of
from tests.helpers.training import Run, compare, loop, one_device, part, train

pytest.importorskip("transformers.integrations.moe")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS = 3


def held(name: str, mesh: str) -> dict[str, float]:
    """The part of each parameter of experts that this rank has."""
    model, _ = build_loss(name)
    model = fxpar.shard(model, mesh=mesh)
    return {
        key: p.to_local().numel() / p.numel()
        for key, p in model.named_parameters()
        if "experts" in key
    }


def trained(name: str, options: dict[str, Any], rest: str) -> tuple[Run, list[Any]]:
    run = train(name, options, STEPS, rest)
    sent = [(c.kind, c.axes, str(c.source)) for c in fxpar.plans()[-1].collectives]
    return run, sent


def check(name: str, mesh: str, codegen: str, rest: str) -> list[Any]:
    """What a rank sends."""
    options = {"mesh": mesh, "codegen": codegen, "plan": "propagate"}
    runs = ranks_of(mesh).run(trained, name, options, rest, timeout=900.0)
    compare([run for run, _ in runs], one_device(name, STEPS))
    return [x for _, sent in runs for x in sent]


def fed_parts(name: str, mesh: str) -> list[float]:
    """Losses where each rank reads its own part of the batch."""
    torch._dynamo.reset()
    model, batch = build_loss(name)
    model = fxpar.shard(model, mesh=mesh)
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate", "inputs": "local"}
    compiled = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mine = part(batch, torch.distributed.get_world_size())
    return loop(compiled, optimizer, [mine] * STEPS)[0]


def of_weights(sent: list[Any]) -> list[Any]:
    return [x for x in sent if "gate_up_proj" in x[2] or "down_proj" in x[2]]


def test_experts_at_rest_on_their_ranks() -> None:
    """Tokens travel, weights and their gradients stay."""
    sent = check("mixtral", "ep=2", "eager", "sharded")
    assert not of_weights(sent)
    assert {kind for kind, *_ in sent} >= {"all_gather", "reduce_scatter"}
    shares = ranks_of("ep=2").run(held, "mixtral", "ep=2")
    assert {n for share in shares for n in share.values()} == {0.5}


def test_parts_of_the_batch() -> None:
    """``ep`` splits the batch: each of its ranks feeds a part."""
    want = one_device("mixtral", STEPS).losses
    for losses in ranks_of("ep=2").run(fed_parts, "mixtral", "ep=2", timeout=900.0):
        assert losses == pytest.approx(want, rel=1e-5)


def test_whole_parameters() -> None:
    check("mixtral", "ep=2", "eager", "whole")


def test_four_ranks() -> None:
    """Along dp experts' weights are gathered and gradients reduced, as of any other."""
    sent = check("qwen3_moe", "dp=2,ep=2", "eager", "sharded")
    assert {axes for _, axes, _ in of_weights(sent)} <= {("dp",)}


def test_generated_kernels() -> None:
    check("mixtral", "ep=2", "inductor", "sharded")
