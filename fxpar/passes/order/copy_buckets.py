"""Leaves copies into buckets, and out of them, to torch, where values are in memory.

In: the graph of a forward or a backward with its buckets, as it goes to Inductor. Out:
the same, in place, with copies as ops that Inductor does not generate. Never: a value
changes.
"""

from __future__ import annotations

import operator
from itertools import pairwise

import torch
from torch import fx

from fxpar._torch.objects import argument
from fxpar.graph.custom_ops import register_lowerings
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.passes.simulate.launches import WAIT
from fxpar.sharding.cost.op import bytes_of, is_contraction, viewed
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def copy_together(graph: fx.Graph) -> None:
    """Let torch make the copies of buckets that Inductor has nothing to fuse with, in
    place: its code, and the time to generate and to compile it, would grow with the
    parameters of a model."""
    copy_into_buckets(graph)
    split_buckets(graph)


# The least number of values in memory of a row that no collective sends: it may be
# fused with what reads it, and for fewer values loops are a few lines.
LEAST = 8


def copy_into_buckets(graph: fx.Graph) -> None:
    """Let torch fill rows of which most is in memory, in place: Inductor generates a
    loop for each part. Of a bucket that is sent, views of what a kernel of its own
    computes are copied, too, whoever does it."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = argument(node, "tensors")
        is_sent = any(op_facts_of(user.target).communicates for user in node.users)
        in_memory = [x for x in parts if _is_in_memory(x, is_sent=is_sent)]
        if len(in_memory) < (2 if is_sent else LEAST):
            continue
        if 2 * sum(map(bytes_of, in_memory)) > sum(map(bytes_of, parts)):
            register_lowerings()
            node.args, node.kwargs = (parts, argument(node, "dim")), {}
            node.target = torch.ops.fxpar.join.default


def split_buckets(graph: fx.Graph) -> None:
    """Let torch copy the parts of a bucket with a row of each rank at once, in place:
    Inductor launches a kernel for each part, and compiles one for each place that a
    part has in any bucket."""
    results = set(graph.output_node().all_input_nodes)
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        whole, pieces = wait.meta["val"], list(wait.users)
        if not _is_of_rows(wait.args[0]) or len(pieces) < 2:
            continue
        if any(x.target is not aten.slice.Tensor or x in results for x in pieces):
            continue
        places = [x.args[1:] for x in pieces]
        if any(len(x) != 3 or {int} != {*map(type, x)} or x[0] != 1 for x in places):
            continue
        pieces.sort(key=lambda piece: piece.args[2])
        edges = [0, *(piece.args[3] for piece in pieces)]
        if edges != [*(piece.args[2] for piece in pieces), whole.shape[1]]:
            continue
        sizes = [end - begin for begin, end in pairwise(edges)]
        split = torch.ops.fxpar.split_copied.default
        with graph.inserting_after(wait):
            parts = graph.call_function(split, (wait, sizes))
        parts.meta = wait.meta | {"val": split(whole, sizes)}
        for i, piece in enumerate(pieces):
            piece.target, piece.args = operator.getitem, (parts, i)
            piece.meta["val"] = parts.meta["val"][i]


def _is_of_rows(gather: fx.Node) -> bool:
    """Return whether a node gathers one row of each of several ranks, of a known
    length."""
    if gather.target is not c10d.all_gather_into_tensor.default:
        return False
    shape = gather.meta["val"].shape
    is_known = len(shape) == 2 and {int} == {*map(type, shape)}
    return is_known and 1 < shape[0] == gather.args[1]


def _is_in_memory(part: fx.Node, *, is_sent: bool) -> bool:
    """Return whether a part is, or is a view of, a graph input or a body's result; if
    it ``is_sent``, also a view of the result of an op with a kernel of its own, which
    could write to the bucket itself only if it were no view."""
    base = viewed(part)
    if base.op == "placeholder":
        return True
    if base.target is operator.getitem:
        return base.args[0].target is INVOKE
    is_view_of_other = is_sent and base is not part
    facts = op_facts_of(base.target)
    return is_view_of_other and (is_contraction(base.target) or facts.scatters)
