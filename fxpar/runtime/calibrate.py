"""Measure this machine: ``python -m fxpar calibrate``.

In: the device of this process and, if it is one of several ranks, their mesh. Out: a
``Hardware`` of rates fitted to medians. All ranks compute at once, as during a step, so
that what they share (cores, memory bus, network) is shared while it is measured. Runs
the collectives that fxpar emits and no program of the user; writes no file.

Bounded in time: once ``limit`` seconds have passed on any rank, all ranks leave out the
points that remain. ``spawn`` ends its ranks some time after that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxpar.config import Options
from fxpar.errors import DeviceError, FxparWarning, MeshError, compose
from fxpar.passes import ops  # noqa: F401  (defines the gather that runs on CPU)
from fxpar.runtime import agree, groups
from fxpar.runtime.fit import Point, fit_collective, fit_peak
from fxpar.sharding import collectives
from fxpar.sharding.hardware import Hardware, Level, Peak, detect
from fxpar.sharding.mesh import Link, Mesh

_C10D = torch.ops._c10d_functional

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class _Suite:
    """What is measured. ``shapes``: m, k, n of matrix products, some with one small dim
    for ``Peak.half_dim``. ``stream``: elements of the triad's tensors, more than caches
    hold. ``sizes``: bytes of the largest tensor of a collective."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    stream: int
    sizes: tuple[int, ...]


def _cubes(*sizes: int) -> tuple[Shape, ...]:
    return tuple((n, n, n) for n in sizes)


_SUITES = {
    "cpu": _Suite(
        _cubes(32, 64, 128, 256, 512, 1024)
        + ((512, 512, 16), (512, 16, 512), (16, 512, 512), (1024, 64, 1024)),
        ("float32", "bfloat16", "float64"),
        1 << 24,
        tuple(1 << n for n in range(10, 25, 2)),
    ),
    "cuda": _Suite(
        _cubes(256, 512, 1024, 2048, 4096, 8192)
        + ((8192, 8192, 64), (8192, 128, 8192), (8192, 256, 8192)),
        ("float32", "tf32", "bfloat16", "float16", "float64"),
        1 << 28,
        tuple(1 << n for n in range(10, 29, 2)),
    ),
    "quick": _Suite(
        ((*_cubes(64, 128, 256), (256, 16, 256))),
        ("float32",),
        1 << 22,
        (1 << 10, 1 << 14, 1 << 18, 1 << 20),
    ),
}


