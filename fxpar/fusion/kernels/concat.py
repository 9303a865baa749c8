"""Ops whose result is parts of several tensors side by side.

In: a line that concatenates, pads, or puts a slice into a tensor. Out: ``Choice``s in
order: the first one whose ranges hold an element gives it, else the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxpar.fusion.kernels.index_arithmetic import Map, slice_start, strided
from fxpar.fusion.kernels.region_program import Ref, Statement, contiguous

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Choice:
    """``source``: a value, or a number that fills. ``ranges``: (dim, first, end) of the
    result. ``to``: element of the result -> of the source."""

    source: Ref | float
    ranges: tuple[tuple[int, int, int], ...]
    to: Map


# Parts of one tensor: for every element a kernel asks each of them.
_MOST = 8


def _cat(line: Statement, shapes: Shapes) -> list[Choice]:
    parts = [x for x in line.args[0] if 0 not in shapes[x.name]]
    if len(parts) > _MOST:
        raise LookupError(f"{line.op} of {len(parts)} tensors")
    dim = (line.args[1] if len(line.args) > 1 else 0) % len(line.shape)
    out, low = [], 0
    for x in parts:
        shape = shapes[x.name]
        strides = contiguous(shape)
        high = low + shape[dim]
        to = strided(line.shape, strides, -low * strides[dim])
        out.append(Choice(x, ((dim, low, high),), to))
        low = high
    return out


def _pad(line: Statement, shapes: Shapes) -> list[Choice]:
    x, pads = line.args[:2]
    fill = line.args[2] if len(line.args) > 2 else 0
    shape = shapes[x.name]
    strides = contiguous(shape)
    ranges, offset = [], 0
    for i in range(len(pads) // 2):
        dim = len(shape) - 1 - i
        low = pads[2 * i]
        ranges.append((dim, low, low + shape[dim]))
        offset -= low * strides[dim]
    to = strided(line.shape, strides, offset)
    return [Choice(x, tuple(ranges), to), Choice(fill, (), to)]


def _put_slice(line: Statement, shapes: Shapes) -> list[Choice]:
    base, x = line.args[:2]
    dim = (line.args[2] if len(line.args) > 2 else 0) % len(line.shape)
    start, step = slice_start(line.args, line.shape[dim], at=3)
    if step != 1:
        raise LookupError(f"{line.op} in steps")
    strides = contiguous(shapes[x.name])
    to = strided(line.shape, strides, -start * strides[dim])
    ranges = ((dim, start, start + shapes[x.name][dim]),)
    return [Choice(x, ranges, to), _rest(line, base)]


def _put_index(line: Statement, shapes: Shapes) -> list[Choice]:
    base, x, dim, index = line.args
    dim, strides = dim % len(line.shape), list(contiguous(shapes[x.name]))
    index %= line.shape[dim]
    strides.insert(dim, 0)
    to = strided(line.shape, strides)
    return [Choice(x, ((dim, index, index + 1),), to), _rest(line, base)]


def _rest(line: Statement, base: Ref) -> Choice:
    return Choice(base, (), strided(line.shape, contiguous(line.shape)))


_CHOICES: dict[str, Callable[[Statement, Shapes], list[Choice]]] = {
    "aten.cat.default": _cat,
    "aten.constant_pad_nd.default": _pad,
    "aten.slice_scatter.default": _put_slice,
    "aten.select_scatter.default": _put_index,
}
CHOICES = frozenset(_CHOICES)


def choices_of(line: Statement, shapes: Shapes) -> list[Choice]:
    """The parts of a line's result. Raises LookupError for what has no form."""
    return _CHOICES[line.op](line, shapes)
