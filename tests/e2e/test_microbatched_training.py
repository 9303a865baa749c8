"""Training with the batch in microbatches, on ranks: losses, gradients, buffers and
the optimizer's state are those of one device, compiled and as a whole step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.helpers.spawn import ranks_of, shared_pool
from tests.helpers.training import Run, compare, one_device, train
from tests.helpers.whole_steps import whole_steps

pytestmark = pytest.mark.multiprocess

STEPS = 3
TRAINED = [
    ("llama", "dp=2", "whole"),
    ("gpt2", "dp=2,tp=2", "sharded"),
    ("resnet", "dp=2", "whole"),
    ("bert", "tp=2", "sharded"),
    ("vit", "dp=2,tp=2", "whole"),
]


def train_in_one_graph(*args: Any) -> Run:
    """GPT-2's loss calls a logger, at which Dynamo else breaks the graph; a part of it
    without a batch can not be cut."""
    import transformers  # noqa: F401  (gives loggers ``warning_once``)

    silent = {logging.Logger.warning_once}
    with torch._dynamo.config.patch(ignore_logging_functions=silent):
        return train(*args)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["propagate", "search"])
@pytest.mark.parametrize(("name", "mesh", "rest"), TRAINED)
def test_models_train_as_on_one_device(
    name: str, mesh: str, rest: str, plan: str
) -> None:
    options = {"mesh": mesh, "codegen": "eager", "microbatches": 2, "plan": plan}
    given = name, options, STEPS, rest
    runs = ranks_of(mesh).run(train_in_one_graph, *given, timeout=900.0)
    compare(runs, one_device(name, STEPS))


@pytest.mark.slow
def test_a_model_trains_with_inductor() -> None:
    options = {"mesh": "dp=2", "microbatches": 2}
    runs = shared_pool(2).run(train, "llama", options, STEPS, "sharded", timeout=900.0)
    compare(runs, one_device("llama", STEPS))


@pytest.mark.parametrize(
    ("shard", "inputs"),
    [
        (True, "local"),
        pytest.param(False, "global", marks=pytest.mark.slow),
        pytest.param(False, "local", marks=pytest.mark.slow),
        pytest.param(True, "global", marks=pytest.mark.slow),
    ],
)
def test_whole_steps_are_those_of_one_device(shard: bool, inputs: str) -> None:
    options = {"mesh": "dp=2", "codegen": "eager", "microbatches": 2, "inputs": inputs}
    options["plan"] = "propagate"
    if inputs == "global":
        wants = [whole_steps(None, STEPS)] * 2
    else:  # norms are of a rank's own rows
        plain = options | {"microbatches": 1}
        wants = shared_pool(2).run(whole_steps, plain, STEPS, shard)
    ranks = shared_pool(2).run(whole_steps, options, STEPS, shard)
    for got, want in zip(ranks, wants, strict=True):
        assert any("2 microbatches" in note for note in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for kind in ("state", "moments", "buffers"):
            for name, x in want[kind].items():
                torch.testing.assert_close(got[kind][name], x, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_what_does_not_divide_is_cut_in_fewer_parts() -> None:
    options = {"mesh": "dp=2", "codegen": "eager", "microbatches": 4}
    want = whole_steps(None, STEPS, size=6)
    for got in shared_pool(2).run(whole_steps, options, STEPS, False, 6):
        # 3 rows on a rank, if the plan splits the batch, else 6.
        assert any("and are cut into 3" in x for x in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
