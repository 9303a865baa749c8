"""Splits lookups and updates whose rows are near the rows that they make.

``reach_of`` finds the windows: rows from ``(first + step * i) // of`` on, except for a
few at the ends.
In: a call whose index is made of constants alone (an interpolation, a pad that repeats
rows or mirrors them), and its rule. Out: the rule in which the dim that is looked up
and the dim made from it are one factor: a rank reads the window of rows that holds its
own positions (``Rule.windows``); an update that accumulates adds to that window. The
unchanged rule where rows are far from the rows that they make. ``computed``: the value
of a node that is made of constants alone, such as positions that count up and masks.
Never: reads an index that depends on an input, is drawn, or has more than ``MOST``
elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.factors import Dims, Reach, RowWindow, Rule
from fxpar.sharding.ops.indexing import index_dims, is_mask

aten = torch.ops.aten

MASKED = aten._unsafe_masked_index.default
READ = (aten.index.Tensor, aten._unsafe_index.Tensor, MASKED)
ADDED = (aten.index_put.default, aten._unsafe_index_put.default)

# The most elements of a value that is computed while planning.
MOST = 1 << 20

# A row is near the row made from it if they differ by at most 1/_SHARE of all rows.
_SHARE = 4

# How many rows at either end may be exceptions to the formula.
_ENDS = 32

# (dim of the operand, the result's dim made from it, counted from the last as -1, the
# rows that each row along that dim reads)
Reaches = tuple[tuple[int, int, Reach], ...]


def computed(node: Any, values: dict[fx.Node, Any]) -> Any:
    """Return the value of a node that is made of constants alone; None for any other.
    ``values``: the nodes computed so far, to which it adds."""
    if node in values:
        return values[node]
    values[node] = None
    if not _is_arithmetic(node):
        return None
    if any(computed(x, values) is None for x in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    values[node] = node.target(*args, **kwargs)
    return values[node]


def _is_arithmetic(node: fx.Node) -> bool:
    """Return whether a call's result follows from its arguments, and has at most
    ``MOST`` elements."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    target: Any = node.target
    return (
        getattr(target, "namespace", "") in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not _torch.objects.is_mutable(target)
        and value.numel() <= MOST
        and not value.dtype.is_complex
        and not target.name().startswith("aten::empty")
    )


@_torch.aot.as_compiled()
def reaches_of(node: fx.Node) -> Reaches:
    """Return the dims along which rows are near, of a call of ``READ``, or of one of
    ``ADDED`` that accumulates."""
    x, *masks, indices = node.args[: 3 if node.target is MASKED else 2]
    if node.target in ADDED and node.args[3:] != (True,):
        return ()
    value = x.meta["val"]
    places = _index_dims(indices, value.dim())
    if places is None or value.dtype is torch.bool:
        return ()
    along, first = places
    mask = _mask(masks[0], along) if masks else None
    if masks and mask is None:
        return ()
    out: dict[int, tuple[int, int, Reach]] = {}
    for k, (d, own) in enumerate(along.items()):
        others = [i for i in range(len(along)) if i != k]
        read = None if mask is None else mask.any(others) if others else mask
        reached = _reach(indices[d], value.shape[d], own, read)
        # Where two dims are looked up along the same result dim, the first keeps it.
        if reached is not None and reached[0] not in out:
            i, reach = reached
            out[i] = d, first + i, reach
    return tuple(out.values())


def _mask(node: fx.Node, along: Mapping[int, Sequence[int]]) -> torch.Tensor | None:
    """Return a mask made of constants, with one dim for each dim that is looked up, of
    one row where the dim is looked up at one place; None for any other mask."""
    sizes = node.meta["val"].shape
    is_known = all(isinstance(n, int) for n in sizes)
    value = computed(node, {}) if is_known and math.prod(sizes) <= MOST else None
    if value is None or value.dim() != len(along):
        return None
    dims = enumerate(zip(along.values(), value.shape, strict=True))
    is_each = all(own == [i] or not own and n == 1 for i, (own, n) in dims)
    return value if is_each else None


def _index_dims(
    indices: Sequence[fx.Node | None], ndim: int
) -> tuple[dict[int, list[int]], int] | None:
    """Return (dim that is looked up -> the dims of the joint index that its own index
    has, where the joint index starts, counted from the result's last dim); None for a
    mask or symbolic sizes. ``ndim``: of the operand."""
    values = {d: i.meta["val"] for d, i in enumerate(indices) if i is not None}
    sizes = [n for x in values.values() for n in x.shape]
    if not values or any(map(is_mask, values.values())):
        return None
    if not all(isinstance(n, int) for n in sizes):
        return None
    dims, at = index_dims([values.get(d) for d in range(len(indices))])
    shape = torch.broadcast_shapes(*(x.shape for x in values.values()))
    along = {}
    for d in dims:
        own = [1] * (len(shape) - values[d].dim()) + list(values[d].shape)
        along[d] = [i for i, n in enumerate(own) if n > 1]
    return along, at - len(shape) - (ndim - len(dims))


