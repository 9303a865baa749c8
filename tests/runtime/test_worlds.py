"""Places: ranks that meet, agree and fail by themselves, beside all ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import FxparError, InputMismatchError, RankMismatchError
from fxpar.runtime.calls.open_sizes import Fed, Sizes
from fxpar.runtime.ranks import (
    check_inputs,
    groups,
    meeting,
    presence,
    worlds,
)
from fxpar.runtime.ranks.groups import Ranks
from fxpar.sharding.program import Input
from fxpar.sharding.spec import Spec
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

# Of the test: ranks 0 and 1 are the first place, 2 and 3 the second.
MESH = "dp=2,tp=2"


def join(mesh: str = MESH) -> Ranks:
    """This process's place, once all ranks are here, with channels open."""
    ranks = groups.join(Options(mesh=mesh, inputs="local"))
    meeting.gather("begin", "")
    return ranks


def place_of(mesh: str) -> dict[str, Any]:
    """What a rank is told of its place."""
    ranks = join(mesh)
    with ranks.inside():
        world = worlds.current()
        assert world is not None
        numbers = meeting.gather_data("numbers", [dist.get_rank()])
        return {
            "mesh": str(ranks.mesh),
            "rank": ranks.rank,
            "open": ranks.open,
            "manual": ranks.manual and ranks.manual.axes,
            "ranks": list(world.ranks),
            "place": (world.place, world.places),
            "gathered": [number for [number] in numbers],
            "texts": meeting.gather("it", str(dist.get_rank())),
            "words": meeting.meet("it", str(dist.get_rank())),
            "leads": meeting.is_leader(),
            "channel": meeting.current() is not None,
        }


@pytest.mark.parametrize(
    ("mesh", "place", "manual", "members"),
    [
        ("dp=2,tp=2", "dp=1,tp=2", ("dp",), [[0, 1], [2, 3]]),
        ("tp=2,dp=2", "tp=2,dp=1", ("dp",), [[0, 2], [1, 3]]),
        ("dp=2,pp=2", "dp=1,pp=2", ("dp",), [[0, 1], [2, 3]]),
        ("dp=2,ep=2", "dp=1,ep=1", ("dp", "ep"), [[0], [1], [2], [3]]),
        ("dp=4", "dp=1", ("dp",), [[0], [1], [2], [3]]),
        ("dp=2*2", "dp=1", ("dp:(1)2", "dp:(2)2"), [[0], [1], [2], [3]]),
        ("auto", "dp=1", ("dp",), [[0], [1], [2], [3]]),
        ("tp=2*2", "tp=2*2", None, [[0, 1, 2, 3]]),
        ("dp=1,tp=4", "dp=1,tp=4", None, [[0, 1, 2, 3]]),
    ],
)
def test_places_of_a_mesh(mesh: str, place: str, manual: Any, members: Any) -> None:
    of_rank = {rank: each for each in members for rank in each}
    for rank, result in enumerate(shared_pool(4).run(place_of, mesh)):
        mine = of_rank[rank]
        assert result["mesh"] == place and result["manual"] == manual
        assert not result["open"]
        assert result["ranks"] == result["gathered"] == mine
        assert result["rank"] == mine.index(rank)
        assert result["place"] == (members.index(mine), len(members))
        assert result["texts"] == result["words"] == list(map(str, mine))
        assert result["leads"] == (rank == mine[0])
        assert result["channel"] == (len(mine) > 1)


def in_turn() -> tuple[list[Any], list[int]]:
    """What is heard where places meet at their own times, and all ranks in between;
    how often a rank came, by its counts."""
    ranks, me = join(), dist.get_rank()
    heard: list[Any] = []
    turns = 2 if me < 2 else 5
    before = _counts()
    for turn in range(turns):
        time.sleep(0.05 * (me % 3))
        with ranks.inside():
            heard.append(meeting.meet("it", f"{me} {turn}"))
            heard.append(meeting.gather(f"turn {turn}", str(me)))
            with worlds.inside(None):  # as a backward in a call of a place
                assert worlds.current().size == 4
            assert worlds.current().size == 2
            assert meeting.agree(f"the end of {turn}", "text")
    heard.append(meeting.meet("all", f"{me}"))
    return heard, [now - then for now, then in zip(_counts(), before, strict=True)]


def _counts() -> list[int]:
    """Meetings of all ranks, then those of the place."""
    world = groups.join(Options(mesh=MESH, inputs="local")).world
    out = []
    for each in (None, world):
        with worlds.inside(each):
            channel = meeting.current()
        assert channel is not None
        out.append(channel.meetings)
    return out


def test_places_meet_at_their_own_times() -> None:
    for rank, (heard, counts) in enumerate(shared_pool(4).run(in_turn)):
        place, turns = ([0, 1], 2) if rank < 2 else ([2, 3], 5)
        for turn in range(turns):
            assert heard[2 * turn] == [f"{r} {turn}" for r in place]
            assert heard[2 * turn + 1] == list(map(str, place))
        assert heard[-1] == ["0", "1", "2", "3"]
        assert counts == [1, 3 * turns]


