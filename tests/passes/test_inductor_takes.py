"""Local graphs are compiled as they are: what Inductor makes of others while a program
is traced, it does not take any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor import lowering
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fxpar
from fxpar.features.sequences.overlap_attention import balances_of, rings_of
from fxpar.fusion import choose_schedule
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.schedule import Schedule
from fxpar.passes.decompose import decompose
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten

SEQUENCE = (None, None, "cp", None)

Lines = Callable[[fx.Graph, Mesh], Schedule]


def refused(graph: fx.Graph) -> set[str]:
    """Ops that Inductor has a decomposition for, and no kernel."""
    known = select_decomp_table()
    return {
        str(node.target)
        for node in graph.nodes
        if node.target in known and node.target not in lowering.lowerings
    }


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, (rows - keys).abs() < 3)


def rings(graph: fx.Graph, mesh: Mesh) -> Schedule:
    return rings_of(graph)


@pytest.mark.parametrize(
    "fn, lines", [(causal, rings), (window, rings), (causal, balances_of)]
)
def test_attention_by_a_schedule(
    fn: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(state: choose_schedule.Attempts, **_: Any) -> choose_schedule.Chosen:
        graph, mesh = state.local, state.mesh
        schedule = lines(graph, mesh)
        assert len(schedule.lines) == 2
        after = apply(schedule, graph, mesh)
        return choose_schedule.Chosen(schedule, after, (1, 1), (1, 1))

    monkeypatch.setattr(choose_schedule, "choose", choose)
    dtype = torch.bfloat16
    args = [torch.randn(1, 2, 8, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    options = {"mesh": "cp=2", "in_specs": [SEQUENCE] * 3, "mode": "propagate"}
    plan = fxpar.plan(fn, *args, **options, grad=True, schedule="auto")
    assert not refused(plan.result.local)


@pytest.mark.parametrize("fn", [causal, window])
def test_attention_on_split_keys(fn: Any) -> None:
    args = [torch.randn(1, 2, rows, 4, dtype=torch.bfloat16) for rows in (1, 16, 16)]
    specs = [None, SEQUENCE, SEQUENCE]
    plan = fxpar.plan(fn, *args, mesh="cp=2", in_specs=specs, mode="propagate")
    assert not refused(plan.result.local)


def test_a_loss_over_a_split_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    x, labels = torch.randn(8, 16, requires_grad=True), torch.randint(16, (8,))
    specs = [(None, "tp"), None]
    options = {"mesh": "tp=2", "in_specs": specs, "mode": "propagate", "grad": True}
    plan = fxpar.plan(F.cross_entropy, x, labels, **options)
    assert "all_gather" in {c.kind for c in plan.collectives}
    assert not refused(plan.result.local)


def test_booleans_are_padded_as_bytes() -> None:
    """In shards that are not alike; Inductor (2.13) cannot pad those that it computes
    of 8 bytes each."""

    def fn(ids: torch.Tensor) -> torch.Tensor:
        return ids > 1

    ids = torch.randint(4, (5, 7))
    specs = {"in_specs": [("dp", None)], "out_specs": [(None, None)]}
    plan = fxpar.plan(fn, ids, mesh="dp=2", **specs, mode="propagate")
    pads = plan.result.local.find_nodes(
        op="call_function", target=aten.constant_pad_nd.default
    )
    assert [node.meta["val"].dtype for node in pads] == [torch.uint8]
    assert torch.equal(plan.simulate(ids), fn(ids))


def test_what_is_refused_is_noticed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.logaddexp.default, (x, x))
    assert refused(graph) == {"aten.logaddexp.default"}


ADDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": lambda x: aten.logaddexp.default(x, x),
    "a number": lambda x: aten.clamp.default(x, -0.5, 0.5),
    "positions": lambda x: aten.index_select.default(
        x, 0, aten.argsort.default(x[:, 0])
    ),
    "keywords": lambda x: aten._to_copy.default(x, dtype=torch.bfloat16),
    "several": lambda x: aten.aminmax.default(x, dim=0),
    "of others": lambda x: aten.logsumexp.default(aten.flip.default(x, [0]), [1]),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_is_decomposed(name: str) -> None:
    x = torch.randn(5, 6)
    graph = make_fx(ADDED[name], tracing_mode="fake")(x).graph
    mode = next(iter(graph.nodes)).meta["val"].fake_mode
    want = fx.Interpreter(fx.GraphModule({}, graph)).run(x)
    assert refused(graph)
    decompose(graph, mode)
    assert not refused(graph)
    assert all("val" in node.meta for node in graph.nodes if node.op != "output")
    torch.testing.assert_close(fx.Interpreter(fx.GraphModule({}, graph)).run(x), want)


def test_what_inductor_takes_stays() -> None:
    graph = make_fx(lambda x: aten.mm.default(x, x), tracing_mode="fake")(torch.eye(3))
    before = str(graph.graph)
    decompose(graph.graph, next(iter(graph.graph.nodes)).meta["val"].fake_mode)
    assert str(graph.graph) == before
