"""What a step sends: the collectives of a local graph, each as often as it runs.

In: a local graph, lowered and as scheduled. Out: facts of a plan: its collectives in
the order they run, those of the forward that the backward does again (gathers of
parameters at rest, what is checkpointed) in both places; and the reshards they come
from. Before ``bucket_collectives`` joins small ones.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from fxpar.passes.custom_ops import GROUP_PREFIX, group_axes
from fxpar.passes.simulate.launches import KINDS, PRODUCTS, is_collective, message_of
from fxpar.passes.stages import pipeline_ops as _pipeline_ops  # noqa: F401  (registers ops)
from fxpar.sharding.cost.op import bytes_of, nbytes_of, tensors_in
from fxpar.sharding.cost.recompute import phases
from fxpar.sharding.plan import Collective
from fxpar.sharding.program import user_line
from fxpar.sharding.reshard.needed import Reshard

ours = torch.ops.fxpar

# Messages between stages.
MESSAGES = {
    ours.transfer.default: "send",
    ours.spread.default: "broadcast",
    ours.scatter.default: "scatter",
}


def facts_of(
    graph: fx.Graph,
) -> tuple[tuple[Collective, ...], tuple[tuple[Reshard, int], ...]]:
    """The collectives of one step in order, and the reshards that these belong to, of
    each phase, with the bytes of their collectives."""
    sent: list[Collective] = []
    reshards: list[tuple[Reshard, int]] = []
    for phase in phases(graph):
        sent_bytes: dict[Reshard, int] = defaultdict(int)
        for node in phase:
            if _is_ours(node):
                sent.append(_collective(node))
                if "fxpar_reshard" in node.meta:
                    sent_bytes[node.meta["fxpar_reshard"]] += sent[-1].bytes
        reshards += sent_bytes.items()
    return tuple(sent), tuple(reshards)


def _is_ours(node: fx.Node) -> bool:
    """Whether it is a collective along axes of the mesh."""
    communicates = node.target in PRODUCTS or node.target in MESSAGES
    communicates = communicates or is_collective(node)
    return communicates and _group(node).startswith(GROUP_PREFIX)


def _group(node: fx.Node) -> str:
    return str(node.kwargs.get("group_name", node.args[-1]))


def _collective(node: fx.Node) -> Collective:
    if node.target is ours.move_rows.default:
        kind, nbytes = message_of(node)
        return Collective(kind, group_axes(_group(node)), round(nbytes), _source(node))
    ops = KINDS | PRODUCTS | MESSAGES
    kind = ops[node.target]
    return Collective(kind, group_axes(_group(node)), _size(node), _source(node))


def _size(node: fx.Node) -> int:
    """Bytes of what a rank has before or after, whichever is more."""
    if node.target not in PRODUCTS:
        return max(bytes_of(node), sum(map(bytes_of, node.all_input_nodes)))
    (value, *_), count = tensors_in(node.meta["val"]), node.args[-2]
    return nbytes_of(value) * (1 if PRODUCTS[node.target] == "all_gather" else count)


def _source(node: fx.Node) -> str:
    """Node and user line that made it necessary."""
    if "fxpar_cause" in node.meta:
        return node.meta["fxpar_cause"]
    name, line = node.meta.get("fxpar_origin", node.name), user_line(node)
    return f"{name} ({line})" if line else name