def sums_along_axes() -> dict[str, Any]:
    """Sums and names of groups that places ask for in other orders, on ranks that are
    in other numbers of groups; one of them is asked for by one place alone."""
    ranks, me = join(), dist.get_rank()
    if me == 3:  # torch names groups that only members make by how many there are
        dist.new_group([3], use_local_synchronization=True)
    out: dict[str, Any] = {}

    def ask(axes: str, of: Ranks = ranks) -> None:
        name = of.group(axes.split("+"))
        total = torch.ops._c10d_functional.all_reduce(
            torch.tensor([10.0**me]), "sum", name
        )
        total = torch.ops._c10d_functional.wait_tensor(total)
        out[axes] = [name, total.item()]

    for axes in ("tp", "dp", "dp+tp") if me < 2 else ("dp", "dp+tp"):
        ask(axes)
    x = torch.tensor([float(me)])
    with ranks.inside():
        check_inputs.broadcast(x)
        worlds.barrier()
    out["first"] = x.item()
    same = groups.join(Options(mesh=MESH))  # the whole mesh, in the same process
    assert same.world is None and same.mesh.size == 4
    ask("tp", same)
    assert ranks.group(["tp"]) == out["tp"][0]
    # A place's value is a DTensor over its ranks.
    part = ranks.dtensor(torch.full((2,), float(me)), Spec("tp"))
    out["whole"] = part.full_tensor().tolist()
    out["owned"] = groups.has_device_mesh(part.device_mesh)
    return out


def test_groups_of_places() -> None:
    pool = shared_pool(4)
    pool.renew()
    results = pool.run(sums_along_axes)
    pool.renew()
    for rank, result in enumerate(results):
        base = rank // 2 * 2
        assert result["tp"] == ["dp=2,tp=2/tp", 10.0**base + 10.0 ** (base + 1)]
        assert result["dp"] == ["dp=2,tp=2/dp", 10.0 ** (rank % 2) * 101]
        assert result["dp+tp"][1] == 1111.0
        assert result["first"] == base
        assert result["whole"] == [base, base, base + 1, base + 1] and result["owned"]


def one_fails(way: str) -> tuple[str, float]:
    """What each rank hears where rank 3 fails, and after how long; its place goes on
    with the next call, and all ranks meet then."""
    ranks, me, said = join(), dist.get_rank(), ""
    begin = time.monotonic()
    with ranks.inside():
        try:
            if me == 3 and way == "round":
                meeting.abort(ValueError("no memory"))
            elif me == 3:
                meeting.fail("no memory")
            elif way == "round":
                meeting.agree("graph", "plan")
            else:
                meeting.meet("it", "word")
        except RankMismatchError as error:
            said = str(error)
        took = time.monotonic() - begin
        assert len(meeting.meet("it", "after")) == 2
        assert len(meeting.gather("after", "it")) == 2
    assert len(meeting.meet("it", "all")) == 4
    return said, took


@pytest.mark.parametrize("way", ["round", "call"])
def test_a_rank_fails_its_place_alone(way: str) -> None:
    results = shared_pool(4).run(one_fails, way)
    assert [bool(said) for said, _ in results] == [False, False, True, False]
    said, took = results[2]
    assert "rank 3 failed" in said and "no memory" in said and took < 20.0


