"""Copies values that are in memory already into a bucket by one call of torch.

In: a forward or a backward as it goes to Inductor. Out: the same graph, changed in
place: an ``aten.cat`` of many values, most of them graph inputs or results of bodies of
layers, becomes one call of torch's own cat. The result of an op outside of a body
Inductor writes to its place in the bucket; for any other value it generates a loop, so
that its code, and the C++ or Triton compiler's time, grow with the layers of a model.
Never: a value changes.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpar.graph.custom_ops import register_joins
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.sharding.cost.op import viewed

aten = torch.ops.aten

# The least number of values in memory: for fewer, loops are a few lines.
LEAST = 8


def copy_into_buckets(graph: fx.Graph) -> None:
    """Let torch copy buckets most of whose parts are in memory, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        in_memory = sum(map(_is_in_memory, parts))
        if in_memory >= LEAST and 2 * in_memory > len(parts):
            register_joins()
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            node.target = torch.ops.fxpar.join.default
            node.args, node.kwargs = (parts, dim), {}


def _is_in_memory(part: fx.Node) -> bool:
    """Return whether a part is, or is a view of, a graph input or a body's result."""
    base = viewed(part)
    if base.op == "placeholder":
        return True
    return base.target is operator.getitem and base.args[0].target is INVOKE
