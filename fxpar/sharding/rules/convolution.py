"""Rows of convolutions, pooling and resampling.

Batch and channels are free. Of a convolution, input channels are contracted and groups
are a compound of their own; the bias is added once, so where input channels are split
it is partial as well. A spatial dim is free where windows are laid out evenly over it,
as many of them as the dim has steps: a shard then needs rows around it, its halo. It is
whole otherwise, and where something is resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxpar.sharding.factors import Halo, Passage, RowWindow, Rule, parse_rule
from fxpar.sharding.rules.table import Row, names, row, tensors_of, text
from fxpar.sharding.rules.window_dims import (
    SlidingWindow,
    SpatialDims,
    each,
    spatial_dims,
    windows,
)

aten = torch.ops.aten

Numbers = int | Sequence[int]
MaySplit = Callable[[SlidingWindow], bool]


# Convolution


def _channels(transposed: bool, groups: int, k: int) -> tuple[str, str, list[str]]:
    """Words of the channel dim of input and of output, and of the weight's dims."""
    inside = [f"{word}!" for word in names(k, "k")]
    first, second = ("ci", "co") if transposed else ("co", "ci")
    if groups == 1:
        return "ci", "co", [first, second, *inside]
    return "(g ci)", "(g co)", [f"(g {first})", second, *inside]


def _sliding(
    rule: str,
    spatial: SpatialDims,
    halos: tuple[Halo, ...] = (),
    windows: tuple[RowWindow, ...] = (),
    groups: int = 1,
) -> Rule:
    """The rule with the sizes, halos and windows of its spatial dims."""
    sizes = (("g", groups),) if groups > 1 else ()
    return replace(
        parse_rule(rule),
        sizes=(*sizes, *spatial.sizes),
        evenly=spatial.free,
        halos=halos,
        windows=windows,
    )


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Rule | None:
    if x.dim() != weight.dim():
        return None
    k = x.dim() - 2
    ci, co, kernel = _channels(transposed, groups, k)
    slid = windows(weight.shape[2:], stride, padding, dilation, k)
    rows = [int(n) for n in x.shape[2:]]
    if transposed:
        more = zip(rows, slid, each(output_padding, k), strict=True)
        result_rows = [
            (n - 1) * w.stride - 2 * w.padding + w.dilation * (w.kernel - 1) + 1 + extra
            for n, w, extra in more
        ]
        spatial = spatial_dims(slid, result_rows, rows)
        operand_dims, result_dims = spatial.few, spatial.many
    else:
        result_rows = [w.count(n) for n, w in zip(rows, slid, strict=True)]
        spatial = spatial_dims(slid, rows, result_rows)
        operand_dims, result_dims = spatial.many, spatial.few
    operands = [
        ["n", ci, *operand_dims],
        kernel,
        *([["+", co]] if bias is not None else []),
    ]
    ends = (len(operands), 0) if transposed else (0, len(operands))
    halos, read = spatial.halos(ends[0], 2), spatial.windows(ends[0], 2, ends[1])
    words = text(*operands, results=[["n", co, *result_dims]])
    rule = _sliding(words, spatial, halos, read, groups)
    summed = (2,) if bias is not None else ()
    return replace(rule, passages=(Passage((0, *summed)), Passage((1, *summed))))


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Rule | None:
    """A convolution reads rows around a shard for the weight's gradient, and gives back
    what its own gradient is there; a transposed one reads such rows of ``grad``."""
    if x.dim() != weight.dim():
        return None
    k = x.dim() - 2
    ci, co, kernel = _channels(transposed, groups, k)
    slid = windows(weight.shape[2:], stride, padding, dilation, k)
    many, few = (grad, x) if transposed else (x, grad)
    sizes = many.shape[2:], few.shape[2:]
    spatial = spatial_dims(slid, *sizes, sliding=mask[0] or mask[1])
    at_grad, at_x = spatial.few, spatial.many
    halos = spatial.halos(1, 2) * mask[1] + spatial.halos(3, 2) * mask[0]
    read = spatial.windows(1, 2, 0) * mask[1] + spatial.windows(3, 2, 0) * mask[0]
    if transposed:
        at_grad, at_x = spatial.many, spatial.few
        halos = spatial.halos(0, 2) * (mask[0] or mask[1])
        read = spatial.windows(0, 2, 1)
    operand = ["n", ci, *at_x]
    # The bias is not in the product, so a split of input channels leaves it complete.
    gradients = zip([operand, kernel, [co, "~ci"]], mask, strict=True)
    results = [dims for dims, is_asked in gradients if is_asked]
    words = text(["n", co, *at_grad], operand, kernel, results=results)
    return _sliding(words, spatial, halos, read, groups)


# Windows