def unlike(what: str) -> str:
    """What a rank says of a disagreement in the second place."""
    ranks, me = join(), dist.get_rank()
    x = torch.full((3,), float(me // 2))
    with ranks.inside():
        try:
            if what == "inputs":
                x += me == 3
                check_inputs.check_same([("x", "input", x)])
            else:
                meeting.agree("graph", f"text {me}", key=str(me // 3))
        except (InputMismatchError, RankMismatchError) as error:
            return str(error)
    return ""


def test_what_ranks_of_a_place_must_have_alike() -> None:
    """Places may differ; errors have the numbers by which users know ranks."""
    pool = shared_pool(4)
    *fine, first, second = pool.run(unlike, "inputs")
    assert fine == ["", ""] and first == second
    assert "rank 3 does not feed what rank 2 feeds" in first
    assert "DistributedSampler(num_replicas=2, rank=1)" in first
    *fine, first, second = pool.run(unlike, "plans")
    assert fine == ["", ""] and first == second
    assert "rank 3 from rank 2" in first
    assert "--- rank 2" in first and "+text 3" in first


def at_different_places() -> tuple[str, float]:
    """Rank 0 comes to a call of its place, all others to one of all ranks; what they
    say, and after how long. Who ends first goes on, so that others hear of it."""
    ranks, me, said = join(), dist.get_rank(), ""
    begin = time.monotonic()
    try:
        if me == 0:
            with ranks.inside():
                meeting.meet("the call", "word")
        else:
            meeting.meet("the backward", "word")
    except RankMismatchError as error:
        said = str(error)
    return said, time.monotonic() - begin


def test_ranks_that_wait_for_one_another_in_two_worlds_end_at_once() -> None:
    pool = shared_pool(4)
    pool.renew()
    results = pool.run(at_different_places, timeout=100.0)
    pool.renew()
    for said, took in results:
        assert took < 30.0, said
        assert "ranks wait for one another at different places" in said
        assert "waits for others at the" in said
    first, second = results[0][0], results[1][0]
    assert "the call" in first and "the backward" in second


def one_is_held_up() -> float:
    """Rank 0 waits for rank 1 in a call of their place, which waits for rank 3 in
    another group, which works for longer than either wait may last."""
    ranks, me = join(), dist.get_rank()
    presence.set_timeouts(3.0, 3.0)
    begin = time.monotonic()
    try:
        if me == 3:
            with presence.works("compiles"):
                time.sleep(7.0)
        if me in (1, 3):
            ranks.group(["dp"])
        if me in (0, 1):
            with ranks.inside(), presence.in_call():
                meeting.agree("graph", "plan")
    finally:
        presence.set_timeouts(30.0, 600.0)
    return time.monotonic() - begin


@pytest.mark.slow
def test_who_waits_for_another_place_is_waited_for() -> None:
    pool = shared_pool(4)
    pool.renew()
    took = pool.run(one_is_held_up, timeout=60.0)
    pool.renew()
    assert took[0] > 6.0 and took[1] > 6.0


def counts_that_differ() -> list[str]:
    """All ranks meet while ranks 2 and 3 are at a call of their place of a far higher
    number, for which one of them is late."""
    ranks, me = join(), dist.get_rank()
    with ranks.inside():
        for turn in range(40 if me > 1 else 1):
            meeting.meet("it", f"{turn}")
        if me == 3:
            time.sleep(3.0)
        if me > 1:
            meeting.meet("it", "late")
            meeting.gather("late", "it")
    return meeting.meet("all", f"{me}")


@pytest.mark.slow
def test_counts_of_two_worlds_are_not_compared() -> None:
    for heard in shared_pool(4).run(counts_that_differ):
        assert heard == ["0", "1", "2", "3"]


def a_member_does_not_come() -> str:
    """What ranks say of a group that one of its members does not come to."""
    ranks, said = join(), ""
    presence.set_timeouts(1.0, 2.0)
    try:
        if dist.get_rank() in (0, 1, 3):
            ranks.group(["dp"])
    except RankMismatchError as error:
        said = str(error)
    finally:
        presence.set_timeouts(30.0, 600.0)
    time.sleep(0.0 if said else 4.0)
    return said


@pytest.mark.slow
def test_a_group_of_which_a_member_does_not_come() -> None:
    pool = shared_pool(4)
    pool.renew()
    said = pool.run(a_member_does_not_come, timeout=60.0)
    pool.renew()
    assert said[1:] == ["", "", ""]
    assert "rank 2 did not reach the process group dp=2,tp=2/dp" in said[0]
    assert "where rank 0 waited" in said[0]


_KEPT: list[Ranks] = []


def in_an_ended_world() -> str:
    """What is said of a place of the process group before this one."""
    if not _KEPT:
        _KEPT.append(join())
        return ""
    try:
        with _KEPT.pop().inside():
            return "inside"
    except FxparError as error:
        return str(error)


def test_a_place_ends_with_its_process_group() -> None:
    pool = shared_pool(4)
    pool.run(in_an_ended_world)
    pool.renew()
    for said in pool.run(in_an_ended_world):
        assert "a process group that has ended" in said
        assert "torch.compiler.reset()" in said


def test_one_process_has_no_world() -> None:
    assert _torch.distributed.default_group() is None
    assert worlds.current() is None and worlds.global_rank(3) == 3
    worlds.barrier()
    with worlds.inside(None):
        assert meeting.current() is None


def unequal_sizes() -> str:
    """What the ranks of this process's place hear where their sizes differ."""
    ranks = join()
    module = torch.fx.symbolic_trace(torch.nn.Identity())
    (node,) = module.graph.find_nodes(op="placeholder")
    node.meta["example_value"] = torch.ones(2)
    fed = Fed(module, [Input("x", "input")], None)
    with ranks.inside(), pytest.raises(InputMismatchError) as error:
        fed.require_same([Sizes(((2,),), ()), Sizes(((3,),), ())])
    return str(error.value)


def test_ranks_of_a_place_are_named_as_users_number_them() -> None:
    first, _, _, last = shared_pool(4).run(unequal_sizes)
    assert "[2] on rank 0, [3] on rank 1" in first
    assert "[2] on rank 2, [3] on rank 3" in last
