"""bound -> bound: a backward joins the rows around a shard again.

In: the joint graph one rank runs, on its way to Inductor. Out: the same nodes; joins of
rows that a convolution and its backward read are tagged to be computed again, so that
AOTAutograd saves the shard, and the few rows that came, and not the join. On a CPU
Inductor (2.13) writes a join as it was traced, and not in the layout that convolutions
give and want: kept, it takes masks of activations with it, and each kernel that reads
them goes across memory. Joins on other devices stay: there they are one kernel with
what makes their parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.passes.order.joinable_collectives import REGATHERED

aten = torch.ops.aten


def rejoin_rows(graph: fx.Graph) -> None:
    """Tag joins, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        readers = {user.target for user in node.users}
        if _is_of_rows(node) and readers >= {
            aten.convolution.default,
            aten.convolution_backward.default,
        }:
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", REGATHERED)


def _is_of_rows(node: fx.Node) -> bool:
    """Whether parts are joined along a dim that windows slide over, on a CPU."""
    value = node.meta["val"]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return value.device.type == "cpu" and dim % value.dim() >= 2
