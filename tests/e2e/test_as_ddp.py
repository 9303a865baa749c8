"""In local mode every rank has the numbers that DistributedDataParallel gives it: its
own losses and results, means of gradients, buffers. Each loop of ``helpers.loops`` runs
under both on the same ranks; every value is compared, in float64."""

from __future__ import annotations

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


def is_quick(name: str, cell: Cell) -> bool:
    return cell == PLAIN or name in QUICK.get(cell, ())


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        pytest.param(
            *(name, cell),
            id=f"{name}-{cell}",
            marks=[] if is_quick(name, cell) else [pytest.mark.slow],
        )
        for cell in CELLS
        for name, loop in LOOPS.items()
        if not (cell.sharded and loop.whole)
    ],
)
def test_a_loop(name: str, cell: Cell) -> None:
    check("loops", name, cell)


# The comparison itself: what is equal, and what is not, without fxpar.


@pytest.mark.parametrize("name", [n for n, loop in LOOPS.items() if not loop.eager])
def test_a_compiled_model_in_ddp_is_equal(name: str) -> None:
    check("loops", name, Cell(side=INDUCED))


@pytest.mark.parametrize("name", [n for n, loop in LOOPS.items() if not loop.alone])
def test_gradients_that_are_not_averaged_are_seen(name: str) -> None:
    assert by_rank("loops", name, Cell(side=UNREDUCED))
