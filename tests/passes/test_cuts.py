"""Few rows cut out of a split dim, and put into one: nothing large is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpar


def last(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.tanh()[:, -1] @ w).logsumexp(-1)


def first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x * x[:, :1].sigmoid()
    return (h[:, 0] @ w).square() + h.mean(1) @ w


def middle(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.exp()[:, 3:9:2] @ w).amax(1)


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x.tanh().clone()
    h[:, 5:8] = x[:, :3] * 2
    h[:, -1] = 0.5
    return (h @ w).square().sum(1)


PROGRAMS = (last, first, middle, written)


def check(program: Any, rows: int, mesh: str, axes: Any = "sp") -> Any:
    torch.manual_seed(0)
    x = torch.randn(2, rows, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    specs = [(None, axes, None), None]
    plan = fxpar.plan(
        program, x, w, mesh=mesh, mode="propagate", grad=True, in_specs=specs
    )
    got, want = plan.outcome(x, w), plan.reference_outcome(x, w)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(want.result, program(x, w), rtol=1e-9, atol=1e-9)
    return plan


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_the_large_operand_stays_split(program: Any) -> None:
    plan = check(program, 37, "sp=4")
    # All of x is 2 * rows * 6 numbers.
    assert plan.collectives
    assert all(c.kind == "all_reduce" for c in plan.collectives)
    assert max(c.bytes for c in plan.collectives) <= 2 * 2 * 4 * 6 * 8


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ("sp=2,dp=2", ("sp", "dp")),
        ("sp=2,dp=2", ("dp", "sp")),
        ("sp=4", "sp:2"),
        ("sp=3[1,3,1]", "sp"),
        ("sp=4", "sp"),
        ("sp=8", "sp"),
    ],
)
@pytest.mark.parametrize("rows", [16, 17, 37])
def test_meshes(program: Any, mesh: str, axes: Any, rows: int) -> None:
    """Of 17 rows on 8 ranks, three each, two ranks have none."""
    check(program, rows, mesh, axes)


def test_many_rows_are_exchanged() -> None:
    """Ranks get the rows that they compute with, and gather none."""

    def halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.tanh()
        return (h[:, :16] * h[:, 16:]).sum(1) @ w

    plan = check(halves, 32, "sp=4")
    assert "all_gather" not in {c.kind for c in plan.collectives}


def test_a_slice_without_an_end_has_many_rows() -> None:
    def left(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.tanh()
        later = torch.ops.aten.slice.Tensor(h, 1, 1).exp().sum(1)
        return (h[:, 0] * h[:, 2] + later) @ w

    check(left, 37, "sp=4")


def test_truths_are_not_summed() -> None:
    def found(x: torch.Tensor) -> torch.Tensor:
        return (x > 0)[-1]

    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    plan = fxpar.plan(found, x, mesh="sp=4", mode="propagate", in_specs=[("sp", None)])
    assert torch.equal(plan.simulate(x), found(x))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_stack_is_split_as_its_parts(dim: int) -> None:
    """Along the dim that torch would join them by, too."""

    def stacked(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.sin(), x.cos(), x], dim).exp().sum(dim)

    x = torch.linspace(-1, 1, 7 * 5).double().reshape(7, 5).requires_grad_()
    for lies in (("sp", None), (None, "sp")):
        plan = fxpar.plan(
            stacked, x, mesh="sp=2", mode="propagate", grad=True, in_specs=[lies]
        )
        assert not plan.collectives
        got, want = plan.outcome(x), plan.reference_outcome(x)
        torch.testing.assert_close(got.result, want.result)
        torch.testing.assert_close(got.gradients, want.gradients)
        torch.testing.assert_close(want.result, stacked(x))


def test_other_views_of_a_join_stay() -> None:
    """Of parts that are no rows of a stack, and of a join that others read."""

    def viewed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([x, x.exp()])
        return (
            torch.cat([x, x[:2]]).view(2, 4, 3),
            both.view(2, 6, 3) + 1,
            both * 2,
            torch.cat([x, x + 1]).view(4, 3, 3),
        )

    x = torch.linspace(-1, 1, 18).reshape(6, 3)
    plan = fxpar.plan(viewed, x, mesh="sp=2", mode="propagate")
    joins = plan.result.normalized.find_nodes(
        op="call_function", target=torch.ops.aten.cat.default
    )
    assert [join.meta["val"].shape for join in joins] == [(12, 3), (8, 3), (12, 3)]
    torch.testing.assert_close(plan.simulate(x), viewed(x))
