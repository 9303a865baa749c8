"""Ops that read windows of rows of a split dim: convolutions and pools that are laid
out otherwise than their dim, pads that repeat rows, interpolation. Numbers are those of
one device, and what is sent is the rows that a rank's windows reach beyond its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.graph.builder import Builder
from fxpar.sharding import near_rows
from fxpar.sharding.factors import Reach
from tests.helpers.pairs import diagonal
from tests.helpers.spawn import ranks_of

Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pool(x: torch.Tensor, _: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.avg_pool2d(x, 3, 1, 1, **options)


def smoothed(x: torch.Tensor, _: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.interpolate(x, antialias=True, **options)


# Bytes of a row of the images below: batch, channels, columns, of float64.
ROW = 2 * 3 * 12 * 8

# Each with the most rows that one rank of four sends or gets of 16, forward.
OPS: dict[str, tuple[Op, int]] = {
    "no padding": (F.conv2d, 2),
    "no padding, stride": (partial(F.conv2d, stride=2), 1),
    "even kernel": (lambda x, w: F.conv2d(x, w[..., :2, :2], padding=(0, 1)), 1),
    "transposed": (partial(F.conv_transpose2d, stride=2), 3 * 25 / 12),
    "maximum": (lambda x, _: F.max_pool2d(x, 3, 2), 1),
    "average": (lambda x, _: F.avg_pool2d(x, 3, 2), 1),
    "average of what is there": (partial(pool, count_include_pad=False), 2),
    "doubled": (lambda x, _: F.interpolate(x, scale_factor=2), 0),
    "halved": (lambda x, _: F.interpolate(x, size=(8, 6), mode="nearest-exact"), 0),
    "bilinear": (lambda x, _: F.interpolate(x, scale_factor=2, mode="bilinear"), 2),
    "corners": (
        lambda x, _: F.interpolate(x, (32, 24), mode="bilinear", align_corners=True),
        2,
    ),
    "bicubic": (lambda x, _: F.interpolate(x, scale_factor=2, mode="bicubic"), 6),
    "smoothed": (partial(smoothed, size=(8, 6), mode="bilinear"), 2),
    "smoothed bicubic": (partial(smoothed, size=(8, 12), mode="bicubic"), 6),
    "smoothed in part": (partial(smoothed, size=(16, 6), mode="bilinear"), 0),
    "turned round": (lambda x, _: F.pad(x, (1, 1, 2, 2), "reflect"), 1),
    "repeated": (lambda x, _: F.pad(x, (1, 1, 2, 2), "replicate"), 1),
    "windows": (lambda x, _: x.unfold(2, 4, 2), 2),
}
SLOW = (
    "smoothed bicubic",
    "corners",
    "halved",
    "bicubic",
    "even kernel",
    "maximum",
    "no padding, stride",
)


def planned(
    op: Op, grad: bool = True, mesh: str = "h=4", rows: int = 16, space: Any = None
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A function of a square of what the op makes, its rows split."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return op(x, w).square().sum() if grad else op(x, w)

    torch.manual_seed(0)
    x, w = torch.randn(2, 3, rows, 12).double(), torch.randn(3, 3, 3, 3).double()
    args = x.requires_grad_(grad), w.requires_grad_(grad)
    lie = space or (None, None, "h", None)
    options = {"mesh": mesh, "in_specs": [lie, None], "mode": "propagate"}
    return fxpar.plan(fn, *args, grad=grad, **options), args


def check(plan: Any, args: tuple[torch.Tensor, ...]) -> None:
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)


def sent(plan: Any) -> int:
    """Bytes of rows that are sent, at most by one rank."""
    return sum(c.bytes for c in plan.collectives if c.kind != "all_reduce")


@pytest.mark.parametrize("name", OPS)
def test_rows_around_a_shard_are_sent(name: str) -> None:
    op, rows = OPS[name]
    plan, args = planned(op, grad=False)
    kinds = {found.kind for found in plan.collectives}
    # An exchange with two peers is priced as an all-to-all of four ranks.
    assert kinds <= {"permute", "all_to_all"}
    assert 3 * sent(plan) == rows * ROW * (4 if "all_to_all" in kinds else 3)
    check(plan, args)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OPS],
)
def test_gradients(name: str) -> None:
    plan, args = planned(OPS[name][0])
    kinds = {found.kind for found in plan.collectives}
    assert kinds <= {"permute", "all_to_all", "all_reduce"}
    check(plan, args)


def turned_round(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """One image: each of its dims of one row is looked up at one place."""
    return F.pad(x[:1], (1, 1, 3, 2), "reflect")


@pytest.mark.parametrize(("mesh", "rows"), [("h=4", 64), ("w=2,h=2", 37)])
def test_gradient_of_one_image_with_rows_turned_round(mesh: str, rows: int) -> None:
    space = (None, None, "h", "w" if "w" in mesh else None)
    plan, args = planned(turned_round, mesh=mesh, rows=rows, space=space)
    kinds = {found.kind for found in plan.collectives}
    assert kinds <= {"permute", "all_to_all", "all_reduce"}
    # No exchange is of more than the rows of the pad, there and back.
    assert max(c.bytes for c in plan.collectives) <= 2 * 5 * ROW
    check(plan, args)


# Windows as columns, by their rows and by which of them.
PATCHES: dict[str, Op] = {
    "patches": lambda x, _: F.unfold(x, 3, padding=1),
    "steps": lambda x, _: F.unfold(x, (4, 3), padding=(1, 0), stride=(2, 1)),
    "there and back": lambda x, _: F.fold(
        F.unfold(x, 3, padding=1).relu(), x.shape[2:], 3, padding=1
    ),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("steps", "h=4"),
        ("there and back", "h=2"),
        pytest.param("there and back", "h=4", marks=pytest.mark.slow),
        pytest.param("patches", "h=4", marks=pytest.mark.slow),
    ],
)
def test_patches_are_rows_of_windows(name: str, mesh: str) -> None:
    plan, args = planned(PATCHES[name], mesh=mesh)
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all", "all_reduce"}
    assert max(c.bytes for c in plan.collectives) <= 4 * 4 * 2 * ROW
    check(plan, args)


@pytest.mark.parametrize(
    ("name", "mesh"),
    diagonal(
        ["no padding", "maximum", "bilinear", "smoothed", "turned round"],
        ["h=3", "h=2[1,3]", "h=2,w=2"],
    ),
)
def test_shards_that_are_not_alike(name: str, mesh: str) -> None:
    """17 rows, in chunks or by shares; columns split as well."""
    space = (None, None, "h", "w") if "w" in mesh else None
    plan, args = planned(OPS[name][0], mesh=mesh, rows=17, space=space)
    assert not plan.result.decision.is_even
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all", "all_reduce"}
    check(plan, args)


# Windows that keep a size, halve or double it.
KEPT: dict[str, Op] = {
    "convolution": partial(F.conv2d, padding=1),
    "halved": partial(F.conv2d, stride=2, padding=1),
    "one of three": lambda x, w: F.conv2d(x, w[..., :1, :1], stride=3),
    "doubled": partial(F.conv_transpose2d, stride=2, padding=1, output_padding=1),
    "apart": lambda x, w: F.conv_transpose2d(
        x, w[..., :1, :1], stride=3, output_padding=2
    ),
    "maximum": lambda x, _: F.max_pool2d(x, 3, 2, 1),
    "average": lambda x, _: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
}


@pytest.mark.parametrize("rows", [30, 18])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("halved", "apart")))
        for name in KEPT
    ],
)
def test_windows_that_ranks_do_not_share_alike(name: str, rows: int) -> None:
    """Of 30 or 18 rows, or half of them, or a third."""
    plan, args = planned(KEPT[name], rows=rows)
    assert not plan.result.decision.is_even
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all", "all_reduce"}
    check(plan, args)


@pytest.mark.parametrize("name", ["convolution", "doubled"])
def test_a_rank_without_rows(name: str) -> None:
    """The last of four has none of 9."""
    plan, args = planned(KEPT[name], rows=9)
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all", "all_reduce"}
    check(plan, args)


@pytest.mark.parametrize("columns", [8, 6, 5])
def test_windows_of_columns_that_a_rank_may_lack(columns: int) -> None:
    """One column of each row is looked up. Of 6 or 5 columns the last of four ranks has
    none, and the gradient is added up in windows of the rows all the same."""

    def fn(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(6), place].square().sum()

    torch.manual_seed(0)
    x = torch.randn(6, columns, 3, dtype=torch.float64, requires_grad=True)
    place = torch.randint(-columns, columns, (6,))
    options = {"mesh": "w=4,h=2", "in_specs": [("h", "w", None), None]}
    plan = fxpar.plan(fn, x, place, grad=True, mode="propagate", **options)
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    check(plan, (x, place))


def test_what_a_rank_without_windows_makes_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Builder, "first_rows", lambda build, x, sizes: x)
    with pytest.raises((AssertionError, RuntimeError)):
        check(*planned(KEPT["maximum"], rows=18))


@pytest.mark.parametrize("name", ["convolution", "halved"])
def test_an_odd_number_shared_alike_goes_by_permutes(name: str) -> None:
    plan, args = planned(KEPT[name], mesh="h=3", rows=18)
    assert plan.result.decision.is_even
    assert {c.kind for c in plan.collectives} == {"permute", "all_reduce"}
    check(plan, args)


# Parts of a dim, of which some share a row, or ranks have unlike numbers.
PARTS: dict[str, Op] = {
    "averages": lambda x, _: F.adaptive_avg_pool2d(x, (7, 5)),
    "more than rows": lambda x, _: F.adaptive_avg_pool2d(x, (20, 5)),
    "alike, unlike shares": lambda x, _: F.adaptive_avg_pool2d(x, (6, 4)),
    "maxima": lambda x, _: F.adaptive_max_pool2d(x, (9, 5)),
    "maxima, alike": lambda x, _: F.adaptive_max_pool2d(x, (8, 6)),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("averages", "h=4"),
        ("maxima", "h=4"),
        ("maxima, alike", "h=4"),
        *(
            pytest.param(name, mesh, marks=pytest.mark.slow)
            for name, mesh in (
                ("more than rows", "h=4"),
                ("alike, unlike shares", "h=4"),
                ("averages", "h=2,w=2"),
                ("maxima", "h=2,w=2"),
            )
        ),
    ],
)
def test_parts_of_a_dim(name: str, mesh: str) -> None:
    space = (None, None, "h", "w") if "w" in mesh else None
    plan, args = planned(PARTS[name], mesh=mesh, space=space)
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all", "all_reduce"}
    check(plan, args)


def two_layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The second has 14 rows, as four ranks do not share alike."""
    return F.conv2d(F.avg_pool2d(F.conv2d(x, w), 2, 1).relu(), w, padding=1)


