"""This module finds this process's rank in the mesh, and makes groups along its axes.

In: options. Out: ``Ranks``, which names the groups along mesh axes. An existing process
group is used as it is; without one, one is started from torchrun's environment. A group
is made when it is first needed, by its members only, which must need groups in the same
order, as ranks that bind the same graph do. Where each rank feeds its own part of the
batch, the axes of the batch are *manual*: the program of one place along them is
planned, on a mesh where they have one rank. Never: a group of which a member is
missing.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import itertools
import math
import os
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import DeviceError, FxparError, MeshError
from fxpar.runtime.ranks import meeting, worlds
from fxpar.runtime.ranks.presence import patience_limit, set_timeouts
from fxpar.runtime.ranks.worlds import World
from fxpar.sharding.manual_axes import ManualAxes, planned_mesh
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import with_planned_axis
from fxpar.sharding.plan_request import read_auto
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Seconds in which gloo's threads let go of the tensors of their last collective. One
# that still holds a tensor when Python ends aborts the process.
SETTLE = 0.05


@dataclass
class _Life:
    """Holds everything that ends with one default process group."""

    group: weakref.ref[Any]  # the default process group
    names: dict[Any, str] = field(default_factory=dict)  # of groups, by mesh and axes
    device_meshes: dict[Any, Any] = field(default_factory=dict)  # by mesh
    mesh: Mesh | None = None  # chosen for FXPAR_MESH=auto
    # Names of the worlds in which each rank is known to have a device of its own.
    devices_checked: set[str] = field(default_factory=set)
    places: dict[str, World] = field(default_factory=dict)  # worlds of this process


_lives: list[_Life] = []  # the current one, if any


def _life() -> _Life:
    """Return the current life; names made in an ended one are not valid any more."""
    world = _torch.distributed.default_group()
    assert world is not None, "there is no process group"
    if not _lives or _lives[0].group() is not world:
        _torch.distributed.forget_meshes()
        _lives[:] = [_Life(weakref.ref(world))]
    return _lives[0]


_alone = itertools.count()  # graphs compiled without a process group


def next_graph() -> int:
    """Return the number of a new graph; ranks that run the same program get the same. A
    new process group counts from 0, since its ranks may be other processes."""
    return next(_graphs())


def coming_graph() -> int:
    """Return the number that the next graph will have."""
    return next(copy.copy(_graphs()))


def _graphs() -> Iterator[int]:
    world = worlds.current()
    return _alone if world is None else world.graphs


@dataclass(frozen=True)
class Ranks:
    """Is this process's rank in the mesh, with the process groups of its axes."""

    mesh: Mesh  # of all ranks, or of one place where axes are manual
    rank: int
    open: bool = False  # the mesh is not chosen yet: it is one axis over all ranks
    world: World | None = None  # the ranks of the mesh, if they are not all
    # Axes of the batch, of which each place is fed its own part.
    manual: ManualAxes | None = None

    @property
    def whole(self) -> Ranks:
        """Return all ranks on the whole mesh, over which parameters are sharded."""
        if self.manual is None or self.world is None:
            return self
        return Ranks(self.manual.mesh, self.world.ranks[self.rank])

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Let this thread inside meet only the ranks of the mesh."""
        return worlds.inside(self.world)

    def group(self, axes: Sequence[str]) -> str:
        """Return the name of this rank's process group along ``axes``. Along manual
        axes it has all ranks, though the mesh has one."""
        if self.manual is None:
            return group_of(self.mesh, axes)
        several = [
            axis
            for axis in axes
            if axis in self.manual.axes or self.mesh.axis_size(axis) > 1
        ]
        return group_of(self.manual.mesh, several)

    def dtensor(self, local: torch.Tensor, spec: Spec) -> Any:
        """Return the DTensor of which ``local`` is this rank's part."""
        from torch.distributed.tensor import DTensor

        # A part of an axis is a dim of its own of the DeviceMesh.
        mesh = self.mesh.refined(spec.joined(self.mesh).axes)
        device_type = local.device.type
        return DTensor.from_local(
            local,
            device_mesh_of(mesh, device_type)
            if self.world is None
            else _device_mesh_of_place(self, mesh, device_type),
            spec.joined(mesh).to_placements(mesh),
            run_check=False,
        )


def join(options: Options) -> Ranks:
    """Return this process's rank in the mesh; start a process group if there is none.

    Raises MeshError if mesh and processes do not fit, FxparError if torchrun's
    environment is incomplete.
    """
    set_timeouts(options.timeout, options.late_timeout)
    size = ensure_process_group(options.mesh)
    mesh = resolve_mesh(options, size)
    is_local = options.inputs == "local"
    # With parts of the batch there is no choice: all axes would be those of the batch.
    chooses = read_auto(options.mesh) is not None and not is_local
    if chooses and size > 1 and (chosen := _life().mesh) is not None:
        return Ranks(chosen, dist.get_rank())
    if options.mesh is not None and hasattr(options.mesh, "mesh_dim_names"):
        _life().device_meshes[mesh.axes, options.mesh.device_type] = options.mesh
    rank = dist.get_rank() if size > 1 else 0
    axes = [a for a in batch_axes(mesh) if mesh.axis_size(a) > 1] if is_local else ()
    if axes:  # else the batch has one part
        return _in_place(ManualAxes(mesh, tuple(axes)), rank)
    return Ranks(mesh, rank, chooses)


