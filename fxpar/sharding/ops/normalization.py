"""Gives rules to normalizations: dims that share statistics are whole, all others are
free.

Gradients of weight and bias are contracted over the free dims. Inductor decomposes most
of these before a plan is made, and the plan then splits normalized dims as well. A
group norm gets the local numbers of samples, channels and groups.
In: calls of these ops. Out: their rules, and local forms of group norms.
Never: splits a dim over which one op computes statistics.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding.factors import Rule, parse_rule
from fxpar.sharding.op_table import names, rows, text, whole
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten

Maybe = torch.Tensor | None


def _words_of_tensors(
    tensors: Sequence[Maybe], words: Sequence[str]
) -> list[Sequence[str]]:
    """Return the words once for each tensor that is given."""
    return [words for tensor in tensors if tensor is not None]


def _words_by_mask(
    mask: Sequence[bool], *results: Sequence[str]
) -> list[Sequence[str]]:
    """Return the results that an output mask selects."""
    return [words for words, is_asked in zip(results, mask, strict=True) if is_asked]


# Layer and RMS norm


def _over_last(x: torch.Tensor, k: int) -> tuple[list[str], list[str], list[str]]:
    """Return words of the input, of its last ``k`` dims, and of statistics over
    those."""
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
    """Return words of saved mean and deviation, which are empty in inference on CPU."""
    if training:
        return [["c"]] * 2
    words = ["_"] if x.device.type == "cpu" else ["c"]
    return [words + [f"~{f}" for f in full if f not in words]] * 2


def _batch_norm(x: torch.Tensor, *args: Any) -> str:
    """Return the rule of any form ``(x, tensors..., training, momentum, eps)``."""
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
    """Return the rule of ``(grad, x, weight, running and saved statistics, training,
    eps, mask)``."""
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


# Local forms


def _group_sizes(
    call: LocalCall, i: int, channels: int, points: int, groups: int
) -> tuple[Size, Size, int, Size]:
    """Return (N, C, points, groups) that this rank holds of an input that is operand
    ``i``."""
    n, c, *_ = call.operand_shape(i)
    return n, c, points, call.build.compute(operator.floordiv, c, channels // groups)


def _local_group_norm(
    call: LocalCall,
    x: fx.Node,
    weight: Any,
    bias: Any,
    n: int,
    c: int,
    hw: int,
    group: int,
    eps: float,
) -> fx.Node:
    return call.same(x, weight, bias, *_group_sizes(call, 0, c, hw, group), eps)


def _local_group_norm_backward(
    call: LocalCall,
    grad: fx.Node,
    x: fx.Node,
    mean: fx.Node,
    rstd: fx.Node,
    weight: Any,
    n: int,
    c: int,
    hw: int,
    group: int,
    mask: Any,
) -> fx.Node:
    sizes = _group_sizes(call, 1, c, hw, group)
    return call.same(grad, x, mean, rstd, weight, *sizes, mask)


ROWS = {
    **rows("native_layer_norm", _layer_norm),
    **rows("native_layer_norm_backward", _layer_norm_backward, linear="0"),
    **rows("rms_norm", _rms_norm),
    **rows("_fused_rms_norm", _fused_rms_norm),
    **rows("_fused_rms_norm_backward", _fused_rms_norm_backward, linear="0"),
    **rows("native_group_norm", _group_norm, local=_local_group_norm),
    **rows(
        "native_group_norm_backward",
        _group_norm_backward,
        linear="0",
        local=_local_group_norm_backward,
    ),
    **rows("native_batch_norm _native_batch_norm_legit.no_stats", _batch_norm),
    **rows("_native_batch_norm_legit_functional", _batch_norm_functional),
    **rows("_native_batch_norm_legit_no_training", _batch_norm_no_training),
    **rows("native_batch_norm_backward", _batch_norm_backward, linear="0"),
    **rows(
        "cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm "
        "miopen_batch_norm_backward _batch_norm_with_update_functional "
        "_batch_norm_no_update batch_norm_backward",
        whole,
    ),
    **rows(
        "_softmax_backward_data",
        _softmax_backward,
        linear="0",
        rows=2,
        along=2,
        facts="by_row",
    ),
    **rows(
        "_log_softmax_backward_data", _softmax_backward, linear="0", rows=2, along=2
    ),
}
