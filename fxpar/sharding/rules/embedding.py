"""Rows of embeddings: what is looked up in a table by index, one by one or in bags.

Rows of the table may be split where one is looked up at a time (the local forms are in
``fxpar/passes/local/local_indexing.py``); columns may always be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.rules.table import make, names, row, text

aten = torch.ops.aten

MAX = 2  # the mode of bags, of which 0 is a sum and 1 a mean


def _embedding(weight: torch.Tensor, index: torch.Tensor, *_: Any) -> str:
    words = names(index.dim(), "i")
    return text(["s", "e"], words, results=[[*words, "e"]])


def _embedding_backward(
    grad: torch.Tensor, index: torch.Tensor, rows: int, padding: int, by_count: bool
) -> str:
    # The count of an index is its count in the whole batch.
    words = [w + "!" * by_count for w in names(index.dim(), "i")]
    return text([*words, "e"], words, results=[["s", "e"]])


# Bags: where one begins says a count of the indices before it, so both are whole


def _bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Rule:
    """Further results: the bag of each index, the size of each bag and, of a maximum,
    where it was found in each column."""
    weights = [["_"]] * (per_sample_weights is not None)
    where = ["_", "e"] if mode == MAX else ["_", "~e"]
    bags = [["_", "~e"], ["_", "~e"], where]
    return make([["_", "e"], ["_"], ["_"], *weights], [["_", "e"], *bags])


def _bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    bag_of: torch.Tensor,
    sizes: torch.Tensor,
    where: torch.Tensor,
    rows: int,
    by_count: bool,
    mode: int,
    scales: torch.Tensor | None,
    padding: int = -1,
) -> Rule:
    """A sum over the indices, but for a maximum, which goes through bags."""
    index = "_" if by_count or mode == MAX or bag_of.shape != indices.shape else "i"
    places = ["_", "e"] if mode == MAX else ["_"]
    weights = [[index]] * (scales is not None)
    operands = [["_", "e"], [index], [index], ["_"], places]
    return make([*operands, *weights], [["_", "e"]])


def _bag_any_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    sizes: torch.Tensor,
    where: torch.Tensor,
    rows: int,
    by_count: bool,
    mode: int,
    sparse: bool,
    scales: torch.Tensor | None,
    padding: int = -1,
) -> Rule | None:
    """As the dense one, which it calls; a sparse gradient has no rule."""
    if sparse:
        return None
    rule = _bag_backward(
        grad, indices, bag_of, sizes, where, rows, by_count, mode, scales, padding
    )
    first, second, *rest = rule.operands
    return replace(rule, operands=(first, second, ((),), *rest))


def _bag_scales_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    mode: int,
    padding: int = -1,
) -> Rule:
    index = "i" if bag_of.shape == indices.shape else "_"
    operands = [["_", "e"], ["_", "e"], [index], ["_"], [index]]
    return make(operands, [[index]])


ROWS = {
    aten.embedding.default: row(_embedding, movement="0"),
    aten.embedding_dense_backward.default: row(_embedding_backward, linear="0"),
    aten._embedding_bag.default: row(_bag),
    aten._embedding_bag_forward_only.default: row(_bag),
    aten._embedding_bag_backward.default: row(_bag_any_backward, linear="0"),
    aten._embedding_bag_dense_backward.default: row(_bag_backward, linear="0"),
    aten._embedding_bag_per_sample_weights_backward.default: row(
        _bag_scales_backward, linear="0|1"
    ),
}
