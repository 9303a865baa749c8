"""Rows of normalizations: dims that share statistics are whole, all others are free.

Gradients of weight and bias are contracted over the free dims. Inductor decomposes most
of these before a plan is made, and the plan then splits normalized dims as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Rule, parse_rule
from fxpar.sharding.rules.table import names, row, text, whole

aten = torch.ops.aten

Maybe = torch.Tensor | None


def _words_of_tensors(
    tensors: Sequence[Maybe], words: Sequence[str]
) -> list[Sequence[str]]:
    """The words once for each tensor that is given."""
    return [words for tensor in tensors if tensor is not None]


def _words_by_mask(
    mask: Sequence[bool], *results: Sequence[str]
) -> list[Sequence[str]]:
    """Results that an output mask asks for."""
    return [words for words, is_asked in zip(results, mask, strict=True) if is_asked]


# Layer and RMS norm


def _over_last(x: torch.Tensor, k: int) -> tuple[list[str], list[str], list[str]]:
    """Words of the input, of its last ``k`` dims, and of statistics over those."""
    lead, last = names(x.dim() - k), names(k, "n")
    last = [f"{word}!" for word in last]
    return lead + last, last, lead + ["_"] * k


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> str:
    full, last, stat = _over_last(x, len(shape))
    return text(
        full, *_words_of_tensors([weight, bias], last), results=[full, stat, stat]
    )


def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    mask: Sequence[bool],
) -> str:
    full, last, stat = _over_last(x, len(shape))
    affine = _words_of_tensors([weight, bias], last)
    return text(
        full, full, stat, stat, *affine, results=_words_by_mask(mask, full, last, last)
    )


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Maybe = None, eps: Any = None
) -> str:
    full, last, _ = _over_last(x, len(shape))
    return text(full, *_words_of_tensors([weight], last), results=[full])


def _fused_rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Maybe, eps: Any
) -> str:
    full, last, stat = _over_last(x, len(shape))
    return text(full, *_words_of_tensors([weight], last), results=[full, stat])


def _fused_rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: Maybe,
    mask: Sequence[bool],
) -> str:
    full, last, stat = _over_last(x, len(shape))
    affine = _words_of_tensors([weight], last)
    return text(full, full, stat, *affine, results=_words_by_mask(mask, full, last))


# Group norm: groups are free, channels within one are not


def _grouped(rule: str, groups: int) -> Rule:
    return replace(parse_rule(rule), sizes=(("g", groups),))


def _group_norm(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    n: int,
    c: int,
    hw: int,
    group: int,
    eps: float,
) -> Rule:
    full = ["n", "(g c!)", *["_"] * (x.dim() - 2)]
    affine, stat = _words_of_tensors([weight, bias], ["(g c!)"]), ["n", "g"]
    return _grouped(text(full, *affine, results=[full, stat, stat]), group)


def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    n: int,
    c: int,
    hw: int,
    group: int,
    mask: Sequence[bool],
) -> Rule:
    full = ["n", "(g c!)", *["_"] * (x.dim() - 2)]
    each, stat = ["(g c!)"], ["n", "g"]
    results = _words_by_mask(mask, full, each, each)
    affine = _words_of_tensors([weight], each)
    return _grouped(text(full, full, stat, stat, *affine, results=results), group)


# Batch norm: channels are free; other dims are where the statistics are fixed


def _batch(x: torch.Tensor, training: bool) -> list[str]:
    mark = "!" * training
    return [f"n{mark}", "c", *(f"{w}{mark}" for w in names(x.dim() - 2))]


def _statistics(
    x: torch.Tensor, full: Sequence[str], training: bool
) -> list[list[str]]:
    """Saved mean and deviation; those of an inference on CPU are empty."""
    if training:
        return [["c"]] * 2
    words = ["_"] if x.device.type == "cpu" else ["c"]
    return [words + [f"~{f}" for f in full if f not in words]] * 2


def _batch_norm(x: torch.Tensor, *args: Any) -> str:
    """Any form ``(x, tensors..., training, momentum, eps)``: further results are the
    running statistics, one per given one, and a reserve."""
    training = next(a for a in args if isinstance(a, bool))
    full = _batch(x, training)
    channels = [["c"] for a in args if isinstance(a, torch.Tensor)]
    return text(full, *channels, results=[full, *_statistics(x, full, training)])


def _batch_norm_functional(x: torch.Tensor, *args: Any) -> str:
    training = args[4]
    full = _batch(x, training)
    channels = [["c"] for a in args if isinstance(a, torch.Tensor)]
    running = ["c", *(f"~{f.rstrip('!')}" for f in full if f != "c")]
    results = [full, *_statistics(x, full, training), running, running]
    return text(full, *channels, results=results)


def _batch_norm_no_training(x: torch.Tensor, *args: Any) -> str:
    full = _batch(x, False)
    channels = [["c"] for a in args if isinstance(a, torch.Tensor)]
    return text(full, *channels, results=[full, *_statistics(x, full, False)])


def _batch_norm_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> str | None:
    """``(grad, x, weight, running and saved statistics, training, eps, mask)``."""
    tensors, (training, _, mask) = args[:5], args[5:8]
    full = _batch(x, training)
    channels = [["c"] if t.numel() else ["_"] for t in tensors if t is not None]
    return text(full, full, *channels, results=_words_by_mask(mask, full, ["c"], ["c"]))


# Softmax


def _softmax_backward(
    grad: torch.Tensor, out: torch.Tensor, dim: int, dtype: torch.dtype
) -> str:
    words = names(out.dim())
    if words:
        words[dim] += "!"
    return text(words, words, results=[words])


ROWS = {
    aten.native_layer_norm.default: row(_layer_norm),
    aten.native_layer_norm_backward.default: row(_layer_norm_backward, linear="0"),
    aten.rms_norm.default: row(_rms_norm),
    aten._fused_rms_norm.default: row(_fused_rms_norm),
    aten._fused_rms_norm_backward.default: row(_fused_rms_norm_backward, linear="0"),
    aten.native_group_norm.default: row(_group_norm),
    aten.native_group_norm_backward.default: row(_group_norm_backward, linear="0"),
    aten.native_batch_norm.default: row(_batch_norm),
    aten._native_batch_norm_legit.no_stats: row(_batch_norm),
    aten._native_batch_norm_legit_functional.default: row(_batch_norm_functional),
    aten._native_batch_norm_legit_no_training.default: row(_batch_norm_no_training),
    aten.native_batch_norm_backward.default: row(_batch_norm_backward, linear="0"),
    # A reserve in the vendor's own layout ties forward and backward.
    aten.cudnn_batch_norm.default: row(whole),
    aten.cudnn_batch_norm_backward.default: row(whole),
    aten.miopen_batch_norm.default: row(whole),
    aten.miopen_batch_norm_backward.default: row(whole),
    aten._batch_norm_with_update_functional.default: row(whole),
    aten._batch_norm_no_update.default: row(whole),
    aten.batch_norm_backward.default: row(whole),
    aten._softmax_backward_data.default: row(_softmax_backward, linear="0"),
    aten._log_softmax_backward_data.default: row(_softmax_backward, linear="0"),
}
