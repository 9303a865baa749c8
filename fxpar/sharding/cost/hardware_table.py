"""Knows machines: arithmetic, memory, launches, and the links of a mesh on each;
computes seconds of kernels from these figures.

In: a name (``lookup("h100")``), a file that ``python -m fxpar calibrate`` wrote, or the
device of this process (``detect``). Out: a ``Hardware``: rates for a roofline, and
``links(mesh)``, the link of each axis. All figures are per device, in seconds, bytes
and floating point operations, and each in ``BUILT_IN`` comes with its source. Never:
measures anything (``runtime.calibrate`` does) or chooses a plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fxpar.cache_files import write_asked
from fxpar.config import nearest
from fxpar.errors import DeviceError, OptionError
from fxpar.sharding.mesh import Link, Mesh, axis_of, rate_at

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


def of_kind(overhead: float, latency: float, bandwidth: float) -> Link:
    """Return the figures of one kind of collective on one level, where they differ from
    the level's."""
    return Link(bandwidth, latency, overhead)


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
    # (kind of collective, figures measured of it: ``of_kind``).
    kinds: tuple[tuple[str, Link], ...] = ()


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

    def peak(self, dtype: Any, family: str = "") -> Peak:
        """Return the peak of a torch dtype or its name, or of "tf32". ``family``: of
        ops, which run as products do where they have no own figures.

        A dtype without matrix units here runs as the next wider one does.
        """
        peaks = dict(self.peaks)
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
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

    def kernel(
        self,
        nbytes: float,
        flops: float = 0.0,
        dims: ProductDims = NO_DIMS,
        dtype: Any = "float32",
        family: str = "",
        hidden_flops: float = 0.0,
    ) -> float:
        """Return the seconds of one kernel that moves ``nbytes``, without its launch: a
        roofline. A contraction has ``flops`` and ``dims``; ``hidden_flops``: of pairs
        that the causal mask of an attention hides."""
        flops += self.masked * hidden_flops
        work = flops / self.peak(dtype, family).rate(flops, dims) if flops else 0.0
        return max(work, self.streaming(nbytes))

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
            levels=tuple(scaled(x, 1 / speed, speed) for x in self.levels),
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
            (kind, replace(own, bandwidth=own.bandwidth / sharing, tree=level.tree))
            for kind, own in level.kinds
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
        data = {"format": FORMAT, **self.to_record()}
        write_asked(path, json.dumps(data, indent=1) + "\n")

    def to_record(self) -> dict[str, Any]:
        """Return the figures as ``read_figures`` takes them, also from JSON."""
        data = asdict(self)
        data["peaks"] = dict(data["peaks"])
        for level in data["levels"]:
            level["kinds"] = {
                kind: {name: own[name] for name in _OF_KIND}
                for kind, own in level["kinds"]
            }
        return data


# Figures that ``of_kind`` takes.
_OF_KIND = ("overhead", "latency", "bandwidth")

# No cache holds this many times the bytes of the last entry of ``near``.
_FAR = 4.0

_INSTEAD = {"tf32": "float32", "float8": "bfloat16"}


Figures = TypeVar("Figures", Level, Link)


def scaled(x: Figures, latency: float, bandwidth: float) -> Figures:
    """Return the figures of a level of the network, or of one kind of collective, with
    so many times the latency and bandwidth."""
    return replace(
        x,
        overhead=x.overhead * latency,
        latency=x.latency * latency,
        bandwidth=x.bandwidth * bandwidth,
        kinds=tuple((kind, scaled(own, latency, bandwidth)) for kind, own in x.kinds),
    )


