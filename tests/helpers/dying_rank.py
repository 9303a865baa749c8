"""A rank that dies in a step, or hangs; the others may not wait."""

from __future__ import annotations

import re

from tests.helpers.scripts import run_script

SCRIPT = """
import os, torch, torch.distributed as dist
from datetime import timedelta
import fxpar
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
options = {"codegen": "eager", "plan": "propagate"}
step = torch.compile(model, backend="fxpar", options=options)
x = torch.randn(8, 16)
step(x).sum().backward()
dist.barrier()
loss = step(x).sum()
if dist.get_rank() == 1:
    os._exit(7)
print("alive", flush=True)
loss.backward()
print("went on", flush=True)
"""


def check_that_ranks_end(mesh: str, said: str) -> None:
    """The other of two ranks fails in its backward, says so, and does not wait for
    ever."""
    survivor, dead = run_script(SCRIPT, ranks=2, fork=True, env={"FXPAR_MESH": mesh})
    assert dead.code == 7
    assert survivor.code not in (0, None)
    assert "alive" in survivor.output and "went on" not in survivor.output
    assert re.search("(RankMismatch|LostRank)Error: ", survivor.output)
    assert said in survivor.output, survivor.output


AMONG_EXPERTS = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import fxpar
from tests.helpers.mixture import mixture
end, codegen = sys.argv[1:]
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
torch.manual_seed(0)
shapes = (16, 8), (16, 4), (4, 8, 8), (4, 8, 8)
args = [torch.randn(n, requires_grad=True) for n in shapes]
options = {"codegen": codegen, "plan": "propagate", "expert_exchange": "exact"}
step = torch.compile(mixture, backend="fxpar", options=options)
step(*args).sum().backward()
dist.barrier()
loss = step(*args).sum()
if dist.get_rank() == 1:
    if end == "raises":
        raise ValueError("of rank 1 alone")
    if end == "hangs":
        time.sleep(12)
    os._exit(7)
print("alive", flush=True)
begun = time.monotonic()
try:
    loss.backward()
finally:
    print("ended in time", time.monotonic() - begun < 12, flush=True)
"""
# How a rank is not there -> what others say of it.
_LOST = {
    "raises": "rank 1 ended: ValueError: of rank 1 alone",
    "dies": "rank 1 has ended without an error",
    "hangs": "rank 1 is idle at <string>:",
}


def check_that_the_rank_is_named(end: str, codegen: str) -> None:
    """Where one of two ranks "raises", "dies" or "hangs" between forward and backward,
    the other, which sends rows to experts, says which."""
    arguments = AMONG_EXPERTS, end, codegen
    environment = {"FXPAR_MESH": "ep=2"}
    ranks = run_script(*arguments, ranks=2, fork=True, env=environment)
    assert ranks[1].code == (1 if end == "raises" else 7)
    output = ranks[0].output
    assert ranks[0].code not in (0, None)
    assert "alive" in output and "ended in time True" in output
    assert "RankMismatchError" in output and _LOST[end] in output


IN_STAGE = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import fxpar
from fxpar.errors import RankMismatchError
victim, end, stages = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
armed = False

@torch.library.custom_op("dying::here", mutates_args=())
def here(x: torch.Tensor) -> torch.Tensor:
    if armed and dist.get_rank() == victim:
        if end == "raises":
            raise ValueError("of this stage alone")
        if end == "dies":
            os._exit(7)
        time.sleep(15)
        os._exit(7)
    return x.clone()

here.register_fake(torch.empty_like)
here.register_autograd(lambda context, gradient: gradient)
fxpar.rule("dying::here", "b f -> b f")

class Layer(torch.nn.Linear):
    def forward(self, x):
        return torch.ops.dying.here(super().forward(x))

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
torch.manual_seed(0)
model = torch.nn.Sequential(*[Layer(16, 16) for _ in range(stages)])
step = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
x = torch.randn(8, 16)
for _ in range(2):
    step(x).sum().backward()
    dist.barrier()
armed = True
begun = time.monotonic()
try:
    step(x).sum().backward()
except RankMismatchError as error:
    print("says:", repr(error.what), flush=True)
    print("ended in time", time.monotonic() - begun < 14, flush=True)
    os._exit(1)  # at once: others wait for that
"""


def check_that_the_stage_is_named(victim: int, end: str, stages: int = 2) -> None:
    """Where one of the ranks "raises", "dies" or "hangs" in its stage, the others fail
    within the group's timeout, and all say which stage it is, also those that fail
    since another has."""
    arguments, mesh = (str(victim), end, str(stages)), f"pp={stages}"
    environment = {"FXPAR_MESH": mesh}
    ranks = run_script(IN_STAGE, *arguments, ranks=stages, fork=True, env=environment)
    dead = ranks.pop(victim)
    assert dead.code == (1 if end == "raises" else 7)
    assert ("of this stage alone" in dead.output) == (end == "raises")
    for survivor in ranks:
        assert survivor.code not in (0, None)
        assert "ended in time True" in survivor.output
        said = survivor.output.partition("says: ")[2].splitlines()[0]
        last = said.rpartition("failed before")[2]
        assert f"rank {victim}" in last, survivor.output
