"""The simulated step of a choice, candidates ranked by it, and a walk in it."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import fxpar
from fxpar.sharding.cost.hardware_table import Hardware, Level
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.search.formulate import Formulation, cost_of
from fxpar.sharding.search.run_search import (
    SearchOptions,
    SearchResult,
    discounted,
    search,
)
from fxpar.sharding.solver import evaluate
from tests.helpers.machines import machine
from tests.helpers.programs import batch, mlp

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from random_walk import Moves, walk
from simulated_choice import Overlap

MESH = "dp=2,tp=2"


def started(bandwidth: float = 1e10) -> Hardware:
    """As ``machine``, but kernels take time to start, and none to send."""
    levels = (Level(0, bandwidth, 1e-8, 1e-7),)
    return replace(machine(), launch=1e-5, levels=levels, beside=0.0)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    """A search of two layers, forward and backward, on two axes."""
    plan = fxpar.plan(mlp(2), batch(), mesh=MESH, mode="replicate", grad=True)
    program = plan.result.decision.program
    return search(program, Mesh.parse(MESH), SearchOptions(started()), {})


def random_choices(found: Formulation, seed: int, count: int) -> list[list[int]]:
    """Choices that nothing forbids, some proposals apart."""
    choice = list(Overlap(found, [0] * len(found.nodes)).choice)
    moves, out = Moves(found, choice, seed), []
    while len(out) < count:
        changes = moves.propose()
        if moves.allowed(changes):
            for node, k in changes.items():
                choice[node] = k
            out.append(list(choice))
    return out


def additive(found: Formulation, choice: Sequence[int]) -> float:
    return evaluate(found.problem, choice)[0] + found.launches


# The simulated step


def test_a_step_by_hand() -> None:
    """Two products whose sums are reduced, then what reads the first and the second."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        a, b = x @ w, x @ v
        return torch.relu(a) * 2, F.softmax(b, 1)

    args = [torch.randn(shape) for shape in ((8, 16), (16, 4), (16, 64))]
    specs = [(None, "x"), ("x", None), ("x", None)]
    plan = fxpar.plan(fn, *args, mesh="x=2", mode="propagate", in_specs=specs)
    decision = plan.result.decision
    program = decision.program
    asked = SearchOptions(started(2e7))  # nothing hides the second
    found = search(program, Mesh.parse("x=2"), asked, {}).formulation
    choice = cost_of(found, decision.strategies).choice
    step = Overlap(found, choice)
    first, second, *rest = [i for i, n in enumerate(found.nodes) if n.kind == "op"]
    names = [program.ops[found.nodes[i].of].name for i in (first, second, *rest)]
    takes = {
        i: float(found.problem.costs[i][choice[i]]) for i in (first, second, *rest)
    }
    paid = [
        (i, float(found.problem.tables[t][choice[i], choice[j]]))
        for i, j, t in found.problem.edges
        if found.problem.tables[t][choice[i], choice[j]] > 0
    ]
    assert [i for i, _ in paid] == [first, second], names
    launch = 1e-5
    ran = takes[first] + launch
    there = ran + paid[0][1]
    ran += takes[second] + launch
    also = max(ran, there) + paid[1][1]
    softmax = [i for i in rest if names[i - first].startswith(("_softmax", "amax"))][0]
    for i in rest:
        ran = max(ran, also if i >= softmax else there)
        ran += takes[i] + (launch if i in (rest[0], softmax) else 0.0)
    assert step.seconds == pytest.approx(ran, rel=1e-12)
    assert step.seconds < additive(found, choice) - 1e-9


