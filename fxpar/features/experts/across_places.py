"""Finds experts that are sharded over manual axes, so that rows can be sent to them.

Along a manual axis each rank runs its own program and gathers parameters before use;
their gradients become means (``sharding.manual_axes``). A rank may keep its own experts
instead and multiply the rows of all ranks: an expert gives the same for a row on every
rank. Its gradient is then a sum over the rows of all. In: a traced graph, before rows
of experts are computed in place. Out: data. Never: changes the graph; if a weight or
gradient of a mixture is read in another way than expert by expert, the mixture is
gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import shape_of
from fxpar.passes.row_wise import row_result
from fxpar.sharding.factors import Axes
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Signature
from fxpar.sharding.spec import Spec

aten = torch.ops.aten
MEAN = torch.ops.fxpar.mean_over_ranks.default


def means_of_experts(
    products: Mapping[fx.Node, int], signature: Signature, axes: Axes
) -> list[fx.Node] | None:
    """Return the means of the gradients of a mixture's weights; None unless all its
    weights are sharded by expert over the axes and nothing reads across experts."""
    gradients: list[fx.Node] = []
    for product in products:
        weight, gradient = _weight_of(product)
        if weight is not None and not _is_split_at_rest(weight, signature, axes):
            return None
        if gradient is not None:
            gradients.append(gradient)
    means = list(dict.fromkeys(_readers(gradients)))
    for node in means:
        if node.target is not MEAN:
            return None
        if not _is_split(Spec.parse(str(node.args[1])), axes):
            return None
    return means


def _weight_of(product: fx.Node) -> tuple[Any, fx.Node | None]:
    """Return (the weight that a grouped product reads, the weight gradient that it
    gives)."""
    x, y = product.args[:2]
    if len(product.args) > 3:  # the backward of a product
        items = {user.args[1]: user for user in product.users}
        return y, items.get(1)
    return (y, None) if len(shape_of(y)) == 3 else (None, product)


def _is_split_at_rest(weight: fx.Node, signature: Signature, axes: Axes) -> bool:
    """Return whether a weight is made, expert by expert, of a parameter that is sharded
    over the axes."""
    while weight.op == "call_function" and len(weight.all_input_nodes) == 1:
        (source,) = weight.all_input_nodes
        if row_result(weight, source, 0) != 0:
            return False
        weight = source
    if weight.op != "placeholder":
        return False
    place = weight.graph.find_nodes(op="placeholder").index(weight)
    at_rest = signature.inputs[place].at_rest
    return at_rest is not None and _is_split(at_rest, axes)


def _is_split(spec: Spec, axes: Axes) -> bool:
    """Return whether the axes are the first that split dim 0."""
    return bool(spec.dims) and spec.dims[0][: len(axes)] == axes


def _readers(gradients: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield what reads gradients, except for ops that pass sums of them on expert by
    expert."""
    passed, queue = set(gradients), list(gradients)
    while queue:
        for user in queue.pop().users:
            operands = user.all_input_nodes
            facts = op_facts_of(user.target)
            passes = facts.casts or facts.renames or facts.reshapes or facts.permutes
            passes = passes or user.target in (aten.clone.default, aten.add.Tensor)
            if not passes or not all(row_result(user, x, 0) == 0 for x in operands):
                yield user
            elif user not in passed:
                passed.add(user)
                queue.append(user)
    for node in passed.difference(gradients):  # sums with something else
        if not passed.issuperset(node.all_input_nodes):
            yield node