def _spatial(k: int) -> Callable[..., str]:
    """Every tensor has the same leading dims; the last ``k`` are whole."""

    def factors(*args: Any, **kwargs: Any) -> str:
        words = [*names(args[0].dim() - k), *["_"] * k]
        return text(*[words] * len(tensors_of((args, kwargs))), results=[words])

    return factors


def _pooled(
    x: torch.Tensor,
    slid: Sequence[SlidingWindow],
    few: Sequence[int],
    may: MaySplit,
    sliding: bool,
) -> tuple[SpatialDims, list[str], list[str]]:
    """(dims, words of what is pooled, words of what is made of it)."""
    k = len(slid)
    spatial = spatial_dims(slid, x.shape[-k:], few, may, sliding=sliding)
    lead = names(x.dim() - k)
    return spatial, [*lead, *spatial.many], [*lead, *spatial.few]


def _pool(
    x: torch.Tensor,
    slid: Sequence[SlidingWindow],
    few: Sequence[int],
    may: MaySplit,
    results: int = 1,
    sliding: bool = True,
) -> Rule:
    """A pool: windows over the last dims, ``few`` of them."""
    spatial, rows, slid_rows = _pooled(x, slid, few, may, sliding)
    first = x.dim() - len(slid)
    ends = spatial.halos(0, first), spatial.windows(0, first, 1)
    return _sliding(text(rows, results=[slid_rows] * results), spatial, *ends)


def _pool_backward(
    x: torch.Tensor,
    slid: Sequence[SlidingWindow],
    few: Sequence[int],
    may: MaySplit,
    n: int = 1,
    sliding: bool = True,
) -> Rule:
    """Its backward, which reads ``n`` tensors that have windows, ``x`` the second."""
    spatial, rows, slid_rows = _pooled(x, slid, few, may, sliding)
    first = x.dim() - len(slid)
    ends = spatial.halos(n + 1, first), spatial.windows(n + 1, first, 0)
    words = text(slid_rows, rows, *[slid_rows] * (n - 1), results=[rows])
    return _sliding(words, spatial, *ends)


def _counts(x: torch.Tensor, slid: Sequence[SlidingWindow], ceil: bool) -> list[int]:
    """So many windows of each of the last dims."""
    rows = x.shape[-len(slid) :]
    return [w.count(int(n), ceil) for w, n in zip(slid, rows, strict=True)]


def _even(ceil: bool) -> MaySplit:
    """A window that begins behind the padding would be dropped of a shard, so with
    ``ceil`` none may end before its rows do."""
    return lambda window: not ceil or window.behind >= 0


# Windows over the last ``k`` dims, as the arguments of a pool behind its tensors say:
# these, whether they are rounded up, which may be split as halos are, and whether
# others may be split at all.
_Windows = tuple[list[SlidingWindow], bool, MaySplit, bool]


def _max_windows(
    k: int,
    kernel: Numbers,
    stride: Numbers = (),
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil: bool = False,
    *_: Any,
) -> _Windows:
    return windows(kernel, stride, padding, dilation, k), ceil, _even(ceil), True


