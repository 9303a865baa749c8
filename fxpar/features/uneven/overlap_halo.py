"""Applies verb ``overlap`` to the permutes of a halo and the convolution that reads it:
windows that read only rows of the shard run while the rows around it are on their way.

In: a local graph with steps, in which a convolution reads rows that permutes bring,
joined with the rows of a shard. Out: the convolution of the shard alone, after the
start of the permutes, then that of the windows at its ends, and their results joined:

    p = permute(x[-1:]);  y = conv(cat(p, x))
    p = permute(x[-1:]);  y = cat(conv(cat(p, x[:2])), conv(x))

If both ends have equally many windows they are one convolution, joined along the batch,
since small kernels take longer than their arithmetic. Each window reads the same rows,
so that this never changes a number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.fusion.node_legality import arrange
from fxpar.fusion.overlap_candidates import OverlapCandidate, Varies, Window, cut_out
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.verbs.overlap import between
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten

_CONVOLUTION = aten.convolution.default


class NoInnerWindows(Exception):
    """Says why a convolution has no windows that could run before a halo is there."""


@dataclass(frozen=True)
class WindowsByEnd:
    """Divides the windows of a convolution along one dim by the rows they read."""

    # The dim of tensors along which rows are joined.
    dim: int
    # The joined tensors, in order.
    parts: tuple[fx.Node, ...]
    # Rows from one window to the next.
    stride: int
    # Rows from the first that a window reads to the last.
    span: int
    # How many windows there are.
    count: int
    # The first window that reads no row of a halo.
    first: int
    # The first window after those.
    last: int

    def rows(self, build: Builder, first: int, last: int) -> fx.Node:
        """Return the rows that windows ``[first, last)`` read."""
        start, end = first * self.stride, (last - 1) * self.stride + self.span
        read, at = [], 0
        for part in self.parts:
            size = part.meta["val"].shape[self.dim]
            low, high = max(0, start - at), min(size, end - at)
            if low < high:
                whole = (low, high) == (0, size)
                args = part, self.dim, low, high
                read.append(part if whole else build.call(aten.slice.Tensor, *args))
            at += size
        return read[0] if len(read) == 1 else _joined(build, read, self.dim)


def overlap(
    edit: Edit,
    starts: tuple[fx.Node, ...],
    ends: tuple[fx.Node, ...],
    chunks: int | None,
    dim: int | None,
    ring: int | None,
    fused: int,
) -> list[fx.Node] | None:
    """Apply ``overlap([permute, permute_1], convolution)``. Return its result, and that
    of the windows that read no halo; None if it is no convolution after permutes."""
    (end,) = ends if len(ends) == 1 else (None,)
    if end is None or any(n.target is not collective_nodes.permute for n in starts):
        return None
    if fused or any(option is not None for option in (chunks, dim, ring)):
        why = "is cut where its windows read a halo"
        raise refuse("overlap", end, why, fix="leave out chunks, dim, ring and fused")
    try:
        windows = _windows(end, starts)
    except NoInnerWindows as why:
        raise refuse("overlap", end, str(why)) from None
    with edit.before(end) as build:
        inner = _convolved(build, end, windows.rows(build, windows.first, windows.last))
    for node in between(starts, (end,))[:-1]:
        end.prepend(node)
    with edit.before(end) as build:
        whole = _joined(build, _with_ends(build, end, windows, inner), windows.dim)
    for start in starts:
        start.meta["fxpar_chunk"] = True
    edit.swap(end, whole)
    arrange(edit.graph)
    return [whole, inner]


def lines_of(graph: fx.Graph) -> list[tuple[Line, list[fx.Node], fx.Node]]:
    """Return a line for each convolution of a local graph with steps that has windows
    which read no halo, with the permutes of the halo, and the convolution."""
    out = []
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        starts = _permutes(node)
        try:
            _windows(node, starts)
        except NoInnerWindows:
            continue
        names = tuple(start.name for start in starts)
        out.append((Line("overlap", (names, node.name)), starts, node))
    return out


def candidates(
    graph: fx.Graph, mesh: Mesh, hardware: Hardware, varies: Varies
) -> list[OverlapCandidate]:
    """Return lines for all convolutions of one form, if they save time, and the seconds
    that each does. One convolution of a form is simulated, in a window of its own: the
    permutes of halos, the joining of their rows, the convolution."""
    lines: dict[Any, list[Line]] = defaultdict(list)
    windows: dict[Any, Window] = {}
    for line, starts, node in lines_of(graph):
        members = {*starts, *between(tuple(starts), (node,))}
        window = cut_out(members, [node], starts[0], varies)
        lines[window.form].append(line)
        windows.setdefault(window.form, window)
    out = []
    for form, same_form in lines.items():
        before, after = (
            windows[form].seconds(schedule, mesh, hardware)
            for schedule in (Schedule(), Schedule(tuple(same_form[:1])))
        )
        if after < before:
            out.append(OverlapCandidate(Schedule(tuple(same_form)), before - after))
    return out


def _permutes(node: fx.Node) -> list[fx.Node]:
    """Return the permutes that bring rows to the joined operand of a convolution."""
    x: Any = node.args[0]
    if x.target is not aten.cat.default:
        return []
    parts: Any = x.args[0]
    around = [read for part in parts for read in (part, *part.all_input_nodes)]
    permutes = (n for n in around if n.target is collective_nodes.permute)
    return sorted(dict.fromkeys(permutes))


def _windows(node: fx.Node, starts: Sequence[fx.Node]) -> WindowsByEnd:
    """Return the windows of a convolution that reads rows from ``starts``. Raises
    NoInnerWindows."""
    x, weight, _, strides, padding, dilation, transposed, *_ = node.args
    if transposed:
        raise NoInnerWindows("is transposed: its result has the halo")
    if not starts or x.target is not aten.cat.default:
        raise NoInnerWindows("reads no rows that come, joined with others")
    parts, *dims = x.args
    dim = dims[0] if dims else 0
    at = dim - 2  # among the dims that windows slide over
    if at < 0 or padding[at]:
        raise NoInnerWindows(
            "pads the dim that rows are joined along, or slides over others"
        )
    late = set(between(tuple(starts), (x,)))
    unread = set(starts).difference(n for node in late for n in node.all_input_nodes)
    if unread:
        raise NoInnerWindows(
            f"does not read the rows of {min(unread).name} joined with others"
        )
    comes = [part in late or part in starts for part in parts]
    own = [i for i, is_late in enumerate(comes) if not is_late]
    if not own or any(comes[own[0] : own[-1]]):
        raise NoInnerWindows("joins rows that come between others, or no others")
    sizes = [part.meta["val"].shape[dim] for part in parts]
    stride, before = strides[at], sum(sizes[: own[0]])
    span = dilation[at] * (weight.meta["val"].shape[dim] - 1) + 1
    count, held = node.meta["val"].shape[dim], sum(sizes[: own[-1] + 1])
    first, last = -(-before // stride), min(count, (held - span) // stride + 1)
    if last <= first:
        raise NoInnerWindows("has no window that reads only rows which are there")
    return WindowsByEnd(dim, tuple(parts), stride, span, count, first, last)


def _with_ends(
    build: Builder, end: fx.Node, windows: WindowsByEnd, inner: fx.Node
) -> list[fx.Node]:
    """Return results of all windows, in order; ``inner`` are there already."""
    spans = (0, windows.first), (windows.last, windows.count)
    sizes = [last - first for first, last in spans]
    reads = [windows.rows(build, *span) for span in spans if span[0] < span[1]]
    if len(reads) == 2 and sizes[0] == sizes[1]:
        both = _convolved(build, end, _joined(build, reads, 0))
        n = inner.meta["val"].shape[0]
        ends = [
            build.call(aten.slice.Tensor, both, 0, i * n, (i + 1) * n) for i in range(2)
        ]
    else:
        ends = [_convolved(build, end, rows) for rows in reads]
    at = int(sizes[0] > 0)
    return [*ends[:at], inner, *ends[at:]]


def _convolved(build: Builder, end: fx.Node, x: fx.Node) -> fx.Node:
    return build.call(_CONVOLUTION, x, *end.args[1:])


def _joined(build: Builder, parts: Sequence[fx.Node], dim: int) -> fx.Node:
    return build.call(aten.cat.default, list(parts), dim)
