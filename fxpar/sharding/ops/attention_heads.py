"""Gives words to the tensors of attention: which dims share batch, heads and the
sequence.

Query heads that share a key head (GQA) are a compound of factors.
In: queries and keys of a call, fake tensors. Out: ``Heads``, a word per dim of each
tensor of the call, from which ``attention`` and ``nn_attention`` make their rules.
Never: knows which kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxpar.sharding.factors import Gathered, Rule, parse_rule
from fxpar.sharding.op_table import text

Maybe = torch.Tensor | None

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
    # Of [batch, query heads, queries, keys].
    scores: list[str]
    # Sizes of the scores' dims.
    sizes: list[int]
    # Query heads per key head.
    groups: int
    # Whether there is a mask: all shards of the keys are then equal, as a mask may
    # leave shards no weights but their numbers of keys.
    masked: bool

    @property
    def inputs(self) -> tuple[list[str], list[str], list[str]]:
        return self.query, self.key, self.value

    @property
    def has_split_keys(self) -> bool:
        return not self.scores[3].endswith("!")

    @property
    def logsumexp(self) -> list[str]:
        return self.scores[:3]

    @property
    def merged(self) -> list[str]:
        """Return the log-sum-exp of a forward: over all keys, on each rank."""
        return [*self.logsumexp, "~t"]

    @property
    def padded(self) -> list[str]:
        """Return a log-sum-exp whose last dim is not the queries'."""
        return [*self.scores[:2], "_"]

    def bias(self, x: Maybe) -> list[list[str]]:
        """Return the words of a mask or bias that broadcasts to the scores, if there is
        one."""
        if not isinstance(x, torch.Tensor):
            return []
        if x.dim() < 2:
            return [whole_dims(x)]
        skip = 4 - x.dim()
        return [
            [
                word if n == size else "_"
                for word, n, size in zip(
                    self.scores[skip:], x.shape, self.sizes[skip:], strict=True
                )
            ]
        ]

    def rule(self, *operands: Sequence[str], results: Sequence[Sequence[str]]) -> Rule:
        rule = parse_rule(text(*operands, results=results))
        sizes = (("g", self.groups),) if self.groups > 1 else ()
        evenly = frozenset("t") if self.masked and self.has_split_keys else frozenset()
        return replace(rule, sizes=sizes, evenly=evenly)

    def forward(
        self, *operands: Sequence[str], logsumexp: Sequence[str] | None = None
    ) -> Rule:
        """Return the rule of a forward with output, log-sum-exp and further results."""
        results = [self.out, logsumexp or self.merged, FURTHER]
        rule = self.rule(*operands, results=results)
        if not self.has_split_keys:
            return rule
        return replace(rule, gathered=(Gathered("t", len(operands) + 1),))


def whole_dims(x: torch.Tensor) -> list[str]:
    return ["_"] * x.dim()


def heads_of(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    seq_first: bool = False,
    queries: bool = False,
    keys: bool = False,
    masked: bool = False,
) -> Heads | None:
    """Return the words of a call; None if it does not have four dims, or heads that
    divide. ``seq_first``: tensors are [batch, sequence, heads, dim]; ``queries``,
    ``keys``: whether they may be split along the sequence; ``masked``: whether there is
    a mask."""
    h, s = (2, 1) if seq_first else (1, 2)
    if q.dim() != 4 or q.shape[h] % k.shape[h]:
        return None
    groups = int(q.shape[h] // k.shape[h])
    heads = "(h g)" if groups > 1 else "h"
    places, seen = "s" if queries else "s!", "t" if keys else "t!"

    def words(head: str, place: str, last: str) -> list[str]:
        return ["b", place, head, last] if seq_first else ["b", head, place, last]

    return Heads(
        query=words(heads, places, "d!"),
        key=words("h", seen, "d!"),
        value=words("h", seen, "e!"),
        out=words(heads, places, "e!"),
        scores=["b", heads, places, seen],
        sizes=[q.shape[0], q.shape[h], q.shape[s], k.shape[s]],
        groups=groups,
        masked=masked,
    )


def is_ragged(*starts: Maybe) -> bool:
    """Return whether sequences are packed, with their starts given."""
    return any(isinstance(x, torch.Tensor) and x.numel() for x in starts)


def given_tensors(*tensors: Maybe) -> list[list[str]]:
    return [whole_dims(x) for x in tensors if isinstance(x, torch.Tensor)]