def _in_place(manual: ManualAxes, rank: int) -> Ranks:
    """Return the ranks of the place of ``rank``, this process."""
    mesh = manual.mesh
    others = [axis for axis in mesh.names if axis not in manual.axes]
    members = mesh.group(rank, others)
    part = mesh.index(rank, manual.axes)
    name = f"{_axes_text(mesh)}/{'+'.join(manual.axes)}/{part}"
    life = _life()
    world = life.places.get(name)
    if world is None:
        world = life.places[name] = World(
            name,
            members,
            members.index(rank),
            life.group,
            lambda: _torch.distributed.group_named(group_of(mesh, others)),
            part,
            mesh.count(manual.axes),
        )
        with worlds.inside(world):
            meeting.current()  # what others of the place wait for is known from now on
    return Ranks(
        planned_mesh(mesh, manual.axes), world.rank, world=world, manual=manual
    )


def _axes_text(mesh: Mesh) -> str:
    """Return axes of a mesh and their sizes as a text, without parts, speeds and
    links."""
    return ",".join(f"{name}={size}" for name, size in mesh.unrefined.axes)


def settle(ranks: Ranks, mesh: Mesh) -> Ranks:
    """Return the ranks on the mesh that a plan chose. ``FXPAR_MESH=auto`` is that mesh
    from now on: graphs that are compiled later share its groups and parameters."""
    mesh = Mesh(mesh.unrefined.axes)
    if ranks.mesh.size > 1:
        life = _life()
        life.mesh = life.mesh or mesh
    return replace(ranks, mesh=mesh, open=False)