def _reach(
    index: fx.Node, rows: int, own: Sequence[int], read: torch.Tensor | None
) -> tuple[int, Reach] | None:
    """Return (dim of the joint index, the rows that each row along it reads) for the
    dim with the narrowest windows; None if no rows are near. ``own``: the dims that the
    index has; ``read``: which rows are looked up at all; others count as near."""
    value = index.meta["val"]
    sizes = (rows, *value.shape)
    if not all(isinstance(n, int) for n in sizes) or not 1 < value.numel() <= MOST:
        return None
    places = computed(index, {})
    if places is None:
        return None
    places = places.reshape([n for n in places.shape if n > 1])
    if read is not None:
        i = torch.arange(len(places))
        anywhere = (i * rows // len(places)).clamp(0, rows - 1)
        places = torch.where(read.expand(len(places)), places, anywhere)
    reaches = [
        (i, reach)
        for k, i in enumerate(own)
        if (reach := reach_of(places.movedim(k, 0), rows)) is not None
    ]
    return min(reaches, key=lambda reached: reached[1].span, default=None)


def reach_of(places: torch.Tensor, rows: int) -> Reach | None:
    """Return windows for ``places``, positions among ``rows``: ``[count]``, or several
    for each row of the result, ``[count, ...]``; None if they are not near, or fit no
    formula."""
    count = len(places)
    several, i = places.reshape(count, -1).long(), torch.arange(count)
    low, high = several.min(1).values, several.max(1).values
    width = int((high - low).max()) + 1
    # Twice the distance of a window's middle from its result row's own place.
    far = ((low + high - (width - 1)) * count - 2 * i * rows).abs().max()
    if low.min() < 0 or high.max() >= rows or far * _SHARE > 2 * rows * count:
        return None
    if width > 1 and width * _SHARE > rows:
        return None
    slopes = [(1, 1), Fraction(rows, count).as_integer_ratio()]
    if count > 1:
        steps = low.diff()
        slopes.append(Fraction(rows - 1, count - 1).as_integer_ratio())
        slopes.append((int(steps[len(steps) // 2]), 1))
    best: Reach | None = None
    for ends in range(min(_ENDS, (count - 1) // 2) + 1):
        for slope in slopes:
            reach = _windows(low, high, ends, slope)
            if reach.span == width:
                return reach
            if best is None or reach.span < best.span:
                best = reach
    # Windows of one row must be exact.
    return best if width > 1 else None


def _windows(
    low: torch.Tensor, high: torch.Tensor, ends: int, slope: tuple[int, int]
) -> Reach:
    """Return the narrowest windows on a slope that hold rows ``low`` to ``high``, with
    ``ends`` exceptions at either end."""
    count, (step, of) = len(low), slope
    i = torch.arange(count)
    inside = slice(ends, count - ends)
    least = int((low * of - i * step)[inside].max())
    most = int(((low + 1) * of - 1 - i * step)[inside].min())
    first = min(least, most)
    begin = torch.div(first + step * i, of, rounding_mode="floor")
    begin = torch.cat([low[:ends], begin[inside], low[count - ends :]])
    span = int((high - begin).max()) + 1
    head, tail = low[:ends].tolist(), low[count - ends :].tolist()
    return Reach(step, of, first, span, tuple(head), tuple(tail))


def with_windows(rule: Rule, node: fx.Node, reaches: Reaches) -> Rule:
    """Return the rule of a lookup or update with these windows."""
    n = len(rule.operands)
    position, other = (n, n - 1) if node.target in ADDED else (0, n)
    words: dict[str, str] = {}
    windows, sizes = [], rule.size
    for d, result_dim, reach in reaches:
        # For an update the added rows take the place of a lookup's result.
        dims = rule.tensors[other]
        if -result_dim > len(dims):
            continue  # values that broadcast over all rows
        pair = rule.tensors[position][d], dims[result_dim]
        if not all(pair):
            continue
        (wide,), (other_word,) = pair
        rows, count = sizes[wide], sizes[other_word]
        if count > 1:
            words |= {wide: f"w{d}", other_word: f"w{d}"}
            windows.append(RowWindow(position, d, rows, count, reach))
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
        evenly=frozenset(words.get(f, f) for f in rule.evenly),
        windows=tuple(windows),
    )


def _renamed(dims: Dims, words: Mapping[str, str]) -> Dims:
    return tuple(tuple(words.get(f, f) for f in dim) for dim in dims)
