"""Counts the pairs of query and key that the mask of an attention leaves visible.

In: a call of attention, in a graph of global shapes or of local ones, where a causal
mask counts places. Out: how many pairs, for each of batch and heads, the rank has that
has most: a step waits for that rank. Some kernels skip the pairs that a causal mask
hides (``Hardware.masked``); they read a mask of booleans or numbers, and look at all
pairs. Sizes left open are taken as they were traced. Never: reads values of a mask.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import fx

from fxpar._torch.objects import argument, defaults_of
from fxpar._torch.symbols import hint_of
from fxpar.sharding import rank_ints
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import BIASES, op_facts_of

# (queries, keys, ahead): query ``i`` sees keys up to ``i + ahead``, which is an int, or
# a function of the rank, as ``_expression`` writes it.
_Block = tuple[int, int, Any]


def visible_pairs(queries: int, keys: int, ahead: int) -> float:
    """Return the number of pairs in which query ``i`` sees keys up to ``i + ahead``."""
    first = min(max(-ahead, 0), queries)
    full = min(max(keys - ahead, first), queries)
    growing = (full - first) * (first + full + 1 + 2 * ahead) / 2
    return growing + (queries - full) * keys


def seen_share(node: fx.Node) -> float:
    """Return the pairs of a call, on the rank that has most, over its queries times its
    keys."""
    names = defaults_of(node.target)
    if "is_causal" not in names and "ahead" not in names and "near_ahead" not in names:
        return 1.0
    blocks = tuple(_blocks(node))
    if not blocks:
        return 1.0
    queries, keys = _rows(node)
    return _most(blocks) / (queries * keys) if queries * keys else 1.0


def hidden_share(node: fx.Node) -> float:
    """Return the pairs that the causal mask of a call hides, which its kernel may skip
    or not, over its queries times its keys. fxpar's own calls get few such pairs: 0."""
    return 1.0 - seen_share(node) if "is_causal" in defaults_of(node.target) else 0.0


def sequence_dim(target: Any) -> int:
    """Return the dim of an attention's queries and keys that is the sequence, from the
    end. Ranks hold parts of the queries of ops on [..., sequence, heads, features]
    where nothing counts places, or where documents begin and end, which is data."""
    return -3 if op_facts_of(target).seq_first else -2


def is_packed(node: fx.Node) -> bool:
    """Return whether sequences are stored one after the other and where they begin is
    data."""
    if sequence_dim(node.target) == -2:
        return False
    names = defaults_of(node.target)
    starts = (argument(node, x) for x in names if x[:3] in ("cu_", "cum"))
    return any(
        isinstance(x, fx.Node) and hint_of(x.meta["val"].numel()) for x in starts
    )


def has_causal_mask(node: fx.Node) -> bool:
    """Return whether a call on [batch, heads, sequence, features] has a causal mask,
    and no other: where its queries or keys are split, it counts places."""
    if not argument(node, "is_causal") or sequence_dim(node.target) == -3:
        return False
    return not any(isinstance(argument(node, name), fx.Node) for name in BIASES)


def unevenness(node: fx.Node, query_parts: float, key_parts: float) -> float:
    """Return how many times the mean work of all ranks the one with the last queries
    and the first keys has, for a causal call whose queries and keys are split in
    ``query_parts`` and ``key_parts``, in order. 1 for packed documents, of which any
    rank may have the longest."""
    if not argument(node, "is_causal") or sequence_dim(node.target) == -3:
        return 1.0
    queries, keys = _rows(node)
    rows, columns = round(queries / query_parts), round(keys / key_parts)
    most = visible_pairs(rows, columns, queries - rows)
    mean = visible_pairs(queries, keys, 0) / (query_parts * key_parts)
    return most / mean if mean else 1.0


def _rows(node: fx.Node) -> tuple[int, int]:
    """Return how many queries and keys a call has; for packed sequences, of the
    longest."""
    names = defaults_of(node.target)
    if "max_q" in names:
        longest = (argument(node, name) for name in ("max_q", "max_k"))
        queries, keys = (int(_on_rank(_expression(x), 0)) for x in longest)
        return queries, keys
    query = next(i for i, name in enumerate(names) if name in ("query", "q", "near"))
    tensors = (node.args[query + i] for i in range(2))
    queries, keys = (hint_of(x.meta["val"].shape[-2]) for x in tensors)
    return queries, keys


def _blocks(node: fx.Node) -> Iterator[_Block]:
    """Yield the blocks that a mask by places leaves of a call; nothing if it has
    none."""
    queries, keys = _rows(node)
    names = defaults_of(node.target)
    if "is_causal" in names:
        if argument(node, "is_causal"):
            yield queries, keys, 0
        return
    if "ahead" in names:
        yield queries, keys, _expression(argument(node, "ahead"))
        return
    near, far, gap = (
        _expression(argument(node, name)) for name in ("near_ahead", "far_ahead", "gap")
    )
    for ahead in (near, far):
        yield queries, keys // 2, ahead
        yield queries, keys // 2, (operator.sub, ahead, gap)


def _expression(x: Any) -> Any:
    """Return a number of a local graph: itself, or (function, its arguments) where it
    depends on the rank."""
    if isinstance(x, tuple):
        return tuple(map(_expression, x))
    if not isinstance(x, fx.Node):
        return hint_of(x)
    arithmetic = getattr(x.target, "__module__", "") == "_operator"
    if x.target in rank_ints.PLACES or arithmetic:
        return (x.target, *map(_expression, x.args))
    return hint_of(x.meta["val"])


def _on_rank(x: Any, rank: int) -> Any:
    """Return the value of an expression on a rank."""
    if not isinstance(x, tuple) or not x or not callable(x[0]):
        return x
    function, *args = x
    values = [_on_rank(a, rank) for a in args]
    if function in rank_ints.PLACES:
        return rank_ints.place(function, values, rank)
    return function(*values)


def _places(x: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield mesh and axes of the parts of an expression that depend on the rank."""
    if isinstance(x, tuple) and x and callable(x[0]):
        if x[0] in rank_ints.PLACES:
            yield x[1], x[2]
        for argument in x[1:]:
            yield from _places(argument)


@lru_cache(4096)
def _most(blocks: tuple[_Block, ...]) -> float:
    """Return the pairs of all blocks, on the rank that has most."""
    places = [place for *_, ahead in blocks for place in _places(ahead)]
    ranks: tuple[int, ...] = (0,)
    if places:
        mesh, axes = Mesh.parse(places[0][0]), {a for _, own in places for a in own}
        ranks = mesh.group(0, tuple(axes))
    return max(
        sum(visible_pairs(rows, keys, _on_rank(at, rank)) for rows, keys, at in blocks)
        for rank in ranks
    )