def test_layers_one_after_the_other() -> None:
    plan, args = planned(two_layers)
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all", "all_reduce"}
    check(plan, args)


def test_what_is_far_is_looked_up_by_all() -> None:
    """Positions of a table are no rows near their own."""
    places = torch.arange(0, 32) * 7 % 32
    for far in (places, torch.arange(31, -1, -1), torch.arange(16, 32)):
        assert near_rows.reach_of(far, 64) is None
    assert near_rows.reach_of(torch.arange(64) // 2, 32) == Reach(1, 2)
    # Several rows for each: a third of all is not near, nor are rows of one window.
    several = torch.arange(16).unsqueeze(1) * 2 + torch.arange(4)
    assert near_rows.reach_of(several, 36) == Reach(2, span=4)
    assert near_rows.reach_of(several, 34).span == 4
    assert near_rows.reach_of(several.T, 36) is None
    assert near_rows.reach_of(torch.randperm(64).reshape(16, 4), 64) is None
    clamped = (torch.arange(32) - 1).clamp_min(0)
    assert near_rows.reach_of(clamped, 32) == Reach(1, first=-1, head=(0,), tail=(30,))


def trained(mesh: str) -> Any:
    """A convolution without padding between interpolations, compiled."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(F.conv2d(x, w), scale_factor=2, mode="bilinear")
        return F.max_pool2d(F.pad(y, (1, 1, 1, 1), "replicate"), 3, 2).square().mean()

    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 16, 12).double(), torch.randn(3, 3, 3, 3).double()
    args = x.requires_grad_(), w.requires_grad_()
    torch._dynamo.reset()
    hints = {"x": (None, None, mesh[0], None)}
    options = {"mesh": mesh, "plan": "propagate", "codegen": "eager", "hints": hints}
    loss = torch.compile(fn, backend="fxpar", options=options)(*args)
    loss.backward()
    return loss.detach(), x.grad, w.grad


@pytest.mark.multiprocess
def test_on_ranks() -> None:
    one = ranks_of("h=1").run(trained, "h=1")[0]
    for found in ranks_of("h=2").run(trained, "h=2"):
        torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9)
