"""Ops whose local form is not simply the op on local operands.

Most ops compute their shard from the shards of their operands unchanged. The rows here
are the others: an index into a split dim must be shifted by the rank's offset and
masked where it points elsewhere, a size among the arguments must become the local one,
a random op must count by global index. Each function appends the local form of one call
to the graph and returns its node. Keys are op overloads, or names of ops that torch
registers late.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar import _torch
from fxpar.passes import local_custom_ops, local_indexing, local_views, local_windows
from fxpar.passes.local_call import LocalCall, Localizer
from fxpar.sharding.rules import row_of

__all__ = ["LOCAL", "LocalCall", "Localizer", "local_form"]

LOCAL: dict[Any, Localizer] = {
    **local_indexing.LOCAL,
    **local_views.LOCAL,
    **local_windows.LOCAL,
    **local_custom_ops.LOCAL,
}


def local_form(call: LocalCall, args: Any, kwargs: Any) -> fx.Node:
    """Append one op on local arguments; the op's own name where nothing else is said,
    its shape argument, if its row marks one, made local."""
    target = call.node.target
    local = LOCAL.get(target)
    if local is None and isinstance(target, _torch.inductor.OpOverload):
        local = LOCAL.get(target.name())
    if local is None:
        local = LOCAL.get(_torch.aot.higher_order_name(target))
    if local is not None:
        return local(call, *args, **kwargs)
    row = row_of(target)
    if row is not None and row.shape is not None and row.shape < len(args):
        shape = list(call.local_shape())
        args = (*args[: row.shape], shape, *args[row.shape + 1 :])
    return call.build.call(target, *args, **kwargs)
