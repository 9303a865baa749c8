"""Memory of collectives in compiled programs: what Inductor emits, and what happens
when every collective starts late and finishes late.

A program is right by luck if a buffer that a collective still reads or writes is freed,
reused or written, and the collective happens to be done by then. Here none is done
before its wait (tests/helpers/late.py), and the generated wrappers are read line by
line (tests/helpers/wrapper.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from tests.helpers.late import late_collectives
from tests.helpers.models import DRAWS_RANDOM, NAMES, build_loss
from tests.helpers.spawn import shared_pool
from tests.helpers.wrapper import hazards, launches

pytestmark = pytest.mark.usefixtures("propagated")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(torch.relu(self.up(h)))


class Blocks(nn.Module):
    """Weights small enough to share a bucket of gathers."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


SEED = 5  # of what a step draws


def blocks() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Blocks(), {"x": torch.randn(8, 16)}


def mixture(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A mixture of experts of Hugging Face."""
    import transformers

    common: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "vocab_size": 96,
    }
    config: Any
    torch.manual_seed(0)
    if kind == "qwen3":
        config = transformers.Qwen3MoeConfig(
            **common,
            head_dim=16,
            num_experts=4,
            moe_intermediate_size=32,
            intermediate_size=64,
        )
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.MixtralConfig(
            **common, num_local_experts=4, intermediate_size=32
        )
        model = transformers.MixtralForCausalLM(config)
    ids = torch.randint(0, 96, (4, 16))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, labels=ids).loss

    return Loss(), {"ids": ids}


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if name == "blocks":
        return blocks()
    if name in ("qwen3", "mixtral"):
        return mixture(name)
    return build_loss(name)


def numbers(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and every gradient, whole."""
    out = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        grad: Any = p.grad
        if grad is not None:
            full = getattr(grad, "full_tensor", lambda g=grad: g)
            out[name] = full().detach().clone()
    return out


def late(
    name: str, options: dict[str, Any], shard: bool, seed: int
) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """Loss and gradients of a model, faults of its collectives, how many there were."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model, batch = made(name)
    if shard:
        mesh = fxpar.Mesh.parse(options["mesh"])
        model = fxpar.shard(model, mesh)
    compiled = torch.compile(model, backend="fxpar", options=options)
    torch.manual_seed(SEED)

    def step() -> torch.Tensor:
        loss = compiled(**batch)
        loss.backward()
        return loss

    with late_collectives(seed) as happened:
        loss, codes = run_and_get_code(step)
    faults = [*happened.faults, *(fault for code in codes for fault in hazards(code))]
    if options.get("codegen", "inductor") == "inductor":
        assert sum(map(launches, codes)) > 0
    torch._dynamo.reset()
    return numbers(model, loss), faults, happened.started


def wanted(name: str) -> dict[str, torch.Tensor]:
    """On one device; with dropout by the same backend alone, since eager PyTorch draws
    other random numbers than compiled code does."""
    model, batch = made(name)
    alone: Any = model
    if name in DRAWS_RANDOM:
        torch._dynamo.reset()
        alone = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
    torch.manual_seed(SEED)
    loss = alone(**batch)
    loss.backward()
    return numbers(model, loss)


def check(
    name: str,
    options: dict[str, Any],
    shard: bool = True,
    *,
    seed: int = 0,
    ranks: int = 4,
) -> None:
    compare(late, wanted(name), name, options, shard, seed, ranks)


def compare(
    run: Callable[..., Any],
    want: dict[str, torch.Tensor],
    name: str,
    options: dict[str, Any],
    shard: bool,
    seed: int = 0,
    ranks: int = 4,
) -> None:
    args = name, options, shard, seed
    for got, faults, started in shared_pool(ranks).run(run, *args, timeout=900.0):
        assert started > 0
        assert faults == []
        assert got.keys() == want.keys()
        for key, x in want.items():
            torch.testing.assert_close(
                got[key], x, rtol=2e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


BOTH: dict[str, Any] = {"mesh": "dp=2,tp=2", "plan": "search", "schedule": "auto"}


FULL = "buckets(bytes=1048576)\nprefetch(ahead=4)"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_buckets() -> None:
    check("blocks", BOTH | {"mesh": "dp=2", "schedule": FULL}, ranks=2)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_work_put_behind_collectives() -> None:
    """Gradients of weights, behind the start of a reduction (``delay``)."""
    check("blocks", BOTH | {"mesh": "tp=2", "plan": "propagate"}, ranks=2)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_buckets_over_two_axes() -> None:
    check("blocks", BOTH | {"schedule": FULL})


MODELS = [*NAMES, "qwen3", "mixtral"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["auto", FULL])
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, shard: bool, schedule: str) -> None:
    # A search leaves a small model whole where it is not sharded: nothing would pay.
    plan = "search" if shard else "propagate"
    check(name, BOTH | {"schedule": schedule, "plan": plan}, shard)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["tp=4", "dp=4"])
@pytest.mark.parametrize("name", MODELS)
def test_models_on_one_axis(name: str, mesh: str) -> None:
    check(name, BOTH | {"mesh": mesh}, seed=1)


def late_step(
    name: str, options: dict[str, Any], shard: bool, seed: int
) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """As ``late``, of two whole training steps: losses, and every parameter."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model, batch = made(name)
    if shard:
        model = fxpar.shard(model, fxpar.Mesh.parse(options["mesh"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = fxpar.train_step(
        model, lambda model, batch: model(**batch), optimizer, options=options
    )
    with late_collectives(seed) as happened:
        (first, second), codes = run_and_get_code(lambda: (step(batch), step(batch)))
    faults = [*happened.faults, *(fault for code in codes for fault in hazards(code))]
    torch._dynamo.reset()
    out = {"first": first, "second": second}
    for key, p in model.named_parameters():
        full: Any = getattr(p, "full_tensor", lambda p=p: p)
        out[key] = full().detach().clone()
    return out, faults, happened.started


def wanted_step(name: str) -> dict[str, torch.Tensor]:
    model, batch = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(model(**batch))
        losses[-1].backward()
        optimizer.step()
    first, second = (loss.detach() for loss in losses)
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    return {"first": first, "second": second, **parameters}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("name", ["blocks", "llama", "qwen3"])
def test_training_steps(name: str, shard: bool) -> None:
    options = BOTH | {"plan": "search" if shard else "propagate"}
    compare(late_step, wanted_step(name), name, options, shard)
