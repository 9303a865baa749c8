"""Collectives of manual regions are named on their dims; what is alike is not sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives as collectives

import fxpar
from fxpar import Mesh, Spec, shard_map
from fxpar.sharding.reshard.route import steps
from tests.helpers.machines import machine

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def planned(fn: Callable[..., Any], ins: Any, outs: Any, grad: bool = False) -> Any:
    x = torch.randn(4, 8, 6, dtype=torch.float64)

    def model(x: torch.Tensor) -> torch.Tensor:
        return shard_map(fn, ins, outs)(x)

    plan = fxpar.plan(model, x, mesh="tp=2", mode="propagate", grad=grad)
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    return plan


def sent(plan: Any) -> list[tuple[str, list[int]]]:
    """Kind and dims of each collective of the region, as they are traced."""
    op = torch.ops.fxpar.collective.default
    nodes = plan.result.normalized.find_nodes(op="call_function", target=op)
    return [(node.args[1], list(node.args[2])) for node in nodes]


SPLIT = ((None, "tp"),)


def test_a_gather_on_another_dim_is_one_collective() -> None:
    plan = planned(
        lambda x: collectives.all_gather_tensor(x, 1, "tp").sin(), SPLIT, (None,), True
    )
    assert sent(plan) == [("all_gather", [1]), ("reduce_scatter", [1])]
    targets = {node.target for node in plan.result.normalized.nodes}
    assert torch.ops.aten.cat.default not in targets


def test_a_scatter_on_another_dim_is_one_collective() -> None:
    plan = planned(
        lambda x: collectives.reduce_scatter_tensor(x.sin(), "sum", 1, "tp").cos(),
        (("tp",),),
        SPLIT,
        True,
    )
    assert sent(plan) == [("reduce_scatter", [1]), ("all_gather", [1])]


def test_a_dim_may_be_counted_from_the_end() -> None:
    plan = planned(
        lambda x: collectives.reduce_scatter_tensor(x.sin(), "sum", -1, "tp").cos(),
        (("tp",),),
        ((None, None, "tp"),),
        True,
    )
    assert sent(plan) == [("reduce_scatter", [2]), ("all_gather", [2])]


def test_pieces_without_rows_stay_as_they_are() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat([x[:, 8:], x[:, 8:]], 0).sum()

    assert sent(planned(fn, SPLIT, SPLIT)) == []


def test_pieces_in_another_order_stay_as_they_are() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        whole = collectives.all_gather_tensor(x, 0, "tp")
        return torch.cat(whole.chunk(2)[::-1], 1)

    assert sent(planned(fn, SPLIT, (None,))) == [("all_gather", [0])]


def test_a_gather_that_is_read_otherwise_too_stays() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        whole = collectives.all_gather_tensor(x, 0, "tp")
        return torch.cat(whole.chunk(2), 1) + whole.sum()

    assert sent(planned(fn, SPLIT, (None,))) == [("all_gather", [0])]


def test_a_sum_of_what_is_alike_is_not_sent() -> None:
    plan = planned(lambda x: collectives.all_reduce(x, "sum", "tp"), (None,), (None,))
    assert sent(plan) == []


def test_a_sum_of_what_varies_is_sent() -> None:
    plan = planned(lambda x: collectives.all_reduce(x, "sum", "tp"), SPLIT, (None,))
    assert sent(plan) == [("all_reduce", [])]


def test_regions_are_numbered_in_order() -> None:
    """Ranks may have traced other regions before: their plans are the same."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x.sin(), "sum", "tp")

    first, second = (planned(fn, SPLIT, (None,)) for _ in range(2))
    assert first.hash == second.hash
    edges = torch.ops.fxpar.enter_region.default
    for plan in (first, second):
        found = plan.result.normalized.find_nodes(op="call_function", target=edges)
        assert [node.args[4] for node in found] == [0]


def test_ranks_of_a_region_do_not_share_the_work_of_a_reshard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight inside has no axis of the region, and other values on each of its
    ranks: it is gathered over ``dp`` by ``dp`` alone, though ``tp`` would speed it."""
    machine().save(tmp_path / "machine.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "machine.json"))

    def of_columns(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce((x @ a).tanh() @ b, "sum", "tp")

    def mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        specs = None, (None, "tp"), ("tp", None)
        return fxpar.shard_map(of_columns, specs, (None,), axes="tp")(x, a, b)

    args = [torch.randn(s).double() for s in ((8, 4, 8), (8, 16), (16, 8))]
    plan = fxpar.plan(mlp, *args, mesh="dp=2,tp=2", mode="search")
    torch.testing.assert_close(plan.simulate(*args), mlp(*args))
    gathers = [c.axes for c in plan.collectives if c.kind == "all_gather"]
    assert set(gathers) == {("dp",)}

    mesh, parts = machine().on(Mesh.parse("dp=2,tp=2")), Spec("dp", None)
    alone = steps(parts, Spec.whole(2), mesh, (8, 8), 8, ("tp",))
    assert [(step.kind, step.axes) for step in alone] == [("all_gather", ("dp",))]
    shared = steps(parts, Spec.whole(2), mesh, (8, 8), 8)
    assert any("tp" in step.axes for step in shared)  # which would mix what ranks have
