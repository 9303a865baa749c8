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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.sharding.factors import Rule, parse_rule
from fxpar.sharding.op_table import names, rows, tensors_of, text, whole
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


def _over_last_dims(statistics: int) -> Callable[..., str]:
    """Return the rule function of norms with so many statistics, called as ``(x,
    shape, weight, bias, ...)``."""

    def factors(x: torch.Tensor, shape: Sequence[int], *args: Any, **rest: Any) -> str:
        full, last, stat = _over_last(x, len(shape))
        affine = [last] * len(tensors_of((args, rest)))
        return text(full, *affine, results=[full, *[stat] * statistics])

    return factors


def _over_last_dims_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], *args: Any
) -> str:
    """Return the rule; ``args``: statistics, as many of weight and bias, and a mask."""
    full, last, stat = _over_last(x, len(shape))
    *tensors, mask = args
    n = len(tensors) // 2
    affine = _words_of_tensors(tensors[n:], last)
    results = _words_by_mask(mask, full, *[last] * n)
    return text(full, full, *[stat] * n, *affine, results=results)


# Group norm: groups are free, channels within one are not


def _group_norm(at: int, *args: Any) -> Rule:
    """Return the rule of ``(x, weight, bias, N, C, HxW, groups, eps)``, and of the
    backward, ``(grad, x, mean, rstd, weight, N, C, HxW, groups, mask)``; ``at``:
    position of the input."""
    count = 3 + 2 * at
    full = ["n", "(g c!)", *["_"] * (args[at].dim() - 2)]
    each, stat = ["(g c!)"], ["n", "g"]
    if at:
        read, affine = [full, full, stat, stat], args[4:5]
        results = _words_by_mask(args[-1], full, each, each)
    else:
        read, affine, results = [full], args[1:3], [full, stat, stat]
    words = text(*read, *_words_of_tensors(affine, each), results=results)
    return replace(parse_rule(words), sizes=(("g", args[count + 3]),))


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


def _batch_norm(x: torch.Tensor, *args: Any, updates: bool = False) -> str:
    """Return the rule of any form ``(x, tensors..., training, momentum, eps)``; without
    ``training`` of inference. ``updates``: it gives running statistics too."""
    training = next((a for a in args if isinstance(a, bool)), False)
    full = _batch(x, training)
    channels = [["c"] for a in args if isinstance(a, torch.Tensor)]
    running = ["c", *(f"~{f.rstrip('!')}" for f in full if f != "c")]
    results = [full, *_statistics(x, full, training), *[running] * 2 * updates]
    return text(full, *channels, results=results)


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


def _local_group_norm(at: int, call: LocalCall, *args: Any) -> fx.Node:
    """Return the norm, or its backward, of this rank's samples, channels and groups.
    ``at``: position of the input; sizes come after three tensors, or five."""
    count = 3 + 2 * at
    _, channels, points, groups, *rest = args[count:]
    n, c, *_ = call.operand_shape(at)
    own = call.build.compute(operator.floordiv, c, channels // groups)
    return call.same(*args[:count], n, c, points, own, *rest)


ROWS = {
    **rows("native_layer_norm", _over_last_dims(2)),
    **rows("rms_norm", _over_last_dims(0)),
    **rows("_fused_rms_norm", _over_last_dims(1)),
    **rows(
        "native_layer_norm_backward _fused_rms_norm_backward",
        _over_last_dims_backward,
        linear="0",
    ),
    **rows(
        "native_group_norm",
        partial(_group_norm, 0),
        local=partial(_local_group_norm, 0),
    ),
    **rows(
        "native_group_norm_backward",
        partial(_group_norm, 1),
        linear="0",
        local=partial(_local_group_norm, 1),
    ),
    **rows(
        "native_batch_norm _native_batch_norm_legit.no_stats "
        "_native_batch_norm_legit_no_training",
        _batch_norm,
    ),
    **rows("_native_batch_norm_legit_functional", partial(_batch_norm, updates=True)),
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
