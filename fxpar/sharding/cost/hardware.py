"""Holds the rates of a device and its network, and computes seconds of kernels from
them.

In: figures, per device, in seconds, bytes and floating point operations. Out: seconds
of kernels, and the link of every axis of a mesh. ``hardware_table`` knows machines by
name and reads files. Never: measures anything or chooses a plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fxpar.cache_files import write_asked
from fxpar.sharding.axis_parts import axis_of
from fxpar.sharding.mesh import Link, Mesh, rate_at

FORMAT = "fxpar hardware 1"

# Classes of operations on single elements: a simple one, a division or root, functions
# that take a polynomial, a random number, an element of a pool's window.
LIGHT = ("step", "root", "exp", "log", "sin", "tanh", "erf", "draw", "pool")


@dataclass(frozen=True)
class ProductDims:
    """Holds the dims of a product of matrices, m by k and k by n: numbers, or arrays of
    several products. Infinite where none is known to count."""

    # Rows of the result: an outer dim.
    m: Any = math.inf
    # Columns of the result: an outer dim.
    n: Any = math.inf
    # The contracted dim.
    k: Any = math.inf


# Dims of an op that is no product.
NO_DIMS = ProductDims()


@dataclass(frozen=True)
class Peak:
    """Says how fast contractions of one dtype run: ``rate`` of their size.

    It saturates in ``flops`` and in each dim, as in Hockney's r = r_inf n / (n +
    n_half). So in addition to its arithmetic a product takes a time to start, one for
    each element of its operands, m k and k n of them (``half_dim``), and one for each
    of its result, m n (``half_contracted``): a contraction that grows in any dim never
    takes less time.
    """

    # Flops/s of the data sheet.
    flops: float
    # Share of ``flops`` that large contractions reach.
    efficiency: float = 1.0
    # Flops of a contraction at which starting up takes half the time; 0: none.
    half_flops: float = 0.0
    # The m, or n, that halves the rate; 0: none does.
    half_dim: float = 0.0
    # The k that halves the rate; 0: none does. None: not separated from m and n, and
    # ``half_dim`` is of the smallest of the three alone.
    half_contracted: float | None = None

    def rate(self, flops: Any, dims: ProductDims = NO_DIMS) -> Any:
        """Return the flops/s of a contraction of ``flops``; numbers or arrays."""
        if self.half_contracted is None:
            idle = self.half_dim / min(dims.m, dims.n, dims.k)
        else:
            idle = self.half_dim * (1 / dims.m + 1 / dims.n)
            idle = idle + self.half_contracted / dims.k
        full = 1 / (1 + self.half_flops / flops + idle)
        return self.flops * self.efficiency * full


@dataclass(frozen=True)
class Measured:
    """Holds figures of one kind of collective on one level, where they differ from the
    level's."""

    # Seconds per collective.
    overhead: float
    # Seconds from rank to rank.
    latency: float
    # Bytes/s that one device sends, or all of a unit, if ``Level.shared``.
    bandwidth: float


@dataclass(frozen=True)
class Level:
    """Is one level of a network, e.g. NVLink in a node."""

    # Number of devices it joins; 0: any.
    devices: int
    # Bytes/s one device sends.
    bandwidth: float
    # Seconds from rank to rank.
    latency: float
    # Seconds per collective.
    overhead: float = 0.0
    # Whether ``bandwidth`` is of all devices of a unit (the level below) together.
    shared: bool = False
    # See ``mesh.Link``.
    tree: bool = False
    # (kind of collective, figures measured of it).
    kinds: tuple[tuple[str, Measured], ...] = ()


