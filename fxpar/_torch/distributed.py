"""Reaches process groups, stores, symmetric memory and ops that communicate.

In: names of groups, and tensors. Out: groups, memory, messages under way. Never: a
collective that the caller did not ask for.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import define_op

# Ops that fxpar names and torch 2.11 lacks: this module defines them there.
NEWER = ("_c10d_functional::isend", "_c10d_functional::irecv")


def can_share_memory(x: torch.Tensor, group: str) -> bool:
    """Return whether the ranks of a group can use PyTorch's fused ops on symmetric
    memory: GPUs of one machine. Equal on all ranks of it."""
    if x.device.type != "cuda":
        return False
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    return _resolved(group).size() <= local == torch.distributed.get_world_size()


def register_symmetric_ops() -> None:
    """Register PyTorch's fused ops on symmetric memory, ``torch.ops.symm_mem``."""
    import torch.distributed._symmetric_memory  # noqa: F401


def _registry() -> Any:
    """Return torch's module of process groups by name."""
    return torch.distributed.distributed_c10d


def _resolved(name: str) -> Any:
    """Return the process group of a name; raises one of several errors if there is
    none."""
    return _registry()._resolve_process_group(name)


def default_group() -> Any:
    """Return the default process group, or None before there is one."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() else None


def is_only_rank() -> bool:
    """Return whether there is one rank, now or once there is a process group."""
    group = default_group()
    if group is None:
        return int(os.environ.get("WORLD_SIZE") or 1) == 1
    return int(group.size()) == 1


def own_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    group = default_group()
    return 0 if group is None else int(group.rank())


def also_named(name: str, also: str) -> None:
    """Let this process find the process group of a name by another name, too."""
    group = group_named(name)
    if group_named(also) is not group:
        registry: Any = torch._C._distributed_c10d
        registry._register_process_group(also, group)


def make_group(name: str, ranks: Sequence[int], about: str) -> None:
    """Make a process group of these ranks of the default one, under a name that none
    had. They alone call this, at any time, whatever other groups these or other ranks
    make."""
    module, default = _registry(), default_group()
    # torch would count groups for a name, and some ranks are in more than others; split
    # NCCL's communicator, which takes all ranks.
    plain, device = module._process_group_name, default.bound_device_id
    module._process_group_name = lambda *_, **__: name
    if device is not None:
        default.bound_device_id = None
    try:
        torch.distributed.new_group(
            list(ranks),
            timeout=group_timeout(default),
            use_local_synchronization=True,
            group_desc=about,
        )
    finally:
        module._process_group_name = plain
        if device is not None:
            default.bound_device_id = device


def group_store(name: str) -> tuple[Any, int, int]:
    """Return the key-value store of a process group, this rank in it, and its
    members."""
    group, registry = _resolved(name), _registry()
    return registry._get_process_group_store(group), group.rank(), group.size()


def group_named(name: str) -> Any:
    """Return the process group of a name; None if there is none."""
    try:
        return _resolved(name)
    except (RuntimeError, ValueError, LookupError):
        return None


def symmetric_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of a GPU (uint8) that other ranks may be let reach. Raises
    RuntimeError where there is none."""
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    return memory.empty(nbytes, dtype=torch.uint8, device=device)


def symmetric_meet(own: torch.Tensor, group: str) -> tuple[tuple[int, ...], Any]:
    """Let the ranks of a group reach each other's memory; return the addresses of all
    ranks' memory as known here, and what keeps them alive. Every rank calls it. Raises
    RuntimeError where one cannot."""
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    handle = memory.rendezvous(own, group)
    return tuple(handle.buffer_ptrs), (own, handle)


def multicast_address(keep: Any) -> int:
    """Return the address through which a switch between GPUs reaches all ranks' memory,
    which ``symmetric_meet`` keeps; 0 if there is none."""
    _, handle = keep
    return int(handle.multicast_ptr)


