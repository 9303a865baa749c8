"""Lookups and updates at positions near those of the rows that they make.

In: a call whose index is made of constants alone (an interpolation, a pad that repeats
rows or turns them round), and its rule. Out: the rule in which the dim that is looked
up and the one that is made of it are one factor: a rank reads the window of rows that
its own positions lie in (``Rule.windows``); of an update that accumulates it adds to
that window. ``reach_of`` finds what windows are: rows ``(first + step * i) // of``, but
for a few at the ends. Where rows are far from those they are made of the rule stays as
it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.constant_values import MOST, computed
from fxpar.sharding.factors import Dims, Reach, RowWindow, Rule
from fxpar.sharding.rules.indexing import index_dims, is_mask

aten = torch.ops.aten

MASKED = aten._unsafe_masked_index.default
READ = (aten.index.Tensor, aten._unsafe_index.Tensor, MASKED)
ADDED = (aten.index_put.default, aten._unsafe_index_put.default)

# A row is near the one it is made of within this share of all.
_SHARE = 4

# So many rows at either end may be made of others than the formula says.
_ENDS = 32

Reaches = tuple[tuple[int, Reach], ...]


def reaches_of(node: fx.Node) -> Reaches:
    """(dim, what each row along it reads) of a lookup, or of an update that
    accumulates, of the dims where rows are near."""
    if node.target not in READ + ADDED:
        return ()
    with _torch.aot.as_compiled():
        return _reaches(node)


def _reaches(node: fx.Node) -> Reaches:
    x, *masks, indices = node.args[: 3 if node.target is MASKED else 2]
    if node.target in ADDED and node.args[3:] != (True,):
        return ()
    along = _index_dims(indices)
    value = x.meta["val"]
    if along is None or value.dtype is torch.bool:
        return ()
    mask = _mask(masks[0], len(along)) if masks else None
    if masks and mask is None:
        return ()
    out = []
    for k, d in enumerate(along):
        others = [i for i in range(len(along)) if i != k]
        read = None if mask is None else mask.any(others) if others else mask
        reach = _reach(indices[d], value.shape[d], read)
        if reach is not None:
            out.append((d, reach))
    return tuple(out)


def _mask(node: fx.Node, ndim: int) -> torch.Tensor | None:
    """A mask made of constants, of so many dims."""
    sizes = node.meta["val"].shape
    is_told = all(isinstance(n, int) for n in sizes)
    value = computed(node, {}) if is_told and math.prod(sizes) <= MOST else None
    return value if value is not None and value.dim() == ndim else None


def _index_dims(indices: Sequence[fx.Node | None]) -> list[int] | None:
    """The dims that are looked up, where each index gives the rows of its own."""
    values = {d: i.meta["val"] for d, i in enumerate(indices) if i is not None}
    sizes = [n for x in values.values() for n in x.shape]
    if not values or any(map(is_mask, values.values())):
        return None
    if not all(isinstance(n, int) for n in sizes):
        return None
    dims, at = index_dims([values.get(d) for d in range(len(indices))])
    shape = torch.broadcast_shapes(*(x.shape for x in values.values()))
    if at != dims[0] or len(shape) != len(dims):
        return None
    for k, d in enumerate(dims):
        own = [1] * (len(shape) - values[d].dim()) + list(values[d].shape)
        if any(n > 1 for i, n in enumerate(own) if i != k) or own[k] != shape[k]:
            return None
    return dims


def _reach(index: fx.Node, rows: int, read: torch.Tensor | None) -> Reach | None:
    """``read``: which rows are looked up at all; others are of any place."""
    value = index.meta["val"]
    sizes = (rows, *value.shape)
    if not all(isinstance(n, int) for n in sizes) or not 1 < value.numel() <= MOST:
        return None
    places = computed(index, {})
    if places is None:
        return None
    places = places.reshape(-1)
    if read is not None:
        i = torch.arange(len(places))
        anywhere = (i * rows // len(places)).clamp(0, rows - 1)
        places = torch.where(read.expand(len(places)), places, anywhere)
    return reach_of(places, rows)


def reach_of(places: torch.Tensor, rows: int) -> Reach | None:
    """What says these places of ``rows``; None if they are not near, or not so."""
    count = len(places)
    i, p = torch.arange(count), places.long()
    far = (p * count - i * rows).abs().max()
    if p.min() < 0 or p.max() >= rows or far * _SHARE > rows * count:
        return None
    slopes = [(1, 1), _reduced(rows, count), _reduced(rows - 1, count - 1)]
    for ends in range(min(_ENDS, (count - 1) // 2) + 1):
        inside = slice(ends, count - ends)
        for step, of in slopes:
            low, high = p * of - i * step, (p + 1) * of - 1 - i * step
            first = int(low[inside].max())
            if first <= int(high[inside].min()):
                head, tail = p[:ends].tolist(), p[count - ends :].tolist()
                return Reach(step, of, first, 1, tuple(head), tuple(tail))
    return None


def _reduced(step: int, of: int) -> tuple[int, int]:
    divisor = math.gcd(step, of)
    return step // divisor, of // divisor


def near(rule: Rule, node: fx.Node, reaches: Reaches) -> Rule:
    """The rule of a lookup or update with these windows."""
    n = len(rule.operands)
    position, other = (n, n - 1) if node.target in ADDED else (0, n)
    words: dict[str, str] = {}
    windows, sizes = [], rule.size
    for d, reach in reaches:
        pair = [rule.tensors[at][d] for at in (position, other)]
        if not all(pair):
            continue  # values that stand for all rows
        (wide,), (other_word,) = pair
        rows, count = sizes[wide], sizes[other_word]
        if count > 1:
            words |= {wide: f"w{d}", other_word: f"w{d}"}
            windows.append(RowWindow(position, d, other, rows, count, reach))
    if not windows:
        return rule
    for window in windows:
        sizes[f"w{window.dim}"] = min(window.rows, window.count)
    return replace(
        rule,
        operands=tuple(_renamed(dims, words) for dims in rule.operands),
        results=tuple(_renamed(dims, words) for dims in rule.results),
        sizes=tuple((f, n) for f, n in sizes.items() if f not in words),
        whole=rule.whole.difference(words),
        windows=tuple(windows),
    )


def _renamed(dims: Dims, words: Mapping[str, str]) -> Dims:
    return tuple(tuple(words.get(f, f) for f in dim) for dim in dims)
