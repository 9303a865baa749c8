"""Describes the device mesh: ordered, named axes over the ranks, and parts of axes.

A mesh is data, so a mesh of 65,536 ranks is as cheap as one of two. Ranks are
row-major: the last axis varies fastest. As text it is ``"dp=2{1.0,0.5}[2,1],tp=2*2"``:
an axis has a name and a size, or the sizes of its parts; in braces the speeds of its
ranks, in brackets their shares.

A **part** ``"x:(m)k"`` of axis x, as Shardy writes it, is of its n ranks, seen as ``[m,
k, n/(mk)]``, the middle dim; ``"x:k"`` is short for the outermost, ``"x:(1)k"``. It may
stand wherever an axis does: every method here takes parts. A plan that needs parts is
made on a *refined* mesh, whose axes they are: ``dp=2,tp=2*2`` is ``dp=2,tp=4`` with the
axes dp, tp:(1)2 and tp:(2)2, each with the link of tp. Planning treats it as any other
mesh.

In: text, a DeviceMesh, or axes. Out: sizes, groups of ranks, links, speeds, shares; or
a MeshError that names the axis. Never: needs a process group or a device.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

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


@dataclass(frozen=True)
class Link:
    """Describes the connection between the ranks of one axis; ``hardware`` makes it,
    ``collectives`` reads all of it."""

    # Bytes/s that one rank sends while all send.
    bandwidth: float = 1e11
    # Seconds from rank to rank.
    latency: float = 0.0
    # Seconds of a collective, independent of its bytes.
    overhead: float = 1e-5
    # Whether reductions may use a tree in addition to the ring.
    tree: bool = False
    # This many neighbours along the axis share a node.
    inside: int = 1
    # The link between ranks of one node; None: this link.
    inner: Link | None = None
    # (kind of collective, the link it has instead).
    kinds: tuple[tuple[str, Link], ...] = ()
    # Seconds for each copy that brings a tensor into the memory order that collectives
    # need.
    copy_launch: float = 0.0
    # Seconds for each byte of such a copy, read and written.
    copy_byte: float = 0.0
    # (bytes, seconds for each byte) of copies within caches, as in ``rate_at``.
    copy_near: tuple[tuple[float, float], ...] = ()

    def copy_seconds(self, nbytes: Any) -> Any:
        """Return seconds of a copy of ``nbytes``, a number or an array."""
        byte = rate_at(nbytes, self.copy_near) if self.copy_near else self.copy_byte
        return self.copy_launch + byte * nbytes

    def __hash__(self) -> int:
        # Links are looked up often, and the other fields are nested.
        return hash((self.bandwidth, self.latency))


def rate_at(nbytes: Any, points: tuple[tuple[float, float], ...]) -> Any:
    """Return the rate for ``nbytes``, a number or an array: linear in logarithms
    between points of (bytes, rate)."""
    import numpy as np

    sizes, rates = _logarithms(points)
    return np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), sizes, rates))


@lru_cache
def _logarithms(points: tuple[tuple[float, float], ...]) -> Any:
    import numpy as np

    return np.log(points).T


@dataclass(frozen=True)
class Mesh:
    """Holds named axes with sizes, major to minor, e.g. ``Mesh((("dp", 2), ("tp",
    4)))``."""

    # (name, number of ranks along it).
    axes: tuple[tuple[str, int], ...]
    # The link between the ranks of each axis; if empty, ``Link()``.
    links: tuple[Link, ...] = ()
    # For each axis the relative speed of each of its ranks, 1.0 for the hardware's, or
    # None where all are equal. A rank's speed is the product over its coordinates.
    speeds: tuple[tuple[float, ...] | None, ...] = ()
    # For each axis the share of a dim that each of its ranks gets, up to a factor, or
    # None: equal shards.
    shares: tuple[tuple[float, ...] | None, ...] = ()

    def __post_init__(self) -> None:
        check_axes(self.axes)
        if not self.links:
            object.__setattr__(self, "links", (Link(),) * len(self.axes))
        if len(self.links) != len(self.axes):
            raise MeshError(f"{len(self.links)} links for {len(self.axes)} axes")
        for what, fix in (("speeds", SPEEDS), ("shares", SHARES)):
            if not getattr(self, what):
                object.__setattr__(self, what, (None,) * len(self.axes))
            check_numbers(self.axes, getattr(self, what), what, fix)

    def __hash__(self) -> int:
        # Specs are priced per mesh very often, and hashing every link is slow.
        return hash(self.axes)

    @classmethod
    def parse(cls, text: str | Mesh) -> Mesh:
        """Return the mesh of ``"dp=2,tp=4"``; with speeds and shares
        ``"dp=2{1.0,0.5}[2,1],tp=4"``.

        Raises MeshError naming the malformed part.
        """
        if isinstance(text, Mesh):
            return text
        if not isinstance(text, str):
            fix = 'name axes with their sizes: "dp=2,tp=4"'
            raise MeshError(f"cannot read mesh {text!r}", fix=fix)
        axes: list[tuple[str, int]] = []
        speeds: list[tuple[float, ...] | None] = []
        shares: list[tuple[float, ...] | None] = []
        for axis_text in _BETWEEN.split(text):
            match = _AXIS.match(axis_text)
            if not match:
                raise MeshError(f"cannot read mesh {text!r}: {axis_text!r}", fix=FORM)
            name, sizes, *numbers = match.groups()
            parts = axes_of_parts(name, [int(n) for n in sizes.split("*")])
            axes += parts
            columns = (speeds, SPEEDS), (shares, SHARES)
            for (column, fix), words in zip(columns, numbers, strict=True):
                number = None if words is None else _numbers(name, words, fix)
                if number is not None and len(parts) > 1:
                    raise uncut(name)
                column += [number] * len(parts)
        return cls(tuple(axes), speeds=tuple(speeds), shares=tuple(shares))

    @classmethod
    def from_device_mesh(cls, device_mesh) -> Mesh:
        """Return the mesh of a ``torch.distributed.DeviceMesh`` with named dims.

        Raises MeshError if it has no names, or its ranks are not row-major.
        """
        names = device_mesh.mesh_dim_names
        if not names:
            raise MeshError(
                "the DeviceMesh has no mesh_dim_names",
                fix="create it with init_device_mesh(..., mesh_dim_names=(...))",
            )
        if device_mesh.mesh.flatten().tolist() != list(range(device_mesh.mesh.numel())):
            raise MeshError("the DeviceMesh does not hold ranks 0..N-1 in order")
        return cls(tuple(zip(names, device_mesh.mesh.shape, strict=True)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def _layout(self) -> dict[str, tuple[int, int, int]]:
        """Return axis -> (position of its axis in the mesh, size, distance between
        ranks)."""
        out, stride = {}, 1
        for i, (name, size) in reversed(list(enumerate(self.axes))):
            out[name] = (i, size, stride)
            stride *= size
        for name, (i, _, stride) in out.copy().items():  # the parts of an axis, joined
            axis = axis_of(name)
            if axis != name:
                first, _, least = out.get(axis, (i, 0, stride))
                out[axis] = (min(i, first), self._whole[axis], min(stride, least))
        return out

    @cached_property
    def _whole(self) -> dict[str, int]:
        """Return the sizes of the whole axes, in order."""
        out: dict[str, int] = {}
        for name, size in self.axes:
            out[axis_of(name)] = out.get(axis_of(name), 1) * size
        return out

    @cached_property
    def is_refined(self) -> bool:
        """Return whether some of its axes are parts."""
        return len(self._whole) < len(self.axes)

    @cached_property
    def unrefined(self) -> Mesh:
        """Return the mesh of whole axes."""
        if not self.is_refined:
            return self
        return self._with_axes(self._whole.items())

    def _with_axes(self, axes: Iterable[tuple[str, int]]) -> Mesh:
        """Return the mesh of the same whole axes, each cut into other parts."""
        rows = [
            (axis, self.links[i], self.speeds[i], self.shares[i])
            for axis in axes
            for i in [self._find(axis_of(axis[0]))[0]]
        ]
        return Mesh(*zip(*rows, strict=True))

    def refined(self, names: Iterable[str]) -> Mesh:
        """Return the mesh whose axes make up each of ``names``, axes and parts of them,
        and its own axes. The same mesh if nothing is to be cut.

        Raises MeshError on unknown axes, parts that do not divide theirs, parts that do
        not nest, and unequal devices along an axis that is cut.
        """
        names_by_axis: dict[str, list[str]] = {axis: [] for axis in self._whole}
        for name in (*self.names, *names):
            self._find(name)
            names_by_axis[axis_of(name)].append(name)
        axes: list[tuple[str, int]] = []
        for axis, n in self._whole.items():
            sizes = cut(n, names_by_axis[axis])
            i = self._find(axis)[0]
            if len(sizes) > 1 and (self.speeds[i] or self.shares[i]):
                raise uncut(axis)
            axes += axes_of_parts(axis, sizes)
        if tuple(axes) == self.axes:
            return self
        return self._with_axes(axes)

    @property
    def can_be_cut(self) -> bool:
        """Return whether an axis has parts that are neither one rank nor all of it."""
        return any(n % k == 0 for n in self._whole.values() for k in range(2, n))

    def has(self, axis: str) -> bool:
        """Return whether a name is an axis of the mesh, or a part of one."""
        try:
            self._find(axis)
        except MeshError:
            return False
        return True

    def _find(self, axis: str) -> tuple[int, int, int]:
        place = self._layout.get(axis)
        if place is None:
            part = split_name(axis)
            if part is None or part[0] not in self._layout:
                raise MeshError(
                    f"mesh {self} has no axis {axis!r}",
                    fix=f"use one of {', '.join(self._whole)}",
                )
            name, major, size = part
            i, n, stride = self._layout[name]
            if n % (major * size):
                raise MeshError(
                    f"axis {name!r} of {n} ranks has no part {axis!r}",
                    fix=f'in "{name}:(m)k" m * k divides {n}',
                )
            place = self._layout[axis] = (i, size, stride * (n // (major * size)))
        return place

    def parts(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of this mesh that make up the given axes and parts, in order.

        Raises MeshError if one is unknown, or no product of axes of this mesh.
        """
        out: list[str] = []
        for axis in axes:
            if axis in self.sizes:
                out.append(axis)
                continue
            _, size, stride = self._find(axis)
            inner_names = [
                name
                for name in self.names
                if axis_of(name) == axis_of(axis)
                and stride <= self._layout[name][2] < stride * size
            ]
            if self.count(inner_names) != size:
                raise MeshError(
                    f"mesh {self} has no axis for part {axis!r}",
                    fix=f"plan on {self.unrefined}, or for parts that it has",
                )
            out += inner_names
        return tuple(out)

    def joined(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the same axes, with consecutive parts of one axis joined, and a part
        that is all of an axis under the axis's name."""
        out: list[str] = []
        for name in axes:
            part, last = split_name(name), split_name(out[-1]) if out else None
            if part and part[2] == self._whole.get(part[0]):
                name, part = part[0], None
            if part and last and last[0] == part[0] and last[1] * last[2] == part[1]:
                name = self.sub_axis(part[0], last[1], last[2] * part[2])
                out.pop()
            out.append(name)
        return tuple(out)

    @property
    def unlike(self) -> tuple[str, ...]:
        """Return the axes whose ranks compute at different speeds."""
        speeds_of_axes = zip(self.names, self.speeds, strict=True)
        return tuple(
            name for name, speeds in speeds_of_axes if speeds and len(set(speeds)) > 1
        )

    def speeds_of(self, axis: str) -> tuple[float, ...]:
        """Return the relative speed of each rank of a whole axis."""
        i, size, _ = self._find(axis)
        return self.speeds[i] or (1.0,) * size

    @cached_property
    def _weights(self) -> dict[str, tuple[int, ...]]:
        """Return axis -> whole numbers in the ratio of its shares, where these
        differ."""
        out = {}
        for name, shares in zip(self.names, self.shares, strict=True):
            if shares and len(set(shares)) > 1:
                exact = [Fraction(share) for share in shares]
                scale = math.lcm(*(share.denominator for share in exact))
                out[name] = tuple(int(share * scale) for share in exact)
        return out

    @property
    def is_shared_equally(self) -> bool:
        """Return whether every axis cuts dims into equal shards."""
        return not self._weights

    @cached_property
    def shared_equally(self) -> Mesh:
        """Return the mesh with equal shares."""
        return replace(self, shares=())

    def weights_of(self, axis: str) -> tuple[int, ...] | None:
        """Return whole numbers in the ratio of the parts of a dim that the ranks of an
        axis get; None for equal shards."""
        return self._weights.get(axis)

    def largest_share(self, axes: Iterable[str]) -> float:
        """Return the part of a dim that the largest shard over axes has, ignoring
        rounding."""
        most, of = 1, 1
        for axis in axes:
            weights = self.weights_of(axis)
            most *= max(weights) if weights else 1
            of *= sum(weights) if weights else self.axis_size(axis)
        return most / of

    def with_shares(self, shares: Mapping[str, tuple[float, ...] | None]) -> Mesh:
        """Return the mesh with these shares of axes; other axes keep theirs."""
        shares_of_axes = dict(zip(self.names, self.shares, strict=True)) | dict(shares)
        return replace(self, shares=tuple(shares_of_axes.values()))

    @property
    def slowest(self) -> float:
        """Return the relative speed of the slowest rank."""
        return math.prod(min(speeds) for speeds in self.speeds if speeds)

    def _place(self, axis: str) -> tuple[int, int]:
        i, _, stride = self._find(axis)
        return -stride, i

    def axis_size(self, axis: str) -> int:
        """Return the size of an axis. Raises MeshError if the mesh has no such axis."""
        return self._find(axis)[1]

    def link(self, axis: str) -> Link:
        """Return the link between the ranks of an axis."""
        return self.links[self._find(axis)[0]]

    def sub_axis(self, axis: str, major: int, size: int) -> str:
        """Return the name of the part ``(major)size`` of an axis or part; ``axis`` if
        it is all."""
        if major == 1 and size == self.axis_size(axis):
            return axis
        whole, outer, _ = split_name(axis) or (axis, 1, 0)
        name = part_name(whole, outer * major, size)
        self._find(name)
        return name

    def count(self, axes: Sequence[str]) -> int:
        """Return the number of shards that the given axes make together."""
        return math.prod(self.axis_size(axis) for axis in axes)

    def rank(self, coordinates: dict[str, int]) -> int:
        """Return the rank at a position; axes left out count as 0."""
        out = 0
        for name, size in self.axes:
            out = out * size + coordinates.get(name, 0)
        return out

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Return which of the ``count(axes)`` shards, axes major to minor, a rank
        holds."""
        out = 0
        for axis in axes:
            _, size, stride = self._find(axis)
            out = out * size + rank // stride % size
        return out

    def ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the given axes in mesh order."""
        return tuple(sorted(axes, key=self._place))

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on ``axes``, in mesh
        order."""
        axis_steps = [self._find(axis) for axis in self.ordered(axes)]
        members = [
            rank - sum(rank // step % size * step for _, size, step in axis_steps)
        ]
        for _, size, step in axis_steps:
            members = [member + i * step for member in members for i in range(size)]
        return tuple(members)

    def groups(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yield all groups along ``axes``, each once, ordered by first rank."""
        for rank in range(self.size):
            group = self.group(rank, axes)
            if group[0] == rank:
                yield group

    def __str__(self) -> str:
        parts: dict[str, str] = {}
        axes = zip(self.axes, self.speeds, self.shares, strict=True)
        for (name, size), speeds, shares in axes:
            text = f"{size}" + (f"{{{written(speeds)}}}" if speeds else "")
            text += f"[{written(shares)}]" if shares else ""
            axis = axis_of(name)
            parts[axis] = f"{parts[axis]}*{text}" if axis in parts else text
        return ",".join(f"{axis}={text}" for axis, text in parts.items())
