"""Gives rules to fused attention, forward and backward, in every form ATen has, and to
``torch.nn.attention``: flex_attention, and documents packed in one dim.

Batch and heads are free; where query heads share key heads (GQA) they are a compound,
and a gradient of the keys is partial over the query heads that share one. Queries may
be split along the sequence where there is one log-sum-exp per query; so may keys and
values, which makes outputs summands that ranks weight by their log-sum-exp, and
gradients of queries plain summands. A causal mask counts places in the whole
sequence (``sequences.local_attention``). Seeds, reserves and empty results are
equal on every rank.

Tensors get their words by the names of arguments in an op's schema, which all kernels
share.

In flex_attention a block mask is split with batch and heads where it has them, and
queries and keys may be split block by block of it: functions of scores count both by
global index (``local_flex``). Tensors that a score or mask function captures are whole,
since it may look up any element, and their gradients are sums over all scores, so
partial. In ``varlen`` queries are split where the window is none or ends after a known
number of later tokens, and keys where there is no window or a causal one: where
documents begin on a rank depends on data (``sequences.local_documents``).

In: calls of these ops. Out: their rules.
Never: splits a call with dropout, as a kernel draws its mask by local position; nor one
with ragged sequences, or one that returns a debug mask; gives a rule to a call with
pages of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch

from fxpar import _torch
from fxpar.sharding.factors import Gathered, Rule
from fxpar.sharding.op_facts import BIASES
from fxpar.sharding.op_table import (
    Row,
    align,
    keys,
    make,
    parse_rule,
    rows,
    tensors_of,
    text,
)
from fxpar.sharding.ops.local_call import Localizer, form_of_feature

aten = torch.ops.aten

# Words of results that depend on no operand: equal on every rank.
FURTHER = ["~"]


@dataclass(frozen=True)
class Heads:
    """Holds the words per tensor of one call."""

    # A word per dim.
    query: list[str]
    # A word per dim.
    key: list[str]
    # A word per dim.
    value: list[str]
    # A word per dim of the output.
    out: list[str]
    # Of [batch, query heads, queries, keys], without a batch in packed documents.
    scores: list[str]
    # Sizes of the scores' dims.
    sizes: list[int]
    # Query heads per key head.
    groups: int
    # Whether there is a mask: all shards of the keys are then equal, as a mask may
    # leave shards no weights but their numbers of keys.
    masked: bool
    # (factor, size) of dims that have several blocks of a mask.
    blocks: tuple[tuple[str, int], ...] = ()

    @property
    def inputs(self) -> tuple[list[str], list[str], list[str]]:
        return self.query, self.key, self.value

    @property
    def has_split_keys(self) -> bool:
        return not self.scores[-1].endswith("!")

    @property
    def logsumexp(self) -> list[str]:
        return self.scores[:-1]

    @property
    def padded(self) -> list[str]:
        """Return a log-sum-exp whose last dim is not the queries'."""
        return [*self.scores[:2], "_"]

    def bias(self, x: torch.Tensor | None) -> list[list[str]]:
        """Return the words of a mask or bias that broadcasts to the scores, if there is
        one."""
        if x is None:
            return []
        few = x.dim() < 2
        return [["_"] * x.dim() if few else align(x.shape, self.sizes, self.scores)]

    def rule(self, *operands: Sequence[str], results: Sequence[Sequence[str]]) -> Rule:
        """Return the rule; ranks have equally many blocks of queries."""
        rule = parse_rule(text(*operands, results=results))
        sizes = (("g", self.groups),) if self.groups > 1 else ()
        evenly = {"t"} if self.masked and self.has_split_keys else set()
        evenly |= {"s"} & dict(self.blocks).keys()
        return replace(rule, sizes=(*sizes, *self.blocks), evenly=frozenset(evenly))

    def forward(
        self, *operands: Sequence[str], results: Sequence[Sequence[str]]
    ) -> Rule:
        """Return the rule of a forward, whose results are the output, the log-sum-exp
        and others."""
        rule = self.rule(*operands, results=results)
        if not self.has_split_keys:
            return rule
        return replace(rule, gathered=(Gathered("t", len(operands) + 1),))


