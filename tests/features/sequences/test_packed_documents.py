"""Attention over packed documents whose tokens are split, beside one device.

The kernel runs on CUDA alone. ``on_cpu`` stands for it, in float64, with what it leaves
open: what it writes for keys of no document is NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

import fxpar
from tests.helpers.pairs import diagonal

varlen = pytest.importorskip("torch.nn.attention.varlen")

ROWS, HEADS, WIDTH = 12, 4, 8
TOKENS = ("cp", None, None)
CAUSAL = (-1, 0)
HAS_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def documents(starts_q: Any, starts_k: Any) -> Iterator[tuple[slice, slice]]:
    assert starts_q.dtype == starts_k.dtype == torch.int32
    pairs = zip(starts_q.tolist(), starts_k.tolist(), strict=True)
    begins = list(pairs)
    for (q, k), (q_end, k_end) in zip(begins, begins[1:], strict=False):
        assert 0 <= q <= q_end and 0 <= k <= k_end
        yield slice(q, q_end), slice(k, k_end)


def scores_of(
    q: torch.Tensor, k: torch.Tensor, scale: float, window: Any
) -> torch.Tensor:
    """[heads, queries, keys] of one document, windows aligned with its last key."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    behind = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    left, right = window
    hidden = (behind > right) * (right >= 0) + (-behind > left) * (left >= 0)
    return scores.masked_fill(hidden, -math.inf)


def of_each_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A head of keys for each of the queries'."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def forward(
    q, k, v, starts_q, starts_k, max_q, max_k, is_causal=False, scale=None,
    window_size=None, *settings: Any, **rest: Any,
) -> Any:  # fmt: skip
    window, scale = window_size or (-1, -1), scale or 1 / math.sqrt(WIDTH)
    if is_causal:
        window = CAUSAL
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), math.nan)
    for rows, keys in documents(starts_q, starts_k):
        scores = scores_of(q[rows], of_each_head(k[keys], q), scale, window)
        total = scores.logsumexp(-1)
        lse[:, rows] = total.masked_fill(total == -math.inf, math.inf)
        weight = (scores - lse[:, rows].unsqueeze(-1)).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", weight, of_each_head(v[keys], q))
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, is_causal, state,
    scale=None, window_size=None,
) -> Any:  # fmt: skip
    window, scale = window_size or (-1, -1), scale or 1 / math.sqrt(WIDTH)
    if is_causal:
        window = CAUSAL
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    for rows, keys in documents(starts_q, starts_k):
        key, value = of_each_head(k[keys], q), of_each_head(v[keys], q)
        scores = scores_of(q[rows], key, scale, window)
        weight = (scores - lse[:, rows].unsqueeze(-1)).exp()
        dp = torch.einsum("qhd,khd->hqk", grad[rows], value)
        ds = weight * (dp - (grad[rows] * out[rows]).sum(-1).T.unsqueeze(-1)) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, key)
        for total, made in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[rows])),
            (dv, torch.einsum("hqk,qhd->khd", weight, grad[rows])),
        ):
            total[keys] = made.unflatten(1, (k.shape[1], -1)).sum(2)
    return dq, dk, dv


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> None:
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def tensors(rows: int, keys: int, heads: int = HEADS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (rows, HEADS, WIDTH), (keys, heads, WIDTH), (keys, heads, WIDTH)
    return [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in shapes]


def starts(*places: int) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32)


def planned(
    args: Any, window: Any, ranks: int = 4, lie: Any = TOKENS, **settings: Any
) -> Any:
    def attend(q: Any, k: Any, v: Any, starts_q: Any, *starts_k: Any) -> Any:
        last = starts_k[0] if starts_k else starts_q
        how = {"window_size": window, **settings}
        return varlen.varlen_attn(q, k, v, starts_q, last, 8, 8, **how)

    specs = [lie] * 3 + [(None,)] * (len(args) - 3)
    how = {"mesh": f"cp={ranks}", "mode": "propagate", "grad": True}
    return fxpar.plan(attend, *args, in_specs=specs, out_specs=[lie], **how)


def planned_by_keys(
    args: Any, window: Any, mesh: str, queries: Any, **settings: Any
) -> Any:
    """Keys along ``cp``, queries along an axis of their own, or whole."""

    def attend(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any) -> Any:
        how = {"window_size": window, **settings}
        return varlen.varlen_attn(q, k, v, starts_q, starts_k, 8, 8, **how)

    rows = queries, None, None
    specs = [rows, TOKENS, TOKENS, (None,), (None,)]
    how = {"mesh": mesh, "mode": "propagate", "grad": True}
    return fxpar.plan(attend, *args, in_specs=specs, out_specs=[rows], **how)


def matches(plan: Any, *args: Any) -> None:
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def kinds(plan: Any) -> set[str]:
    return {c.kind for c in plan.collectives}


# A document cut by three ranks, empty ones, borders of documents where ranks' are.
PACKED = [(0, 12), (0, 5, 12), (0, 1, 1, 11, 12), (0, 3, 6, 9, 12), (0, 0, 7, 12, 12)]
WINDOWS = [(-1, -1), CAUSAL, (2, 0), (-1, 2), (3, 1), (0, 99)]


@pytest.mark.parametrize(("places", "window"), diagonal([*PACKED], [*WINDOWS]))
def test_queries_are_split(places: tuple[int, ...], window: Any) -> None:
    """Keys are gathered, their gradients reduced; numbers are those of one device."""
    args = [*tensors(ROWS, ROWS), starts(*places)]
    plan = planned(args, window)
    assert kinds(plan) == {"all_gather", "reduce_scatter"}
    matches(plan, *args)


