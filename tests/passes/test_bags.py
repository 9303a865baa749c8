"""Embedding bags along bags, columns and rows of the table: numbers are those of one
device, and what is sent is a bag's row of each rank, or the gradient of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from tests.helpers.spawn import ranks_of

ROWS, COLUMNS, BAGS, LENGTH = 16, 4, 8, 5
BAG = COLUMNS * 8  # bytes of what a bag becomes

Bags = Callable[..., torch.Tensor]


def bags(mode: str, padding: int | None = None) -> Bags:
    """Of rows of indices, or of a list of them and where each begins."""

    def fn(table: torch.Tensor, index: torch.Tensor, *begins: Any) -> torch.Tensor:
        how = {"mode": mode, "padding_idx": padding}
        return F.embedding_bag(index, table, *begins, **how).sin()

    return fn


def operands(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    table = torch.randn(ROWS, COLUMNS, dtype=torch.float64, requires_grad=True)
    return table, torch.randint(0, ROWS, shape)


def sent(fn: Bags, *args: torch.Tensor, **how: Any) -> list[tuple[str, int]]:
    """What a program sends, forward and backward, which computes what one device
    does."""
    settings: Any = {"mesh": "tp=4", "mode": "propagate"} | how
    plan = fxpar.plan(fn, *args, grad=True, **settings)
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    assert bool(gathers := "all_gather" in {c.kind for c in plan.collectives}) == any(
        "gathered: _embedding_bag" in note for note in plan.notes
    ), gathers
    return [(c.kind, c.bytes) for c in plan.collectives]


GRADIENT = ("all_reduce", ROWS * BAG)
# How table and indices lie, and what is sent.
LIE: dict[str, tuple[Any, list[tuple[str, int]]]] = {
    "bags": ([None, ("tp", None)], [GRADIENT]),
    "columns": ([(None, "tp"), None], []),
    "table": ([("tp", None), None], [("all_reduce", BAGS * BAG)]),
}


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("how", LIE)
def test_rows_of_indices(how: str, mode: str, padding: int | None) -> None:
    specs, want = LIE[how]
    if (how, mode) == ("table", "max"):  # of which a rank has not all that is compared
        want = [("all_gather", ROWS * BAG)]
    fn, args = bags(mode, padding), operands(BAGS, LENGTH)
    assert sent(fn, *args, in_specs=specs) == want


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_where_bags_begin_is_data(mode: str) -> None:
    """Of a list of indices the table may be split, but not the bags."""
    begins = torch.tensor([0, 3, 3, 20])
    args = (*operands(BAGS * LENGTH), begins)
    specs = [("tp", None), None, None]
    assert sent(bags(mode), *args, in_specs=specs) == [("all_reduce", 4 * BAG)]
    specs = [None, ("tp",), None]
    kinds = [kind for kind, _ in sent(bags(mode), *args, in_specs=specs)]
    assert kinds == ["all_gather", "all_reduce"]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_two_axes(mode: str) -> None:
    """Bags over one, rows of the table over the other."""
    specs = [("tp", None), ("dp", None)]
    found = sent(
        bags(mode, 3), *operands(BAGS, LENGTH), mesh="dp=2,tp=2", in_specs=specs
    )
    half = BAGS * BAG // 2, ROWS * BAG // 2
    assert sorted(found) == sorted([("all_reduce", n) for n in half])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_that_ranks_do_not_share_alike(mode: str) -> None:
    specs = [("tp", None), ("dp", None)]
    sent(bags(mode), *operands(5, 1), mesh="dp=2,tp=2", in_specs=specs)


@pytest.mark.parametrize("how", ["bags", "table"])
def test_weights(how: str) -> None:
    def fn(
        table: torch.Tensor, index: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        how: Any = {"mode": "sum", "padding_idx": 2}
        return F.embedding_bag(index, table, per_sample_weights=scale, **how).sin()

    table, index = operands(BAGS, LENGTH)
    scale = torch.randn(BAGS, LENGTH, dtype=torch.float64, requires_grad=True)
    lie = LIE[how][0]
    found = sent(fn, table, index, scale, in_specs=[*lie, lie[1]])
    scales = [("all_reduce", BAGS * LENGTH * 8)] if how == "table" else []
    assert sorted(found) == sorted(LIE[how][1] + scales)


def longer_last(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Bags that begin four indices apart, the last of twelve."""
    return F.embedding_bag(index, table, torch.arange(BAGS) * 4).sin()


def test_bags_of_unlike_length_are_whole() -> None:
    specs = [None, ("tp",)]
    kinds = [k for k, _ in sent(longer_last, *operands(BAGS * LENGTH), in_specs=specs)]
    assert kinds == ["all_gather", "all_reduce"]


def test_lengths_that_are_taken_for_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bags are cut at every fifth index, where they are not."""
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    with pytest.raises((AssertionError, RuntimeError)):
        sent(longer_last, *operands(BAGS * LENGTH), in_specs=[None, ("tp",)])


def trained(mesh: str, codegen: str) -> Any:
    table, index = operands(BAGS, LENGTH)
    torch._dynamo.reset()
    hints = {"table": ("tp", None), "index": ("dp", None)}
    hints = {k: v for k, v in hints.items() if v[0] in mesh}
    how = {"mesh": mesh, "plan": "propagate", "codegen": codegen, "hints": hints}
    loss = torch.compile(bags("mean", 3), backend="fxpar", options=how)(table, index)
    loss.square().sum().backward()
    return loss.detach(), table.grad


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.slow), "tp=2"])
def test_on_ranks(mesh: str) -> None:
    one = ranks_of("dp=1").run(trained, "dp=1", "eager")[0]
    for found in ranks_of(mesh).run(trained, mesh, "inductor", timeout=300.0):
        torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9)