def heads_of(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    seq_first: bool = False,
    queries: bool = False,
    keys: bool = False,
    masked: bool = False,
    batch: Sequence[str] = ("b",),
) -> Heads | None:
    """Return the words of a call; None if it does not have three dims after ``batch``,
    or heads that divide. ``seq_first``: tensors are [batch, sequence, heads, dim];
    ``queries``, ``keys``: whether they may be split along the sequence; ``masked``:
    whether there is a mask."""
    h, s = (-2, -3) if seq_first else (-3, -2)
    if {q.dim(), k.dim()} != {len(batch) + 3} or q.shape[h] % k.shape[h]:
        return None
    groups = int(q.shape[h] // k.shape[h])
    heads = "(h g)" if groups > 1 else "h"
    places, seen = "s" if queries else "s!", "t" if keys else "t!"

    def words(head: str, place: str, last: str) -> list[str]:
        rows = [place, head] if seq_first else [head, place]
        return [*batch, *rows, last]

    return Heads(
        query=words(heads, places, "d!"),
        key=words("h", seen, "d!"),
        value=words("h", seen, "e!"),
        out=words(heads, places, "e!"),
        scores=[*batch, heads, places, seen],
        sizes=[*q.shape[:-3], q.shape[h], q.shape[s], k.shape[s]],
        groups=groups,
        masked=masked,
    )


# Kernels

# Argument name -> value.
Call = dict[str, Any]

# Arguments that are whole: of a kernel's random numbers, and starts of sequences, which
# are empty where every sequence has a row of its own.
_WHOLE = ("philox_seed", "philox_offset", "rng_state", "unused")
_STARTS = ("cum_seq_q", "cum_seq_k")


@dataclass(frozen=True)
class _Kernel:
    """Describes a kernel, as functions of a call."""

    # Whether queries, and whether keys, may be split along the sequence.
    splits: Callable[[Call], tuple[bool, bool]]
    # Whether the log-sum-exp has a row for each query; else it may be padded, or empty.
    by_query: Callable[[Call], bool] = lambda call: True
    # Whether the log-sum-exp has one more dim, of size 1.
    has_column: bool = False
    # Whether a backward gives the gradient of a bias, if there is one.
    of_bias: Callable[[Call], bool] = lambda call: False
    # Whether tensors are [batch, sequence, heads, dim].
    seq_first: bool = False
    # Its local form; a feature adds that of a kernel whose rows count places.
    local: Localizer | None = None

    def words(self, call: Call) -> Heads | None:
        """Return the words of a call."""
        queries, keys = self.splits(call)
        return heads_of(
            call["query"],
            call["key"],
            seq_first=self.seq_first,
            queries=queries,
            keys=keys,
            masked=any(call.get(name) is not None for name in BIASES),
        )


def _has_logsumexp(call: Call) -> bool:
    return bool(call.get("compute_log_sumexp", True))


def _has_fitting_rows(call: Call) -> bool:
    """Return whether a log-sum-exp of the memory-efficient kernel, which pads rows to
    multiples of 32, has a row per query."""
    q = call["query"]
    return q.dim() == 4 and int(q.shape[2]) % 32 == 0


def _has_bias_gradient(call: Call) -> bool:
    return "grad_input_mask" in call and bool(call["grad_input_mask"][3])


def _efficient_splits(call: Call) -> tuple[bool, bool]:
    # The gradient of a bias has the bias's shape, not that of a causal mask.
    if call.get("is_causal") and _has_bias_gradient(call):
        return False, False
    has_lse = _has_logsumexp(call)
    return _has_fitting_rows(call) or not has_lse, has_lse


def _has_places(call: Call) -> bool:
    """Return whether a causal mask or a sliding window counts positions."""
    sides = (call.get(f"window_size_{side}") for side in ("left", "right"))
    return call["is_causal"] or any(side is not None for side in sides)


_NEITHER = (False, False)
_FLASH = _Kernel(lambda call: (True, True), local=form_of_feature)
# Name of a forward -> its kernel; the backward has its name, too.
_KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": _FLASH,
    "_scaled_dot_product_flash_attention": _FLASH,
    "_flash_attention_forward": _Kernel(
        lambda call: (not _has_places(call), False), seq_first=True
    ),
    "_scaled_dot_product_efficient_attention": _Kernel(
        _efficient_splits,
        lambda call: _has_logsumexp(call) and _has_fitting_rows(call),
        of_bias=_has_bias_gradient,
        local=form_of_feature,
    ),
    "_efficient_attention_forward": _Kernel(
        lambda call: _NEITHER,
        lambda call: False,
        of_bias=lambda call: call["bias_requires_grad"],
        seq_first=True,
    ),
    "_scaled_dot_product_cudnn_attention": _Kernel(
        lambda call: (_has_logsumexp(call),) * 2,
        _has_logsumexp,
        has_column=True,
        local=form_of_feature,
    ),
    "_scaled_dot_product_fused_attention_overrideable": _Kernel(
        lambda call: _NEITHER, lambda call: False, of_bias=lambda call: True
    ),
}


