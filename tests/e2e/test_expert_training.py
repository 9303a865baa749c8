"""Training mixtures of experts of Hugging Face, unchanged, with experts on ranks."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch

import fxpar
from fxpar.errors import RoomError
from fxpar.features.experts import expert_axes
from tests.helpers.mixture import mixture
from tests.helpers.models import build_double, build_loss, double
from tests.helpers.spawn import ranks_of
from tests.helpers.training import (
    Run,
    compare,
    loop,
    one_device,
    part,
    train,
    whole,
)

pytest.importorskip("transformers.integrations.moe")
TRACED = hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not TRACED, reason="no backend traces its backward"),
    pytest.mark.usefixtures("propagated"),
]

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


def check(name: str, mesh: str, codegen: str, rest: str, **more: Any) -> list[Any]:
    """What a rank sends."""
    options = {"mesh": mesh, "codegen": codegen, "plan": "propagate", **more}
    runs = ranks_of(mesh).run(trained, name, options, rest, timeout=900.0)
    compare([run for run, _ in runs], one_device(name, STEPS))
    return [x for _, sent in runs for x in sent]


def fed_parts(name: str, mesh: str) -> tuple[list[float], int]:
    """A rank's own losses where each reads its own part of the batch; how many rows it
    sends to experts."""
    torch._dynamo.reset()
    model, batch = build_loss(name)
    model = fxpar.shard(model, mesh=mesh)
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate", "inputs": "local"}
    compiled = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mine = part(batch, torch.distributed.get_world_size())
    losses = loop(compiled, optimizer, [mine] * STEPS)[0]
    return losses, sum(fxpar.plans()[-1].sent_rows)


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
    """``ep`` splits the batch: each of its ranks feeds a part, of as many tokens, and
    rows go to their experts."""
    want = one_device("mixtral", STEPS).losses
    results = ranks_of("ep=2").run(fed_parts, "mixtral", "ep=2", timeout=900.0)
    assert all(rows for _, rows in results)
    means = [
        sum(own) / len(own) for own in zip(*(run for run, _ in results), strict=True)
    ]
    assert means == pytest.approx(want, rel=1e-5)


def test_whole_parameters() -> None:
    check("mixtral", "ep=2", "eager", "whole")


def test_four_ranks() -> None:
    """Along dp experts' weights are gathered and gradients reduced, as of any other."""
    sent = check("qwen3_moe", "dp=2,ep=2", "eager", "sharded")
    assert {axes for _, axes, _ in of_weights(sent)} <= {("dp",)}


def test_experts_split_inside() -> None:
    """Of weights that rest split nothing is gathered; ranks along tp exchange parts."""
    sent = check("mixtral/1", "ep=2,tp=2", "eager", "sharded")
    of_experts = [x for x in sent if "moe.py" in x[2] and "tp" in x[1]]
    assert {kind for kind, *_ in of_experts} == {"all_reduce", "all_to_all"}


def test_generated_kernels() -> None:
    check("mixtral", "ep=2", "inductor", "sharded")


def in_double(options: dict[str, Any] | None) -> tuple[list[float], list[Any]]:
    """Losses of five steps and the weights behind them, all of it in float64, also what
    the model computes in float32: the router, norms, the loss."""
    torch._dynamo.reset()
    with double():
        model, batch = build_double("mixtral")
        if options is None:  # eager grouped products take no float64
            compiled = torch.compile(model, backend="aot_eager")
        else:
            model = fxpar.shard(model, mesh=options["mesh"])
            compiled = torch.compile(model, backend="fxpar", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses, _ = loop(compiled, optimizer, [batch] * 5)
    return losses, [whole(p) for p in model.parameters()]


def test_rounding_is_all_that_differs() -> None:
    """As models are, losses differ by 1e-7: the router's float32."""
    want, weights = in_double(None)
    options = {"mesh": "ep=2", "codegen": "eager", "plan": "propagate"}
    for losses, ours in ranks_of("ep=2").run(in_double, options, timeout=300.0):
        assert losses == pytest.approx(want, rel=1e-13)
        torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)


