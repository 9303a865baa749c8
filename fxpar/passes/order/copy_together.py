"""scheduled -> scheduled: what already lies in memory is copied into a bucket at once.

In: a forward or a backward as it goes to Inductor. Out: the same graph, changed in
place: an ``aten.cat`` of many values, most of which graph inputs or bodies of layers
give, is one call of torch's own copy. What an op outside of a body computes, Inductor
writes where it belongs in the bucket; of what lies elsewhere it generates a loop for
each value, so that its text, and the C++ or Triton compiler's time, grow with the
layers of a model.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpar.graph.custom_ops import register_joins
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.sharding.cost.op import viewed

aten = torch.ops.aten

# So many values must lie in memory: of fewer, loops are a few lines.
LEAST = 8


def copy_together(graph: fx.Graph) -> None:
    """Let torch copy the parts of buckets that lie in memory."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        in_memory = sum(map(_lies_in_memory, parts))
        if in_memory >= LEAST and 2 * in_memory > len(parts):
            register_joins()
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            node.target = torch.ops.fxpar.join.default
            node.args, node.kwargs = (parts, dim), {}


def _lies_in_memory(part: fx.Node) -> bool:
    """Whether a graph input, or a body, gives what a part shows."""
    base = viewed(part)
    if base.op == "placeholder":
        return True
    return base.target is operator.getitem and base.args[0].target is INVOKE