def _named(op: Any, rule: Callable[[Call], Rule | None]) -> Callable[..., Rule | None]:
    """Return the rule function of an op, by a function of its arguments by name."""
    names = _torch.objects.defaults_of(op)
    return lambda *args, **rest: rule(dict(zip(names, args, strict=False)) | rest)


def _fused(kernel: _Kernel, backward: bool, call: Call) -> Rule | None:
    words = kernel.words(call)
    if words is None:
        return None
    lse = words.logsumexp if kernel.by_query(call) else words.padded
    lse = [*lse, "_"] if kernel.has_column else lse
    operands = _operands(call, words, lse)
    if operands is None:
        return None
    if not backward:
        return words.forward(*operands, results=[words.out, [*lse, "~t"], FURTHER])
    bias = next((call[name] for name in BIASES if name in call), None)
    grads = words.bias(bias) if kernel.of_bias(call) else []
    # A kernel that is asked for the gradient of a bias by a flag gives an empty one.
    further = [FURTHER] if "bias_requires_grad" in call and not grads else []
    return words.rule(*operands, results=[*words.inputs, *grads, *further])


def _operands(
    call: Call, words: Heads, lse: Sequence[str] = ()
) -> list[Sequence[str]] | None:
    """Return the words of a call's tensors; None if it draws numbers, or has a tensor
    that is not known here."""
    if call.get("dropout_p") or call.get("return_debug_mask"):
        return None
    own = dict(zip(("query", "key", "value"), words.inputs, strict=True))
    out = dict.fromkeys(("out", "grad_out", "grad_out_"), words.out)
    own |= out | {"logsumexp": [*lse]}
    operands: list[Sequence[str]] = []
    for name, x in call.items():
        if not isinstance(x, torch.Tensor):
            continue
        if name in BIASES:
            operands += words.bias(x)
        elif name in own:
            operands.append(own[name])
        elif name in _WHOLE or name in _STARTS and not x.numel():
            operands.append(["_"] * x.dim())
        else:
            return None
    return operands


# Whole layers that torch runs as one op in eval, weights included

_BATCHED = ["b", "_", "_"]


def _layer(call: Call) -> Rule | None:
    """Return the rule; a mask has queries and keys (type 0), or the batch as first
    dim."""
    inputs, operands = ("src", "query", "key", "value"), []
    for name, x in call.items():
        if isinstance(x, torch.Tensor):
            by_batch = name in inputs or name == "mask" and call.get("mask_type") != 0
            operands.append(["b"] * by_batch + ["_"] * (x.dim() - by_batch))
    if operands[0] != _BATCHED:
        return None
    if "src" in call:
        return make(operands, [_BATCHED])
    scores = [*_BATCHED, *["_"] * (not call.get("average_attn_weights", True))]
    gives = call.get("need_weights", True)
    return make(operands, [_BATCHED, scores if gives else ["_"]])


def _row(
    name: str, rule: Callable[[Call], Rule | None], **marks: Any
) -> dict[Any, Row]:
    """Return the row of an op, if this torch has it."""
    return {
        key: row
        for op in keys(name)
        for key, row in rows(name, _named(op, rule), **marks).items()
    }


# torch.nn.attention: flex_attention, and documents packed in one dim

# Words of several tensors.
Names = list[list[str]]


def _captured(*groups: Sequence[Any]) -> Names:
    return [["_"] * x.dim() for x in tensors_of(groups)]


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