@dataclass(frozen=True)
class Hardware:
    """Holds the figures of one device and its network."""

    # The name that ``hardware_table.lookup`` knows it by, if it is built in.
    name: str
    # (dtype, peak). A name as "float32 convolution backward" separates a family of ops
    # from products of matrices.
    peaks: tuple[tuple[str, Peak], ...]
    # Bytes/s that streaming through the device memory reaches.
    bandwidth: float
    # Bytes of the device memory.
    memory: float
    # Seconds for each kernel (on CPU: op or fused region) of a compiled graph.
    launch: float
    # Seconds for each kernel of a graph that is run op by op.
    eager_launch: float
    # The network, innermost first.
    levels: tuple[Level, ...]
    # The source of the figures.
    about: str = ""
    # (bytes, bytes/s) of kernels that move no more than that, which caches hold; from
    # the last to ``bandwidth`` the rate changes evenly in logarithms, as between them.
    near: tuple[tuple[float, float], ...] = ()
    # Share of a collective's time that overlapping kernels lose: 0 where it has engines
    # of its own, about 1 where the cores that compute also copy and add up.
    beside: float = 0.0
    # Operations on single elements that fused kernels do in a second, by the classes of
    # ``LIGHT``; one that is not there never takes longer than memory does.
    light: tuple[tuple[str, float], ...] = ()
    # Time of a pair of query and key that attention's causal mask hides, relative to
    # other pairs: 0 where kernels skip it.
    masked: float = 0.0
    # Number of ranks of a machine that compute at once for which the figures hold.
    ranks: int = 1
    # Number of cores that they share; 0: each rank has a core, or a device, of its own.
    cores: int = 0

    def peak(self, dtype: Any, *, tf32: bool = False, family: str = "") -> Peak:
        """Return the peak of a torch dtype or its name; ``tf32``: float32 may run as
        such. ``family``: of ops, which run as products do where they have no own
        figures.

        A dtype without matrix units here runs as the next wider one does.
        """
        peaks = dict(self.peaks)
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        name = "tf32" if tf32 and name == "float32" else name
        while name not in peaks:
            name = _INSTEAD.get(name, "float32")
        return peaks.get(f"{name} {family}", peaks[name])

    def streaming(self, nbytes: Any) -> Any:
        """Return the seconds to move bytes, a number or an array, through memory, or
        caches that hold them."""
        return nbytes / (rate_at(nbytes, self._rates) if self.near else self.bandwidth)

    @property
    def _rates(self) -> tuple[tuple[float, float], ...]:
        """Return (bytes, bytes/s) of kernels, up to sizes that no cache holds."""
        return *self.near, (self.near[-1][0] * _FAR, self.bandwidth)

    def seconds(
        self,
        nbytes: float,
        flops: float = 0.0,
        dims: ProductDims = NO_DIMS,
        dtype: Any = "float32",
        *,
        tf32: bool = False,
        family: str = "",
    ) -> float:
        """Return the seconds of one kernel that moves ``nbytes``: a roofline, launch
        included.

        A contraction has ``flops`` and ``dims``.
        """
        work = self.arithmetic(flops, dims, dtype, tf32=tf32, family=family)
        return self.launch + max(work, self.streaming(nbytes))

    def arithmetic(
        self,
        flops: float,
        dims: ProductDims = NO_DIMS,
        dtype: Any = "float32",
        *,
        tf32: bool = False,
        family: str = "",
    ) -> float:
        """Return the seconds a contraction multiplies and adds; 0 without ``flops``."""
        if not flops:
            return 0.0
        return flops / self.peak(dtype, tf32=tf32, family=family).rate(flops, dims)

    def fused(self, nbytes: float, counts: Mapping[str, float]) -> float:
        """Return the seconds of a kernel of light ops that moves ``nbytes`` and does
        ``counts`` operations on elements, by class, launch included."""
        work = sum(counts.get(kind, 0.0) / rate for kind, rate in self.light)
        return self.launch + max(work, self.streaming(nbytes))

    def links(self, mesh: Mesh) -> tuple[Link, ...]:
        """Return the link of every axis: the node's where groups stay inside, else the
        one between nodes, of which every device has its share.

        Ranks are row-major, the last axis fastest, and fill one node after the other. A
        part of an axis has the link of the axis.
        """
        out, stride = dict[str, Link](), 1
        for axis, size in reversed(mesh.unrefined.axes):
            out[axis] = self._link(size, stride, mesh.size)
            stride *= size
        return tuple(out[axis_of(name)] for name in mesh.names)

    def on(self, mesh: Mesh) -> Mesh:
        """Return the mesh with this hardware's links."""
        return replace(mesh, links=self.links(mesh))

    def at_speed(self, speed: float) -> Hardware:
        """Return the hardware with kernels that take ``1 / speed`` times as long;
        launches and links stay."""
        peaks = tuple((k, replace(p, flops=p.flops * speed)) for k, p in self.peaks)
        near = tuple((size, rate * speed) for size, rate in self.near)
        bandwidth = self.bandwidth * speed
        return replace(
            self,
            peaks=peaks,
            bandwidth=bandwidth,
            near=near,
            light=tuple((kind, rate * speed) for kind, rate in self.light),
        )

    def speed_of(self, ranks: int) -> float:
        """Return the factor on the figures' speed of each of ``ranks`` ranks that
        compute at once on a machine."""
        if not self.cores:
            return 1.0
        return min(1.0, self.cores / ranks) / min(1.0, self.cores / self.ranks)

    def with_ranks(self, ranks: int) -> Hardware:
        """Return the figures for ``ranks`` ranks at work on a machine, which share the
        cores that launch, compute and send."""
        if not self.cores:
            return self
        speed = self.speed_of(ranks)
        return replace(
            self.at_speed(speed),
            launch=self.launch / speed,
            eager_launch=self.eager_launch / speed,
            levels=tuple(_at_speed(level, speed) for level in self.levels),
            ranks=ranks,
        )

    def _link(self, size: int, stride: int, ranks: int) -> Link:
        link, inner_ranks = None, 1
        for i, level in enumerate(self.levels):
            reach = _neighbours(size, stride, ranks, level.devices)
            if level is self.levels[-1]:
                reach = size
            if link is None or reach > inner_ranks:
                below = self.levels[i - 1].devices if level.shared and i else 1
                link = self._level_link(level, min(below, ranks), inner_ranks, link)
                inner_ranks = reach
            if inner_ranks == size:
                break
        assert link is not None, "hardware without levels"
        return link

    def _level_link(
        self, level: Level, sharing: int, inner_ranks: int, inner: Link | None
    ) -> Link:
        kinds = tuple(
            (kind, Link(m.bandwidth / sharing, m.latency, m.overhead, level.tree))
            for kind, m in level.kinds
        )
        return Link(
            level.bandwidth / sharing,
            level.latency,
            level.overhead,
            level.tree,
            inner_ranks if inner else 1,
            inner if inner_ranks > 1 else None,
            kinds,
            self.launch,
            2 / self.bandwidth,
            tuple((n / 2, 2 / rate) for n, rate in self._rates) if self.near else (),
        )

    def save(self, path: str | Path) -> None:
        """Write the file that ``lookup`` reads. Raises OptionError if it cannot be
        written."""
        data = {"format": FORMAT, **asdict(self)}
        data["peaks"] = dict(data["peaks"])
        data["levels"] = [
            level | {"kinds": dict(level["kinds"])} for level in data["levels"]
        ]
        write_asked(path, json.dumps(data, indent=1) + "\n")


# No cache holds this many times the bytes of the last entry of ``near``.
_FAR = 4.0

_INSTEAD = {"tf32": "float32", "float8": "bfloat16"}


def _at_speed(level: Level, speed: float) -> Level:
    """Return a level of the network for ranks at ``speed`` times their speed."""

    def slower(x: Measured) -> Measured:
        return Measured(x.overhead / speed, x.latency / speed, x.bandwidth * speed)

    return replace(
        level,
        bandwidth=level.bandwidth * speed,
        latency=level.latency / speed,
        overhead=level.overhead / speed,
        kinds=tuple((kind, slower(x)) for kind, x in level.kinds),
    )


def _neighbours(size: int, stride: int, ranks: int, devices: int) -> int:
    """Return how many ranks of a group at distances of ``stride`` share a unit of
    ``devices``: all of them, or the largest number that is the same in every unit."""
    if not devices or ranks <= devices or devices % (stride * size) == 0:
        return size
    return math.gcd(size, devices // stride) if devices % stride == 0 else 1
