"""flex_attention split along its queries, in whole blocks of its mask, with gradients:
the numbers of one device, and the lists of blocks that torch makes of a rank's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxpar
from fxpar.features.sequences import local_flex
from fxpar.graph.builder import Builder
from fxpar.planning import TracedPlan
from tests.helpers.flex_calls import calls, on_cpu

slow = pytest.mark.slow


def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Packed documents of 5 rows, causal."""
    return (i >= j) & (i // 5 == j // 5)


def over_positions(q: Tensor, k: Tensor, v: Tensor, block: int | None) -> Tensor:
    """Packed documents, causal, scores by distance; a mask in blocks, or none."""

    def score(s, b, h, i, j):
        return s * (1 + h) - 0.1 * (i - j).abs()

    rows = q.shape[2]
    sizes = (None, None, rows, rows, "cpu", block)
    mask = create_block_mask(visible, *sizes) if block else None
    return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)


def split_along_queries(
    block: int | None, ranks: int, *, heads: int = 2, grad: bool = False
) -> tuple[TracedPlan, list[Tensor]]:
    torch.manual_seed(0)
    shapes = (2, 4, 16, 8), (2, heads, 16, 8), (2, heads, 16, 8)
    qkv = [torch.randn(n, dtype=torch.float64, requires_grad=grad) for n in shapes]
    plan = fxpar.plan(
        lambda q, k, v: over_positions(q, k, v, block),
        *qkv,
        mesh=f"cp={ranks}",
        mode="propagate",
        grad=grad,
        in_specs=[(None, None, "cp", None)] * 3,
    )
    return plan, qkv


SPLIT = [
    (4, 2, True),
    pytest.param(4, 4, True, marks=slow),
    pytest.param(16, 2, True, marks=slow),
    pytest.param(None, 4, True, marks=slow),
    # Two blocks are no more ranks' than two.
    pytest.param(8, 4, False, marks=slow),
]


@pytest.mark.parametrize("block, ranks, split", SPLIT)
def test_queries_count_places_in_the_whole_sequence(
    block: int | None, ranks: int, split: bool
) -> None:
    plan, qkv = split_along_queries(block, ranks)
    (node,) = calls(plan)
    assert (node.operands[0].dims[2] == ("cp",)) == split
    assert node.operands[1].is_whole
    gathered = [c.bytes for c in plan.collectives if c.bytes == qkv[0].nbytes]
    assert bool(gathered) != split
    torch.testing.assert_close(plan.simulate(*qkv), over_positions(*qkv, block))


@pytest.mark.parametrize("block, ranks, split", SPLIT)
def test_gradients_of_keys_are_sums_over_queries(
    block: int | None, ranks: int, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch)
    plan, qkv = split_along_queries(block, ranks, grad=True)
    assert [node.operands[0].dims[2] == ("cp",) for node in calls(plan)] == [split] * 2
    if split:
        keys = qkv[1].nbytes  # lists of blocks are less
        sent = sorted((c.kind, c.bytes) for c in plan.collectives if c.bytes >= keys)
        assert sent == [("all_gather", keys)] * 2 + [("reduce_scatter", keys)] * 2
    torch.testing.assert_close(plan.simulate(*qkv), plan.reference(*qkv))


def test_heads_where_queries_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """An axis that splits the sequence goes to heads, by all-to-alls."""
    on_cpu(monkeypatch)
    plan, qkv = split_along_queries(8, 4, heads=4, grad=True)
    assert all(node.operands[0].dims[1] == ("cp",) for node in calls(plan))
    assert {c.kind for c in plan.collectives} == {"all_to_all"}
    torch.testing.assert_close(plan.simulate(*qkv), plan.reference(*qkv))


# Blocks of a rank's queries


def lists_of_rank(mask: Any, rank: int, ranks: int) -> list[Tensor]:
    """What the local form makes of the lists by block of keys."""
    graph, mode = fx.Graph(), FakeTensorMode()
    build = Builder(graph, mode)
    whole = [mask.q_num_blocks, mask.q_indices]
    whole += [mask.full_q_num_blocks, mask.full_q_indices]
    inputs = []
    for i, x in enumerate(whole):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = mode.from_tensor(x)
        inputs.append(node)
    own = mask.kv_num_blocks.shape[-1] // ranks
    pairs = zip(inputs[::2], inputs[1::2], strict=True)
    results = [local_flex.own_blocks(build, *x, rank * own, own) for x in pairs]
    graph.output(tuple(x for pair in results for x in pair))
    return fx.GraphModule(torch.nn.Module(), graph)(*whole)


def windowed(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Other keys for each head; blocks of all kinds, and some that nobody sees."""
    return (i >= j) & (i - j < 20 * (1 + h))


@pytest.mark.parametrize("function", [visible, windowed])
@pytest.mark.parametrize("rank", range(4))
def test_lists_of_blocks_are_those_of_a_mask_of_the_ranks_queries(
    function: Any, rank: int
) -> None:
    rows, ranks = 64, 4
    own = rows // ranks
    sizes = 1, 2, rows, rows, "cpu", 4
    whole = create_block_mask(function, *sizes)

    def moved(b: Any, h: Any, i: Any, j: Any) -> Any:
        return function(b, h, i + rank * own, j)

    want = create_block_mask(moved, 1, 2, own, rows, "cpu", 4)
    got = lists_of_rank(whole, rank, ranks)
    expected = want.q_num_blocks, want.q_indices
    expected += want.full_q_num_blocks, want.full_q_indices
    for number, index, numbers, indices in zip(
        got[::2], got[1::2], expected[::2], expected[1::2], strict=True
    ):
        assert number.dtype == index.dtype == torch.int32
        torch.testing.assert_close(number, numbers)
        assert index.shape == indices.shape
        listed = torch.arange(index.shape[-1]) < number[..., None]
        torch.testing.assert_close(index[listed], indices[listed])
