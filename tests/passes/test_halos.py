"""Convolutions and pools whose rows or columns are split: the numbers of one device,
and no more sent than the rows around a shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import PlanError
from fxpar.sharding import shift_messages
from fxpar.sharding.rules import window_dims

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
