"""Masks made of positions: what is causal is told to the kernel, all else is a mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from tests.helpers import models

BATCH, HEADS, ROWS, WIDTH = 2, 2, 8, 4
SEQUENCE = (None, None, "cp", None)

places = torch.arange


def causal(rows: int = ROWS, by: int = 0) -> torch.Tensor:
    return places(rows)[:, None] + by >= places(rows)[None]


def additive(seen: torch.Tensor, low: float = -math.inf) -> torch.Tensor:
    return torch.where(seen, 0.0, torch.full((), low, dtype=torch.float64))


def within(window: int) -> torch.Tensor:
    return causal() & (places(ROWS)[None] > places(ROWS)[:, None] - window)


def documents(starts: torch.Tensor) -> torch.Tensor:
    """As Hugging Face finds packed documents."""
    firsts = starts[:, :1] - 1
    number = (torch.diff(starts, prepend=firsts, dim=-1) != 1).cumsum(-1)
    return (number[:, None, :, None] == number[:, None, None]) & causal()


def below(low: float) -> torch.Tensor:
    """As Hugging Face once made it."""
    mask = torch.full((ROWS, ROWS), low, dtype=torch.float64).triu(1)
    return mask * (places(ROWS)[None] > places(ROWS)[:, None])


Mask = Callable[[], torch.Tensor]

CAUSAL: dict[str, Mask] = {
    "bool": causal,
    "tril": lambda: torch.ones(ROWS, ROWS, dtype=torch.bool).tril(),
    "not later": lambda: ~(places(ROWS)[:, None] < places(ROWS)[None]),
    "additive": lambda: additive(causal()),
    "least": lambda: additive(causal(), torch.finfo(torch.float64).min),
    "filled": lambda: (
        torch.zeros(ROWS, ROWS).double().masked_fill(~causal(), -math.inf)
    ),
    "below": lambda: below(torch.finfo(torch.float64).min),
    "long window": lambda: within(ROWS),
    "one document": lambda: documents(places(ROWS).expand(BATCH, -1)),
    "batched": lambda: causal().expand(BATCH, 1, ROWS, ROWS),
    "shifted": lambda: places(3, 3 + ROWS)[:, None] >= places(3, 3 + ROWS),
}

OTHER: dict[str, Mask] = {
    "one more": lambda: causal(by=1),
    "window": lambda: within(3),
    "later": lambda: causal().T,
    "low": lambda: additive(causal(), -5.0),
    "raised": lambda: additive(causal()) + causal(),
    "documents": lambda: documents((places(ROWS) % 4).expand(BATCH, -1)),
    "twice": lambda: 2 * places(ROWS)[:, None] >= places(ROWS),
    "by batch": lambda: (
        places(ROWS)[:, None] + places(BATCH)[:, None, None, None] >= places(ROWS)
    ),
    "two more": lambda: torch.add(places(ROWS)[:, None], 1, alpha=2) >= places(ROWS),
    "rows of a table": lambda: (
        torch.ops.aten.index(
            places(ROWS)[:, None].expand(-1, ROWS), [places(ROWS), None]
        )
        >= places(ROWS)
    ),
    "around": lambda: places(ROWS)[places(ROWS) - 2][:, None] + 2 >= places(ROWS),
}


def attend(make: Mask) -> Callable[..., torch.Tensor]:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, make())

    return fn


def tensors(rows: int = ROWS, keys: int = ROWS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(BATCH, HEADS, n, WIDTH) for n in (rows, keys, keys)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]


def planned(fn: Any, args: Any, mesh: str = "cp=2", **more: Any) -> Any:
    more = {"mode": "propagate", "schedule": "none", **more}
    return fxpar.plan(fn, *args, mesh=mesh, in_specs=[SEQUENCE] * 3, **more)


def attentions(plan: Any) -> set[str]:
    """What the attention ops of a local graph are called."""
    names = (str(node.target) for node in plan.result.local.nodes)
    return {name for name in names if "attention" in name}


def simulated(plan: Any, args: Any) -> Any:
    got = plan.simulate(*args)
    return got if isinstance(got, tuple | list) else (got,)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_told_to_the_kernel(name: str) -> None:
    fn, args = attend(CAUSAL[name]), tensors()
    plan = planned(fn, args)
    assert attentions(plan) == {"fxpar.causal_attention.default"}
    torch.testing.assert_close(simulated(plan, args)[0], fn(*args))


@pytest.mark.parametrize("name", OTHER)
def test_another_mask_stays_one(name: str) -> None:
    fn, args = attend(OTHER[name]), tensors()
    plan = planned(fn, args)
    assert "fxpar.causal_attention.default" not in attentions(plan)
    torch.testing.assert_close(simulated(plan, args)[0], fn(*args))


def test_a_mask_that_hides_nothing_is_none() -> None:
    fn, args = attend(lambda: places(ROWS)[:, None] + ROWS > places(ROWS)), tensors()
    plan = planned(fn, args)
    (node,) = (n for n in plan.result.local.nodes if "attention" in str(n.target))
    assert node.kwargs.get("attn_mask") is None
    torch.testing.assert_close(simulated(plan, args)[0], fn(*args))


def test_fewer_queries_than_keys() -> None:
    """Kernels count places of queries from the first key."""
    rows = places(2, 2 + 4)[:, None]
    fn, args = attend(lambda: rows >= places(ROWS)), tensors(4)
    plan = planned(fn, args)
    assert "fxpar.causal_attention.default" not in attentions(plan)
    torch.testing.assert_close(simulated(plan, args)[0], fn(*args))


def test_gradients_and_a_step_that_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn, args = attend(causal), tensors()
    for disabled in (False, True):
        if disabled:
            monkeypatch.setenv("FXPAR_DISABLE", "causal_masks")
        plan = planned(fn, args, mesh="cp=4", grad=True)
        ours = {
            "fxpar.causal_attention.default",
            "fxpar.causal_attention_backward.default",
        }
        assert (attentions(plan) == ours) == (not disabled)
        torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))


@pytest.mark.parametrize(
    "op",
    ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"],
)
def test_kernels_of_a_gpu(op: str) -> None:
    """A bias that is padded, so that rows are aligned, and cut."""
    rows = 32

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bias = F.pad(additive(causal(rows)), (0, 8))[:, :rows]
        bias = bias.to(q.dtype).expand(BATCH, HEADS, rows, rows)
        return getattr(torch.ops.aten, op)(q, k, v, bias, True)[0]

    args = [x.detach().to("meta") for x in tensors(rows, rows)]
    plan = planned(fn, args)
    assert attentions(plan) == {"fxpar.causal_attention.default"}


@pytest.mark.parametrize("name", ["llama/1", "mixtral/1", "qwen3_moe/1"])
def test_hugging_face_masks(name: str) -> None:
    model, batch = models.build(name, 2)
    plan = fxpar.plan(model, mesh="cp=2", mode="propagate", schedule="none", **batch)
    assert attentions(plan) == {"fxpar.causal_attention.default"}
