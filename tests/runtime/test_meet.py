"""Ranks meet: each knows what all are about to run, or why one does not come.

Once as few ranks do, each reading the words of all, and once as many, through rank 0.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import meeting, presence
from tests.helpers.patience import given_up_at_call
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

RANKS = 4


def words(direct: int, same: bool) -> list[list[str]]:
    """What this rank heard in three calls."""
    meeting.DIRECT = direct
    rank = dist.get_rank()
    return [meeting.meet(f"{n}" if same else f"{n} of {rank}", "it") for n in range(3)]


@pytest.mark.parametrize("direct", [1, 8])
def test_all_hear_the_same(direct: int) -> None:
    for heard in shared_pool(RANKS).run(words, direct, True):
        assert heard == [["0"] * 4, ["1"] * 4, ["2"] * 4]
    for heard in shared_pool(RANKS).run(words, direct, False):
        assert heard == [[f"{n} of {r}" for r in range(4)] for n in range(3)]


def one_fails(direct: int, which: int) -> tuple[str, list[str]]:
    """What the others are told, and the words of the call after it."""
    meeting.DIRECT = direct
    meeting.meet("before", "it")
    told = "failed itself"
    if dist.get_rank() == which:
        meeting.fail("no memory")
    else:
        try:
            meeting.meet("now", "it")
        except RankMismatchError as error:
            told = str(error)
    return told, meeting.meet("after", "it")


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
    presence.set_timeout(1.0)
    meeting.meet("before", "it")
    if dist.get_rank() == which:
        while not given_up_at_call():
            time.sleep(0.3)
    try:
        meeting.meet("now", "the call")
    except RankMismatchError as error:
        return str(error)
    finally:
        presence.set_timeout(30.0)
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
        assert f"rank {which} did not come to the call" in text
        assert "FXPAR_TIMEOUT" in text and "fxpar.alone()" in text
