"""Training where no axis divides a dim: batch, features and words are odd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from tests.helpers.device import put
from tests.helpers.spawn import ranks_of
from tests.helpers.training import loop

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

ROWS, WORDS = 7, 101


class Odd(nn.Module):
    """Words to words; its loss is a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 10)
        self.inner = nn.Linear(10, 5)
        self.norm = nn.LayerNorm(5)
        self.words = nn.Linear(5, WORDS)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.inner(self.table(x)))
        logits = self.words(self.drop(self.norm(hidden)))
        return nn.functional.cross_entropy(logits, labels) + hidden.mean()


HINTS = {
    "table.weight": ("tp",),
    "inner.weight": ("tp",),
    "words.weight": ("tp",),
}


def train(options: dict[str, Any] | None, rows: int = ROWS) -> Any:
    torch.manual_seed(3)
    model = put(Odd().double())
    torch.manual_seed(4)
    batch = {"x": torch.randint(0, WORDS, (rows,))}
    batch["labels"] = torch.randint(0, WORDS, (rows,))
    batch = put(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = model
    if options is not None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="fxpar", options=options)
    torch.manual_seed(5)
    losses, gradients = loop(compiled, optimizer, [batch] * 3, model=model)
    plan = fxpar.plans()[-1] if options is not None else None
    return losses, gradients, plan and (str(plan.notes), plan.values)


def check(
    mesh: str, codegen: str, rows: int = ROWS, noted: str = "idle", **more: Any
) -> None:
    options = {"mesh": mesh, "codegen": codegen, **more}
    one = ranks_of("x=1").run(train, {"mesh": "x=1", "codegen": "eager"}, rows)[0]
    runs = ranks_of(mesh).run(train, options, rows, timeout=900.0)
    for losses, gradients, plan in runs:
        assert plan is not None and noted in plan[0]
        torch.testing.assert_close(losses, one[0], rtol=1e-9, atol=1e-9)
        assert gradients.keys() == one[1].keys()
        torch.testing.assert_close(gradients, one[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("axis", [pytest.param("dp", marks=pytest.mark.slow), "tp"])
def test_two_ranks(axis: str) -> None:
    hints = HINTS if axis == "tp" else None
    more = {"hints": hints} if hints else {}
    check(f"{axis}=2", "eager", plan="propagate", **more)


def sharded(mesh: str) -> Any:
    """A step with parameters at rest: their shapes, the loss, the last plan."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)).double()
    fxpar.shard(model, mesh=mesh)
    shapes = [tuple(p.to_local().shape) for p in model.parameters()]
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"}
    compiled = torch.compile(model, backend="fxpar", options=options)
    loss = compiled(torch.linspace(-1, 1, 56).double().reshape(7, 8)).square().mean()
    loss.backward()
    return shapes, float(loss), str(fxpar.plans()[-1].mesh)


def test_unlike_ranks() -> None:
    """One rank has five rows of seven, the other two."""
    mesh = "dp=2{1.0,0.4}"
    check(mesh, "eager", noted="shares: along dp 5:2", plan="propagate")


@pytest.mark.slow
def test_parameters_of_unlike_ranks_rest_in_equal_shards() -> None:
    """Where they rest over the axis its shards are equal; not with shares that are
    given, and then they rest elsewhere."""
    unlike = "dp=2{1.0,0.4}"
    ranks = ranks_of(unlike)
    (shapes, loss, mesh), other = ranks.run(sharded, unlike)
    assert (6, 8) in shapes and mesh == unlike and other[1] == loss
    (shapes, given, mesh), _ = ranks.run(sharded, f"{unlike}[5,2]")
    assert (12, 8) in shapes and mesh == f"{unlike}[5.0,2.0]"
    assert given == pytest.approx(loss, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("mesh", ["dp=4", "tp=4", "dp=2,tp=2"])
def test_four_ranks(mesh: str, rows: int) -> None:
    """Of six rows the last of four ranks has none."""
    more = {"hints": HINTS} if "tp" in mesh else {}
    check(mesh, "eager", rows, plan="propagate", **more)


@pytest.mark.slow
def test_generated_kernels() -> None:
    check("dp=2,tp=2", "inductor", plan="propagate", hints=HINTS)
