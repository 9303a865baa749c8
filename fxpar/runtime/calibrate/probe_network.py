"""Measure collectives, alone and overlapping with kernels, for ``calibrate``.

In: a ``Probe``. Out: the levels of a network, fitted to medians, and the share of time
that is lost where kernels overlap with a collective. Runs the collectives that fxpar
emits, along the axes of the mesh, all groups at once. Never: a program of the user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from fxpar.errors import MeshError
from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
from fxpar.runtime.calibrate.probe_device import Point, Probe, fit_collective
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware_table import Hardware, Level
from fxpar.sharding.mesh import Mesh

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
    for size in probe.suite.sizes:
        nbytes = size // count if kind == "all_gather" else size
        n = max(1, nbytes // 4 // count) * count
        x = torch.zeros(n, device=probe.device)
        seconds = probe.median(partial(RUN[kind], x, count, group, me))
        if seconds is None:
            return
        yield count, float(x.nbytes), seconds


def _all_gather(x: torch.Tensor, count: int, group: str, me: int) -> None:
    if x.device.type == "cpu":  # as give_outputs
        gathered = torch.ops.fxpar.all_gather_into_tensor(x, count, group)
        torch.ops.fxpar.wait_gather(gathered)
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


# How each collective of ``reshard.steps`` is run, along one group.
RUN: dict[str, Callable[[torch.Tensor, int, str, int], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
