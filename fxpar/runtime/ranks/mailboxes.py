"""This module lets ranks of one machine exchange short texts in shared memory.

In: a word (a text) for each call. Out: the words of all ranks, if they come within
1 ms; else the caller reads the store, which has every word as well. Two messages
through a store take some hundred microseconds, this a few.

A rank has two boxes, which it fills in turn: it comes to the next call but one when all
have read the last. A word counts only with the number of its call and its checksum. A
rank that stops looking takes its word out, so that nobody runs past a rank that waits
at the store, where it may give up on others. Never: a wait longer than 1 ms.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable

# Bytes of a box: number of the call, checksum and length, then the word.
_HEAD = struct.Struct("<QII")
_BOX = 1 << 13

# Seconds to wait for the words of other ranks.
_MOMENT = 1e-3

# Calls after which a rank gives up on the memory if not all have opened it.
_OPENED_BY = 8


class Mailboxes:
    """Gives one rank access to the boxes of all ranks. ``published``: tells the other
    ranks the name of the memory, or, given None, returns it, None while it is unknown.

    The memory has no file in a folder: other ranks open it through the process of rank
    0, and the system frees it once all of them have ended, in whatever way."""

    def __init__(
        self, rank: int, size: int, published: Callable[[str | None], str | None]
    ) -> None:
        self.rank, self.size, self._published = rank, size, published
        self._memory: mmap.mmap | None = None
        self._handle: int | None = None  # of the memory, on rank 0 until all have it
        self._calls = 0
        self._all_open = False
        if rank == 0:
            self._make()

    def write(self, number: int, word: str) -> None:
        """Write a word for a call, if it fits in a box and all share the memory."""
        self._calls += 1
        if not self._all_open:
            self._meet()
        data = word.encode()
        if self._memory is None or not self._all_open or len(data) > _BOX - _HEAD.size:
            return
        at = self._box(self.rank, number)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, at, number, _sum(number, data), len(data))

    def read(self, number: int) -> list[str] | None:
        """Return the words of all ranks at a call; None if not all come within 1 ms."""
        if self._memory is None or not self._all_open:
            return None
        words: list[str | None] = [None] * self.size
        end = time.monotonic() + _MOMENT
        while True:
            for rank, word in enumerate(words):
                if word is None:
                    words[rank] = self._word(rank, number)
            if None not in words:
                return [word for word in words if word is not None]
            if time.monotonic() > end:
                _HEAD.pack_into(self._memory, self._box(self.rank, number), 0, 0, 0)
                return None
            os.sched_yield()

    def _box(self, rank: int, number: int) -> int:
        return self.size + (2 * rank + number % 2) * _BOX

    def _word(self, rank: int, number: int) -> str | None:
        assert self._memory is not None
        at = self._box(rank, number)
        of, checksum, length = _HEAD.unpack_from(self._memory, at)
        if of != number or length > _BOX - _HEAD.size:
            return None
        data = self._memory[at + _HEAD.size : at + _HEAD.size + length]
        return data.decode() if _sum(number, data) == checksum else None

    def _make(self) -> None:
        name = f"fxpar-{uuid.uuid4().hex}"
        size = self.size + 2 * self.size * _BOX
        try:
            self._handle = os.memfd_create(name)
            os.posix_fallocate(self._handle, 0, size)  # no room would kill at a write
            self._memory = mmap.mmap(self._handle, size)
        except (AttributeError, OSError):  # AttributeError: this is not Linux
            self.close()
            return
        self._memory[0] = 1
        self._published(f"{name}\n/proc/{os.getpid()}/fd/{self._handle}")

    def _meet(self) -> None:
        """Open the memory that rank 0 made, and check whether all ranks have."""
        if self._calls > _OPENED_BY:
            self._memory = None
            self.close()
            return
        if self._memory is None and self.rank:
            published = self._published(None)
            if published is None:
                return
            name, path = published.split("\n")
            try:
                # Elsewhere, as in another container, the path is of something else.
                if name not in os.readlink(path):
                    raise FileNotFoundError(path)
                with open(path, "r+b") as file:
                    self._memory = mmap.mmap(file.fileno(), 0)
            except (OSError, ValueError):
                self._calls = _OPENED_BY
                return
            self._memory[self.rank] = 1
        if self._memory is not None and all(self._memory[: self.size]):
            self._all_open = True
            self.close()

    def close(self) -> None:
        """Close the handle by which other ranks open the memory."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def _sum(number: int, data: bytes) -> int:
    return zlib.crc32(data, number & 0xFFFFFFFF)
