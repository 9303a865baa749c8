"""Splits embeddings: rows looked up in a table by index, one by one or in bags.

Rows of the table may be split, except where a maximum is looked up; columns may always
be.

A rank with some of the bags counts bags, and the positions where they begin, from its
first. With a split table it sums the rows of each bag that it has, so that results are
partial, and for a gradient it keeps those. The further results of a forward depend on
indices and bags alone, and so are computed on a table of two rows: counted, and left
out.

In: calls of these ops. Out: their rules and local forms.
Never: communicates; a split table gives a partial result instead.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding.factors import Dims, Rule
from fxpar.sharding.op_table import make, names, rows, text
from fxpar.sharding.ops.local_call import (
    LocalCall,
    Localizer,
    Part,
    part_of,
    rows_at,
    trailing,
)

aten = torch.ops.aten
prims = torch.ops.prims

MAX = 2  # the mode of bags; 0 is a sum and 1 a mean


def _embedding(weight: torch.Tensor, index: torch.Tensor, *_: Any) -> str:
    words = names(index.dim(), "i")
    return text(["s", "e"], words, results=[[*words, "e"]])


def _embedding_backward(
    grad: torch.Tensor, index: torch.Tensor, rows: int, padding: int, by_count: bool
) -> str:
    # The count of an index is its count in the whole batch.
    words = [w + "!" * by_count for w in names(index.dim(), "i")]
    return text([*words, "e"], words, results=[["s", "e"]])


# Bags: the begin of a bag counts the indices before it, so both are whole, except for
# bags of one length (``in_even_bags``)


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
    """Return the rule. Further results: the bag of each index, the size of each bag
    and, for a maximum, its position in each column, for which a table is whole."""
    weights = [["_"]] * (per_sample_weights is not None)
    rows, unreduced = ("_", []) if mode == MAX else ("s", ["~s"])
    where = ["_", "e"] if mode == MAX else ["_", "~e", *unreduced]
    bags = [["_", "~e", *unreduced], ["_", "~e", *unreduced], where]
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
    """Return the rule of a sum over the indices, except for a maximum, which uses bags.
    Counts of indices are counts in the whole batch, of the whole table."""
    table = "_" if by_count else "s"
    index = "_" if by_count or mode == MAX or bag_of.shape != indices.shape else "i"
    places = ["_", "e"] if mode == MAX else ["_"]
    weights = [[index]] * (scales is not None)
    operands = [["_", "e"], [index], [index], ["_"], places]
    return make([*operands, *weights], [[table, "e"]])


def _bag_any_backward(
    grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *args: Any
) -> Rule | None:
    """Return the rule of the dense op, which it calls, and which has no ``offsets`` and
    no flag; a sparse gradient has no rule."""
    *others, sparse, scales = args[:8]
    if sparse:
        return None
    rule = _bag_backward(grad, indices, *(*others, scales))
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


# Tensors of an op, operands then results: "b" has a row for each bag, "i" for each
# index, "w" is a table. If there is one more operand it is weights of the indices.
BAGS = {
    aten._embedding_bag.default: ("wib", "bibb"),
    aten._embedding_bag_forward_only.default: ("wib", "bibb"),
    aten._embedding_bag_backward.default: ("bibibb", "w"),
    aten._embedding_bag_per_sample_weights_backward.default: ("bwibi", "i"),
}
# position of the argument of a gradient that says that it is scaled by counts
_BY_COUNT = 7


def in_even_bags(
    rule: Rule,
    target: Any,
    args: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    length: int,
) -> Rule:
    """Return the rule of a call where each bag has ``length`` indices: bags are a
    factor, and indices a compound with it. ``shapes``: of the call's tensors. A
    gradient that is scaled by counts keeps its rule, as it counts all indices."""
    operands, results = BAGS[target]
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


# Local forms


def _local_embedding(
    call: LocalCall, weight: fx.Node, index: fx.Node, *settings: Any
) -> fx.Node:
    part = part_of(call, 0, index)
    if part is None:
        return call.same(weight, index, *settings)
    rows = call.same(part.rows_of(weight), part.read(), *settings)
    return call.where(trailing(call, part.inside, 1), rows, 0)


def _local_embedding_backward(
    call: LocalCall,
    grad: fx.Node,
    index: fx.Node,
    rows: int,
    padding: int,
    by_count: bool,
) -> fx.Node:
    part, places = _own_places(call, index, padding)
    if part is None:
        return call.same(grad, index, rows, padding, by_count)
    # The spare row takes the padding as well, so that no local row is taken for it.
    more = call.build.compute(operator.add, part.n, 1)
    result = call.same(grad, places, more, part.n, by_count)
    return call.build.first_rows(result, [(part.dim, part.n)])


def _own_places(
    call: LocalCall, x: fx.Node, padding: int
) -> tuple[Part | None, fx.Node]:
    """Return (the part of the rows that this rank makes, rows among those); other rows,
    and padding, become the spare row after them. Where rows are not split there is no
    part."""
    part = part_of(call, 0, x, result=True)
    if part is None:
        return None, x
    own = call.build.call(aten.ne.Scalar, x, padding)
    own = call.build.call(aten.bitwise_and.Tensor, own, part.inside)
    return part, call.where(own, part.place, part.n)


def _first_bag(call: LocalCall, position: int, by: int = 1) -> Size:
    """Return the number of this rank's first bag, times ``by``. ``position``: of a
    tensor that has a row for each bag."""
    axes = (*call.operands, *call.results)[position].dims[0]
    return call.build.own_start(call.shapes[position][0], axes, times=by)


def _begins(call: LocalCall, offsets: fx.Node, position: int) -> fx.Node:
    """Return where bags begin among this rank's indices."""
    first = _first_bag(call, position, call.rule.size.get("l", 1))
    return _less(call, offsets, first)


