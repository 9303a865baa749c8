"""Ranks choose alike how a region runs, whatever each of their clocks says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fxpar import cache_files
from fxpar.fusion.kernels.implementations import (
    GroupFacts,
    Run,
    TunedWay,
    choose,
    fastest,
    tuned,
    ways_of,
)
from fxpar.fusion.kernels.region_program import RegionProgram
from fxpar.fusion.kernels.symmetric_memory import Meeting, Unshared
from tests.helpers.kernels.fused_graphs import GRAPHS, fused

ONE, TWO, NCCL = TunedWay("one_shot", 8), TunedWay("two_shot", 8), TunedWay("nccl", 8)
WAYS = (ONE, TWO, NCCL)
Ran = list[tuple[int, TunedWay]]


def program() -> RegionProgram:
    return fused(GRAPHS["epilogue"])[1].programs[0]


def on_ranks(fn: Callable[[Meeting], Any], ranks: int = 2) -> list[Any]:
    """What each rank gets or raises; all have ten seconds."""
    store, out = dist.HashStore(), [None] * ranks

    def play(rank: int) -> None:
        try:
            out[rank] = fn(Meeting(store, rank, ranks, "tune"))
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=play, args=(r,), daemon=True) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a rank waits for others"
    return out


def clocks(*seconds: dict[TunedWay, float]) -> tuple[Ran, Any, Any]:
    """What ran on which rank; and, for a meeting, what prepares a way and times it."""
    ran: Ran = []

    def prepare(meeting: Meeting) -> Callable[[TunedWay], Run]:
        def make(way: TunedWay) -> Run:
            if way not in seconds[meeting.rank]:
                raise ValueError("it does not compile here")
            return lambda: way

        return make

    def clock(meeting: Meeting) -> Callable[[Run], float]:
        def time(run: Run) -> float:
            ran.append((meeting.rank, run()))
            return seconds[meeting.rank][run()]

        return time

    return ran, prepare, clock


def test_the_slowest_rank_counts() -> None:
    ran, prepare, clock = clocks(
        {ONE: 3.0, TWO: 1.0, NCCL: 2.0}, {ONE: 3.0, TWO: 9.0, NCCL: 2.0}
    )
    found = on_ranks(lambda m: fastest(WAYS, prepare(m), m, clock(m)))
    assert found[0] == found[1]
    assert found[0][0] == NCCL
    assert list(found[0][1].values()) == [3.0, 9.0, 2.0]
    # Every rank ran the same one at the same time.
    assert [way for rank, way in ran if rank == 0] == list(WAYS)
    assert [{rank for rank, _ in ran[i : i + 2]} for i in (0, 2, 4)] == [{0, 1}] * 3


def test_the_tables_way_stands_unless_another_is_clearly_faster() -> None:
    near = {ONE: 1.0, TWO: 0.99, NCCL: 2.0}
    _, prepare, clock = clocks(near, near)
    for way, _ in on_ranks(lambda m: fastest(WAYS, prepare(m), m, clock(m))):
        assert way == ONE


def test_what_fails_on_one_rank_is_left_out_on_all() -> None:
    ran, prepare, clock = clocks({ONE: 1.0, TWO: 2.0, NCCL: 3.0}, {TWO: 2.0, NCCL: 3.0})
    for way, seconds in on_ranks(lambda m: fastest(WAYS, prepare(m), m, clock(m))):
        assert way == TWO and len(seconds) == 2
    assert ONE not in [way for _, way in ran]


def test_nothing_runs_anywhere() -> None:
    _, prepare, clock = clocks({}, {ONE: 1.0})
    for error in on_ranks(lambda m: fastest(WAYS, prepare(m), m, clock(m))):
        assert isinstance(error, Unshared)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache_files, "folder", lambda: tmp_path)
    return tmp_path / "tuned"


def found_on_ranks(
    prepare: Any, clock: Any, ways: Sequence[TunedWay] = WAYS, device: str = "some"
) -> list[Any]:
    p, where = program(), {"device": device}
    return on_ranks(
        lambda m: tuned(p, ways, prepare(m), m, where=where, clock=clock(m))
    )


def test_it_is_measured_once(folder: Path) -> None:
    times = {ONE: 3.0, TWO: 1.0, NCCL: 2.0}
    ran, prepare, clock = clocks(times, times)
    assert found_on_ranks(prepare, clock) == [TWO, TWO]
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["way"]["rung"] == "two_shot"
    count = len(ran)
    assert found_on_ranks(prepare, clock) == [TWO, TWO] and len(ran) == count
    # Elsewhere it is measured again; a file of something else is no answer.
    assert found_on_ranks(prepare, clock, device="other") == [TWO, TWO]
    assert len(ran) == 2 * count
    path.write_text("{")
    assert found_on_ranks(prepare, clock) == [TWO, TWO] and len(ran) == 3 * count
    # What is known is no longer among the ways.
    assert found_on_ranks(prepare, clock, (ONE, NCCL)) == [NCCL, NCCL]


def test_the_first_ranks_file_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of other machines have other files, or none."""
    read = cache_files.read_record
    here = threading.local()

    def of_rank(*how: Any) -> Any:
        return read(*how) if here.rank == 0 else None

    monkeypatch.setattr(cache_files, "read_record", of_rank)
    times = {ONE: 3.0, TWO: 1.0, NCCL: 2.0}
    ran, prepare, clock = clocks(times, times)
    p = program()

    def one(meeting: Meeting) -> TunedWay:
        here.rank = meeting.rank
        where = {"device": "some"}
        kinds = prepare(meeting), meeting
        return tuned(p, WAYS, *kinds, where=where, clock=clock(meeting))

    assert on_ranks(one) == [TWO, TWO] and len(ran) == 6
    assert on_ranks(one) == [TWO, TWO] and len(ran) == 6


def test_what_is_tried() -> None:
    facts = GroupFacts(2, kernels=True, shared=True)
    ways = ways_of(program(), facts, 100)
    assert ways[0] == TunedWay(choose(program(), facts).name, 100)
    assert {way.rung for way in ways} == {"one_shot", "nccl"}
    assert len(set(ways)) == len(ways) == 4
    alone = GroupFacts(2, kernels=True, shared=False)
    assert ways_of(program(), alone, 100) == (TunedWay("nccl", 100),)
