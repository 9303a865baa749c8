"""Links are measured at the first start of several ranks, and kept: of CUDA ranks with
a device and a measurement that stand in for a GPU's."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fxpar.config import Options
from fxpar.runtime.calibrate import measure
from fxpar.runtime.ranks import groups
from fxpar.sharding.cost import hardware_table
from fxpar.sharding.cost.hardware_table import Hardware, Level, lookup, of_kind
from tests.helpers.spawn import shared_pool

LEVEL = Level(8, 2e11, 1e-6, 5e-6, kinds=(("all_gather", of_kind(0.0, 2e-6, 1e11)),))
GPU = "NVIDIA H100 80GB HBM3"
H100 = lookup("h100")


def with_level(level: Level) -> Hardware:
    return replace(H100, levels=(level,))


def started(
    folder: str, places: str = "{}", driver: str = "1", options: str = "{}"
) -> tuple[Hardware, int]:
    """What ``detect`` returns after a start, and how often it was measured."""
    groups.ensure_process_group()
    measure._AGREED.clear()
    rank = torch.distributed.get_rank()
    place = json.loads(places).get(str(rank), f"host {rank}")
    # Ranks measure unlike figures; rank 0's count.
    level = Level(8, 2e11 + rank, 1e-6, 5e-6, kinds=LEVEL.kinds)
    stand_ins = {
        "_device": lambda: "cuda",
        "_place": lambda: place,
        "_facts": lambda size: [GPU, size, driver],
        "_measured": mock.Mock(return_value=with_level(level)),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(measure, name, stand_in))
        files = measure.cache_files
        stack.enter_context(mock.patch.object(files, "folder", lambda: Path(folder)))
        read = Options.read({"measure": True} | json.loads(options))
        for _ in range(2):
            measure.measure_first(read)
        calls = measure._measured.call_count
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_name", lambda: GPU)
        )
        hardware = hardware_table.detect()
    hardware_table.keep_measured()
    return hardware, calls


@pytest.mark.multiprocess
def test_links_are_measured_once_and_kept(tmp_path: Path) -> None:
    def run(*args: str) -> list[tuple[Hardware, int]]:
        return shared_pool(4).run(started, str(tmp_path), *args, ranks=2)

    assert run() == [(with_level(LEVEL), 1)] * 2
    assert run() == [(with_level(LEVEL), 0)] * 2
    assert run("{}", "2") == [(with_level(LEVEL), 1)] * 2  # another driver
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace("200000000000", "300000000000"))
    assert run() == [(with_level(LEVEL), 1)] * 2  # what was kept is damaged


@pytest.mark.multiprocess
def test_where_nothing_is_measured(tmp_path: Path) -> None:
    built_in = H100, 0
    for args in (
        ('{"0": "host 1"}',),  # two ranks on a device
        ('{"1": ""}',),  # figures of a device are not known
        ("{}", "1", '{"hardware": "h100"}'),
        ("{}", "1", '{"measure": false}'),
    ):
        pool = shared_pool(4)
        assert pool.run(started, str(tmp_path), *args, ranks=2) == [built_in] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("hardware", hardware_table.BUILT_IN, ids=lambda x: x.name)
def test_figures_come_back_from_text(hardware: Hardware) -> None:
    text = json.dumps(hardware.to_record())
    assert hardware_table.read_figures(json.loads(text)) == hardware


def on_cpu(folder: str) -> tuple[Hardware, Hardware]:
    """What ``detect`` returns after two starts of this machine's ranks, which take no
    random numbers from the user."""
    groups.ensure_process_group()
    seen, found = torch.get_rng_state(), []
    with mock.patch.object(measure.cache_files, "folder", lambda: Path(folder)):
        for _ in range(2):
            measure._AGREED.clear()
            hardware_table.keep_measured()
            measure.measure_first(Options.read({"measure": True}))
            found.append(hardware_table.detect())
    assert torch.equal(seen, torch.get_rng_state())
    hardware_table.keep_measured()
    return found[0], found[1]


@pytest.mark.multiprocess
def test_ranks_on_a_cpu_are_as_fast_as_measured(tmp_path: Path) -> None:
    """Each kind of figure is the built-in one times one factor."""
    (first, again), (other, _) = shared_pool(4).run(on_cpu, str(tmp_path), ranks=2)
    assert first == again == other
    built_in = lookup("cpu")
    assert first.ranks == 2 and first.cores >= 1 and "2 ranks" in first.about
    (level,), (usual,) = first.levels, built_in.levels
    slower = level.latency / usual.latency
    assert 0.01 < slower < 1e4 and level.bandwidth > 0
    for (kind, own), (name, figures) in zip(level.kinds, usual.kinds, strict=True):
        assert kind == name
        assert own.latency / figures.latency == pytest.approx(slower)
    speeds = [
        own.flops / peak.flops
        for (_, own), (_, peak) in zip(first.peaks, built_in.peaks, strict=True)
    ]
    speeds.append(first.bandwidth / built_in.bandwidth)
    assert max(speeds) == pytest.approx(min(speeds))


def test_a_process_alone_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_agreed", mock.Mock(side_effect=AssertionError))
    measure.measure_first(Options(measure=True))
    assert hardware_table.detect() == lookup("cpu")
