"""Rows of ``torch.nn.attention``: flex_attention, and documents packed in one dim.

Heads are free, as in ``attention``. Of flex_attention the batch is free too; a block
mask is split with them where it has them. So are queries, block by block of the mask:
functions of scores count them by global index (``passes.local.local_flex``), and
gradients of keys are sums over them. Tensors that a score or mask function captures are
whole, since it may look up anything in them, and their gradients are sums over all
scores, so partial.

Of ``varlen`` queries are split too, where no window reaches behind them; keys are
whole, since where documents begin and end is data
(``passes.attention.local_documents``). With pages of a cache a call has no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.rules.attention_heads import Heads, heads_of
from fxpar.sharding.rules.table import Word, make, row, rows, tensors_of

# Of several tensors, and of one.
Names = list[list[str]]
Words = list[Word]


def _captured(*groups: Sequence[Any]) -> Names:
    return [["_"] * x.dim() for x in tensors_of(groups)]


def _flex_words(
    q: torch.Tensor, k: torch.Tensor, queries: bool = False
) -> Heads | None:
    """Those of the tensors; a batch of one key serves all queries."""
    heads = heads_of(q, k, queries=queries)
    if heads is None or k.shape[0] == q.shape[0]:
        return heads
    return replace(heads, key=["_", *heads.key[1:]], value=["_", *heads.value[1:]])


def _blocks(heads: Heads, mask: Sequence[Any], query_block: str = "_") -> Names | None:
    """The tensors of a block mask: of each batch and head, or of all; the first four
    have a row for each block of queries."""
    out, by_query = [], tensors_of(mask[2:6])
    for i, x in enumerate(tensors_of(mask)):
        sizes = [int(n) for n in x.shape[:2]]
        if len(sizes) < 2 or any(
            n not in (1, size) for n, size in zip(sizes, heads.sizes, strict=False)
        ):
            return None
        pairs = zip(heads.scores, sizes, heads.sizes, strict=False)
        word = [name if n == size else "_" for name, n, size in pairs]
        block = query_block if i < len(by_query) else "_"
        out.append([*word, *[block, "_"][: x.dim() - 2]])
    return out


def _query_blocks(q: torch.Tensor, mask: Sequence[Any]) -> int | None:
    """In how many blocks a mask has the queries; None if it ends within one."""
    rows, size = q.shape[2], mask[-3]
    if size >= rows:
        return 1
    return None if rows % size else int(rows // size)


def _by_blocks(
    q: torch.Tensor, k: torch.Tensor, mask: Sequence[Any]
) -> tuple[Heads, Names] | None:
    """Words of the tensors, whose queries are blocks of the mask if it has several, and
    of the mask; None where these do not fit."""
    count = _query_blocks(q, mask)
    words = _flex_words(q, k, queries=count is not None)
    if words is None:
        return None
    in_blocks = count is not None and count > 1
    if in_blocks:
        query, out, scores = (
            [*x[:2], "(s r!)", *x[3:]] for x in (words.query, words.out, words.scores)
        )
        words = replace(words, query=query, out=out, scores=scores)
    blocks = _blocks(words, mask, "s" if in_blocks else "_")
    return None if blocks is None else (words, blocks)


def _in_blocks(rule: Rule, q: torch.Tensor, mask: Sequence[Any]) -> Rule:
    """A rule of such words, with the number of blocks and their rows."""
    count = _query_blocks(q, mask)
    if count is None or count == 1:
        return rule
    sizes = (*rule.sizes, ("s", count), ("r", mask[-3]))
    return replace(rule, sizes=sizes, evenly=frozenset("s"))


def _flex(
    q, k, v, score_mod, mask, scale, options, score_others=(), mask_others=()
) -> Rule | None:
    both = _by_blocks(q, k, mask)
    if both is None:
        return None
    words, blocks = both
    captured_dims = _captured(score_others, mask_others)
    results = [words.out, words.logsumexp, words.logsumexp]
    rule = words.rule(*words.inputs, *blocks, *captured_dims, results=results)
    return _in_blocks(rule, q, mask)


def _flex_backward(
    q, k, v, out, lse, grad, grad_lse, forward, joint, mask, scale, options,
    score_others=(), mask_others=(),
) -> Rule | None:  # fmt: skip
    both = _by_blocks(q, k, mask)
    if both is None:
        return None
    words, blocks = both
    grads = [words.out] * (grad is not None)
    grads += [words.logsumexp] * (grad_lse is not None)
    captured_dims = _captured(score_others, mask_others)
    results = [*words.inputs, *_captured(score_others)]
    rule = words.rule(
        *words.inputs, words.out, words.logsumexp, *grads, *blocks, *captured_dims,
        results=results,
    )  # fmt: skip
    return _in_blocks(rule, q, mask)


def _varlen_words(
    q: torch.Tensor,
    k: torch.Tensor,
    starts_k: torch.Tensor | None,
    window: Sequence[int] | None,
) -> tuple[Words, Words, Words, Words, Words, dict[str, int]] | None:
    """Words of queries, keys, values, output and log-sum-exp, and sizes of factors.
    None where these are not [tokens, heads, features]."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[1] % k.shape[1]:
        return None
    shared = int(q.shape[1] // k.shape[1])
    heads: Word = ("h", "g") if shared > 1 else "h"
    sizes = {"h": int(k.shape[1]), "g": shared} if shared > 1 else {}
    left, right = window or (-1, -1)
    splits = starts_k is not None and (right == 0 or left == right == -1)
    queries = "s" if splits else "s!"
    out, logsumexp = [queries, heads, "e!"], [heads, queries]
    return (
        [queries, heads, "d!"],
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
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    *settings: Any,
    **rest: Any,
) -> Rule | None:
    words = _varlen_words(q, k, starts_k, window)
    paged = [x for x in (*settings, *rest.values()) if isinstance(x, torch.Tensor)]
    if words is None or paged:
        return None
    query, key, value, out, logsumexp, sizes = words
    operands = [query, key, value, *_loose(starts_q, starts_k)]
    state: Words = ["_", "~s", *(f"~{name}" for name in sizes or "h")]
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
    scale: float | None = None,
    window: Sequence[int] | None = None,
) -> Rule | None:
    words = _varlen_words(q, k, starts_k, window)
    if words is None:
        return None
    query, key, value, out, logsumexp, sizes = words
    whole_dims = _loose(starts_q, starts_k, state)
    operands = [out, query, key, value, out, logsumexp, *whole_dims]
    return make(operands, [query, key, value], sizes)


ROWS = {
    "higher_order::flex_attention": row(_flex),
    "higher_order::flex_attention_backward": row(_flex_backward),
    **rows("_varlen_attn", _varlen, "torch_attn"),
    **rows("_varlen_attn_backward", _varlen_backward, "torch_attn"),
}
