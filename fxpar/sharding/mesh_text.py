"""The text of a mesh: ``"dp=2{1.0,0.5}[2,1],tp=2*2"``.

Of each axis its name and size, or the sizes of its parts; in braces the speeds of its
ranks, in brackets their shares. ``mesh`` checks that numbers and sizes fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxpar.errors import MeshError

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
    """What the text of one axis says."""

    name: str
    # One, or those of its parts, major to minor.
    sizes: tuple[int, ...]
    # Of each rank; None if nothing is said.
    speeds: tuple[float, ...] | None
    shares: tuple[float, ...] | None


def read_axes(text: str) -> Iterator[AxisText]:
    """The axes of a mesh, in order. Raises MeshError naming the malformed part."""
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
    """Numbers as between braces or brackets."""
    return ",".join(repr(float(number)) for number in numbers)


def _numbers(name: str, text: str, fix: str) -> tuple[float, ...]:
    """The numbers between the braces or brackets of an axis."""
    out = []
    for word in text.split(","):
        try:
            out.append(float(word))
        except ValueError:
            what = f"mesh axis {name!r}: {word.strip()!r} is not a number"
            raise MeshError(what, fix=fix) from None
    return tuple(out)
