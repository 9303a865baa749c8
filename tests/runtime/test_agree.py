"""Ranks agree, or are told why not, on every rank and in bounded time."""

from __future__ import annotations

import logging
import time
import weakref

import pytest
import torch.distributed as dist

from fxpar import _torch
from fxpar.errors import InputMismatchError, RankMismatchError, UnknownOpError
from fxpar.runtime.ranks import meeting, presence
from fxpar.runtime.ranks.meeting import current
from tests.helpers.patience import given_up
from tests.helpers.spawn import shared_pool


def rank() -> int:
    return _torch.distributed.default_group().rank()


def caught(fn, *args, **kwargs) -> str:
    """What a round says on this rank, "" where it passes."""
    try:
        fn(*args, **kwargs)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_one_process_agrees() -> None:
    meeting.agree("graph", "text")
    assert meeting.gather("tag", "text") == ["text"]
    meeting.abort(ValueError("nobody hears this"))


def rounds() -> list[str]:
    me, said = rank(), []
    said.append(caught(meeting.agree, "graph0", "plan"))
    said.append(meeting.gather("devices", f"of {me}"))
    text = "a\nb\nc" if me != 2 else "a\nx\nc"
    try:
        meeting.agree("graph1", text)
    except RankMismatchError as error:
        said.append(str(error))
        meeting.abort(error)  # which everyone was told already
    said.append(caught(meeting.agree, f"graph{3 if me == 1 else 2}", "plan"))
    said.append(caught(meeting.gather, "last", "in step again"))
    return said


@pytest.mark.multiprocess
def test_rounds() -> None:
    for said in shared_pool(4).run(rounds, timeout=60.0):
        first, gathered, differ, tags, last = said
        assert first == last == ""
        assert gathered == ["of 0", "of 1", "of 2", "of 3"]
        assert "ranks disagree about the program: rank 2 from rank 0" in differ
        assert "-b\n+x" in differ and "--- rank 0" in differ and "+++ rank 2" in differ
        assert "rank 1 is at 'graph3', rank 0 at 'graph2'" in tags


def other_errors() -> None:
    text = f"x {rank()}"
    meeting.agree("inputs", text, what="inputs", fix="feed", error=InputMismatchError)


@pytest.mark.multiprocess
def test_the_error_is_the_callers() -> None:
    for error in shared_pool(4).errors(other_errors, ranks=2):
        assert type(error) is InputMismatchError
        assert "about inputs: rank 1 from rank 0" in str(error) and error.fix == "feed"


def one_fails(who: int) -> tuple[str, float, str]:
    meeting.agree("start", "")
    begin = time.monotonic()
    if rank() == who:
        meeting.abort(UnknownOpError("no rule for op", fix="give it one"))
        said = ""
    else:
        try:
            meeting.gather("graph", "plan", 30.0)
        except RankMismatchError as error:
            said = str(error)
            meeting.abort(error)  # as the backend does with any; must change nothing
    return said, time.monotonic() - begin, caught(meeting.agree, "next", "")


@pytest.mark.multiprocess
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_stops_the_others(who: int) -> None:
    for me, (said, seconds, after) in enumerate(shared_pool(4).run(one_fails, who)):
        assert after == ""
        if me != who:
            assert seconds < 10.0
            assert said.startswith(
                f"rank {who} failed:\nUnknownOpError: no rule for op"
            )


def one_is_missing(who: int) -> tuple[str, str]:
    meeting.agree("start", "")
    if rank() == who:
        while not given_up():
            time.sleep(0.05)
    said = caught(meeting.gather, "graph", "digest", 0.2)
    # The one that is late reads the verdict, and is in step again.
    return said, caught(meeting.agree, "next", "")


@pytest.mark.multiprocess
def test_a_missing_rank_is_named() -> None:
    pool = shared_pool(4)
    pool.renew()
    for said, after in pool.run(one_is_missing, 3):
        assert "rank 3 did not reach 'graph', where rank " in said and after == ""
    # Nor does rank 0 go on by itself, once others have given up.
    said = [text for text, _ in pool.run(one_is_missing, 0)]
    assert all("rank 0 did not reach 'graph'" in text for text in said)


def one_works() -> list[str]:
    meeting.agree("start", "")
    if rank() == 0:
        with presence.works("compiles"):
            time.sleep(3.0)
    return meeting.gather("the plan", f"of {rank()}", 1.2)


def fails_twice() -> list[str]:
    """A failure of every rank that all were told of, then one of a rank's own."""
    said = [caught(meeting.agree, "graph", "text", key=str(rank()))]
    if rank() == 1:
        meeting.abort(UnknownOpError("no rule for op"))
        said.append("")
    else:
        said.append(caught(meeting.agree, "next", ""))
    return [*said, caught(meeting.agree, "last", "")]


@pytest.mark.multiprocess
def test_a_failure_is_told_though_an_older_one_was() -> None:
    for me, (first, second, last) in enumerate(shared_pool(2).run(fails_twice)):
        assert "ranks disagree" in first and last == ""
        assert ("rank 1 failed:\nUnknownOpError: no rule" in second) == (me == 0)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_works_is_waited_for() -> None:
    for gathered in shared_pool(4).run(one_works, ranks=2):
        assert gathered == ["of 0", "of 1"]


def lives() -> list[int]:
    channel = current()
    assert channel.meetings == 0
    meeting.agree("start", "")
    return [channel.meetings, int(current() is channel)]


@pytest.mark.multiprocess
def test_a_new_process_group_starts_over() -> None:
    pool = shared_pool(4)
    for _ in range(2):
        pool.renew()
        assert pool.run(lives) == [[1, 1]] * 4


class _BusyStore:
    """A store that is late at first, and then lost."""

    def __init__(self) -> None:
        self.asked, self.written = 0, list[str]()

    def add(self, key: str, amount: int) -> int:
        self.asked += 1
        if self.asked == 1:
            raise dist.DistStoreError("wait timeout after 300000ms")
        if self.asked > 2:
            raise dist.DistNetworkError("Broken pipe")
        return 1

    def set(self, key: str, value: str) -> None:
        self.written.append(key)

    def check(self, keys: list[str]) -> bool:
        return False


def test_a_store_that_is_late_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that did not answer any more would pass for one that hangs."""
    group, store = type("Group", (), {})(), _BusyStore()
    monkeypatch.setattr(_torch.distributed, "default_group", lambda: group)
    monkeypatch.setattr(presence, "BEAT", 0.01)
    me = presence.Presence(weakref.ref(group), store, 1, 2, "it")
    with caplog.at_level(logging.INFO, logger="fxpar"):
        me._run()
    assert store.asked == 3 and store.written == ["it/where/1"]
    assert "rank 1 cannot report where it is: Broken pipe" in caplog.text
