"""Keys and values of flex_attention that travel in a ring: the numbers of one device,
also where kernels look at the blocks alone that lists name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    flex_attention,
)

import fxpar
from fxpar.errors import FxparWarning, ScheduleError
from fxpar.planning import TracedPlan
from fxpar.sharding.program import depending_on_tangents
from tests.helpers.flex_calls import check_by_lists, give_largest_scores, on_cpu

slow = pytest.mark.slow

ROWS = 64
SPLIT = (None, None, "cp", None)
DOCUMENTS = torch.arange(ROWS) // 13  # they end within blocks
aten = torch.ops.aten


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, bias: Tensor, block: int | None
) -> tuple[Tensor, Tensor]:
    """Packed documents, causal; scores by distance and a captured bias. Query 3 sees
    nothing."""

    def score(s, b, h, i, j):
        return s * (1 + h) - 0.1 * (i - j).abs() + bias[h, j]

    def visible(b, h, i, j):
        return (i >= j) & (documents[i] == documents[j]) & (i != 3)

    sizes = (None, None, ROWS, ROWS, "cpu", block)
    mask = create_block_mask(visible, *sizes) if block else None
    aux = AuxRequest(lse=True)
    out, others = flex_attention(
        q, k, v, score_mod=score, block_mask=mask, enable_gqa=True, return_aux=aux
    )
    return out, others.lse


def planned(
    block: int | None,
    ranks: int = 4,
    *,
    grad: bool = False,
    fn: Any = attend,
    ring: bool = True,
    **options: Any,
) -> tuple[TracedPlan, list[Tensor]]:
    torch.manual_seed(0)
    shapes = (2, 4, ROWS, 8), (2, 2, ROWS, 8), (2, 2, ROWS, 8), (4, ROWS)
    *qkv, bias = (
        torch.randn(n, dtype=torch.float64, requires_grad=grad) for n in shapes
    )
    args = [*qkv, DOCUMENTS, bias]

    def in_blocks(q, k, v, documents, bias):
        return fn(q, k, v, documents, bias, block)

    options = {
        "mesh": f"cp={ranks}",
        "in_specs": [SPLIT, SPLIT, SPLIT, None, None],
        "out_specs": [SPLIT, (None, None, "cp")],
        "schedule": "none",
    } | options
    plan = fxpar.plan(in_blocks, *args, mode="propagate", grad=grad, **options)
    if not ring:
        return plan, args
    options["schedule"] = lines(plan)
    return planned(block, ranks, grad=grad, fn=fn, ring=False, **options)


def lines(plan: TracedPlan) -> str:
    """A ring for each attention: the gathers before last are those of keys, values."""
    names = [n.name for n in plan.nodes if n.name.startswith("flex_attention")]
    masks = [c for c in plan.collectives if c.kind == "all_gather"]
    keys = [i for i, c in enumerate(masks) if "flex_attention" in c.source][:2]
    first, second = ("all_gather" + (f"_{i}" if i else "") for i in keys)
    return "\n".join(f"overlap([{first}, {second}], {name}, ring=1)" for name in names)


def matches(plan: TracedPlan, args: list[Tensor]) -> None:
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))


@pytest.mark.parametrize(
    "block, ranks, grad",
    [
        (4, 4, True),
        pytest.param(16, 2, True, marks=slow),
        pytest.param(None, 4, True, marks=slow),
        pytest.param(4, 4, False, marks=slow),
        pytest.param(ROWS, 4, True, marks=slow),
        pytest.param(8, 8, True, marks=slow),
    ],
)
def test_keys_travel(
    block: int | None, ranks: int, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch)
    plan, args = planned(block, ranks, grad=grad)
    kinds = [c.kind for c in plan.collectives]
    assert kinds.count("permute") == (ranks - 1) * (3 if grad else 1)
    assert "reduce_scatter" not in kinds
    part = args[1].nbytes // ranks
    gathers = [c.bytes for c in plan.collectives if c.kind == "all_gather"]
    assert all(n < part for n in gathers)
    # What travels in the backward is not kept from the forward.
    local = plan.result.local
    late, permute = depending_on_tangents(local), torch.ops.fxpar.permute.default
    hops = local.find_nodes(op="call_function", target=permute)
    assert sum(hop in late for hop in hops) == (ranks - 1) * (2 if grad else 0)
    matches(plan, args)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=slow)])
def test_lists_name_blocks_of_a_part(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch)
    plan, args = planned(4, ranks, grad=True)
    check_by_lists(plan, args, monkeypatch)


@pytest.mark.slow
def test_captured_integers_have_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)

    def near(q, k, v, documents, bias, block):
        def score(s, b, h, i, j):
            return torch.where(documents[i] == documents[j], s, s / 2) + bias[h, j]

        return flex_attention(q, k, v, score_mod=score, enable_gqa=True)

    matches(*planned(None, 2, grad=True, fn=near, out_specs=[SPLIT]))


def test_the_largest_score_is_that_of_all_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_largest_scores(monkeypatch)

    def most(q, k, v, documents, bias, block):
        aux = AuxRequest(max_scores=True)
        out, others = flex_attention(q, k, v, enable_gqa=True, return_aux=aux)
        return out, others.max_scores

    plan, args = planned(None, fn=most)
    matches(plan, args)


class Layer(nn.Module):
    """Attention and its projections, along the sequence."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.inner, self.outer = (
            nn.Linear(2048, n * 2048, bias=False, **how) for n in (3, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (16, 128)) for t in self.inner(x).chunk(3, -1)]
        qkv = [fxpar.constrain(t.transpose(1, 2), *SPLIT) for t in heads]
        out = flex_attention(*qkv).transpose(1, 2).flatten(2)
        return self.outer(out).square().mean()


def test_a_ring_is_chosen_for_a_long_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other lines are tried before, in windows that hold the functions of scores."""
    on_cpu(monkeypatch)
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    how: Any = {"dtype": torch.bfloat16, "device": "meta"}
    x = torch.randn(1, 32768, 2048, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxparWarning)
        options = {"mesh": "cp=8", "mode": "propagate", "schedule": "auto"}
        plan = fxpar.plan(Layer(**how), x, grad=True, **options)
    ring = "overlap([all_gather, all_gather_1], {}, ring=1)".format
    names = ("flex_attention", "flex_attention_backward")
    assert str(plan.schedule).split("\n")[:2] == [ring(name) for name in names]


def test_a_part_of_a_block_is_refused() -> None:
    def wide(q, k, v, documents, bias, block):
        sizes = (None, None, ROWS, ROWS, "cpu", (4, block))
        mask = create_block_mask(lambda b, h, i, j: i >= j, *sizes)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    with pytest.raises(ScheduleError, match="blocks of 32 keys, of which a part cuts"):
        planned(32, 4, fn=wide, out_specs=[SPLIT])


def test_an_order_of_all_blocks_is_refused() -> None:
    def ordered(q, k, v, documents, bias, block):
        sizes = (None, None, ROWS, ROWS, "cpu", block)
        mask = create_block_mask(lambda b, h, i, j: i >= j, *sizes)
        mask.dq_write_order = mask.kv_indices
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    with pytest.raises(ScheduleError, match="writes in an order of all blocks"):
        planned(4, 4, fn=ordered, out_specs=[None])
