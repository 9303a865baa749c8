"""Buffers that code in no graph writes to in local mode, where no backward makes them
those of rank 0: ranks have unlike ones, and are told."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import update_bn

from fxpar.errors import FxparWarning
from fxpar.runtime.ranks import reduce_gradients
from tests.helpers.spawn import shared_pool

OPTIONS = {"mesh": "dp=2", "inputs": "local", "codegen": "eager"}


class Kept(nn.Module):
    """A mean of what it saw, kept by a graph or by code that none contains."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.outside:
            torch._dynamo.graph_break()
        self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x * 2


class Replaced(nn.Module):
    """A mean of what it saw, another tensor at each update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    @torch.compiler.disable
    def update(self, x: torch.Tensor) -> None:
        self.seen = self.seen.lerp(x.mean(0).detach(), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.update(x)
        return x * 2


def said(name: str) -> tuple[list[str], bool]:
    """Warnings of buffers, and whether ranks have them alike."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(8, 6).chunk(2)[dist.get_rank()].clone()
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    if name.startswith("kept"):
        model = nn.Sequential(nn.Linear(6, 6), Kept(outside=name == "kept outside"))
    if name == "replaced":
        model = nn.Sequential(nn.Linear(6, 6), Replaced())
    call = torch.compile(model, backend="fxpar", options=OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if name == "update_bn":
            update_bn([x, x + 1], call)
            model.eval()
        for _ in range(2):
            with torch.no_grad():
                call(x)
    written = next(b for b in model.buffers() if b.is_floating_point())
    of_ranks = [torch.empty_like(written) for _ in range(2)]
    dist.all_gather(of_ranks, written)
    texts = [str(w.message) for w in caught if w.category is FxparWarning]
    return [t for t in texts if "wrote to buffer" in t], torch.equal(*of_ranks)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("update_bn", "1.running_mean"),
        ("kept outside", ""),
        ("kept", ""),
        ("replaced", "1.seen"),
    ],
)
def test_ranks_are_told_of_unlike_buffers(name: str, buffer: str) -> None:
    (texts, alike), (others, _) = shared_pool(2).run(said, name)
    assert alike == (not texts)
    assert not others  # rank 0 says it
    assert len(texts) == (buffer != "")
    assert all(buffer in text and "without a gradient" in text for text in texts)


def test_a_tensor_at_the_address_of_the_one_before_is_another() -> None:
    module = Replaced()
    buffer = reduce_gradients._Buffer(weakref.ref(module), "seen", 1)
    buffer.agree()
    assert not buffer.changed()
    address, module.seen = id(module.seen), None
    module.seen = next(x for _ in range(64) if id(x := torch.ones(6)) == address)
    assert buffer.changed()
