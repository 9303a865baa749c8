"""Measure one device for ``calibrate``: contractions, memory, launches.

In: a ``Probe``, this rank's part in a calibration. Out: rates. All ranks start
together, as during a step, and a time ends when the last one is done: so what they
share (cores, caches, memory bus) is shared while it is measured. Curves are fitted to
points, each a size and its seconds, by ratio, so that small and large sizes count
equally. Never: a collective except to start together, or a program of the user.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fxpar import _torch
from fxpar.errors import warn
from fxpar.passes.normalize import random
from fxpar.runtime.ranks import groups, meeting, worlds
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import Hardware, Peak, ProductDims, of_kind
from fxpar.sharding.mesh import Link, Mesh

aten = torch.ops.aten

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Suite:
    """Holds what is measured."""

    # M, k, n of matrix products, some with one small dim: m or n for
    # ``Peak.half_dim``, k for ``half_contracted``.
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]  # of these products; "tf32" is float32 computed so
    # For each convolution: samples, channels in and out, pixels along a side, along the
    # window's.
    convolved: tuple[Shape, ...]
    attended: tuple[Shape, ...]  # samples, heads, length, width of a head
    families: tuple[str, ...]  # the dtypes of convolutions and attention
    streams: tuple[int, ...]  # bytes moved by sums of two tensors; the last miss caches
    sizes: tuple[int, ...]  # bytes of the largest tensor of a collective


def _powers(first: int, last: int) -> tuple[int, ...]:
    """Return every fourth power of two."""
    return tuple(1 << n for n in range(first, last, 2))


def _cubes(*sizes: int) -> tuple[Shape, ...]:
    return tuple((n, n, n) for n in sizes)


_SUITES = {
    "cpu": Suite(
        _cubes(32, 64, 128, 256, 512, 1024)
        + ((512, 512, 16), (512, 16, 512), (16, 512, 512))
        + ((1024, 1024, 64), (1024, 64, 1024), (64, 1024, 1024)),
        ("float32", "bfloat16", "float64"),
        ((4, 16, 16, 16, 3), (8, 32, 32, 32, 3), (8, 64, 64, 16, 3))
        + ((8, 128, 128, 16, 3), (8, 32, 64, 32, 1), (8, 256, 64, 16, 1))
        + ((2, 64, 64, 8, 3), (2, 256, 256, 4, 3)),
        ((2, 4, 64, 32), (4, 8, 128, 32), (4, 8, 128, 64), (2, 4, 512, 64)),
        ("float32",),
        _powers(17, 29),
        _powers(10, 25),
    ),
    "cuda": Suite(
        _cubes(256, 512, 1024, 2048, 4096, 8192)
        + ((8192, 8192, 64), (8192, 128, 8192), (8192, 256, 8192))
        + ((4096, 1024, 4096), (1024, 4096, 4096)),
        ("float32", "tf32", "bfloat16", "float16", "float64"),
        ((32, 64, 64, 56, 3), (32, 64, 256, 56, 1), (32, 256, 256, 14, 3))
        + ((64, 512, 512, 14, 3), (64, 3, 64, 224, 7)),
        ((4, 16, 512, 64), (4, 16, 1024, 128), (4, 32, 4096, 128)),
        ("bfloat16", "float16"),
        _powers(21, 33),
        _powers(10, 29),
    ),
    "quick cpu": Suite(
        ((*_cubes(64, 128, 256), (256, 16, 256))),
        ("float32",),
        (),
        (),
        (),
        (1 << 19, 1 << 25),
        (1 << 12, 1 << 16, 1 << 20, 1 << 23),
    ),
    "quick cuda": Suite(
        (*_cubes(512, 1024, 2048, 4096), (4096, 128, 4096)),
        ("float32", "bfloat16"),
        (),
        (),
        (),
        (1 << 22, 1 << 31),
        (1 << 10, 1 << 16, 1 << 22, 1 << 26),
    ),
}

# Seconds of calls that are timed together, so long that meeting costs little.
_LONG = 0.03
# Calls that a GPU takes before the host has to wait, each with kernels of its own.
_AHEAD = 256


@dataclass(frozen=True)
class Probe:
    """Is one calibration on this rank; its mesh has one rank if there are no others."""

    device: torch.device
    ranks: groups.Ranks
    end: float  # when time is up, by the monotonic clock
    quick: bool  # whether fewer sizes and repetitions are measured
    long: float = _LONG  # seconds of calls that are timed together
    repeats: int = 11  # how often they are timed

    @property
    def suite(self) -> Suite:
        """Return what is measured on this device."""
        kind = self.device.type
        return _SUITES[f"quick {kind}" if self.quick else kind]

    def median(self, fn: Callable[[], Any], *, launches: bool = False) -> float | None:
        """Return the seconds a call takes, until the last rank is done: the median of
        several. None once time is up. Ranks call it together, and ``fn`` equally
        often. ``launches``: on a GPU, the seconds of the host, where kernels take
        less."""
        fn()
        pilot, overrun = self._worst(self._time(fn, 1), time.monotonic() - self.end)
        if overrun > 0:
            return None
        ahead = self.device.type == "cuda" and not launches
        calls = int(min(max(self.long / pilot, 1), _AHEAD if ahead else 20000))
        repeats = range(min(5, self.repeats) if pilot > 0.05 else self.repeats)
        times = [self._time(fn, calls, meet=True, ahead=ahead) for _ in repeats]
        return statistics.median(self._worst(*times))

    def _time(
        self,
        fn: Callable[[], Any],
        calls: int,
        *,
        meet: bool = False,
        ahead: bool = False,
    ) -> float:
        """Return the seconds a call takes.

        meet: from where ranks meet to where they meet again, as one of those that share
        a core may begin when another is done. ahead: a GPU begins when the host has
        launched all.
        """
        if meet:
            worlds.barrier()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                fn()
            if meet:
                worlds.barrier()
            return (time.perf_counter() - begin) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead:
            begin = time.perf_counter()
            fn()
            _torch.objects.keep_busy(2 * calls * (time.perf_counter() - begin))
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def _worst(self, *values: float) -> list[float]:
        """Return the largest of each value over all ranks."""
        texts = meeting.gather("calibrate", " ".join(map(repr, values)))
        rows = ([*map(float, text.split())] for text in texts)
        return [max(column) for column in zip(*rows, strict=True)]

    def compiled(self, fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """Return ``fn`` through Inductor, or itself if quick or if any rank fails."""
        compiled, failed = fn, ""
        if not self.quick:
            try:
                compiled = torch.compile(fn, dynamic=False)
                compiled(*args)
            except Exception as error:  # no compiler, or one that does not work
                failed = f"{type(error).__name__}: {error}".splitlines()[0]
        if self._worst(float(bool(failed)))[0]:
            what = f"nothing compiles here, so eager ops were measured ({failed})"
            warn(what)
            return fn
        return compiled


def streams(probe: Probe, launch: float) -> list[tuple[float, float]]:
    """Return (bytes, bytes/s) of sums of two tensors into a fresh one, as a step makes
    its results: the allocator's time counts. ``launch``: seconds of a tiny sum."""
    rates = []
    for nbytes in probe.suite.streams:
        a, b = (torch.ones(nbytes // 12, device=probe.device) for _ in range(2))
        seconds = probe.median(partial(torch.add, a, b))
        if seconds is None:
            break
        rates.append((float(3 * a.nbytes), 3 * a.nbytes / max(seconds - launch, 1e-9)))
    return rates


def cores(probe: Probe) -> int:
    """Return how many ranks can have a core of this machine for each of their threads;
    0 on other devices than a CPU. All ranks must call it."""
    if probe.device.type != "cpu":
        return 0
    ours = os.sched_getaffinity(0) if _LINUX else range(os.cpu_count() or 1)
    texts = meeting.gather("cores", " ".join(map(str, sorted(ours))))
    every = {core for text in texts for core in text.split()}
    return max(len(every) // torch.get_num_threads(), 1)


def speed(probe: Probe, hardware: Hardware, side: int) -> float:
    """Return how many times as fast as ``hardware`` says a rank multiplies square
    matrices of ``side`` rows; 1.0 if time is up."""
    x, y = torch.ones(2, side, side, device=probe.device)
    seconds = probe.median(partial(torch.mm, x, y, out=torch.mm(x, y)))
    flops, dims = 2.0 * side**3, ProductDims(side, side, side)
    return hardware.kernel(3 * x.nbytes, flops, dims) / seconds if seconds else 1.0


# Systems on which a process may be bound to some cores.
_LINUX = hasattr(os, "sched_getaffinity")


def launches(probe: Probe) -> tuple[float | None, float | None]:
    """Return the seconds of a tiny op: run eagerly, and in a compiled graph."""
    x = torch.zeros(8, 8, device=probe.device)
    eager = probe.median(partial(torch.add, x, x), launches=True)
    if probe.device.type == "cuda":
        # A device takes as long from one tiny kernel to the next, whoever launches.
        return eager, probe.median(partial(torch.add, x, x))
    if probe.quick:
        return eager, eager
    seconds = []
    for count in (4, 36):

        def chain(x: torch.Tensor, count: int = count) -> torch.Tensor:
            for _ in range(count):
                # A product and a fused region, which Inductor does not merge.
                x = torch.relu(torch.mm(x, x) - 1)
            return x

        run = probe.compiled(chain, x)
        seconds.append(probe.median(partial(run, x)))
    few, many = seconds
    if few is None or many is None:
        return eager, eager
    return eager, max(many - few, 1e-7) / (2 * 32)


# Elements of a tensor that the nearest cache holds; number of ops in a chain.
_ELEMENTS, _CHAIN = 1 << 14, 16

_LIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "step": lambda x: torch.clamp_min(x, 0.5) * 1.01,
    "root": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "erf": torch.erf,
}


def light(probe: Probe) -> Iterator[tuple[str, float]]:
    """Yield (class, operations on elements that a compiled kernel does a second)."""
    if probe.quick or probe.device.type != "cpu":
        return
    x = torch.rand(_ELEMENTS)
    seed = torch.zeros((), dtype=torch.int64)
    random.register_lowering()

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw as dropout does: to store the mask takes as long as to draw."""
        local, whole = [4, 64, _ELEMENTS // 256], [8, 64, _ELEMENTS // 256]
        numbers = torch.ops.fxpar.random(local, seed, "rand", whole, [4, 0, 0])
        mask = numbers.view(_ELEMENTS) > 0.1
        return mask, x * mask

    def seconds(fn: Callable[[torch.Tensor], Any]) -> float | None:
        return probe.median(partial(probe.compiled(fn, x), x))

    base, steps = seconds(torch.neg), 0.0
    for kind, op in _LIGHT.items():
        elapsed = seconds(partial(_chain, op))
        if base is None or elapsed is None:
            return
        # Every link of a chain has two steps and its op, except for the first class.
        one = max((elapsed - base) / _CHAIN - steps, 1e-10)
        if kind == "step":
            steps, one = one, one / 2
        yield kind, _ELEMENTS / one
    elapsed = seconds(draw)
    if base is not None and elapsed is not None:
        yield "draw", _ELEMENTS / max(elapsed - base, 1e-10)
    elapsed = seconds(_pooled)
    if base is not None and elapsed is not None:
        yield "pool", _POOLED / max(elapsed - base, 1e-10)


# Elements of windows that ``_pooled`` pools, forward and backward.
_POOLED = 2 * 9 * _ELEMENTS // 4


def _pooled(x: torch.Tensor) -> torch.Tensor:
    """Compute a maximum over windows, with its place as in training, and a gradient."""
    windows = [3, 3], [2, 2], [1, 1], [1, 1], False
    images = x.view(4, -1, 32, 32)
    most, places = aten.max_pool2d_with_indices(images, *windows)
    back = aten.max_pool2d_with_indices_backward(most, images, *windows, places)
    return back.view(_ELEMENTS)


def _chain(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for _ in range(_CHAIN):
        x = op(x)
        if op is not _LIGHT["step"]:
            x = _LIGHT["step"](x)
    return x


def peaks(probe: Probe, bandwidth: float) -> Iterator[tuple[str, Peak]]:
    """Yield the peak of each dtype in the suite, fitted to matrix products."""
    for name in probe.suite.dtypes:
        dtype = getattr(torch, "float32" if name == "tf32" else name)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        points = []
        try:
            for m, k, n in probe.suite.shapes:
                x = torch.rand(m, k, device=probe.device).to(dtype)
                y = torch.rand(k, n, device=probe.device).to(dtype)
                product = torch.mm(x, y)
                seconds = probe.median(
                    _in_turn(lambda x, y, out: torch.mm(x, y, out=out), x, y, product)
                )
                if seconds is None:
                    break
                # Out of reach of caches, a thin product is bound by memory instead.
                move_seconds = (x.nbytes + y.nbytes + product.nbytes) / bandwidth
                if probe.device.type == "cpu" or move_seconds < 0.5 * seconds:
                    dims = ProductDims(m, n, k)
                    points.append((2.0 * m * k * n, dims, seconds))
        finally:
            torch.set_float32_matmul_precision(before)
        if len(points) > 3:
            yield name, fit_peak(points)


# Bytes of operands that are used in turn: more than caches hold, as in a step, where a
# product reads what was made or read long before.
_COLD = 1 << 26


def _in_turn(
    fn: Callable[..., Any], *operands: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a function that calls ``fn`` on one copy of its operands after another."""
    nbytes = sum(x.nbytes for x in operands)
    copies = [operands]
    for _ in range(min(_COLD // nbytes, 256)):
        copies.append(tuple(x.detach().clone() for x in operands))
    turns = itertools.cycle(copies)
    return lambda: fn(*next(turns))


def families(probe: Probe) -> Iterator[tuple[str, Peak]]:
    """Yield the peaks of convolution and attention, forward and backward, by dtype."""
    suite = probe.suite
    for name in suite.families:
        dtype = getattr(torch, name)
        yield from _family(probe, dtype, "convolution", _convolved, suite.convolved)
        yield from _family(probe, dtype, "attention", _attended, suite.attended)


# A case: operands, the op, flops forward and backward, dims.
_Case = tuple[
    list[torch.Tensor], Callable[..., torch.Tensor], float, float, ProductDims
]


def _family(
    probe: Probe,
    dtype: torch.dtype,
    name: str,
    make: Callable[..., _Case],
    shapes: tuple[Shape, ...],
) -> Iterator[tuple[str, Peak]]:
    """Yield the peaks of one family of ops, forward and backward, in one dtype."""
    points: dict[str, list[ContractionPoint]] = {name: [], f"{name} backward": []}
    for shape in shapes:
        operands, op, flops, late_flops, dims = make(probe.device, dtype, *shape)
        seconds = probe.median(_in_turn(op, *operands))
        leaves = [x.requires_grad_() for x in operands]
        result = op(*leaves)
        back = partial(
            torch.autograd.grad,
            result,
            leaves,
            torch.ones_like(result),
            retain_graph=True,
        )
        back_seconds = probe.median(back)
        if seconds is None or back_seconds is None:
            break
        points[name].append((flops, dims, seconds))
        points[f"{name} backward"].append((late_flops, dims, back_seconds))
    for key, measured in points.items():
        if len(measured) > 2:
            yield f"{str(dtype).removeprefix('torch.')} {key}", fit_peak(measured)


def masked(probe: Probe) -> float | None:
    """Return the time of a pair that a causal mask hides, as a share of that of other
    pairs: 0 if attention skips it; None if nothing is measured."""
    if not probe.suite.attended:
        return None
    dtype = getattr(torch, probe.suite.families[0])
    operands, op, *_ = _attended(probe.device, dtype, *probe.suite.attended[-1])
    whole = probe.median(_in_turn(op, *operands))
    causal = probe.median(_in_turn(partial(op, is_causal=True), *operands))
    if whole is None or causal is None:
        return None
    length = operands[0].shape[-2]
    seen = (length + 1) / (2 * length)
    return min(max((causal / whole - seen) / (1 - seen), 0.0), 1.0)


def _convolved(device: torch.device, dtype: torch.dtype, *shape: int) -> _Case:
    """Return a case of a convolution."""
    samples, before, after, side, window = shape
    x = torch.rand(samples, before, side, side, device=device, dtype=dtype)
    weight = torch.rand(after, before, window, window, device=device, dtype=dtype)
    points, inner = samples * side * side, before * window * window
    flops = 2.0 * points * after * inner
    dims = ProductDims(points, after, inner)
    return [x, weight], partial(F.conv2d, padding="same"), flops, 2 * flops, dims


def _attended(device: torch.device, dtype: torch.dtype, *shape: int) -> _Case:
    """Return a case of attention."""
    samples, heads, length, width = shape
    x = [torch.rand(*shape, device=device, dtype=dtype) for _ in range(3)]
    pairs = float(samples * heads * length * length * width)
    op = F.scaled_dot_product_attention
    return x, op, 4 * pairs, 10 * pairs, ProductDims(length, length, width)


# For a collective: ranks, bytes on each before, seconds.
Point = tuple[float, float, float]
# For a contraction: flops, dims, seconds.
ContractionPoint = tuple[float, ProductDims, float]

_TIE = 0.01  # weight of a fit's starting point, compared with 1 for each point


def fit_peak(points: Sequence[ContractionPoint]) -> Peak:
    """Return the curve nearest to the seconds of some contractions."""
    rows = [(flops, dims.m, dims.n, dims.k, seconds) for flops, dims, seconds in points]
    flops, m, n, k, seconds = np.array(rows).T
    dims = ProductDims(m, n, k)

    def peak_of(p: Sequence[float] | np.ndarray) -> Peak:
        peak, half_flops, half_dim, half_contracted = p
        return Peak(peak, 1.0, half_flops, half_dim, half_contracted)

    def model(p: np.ndarray) -> np.ndarray:
        return flops / peak_of(p).rate(flops, dims)

    least_outer, least_contracted = float(min(m.min(), n.min())), float(k.min())
    start = [float((flops / seconds).max()), float(flops.min())]
    return peak_of(fit(model, [*start, least_outer, least_contracted], seconds))


def fit_collective(kind: str, points: Sequence[Point]) -> Link:
    """Return overhead, latency and bandwidth nearest to (ranks, bytes, seconds) of some
    collectives. Groups of one size do not separate overhead from latency: it is 0
    then."""
    count, nbytes, seconds = np.array(points).T

    def of_groups(link: Link, size: float) -> np.ndarray:
        meshes = (Mesh((("x", int(n)),), (link,)) for n in count)
        return np.array([along(kind, m, m.names).seconds(size) for m in meshes])

    steps = of_groups(Link(math.inf, 1.0), 0.0)
    sent_share = of_groups(Link(1.0, 0.0), 1.0)
    several = len(set(count)) > 1

    def model(p: np.ndarray) -> np.ndarray:
        once = p[2] if several else 0.0
        return once + steps * p[0] + sent_share * nbytes / p[1]

    start = [
        float(seconds.min() / steps.max()),
        float((sent_share * nbytes / seconds).max()),
        float(seconds.min()),
    ]
    fitted = fit(model, start[: 3 if several else 2], seconds)
    return of_kind(fitted[2] if several else 0.0, fitted[0], fitted[1])


def fit(
    model: Callable[[np.ndarray], np.ndarray], start: Sequence[float], seconds: Any
) -> list[float]:
    """Return positive parameters whose ``model`` is nearest to ``seconds`` in ratio:
    least squares of logarithms, by Levenberg and Marquardt's method. Parameters that
    the points do not determine stay close to ``start``."""
    from scipy.optimize import least_squares

    begin, target = np.log(start), np.log(seconds)

    def off(at: np.ndarray) -> np.ndarray:
        return np.append(np.log(model(np.exp(at))) - target, _TIE * (at - begin))

    return [float(x) for x in np.exp(least_squares(off, begin, method="lm").x)]
