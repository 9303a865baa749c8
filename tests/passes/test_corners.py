"""Small programs at the corners of the pipeline, each against eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar


def whole(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def check(
    fn: Callable[..., Any], *args: torch.Tensor, grad: bool = False, **how: Any
) -> Any:
    """Plan, simulate, compare results and gradients with eager mode; the plan."""
    args = tuple(x.requires_grad_(grad and x.is_floating_point()) for x in args)
    plan = fxpar.plan(fn, *args, grad=grad, **how)
    got = plan.outcome(*args)
    want = fn(*args)
    many = want if isinstance(want, tuple) else (want,)
    torch.testing.assert_close(got.result, _detached(want), rtol=1e-9, atol=1e-9)
    if grad:
        leaves = [x for x in args if x.requires_grad]
        total = sum(y.sum() for y in many if y.requires_grad)
        gradients = torch.autograd.grad(total, leaves)
        assert len(got.gradients) == len(gradients)
        for a, b in zip(got.gradients.values(), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return plan


def _detached(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(y.detach() for y in result)
    return result.detach()


def specs(*dims: Sequence[Any] | None) -> list:
    return list(dims)


def test_a_mean_is_reduced_before_an_update_adds_summands():
    """The operand of the update is wanted as parts of a sum, its producer makes parts
    of a mean: on one axis that takes two reshards."""

    def update(x, i, s):
        return x.mean(-1).index_add(0, i, s)

    check(
        update,
        *(whole(4, 8), torch.tensor([1, 3]), whole(2)),
        mesh="dp=2,x=4",
        in_specs=specs(("x", "dp"), ("dp",), None),
    )


def test_a_dim_of_local_size_one_is_not_squeezed():
    check(
        lambda x: x.squeeze() * 2,
        whole(4, 1, 2),
        mesh="dp=4",
        in_specs=specs(("dp", None, None)),
    )


def test_parts_of_a_sum_pass_a_view_only_where_its_factors_stay_contiguous():
    """Without the axis that passes, the minor factor of the merged dim would be split
    below a major one that is not."""

    def product(x, w):
        y = x @ w
        return y * y

    check(
        product,
        *(whole(3, 4, 6), whole(6)),
        mesh="y=3,dp=2",
        in_specs=specs((None, "dp", "y"), None),
        out_specs=specs(("y", "dp")),
    )


def test_an_input_returned_in_another_spec():
    plan = check(
        lambda x: (x * 2, x),
        whole(4, 8),
        mesh="dp=2,tp=2",
        hints={"x": ("dp", "?")},
        out_specs=specs(None, (None, "dp")),
    )
    assert plan.spec("x").dims[0] == ("dp",)
    assert plan.outputs[1] == fxpar.Spec(None, "dp")


def test_one_value_returned_in_two_specs():
    def twice(x):
        y = x + 1
        return y, y

    wanted = [fxpar.Spec("dp", None), fxpar.Spec(None, ("dp", "tp"))]
    plan = check(twice, whole(4, 8), mesh="dp=2,tp=2", out_specs=wanted)
    assert list(plan.outputs) == wanted


def test_an_axis_that_moves_in_pieces_is_counted():
    plan = check(
        lambda x: x * 2,
        whole(8, 8),
        mesh="a=2,b=4",
        in_specs=specs(("a", "b")),
        out_specs=specs(("b", "a")),
    )
    assert plan.collectives and all(c.bytes > 0 for c in plan.collectives)


def test_results_that_share_memory_have_a_gradient_each():
    def views(x, w):
        y = x @ w
        return y, y.transpose(0, 1), x, y[0]

    check(views, whole(4, 8), whole(8, 6), mesh="dp=2,tp=2", grad=True)


def test_a_result_with_another_layout_has_a_tangent_of_that_layout():
    """Its backward is a view that a contiguous tangent would not allow."""
    check(
        lambda x: (x.reshape(6, 8) * 2).transpose(0, 1),
        whole(48),
        mesh="dp=1",
        grad=True,
    )


def test_strides_of_the_whole_are_not_used_on_a_shard():
    with pytest.warns(fxpar.FxparWarning, match="as_strided"):
        check(
            lambda x: x.as_strided((8, 4), (1, 8)) * 2,
            whole(4, 8),
            mesh="dp=2,tp=2",
            in_specs=specs(("dp", "tp")),
        )
    with pytest.warns(fxpar.FxparWarning, match="as_strided"):
        check(
            lambda x, w: (x @ w).transpose(0, 1).clone().as_strided((3, 3), (2, 3)),
            *(whole(4, 8), whole(8, 6)),
            mesh="dp=2",
            in_specs=specs(("dp", None), None),
        )


def test_a_closed_dim_stays_whole():
    """A convention splits columns of weights, unless the hint closed them."""
    layer = torch.nn.Linear(8, 16, bias=False).double()
    hints = {"weight": ("_", "_")}
    plan = fxpar.plan(layer, whole(4, 8), mesh="dp=2,tp=2", hints=hints)
    assert plan.spec("weight").is_whole


@pytest.mark.parametrize("mesh", ["dp=1", "dp=1,tp=1", "tp=3", "dp=5"])
def test_meshes_that_split_nothing(mesh):
    check(lambda x: F.gelu(x).sum(0), whole(4, 8), mesh=mesh, grad=True)
