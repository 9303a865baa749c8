"""Gives rules to ``torch.nn.attention``: flex_attention, and documents packed in one
dim.

Heads are free, as in ``attention``. In flex_attention the batch is free too; a block
mask is split with batch and heads where it has them. Queries and keys may be split
block by block of the mask: functions of scores count both by global index
(``local_flex``). Gradients of keys are sums over queries; where keys are split outputs
are summands that ranks weight, and gradients of queries are sums. Tensors
that a score or mask function captures are whole, since it may look up any element, and
their gradients are sums over all scores, so partial.

In ``varlen`` queries are split where the window is none or ends after a known number of
later tokens, and keys where there is no window or a causal one: where documents begin
on a rank depends on data (``sequences.local_documents``).

In: calls of these ops. Out: their rules.
Never: gives a rule to a call with pages of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch

from fxpar import _torch
from fxpar.sharding.factors import Gathered, Rule
from fxpar.sharding.op_table import Word, make, rows, tensors_of
from fxpar.sharding.ops.attention import Heads, heads_of
from fxpar.sharding.ops.local_call import form_of_feature

# Words of several tensors, and of one.
Names = list[list[str]]
Words = list[Word]


def _captured(*groups: Sequence[Any]) -> Names:
    return [["_"] * x.dim() for x in tensors_of(groups)]


def _flex_words(
    q: torch.Tensor, k: torch.Tensor, queries: bool, keys: bool
) -> Heads | None:
    """Return words of the tensors; a batch of one key serves all queries."""
    heads = heads_of(q, k, queries=queries, keys=keys, masked=True)
    if heads is None or k.shape[0] == q.shape[0]:
        return heads
    return replace(heads, key=["_", *heads.key[1:]], value=["_", *heads.value[1:]])


def _lists(heads: Heads, mask: Sequence[Any], query_block: str) -> Names | None:
    """Return words of a block mask's tensors, which have a row for each batch and head,
    or one for all; the first four have a row for each block of queries. Tensors by
    block of keys are whole: a mask makes them of the others, and they are small. None
    where sizes do not fit."""
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


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, mask: Sequence[Any]
) -> tuple[int | None, int | None]:
    """Return how many blocks of queries and of keys a mask has; None where a dim
    ends within a block, or the mask gives the order in which a backward writes all
    blocks."""
    if any(x is not None for x in mask[10:-3]):
        return None, None
    counts: list[int | None] = []
    for x, size in ((q, mask[-3]), (k, mask[-2])):
        rows = x.shape[2]
        count = None if rows % size else int(rows // size)
        counts.append(1 if size >= rows else count)
    return counts[0], counts[1]


@dataclass(frozen=True)
class FlexWords:
    """Holds the words of one call."""

    # Words for queries, keys, values and results.
    heads: Heads
    # Names of the tensors of the mask.
    lists: Names
    # (factor, size), of dims that have several blocks.
    sizes: tuple[tuple[str, int], ...]

    def rule(self, *operands: Sequence[str], results: Names) -> Rule:
        """Return the rule of these words; ranks have equally many blocks."""
        rule = self.heads.rule(*operands, results=results)
        evenly = rule.evenly.union({"s"} if "s" in dict(self.sizes) else ())
        return replace(rule, sizes=(*rule.sizes, *self.sizes), evenly=evenly)


def _words_of(
    q: torch.Tensor, k: torch.Tensor, mask: Sequence[Any]
) -> FlexWords | None:
    """Return words of a call; queries and keys are split in blocks of the mask if it
    has several. None where words do not fit."""
    query_blocks, key_blocks = _in_blocks(q, k, mask)
    splits = query_blocks is not None, key_blocks is not None
    heads = _flex_words(q, k, *splits)
    if heads is None:
        return None
    query_block = "_"
    sizes: list[tuple[str, int]] = []
    if query_blocks is not None and query_blocks > 1:
        query_block, words = "s", (heads.query, heads.out, heads.scores)
        query, out, scores = ([*x[:2], "(s r!)", *x[3:]] for x in words)
        heads = replace(heads, query=query, out=out, scores=scores)
        sizes += [("s", query_blocks), ("r", mask[-3])]
    if key_blocks is not None and key_blocks > 1:
        key, value = ([*x[:2], "(t u!)", x[3]] for x in (heads.key, heads.value))
        heads = replace(heads, key=key, value=value)
        sizes += [("t", key_blocks), ("u", mask[-2])]
    lists = _lists(heads, mask, query_block)
    return None if lists is None else FlexWords(heads, lists, tuple(sizes))


def _flex(
    q, k, v, score_mod, mask, scale, options, score_others=(), mask_others=()
) -> Rule | None:
    words = _words_of(q, k, mask)
    if words is None:
        return None
    heads = words.heads
    operands = [*heads.inputs, *words.lists, *_captured(score_others, mask_others)]
    merged = [*heads.logsumexp, "~t"]
    rule = words.rule(*operands, results=[heads.out, merged, merged])
    weights = Gathered("t", len(operands) + 1)
    return replace(rule, gathered=(weights,)) if heads.has_split_keys else rule


def _flex_backward(
    q, k, v, out, lse, grad, grad_lse, forward, joint, mask, scale, options,
    score_others=(), mask_others=(),
) -> Rule | None:  # fmt: skip
    words = _words_of(q, k, mask)
    if words is None:
        return None
    heads = words.heads
    grads = [heads.out] * (grad is not None)
    grads += [heads.logsumexp] * (grad_lse is not None)
    captured_dims = _captured(score_others, mask_others)
    is_result = _torch.aot.gives_gradients(joint, score_others)
    results = [*heads.inputs, *_captured(list(compress(score_others, is_result)))]
    return words.rule(
        *heads.inputs, heads.out, heads.logsumexp, *grads, *words.lists, *captured_dims,
        results=results,
    )  # fmt: skip


def _varlen_words(
    q: torch.Tensor,
    k: torch.Tensor,
    starts_k: torch.Tensor | None,
    window: Sequence[int] | None,
) -> tuple[Words, Words, Words, Words, Words, dict[str, int]] | None:
    """Return words of queries, keys, values, output and log-sum-exp, and sizes of
    factors. None where tensors are not [tokens, heads, features]."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[1] % k.shape[1]:
        return None
    shared = int(q.shape[1] // k.shape[1])
    heads: Word = ("h", "g") if shared > 1 else "h"
    sizes = {"h": int(k.shape[1]), "g": shared} if shared > 1 else {}
    left, right = window or (-1, -1)
    splits = starts_k is not None and (right >= 0 or left == right == -1)
    queries = "s" if splits else "s!"
    keys = "t" if splits and left == -1 and right <= 0 else "t!"
    out, logsumexp = [queries, heads, "e!"], [heads, queries, "~t"]
    return (
        [queries, heads, "d!"],
        [keys, "h", "d!"],
        [keys, "h", "e!"],
        out,
        logsumexp,
        sizes,
    )


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
    starts = _captured((starts_q, starts_k))
    operands: list[Sequence[Word]] = [query, key, value, *starts]
    state: Words = ["_", "~s", "~t", *(f"~{name}" for name in sizes or "h")]
    rule = make(operands, [out, logsumexp, state], sizes)
    has_split_keys = "t!" not in key
    weights = Gathered("t", len(operands) + 1)
    return replace(rule, gathered=(weights,)) if has_split_keys else rule


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
    operands: list[Sequence[Word]] = [out, query, key, value, out, logsumexp[:2]]
    operands += _captured((starts_q, starts_k, state))
    return make(operands, [query, key, value], sizes)


_FLEX: dict[str, Any] = {"local": form_of_feature, "facts": "orders"}
_DOCUMENTS: dict[str, Any] = {"local": form_of_feature, "facts": "orders seq_first"}

ROWS = {
    **rows("higher_order::flex_attention", _flex, **_FLEX),
    **rows("higher_order::flex_attention_backward", _flex_backward, **_FLEX),
    **rows("torch_attn::_varlen_attn", _varlen, **_DOCUMENTS),
    **rows("torch_attn::_varlen_attn_backward", _varlen_backward, **_DOCUMENTS),
}
