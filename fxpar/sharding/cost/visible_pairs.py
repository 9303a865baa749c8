"""Counts the pairs of query and key that the mask of an attention leaves visible.

In: a call of attention, in a graph of global shapes or of local ones, where a causal
mask counts places. Out: how many pairs, for each of batch and heads, the rank has that
has most: a step waits for that rank. Some kernels skip the pairs that a causal mask
hides (``Hardware.masked``); they read a mask of booleans or numbers, and look at all
pairs. Sizes left open are taken as they were traced. Never: reads values of a mask.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar._torch.objects import argument, defaults_of
from fxpar._torch.symbols import hint_of
from fxpar.sharding import rank_ints
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import BIASES, op_facts_of


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
    queries, keys = _rows(node)
    most = max(_seen(node, rank) for rank in _ranks(node))
    return most / (queries * keys) if queries * keys else 1.0


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
        queries, keys = (int(_on_rank(x, 0)) for x in longest)
        return queries, keys
    query = next(i for i, name in enumerate(names) if name in ("query", "q", "near"))
    tensors = (node.args[query + i] for i in range(2))
    queries, keys = (hint_of(x.meta["val"].shape[-2]) for x in tensors)
    return queries, keys


def _seen(node: fx.Node, rank: int) -> float:
    """Return the pairs of a call that its mask leaves on a rank."""
    queries, keys = _rows(node)
    names = defaults_of(node.target)

    def number(name: str) -> int:
        return _on_rank(argument(node, name), rank)

    if "is_causal" in names:
        causal = argument(node, "is_causal")
        return visible_pairs(queries, keys, 0) if causal else queries * keys
    if "ahead" in names:
        return visible_pairs(queries, keys, number("ahead"))
    starts, gap = (number("near_ahead"), number("far_ahead")), number("gap")
    places = (ahead - back for ahead in starts for back in (0, gap))
    return sum(visible_pairs(queries, keys // 2, ahead) for ahead in places)


def _is_arithmetic(x: fx.Node) -> bool:
    return getattr(x.target, "__module__", "") == "_operator"


def _on_rank(x: Any, rank: int) -> Any:
    """Return the value on a rank of a number of a local graph."""
    if isinstance(x, tuple):
        return tuple(_on_rank(a, rank) for a in x)
    if not isinstance(x, fx.Node):
        return hint_of(x)
    if x.target in rank_ints.PLACES:
        return rank_ints.place(x.target, _on_rank(x.args, rank), rank)
    if _is_arithmetic(x):
        return x.target(*_on_rank(x.args, rank))
    return hint_of(x.meta["val"])


def _ranks(node: fx.Node) -> tuple[int, ...]:
    """Return the ranks on which numbers that a call reads differ."""
    axes, mesh, pending = dict[str, None](), "", [*node.all_input_nodes]
    while pending:
        x = pending.pop()
        if x.target in rank_ints.PLACES:
            mesh, own = x.args[:2]
            axes |= dict.fromkeys(own)
        if x.target in rank_ints.PLACES or _is_arithmetic(x):
            pending += x.all_input_nodes
    return Mesh.parse(mesh).group(0, tuple(axes)) if axes else (0,)