def _words_of(
    q: torch.Tensor, k: torch.Tensor, mask: Sequence[Any]
) -> tuple[Heads, Names] | None:
    """Return words of a call, and of the tensors of its mask; queries and keys are
    split in blocks of the mask if it has several. None where words do not fit."""
    query_blocks, key_blocks = _in_blocks(q, k, mask)
    queries, keys = query_blocks is not None, key_blocks is not None
    heads = heads_of(q, k, queries=queries, keys=keys, masked=True)
    if heads is None:
        return None
    if k.shape[0] != q.shape[0]:  # a batch of one key serves all queries
        key, value = (["_", *words[1:]] for words in (heads.key, heads.value))
        heads = replace(heads, key=key, value=value)
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
    return None if lists is None else (replace(heads, blocks=tuple(sizes)), lists)


def _flex(
    q, k, v, score_mod, mask, scale, options, score_others=(), mask_others=()
) -> Rule | None:
    if (words := _words_of(q, k, mask)) is None:
        return None
    heads, lists = words
    operands = [*heads.inputs, *lists, *_captured(score_others, mask_others)]
    merged = [*heads.logsumexp, "~t"]
    return heads.forward(*operands, results=[heads.out, merged, merged])


def _flex_backward(
    q, k, v, out, lse, grad, grad_lse, forward, joint, mask, scale, options,
    score_others=(), mask_others=(),
) -> Rule | None:  # fmt: skip
    if (words := _words_of(q, k, mask)) is None:
        return None
    heads, lists = words
    grads = [heads.out] * (grad is not None)
    grads += [heads.logsumexp] * (grad_lse is not None)
    captured_dims = _captured(score_others, mask_others)
    is_result = _torch.aot.gives_gradients(joint, score_others)
    results = [*heads.inputs, *_captured(list(compress(score_others, is_result)))]
    operands = [*heads.inputs, heads.out, heads.logsumexp, *grads, *lists]
    return heads.rule(*operands, *captured_dims, results=results)


def _of_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    starts_k: torch.Tensor | None,
    window: Sequence[int] | None,
) -> Heads | None:
    """Return the words of a call. None where tensors are not [tokens, heads,
    features]."""
    left, right = window or (-1, -1)
    queries = starts_k is not None and (right >= 0 or left == right == -1)
    keys = queries and left == -1 and right <= 0
    return heads_of(q, k, seq_first=True, queries=queries, keys=keys, batch=())


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
    heads = _of_documents(q, k, starts_k, window)
    paged = [x for x in (*settings, *rest.values()) if isinstance(x, torch.Tensor)]
    if heads is None or paged:
        return None
    operands = [*heads.inputs, *_captured((starts_q, starts_k))]
    results = [heads.out, [*heads.logsumexp, "~t"], FURTHER]
    return heads.forward(*operands, results=results)


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
    heads = _of_documents(q, k, starts_k, window)
    if heads is None:
        return None
    operands = [heads.out, *heads.inputs, heads.out, heads.logsumexp]
    operands += _captured((starts_q, starts_k, state))
    return heads.rule(*operands, results=heads.inputs)


_FLEX: dict[str, Any] = {
    "local": form_of_feature,
    "facts": "orders",
    "empty": "never",
}
_DOCUMENTS = _FLEX | {"facts": "orders seq_first"}

ROWS: dict[Any, Row] = {
    **_row("_transformer_encoder_layer_fwd", _layer),
    **_row("_native_multi_head_attention", _layer),
    **rows("higher_order::flex_attention", _flex, **_FLEX),
    **rows("higher_order::flex_attention_backward", _flex_backward, **_FLEX),
    **rows("torch_attn::_varlen_attn", _varlen, **_DOCUMENTS),
    **rows("torch_attn::_varlen_attn_backward", _varlen_backward, **_DOCUMENTS),
}
for _forward, _kernel in _KERNELS.items():
    _backward = f"{_forward.removesuffix('_forward')}_backward"
    _marks = {"facts": "orders seq_first" * _kernel.seq_first, "local": _kernel.local}
    ROWS |= _row(_forward, partial(_fused, _kernel, False), **_marks)
    ROWS |= _row(_backward, partial(_fused, _kernel, True), linear="0", **_marks)
