"""Gives ops that move, repeat or cut rows forms that may be split: steps of the
pipeline.

In: a functional ATen graph with global fake values, and the state of the pipeline. Out:
the same graph, changed in place, computing the same values. Never: a result's strides
change for a reader that would notice; a difference between ranks.

Scans: the gradient of a scan flips rows, scans them, and flips them back. As one op
(``fxpar::scan_back``) it may be split along its dim as the scan is: ranks gather the
totals of shards, and exchange no rows to flip them. The gradient of ``cummax`` adds
rows at the places that were chosen, by a scatter (``fxpar::choice_back``): each place
is the row itself, or that of the row before, so that a shard adds to at most one row
before it.

Cuts: in a split dim each cut of few rows (``select``, a short slice) is a sum over
ranks by itself. Where cuts of one tensor are near each other, or evenly spaced, one
slice holds the rows of all of them and is summed once; on one device that is one more
view. The slice has at most twice as many rows as are cut out, and no more than would be
summed rather than exchanged.

Repeats: rows of a split dim may be repeated (``slicing.repeat``), but not together with
copies of one row, or along a new dim: such a repeat becomes one of rows, then one of
copies. The gradient views a dim as turns and sums them, and a view as turns is no shard
of the dim. As one op (``fxpar::sum_turns``) each rank sums its own rows, and ranks sum
the results. ``repeat_interleave`` and its gradient view a dim as rows and their copies,
and a view as several dims must be whole where shards are uneven. Instead rows are
looked up by index, and the gradient sums windows of rows: for both a rank reads only
rows near its own. Repeats with open or empty sizes stay, and so do dims that axes
divide, or of few rows, such as heads.

Rows in turn: tensors stacked after a dim, which is then merged with the new one, give
their rows in turn; a view as rows and parts must be whole where shards are uneven. As
one op (``fxpar::interleave``) ranks exchange the few rows that change ranks; the
gradient reads every n-th row of one tensor, which slices do. Where the parts have
different numbers of rows (an associative scan pads the last of them, and cuts off the
padding) the op takes them unpadded. Dims that all axes divide stay, whose shards are
views as well.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import argument
from fxpar.features.uneven import normalize_shifts
from fxpar.features.uneven.normalize_shifts import can_be_read_for, padded_dim
from fxpar.graph.builder import Builder, is_zeros, shape_of
from fxpar.passes.normalize.normalize_matmul import before_views
from fxpar.passes.order.order_collectives import of_build
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding import shard_sizes
from fxpar.sharding.ops.slicing import is_few, is_summed

aten = torch.ops.aten
ours = torch.ops.fxpar

find_shifts = of_build(normalize_shifts.find_shifts)


# Scans

_SCANS = {
    getattr(aten, name).default: name for name in ("cumsum", "cumprod", "logcumsumexp")
}
_CHOICES = (aten.cummax.default, aten.cummin.default)


@of_build
def find_backward_scans(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace a flip, scan and flip by ``fxpar::scan_back``, and additions to zeros at
    the places of a running choice along the dim by ``fxpar::choice_back``."""
    for node in graph.find_nodes(op="call_function", target=aten.scatter_add.default):
        zeros, dim, places, grad = node.args
        dim %= max(1, len(shape_of(node)))
        if not _is_index_of_choice(places, dim) or not is_zeros(zeros):
            continue
        if shape_of(grad) == shape_of(places) == shape_of(node):
            _replace(rewriter, node, ours.choice_back.default, grad, places, dim)
    for scan in [node for node in graph.nodes if node.target in _SCANS]:
        flipped, dim = scan.args[:2]
        values = [x.meta["val"] for x in (scan, flipped)]
        if not _is_flip(flipped, dim) or values[0].dtype != values[1].dtype:
            continue
        for back in [user for user in scan.users if _is_flip(user, dim)]:
            args = flipped.args[0], dim % len(shape_of(scan)), _SCANS[scan.target]
            _replace(rewriter, back, ours.scan_back.default, *args)


def _replace(rewriter: Builder, node: fx.Node, target: Any, *args: Any) -> None:
    """Replace a node by a call, if that has the same strides."""
    with rewriter.before(node):
        replacement = rewriter.call(target, *args)
    rewriter.replace_as_it_is(node, replacement)


