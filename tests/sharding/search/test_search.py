"""The search: true optima of small programs, numbers of one device, facts kept."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import FxparWarning, HintError, PlanError
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.launches import launches_of
from fxpar.passes.simulate.lockstep import run_lockstep  # noqa: F401  (registers the ops)
from fxpar.sharding import decide
from fxpar.sharding.cost.hardware_table import Hardware, Peak, lookup
from fxpar.sharding.cost.program_kernels import kernels_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import is_view
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.reshard.route import price
from fxpar.sharding.reshard.steps import duration
from fxpar.sharding.search.alternatives import alternatives
from fxpar.sharding.search.formulate import cost_of, formulate
from fxpar.sharding.search.run_search import (
    SearchOptions,
    repeated,
    search,
    with_choice,
)
from fxpar.sharding.solver import evaluate, solve
from fxpar.sharding.spec import Spec
from tests.helpers.check_random import check
from tests.helpers.machines import machine
from tests.helpers.programs import batch, mlp, program_of
from tests.helpers.random_programs import Case

aten = torch.ops.aten


# Optima

SMALL: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "product": (lambda x, w: torch.relu(x @ w), ((8, 4), (4, 16))),
    "two readers": (lambda x: (x * 2, x.sum(0)), ((8, 4),)),
    "norm": (lambda x, w: x @ w / (x @ w).sum(), ((4, 8), (8, 2))),
    "transposed": (lambda x, y: (x.t() @ y).exp(), ((16, 2), (16, 4))),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "norm")) for n in SMALL],
)
@pytest.mark.parametrize("mesh", ["x=2"])
def test_no_choice_is_better(name: str, mesh: str) -> None:
    fn, shapes = SMALL[name]
    args = [torch.randn(shape) for shape in shapes]
    program = program_of(fn, *args, mesh=mesh)
    on = machine().on(Mesh.parse(mesh))
    problem = formulate(program, on, machine()).problem
    sizes = [range(len(costs)) for costs in problem.costs]
    assert np.prod([len(size) for size in sizes], dtype=float) < 3e5
    least = min(evaluate(problem, choice)[0] for choice in itertools.product(*sizes))
    found = search(program, Mesh.parse(mesh), SearchOptions(machine()), {})
    assert found.solution.cost == pytest.approx(least)
    assert found.solution.bound == pytest.approx(least)


@pytest.mark.parametrize(
    "hints",
    [
        {},
        {"*.0.weight": ("tp", None), "*.2.weight": (None, "tp")},
        {"*.weight": ("dp", None)},
        {"*.0.weight": (None, "tp"), "*.2.weight": ("tp", None)},
    ],
    ids=["data", "megatron", "zero", "reversed"],
)
def test_no_expert_is_better(hints: dict[str, Any]) -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    expert = fxpar.plan(
        mlp(2), batch(), mesh="dp=2,tp=2", hints=hints, mode="propagate", grad=True
    )
    decision = expert.result.decision
    found = search(decision.program, mesh, SearchOptions(machine()), {})
    theirs = cost_of(found.formulation, decision.strategies)
    assert found.solution.cost <= theirs.cost * (1 + 1e-9)
    assert found.solution.bound <= found.solution.cost


# Numbers


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), *range(2, 6)]
)
def test_random_programs(seed: int, slow: Hardware) -> None:
    case = Case(seed)
    case.mode = "search"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 212))
def test_many_random_programs(seed: int, slow: Hardware) -> None:
    case = Case(seed)
    case.mode = "search"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(case)


def test_training_is_split_and_right(slow: Hardware) -> None:
    model, x = mlp(2), batch()
    plan = fxpar.plan(model, x, mesh="dp=2,tp=2", mode="search", grad=True)
    assert any(spec.sharded_axes for _, spec in plan.values)
    got, want = plan.simulate(x), plan.reference(x)
    torch.testing.assert_close(got, want)
    assert "proved within" in plan.notes[0]


@pytest.mark.parametrize("grad", [False, True])
def test_constants_that_are_returned(slow: Hardware, grad: bool) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, torch.zeros(3), x.new_ones(0, 2)

    x = torch.randn(8, 4, requires_grad=grad)
    plan = fxpar.plan(fn, x, mesh="dp=2", mode="search", grad=grad)
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def test_a_saved_plan_is_the_same_program(slow: Hardware, tmp_path: Path) -> None:
    model, x = mlp(), batch()
    plan = fxpar.plan(model, x, mesh="dp=2,tp=2", mode="search", grad=True)
    plan.save(tmp_path / "plan.json")
    again = fxpar.plan(
        model, x, mesh="dp=2,tp=2", mode=str(tmp_path / "plan.json"), grad=True
    )
    torch.testing.assert_close(again.simulate(x), plan.reference(x))
    assert again.values == plan.values


# Facts


def test_hints_hold(slow: Hardware) -> None:
    hints = {"0.0.weight": (None, "tp"), "input": ("dp?", "?")}
    plan = fxpar.plan(
        mlp(), batch(), mesh="dp=2,tp=2", mode="search", hints=hints, grad=True
    )
    assert dict(plan.parameters)["0.0.weight"] == Spec(None, "tp")
    assert plan.inputs[0].dims[0][:1] == ("dp",)
    assert "hint" in plan.why("0.0.weight")


def test_hints_that_contradict_each_other(slow: Hardware) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return fxpar.constrain(fxpar.constrain(x, "dp", None), None, "dp") * 2

    fxpar.plan(fn, batch(), mesh="dp=2", mode="search")  # two values: a reshard
    with pytest.raises(HintError, match="contradict"):
        fxpar.plan(
            mlp(),
            batch(),
            mesh="dp=2",
            mode="search",
            in_specs=[("dp", None)],
            hints={"input": (None, "dp")},
        )


def test_memory_binds(slow: Hardware) -> None:
    """What does not fit whole is split, and what cannot fit is told."""
    model, x = mlp(2, 32), batch(8, 32)
    weight = sum(p.nbytes for p in model.parameters())
    program = program_of(model, x, mesh="x=4", grad=True)
    mesh = Mesh.parse("x=4")
    quick = replace(slow, peaks=tuple((n, Peak(1e15)) for n, _ in slow.peaks))
    quick = replace(quick, bandwidth=1e15)  # where whole copies cost nothing
    free = search(program, mesh, SearchOptions(quick), {})
    assert free.solution.peak > 3 * weight
    tight = search(program, mesh, SearchOptions(quick, memory=2 * weight), {})
    assert tight.solution.peak <= 2 * weight
    assert tight.solution.cost > free.solution.cost
    with pytest.raises(PlanError, match=r"(?s)no plan fits in .* of which\s.*weight"):
        search(program, mesh, SearchOptions(quick, memory=weight / 4), {})


def test_more_axes_than_can_be_searched(slow: Hardware) -> None:
    mesh = Mesh.parse("a=2,b=2,c=2,d=2")
    with pytest.raises(PlanError, match="at most 3 axes"):
        search(
            program_of(mlp(), batch(), mesh=str(mesh)), mesh, SearchOptions(slow), {}
        )
    with pytest.warns(FxparWarning, match="at most 3 axes.* is propagated"):
        plan = fxpar.plan(mlp(), batch(), mesh=mesh, mode="search")
    assert plan.hash == fxpar.plan(mlp(), batch(), mesh=mesh, mode="propagate").hash
    fxpar.plan(mlp(), batch(), mesh="a=2,b=2,c=2,d=1", mode="search")


# Layers


def test_layers_are_found() -> None:
    program = program_of(mlp(4), batch(), mesh="x=2", grad=True)
    tied = repeated(program, program.backward)
    products = [op.index for op in program.ops if "dot" in op.name or "mm" in op.name]
    heads = {tied[i] for i in products}
    assert len(heads) <= len(products) / 2
    for i, to in enumerate(tied):
        assert tied[to] == to
        assert program.ops[i].rule == program.ops[to].rule


def test_ties_do_not_change_the_optimum() -> None:
    program = program_of(mlp(4), batch(), mesh="dp=2,tp=2", grad=True)
    found = search(program, Mesh.parse("dp=2,tp=2"), SearchOptions(machine()), {})
    problem = found.formulation.problem
    assert len(set(problem.tied)) < len(problem.tied)
    untied = solve(replace(problem, tied=None, limit=None), 20.0)
    assert found.solution.cost == pytest.approx(untied.cost, rel=2e-4)


def test_what_is_not_alike_is_not_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 2))
    program = program_of(model, torch.randn(4, 4), mesh="x=2")
    assert repeated(program, set()) == list(range(len(program.ops)))


# Resharding between all specs


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4,tp=2", "a=2,b=2,c=2"])
@pytest.mark.parametrize("shape", [(8, 16), (64, 8, 32), (9, 64), (16, 7, 10)])
def test_paths_cost_what_matrices_say(mesh: str, shape: tuple[int, ...]) -> None:
    on, rng = machine().on(Mesh.parse(mesh)), random.Random(0)
    pool = [all_pairs._spec(node, on) for node in all_pairs._nodes(on, len(shape))]
    for _ in range(40):
        a, b = rng.choice(pool), rng.choice(pool)
        seconds = all_pairs.matrix([a], [b], on, shape, 4)[0, 0]
        way = all_pairs.path(a, b, on, shape, 4)
        assert way is not None and (not way or way[-1].spec == b)
        local = 4 * math.prod(shape) / on.count(a.sharded_axes)
        assert duration(way, on, local) == pytest.approx(seconds)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "x=4", "a=2,b=2,c=2"])
def test_on_like_links_prices_are_those_of_reshard(mesh: str) -> None:
    """Where latency or bandwidth decides: in between, reshard takes the better of the
    two routes for these, and a path may be cheaper."""
    on, rng = Mesh.parse(mesh), random.Random(1)
    for shape in ((8, 8), (2**14, 2**14)):
        pool = [all_pairs._spec(node, on) for node in all_pairs._nodes(on, 2)]
        for _ in range(40):
            a, b = rng.choice(pool), rng.choice(pool)
            seconds = all_pairs.matrix([a], [b], on, shape, 4)[0, 0]
            assert seconds <= price(a, b, on, shape, 4) * (1 + 1e-9)
            assert seconds >= price(a, b, on, shape, 4) * 0.8


def test_a_gather_over_slow_links_goes_by_the_fast_ones() -> None:
    on = lookup("h100").on(Mesh.parse("dp=8,tp=8"))
    source, whole = Spec("dp", None), Spec(None, None)
    way = all_pairs.path(source, whole, on, (8192, 8192), 4)
    assert [str(step) for step in way or ()] == [
        "slice tp on 0",
        "all_gather dp+tp on 0",
    ]
    assert all_pairs.path(source, whole, Mesh.parse("dp=8,tp=8"), (8192, 8192), 4)
    alike = all_pairs.path(source, whole, Mesh.parse("dp=8,tp=8"), (8192, 8192), 4)
    assert [str(step) for step in alike or ()] == ["all_gather dp on 0"]


def test_other_reductions_have_paths_too() -> None:
    on = machine().on(Mesh.parse("dp=2,tp=2"))
    most = Spec(None, "tp", partial={"dp": "max"})
    (step,) = all_pairs.path(most, Spec("dp", "tp"), on, (8, 8), 4) or ()
    assert str(step) == "reduce_scatter dp on 0 (max)"
    summed = Spec(None, "tp", partial={"dp": "sum"})
    assert all_pairs.path(most, summed, on, (8, 8), 4) is None
    assert np.isfinite(all_pairs.matrix([most], [summed], on, (8, 8), 4)).all()


# The cost model


def test_replicated_work_is_not_free() -> None:
    """Neither of contractions nor of what is fused, as a floor per op would make it."""
    x = torch.randn(64, 64)
    program = program_of(lambda x: F.gelu(x).exp() + 1, x, mesh="x=4")
    on = replace(machine(), launch=1.0)  # far above the work
    found = search(program, Mesh.parse("x=4"), SearchOptions(on), {})
    whole = formulate(program, on.on(Mesh.parse("x=4")), on)
    assert whole.launches == pytest.approx(1.0)  # one fused kernel
    made = [found.settled[v] for op in program.ops for v in op.results]
    assert all(spec.sharded_axes for spec in made)


def test_readers_of_one_region_share_a_read() -> None:
    """It is read once; a reader that is split saves its part of that."""
    x = torch.randn(8, 32)
    program = program_of(
        lambda x: (x - x.amax(1, keepdim=True)).exp().sum(1), x, mesh="x=2"
    )
    works = kernels_of(program).works
    read = {
        op.target: sum(size for at, size in work.moved if op.tensors[at] == 0)
        for op, work in zip(program.ops, works, strict=True)
    }
    assert read[aten.amax.default] == read[aten.sub.Tensor] == x.nbytes / 2
    assert sum(read.values()) == x.nbytes
    moved = sum(size for work in works for _, size in work.moved)
    assert moved == x.nbytes + 8 * 4, "and the result is written"


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sin() + x[:1].cos(),
        lambda x: x[:4].sin() + x[4:].cos(),
        lambda x: x.sin() * x,
    ],
)
def test_a_read_is_never_more_or_less_than_what_is_read(fn: Any) -> None:
    x = torch.randn(8, 32)
    program = program_of(fn, x, mesh="x=2")
    works, (whole,) = kernels_of(program).works, program.inputs
    seen = {whole, *(op.results[0] for op in program.ops if is_view(op))}
    read = sum(
        size
        for op, work in zip(program.ops, works, strict=True)
        for at, size in work.moved
        if op.tensors[at] in seen
    )
    assert read == pytest.approx(x.nbytes)


def twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A light value that a product reads and, in one kernel with it, a light op."""
    kept = (x * 2).relu()
    return kept @ w, kept.exp()


