"""The minimum cut that parts forward and backward: the one that networkx finds."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import networkx
import pytest
import torch
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function

from fxpar._fast import min_cut
from fxpar._fast.min_cut import minimum_cut, quick_min_cut
from tests.helpers.patched import needs_patches

pytestmark = needs_patches

S, T = "source", "sink"


def graph_of(*edges: tuple[str, str, float]) -> Any:
    graph = networkx.DiGraph()
    for a, b, capacity in edges:
        graph.add_edge(a, b, capacity=capacity)
    return graph


def a_graph(seed: int) -> Any:
    """As torch makes them: a program of nodes with two ends each, some that must be
    there and some that must not be saved; equal sizes, so that many cuts are least."""
    draw = random.Random(seed)
    count = draw.randint(2, 40)
    graph = networkx.DiGraph()
    graph.add_node(S)
    graph.add_node(T)
    for i in range(count):
        size = draw.choice([0, 1, 1, 2, 3, 8, 2**40, 4.0, math.inf])
        graph.add_edge(f"{i}_in", f"{i}_out", capacity=size)
        if draw.random() < 0.3:
            graph.add_edge(S, f"{i}_in", capacity=math.inf)
        if draw.random() < 0.2:
            graph.add_edge(f"{i}_out", T, capacity=math.inf)
        if draw.random() < 0.1:
            graph.add_edge(f"{i}_in", T, capacity=draw.choice([2, math.inf]))
        for j in draw.sample(range(i + 1, count), min(2, count - i - 1)):
            graph.add_edge(f"{i}_out", f"{j}_in", capacity=math.inf)
    return graph


@pytest.mark.parametrize("seeds", [range(150), range(150, 300)])
def test_of_all_least_cuts_the_same(seeds: range) -> None:
    finite = 0
    for seed in seeds:
        graph = a_graph(seed)
        try:
            want = networkx.minimum_cut(graph, S, T)
        except networkx.NetworkXUnbounded:
            assert minimum_cut(graph, S, T) is None
            continue
        value, (early, late) = minimum_cut(graph, S, T) or (math.nan, (set(), set()))
        assert (value, (early, late)) == want, seed
        finite += value > 0
    assert finite > len(seeds) // 5


def test_an_edge_without_capacity_has_no_limit() -> None:
    graph = graph_of((S, "a", 3), ("b", T, 2))
    graph.add_edge("a", "b")
    assert minimum_cut(graph, S, T) == networkx.minimum_cut(graph, S, T)


def test_a_flow_is_sent_back() -> None:
    """The shortest way takes what a larger flow needs elsewhere."""
    graph = graph_of(
        *((S, "a", 1), (S, "b", 1), ("a", "c", 1), ("a", "d", 1)),
        *(("b", "e", 1), ("e", "c", 1), ("d", "f", 1), ("f", T, 1), ("c", T, 1)),
    )
    assert minimum_cut(graph, S, T) == networkx.minimum_cut(graph, S, T)
    assert networkx.minimum_cut(graph, S, T)[0] == 2


@pytest.mark.parametrize(
    "graph",
    [
        graph_of((S, "a", math.inf), ("a", T, math.inf)),
        graph_of((S, "a", 1), ("a", T, 0.5)),
        graph_of((S, "a", 1)),
    ],
    ids=["of no finite cut", "of fractions", "of no sink"],
)
def test_others_are_left_to_networkx(graph: Any) -> None:
    assert minimum_cut(graph, S, T) is None
    by_networkx = mock.Mock(return_value="networkx")
    with (
        mock.patch.object(networkx, "minimum_cut", by_networkx),
        min_cut._in_the_place_of_networkx(),
    ):
        assert networkx.minimum_cut(graph, S, T) == "networkx"
    assert by_networkx.call_args == mock.call(graph, S, T)


def test_other_ways_to_ask_are_left_to_networkx() -> None:
    graph = graph_of((S, "a", 1), ("a", T, 2))
    with min_cut._in_the_place_of_networkx():
        for how in ({"capacity": "capacity"}, {"flow_func": None}):
            assert networkx.minimum_cut(graph, S, T, **how)[0] == 1
    assert networkx.minimum_cut(graph, S, T)[0] == 1


def test_torch_parts_by_it() -> None:
    """A program is parted as it is by networkx."""

    def parts(x: torch.Tensor, w: torch.Tensor) -> list[str]:
        codes: list[str] = []

        def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
            codes.append(gm.print_readable(print_output=False))
            return gm

        def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.relu(x @ w).cos().sin() + x
            return x.sum()

        part = partitioners.min_cut_rematerialization_partition
        aot_function(program, keep, keep, part)(x, w).backward()
        return codes

    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    want = parts(x, w)
    with quick_min_cut():
        assert parts(x, w) == want
    assert len(want) == 2
