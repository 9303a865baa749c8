"""Rows of flex_attention, forward and backward.

Batch and heads are free, as in ``attention``; a block mask is split with them where it
has them. So are queries in the forward, block by block of the mask: functions of scores
count them by global index (``passes.local.local_custom_ops``). Tensors that a score or
mask function captures are whole, since it may look up anything in them, and their
gradients are sums over all scores, so partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.rules.attention import Heads, heads_of
from fxpar.sharding.rules.table import row, tensors_of

Words = list[list[str]]


def _captured(*groups: Sequence[Any]) -> Words:
    return [["_"] * x.dim() for x in tensors_of(groups)]


def _words(q: torch.Tensor, k: torch.Tensor, queries: bool = False) -> Heads | None:
    """Those of the tensors; a batch of one key serves all queries."""
    heads = heads_of(q, k, queries=queries)
    if heads is None or k.shape[0] == q.shape[0]:
        return heads
    return replace(heads, key=["_", *heads.key[1:]], value=["_", *heads.value[1:]])


def _blocks(heads: Heads, mask: Sequence[Any], query_block: str = "_") -> Words | None:
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
        rows = query_block if i < len(by_query) else "_"
        out.append([*word, *[rows, "_"][: x.dim() - 2]])
    return out


def _query_blocks(q: torch.Tensor, mask: Sequence[Any]) -> int | None:
    """In how many blocks a mask has the queries; None if it ends within one."""
    rows, size = q.shape[2], mask[-3]
    if size >= rows:
        return 1
    return None if rows % size else int(rows // size)


def _forward(
    q, k, v, score_mod, mask, scale, options, score_others=(), mask_others=()
) -> Rule | None:
    count = _query_blocks(q, mask)
    words = _words(q, k, queries=count is not None)
    if words is None:
        return None
    in_blocks = count is not None and count > 1
    if in_blocks:
        query, out, scores = (
            [*x[:2], "(s r!)", *x[3:]] for x in (words.query, words.out, words.scores)
        )
        words = replace(words, query=query, out=out, scores=scores)
    blocks = _blocks(words, mask, "s" if in_blocks else "_")
    if blocks is None:
        return None
    given = _captured(score_others, mask_others)
    results = [words.out, words.logsumexp, words.logsumexp]
    rule = words.rule(*words.inputs, *blocks, *given, results=results)
    if not in_blocks:
        return rule
    sizes = (*rule.sizes, ("s", count), ("r", mask[-3]))
    return replace(rule, sizes=sizes, evenly=frozenset("s"))


def _backward(
    q, k, v, out, lse, grad, grad_lse, forward, joint, mask, scale, options,
    score_others=(), mask_others=(),
) -> Rule | None:  # fmt: skip
    words = _words(q, k)
    blocks = None if words is None else _blocks(words, mask)
    if words is None or blocks is None:
        return None
    grads = [words.out] * (grad is not None)
    grads += [words.logsumexp] * (grad_lse is not None)
    given = _captured(score_others, mask_others)
    results = [*words.inputs, *_captured(score_others)]
    return words.rule(
        *words.inputs, words.out, words.logsumexp, *grads, *blocks, *given,
        results=results,
    )  # fmt: skip


ROWS = {
    "higher_order::flex_attention": row(_forward),
    "higher_order::flex_attention_backward": row(_backward),
}
