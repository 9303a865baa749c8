"""Real models trained on ranks that each hold a part of every sequence."""

from __future__ import annotations

import pytest

from tests.helpers.spawn import ranks_of
from tests.helpers.training import compare, one_device, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS = 3


@pytest.mark.parametrize("rest", ["whole", "sharded"])
@pytest.mark.parametrize("mesh", ["cp=2", "dp=2,cp=2"])
def test_op_by_op(mesh: str, rest: str) -> None:
    options = {"mesh": mesh, "plan": "propagate", "codegen": "eager"}
    runs = ranks_of(mesh).run(train, "llama/1", options, STEPS, rest, timeout=300.0)
    compare(runs, one_device("llama/1", STEPS))


def test_generated_kernels() -> None:
    options = {"mesh": "cp=2", "plan": "propagate", "codegen": "inductor"}
    runs = ranks_of("cp=2").run(train, "llama/1", options, STEPS, timeout=900.0)
    compare(runs, one_device("llama/1", STEPS))


def test_a_model_with_its_own_mask() -> None:
    options = {"mesh": "sp=2", "plan": "propagate", "codegen": "eager"}
    runs = ranks_of("sp=2").run(train, "gpt2/1", options, STEPS, timeout=300.0)
    compare(runs, one_device("gpt2/1", STEPS))