def forget_meshes() -> None:
    """Empty DTensor's caches of results, which hold the meshes they were made on. Equal
    meshes are one to them (2.13), although with another process group their names mean
    others."""
    from torch.distributed.tensor import DTensor

    # As ``tensor.debug`` does, which imports a profiler of memory.
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def default_store() -> Any:
    """Return the key-value store that the default process group was started with."""
    return _registry()._get_default_store()


def cut_store(store: Any) -> None:
    """Close the connections of this process to the server of a TCPStore, so that calls
    that wait for it raise DistNetworkError, in every thread and whatever their timeout.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    peers = _peers() if port is not None else {}
    # Another host may have a server at this port: only the connection says which it is.
    client = re.search(r"SocketImpl\(fd=(\d+)", repr(store))
    server = peers.get(int(client[1])) if client else None
    for handle, peer in peers.items():
        if peer == server or (server is None and peer[1:2] == (port,)):
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(handle)) as connection,
            ):
                connection.shutdown(socket.SHUT_RDWR)


def _peers() -> dict[int, Any]:
    """Return the addresses that sockets of this process are connected to, by their
    handles."""
    peers = {}
    names = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for handle in map(int, names):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(handle).st_mode):
                with socket.socket(fileno=os.dup(handle)) as connection:
                    peers[handle] = connection.getpeername()
    return peers


def group_timeout(group: Any) -> datetime.timedelta:
    """Return how long a collective of a process group may take; NCCL's where there are
    two."""
    devices = sorted(group._device_types, key=lambda device: device.type != "cuda")
    for device in devices:
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):  # not of this machine, or a fake group
            continue
    return datetime.timedelta(minutes=30)


# (rank of the process, why it did not get through) -> the error to raise instead.
Failed = Callable[[int, Exception], Exception]


def start_message(
    way: str,
    x: torch.Tensor,
    peer: int,
    tag: int,
    group: str,
    until: torch.Tensor,
    failed: Failed,
) -> None:
    """Start to "send" contiguous memory to a member of a group, or to "recv" it from
    there; waiting for ``until`` (``_c10d_functional.wait_tensor``) waits for it."""
    _start(lambda g: getattr(g, way)([x], peer, tag), peer, group, until, failed)


def start_broadcast(
    x: torch.Tensor, source: int, group: str, until: torch.Tensor, failed: Failed
) -> None:
    """Start to broadcast the contiguous memory of member ``source`` of a group to all
    members; waiting for ``until`` waits for it."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    _start(lambda g: g.broadcast([x], options), source, group, until, failed)


