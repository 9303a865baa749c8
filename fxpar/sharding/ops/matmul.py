"""Gives rules to contractions: each is its own einsum, linear in every operand; also to
products by expert, and the ops that send rows to their experts.

A contracted factor makes the result partial. Where a bias is added inside the op it
stays whole: every rank would add the bias to its summand. Of ``groups`` groups of
experts a rank has one or more, and the rows that are assigned to them
(``fxpar/features/experts/expert_ops.py``).

In: calls of these ops. Out: their rules, and local forms of grouped products.
Never: splits a sum into which a bias is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.sharding.factors import Passage, Rule
from fxpar.sharding.op_table import Word, aligned, make, rows, words_of
from fxpar.sharding.ops.local_call import LocalCall, form_of_feature

aten = torch.ops.aten

# Partial values that pass an op that adds a bias: the bias with one of the two others.
BIASED = "0+1|0+2"


def _biased(*tensors: str) -> Callable[..., Rule]:
    """Return the rule function of a contraction of operands 1 and 2 added to operand 0,
    which may be broadcast."""
    *operands, result = [t.split() for t in tensors]

    def rule_of_call(bias: torch.Tensor, *_: Any, **__: Any) -> Rule:
        last = [w.rstrip("!") for w in result[len(result) - bias.ndim :]]
        words = [
            "_" if size == 1 else word
            for size, word in zip(bias.shape, last, strict=True)
        ]
        return make([words, *operands], [result])

    return rule_of_call


def _trilinear(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, *dims: Sequence[int], **_: Any
) -> Rule:
    """Return the rule of the product of three tensors, each with dims of size 1
    inserted, summed over some dims."""
    *inserted, summed = dims[:4]
    ndim = x.ndim + len(inserted[0])
    shapes = []
    for t, inserted_dims in zip((x, y, z), inserted, strict=True):
        sizes = iter(t.shape)
        shapes.append([1 if d in inserted_dims else next(sizes) for d in range(ndim)])
    words, words_by_operand = aligned(shapes)
    operands = [
        [w for d, w in enumerate(words) if d not in inserted_dims]
        for words, inserted_dims in zip(words_by_operand, inserted, strict=True)
    ]
    return make(operands, [[w for d, w in enumerate(words) if d not in summed]])


def _scaled_mm(
    x: torch.Tensor,
    y: torch.Tensor,
    scale_x: torch.Tensor,
    scale_y: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *_: Any,
    **__: Any,
) -> Rule | None:
    """Return the rule where scales are of the whole tensor or of its rows and columns;
    None where they are of blocks."""
    m, n = x.shape[0], y.shape[1]
    scales: list[Sequence[Word]] = []
    for scale, shape, words in (
        (scale_x, (m, 1), ["m", "_"]),
        (scale_y, (1, n), ["_", "n"]),
    ):
        if scale.numel() == 1:
            scales.append(["_"] * scale.ndim)
        elif tuple(scale.shape) == shape and scale.dtype == torch.float32:
            scales.append(words)
        else:
            return None
    # A summand cannot be rounded to fp8, nor be given the bias of the sum.
    sums = bias is None and scale_result is None and (out_dtype or x.dtype).itemsize > 1
    sizes: dict[str, int] = {}
    columns = _in_units("n", n, 16, sizes)
    k = _in_units("k", x.shape[1], 16, sizes) if sums else "k!"
    if isinstance(columns, tuple):
        scales = [[columns if w == "n" else w for w in words] for words in scales]
    more: list[list[Word]] = [[columns]] * (bias is not None)
    more += [["_"] * scale_result.ndim] if scale_result is not None else []
    return make([["m", k], [k, columns], *scales, *more], [["m", columns]], sizes)


def _in_units(name: str, n: int, unit: int, sizes: dict[str, int]) -> Word:
    """Return the word of a dim whose shards a kernel needs to be multiples of ``unit``;
    whole where the dim is none. Enters its factors into ``sizes``."""
    if n % unit or not n:
        return f"{name}!"
    sizes[name], sizes[f"{name}u"] = n // unit, unit
    return (name, f"{name}u!")


# Values of torch.nn.functional.ScalingType: one scale, or one for each row and column.
_TENSORWISE, _ROWWISE = 0, 1


def _scaled_mm_v2(
    x: torch.Tensor,
    y: torch.Tensor,
    scales_x: Sequence[torch.Tensor],
    recipes_x: Sequence[int],
    swizzles_x: Sequence[int],
    scales_y: Sequence[torch.Tensor],
    recipes_y: Sequence[int],
    swizzles_y: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction: Sequence[int] = (),
    fast: bool = False,
) -> Rule | None:
    """Return the rule of ``_scaled_mm``; None for blocks and swizzled scales."""
    recipes = {*map(int, recipes_x), *map(int, recipes_y)}
    if recipes not in ({_TENSORWISE}, {_ROWWISE}) or contraction:
        return None
    if any(map(int, [*swizzles_x, *swizzles_y])) or len([*scales_x, *scales_y]) != 2:
        return None
    return _scaled_mm(x, y, scales_x[0], scales_y[0], bias, None, out_dtype)


# Grouped: a running count, ``offs``, says where each group's rows end. A rank with a
# part of the rows counts from its first.


def _grouped_mm(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Rule | None:
    """Return the rule. A kernel needs rows of multiples of 16 bytes, so shards are
    split in such units."""
    if bias is not None:
        return None
    sizes: dict[str, int] = {}
    m, k, n = (
        _in_units(name, size, 16 // x.dtype.itemsize, sizes)
        for name, size in zip("mkn", (*x.shape[-2:], y.shape[-1]), strict=True)
    )
    if offs is None:
        return make([["g", m, k], ["g", k, n]], [["g", m, n]], sizes)
    left = ["_"] * (x.ndim - 2) + [m, k]
    right = ["_"] * (y.ndim - 2) + [k, n]
    result = ["_"] * (x.ndim == y.ndim) + [m, n]
    return make([left, right, ["_"]], [result], sizes)


MM, BMM = "m k, k n -> m n", "b m k, b k n -> b m n"


def _expert_words(
    experts: int, count: int, ids: int, groups: int
) -> tuple[Word, Word, Word, Any]:
    """Return (word of the rows, of the experts, of the ids, sizes of their factors)."""
    if groups == 1:
        return "s", "e!", "s", {"s": count, "e": experts}
    sizes = {"g": groups, "s": count // groups, "e": experts // groups}
    by_row: Word = ("g", "s")
    return by_row, ("g", "e!"), by_row if ids == count else "s", sizes


def _columns(name: str, count: int) -> list[Word]:
    """Return a word for each of ``count`` dims of columns."""
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]


def _expert_mm(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, groups: int, *_: float
) -> Rule:
    counts = weight.shape[0], x.shape[0], ids.shape[0], groups
    by_row, experts, expert_ids, sizes = _expert_words(*counts)
    k, n = _columns("k", x.dim() - 1), _columns("n", weight.dim() - x.dim())
    operands = [[by_row, *k], [experts, *k, *n], [expert_ids]]
    return make(operands, [[by_row, *n]], sizes)


def _expert_outer(
    x: torch.Tensor,
    y: torch.Tensor,
    ids: torch.Tensor,
    count: int,
    groups: int,
    *_: float,
) -> Rule:
    counts = count, x.shape[0], ids.shape[0], groups
    by_row, experts, expert_ids, sizes = _expert_words(*counts)
    k, n = _columns("k", x.dim() - 1), _columns("n", y.dim() - 1)
    operands = [[by_row, *k], [by_row, *n], [expert_ids]]
    return make(operands, [[experts, *k, *n]], sizes)


def _dispatch_slots(
    ids: torch.Tensor, experts: int, groups: int, sources: int, room: int, _: bool
) -> Rule:
    by_row: Word = ("s", "r!")
    sizes = {"s": sources, "r": ids.shape[0] // sources}
    results: list[list[Word]] = [["g!", "s", "c!"], [by_row], ["s"]]
    rule = make([[by_row]], results, sizes)
    return replace(rule, evenly=frozenset("s"))


def _dispatch_rows(x: torch.Tensor, slots: torch.Tensor, _: int, fill: int) -> Rule:
    """Return the rule; partial sums may be sent where slots without a row are zero."""
    sources, columns = slots.shape[1], words_of(x)[1:]
    sizes = {"s": sources, "t": x.shape[0] // sources}
    operands: list[list[Word]] = [[("s", "t!"), *columns], ["g!", "s", "c!"]]
    sums = [Passage((0,))] if x.is_floating_point() and not fill else []
    rule = make(operands, [["g!", "s", "c!", *columns]], sizes, passages=sums)
    return replace(rule, evenly=frozenset("s"))


def _combine_rows(y: torch.Tensor, slots: torch.Tensor) -> Rule:
    sources, columns = y.shape[1], words_of(y)[3:]
    by_row: Word = ("s", "r!")
    sizes = {"s": sources, "r": slots.shape[0] // sources}
    rule = make([["g!", "s", "c!", *columns], [by_row]], [[by_row, *columns]], sizes)
    return replace(rule, evenly=frozenset("s"))


def _exchange_slots(slots: torch.Tensor, _: str) -> Rule:
    return _slots_as_rows(slots, slots.shape[:3], [0, 1])


def _return_slots(rows: torch.Tensor, groups: int, sources: int, _: str) -> Rule:
    room = rows.shape[0] // (groups * sources)
    return _slots_as_rows(rows[:, None, None], (groups, sources, room), [1, 0])


def _slots_as_rows(x: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> Rule:
    """Return the rule of slots viewed as rows, or with ``order`` [1, 0] of the
    reverse."""
    columns = words_of(x)[3:]
    tensors: list[list[Word]] = [
        ["g!", "s!", "c!", *columns],
        [("g!", "s!", "c!"), *columns],
    ]
    first, second = (tensors[i] for i in order)
    return make([first], [second], dict(zip("gsc", sizes, strict=True)))


def _within(x: torch.Tensor, most: torch.Tensor, *_: Any) -> Rule:
    """Return the rule; ``most`` has a number for each part, and parts are dim 1 of
    ``x``."""
    words = words_of(x)
    return make([words, words[1 : 1 + most.dim()]], [words])


# Local forms


def _counted(call: LocalCall, offs: fx.Node, operand: int, dim: int) -> fx.Node:
    """Return a running count along a dim of an operand, for this rank's part of the
    dim."""
    axes, n = call.operands[operand].dims[dim], call.operand_shape(operand)[dim]
    if not axes:
        return offs
    first = call.build.own_start(call.shapes[operand][dim], axes)
    count = call.build.call(aten.sub.Tensor, offs, first)
    return call.build.call(aten.clamp.default, count, 0, n)


def _local_grouped_mm(
    call: LocalCall,
    x: fx.Node,
    y: fx.Node,
    offs: Any = None,
    *args: Any,
    **options: Any,
) -> fx.Node:
    if offs is not None:
        x_ndim, y_ndim = x.meta["val"].ndim, y.meta["val"].ndim
        # (operand, dim) that the offsets count along.
        along = (1, 1) if x_ndim == 3 else (0, 0 if y_ndim == 3 else 1)
        offs = _counted(call, offs, *along)
    return call.same(x, y, offs, *args, **options)


_OF_EXPERTS: dict[str, Any] = {"local": form_of_feature, "facts": "replaced"}

ROWS = {
    **rows("mm", MM, linear="0|1", product=0, equation=MM, facts="by_row"),
    **rows("mm.dtype", MM, linear="0|1", product=0, facts="by_row"),
    **rows("_int_mm", MM, linear="0|1"),
    **rows("bmm", BMM, linear="0|1", product=0, equation=BMM),
    **rows("bmm.dtype", BMM, linear="0|1", product=0),
    **rows(
        "addmm",
        _biased("m k!", "k! n", "m n"),
        linear=BIASED,
        product=1,
        equation=MM,
    ),
    **rows("addmm.dtype", _biased("m k!", "k! n", "m n"), linear=BIASED, product=1),
    **rows("_addmm_activation", _biased("m k!", "k! n", "m n")),
    **rows(
        "baddbmm",
        _biased("b m k!", "b k! n", "b m n"),
        linear=BIASED,
        product=1,
        equation=BMM,
    ),
    **rows("baddbmm.dtype", None, product=1),
    **rows("addbmm", _biased("b! m k!", "b! k! n", "m n"), linear=BIASED),
    **rows("_scaled_mm", _scaled_mm, product=0),
    **rows("_scaled_mm_v2", _scaled_mm_v2),
    **rows("_trilinear", _trilinear, linear="0|1|2"),
    **rows("_grouped_mm", _grouped_mm, linear="0|1", local=_local_grouped_mm),
    **rows(
        "transformers::grouped_mm_fallback",
        "m k, _ k n, _ -> m n",
        linear="0|1",
        local=_local_grouped_mm,
    ),
    **rows(
        "transformers::grouped_mm_fallback_backward",
        "m k, _ k n, _, m n -> m k, _ k n",
        linear="3",
        local=_local_grouped_mm,
    ),
    **rows("fxpar::expert_mm", _expert_mm, linear="0|1", product=0, **_OF_EXPERTS),
    **rows(
        "fxpar::expert_outer", _expert_outer, linear="0|1", product=0, **_OF_EXPERTS
    ),
    **rows(
        "fxpar::own_expert_mm",
        lambda x, weight, ids, *_: _expert_mm(x, weight, ids, 1),
        linear="0|1",
        product=0,
        facts="by_row",
    ),
    **rows(
        "fxpar::own_expert_outer",
        lambda x, y, ids, count, *_: _expert_outer(x, y, ids, count, 1),
        linear="0|1",
        product=0,
        facts="by_row",
    ),
    **rows("fxpar::dispatch_slots", _dispatch_slots, local=form_of_feature),
    **rows("fxpar::dispatch_rows", _dispatch_rows),
    **rows("fxpar::combine_rows", _combine_rows, linear="0"),
    **rows("fxpar::exchange_slots", _exchange_slots, **_OF_EXPERTS),
    **rows("fxpar::return_slots", _return_slots, **_OF_EXPERTS),
    **rows("fxpar::within", _within, local=form_of_feature),
}
