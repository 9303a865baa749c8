"""Links are measured at the first start of several CUDA ranks, and kept: with a device
and a measurement that stand in for a GPU's."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

from fxpar.config import Options
from fxpar.runtime.calibrate import measure
from fxpar.runtime.ranks import groups
from fxpar.sharding.cost import hardware_table
from fxpar.sharding.cost.hardware_table import Level, Measured, lookup
from tests.helpers.spawn import shared_pool

LEVEL = Level(8, 2e11, 1e-6, 5e-6, kinds=(("all_gather", Measured(0.0, 2e-6, 1e11)),))
GPU = "NVIDIA H100 80GB HBM3"


def started(
    folder: str, places: str = "{}", driver: str = "1", options: str = "{}"
) -> tuple[tuple[Level, ...], int]:
    """Levels that ``detect`` gives after a start, and how often they were measured."""
    groups.ensure_process_group()
    measure._AGREED.clear()
    rank = torch.distributed.get_rank()
    place = json.loads(places).get(str(rank), f"host {rank}")
    # Ranks measure unlike figures; rank 0's count.
    level = Level(8, 2e11 + rank, 1e-6, 5e-6, kinds=LEVEL.kinds)
    stand_ins = {
        "_has_devices": lambda: True,
        "_place": lambda: place,
        "_facts": lambda size: [GPU, size, driver],
        "_measured": mock.Mock(return_value=(level,)),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(measure, name, stand_in))
        files = measure.cache_files
        stack.enter_context(mock.patch.object(files, "folder", lambda: Path(folder)))
        read = Options.read(json.loads(options))
        for _ in range(2):
            measure.measure_first(read)
        calls = measure._measured.call_count
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_name", lambda: GPU)
        )
        levels = hardware_table.detect().levels
    hardware_table.keep_levels(())
    return levels, calls


@pytest.mark.multiprocess
def test_links_are_measured_once_and_kept(tmp_path: Path) -> None:
    def run(*args: str) -> list[tuple[tuple[Level, ...], int]]:
        return shared_pool(4).run(started, str(tmp_path), *args, ranks=2)

    assert run() == [((LEVEL,), 1)] * 2
    assert run() == [((LEVEL,), 0)] * 2
    assert run("{}", "2") == [((LEVEL,), 1)] * 2  # another driver
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace("200000000000", "300000000000"))
    assert run() == [((LEVEL,), 1)] * 2  # what was kept is damaged


@pytest.mark.multiprocess
def test_where_nothing_is_measured(tmp_path: Path) -> None:
    built_in = lookup("h100").levels, 0
    for args in (
        ('{"0": "host 1"}',),  # two ranks on a device
        ('{"1": ""}',),  # figures of a device are not known
        ("{}", "1", '{"hardware": "h100"}'),
        ("{}", "1", '{"measure": false}'),
    ):
        pool = shared_pool(4)
        assert pool.run(started, str(tmp_path), *args, ranks=2) == [built_in] * 2
    assert not list(tmp_path.iterdir())


def test_levels_come_back_from_text() -> None:
    text = json.dumps([asdict(LEVEL), asdict(LEVEL)])
    assert measure._parse(json.loads(text)) == (LEVEL, LEVEL)


def test_a_process_on_cpu_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_agreed", mock.Mock(side_effect=AssertionError))
    measure.measure_first(Options())
    assert hardware_table.detect() == lookup("cpu")