@pytest.mark.parametrize(
    ("fn", "shapes", "grad"),
    [
        (twice, [(8, 16), (16, 16)], False),
        (lambda x, a: ((x @ a).softmax(-1), x.cos()), [(8, 16), (16, 16)], False),
        (
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
            [(8, 16)],
            True,
        ),
        (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), [(8, 16)], True),
    ],
)
def test_a_search_counts_the_kernels_that_are_simulated(
    fn: Any, shapes: list[tuple[int, ...]], grad: bool
) -> None:
    """Where nothing is split, to the byte: of forward and backward, what the backward
    computes again included."""
    args = [torch.randn(shape) for shape in shapes]
    plan = fxpar.plan(fn, *args, mesh="x=2", mode="replicate", grad=grad)
    found = kernels_of(plan.result.decision.program)
    launches = launches_of(as_run(plan.result.local)).launches
    assert sum(work.launches for work in found.works) == len(launches)
    moved = sum(nbytes for work in found.works for _, nbytes in work.moved)
    assert moved == pytest.approx(sum(launch.moved for launch in launches))


# Questions


def test_the_next_best_is_solved_again(slow: Hardware) -> None:
    """Against every strategy of the op pinned, each solved from scratch."""
    plan = fxpar.plan(mlp(), batch(), mesh="x=4", mode="search", grad=True)
    decision = plan.result.decision
    found, program = decision.search, decision.program
    problem = replace(found.formulation.problem, tied=None, limit=None)
    for op in program.ops[:6]:
        (value, *_) = op.results
        others = alternatives(found, value)
        node = next(
            i
            for i, n in enumerate(found.formulation.nodes)
            if n.kind == "op" and n.of == op.index
        )
        totals = [
            solve(problem, 5.0, fixed={node: k}).cost
            for k in range(len(problem.costs[node]))
            if k != found.solution.choice[node]
        ]
        launches = found.formulation.launches
        # The plan is that of the shortest predicted step, not of the least sum.
        assert others[0].seconds >= found.first.cost + launches - 1e-12
        assert others[0].seconds <= sorted(totals)[0] + launches + 1e-12
        assert str(op.results) and others == sorted(others, key=lambda a: a.seconds)


