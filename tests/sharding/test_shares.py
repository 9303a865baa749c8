"""Shares of the ranks of an axis: their text, what they cut, what plans say of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from fxpar import Mesh, Spec
from fxpar.errors import MeshError
from fxpar.sharding import shard_sizes
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.plan import Plan

F = torch.nn.functional


@pytest.mark.parametrize(
    ("text", "written", "weights"),
    [
        ("dp=2[2,1],tp=4", "dp=2[2.0,1.0],tp=4", (2, 1)),
        ("dp=2{1,.5} [ 3, 1.5 ]", "dp=2{1.0,0.5}[3.0,1.5]", (6, 3)),
        ("dp=2[0.25,0.75]", "dp=2[0.25,0.75]", (1, 3)),
        ("dp=3[2,2,2]", "dp=3[2.0,2.0,2.0]", None),
        ("dp=2{1,.5}", "dp=2{1.0,0.5}", None),
    ],
)
def test_text(text: str, written: str, weights: tuple[int, ...] | None) -> None:
    mesh = Mesh.parse(text)
    assert str(mesh) == written
    assert Mesh.parse(written) == mesh
    assert mesh.weights_of("dp") == weights
    assert mesh.is_shared_equally == (weights is None)
    assert mesh.shared_equally.weights_of("dp") is None
    assert lookup("h100").on(mesh).shares == mesh.shares
    assert mesh.refined(()).shares == mesh.unrefined.shares == mesh.shares


def test_an_axis_with_shares_has_no_parts() -> None:
    mesh = Mesh.parse("dp=4[1,2,1,1],tp=4")
    with pytest.raises(MeshError, match="can have no parts"):
        mesh.refined(["dp:2"])
    assert mesh.refined(["tp:2"]).weights_of("dp") == (1, 2, 1, 1)


@pytest.mark.parametrize(
    ("rows", "mesh", "sizes"),
    [
        (12, "a=2[2,1]", [8, 4]),
        (7, "a=2[2,1]", [5, 2]),
        (1, "a=2[2,1]", [1, 0]),
        (1, "a=2[1,2]", [0, 1]),
        (0, "a=2[1,2]", [0, 0]),
        (10, "a=4[1,5,1,2]", [1, 6, 1, 2]),
        (7, "a=2[2,1],b=2", [3, 2, 1, 1]),
        (9, "b=2,a=2[1,2]", [2, 3, 1, 3]),
    ],
)
def test_shards_follow_shares(rows: int, mesh: str, sizes: list[int]) -> None:
    parsed = Mesh.parse(mesh)
    axes = parsed.names
    shards = [
        shard_sizes.shard(rows, parsed, axes, rank) for rank in range(parsed.size)
    ]
    assert [size for _, size in shards] == sizes
    ends = itertools.accumulate(sizes, initial=0)
    assert [start for start, _ in shards] == [*ends][:-1]
    assert shard_sizes.largest(rows, parsed, axes) == max(sizes)
    assert shard_sizes.smallest(rows, parsed, axes) == min(sizes)
    assert shard_sizes.is_even(rows, parsed, axes) == (len(set(sizes)) == 1)


def test_what_divides_is_cut_alike_as_rows_of_more() -> None:
    for text, rows in itertools.product(["a=2[2,1]", "a=3[1,3,2],b=2"], range(40)):
        mesh = Mesh.parse(text)
        if shard_sizes.is_exact(rows, mesh, mesh.names):
            for rank in range(mesh.size):
                one = shard_sizes.shard(rows, mesh, mesh.names, rank)
                more = shard_sizes.shard(5 * rows, mesh, mesh.names, rank)
                assert more == (5 * one[0], 5 * one[1])
    assert not shard_sizes.is_exact(4, Mesh.parse("a=2[2,1]"), ("a",))


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def plan_of(mesh: str, rows: int = 12, **options: Any) -> Any:
    torch.manual_seed(0)
    args = torch.randn(rows, 64), torch.randn(64, 64)
    return fxpar.plan(product, *args, mesh=mesh, **options)


def held(plan: Any) -> list[int]:
    """Rows of the result of each rank."""
    (value,) = (v for v in plan.result.decision.program.values if v.name == "relu")
    spec = plan.spec("relu")
    ranks = range(plan.mesh.size)
    return [spec.rank_shape(plan.mesh, value.shape, rank)[0] for rank in ranks]


def test_the_batch_is_shared_by_speed(tmp_path: Path) -> None:
    plan = plan_of("dp=2{1.0,0.5}", mode="propagate")
    assert held(plan) == [8, 4]
    assert str(plan.mesh) == "dp=2{1.0,0.5}[8.0,4.0]"
    assert plan.notes == ("shares: along dp 8:4",)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.mesh.shares == plan.mesh.shares and loaded.hash == plan.hash
    # Without shares in the text: those of the plan.
    again = plan_of("dp=2{1.0,0.5}", mode=str(tmp_path / "plan.json"))
    assert held(again) == [8, 4] and again.hash == plan.hash
    assert again.collectives == plan.collectives


@pytest.mark.parametrize(
    ("mesh", "rows", "sizes"),
    [
        ("dp=2{1.0,0.5}[1,1]", 12, [6, 6]),  # as given
        ("dp=2{1.0,0.5}[1,3]", 12, [3, 9]),
        ("dp=2[3,1]", 12, [9, 3]),
        ("dp=2{1.0,0.5}", 7, [5, 2]),
        ("dp=2{1.0,1.0}", 12, [6, 6]),
        ("tp=2{1.0,0.5}", 12, [12, 12]),  # splits no batch
    ],
)
def test_shares_that_are_given_hold(mesh: str, rows: int, sizes: list[int]) -> None:
    assert held(plan_of(mesh, rows, mode="propagate")) == sizes


def test_the_step_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_DISABLE", "share_by_speed")
    plan = plan_of("dp=2{1.0,0.5}", mode="propagate")
    assert held(plan) == [6, 6]
    assert "their shards are equal" in plan.notes[0]


def test_what_cuts_alike_refuses_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "split(all_reduce) -> rs, ag"
    with pytest.raises(MeshError, match="that a schedule rewrites are equal"):
        plan_of("dp=2[2,1]", schedule=text)
    # By speed alone nothing is asked for.
    assert plan_of("dp=2{2,1}", mode="propagate", schedule="none").notes
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    with pytest.raises(MeshError, match="microbatches are equal"):
        plan_of("dp=2[2,1]")


def test_manual_regions_are_cut_alike() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return fxpar.shard_map(torch.relu, (("dp", None),), (("dp", None),))(x)

    x = torch.randn(12, 4)
    with pytest.raises(MeshError, match="the shards of manual regions are equal"):
        fxpar.plan(fn, x, mesh="dp=2[2,1]", mode="propagate")
    plan = fxpar.plan(fn, x, mesh="dp=2{1.0,0.5}", mode="propagate")
    assert plan.mesh.is_shared_equally
    torch.testing.assert_close(plan.simulate(x), fn(x))


def large(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sum()


def test_the_slowest_rank_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    args = torch.randn(3072, 512), torch.randn(512, 512)
    seconds = {
        mesh: fxpar.plan(
            large, *args, mesh=mesh, mode="propagate", in_specs=[("dp", None), None]
        ).predicted.compute
        for mesh in ("dp=2", "dp=2{1,.5}[1,1]", "dp=2{1,.5}[2,1]", "dp=2{1,.5}[1,2]")
    }
    alike, equal, shared, wrong = seconds.values()
    assert equal == pytest.approx(2 * alike, rel=0.05)
    assert shared == pytest.approx(4 / 3 * alike, rel=0.05)
    assert wrong == pytest.approx(8 / 3 * alike, rel=0.05)


def test_a_search_takes_the_faster_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    args = torch.randn(3072, 512), torch.randn(512, 512)
    specs = [("tp", None), None]

    def searched(mesh: str) -> Any:
        return fxpar.plan(large, *args, mesh=mesh, mode="search", in_specs=specs)

    # Nothing says that tp splits the batch; the plan says so.
    shared, equal = map(searched, ("tp=2{1,.5}", "tp=2{1,.5}[1,1]"))
    assert not shared.mesh.is_shared_equally and equal.mesh.is_shared_equally
    found, other = (plan.result.decision.search.predicted for plan in (shared, equal))
    assert found < 0.75 * other
    assert shared.predicted.seconds < 0.75 * equal.predicted.seconds
    assert Spec("tp", None).rank_shape(shared.mesh, (3072, 512), 0)[0] > 1900
