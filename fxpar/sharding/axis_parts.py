"""Reads and writes names of parts of an axis, and checks which parts go together.

``"x:(m)k"`` is a part of axis x, as Shardy writes it: of its n ranks, seen as ``[m, k,
n/(mk)]``, the middle dim. ``"x:k"`` is short for the outermost, ``"x:(1)k"``.
In: names of axes and of parts. Out: names, (axis, m, k), sizes.
Never: knows how many ranks an axis has; a mesh does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from fxpar.errors import MeshError

_PART = re.compile(r"([A-Za-z_]\w*):(?:\(([1-9]\d*)\))?([1-9]\d*)")


def split_name(name: str) -> tuple[str, int, int] | None:
    """Return (axis, m, k) of the name of a part; None for any other text."""
    match = _PART.fullmatch(name) if ":" in name else None
    return (match[1], int(match[2] or 1), int(match[3])) if match else None


def full_name(name: str) -> str:
    """Return ``"tp:(1)2"`` for ``"tp:2"``, and any other name unchanged."""
    if ":" not in name:
        return name
    part = split_name(name)
    return part_name(*part) if part else name


def part_name(axis: str, major: int, size: int) -> str:
    """Return the name of a part; the inverse of ``split_name``."""
    return f"{axis}:({major}){size}"


def axis_of(name: str) -> str:
    """Return the axis that a name names, or is a part of."""
    return name.partition(":")[0]


def is_name(text: str) -> bool:
    """Return whether a text may name an axis or a part of one."""
    return text.isidentifier() or split_name(text) is not None


def parts_among(axes: Iterable[str]) -> list[str]:
    """Return the names that are parts of axes, each once."""
    return [name for name in dict.fromkeys(axes) if ":" in name]


def cut(n: int, names: Iterable[str]) -> list[int]:
    """Return sizes of parts, major to minor, into which an axis of ``n`` ranks is cut
    so that each of ``names``, parts of it, is made of some of them.

    Raises MeshError if the parts do not nest.
    """
    ends = {1: "", n: ""}
    for name in names:
        _, major, size = split_name(name) or (name, 1, 1)
        if size > 1:
            ends.setdefault(major, name)
            ends.setdefault(major * size, name)
    pairs = list(itertools.pairwise(sorted(ends)))
    for inner, outer in pairs:
        if outer % inner:
            raise MeshError(
                f"parts {ends[inner]!r} and {ends[outer]!r} of one axis do not nest",
                fix="cut an axis at sizes of which each divides the next",
            )
    return [outer // inner for inner, outer in pairs] or [n]


def overlapping(axes: Sequence[str]) -> tuple[str, str] | None:
    """Return the first two names that share ranks' coordinates: one axis twice, an axis
    and its part, or two parts that overlap. None if there are none."""
    for i, name in enumerate(axes):
        for other in axes[:i]:
            if name == other or (":" in name + other and _has_overlap(name, other)):
                return other, name
    return None


def _has_overlap(one: str, other: str) -> bool:
    if axis_of(one) != axis_of(other):
        return False
    first, second = sorted(
        (split_name(one) or ("", 0, 0), split_name(other) or ("", 0, 0))
    )
    if not first[0]:  # a whole axis
        return True
    return 1 not in (first[2], second[2]) and first[1] * first[2] > second[1]
