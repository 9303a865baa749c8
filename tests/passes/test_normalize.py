"""Normalizing: golden graphs before and after, equal numbers, what is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpar


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def normalized(fn, *args, **options) -> list[str]:
    """The calls of the normalized graph, after checking that it computes the same."""
    plan = fxpar.plan(fn, *args, mesh="a=1", **options)
    torch.testing.assert_close(plan.reference(*args), fn(*args), rtol=1e-9, atol=1e-11)
    return calls(plan.result.normalized)


def calls(graph: fx.Graph) -> list[str]:
    return [
        f"{str(n.target).removesuffix('.default')}"
        + (f" {n.args[2]}" if "fxpar.dot" in str(n.target) else "")
        for n in graph.nodes
        if n.op == "call_function"
    ]


def test_linear_on_three_dims_becomes_one_dot():
    layer = nn.Linear(8, 16)
    assert normalized(layer, torch.randn(2, 4, 8)) == [
        "fxpar.dot x0 x1 k, n k -> x0 x1 n",
        "aten.add.Tensor",
    ]


def test_attention_products_keep_batch_and_heads_apart():
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    found = normalized(lambda q, k: q @ k.transpose(-1, -2), q, k)
    assert found[-1] == "fxpar.dot x0 x1 m k, x0 x1 n k -> x0 x1 m n"


def test_the_weight_gradient_contracts_batch_and_sequence():
    layer = nn.Linear(8, 16, bias=False)
    plan = fxpar.plan(layer, torch.randn(2, 4, 8), mesh="a=1", grad=True)
    dots = [c for c in calls(plan.result.normalized) if "fxpar.dot" in c]
    assert "fxpar.dot x0 x1 m, x0 x1 n -> m n" in dots


def test_a_bias_is_added_apart_with_its_factors():
    bias, x, w = torch.randn(6), torch.randn(4, 5), torch.randn(5, 6)

    def scaled(bias, x, w):
        return torch.addmm(bias, x, w, beta=0.5, alpha=2.0)

    assert normalized(scaled, bias, x, w) == [
        "fxpar.dot m k, k n -> m n",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]


def test_a_fused_projection_gets_a_dim_of_parts():
    layer = nn.Linear(8, 24)

    def parts(x):
        q, k, v = layer(x).split(8, dim=-1)
        return q * k + v

    found = normalized(parts, torch.randn(2, 4, 8))
    assert any("part" in call for call in found)
    assert not any("split" in call for call in found)


def test_parts_of_unequal_size_are_left_alone():
    layer = nn.Linear(8, 24)

    def parts(x):
        q, rest = layer(x).split([8, 16], dim=-1)
        return q.sum() + rest.sum()

    found = normalized(parts, torch.randn(2, 4, 8))
    assert any("split" in call for call in found)
    assert not any("part" in call for call in found)


def test_a_view_that_merges_nothing_is_not_looked_through():
    x, w = torch.randn(2, 3, 4), torch.randn(6, 4)
    found = normalized(lambda x, w: x.reshape(2, 12).reshape(4, 6) @ w, x, w)
    assert "fxpar.dot m k, k n -> m n" in found


def test_a_batch_of_one_with_a_bias_is_left_out():
    x, w, bias = torch.randn(6, 4, 8), torch.randn(8, 5), torch.randn(1, 24, 5)

    def biased(bias, x, w):
        return torch.baddbmm(bias, x.reshape(1, 24, 8), w[None])

    found = normalized(biased, bias, x, w)
    assert "fxpar.dot x0 x1 x2 x3, x2 x3 n -> x0 x1 n" in found


def test_a_batch_of_one_beside_dims_that_merge_nothing_is_left_alone():
    x, w = torch.randn(24, 8), torch.randn(1, 8, 5)
    found = normalized(lambda x, w: torch.bmm(x[None], w), x, w)
    assert found[-1] == "fxpar.dot b m k, b k n -> b m n"


def narrow_rows() -> torch.Tensor:
    """Numbers whose sum float16 does not hold."""
    return (1 + torch.rand(80000, 2)).half()


@pytest.mark.parametrize(
    "x",
    [
        narrow_rows(),
        100 + torch.randn(64, 3).bfloat16(),
        torch.randn(8, 4, dtype=torch.complex128),
    ],
)
def test_moments_of_split_dims_are_those_of_wide_numbers(x: torch.Tensor) -> None:
    def moments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.var(0), *torch.var_mean(x, 0))

    plan = fxpar.plan(
        moments, x, mesh="dp=2", in_specs=[("dp", None)], mode="propagate"
    )
    tolerance = torch.finfo(x.dtype).eps
    for got, want in zip(plan.simulate(x), moments(x), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_moments_are_expanded_only_where_a_plan_splits_them():
    x = torch.randn(8, 16)

    def norm(x):
        return F.layer_norm(x, (16,))

    rows = fxpar.plan(norm, x, mesh="a=4", in_specs=[("a", None)])
    dims = fxpar.plan(norm, x, mesh="a=4", in_specs=[(None, "a")])
    assert "aten.var_mean.correction" in calls(rows.result.normalized)
    assert "aten.var_mean.correction" not in calls(dims.result.normalized)
    for plan in (rows, dims):
        torch.testing.assert_close(plan.simulate(x), norm(x), rtol=1e-9, atol=1e-11)


def test_variance_with_large_mean_stays_accurate():
    """Centered squares, not the difference of two large sums."""
    x = torch.randn(8, 16) + 1e6
    plan = fxpar.plan(
        lambda x: x.var(1), x, mesh="a=4", in_specs=[(None, "a")], out_specs=[(None,)]
    )
    torch.testing.assert_close(plan.simulate(x), x.var(1), rtol=1e-8, atol=0.0)


def test_a_constant_is_made_anew_for_each_user():
    def fn(x, y):
        one = torch.full((4,), 3.0)
        return x + one, y * one

    found = normalized(fn, torch.randn(4), torch.randn(4))
    assert found.count("aten.full") == 2


def test_passes_can_be_left_out(monkeypatch):
    monkeypatch.setenv("FXPAR_DISABLE", "undo_views_around_matmul")
    plan = fxpar.plan(nn.Linear(8, 16), torch.randn(2, 4, 8), mesh="a=1")
    assert "aten.addmm" in calls(plan.result.normalized)


# Sums of rows with one element


SUM = "aten.sum.dim_IntList"
LOSSES = {
    "plain": ((6, 10), (6,), {}),
    "ignored": ((6, 10), (6,), {"ignore_index": 3}),
    "each": ((6, 10), (6,), {"reduction": "sum"}),
    "pixels": ((2, 5, 3, 4), (2, 3, 4), {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropys_backward_sums_no_row(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, rows, options = LOSSES[name]
    index = torch.randint(shape[1], rows)

    def loss(x):
        return F.cross_entropy(x, index, **options)

    x = torch.randn(shape, requires_grad=True)

    def sums() -> int:
        plan = fxpar.plan(loss, x, mesh="a=1", grad=True)
        return calls(plan.result.normalized).count(SUM)

    assert sums() == 1, "that of the softmax"
    monkeypatch.setenv("FXPAR_DISABLE", "sum_one_hot")
    assert sums() == 2


def test_a_cross_entropy_of_split_classes_is_one_small_message() -> None:
    index = torch.randint(12, (6,))

    def loss(x):
        return F.cross_entropy(x, index)

    x = torch.randn(6, 12, requires_grad=True)
    split = (None, "tp")
    plan = fxpar.plan(
        loss, x, mesh="tp=4", grad=True, in_specs=[split], mode="propagate"
    )
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    got = plan.outcome(x)
    (want,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(got.result, loss(x).detach(), rtol=1e-9, atol=1e-11)
    (gradient,) = got.gradients.values()
    torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-11)


def hot(rows: torch.Tensor, width: int, dim: int = 1, fill: float = 0.0, value=-2.0):
    shape = list(rows.shape)
    shape[dim] = width
    return torch.full(shape, fill).scatter(dim, rows, value)


ONE = torch.tensor([[1], [4], [0]])
REFUSED = {
    "rows that are not zero": lambda w: (hot(ONE, 5, fill=1.0) * w).sum(1),
    "two of a row": lambda w: (hot(ONE.expand(3, 2), 5) * w).sum(1),
    "not every row": lambda w: (
        (hot(ONE[:2], 5) * w[:2]).sum(1).sum()
        + (torch.zeros(3, 5).scatter(1, ONE[:2], 3.0) * w).sum(1)
    ),
    "a weight for each": lambda w: (hot(ONE, 5) * (w * torch.arange(5.0))).sum(1),
    "one weight for all": lambda w: (hot(ONE, 5) * w[:1]).sum(1),
    "along the other dim": lambda w: (hot(ONE, 5) * w).sum(0),
    "along both": lambda w: (hot(ONE, 5) * w).sum((0, 1)),
    "placed along the other dim": lambda w: (
        torch.zeros(3, 5).scatter(0, ONE.clamp(max=2), 3.0) * w
    ).sum(1),
    "of another type": lambda w: (hot(ONE, 5) * w.float()).sum(1),
    "rows of another type": lambda w: (hot(ONE, 5).float() * w).sum(1),
    "whole numbers": lambda w: (
        torch.zeros(3, 5, dtype=torch.int64).scatter(1, ONE, 2.7) * w
    ).sum(1),
    "a value no type has": lambda w: (
        torch.zeros(3, 5, dtype=torch.bfloat16).scatter(1, ONE, 0.1) * w.bfloat16()
    ).sum(1),
    "no dim at all": lambda w: (w.sum() * w.mean()).sum(0),
}


def test_the_product_lies_as_the_sum_did() -> None:
    """What follows may see it in another shape."""

    def of(w):
        rows = hot(torch.zeros(3, 2, 1, dtype=torch.int64), 5, dim=2)
        return (rows * w.t().unsqueeze(-1)).sum(-1).view(-1)

    assert SUM not in normalized(of, torch.randn(2, 3))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("turn", [False, True])
def test_the_sum_of_one_hot_rows_is_one_product(keep: bool, turn: bool) -> None:
    def of(w):
        rows = hot(ONE, 5)
        return (w * rows if turn else rows * w).sum(-1, keepdim=keep)

    assert SUM not in normalized(of, torch.randn(3, 1))


@pytest.mark.parametrize("name", REFUSED)
def test_other_sums_stay(name: str) -> None:
    assert SUM in normalized(REFUSED[name], torch.randn(3, 1))


def fused_projection(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Attention whose projections are one, as GPT-2 has it: ``x @ weight``."""
    batch, rows, width = x.shape
    qkv = torch.addmm(bias, x.view(-1, width), weight).view(batch, rows, -1)
    q, k, v = (
        part.view(batch, rows, 4, -1).transpose(1, 2) for part in qkv.split(width, -1)
    )
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return y.transpose(1, 2).reshape(x.shape) @ out


def test_gradients_of_a_fused_projection_gather_no_activations() -> None:
    """Its weight's and bias's read the gradients of its parts as a dim of parts; what
    is gathered is the weight's gradient, since weights lie whole."""
    torch.manual_seed(0)
    shapes = (8, 16, 16), (16, 48), (48,), (16, 16)
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    hints = {"out": ("tp", None)}
    plan = fxpar.plan(
        fused_projection, *args, mesh="tp=2", mode="propagate", grad=True, hints=hints
    )
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))
    gathered = [c.bytes for c in plan.collectives if c.kind == "all_gather"]
    assert sorted(gathered) == [48 * 8, 16 * 48 * 8]
