"""Schedules and buckets of programs some of whose shards are not alike."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpar
from fxpar import _torch
from fxpar.errors import ScheduleError
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.node_legality import UnevenOp, close, is_closed
from fxpar.graph import collective_nodes
from fxpar.graph.builder import copy_of
from fxpar.graph.custom_ops import group_name
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.order_collectives import Settings
from fxpar.passes.simulate.launches import crossings
from fxpar.runtime.steps import binding

WORDS = 37


class Head(nn.Module):
    """Layers that two ranks divide, and words that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(64, 16) for _ in range(2))
        self.words = nn.Linear(16, WORDS, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return F.cross_entropy(self.words(x), labels)


HINTS = {
    "ups.*.weight": ("tp", None),
    "downs.*.weight": (None, "tp"),
    "words.weight": ("tp", None),
}


def mode_of(graph: fx.Graph) -> Any:
    return _torch.fake.fake_mode_of([node.meta.get("val") for node in graph.nodes])


def planned(
    mesh: str, rows: int = 64, **options: Any
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, args = Head().double(), (torch.randn(rows, 16).double(),)
    args += (torch.arange(rows) % WORDS,)
    options = {"mode": "propagate", "grad": True, **options}
    plan = fxpar.plan(model, *args, mesh=mesh, **options)
    assert not plan.result.decision.is_even
    return plan, args


def check(plan: Any, args: tuple[torch.Tensor, ...]) -> None:
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)


def test_lines_for_layers_that_are_even() -> None:
    plan, args = planned("tp=2", hints=HINTS)
    local, mesh = plan.result.local, plan.mesh
    graph = apply("", local, mesh, lowered=False)
    names = [n.name for n in graph.nodes if n.target is collective_nodes.all_reduce]
    lines = [f"split({name}, dim=0)" for name in names if takes_split(plan, name)]
    assert len(lines) >= 4  # two layers, forward and backward
    after = apply("\n".join(lines), local, mesh, lowered=True)
    check(replace(plan, result=replace(plan.result, graph=after)), args)
    check(*planned("tp=2", hints=HINTS, schedule="split(all_reduce, dim=0)"))


def takes_split(plan: Any, name: str) -> bool:
    """Whether an all-reduce may be split along its rows."""
    with contextlib.suppress(ScheduleError):
        apply(f"split({name}, dim=0)", plan.result.local, plan.mesh)
        return True
    return False


def _closed_ops(plan: Any) -> fx.Graph:
    graph = copy_of(plan.result.local)
    close(graph, plan.mesh, mode_of(graph))
    return graph


def test_what_reads_a_closed_op_is_closed() -> None:
    """A product over a dim that ranks do not share alike, of which each computed its
    operands, though all have as much of what it makes."""
    x, w = torch.randn(6, 7).double(), torch.randn(7, 4).double()
    plan = fxpar.plan(
        lambda x, w: x.sin() @ w.sin(),
        *(x, w),
        mesh="tp=2",
        in_specs=[(None, "tp"), ("tp", None)],
        out_specs=[("tp", None)],
        mode="propagate",
    )
    torch.testing.assert_close(plan.simulate(x, w), plan.reference(x, w))
    targets = [node.target for node in _closed_ops(plan).nodes]
    assert torch.ops.aten.mm.default not in targets
    assert sum(isinstance(target, UnevenOp) for target in targets) >= 3


def test_what_is_closed() -> None:
    """What reads or makes the words, or their gradient's rows, and no layer."""
    plan, _ = planned("tp=2", hints=HINTS)
    graph = _closed_ops(plan)
    inner = [
        next(n for n in region.target.graph.nodes if n.op == "call_function")
        for region in graph.nodes
        if isinstance(region.target, UnevenOp)
    ]
    shapes = {n for node in inner for n in node.meta["val"].shape}
    assert inner and 19 in shapes and 64 // 2 not in shapes
    left = Counter(str(node.target) for node in graph.nodes)
    assert left["aten.erf.default"] == 4  # and again in the backward


def test_a_line_that_names_unlike_shards_is_refused() -> None:
    plan, _ = planned("tp=2", hints=HINTS)
    graph = _closed_ops(plan)
    item = next(node for node in graph.nodes if is_closed(node))
    with pytest.raises(ScheduleError, match="has shards of unequal sizes"):
        apply(f"cut({item.name}, axes=tp)", plan.result.local, plan.mesh)


def launches(plan: Any, rank: int, most: int) -> list[str]:
    """The collectives of one rank, in the order they run, with buckets of so many
    bytes."""
    mesh, graph = plan.mesh, plan.result.local
    names = binding.bind(
        graph,
        mesh,
        rank,
        lambda axes: group_name(mesh, axes),
        mode_of(graph),
        inductor=False,
    )
    return crossings(as_run(names, settings=Settings(bucket=most)), even=False)


@pytest.mark.parametrize("mesh", ["dp=2{1.0,0.5}", "dp=2,tp=2"])
def test_gradients_go_in_buckets(mesh: str) -> None:
    """The same ones on every rank, though some rank's fill less of a bucket."""
    plan, args = planned(mesh, hints=HINTS if "tp" in mesh else None)
    alone = launches(plan, 0, 0)
    sizes = range(1 << 10, 1 << 14, 3 << 10)
    for most in sizes:
        ranks = [launches(plan, rank, most) for rank in range(plan.mesh.size)]
        assert all(lines == ranks[0] for lines in ranks)
    assert len(ranks[0]) < len(alone)
    check(plan, args)


def test_buckets_by_what_a_rank_holds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_note_largest", lambda *_: None)
    plan, _ = planned("dp=2,tp=2", hints=HINTS)
    some = range(256, 1 << 13, 256)
    assert any(launches(plan, 0, n) != launches(plan, 3, n) for n in some)
