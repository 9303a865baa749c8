"""Makes gradients of scans, and of running choices, one op each.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. The gradient of a scan flips rows, scans them, and
flips them back. As one op (``fxpar::scan_back``) it may be split along its dim as the
scan is: ranks gather the totals of shards, and exchange no rows to flip them. The
gradient of ``cummax`` adds rows at the places that were chosen, by a scatter
(``fxpar::choice_back``): each place is the row itself, or that of the row before, so
that a shard adds to at most one row before it. Never: a result's strides change.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, is_zeros, shape_of

aten = torch.ops.aten

_SCANS = {
    getattr(aten, name).default: name for name in ("cumsum", "cumprod", "logcumsumexp")
}
_CHOICES = (aten.cummax.default, aten.cummin.default)
_TURNS = (aten.flip.default, torch.ops.prims.rev.default)


def find_backward_scans(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace a flip, scan and flip by ``fxpar::scan_back``, and gradients of running
    choices by ``fxpar::choice_back``."""
    _find_backward_choices(graph, rewriter)
    for scan in [node for node in graph.nodes if node.target in _SCANS]:
        turned, dim = scan.args[:2]
        if not _is_flip(turned, dim) or _dtype(scan) != _dtype(turned):
            continue
        for back in [user for user in scan.users if _is_flip(user, dim)]:
            x, kind = turned.args[0], _SCANS[scan.target]
            at = dim % len(shape_of(scan))
            with rewriter.before(back):
                node = rewriter.call(torch.ops.fxpar.scan_back.default, x, at, kind)
            rewriter.replace_as_it_is(back, node)


def _find_backward_choices(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace additions to zeros at the places of a running choice along the dim by
    ``fxpar::choice_back``."""
    scatters = graph.find_nodes(op="call_function", target=aten.scatter_add.default)
    for node in scatters:
        zeros, dim, places, grad = node.args
        ndim, shape = max(1, len(shape_of(node))), shape_of(node)
        if not _is_index_of_choice(places, dim % ndim) or not is_zeros(zeros):
            continue
        if shape_of(grad) != shape or shape_of(places) != shape:
            continue
        with rewriter.before(node):
            op = torch.ops.fxpar.choice_back.default
            back = rewriter.call(op, grad, places, dim % ndim)
        rewriter.replace_as_it_is(node, back)


def _is_index_of_choice(node: fx.Node, dim: int) -> bool:
    """Return whether a node is the indices of a running choice along this dim."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    choice: Any = node.args[0]
    ndim = max(1, len(shape_of(node)))
    return choice.target in _CHOICES and choice.args[1] % ndim == dim


def _is_flip(node: Any, dim: int) -> bool:
    """Return whether a node flips this one dim."""
    if not isinstance(node, fx.Node) or node.target not in _TURNS:
        return False
    ndim = len(shape_of(node))
    return [d % ndim for d in node.args[1]] == [dim % max(1, ndim)]


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
