"""The price of causal attention: the pairs that the rank with most of them sees."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpar
from fxpar.sharding.cost.hardware_table import Peak, lookup
from fxpar.sharding.cost.op import flops_of
from fxpar.sharding.cost.program_kernels import flops_of_op, seconds, work_alone
from fxpar.sharding.cost.visible_pairs import visible_pairs
from fxpar.sharding.strategy import Strategy

BATCH, HEADS, WIDTH, ROWS, RANKS = 2, 4, 8, 32, 4
# Flops of a pair, forward and backward.
EACH = BATCH * HEADS * WIDTH * 4, BATCH * HEADS * WIDTH * 10
SEQUENCE = (None, None, "cp", None)

BALANCED = (
    "balance(causal_attention_default)\nbalance(causal_attention_backward_default)"
)
RINGS = """
overlap([all_gather, all_gather_1], causal_attention_default, ring=1)
overlap([all_gather, all_gather_1], causal_attention_backward_default, ring=1)
"""
BALANCED_RINGS = f"""
{BALANCED}
overlap([all_gather, all_gather_1], balanced_causal_attention_default, ring=1)
overlap([all_gather, all_gather_1], balanced_causal_attention_backward_default, ring=1)
"""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def planned(
    fn: Any = attend, spec: Any = SEQUENCE, mesh: Any = None, **how: Any
) -> Any:
    tensors = [
        torch.randn(BATCH, HEADS, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    how = {"mode": "propagate", "grad": True, "schedule": "none", **how}
    return fxpar.plan(
        fn, *tensors, mesh=mesh or f"cp={RANKS}", in_specs=[spec] * 3, **how
    )


def flops(plan: Any) -> tuple[float, float]:
    """Of the attentions of a rank, forward and backward."""
    calls = [n for n in plan.result.local.nodes if "attention" in str(n.target)]
    late = ["backward" in str(n.target) for n in calls]
    forward = sum(
        flops_of(n) for n, is_late in zip(calls, late, strict=True) if not is_late
    )
    return forward, sum(map(flops_of, calls)) - forward


@pytest.mark.parametrize("ahead", range(-9, 9))
def test_pairs_are_those_that_a_mask_leaves(ahead: int) -> None:
    for queries, keys in itertools.product((1, 3, 5), (1, 4, 7)):
        places = torch.arange(queries)[:, None] + ahead - torch.arange(keys)
        assert visible_pairs(queries, keys, ahead) == int((places >= 0).sum())


def test_one_rank_pays_for_what_it_sees_and_more_ranks_for_the_last_queries() -> None:
    whole = ROWS * (ROWS + 1) // 2
    assert flops(planned(mesh="cp=1")) == tuple(whole * n for n in EACH)
    own = ROWS // RANKS
    last = own * ROWS - own * (own - 1) // 2
    assert flops(planned()) == tuple(last * n for n in EACH)


def test_heads_have_an_equal_share() -> None:
    whole = flops(planned(mesh="cp=1"))
    heads = flops(planned(spec=(None, "cp", None, None)))
    assert heads == tuple(n / RANKS for n in whole)


def test_balanced_ranks_have_the_mean_of_all() -> None:
    whole = flops(planned(mesh="cp=1"))
    for schedule in (BALANCED, BALANCED_RINGS):
        assert flops(planned(schedule=schedule)) == tuple(n / RANKS for n in whole)


def test_hops_of_a_ring_wait_for_the_rank_that_sees_most() -> None:
    own = ROWS // RANKS
    seen = (RANKS - 1) * own**2 + own * (own + 1) // 2
    assert flops(planned(schedule=RINGS)) == tuple(seen * n for n in EACH)
    assert flops(planned()) == flops(planned(schedule=RINGS))


def test_without_a_mask_every_pair_is_paid() -> None:
    plan = planned(fn=F.scaled_dot_product_attention)
    assert flops(plan) == tuple(ROWS * ROWS // RANKS * n for n in EACH)


def test_a_mask_that_kernels_read_hides_no_work() -> None:
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril().clone()
    mask[0, 0] = False  # not causal, so that it stays

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert flops(planned(fn=masked)) == tuple(ROWS * ROWS // RANKS * n for n in EACH)


@pytest.mark.parametrize("masked", [0.0, 1.0])
@pytest.mark.parametrize("factor", "sth")
def test_a_search_pays_for_the_rank_that_sees_most(factor: str, masked: float) -> None:
    """And, where kernels skip nothing, for what a mask hides."""
    decision = planned(grad=False, mode="replicate").result.decision
    (op,) = (op for op in decision.program.ops if flops_of_op(op))
    slow = replace(
        lookup("cpu"),
        peaks=(("float64", Peak(1.0)), ("float64 attention", Peak(1.0))),
        masked=masked,
    )
    work = work_alone(op, decision.program.values)
    paid = seconds(op, work, Strategy(((factor, ("cp",)),)), decision.mesh, slow)
    own, triangle = ROWS // RANKS, ROWS * (ROWS + 1) // 2
    most = {
        "s": own * ROWS - own * (own - 1) // 2,
        "t": own * ROWS - own * (own - 1) // 2,
        "h": triangle / RANKS,
    }
    hidden = masked * (ROWS * ROWS - triangle) / RANKS
    assert paid == pytest.approx((most[factor] + hidden) * EACH[0])


def test_heads_of_packed_documents_have_an_equal_share() -> None:
    """Whose dim before the features is no sequence."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def packed(q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return varlen.varlen_attn(q, k, k, starts, starts, 8, 8, window_size=(-1, 0))

    with FakeTensorMode():
        q, k = (torch.empty(16, 8, 16, dtype=torch.float16) for _ in range(2))
        starts = torch.empty(3, dtype=torch.int32)
    decision = fxpar.plan(packed, q, k, starts, mesh="tp=2", mode="replicate")
    program, mesh = decision.result.decision.program, decision.mesh
    (op,) = (op for op in program.ops if "varlen" in str(op.target))
    slow = replace(lookup("cpu"), peaks=(("float32", Peak(1.0)),))
    work = work_alone(op, program.values)
    for dim in (0, 1):
        (factor,) = op.rule.tensors[0][dim]
        split = Strategy(((factor, ("tp",)),))
        paid, whole = (seconds(op, work, s, mesh, slow) for s in (split, Strategy()))
        assert paid == pytest.approx(whole / 2)
