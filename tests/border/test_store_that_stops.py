"""The process that holds the store of the process group stops: every other rank says
so and ends, wherever it is. A job that is stopped as a whole, and goes on, does not."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from fxpar import _torch
from tests.helpers.scripts import run_script

pytestmark = pytest.mark.multiprocess

# The store is that of rank 0, or of a process that is no rank, as torchrun's is.
SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from fxpar import pipeline

folder, holder, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
me, holds = int(os.environ["RANK"]), {"rank": 0, "agent": 2}[holder]

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

def say(name, text=""):
    (folder / f"{name}.new").write_text(text)
    os.replace(folder / f"{name}.new", folder / name)

def stop():
    if holder == "agent":
        say("stop")
        wait_for("stopping")
        time.sleep(0.2)
    else:
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)

if me == holds:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say("port", str(store.port))
if me == 2:
    wait_for("stop")
    say("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)
wait_for("port")
if me != holds:
    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()))
dist.init_process_group("gloo", store=store, rank=me, world_size=2)

def decided(*args, **kwargs):
    stop()
    return before(*args, **kwargs)

before = pipeline.decided
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
options = {"codegen": "eager", "plan": "propagate"}
step = torch.compile(model, backend="fxpar", options=options)
torch.manual_seed(0)
x = torch.randn(8, 16)
if when == "compiles" and me == 0:
    pipeline.decided = decided
if when not in ("before", "compiles"):
    step(x).sum().backward()
    loss = step(x).sum()
    loss.backward()
    loss = step(x).sum()
    dist.barrier()
if when not in ("compiles",):
    if me == 0:
        stop()
    wait_for("stopping")
    time.sleep(0.2)
print("on the way", flush=True)
if when == "collective":
    loss.backward()
elif when == "shutdown":
    dist.barrier()
    dist.destroy_process_group()
else:
    step(x)
    step(x)
print("went on", flush=True)
"""

SILENT = r"the store of the process group has not answered for \d+ s"


@pytest.mark.parametrize(
    ("holder", "when"),
    [
        ("agent", "between"),
        *(
            pytest.param(holder, when, marks=pytest.mark.slow)
            for holder in ("rank", "agent")
            for when in ("before", "compiles", "between", "collective", "shutdown")
            if (holder, when) != ("agent", "between")
            # With the store of an agent both ranks come to the end of a collective.
            and (holder, when) not in (("agent", "collective"), ("agent", "shutdown"))
        ),
    ],
)
def test_the_others_say_so_and_end(holder: str, when: str, tmp_path: Path) -> None:
    agent = holder == "agent"
    ended = run_script(
        SCRIPT,
        *(str(tmp_path), holder, when),
        ranks=3 if agent else 2,
        env={"FXPAR_TIMEOUT": "2"},
        fork=True,
        stopped=[2 if agent else 0],
    )
    healthy = ended[:2] if agent else ended[1:]
    for each in healthy:
        assert each.code == 1, each.output
        assert re.search(SILENT, each.output), each.output
        assert "went on" not in each.output
        assert "RankMismatchError" in each.output and "<string>:" in each.output


WHOLE = """
import os, signal, sys, time
from pathlib import Path
folder, me = Path(sys.argv[1]), int(os.environ["RANK"])
if me == 2:  # neither a rank nor stopped
    pids = []
    while len(pids) < 3:
        pids = [int(file.name) for file in folder.glob("[0-9]*")]
        time.sleep(0.02)
    time.sleep(1.0)  # rank 0 waits for rank 1
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    sys.exit(0)
import torch, torch.distributed as dist
if me == 3:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "new").write_text(str(store.port))
    os.replace(folder / "new", folder / "port")
    (folder / str(os.getpid())).touch()
    while len(list(folder.glob("ended*"))) < 2:
        time.sleep(0.02)
    sys.exit(0)
while not (folder / "port").exists():
    time.sleep(0.02)
store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()))
dist.init_process_group("gloo", store=store, rank=me, world_size=2)
step = torch.compile(
    torch.nn.Linear(8, 8), backend="fxpar", options={"codegen": "eager"}
)
torch.manual_seed(0)
x = torch.ones(4, 8)
step(x).sum().backward()
dist.barrier()
(folder / str(os.getpid())).touch()
for _ in range(60 * me):
    time.sleep(0.05)
for _ in range(3):
    step(x).sum().backward()
dist.barrier()
print("went on", flush=True)
(folder / f"ended{me}").touch()
"""


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """While one rank waits for another: seconds of a process that stands still do not
    count."""
    env = {"FXPAR_TIMEOUT": "4", "FXPAR_LATE_TIMEOUT": "6"}
    ended = run_script(WHOLE, str(tmp_path), ranks=4, env=env, fork=True)
    assert [each.code for each in ended] == [0] * 4, ended
    assert all("went on" in each.output for each in ended[:2])
    assert not any("has not answered" in each.output for each in ended)


def test_only_connections_to_the_store_are_cut() -> None:
    """A server at the same port of another host keeps its clients, and no pipe or file
    is held open."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        servers = [keep(socket.create_server(("127.0.0.2", 0)))]
        port = servers[0].getsockname()[1]
        servers.append(keep(socket.create_server(("127.0.0.3", port))))
        clients = [keep(socket.create_connection(s.getsockname())) for s in servers]
        ends = [keep(server.accept()[0]) for server in servers]

        class Store(SimpleNamespace):
            def __repr__(self) -> str:
                client = f"SocketImpl(fd={clients[0].fileno()}, addr=a, remote=b)"
                return f"TCPStore(client=TCPClient({client}))"

        reads, writes = os.pipe()
        os.set_blocking(reads, False)  # a write end that is open raises
        stack.callback(os.close, reads)
        _torch.distributed.cut_store(Store(port=port))
        os.close(writes)
        assert os.read(reads, 1) == b""  # its end is open nowhere
        assert ends[0].recv(1) == b""
        clients[1].sendall(b"x")
        assert ends[1].recv(1) == b"x"
