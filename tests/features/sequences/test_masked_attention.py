"""Attention under masks whose keys are split: gathered nowhere, or in a ring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.errors import ScheduleError
from fxpar.features.sequences import (
    merge_attention,
    ring_attention,
)

BATCH, HEADS, ROWS, WIDTH = 2, 4, 16, 8
SEQUENCE = (None, None, "cp", None)
BY_ROWS = [SEQUENCE] * 3
BY_KEYS = [None, SEQUENCE, SEQUENCE]

LEAST = torch.finfo(torch.float64).min

places = torch.arange(ROWS)
causal = places[:, None] >= places


def is_refused_with_a_mask() -> bool:
    """Return whether torch refuses a mask of a causal call, as 2.15 does."""
    x = torch.ones(1, 1, 2, 2)
    try:
        F.scaled_dot_product_attention(x, x, x, torch.ones(2, 2) > 0, is_causal=True)
    except RuntimeError:
        return True
    return False


of_causal_calls = pytest.mark.skipif(
    is_refused_with_a_mask(), reason="torch refuses a mask of a causal call"
)


def padded(left: bool) -> torch.Tensor:
    """Of the second sequence more than half is padding."""
    kept = torch.ones(BATCH, ROWS, dtype=torch.bool)
    kept[1, : ROWS - 5] = False
    return (kept if left else kept.flip(1))[:, None, None]


def documents() -> torch.Tensor:
    number = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 3 + [2] * 4])
    return (number[:, None, :, None] == number[:, None, None]) & causal


# [batch, heads, queries, keys] or what broadcasts to it; true: seen.
SEEN: dict[str, torch.Tensor] = {
    "causal": causal,
    "padded left": causal & padded(True),
    "padded right": causal & padded(False),
    "padding alone": padded(True),
    "documents": documents(),
    "window": causal & (places > places[:, None] - 3),
    "by head": documents() | (torch.arange(HEADS) == 1)[:, None, None],
    "nothing": causal & (places[:, None] != 3),
}


def additive(seen: torch.Tensor, low: float = -math.inf) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)


def tensors(heads: int = HEADS, rows: int = ROWS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(BATCH, HEADS, rows, WIDTH), *[(BATCH, heads, ROWS, WIDTH)] * 2]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]


def attend(q, k, v, mask) -> torch.Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=shared)


def planned(*args: Any, specs: Any = BY_ROWS, mesh: str = "cp=4", **more: Any) -> Any:
    more = {"mode": "propagate", "grad": True, "schedule": "none", **more}
    specs = [*specs, (None,) * args[3].dim()]
    return fxpar.plan(attend, *args, mesh=mesh, in_specs=specs, **more)


def ring(plan: Any) -> str:
    """Its lines for a plan that gathers keys."""
    gathers = "[all_gather, all_gather_1]"
    nodes = plan.result.local.nodes
    names = [n.name for n in nodes if ring_attention.form_of(n.target)]
    return "\n".join(f"overlap({gathers}, {name}, ring=1)" for name in names)


def matches(plan: Any, *args: Any) -> None:
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def ringed(*args: Any, **more: Any) -> Any:
    plan = planned(*args, schedule=ring(planned(*args, **more)), **more)
    assert {c.kind for c in plan.collectives} == {"permute"}
    return plan


SOON = {("padded left", "cp=4"), ("nothing", "cp=4")}


@pytest.mark.parametrize(
    "name, mesh",
    [
        pytest.param(n, m, marks=() if (n, m) in SOON else pytest.mark.slow)
        for n in SEEN
        for m in ("cp=4", "dp=2,cp=2")
    ],
)
def test_a_ring_under_a_mask(name: str, mesh: str) -> None:
    args = [*tensors(), additive(SEEN[name])]
    matches(ringed(*args, mesh=mesh), *args)


@pytest.mark.parametrize("low", [LEAST, -1e4])
def test_a_ring_under_a_bias_that_hides_by_a_number(low: float) -> None:
    """Of the least number a log-sum-exp keeps no count of keys."""
    args = [*tensors(), additive(SEEN["nothing"], low)]
    matches(ringed(*args), *args)


@pytest.mark.parametrize("name", ["padded left", "documents"])
def test_a_ring_of_shared_heads(name: str) -> None:
    args = [*tensors(heads=2), additive(SEEN[name])]
    matches(ringed(*args), *args)


def test_a_boolean_mask() -> None:
    args = [*tensors(), SEEN["padded left"]]
    matches(ringed(*args), *args)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("low", [-math.inf, LEAST])
@pytest.mark.parametrize("name", ["padded left", "nothing"])
def test_keys_stay_where_they_are(name: str, low: float, rows: int) -> None:
    mask = additive(SEEN[name].expand(BATCH, 1, -1, -1)[:, :, :rows], low)
    args = [*tensors(rows=rows), mask]
    options = {"specs": BY_KEYS, "grad": False}
    if rows > 1:
        options |= {"out_specs": [None]}
    plan = planned(*args, **options)
    matches(plan, *args)
    if rows == 1:
        sent = sum(c.bytes for c in plan.collectives)
        assert sent < args[1].numel() * 8 / 4  # of a rank's keys


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_keys_stay_along_axes_in_any_order_beside_a_batch_that_does_not_divide(
    axes: tuple[str, str],
) -> None:
    args = [*(x[:1, :3] for x in tensors(rows=1)), additive(padded(True)[1:])]
    queries, keys = (None, "tp", None, None), (None, "tp", axes, None)
    specs = {"specs": [queries, keys, keys], "out_specs": [queries]}
    plan = planned(*args, **specs, mesh="tp=2,a=2,b=2", grad=False)
    matches(plan, *args)
    assert {c.kind for c in plan.collectives} == {"all_gather", "all_reduce"}
    assert len(plan.collectives) == 2


def test_keys_that_do_not_divide_are_gathered() -> None:
    """Parts of several sizes would count alike where a bias is the least number."""
    q, k, v = tensors(rows=1)
    args = [q, k[:, :, :14], v[:, :, :14], additive(torch.zeros(1, 14).bool(), LEAST)]
    plan = planned(*args, specs=BY_KEYS, grad=False)
    matches(plan, *args)


def test_a_part_that_is_hidden_has_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*tensors(), additive(SEEN["padded left"])]
    monkeypatch.setattr(merge_attention, "of_visible", lambda build, lse, mask: lse)
    monkeypatch.setattr(ring_attention, "of_visible", lambda build, lse, mask: lse)
    with pytest.raises(AssertionError):
        matches(ringed(*args), *args)
    args = [*tensors(rows=1), additive(padded(True))]
    with pytest.raises(AssertionError):
        matches(planned(*args, specs=BY_KEYS, grad=False), *args)


def test_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*tensors(), additive(SEEN["nothing"], LEAST)]
    result = merge_attention.RunningAttention.result

    def uncounted(self: Any, build: Any) -> Any:
        _, lse = result(self, build)
        return self.out, lse

    monkeypatch.setattr(merge_attention.RunningAttention, "result", uncounted)
    with pytest.raises(AssertionError):
        matches(ringed(*args), *args)


# A mask beside ``is_causal``


def attend_causal(q, k, v, mask) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)


MASKS = {
    "padding": padded(True),
    "padding of later rows": padded(False),
    "half of the documents": documents() | documents().mT,
    "bias": additive(padded(True)) + torch.arange(ROWS) / ROWS,
}


@pytest.mark.parametrize("mesh", ["cp=4", pytest.param("cp=3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MASKS)
@of_causal_calls
def test_a_causal_mask_counts_whole_places_beside_another(name: str, mesh: str) -> None:
    args = [*tensors(), MASKS[name]]
    specs = [*BY_ROWS, (None,) * args[3].dim()]
    options = {"mesh": mesh, "mode": "propagate", "grad": True, "in_specs": specs}
    plan = fxpar.plan(attend_causal, *args, **options, schedule="none")
    calls = [node for node in plan.nodes if "flash" in node.name]
    assert all(
        node.operands[i].dims[2] == ("cp",) for i, node in enumerate(calls)
    )  # a backward has the gradient first
    matches(plan, *args)


@pytest.mark.parametrize("name", ["padding", "bias"])
@of_causal_calls
def test_keys_of_a_causal_call_stay_where_they_are(name: str) -> None:
    args = [*tensors(), MASKS[name]]
    options = {"mode": "propagate", "in_specs": [*BY_KEYS, None], "out_specs": [None]}
    plan = fxpar.plan(attend_causal, *args, mesh="cp=4", **options)
    (call,) = (node for node in plan.nodes if "flash" in node.name)
    assert call.operands[1].dims[2] == ("cp",)
    matches(plan, *args)


@pytest.mark.parametrize("of_bias", [True, False])
def test_only_a_bias_with_a_gradient_is_refused(of_bias: bool) -> None:
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward

    def fn(q, k, v, bias):
        given = q, k, v, bias, q, q.new_zeros(q.shape[:3]), *[torch.zeros(())] * 2
        return op(q, *given, 0.0, [True, True, True, of_bias])[:3]

    rows = 64
    args = [x.new_empty(BATCH, HEADS, rows, WIDTH, device="meta") for x in tensors()]
    bias = torch.empty(BATCH, HEADS, rows, rows, device="meta", dtype=torch.float64)
    options = {"mesh": "cp=2", "in_specs": [*BY_ROWS, None], "mode": "propagate"}
    options["out_specs"] = BY_ROWS
    plan = fxpar.plan(fn, *args, bias, **options, schedule="none")
    if of_bias:
        with pytest.raises(ScheduleError, match="gradient of its bias"):
            fxpar.plan(fn, *args, bias, **options, schedule=ring(plan))
    else:
        plan = fxpar.plan(fn, *args, bias, **options, schedule=ring(plan))
        assert {c.kind for c in plan.collectives} == {"permute"}


def test_rows_of_a_bias_are_aligned() -> None:
    """The memory-efficient kernel reads rows of a multiple of 16 elements."""
    op = torch.ops.aten._scaled_dot_product_efficient_attention

    def fn(q, k, v, bias):
        return op(q, k, v, bias, True)[0]

    sizes = [(BATCH, HEADS, n, WIDTH) for n in (256, 64, 64)]
    args = [torch.empty(size, device="meta") for size in (*sizes, (256, 64))]
    args[3] = args[3].expand(BATCH, HEADS, -1, -1)
    options = {"mesh": "cp=8", "in_specs": [*BY_ROWS, None], "mode": "propagate"}
    plan = fxpar.plan(fn, *args, **options, schedule="none")
    plan = fxpar.plan(fn, *args, **options, schedule=ring(plan))
    biases = [n.args[3] for n in plan.result.local.nodes if n.target is op.default]
    assert len(biases) == 8
    for bias in biases:
        assert bias.meta["val"].shape[3] == 8
        assert all(n % 16 == 0 for n in bias.meta["val"].stride()[:3])


# cuDNN's kernels, which run on CUDA alone


def cudnn_forward(
    q, k, v, bias, compute_lse, dropout=0.0, is_causal=False, debug=False, *, scale=None
) -> Any:  # fmt: skip
    """Stands for its forward: of what sees nothing it gives no number."""
    scores = q @ k.mT / math.sqrt(WIDTH) + bias
    lse = scores.logsumexp(-1, keepdim=True)
    unseen, seed = torch.empty(0), torch.zeros((), dtype=torch.int64)
    lse = lse.masked_fill(lse == -math.inf, math.nan)
    ends = unseen, unseen, q.shape[2], k.shape[2], seed, seed, unseen
    return (scores - lse).exp() @ v, lse, *ends


def cudnn_backward(
    grad, q, k, v, out, lse, seed, offset, bias, starts_q, starts_k, max_q, max_k,
    dropout, is_causal, *, scale=None,
) -> Any:  # fmt: skip
    weights = (q @ k.mT / math.sqrt(WIDTH) + bias - lse).exp()
    centered = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
    scores = weights * centered / math.sqrt(WIDTH)
    return scores @ k, scores.mT @ q, weights.mT @ grad


@pytest.fixture
def cudnn_on_cpu() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        name = "_scaled_dot_product_cudnn_attention"
        library.impl(name, cudnn_forward, "CPU")
        library.impl(f"{name}_backward", cudnn_backward, "CPU")
        yield


def attend_by_cudnn(q, k, v, mask) -> Any:
    """Output and gradients of cuDNN's kernels."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, _, _, rows, keys, seed, offset, _ = op(q, k, v, mask, True)
    given = out, lse, seed, offset, mask, None, None, rows, keys, 0.0, False
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return out, *backward(torch.ones_like(out), q, k, v, *given)


@pytest.mark.parametrize("specs", [BY_KEYS, BY_ROWS])
@pytest.mark.parametrize("name", ["window", "documents"])
def test_keys_of_cudnn_stay_where_they_are(
    name: str, specs: Any, cudnn_on_cpu: None
) -> None:
    args = [x.detach() for x in tensors()]
    args.append(additive(SEEN[name]).expand(BATCH, HEADS, -1, -1))
    options = {"in_specs": [*specs, None], "mode": "propagate", "schedule": "none"}
    out_specs = [None, None, SEQUENCE, SEQUENCE] if specs is BY_KEYS else None
    plan = fxpar.plan(
        attend_by_cudnn, *args, mesh="cp=4", out_specs=out_specs, **options
    )
    split = 1 if specs is BY_KEYS else 0
    first = [node for node in plan.nodes if "cudnn" in node.name]
    assert [n.operands[split + i].dims[2] for i, n in enumerate(first)] == [("cp",)] * 2
    matches(plan, *args)


def test_what_is_no_number_has_no_weight(
    cudnn_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_attention, "of_seen_rows", lambda build, out, lse: out)
    with pytest.raises(AssertionError):
        test_keys_of_cudnn_stay_where_they_are("documents", BY_KEYS, None)
