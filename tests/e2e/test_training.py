"""Real models trained on ranks have the losses, gradients and buffers of one device."""

from __future__ import annotations

import contextlib
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.machines import machine
from tests.helpers.models import NAMES, ODD_NAMES
from tests.helpers.spawn import ranks_of
from tests.helpers.training import STEPS, Run, compare, one_device, train

pytestmark = pytest.mark.multiprocess

FOUR = ("dp=4", "tp=4", "dp=2,tp=2")


def row(
    name: str, mesh: str, rest: str = "whole", steps: int = STEPS, **options: Any
) -> Any:
    """A model, the options it is compiled with, how its parameters lie between steps,
    and how many steps there are."""
    words = (name, mesh, rest, *(str(value) for value in options.values()))
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"} | options
    return pytest.param(name, options, rest, steps, id="-".join(words))


CASES = [
    row("llama/1", "dp=2", steps=3),
    row("resnet", "dp=2"),
    row("llama/3", "tp=2"),
    *(row(name, mesh) for name, mesh in product(NAMES, (*FOUR, "a=2,b=1,c=2"))),
    *(row(name, "dp=2,tp=2", codegen="inductor") for name in NAMES),
    # At rest sharded. Odd: batch 6, sequence 37, 101 words, 3 heads.
    *(row(name, mesh, "sharded") for name, mesh in product(NAMES, FOUR)),
    *(row(name, mesh, "sharded", 3) for name, mesh in product(ODD_NAMES, FOUR)),
    row("llama", "dp=2,tp=2", "sharded", codegen="inductor"),
    # Regions as single ops.
    *(
        row(name, mesh, rest, 3, fuse="interpret")
        for name, (mesh, rest) in product(
            NAMES, [("tp=4", "whole"), ("dp=2,tp=2", "whole"), ("dp=4", "sharded")]
        )
    ),
    # In stages.
    row("llama", "pp=2", steps=3, microbatches=4),
    row("gpt2", "pp=2,dp=2", steps=3, microbatches=2),
    row("bert", "pp=2,tp=2", steps=3, microbatches=None),
    row("vit", "pp=4", steps=3, microbatches=4),
    row("resnet", "pp=2", steps=3, microbatches=2),
    *(
        row(name, "pp=2", "sharded", 3, microbatches=2, codegen=codegen)
        for name, codegen in product(("llama", "gpt2"), ("eager", "inductor"))
    ),
    # In microbatches.
    *(
        row(name, mesh, rest, 3, microbatches=2, plan=plan)
        for (name, mesh, rest), plan in product(
            [
                ("llama", "dp=2", "whole"),
                ("gpt2", "dp=2,tp=2", "sharded"),
                ("resnet", "dp=2", "whole"),
                ("bert", "tp=2", "sharded"),
                ("vit", "dp=2,tp=2", "whole"),
            ],
            ("propagate", "search"),
        )
    ),
    row("llama", "dp=2", "sharded", 3, microbatches=2, codegen="inductor"),
    # Parts of every sequence; GPT-2 has a mask of its own.
    *(
        row("llama/1", mesh, rest, 3)
        for mesh, rest in product(("cp=2", "dp=2,cp=2"), ("whole", "sharded"))
    ),
    row("llama/1", "cp=2", steps=3, codegen="inductor"),
    row("gpt2/1", "sp=2", steps=3),
]


def train_in_one_graph(name: str, options: dict[str, Any], *args: Any) -> Run:
    """In microbatches, a logger that GPT-2's loss calls breaks no graph: a part of it
    without a batch cannot be cut."""
    import transformers  # noqa: F401  (gives loggers ``warning_once``)

    silent = {logging.Logger.warning_once}
    ignored = torch._dynamo.config.patch(ignore_logging_functions=silent)
    in_parts = options.get("microbatches") and "pp" not in options["mesh"]
    with ignored if in_parts else contextlib.nullcontext():
        return train(name, options, *args)


@pytest.mark.slow  # but for the one below
@pytest.mark.usefixtures("propagated")
@pytest.mark.parametrize(("name", "options", "rest", "steps"), CASES)
def test_models_train_as_on_one_device(
    name: str, options: dict[str, Any], rest: str, steps: int
) -> None:
    pool = ranks_of(options["mesh"])
    runs = pool.run(train_in_one_graph, name, options, steps, rest, timeout=900.0)
    compare(runs, one_device(name, steps))


def test_as_a_user_has_it(tmp_path: Path) -> None:
    """Searched, in a schedule by cost, compiled by Inductor, where splits pay."""
    hardware = str(tmp_path / "machine.json")
    machine().save(hardware)
    options = {"mesh": "tp=2", "hardware": hardware}
    runs = ranks_of("tp=2").run(train, "llama/1", options, 2, timeout=900.0)
    compare(runs, one_device("llama/1", 2))
