"""Implements ``overlap(..., fused=1)``: a product and its collective as one op.

In: a gather along a dim that products do not sum over, whose rows they read, with any
shape of the dims before the last; or a product whose rows a reduce-scatter takes in
that way. Out: ``fxpar::gather_matmul`` or ``fxpar::matmul_scatter`` in their place.
Never chosen automatically: the seconds of these ops are not in the cost model.

On GPUs that share memory these ops are PyTorch's own of asynchronous tensor parallelism
(``symm_mem::fused_all_gather_matmul``, ``symm_mem::fused_matmul_reduce_scatter``),
elsewhere the two ops one after the other (``graph.custom_ops``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.graph.custom_ops import group_name
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import ancestors

aten = torch.ops.aten
ours = torch.ops.fxpar

_SUMS = ("sum", "avg")


def gather_first(edit: Edit, gather: fx.Node, ends: tuple[fx.Node, ...]) -> Any:
    """Put a gather and the products ``ends`` into one op. Return the products."""
    args: Any = gather.args
    x, dim = args[0], args[1]
    if dim == x.meta["val"].dim() - 1:
        raise refuse("overlap", gather, "gathers the dim that a product sums over")
    weights = [_weight(end, gather) for end in ends]
    with edit.before(max(ends).next) as build:
        fused = _call(edit, build, gather, ours.gather_matmul.default, x, weights, dim)
        whole = build.call(operator.getitem, fused, 0)
        rows = [build.call(operator.getitem, fused, i) for i in range(1, len(ends) + 1)]
        products = [
            build.call(aten.reshape.default, x, list(end.meta["val"].shape))
            for x, end in zip(rows, ends, strict=True)
        ]
    for end, product in zip(ends, products, strict=True):
        edit.swap(end, product)
    edit.swap(gather, whole)
    arrange(edit.graph)
    return products


def reduce_last(edit: Edit, starts: tuple[fx.Node, ...], reduced: fx.Node) -> Any:
    """Put a product and its reduce-scatter into one op. Return the result of each
    rank."""
    args: Any = reduced.args
    source, dim, op = args[0], args[1], args[2]
    product = _before_reshapes(source)
    shape = list(source.meta["val"].shape)
    if starts != (product,) or product.target is not aten.mm.default:
        why = "does not reduce the rows of a product of two matrices"
        raise refuse("overlap", reduced, why)
    if op not in _SUMS or dim == len(shape) - 1:
        raise refuse("overlap", reduced, f"is a {op} along dim {dim} of {len(shape)}")
    chain, read_too = source, "is read by others too"
    while chain is not product.args[0]:
        if len(chain.users) > 1:
            raise refuse("overlap", chain, read_too)
        if chain is product:
            break
        chain = chain.all_input_nodes[0]
    x, w = product.args
    with edit.before(reduced) as build:
        rows = [*shape[:-1], x.meta["val"].shape[1]]
        x = build.call(aten.reshape.default, x, rows)
        fused = _call(edit, build, reduced, ours.matmul_scatter.default, x, w, op, dim)
    edit.swap(reduced, fused)
    return [fused]


def _call(edit: Edit, build: Builder, node: fx.Node, target: Any, *args: Any) -> Any:
    axes = collective_nodes.axes_of(node)
    if edit.mesh.ordered(axes) != tuple(axes):
        raise refuse("overlap", node, f"has its axes in another order than {edit.mesh}")
    return build.call(target, *args, edit.mesh.count(axes), group_name(edit.mesh, axes))


def _before_reshapes(node: fx.Node) -> Any:
    """Return the value before reshapes that keep the last dim: the same rows, in
    order."""
    while op_facts_of(node.target).reshapes:
        source = node.all_input_nodes[0]
        if node.meta["val"].shape[-1:] != source.meta["val"].shape[-1:]:
            break
        node = source
    return node


def _weight(end: fx.Node, gather: fx.Node) -> Any:
    """Return the matrix that a product multiplies the gathered value with."""
    args: Any = end.args
    if end.target is not aten.mm.default or _before_reshapes(args[0]) is not gather:
        raise refuse(
            "overlap", end, f"is no product of the rows of {gather.name} with a matrix"
        )
    if gather in ancestors([args[1]]):
        raise refuse("overlap", end, f"has {gather.name} on both sides")
    return args[1]
