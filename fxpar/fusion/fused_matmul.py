"""``overlap(..., fused=1)``: a product and its collective as one op.

In: a gather along a dim that products do not sum over, whose rows they read, the dims
before the last in whatever shape; or a product whose rows a reduce-scatter takes so.
Out: ``fxpar::gather_matmul`` or ``fxpar::matmul_scatter`` in their place, which on GPUs
that share memory are kernels with signals where these are predicted to be faster
(``kernels.matmul_ops``), else PyTorch's ops of asynchronous tensor parallelism
(``symm_mem::fused_all_gather_matmul``, ``symm_mem::fused_matmul_reduce_scatter``), and
elsewhere the two ops one after the other. Never chosen by itself: what these ops take
is not in the cost model.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar.fusion.kernels import matmul_ops as _matmul_ops  # noqa: F401  (runs the ops)
from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.passes import collective_nodes
from fxpar.passes.builder import Builder
from fxpar.passes.custom_ops import group_name
from fxpar.sharding.rules.op_facts import op_facts_of

aten = torch.ops.aten
ours = torch.ops.fxpar

_SUMS = ("sum", "avg")


def gather_first(edit: Edit, gather: fx.Node, ends: tuple[fx.Node, ...]) -> Any:
    """Gives the products."""
    args: Any = gather.args
    x, dim = args[0], args[1]
    if dim == x.meta["val"].dim() - 1:
        raise refuse("overlap", gather, "gathers the dim that a product sums over")
    weights = [_weight(end, gather) for end in ends]
    with edit.before(max(ends).next) as build:
        fused = _call(edit, build, gather, ours.gather_matmul.default, x, weights, dim)
        whole = build.call(operator.getitem, fused, 0)
        products = [
            _shaped(build, build.call(operator.getitem, fused, i + 1), end)
            for i, end in enumerate(ends)
        ]
    for end, product in zip(ends, products, strict=True):
        edit.swap(end, product)
    edit.swap(gather, whole)
    arrange(edit.graph)
    return products


def reduce_last(edit: Edit, starts: tuple[fx.Node, ...], reduced: fx.Node) -> Any:
    """Gives what is left to each rank."""
    args: Any = reduced.args
    source, dim, op = args[0], args[1], args[2]
    product = _behind_reshapes(source)
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


def _behind_reshapes(node: fx.Node) -> Any:
    """What a value is with other dims before its last: rows, all and in order."""
    while op_facts_of(node.target).reshapes:
        source = node.all_input_nodes[0]
        if node.meta["val"].shape[-1:] != source.meta["val"].shape[-1:]:
            break
        node = source
    return node


def _weight(end: fx.Node, gather: fx.Node) -> Any:
    """The matrix that a product multiplies what is gathered with."""
    args: Any = end.args
    if end.target is not aten.mm.default or _behind_reshapes(args[0]) is not gather:
        raise refuse(
            "overlap", end, f"is no product of the rows of {gather.name} with a matrix"
        )
    if _depends(args[1], gather):
        raise refuse("overlap", end, f"has {gather.name} on both sides")
    return args[1]


def _depends(node: fx.Node, on: fx.Node) -> bool:
    seen, pending = set[fx.Node](), [node]
    while pending:
        at = pending.pop()
        if at is on:
            return True
        if at not in seen and at > on:
            seen.add(at)
            pending += at.all_input_nodes
    return False


def _shaped(build: Builder, product: fx.Node, like: fx.Node) -> fx.Node:
    return build.call(aten.reshape.default, product, list(like.meta["val"].shape))
