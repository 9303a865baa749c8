"""Convolutions and pools whose rows or columns are split: the numbers of one device,
and no more sent than the rows around a shard."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.sharding import shift_messages

ROW = 8  # bytes of an element


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def planned(fn: Any, *args: Any, mesh: str, x: tuple, **options: Any) -> Any:
    specs = [x, *[None] * (len(args) - 1)]
    options = {"mode": "propagate", **options}
    return fxpar.plan(fn, *args, mesh=mesh, in_specs=specs, **options)


def matches(plan: Any, *args: Any) -> None:
    """Results and every gradient are those of one device."""
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def permuted(plan: Any) -> list[int]:
    return [c.bytes for c in plan.collectives if c.kind == "permute"]


def kinds(plan: Any) -> set[str]:
    return {c.kind for c in plan.collectives}


# Rows of an input of 16 that a convolution needs before each shard and behind it.
REACH = {
    "1": ({"kernel": 1}, 0, 0),
    "3": ({"kernel": 3, "padding": 1}, 1, 1),
    "5 of 2": ({"kernel": 5, "padding": 4, "dilation": 2}, 4, 4),
    "stride 2": ({"kernel": 3, "padding": 1, "stride": 2}, 1, 0),
    "7, stride 2": ({"kernel": 7, "padding": 3, "stride": 2}, 3, 2),
    "1, stride 2": ({"kernel": 1, "stride": 2}, 0, 0),
    "patches": ({"kernel": 4, "stride": 4}, 0, 0),
}


@pytest.mark.parametrize("name", REACH)
def test_a_convolution_sends_the_rows_around_a_shard(name: str) -> None:
    window, before, behind = REACH[name]
    window = dict(window)
    x, weight = draw(2, 3, 16, 6), draw(3, 3, window.pop("kernel"), 1)
    options = {key: (n, int(key != "padding")) for key, n in window.items()}
    if "padding" in options:
        options["padding"] = (window["padding"], 0)

    def fn(x, weight):
        return F.conv2d(x, weight, **options)

    plan = planned(fn, x, weight, mesh="rows=4", x=(None, None, "rows", None))
    row = 2 * 3 * 6 * ROW
    assert sum(permuted(plan)) == row * (before + behind)
    assert kinds(plan) <= {"permute", "all_gather"}  # the result is whole
    assert plan.result.decision.settled[-1].dims[2] == ("rows",)
    # A shard has four rows: the halo of a neighbour, each way.
    assert len(permuted(plan)) == (before > 0) + (behind > 0)
    matches(plan, x, weight)


def test_a_halo_of_several_shards() -> None:
    x, weight = draw(1, 1, 8), draw(1, 1, 7)
    plan = planned(
        lambda x, w: F.conv1d(x, w, padding=3),
        *(x, weight),
        mesh="rows=4",
        x=(None, None, "rows"),
        grad=True,
    )
    assert Counter(permuted(plan)[:4]) == {2 * ROW: 2, ROW: 2}
    matches(plan, x, weight)


class Block(nn.Module):
    """The stem and one block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.first = nn.Conv2d(4, 4, 3, 2, 1)
        self.second = nn.Conv2d(4, 8, 3, 1, 1, groups=2)
        self.short = nn.Conv2d(4, 8, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x))))
        y = self.second(F.relu(self.first(x))) + self.short(x)
        return y.mean((2, 3)).square().sum()