def test_why_and_why_not(slow: Hardware) -> None:
    plan = fxpar.plan(mlp(), batch(), mesh="x=4", mode="search", grad=True)
    product = next(node.name for node in plan.nodes if "dot" in node.name)
    assert "%" in plan.why(product)
    whole = plan.why_not(product, (None, None))
    assert "us more" in whole and "[_, _]" in whole
    with pytest.raises(PlanError, match="no strategy of"):
        plan.why_not(product, Spec(None, None, partial={"x": "max"}))
    assert "computing it takes" in plan.why(product)
    assert "rest in [x, _]" in plan.why_not("input", ("x", None))
    with pytest.raises(PlanError, match="is an input that cannot have"):
        plan.why_not("input", Spec(None, None, partial={"x": "sum"}))
    with pytest.raises(PlanError, match="only a searched plan"):
        fxpar.plan(mlp(), batch(), mesh="x=4", mode="propagate").why_not(
            product, (None, None)
        )


def normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x @ w, None, None, training=True)


def test_statistics_of_a_batch_are_split(slow: Hardware) -> None:
    # The rule of var_mean keeps what it reduces whole; a search must see beyond it.
    # Features are odd, so that only the batch can be.
    x, w = torch.randn(64, 7).double(), torch.randn(7, 9).double()
    plan = fxpar.plan(normalized, x, w, mesh="dp=2", mode="search", grad=True)
    assert plan.outputs[0].dims[0] == ("dp",) or plan.spec("sub").dims[0] == ("dp",)
    got, want = plan.simulate(x, w), plan.reference(x, w)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_a_search_that_has_no_time_has_a_rival_no_dearer_than_hints_alone(
    slow: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(mlp(3), batch(), mesh="dp=2,tp=2", grad=True)
    mesh = Mesh.parse("dp=2,tp=2")
    best = search(program, mesh, SearchOptions(slow), {})
    far = replace(best, solution=replace(best.solution, cost=2 * best.solution.cost))
    monkeypatch.setattr(decide, "search", lambda *args, **how: far)
    request = Request(mesh, program.signature, {}, SearchOptions(slow))
    decision = decide.decide_on(program, request)
    priced = [x.search.predicted for x in decision.rivals if x.search]
    assert min(priced) < far.predicted


def test_plans_that_may_be_faster_are_rivals(
    slow: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(mlp(2), batch(), mesh="dp=2,tp=2", grad=True)
    mesh = Mesh.parse("dp=2,tp=2")
    best = search(program, mesh, SearchOptions(slow), {})
    whole = decide.decide(program, mesh, {}, mode="replicate").strategies
    choice = cost_of(best.formulation, whole).choice
    bad = with_choice(best, choice)  # everything computed on every rank
    closed = replace(bad.solution, bound=bad.solution.cost)
    bad = replace(bad, solution=closed)
    monkeypatch.setattr(decide, "search", lambda *args, **how: bad)
    request = Request(mesh, program.signature, {}, SearchOptions(slow))
    decision = decide.decide_on(program, request)
    found = decision.rivals[0].search
    assert found.predicted < 0.9 * bad.predicted
    assert found.first == closed and found.solution.choice != choice
    asked = replace(SearchOptions(slow), ranked=False)
    unranked = decide.decide_on(program, Request(mesh, program.signature, {}, asked))
    assert unranked.search.solution.choice == choice and not unranked.rivals
