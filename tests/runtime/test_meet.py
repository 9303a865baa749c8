"""Ranks meet: each knows what all are about to run, or why one does not come.

Once as few ranks do, each reading the words of all, and once as many, through rank 0.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import meeting, presence
from fxpar.runtime.ranks.meeting import Mailboxes
from tests.helpers.patience import given_up
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

RANKS = 4


def words(direct: int, same: bool) -> list[list[str]]:
    """What this rank heard in three calls."""
    meeting.DIRECT = direct
    rank = dist.get_rank()
    return [meeting.meet("it", f"{n}" if same else f"{n} of {rank}") for n in range(3)]


def much() -> list[int]:
    """How long the words are that rank 0 does not repeat."""
    meeting.DIRECT, meeting.LARGEST = 1, 1 << 10
    rank = dist.get_rank()
    heard = meeting.meet("it", f"{rank}" * 1000), meeting.meet("it", f"{rank}")
    meeting.LARGEST = 1 << 20
    return [len(word) for words in heard for word in words]


def test_much_is_read_by_each() -> None:
    assert shared_pool(RANKS).run(much) == [[1000] * 4 + [1] * 4] * 4


@pytest.mark.parametrize("direct", [1, 8])
def test_all_hear_the_same(direct: int) -> None:
    for heard in shared_pool(RANKS).run(words, direct, True):
        assert heard == [["0"] * 4, ["1"] * 4, ["2"] * 4]
    for heard in shared_pool(RANKS).run(words, direct, False):
        assert heard == [[f"{n} of {r}" for r in range(4)] for n in range(3)]


def near_words() -> tuple[list[str], list[bool], list[str], list[str]]:
    """What is heard of several calls, which of them had all words in memory; of a call
    that one rank comes late to; of one with a long word."""
    rank, heard, near = dist.get_rank(), [], []
    channel = meeting.current()
    assert channel is not None
    meeting.DIRECT = 8
    where = channel.store, f"{channel.prefix}/new"
    channel.boxes = Mailboxes(rank, RANKS, *where, channel.meetings)
    read = channel.boxes.read

    def noted(number: int) -> Any:
        words = read(number)
        near.append(words is not None)
        return words

    for _ in range(4):  # opens the memory
        meeting.meet("it", "")
    with mock.patch.object(channel.boxes, "read", noted):
        with mock.patch.object(meeting, "_MOMENT", 30.0):
            for n in range(5):
                heard += meeting.meet("it", f"{n} of {rank}")
        with mock.patch.object(meeting, "_MOMENT", 0.0):
            time.sleep(0.2 if rank == 1 else 0.0)
            late = meeting.meet("it", f"late {rank}")
        long = meeting.meet("it", f"{rank}" * (1 << 14))
    return heard, near, late, long


def test_words_are_read_from_memory() -> None:
    """Those of ranks that come together; else, or if they are long, from the store."""
    for heard, near, late, long in shared_pool(RANKS).run(near_words):
        assert heard == [f"{n} of {r}" for n in range(5) for r in range(RANKS)]
        assert late == [f"late {r}" for r in range(RANKS)]
        assert long == [f"{r}" * (1 << 14) for r in range(RANKS)]
        assert near[:5] == [True] * 5 and not near[-1]


def test_a_box_holds_the_word_of_one_call() -> None:
    """Not that of an earlier call, one that is half written, or one taken out."""
    store = dist.HashStore()
    first, second = (Mailboxes(rank, 2, store, "") for rank in range(2))
    for number in range(1, 5):  # opens the memory
        first.prepare(number)
        second.prepare(number)
        first.write(number, f"a{number}")
        second.write(number, f"b{number}")
    assert first.read(4) == second.read(4) == ["a4", "b4"]
    name, path = store.get("/boxes").decode().split("\n")
    with pytest.raises(OSError):  # nobody else opens it
        assert name not in os.readlink(path)
        raise OSError
    assert first.read(1) is None, "of an earlier call"
    second.write(5, "b5")
    assert second.read(5) is None, "the other did not come"
    first.write(5, "a5")
    assert first.read(5) is None, "the second looks in the store"
    first.write(6, "a6")
    second.write(6, "b6")
    at = second._box(0, 6) + meeting._HEAD.size
    second._memory[at : at + 1] = b"x"
    assert second.read(6) is None, "half written"


def test_no_room_for_boxes_is_no_error() -> None:
    """Words go through the store then."""
    store = dist.HashStore()
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError("no room"))
    boxes = Mailboxes(0, 2, store, "")
    with full:
        boxes.prepare(2)
    boxes.write(1, "a")
    assert boxes.read(1) is None
    assert not store.check(["/boxes"])


def test_memory_of_another_is_not_opened(tmp_path: Path) -> None:
    """What another container has at the path of the boxes, if anything."""
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 16))
    store = dist.HashStore()
    store.set("/boxes", f"fxpar-boxes\n{other}")
    boxes = Mailboxes(1, 2, store, "")
    for number in range(5):
        boxes.prepare(number)
        boxes.write(number, "b")
    assert not any(other.read_bytes())


def one_fails(direct: int, which: int) -> tuple[str, list[str]]:
    """What the others are told, and the words of the call after it."""
    meeting.DIRECT = direct
    meeting.meet("it", "before")
    told = "failed itself"
    if dist.get_rank() == which:
        meeting.fail("no memory")
    else:
        try:
            meeting.meet("it", "now")
        except RankMismatchError as error:
            told = str(error)
    return told, meeting.meet("it", "after")


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("direct", [1, 8])
def test_a_rank_that_fails(direct: int, which: int) -> None:
    out = shared_pool(RANKS).run(one_fails, direct, which)
    for rank, (told, after) in enumerate(out):
        assert after == ["after"] * RANKS
        if rank != which:
            assert f"rank {which} failed" in told and "no memory" in told


def one_is_away(direct: int, which: int) -> str:
    """What each rank is told, where one comes only after the others gave it up."""
    meeting.DIRECT = direct
    presence.set_timeouts(1.0, 1.0)
    meeting.meet("it", "before")
    if dist.get_rank() == which:
        while not given_up():
            time.sleep(0.3)
    try:
        meeting.meet("the call", "now")
    except RankMismatchError as error:
        return str(error)
    finally:
        presence.set_timeouts(30.0, 600.0)
    return "met"


@pytest.mark.parametrize(
    ("direct", "which"),
    [
        (1, 0),
        (8, 3),
        pytest.param(1, 3, marks=pytest.mark.slow),
        pytest.param(8, 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_come(direct: int, which: int) -> None:
    pool = shared_pool(RANKS)
    told: list[Any] = pool.run(one_is_away, direct, which)
    pool.renew()
    for text in told:
        assert f"rank {which} did not reach the call" in text
        assert "FXPAR_TIMEOUT" in text and "fxpar.alone()" in text


def idles_with_many_groups() -> tuple[float, float]:
    """The share of a core that a rank is said to compute, which waits, and the share
    that its threads take."""
    groups = [dist.new_group() for _ in range(40)]
    begin, before = time.monotonic(), presence.computed()
    process = time.process_time()
    time.sleep(1.0)
    took = time.monotonic() - begin
    share = (presence.computed() - before) / took
    used = (time.process_time() - process) / took
    for group in groups:
        dist.destroy_process_group(group)
    return share, used


def test_a_rank_with_many_groups_does_not_work() -> None:
    """Each group of gloo has threads that take some time by themselves."""
    for share, used in shared_pool(2).run(idles_with_many_groups):
        assert share < presence.BUSY / 2
        if used <= presence.BUSY:
            pytest.skip("the machine is too busy for threads that idle")


def test_who_serves_and_answers_does_not_work() -> None:
    """The rank with the store computes for those that wait: that is not its program."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before, begin = time.process_time(), presence.computed()
    for _ in range(3000):
        store.add("asked", 0)
    took, computed = time.process_time() - before, presence.computed() - begin
    assert computed < 0.1 * took
    sums = torch.ones(300, 300)
    worker = threading.Thread(target=lambda: [sums @ sums for _ in range(300)])
    worker.start()
    while worker.is_alive() and presence.computed() - begin <= 10 * computed + 0.01:
        time.sleep(0.01)
    assert worker.is_alive(), "what it computes was not seen"
    worker.join()
