"""Ten steps of AdamW of models in stages, on ranks: losses, parameters, buffers and
moments are those of one device, of every model, mesh, number of microbatches and
schedule, compiled or as one program, whole or at rest in parts."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.sharding.pipeline_schedule import SCHEDULES
from tests.helpers.model_steps import (
    SAMPLES,
    Left,
    Make,
    a_model,
    compare_steps,
    model_steps,
    steps_of_one_device,
)
from tests.helpers.models import Batch
from tests.helpers.pairs import Row, covering
from tests.helpers.spawn import ranks_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

MODELS = ("llama", "gpt2", "bert", "t5", "vit", "resnet")
MESHES = ("pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2")
FORMS, AT_REST = ("step", "compile"), ("whole", "sharded")
COLUMNS = (MODELS, MESHES, (1, 2, 4, 8), tuple(SCHEDULES), FORMS, AT_REST)


def can_be(row: Row) -> bool:
    _, mesh, parts, schedule, form, _ = row
    places = 4 if mesh == "pp=4" else 2
    if form == "compile" and schedule != "gpipe":  # as it is whatever is asked
        return False
    if "dp=2" in mesh and parts == SAMPLES:
        return False
    return schedule != "dualpipev" or parts >= 2 * places


@cache
def of_one_device(make: Make, form: str) -> Left:
    return steps_of_one_device(make, form)


@cache
def model(name: str, still: bool) -> Make:
    return partial(a_model, name, still=still)


def check(make: Make, mesh: str, form: str, rest: str, **options: Any) -> None:
    """Steps in stages are those of one device."""
    options = {"mesh": mesh, "plan": "propagate", "codegen": "eager"} | options
    pool = ranks_of(mesh)
    runs = pool.run(model_steps, make, options, form, rest, timeout=900.0)
    compare_steps(runs, of_one_device(make, form))
    rounds = SCHEDULES[options["pipeline"]].rounds
    stages = (4 if mesh == "pp=4" else 2) * rounds
    assert all(stages in got.stages for got in runs)
    asked = f"{options['pipeline']}, {options['microbatches']} microbatches"
    if options["microbatches"] > 1:
        assert all(any(asked in note for note in got.notes) for got in runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "parts", "schedule", "form", "rest"), covering(COLUMNS, can_be)
)
def test_ten_steps_are_those_of_one_device(
    name: str, mesh: str, parts: int, schedule: str, form: str, rest: str
) -> None:
    make = model(name, name == "t5")
    check(make, mesh, form, rest, microbatches=parts, pipeline=schedule)


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads what the encoder gives; the first stage and the
    last read one weight."""

    def __init__(self, width: int = 8, words: int = 12, blocks: int = 3) -> None:
        super().__init__()
        linear = partial(nn.Linear, width, width)
        self.embed = nn.Embedding(words, width)
        self.encoder = nn.ModuleList(linear() for _ in range(2))
        self.queries = nn.ModuleList(linear() for _ in range(blocks))
        self.up = nn.ModuleList(linear() for _ in range(blocks))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        given = self.embed(ids)
        for layer in self.encoder:
            given = given + torch.tanh(layer(given))
        x = self.embed(labels)
        for queries, up in zip(self.queries, self.up, strict=True):
            x = x + F.scaled_dot_product_attention(queries(x), given, given)
            x = x + torch.tanh(up(x))
        logits = x @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=3)


def encoder_decoder() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = EncoderDecoder(blocks=2).double()
    ids = torch.randint(12, (2 * SAMPLES, 5))
    return model, {"ids": ids, "labels": ids.roll(1, 1)}


@pytest.mark.parametrize(
    ("mesh", "schedule", "form", "rest"),
    [
        ("pp=2", "interleaved", "step", "sharded"),
        pytest.param("pp=4", "1f1b", "step", "whole", marks=pytest.mark.slow),
        pytest.param("pp=4", "gpipe", "compile", "sharded", marks=pytest.mark.slow),
    ],
)
def test_a_decoder_reads_the_encoder_over_several_stages(
    mesh: str, schedule: str, form: str, rest: str
) -> None:
    check(encoder_decoder, mesh, form, rest, microbatches=2, pipeline=schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "form", "rest"),
    [
        ("llama", "pp=2,tp=2", "1f1b", "step", "sharded"),
        ("gpt2", "pp=2,dp=2", "gpipe", "compile", "whole"),
        ("bert", "pp=2", "zero_bubble", "step", "whole"),
        ("t5", "pp=2", "1f1b", "step", "sharded"),
        ("vit", "pp=2", "interleaved", "step", "whole"),
        ("resnet", "pp=2", "gpipe", "compile", "sharded"),
    ],
)
def test_kernels_of_inductor(
    name: str, mesh: str, schedule: str, form: str, rest: str
) -> None:
    how = {"microbatches": 2, "pipeline": schedule, "codegen": "inductor"}
    make = model(name, name in ("bert", "t5"))
    check(make, mesh, form, rest, **how)