@pytest.mark.parametrize(
    ("keys", "window"),
    diagonal([(0, 9, 9, 20), (0, 2, 4, 6), (0, 0, 10, 11), (0, 7, 11, 15)], [*WINDOWS]),
)
def test_documents_with_other_keys(keys: tuple[int, ...], window: Any) -> None:
    """Fewer keys than queries, more, and none."""
    args = [*tensors(ROWS, keys[-1]), starts(0, 5, 7, 12), starts(*keys)]
    matches(planned(args, window), *args)


@pytest.mark.parametrize("rows, ranks", [(7, 2), (13, 4), (3, 4)])
def test_tokens_that_ranks_do_not_divide(rows: int, ranks: int) -> None:
    args = [*tensors(rows, rows), starts(0, 2, rows)]
    matches(planned(args, CAUSAL, ranks), *args)


@pytest.mark.skipif(not HAS_SHARED_HEADS, reason="this torch has no shared heads there")
def test_shared_heads_are_sent_once() -> None:
    args = [*tensors(ROWS, ROWS, heads=2), starts(0, 5, 12)]
    plan = planned(args, CAUSAL, enable_gqa=True)
    sent = [c.bytes for c in plan.collectives if c.kind == "all_gather"]
    assert sent == [args[1].numel() * 8] * 2
    matches(plan, *args)


@pytest.mark.skipif(not HAS_SHARED_HEADS, reason="this torch has no shared heads there")
@pytest.mark.parametrize("heads", [HEADS, 2])
def test_heads_are_split(heads: int) -> None:
    """Nothing is sent, forward and backward; prices know how torch counts flops."""
    args = [*tensors(ROWS, ROWS, heads), starts(0, 5, 12)]
    plan = planned(args, CAUSAL, 2, (None, "cp", None), enable_gqa=True)
    calls = [node for node in plan.nodes if "varlen" in node.name]
    assert all(node.operands[1].dims[1] == ("cp",) for node in calls)
    assert not plan.unknown and not plan.collectives
    matches(plan, *args)


KEYS_SPLIT = [("cp=4", None), ("q=2,cp=3", "q")]


def all_keys_rest(plan: Any) -> bool:
    """Whether nothing of a key or value is sent."""
    rows = [node for node in plan.nodes if "varlen" in node.name]
    keys = [node.operands[(1 + ("backward" in node.name)) :][:2] for node in rows]
    return all(x.dims[0] == ("cp",) for pair in keys for x in pair)


@pytest.mark.parametrize("window", [(-1, -1), CAUSAL])
@pytest.mark.parametrize("places", PACKED[:1] + PACKED[2:5:2])
@pytest.mark.parametrize("mesh, queries", KEYS_SPLIT)
def test_keys_are_split(
    mesh: str, queries: Any, places: tuple[int, ...], window: Any
) -> None:
    """No key is sent, forward or backward, nor the gradient of one."""
    args = [*tensors(ROWS, ROWS), starts(*places), starts(*places)]
    plan = planned_by_keys(args, window, mesh, queries)
    assert all_keys_rest(plan)
    matches(plan, *args)


@pytest.mark.parametrize(
    ("keys", "window"),
    diagonal(
        [(0, 9, 9, 20), (0, 2, 4, 6), (0, 0, 10, 11), (0, 7, 11, 15)],
        [(-1, -1), CAUSAL],
    ),
)
def test_split_keys_of_other_documents(keys: tuple[int, ...], window: Any) -> None:
    """Fewer keys than queries, more, none, and as many as ranks do not divide."""
    args = [*tensors(ROWS, keys[-1]), starts(0, 5, 7, 12), starts(*keys)]
    plan = planned_by_keys(args, window, "q=2,cp=3", "q")
    assert all_keys_rest(plan)
    matches(plan, *args)


@pytest.mark.skipif(not HAS_SHARED_HEADS, reason="this torch has no shared heads there")
def test_split_keys_of_shared_heads() -> None:
    places = starts(0, 5, 12)
    args = [*tensors(ROWS, ROWS, heads=2), places, places]
    plan = planned_by_keys(args, CAUSAL, "cp=4", None, enable_gqa=True)
    assert all_keys_rest(plan)
    matches(plan, *args)


def test_keys_of_a_window_are_whole() -> None:
    args = [*tensors(ROWS, ROWS), starts(0, 5, 12), starts(0, 5, 12)]
    plan = planned_by_keys(args, (2, 0), "cp=4", None)
    assert not all_keys_rest(plan)
    matches(plan, *args)


def test_operations_that_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on torch 2.11."""
    for op in [op for op in flop_registry if "varlen" in str(op)]:
        monkeypatch.delitem(flop_registry, op)
    args = [*tensors(ROWS, ROWS), starts(0, 5, 12)]
    plan = planned(args, CAUSAL)
    assert kinds(plan) == {"all_gather", "reduce_scatter"}
    matches(plan, *args)


def test_a_window_with_no_end_behind_its_query_is_whole() -> None:
    """A cut would hide keys that this rank's last queries see."""
    args = [*tensors(ROWS, ROWS), starts(0, 5, 12)]
    plan = planned(args, (2, -1))
    calls = [node for node in plan.nodes if "varlen" in node.name]
    assert calls and not any(x.dims[0] for node in calls for x in node.operands)
    matches(plan, *args)
