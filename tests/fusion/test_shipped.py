"""``overlap(..., fused=1)``: a product and its collective as one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar import _torch
from fxpar.errors import ScheduleError
from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
from tests.helpers.spawn import shared_pool
from tests.helpers.toys import Toy, all_gather, all_reduce, reduce_scatter

c10d, ours = torch.ops._c10d_functional, torch.ops.fxpar


def gathering(x: Any, w: Any, v: Any) -> Any:
    y = all_gather(x * 2)
    return (y @ w).relu(), y @ v, y


def scattering(x: Any, w: Any) -> Any:
    return reduce_scatter(x.relu() @ w) + 1


def scattering_rows(x: Any, w: Any) -> Any:
    """A product seen as three dims, scattered along the first."""
    y = (x @ w).view(8, 2, 5)
    return reduce_scatter(y) * 2


GATHERED = ("[tp, _]", (8, 5)), ("[_, tp]", (5, 8)), ("[_, tp]", (5, 8))
SCATTERED = ("[_, tp]", (16, 8)), ("[tp, _]", (8, 5))

GATHER = "all_gather_into_tensor"
SCATTER = "reduce_scatter_tensor"

FORMS: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "two products": (gathering, GATHERED, f"overlap({GATHER}, [mm, mm_1], fused=1)"),
    "scatter": (scattering, SCATTERED, f"overlap(mm, {SCATTER}, fused=1)"),
    "of a view": (scattering_rows, SCATTERED, f"overlap(mm, {SCATTER}, fused=1)"),
}


@pytest.mark.parametrize("name", FORMS)
def test_numbers(name: str) -> None:
    fn, given, schedule = FORMS[name]
    toy = Toy(fn, *given)
    targets = {n.target for n in toy.after(schedule, lowered=True).nodes}
    assert targets & {ours.gather_matmul.default, ours.matmul_scatter.default}
    assert not any("c10d" in str(target) for target in targets)
    toy.check(schedule)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(5, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(torch.tanh(x)))


def test_a_gather_along_an_inner_dim() -> None:
    """In a plan, of a value of three dims, which a product reads through a view."""
    x = torch.randn(2, 8, 5).double()
    plan = fxpar.plan(
        Up().double(),
        x,
        mesh="tp=4",
        hints={"up.weight": ("tp", None)},
        in_specs=[(None, "tp", None)],
        out_specs=[(None, None, "tp")],
        mode="propagate",
        schedule="overlap(all_gather, mm_default, fused=1)",
    )
    (sent,) = plan.collectives
    assert (sent.kind, sent.axes, sent.bytes) == ("all_gather", ("tp",), x.nbytes)
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    (made,) = plan.result.local.find_nodes(
        op="call_function", target=ours.gather_matmul.default
    )
    assert made.args[2] == 1


def on_columns(x: Any, w: Any) -> Any:
    """The gathered dim is the one that is summed over."""
    return x @ all_gather(w)


def both(x: Any) -> Any:
    y = all_gather(x)
    return y @ y.T


def read_twice(x: Any, w: Any) -> Any:
    y = x @ w
    return reduce_scatter(y), y


def not_a_product(x: Any, w: Any) -> Any:
    return reduce_scatter(x.relu() + w)


REFUSED: dict[str, tuple[Callable[..., Any], Any, str, str]] = {
    "on the right": (
        on_columns,
        (("[_, _]", (4, 8)), ("[tp, _]", (8, 5))),
        f"overlap({GATHER}, mm, fused=1)",
        "is no product of",
    ),
    "on the summed dim": (
        lambda x, w: all_reduce(x) @ w,
        (("[_, _] partial(sum: tp)", (8, 8)), ("[_, _]", (8, 5))),
        "split(all_reduce, dim=1) -> rs, ag\noverlap(ag, mm, fused=1)",
        "gathers the dim that a product sums over",
    ),
    "transposed": (
        lambda x, w: all_gather(x).T @ w,
        (("[tp, _]", (8, 8)), ("[_, _]", (8, 4))),
        f"overlap({GATHER}, mm, fused=1)",
        "is no product of the rows",
    ),
    "some rows": (
        lambda x, w: all_gather(x)[0:4] @ w,
        (("[tp, _]", (8, 8)), ("[_, _]", (8, 4))),
        f"overlap({GATHER}, mm, fused=1)",
        "is no product of the rows",
    ),
    "other rows": (
        lambda x, w: all_gather(x).view(16, 4) @ w,
        (("[tp, _]", (8, 8)), ("[_, _]", (4, 4))),
        f"overlap({GATHER}, mm, fused=1)",
        "is no product of the rows",
    ),
    "columns in other dims": (
        lambda x, w: reduce_scatter((x @ w).view(8, 10)),
        SCATTERED,
        f"overlap(mm, {SCATTER}, fused=1)",
        "does not reduce the rows",
    ),
    "scattered transposed": (
        lambda x, w: reduce_scatter((x @ w).T),
        (("[_, tp]", (8, 8)), ("[tp, _]", (8, 8))),
        f"overlap(mm, {SCATTER}, fused=1)",
        "does not reduce the rows",
    ),
    "along the last dim": (
        lambda x, w: all_reduce(x @ w),
        (("[_, tp]", (8, 8)), ("[tp, _]", (8, 8))),
        "split(all_reduce, dim=1) -> rs, ag\noverlap(mm, rs, fused=1)",
        "is a sum along dim 1 of 2",
    ),
    "a maximum": (
        lambda x, w: all_reduce(x @ w, op="max"),
        (("[_, tp]", (8, 8)), ("[tp, _]", (8, 8))),
        "split(all_reduce, dim=0) -> rs, ag\noverlap(mm, rs, fused=1)",
        "is a max along dim 0 of 2",
    ),
    "both sides": (both, GATHERED[:1], f"overlap({GATHER}, mm, fused=1)", "both sides"),
    "read twice": (
        read_twice,
        SCATTERED,
        f"overlap(mm, {SCATTER}, fused=1)",
        "is read by others too",
    ),
    "no product": (
        not_a_product,
        (("[_, tp]", (16, 8)), ("[_, tp]", (16, 8))),
        f"overlap(add, {SCATTER}, fused=1)",
        "product of two matrices",
    ),
    "another op": (
        gathering,
        GATHERED,
        f"overlap({GATHER}, relu, fused=1)",
        "is no product of",
    ),
    "chunks": (
        gathering,
        GATHERED,
        f"overlap({GATHER}, mm, fused=1, chunks=2)",
        "no chunks of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    fn, given, schedule, why = REFUSED[name]
    with pytest.raises(ScheduleError, match=why):
        Toy(fn, *given).after(schedule)


def test_axes_in_another_order_than_the_mesh() -> None:
    def program(x: Any, w: Any) -> Any:
        return all_gather(all_gather(x, 2, "dp"), 2, "tp") @ w

    given = ("[tp+dp, _]", (8, 8)), ("[_, _]", (8, 4))
    toy = Toy(program, *given, mesh="dp=2,tp=2")
    merged = f"merge({GATHER}, {GATHER}_1) -> both\n"
    toy.check(merged)
    with pytest.raises(ScheduleError, match="has its axes in another order"):
        toy.after(merged + "overlap(both, mm, fused=1)")


def beside_torch() -> None:
    """On CPU ours run their parts one after the other; PyTorch's definitions of its
    own ops, which it has for shapes, say the same."""
    from torch.distributed import _symmetric_memory as shipped

    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    torch.manual_seed(rank)
    for shape, dim in (((3, 5), 0), ((3, 2, 5), 0), ((2, 3, 5), 1)):
        x, ws = torch.randn(shape), [torch.randn(5, 4), torch.randn(5, 2)]
        # Torch's gather corrupts the heap on gloo: see ``give_outputs``.
        with mock.patch.object(c10d, "all_gather_into_tensor", None):
            made = ours.gather_matmul(x, ws, dim, 4, group)
        whole, products = shipped._fused_all_gather_matmul_fallback(x, ws, dim, group)
        for a, b in zip(made, [whole, *products], strict=True):
            torch.testing.assert_close(a, b)
            assert a.is_contiguous()
    for shape, dim in (((8, 5), 0), ((8, 2, 5), 0), ((2, 8, 5), 1)):
        x, w = torch.randn(shape), torch.randn(5, 4)
        for op in ("sum", "avg"):
            mine = ours.matmul_scatter(x, w, op, dim, 4, group)
            want = shipped._fused_matmul_reduce_scatter_fallback(x, w, op, dim, group)
            torch.testing.assert_close(mine, want)
    fake = torch.empty(1, device="meta")
    assert not _torch.distributed.can_share_memory(fake, group)


@pytest.mark.multiprocess
def test_the_ops_are_those_of_torch() -> None:
    shared_pool(4).run(beside_torch)
