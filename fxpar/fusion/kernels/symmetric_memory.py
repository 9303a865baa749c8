"""Provides memory that kernels of several ranks read and write.

In: a way for ranks to meet (a store, a group, one process). Out: a ``Provider``:
workspaces of equal size on all ranks, with the addresses of all of them; the memory is
torch's symmetric memory. A workspace belongs to one group and to one stream at a time.
Never computes anything.

A workspace has two halves, used in turn: a rank that fills a half again has finished
the call between, and others reached the barrier of that call only when they were done
with the call before it. So kernels need no barrier at their end. It grows when more is
asked for, on all ranks at once, since all ask for the same; if one rank has no room for
it, none gets it, and all keep the memory they had.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from fxpar import _torch
from fxpar.errors import FxparError

log = logging.getLogger("fxpar")

# Words at the start of each rank's pads, before its signals: the rank (plus one) from
# which a kernel got no signal, and the number of the region it belongs to.
HEAD = 4
_LEAST = 1 << 16  # bytes of the smallest half
_ALIGNED = 1024
# Multiprocessors that kernels which wait for others leave to those of NCCL.
FREE = 16
# Seconds between reads of the words in which kernels on a GPU report missing ranks.
_LOOK = 1.0

T = TypeVar("T")


class Unshared(Exception):
    """Is raised, on all ranks, for memory that one of them could not get."""


@dataclass(frozen=True)
class Memory:
    """Is one piece of memory on every rank, of equal size, zero at first."""

    addresses: tuple[int, ...]  # of all ranks' pieces, as seen by this process
    own: torch.Tensor  # this rank's piece, uint8
    keep: Any = None  # keeps the pieces alive
    multicast: int = 0  # the address through which a switch reaches all pieces, or 0


@dataclass(frozen=True)
class Workspace:
    """Is memory for one call."""

    buffers: torch.Tensor  # all ranks' addresses, int64 [ranks + 1], multicast last
    signals: torch.Tensor  # addresses of all ranks' signals, int64 [ranks]
    own: torch.Tensor  # this rank's buffer, uint8


@dataclass(eq=False)
class Provider:
    """Provides memory that all ranks of a group reach, and says how kernels run on
    it."""

    rank: int
    ranks: int  # number of ranks in the group
    programs: int  # how many programs of a kernel run at a time on every rank
    device: torch.device
    # Bytes -> memory. Every rank calls it with the same, more each time, and all raise
    # Unshared if one gets none.
    allocate: Callable[[int], Memory]
    # Waits on the host until all ranks' kernels are done and all have called it.
    barrier: Callable[[], None]
    # Whether a device holds one kernel of it at a time, with a grid that must fit as a
    # whole.
    cooperative: bool = False
    multicast: bool = False  # whether its memory has a multicast address, however large
    meeting: Meeting | None = None  # where its ranks exchange their results
    _memory: Memory | None = None  # holds the halves; None before the first call
    _half: int = 0  # bytes
    _most: float = float("inf")  # bytes of a half that could not be had
    _calls: int = 0  # workspaces given so far
    _halves: list[Workspace] = field(default_factory=list)  # used in turn
    _stream: Any = None  # the last one it was used on
    _words: torch.Tensor | None = None  # a copy of what kernels report, in flight
    _copied: Any = None  # the CUDA event after that copy
    _looked: float = 0.0  # when it was begun, in seconds of ``time.monotonic``

    def workspace(self, nbytes: int) -> Workspace:
        """Return the next half, of at least ``nbytes`` bytes. Raises Unshared where
        there is no room, on all ranks, and FxparError where an earlier kernel missed a
        rank."""
        self.reserve(nbytes)
        if self.device.type == "cuda":
            self._follow()
            self._look()
        self._calls += 1
        return self._halves[self._calls % 2]

    def reserve(self, nbytes: int) -> None:
        """Grow now, if that many bytes need it: all ranks together."""
        if nbytes > self._half:
            self._grow(nbytes)

    def check(self) -> None:
        """Wait for the report of kernels. Raises FxparError if one missed a rank."""
        if self._memory is not None:
            _raise_missed(self._head(self._memory).tolist())

    def _grow(self, nbytes: int) -> None:
        half = max(_LEAST, 1 << (nbytes - 1).bit_length())
        if half >= self._most:
            raise Unshared(f"there was no room for {self._most} bytes")
        self.barrier()  # others may still read the memory that is given back
        self.check()
        heads = 4 * (HEAD + self.ranks * self.programs)
        pads = -(-heads // _ALIGNED) * _ALIGNED
        try:
            memory = self.allocate(pads + 2 * half)
        except Unshared:
            self._most = half
            raise
        signals = self._table(memory.addresses)
        halves = []
        for start in (pads, pads + half):
            every = (*memory.addresses, memory.multicast)
            buffers = self._table([a + start for a in every])
            own = memory.own[start : start + half]
            halves.append(Workspace(buffers, signals, own))
        self._memory, self._half, self._halves = memory, half, halves
        self._words = None
        self.barrier()  # none signals before all pads are zero

    def _table(self, addresses: Sequence[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def _follow(self) -> None:
        """Let the current stream wait for the last one, if it is another: halves are
        used in turn by kernels that end in turn."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _look(self) -> None:
        """Read what kernels reported, some calls ago; the host waits for nothing."""
        if self._words is not None and self._copied.query():
            words, self._words = self._words.tolist(), None
            _raise_missed(words)
        now = time.monotonic()
        if self._words is None and now > self._looked + _LOOK:
            assert self._memory is not None
            self._looked, self._copied = now, torch.cuda.Event()
            self._words = torch.empty(HEAD, dtype=torch.int32, pin_memory=True)
            self._words.copy_(self._head(self._memory), non_blocking=True)
            self._copied.record()

    def _head(self, memory: Memory) -> torch.Tensor:
        return memory.own[: 4 * HEAD].view(torch.int32)


