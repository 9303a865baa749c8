"""bound: flex_attention on CPU that gives log-sum-exps, written out.

In: a call of a bound graph, whose functions of scores and masks are graphs. Out: the
same results of products and a softmax, all scores being made. Inductor (2.13) has a
kernel on CPU for the output alone; its lists of blocks say what it skips, not what it
sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar import _torch

Function = Callable[..., torch.Tensor]

# Which of the arguments of a function is counted along each dim of scores, inside out:
# key, query, head, batch.
_DIMS = (3, 2, 1, 0)


def may_be_written_out(target: Any) -> bool:
    """Whether calls of a target may be such."""
    return _torch.aot.higher_order_name(target) == "higher_order::flex_attention"


def is_written_out(node: fx.Node) -> bool:
    """Whether a call is one that Inductor has no kernel for."""
    if not may_be_written_out(node.target):
        return False
    query, options = node.args[0], node.args[6]
    on_cpu = query.meta["val"].device.type == "cpu"
    return on_cpu and bool(options.get("OUTPUT_LOGSUMEXP"))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Function, mask: Any,
    scale: float, options: Any, score_captured: Any = (), mask_captured: Any = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output, log-sum-exps to base 2 and largest scores, as of ``flex_attention``."""
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
    """A function of one score, if it is given it, and its place, of all of them."""
    for dim in _DIMS:
        counted = [0 if i == dim else None for i in range(len(_DIMS))]
        in_dims = (*[0] * scores, *counted, *[None] * captured)
        function = torch.func.vmap(function, in_dims=in_dims)
    return function
