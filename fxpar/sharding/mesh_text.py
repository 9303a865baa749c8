"""Reads the text of a mesh, ``"dp=2{1.0,0.5}[2,1],tp=2*2"``, and checks its axes.

An axis has a name and a size, or the sizes of its parts; in braces the speeds of its
ranks, in brackets their shares. Every ``Mesh`` is checked here.
In: text, or axes and numbers. Out: ``AxisText`` of each axis, or a MeshError that names
the axis.
Never: makes a Mesh.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxpar.errors import MeshError
from fxpar.sharding.axis_parts import part_name, split_name

_AXIS = re.compile(
    r"^\s*([A-Za-z_]\w*)\s*=\s*(\d+(?:\*\d+)*)\s*"
    r"(?:\{([^{}]*)\}\s*)?(?:\[([^\[\]]*)\]\s*)?$"
)
_BETWEEN = re.compile(r",(?![^{}\[\]]*[}\]])")  # a comma, but not one of {1.0,0.5}[2,1]
FORM = 'write axes as name=size, separated by commas: FXPAR_MESH="dp=2,tp=4"'
SPEEDS = (
    'write one positive number for each rank of the axis: FXPAR_MESH="dp=2{1.0,0.5}"'
)
SHARES = 'write one positive number for each rank of the axis: FXPAR_MESH="dp=2[2,1]"'


@dataclass(frozen=True)
class AxisText:
    """Holds the contents of the text of one axis."""

    # The axis's name, not that of a part.
    name: str
    # One size, or the sizes of its parts, major to minor.
    sizes: tuple[int, ...]
    # Relative speed of each rank; None if not given.
    speeds: tuple[float, ...] | None
    # The share of a dim that each rank gets, up to a factor; None if not given.
    shares: tuple[float, ...] | None


def read_axes(text: str) -> Iterator[AxisText]:
    """Yield the axes of a mesh, in order. Raises MeshError naming the malformed
    part."""
    for part in _BETWEEN.split(text):
        match = _AXIS.match(part)
        if not match:
            raise MeshError(f"cannot read mesh {text!r}: {part!r}", fix=FORM)
        name, sizes, speeds, shares = match.groups()
        yield AxisText(
            name,
            tuple(int(n) for n in sizes.split("*")),
            None if speeds is None else _numbers(name, speeds, SPEEDS),
            None if shares is None else _numbers(name, shares, SHARES),
        )


def written(numbers: Iterable[float]) -> str:
    """Return numbers as they are written between braces or brackets."""
    return ",".join(repr(float(number)) for number in numbers)


def _numbers(name: str, text: str, fix: str) -> tuple[float, ...]:
    """Return the numbers between the braces or brackets of an axis."""
    out = []
    for word in text.split(","):
        try:
            out.append(float(word))
        except ValueError:
            what = f"mesh axis {name!r}: {word.strip()!r} is not a number"
            raise MeshError(what, fix=fix) from None
    return tuple(out)


def axes_of_parts(axis: str, sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Return (name, size) of an axis, or of the parts it is cut into, major to
    minor."""
    if len(sizes) == 1:
        return [(axis, sizes[0])]
    major = [1, *itertools.accumulate(sizes, operator.mul)]
    return [(part_name(axis, m, k), k) for m, k in zip(major, sizes, strict=False)]


def uncut(axis: str) -> MeshError:
    """Return the error for parts of an axis that has speeds or shares."""
    return MeshError(
        f"mesh axis {axis!r} has devices of different speeds or shares, and can "
        "have no parts",
        fix="leave out the speeds and shares, or the parts",
    )


def check_axes(axes: Sequence[tuple[str, int]]) -> None:
    """Raise MeshError unless names are unique, sizes positive, and the parts of an axis
    follow each other."""
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise MeshError(f"mesh axis {name!r} appears twice", fix=FORM)
    for name, size in axes:
        if size < 1:
            raise MeshError(f"mesh axis {name!r} has size {size}", fix=FORM)
    before, end = "", 1
    axes_so_far: list[str] = []
    for name, size in axes:
        axis, major, part = split_name(name) or (name, 1, size)
        end = end if axis == before else 1
        follows = major == end and (axis == before or axis not in axes_so_far)
        if part != size or ":" in axis or not follows:
            raise MeshError(
                f"mesh axis {name!r} of size {size} is no part that follows",
                fix='write axes of parts as "tp=2*2"',
            )
        axes_so_far.append(axis)
        before, end = axis, end * size


def check_numbers(
    axes: Sequence[tuple[str, int]],
    numbers_by_axis: Sequence[tuple[float, ...] | None],
    what: str,
    fix: str,
) -> None:
    """Raise MeshError unless speeds or shares, ``what``, are positive numbers, one for
    each rank of an axis."""
    if len(numbers_by_axis) != len(axes):
        raise MeshError(
            f"{what} of {len(numbers_by_axis)} axes for {len(axes)} axes",
            fix="give a tuple or None for each axis",
        )
    for (name, size), numbers in zip(axes, numbers_by_axis, strict=True):
        if numbers is None:
            continue
        if len(numbers) != size:
            raise MeshError(
                f"mesh axis {name!r} has {len(numbers)} {what} for {size} ranks",
                fix=fix,
            )
        for number in numbers:
            if not 0 < number < math.inf:
                raise MeshError(
                    f"mesh axis {name!r} has a rank of {what[:-1]} {number}",
                    fix=fix,
                )
