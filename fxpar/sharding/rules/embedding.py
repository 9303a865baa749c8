"""Rows of embeddings: what is looked up in a table by index, one by one or in bags.

Rows of the table may be split, but where a maximum is looked up; columns may always be
(the local forms are in ``fxpar/passes/local``: ``local_indexing``, ``local_bags``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Dims, Rule
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


# Bags: where one begins says a count of the indices before it, so both are whole, but
# for bags of one length (``in_even_bags``)


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
    where it was found in each column, for which a table is whole."""
    weights = [["_"]] * (per_sample_weights is not None)
    rows, alike = ("_", []) if mode == MAX else ("s", ["~s"])
    where = ["_", "e"] if mode == MAX else ["_", "~e", *alike]
    bags = [["_", "~e", *alike], ["_", "~e", *alike], where]
    return make([[rows, "e"], ["_"], ["_"], *weights], [["_", "e"], *bags])


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
    """A sum over the indices, but for a maximum, which goes through bags. Counts of
    indices are counts in the whole batch, of the whole table."""
    table = "_" if by_count else "s"
    index = "_" if by_count or mode == MAX or bag_of.shape != indices.shape else "i"
    places = ["_", "e"] if mode == MAX else ["_"]
    weights = [[index]] * (scales is not None)
    operands = [["_", "e"], [index], [index], ["_"], places]
    return make([*operands, *weights], [[table, "e"]])


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
    operands = [["_", "e"], ["s", "e"], [index], ["_"], [index]]
    return make(operands, [[index]])


# Of the tensors of an op, operands then results, those that have a row for each bag,
# "b", or for each index, "i"; a last operand, if it is there, are weights of these.
_ALONG = {
    aten._embedding_bag.default: ("wib", "bibb"),
    aten._embedding_bag_forward_only.default: ("wib", "bibb"),
    aten._embedding_bag_backward.default: ("bibibb", "w"),
    aten._embedding_bag_per_sample_weights_backward.default: ("bwibi", "i"),
}
_BY_COUNT = 7  # which argument of a gradient says that it is scaled by counts


def begins_at(target: Any) -> int | None:
    """Which argument of an op, behind the indices, says where bags begin."""
    return _ALONG[target][0].index("ib") + 1 if target in _ALONG else None


def in_even_bags(
    rule: Rule,
    target: Any,
    args: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    length: int,
) -> Rule:
    """The rule of a call of such an op, of tensors of these shapes, where each bag has
    ``length`` indices: bags are a factor, of which indices are a compound. A gradient
    that is scaled by counts counts all."""
    operands, results = _ALONG[target]
    operands += "i" * (len(rule.operands) - len(operands))
    (bags,), count = shapes[operands.index("ib") + 1], {"b": 1, "i": length}
    is_backward = target is aten._embedding_bag_backward.default
    rows = zip(operands + results, shapes, strict=True)
    if (
        is_backward
        and args[_BY_COUNT]
        or any(n != bags * count[along] for along, (n, *_) in rows if along != "w")
    ):
        return rule
    factors = {"b": ("b",), "i": ("b", "l") if length > 1 else ("b",)}

    def tensor(dims: Dims, along: str) -> Dims:
        return (factors[along], *dims[1:]) if along in factors else dims

    return replace(
        rule,
        operands=tuple(map(tensor, rule.operands, operands)),
        results=tuple(map(tensor, rule.results, results)),
        sizes=(
            *((f, n) for f, n in rule.sizes if f != "i"),
            ("b", bags),
            ("l", length),
        ),
        whole=rule.whole.union("l"),
    ).with_sizes(shapes)


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