def _is_index_of_choice(node: fx.Node, dim: int) -> bool:
    """Return whether a node is the indices of a running choice along this dim."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    choice: Any = node.args[0]
    ndim = max(1, len(shape_of(node)))
    return choice.target in _CHOICES and choice.args[1] % ndim == dim


def _is_flip(node: Any, dim: int) -> bool:
    """Return whether a node flips this one dim."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.prims.rev.default:
        return False
    ndim = len(shape_of(node))
    return [d % ndim for d in node.args[1]] == [dim % max(1, ndim)]


# Cuts


@of_build
def join_cuts(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace several cuts of few rows of one dim by cuts of one slice."""
    cuts: dict[tuple[fx.Node, int], dict[fx.Node, range]] = defaultdict(dict)
    for node in graph.nodes:
        dim = _cut_dim(node)
        rows = None if dim is None else _rows_of(node, dim)
        if dim is not None and rows is not None:
            cuts[node.args[0], dim][node] = rows
    for (x, dim), rows_of in cuts.items():
        shared = _shared(list(rows_of.values()), shape_of(x)[dim])
        if shared is None:
            continue
        with rewriter.before(next(iter(rows_of))):
            few = rewriter.call(
                aten.slice.Tensor, x, dim, shared.start, shared.stop, shared.step
            )
        for node, rows in rows_of.items():
            first = shared.index(rows[0])
            is_one = node.target is aten.select.int
            ends = [first] if is_one else [first, first + len(rows)]
            _replace(rewriter, node, node.target, few, dim, *ends)


def _cut_dim(node: fx.Node) -> int | None:
    """Return the dim of a cut; None for other nodes, and for bools, which ranks do not
    sum."""
    if node.target not in (aten.select.int, aten.slice.Tensor) or node.kwargs:
        return None
    x, dim = (*node.args, 0)[:2]
    if x.meta["val"].dtype is torch.bool or not shape_of(x):
        return None
    return int(dim) % len(shape_of(x))


def _rows_of(node: fx.Node, dim: int) -> range | None:
    """Return the consecutive rows of a cut; None if they are many, or unknown."""
    n = shape_of(node.args[0])[dim]
    bounds: tuple[Any, ...] = node.args[2:]
    if not all(isinstance(k, int | None) for k in (n, *bounds)):
        return None
    if node.target is aten.select.int:
        rows = range(n)[bounds[0] : bounds[0] + 1 or None]
    else:
        start, end, step, *_ = (*bounds, None, None, None)
        rows = range(n)[start:end:step]
    return rows if rows and rows.step == 1 and is_few(len(rows), n) else None


def _shared(cuts: list[range], n: int) -> range | None:
    """Return the rows of one slice that holds several cuts; None if it would not pay.
    ``n``: rows of the dim."""
    cut_out = sorted({row for rows in cuts for row in rows})
    if len({*cuts}) < 2:
        return None
    step = math.gcd(*(row - cut_out[0] for row in cut_out))
    if any(len(rows) > 1 for rows in cuts):
        step = 1
    shared = range(cut_out[0], cut_out[-1] + 1, max(1, step))
    is_dense = len(shared) <= 2 * len(cut_out)
    return shared if is_dense and is_few(len(shared), n) else None


# Repeats


@of_build
def part_repeats(graph: fx.Graph, rewriter: Builder) -> None:
    """Split repeats into those of rows and of copies, and replace sums of turns of
    repeated rows by ``fxpar::sum_turns``."""
    turns_seen = set()
    for node in graph.find_nodes(op="call_function", target=aten.repeat.default):
        shape, repeats = shape_of(node.args[0]), node.args[1]
        sizes = (*shape, *repeats)
        if all(isinstance(n, int) for n in sizes) and 0 not in sizes:
            pairs = zip(shape, repeats[len(repeats) - len(shape) :], strict=True)
            # Dim with several rows -> number of repeats.
            repeated = {d: k for d, (n, k) in enumerate(pairs) if n > 1 < k}
            turns_seen.add((shape, tuple(repeated.items())))
            _part(node, repeated, rewriter)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    for node in sums if turns_seen else ():
        # The dim of turns is right before the dim that was repeated.
        x, shape, turns, keep = _summed_view(node, 0)
        if (shape, turns) not in turns_seen or keep:
            continue
        with rewriter.before(node):
            for d, times in turns:
                x = rewriter.call(ours.sum_turns.default, x, d, times)
        rewriter.replace_as_it_is(node, x)


def _part(node: fx.Node, rows: dict[int, int], rewriter: Builder) -> None:
    """Replace a repeat by one of rows, then one of copies."""
    x, repeats = node.args
    new = len(repeats) - len(shape_of(x))
    copies = [1 if d - new in rows else times for d, times in enumerate(repeats)]
    if not rows or math.prod(copies) == 1:
        return
    with rewriter.before(node):
        turns = [rows.get(d, 1) for d in range(len(shape_of(x)))]
        repeated = rewriter.call(aten.repeat.default, x, turns)
        copied = rewriter.call(aten.repeat.default, repeated, copies)
    rewriter.replace(node, copied)


def _summed_view(node: fx.Node, after: int) -> tuple[Any, Any, Any, bool]:
    """Return (value, its shape once summed, (dim, size of a new dim) for each dim,
    whether new dims stay) of a sum over the new dims of a view that splits dims in two;
    Nones for any other sum. ``after``: whether a new dim is after the rows, or before
    them (0)."""
    view, dims, keep = (*node.args, False)[:3]
    if view.target is not aten.view.default or node.kwargs or not dims:
        return None, None, None, False
    x, sizes = view.args[0], shape_of(view)
    dims = sorted(d % len(sizes) for d in dims)
    shape = tuple(n for d, n in enumerate(sizes) if d not in dims)
    parts = tuple((d - i - after, sizes[d]) for i, d in enumerate(dims))
    whole = list(shape)
    for d, count in parts:
        if 0 <= d < len(whole):
            whole[d] *= count
    # Narrow integers are summed in a wider dtype.
    is_same = shape_of(x) == tuple(whole) and _dtype(x) == _dtype(node)
    return (x, shape, parts, keep) if is_same else (None, None, None, False)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def interleave_rows(graph: fx.Graph, state: JointState) -> None:
    """Replace repeats of single rows, of a dim that may be split unevenly, by lookups,
    and their gradients by sums of windows."""
    mesh, rewriter = state.request.mesh, state.build
    if state.open or mesh.size == 1:
        return
    repeats_seen = set()
    for view in graph.find_nodes(op="call_function", target=aten.view.default):
        x, dim, times = _interleaved(view) or (view, 0, 0)
        rows = shape_of(x)[dim] if times else 0
        divides = (shard_sizes.is_exact(rows, mesh, (axis,)) for axis in mesh.names)
        if rows < shard_sizes.LONG * mesh.size or all(divides):
            continue
        repeats_seen.add((shape_of(x), ((dim, times),)))
        with rewriter.before(view):
            place = rewriter.iota(rows * times, x.meta["val"].device)
            place = rewriter.call(aten.floor_divide.default, place, times)
            indices = [*[None] * dim, place]
            looked_up = rewriter.call(aten.index.Tensor, x, indices)
        rewriter.replace_as_it_is(view, looked_up)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    for node in sums if repeats_seen else ():
        x, shape, copies, keep = _summed_view(node, 1)
        if (shape, copies) not in repeats_seen:
            continue
        ((dim, times),) = copies
        with rewriter.before(node):
            windows = rewriter.call(aten.unfold.default, x, dim, times, times)
            total = rewriter.call(aten.sum.dim_IntList, windows, [-1])
            if keep:
                total = rewriter.call(aten.unsqueeze.default, total, dim + 1)
        rewriter.replace_as_it_is(node, total)


def _interleaved(view: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return (x, dim, number of copies) if a view repeats each row of ``x`` in place,
    else None."""
    copies: Any = view.args[0]
    if copies.target is aten.clone.default:
        copies = copies.args[0]
    if copies.target is not aten.expand.default:
        return None
    one: Any = copies.args[0]
    if one.target is not aten.unsqueeze.default:
        return None
    x, shape, expanded = one.args[0], shape_of(one.args[0]), shape_of(copies)
    dim = one.args[1] % len(expanded) - 1
    if dim < 0 or not all(isinstance(n, int) for n in expanded):
        return None
    times = expanded[dim + 1]
    merged = list(shape)
    merged[dim] *= times
    is_one = (*shape[: dim + 1], times, *shape[dim + 1 :]) == expanded
    if not is_one or times < 2 or tuple(merged) != shape_of(view):
        return None
    return x, dim, times


# Rows in turn

_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class _Turns:
    """Holds the sizes of parts whose rows are taken in turn."""

    # Sizes before the dim.
    before: tuple[int, ...]
    # Rows of each part.
    rows: int
    # Number of parts.
    parts: int
    # Elements of a row.
    inner_size: int

    @property
    def dim(self) -> int:
        return len(self.before)

    @property
    def merged(self) -> tuple[int, ...]:
        """Return the sizes up to the dim that has the rows of all parts."""
        return (*self.before, self.rows * self.parts)


def take_rows_in_turn(graph: fx.Graph, state: JointState) -> None:
    """Replace rows in turn, of tensors whose rows are split unevenly, by
    ``fxpar::interleave``, and their gradients by slices."""
    mesh, rewriter = state.request.mesh, state.build
    if state.open or mesh.size == 1:
        return
    turns_seen: set[_Turns] = set()
    for view in graph.find_nodes(op="call_function", target=aten.view.default):
        join = before_views(view)
        turns = _turns(join, view)
        if turns is not None and not shard_sizes.is_exact(turns.rows, mesh, mesh.names):
            turns_seen.add(turns)
            _interleave(view, list(join.args[0]), turns, rewriter)
    selects = graph.find_nodes(op="call_function", target=aten.select.int)
    for node in selects if turns_seen else ():
        _slice(node, turns_seen, rewriter)


def _turns(join: fx.Node, view: fx.Node) -> _Turns | None:
    """Return the sizes of the parts whose rows a view of a join has in turn, if any."""
    if join.target is not aten.cat.default or join.kwargs:
        return None
    parts, shape = join.args[0], shape_of(join.args[0][0])
    dim = argument(join, "dim") % max(len(shape), 1) - 1
    sizes = (*shape, *shape_of(view))
    if dim < 0 or len(parts) < 2 or 0 in sizes:
        return None
    if not all(isinstance(n, int) for n in sizes):
        return None
    dtype = view.meta["val"].dtype
    if any(shape_of(x) != shape or x.meta["val"].dtype != dtype for x in parts):
        return None
    inner_size = math.prod(shape[dim + 1 :])
    turns = _Turns(tuple(shape[:dim]), shape[dim], len(parts), inner_size)
    return turns if shape_of(view)[: dim + 1] == turns.merged else None


def _interleave(
    view: fx.Node, parts: list[fx.Node], turns: _Turns, rewriter: Builder
) -> None:
    parts = _before_stack(parts, turns.dim + 1)
    for node in [*view.users]:
        full = turns.parts - _cut_off(node, turns)
        padded = parts[full:]
        if not padded or not all(_is_end_pad(x, turns.dim, 1) for x in padded):
            continue
        own = [*parts[:full], *(x.args[0] for x in padded)]
        with rewriter.before(node):
            rows = _in_turn(own, turns, shape_of(node), rewriter)
        if can_be_read_for(rows, node):
            rewriter.replace(node, rows)
    if view.users:
        with rewriter.before(view):
            rows = _in_turn(parts, turns, shape_of(view), rewriter)
        rewriter.replace_as_it_is(view, rows)


def _before_stack(parts: list[fx.Node], dim: int) -> list[fx.Node]:
    """Return parts without the new dim along which they are joined, if all have it."""
    for x in parts:
        is_new = x.target is aten.unsqueeze.default
        if not is_new or x.args[1] % len(shape_of(x)) != dim:
            return parts
    return [x.args[0] for x in parts]


def _in_turn(
    parts: list[fx.Node], turns: _Turns, shape: tuple[int, ...], rewriter: Builder
) -> fx.Node:
    """Return the rows of parts in turn, in this shape."""
    rows = rewriter.call(ours.interleave.default, parts, turns.dim)
    if shape_of(rows) != shape:
        rows = rewriter.call(aten.view.default, rows, shape)
    return rows


def _cut_off(node: fx.Node, turns: _Turns) -> int:
    """Return the number of rows that a slice leaves out at the end, if they are fewer
    than the parts (each the last row of its part), else 0."""
    if node.target is not aten.slice.Tensor or node.kwargs or turns.rows == 1:
        return 0
    rows = turns.merged[turns.dim]
    start, step = argument(node, "start") or 0, argument(node, "step")
    left = shape_of(node)[turns.dim]
    is_end = argument(node, "dim") % len(shape_of(node)) == turns.dim
    fits = is_end and (start, step) == (0, 1) and rows - left < turns.parts
    return rows - left if fits else 0


def _is_end_pad(node: fx.Node, dim: int, rows: int) -> bool:
    """Return whether a node pads only the end of a dim, by so many rows."""
    if node.target is not aten.constant_pad_nd.default or padded_dim(node) != dim:
        return False
    at = 2 * (len(shape_of(node)) - 1 - dim)
    return list(node.args[1][at : at + 2]) == [0, rows]


def _slice(node: fx.Node, turns_seen: set[_Turns], rewriter: Builder) -> None:
    """Replace a ``select`` of one part from a view as rows and parts by a slice."""
    view, along, index = node.args
    if view.target not in _VIEWS or not isinstance(index, int):
        return
    shape, x = shape_of(view), before_views(view)
    dim = along % len(shape) - 1
    if dim < 0 or not all(isinstance(n, int) for n in (*shape, *shape_of(x))):
        return
    inner_size = math.prod(shape[dim + 2 :])
    turns = _Turns(shape[:dim], shape[dim], shape[dim + 1], inner_size)
    if turns not in turns_seen or shape_of(x)[: dim + 1] != turns.merged:
        return
    if is_summed(turns.rows, turns.rows * turns.parts, turns.parts):
        return
    index %= turns.parts
    _slice_padded(node, x, turns, index, rewriter)
    if node.users:
        with rewriter.before(node):
            rows = _every(x, turns, index, shape_of(node), rewriter)
        rewriter.replace(node, rows)


def _every(
    x: fx.Node, turns: _Turns, first: int, shape: tuple[int, ...], rewriter: Builder
) -> fx.Node:
    """Return the rows of one part, in this shape except for their number."""
    rows = shape_of(x)[turns.dim]
    merged = (*turns.before, rows, *shape[turns.dim + 1 :])
    if shape_of(x) != merged:
        x = rewriter.call(aten.view.default, x, merged)
    return rewriter.call(aten.slice.Tensor, x, turns.dim, first, rows, turns.parts)


def _slice_padded(
    node: fx.Node, x: fx.Node, turns: _Turns, index: int, rewriter: Builder
) -> None:
    """Replace the rows of one part of a tensor padded by zeros, without the padding, by
    a slice of the unpadded tensor."""
    source = _before_zeros(x, turns)
    if source is None:
        return
    rows = len(range(index, shape_of(source)[turns.dim], turns.parts))
    readers = [node] if rows == turns.rows else []
    if rows == turns.rows - 1:
        readers = [user for user in node.users if _is_end_pad(user, turns.dim, -1)]
    for reader in readers:
        with rewriter.before(reader):
            own = _every(source, turns, index, shape_of(reader), rewriter)
            own = rewriter.with_strides_of(reader, own)
        if own.meta["val"].stride() == reader.meta["val"].stride():
            reader.replace_all_uses_with(own)


def _before_zeros(node: fx.Node, turns: _Turns) -> fx.Node | None:
    """Return the rows that a node pads by zeros at the end; None for other nodes."""
    if node.target is not aten.slice_scatter.default or node.kwargs:
        return None
    zeros, source = node.args[:2]
    start, step = argument(node, "start") or 0, argument(node, "step")
    is_dim = argument(node, "dim") % len(shape_of(node)) == turns.dim
    return source if is_zeros(zeros) and is_dim and (start, step) == (0, 1) else None
