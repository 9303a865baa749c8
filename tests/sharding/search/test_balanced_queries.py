"""A search counts on the schedule to balance queries, where it may: its price of causal
attention, and the plan that it finds, after its schedule."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.features.sequences.overlap_attention import balances_of
from fxpar.runtime.steps import plan_steps
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.cost.op import query_position
from fxpar.sharding.cost.program_kernels import swap_seconds
from tests.helpers.machines import products_alone

SEQUENCE = (None, None, "cp", None)
HEADS = (None, "cp", None, None)


@pytest.fixture(autouse=True)
def _on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With attention as fast as products, so that what is sent decides."""
    products_alone(lookup("h100")).save(tmp_path / "hardware.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "hardware.json"))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def tensors(rows: int, key_heads: int, *, keys: int | None = None) -> list[Any]:
    shapes = (32, rows), *[(key_heads, keys or rows)] * 2
    return [
        torch.empty(1, *n, 128, dtype=torch.bfloat16, device="meta") for n in shapes
    ]


def planned(args: list[Any], ranks: int = 4, fn: Any = causal, **how: Any) -> Any:
    specs = {"in_specs": [SEQUENCE] * len(args), "out_specs": [SEQUENCE]}
    how = {"mode": "search", "schedule": "auto", **specs, **how}
    return fxpar.plan(fn, *args, mesh=f"cp={ranks}", **how)


def queries(plan: Any) -> Any:
    """Spec of the queries."""
    (node,) = (node for node in plan.nodes if "attention" in node.name)
    return node.operands[0].dims


@pytest.mark.slow
@pytest.mark.parametrize("rows, ranks", [(1 << 13, 4), (1 << 15, 8)])
def test_queries_are_split_where_a_schedule_balances_them(
    rows: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key head: halves of queries are less to send than the queries by heads."""
    args = tensors(rows, 1)
    plan = planned(args, ranks)
    assert queries(plan) == ((), (), ("cp",), ())
    assert [line.verb for line in plan.result.schedule.lines] == ["balance"]
    assert queries(planned(args, ranks, schedule="none")) == ((), ("cp",), (), ())
    monkeypatch.setattr(plan_steps, "can_choose_schedule", lambda request: False)
    before = planned(args, ranks)
    assert queries(before) == ((), ("cp",), (), ())
    assert plan.predicted.seconds < before.predicted.seconds


@pytest.mark.parametrize("key_heads", [4, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rows", [pytest.param(1 << 12, marks=pytest.mark.slow), 1 << 14]
)
def test_no_plan_is_slower_than_one_that_counts_on_no_schedule(
    rows: int, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tensors(rows, key_heads))
    monkeypatch.setattr(plan_steps, "can_choose_schedule", lambda request: False)
    before = planned(tensors(rows, key_heads))
    assert plan.predicted.seconds <= before.predicted.seconds * 1.001


@pytest.mark.slow
def test_the_search_and_the_prediction_agree_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of queries that are balanced and heads, as they are scheduled; as they lie they
    are ranked otherwise."""

    def correlation() -> float:
        counted, predicted = [], []
        for rows, spec in itertools.product((13, 14, 15), (SEQUENCE, HEADS)):
            for ranks in (4, 8):

                def held(q: Any, k: Any, v: Any, spec: Any = spec) -> Any:
                    return causal(fxpar.constrain(q, *spec), k, v)

                plan = planned(tensors(1 << rows, 1), ranks, held)
                counted.append(plan.result.decision.search.solution.cost)
                predicted.append(plan.predicted.seconds)
        places = ([sorted(x).index(n) for n in x] for x in (counted, predicted))
        return statistics.correlation(*places)

    scheduled = correlation()
    assert scheduled >= 0.99
    monkeypatch.setattr(plan_steps, "can_choose_schedule", lambda request: False)
    assert correlation() < scheduled


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


PADDING = torch.empty(1, 1, 1, 64, dtype=torch.bool)
# (function, arguments, what the axis splits, whether queries can be balanced).
CASES: dict[str, tuple[Any, list[Any], Any, bool]] = {
    "queries": (causal, tensors(64, 32), SEQUENCE, True),
    "shared heads": (causal, tensors(64, 8), SEQUENCE, True),
    "heads": (causal, tensors(64, 32), HEADS, False),
    "no halves": (causal, tensors(60, 32), SEQUENCE, False),
    "unlike shards": (causal, tensors(62, 32), SEQUENCE, False),
    "other keys": (causal, tensors(64, 32, keys=128), SEQUENCE, False),
    "no mask": (full, tensors(64, 32), SEQUENCE, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_price_counts_on_what_the_verb_takes(name: str) -> None:
    fn, args, spec, balances = CASES[name]
    specs = [spec, *[spec if spec is HEADS else None] * 2]
    how = {"mode": "propagate", "schedule": "none", "out_specs": [spec]}
    plan = planned(args, fn=fn, in_specs=specs, **how)
    decision = plan.result.decision
    (op,) = (op for op in decision.program.ops if query_position(op.target) is not None)
    strategy = decision.strategies[op.index]
    assert strategy.axes_of
    paid = swap_seconds(op, strategy, decision.mesh, lookup("h100"))
    assert (paid is not None) == balances
    assert bool(balances_of(plan.result.local, decision.mesh).lines) == balances


@pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="torch refuses a mask with is_causal"
)
def test_a_mask_beside_a_causal_one_is_not_balanced() -> None:
    args = [torch.zeros(x.shape) for x in tensors(64, 32)]
    how = {"mode": "propagate", "schedule": "none"}
    specs = [SEQUENCE, None, None, None]
    plan = planned([*args, PADDING], fn=masked, in_specs=specs, **how)
    decision = plan.result.decision
    (op,) = (op for op in decision.program.ops if query_position(op.target) is not None)
    strategy = decision.strategies[op.index]
    assert swap_seconds(op, strategy, decision.mesh, lookup("h100")) is None
    assert not balances_of(plan.result.local, decision.mesh).lines
