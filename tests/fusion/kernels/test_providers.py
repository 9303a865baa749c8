"""Workspaces that ranks share: halves in turn, growth, addresses of all ranks, and that
ranks agree where one of them gets none. Those of several processes are tested by the
kernels that use them (``test_templates``)."""

from __future__ import annotations

import ctypes
import logging
import tempfile
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.errors import FxparError
from fxpar.fusion.kernels import region_op, symmetric_memory
from fxpar.fusion.kernels.symmetric_memory import (
    HEAD,
    Provider,
    Unshared,
    region_number,
    symmetric,
)
from tests.helpers.kernels.shared_memory import install, shared_files, virtual

CPU = torch.device("cpu")


def ranks(fn: Callable[[int], Any], count: int = 2) -> list[Any]:
    """Of all ranks, each a thread: what ``fn`` gives, or what it raises."""

    def run(rank: int) -> Any:
        try:
            return fn(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count), timeout=60))


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
        size = 4 * (HEAD + provider.ranks * provider.programs)
        assert ctypes.string_at(pads, size) == bytes(size)
        assert abs(pads - space.own.data_ptr()) >= size
    large = a.workspace(1 << 20)
    assert large.own.numel() >= 1 << 20
    assert large.buffers[0] % 1024 == large.own.data_ptr() % 1024
    assert a.workspace(100).own.numel() == large.own.numel(), "it does not shrink"


def test_files_leave_no_names(monkeypatch) -> None:
    token = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: token)
    provider = shared_files(dist.HashStore(), 0, 1, name="alone")
    space = provider.workspace(1 << 10)
    assert space.buffers[0] == space.own.data_ptr()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        assert not [*Path(folder).glob(f"fxpar_{token.hex}*")]


def test_a_store_may_have_seen_others_of_the_name() -> None:
    store = dist.HashStore()
    for number in range(2):  # the second one is in need of all ranks again
        made = ranks(lambda r: shared_files(store, r, 2, name="again"))
        spaces = ranks(lambda r, made=made: made[r].workspace(10))
        spaces[0].own[0] = 7 + number
        there = ctypes.string_at(spaces[1].buffers[0].item(), 1)
        assert there == bytes([7 + number])


@pytest.mark.parametrize("failing", [0, 1])
def test_no_room_on_one_rank_is_none_on_all(monkeypatch, failing: int) -> None:
    """And all keep what they had."""
    store, here = dist.HashStore(), threading.local()
    mapped, asked = torch.from_file, []

    def from_file(name: str, **how: Any) -> torch.Tensor:
        asked.append(name)
        if how["size"] > 1 << 20 and here.rank == failing:
            raise RuntimeError("out of memory")
        return mapped(name, **how)

    monkeypatch.setattr(torch, "from_file", from_file)

    def run(rank: int) -> Any:
        here.rank = rank
        provider = shared_files(store, rank, 2, name="room")
        first = provider.workspace(100)
        with pytest.raises(Unshared, match=f"rank {failing} failed: .*out of memory"):
            provider.workspace(1 << 20)
        with pytest.raises(Unshared, match="no room"):  # nobody is asked again
            provider.workspace(1 << 20)
        return [first, provider.workspace(100), provider.workspace(100)]

    found = ranks(run)
    for first, second, third in found:
        assert first.own.data_ptr() == third.own.data_ptr() != second.own.data_ptr()
    assert not [name for name in asked if Path(name).exists()]


def test_no_memory_is_shared_on_cpu_unless_said() -> None:
    assert region_op.provider_of("a group of CPUs", CPU) is None


def test_a_provider_ends_with_its_group() -> None:
    if dist.is_initialized():
        pytest.skip("there is a process group of another test")
    (provider,) = virtual(1, CPU, programs=1)
    for known in (None, None):  # of the second one nothing is known again
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = _torch.distributed.default_group().group_name
        assert region_op.provider_of(name, CPU) is known
        install(name, "cpu", provider)
        assert region_op.provider_of(name, CPU) is provider
        dist.destroy_process_group()
    assert region_op.provider_of(name, CPU) is None


class Gpus:
    """Two that are not there. ``symmetric_meet`` waits for both, as torch's does."""

    def __init__(self, monkeypatch: Any) -> None:
        self.store, self.here = dist.HashStore(), threading.local()
        self.broken: dict[str, Exception] = {}  # by what breaks on the second rank
        self.machines, self.devices = ["a", "a"], ["0", "1"]
        self.multicast = [0, 0]
        self.both = threading.Barrier(2, timeout=20)
        made = {
            "group_store": lambda _: (self.store, self.here.rank, 2),
            "symmetric_empty": self.empty,
            "symmetric_meet": self.meet,
        }
        for name, fn in made.items():
            monkeypatch.setattr(_torch.distributed, name, fn)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.device)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(
            symmetric_memory, "_machine", lambda: self.machines[self.here.rank]
        )

    def fail(self, what: str) -> None:
        if self.here.rank == 1 and what in self.broken:
            raise self.broken[what]

    def empty(self, nbytes: int, device: Any) -> torch.Tensor:
        self.fail("empty")
        return torch.ones(nbytes, dtype=torch.uint8)

    def meet(self, own: torch.Tensor, group: str) -> Any:
        self.both.wait()
        self.fail("meet")
        multicast = self.multicast[self.here.rank]
        return (own.data_ptr(),) * 2, (own, mock.Mock(multicast_ptr=multicast))

    def device(self, _: Any) -> Any:
        counts, uuid = (132, 78), self.devices[self.here.rank]
        return mock.Mock(multi_processor_count=counts[self.here.rank], uuid=uuid)

    def run(self, fn: Callable[[int], Any] | None = None) -> list[Any]:
        def run(rank: int) -> Any:
            self.here.rank = rank
            return fn(rank) if fn else symmetric("g", CPU)

        return ranks(run)


