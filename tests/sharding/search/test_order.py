"""What a search counts for a plan, and what the simulation of the lowered plan says."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
import fxpar.planning
from fxpar.errors import PlanError
from fxpar.passes.localize import insert_reshards, localize
from fxpar.passes.order.delay_work import sink_waits
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.simulate_step import Timeline, simulate
from fxpar.sharding.cost.hardware_table import BUILT_IN
from fxpar.sharding.reshard.route import connect
from fxpar.sharding.search import search_space
from fxpar.sharding.search.formulate import cost_of, decode
from fxpar.sharding.solver import Infeasible, evaluate
from tests.helpers.mixed_programs import MixedProgram


def test_no_gather_widens_a_small_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 columns a rank instead of 16 start up in the same time."""
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    x = torch.randn(32, 1024, dtype=torch.float64)
    w = torch.randn(1024, 16, dtype=torch.float64)
    plan = fxpar.plan(
        torch.mm,
        x,
        w,
        mesh="dp=2,tp=2",
        in_specs=[("dp", None), (None, "tp")],
        mode="search",
    )
    assert not plan.collectives
    torch.testing.assert_close(plan.simulate(x, w), x @ w)


@pytest.mark.parametrize("machine", [m.name for m in BUILT_IN])
def test_splitting_a_matmul_never_prolongs_it(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", machine)
    x = torch.empty(32, 1024, dtype=torch.float64, device="meta")
    w = torch.empty(1024, 16, dtype=torch.float64, device="meta")
    took = [
        fxpar.plan(
            torch.mm, x, w, mesh="tp=8", in_specs=specs, mode="propagate"
        ).predicted.compute
        for specs in ([None, (None, None)], [(None, None), (None, "tp")])
    ]
    assert took[1] <= took[0]


# What random plans of small programs are made of: (function, shapes from m, k, n).
PROGRAMS: list[tuple[Callable[..., Any], Callable[..., list[tuple[int, ...]]]]] = [
    (lambda a, b: a @ b, lambda m, k, n: [(m, k), (k, n)]),
    (lambda x, a, b: (x @ a).relu() @ b, lambda m, k, n: [(m, k), (k, n), (n, k)]),
    (lambda x, a, b: x @ a + b, lambda m, k, n: [(m, k), (k, n), (n,)]),
    (lambda x, a: (x @ a).softmax(-1), lambda m, k, n: [(m, k), (k, n)]),
    (lambda x, a: (x.t() + a).relu(), lambda m, k, n: [(m, k), (k, m)]),
    (lambda x, a: ((x * a).sum(1), x.mean(0)), lambda m, k, n: [(m, k), (m, k)]),
    (lambda x, a, b: F.gelu(x @ a) * (x @ b), lambda m, k, n: [(m, k), *[(k, n)] * 2]),
]


def at_random(rng: random.Random, plan: fxpar.planning.TracedPlan) -> tuple[int, ...]:
    """A choice of the solver: a random strategy for every op, well connected."""
    found = plan.result.decision.search
    while True:
        strategies = [
            rng.choice([*search_space.strategies(op.rule, found.mesh).values()])
            for op in found.formulation.program.ops
        ]
        with contextlib.suppress(Infeasible, PlanError):
            return cost_of(found.formulation, strategies, 1.0).choice


def lowered(plan: fxpar.planning.TracedPlan, choice: Sequence[int]) -> Timeline:
    """The plan that a choice is, simulated as ``plan.predicted`` is."""
    result = plan.result
    found, graph = result.decision.search, result.normalized
    strategies, settled = decode(found.formulation, choice)
    edges = connect(result.decision.program, strategies, settled, found.mesh)
    decision = replace(
        result.decision,
        strategies=tuple(strategies),
        settled=tuple(settled),
        edges=edges,
    )
    fake_mode = next(iter(graph.nodes)).meta["val"].fake_mode
    local = localize(insert_reshards(graph, decision), decision, fake_mode)
    sink_waits(local)
    return simulate(as_run(local), found.mesh, plan.hardware)


def ranking(numbers: Sequence[float]) -> list[float]:
    """Places by size, equals at the mean of theirs."""
    order = sorted(numbers)
    first = {x: i for i, x in reversed(list(enumerate(order)))}
    return [first[x] + (order.count(x) - 1) / 2 for x in numbers]


# Of each program: the least rank correlation, and the least part of the simulated
# seconds that is counted. What the search does not see: kernels that an op needs in
# its local form, and, between light ops, that a version in memory is read again.
WITHIN = [
    (0, 0.98, 0.98),
    (1, 0.97, 0.98),
    (2, 0.96, 0.98),
    *(pytest.param(i, 0.8, 0.88, marks=pytest.mark.slow) for i in (3, 4, 5, 6)),
]


@pytest.mark.parametrize(("program", "least", "counts"), WITHIN)
def test_plans_of_one_program_are_ordered_alike(
    program: int, least: float, counts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are the same, so what differs is where values lie and what moves them,
    copies around collectives included. Both add up kernels and collectives."""
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    fn, shapes = PROGRAMS[program]
    m, k, n = [(256, 512, 1024), (1024, 256, 512), (512, 1024, 256)][program % 3]
    args = [torch.empty(s, device="meta") for s in shapes(m, k, n)]
    plan = fxpar.plan(fn, *args, mesh="dp=2,tp=4", mode="search", schedule="none")
    found, rng = plan.result.decision.search.formulation, random.Random(0)
    counted, simulated = [], []
    for _ in range(24):
        choice = at_random(rng, plan)
        counted.append(evaluate(found.problem, choice)[0] + found.launches)
        step = lowered(plan, choice)
        simulated.append(step.compute_seconds + step.communication_seconds)
    parts = [c / s for c, s in zip(counted, simulated, strict=True)]
    assert counts <= statistics.median(parts) <= 1.02, parts
    assert statistics.correlation(ranking(counted), ranking(simulated)) >= least


def small(rng: random.Random) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """One of ``PROGRAMS`` of random sizes."""
    fn, shapes = rng.choice(PROGRAMS)
    sizes = [rng.choice([16, 32, 64, 128, 256, 512, 1024, 2048]) for _ in range(3)]
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
    args = [torch.empty(s, dtype=dtype, device="meta") for s in shapes(*sizes)]
    return fn, args


def mixed(rng: random.Random) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A program of views, reductions, pointwise ops and products."""
    program = MixedProgram(rng.randrange(1 << 16))
    return program, program.arguments


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "count"), [(small, 40), (mixed, 60)])
@pytest.mark.parametrize("machine", ["h100", "a100", "cpu"])
def test_the_search_and_the_prediction_agree_in_order(
    machine: str,
    draw: Callable[[random.Random], Any],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four random plans each of so many programs: the search's own count and the
    simulation of what is lowered rank them alike."""
    monkeypatch.setenv("FXPAR_HARDWARE", machine)
    rng = random.Random(0)
    counted, simulated = [], []
    for _ in range(count):
        fn, args = draw(rng)
        mesh = rng.choice(["dp=2", "tp=4", "dp=2,tp=2", "dp=2,tp=4"])
        plan = fxpar.plan(fn, *args, mesh=mesh, mode="search", schedule="none")
        found = plan.result.decision.search
        taken = evaluate(found.formulation.problem, found.solution.choice)[0]
        assert taken == pytest.approx(found.solution.cost)
        for _ in range(4):
            choice = at_random(rng, plan)
            cost = evaluate(found.formulation.problem, choice)[0]
            counted.append(cost + found.formulation.launches)
            simulated.append(lowered(plan, choice).seconds)
    assert statistics.correlation(ranking(counted), ranking(simulated)) >= 0.98