def _neighbours(size: int, stride: int, ranks: int, devices: int) -> int:
    """Return how many ranks of a group at distances of ``stride`` share a unit of
    ``devices``: all of them, or the largest number that is the same in every unit."""
    if not devices or ranks <= devices or devices % (stride * size) == 0:
        return size
    return math.gcd(size, devices // stride) if devices % stride == 0 else 1


CALIBRATE = "measure it: python -m fxpar calibrate --out machine.json"


# What reading a file raises that is none of ``Hardware.save``.
_UNREADABLE = OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError


def read_figures(data: dict[str, Any]) -> Hardware:
    """Return the hardware of a record; raises one of ``_UNREADABLE`` if it is none."""
    data["peaks"] = tuple((k, Peak(**v)) for k, v in data["peaks"].items())
    data["levels"] = tuple(_level(entry) for entry in data["levels"])
    data["light"] = tuple((k, rate) for k, rate in data.get("light", ()))
    data["near"] = tuple((n, rate) for n, rate in data.get("near", ()))
    if not data["levels"] or "float32" not in dict(data["peaks"]):
        raise ValueError("it needs a level and a peak of float32")
    hardware = Hardware(**data)
    _check(hardware)
    return hardware


def load(path: str | Path) -> Hardware:
    """Read a file of ``Hardware.save``. Raises OptionError if it is not one."""
    try:
        data = json.loads(Path(path).read_text())
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        return read_figures(data)
    except _UNREADABLE as error:
        raise OptionError(
            f"cannot read hardware file {str(path)!r}: {error}", fix=CALIBRATE
        ) from None


# Figures that are divided by, so that they must not be 0.
_RATES = {"flops", "efficiency", "bandwidth", "ranks"}


def _check(figures: Any) -> None:
    """Raise ValueError on a figure that no machine has."""
    for field in fields(figures):
        value = getattr(figures, field.name)
        if field.name in ("near", "light"):
            for key, rate in value:
                _check_figure(f"{field.name} {key}", rate, over=True)
                if field.name == "near":
                    _check_figure("near", key, over=True)
        elif isinstance(value, tuple):
            for entry in value:
                _check(entry[1] if isinstance(entry, tuple) else entry)
        elif (
            field.type in ("float", "int")
            or value is not None
            and "float" in field.type
        ):
            _check_figure(field.name, value, over=field.name in _RATES)


def _check_figure(name: str, value: Any, *, over: bool) -> None:
    """Raise ValueError unless a figure is a number of at least 0, or, if ``over``, more
    than 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (over and not value):
        least = "more than 0" if over else "0 or more"
        raise ValueError(f"{name} is {value!r}, not a number that is {least}")


def _level(entry: Mapping[str, Any]) -> Level:
    kinds = tuple((kind, of_kind(**m)) for kind, m in entry["kinds"].items())
    return Level(**{**entry, "kinds": kinds})


def lookup(text: str) -> Hardware:
    """Return the hardware of a name, as in ``BUILT_IN``, or of a file; ``cpu:2`` is a
    CPU whose ranks share two cores. Raises OptionError."""
    machines = {hardware.name: hardware for hardware in BUILT_IN} | _ALIASES
    name, _, cores = text.lower().partition(":")
    if name == "cpu" and cores.isdecimal() and int(cores):
        return replace(machines[name], name=text.lower(), cores=int(cores))
    if text.lower() in machines:
        return machines[text.lower()]
    if Path(text).is_file():
        return load(text)
    hint = nearest(text.lower(), machines)
    raise OptionError(
        f"unknown hardware {text!r}",
        fix=f"{hint} use one of {', '.join(machines)}, or {CALIBRATE}".strip(),
    )


# The hardware of this process's ranks, as their first start measured it.
_measured: list[Hardware] = []


def keep_measured(*hardware: Hardware) -> None:
    """Let ``detect`` return this hardware, or without one what is built in."""
    _measured[:] = hardware


def detect() -> Hardware:
    """Return the hardware that was measured, else the built-in one of this process's
    CUDA device, by its name; without a device, ``cpu``. Raises DeviceError on a device
    that is not known."""
    import torch

    if _measured:
        return _measured[0]
    if not torch.cuda.is_available():
        return lookup("cpu")
    device = torch.cuda.get_device_name()
    for part, name in _DEVICES:
        if part.lower() in device.lower():
            if name:
                return lookup(name)
            break
    raise DeviceError(
        f"the figures of {device!r} are not known",
        fix=f"set FXPAR_HARDWARE to similar hardware, or {CALIBRATE}",
    )


# (part of a CUDA device name, hardware), the first that fits. No hardware: a variant
# (PCIe cards, bridged pairs, superchips) whose figures differ from its namesake's.
_DEVICES = (
    ("PCIe", ""),
    ("NVL", ""),
    ("GH200", ""),
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100-SXM4-80GB", "a100"),
    ("V100-SXM3", "v100-dgx2"),
    ("V100-SXM2", "v100-dgx1"),
    ("P100-SXM2", "p100"),
    ("K80", "k80"),
)


def _matrix(flops: float, efficiency: float = 0.78) -> Peak:
    """Return the peak of tensor cores. Efficiency: 770 to 798 of 989 TFLOP/s bfloat16
    on an H200. Until measured, estimates: 3 us to fill the device, and tiles of 128,
    half idle at 64."""
    return Peak(flops, efficiency, 3e-6 * flops * efficiency, 64.0)


def _vector(flops: float, efficiency: float = 0.85) -> Peak:
    """Return the peak of ordinary units of a GPU. All but ``flops`` are estimates until
    measured."""
    return Peak(flops, efficiency, 3e-6 * flops * efficiency, 32.0)


_MIB = float(2**20)

# NCCL's latencies: base and hops over PCI and NET from its tuning.cc (LL protocol).
# NVLink: such that 0.5 MB over 8 H100 take 24 us, as vLLM (pull request 42324) found.
_NCCL, _NVLINK, _PCI, _NET = 6.6e-6, 1.1e-6, 1e-6, 5e-6


def _nvlink(devices: int, per_link: float, links: int) -> Level:
    """Return a level of ``links`` times NCCL's bandwidth of one (``src/graph/topo.h``):
    what rings reach, some 0.8 of the data sheet's figure for one direction."""
    return Level(devices, per_link * links, _NVLINK, _NCCL)


def _infiniband(bandwidth: float, *, shared: bool = False) -> Level:
    return Level(0, bandwidth, _NET, _NCCL, shared=shared, tree=True)


_HOPPER = (
    # Measured by calibrate on an H100 (SXM, 80 GB; torch 2.11), rounded, but for tf32,
    # of which products of all sizes were too few, and float8: NVIDIA's data sheet,
    # without sparsity. Of attention by heads of 64 and 128: what wider ones reach is a
    # guess of the fit.
    ("float64", Peak(60.6e12, 1.0, 3.3e8, 40.0)),
    ("float32", Peak(48.4e12, 1.0, 4.4e8, 11.0)),
    ("tf32", _matrix(494.7e12, 0.85)),
    ("bfloat16", Peak(817e12, 1.0, 3.5e9, 93.0)),
    ("float16", Peak(773e12, 1.0, 3.3e9, 59.0)),
    ("float8", _matrix(1978.9e12)),
    *(
        (f"{dtype} attention{phase}", peak)
        for dtype in ("bfloat16", "float16")
        for phase, peak in (
            ("", Peak(1.7e15, 1.0, 8.3e9, 211.0)),
            (" backward", Peak(546e12, 1.0, 1.7e10, 3.0)),
        )
    ),
)
_AMPERE = (
    # NVIDIA A100 data sheet, without sparsity.
    ("float64", _matrix(19.5e12)),
    ("float32", _vector(19.5e12)),
    ("tf32", _matrix(156e12)),
    ("bfloat16", _matrix(312e12)),
    ("float16", _matrix(312e12)),
)
_VOLTA = (
    # NVIDIA V100 data sheet, SXM; matrix units have float16 only. CoCoNeT assumes 60 to
    # 80 TFLOP/s for matrix products of GPT-2, whose inner dim is small.
    ("float64", _vector(7.8e12)),
    ("float32", _vector(15.7e12)),
    ("float16", _matrix(125e12, 0.72)),
)
_PASCAL = (
    # NVIDIA P100 data sheet, SXM2.
    ("float64", _vector(5.3e12)),
    ("float32", _vector(10.6e12)),
    ("float16", _vector(21.2e12)),
)
# NVIDIA K80 data sheet, one of its two devices at boost clocks.
_KEPLER = (("float64", _vector(1.46e12)), ("float32", _vector(4.37e12)))
# A core for each rank: geometric means of calibrate's figures on 2 cores of an AMD EPYC
# (Zen 4), with 2 ranks on two days and with 4 ranks on three, the latter at twice the
# speed (``Hardware.with_ranks``). Both agree within a tenth, but for collectives.
_CPU = (
    ("float64", Peak(4.5e10, 1.0, 2.4e3, 25.0, 18.0)),
    ("float32", Peak(9.9e10, 1.0, 2e4, 18.0, 17.0)),
    ("bfloat16", Peak(3.3e11, 1.0, 4e6, 33.0, 21.0)),  # AVX512_BF16
    ("float32 convolution", Peak(1.6e11, 1.0, 7e6, 13.0, 21.0)),
    ("float32 convolution backward", Peak(2e11, 1.0, 6e6, 40.0, 43.0)),
)
_CPU_CACHES = (
    (1.3e5, 2.6e11),
    (5.2e5, 1.2e11),
    (2.1e6, 8.6e10),
    (8.4e6, 6.8e10),
    (3.4e7, 2e10),
)
_CPU_LIGHT = (
    ("step", 2.2e10),
    ("root", 3.9e9),
    ("exp", 1e9),
    ("log", 1.1e9),
    ("sin", 1.3e9),
    ("tanh", 4.3e8),
    ("erf", 8.4e8),
    ("draw", 8.2e7),
    ("pool", 1.3e9),
)

# gloo in one machine, each step of a ring, measured as ``_CPU``: a fit is off by a
# factor of 1.3 (all-to-all) to 1.8 (all-reduce), as the days differ by more. But a
# reduce-scatter (2.8e-4 s and 6.8e8 bytes/s a step) counts as no more than an
# all-reduce of which a rank keeps its part, since half of the bytes are worth a little
# time, and as no more than a ring of permutes (1.2e-4 s), which gains nothing.
_GLOO = Level(
    0,
    1.8e9,
    1.5e-4,
    1.8e-4,
    kinds=(
        ("all_reduce", of_kind(1.8e-4, 1.5e-4, 1.8e9)),
        ("all_gather", of_kind(1.2e-4, 2e-4, 1e9)),
        ("reduce_scatter", of_kind(1.2e-4, 2.4e-4, 9.2e8)),
        ("all_to_all", of_kind(7e-5, 1.3e-4, 1.3e9)),
        ("permute", of_kind(1.2e-4, 1.7e-4, 1.6e9)),
    ),
)

# 18 NVLinks; DGX H100 and DGX H200: 8 adapters of 400 Gbit/s, one for each device.
_DGX_HOPPER = (_nvlink(8, 20.6e9, 18), _infiniband(50e9))
# 12 NVLinks; DGX A100: 8 adapters of 200 Gbit/s, one for each device.
_DGX_A100 = (_nvlink(8, 20e9, 12), _infiniband(25e9))
# 6 NVLinks on NVSwitch; 8 adapters of 100 Gbit/s a node, over which all-reduces of
# CoCoNeT's 16 nodes reached 80.8 GB/s.
_DGX_2 = (_nvlink(16, 20e9, 6), _infiniband(80.8e9, shared=True))
# 6 NVLinks in a hybrid cube mesh; 4 adapters of 100 Gbit/s a node.
_DGX_1 = (_nvlink(8, 20e9, 6), _infiniband(50e9, shared=True))
# FlexFlow: 4 nodes of 4 P100, NVLink (of 4 links each a ring of all uses 3 here), EDR
# InfiniBand of 100 Gbit/s a node.
_FLEXFLOW_P100 = (_nvlink(4, 18e9, 3), _infiniband(12.5e9, shared=True))
# FlexFlow: 16 nodes of 4 K80; a PCIe switch for each pair, its one link to the host
# (NCCL's figure for PCIe 3 x16), InfiniBand of 56 Gbit/s a node.
_FLEXFLOW_K80 = (
    Level(2, 12e9, _PCI, _NCCL),
    Level(4, 12e9, _PCI, _NCCL, shared=True),
    _infiniband(7e9, shared=True),
)


# Seconds of a launch, in a compiled program from one tiny kernel to the next, and by
# the host: measured by calibrate on an H100; before it estimates.
_LAUNCHES, _OLDER_LAUNCHES = (2e-6, 6.5e-6), (2.5e-6, 6e-6)


def _gpu(
    name: str, peaks: Any, bandwidth: float, mib: int, levels: Any, about: str
) -> Hardware:
    launches = _LAUNCHES if peaks is _HOPPER else _OLDER_LAUNCHES
    return Hardware(name, peaks, bandwidth, mib * _MIB, *launches, levels, about)


def _tpu(name: str, flops: float, bandwidth: float, mib: int, link: float) -> Hardware:
    """Return a chip of a pod. Float32 takes the matrix units 6 passes; a ring along an
    axis of the torus uses two links. Launches and latencies are estimates."""
    peaks = (("bfloat16", _matrix(flops)), ("float32", _matrix(flops / 6)))
    levels = (Level(0, 2 * link, 1e-6, 2e-6),)
    about = f"Google TPU {name[-2:]}, a chip of a pod"
    return Hardware(name, peaks, bandwidth, mib * _MIB, 2e-6, 2e-6, levels, about)


# Bandwidth of memory: of the data sheet's figure 0.9, as an H200 copies (4.3 of 4.8
# TB/s), or 0.88, as V100s update Adam's state (792 of 900 GB/s, CoCoNeT); for older
# devices an estimate; an H100 copies 3.0 TB/s. Size: as nvidia-smi says.
# TPUs: AccPar has 180 and 420 TFLOP/s for boards of 4 chips (Google now says 123 for a
# chip of v3). Jouppi et al., Communications of the ACM, July 2020: memory of 700 and
# 900 GB/s, links of 496 and 656 Gbit/s, which agrees with Google's 340 TB/s of
# all-reduce bandwidth for 1024 chips of v3.
BUILT_IN = (
    _gpu("h100", _HOPPER, 0.9 * 3.35e12, 81559, _DGX_HOPPER, "NVIDIA H100 SXM, DGX"),
    _gpu("h200", _HOPPER, 0.9 * 4.8e12, 143771, _DGX_HOPPER, "NVIDIA H200 SXM, DGX"),
    _gpu("a100", _AMPERE, 0.9 * 2039e9, 81920, _DGX_A100, "NVIDIA A100 80 GB, DGX"),
    _gpu("v100-dgx2", _VOLTA, 0.88 * 900e9, 32510, _DGX_2, "NVIDIA V100 32 GB, DGX-2"),
    _gpu("v100-dgx1", _VOLTA, 0.88 * 900e9, 16160, _DGX_1, "NVIDIA V100 16 GB, DGX-1"),
    _gpu("p100", _PASCAL, 0.75 * 732e9, 16280, _FLEXFLOW_P100, "NVIDIA P100, FlexFlow"),
    _gpu("k80", _KEPLER, 0.7 * 240e9, 11441, _FLEXFLOW_K80, "NVIDIA K80, FlexFlow"),
    _tpu("tpu-v2", 45e12, 0.9 * 700e9, 16384, 62e9),
    _tpu("tpu-v3", 105e12, 0.9 * 900e9, 32768, 82e9),
    Hardware(
        "cpu",
        _CPU,
        5.4e9,
        16384 * _MIB,
        8e-7,
        1.4e-6,
        (_GLOO,),
        "a core for each rank, gloo in one machine",
        _CPU_CACHES,
        beside=0.95,
        light=_CPU_LIGHT,
        masked=1.0,
    ),
)

_ALIASES = {"v100": next(h for h in BUILT_IN if h.name == "v100-dgx2")}
