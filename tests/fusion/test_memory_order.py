"""Verbs put contiguous values in the place of others: what goes by memory reads it as
it lay before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxpar.errors import ScheduleError
from tests.helpers.toys import Toy, all_gather, all_reduce, dropped

WHOLE = "[_, _]", (8, 4)
ROWS = "[tp, _]", (8, 4)
SUMMANDS = "[_, _] partial(sum: tp)", (8, 4)
GATHER = "all_gather_into_tensor"

# (program, what it is given, schedule): with the value as the verb gives it, a view of
# it is no view, and memory is in another order.
CASES: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "a view behind a cut": (
        lambda x: x.t().t().view(-1) * 2,
        WHOLE,
        "cut(t, axes=tp)",
    ),
    "a view behind an op behind a cut": (
        lambda x: (x.t() * 2).t().view(-1) + 1,
        WHOLE,
        "cut(t, axes=tp)",
    ),
    "a view in a region": (
        lambda x: (x.t() * 2).t().view(-1) + 1,
        WHOLE,
        "fuse([mul, t_1, view])\ncut(t, axes=tp)",
    ),
    "a view behind a reduction": (
        lambda x: all_reduce(x).t().t().view(-1) * 2,
        SUMMANDS,
        "reorder([t], all_reduce)",
    ),
    "a view behind chunks": (
        lambda x: (all_gather(x) * 2).t().t().view(-1) + 1,
        ROWS,
        f"overlap({GATHER}, t, chunks=2)",
    ),
    "a view behind a ring": (
        lambda x: (all_gather(x) * 2).t().t().view(-1) + 1,
        ROWS,
        f"overlap({GATHER}, t, ring=1)",
    ),
    "a view behind a gather": (
        lambda x: (all_gather(x) * 2).t().t().view(-1) + 1,
        ROWS,
        f"reorder([mul, t], {GATHER})",
    ),
    "strides": (
        lambda x: x.t().as_strided((4, 8), (1, 4)) * 2,
        WHOLE,
        "cut(t, axes=tp)",
    ),
    "numbers drawn in memory's order": (
        lambda x: torch.rand_like(x.t()),
        WHOLE,
        "cut(t, axes=tp)",
    ),
    "a mask drawn behind a reduction": (
        lambda x: dropped(all_reduce(x).t()),
        SUMMANDS,
        "reorder([t], all_reduce)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_by_memory(name: str) -> None:
    program, given, schedule = CASES[name]
    Toy(program, given).check(schedule)


def test_fake_values_are_those_of_now() -> None:
    toy = Toy(lambda x: (x.t() * 2).t() + 1, WHOLE)
    after = toy.after("cut(t, axes=tp)", lowered=False)
    (product,) = after.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert product.meta["val"].stride() == (8, 1)
    assert product.users and next(iter(product.users)).meta["val"].stride() == (1, 8)


def test_a_reader_of_the_old_value_is_left() -> None:
    """What read a value before another took its place reads it as it lies."""

    def program(x: Any) -> Any:
        t = x.t()
        return t.as_strided((4, 8), (1, 4)) * 2, t * 3

    toy = Toy(program, WHOLE)
    toy.check("cut(t, axes=tp, dim=0) -> part, ag\ndrop(ag)")


def test_strides_that_skip_memory() -> None:
    toy = Toy(lambda x: x[:, :2].as_strided((8, 2), (4, 1)) * 2, WHOLE)
    with pytest.raises(ScheduleError, match="by strides that skip memory"):
        toy.after("cut(slice_1, axes=tp)")
