"""A rank that dies in a step, or hangs; the others may not wait."""

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


IN_STAGE = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import fxpar
victim, end = int(sys.argv[1]), sys.argv[2]
armed = False

@torch.library.custom_op("dying::here", mutates_args=())
def here(x: torch.Tensor) -> torch.Tensor:
    if armed and dist.get_rank() == victim:
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
model = torch.nn.Sequential(Layer(16, 16), Layer(16, 16))
step = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
x = torch.randn(8, 16)
for _ in range(2):
    step(x).sum().backward()
    dist.barrier()
armed = True
begun = time.monotonic()
try:
    step(x).sum().backward()
finally:
    print("ended in time", time.monotonic() - begun < 14, flush=True)
"""


def check_that_the_stage_is_named(victim: int, end: str) -> None:
    """Where one of two ranks "dies" or "hangs" in its stage, the other fails within the
    group's timeout, and says which stage it is."""
    environment = {"FXPAR_MESH": "pp=2"}
    ranks = run_script(IN_STAGE, str(victim), end, ranks=2, env=environment)
    survivor, dead = ranks[1 - victim], ranks[victim]
    assert dead.code == 7
    assert survivor.code not in (0, None)
    assert "ended in time True" in survivor.output
    assert f"the stage at place {victim} along the axis of stages" in survivor.output
