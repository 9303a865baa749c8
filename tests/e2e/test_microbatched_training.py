"""Training with the batch in microbatches, on ranks: losses, gradients, buffers and
the optimizer's state are those of one device, compiled and as a whole step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpar
from tests.helpers.models import double
from tests.helpers.spawn import ranks_of, shared_pool
from tests.helpers.step_programs import OPTIMIZERS, batches, build, loss_fn
from tests.helpers.training import compare, loop, one_device, part, train, whole

pytestmark = pytest.mark.multiprocess

STEPS = 3
TRAINED = [
    ("llama", "dp=2", "whole"),
    ("gpt2", "dp=2,tp=2", "sharded"),
    ("resnet", "dp=2", "whole"),
    ("bert", "tp=2", "sharded"),
    ("vit", "dp=2,tp=2", "whole"),
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["propagate", "search"])
@pytest.mark.parametrize(("name", "mesh", "rest"), TRAINED)
def test_models_train_as_on_one_device(
    name: str, mesh: str, rest: str, plan: str
) -> None:
    options = {"mesh": mesh, "codegen": "eager", "microbatches": 2, "plan": plan}
    runs = ranks_of(mesh).run(train, name, options, STEPS, rest, timeout=900.0)
    compare(runs, one_device(name, STEPS))


@pytest.mark.slow
def test_a_model_trains_with_inductor() -> None:
    options = {"mesh": "dp=2", "microbatches": 2}
    runs = shared_pool(2).run(train, "llama", options, STEPS, "sharded", timeout=900.0)
    compare(runs, one_device("llama", STEPS))


def steps(options: dict[str, Any] | None, shard: bool, size: int) -> dict[str, Any]:
    """Losses and the state after some steps of ``train_step``; as an eager loop without
    options."""
    with double():
        model, before = build(), len(fxpar.plans())
        if shard:
            model = fxpar.shard(model, mesh="dp=2")
        optimizer = OPTIMIZERS["adamw"][0](model.parameters())
        given = batches(STEPS, size)
        if options is None:
            program = lambda x, y: loss_fn(model, x, y)  # noqa: E731
            losses, _ = loop(program, optimizer, given, clip=0.3)
        else:
            step = fxpar.train_step(
                model, loss_fn, optimizer, clip=0.3, options=options
            )
            if options.get("inputs") == "local":
                given = [tuple(part(dict(enumerate(b)), 2).values()) for b in given]
            losses = [step(*batch).item() for batch in given]
        named = dict(model.named_parameters())
        state = {name: whole(p) for name, p in named.items()}
        moments = {
            name: whole(optimizer.state[p]["exp_avg"])
            for name, p in named.items()
            if p in optimizer.state
        }
        plans = fxpar.plans()[before:]
    return {
        "losses": losses,
        "state": state,
        "moments": moments,
        "buffers": {name: whole(x) for name, x in model.named_buffers()},
        "notes": [note for plan in plans for note in plan.notes],
        "collectives": [len(plan.collectives) for plan in plans],
    }


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
    want = steps(None, False, 8)
    for got in shared_pool(2).run(steps, options, shard, 8):
        assert any("2 microbatches" in note for note in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for kind in ("state", "moments", "buffers"):
            for name, x in want[kind].items():
                torch.testing.assert_close(got[kind][name], x, rtol=1e-9, atol=1e-11)


def test_what_does_not_divide_is_cut_in_fewer_parts() -> None:
    options = {"mesh": "dp=2", "codegen": "eager", "microbatches": 4}
    want = steps(None, False, 6)
    for got in shared_pool(2).run(steps, options, False, 6):
        # 3 rows on a rank, if the plan splits the batch, else 6.
        assert any("rows on a rank are cut in 3 parts" in x for x in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
