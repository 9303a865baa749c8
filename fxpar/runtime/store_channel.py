"""How ranks speak without collectives: keys in the store of the default process group.

``current`` gives this rank's channel in the life of the process group there is now. It
counts what all ranks do alike: rounds (``agree``), calls of compiled graphs (``meet``).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxpar import _torch, cache_files
from fxpar.runtime.presence import Presence

# Of one message; who waits longer than it should is told so by a key (``meet``).
LONGEST = timedelta(days=7)


@dataclass
class Channel:
    """The store as seen by one rank in one life of the default process group."""

    store: Any
    rank: int
    size: int
    prefix: str
    presence: Presence
    rounds: int = 0
    calls: int = 0
    heard: int = 0  # questions of waiting ranks before the last call
    wrote: list[str] = field(default_factory=list)  # this rank's keys of the last call

    def key(self, number: int, *parts: object) -> str:
        return "/".join(map(str, (self.prefix, number, *parts)))

    def has(self, *keys: str) -> bool:
        return self.store.check(list(keys))

    def read(self, key: str) -> str:
        return self.store.get(key).decode()

    def folders(self) -> list[str]:
        """Which folder of files each rank sees."""
        return [self.read(f"{self.prefix}/folder/{r}") for r in range(self.size)]


_CHANNELS: weakref.WeakKeyDictionary[Any, Channel] = weakref.WeakKeyDictionary()


def current() -> Channel | None:
    """None where there is nobody to speak with."""
    group = _torch.distributed.default_group()
    if group is None:
        return None
    channel = _CHANNELS.get(group)
    if channel is None and group.size() > 1 and dist.get_backend() != "fake":
        channel = _CHANNELS[group] = _open(group)
    return channel


def _open(group: Any) -> Channel:
    store, rank, size = _torch.distributed.default_store(), group.rank(), group.size()
    # A store may outlive a process group; its next life starts new keys.
    prefix = f"fxpar/{store.add(f'fxpar/life/{rank}', 1)}"
    beside = _torch.distributed.same_store(store)
    presence = Presence(weakref.ref(group), beside, rank, size, prefix)
    presence.start()
    store.set(f"{prefix}/folder/{rank}", cache_files.folder_mark())
    own = _torch.distributed.same_store(store)
    if own is not store:
        own.set_timeout(LONGEST)
    return Channel(own, rank, size, prefix, presence)
