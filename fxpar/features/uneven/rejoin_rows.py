"""Makes a backward join the rows around a shard again, instead of saving the join.

In: the joint graph one rank runs, on its way to Inductor. Out: the same nodes; joins of
rows that a convolution and its backward read are tagged to be recomputed, so that
AOTAutograd saves the shard and the few received rows, and not the join. On a CPU
Inductor (2.13) writes a join in its traced layout, not in the one that convolutions
return and want: a saved join makes masks of activations use that layout too, and each
kernel that reads them has strided access. Never: joins on other devices are tagged;
there a join is one kernel with the ops that compute its parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.passes.order.joinable_collectives import REGATHERED

aten = torch.ops.aten


def rejoin_rows(graph: fx.Graph) -> None:
    """Tag joins of rows to be recomputed, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        readers = {user.target for user in node.users}
        if _is_of_rows(node) and readers >= {
            aten.convolution.default,
            aten.convolution_backward.default,
        }:
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", REGATHERED)


def _is_of_rows(node: fx.Node) -> bool:
    """Return whether a join is along a spatial dim of a convolution, on a CPU."""
    value = node.meta["val"]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return value.device.type == "cpu" and dim % value.dim() >= 2
