"""Leaves copies into buckets, and out of them, to torch, where values are in memory.

In: the graph of a forward or a backward with its buckets, as it goes to Inductor, and
the bodies that it calls. Out: the same, in place, with copies as ops that Inductor does
not generate. Never: a value changes.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpar.graph.custom_ops import register_lowerings
from fxpar.passes.order.delay_work import WAIT
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.sharding.cost.op import (
    bytes_of,
    is_contraction,
    is_light,
    is_view,
    viewed,
)
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def copy_together(graph: fx.Graph) -> None:
    """Let torch make the copies of buckets that Inductor has nothing to fuse with, in
    place, in the graph that goes to Inductor and in the bodies that it calls: its code,
    and the time to generate and to compile it, would grow with the parameters of a
    model."""
    copy_into_buckets(graph)
    scale_buckets(graph)
    owner = graph.owning_module
    modules = owner.modules() if owner is not None else ()
    bodies = [m.graph for m in modules if isinstance(m, fx.GraphModule)]
    for each in dict.fromkeys([graph, *bodies]):
        copy_out_of_buckets(each)


# The least number of values in memory of a row that no collective sends: it may be
# fused with what reads it, and for fewer values loops are a few lines.
LEAST = 8


def copy_into_buckets(graph: fx.Graph) -> None:
    """Let torch fill rows of which most is in memory, in place: Inductor generates a
    loop for each part. Of a bucket that is sent, views of what a kernel of its own
    computes are copied, too, whoever does it."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        is_sent = any(op_facts_of(user.target).communicates for user in node.users)
        in_memory = [x for x in parts if _is_in_memory(x, is_sent=is_sent)]
        if len(in_memory) < (2 if is_sent else LEAST):
            continue
        if 2 * sum(map(bytes_of, in_memory)) > sum(map(bytes_of, parts)):
            register_lowerings()
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            node.target = torch.ops.fxpar.join.default
            node.args, node.kwargs = (parts, dim), {}


def scale_buckets(graph: fx.Graph) -> None:
    """Multiply or divide a reduced bucket by a number at once, where each of its parts
    is and nothing that could be fused with it reads the result: all are gradients of
    which the mean over ranks is taken."""
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        pieces = list(wait.users)
        parts = [user for piece in pieces for user in piece.users]
        scaled = [user for part in parts for user in part.users]
        if len(pieces) < 2 or any(len(n.users) != 1 for n in (*pieces, *parts)):
            continue
        if not all(map(is_view, (*pieces, *parts))):
            continue
        if not _SCALINGS.issuperset(node.target for node in scaled):
            continue
        if any(is_light(reader.target) for node in scaled for reader in node.users):
            continue
        kinds = {(node.target, *node.args[1:]) for node in scaled}
        if len(kinds) > 1:
            continue
        ((target, number),) = kinds
        with graph.inserting_after(wait):
            whole = graph.call_function(target, (wait, number))
        dtype = scaled[0].meta["val"].dtype
        value = torch.empty_like(wait.meta["val"], dtype=dtype)
        whole.meta = scaled[0].meta | {"val": value}
        for piece, part, node in zip(pieces, parts, scaled, strict=True):
            piece.replace_input_with(wait, whole)
            node.replace_all_uses_with(part)
            graph.erase_node(node)


# Ops on a tensor and a number.
_SCALINGS = {aten.div.Scalar, aten.mul.Scalar}


def copy_out_of_buckets(graph: fx.Graph) -> None:
    """Let torch copy, on CPUs, what contractions read of a bucket with a row of each
    rank, in place: Inductor generates a kernel for each."""
    for node in graph.find_nodes(op="call_function", target=aten.reshape.default):
        source, on_cpu = node.args[0], node.meta["val"].device.type == "cpu"
        if on_cpu and _is_part_of_bucket(source) and _is_only_contracted(node):
            register_lowerings()
            with graph.inserting_before(node):
                copied = graph.call_function(torch.ops.fxpar.copied.default, (source,))
            copied.meta = dict(source.meta)
            copied.meta["val"] = torch.clone(source.meta["val"])
            node.replace_input_with(source, copied)


def _is_part_of_bucket(node: fx.Node) -> bool:
    """Return whether a node is part of each row of a bucket in memory, as itself or as
    the operand of a body."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    if any(type(n) is not int for n in (*value.shape, *value.stride())):
        return False
    if value.is_contiguous():
        return False
    base = viewed(node)
    is_in_memory = base.op == "placeholder" or op_facts_of(base.target).communicates
    return is_in_memory and value.stride(1) == 1


def _is_only_contracted(node: fx.Node) -> bool:
    """Return whether only contractions read a value, or views of it."""
    return bool(node.users) and all(
        is_contraction(user.target) or (is_view(user) and _is_only_contracted(user))
        for user in node.users
    )


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