_TITLES: dict[int, str] = {}


def region_number(digest: str, title: str) -> int:
    """Return the number by which a kernel names a region when it reports a missing
    rank."""
    number = int(digest[:7], 16)
    _TITLES[number] = title
    return number


def _raise_missed(words: Sequence[int]) -> None:
    """Raise FxparError if a kernel reports that it got no signal from a rank."""
    missed, number = words[:2]
    if missed:
        title = _TITLES.get(number, "a region")
        raise FxparError(
            f"rank {missed - 1} of the group sent no signal inside {title}; "
            "results since then are wrong",
            fix="see why that rank failed or was late, and start all ranks again",
        )


@dataclass
class Meeting:
    """Exchanges words between ranks: in turns, at a store that all reach."""

    store: Any  # a key-value store that all ranks reach
    rank: int
    ranks: int
    name: str  # prefix of the keys, not used in the store before
    turn: int = 0  # meetings so far

    @staticmethod
    def of(store: Any, rank: int, ranks: int, name: str) -> Meeting:
        """Return a new meeting, also on a store that has seen one of this name."""
        times = (store.add(f"{name}/meetings", 1) - 1) // ranks
        return Meeting(store, rank, ranks, f"{name}/{times}")

    def words_of_all(self, mine: str = "") -> list[str]:
        """Return the words of all ranks, once all have given theirs."""
        self.turn += 1
        self.store.set(f"{self.name}/{self.turn}/{self.rank}", mine or "-")
        keys = [f"{self.name}/{self.turn}/{r}" for r in range(self.ranks)]
        return [self.store.get(key).decode() for key in keys]

    def agreed(self, fn: Callable[[], T], *errors: type[Exception]) -> T:
        """Return ``fn()``, if it succeeds on all ranks. Raises Unshared on all of them
        if one raises one of the ``errors``, by default a RuntimeError or an OSError;
        raises another error on its own rank unchanged."""
        result, error = None, None
        try:
            result = fn()
        except Exception as problem:
            error = problem
        words = self.words_of_all("ok" if error is None else f"failed: {error!r}"[:300])
        if error and not isinstance(error, errors or (RuntimeError, OSError)):
            raise error
        for rank, word in enumerate(words):
            if word != "ok":
                raise Unshared(f"rank {rank} {word}") from error
        return result  # type: ignore[return-value]


def symmetric(group: str, device: torch.device) -> Provider | None:
    """Return a provider with torch's symmetric memory on the GPUs of a group. None, on
    all ranks, if there is one rank or several machines, if ranks share a GPU, or if one
    GPU does not reach the others; the first rank logs the reason."""
    store, rank, ranks = _torch.distributed.group_store(group)
    if ranks == 1:
        return None
    meeting = Meeting.of(store, rank, ranks, f"fxpar/{group}/symmetric")

    def all_done() -> None:
        torch.cuda.synchronize(device)
        meeting.words_of_all()

    switch = False

    def meet(own: torch.Tensor) -> tuple[tuple[int, ...], Any, int]:
        addresses, keep = _torch.distributed.symmetric_meet(own, group)
        multicast = _torch.distributed.multicast_address(keep)
        if switch and not multicast:
            # Kernels that use one were chosen because the first memory had one.
            raise RuntimeError("larger memory has no multicast address")
        return addresses, keep, multicast

    def allocate(nbytes: int) -> Memory:
        own = meeting.agreed(lambda: _torch.distributed.symmetric_empty(nbytes, device))
        own.zero_()
        addresses, keep, multicast = meeting.agreed(lambda: meet(own))
        assert addresses[rank] == own.data_ptr(), "ranks' memory is in another order"
        return Memory(addresses, own, keep, multicast)

    properties = torch.cuda.get_device_properties(device)
    words = f"{_machine()}\n{properties.uuid}\n{properties.multi_processor_count}"
    machines, devices, counts = zip(
        *(word.split("\n") for word in meeting.words_of_all(words)), strict=True
    )
    try:
        _check_places(machines, devices)
        first = allocate(_LEAST)
    except Unshared as error:
        level = logging.DEBUG if rank else logging.WARNING
        text = "no memory is shared by GPUs of group %s, so collectives of regions"
        log.log(level, f"{text} run between their kernels: %s", group, error)
        return None
    least = max(1, min(map(int, counts)) - FREE)
    switch = "0" not in meeting.words_of_all(str(int(first.multicast > 0)))
    return Provider(
        rank,
        ranks,
        least,
        device,
        allocate,
        all_done,
        cooperative=True,
        multicast=switch,
        meeting=meeting,
    )


def _check_places(machines: Sequence[str], devices: Sequence[str]) -> None:
    """Raise Unshared if ranks are on several machines, or share a device: a kernel that
    another waits for could then not run."""
    if len(set(machines)) > 1:
        raise Unshared("its ranks are on several machines")
    # Set by tests on one GPU, where processes then take turns.
    together = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    if len(set(devices)) < len(devices) and not together:
        raise Unshared("its ranks share GPUs")


def _machine() -> str:
    """Return an identifier of this machine since its start; containers on it share
    that, while their names may be equal to those of other machines."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
