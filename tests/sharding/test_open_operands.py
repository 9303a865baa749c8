"""An input that may lie anywhere lies as it is read: nothing is sent for it, and what
is decided elsewhere reckons with that."""

from __future__ import annotations

import pytest
import torch

import fxpar
from fxpar import Spec

# Program, shapes, specs of its arguments and its result; what is sent on mp=2,tp=2.
CASES = {
    "a sum": (
        torch.add,
        [(64, 64), (64, 64)],
        [("mp", None), None],
        ("tp", "mp"),
        [("permute", 64 * 64 * 8 // 4)],
    ),
    "a product": (
        lambda a, b: (a @ b).relu(),
        [(64, 64), (64, 64)],
        [("mp", None), None],
        (None, "mp"),
        [("all_to_all", 64 * 64 * 8 // 2)],
    ),
    "a bias": (
        torch.add,
        [(64, 64), (64,)],
        [None, ("tp",)],
        ("tp", None),
        [("all_gather", 64 * 8)],
    ),
}


def planned(name: str, grad: bool = False, given: list | None = None):
    fn, shapes, specs, out, want = CASES[name]
    args = [torch.randn(*s, dtype=torch.float64, requires_grad=grad) for s in shapes]
    plan = fxpar.plan(
        fn,
        *args,
        mesh="mp=2,tp=2",
        in_specs=given or specs,
        out_specs=[out],
        mode="propagate",
        grad=grad,
    )
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))
    return plan, want


@pytest.mark.parametrize("name", CASES)
def test_it_lies_as_it_is_read(name: str) -> None:
    plan, want = planned(name)
    assert [(c.kind, c.bytes) for c in plan.collectives] == want


@pytest.mark.parametrize("name", CASES)
def test_an_input_that_was_given_a_spec_keeps_it(name: str) -> None:
    specs = CASES[name][2]
    given = [spec or ("mp", None) for spec in specs]
    plan, _ = planned(name, given=given)
    assert list(plan.inputs) == [Spec(*spec) for spec in given]


def test_an_input_with_a_gradient_is_not_moved_alone() -> None:
    """Its gradient follows it, or it would rest otherwise than it is updated."""
    plan, _ = planned("a product", grad=True)
    lie = dict(plan.gradients)
    assert list(lie.values()) == list(plan.inputs)


def test_an_input_with_two_readers_lies_where_it_did() -> None:
    x, y = (torch.randn(64, 64, dtype=torch.float64) for _ in range(2))
    plan = fxpar.plan(
        lambda x, y: (x + y, y.t() * 2),
        x,
        y,
        mesh="mp=2,tp=2",
        in_specs=[("mp", "tp"), None],
        mode="propagate",
    )
    assert plan.inputs[1] == Spec("mp", "tp") and not plan.collectives
    torch.testing.assert_close(plan.simulate(x, y), plan.reference(x, y))


def test_an_axis_of_the_batch_stays_on_the_batch() -> None:
    """Data parallelism gathers the other operand, however small the batch is."""
    x, w = torch.randn(8, 64).double(), torch.randn(64, 64).double()
    for axis, gathered in (("dp", w), ("mp", x)):
        plan = fxpar.plan(
            torch.mm,
            x,
            w,
            mesh=f"{axis}=2",
            in_specs=[(axis, None), (None, axis)],
            mode="propagate",
        )
        assert [(c.kind, c.bytes) for c in plan.collectives] == [
            ("all_gather", gathered.nbytes)
        ], axis
        torch.testing.assert_close(plan.simulate(x, w), x @ w)
