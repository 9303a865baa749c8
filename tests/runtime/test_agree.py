"""Ranks agree, or are told why not, on every rank and in bounded time."""

from __future__ import annotations

import time

import pytest

from fxpar import _compat
from fxpar.errors import InputMismatchError, RankMismatchError
from fxpar.runtime import agree
from tests.spawn import shared_pool


def rank() -> int:
    return _compat.default_group().rank()


def caught(fn, *args, **kwargs) -> str:
    """What a round says on this rank, "" where it passes."""
    try:
        fn(*args, **kwargs)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_one_process_agrees() -> None:
    agree.agree("graph", "digest", "text")
    assert agree.gather("tag", "text") == ["text"]
    agree.abort("nobody hears this")


def rounds() -> list[str]:
    me, said = rank(), []
    channel = agree._channel()
    before = channel.rounds  # other tests ran in this process
    said.append(caught(agree.agree, "graph0", "same", "plan"))
    said.append(agree.gather("devices", f"of {me}"))
    text = "a\nb\nc" if me != 2 else "a\nx\nc"
    said.append(caught(agree.agree, "graph1", agree.digest_of(text), text))
    agree.abort("everyone was told already")
    said.append(caught(agree.agree, f"graph{3 if me == 1 else 2}", "same", "plan"))
    said.append(caught(agree.gather, "last", "in step again"))
    left = [i for i in range(1, 5) if channel.has(channel.key(before + i, me))]
    return [*said, left]


@pytest.mark.multiprocess
def test_rounds() -> None:
    for said in shared_pool(4).run(rounds, timeout=60.0):
        first, gathered, differ, tags, last, left = said
        assert first == last == ""
        assert gathered == ["of 0", "of 1", "of 2", "of 3"]
        assert "ranks disagree about the program: rank 2 from rank 0" in differ
        assert "-b\n+x" in differ and "--- rank 0" in differ and "+++ rank 2" in differ
        assert "rank 1 is at 'graph3', rank 0 at 'graph2'" in tags
        # Rounds that failed are kept for ranks that come late; others are deleted.
        assert left == [3]


def other_errors() -> None:
    text = f"x {rank()}"
    agree.agree(
        "inputs", text, text, what="inputs", fix="feed", error=InputMismatchError
    )


@pytest.mark.multiprocess
def test_the_error_is_the_callers() -> None:
    for error in shared_pool(4).errors(other_errors, ranks=2):
        assert type(error) is InputMismatchError
        assert "about inputs: rank 1 from rank 0" in str(error) and error.fix == "feed"


def one_fails(who: int) -> tuple[str, float, str]:
    agree.agree("start", "", "")
    begin = time.monotonic()
    if rank() == who:
        agree.abort("UnknownOpError: no rule for op\n  fix: give it one")
        said = ""
    else:
        said = caught(agree.agree, "graph", "digest", "plan", timeout=30.0)
        agree.abort("as the backend does with any error; must change nothing")
    return said, time.monotonic() - begin, caught(agree.agree, "next", "", "")


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
    agree.agree("start", "", "")
    if rank() == who:
        time.sleep(0.6)
    said = caught(agree.agree, "graph", "digest", "plan", timeout=0.2)
    # The one that is late reads the verdict, and is in step again.
    return said, caught(agree.agree, "next", "", "")


@pytest.mark.multiprocess
def test_a_missing_rank_is_named() -> None:
    pool = shared_pool(4)
    pool.renew()
    for said, after in pool.run(one_is_missing, 3):
        assert "rank 3 did not come to 'graph' in 0 s" in said
        assert "rank 0 is at round 2, rank 3 came to round 1\n" in said and after == ""
    said = [text for text, _ in pool.run(one_is_missing, 0)]
    assert said[0] == ""
    assert all("rank 0 did not come to 'graph'" in text for text in said[1:])


def one_works() -> list[str]:
    agree.agree("start", "", "")
    if rank() == 0:
        time.sleep(0.6)
    return agree.gather("the plan", f"of {rank()}", timeout=0.2, work=20.0)


@pytest.mark.multiprocess
def test_a_rank_that_works_is_waited_for() -> None:
    for gathered in shared_pool(4).run(one_works, ranks=2):
        assert gathered == ["of 0", "of 1"]


def lives() -> list[int]:
    channel = agree._channel()
    assert channel.rounds == 0
    agree.agree("start", "", "")
    return [channel.rounds, int(agree._channel() is channel)]


@pytest.mark.multiprocess
def test_a_new_process_group_starts_over() -> None:
    pool = shared_pool(4)
    for _ in range(2):
        pool.renew()
        assert pool.run(lives) == [[1, 1]] * 4