def _less(call: LocalCall, x: fx.Node, first: Size) -> fx.Node:
    return x if first == 0 else call.build.call(aten.sub.Tensor, x, first)


def _local_bag(
    call: LocalCall,
    weight: fx.Node,
    indices: fx.Node,
    offsets: fx.Node,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: fx.Node | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    build, begins, padding = call.build, _begins(call, offsets, 2), padding_idx
    scales, first = per_sample_weights, _first_bag(call, len(call.operands))
    rest = scale_grad_by_freq, mode, sparse, scales, include_last_offset
    is_split = bool(call.operands[0].dims[0])
    if is_split:
        counted = build.call(aten.ne.Scalar, indices, padding)
        table = call.full([2, 1], 0, weight)
        read = build.cast(counted, indices.meta["val"].dtype)
        left_out = 0 if padding >= 0 else -1
        results = call.same(table, read, begins, *rest, left_out)
        total = _summed(call, weight, indices, begins, mode, scales, counted)
    else:
        results = call.same(weight, indices, begins, *rest, padding)
    total_or_none, bag_of, *others = (
        build.call(operator.getitem, results, i) for i in range(4)
    )
    if first != 0:
        bag_of = build.call(aten.add.Tensor, bag_of, first)
    return (total if is_split else total_or_none, bag_of, *others)


def _summed(
    call: LocalCall,
    weight: fx.Node,
    indices: fx.Node,
    begins: fx.Node,
    mode: int,
    scales: fx.Node | None,
    counted: fx.Node,
) -> fx.Node:
    """Return for each bag the sum of the rows that this rank has, or its share of the
    mean."""
    build, like = call.build, weight.meta["val"]
    part = part_of(call, 0, indices)
    assert part is not None
    dtype = torch.promote_types(like.dtype, torch.float32)
    bags, columns = call.local_shape()
    rows = build.cast(rows_at(call, part.rows_of(weight), 0, part.read()), dtype)
    read = build.call(aten.bitwise_and.Tensor, counted, part.inside)
    rows = call.where(trailing(call, read, 1), rows, 0)
    if scales is not None:
        scale = trailing(call, build.cast(scales, dtype), 1)
        rows = build.call(aten.mul.Tensor, rows, scale)
    bag = build.iota(call.operand_shape(1)[0], like.device)
    begins = build.cast(begins, torch.int64)
    bag = build.call(aten.searchsorted.Tensor, begins, bag, right=True)
    bag = build.call(aten.sub.Tensor, bag, 1)
    # Offsets that include the end of the last bag have one more entry.
    last = build.compute(operator.sub, bags, 1)
    bag = build.call(aten.clamp.default, bag, 0, last)
    zeros = call.full([bags, columns], 0, rows)
    total = build.call(aten.index_put.default, zeros, [bag], rows, True)
    if mode:
        empty = call.full([bags, 1], 0, rows)
        ones = trailing(call, build.cast(counted, dtype), 1)
        count = build.call(aten.index_put.default, empty, [bag], ones, True)
        count = build.call(aten.clamp.default, count, 1)
        total = build.call(aten.div.Tensor, total, count)
    return build.cast(total, like.dtype)


def _local_bag_backward(
    is_dense: bool, call: LocalCall, grad: fx.Node, indices: fx.Node, *args: Any
) -> fx.Node:
    """Return the gradient. ``args``: begins of bags, unless it is dense; the bag of
    each index, sizes, places of maxima; rows, flags, scales and maybe the padding."""
    n = 3 if is_dense else 4
    tensors, (rows, by_count, mode, *rest) = list(args[:n]), args[n:]
    padding = rest.pop() if len(rest) > n - 2 else -1
    if not is_dense:
        tensors[0] = _begins(call, tensors[0], 2)
        tensors[1] = _less(call, tensors[1], _first_bag(call, 0))
    part, places = _own_places(call, indices, padding)
    if part is None:
        return call.same(grad, indices, *tensors, rows, by_count, mode, *rest, padding)
    if mode == MAX:
        tensors[-1] = _own_places(call, tensors[-1], padding)[1]
    more = call.build.compute(operator.add, part.n, 1)
    settings = more, by_count, mode, *rest, part.n
    result = call.same(grad, places, *tensors, *settings)
    return call.build.first_rows(result, [(part.dim, part.n)])


def _local_scales_backward(
    call: LocalCall,
    grad: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    offsets: fx.Node,
    bag_of: fx.Node,
    mode: int,
    padding: int = -1,
) -> fx.Node:
    begins = _begins(call, offsets, 3)
    bag_of = _less(call, bag_of, _first_bag(call, 0))
    part = part_of(call, 0, indices, operand=1)
    if part is None:
        return call.same(grad, weight, indices, begins, bag_of, mode, padding)
    counted = call.build.call(aten.ne.Scalar, indices, padding)
    own = call.build.call(aten.bitwise_and.Tensor, part.inside, counted)
    part = replace(part, inside=own)
    rest = begins, bag_of, mode, -1
    products = call.same(grad, part.rows_of(weight), part.read(), *rest)
    return call.where(own, products, 0)


def _local_by_rows(local: Localizer, call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    """Return the local form's result where bags or rows of a table are split; else the
    op's."""
    specs = *call.operands, *call.results
    is_split = any(spec.dims and spec.dims[0] for spec in specs)
    return (local if is_split else LocalCall.same)(call, *args, **kwargs)


ROWS = {
    **rows(
        "embedding", _embedding, movement="0", local=_local_embedding, facts="gathers"
    ),
    **rows(
        "embedding_dense_backward",
        _embedding_backward,
        linear="0",
        local=_local_embedding_backward,
        facts="scatters",
    ),
    **rows(
        "_embedding_bag _embedding_bag_forward_only",
        _bag,
        local=partial(_local_by_rows, _local_bag),
        facts="gathers",
    ),
    **rows(
        "_embedding_bag_backward",
        _bag_any_backward,
        linear="0",
        local=partial(_local_by_rows, partial(_local_bag_backward, False)),
    ),
    **rows(
        "_embedding_bag_dense_backward",
        _bag_backward,
        linear="0",
        local=partial(_local_by_rows, partial(_local_bag_backward, True)),
        facts="scatters",
    ),
    **rows(
        "_embedding_bag_per_sample_weights_backward",
        _bag_scales_backward,
        linear="0|1",
        local=partial(_local_by_rows, _local_scales_backward),
    ),
}