def ensure_process_group(mesh: Any = None) -> int:
    """Return the number of ranks; start a process group from torchrun's environment if
    there is none. One process without that environment is one rank without a group.

    ``mesh`` is compared with the environment before anything waits for other processes.
    Raises MeshError if they differ, FxparError if the environment is incomplete.
    """
    group = _torch.distributed.default_group()
    if group is None:
        if not is_launched(os.environ):
            return 1
        resolve_mesh(Options(mesh=mesh), int(os.environ["WORLD_SIZE"]))
        _start()
        atexit.register(_end)
    else:
        _settle_at_exit()
    return dist.get_world_size()


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun set the environment. Raises FxparError if only a part of
    its variables is set."""
    unset = [name for name in ENVIRONMENT if not environ.get(name)]
    if unset and int(environ.get("WORLD_SIZE") or 1) > 1:
        raise FxparError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {', '.join(unset)} not set",
            fix="start with torchrun, or call torch.distributed.init_process_group",
        )
    return not unset


def _start() -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local < torch.cuda.device_count() and torch.cuda.current_device() == 0:
            torch.cuda.set_device(local)
    dist.init_process_group(backend)


def _end() -> None:
    """Leave the process group without waiting for other ranks, which may have
    failed."""
    _lives.clear()
    if _torch.distributed.default_group() is not None:
        dist.destroy_process_group()
        time.sleep(SETTLE)


@functools.cache
def _settle_at_exit() -> None:
    """Wait as ``_end`` does when the process ends, and leave the user's process group
    to the user."""
    atexit.register(time.sleep, SETTLE)


def resolve_mesh(options: Options, world_size: int) -> Mesh:
    """Return the mesh of the options; by default, and while it is to be chosen, one
    axis dp over all ranks.

    Raises MeshError if it cannot be read or has another number of ranks.
    """
    requested, auto = options.mesh, read_auto(options.mesh)
    if requested is None:
        return Mesh((("dp", world_size),))
    if auto:
        mesh = Mesh((("dp", auto.ranks or world_size),))
    elif hasattr(requested, "mesh_dim_names"):
        mesh = Mesh.from_device_mesh(requested)
    else:
        mesh = with_planned_axis(Mesh.parse(requested))
    if mesh.size != world_size:
        runs = "1 process runs" if world_size == 1 else f"{world_size} processes run"
        raise MeshError(
            f"mesh {requested if auto else mesh} has {mesh.size} ranks, but {runs}",
            fix=f"start {mesh.size} processes (on one host: torchrun --nproc-per-node "
            f"{mesh.size}), or choose a mesh of {world_size}, as FXPAR_MESH=dp="
            f"{world_size}",
        )
    return mesh


def group_of(mesh: Mesh, axes: Sequence[str]) -> str:
    """Return the name of the process group of this rank along ``axes``. It is equal on
    all ranks, so that programs with the name in them are.

    All members must call this, in the same order. Raises MeshError on an unknown axis,
    RankMismatchError if a member is missing.
    """
    count = mesh.count(axes)
    world = _torch.distributed.default_group()
    assert world is not None, "a group needs a process group"
    if count == world.size():
        return world.group_name
    names = _life().names
    several = mesh.ordered([a for a in axes if mesh.axis_size(a) > 1])
    mesh = mesh.unrefined
    key = mesh.axes, mesh.joined(several)
    if key not in names:
        axes_text, members = "+".join(key[1]), mesh.group(world.rank(), key[1])
        name = f"{_axes_text(mesh)}/{axes_text}"
        own_name = _meet_members(members, name)
        _torch.distributed.make_group(own_name, members, f"fxpar:{axes_text}")
        _torch.distributed.also_named(own_name, name)
        names[key] = name
    return names[key]


def _meet_members(members: Sequence[int], name: str) -> str:
    """Return once all members of a process group are about to make it, with a name
    that no other group has or had. Raises RankMismatchError if one does not come."""
    every, seconds = meeting.all_ranks(), patience_limit()
    if every is None:
        return f"fxpar/group/{name}/{members[0]}"
    life, rank = _life().group, members.index(every.rank)
    # Places along an axis have names such as "dp=2/dp/0", too.
    own_name = f"group/{name}/{members[0]}"
    with worlds.inside(World(own_name, members, rank, life, life)):
        meeting.meet(f"the process group {name}", "", seconds=seconds)
    return f"{every.prefix}/{own_name}"


def axes_of_group(group: str) -> tuple[str, ...] | None:
    """Return the axes of a group that was made here; None: it has all ranks."""
    return next((k[1] for k, name in _life().names.items() if name == group), None)


def bandwidth_of(mesh: Mesh, group: str) -> float:
    """Return the bytes/s of the slowest link in a group that was made here."""
    axes = axes_of_group(group) or mesh.names
    links = [(mesh.link(a), mesh.axis_size(a)) for a in axes if mesh.has(a)]
    rates = [
        link.inner.bandwidth if link.inner and size <= link.inside else link.bandwidth
        for link, size in links
        if size > 1
    ]
    return min(rates, default=math.inf)


def device_mesh_of(mesh: Mesh, device_type: str) -> Any:
    """Return the DeviceMesh with the axes of ``mesh``: the user's own, or one made
    once."""
    from torch.distributed.device_mesh import init_device_mesh

    meshes = _life().device_meshes
    key = mesh.axes, device_type
    if key not in meshes:
        meshes[key] = init_device_mesh(
            device_type, tuple(size for _, size in mesh.axes), mesh_dim_names=mesh.names
        )
    return meshes[key]


def _device_mesh_of_place(ranks: Ranks, mesh: Mesh, device_type: str) -> Any:
    """Return the DeviceMesh of a place, with the axes of ``mesh``, over its ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    assert ranks.world is not None
    meshes = _life().device_meshes
    key = ranks.world.name, mesh.axes, device_type
    if key not in meshes:
        several = [[axis] if size > 1 else [] for axis, size in mesh.axes]
        names = map(ranks.group, several)
        meshes[key] = DeviceMesh.from_group(
            list(map(_torch.distributed.group_named, names)),
            device_type,
            torch.tensor(ranks.world.ranks).view([size for _, size in mesh.axes]),
            mesh_dim_names=mesh.names,
        )
    return meshes[key]


def has_device_mesh(device_mesh: Any) -> bool:
    """Return whether a DeviceMesh is equal to one that ``device_mesh_of`` returned."""
    return device_mesh in _life().device_meshes.values()


def check_devices(device: torch.device) -> None:
    """Check once that the ranks of this world have different CUDA devices, as NCCL
    needs.

    Raises DeviceError if ranks share one, RankMismatchError if a rank does not answer.
    """
    world = worlds.current()
    if device.type != "cuda" or world is None or world.size == 1:
        return
    checked = _life().devices_checked
    if world.name in checked or "cuda:nccl" not in dist.get_backend_config():
        return
    identity = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    texts = meeting.gather("devices", "\n".join(identity))
    hosts, devices = zip(*(text.split("\n") for text in texts), strict=True)
    check_sharing(hosts, devices)
    checked.add(world.name)


def check_sharing(hosts: Sequence[str], devices: Sequence[str]) -> None:
    """Raise DeviceError if ranks of one host use the same device.

    ``hosts``, ``devices``: one entry per rank of this world.
    """
    users: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(zip(hosts, devices, strict=True)):
        users.setdefault(place, []).append(worlds.global_rank(rank))
    for (host, device), ranks in users.items():
        if len(ranks) > 1:
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} on host {host} use one CUDA "
                f"device ({device})",
                fix="torchrun --virtual-local-rank gives each process a device of its "
                'own; or call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) '
                "before the model is made. With more ranks than devices, run on CPU",
            )


# On modules and parameters that ``fxpar.shard`` lays out: their model's
# ``sharded_modules.Home``.
HOME = "_fxpar_home"