def _average_windows(
    k: int,
    kernel: Numbers,
    stride: Numbers = (),
    padding: Numbers = 0,
    ceil: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> _Windows:
    """All windows of a dim must count as many rows, if it is split as halos are."""
    even, alike = _even(ceil), count_padding and not ceil
    return (
        windows(kernel, stride, padding, 1, k),
        ceil,
        lambda w: even(w) and (divisor is not None or w.counts_all(count_padding)),
        k > 1 or alike,  # in one dim no divisor can be given
    )


def _pool_of(
    read: Callable[..., _Windows], results: int = 1
) -> Callable[[int], Callable[..., Rule]]:
    """Rules of pools with so many results."""

    def rule(k: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> Rule:
        slid, ceil, may, sliding = read(k, *args, **kwargs)
        return _pool(x, slid, _counts(x, slid, ceil), may, results, sliding)

    return lambda k: partial(rule, k)


def _pool_backward_of(
    read: Callable[..., _Windows], n: int = 1
) -> Callable[[int], Callable[..., Rule]]:
    """Rules of their backwards, as ``_pool_backward`` has them."""

    def rule(k: int, grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Rule:
        slid, _, may, sliding = read(k, *args)
        return _pool_backward(x, slid, grad.shape[-k:], may, n, sliding)

    return lambda k: partial(rule, k)


def _low_memory_pool(x: torch.Tensor, kernel: Sequence[int], *rest: Any) -> Rule:
    return _pool_of(_max_windows, 2)(len(kernel))(x, kernel, *rest)


def _low_memory_indices(x: torch.Tensor, kernel: Sequence[int], *_: Any) -> Rule:
    """Positions by where a window lies, and in it."""
    words = names(x.dim())
    return parse_rule(text(words, results=[words]))


def _fractional_pool(x: torch.Tensor, *args: Any) -> str:
    """Where windows begin says a sample per image and channel."""
    samples, k = args[-1], args[-1].shape[-1]
    words = [*names(x.dim() - k), *["_"] * k]
    batch = ["_"] * (samples.dim() - 1 - (x.dim() - k)) + words[:-k] + ["_"]
    return text(words, batch, results=[words, words])


def _fractional_pool_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> str:
    return _spatial(len(args[0]))(grad, x, args[-1])


def _columns(to_image: bool) -> Callable[..., Rule]:
    """Patches of an image as columns, ``[n, c * window, columns]``."""

    def factors(x: torch.Tensor, *args: Any) -> Rule:
        kernel = args[1] if to_image else args[0]
        lead = ["n"] if x.dim() == (3 if to_image else 4) else []
        image, columns = [*lead, "c", "_", "_"], [*lead, "(c k!)", "_"]
        here, there = (columns, image) if to_image else (image, columns)
        window = math.prod(kernel) if len(kernel) == 2 else kernel[0] ** 2
        rule = parse_rule(text(here, results=[there]))
        return replace(rule, sizes=(("k", window),))

    return factors


def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, *_: Any) -> str:
    k = x.dim() - 2
    places = names(k)
    return text(
        ["n", "c", *["_"] * k], ["n", *places, "_"], results=[["n", "c", *places]]
    )


def _grid_sampler_backward(
    grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, *args: Any
) -> str:
    k = x.dim() - 2
    places = names(k)
    image, at = ["n", "c", *["_"] * k], ["n", *places, "_"]
    # The gradient of the grid is made whether it is asked for or not.
    results = [image, at] if args[3][0] else [at]
    return text(["n", "c", *places], image, at, results=results)


def _rows(entry: Row, *ops: str, overloads: Sequence[str] = ("default",)) -> dict:
    """The same row for several ops, as far as this version of torch has them."""
    packets = [getattr(aten, op) for op in ops if hasattr(aten, op)]
    return {
        getattr(packet, overload): entry
        for packet in packets
        for overload in overloads
        if overload in packet.overloads()
    }


def _by_rank(
    pattern: str,
    ranks: Sequence[int],
    rule: Callable[[int], Callable[..., Any]] = _spatial,
    **marks: Any,
) -> dict:
    """Rows for ``pattern`` with each number of spatial dims put in; by default these
    are whole."""
    out: dict = {}
    for k in ranks:
        op = pattern.format(k)
        out |= _rows(row(rule(k), **marks), op, overloads=("default", "vec"))
    return out


_RESAMPLED = (
    ("upsample_nearest{}d", (1, 2, 3)),
    ("_upsample_nearest_exact{}d", (1, 2, 3)),
    ("upsample_linear{}d", (1,)),
    ("upsample_bilinear{}d", (2,)),
    ("upsample_bicubic{}d", (2,)),
    ("upsample_trilinear{}d", (3,)),
)

ROWS = {
    aten.convolution.default: row(_convolution),
    aten.convolution_backward.default: row(_convolution_backward, linear="0"),
    **_by_rank("max_pool{}d_with_indices", (2, 3), _pool_of(_max_windows, 2)),
    **_by_rank(
        "max_pool{}d_with_indices_backward",
        (2, 3),
        _pool_backward_of(_max_windows, 2),
        linear="0",
    ),
    "prims::_low_memory_max_pool_with_offsets": row(_low_memory_pool),
    "prims::_low_memory_max_pool_offsets_to_indices": row(_low_memory_indices),
    aten.fractional_max_pool2d.default: row(_fractional_pool),
    aten.fractional_max_pool3d.default: row(_fractional_pool),
    aten.fractional_max_pool2d_backward.default: row(
        _fractional_pool_backward, linear="0"
    ),
    aten.fractional_max_pool3d_backward.default: row(
        _fractional_pool_backward, linear="0"
    ),
    **_by_rank("avg_pool{}d", (1, 2, 3), _pool_of(_average_windows), linear="0"),
    **_by_rank(
        "avg_pool{}d_backward", (2, 3), _pool_backward_of(_average_windows), linear="0"
    ),
    **{
        op: entry
        for pattern, ranks in _RESAMPLED
        for op, entry in {
            **_by_rank(pattern, ranks, linear="0"),
            **_by_rank(pattern + "_backward", ranks, linear="0", shape=2),
        }.items()
    },
    aten.im2col.default: row(_columns(False), linear="0"),
    aten.col2im.default: row(_columns(True), linear="0"),
    aten.grid_sampler_2d.default: row(_grid_sampler, linear="0"),
    aten.grid_sampler_3d.default: row(_grid_sampler, linear="0"),
    aten.grid_sampler_2d_backward.default: row(_grid_sampler_backward, linear="0"),
    aten.grid_sampler_3d_backward.default: row(_grid_sampler_backward, linear="0"),
}
