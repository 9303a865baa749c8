"""What is wrong in torch itself: what fxpar does about it, and a test that fails once
it is mended there, so that ours can go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.spawn import shared_pool


class Counted(nn.Module):
    """Reads a copy of a buffer, then updates the buffer in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("buf", torch.eye(4) * 2)
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = {
            "clone": lambda b: b.clone().detach(),
            "view": lambda b: b.view(16).clone().view(4, 4),
            "repeat": lambda b: b.repeat(1, 1),
        }
        y = self.linear(x) @ copies[self.how](self.buf)
        self.buf.mul_(3.0)
        return y


def gradients(how: str, **compiler: Any) -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Counted(how), torch.randn(4, 4, requires_grad=True)
    call = torch.compile(model, **compiler) if compiler else model
    call(x).square().sum().backward()
    return x.grad, model.linear.weight.grad, model.buf.clone()


def ours(how: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    options = {"codegen": "eager"}
    return gradients(how), gradients(how, backend="fxpar", options=options)


@pytest.mark.parametrize("how", ["clone", "view", "repeat"])
def test_a_copy_of_a_buffer_that_is_updated_stays_a_copy(how: str) -> None:
    for want, got in shared_pool(2).run(ours, how, env={"FXPAR_MESH": "dp=2"}):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_inductor_takes_the_copy_for_the_buffer() -> None:
    """If this fails, torch is mended: ``keep_copies``, ``fxpar::kept`` and the sentence
    in docs/limits.md can go."""
    want, got = gradients("clone"), gradients("clone", backend="inductor")
    assert not torch.allclose(want[0], got[0])
    torch.testing.assert_close(gradients("clone", backend="aot_eager"), want)
