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
    for plan in ("search", "propagate")
]
# What is quick: with the default settings, but op by op, a loop of each mechanism that
# is not one of tests/border; on the other cells uneven rows, buffers, breaks.
QUICK = {
    PLAIN: [
        "contrastive",
        "rows_behind_a_break",
        "lengths_that_change",
        "parameter_in_two_graphs",
        "other_parameters_on_each_rank",
        "one_rank_breaks_its_graph",
    ],
    Cell("dp=2", "inductor"): ["uneven_rows"],
    Cell("dp=2", plan="propagate", sharded=True): ["batch_norm"],
    Cell("dp=2,tp=2", plan="propagate"): ["halves_by_chunk"],
}


def case(name: str, cell: Cell, quick: bool) -> Any:
    marks = [] if quick else [pytest.mark.slow]
    return pytest.param(name, cell, id=f"{name}-{cell}", marks=marks)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        case(name, cell, name in QUICK.get(cell, ()))
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cell"), RANDOM, ids=str)
def test_a_random_loop(name: str, cell: Cell) -> None:
    check("random_loops", name, cell)


# The comparison itself: what is equal, and what is not, without fxpar.
QUICK[Cell(side=INDUCED)], QUICK[Cell(side=UNREDUCED)] = [], ["pairs_by_steps"]


def cases(cell: Cell, reason: str) -> list[Any]:
    """The loops that have no such reason to be left out."""
    names = [name for name, loop in LOOPS.items() if not getattr(loop, reason)]
    return [case(name, cell, name in QUICK[cell]) for name in names]


@pytest.mark.parametrize(("name", "cell"), cases(Cell(side=INDUCED), "eager"))
def test_a_compiled_model_in_ddp_is_equal(name: str, cell: Cell) -> None:
    check("loops", name, cell)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ops/0"])
def test_a_compiled_random_loop_in_ddp_is_equal(name: str) -> None:
    check("random_loops", name, Cell(side=INDUCED))


@pytest.mark.parametrize(("name", "cell"), cases(Cell(side=UNREDUCED), "alone"))
def test_gradients_that_are_not_averaged_are_seen(name: str, cell: Cell) -> None:
    assert by_rank("loops", name, cell)
