"""traced -> normalized: scans from the last row to the first are one op.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. The gradient of a scan scans rows turned round, and
turns them back. As one op (``fxpar::scan_back``) it may be split along its dim as the
scan is: ranks gather what shards come to, and turn no rows round between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.passes.builder import Builder, shape_of

aten = torch.ops.aten

_SCANS = {
    getattr(aten, name).default: name for name in ("cumsum", "cumprod", "logcumsumexp")
}
_TURNS = (aten.flip.default, torch.ops.prims.rev.default)


def find_backward_scans(graph: fx.Graph, rewriter: Builder) -> None:
    """Rows that are turned round, scanned, and turned back, as ``fxpar::scan_back``."""
    for scan in [node for node in graph.nodes if node.target in _SCANS]:
        turned, dim = scan.args[:2]
        if not _turns(turned, dim) or _dtype(scan) != _dtype(turned):
            continue
        for back in [user for user in scan.users if _turns(user, dim)]:
            x, kind = turned.args[0], _SCANS[scan.target]
            at = dim % len(shape_of(scan))
            with rewriter.before(back):
                node = rewriter.call(torch.ops.fxpar.scan_back.default, x, at, kind)
            if node.meta["val"].stride() == back.meta["val"].stride():
                rewriter.replace(back, node)


def _turns(node: Any, dim: int) -> bool:
    """Whether a node is the rows of this one dim in the other order."""
    if not isinstance(node, fx.Node) or node.target not in _TURNS:
        return False
    ndim = len(shape_of(node))
    return [d % ndim for d in node.args[1]] == [dim % max(1, ndim)]


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
