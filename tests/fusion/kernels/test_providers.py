"""Workspaces that ranks share: halves in turn, growth, addresses of all ranks. Those of
several processes are tested by the kernels that use them (``test_templates``)."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fxpar import _compat
from fxpar.fusion.kernels import run_fused
from fxpar.fusion.kernels.providers import shared_files, symmetric, virtual

CPU = torch.device("cpu")


def test_halves_are_used_in_turn_and_grow() -> None:
    a, b = virtual(2, CPU, programs=4)
    for provider in (a, b):
        provider.reserve(100)
    first, second, third = (a.workspace(100) for _ in range(3))
    assert first.own.numel() >= 100
    assert first.own.data_ptr() == third.own.data_ptr() != second.own.data_ptr()
    other = b.workspace(100)
    assert torch.equal(first.buffers, other.buffers)
    assert torch.equal(first.signals, second.signals)
    for provider, space in ((a, first), (b, other)):
        assert space.buffers[provider.rank] == space.own.data_ptr()
        pads = space.signals[provider.rank].item()
        size = 4 * provider.ranks * provider.programs
        assert ctypes.string_at(pads, size) == bytes(size)
        assert abs(pads - space.own.data_ptr()) >= size
    large = a.workspace(1 << 20)
    assert large.own.numel() >= 1 << 20
    assert large.buffers[0] % 1024 == large.own.data_ptr() % 1024
    assert a.workspace(100).own.numel() == large.own.numel(), "it does not shrink"


def test_files_leave_no_names() -> None:
    before = set(Path("/dev/shm").glob("fxpar_*"))
    provider = shared_files(torch.distributed.HashStore(), 0, 1, name="alone")
    space = provider.workspace(1 << 10)
    assert space.buffers.tolist() == [space.own.data_ptr()]
    assert set(Path("/dev/shm").glob("fxpar_*")) <= before


def test_no_memory_is_shared_on_cpu_unless_said() -> None:
    assert run_fused.provider_of("a group of CPUs", CPU) is None


@pytest.mark.parametrize("broken", [None, 1])
def test_ranks_agree_on_symmetric_memory(monkeypatch, broken: int | None) -> None:
    """If one rank cannot have it, none uses it; grids fit the smallest device."""
    store, here = torch.distributed.HashStore(), threading.local()

    def memory(nbytes: int, device: Any, group: str) -> Any:
        if here.rank == broken:
            raise RuntimeError("no peer access")
        own = torch.ones(nbytes, dtype=torch.uint8)
        return own, (own.data_ptr(),) * 2, own

    def device(_: Any) -> Any:
        return mock.Mock(multi_processor_count=(132, 78)[here.rank])

    monkeypatch.setattr(_compat, "group_store", lambda _: (store, here.rank, 2))
    monkeypatch.setattr(_compat, "symmetric_memory", memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)

    def run(rank: int) -> Any:
        here.rank = rank
        made = symmetric("g", CPU)
        if made is None:
            return None
        return made.programs, made.workspace(10).own.any().item()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2), timeout=60))
    want = None if broken else (78, False)
    assert found == [want, want]
