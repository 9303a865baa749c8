"""Sparse gradients and tensors, which no rule splits: refused before planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import FxparError
from tests.helpers.pairs import diagonal
from tests.helpers.spawn import shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]
ENV = {"FXPAR_MESH": "dp=2"}


class Words(nn.Module):
    def __init__(self, kind: type[nn.Module], **how: Any) -> None:
        super().__init__()
        self.words, self.linear = kind(16, 8, sparse=True, **how), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.words(ids)).mean()


class Gathered(nn.Linear):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.gather(self.weight, 0, ids[:, :4], sparse_grad=True).mean()


class Products(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(x, self.weight.t()).mean()


MAKE: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: Words(nn.Embedding),
    "bag": lambda: Words(nn.EmbeddingBag, mode="sum"),
    "gather": lambda: Gathered(4, 8),
}
LINES = {"gather": "torch.gather(self.weight"}


def run(name: str, how: str) -> bool:
    """Whether a model runs: compiled, at rest sharded, without gradients, planned, or
    as a training step."""
    torch._dynamo.reset()
    model, ids = MAKE[name](), torch.randint(4, (8, 6))
    options = {"codegen": "eager"}
    if how == "plan":
        fxpar.plan(model, ids, mesh="dp=2", grad=True)
    elif how == "step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fxpar.train_step(model, lambda m, x: m(x), optimizer, options=options)(ids)
    else:
        if how == "shard":
            model = fxpar.shard(model)
        compiled = torch.compile(model, backend="fxpar", options=options)
        with torch.set_grad_enabled(how != "no grad"):
            compiled(ids)
    return True


@pytest.mark.parametrize(
    ("name", "how"), diagonal([*MAKE], ["compile", "shard", "plan", "step"])
)
def test_a_sparse_gradient_is_refused(name: str, how: str) -> None:
    for error in shared_pool(2).errors(run, name, how, env=ENV):
        assert isinstance(error, FxparError) and "sparse=False" in str(error)
        assert "sparse" in str(error).splitlines()[0]
        assert f"{__file__}:" in str(error)
        assert LINES.get(name, "self.linear(self.words(ids))") in str(error)
        if how == "compile" and name != "gather":
            assert "of module 'words'" in str(error)


@pytest.mark.parametrize("name", MAKE)
def test_without_gradients_nothing_is_sparse(name: str) -> None:
    assert shared_pool(2).run(run, name, "no grad", env=ENV) == [True, True]


@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_input_of_a_plan(form: str) -> None:
    x = getattr(torch.eye(4), form)()
    with pytest.raises(FxparError, match=r"(?s)sparse.*fix: use.* dense tensors"):
        fxpar.plan(Products(4, 8), x, mesh="dp=2")


def products(form: str) -> bool:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Products(4, 8), getattr(torch.eye(4), form)()
    compiled = torch.compile(model, backend="fxpar")
    return bool(torch.equal(compiled(x), model(x)))


def test_a_sparse_input_is_left_to_each_rank() -> None:
    for form in ("to_sparse", "to_sparse_csr"):
        assert shared_pool(2).run(products, form, env=ENV) == [True, True]
