"""The choice of what lies in slices: the best of all, by trying all."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.choose_schedule import begin, choose
from fxpar.fusion.sequence_parallel import Prices, Rows, cut, rows_of
from fxpar.fusion.varying_axes import varying
from fxpar.graph import collective_nodes
from fxpar.sharding.mesh import Mesh
from tests.helpers.machines import machine
from tests.helpers.toys import Toy, all_reduce

TP = ("tp",)


def lifted(toy: Toy) -> Any:
    return apply("", toy.before, toy.mesh, inputs=toy.specs, lowered=False)


def rows_in(toy: Toy) -> list[Rows]:
    graph = lifted(toy)
    return rows_of(graph, toy.mesh, TP, varying(graph))


def block(x: Any, w: Any, b: Any, r: Any) -> Any:
    """Two products over ranks, with a norm and a residual between."""
    y = torch.nn.functional.layer_norm(all_reduce(x @ w) + r, [4])
    z = torch.tanh(y * 2) @ w[:4] + 0 * x[:, :4]
    return (all_reduce(z) + y + b,)


BLOCK = Toy(
    block,
    ("[_, tp]", (8, 32)),
    ("[tp, _]", (32, 4)),
    ("[_]", (4,)),
    ("[_, _]", (8, 4)),
)


def test_rows_go_through_what_works_on_them() -> None:
    by_dim = {next(iter(rows.dims.values())): rows for rows in rows_in(BLOCK)}
    first, second = by_dim[0], by_dim[1]
    names = [op.name for op in first.ops]
    assert "native_layer_norm" in names and "add" in names
    assert len(first.reduced) == 2
    assert "native_layer_norm" not in [op.name for op in second.ops]


class Random:
    """A program of pointwise ops, sums and all-reduces, with random prices."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        count = self.random.randint(1, 2)
        given = [("[_, _] partial(sum: tp)", (8, 4))] * count + [("[_, _]", (8, 4))]
        self.toy = Toy(self.program, *given)
        self.seconds: dict[Any, float] = {}

    def program(self, *args: Any) -> Any:
        *summands, whole = args
        values = [whole]
        out = []
        for x in summands:
            values.append(all_reduce(x))
            for _ in range(self.random.randint(1, 3)):
                a, b = self.random.choice(values), values[-1]
                values.append(a + b if self.random.random() < 0.7 else torch.tanh(b))
            if self.random.random() < 0.5:
                out.append(values[-1].sum(0))
            if self.random.random() < 0.5:
                out.append(self.random.choice(values) @ whole[:4])
        return *out, values[-1]

    def price(self, *key: Any) -> float:
        if key not in self.seconds:
            self.seconds[key] = self.random.randint(0, 12) / 4
        return self.seconds[key]

    def prices(self) -> Prices:
        return Prices(
            lambda op, share: self.price("work", op) * share,
            lambda kind, value: self.price(kind, value),
            0.25,
        )


def seconds_of(rows: Rows, prices: Prices, sliced: frozenset[Any]) -> float | None:
    """What a choice costs, by its definition; None if it cannot be."""
    total = 0.0
    for op in rows.ops:
        total += prices.work(op, prices.share if op in sliced else 1.0)
        if op in sliced and op in rows.sums:
            total += prices.collective("all_reduce", op)
    for value in rows.reduced:
        kind = "reduce_scatter" if value in sliced else "all_reduce"
        total += prices.collective(kind, value)
    for value, dim in rows.dims.items():
        maker = rows.makers.get(value)
        made = value if value in rows.reduced else maker
        if made not in sliced:
            continue
        if dim is None:
            return None
        whole = [
            u
            for u in value.users
            if value not in rows.ops.get(u, ()) or u not in sliced
        ]
        if whole:
            total += prices.collective("all_gather", value)
    return total


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "seed",
    [*range(12), *(pytest.param(i, marks=pytest.mark.slow) for i in range(12, 40))],
)
def test_no_choice_is_better(seed: int, split: bool) -> None:
    """Of all, and of those that split every all-reduce."""
    case = Random(seed)
    for rows in rows_in(case.toy):
        prices = case.prices()
        found = cut(rows, prices, split=split)
        must = {v for v in rows.reduced if split and rows.dims[v] is not None}
        things = [*rows.ops, *rows.reduced]
        if len(things) > 12:
            continue
        chosen = frozenset([*found.sliced, *found.split])
        assert must <= chosen
        assert chosen.isdisjoint(found.unsplit)
        before = seconds_of(rows, prices, frozenset())
        after = seconds_of(rows, prices, chosen)
        assert before is not None and after is not None
        assert found.saved == pytest.approx(before - after, abs=1e-6)
        for size in range(len(things) + 1):
            for some in itertools.combinations(things, size):
                if not must.issubset(some):
                    continue
                other = seconds_of(rows, prices, frozenset(some))
                assert other is None or other >= after - 1e-6


def test_it_is_split_where_that_pays() -> None:
    graph = lifted(BLOCK)
    chosen = choose(begin(graph, BLOCK.mesh, machine()))
    assert (
        len(
            chosen.graph.find_nodes(
                op="call_function", target=collective_nodes.all_reduce
            )
        )
        < 2
    )
    assert chosen.seconds[1] < chosen.seconds[0]
    BLOCK.check(str(chosen.schedule))


def test_what_does_not_pay_is_told() -> None:
    """Two results that are read whole are two gathers, for one all-reduce."""
    toy = Toy(two, *BLOCK_SUM)
    quick = replace(machine(), bandwidth=9e9)
    chosen = choose(begin(lifted(toy), Mesh.parse("tp=4"), quick))
    assert not chosen.schedule
    assert chosen.seconds[0] == chosen.seconds[1]
    assert any("us more of communication" in text for text in chosen.near_misses), (
        chosen.near_misses
    )


def two(x: Any, r: Any) -> Any:
    y = all_reduce(x)
    return y + r, y


BLOCK_SUM = ("[_, _] partial(sum: tp)", (64, 64)), ("[_, _]", (64, 64))
