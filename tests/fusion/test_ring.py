"""Products next to collectives that go round in a ring: numbers and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpar.errors import ScheduleError
from fxpar.fusion.apply_schedule import apply
from fxpar.graph import collective_nodes
from fxpar.sharding import rank_ints
from tests.helpers.toys import Toy, all_gather, all_reduce, reduce_scatter

c10d = torch.ops._c10d_functional


def gathering(count: int) -> Toy:
    """Two products of what is gathered, one with an operand that is cut as it is, and
    the gathered value itself."""

    def program(x: Any, w: Any, v: Any, r: Any) -> Any:
        y = all_gather(x * 2, count)
        return F.relu(y @ w + r), (y @ v).T, y

    rows, columns = 3 * count, 2 * count
    return Toy(
        program,
        ("[tp, _]", (rows, 5)),
        ("[_, tp]", (5, columns)),
        ("[_, tp]", (5, columns)),
        ("[_, tp]", (rows, columns)),
        mesh=f"tp={count}",
    )


def scattering(count: int) -> Toy:
    def program(x: Any, w: Any, r: Any) -> Any:
        return reduce_scatter(F.relu(x) @ w * r, count) + 1

    rows, inner = 3 * count, 2 * count
    return Toy(
        program,
        ("[_, tp]", (rows, inner)),
        ("[tp, _]", (inner, 5)),
        ("[_, _]", (rows, 1)),
        mesh=f"tp={count}",
    )


def permutes(graph: Any) -> list[Any]:
    return graph.find_nodes(op="call_function", target=collective_nodes.permute)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_gather_in_a_ring(count: int, ways: int) -> None:
    toy = gathering(count)
    schedule = f"overlap(all_gather_into_tensor, [relu, mm_1], ring={ways})"
    after = toy.after(schedule, lowered=False)
    assert len(permutes(after)) == count - 1
    assert not after.find_nodes(op="call_function", target=collective_nodes.all_gather)
    toy.check(schedule)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_reduction_in_a_ring(count: int, ways: int) -> None:
    toy = scattering(count)
    schedule = f"overlap(relu, reduce_scatter_tensor, ring={ways})"
    after = toy.after(schedule, lowered=False)
    assert len(permutes(after)) == count - 1
    toy.check(schedule)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_reductions_of_a_ring(op: str) -> None:
    def program(x: Any) -> Any:
        made = c10d.reduce_scatter_tensor(torch.sin(x), op, 4, "fxpar:tp")
        return c10d.wait_tensor(made)

    toy = Toy(program, (f"[_, _] partial({op}: tp)", (8, 3)))
    toy.check("overlap(sin, reduce_scatter_tensor, ring=2)")


@pytest.mark.parametrize("ways", [1, 2])
def test_axes_in_another_order_than_the_mesh(ways: int) -> None:
    """Members stand in mesh order, parts in that of the axes: 0, 2, 1, 3."""

    def program(x: Any, w: Any) -> Any:
        return all_gather(x, 4, "dp+tp") @ w

    given = ("[tp+dp, _]", (8, 4)), ("[_, _]", (4, 4))
    toy = Toy(program, *given, mesh="dp=2,tp=2")
    graph = toy.after("", lowered=False)
    (gather,) = graph.find_nodes(op="call_function", target=collective_nodes.all_gather)
    gather.args = (*gather.args[:2], ("tp", "dp"))
    line = f"overlap(all_gather_into_tensor, mm, ring={ways})"
    parts = toy.parts()
    want, got = (
        toy.run(apply(text, graph, toy.mesh, lowered=True), parts)
        for text in ("", line)
    )
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_an_offset_that_goes_round() -> None:
    with rank_ints.as_rank(2):
        assert rank_ints.offset("tp=4", ("tp",), 1, 3) == 5
        assert rank_ints.offset("tp=4", ("tp",), 1, 3, 4) == 1
        assert rank_ints.offset("tp=4", ("tp",), -3, 0, 4) == 2


SCATTER = "reduce_scatter_tensor"
GATHER, PART = "all_gather_into_tensor", ("[tp, _]", (16, 8))


def contracted() -> Toy:
    """What is gathered is summed over."""

    def program(x: Any, w: Any) -> Any:
        return w @ all_gather(x)

    return Toy(program, PART, ("[_, _]", (8, 16)))


def drawn() -> Toy:
    def program(x: Any, w: Any) -> Any:
        y = x @ w
        seed = torch.ops.fxpar.seeds(1, torch.device("cpu"))
        size = list(y.shape)
        drawn = torch.ops.fxpar.random(size, seed[0], "rand", size, [0, 0])
        return reduce_scatter(y * drawn)

    return Toy(program, ("[_, tp]", (8, 8)), ("[tp, _]", (8, 4)))


def normed() -> Toy:
    def program(x: Any) -> Any:
        return reduce_scatter(torch.softmax(x, 0))

    return Toy(program, ("[_, _] partial(sum: tp)", (8, 4)))


def plain() -> Toy:
    def program(x: Any, w: Any) -> Any:
        return all_gather(x) @ w

    return Toy(program, PART, ("[_, _]", (8, 4)))


def summed() -> Toy:
    def program(x: Any, w: Any) -> Any:
        return all_reduce(x @ w)

    return Toy(program, ("[_, tp]", (8, 8)), ("[tp, _]", (8, 4)))


def alone() -> Toy:
    def program(x: Any, w: Any) -> Any:
        return all_gather(x, 1, "pp") @ w

    return Toy(program, ("[_, _]", (8, 8)), ("[_, _]", (8, 4)), mesh="pp=1,tp=4")


def gathered_last() -> Toy:
    def program(x: Any, w: Any) -> Any:
        return all_gather(x @ w)

    return Toy(program, ("[tp, _]", (8, 8)), ("[_, _]", (8, 4)))


@pytest.mark.parametrize(
    ("toy", "schedule", "why"),
    [
        (contracted, f"overlap({GATHER}, mm, ring=1)", "sums over the dim"),
        (drawn, f"overlap([mm, random], {SCATTER}, ring=1)", "counts by index"),
        (normed, "overlap(_softmax, reduce_scatter_tensor, ring=1)", "reads all"),
        (plain, f"overlap({GATHER}, mm, ring=3)", "ring is 3, not 1 or 2"),
        (plain, f"overlap({GATHER}, mm, ring=1, chunks=4)", "in parts of the ranks"),
        (plain, f"overlap({GATHER}, mm, ring=1, dim=1)", "in parts of the ranks"),
        (summed, "overlap(mm, all_reduce, ring=1)", "is no gather or reduce-scatter"),
        (alone, f"overlap({GATHER}, mm, ring=1)", "has no neighbour"),
        (gathered_last, f"overlap(mm, {GATHER}, ring=1)", "ends no ring"),
    ],
)
def test_what_a_ring_is_not_for(toy: Any, schedule: str, why: str) -> None:
    made = toy()
    before = str(made.before)
    with pytest.raises(ScheduleError, match=why):
        made.after(schedule)
    assert str(made.before) == before


def test_a_mean_in_float16_has_room() -> None:
    """Four times 60,000 is more than float16 holds."""

    def program(x: Any) -> Any:
        y = c10d.reduce_scatter_tensor(x * 2, "avg", 4, "fxpar:tp")
        return c10d.wait_tensor(y)

    given = "[_, _] partial(sum: tp)", (8, 4)
    toy = Toy(program, given, dtype=torch.float16)
    after = toy.after("overlap(mul, reduce_scatter_tensor, ring=2)", lowered=True)
    parts = [[torch.full((8, 4), 30000, dtype=torch.float16)] for _ in range(4)]
    for out in toy.run(after, parts):
        assert out.eq(60000).all()
