"""Memory that ranks without GPUs share: files in shared memory, and one process that
plays all ranks."""

from __future__ import annotations

import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxpar import _torch
from fxpar.fusion.kernels import region_op
from fxpar.fusion.kernels.symmetric_memory import Meeting, Memory, Provider


def shared_files(
    store: Any, rank: int, ranks: int, *, name: str = "", programs: int = 4
) -> Provider:
    """Return a provider for processes on one machine, on CPU. ``store``: a key-value
    store of torch that all reach. Files are unlinked once all have mapped them."""
    meeting = Meeting.of(store, rank, ranks, f"fxpar/{name}")
    folder = Path("/dev/shm")
    if not folder.is_dir():
        folder = Path(tempfile.gettempdir())
    token = meeting.words_of_all(uuid.uuid4().hex)[0]

    def mapped(path: Path, nbytes: int) -> torch.Tensor:
        return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    def allocate(nbytes: int) -> Memory:
        paths = [folder / f"fxpar_{token}_{nbytes}_{r}" for r in range(ranks)]
        try:
            own = meeting.agreed(lambda: mapped(paths[rank], nbytes))
            every = meeting.agreed(
                lambda: [
                    own if r == rank else mapped(path, nbytes)
                    for r, path in enumerate(paths)
                ]
            )
        finally:
            paths[rank].unlink(missing_ok=True)
        addresses = tuple(x.data_ptr() for x in every)
        return Memory(addresses, own, every)

    cpu = torch.device("cpu")
    meet = meeting.words_of_all
    return Provider(rank, ranks, programs, cpu, allocate, meet, meeting=meeting)


def install(group: str, device: str, provider: Provider) -> None:
    """Have the ranks of a group share a provider's memory on a kind of device."""
    of = _torch.distributed.group_named(group)
    region_op._PROVIDERS.setdefault(of, {})[device] = provider


def virtual(ranks: int, device: torch.device, *, programs: int) -> list[Provider]:
    """Return a provider for each rank of one process that plays all ranks, with kernels
    on streams of their own. ``programs``: those of all ranks together must run at a
    time. Memory must be reserved for all before one launches: to allocate is to wait
    for kernels, which may wait for others."""
    pieces: dict[int, list[torch.Tensor]] = {}

    def allocate(nbytes: int, rank: int) -> Memory:
        if nbytes not in pieces:
            pieces.clear()
            pieces[nbytes] = [
                torch.zeros(nbytes, dtype=torch.uint8, device=device)
                for _ in range(ranks)
            ]
        by_rank = pieces[nbytes]
        addresses = tuple(x.data_ptr() for x in by_rank)
        return Memory(addresses, by_rank[rank], by_rank)

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
