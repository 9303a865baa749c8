"""Gives rules to fused attention, forward and backward, in every form ATen has.

Batch and heads are free; where query heads share key heads (GQA) they are a compound,
and a gradient of the keys is partial over the query heads that share one. Queries may
be split along the sequence where there is one log-sum-exp per query; so may keys and
values, which makes outputs summands that ranks weight by their log-sum-exp, and
gradients of queries plain summands. A causal mask counts places in the whole
sequence (``sequences.local_attention``). Seeds, reserves and empty results are
equal on every rank.

In: calls of these ops. Out: their rules.
Never: splits a call with dropout, as a kernel draws its mask by local position; nor one
with ragged sequences, or one that returns a debug mask.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpar.sharding.op_table import make, rows
from fxpar.sharding.ops.attention_heads import (
    FURTHER,
    Heads,
    Maybe,
    given_tensors,
    heads_of,
    is_ragged,
    whole_dims,
)

aten = torch.ops.aten

# Flash


def _flash(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    words = heads_of(q, k, queries=True, keys=True)
    if dropout_p or debug or words is None:
        return None
    return words.forward(*words.inputs)


def _flash_backward(
    grad, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, dropout_p, is_causal,
    seed, offset, *, scale=None,
):  # fmt: skip
    words = heads_of(q, k, queries=True, keys=True)
    if dropout_p or words is None or is_ragged(starts_q, starts_k):
        return None
    starts = given_tensors(starts_q, starts_k, seed, offset)
    return words.rule(
        words.out, *words.inputs, words.out, words.logsumexp, *starts,
        results=words.inputs,
    )  # fmt: skip


def _flash_forward(
    q, k, v, starts_q, starts_k, max_q, max_k, dropout_p, is_causal, debug, **rest: Any
):
    split = not is_causal and not _has_window(rest)
    words = heads_of(q, k, seq_first=True, queries=split)
    extra = any(isinstance(x, torch.Tensor) for x in rest.values())
    if dropout_p or debug or extra or words is None or is_ragged(starts_q, starts_k):
        return None
    starts = given_tensors(starts_q, starts_k)
    results = [words.out, words.logsumexp, FURTHER]
    return words.rule(*words.inputs, *starts, results=results)


def _flash_forward_backward(
    grad, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, dropout_p, is_causal,
    seed, unused, **rest: Any,
):  # fmt: skip
    split = not is_causal and not _has_window(rest)
    words = heads_of(q, k, seq_first=True, queries=split)
    if dropout_p or words is None or is_ragged(starts_q, starts_k):
        return None
    starts = given_tensors(starts_q, starts_k, seed, unused)
    return words.rule(
        words.out, *words.inputs, words.out, words.logsumexp, *starts,
        results=words.inputs,
    )  # fmt: skip


def _has_window(rest: dict[str, Any]) -> bool:
    """Return whether a sliding window counts positions."""
    return any(
        rest.get(f"window_size_{side}") is not None for side in ("left", "right")
    )


def _for_cpu(q: torch.Tensor, k: torch.Tensor, mask: Maybe) -> Heads | None:
    """Return words of the kernel on CPU."""
    return heads_of(q, k, queries=True, keys=True, masked=mask is not None)


def _flash_cpu(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    words = _for_cpu(q, k, attn_mask)
    if dropout_p or words is None:
        return None
    return words.forward(*words.inputs, *words.bias(attn_mask))


def _flash_cpu_backward(
    grad, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    words = _for_cpu(q, k, attn_mask)
    if dropout_p or words is None:
        return None
    return words.rule(
        words.out, *words.inputs, words.out, words.logsumexp, *words.bias(attn_mask),
        results=words.inputs,
    )  # fmt: skip


# Memory-efficient


def _efficient(
    q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None
):
    words = _memory_efficient(q, k, bias, compute_lse)
    if dropout_p or words is None:
        return None
    lse = (
        words.merged if compute_lse and _has_fitting_rows(q) else [*words.padded, "~t"]
    )
    return words.forward(*words.inputs, *words.bias(bias), logsumexp=lse)


def _memory_efficient(
    q: torch.Tensor, k: torch.Tensor, bias: Maybe, compute_lse: bool
) -> Heads | None:
    """Return words of a kernel whose log-sum-exp, if it gives one, pads rows to
    multiples of 32."""
    queries, masked = _has_fitting_rows(q) or not compute_lse, bias is not None
    return heads_of(q, k, queries=queries, keys=compute_lse, masked=masked)


def _has_fitting_rows(q: torch.Tensor) -> bool:
    """Return whether a log-sum-exp of the memory-efficient kernel has a row per
    query."""
    return q.dim() == 4 and int(q.shape[2]) % 32 == 0


def _efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *,
    scale=None,
):  # fmt: skip
    words = _memory_efficient(q, k, bias, True)
    # The gradient of a bias has the bias's shape, not that of a causal mask.
    if words is not None and is_causal and mask[3]:
        words = heads_of(q, k)
    if dropout_p or words is None:
        return None
    lse = words.logsumexp if _has_fitting_rows(q) else words.padded
    biases = words.bias(bias)
    # The mask concerns only the bias: the other gradients are always made.
    results = [*words.inputs, *(biases if mask[3] else [])]
    return words.rule(
        words.out, *words.inputs, *biases, words.out, lse, *given_tensors(seed, offset),
        results=results,
    )  # fmt: skip


def _efficient_forward(
    q, k, v, bias, starts_q, starts_k, max_q, max_k, dropout_p, mask_type,
    compute_lse=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    words = heads_of(q, k, seq_first=True)
    if dropout_p or words is None or given_tensors(starts_q, starts_k, seqlen_k):
        return None
    return words.rule(
        *words.inputs, *words.bias(bias), results=[words.out, words.padded, FURTHER]
    )


def _efficient_forward_backward(
    grad, q, k, v, bias, out, starts_q, starts_k, max_q, max_k, lse, dropout_p, seed,
    offset, mask_type, bias_requires_grad, **rest: Any,
):  # fmt: skip
    words = heads_of(q, k, seq_first=True)
    if dropout_p or words is None or given_tensors(starts_q, starts_k):
        return None
    biases = words.bias(bias)
    grads = biases if bias_requires_grad and biases else [FURTHER]
    return words.rule(
        words.out, *words.inputs, *biases, words.out, words.padded,
        *given_tensors(seed, offset), results=[*words.inputs, *grads],
    )  # fmt: skip


# cuDNN, and the form that other devices override


def _cudnn(
    q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, debug=False, *,
    scale=None,
):  # fmt: skip
    masked = bias is not None
    words = heads_of(q, k, queries=compute_lse, keys=compute_lse, masked=masked)
    if dropout_p or debug or words is None:
        return None
    lse = [*words.logsumexp, "_", "~t"] if compute_lse else [*words.padded, "_", "~t"]
    return words.forward(*words.inputs, *words.bias(bias), logsumexp=lse)


def _cudnn_backward(
    grad, q, k, v, out, lse, seed, offset, bias, starts_q, starts_k, max_q, max_k,
    dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    words = heads_of(q, k, queries=True, keys=True, masked=bias is not None)
    if dropout_p or words is None or is_ragged(starts_q, starts_k):
        return None
    return words.rule(
        words.out, *words.inputs, words.out, [*words.logsumexp, "_"],
        *given_tensors(seed, offset), *words.bias(bias),
        *given_tensors(starts_q, starts_k), results=words.inputs,
    )  # fmt: skip


def _overrideable(
    q, k, v, bias=None, dropout_p=0.0, is_causal=False, debug=False, *, scale=None
):
    words = heads_of(q, k)
    if dropout_p or debug or words is None:
        return None
    results = [words.out, words.padded, FURTHER]
    return words.rule(*words.inputs, *words.bias(bias), results=results)


def _overrideable_backward(
    grad, q, k, v, bias, mask, out, lse, starts_q, starts_k, max_q, max_k, dropout_p,
    is_causal, seed, offset, *, scale=None,
):  # fmt: skip
    words = heads_of(q, k)
    if dropout_p or words is None or is_ragged(starts_q, starts_k):
        return None
    biases = words.bias(bias)
    return words.rule(
        words.out, *words.inputs, *biases, words.out, words.padded,
        *given_tensors(starts_q, starts_k, seed, offset),
        results=[*words.inputs, *biases],
    )  # fmt: skip


# Written out


def _math(
    q, k, v, mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, *,
    scale=None, enable_gqa=False,
):  # fmt: skip
    words = heads_of(q, k, queries=not is_causal)
    if dropout_p or dropout_mask is not None or words is None:
        return None
    results = [words.out, words.scores]
    return words.rule(*words.inputs, *words.bias(mask), results=results)


def _plain(
    q, k, v, mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    words = heads_of(q, k, queries=True)
    if dropout_p or words is None:
        return None
    return words.rule(*words.inputs, *words.bias(mask), results=[words.out])


# Whole layers that torch runs as one op in eval, weights included


def _encoder_layer(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu,
    norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, up_weight,
    up_bias, down_weight, down_bias, mask=None, mask_type=None,
):  # fmt: skip
    if src.dim() != 3:
        return None
    weights = given_tensors(
        qkv_weight, qkv_bias, proj_weight, proj_bias, norm_weight_1, norm_bias_1,
        norm_weight_2, norm_bias_2, up_weight, up_bias, down_weight, down_bias,
    )  # fmt: skip
    return make([_BATCHED, *weights, *_mask_of_layer(mask, mask_type)], [_BATCHED])


def _multi_head(
    q, k, v, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
    mask=None, need_weights=True, average_weights=True, mask_type=None,
):  # fmt: skip
    if q.dim() != 3:
        return None
    weights = given_tensors(qkv_weight, qkv_bias, proj_weight, proj_bias)
    scores = _BATCHED if average_weights else [*_BATCHED, "_"]
    operands = [*[_BATCHED] * 3, *weights, *_mask_of_layer(mask, mask_type)]
    return make(operands, [_BATCHED, scores if need_weights else ["_"]])


_BATCHED = ["b", "_", "_"]


def _mask_of_layer(mask: Maybe, mask_type: int | None) -> list[list[str]]:
    """Return the words of a mask of queries by keys (type 0), or with the batch as
    first dim."""
    if not isinstance(mask, torch.Tensor):
        return []
    return [whole_dims(mask) if mask_type == 0 else ["b", *whole_dims(mask)[1:]]]


ROWS = {
    **rows("scaled_dot_product_attention", _plain),
    **rows("_scaled_dot_product_attention_math", _math),
    **rows("_scaled_dot_product_flash_attention_for_cpu", _flash_cpu),
    **rows(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        _flash_cpu_backward,
        linear="0",
    ),
    **rows("_scaled_dot_product_flash_attention", _flash),
    **rows("_scaled_dot_product_flash_attention_backward", _flash_backward, linear="0"),
    **rows("_flash_attention_forward", _flash_forward, facts="orders"),
    **rows(
        "_flash_attention_backward", _flash_forward_backward, linear="0", facts="orders"
    ),
    **rows("_scaled_dot_product_efficient_attention", _efficient),
    **rows(
        "_scaled_dot_product_efficient_attention_backward",
        _efficient_backward,
        linear="0",
    ),
    **rows("_efficient_attention_forward", _efficient_forward, facts="orders"),
    **rows(
        "_efficient_attention_backward",
        _efficient_forward_backward,
        linear="0",
        facts="orders",
    ),
    **rows("_scaled_dot_product_cudnn_attention", _cudnn),
    **rows("_scaled_dot_product_cudnn_attention_backward", _cudnn_backward, linear="0"),
    **rows("_scaled_dot_product_fused_attention_overrideable", _overrideable),
    **rows(
        "_scaled_dot_product_fused_attention_overrideable_backward",
        _overrideable_backward,
        linear="0",
    ),
    **rows("_transformer_encoder_layer_fwd", _encoder_layer),
    **rows("_native_multi_head_attention", _multi_head),
}
