"""The minimum cut is the one that networkx finds."""

from __future__ import annotations

import math
import random
from typing import Any

import networkx
import pytest

from fxpar.sharding.solver.min_cut import MinCut, minimum_cut

S, T = "source", "sink"


def graph_of(*edges: tuple[str, str, float]) -> Any:
    graph = networkx.DiGraph()
    for a, b, capacity in edges:
        graph.add_edge(a, b, capacity=capacity)
    return graph


def cut_of(graph: Any) -> MinCut | None:
    return minimum_cut(graph.edges(data="capacity", default=math.inf), S, T)


def by_package(graph: Any) -> Any:
    """The cut in the form of networkx."""
    least = cut_of(graph)
    assert least is not None
    return least.capacity, (set(graph) - least.late, least.late)


def a_graph(seed: int) -> Any:
    """As torch makes them: a program of nodes with two ends each, some that must be
    there and some that must not be saved; equal sizes, so that many cuts are least."""
    draw = random.Random(seed)
    count = draw.randint(2, 40)
    graph = networkx.DiGraph()
    graph.add_node(S)
    graph.add_node(T)
    for i in range(count):
        size = draw.choice([0, 1, 1, 2, 3, 8, 2**20, 4.0, math.inf])
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


@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 300), marks=pytest.mark.slow)]
)
def test_of_all_least_cuts_the_same(seeds: range) -> None:
    finite = 0
    for seed in seeds:
        graph = a_graph(seed)
        try:
            want = networkx.minimum_cut(graph, S, T)
        except networkx.NetworkXUnbounded:
            assert cut_of(graph) is None
            continue
        assert by_package(graph) == want, seed
        # What the cut of the reversed graph leaves with its sink.
        early = networkx.minimum_cut(graph.reverse(), T, S)[1][1]
        least = cut_of(graph)
        assert least is not None and least.early == early, seed
        finite += want[0] > 0
    assert finite > len(seeds) // 5


def test_an_edge_without_capacity_has_no_limit() -> None:
    graph = graph_of((S, "a", 3), ("b", T, 2))
    graph.add_edge("a", "b")
    assert by_package(graph) == networkx.minimum_cut(graph, S, T)


@pytest.mark.parametrize("scale", [2.0**-40, 0.1, 2.0**60])
def test_capacities_are_of_any_unit(scale: float) -> None:
    for seed in range(20):
        graph = a_graph(seed)
        arcs = [*graph.edges(data="capacity")]
        scaled = [(*ends, size * scale) for *ends, size in arcs]
        want, least = cut_of(graph), minimum_cut(scaled, S, T)
        if want is None or least is None:
            assert want is least
            continue
        total = sum(size for *_, size in scaled if size != math.inf)
        rounded = len(arcs) * total / 2**28
        assert least.capacity == pytest.approx(want.capacity * scale, abs=rounded)
        if scale != 0.1:
            assert least == (want.capacity * scale, *want[1:]), seed


def test_without_a_finite_cut_there_is_none() -> None:
    assert cut_of(graph_of((S, "a", math.inf), ("a", T, math.inf))) is None
