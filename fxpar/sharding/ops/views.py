"""Splits views that keep every element: reshapes, permutations, expansion.

A reshape is the common factorisation of its two shapes.

A shard may be stored in memory in another order than the whole. Its strides can forbid
a view that the strides of the whole allowed, so a change of shape is a reshape, which
copies only then. A split dim of local size 1 is not a dim of size 1, so squeezing names
the dims that go. Strides among the arguments are strides of the whole: where they
describe a reshape it is one, else the tensor is whole.

In: calls of these ops. Out: their rules and local forms.
Never: reads memory beyond a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.sharding.factors import Rule
from fxpar.sharding.op_table import Word, at, make, rows, words_of
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten

Shape = Sequence[int]


def moves(
    names: str, rule: Callable[..., Rule | None], facts: str = "", **marks: Any
) -> dict:
    """Return rows of ops that only move elements: every partial value may pass."""
    return rows(names, rule, movement="0", facts=f"moves {facts}", **marks)


# Views of the same elements in the same order


def regroup(source: Shape, target: Shape) -> Rule:
    """Return the common factorisation of two shapes of equally many elements.

    From the left, the greatest common divisor of the two open dims is a factor of both.
    Where they have none in common, dims are joined until the products meet; the rest of
    those dims is whole, and so is all that is minor to it in the same dim.
    """
    sizes: dict[str, int] = {}

    def factor(n: int, whole: bool = False) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = n
        return name + "!" * whole

    if 0 in source or 0 in target:
        before, after = ([factor(n, True) for n in s] for s in (source, target))
        return make([before], [after], sizes)

    source_words: list[list[str]] = [[] for _ in source]
    target_words: list[list[str]] = [[] for _ in target]
    i = j = 0
    a = b = 1
    while True:
        while a == 1 and i < len(source):
            a, i = source[i], i + 1
        while b == 1 and j < len(target):
            b, j = target[j], j + 1
        if a == 1 and b == 1:
            break
        common = math.gcd(a, b)
        if common > 1:
            name = factor(common)
            source_words[i - 1].append(name)
            target_words[j - 1].append(name)
            a, b = a // common, b // common
            if a == 1 or b == 1:
                continue
        # No further divisor in common: the rest is whole until the products meet.
        rest_left, rest_right = a, b
        source_words[i - 1].append(factor(a, True))
        target_words[j - 1].append(factor(b, True))
        while rest_left != rest_right:
            if rest_left < rest_right:
                source_words[i].append(factor(source[i], True))
                rest_left, i = rest_left * source[i], i + 1
            else:
                target_words[j].append(factor(target[j], True))
                rest_right, j = rest_right * target[j], j + 1
        a = b = 1

    def words(dims: list[list[str]]) -> list[Word]:
        return [tuple(dim) if dim else "_" for dim in dims]

    return make([words(source_words)], [words(target_words)], sizes)


def view(x: torch.Tensor, shape: Shape, *_: Any, **__: Any) -> Rule:
    rest = x.numel() // max(math.prod(n for n in shape if n != -1), 1)
    return regroup(x.shape, [rest if n == -1 else n for n in shape])


def view_dtype(x: torch.Tensor, dtype: torch.dtype) -> Rule:
    """Return the rule of bits read as another type; a change of width rescales the last
    dim."""
    words = words_of(x)
    if x.element_size() == dtype.itemsize:
        return make([words], [words])
    return make([[*words[:-1], "bits!"]], [[*words[:-1], "_"]])


def collapse(x: torch.Tensor, start: int, end: int) -> Rule:
    """Return the rule of dims ``start`` to ``end``, inclusive, becoming one."""
    shape = list(x.shape)
    product = [math.prod(shape[start : end + 1])]
    return regroup(shape, shape[:start] + product + shape[end + 1 :])


def split_dim(x: torch.Tensor, dim: int, outer: int) -> Rule:
    words = words_of(x, {dim})
    return make([words], [[*words[:dim], "_", "_", *words[dim + 1 :]]])


# Views in another order or with dims of size 1 more or less


def permute(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    words = words_of(x)
    return make([words], [[words[at(d, x.ndim)] for d in dims]])


def transpose(x: torch.Tensor, first: int, second: int) -> Rule:
    order = list(range(x.ndim))
    if order:
        a, b = at(first, x.ndim), at(second, x.ndim)
        order[a], order[b] = b, a
    return permute(x, order)


def t(x: torch.Tensor) -> Rule:
    return permute(x, range(x.ndim)[::-1])


def squeeze(x: torch.Tensor, dims: int | Sequence[int] | None = None) -> Rule:
    """Return the rule: only dims of size 1 go, also among those named. A dim of another
    size that is split into shards of size 1 stays, which the local form ensures."""
    asked_dims = (
        range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    )
    squeezable = {at(d, x.ndim) for d in asked_dims}
    words = words_of(x)
    result_words = [
        w for i, w in enumerate(words) if not (i in squeezable and x.shape[i] == 1)
    ]
    return make([words], [result_words])


def unsqueeze(x: torch.Tensor, dim: int) -> Rule:
    words = words_of(x)
    dim = at(dim, x.ndim + 1)
    return make([words], [[*words[:dim], "_", *words[dim:]]])


def expand(x: torch.Tensor, shape: Shape, **_: Any) -> Rule:
    """Return the rule; a stretched dim is a factor of the result alone."""
    new = len(shape) - x.ndim
    source = [1] * new + list(x.shape)
    result = [m if n == -1 else n for n, m in zip(shape, source, strict=True)]
    return _stretch(x, result, range(new, len(shape)))


def broadcast_in_dim(x: torch.Tensor, shape: Shape, places: Sequence[int]) -> Rule:
    return _stretch(x, shape, places)


def _stretch(x: torch.Tensor, shape: Shape, places: Sequence[int]) -> Rule:
    words = words_of(shape)
    operand = [
        words[p] if n == shape[p] else "_" for p, n in zip(places, x.shape, strict=True)
    ]
    return make([operand], [words])


def is_reshape(
    x: torch.Tensor, shape: Shape, stride: Shape, offset: int | None = None
) -> bool:
    """Return whether strides are those of the tensor, or read a contiguous one in its
    own order."""
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    plain = all(s == d for n, s, d in zip(shape, stride, dense, strict=True) if n != 1)
    if offset is not None and offset != x.storage_offset():
        return False
    if tuple(shape) == x.shape and tuple(stride) == x.stride() and 0 not in stride:
        return True
    return plain and math.prod(shape) == x.numel() and x.is_contiguous()


def as_strided(
    x: torch.Tensor, shape: Shape, stride: Shape, offset: int | None = None
) -> Rule | None:
    """Return the rule of a reshape of a contiguous tensor; None of any other
    strides."""
    return regroup(x.shape, shape) if is_reshape(x, shape, stride, offset) else None


def as_strided_scatter(
    x: torch.Tensor, source: torch.Tensor, *strides: Any
) -> Rule | None:
    """Return the rule of the source put where ``as_strided`` reads."""
    rule = as_strided(x, *strides)
    if rule is None:
        return None
    return replace(rule, operands=rule.operands + rule.results, results=rule.operands)


# Local forms


def _local_reshape(call: LocalCall, x: fx.Node, *_: Any, **__: Any) -> fx.Node:
    return call.build.reshape(x, call.local_shape())


def _local_squeeze(call: LocalCall, x: fx.Node, dims: Any = None) -> fx.Node:
    shape = call.shapes[0]
    listed = range(len(shape)) if dims is None else dims
    listed = [listed] if isinstance(listed, int) else listed
    squeezed = [d % len(shape) for d in listed if shape and shape[d] == 1]
    return call.build.call(aten.squeeze.dims, x, squeezed)


def _local_reread(call: LocalCall, x: fx.Node, *args: Any) -> fx.Node:
    """Return bits read as another type of another width, for which neighbours must be
    adjacent."""
    return call.same(call.build.contiguous(x), *args)


def _local_as_strided(call: LocalCall, x: fx.Node, *args: Any) -> fx.Node:
    """Return a reshape, or any other use of strides, on the whole tensor. ``args``: the
    source, if it is put where the strides read, and the strides."""
    source = [x for x in args if isinstance(x, fx.Node)]
    shape, stride, offset = [*args[len(source) :], None][:3]
    global_x = call.node.args[0].meta["val"]
    if is_reshape(global_x, shape, stride, offset):
        return _local_reshape(call, *(source or [x]))
    # Counted from the tensor's own start.
    first = 0 if offset is None else offset - global_x.storage_offset()
    _refuse_beyond(call, shape, stride, first)
    x = _with_global_strides(call, x)
    return call.same(x, *source, shape, stride, first)


def _refuse_beyond(call: LocalCall, shape: Any, stride: Any, first: int) -> None:
    """Raise PlanError for strides that reach memory beyond the tensor, which is no part
    of its value."""
    ends = [(n - 1) * step for n, step in zip(shape, stride, strict=True)]
    if 0 not in shape and not 0 <= first <= first + sum(ends) < math.prod(
        call.shapes[0]
    ):
        raise PlanError(
            f"{call.node.name} reads memory beyond the tensor by strides",
            fix="index or slice the tensor that owns the memory",
        )


def _with_global_strides(call: LocalCall, x: fx.Node) -> fx.Node:
    """Return a whole tensor with the strides that it has in the global graph."""
    global_x, build = call.node.args[0].meta["val"], call.build
    order = sorted(range(global_x.dim()), key=lambda d: -global_x.stride(d))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    x = build.call(aten.permute.default, x, order)
    x = build.call(aten.permute.default, call.build.contiguous(x), inverse)
    if x.meta["val"].stride() != global_x.stride():
        raise PlanError(
            f"{call.node.name} reads a tensor by strides that skip over memory",
            fix="index or slice the tensor instead of torch.as_strided",
        )
    return x


ROWS = {
    **moves(
        "view",
        view,
        shape=1,
        local=_local_reshape,
        facts="reshapes keeps_order by_row renames sinks",
    ),
    **moves(
        "_reshape_copy _reshape_alias_copy",
        view,
        shape=1,
        local=_local_reshape,
    ),
    **moves(
        "_unsafe_view",
        view,
        shape=1,
        local=_local_reshape,
        facts="reshapes keeps_order by_row",
    ),
    **moves(
        "reshape prims::reshape",
        view,
        shape=1,
        local=_local_reshape,
        view=False,
        facts="reshapes keeps_order sinks by_row",
    ),
    **rows(
        "view.dtype prims::view_of_dtype",
        view_dtype,
        local=_local_reread,
        facts="moves",
    ),
    **moves("permute prims::transpose", permute, facts="permutes sinks by_row"),
    **moves("transpose.int", transpose, facts="permutes by_row"),
    **moves("t", t, facts="permutes by_row"),
    **moves("expand", expand, shape=1, facts="by_row"),
    **moves(
        "squeeze squeeze.dim",
        squeeze,
        local=_local_squeeze,
        along=1,
        facts="keeps_order by_row",
    ),
    **moves(
        "squeeze.dims prims::squeeze",
        squeeze,
        local=_local_squeeze,
        along=1,
        facts="keeps_order by_row sinks",
    ),
    **moves("unsqueeze", unsqueeze, along=1, facts="keeps_order sinks by_row"),
    **moves(
        "as_strided as_strided_copy prims::as_strided",
        as_strided,
        even=True,
        local=_local_as_strided,
        facts="by_strides",
    ),
    **rows(
        "as_strided_scatter prims::as_strided_scatter",
        as_strided_scatter,
        movement="0+1",
        even=True,
        local=_local_as_strided,
        facts="moves by_strides",
    ),
    # Complex numbers are pairs of real ones.
    **rows(
        "view_as_real view_as_real_copy",
        lambda x: make([w := words_of(x)], [[*w, "two!"]]),
        linear="0",
        facts="moves",
    ),
    **rows(
        "view_as_complex view_as_complex_copy",
        lambda x: make([[*(w := words_of(x.shape[:-1])), "two!"]], [w]),
        linear="0",
        local=_local_reread,
        facts="moves",
    ),
    **moves("prims::broadcast_in_dim", broadcast_in_dim, shape=1),
    **moves("prims::collapse prims::collapse_view", collapse, local=_local_reshape),
    **moves("prims::split_dim", split_dim, local=_local_reshape),
}
