"""In local mode every rank has the numbers that DistributedDataParallel gives it: its
own losses and results, means of gradients, buffers. Each loop of ``helpers.loops`` runs
under both on the same ranks; every value is compared, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.as_ddp import INDUCED, UNREDUCED, Cell, by_rank, check
from tests.helpers.loops import LOOPS

pytestmark = pytest.mark.multiprocess

PLAIN = Cell()
CELLS = [
    Cell(mesh, codegen, plan, sharded)
    for mesh in ("dp=2", "dp=2,tp=2", "dp=2,cp=2", "dp=2,ep=2")
    for codegen in ("eager", "inductor")
    for sharded in (False, True)
    for plan in ("propagate", "search")
]
# What is quick on other cells than the first: uneven rows, buffers, breaks, branches.
QUICK = {
    Cell("dp=2", "inductor"): ["uneven_rows"],
    Cell("dp=2", sharded=True): ["uneven_rows", "batch_norm", "rows_behind_a_break"],
    Cell("dp=2,tp=2"): ["halves_by_chunk", "other_parameters_on_each_rank"],
    Cell("dp=2,tp=2", plan="search"): ["attention"],
    Cell("dp=2,tp=2", sharded=True): ["uneven_rows"],
    Cell("dp=2,cp=2"): ["lengths_that_change"],
    Cell("dp=2,ep=2"): ["uneven_rows", "running_mean_assigned"],
}


def case(name: str, cell: Cell, quick: bool) -> Any:
    marks = [] if quick else [pytest.mark.slow]
    return pytest.param(name, cell, id=f"{name}-{cell}", marks=marks)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        case(name, cell, cell == PLAIN or name in QUICK.get(cell, ()))
        for cell in CELLS
        for name, loop in LOOPS.items()
        if not (cell.sharded and loop.whole)
    ],
)
def test_a_loop(name: str, cell: Cell) -> None:
    check("loops", name, cell)


# Random loops. A seed is a whole reproduction: ``str(RandomRows(seed))`` shows it.

RANDOM = [
    (f"{kind}/{1000 * i + seed}", cell)
    for i, cell in enumerate(CELLS)
    for kind in ("rows", "ops")
    for seed in range(40 if cell == PLAIN else 4)
]
QUICK_SEEDS = [f"{kind}/{seed}" for kind in ("rows", "ops") for seed in range(4)]


@pytest.mark.parametrize(
    ("name", "cell"), [case(name, cell, name in QUICK_SEEDS) for name, cell in RANDOM]
)
def test_a_random_loop(name: str, cell: Cell) -> None:
    check("random_loops", name, cell)


# The comparison itself: what is equal, and what is not, without fxpar.


@pytest.mark.parametrize("name", [n for n, loop in LOOPS.items() if not loop.eager])
def test_a_compiled_model_in_ddp_is_equal(name: str) -> None:
    check("loops", name, Cell(side=INDUCED))


@pytest.mark.parametrize("name", QUICK_SEEDS)
def test_a_compiled_random_loop_in_ddp_is_equal(name: str) -> None:
    check("random_loops", name, Cell(side=INDUCED))


@pytest.mark.parametrize("name", [n for n, loop in LOOPS.items() if not loop.alone])
def test_gradients_that_are_not_averaged_are_seen(name: str) -> None:
    assert by_rank("loops", name, Cell(side=UNREDUCED))
