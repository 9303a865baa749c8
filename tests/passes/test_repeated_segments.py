"""Layers that repeat are traced once: the joint graph is that of tracing each of them,
where a layer does more than give new tensors too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.helpers import models
from tests.helpers.patched import needs_patches
from tests.helpers.traced_graphs import WIDTH, chain, check

pytestmark = needs_patches
Tensor = torch.Tensor
LAYERS = 3  # a first, a last, and one between

SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "vit", "mixtral")
]


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_models(name: str) -> None:
    model, batch = models.build(f"{name}/{LAYERS}")
    check(model, **batch, copied=LAYERS - 1)


@pytest.mark.slow
def test_a_model_whose_first_layer_is_another() -> None:
    """It makes what the others add to their scores."""
    model, batch = models.build(f"t5/{LAYERS}")
    check(model, **batch, copied=LAYERS - 2, ordered=False)


@pytest.mark.slow
def test_a_model_without_gradients() -> None:
    model, batch = models.build(f"llama/{LAYERS}")
    with torch.no_grad():
        check(model.eval(), **batch, copied=LAYERS - 1)


@pytest.mark.slow
def test_dropout_and_checkpoints() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=64, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    check(model, input_ids=ids, labels=ids, copied=LAYERS - 1)
    model, batch = models.build(f"llama/{LAYERS}")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model, **batch, copied=LAYERS - 1)


# What a layer adds to its operand: of the operand, a weight and its number.
Part = Callable[[Tensor, Tensor, int], Any]


def stack(part: Part, end: Callable[[Tensor], Tensor] = torch.Tensor.sum) -> Any:
    """Layers of a part and of ops enough to be found, and a loss of the last."""

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for i, w in enumerate(weights):
            x = x + part(chain(x @ w), w, i)
        return end(x)

    return run


def feeds(layers: int = LAYERS) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(layers + 1)]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 + x.detach() * 0


def ruled(h: Tensor, w: Tensor, i: int) -> Tensor:
    with torch.no_grad():
        scale = h.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        y = h @ w
    return y.float() / scale + h.detach()


def drawn(h: Tensor, w: Tensor, i: int) -> Tensor:
    return nn.functional.dropout(h, 0.3) + torch.rand_like(h) * w


def written(h: Tensor, w: Tensor, i: int) -> Tensor:
    h = h.clone()
    h[:, 0] = 0
    return h.mul_(2)


products_kept = partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
)


def kept_only(h: Tensor, w: Tensor, i: int) -> Tensor:
    def fn(h: Tensor, w: Tensor) -> Tensor:
        return (h @ w).exp().sin()

    return checkpoint(fn, h, w, use_reentrant=False, context_fn=products_kept)


COPIED: dict[str, Part] = {
    "custom function": lambda h, w, i: Doubled.apply(h),
    "modes inside": ruled,
    "random": drawn,
    "writes to its own": written,
    "checkpoint": lambda h, w, i: checkpoint(torch.sin, h, use_reentrant=False),
    "selective checkpoint": kept_only,
    "constant": lambda h, w, i: h * torch.tensor([0.5] * WIDTH),
    "several results": lambda h, w, i: torch.stack(h.split(4, 1)[::-1]).view(8, 8),
}


@pytest.mark.parametrize("name", COPIED)
def test_layers_that_are_copied(name: str) -> None:
    check(stack(COPIED[name]), *feeds(), copied=LAYERS - 1)


@pytest.mark.parametrize(
    "name", ["transposed", pytest.param("twice", marks=pytest.mark.slow)]
)
def test_gradients_that_differ_by_layer(name: str) -> None:
    """That of the last layer has strides of its own; another backward is traced."""
    ends = {
        "transposed": lambda x: (x.t().contiguous() ** 2).sum(),
        "twice": lambda x: (x.exp() * x).sum(),
    }
    for part in (COPIED["random"], COPIED["checkpoint"]):
        check(stack(part, ends[name]), *feeds(), copied=LAYERS - 1)


def test_weights_that_layers_share_and_values_of_earlier_layers() -> None:
    def run(x: Tensor, shared: Tensor, *weights: Tensor) -> Tensor:
        first, seen = x.sin(), []
        for w in weights:
            x = x + chain(x @ w + first) @ shared + first
            seen.append(x)
        return sum(x.exp().sum() for x in seen)

    check(run, *feeds(6), copied=4, ordered=False)


def test_frozen_layers_are_another_kind() -> None:
    tensors = feeds(2 * LAYERS)
    for w in tensors[: LAYERS + 1]:
        w.requires_grad_(False)
    check(stack(COPIED["random"]), *tensors, copied=2 * (LAYERS - 1) - 1)


def folded(h: Tensor, w: Tensor, i: int) -> Tensor:
    return h.view(2 * h.shape[0], -1).exp().view(h.shape) * h.shape[1]


def test_sizes_that_dynamo_left_open_are_numbers() -> None:
    check(stack(folded), *feeds(), copied=LAYERS - 2, is_open=True)
    check(stack(COPIED["checkpoint"]), *feeds(), copied=LAYERS - 1, is_open=True)


def test_a_layer_that_reads_another_number_is_traced() -> None:
    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        half = len(tensors) // 2
        for w, other in zip(tensors[:half], tensors[half:], strict=True):
            x = x + chain(x @ w) * other.shape[0]
        return x.sum()

    others = [torch.zeros(n) for n in (3, 4, 3, 5)]
    check(run, *feeds(4), *others, copied=None, is_open=True)


def counting(buffer: Tensor) -> Part:
    def part(h: Tensor, w: Tensor, i: int) -> Tensor:
        buffer.add_(1)
        return h + buffer

    return part


def unlike(h: Tensor, w: Tensor, i: int) -> Tensor:
    return h * (i + 0.5)


def of_another_graph(h: Tensor, w: Tensor, i: int) -> Tensor:
    return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))


def hooked(h: Tensor, w: Tensor, i: int) -> Tensor:
    h.register_hook(lambda gradient: gradient * 2)
    return h


def in_place(x: Tensor, *weights: Tensor) -> Tensor:
    x = x * 1
    for w in weights:
        x.add_(chain(w))
    return x.sum()


def views(x: Tensor, *weights: Tensor) -> Tensor:
    """Layers whose results are views."""
    for w in weights:
        x = chain(x @ w).view(2, WIDTH // 2, WIDTH).flatten(0, 1)
    return x.sum()


def results(x: Tensor, *weights: Tensor) -> Any:
    """Layers that give what they are given."""
    seen = []
    for w in weights:
        seen.append(x.view(-1))
        x = chain(x @ w)
    return x.sum(), seen


REFUSED: dict[str, Any] = {
    "writes to a buffer": stack(counting(torch.zeros(WIDTH))),
    "writes to its operand": in_place,
    "another constant": stack(unlike),
    "runs a graph": stack(of_another_graph),
    "a hook": stack(hooked),
    "views": views,
    "views of operands": results,
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_are_traced_each(name: str) -> None:
    if name == "a hook" and not find_spec("torch._higher_order_ops.register_hook"):
        pytest.skip("a hook is a function of autograd there")
    check(REFUSED[name], *feeds(), copied=0)
