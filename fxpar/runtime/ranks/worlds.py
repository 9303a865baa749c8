"""This module knows which ranks a thread works with: all, or those of one place.

A **place** is the ranks that share their coordinates along the axes of the batch. Where
each place runs a program of its own, it is a ``World``: it has its own messages
(``meeting``), leader and numbers. In: what a thread enters (``inside``). Out:
``current()``, the world that this thread is in, by default all ranks. Never: the world
of an ended process group.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from fxpar import _torch
from fxpar.errors import FxparError


@dataclass(eq=False, repr=False)
class World:
    """Holds ranks that run one program."""

    name: str  # part of its keys: "" for all ranks, equal on all of its ranks
    ranks: Sequence[int]  # its ranks, by their numbers in the default process group
    rank: int  # the number of this process among them
    life: weakref.ref[Any]  # the default process group, with which it ends
    find_group: Callable[[], Any]  # makes its group: all its ranks call this
    place: int = 0  # which part of the batch its ranks are fed
    places: int = 1  # number of parts of the batch
    graphs: Iterator[int] = field(default_factory=itertools.count)  # numbers of graphs
    # The rest is set once ranks exchange words (``meeting``).
    store: Any = None  # through another connection than that of ``presence``
    prefix: str = ""  # prefix of its keys; each life of a process group has another
    presence: Any = None  # says where this rank is, and asks where others are
    boxes: Any = None  # faster than the store; None: too many ranks
    meetings: int = 0  # meetings so far, the same number on all ranks
    questions: int = 0  # questions of waiting ranks before the last meeting
    wrote: list[str] = field(default_factory=list)  # this rank's keys of the last one

    @property
    def size(self) -> int:
        """Return how many ranks it has."""
        return len(self.ranks)

    @property
    def group(self) -> Any:
        """Return its process group."""
        return self.find_group()

    def key(self, number: int, rank: int) -> str:
        """Return the key of a rank's word at a meeting."""
        return word_key(self.prefix, number, self.ranks[rank])

    def __repr__(self) -> str:
        return f"World({self.name!r})"


def word_key(prefix: str, number: int, rank: int | str) -> str:
    """Return the key in the store of a rank's word at a meeting. ``rank``: its number
    in the default process group."""
    return f"{prefix}/{number}/{rank}"


class _Inside(threading.local):
    world: World | None = None


_INSIDE = _Inside()
_ALL: weakref.WeakKeyDictionary[Any, World] = weakref.WeakKeyDictionary()


def current() -> World | None:
    """Return the world that this thread is in; None before there is a process group."""
    if _INSIDE.world is not None:
        return _INSIDE.world
    group = _torch.distributed.default_group()
    if group is None:
        return None
    if (world := _ALL.get(group)) is None:
        life = weakref.ref(group)
        every = World("", range(group.size()), group.rank(), life, life)
        world = _ALL.setdefault(group, every)
    return world


@contextlib.contextmanager
def inside(world: World | None) -> Iterator[None]:
    """Put this thread in a world while inside; None: in the world of all ranks.

    Raises FxparError if the process group that the world was made from has ended.
    """
    if world is not None and world.life() is not _torch.distributed.default_group():
        raise FxparError(
            "a function was compiled for a process group that has ended",
            fix="call torch.compiler.reset() after a new init_process_group",
        )
    before, _INSIDE.world = _INSIDE.world, world
    try:
        yield
    finally:
        _INSIDE.world = before


def global_rank(rank: int) -> int:
    """Return the default process group's number for a rank of the current world."""
    world = current()
    return rank if world is None else world.ranks[rank]


def barrier() -> None:
    """Wait until all ranks of the current world have come here."""
    world = current()
    if world is not None and world.size > 1:
        dist.barrier(group=world.group)
