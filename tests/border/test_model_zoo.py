"""Models of many kinds on two ranks against one device: losses and every gradient of
three steps, and the buffers they leave, in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import FxparWarning
from tests.helpers.model_zoo import ZOO, make
from tests.helpers.spawn import shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

STEPS = 3
TIMEOUT = 300.0

Trained = list[tuple[float, dict[str, torch.Tensor]]]


def whole(x: torch.Tensor | None) -> torch.Tensor | None:
    full = getattr(x, "full_tensor", None)
    return full() if full else None if x is None else x.detach().clone()


def train(model: nn.Module, run: Any, inputs: tuple[torch.Tensor, ...]) -> Trained:
    """The loss and all gradients and buffers, after each step."""
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.005), []
    for step in range(STEPS):
        torch.manual_seed(step)
        first, *rest = inputs
        first = first * (1 + step) if first.is_floating_point() else first
        loss = run(first, *rest)
        loss.backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        named |= dict(model.named_buffers())
        out.append((loss.item(), {name: whole(x) for name, x in named.items()}))
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(model, "follow"):
            model.follow()
    return out


def on_ranks(
    name: str, mesh: str, codegen: str, sharded: bool, config: dict[str, Any]
) -> tuple[Trained, list[str], int]:
    """With warnings of code that is in no graph, and how many collectives there are."""
    torch._dynamo.reset()
    model, inputs = make(name)
    if sharded:
        model = fxpar.shard(model, mesh=mesh)
    options = {"mesh": mesh, "codegen": codegen}
    before = len(fxpar.plans())
    with warnings.catch_warnings(record=True) as caught, dynamo(config):
        warnings.simplefilter("always")
        run = torch.compile(model, backend="fxpar", options=options)
        trained = train(model, run, inputs)
    texts = [str(w.message) for w in caught if w.category is FxparWarning]
    plans = fxpar.plans()[before:]
    return trained, texts, sum(len(plan.collectives) for plan in plans)


def dynamo(config: dict[str, Any]) -> Any:
    return torch._dynamo.config.patch(**config)


def check(
    name: str,
    mesh: str = "dp=2",
    codegen: str = "eager",
    sharded: bool = False,
    want: Trained | None = None,
    split: bool = True,
    **config: Any,
) -> list[str]:
    """What rank 0 warned of."""
    if want is None:
        model, inputs = make(name)
        want = train(model, model, inputs)
    learns = dict(make(name)[0].named_parameters())
    for _, values in want:
        largest = max(x.abs().max() for key, x in values.items() if key in learns)
        assert largest > 1e-3, "all gradients vanish: any would be close"
    arguments = name, mesh, codegen, sharded, config
    runs = shared_pool(2).run(on_ranks, *arguments, timeout=TIMEOUT)
    for trained, _, collectives in runs:
        assert not split or collectives, "nothing was split"
        for (loss, values), (wanted, others) in zip(trained, want, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-10)
            assert set(values) == set(others)
            for key, value in values.items():
                torch.testing.assert_close(
                    value, others[key], rtol=1e-7, atol=1e-11, msg=key
                )
    return runs[0][1]


SLOW = ("dit", "detector", "efficientnet", "mobilenet", "swin", "unet")
APART = ("lstm", "gru", "packed", "graph_net", "mixture", "moco", "mixup")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=(pytest.mark.slow,) if name in SLOW else ())
        for name in ZOO
        if name not in APART
    ],
)
def test_steps_are_those_of_one_device(name: str) -> None:
    check(name)


@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.slow), "tp=2"])
def test_messages_along_edges(mesh: str) -> None:
    """Nodes are indexed as they please, so that they stay whole; weights are split."""
    check("graph_net", mesh, split=mesh == "tp=2")


def test_routing_that_depends_on_data() -> None:
    """Each expert's part of the tokens is as large as it comes: the graph breaks."""
    texts = check("mixture", "tp=2", split=False)
    assert any("torch.where" in text for text in texts), texts


def test_queue_and_slow_weights_at_rest() -> None:
    check("moco", "fsdp=2", sharded=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_nets_traced(name: str) -> None:
    """``allow_rnn`` lets Dynamo trace them, one step of time after the other."""
    check(name, allow_rnn=True)


@pytest.mark.parametrize(
    "name", ["lstm", pytest.param("packed", marks=pytest.mark.slow)]
)
def test_recurrent_nets_not_traced(name: str) -> None:
    """Each rank runs the cells as they stand, on all of the batch, and is told so."""
    texts = check(name, split=False)
    assert any("is in no graph" in text or "graph break" in text for text in texts)


def test_order_drawn_inside() -> None:
    check("mixup")


@pytest.mark.slow
def test_order_drawn_inside_generated_code() -> None:
    check("mixup", codegen="inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detector", "vqvae"])
def test_generated_code(name: str) -> None:
    check(name, codegen="inductor")