def _start(
    begin: Callable[[Any], Any],
    member: int,
    group: str,
    until: torch.Tensor,
    failed: Failed,
) -> None:
    members = _resolved(group)

    def explained(wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError as error:
            rank = torch.distributed.get_global_rank(members, member)
            raise failed(rank, error) from error

    work = explained(lambda: begin(members))
    named = _explained_work()(work, explained)
    torch._C._distributed_c10d._register_work(until, named)


@functools.cache
def _explained_work() -> Any:
    """Return the class of work whose ``wait`` raises explained errors. (Made when first
    asked for: there is none in a torch without distributed.)"""

    class ExplainedWork(torch.distributed.Work):
        def __init__(self, work: Any, explained: Callable[..., Any]) -> None:
            super().__init__()
            self.work, self.explained = work, explained

        def wait(self, timeout: datetime.timedelta | None = None) -> bool:
            self.explained(self.work.wait)
            return True

    return ExplainedWork


def _define_messages() -> None:
    """Define functional sends and receives where torch has none (2.11), by the same
    names."""
    c10d = torch.ops._c10d_functional
    if not torch.distributed.is_available() or hasattr(c10d, "isend"):
        return
    layout = torch.contiguous_format

    def start(way: str, x: torch.Tensor, until: torch.Tensor, *ends: Any) -> Any:
        peer, tag, group = ends
        start_message(way, x, peer, tag, group, until, lambda _, error: error)
        return until

    def isend(tensor: torch.Tensor, dst: int, tag: int, group: str) -> torch.Tensor:
        # A copy: compiled code does not know that it must keep what is sent.
        sent = tensor.clone(memory_format=layout)
        return start("send", sent, tensor.new_empty(0), dst, tag, group)

    def irecv(tensor: torch.Tensor, src: int, tag: int, group: str) -> torch.Tensor:
        out = torch.empty_like(tensor, memory_format=layout)
        return start("recv", out, out, src, tag, group)

    rest = "int tag, str group_name) -> Tensor"
    for name, peer, fake, run in (
        ("isend", "dst", lambda x, *_: x.new_empty(0), isend),
        (
            "irecv",
            "src",
            lambda x, *_: torch.empty_like(x, memory_format=layout),
            irecv,
        ),
    ):
        define_op(
            f"_c10d_functional::{name}(Tensor tensor, int {peer}, {rest}", fake, run
        )
        fx.node.has_side_effect(getattr(c10d, name).default)


_define_messages()


def name_axes(sizes: Mapping[str, int] | None) -> None:
    """Let names of axes stand for process groups of these sizes, in functional
    collectives that are traced; None: no longer. Names of no group at all stand for one
    rank meanwhile: errors in them are reported once there is a graph."""
    registry = _registry()
    resolve = getattr(registry._resolve_process_group, "without_axes", None)
    if sizes is None:
        if resolve is not None:
            registry._resolve_process_group = resolve
        return
    plain = resolve or registry._resolve_process_group

    def with_axes(name: Any) -> Any:
        if name in sizes:
            return _Sized(sizes[name])
        try:
            return plain(name)
        except (RuntimeError, ValueError, LookupError):
            return _Sized(1)

    with_axes.without_axes = plain  # type: ignore[attr-defined]
    registry._resolve_process_group = with_axes


class _Sized:
    """Is a process group of which only the size is known."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def finished(results: Any) -> Any:
    """Return the results of functional collectives that ran outside of a graph, once
    they are there."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(AsyncCollectiveTensor, lambda x: x.wait(), results)


_ALONE = "fxpar:alone"


@contextlib.contextmanager
def axes_of_one_rank() -> Iterator[None]:
    """Let a name given to a functional collective for its group stand for this process
    alone inside; gradients go back through it at any time."""
    from torch.distributed import _functional_collectives

    collectives: Any = _functional_collectives
    name = "_resolve_group"
    if not hasattr(collectives, name):
        name = "_resolve_group_name"  # 2.11
    plain = getattr(collectives, name)

    def alone(group: Any, tag: str = "") -> Any:
        if not isinstance(group, str):
            return plain(group, tag)
        _make_group_of_one()
        return _ALONE

    setattr(collectives, name, alone)
    try:
        yield
    finally:
        setattr(collectives, name, plain)


def _make_group_of_one() -> None:
    """Make a process group of this process, which needs no others and no default
    group."""
    if group_named(_ALONE) is not None:
        return
    dist: Any = torch.distributed
    registry: Any = torch._C._distributed_c10d
    group, kinds = dist.ProcessGroup(0, 1), dist.ProcessGroup.BackendType
    devices: tuple[str, ...]
    fake = registry.FakeProcessGroup._create_internal(0, 1)
    if _is_copying(fake):
        kind, backend, devices = kinds.CUSTOM, fake, ("cpu", "cuda", "meta")
    else:  # 2.11
        wait = datetime.timedelta(seconds=60)
        backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, wait)
        kind, devices = kinds.GLOO, ("cpu",)
    group._set_default_backend(kind)
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
    group._set_group_name(_ALONE)
    registry._register_process_group(_ALONE, group)
    _GROUPS_OF_ONE.append(group)


def _is_copying(group: Any) -> bool:
    """Return whether collectives of a fake group of one rank copy their operand to the
    result."""
    out, summand = (make(1, device="cpu") for make in (torch.zeros, torch.ones))
    group._reduce_scatter_base(out, summand).wait()
    return bool(out.item() == 1)


# Kept: the registry of names does not hold them.
_GROUPS_OF_ONE: list[Any] = []
