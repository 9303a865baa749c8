"""Rows of ``torch.nn.attention.varlen``: documents packed along one dim of tokens.

Heads are free, as in ``attention``. Tokens are whole: where documents begin and end is
data. With pages of a cache a call has no rule.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.rules.row_builders import Word, make, rows

Words = list[Word]


def _words(
    q: torch.Tensor, k: torch.Tensor
) -> tuple[Words, Words, Words, Words, Words, dict[str, int]] | None:
    """Words of queries, keys, values, output and log-sum-exp, and sizes of factors.
    None where these are not [tokens, heads, features]."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[1] % k.shape[1]:
        return None
    shared = int(q.shape[1] // k.shape[1])
    heads: Word = ("h", "g") if shared > 1 else "h"
    sizes = {"h": int(k.shape[1]), "g": shared} if shared > 1 else {}
    out, logsumexp = ["s!", heads, "e!"], [heads, "s!"]
    return (
        ["s!", heads, "d!"],
        ["t!", "h", "d!"],
        ["t!", "h", "e!"],
        out,
        logsumexp,
        sizes,
    )


def _loose(*tensors: Any) -> list[Words]:
    return [["_"] * x.dim() for x in tensors if isinstance(x, torch.Tensor)]


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor | None,
    *settings: Any,
    **rest: Any,
) -> Rule | None:
    words = _words(q, k)
    paged = [x for x in (*settings, *rest.values()) if isinstance(x, torch.Tensor)]
    if words is None or paged:
        return None
    query, key, value, out, logsumexp, sizes = words
    operands = [query, key, value, *_loose(starts_q, starts_k)]
    state: Words = ["_", *(f"~{name}" for name in sizes or "h")]
    return make(operands, [out, logsumexp, state], sizes)


def _varlen_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: torch.Tensor,
    lse: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    state: torch.Tensor,
    *settings: Any,
    **rest: Any,
) -> Rule | None:
    words = _words(q, k)
    if words is None:
        return None
    query, key, value, out, logsumexp, sizes = words
    given = _loose(starts_q, starts_k, state)
    operands = [out, query, key, value, out, logsumexp, *given]
    return make(operands, [query, key, value], sizes)


ROWS = {
    **rows("_varlen_attn", _varlen, "torch_attn"),
    **rows("_varlen_attn_backward", _varlen_backward, "torch_attn"),
}
