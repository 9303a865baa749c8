"""Training in stages, on ranks: losses, gradients, buffers and the optimizer's state
are those of one device, compiled and as a whole step, in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import FxparError
from tests.helpers.scripts import run_script
from tests.helpers.spawn import ranks_of, shared_pool
from tests.helpers.training import compare, one_device, train
from tests.helpers.whole_steps import whole_steps

pytestmark = pytest.mark.multiprocess

STEPS = 3
COMPILED = [
    ("llama", "pp=2", 4),
    ("gpt2", "pp=2,dp=2", 2),
    ("bert", "pp=2,tp=2", None),
    ("vit", "pp=4", 4),
    ("resnet", "pp=2", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "parts"), COMPILED)
def test_models_train_as_on_one_device(name: str, mesh: str, parts: int | None) -> None:
    options = {"mesh": mesh, "codegen": "eager", "microbatches": parts}
    options["plan"] = "propagate"
    runs = ranks_of(mesh).run(train, name, options, STEPS, "whole", timeout=900.0)
    compare(runs, one_device(name, STEPS))


@pytest.mark.slow
def test_a_model_trains_with_inductor() -> None:
    options = {"mesh": "pp=2", "microbatches": 2}
    runs = shared_pool(2).run(train, "llama", options, STEPS, "whole", timeout=900.0)
    compare(runs, one_device("llama", STEPS))


@pytest.mark.parametrize(
    ("mesh", "schedule", "inputs"),
    [
        ("pp=2", "1f1b", "global"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("pp=2", "gpipe", "global"),
                ("pp=2", "interleaved", "global"),
                ("pp=2", "zero_bubble", "global"),
                ("pp=4", "zero_bubble", "global"),
                ("pp=2,dp=2", "interleaved", "global"),
                ("pp=2,tp=2", "1f1b", "global"),
            )
        ],
    ],
)
def test_whole_steps_are_those_of_one_device(
    mesh: str, schedule: str, inputs: str
) -> None:
    options = {"mesh": mesh, "codegen": "eager", "microbatches": 4, "inputs": inputs}
    options |= {"plan": "propagate", "pipeline": schedule}
    want = whole_steps(None, STEPS)
    for got in ranks_of(mesh).run(whole_steps, options, STEPS, timeout=900.0):
        assert any(f"{schedule}, 4 microbatches" in note for note in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for kind in ("state", "moments", "buffers"):
            for name, x in want[kind].items():
                torch.testing.assert_close(got[kind][name], x, rtol=1e-9, atol=1e-11)


DIES = """
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


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others() -> None:
    survivor, dead = run_script(DIES, ranks=2, fork=True, env={"FXPAR_MESH": "pp=2"})
    assert dead.code == 7
    assert survivor.code not in (0, None)
    assert "alive" in survivor.output and "went on" not in survivor.output
    assert "Error" in survivor.output


def refused(options: dict[str, Any]) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    try:
        fxpar.shard(model, mesh=options["mesh"])
    except FxparError as error:
        return str(error)
    return ""


def test_parameters_at_rest_are_refused() -> None:
    for text in shared_pool(2).run(refused, {"mesh": "pp=2"}):
        assert "axis of stages" in text
