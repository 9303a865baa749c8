"""Measure this machine: ``python -m fxpar calibrate``.

In: the device of this process and, if it is one of several ranks, their mesh. Out: a
``Hardware`` of rates fitted to medians. All ranks compute at once, as during a step, so
that what they share (cores, memory bus, network) is shared while it is measured. Runs
the collectives that fxpar emits. Never: a program of the user run.

Collectives run along the axes of the mesh, all groups at once, alone and overlapping
with kernels. Bounded in time: once ``limit`` seconds have passed on any rank, all ranks
leave out the points that remain. ``spawn`` ends its ranks some time after that.

``measure_first`` measures the links between ranks once, at the first start of several;
on a CPU also how fast a core multiplies. Rank 0 keeps the figures on disk by device,
driver, ranks and versions, so that later starts make the same plans;
``hardware_table.detect`` gives them from then on, with the built-in ones of the device
for what is not measured. Not where ranks share a CUDA device.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist

from fxpar import _torch, cache_files
from fxpar.config import Options
from fxpar.errors import DeviceError, MeshError
from fxpar.graph import custom_ops
from fxpar.runtime.calibrate import probe_device
from fxpar.runtime.calibrate.probe_device import Point, Probe, fit, fit_collective
from fxpar.runtime.ranks import groups, meeting, presence, worlds
from fxpar.sharding.cost import collectives, hardware_table
from fxpar.sharding.cost.hardware_table import Hardware, Level, Peak, detect, scaled
from fxpar.sharding.mesh import Link, Mesh
from fxpar.units import digest


def calibrate(
    mesh: str | Mesh | None = None, *, quick: bool = False, limit: float = 300.0
) -> Hardware:
    """Measure this device and, on several ranks, the links between them.

    Every rank calls it and gets the same result. ``mesh``: its axes are measured one by
    one; default one axis of all ranks, or two if there are several nodes. ``quick``:
    few points, nothing compiled. ``limit``: seconds. Raises MeshError if mesh and ranks
    do not fit, or an axis is partly in a node and partly between nodes.
    """
    size = groups.ensure_process_group(mesh)
    ranks = groups.join(Options(mesh=mesh or default_mesh(size)))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
    probe = Probe(torch.device(device), ranks, time.monotonic() + limit, quick=quick)
    groups.check_devices(probe.device)
    base = _base()
    eager, launch = probe_device.launches(probe)
    tiny = (launch if cuda else eager) or 0.0
    *near, far = probe_device.streams(probe, tiny) or [(0.0, base.bandwidth)]
    network, loss = levels(probe, base), overlap_loss(probe)
    light = dict(base.light) | dict(probe_device.light(probe))
    peaks = dict(base.peaks) | dict(probe_device.peaks(probe, far[1]))
    peaks |= dict(probe_device.families(probe))
    share_masked = probe_device.masked(probe)
    return Hardware(
        torch.cuda.get_device_name() if cuda else "cpu",
        tuple(peaks.items()),
        far[1],
        _memory(probe),
        launch or base.launch,
        eager or base.eager_launch,
        network,
        f"measured with {size} ranks on mesh {ranks.mesh}, "
        f"{torch.get_num_threads()} threads each, torch {torch.__version__}",
        tuple(near),
        base.beside if loss is None else loss,
        tuple(light.items()),
        base.masked if share_masked is None else share_masked,
        local_ranks(size),
        probe_device.cores(probe),
    )


def default_mesh(size: int) -> Mesh:
    """Return one axis of all ranks, or one of nodes and one of the ranks of each."""
    local = local_ranks(size)
    if local < size:
        return Mesh((("node", size // local), ("device", local)))
    return Mesh((("device", size),))


def _base() -> Hardware:
    """Return the figures for all that is not measured."""
    try:
        return detect()
    except DeviceError:
        eager = 1e-5
        peaks = (("float32", Peak(1e13)),)
        levels = (Level(0, Link().bandwidth, Link().latency),)
        return Hardware("", peaks, 1e12, 0.0, eager, eager, levels)


def _memory(probe: Probe) -> float:
    """Return the bytes of memory for this rank."""
    if probe.device.type == "cuda":
        return float(torch.cuda.get_device_properties(probe.device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(whole // local_ranks(probe.ranks.mesh.size))


def spawn(ranks: int, arguments: Sequence[str], timeout: float) -> int:
    """Run ``python -m fxpar calibrate`` with these arguments on so many CPU ranks, a
    core for each, and return its exit status. All ranks are ended after ``timeout``
    seconds."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault("OMP_NUM_THREADS", "1")
    root = str(Path(__file__).parents[3])  # this very fxpar, installed or not
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
        print(f"calibrate: not finished after {timeout:g} s", file=sys.stderr)
        return 1
    finally:
        # torchrun, asked to end, ends its ranks within 30 s.
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if child.poll() is None:
                os.killpg(child.pid, signal_number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(40)


def _half_dims(peak: Peak) -> str:
    if peak.half_contracted is None:
        return f"a dim of {peak.half_dim:.2g}"
    return (
        f"an outer dim of {peak.half_dim:.2g}, "
        f"or a contracted one of {peak.half_contracted:.2g}"
    )


def describe(hardware: Hardware) -> str:
    """Return the figures, a line each, in readable units."""
    lines = [f"{hardware.name}: {hardware.about}"]
    for name, peak in hardware.peaks:
        lines.append(
            f"  {name}: {peak.flops * peak.efficiency / 1e9:.4g} GFLOP/s; half of it "
            f"at {peak.half_flops:.2g} flop, or {_half_dims(peak)}"
        )
    rates = [
        f"{rate / 1e9:.4g} GB/s up to {nbytes / 1e6:.3g} MB, "
        for nbytes, rate in hardware.near
    ]
    lines.append(f"  memory: {''.join(rates)}{hardware.bandwidth / 1e9:.4g} GB/s")
    launches = [f"{s * 1e6:.3g} us" for s in (hardware.launch, hardware.eager_launch)]
    lines.append(f"  launch: {launches[0]}, eager {launches[1]}")
    for level in hardware.levels:
        lines.append(f"  links of {level.devices or 'any number of'} devices:")
        rows: list[tuple[str, Any]] = [("else", level), *level.kinds]
        for kind, link in rows:
            lines.append(
                f"    {kind}: {link.overhead * 1e6:.4g} us, "
                f"{link.latency * 1e6:.4g} us a step, {link.bandwidth / 1e9:.4g} GB/s"
            )
    light = [f"{kind} {rate / 1e9:.3g} G/s" for kind, rate in hardware.light]
    lines.append(f"  light ops: {', '.join(light) or 'as fast as memory'}")
    lines.append(f"  lost while a collective runs: {hardware.beside:.2g} of its time")
    if hardware.cores:
        lines.append(f"  {hardware.ranks} ranks at work, {hardware.cores} cores")
    lines.append(f"  pairs that a mask hides: {hardware.masked:.2g} of others' time")
    return "\n".join(lines)


log = logging.getLogger("fxpar")

FORMAT = "fxpar hardware at start 1"

# After how many seconds remaining points are left out.
SECONDS = 2.0
# By device: how long calls are timed together, and how often; and the collectives that
# are measured, from which the figures of others follow.
_TIMED = {"cuda": (0.004, 11), "cpu": (0.015, 5)}
_KINDS = {
    "cuda": ("all_reduce", "all_gather"),
    "cpu": ("all_reduce", "all_gather", "all_to_all"),
}
# Rows of the product that says how fast a core is, and how long it is timed.
_SIDE, _MULTIPLIED = 384, 0.05

# Default process groups whose ranks have agreed.
_AGREED: WeakSet[Any] = WeakSet()


def measure_first(options: Options) -> None:
    """Let ``hardware_table.detect`` know the links of this machine, unless ``options``
    name hardware. All ranks call this together; after the first time it does nothing.

    Raises RankMismatchError if a rank does not come or cannot measure.
    """
    group = _torch.distributed.default_group()
    if options.hardware or not options.measure or group is None or group in _AGREED:
        return
    with worlds.inside(None):
        if not _device() or meeting.current() is None:
            return
        with meeting.reporting(), presence.works("measures links between ranks"):
            hardware_table.keep_measured()  # what another group measured
            hardware_table.keep_measured(*_agreed())
    _AGREED.add(group)


def _device() -> str:
    """Return the type of the devices between which ranks communicate; "" if it is not
    measured."""
    config = dist.get_backend_config()
    if torch.cuda.is_available():
        return "cuda" if "cuda:nccl" in config else ""
    return "cpu" if "cpu:gloo" in config and dist.get_world_size() > 1 else ""


def _agreed() -> tuple[Hardware, ...]:
    """Return the hardware that rank 0 kept, or that is measured now; none where there
    is nothing to measure."""
    size, places = dist.get_world_size(), meeting.gather("its device", _place())
    if not all(places) or len(set(places)) < size:
        return ()
    key = json.dumps(_facts(size))
    path = cache_files.folder() / f"{digest(key, 64)}.hardware.json"
    text: str | None = ""
    if meeting.is_leader():
        text = cache_files.read_record(path, FORMAT, key, _text_of)
    text = meeting.gather("hardware that was kept", text or "")[0]
    if not text:
        measured = _measured(size)
        ours = json.dumps(measured.to_record()) if measured else ""
        text = meeting.gather("hardware", ours)[0]
        if meeting.is_leader() and text:
            cache_files.write_record(path, FORMAT, key, {"hardware": text})
            log.info("measured links between %d ranks, kept in %s", size, path)
    return (hardware_table.read_figures(json.loads(text)),) if text else ()


def _text_of(record: dict[str, Any]) -> str:
    """Return the figures of a record as text; raises an error if they are not
    figures."""
    text = str(record["hardware"])
    hardware_table.read_figures(json.loads(text))
    return text


def _place() -> str:
    """Return this rank's machine and device, of which no other rank may have the same;
    "" if its figures are not known."""
    try:
        hardware_table.detect()
    except DeviceError:
        return ""
    if _device() == "cpu":
        return str(dist.get_rank())
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{socket.gethostname()} {device.uuid}"


def _facts(size: int) -> list[Any]:
    """Return what the figures depend on."""
    about = [size, os.environ.get("LOCAL_WORLD_SIZE"), torch.__version__]
    if _device() == "cpu":
        return [socket.gethostname(), os.cpu_count(), torch.get_num_threads(), *about]
    versions = _torch.version.driver_versions()
    return [torch.cuda.get_device_name(), *versions, *about]


def _measured(size: int) -> Hardware | None:
    """Return the figures of all ranks; None if nodes have different numbers of ranks,
    or several have no GPU, or time was too short."""
    local, kind = local_ranks(size), _device()
    if size % local or (kind == "cpu" and local < size):
        return None
    ranks = groups.Ranks(default_mesh(size), dist.get_rank())
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device(kind, torch.cuda.current_device())
    worlds.barrier()  # NCCL starts up at its first collective
    end, base = time.monotonic() + SECONDS, hardware_table.detect()
    with torch.no_grad():
        probe = Probe(device, ranks, end, True, *_TIMED[kind])
        if kind == "cpu":
            measured = _own_speed(probe, base)
        else:
            measured = replace(base, levels=levels(probe, base, _KINDS[kind]))
    if measured == base:
        return None
    return replace(measured, about=f"{base.about}; links measured with {size} ranks")


def _own_speed(probe: Probe, base: Hardware) -> Hardware:
    """Return the built-in hardware of a CPU at the speed of these ranks and their
    links: few points say more of one factor each than of every figure."""
    mesh = probe.ranks.mesh
    alone = replace(base, cores=probe_device.cores(probe))
    hardware = alone.with_ranks(mesh.size)
    longer = replace(probe, long=_MULTIPLIED)
    hardware = hardware.at_speed(probe_device.speed(longer, hardware, _SIDE))
    points = [(k, *x) for k in _KINDS["cpu"] for x in _collective(probe, k, mesh.names)]
    if not points:
        return base

    def at(factors: Any) -> Hardware:
        return replace(hardware, levels=(scaled(hardware.levels[0], *factors),))

    def predicted(factors: Any) -> Any:
        on = at(factors).on(mesh)
        own = {kind: collectives.along(kind, on, mesh.names) for kind in _KINDS["cpu"]}
        return np.array([own[kind].seconds(nbytes) for kind, _, nbytes, _ in points])

    seconds = np.array([point[-1] for point in points])
    return at(map(float, fit(predicted, [1.0, 1.0], seconds)))


_C10D = torch.ops._c10d_functional


def local_ranks(size: int) -> int:
    """Return how many of ``size`` ranks are in a node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or size)


def levels(
    probe: Probe, base: Hardware, kinds: Sequence[str] = collectives.KINDS
) -> tuple[Level, ...]:
    """Return the network: where an axis was measured, its level, elsewhere that of
    ``base``. ``kinds``: of collectives that are run.

    Groups of several sizes in a node separate the overhead of a collective from its
    latency; of one size, all counts as latency.
    """
    mesh = probe.ranks.mesh
    local = local_ranks(mesh.size)
    axes = [name for name, size in mesh.axes if size > 1]
    axis_sets = [[name] for name in axes]
    if len(axes) > 1 and local == mesh.size:
        axis_sets.append(axes)
    points_of: dict[bool, dict[str, list[Point]]] = {False: {}, True: {}}
    for axis_set in axis_sets:
        crosses = _is_across_nodes(mesh, axis_set, local)
        for kind in kinds:
            points = list(_collective(probe, kind, axis_set))
            points_of[crosses].setdefault(kind, []).extend(points)
    inner, *outer = base.levels
    if any(points_of[False].values()):
        # ``base`` knows the size of a node that is not all in use.
        devices = inner.devices and max(inner.devices, local)
        inner = replace(_level(points_of[False]), devices=devices)
    if any(points_of[True].values()):
        inner, outer = (
            replace(inner, devices=local, kinds=()),
            [_level(points_of[True])],
        )
    return (inner, *outer)


# Bytes of the all-reduce that overlaps with kernels.
_OVERLAPPING_BYTES = 1 << 22


def overlap_loss(probe: Probe) -> float | None:
    """Return the share of the shorter of both that is lost where kernels and a
    collective overlap: 0 if each goes on as if it were alone, 1 if they take turns;
    None if it is not measured."""
    ranks = probe.ranks
    mesh = ranks.mesh
    if mesh.size == 1 or probe.quick:
        return None
    axes = [name for name, size in mesh.axes if size > 1]
    if local_ranks(mesh.size) < mesh.size:
        axes = axes[:1]
    group = ranks.group(axes)
    x = torch.zeros(_OVERLAPPING_BYTES // 4, device=probe.device)
    y = torch.rand(256, 256, device=probe.device)

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(y, y)

    def both(times: int) -> None:
        pending = _C10D.all_reduce(x, "sum", group)
        work(times)
        _C10D.wait_tensor(pending)

    one = probe.median(partial(work, 1))
    collective_seconds = probe.median(partial(both, 0))
    if one is None or collective_seconds is None:
        return None
    times = max(1, round(collective_seconds / one))
    worked, together = (
        probe.median(partial(work, times)),
        probe.median(partial(both, times)),
    )
    if worked is None or together is None:
        return None
    share = (together - max(worked, collective_seconds)) / min(
        worked, collective_seconds
    )
    return min(max(share, 0.0), 1.0)


def _level(points_of: dict[str, list[Point]]) -> Level:
    """Return a level of any number of devices, its own figures those of all-reduce if
    it was measured."""
    kinds = {k: fit_collective(k, points) for k, points in points_of.items() if points}
    usual = kinds.get("all_reduce") or next(iter(kinds.values()))
    return Level(
        0, usual.bandwidth, usual.latency, usual.overhead, kinds=tuple(kinds.items())
    )


def _is_across_nodes(mesh: Mesh, axes: Sequence[str], local: int) -> bool:
    """Return whether groups have one rank in each node, rather than all in one. Raises
    MeshError if they have several in several nodes."""
    nodes = [len({rank // local for rank in group}) for group in mesh.groups(axes)]
    if max(nodes) == 1:
        return False
    if min(nodes) == mesh.count(axes):
        return True
    raise MeshError(
        f"groups of axis {'+'.join(axes)} are partly inside a node of {local} "
        "ranks, partly across nodes",
        fix=f"calibrate on a mesh as node={mesh.size // local},device={local}",
    )


def _collective(probe: Probe, kind: str, axes: Sequence[str]) -> Iterator[Point]:
    """Yield (ranks, bytes on each before, seconds) of a collective along axes, all
    groups at once."""
    ranks = probe.ranks
    count, group = ranks.mesh.count(axes), ranks.group(axes)
    me = ranks.mesh.index(ranks.rank, ranks.mesh.ordered(axes))

    def run(x: torch.Tensor) -> None:
        _C10D.wait_tensor(START[kind](x, count, group, me))

    for size in probe.suite.sizes:
        nbytes = size // count if kind == "all_gather" else size
        n = max(1, nbytes // 4 // count) * count
        x = torch.zeros(n, device=probe.device)
        seconds = probe.median(partial(run, x))
        if seconds is None:
            return
        yield count, float(x.nbytes), seconds


def _all_to_all(x: torch.Tensor, count: int, group: str, me: int) -> torch.Tensor:
    splits = [x.numel() // count] * count
    return _C10D.all_to_all_single(x, splits, splits, group)


def _permute(x: torch.Tensor, count: int, group: str, me: int) -> torch.Tensor:
    receive, send = [0] * count, [0] * count
    receive[me - 1] = send[(me + 1) % count] = x.numel()
    return _C10D.all_to_all_single(x, receive, send, group)


# How each collective of ``reshard.steps`` is started, along one group.
START: dict[str, Callable[[torch.Tensor, int, str, int], torch.Tensor]] = {
    "all_reduce": lambda x, count, group, me: _C10D.all_reduce(x, "sum", group),
    "all_gather": lambda x, count, group, me: custom_ops.all_gather(x, count, group),
    "reduce_scatter": lambda x, count, group, me: _C10D.reduce_scatter_tensor(
        x, "sum", count, group
    ),
    "all_to_all": _all_to_all,
    "permute": _permute,
}
