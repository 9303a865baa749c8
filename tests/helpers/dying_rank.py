"""A rank that dies between forward and backward of a step; the others may not wait."""

from __future__ import annotations

from tests.helpers.scripts import run_script

SCRIPT = """
import os, torch, torch.distributed as dist
from datetime import timedelta
import fxpar
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
step = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
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


def check_that_ranks_end(mesh: str) -> None:
    """The other of two ranks fails in its backward, and does not wait for ever."""
    survivor, dead = run_script(SCRIPT, ranks=2, fork=True, env={"FXPAR_MESH": mesh})
    assert dead.code == 7
    assert survivor.code not in (0, None)
    assert "alive" in survivor.output and "went on" not in survivor.output
    assert "Error" in survivor.output
