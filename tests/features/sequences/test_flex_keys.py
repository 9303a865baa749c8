"""flex_attention split along its keys, in whole blocks of its mask: the numbers of one
device, also where kernels look at the blocks alone that lists name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    flex_attention,
)

import fxpar
from fxpar.features.sequences import (
    merge_attention,
)
from fxpar.planning import TracedPlan
from tests.helpers.flex_calls import calls, check_by_lists, give_largest_scores, on_cpu

slow = pytest.mark.slow

ROWS, KEYS = 16, 64
BY_KEYS = (None, None, "cp", None)
DOCUMENTS = torch.arange(KEYS) // 13  # they end within blocks
LEAST = torch.finfo(torch.float64).min


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, bias: Tensor, block: int | None
) -> tuple[Tensor, Tensor]:
    """The last queries of a sequence: packed documents, causal, of a captured tensor;
    scores by distance and a captured bias. Query 3 sees nothing."""
    behind = k.shape[2] - q.shape[2]

    def score(s, b, h, i, j):
        return s * (1 + h) - 0.1 * (i - j).abs() + bias[h, j]

    def visible(b, h, i, j):
        same = documents[i + behind] == documents[j]
        return (i + behind >= j) & same & (i != 3)

    sizes = (None, None, q.shape[2], k.shape[2], "cpu", block)
    mask = create_block_mask(visible, *sizes) if block else None
    aux = AuxRequest(lse=True)
    out, others = flex_attention(
        q, k, v, score_mod=score, block_mask=mask, enable_gqa=True, return_aux=aux
    )
    return out, others.lse


def tensors(grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, ROWS, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 8)
    x = [torch.randn(n, dtype=torch.float64, requires_grad=grad) for n in shapes]
    bias = torch.randn(4, KEYS, dtype=torch.float64, requires_grad=grad)
    return [*x, DOCUMENTS, bias]


def planned(
    block: int | None, ranks: int = 4, *, grad: bool = False, **options: Any
) -> tuple[TracedPlan, list[Tensor]]:
    args = tensors(grad)
    options = {
        "mesh": f"cp={ranks}",
        "in_specs": [None, BY_KEYS, BY_KEYS, None, None],
        "out_specs": [None, None],
        "fn": attend,
    } | options
    fn = options.pop("fn")

    def last_rows(q, k, v, documents, bias):
        return fn(q, k, v, documents, bias, block)

    return fxpar.plan(last_rows, *args, mode="propagate", grad=grad, **options), args


def matches(plan: TracedPlan, args: list[Tensor]) -> None:
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))


SPLIT = [
    (4, 4, True),
    pytest.param(16, 2, True, marks=slow),
    pytest.param(KEYS, 4, True, marks=slow),
    pytest.param(None, 4, True, marks=slow),
    # Two blocks are no more ranks' than two, and one that is cut short is nobody's.
    pytest.param(32, 4, False, marks=slow),
    (24, 2, False),
    # Parts of several sizes have no weights that count.
    pytest.param(None, 3, False, marks=slow),
]


@pytest.mark.parametrize("grad", [pytest.param(False, marks=slow), True])
@pytest.mark.parametrize("block, ranks, split", SPLIT)
def test_keys_count_places_in_the_whole_sequence(
    block: int | None,
    ranks: int,
    split: bool,
    grad: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu(monkeypatch)
    plan, args = planned(block, ranks, grad=grad)
    nodes = calls(plan)
    assert len(nodes) == 1 + grad
    assert all((node.operands[1].dims[2] == ("cp",)) == split for node in nodes)
    whole_keys = args[1].nbytes
    gathers = [
        c for c in plan.collectives if c.kind == "all_gather" and c.bytes >= whole_keys
    ]
    assert bool(gathers) != split
    if not split:
        said = "flex_attention reads dim 2 of k", "uneven: 64 rows of k"
        assert any(
            note.removeprefix("gathered: ").startswith(said) for note in plan.notes
        )
    matches(plan, args)


def test_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    specs = [(None, None, "q", None), *[(None, None, "k", None)] * 2, None, None]
    options = {"mesh": "q=2,k=4", "in_specs": specs, "out_specs": None}
    plan, args = planned(4, grad=True, **options)
    for node in calls(plan):
        assert [spec.dims[2] for spec in node.operands[:2]] == [("q",), ("k",)]
    matches(plan, args)


def test_outputs_have_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, args = planned(4)
    matches(plan, args)

    monkeypatch.setattr(merge_attention, "_scaled", lambda build, out, weight: out)
    plan, args = planned(4)
    with pytest.raises(AssertionError):
        matches(plan, args)


@pytest.mark.parametrize("block", [None, 4])
def test_weights_count_keys_whose_scores_are_the_least_number(
    block: int | None,
) -> None:
    """Of these a log-sum-exp keeps no count; to base 2 it is none."""

    def least(q, k, v, documents, bias, block):
        def score(s, b, h, i, j):
            return torch.where(i % 2 == 0, LEAST, s)

        sizes = (None, None, ROWS, KEYS, "cpu", block)
        mask = None
        if block:  # parts are hidden, too
            mask = create_block_mask(lambda b, h, i, j: i // 4 >= j // 16, *sizes)
        return flex_attention(
            q, k, v, score_mod=score, block_mask=mask, enable_gqa=True
        )

    plan, args = planned(block, fn=least, out_specs=[None])
    (node,) = calls(plan)
    assert node.operands[1].dims[2] == ("cp",)
    matches(plan, args)


def test_the_largest_score_is_that_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    give_largest_scores(monkeypatch)

    def most(q, k, v, documents, bias, block):
        aux = AuxRequest(max_scores=True)
        out, others = flex_attention(q, k, v, enable_gqa=True, return_aux=aux)
        return out, others.max_scores

    plan, args = planned(None, fn=most)
    (node,) = calls(plan)
    assert node.operands[1].dims[2] == ("cp",)
    matches(plan, args)


def test_a_row_of_a_part_may_see_nothing() -> None:
    """What a caller says of whole rows does not hold of parts."""

    def safe(q, k, v, documents, bias, block):
        options = {"ROWS_GUARANTEED_SAFE": True}
        return flex_attention(q, k, v, enable_gqa=True, kernel_options=options)

    plan, _ = planned(None, fn=safe, out_specs=[None])
    assert plan.result is not None
    (node,) = (n for n in plan.result.local.nodes if n.name.startswith("flex_att"))
    options: Any = node.args[6]
    assert not options["ROWS_GUARANTEED_SAFE"] and options["OUTPUT_LOGSUMEXP"]


def test_an_order_of_blocks_leaves_them_whole() -> None:
    """A backward that is to write in an order, which counts all blocks."""

    def ordered(q, k, v, documents, bias, block):
        sizes = (None, None, ROWS, KEYS, "cpu", block)
        mask = create_block_mask(lambda b, h, i, j: i + KEYS - ROWS >= j, *sizes)
        mask.dq_write_order = mask.kv_indices
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    plan, args = planned(4, 2, fn=ordered, out_specs=[None])
    (node,) = calls(plan)
    assert node.operands[0].dims[2] == node.operands[1].dims[2] == ()
    matches(plan, args)


# Kernels that look at listed blocks alone


@pytest.mark.parametrize("mesh", ["k=4", pytest.param("q=2,k=2", marks=slow)])
def test_lists_name_blocks_of_a_rank(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch)
    queries = (None, None, "q", None) if "q" in mesh else None
    specs = [queries, *[(None, None, "k", None)] * 2, None, None]
    options = {"mesh": mesh, "in_specs": specs, "out_specs": None, "grad": True}
    plan, args = planned(4, **options)
    check_by_lists(plan, args, monkeypatch)
