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
    assert found[-1] == "fxpar.dot x0 x1 m k, x0 x1 k n -> x0 x1 m n"


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
    x, w = torch.randn(4, 1, 6), torch.randn(6, 4)
    found = normalized(lambda x, w: x.reshape(2, 12).reshape(4, 6) @ w, x, w)
    assert "fxpar.dot m k, k n -> m n" in found


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
