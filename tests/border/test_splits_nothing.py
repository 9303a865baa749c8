"""A plan that splits nothing although there are ranks: said, with the reason."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import fxpar
from fxpar import FxparWarning
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess


class GraphNetwork(nn.Module):
    """Messages along edges: rows are gathered and scattered by index."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, source, target):
        h = self.up(x)
        sums = torch.zeros_like(h).index_add(0, target, h[source])
        return self.down(sums.relu()).square().mean()


def said_of_stages() -> tuple[int, list[str]]:
    """Stages of the plan, and warnings."""
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    options = {"codegen": "eager", "mesh": "pp=2"}
    run = torch.compile(model, backend="fxpar", options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(torch.randn(8, 8)).sum().backward()
    texts = [str(w.message) for w in caught if w.category is FxparWarning]
    return len(fxpar.plans()[-1].stages), texts


def test_stages_split_the_work() -> None:
    for stages, texts in shared_pool(2).run(said_of_stages):
        assert (stages, texts) == (2, [])


def said(nodes: int, width: int) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GraphNetwork(width)
    edges = torch.randint(nodes, (2, 3 * nodes))
    run = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(torch.randn(nodes, width), *edges).backward()
    return [str(w.message) for w in caught if w.category is FxparWarning]


def test_a_plan_that_splits_nothing_is_said_once() -> None:
    first, second = shared_pool(2).run(said, 8, 4, env={"FXPAR_PLAN": "search"})
    (text,) = first
    assert re.match("graph[0-9]+: the plan splits nothing, all 2 ranks", text)
    assert "by the cost model every split takes longer" in text
    assert not second


def said_of_graphs() -> list[list[str]]:
    """Of two models of several graphs each."""
    torch._dynamo.reset()
    options = {"codegen": "eager"}
    texts = []
    for width in (4, 8):
        model = nn.Sequential(*(GraphPart(width) for _ in range(2)))
        run = torch.compile(model, backend="fxpar", options=options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for rows in (2, 3):
                run(torch.randn(rows, width)).sum().backward()
        messages = [str(w.message) for w in caught if w.category is FxparWarning]
        texts.append([text for text in messages if "splits nothing" in text])
    return texts


class GraphPart(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return x.relu()


def test_it_is_said_once_for_a_model() -> None:
    env = {"FXPAR_PLAN": "search", "FXPAR_MESH": "dp=2"}
    first, second = shared_pool(2).run(said_of_graphs, env=env)
    assert [len(texts) for texts in first] == [1, 1] and second == [[], []]


def test_shards_that_are_not_alike_are_no_warning() -> None:
    first, second = shared_pool(2).run(said, 7, 5, env={"FXPAR_PLAN": "propagate"})
    assert not first and not second


def test_a_plan_that_splits_is_silent() -> None:
    env = {"FXPAR_PLAN": "propagate"}
    assert shared_pool(2).run(said, 8, 4, env=env) == [[], []]
