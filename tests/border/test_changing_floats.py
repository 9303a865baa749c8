"""Floats of Python that change from call to call: one program serves all values, with
the numbers of one device; where each value has a program of its own, a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import InputMismatchError
from tests.helpers.pairs import diagonal
from tests.helpers.spawn import shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]


class Scale(torch.autograd.Function):
    """Keeps its number for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.k, None


class Clipped(torch.autograd.Function):
    """No tensor can take the place of its number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        ctx.k = k
        return x.clamp(max=k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(max=ctx.k), None


def in_place(x: torch.Tensor, k: float) -> torch.Tensor:
    h = x * 2
    h += k
    h.mul_(1 - k)
    return h


# Program -> how many plans five values take: at first Dynamo takes a float for fixed.
FLOATS: dict[str, tuple[Callable[[torch.Tensor, float], torch.Tensor], int]] = {
    "scaled": (lambda x, k: x * k, 2),
    "mixed": (lambda x, k: (1 - k) * x + k * x.tanh() / (2 * k + 1), 2),
    "loss": (lambda x, k: x.sum() + k * x.square().mean(), 2),
    "in place": (in_place, 2),
    "function": (Scale.apply, 2),
    "region": (lambda x, k: checkpoint(lambda h: k * h, x, use_reentrant=False), 2),
    "clipped": (Clipped.apply, 5),
    "read otherwise": (lambda x, k: F.leaky_relu(x, k) * k, 5),
}


class Model(nn.Module):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.k = nn.Linear(8, 4, dtype=dtype), 0.5
        self.fn, _ = FLOATS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(self.linear(x), self.k).sum()


def train(name: str, dtype: torch.dtype, values: tuple[float, ...], compiled: bool):
    torch._dynamo.reset()
    model = run = Model(name, dtype)
    before = len(fxpar.plans())
    if compiled:
        options = {"codegen": "eager", "mesh": "dp=2"}
        run = torch.compile(model, backend="fxpar", options=options)
    x = torch.linspace(-1, 1, 32).to(dtype).view(4, 8)
    results = []
    for k in values:
        model.k = k
        loss = run(x)
        loss.backward()
        results += [loss.detach(), model.linear.weight.grad]
        model.zero_grad()
    return results, len(fxpar.plans()) - before


VALUES = (0.5, 0.3, 0.1, 0.7, 0.9)


@pytest.mark.parametrize(
    ("name", "dtype"),
    diagonal([*FLOATS], [torch.bfloat16, torch.float32, torch.float64]),
)
def test_all_values_have_one_program(name: str, dtype: torch.dtype) -> None:
    want, _ = train(name, dtype, VALUES, compiled=False)
    most = FLOATS[name][1]
    if name == "in place" and dtype is torch.bfloat16:
        most = len(VALUES)  # where half precision would be rounded otherwise
    for got, plans in shared_pool(2).run(train, name, dtype, VALUES, True):
        assert plans == most
        for mine, right in zip(got, want, strict=True):
            assert mine.dtype is dtype
            close = {torch.bfloat16: 1e-2, torch.float32: 1e-5}.get(dtype, 1e-12)
            torch.testing.assert_close(mine, right, rtol=close, atol=close)


def values_of_its_own(rank_values: tuple[float, float]) -> None:
    torch._dynamo.reset()
    model = Model("function", torch.float32)
    options = {"codegen": "eager", "mesh": "dp=2"}
    run = torch.compile(model, backend="fxpar", options=options)
    for k in (0.5, 0.25, rank_values[torch.distributed.get_rank()]):
        model.k = k
        run(torch.ones(4, 8))


def test_a_float_that_differs_between_ranks() -> None:
    for error in shared_pool(2).errors(values_of_its_own, (0.1, 0.2)):
        assert isinstance(error, InputMismatchError), error
        assert "input self.k differs between ranks" in str(error)
        assert "or a number, is a global value" in str(error)


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train("clipped", torch.float32, tuple(n / 10 for n in range(1, 11)), True)
    return [str(x.message) for x in caught if "compiled 8 times" in str(x.message)]


def test_many_programs_are_warned_of() -> None:
    first, second = shared_pool(2).run(warned)
    assert len(first) == 1 and not second
    assert "each value of self.k, a number of Python" in first[0]
    assert "test_changing_floats.py" in first[0]
