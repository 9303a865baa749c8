"""The device mesh: ordered, named axes over the ranks.

A mesh is data. It needs no process group and no devices, so a mesh of 65,536 ranks is
as cheap as one of two. Ranks are row-major: the last axis varies fastest.

A **sub-axis** ``"x:(m)k"``, as Shardy writes it, is a part of axis x: its n ranks seen
as ``[m, k, n/(mk)]``, of which it is the middle. Users never write one. Resharding uses
them where an axis must move in pieces, and every method here takes them as axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpar.errors import MeshError

_SUB_AXIS = re.compile(r"(\w+):\(([1-9]\d*)\)([1-9]\d*)")
_AXIS = re.compile(r"^\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*(?:\{([^{}]*)\}\s*)?$")
_BETWEEN = re.compile(r",(?![^{]*\})")  # a comma, but not one of {1.0,0.5}
_FORM = 'write axes as name=size, separated by commas: FXPAR_MESH="dp=2,tp=4"'
_SPEEDS = (
    'write one positive number for each rank of the axis: FXPAR_MESH="dp=2{1.0,0.5}"'
)


@dataclass(frozen=True)
class Link:
    """What connects the ranks of one axis; ``hardware`` makes it, ``collectives`` reads
    all of it."""

    # Bytes/s one rank sends while all do.
    bandwidth: float = 1e11
    # Seconds from rank to rank.
    latency: float = 0.0
    # Seconds of a collective, whatever it carries.
    overhead: float = 1e-5
    # Whether reductions may take a tree besides the ring.
    tree: bool = False
    # This many neighbours along the axis share a node, where ``inner`` connects them.
    inside: int = 1
    inner: Link | None = None
    # Links that hold instead for single kinds of collectives.
    kinds: tuple[tuple[str, Link], ...] = ()
    # What a rank takes to bring a tensor in memory into the order that collectives
    # have: seconds for each copy, and for each byte of it, read and written.
    copy_launch: float = 0.0
    copy_byte: float = 0.0

    def __hash__(self) -> int:
        # Links are looked up often, and the rest is nested.
        return hash((self.bandwidth, self.latency))


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, major to minor, e.g. ``Mesh((("dp", 2), ("tp", 4)))``."""

    axes: tuple[tuple[str, int], ...]
    links: tuple[Link, ...] = ()
    # For each axis the relative speed of each of its ranks, 1.0 that of the hardware,
    # or None where all compute alike. A rank has the product of those of its
    # coordinates.
    speeds: tuple[tuple[float, ...] | None, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise MeshError(f"mesh axis {name!r} appears twice", fix=_FORM)
        for name, size in self.axes:
            if size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size}", fix=_FORM)
        if not self.links:
            object.__setattr__(self, "links", (Link(),) * len(self.axes))
        if len(self.links) != len(self.axes):
            raise MeshError(f"{len(self.links)} links for {len(self.axes)} axes")
        self._check_speeds()

    def _check_speeds(self) -> None:
        if not self.speeds:
            object.__setattr__(self, "speeds", (None,) * len(self.axes))
        if len(self.speeds) != len(self.axes):
            raise MeshError(
                f"speeds of {len(self.speeds)} axes for {len(self.axes)} axes",
                fix="give a tuple or None for each axis",
            )
        for (name, size), speeds in zip(self.axes, self.speeds, strict=True):
            if speeds is None:
                continue
            if len(speeds) != size:
                raise MeshError(
                    f"mesh axis {name!r} has {len(speeds)} speeds for {size} ranks",
                    fix=_SPEEDS,
                )
            for speed in speeds:
                if not 0 < speed < math.inf:
                    raise MeshError(
                        f"mesh axis {name!r} has a rank of speed {speed}", fix=_SPEEDS
                    )

    def __hash__(self) -> int:
        # Specs are priced per mesh very often, and hashing every link is slow.
        return hash(self.axes)

    @classmethod
    def parse(cls, text: str | Mesh) -> Mesh:
        """Read ``"dp=2,tp=4"``, or ``"dp=2{1.0,0.5},tp=4"`` with speeds.

        Raises MeshError naming the malformed part.
        """
        if isinstance(text, Mesh):
            return text
        axes, speeds = [], []
        for part in _BETWEEN.split(text):
            match = _AXIS.match(part)
            if not match:
                raise MeshError(f"cannot read mesh {text!r}: {part!r}", fix=_FORM)
            axes.append((match[1], int(match[2])))
            speeds.append(None if match[3] is None else _numbers(match[1], match[3]))
        return cls(tuple(axes), speeds=tuple(speeds))

    @classmethod
    def from_device_mesh(cls, device_mesh) -> Mesh:
        """The mesh of an existing ``torch.distributed.DeviceMesh`` with named dims.

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
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def _layout(self) -> dict[str, tuple[int, int, int]]:
        """Axis -> (position of its axis in the mesh, size, distance between ranks)."""
        out, stride = {}, 1
        for i, (name, size) in reversed(list(enumerate(self.axes))):
            out[name] = (i, size, stride)
            stride *= size
        return out

    def _find(self, axis: str) -> tuple[int, int, int]:
        found = self._layout.get(axis)
        if found is None:
            match = _SUB_AXIS.fullmatch(axis)
            if match is None or match[1] not in self._layout:
                raise self._unknown(axis)
            i, n, stride = self._layout[match[1]]
            above, size = int(match[2]), int(match[3])
            if n % (above * size):
                raise self._unknown(axis)
            found = self._layout[axis] = (i, size, stride * (n // (above * size)))
        return found

    def _unknown(self, axis: str) -> MeshError:
        return MeshError(
            f"mesh {self} has no axis {axis!r}", fix=f"use one of {self.names}"
        )

    @property
    def unlike(self) -> tuple[str, ...]:
        """Axes whose ranks compute at different speeds."""
        found = zip(self.names, self.speeds, strict=True)
        return tuple(name for name, speeds in found if speeds and len(set(speeds)) > 1)

    def speeds_of(self, axis: str) -> tuple[float, ...]:
        """Relative speed of each rank of a whole axis."""
        i, size, _ = self._find(axis)
        return self.speeds[i] or (1.0,) * size

    @property
    def slowest(self) -> float:
        """Relative speed of the slowest rank."""
        return math.prod(min(speeds) for speeds in self.speeds if speeds)

    def _place(self, axis: str) -> tuple[int, int]:
        i, _, stride = self._find(axis)
        return i, -stride

    def axis_size(self, axis: str) -> int:
        """Size of an axis. Raises MeshError if the mesh has no such axis."""
        return self._find(axis)[1]

    def link(self, axis: str) -> Link:
        """What connects the ranks of an axis."""
        return self.links[self._find(axis)[0]]

    def sub_axis(self, axis: str, above: int, size: int) -> str:
        """Name of the part ``(above)size`` of an axis; the axis itself if it is all."""
        if above == 1 and size == self.axis_size(axis):
            return axis
        name = f"{axis}:({above}){size}"
        self._find(name)
        return name

    def count(self, axes: Sequence[str]) -> int:
        """Number of shards that the given axes make together."""
        return math.prod(self.axis_size(axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        out = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return out

    def rank(self, coordinates: dict[str, int]) -> int:
        """Rank at a position; axes left out count as 0."""
        out = 0
        for name, size in self.axes:
            out = out * size + coordinates.get(name, 0)
        return out

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Which of the ``count(axes)`` shards, axes major to minor, a rank holds."""
        out = 0
        for axis in axes:
            _, size, stride = self._find(axis)
            out = out * size + rank // stride % size
        return out

    def ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The given axes in mesh order."""
        return tuple(sorted(axes, key=self._place))

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only on ``axes``, in mesh order."""
        found = [self._find(axis) for axis in self.ordered(axes)]
        members = [rank - sum(rank // step % size * step for _, size, step in found)]
        for _, size, step in found:
            members = [member + i * step for member in members for i in range(size)]
        return tuple(members)

    def groups(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """All groups along ``axes``, each once, ordered by first rank."""
        for rank in range(self.size):
            group = self.group(rank, axes)
            if group[0] == rank:
                yield group

    def __str__(self) -> str:
        parts = []
        for (name, size), speeds in zip(self.axes, self.speeds, strict=True):
            words = ",".join(repr(float(speed)) for speed in speeds or ())
            parts.append(f"{name}={size}" + (f"{{{words}}}" if words else ""))
        return ",".join(parts)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """The numbers between the braces of an axis."""
    out = []
    for word in text.split(","):
        try:
            out.append(float(word))
        except ValueError:
            what = f"mesh axis {name!r}: {word.strip()!r} is not a speed"
            raise MeshError(what, fix=_SPEEDS) from None
    return tuple(out)
