"""Ranks that are late to a call, or never come: those that are late are waited for, and
where nobody can come any more all end, long before `FXPAR_LATE_TIMEOUT`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import meeting, presence
from tests.helpers import processes
from tests.helpers.patience import given_up
from tests.helpers.scripts import run_script
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

BEGIN = """
import os, sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
me = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
options = {"codegen": "eager", "plan": "propagate"}
run = torch.compile(model, backend="fxpar", options=options)
torch.manual_seed(0)
x = torch.ones(4, 4)
run(x).sum().backward()
"""

LATE = """
if me == 1:
    time.sleep(6)
run(x).sum().backward()
dist.barrier()
print("went on", flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for_and_named() -> None:
    """One that does nothing for longer than ranks inside a call may."""
    env = {"FXPAR_TIMEOUT": "2"}
    first, second = run_script(BEGIN + LATE, ranks=2, env=env, fork=True)
    assert first.code == second.code == 0, (first, second)
    assert "went on" in first.output and "went on" in second.output
    says = r"fxpar: rank 0 waits for others at a call, \d+ s so far; rank 1 is idle at "
    says += r"<string>:13 \(its last call: call \d+, a call\)\n"
    assert len(re.findall(says, first.output)) == 1, first.output
    assert "so far" not in second.output


def one_is_idle_inside_a_call() -> str:
    """What a rank says of a round whose other rank does not come."""
    presence.set_timeouts(1.0, 600.0)
    meeting.agree("start", "")
    try:
        with presence.in_call():
            if dist.get_rank() == 1:
                while not given_up():
                    time.sleep(0.1)
            meeting.agree("graph", "plan")
    except RankMismatchError as error:
        return str(error)
    finally:
        presence.set_timeouts(30.0, 600.0)
    return ""


def test_ranks_inside_a_call_wait_less() -> None:
    pool = shared_pool(2)
    for said in pool.run(one_is_idle_inside_a_call, timeout=60.0):
        assert "rank 1 did not reach 'graph', where rank 0 waited" in said
        assert "(FXPAR_TIMEOUT)" in said
    pool.renew()


def at_different_places(first: int) -> str:
    """One rank comes to a call, the other to an agreement."""
    meeting.agree("start", "")
    try:
        if dist.get_rank() == first:
            meeting.meet("the call", "word")
        else:
            meeting.agree("graph", "plan")
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_at_different_places_end_at_once(first: int) -> None:
    places = ["'graph'", "'graph'"]
    places[first] = "the call"
    for text in shared_pool(2).run(at_different_places, first, timeout=100.0):
        assert f"rank 1 is at {places[1]}, rank 0 at {places[0]}" in text


STOPS_EARLY = """
for step in range(4):
    if step == 2 and me == 1:
        break
    run(x).sum().backward()
dist.barrier()
print("went on", flush=True)
"""

LEAVES_OUT = """
for step in range(4):
    loss = run(x).sum()
    if step != 2 or me == 1:
        loss.backward()
"""


@pytest.mark.parametrize(
    ("script", "place"),
    [
        (STOPS_EARLY, "rank 1 is in <string>:16, in a collective"),
        pytest.param(
            LEAVES_OUT,
            "rank 1 is in a graph at <string>:15, in a collective",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_hangs_in_a_collective_ends_the_wait(
    script: str, place: str
) -> None:
    env = {"FXPAR_TIMEOUT": "4"}
    ended = run_script(BEGIN + script, ranks=2, env=env, fork=True, timeout=60.0)
    assert 0 not in [each.code for each in ended], ended
    assert "went on" not in ended[0].output
    assert "ranks wait for one another at different places" in ended[0].output
    assert place in ended[0].output, ended[0].output


ENDS = """
def steps():
    for step in range(4):
        if step == 2 and me == int(sys.argv[1]):
            END
        run(x).sum().backward()
steps()
"""
BY = {
    "raise ValueError('no more')": "ValueError: no more",
    "sys.exit(3)": r"sys.exit\(3\)",
    "def fail(): raise KeyError('data')\n"
    "            threading.Thread(target=fail, name='loader').start()\n"
    "            return": r"KeyError: 'data' \(in loader\)",
}


@pytest.mark.parametrize(
    ("end", "who", "plain"),
    [
        ("raise ValueError('no more')", 1, False),
        *(
            pytest.param(end, who, True, marks=pytest.mark.slow)
            for end in BY
            for who in (0, 1)
        ),
    ],
)
def test_what_ended_a_rank_is_told(
    end: str, who: int, plain: bool, tmp_path: Path
) -> None:
    """Of the rank that holds the store too (``plain``: rank 0, not torchrun)."""
    script = BEGIN + ENDS.replace("END", end)
    if plain:
        script = script.replace('dist.init_process_group("gloo")', OWN_STORE)
    arguments = script, str(who), str(tmp_path / "port")
    ended = run_script(*arguments, ranks=2, fork=not plain)
    other = ended[1 - who]
    assert other.code == 1, ended
    line = f"rank {who} ended: {BY[end]}"
    if who == 0:  # what rank 0 prints itself is not printed again
        line += "|rank 1 ends with the error that rank 0 prints"
    assert re.search(line, other.output), other.output


OWN_STORE = """
rank, file = int(os.environ["RANK"]), sys.argv[2]
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    open(f"{file}.new", "w").write(str(store.port))
    os.replace(f"{file}.new", file)
while not os.path.exists(file):
    time.sleep(0.02)
if rank != 0:
    store = dist.TCPStore("127.0.0.1", int(open(file).read()))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""


def child_of_python(rank: int, port: int, caught: bool) -> None:
    """A rank that multiprocessing starts; ``caught``: as torch does in ``spawn``."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    meeting.meet("the call", "word")
    try:
        if rank == 1:
            raise ValueError("no more")
    except ValueError:
        if not caught:
            raise
        sys.exit(1)
    meeting.meet("the call", "word")


@pytest.mark.parametrize("caught", [False, True])
def test_what_ended_a_child_of_python_is_told(caught: bool) -> None:
    store, port = processes.host_store()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(processes.log(rank)) for rank in range(2)]
        environment = processes.environment()
        ranks = [
            processes.start(child_of_python, log, environment, rank, port, caught)
            for rank, log in enumerate(logs)
        ]
        processes.end(ranks, patience=60.0)
        output = Path(logs[0].name).read_text()
    del store
    assert "rank 1 ended: ValueError: no more" in output, output


KILLED = """
from pathlib import Path
run(x)
if me == 1:
    os.kill(os.getpid(), 9)
run(x)
"""


@pytest.mark.slow
def test_a_rank_that_was_killed_is_known_to_have_ended() -> None:
    first, second = run_script(BEGIN + KILLED, ranks=2, fork=True, timeout=60.0)
    assert second.code == -signal.SIGKILL and first.code == 1, first
    assert "rank 1 has ended without an error" in first.output


KILLED_EARLY = """
import fxpar
from fxpar.runtime.ranks import meeting, presence
dist.barrier()
meeting.current()
os.kill(os.getpid(), 9)
"""


def test_a_job_that_is_killed_leaves_nothing_in_memory() -> None:
    """Before all ranks have opened what they share."""
    before = set(os.listdir("/dev/shm"))
    begin = BEGIN.partition("model =")[0]
    ended = run_script(begin + KILLED_EARLY, ranks=2, fork=True)
    assert [each.code for each in ended] == [-signal.SIGKILL] * 2, ended
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if name.startswith("fxpar-")]
