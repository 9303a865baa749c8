"""Memory that kernels of several ranks read and write.

In: how ranks meet (a store, a group, one process). Out: a ``Provider``: workspaces of
equal size on all ranks, with the addresses of all of them. There are three: torch's
symmetric memory; files in shared memory, for processes on CPU whose kernels Triton
interprets; and one process that plays all ranks, each on a stream of its own. A
workspace belongs to one group and one stream. Nothing is computed here.

A workspace has two halves, used in turn: who fills a half again has finished the call
between, whose barrier others only reached when they were done with the call before it.
So kernels need no barrier at their end. It grows when more is asked for, on all ranks
at once, since they ask alike.
"""

from __future__ import annotations

import os
import platform
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxpar import _compat

_LEAST = 1 << 16  # bytes of the smallest half
_ALIGNED = 1024


@dataclass(frozen=True)
class Memory:
    """The same piece of memory on every rank, zero at first: ``addresses`` of all
    ranks' pieces as they are known here, ``own`` (uint8), and what keeps them."""

    addresses: tuple[int, ...]
    own: torch.Tensor
    keep: Any = None


@dataclass(frozen=True)
class Workspace:
    """For one call: ``buffers`` and ``signals``, int64 [ranks], are addresses; ``own``
    is this rank's buffer, uint8."""

    buffers: torch.Tensor
    signals: torch.Tensor
    own: torch.Tensor


@dataclass
class Provider:
    """``programs``: how many programs of a kernel run at a time on every rank.
    ``allocate(bytes, number)``: memory, by a number that grows; every rank calls it
    alike. ``barrier()``: waits on the host until all ranks' kernels are done and all
    are here."""

    rank: int
    ranks: int
    programs: int
    device: torch.device
    allocate: Callable[[int, int], Memory]
    barrier: Callable[[], None]
    _memory: Memory | None = None
    _half: int = 0  # bytes
    _number: int = 0
    _calls: int = 0
    _halves: list[Workspace] = field(default_factory=list)

    def workspace(self, nbytes: int) -> Workspace:
        """The next half, of at least so many bytes."""
        self.reserve(nbytes)
        self._calls += 1
        return self._halves[self._calls % 2]

    def reserve(self, nbytes: int) -> None:
        """Grow now, if that many bytes need it: all ranks together."""
        if nbytes > self._half:
            self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self.barrier()  # others may still read what is given back
        self._memory, self._halves = None, []
        self._half = max(_LEAST, 1 << (nbytes - 1).bit_length())
        self._number += 1
        pads = -(-4 * self.ranks * self.programs // _ALIGNED) * _ALIGNED
        memory = self.allocate(pads + 2 * self._half, self._number)
        signals = self._table(memory.addresses)
        for start in (pads, pads + self._half):
            buffers = self._table([a + start for a in memory.addresses])
            own = memory.own[start : start + self._half]
            self._halves.append(Workspace(buffers, signals, own))
        self._memory = memory
        self.barrier()  # none signals before all pads are zero

    def _table(self, addresses: Sequence[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)


def shared_files(
    store: Any, rank: int, ranks: int, *, name: str = "", programs: int = 4
) -> Provider:
    """For processes on one machine, on CPU. ``store``: a key-value store of torch that
    all reach. Files have no names any more once all have them."""
    meet = meeting(store, ranks, f"fxpar/{name}")
    folder = Path("/dev/shm")
    if not folder.is_dir():
        folder = Path(tempfile.gettempdir())
    key = f"fxpar/{name}/token"
    if rank == 0:
        store.set(key, uuid.uuid4().hex)
    token = store.get(key).decode()

    def allocate(nbytes: int, number: int) -> Memory:
        paths = [folder / f"fxpar_{token}_{number}_{r}" for r in range(ranks)]

        def mapped(path: Path) -> torch.Tensor:
            return torch.from_file(
                str(path), shared=True, size=nbytes, dtype=torch.uint8
            )

        own = mapped(paths[rank])
        try:
            meet()
            all_ranks = [
                own if r == rank else mapped(path) for r, path in enumerate(paths)
            ]
            meet()
        finally:
            os.unlink(paths[rank])
        return Memory(tuple(x.data_ptr() for x in all_ranks), own, all_ranks)

    return Provider(rank, ranks, programs, torch.device("cpu"), allocate, meet)


def meeting(store: Any, ranks: int, name: str) -> Callable[[], None]:
    """A barrier of processes at a store."""
    count = 0

    def meet() -> None:
        nonlocal count
        count += 1
        key = f"{name}/meet/{count}"
        if store.add(key, 1) == ranks:
            store.set(f"{key}/all", "1")
        store.wait([f"{key}/all"])

    return meet


def symmetric(group: str, device: torch.device) -> Provider | None:
    """Symmetric memory of torch on the GPUs of a group. None, on all ranks, where there
    is one rank or several machines, or where one GPU does not reach the others."""
    store, rank, ranks = _compat.group_store(group)
    name = f"fxpar/{group}/symmetric"

    def told(what: str, mine: str) -> list[str]:
        store.set(f"{name}/{what}/{rank}", mine)
        return [store.get(f"{name}/{what}/{r}").decode() for r in range(ranks)]

    if ranks == 1 or len(set(told("host", platform.node()))) > 1:
        return None
    meet = meeting(store, ranks, name)

    def all_done() -> None:
        torch.cuda.synchronize(device)
        meet()

    def allocate(nbytes: int, number: int) -> Memory:
        own, addresses, keep = _compat.symmetric_memory(nbytes, device, group)
        own.zero_()
        return Memory(addresses, own, keep)

    count = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        allocate(_LEAST, 0)
    except (RuntimeError, ImportError, AttributeError):
        count = 0
    least = min(map(int, told("programs", str(count))))
    return Provider(rank, ranks, least, device, allocate, all_done) if least else None


def virtual(ranks: int, device: torch.device, *, programs: int) -> list[Provider]:
    """One process that plays all ranks: a provider for each, whose kernels run on
    streams of their own. ``programs``: those of all ranks together must run at a time.
    What is needed is to be reserved for all before one launches: a kernel that waits
    for others would be waited for."""
    pieces: dict[tuple[int, int], list[torch.Tensor]] = {}

    def allocate(nbytes: int, number: int, rank: int) -> Memory:
        key = nbytes, number
        if key not in pieces:
            pieces.clear()
            pieces[key] = [
                torch.zeros(nbytes, dtype=torch.uint8, device=device)
                for _ in range(ranks)
            ]
        found = pieces[key]
        return Memory(tuple(x.data_ptr() for x in found), found[rank], found)

    def all_done() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return [
        Provider(
            rank,
            ranks,
            programs,
            device,
            partial(allocate, rank=rank),
            all_done,
        )
        for rank in range(ranks)
    ]
