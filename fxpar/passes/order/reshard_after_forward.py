"""local -> local: gathered parameters are dropped after their use, gathered again.

In: the local graph of a forward with its backward. Out: the same graph; what is made of
resting parameters by communication, and of that alone, is tagged to be recomputed, so
that the partitioner saves this rank's part for the backward and not the whole
(FSDP's reshard-after-forward). Without this pass the partitioner may keep either.

The partitioner weighs what it saves by its size. Where shards are not alike one rank
would thus compute a collective again whose result another saved, and wait for it for
ever; so what is made of values that are recomputed and of others is tagged to be saved:
what is recomputed is what the backward itself reads, on all ranks.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.passes.stages import pipeline_ops as _pipeline_ops  # noqa: F401  (registers ops)
from fxpar.sharding.program import depending_on_tangents

transfer = torch.ops.fxpar.transfer.default

# A region of its own among the user's checkpointed ones.
_REGION = 1 << 20


def save_alike(graph: fx.Graph) -> None:
    """Tag what reads recomputed values in the forward, in place."""
    backward = depending_on_tangents(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in backward:
            tags = [read.meta.get("recompute") for read in node.all_input_nodes]
            if CheckpointPolicy.MUST_RECOMPUTE in tags:
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def regather(graph: fx.Graph) -> None:
    """Tag gathered parameters, in place."""
    if not depending_on_tangents(graph):
        return
    tagged: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is transfer:
            continue  # what another place sent is kept: it is sent once
        read = node.all_input_nodes
        if node.meta.get("fxpar_parameter") or (read and tagged.issuperset(read)):
            tagged.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _REGION
