"""bound: writes out flex_attention on CPU where it gives log-sum-exps.

In: a call of a bound graph, whose functions of scores and masks are graphs. Out: the
same results by products and a softmax over all scores. Inductor (2.13) has a kernel on
CPU for the output alone. Never: reads the lists of blocks: they say what a kernel
skips, not what a query sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar import _torch

Function = Callable[..., torch.Tensor]

# The argument of a function that is counted along each dim of scores, innermost first:
# key, query, head, batch.
_DIMS = (3, 2, 1, 0)


def may_be_written_out(target: Any) -> bool:
    """Return whether calls of a target may need to be written out."""
    return _torch.aot.higher_order_name(target) == "higher_order::flex_attention"


def is_written_out(node: fx.Node) -> bool:
    """Return whether Inductor has no kernel for a call."""
    if not may_be_written_out(node.target):
        return False
    query, options = node.args[0], node.args[6]
    on_cpu = query.meta["val"].device.type == "cpu"
    return on_cpu and bool(options.get("OUTPUT_LOGSUMEXP"))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Function, mask: Any,
    scale: float, options: Any, score_captured: Any = (), mask_captured: Any = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return output, log-sum-exps to base 2 and largest scores, as ``flex_attention``
    does."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).to(dtype) for x in (k, v))
    scores = (q.to(dtype) @ keys.mT) * scale
    places = [torch.arange(n, device=q.device) for n in scores.shape]
    seen = _over_places(mask[-1], 0, len(mask_captured))(*places, *mask_captured)
    changed = _over_places(score, 1, len(score_captured))
    scores = changed(scores, *places, *score_captured).to(dtype)
    scores = torch.where(seen, scores, -math.inf)
    most = scores.amax(-1)
    shift = torch.where(most == -math.inf, 0.0, most)
    weights = (scores - shift.unsqueeze(-1)).exp()
    sums = weights.sum(-1)
    seen_sums = torch.where(sums == 0, 1.0, sums)
    out = (weights @ values) / seen_sums.unsqueeze(-1)
    lse = torch.where(sums == 0, -math.inf, sums.log() + shift)
    logs, most = ((x / math.log(2)).float() for x in (lse, most))
    return out.to(q.dtype), logs, most


def _over_places(function: Function, scores: int, captured: int) -> Function:
    """Return a function of one place, and of its score if it takes one, mapped over all
    places."""
    for dim in _DIMS:
        counted = [0 if i == dim else None for i in range(len(_DIMS))]
        in_dims = (*[0] * scores, *counted, *[None] * captured)
        function = torch.func.vmap(function, in_dims=in_dims)
    return function
