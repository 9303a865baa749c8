"""Reductions are placed by a minimum cut: as few bytes as can be, as early as can be.

Every case has a twin in which a nonlinear op forbids what the first one does.
"""

from __future__ import annotations

import pytest
import torch

import fxpar


@pytest.fixture
def operands():
    """x[m, k], w[k, n] with k split, and another pair."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield torch.randn(8, 16), torch.randn(16, 8), torch.randn(8, 16), torch.randn(16, 8)
    torch.set_default_dtype(torch.float32)


SPLIT = [(None, "a"), ("a", None)]


def reductions(fn, args, specs):
    plan = fxpar.plan(fn, *args, mesh="a=4", in_specs=specs, mode="propagate")
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))
    assert {c.kind for c in plan.collectives} <= {"all_reduce"}
    return [c.bytes for c in plan.collectives]


WHOLE = 8 * 8 * 8  # bytes of x @ w


def test_two_partial_products_are_added_before_one_reduction(operands):
    def add(x, w, y, v):
        return x @ w + y @ v

    assert reductions(add, operands, SPLIT * 2) == [WHOLE]

    def nonlinear(x, w, y, v):
        return torch.relu(x @ w) + torch.relu(y @ v)

    assert reductions(nonlinear, operands, SPLIT * 2) == [WHOLE] * 2


def test_a_reduction_waits_for_the_value_to_shrink(operands):
    x, w, *_ = operands
    assert reductions(lambda x, w: (x @ w).sum(0) * 2, (x, w), SPLIT) == [8 * 8]
    squared = reductions(lambda x, w: (x @ w).square().sum(0), (x, w), SPLIT)
    assert squared == [WHOLE]


def test_a_partial_value_is_multiplied_by_whole_ones_only(operands):
    x, w, *_ = operands
    c = torch.randn(8)
    args, specs = (x, w, c), [*SPLIT, (None,)]
    assert reductions(lambda x, w, c: ((x @ w) * c).sum(1), args, specs) == [8 * 8]
    squared = reductions(lambda x, w: ((x @ w) * (x @ w)).sum(), (x, w), SPLIT)
    assert max(squared) == WHOLE


def test_a_whole_value_is_not_added_once_per_rank(operands):
    """The bias is whole: adding it before the reduction would count it four times."""
    x, w, *_ = operands
    bias = torch.randn(8)
    plan = fxpar.plan(
        lambda x, w, b: x @ w + b, x, w, bias, mesh="a=4", in_specs=[*SPLIT, (None,)]
    )
    torch.testing.assert_close(plan.simulate(x, w, bias), x @ w + bias)
    assert len(plan.collectives) == 1


def test_each_value_is_reduced_once_for_all_its_readers(operands):
    x, w, *_ = operands

    def fan(x, w):
        y = x @ w
        return torch.relu(y), torch.tanh(y), y.exp()

    plan = fxpar.plan(fan, x, w, mesh="a=4", in_specs=SPLIT)
    assert len(plan.collectives) == 1


def test_the_earliest_of_equal_cuts_is_taken(operands):
    """A partial value is not carried through pointwise work for nothing."""
    x, w, *_ = operands
    plan = fxpar.plan(
        lambda x, w: torch.relu((x @ w) * 3.0), x, w, mesh="a=4", in_specs=SPLIT
    )
    assert "dot" in plan.collectives[0].source


def test_a_maximum_over_a_split_dim_is_one_small_reduction(operands):
    x, *_ = operands
    assert reductions(lambda x: x.amax(1).exp(), (x,), [(None, "a")]) == [8 * 8]


@pytest.mark.parametrize("read", ["cast", "product", "mean"])
def test_a_sum_that_wraps_is_reduced_in_its_own_dtype(read):
    """Sums of 8 bits wrap; those of what each rank's sum was cast to would not."""
    torch.manual_seed(0)
    x, w = (torch.randint(-100, 100, s).to(torch.int8) for s in ((8, 16), (16, 8)))
    scale = torch.randn(8, 8, dtype=torch.float32)

    def fn(x, w, scale):
        y = x @ w
        if read == "cast":
            return y + y.to(torch.float32)
        return (
            y * scale + y.to(torch.float32) if read == "product" else y.float().mean()
        )

    specs = [*SPLIT, (None, None)]
    reductions(fn, (x, w, scale), specs)


def test_counts_may_be_cast_first(operands):
    """Of 64 bits nothing wraps."""
    x, *_ = operands

    def shares(x):
        return (x > 0).sum(1).to(torch.float32) * 0.5 + (x > 0).sum(1).float()

    assert len(reductions(shares, (x,), [(None, "a")])) == 1