class UNet(nn.Module):
    """Down and up again, with averages between; in two or three dims."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, up = (
            (nn.Conv2d, nn.ConvTranspose2d)
            if dims == 2
            else (nn.Conv3d, nn.ConvTranspose3d)
        )
        self.down = conv(2, 3, 3, 1, 1)
        self.low = conv(3, 4, 3, 1, 2, dilation=2)
        self.up = up(4, 3, 4, 2, 1)
        self.last = conv(6, 1, 5, padding="same")
        self.pool = nn.AvgPool2d(2) if dims == 2 else nn.MaxPool3d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = F.gelu(self.down(x))
        low = F.gelu(self.low(self.pool(high)))
        return self.last(torch.cat([self.up(low), high], 1)).square().mean()


SPACE = {
    "batch and rows": (Block, (2, 3, 32, 16), "dp=2,h=2", ("dp", None, "h", None)),
    "rows and columns": (Block, (2, 3, 32, 32), "h=2,w=2", (None, None, "h", "w")),
    "both on columns": (Block, (1, 3, 16, 32), "h=2,w=2", (None, None, None, "w+h")),
    "one row each": (Block, (1, 3, 64, 16), "h=4", (None, None, "h", None)),
    "uneven batch": (Block, (3, 3, 32, 16), "dp=2,h=2", ("dp", None, "h", None)),
    "up and down": (
        *(lambda: UNet(2), (2, 2, 16, 16)),
        *("dp=2,h=2", ("dp", None, "h", None)),
    ),
    "corners of a volume": (
        *(lambda: UNet(3), (1, 2, 4, 8, 8)),
        *("h=2,w=2", (None, None, None, "h", "w")),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "rows and columns"))
        for name in SPACE
    ],
)
def test_a_model_split_along_space(name: str) -> None:
    torch.manual_seed(0)
    make, shape, mesh, lie = SPACE[name]
    model, x = make().double(), draw(*shape)
    lie = tuple(tuple(a.split("+")) if a else None for a in lie)
    plan = planned(model, x, mesh=mesh, x=fxpar.Spec(*lie), grad=True)
    matches(plan, x)
    assert kinds(plan) <= {"permute", "all_reduce"}
    sent = [
        sum(nbytes for _, nbytes in shift_messages.sent(op, strategy, plan.mesh))
        for op, strategy in zip(
            plan.result.decision.program.ops,
            plan.result.decision.strategies,
            strict=True,
        )
    ]
    again = sum(sent) - sum(permuted(plan))
    forward = (op for op in plan.result.decision.program.ops if sent[op.index])
    known = sum(sent[op.index] for op in forward if str(op.target) == CONVOLUTION)
    # A backward reads the rows that the forward has got; all else is priced as sent.
    assert 0 < again <= known


CONVOLUTION = "aten.convolution.default"


def test_space_is_split_where_it_is_asked_for_only() -> None:
    model, x = Block().double(), draw(4, 3, 32, 16)
    plan = fxpar.plan(model, x, mesh="dp=2,h=2", mode="propagate")
    assert not permuted(plan)
    assert all(
        spec.dims[2:] == ((),) * (len(spec.dims) - 2)
        for spec in plan.result.decision.settled
        if len(spec.dims) == 4
    )


# Windows of which a shard's are none of its own rows and a few around them.
WHOLE = {
    "one window": lambda x: F.conv2d(x, torch.ones(1, 1, 8, 3).double()),
}
WEIGHT = torch.randn(1, 1, 3, 3, dtype=torch.float64)


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole(name: str) -> None:
    x = draw(1, 1, 8, 8)
    lie = (None, None, "h", None)
    plan = planned(WHOLE[name], x, mesh="h=2", x=lie)
    assert kinds(plan) and not permuted(plan)
    matches(plan, x)


def test_inside_a_branch_nothing_is_sent() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: F.conv2d(x, WEIGHT, padding=1), torch.relu, (x,)
        )

    x = draw(1, 1, 8, 8)
    plan = planned(fn, x, mesh="h=2", x=(None, None, "h", None))
    assert not permuted(plan)
    matches(plan, x)


def test_rows_of_the_other_end_are_no_padding(monkeypatch: Any) -> None:
    """Without the constant over them, rows would come around the end."""
    monkeypatch.setattr("fxpar.sharding.ops.reads._fill_beyond", lambda call, x, *_: x)
    x, weight = draw(1, 1, 8), draw(1, 1, 3)
    plan = planned(
        lambda x, w: F.conv1d(x, w, padding=1),
        *(x, weight),
        mesh="h=2",
        x=(None, None, "h"),
    )
    with pytest.raises(AssertionError):
        matches(plan, x, weight)