@dataclass(frozen=True)
class _Device:
    """One calibration on this rank; ``mesh`` has one rank if there are no others."""

    device: torch.device
    ranks: groups.Ranks
    end: float
    quick: bool

    @property
    def suite(self) -> _Suite:
        return _SUITES["quick" if self.quick else self.device.type]

    def median(self, fn: Callable[[], Any]) -> float | None:
        """Seconds a call takes: the median of five or more, on the slowest rank. None
        once time is up. Ranks call it together, and ``fn`` equally often."""
        fn()
        pilot, late = self._worst(self._time(fn, 1), time.monotonic() - self.end)
        if late > 0:
            return None
        calls = int(min(max(0.01 / pilot, 1), 5000))
        if self.ranks.mesh.size > 1:
            dist.barrier()
        taken = [self._time(fn, calls) for _ in range(5 if pilot > 0.05 else 11)]
        return self._worst(statistics.median(taken))[0]

    def _time(self, fn: Callable[[], Any], calls: int) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                fn()
            return (time.perf_counter() - begin) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def _worst(self, *values: float) -> list[float]:
        texts = agree.gather("calibrate", " ".join(map(repr, values)))
        return [max(column) for column in zip(*map(_numbers, texts), strict=True)]

    def compiled(self, fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """``fn`` through Inductor; as it is if quick, or if that fails on any rank."""
        made, failed = fn, ""
        if not self.quick:
            try:
                made = torch.compile(fn, dynamic=False)
                made(*args)
            except Exception as error:  # no compiler, or one that does not work
                failed = f"{type(error).__name__}: {error}".splitlines()[0]
        if self._worst(float(bool(failed)))[0]:
            what = f"nothing compiles here, so eager ops were measured ({failed})"
            warnings.warn(compose(what), FxparWarning, stacklevel=2)
            return fn
        return made


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def calibrate(
    mesh: str | Mesh | None = None, *, quick: bool = False, limit: float = 300.0
) -> Hardware:
    """Measure this device and, on several ranks, the links between them.

    Every rank calls it and gets the same result. ``mesh``: its axes are measured one by
    one; default one axis of all ranks, or two if there are several nodes. ``quick``:
    few points, nothing compiled. ``limit``: seconds. Raises MeshError if mesh and ranks
    do not fit, or an axis lies partly in a node and partly between nodes.
    """
    size = groups.ensure_process_group(mesh)
    ranks = groups.join(Options(mesh=mesh or _default_mesh(size)))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
    running = _Device(
        torch.device(device), ranks, time.monotonic() + limit, quick=quick
    )
    groups.check_devices(running.device)
    base = _base()
    bandwidth = _bandwidth(running) or base.bandwidth
    eager, launch = _launches(running)
    levels = _levels(running, base)
    peaks = dict(base.peaks) | dict(_peaks(running, bandwidth))
    return Hardware(
        torch.cuda.get_device_name() if cuda else "cpu",
        tuple(peaks.items()),
        bandwidth,
        _memory(running),
        launch or base.launch,
        eager or base.eager_launch,
        levels,
        f"measured with {size} ranks on mesh {ranks.mesh}, "
        f"{torch.get_num_threads()} threads each, torch {torch.__version__}",
    )


def _local(size: int) -> int:
    """Ranks in a node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or size)


def _default_mesh(size: int) -> Mesh:
    local = _local(size)
    if local < size:
        return Mesh((("node", size // local), ("device", local)))
    return Mesh((("device", size),))


def _base() -> Hardware:
    """What stands in for figures that are not measured."""
    try:
        return detect()
    except DeviceError:
        eager = 1e-5
        peaks = (("float32", Peak(1e13)),)
        levels = (Level(0, Link().bandwidth, Link().latency),)
        return Hardware("", peaks, 1e12, 0.0, eager, eager, levels)


def _memory(running: _Device) -> float:
    if running.device.type == "cuda":
        return float(torch.cuda.get_device_properties(running.device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(whole // _local(running.ranks.mesh.size))


def _bandwidth(running: _Device) -> float | None:
    """Bytes/s of the triad a = b + 2 c, as STREAM counts them."""
    n = running.suite.stream
    b, c = (torch.ones(n, device=running.device) for _ in range(2))
    a = torch.empty_like(b)

    def triad(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        torch.add(b, c, alpha=2, out=a)

    run = running.compiled(triad, a, b, c)
    seconds = running.median(partial(run, a, b, c))
    return 3 * b.nbytes / seconds if seconds else None


def _launches(running: _Device) -> tuple[float | None, float | None]:
    """Seconds of a tiny op: run eagerly, and one more in a compiled graph."""
    x = torch.zeros(8, 8, device=running.device)
    eager = running.median(partial(torch.add, x, x))
    if running.quick:
        return eager, eager
    taken = []
    for count in (4, 36):

        def chain(x: torch.Tensor, count: int = count) -> torch.Tensor:
            for _ in range(count):
                # A product and a fused region, which Inductor keeps apart.
                x = torch.relu(torch.mm(x, x) - 1)
            return x

        run = running.compiled(chain, x)
        taken.append(running.median(partial(run, x)))
    few, many = taken
    if few is None or many is None:
        return eager, eager
    return eager, max(many - few, 1e-7) / (2 * 32)


def _peaks(running: _Device, bandwidth: float) -> Iterator[tuple[str, Peak]]:
    """The peak of each dtype in the suite, fitted to matrix products."""
    for name in running.suite.dtypes:
        dtype = getattr(torch, "float32" if name == "tf32" else name)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        points = []
        try:
            for m, k, n in running.suite.shapes:
                x = torch.rand(m, k, device=running.device).to(dtype)
                y = torch.rand(k, n, device=running.device).to(dtype)
                out = torch.mm(x, y)
                seconds = running.median(partial(torch.mm, x, y, out=out))
                if seconds is None:
                    break
                # Out of reach of caches, a thin product is bound by memory instead.
                moved = (x.nbytes + y.nbytes + out.nbytes) / bandwidth
                if running.device.type == "cpu" or moved < 0.5 * seconds:
                    points.append((2.0 * m * k * n, float(min(m, k, n)), seconds))
        finally:
            torch.set_float32_matmul_precision(before)
        if len(points) > 3:
            yield name, fit_peak(points)


def _levels(running: _Device, base: Hardware) -> tuple[Level, ...]:
    """The network: where an axis was measured, its level, elsewhere that of ``base``.

    Groups of several sizes in a node tell the overhead of a collective from its
    latency; of one size, all counts as latency.
    """
    mesh = running.ranks.mesh
    local = _local(mesh.size)
    axes = [name for name, size in mesh.axes if size > 1]
    wanted = [[name] for name in axes]
    if len(axes) > 1 and local == mesh.size:
        wanted.append(axes)
    found: dict[bool, dict[str, list[Point]]] = {False: {}, True: {}}
    for some in wanted:
        crosses = _crosses(mesh, some, local)
        for kind in collectives.KINDS:
            points = list(_collective(running, kind, some))
            found[crosses].setdefault(kind, []).extend(points)
    inner, *outer = base.levels
    if any(found[False].values()):
        # Of a node that is not all in use, ``base`` knows the size.
        devices = inner.devices and max(inner.devices, local)
        inner = replace(_level(found[False]), devices=devices)
    if any(found[True].values()):
        inner, outer = replace(inner, devices=local), [_level(found[True])]
    return (inner, *outer)


def _level(found: dict[str, list[Point]]) -> Level:
    """A level of any number of devices, its own figures those of all-reduce if it was
    measured."""
    kinds = {k: fit_collective(k, points) for k, points in found.items() if points}
    usual = kinds.get("all_reduce") or next(iter(kinds.values()))
    return Level(
        0,
        usual.bandwidth,
        usual.latency,
        usual.overhead,
        kinds=tuple(kinds.items()),
    )


def _crosses(mesh: Mesh, axes: Sequence[str], local: int) -> bool:
    """Whether groups have one rank in each node, rather than all in one."""
    nodes = [len({rank // local for rank in group}) for group in mesh.groups(axes)]
    if max(nodes) == 1:
        return False
    if min(nodes) == mesh.count(axes):
        return True
    raise MeshError(
        f"groups of axis {'+'.join(axes)} lie partly in a node of {local} ranks, "
        "partly between nodes",
        fix=f"calibrate on a mesh as node={mesh.size // local},device={local}",
    )


def _collective(running: _Device, kind: str, axes: Sequence[str]) -> Iterator[Point]:
    """(ranks, bytes on each before, seconds) of a collective along axes, all groups at
    once."""
    ranks = running.ranks
    count, group = ranks.mesh.count(axes), ranks.group(axes)
    me = ranks.mesh.index(ranks.rank, ranks.mesh.ordered(axes))
    for size in running.suite.sizes:
        nbytes = size // count if kind == "all_gather" else size
        n = max(1, nbytes // 4 // count) * count
        x = torch.zeros(n, device=running.device)
        seconds = running.median(partial(_RUN[kind], x, count, group, me))
        if seconds is None:
            return
        yield count, float(x.nbytes), seconds


def _all_gather(x: torch.Tensor, count: int, group: str, me: int) -> None:
    if x.device.type == "cpu":  # as passes.schedule.give_outputs
        out = torch.ops.fxpar.all_gather_into_tensor(x, count, group)
        torch.ops.fxpar.wait_gather(out, x)
    else:
        _C10D.wait_tensor(_C10D.all_gather_into_tensor(x, count, group))


def _all_reduce(x: torch.Tensor, count: int, group: str, me: int) -> None:
    _C10D.wait_tensor(_C10D.all_reduce(x, "sum", group))


def _reduce_scatter(x: torch.Tensor, count: int, group: str, me: int) -> None:
    _C10D.wait_tensor(_C10D.reduce_scatter_tensor(x, "sum", count, group))


def _all_to_all(x: torch.Tensor, count: int, group: str, me: int) -> None:
    splits = [x.numel() // count] * count
    _C10D.wait_tensor(_C10D.all_to_all_single(x, splits, splits, group))


def _permute(x: torch.Tensor, count: int, group: str, me: int) -> None:
    receive, send = [0] * count, [0] * count
    receive[me - 1] = send[(me + 1) % count] = x.numel()
    _C10D.wait_tensor(_C10D.all_to_all_single(x, receive, send, group))


_RUN: dict[str, Callable[[torch.Tensor, int, str, int], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}


def spawn(ranks: int, arguments: Sequence[str], timeout: float) -> int:
    """Run ``python -m fxpar calibrate`` with these arguments on so many CPU ranks, a
    core for each; its exit status. All ranks are ended after ``timeout`` seconds."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault("OMP_NUM_THREADS", "1")
    root = str(Path(__file__).parents[2])  # this very fxpar, installed or not
    paths = [root, environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "fxpar", "calibrate"]
    child = subprocess.Popen(
        [*command, *arguments], env=environment, start_new_session=True
    )
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        print(f"calibrate: not done after {timeout:g} s", file=sys.stderr)
        return 1
    finally:
        # torchrun, told to end, ends its ranks within 30 s.
        for told in (signal.SIGTERM, signal.SIGKILL):
            if child.poll() is None:
                os.killpg(child.pid, told)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(40)


def describe(hardware: Hardware) -> str:
    """The figures, a line each, in units one can read."""
    lines = [f"{hardware.name}: {hardware.about}"]
    for name, peak in hardware.peaks:
        lines.append(
            f"  {name}: {peak.flops * peak.efficiency / 1e9:.4g} GFLOP/s; half of it "
            f"at {peak.half_flops:.2g} flop, or a dim of {peak.half_dim:.2g}"
        )
    lines.append(f"  memory: {hardware.bandwidth / 1e9:.4g} GB/s")
    launches = [f"{s * 1e6:.3g} us" for s in (hardware.launch, hardware.eager_launch)]
    lines.append(f"  launch: {launches[0]}, eager {launches[1]}")
    for level in hardware.levels:
        lines.append(f"  links of {level.devices or 'any number of'} devices:")
        rows: list[tuple[str, Any]] = [("else", level), *level.kinds]
        for kind, own in rows:
            lines.append(
                f"    {kind}: {own.overhead * 1e6:.4g} us, {own.latency * 1e6:.4g} us "
                f"a step, {own.bandwidth / 1e9:.4g} GB/s"
            )
    return "\n".join(lines)
