"""``x[mask] = v`` in one graph, without the places of the mask."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpar
from fxpar._torch import masked_writes
from fxpar.errors import FxparWarning, PlanError
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.usefixtures("propagated")

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def set_rows(h: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h[mask] = v
    return h


def set_columns(h: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    part = h[:, :, :4]  # seen in ``h``
    part[:, mask[0]] = v[None, None, :4]
    return h


def set_some_columns(h: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> Any:
    h[mask, 2:5] = v[2:5]
    return h


def put(h: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.index_put(h, (mask,), v[None]) * h


def put_in_place(h: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h.transpose(0, 1).index_put_((mask.t(),), v[:1])
    return h


def put_by_rows(h: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A value for each sample, broadcast over places."""
    h[:, mask[0]] = h.sum(1, keepdim=True)
    return h


def put_one(h: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h[mask[:, 0]] = v  # fewer dims than samples have
    h[mask] = v.sum()
    return h


WRITES = [
    set_rows,
    set_columns,
    set_some_columns,
    put,
    put_in_place,
    put_by_rows,
    put_one,
]


class Masked(nn.Module):
    """Has a token that takes the place of masked ones."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(8, 8), write
        self.token = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.write(self.layer(x), mask, self.token).square().mean()


def masked(write: Write, run: Any = None) -> list[torch.Tensor]:
    """Loss and gradients; ``run``: what compiles the model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Masked(write).double(), torch.randn(4, 6, 8).double().requires_grad_()
    mask = torch.rand(4, 6) > 0.5
    loss = (run or (lambda model: model))(model)(x, mask)
    loss.backward()
    return [loss.detach(), *(p.grad for p in (x, *model.parameters()))]


def split(codegen: str) -> None:
    hints = {"x": ("dp", None, None), "mask": ("dp", None)}
    how = {"mesh": "dp=2", "codegen": codegen, "hints": hints}
    run = partial(torch.compile, backend="fxpar", fullgraph=True, options=how)
    for write in WRITES if codegen == "eager" else WRITES[:1]:
        torch.testing.assert_close(masked(write, run), masked(write))


@pytest.mark.multiprocess
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_one_device(codegen: str) -> None:
    shared_pool(2).run(split, codegen)


def trained(step_of: Callable[[nn.Module, Any, Any], Any]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Masked(set_rows).double(), torch.randn(4, 6, 8).double()
    step = step_of(model, lambda m, *xs: m(*xs), torch.optim.SGD(model.parameters(), 1))
    losses = [step(x, torch.rand(4, 6) > 0.5) for _ in range(2)]
    return [x.detach() for x in (*losses, *model.parameters())]


def eager_step(model: nn.Module, loss_fn: Any, optimizer: Any) -> Any:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def whole_steps() -> None:
    how = {"mesh": "dp=2", "codegen": "eager"}
    got = trained(lambda *args: fxpar.train_step(*args, options=how))
    torch.testing.assert_close(got, trained(eager_step))


@pytest.mark.multiprocess
def test_a_train_step() -> None:
    shared_pool(2).run(whole_steps)


@pytest.mark.parametrize("write", WRITES)
def test_a_plan(write: Write) -> None:
    model, x = Masked(write).double(), torch.randn(4, 6, 8).double()
    with warnings.catch_warnings():  # of an op that is whole on every rank
        warnings.simplefilter("error", FxparWarning)
        fxpar.plan(model, x, torch.rand(4, 6) > 0.5, mesh="dp=2")


def set_each(x: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = x * 2
    h[mask] = v
    return h.square().sum()


def each_place(mesh: str) -> torch.Tensor:
    torch._dynamo.reset()
    mask = torch.tensor([True, False, True, True])
    v = torch.arange(9.0).view(3, 3).requires_grad_()
    run = torch.compile(set_each, backend="fxpar", options={"mesh": mesh})
    run(torch.ones(4, 3), mask, v).backward()
    return v.grad


def test_a_row_for_each_place_breaks_the_graph_on_one_process() -> None:
    torch.testing.assert_close(each_place("dp=1"), torch.arange(9.0).view(3, 3) * 2)


@pytest.mark.multiprocess
def test_a_row_for_each_place_is_refused_on_two() -> None:
    for error in shared_pool(2).errors(each_place, "dp=2"):
        assert isinstance(error, PlanError)
        assert "h[mask] = v" in str(error)


def test_what_where_refuses_stays_as_it_is() -> None:
    """A mask on another device is not taken; a number on one is."""
    with FakeTensorMode():
        x, mask = torch.empty(4, 6, device="cuda"), torch.empty(4).bool()
        for value in (torch.empty(()), torch.empty(6, device="cuda")):
            assert masked_writes._choice(x, [mask], value) is None
        mask = torch.empty(4, device="cuda").bool()
        assert masked_writes._choice(x, [mask], torch.empty(())) is not None
        assert masked_writes._choice(x, [mask], torch.empty(6)) is None
