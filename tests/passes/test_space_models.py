"""Whole models for images and volumes with their height over one axis and their batch
over another: the numbers of one device, and no more sent than the rows of halos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpar

F = nn.functional

DOUBLE = 8  # bytes


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [2, 2]}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=5))


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"hidden_sizes": [6, 8], "depths": [2, 2], "num_stages": 2}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, num_labels=5))


class Double(nn.Sequential):
    """Two convolutions of a U-Net."""

    def __init__(self, ins: int, outs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (ins, outs):
            layers += [nn.Conv3d(channels, outs, 3, padding=1), nn.GroupNorm(2, outs)]
            layers.append(nn.ReLU())
        super().__init__(*layers)


class UNet(nn.Module):
    """Two levels, joined across as Cicek et al. (2016) do."""

    def __init__(self) -> None:
        super().__init__()
        widths = (2, 4, 6)
        self.down = nn.ModuleList(map(Double, widths[:-1], widths[1:]))
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(outs, ins, 2, 2)
            for ins, outs in zip(widths[1:-1], widths[2:], strict=True)
        )
        self.join = nn.ModuleList(Double(2 * width, width) for width in widths[1:-1])
        self.last = nn.Conv3d(widths[1], 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        across = []
        for level in self.down:
            x = level(F.max_pool3d(x, 2) if across else x)
            across.append(x)
        for up, join, y in zip(
            reversed(self.up), reversed(self.join), across[-2::-1], strict=True
        ):
            x = join(torch.cat([up(x), y], 1))
        return self.last(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (resnet, (4, 3, 64, 32)),
    "convnext": (convnext, (4, 3, 64, 16)),
    "unet": (UNet, (2, 2, 16, 8, 8)),
}
HEIGHT = 2  # the dim, of an image or a volume


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.model(x)
        return getattr(found, "logits", found).square().mean()


def halo_bytes(model: nn.Module, x: torch.Tensor, dim: int) -> int:
    """What one of two ranks sends in the forward, of the height in halves, by the sizes
    of windows alone: ``padding`` rows before a shard and ``kernel - padding - stride``
    behind it."""
    sent = []

    def count(layer: Any, args: tuple[torch.Tensor, ...]) -> None:
        (given,) = args
        kernel, stride, padding = (
            n if isinstance(n, int) else n[dim - 2]
            for n in (layer.kernel_size, layer.stride, layer.padding)
        )
        rows = padding + max(0, kernel - padding - stride)
        sent.append(rows * given.numel() // given.shape[dim] * DOUBLE // 2)

    kinds = (nn.Conv2d, nn.Conv3d, nn.MaxPool2d)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    model(x)
    for hook in hooks:
        hook.remove()
    return sum(sent)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "unet"))
        for name in MODELS
    ],
)
def test_height_and_batch(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x, dim = Loss(make()).double(), torch.randn(shape).double(), HEIGHT
    lie = ["dp", *[None] * (x.dim() - 1)]
    lie[dim] = "h"
    options: dict[str, Any] = {"mesh": "dp=2,h=2", "mode": "propagate"}
    options["in_specs"] = [tuple(lie)]
    halos = halo_bytes(model, x, dim)
    sent = {}
    for grad in (False, True):
        plan = fxpar.plan(model.train(grad), x, grad=grad, **options)
        rows = [c for c in plan.collectives if c.kind != "all_reduce"]
        assert {c.kind for c in rows} == {"permute"}
        assert {c.axes for c in rows} == {("h",)}
        sent[grad] = sum(c.bytes for c in rows)
        got, want = plan.outcome(x), plan.reference_outcome(x)
        torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    # A backward sends back what it computed for those rows, but for the input's.
    assert sent[False] == halos and halos < sent[True] <= 2 * halos