def test_ranks_share_symmetric_memory(monkeypatch) -> None:
    """Grids fit the smallest device, and leave some of it to others."""
    gpus = Gpus(monkeypatch)
    made = gpus.run()
    assert [p.programs for p in made] == [78 - symmetric_memory.FREE] * 2
    assert all(p.cooperative for p in made)
    spaces = gpus.run(lambda rank: made[rank].workspace(10))
    assert not any(space.own.any() for space in spaces)


@pytest.mark.parametrize("what", ["empty", "meet"])
def test_ranks_agree_that_there_is_none(monkeypatch, caplog, what: str) -> None:
    """If one rank cannot have it, none uses it, none waits, and one says why."""
    gpus = Gpus(monkeypatch)
    gpus.broken = {what: RuntimeError("no peer access")}
    with caplog.at_level(logging.WARNING, "fxpar"):
        assert gpus.run() == [None, None]
    (text,) = caplog.messages
    assert "rank 1 failed" in text and "no peer access" in text


@pytest.mark.parametrize("what", ["empty", "meet"])
def test_a_wrong_call_of_our_own_is_raised(monkeypatch, what: str) -> None:
    gpus = Gpus(monkeypatch)
    gpus.broken = {what: AttributeError("no such name")}
    first, second = gpus.run()
    assert first is None
    assert isinstance(second, AttributeError)


def test_several_machines_or_one_gpu_share_none(monkeypatch, caplog) -> None:
    gpus = Gpus(monkeypatch)
    gpus.machines = ["a", "b"]
    assert gpus.run() == [None, None]
    assert "several machines" in caplog.text
    gpus.machines, gpus.devices = ["a", "a"], ["0", "0"]
    assert gpus.run() == [None, None]
    assert "share GPUs" in caplog.text
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert None not in gpus.run()


def test_memory_that_grows_keeps_its_multicast_address(monkeypatch) -> None:
    """Else it does not grow, on any rank: a kernel that was chosen for the switch would
    write to the address 0."""
    gpus = Gpus(monkeypatch)
    gpus.multicast = [7 << 20, 9 << 20]
    made = gpus.run()
    assert all(p.multicast for p in made)
    large = 4 * symmetric_memory._LEAST
    with mock.patch.object(gpus, "multicast", [7 << 20, 0]):
        grown = gpus.run(lambda rank: made[rank].workspace(large))
    assert all(isinstance(error, Unshared) for error in grown)
    assert all("rank 1 failed" in str(e) and "multicast" in str(e) for e in grown)
    assert all(p.multicast for p in made)
    spaces = gpus.run(lambda rank: made[rank].workspace(10))
    for space, multicast in zip(spaces, gpus.multicast, strict=True):
        assert multicast <= space.buffers[-1] < multicast + (1 << 20)


def test_where_one_rank_has_no_multicast_address_none_uses_it(monkeypatch) -> None:
    gpus = Gpus(monkeypatch)
    gpus.multicast = [7 << 20, 0]
    made = gpus.run()
    assert not any(p.multicast for p in made)
    large = gpus.run(lambda rank: made[rank].workspace(4 * symmetric_memory._LEAST))
    assert all(space.own.numel() >= 4 * symmetric_memory._LEAST for space in large)


def test_a_machine_is_known_by_when_it_was_started() -> None:
    assert symmetric_memory._machine() == symmetric_memory._machine() != ""
    if Path("/proc/sys/kernel/random/boot_id").exists():
        assert symmetric_memory._machine().count("-") == 4


def used(provider: Provider, monkeypatch: Any, stream: Any) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    provider._follow()


def test_another_stream_waits_for_the_last_one(monkeypatch) -> None:
    (provider,) = virtual(1, CPU, programs=1)
    a, b = mock.Mock(), mock.Mock()
    for stream in (a, a, b):
        used(provider, monkeypatch, stream)
    a.wait_stream.assert_not_called()
    b.wait_stream.assert_called_once_with(a)
    used(provider, monkeypatch, a)
    a.wait_stream.assert_called_once_with(b)


def test_what_a_kernel_says_is_raised() -> None:
    (provider,) = virtual(1, CPU, programs=1)
    provider.check()  # nothing was said
    provider.reserve(10)
    provider.check()
    number = region_number("0123456789abcdef", "fxpar::region add")
    assert provider._memory is not None
    provider._memory.own[:8].view(torch.int32)[:] = torch.tensor([4, number])
    with pytest.raises(FxparError, match="rank 3 .* inside fxpar::region add"):
        provider.check()
    with pytest.raises(FxparError, match="rank 3"):  # before those words are gone
        provider.workspace(1 << 20)