def test_gradients_are_reduced_beside_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each by itself where buckets are full."""
    monkeypatch.setattr("fxpar.sharding.cost.collectives.FULL", 1)
    plan = fxpar.plan(mlp(2), batch(), mesh="dp=2", mode="propagate", grad=True)
    decision = plan.result.decision
    found = search(decision.program, Mesh.parse("dp=2"), SearchOptions(started()), {})
    choice = cost_of(found.formulation, decision.strategies).choice
    form, problem = found.formulation, found.formulation.problem
    step = Overlap(form, choice)
    sent: dict[int, float] = {}
    for (i, j, t), free in zip(problem.edges, form.hidden, strict=True):
        if problem.tables[t][choice[i], choice[j]] > 0:
            assert free, "data parallelism waits for no collective"
            sent[i] = sent.get(i, 0.0) + float(problem.tables[t][choice[i], choice[j]])
    assert len(sent) >= 8
    now = link = 0.0
    for i, node in enumerate(form.nodes):
        if node.kind == "op":
            now += float(problem.costs[i][choice[i]]) + form.launches_of(node.of)
            if i in sent:
                link = max(link, now) + sent[i]
    assert step.seconds == pytest.approx(max(now, link), rel=1e-12)


def test_on_one_stream_a_step_is_the_cost_of_the_problem(found: SearchResult) -> None:
    form = found.formulation
    for choice in random_choices(form, 0, 10):
        alone = Overlap(form, choice, overlap=False).seconds
        assert alone == pytest.approx(additive(form, choice), rel=1e-9)
        assert Overlap(form, choice).seconds <= alone * (1 + 1e-9)


def test_changes_give_what_a_new_simulation_gives(found: SearchResult) -> None:
    form = found.formulation
    chance = random.Random(1)
    step = Overlap(form, found.solution.choice)
    for choice in random_choices(form, 1, 60):
        changes = {i: k for i, k in enumerate(choice) if step.choice[i] != k}
        expected = Overlap(form, choice).seconds
        before = step.seconds
        assert step.seconds_with(changes) == expected
        assert step.seconds == before
        kind = chance.randrange(3)
        if kind:
            kept = changes if kind == 1 else {}
            assert step.change(kept) == (expected if kind == 1 else before)
    assert step.change({}) == Overlap(form, step.choice).seconds


@pytest.mark.parametrize(
    ("mesh", "whole"),
    [
        pytest.param("dp=2", False, marks=pytest.mark.slow),
        pytest.param("dp=2", True, marks=pytest.mark.slow),
        ("dp=4", True),
    ],
)
def test_a_step_costs_what_is_predicted_of_it(
    mesh: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Llama on cores that ranks share, before a schedule; gradients of whole
    parameters are reduced in buckets."""
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu:2")
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model, ids = LlamaForCausalLM(config), torch.randint(0, 1024, (4, 64))
    hints = {n: (None,) * p.dim() for n, p in model.named_parameters()}
    plan = fxpar.plan(
        model,
        mesh=mesh,
        mode="search",
        grad=True,
        schedule="none",
        hints=hints if whole else None,
        input_ids=ids,
        labels=ids,
    )
    search = plan.result.decision.search
    simulated = Overlap(search.formulation, search.solution.choice).seconds
    assert simulated == pytest.approx(plan.predicted.seconds, rel=0.05)


# The walk


def test_a_walk_is_never_worse_and_the_same_again(found: SearchResult) -> None:
    form = found.formulation
    start = random_choices(form, 2, 40)[-1]
    one, again = (walk(form, start, 300, seed=3) for _ in range(2))
    other = walk(form, start, 300, seed=4)
    assert one == again != other
    assert one.seconds < one.start == Overlap(form, start).seconds
    assert Overlap(form, one.choice).seconds == one.seconds
    assert np.isfinite(evaluate(form.problem, one.choice)[0])
    assert walk(form, one.choice, 0).choice == one.choice
    hot = walk(form, one.choice, 100, heat=1e9)  # anything is accepted
    assert hot.accepted > 10 and hot.seconds <= hot.start


def test_a_walk_stays_within_memory(
    found: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, start = found.formulation, found.solution.choice
    limit = evaluate(form.problem, start)[1] * 1.2
    peaks: list[float] = []
    change = Overlap.change

    def noted(step: Overlap, changes: dict[int, int]) -> float:
        seconds = change(step, changes)
        peaks.append(evaluate(form.problem, step.choice)[1])
        return seconds

    monkeypatch.setattr(Overlap, "change", noted)
    hot = 1e9  # anything is accepted
    free = replace(form, problem=replace(form.problem, limit=None))
    walk(free, start, 100, heat=hot)
    assert max(peaks) > limit
    peaks.clear()
    tight = replace(form, problem=replace(form.problem, limit=limit))
    assert walk(tight, start, 100, heat=hot).accepted > 10
    assert max(peaks) <= limit * (1 + 1e-9)


def test_proposals_change_layers_together_and_pass_strategies_on(
    found: SearchResult,
) -> None:
    form = found.formulation
    moves = Moves(form, list(found.solution.choice))
    assert any(len(group) > 1 for group in moves.alike.values())
    for _ in range(50):
        group = moves._layers()
        assert len(set(group.values())) == 1
        assert set(group) == set(moves.alike[next(iter(group))])
    several = 0
    for _ in range(50):
        passed = list(moves._passed())
        several += len(passed) > 1
        near = {other for node in passed for other, *_ in moves.beside[node]}
        assert set(passed[1:]) <= near | {m for n in near for m in moves.together[n]}
    assert several > 10


def test_what_compute_may_hide_is_cheaper(found: SearchResult) -> None:
    form, problem = found.formulation, found.formulation.problem
    cheap = discounted(form, 0.1)
    for choice in random_choices(form, 8, 20):
        aside = [
            float(problem.tables[t][choice[i], choice[j]])
            for (i, j, t), free in zip(problem.edges, form.hidden, strict=True)
            if free
        ]
        assert sum(aside) > 0
        less = evaluate(problem, choice)[0] - evaluate(cheap, choice)[0]
        assert less == pytest.approx(0.9 * sum(aside))
