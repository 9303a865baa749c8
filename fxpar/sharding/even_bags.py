"""Gives an embedding bag whose bags have equal lengths a rule that splits the bags.

In: a call of an op that takes the positions where bags begin, and its rule. Out: the
rule in which bags are a factor, if these positions are constants, one length from each
other, as they are for an input of two dims; else the unchanged rule.
Never: guesses a length that the graph does not say.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.constant_values import computed
from fxpar.sharding.factors import Rule
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.ops.embedding import begins_at, in_even_bags
from fxpar.sharding.program import tensor_nodes


def bag_length(node: fx.Node) -> int | None:
    """Return how many indices each bag has; None if the graph does not say, or they
    differ."""
    at = begins_at(node.target)
    if at is None:
        return None
    indices, offsets = node.args[at - 1], node.args[at]
    (count,), (bags,) = indices.meta["val"].shape, offsets.meta["val"].shape
    are_known = isinstance(count, int) and isinstance(bags, int)
    if not are_known or bags < 2 or not count or count % bags:
        return None
    length = count // bags
    with _torch.aot.as_compiled():
        begins = computed(offsets, {})
        if begins is None:
            return None
        is_even = torch.equal(begins.long(), torch.arange(bags) * length)
    return length if is_even else None


def in_bags(rule: Rule, node: fx.Node, length: int) -> Rule:
    """Return the rule of a call whose bags have ``length`` indices each."""
    tensors = [x.meta["val"] for x in tensor_nodes(node)]
    shapes = [tuple(x.shape) for x in (*tensors, *tensors_of(node.meta["val"]))]
    return in_even_bags(rule, node.target, node.args, shapes, length)
