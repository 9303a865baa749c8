"""Unlike devices: what a mesh says of them, what equal and unequal shards cost, and
AccPar's figures from the solver."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fxpar
from fxpar.config import Options
from fxpar.errors import FxparWarning, MeshError
from fxpar.explain.dump import report
from fxpar.passes.simulate.launches import facts_of
from fxpar.sharding.cost.hardware_table import Hardware, Level, Peak, lookup
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.search.run_search import SearchOptions, search
from fxpar.sharding.search.unequal_shards import (
    StepSeconds,
    cut,
    notes,
    shares,
    step_of,
)

ROOT = Path(__file__).parents[3]


def machine(bandwidth: float = 1e9) -> Hardware:
    """Kernels cost what they compute and move; links are alike."""
    return replace(
        lookup("cpu"),
        launch=0.0,
        bandwidth=1e8,
        peaks=tuple((name, Peak(1e8)) for name, _ in lookup("cpu").peaks),
        levels=(Level(0, bandwidth, 1e-8, 1e-7),),
    )


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """FXPAR_HARDWARE is ``machine()``."""
    path = tmp_path / "slow.json"
    machine().save(path)
    monkeypatch.setenv("FXPAR_HARDWARE", str(path))
    return machine()


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def program_of(fn: Any, *args: Any, **specs: Any) -> Any:
    plan = fxpar.plan(fn, *args, mesh="a=2", mode="replicate", **specs)
    return plan.result.decision.program


# The mesh


@pytest.mark.parametrize(
    ("text", "written", "slowest", "unlike"),
    [
        ("dp=2{1.0,0.5},tp=4", "dp=2{1.0,0.5},tp=4", 0.5, ("dp",)),
        (" a=2 {1, .5} , b=2{2,1e-1}", "a=2{1.0,0.5},b=2{2.0,0.1}", 0.05, ("a", "b")),
        ("a=3{2,2,2}", "a=3{2.0,2.0,2.0}", 2.0, ()),
        ("a=3,b=2", "a=3,b=2", 1.0, ()),
    ],
)
def test_speeds_are_read_and_written(
    text: str, written: str, slowest: float, unlike: tuple[str, ...]
) -> None:
    mesh = Mesh.parse(text)
    assert str(mesh) == written
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.slowest == pytest.approx(slowest)
    assert mesh.unlike == unlike
    assert len(notes(mesh)) == bool(unlike)


def test_speeds_tell_meshes_apart_and_links_leave_them() -> None:
    mesh = Mesh.parse("dp=2{1.0,0.5},tp=4")
    assert mesh != Mesh.parse("dp=2,tp=4")
    assert mesh.speeds_of("dp") == (1.0, 0.5)
    assert mesh.speeds_of("tp") == (1.0,) * 4
    assert lookup("h100").on(mesh).speeds == mesh.speeds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=2{1.0},tp=4", "'dp' has 1 speeds for 2 ranks"),
        ("dp=2{1,1,1}", "'dp' has 3 speeds for 2 ranks"),
        ("dp=2{1,0}", "'dp' has a rank of speed 0"),
        ("dp=2{1,-2}", "'dp' has a rank of speed -2"),
        ("dp=2{1,nan}", "'dp' has a rank of speed nan"),
        ("dp=2{1,inf}", "'dp' has a rank of speed inf"),
        ("tp=4,dp=2{1,fast}", "'dp': 'fast' is not a number"),
        ("dp=2{}", "'dp': '' is not a number"),
        ("dp=2{1,2", "'dp=2{1'"),
        ("dp=2{1,2}{1,2}", "cannot read mesh"),
        ("dp=2[2]", "'dp' has 1 shares for 2 ranks"),
        ("dp=2[1,0]", "'dp' has a rank of share 0"),
        ("dp=2[1,much],tp=2", "'dp': 'much' is not a number"),
        ("dp=2[1,2]{1,2}", "cannot read mesh"),
    ],
)
def test_malformed_speeds_are_named(text: str, said: str) -> None:
    with pytest.raises(MeshError) as error:
        Mesh.parse(text)
    assert said in str(error.value)
    assert "FXPAR_MESH=" in (error.value.fix or "")


# Ratios


def test_ranks_finish_together() -> None:
    # Twice as fast gets twice as much; with own communication, less than that.
    assert shares((1.0, 2.0)) == pytest.approx((2 / 3, 1 / 3))
    assert shares((1.0 + 1.0, 2.0 + 1.0)) == pytest.approx((0.6, 0.4))
    alone = (1.0, 3.0, 0.5, 7.0)
    finish = np.array(shares(alone)) * alone
    assert finish == pytest.approx(np.full(4, 1 / sum(1 / t for t in alone)))


def test_the_largest_share_is_held_back_where_collectives_wait_for_it() -> None:
    assert shares((1.0, 2.0), largest=100.0) == pytest.approx((0.5, 0.5))
    draw = np.random.default_rng(0)
    for _ in range(30):
        alone, largest = draw.uniform(0.1, 3, 4), draw.uniform(0, 2)

        def seconds(x: Any, alone: Any = alone, largest: float = largest) -> Any:
            return (x * alone).max(-1) + largest * x.max(-1)

        least = seconds(np.array(shares(alone, largest)))
        others = draw.dirichlet(1 / alone, 5000)
        assert least <= seconds(others).min() + 1e-12
    between = shares((1.0, 2.0, 3.0), largest=2.0)
    assert between[0] == pytest.approx(between[1]) and between[1] > between[2]


def test_shards_are_whole_and_all_there() -> None:
    assert cut(30, (2 / 3, 1 / 3)) == (20, 10)
    assert cut(10, (1 / 3,) * 3) == (3, 4, 3)
    assert cut(2, (0.9, 0.05, 0.05)) == (2, 0, 0)
    draw = np.random.default_rng(1)
    for _ in range(50):
        share = draw.dirichlet(np.ones(7))
        parts = np.array(cut(1000, share))
        assert parts.sum() == 1000
        assert np.abs(parts - 1000 * share).max() <= 1


def test_what_is_split_is_balanced_and_the_rest_waits_for_the_slowest() -> None:
    mesh = Mesh.parse("a=2{1.0,0.5},b=2")
    split, whole = frozenset("a"), frozenset[str]()
    step = StepSeconds({split: 6.0, whole: 1.0}, {}, 0.25)
    even = {"a": (0.5, 0.5)}
    assert step.seconds(mesh, even) == pytest.approx(6 / 0.5 + 1 / 0.5 + 0.25)
    best = step.best(mesh)
    assert best["a"] == pytest.approx((2 / 3, 1 / 3))
    # 6 seconds on each of two are 12 for speeds of 1.5 together.
    assert step.seconds(mesh, best) == pytest.approx(12 / 1.5 + 1 / 0.5 + 0.25)
    # A collective along a waits for the largest share, one along b carries the own.
    moved = StepSeconds({split: 6.0}, {(whole, split): 3.0}, 0.0)
    assert moved.seconds(mesh, best) == pytest.approx(8.0 + 3.0 * 4 / 3)
    own = StepSeconds({split: 6.0}, {(split, whole): 3.0}, 0.0)
    assert own.seconds(mesh, best) == pytest.approx(8.0 + 3.0 * 4 / 3)
    assert own.best(mesh)["a"] == pytest.approx(((12 + 3) / 24, (6 + 3) / 24))
    # Between the two, the fastest is held back to what the next one takes.
    three = Mesh((("a", 3),), speeds=((1.0, 1 / 2, 1 / 3),))
    some = StepSeconds({split: 1.0}, {(whole, split): 2.0}, 0.0)
    assert some.best(three)["a"] == pytest.approx((0.375, 0.375, 0.25))
    # Where collectives are all there is, equal shards are best.
    assert StepSeconds({split: 1e-9}, {(whole, split): 3.0}, 0.0).best(mesh) == even


def test_two_axes_of_unlike_ranks_multiply() -> None:
    mesh = Mesh.parse("a=2{1.0,0.5},b=2{1.0,0.25},c=2{2,2}")
    step = StepSeconds({frozenset("ab"): 1.0}, {}, 0.0)
    best = step.best(mesh)
    assert best["a"] == pytest.approx((2 / 3, 1 / 3))
    assert best["b"] == pytest.approx((0.8, 0.2))
    assert step.seconds(mesh, best) == pytest.approx(4 / (2 * 1.5 * 1.25))


def test_shares_found_axis_by_axis_are_dropped_where_together_they_are_slower() -> None:
    mesh = Mesh.parse("a=2{1.0,0.5},b=2{1.0,0.25}")
    a, b, both, none = (frozenset(axes) for axes in ("a", "b", "ab", ""))
    moving = {(none, both): 10.0, (none, b): 3.0, (a, b): 3.0}
    step = StepSeconds({a: 1.0, both: 2.0}, moving, 0.0)
    assert step.best(mesh) == {"a": (0.5, 0.5), "b": (0.5, 0.5)}


# Plans


def test_the_slowest_rank_decides(slow: Hardware) -> None:
    args = double(32, 64), double(64, 64)
    program = program_of(product, *args)
    unlike = search(program, Mesh.parse("a=2{1.0,0.5}"), SearchOptions(slow), {})
    halved = search(program, Mesh.parse("a=2"), SearchOptions(slow.at_speed(0.5)), {})
    assert unlike.predicted == pytest.approx(halved.predicted, rel=1e-9)
    faster = search(program, Mesh.parse("a=2"), SearchOptions(slow), {})
    assert unlike.predicted > 1.5 * faster.predicted
    plans = [
        fxpar.plan(product, *args, mesh=mesh, mode="replicate")
        for mesh in ("a=2", "a=2{0.25,1.0}")
    ]
    alike, slower = (plan.predicted.compute for plan in plans)
    assert slower == pytest.approx(4 * alike)


def test_the_search_splits_more_on_a_slow_rank() -> None:
    # Gathering takes longer than half of computing on fast ranks, not on slow ones.
    whole = (None, None)
    program = program_of(
        product, double(16, 16), double(16, 16), in_specs=[whole] * 2, out_specs=[whole]
    )
    on = machine(bandwidth=1e7)

    def is_split(mesh: str) -> bool:
        found = search(program, Mesh.parse(mesh), SearchOptions(on), {})
        return any(strategy.factors for strategy in found.strategies)

    assert not is_split("a=2")
    assert not is_split("a=2{4.0,8.0}")
    assert is_split("a=2{1.0,0.01}")


def test_the_report_agrees_with_the_search(slow: Hardware) -> None:
    x, w, v = double(96, 64), double(64, 256), double(256, 64)

    def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w) @ v

    split = [("a", None), ("b", None), None]
    plan = fxpar.plan(
        mlp, x, w, v, mesh="a=2{1.0,0.5}[1,1],b=2", mode="search", in_specs=split
    )
    found = plan.ratios()
    assert found.even == pytest.approx(plan.result.decision.search.predicted, rel=1e-6)
    assert found.even / 1.5 <= found.uneven < 0.8 * found.even
    ((axis, best),) = found.shares
    assert axis == "a" and best[0] > best[1] > 1 / 3 - 1e-9
    rows = next(c for c in found.cuts if c.axes == ("a",) and c.size == 96)
    assert rows.parts == cut(96, best) and "x" in rows.values
    text = str(found)
    assert f"96 over a: {rows.parts[0]} + {rows.parts[1]}" in text
    assert "of speed 0.5" in text and "times as fast" in text


@pytest.mark.parametrize(
    ("x", "w", "out", "split", "over"),
    [
        # Gathering along a waits for the largest part, reducing along b carries the
        # own rows, reducing along a carries the same on all ranks.
        (("a", None), (None, None), (None, None), "", "a"),
        (("a", "b"), ("b", None), ("a", None), "a", ""),
        ((None, "a"), ("a", None), (None, None), "", ""),
    ],
)
def test_what_a_collective_carries(
    x: Any, w: Any, out: Any, split: str, over: str
) -> None:
    plan = fxpar.plan(
        torch.mm,
        double(8, 8),
        double(8, 8),
        mesh="a=2{1.0,0.5}[1,1],b=2",
        in_specs=[x, w],
        out_specs=[out],
    )
    decision = plan.result.decision
    (found,) = plan.collectives
    _, done = facts_of(plan.result.local)
    step = step_of(decision, machine(), [reshard for reshard, _ in done])
    assert set(step.moving) == {(frozenset(split), frozenset(over))}
    sent = found.bytes // (2 if found.kind == "all_gather" else 1)
    (seconds,) = step.moving.values()
    assert seconds == pytest.approx(sent / 1e9)


def test_alike_ranks_have_equal_shards(slow: Hardware) -> None:
    plan = fxpar.plan(product, double(8, 8), double(8, 8), mesh="a=2{0.5,0.5}")
    found = plan.ratios()
    assert found.shares == () and found.cuts == ()
    assert found.even == found.uneven
    assert "equally fast" in str(found)


def test_equal_shards_run_and_the_plan_says_so(tmp_path: Path) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0], dtype=x.dtype)[:, None]
        return torch.softmax(x @ w + rows, dim=-1)

    args = double(8, 4), double(4, 6)
    specs = [("dp", None), (None, "tp")]
    unlike = "dp=2{1.0,0.5}[1,1],tp=2"
    plan = fxpar.plan(fn, *args, mesh=unlike, in_specs=specs)
    assert any("dp" in spec.axes for spec in plan.inputs)
    torch.testing.assert_close(plan.simulate(*args), fn(*args))
    (said,) = plan.notes
    assert "along dp differ in speed" in said and "up to 1.5 times" in said
    with pytest.warns(FxparWarning, match="all wait for the slowest"):
        report(plan, Options(), 0, 4, "graph0", None, set())
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.mesh.speeds == plan.mesh.speeds
    assert loaded.hash == plan.hash
    again = fxpar.plan(
        fn, *args, mesh=plan.mesh, in_specs=specs, mode=str(tmp_path / "plan.json")
    )
    assert again.notes == plan.notes
    alike = fxpar.plan(fn, *args, mesh="dp=2,tp=2", in_specs=specs)
    assert alike.notes == ()
    assert alike.collectives == plan.collectives


# AccPar


@pytest.fixture
def accpar(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("accpar")


@pytest.mark.parametrize(
    ("name", "figures", "within"),
    [
        ("alexnet", (6.42, 7.27, 9.20), 0.005),
        ("vgg11", (8.13, 8.83, 9.92), 0.005),
        ("resnet50", (1.08, 1.20, 1.26), 0.006),
    ],
)
def test_figures_of_accpar(
    accpar: Any, name: str, figures: tuple[float, ...], within: float
) -> None:
    network = accpar.NETWORKS[name]
    base, *others = (accpar.recursive(network, m) for m in accpar.METHODS)
    assert base == 7 * sum(layer.summed[0] for layer in network.layers)
    found = [base / n for n in others]
    assert found == pytest.approx(list(figures), abs=within)


def test_all_levels_at_once_are_never_worse(accpar: Any) -> None:
    for name, gains in (("alexnet", True), ("resnet18", False)):
        network = accpar.NETWORKS[name]
        ratio = accpar.recursive(network, "accpar", levels=3) / accpar.jointly(
            network, 3
        )
        assert (ratio > 1.02) if gains else ratio == pytest.approx(1)


def test_balance_of_unlike_groups_is_bounded_by_their_speeds(accpar: Any) -> None:
    # With links that cost nothing only computing counts.
    groups = accpar.groups_of((1e18, 1e18))
    network = accpar.NETWORKS["alexnet"]
    even = max(accpar.unlike(network, "data parallel", groups, 0.5))
    share, seconds = accpar.balanced(network, "data parallel", groups, rounds=14)
    assert share == pytest.approx(45 / 150, abs=1e-3)
    assert accpar.ceiling(groups) == pytest.approx(5 / 3)
    assert even / seconds == pytest.approx(5 / 3, rel=2e-3)


def test_a_parameter_of_no_rows_costs_nothing() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.empty = torch.nn.Parameter(torch.zeros(0, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean() + self.empty.sum()

    x = torch.randn(8, 8)
    plan = fxpar.plan(Model(), x, mesh="dp=2{1.0,0.5}", grad=True, mode="search")
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