def test_tokens_sent_in_slots() -> None:
    """Nothing is gathered along the axis of experts but what rests split."""
    exchange = {"expert_exchange": "all_to_all", "expert_room": 2.0}
    sent = check("mixtral", "ep=2", "eager", "sharded", **exchange)
    assert not of_weights(sent)
    experts = [kind for kind, _, where in sent if "moe.py" in where]
    assert "all_to_all" in experts and "all_gather" not in experts


def searched_over_any_axis() -> tuple[tuple[str, ...], bool]:
    """(the axes that experts are split over, whether results are right)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = (16, 8), (16, 4), (4, 8, 8), (4, 8, 8)
    args = [torch.rand(n, requires_grad=True) for n in shapes]
    options = {"mesh": "x=2", "codegen": "eager", "plan": "search"}
    options["cache_plans"] = False
    compiled = torch.compile(mixture, backend="fxpar", options=options)
    with mock.patch.object(expert_axes, "best", lambda s: ([*s][-1], "the last")):
        got = compiled(*args)
    grads = torch.autograd.grad(got.sum(), args)
    want = mixture(*args)
    wanted = [want, *torch.autograd.grad(want.sum(), args)]
    pairs = zip([got, *grads], wanted, strict=True)
    right = all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    return fxpar.plans()[-1].experts, right


def test_a_search_says_to_all_ranks_where_experts_are() -> None:
    assert ranks_of("x=2").run(searched_over_any_axis) == [(("x",), True)] * 2


def one_group_overflows(mesh: str, exchange: str) -> tuple[float, str, bool]:
    """(seconds until the error, the error, whether the next call is right)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, up, down = (torch.randn(*n) for n in ((16, 8), (4, 8, 8), (4, 8, 8)))
    up.requires_grad_()
    even = torch.eye(4).repeat(4, 1)  # each expert has as many rows, of every rank
    uneven = even.clone()
    uneven[:8] = torch.eye(4)[0]  # rows of the first ranks along dp
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"}
    options |= {"expert_room": 1.5, "expert_exchange": exchange}
    compiled = torch.compile(mixture, backend="fxpar", options=options)
    compiled(x, even, up, down).sum().backward()
    begun = time.monotonic()
    try:
        compiled(x, uneven, up, down).sum().backward()
    except RoomError as error:
        took, said = time.monotonic() - begun, str(error)
    again = compiled(x, even, up, down)
    return took, said, torch.allclose(again, mixture(x, even, up, down), atol=1e-5)


@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_all_ranks_are_told_of_an_overflow(exchange: str) -> None:
    """Also those of a group that has room."""
    mesh = "dp=2,ep=2"
    for took, said, right in ranks_of(mesh).run(one_group_overflows, mesh, exchange):
        assert took < 20.0
        assert "rows, and expert_room leaves room for" in said
        assert right


def of_any_length(mesh: str) -> list[tuple[float, float]]:
    """Losses of two lengths, compiled for any, beside those computed as they are."""
    torch._dynamo.reset()
    model, batch = build_loss("mixtral/1")
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"}
    compiled = torch.compile(model, backend="fxpar", dynamic=True, options=options)
    out = []
    for length in (8, 6, 5):
        cut = {k: v[:, :length].contiguous() for k, v in batch.items()}
        out.append((float(compiled(**cut)), float(model(**cut))))
    return out


def test_sizes_that_are_open() -> None:
    for pairs in ranks_of("ep=2").run(of_any_length, "ep=2", timeout=900.0):
        for got, want in pairs:
            assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_rows_sent_by_exact_numbers(codegen: str) -> None:
    """Compiled, what lies between products is computed of as many rows as there are."""
    want, weights = in_double(None)
    options = {"mesh": "ep=2", "codegen": codegen, "plan": "propagate"}
    options["expert_exchange"] = "exact"
    for losses, ours in ranks_of("ep=2").run(in_double, options, timeout=900.0):
        assert losses == pytest.approx(want, rel=1e-13)
        torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)
