"""Steps of AdamW in float64, under torch.compile or each as one program, and all that
they leave: what a user's loop does to losses, parameters, buffers and moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from tests.helpers.models import DRAWS_RANDOM, Batch, build_double, double
from tests.helpers.training import loop, whole

STEPS, SAMPLES, CLIP = 10, 8, 0.5

Make = Callable[[], tuple[nn.Module, Batch]]


@dataclass(frozen=True)
class Left:
    """What steps left on one rank."""

    losses: list[float]
    # Gradients of the first step; none of steps that are one program.
    gradients: dict[str, torch.Tensor]
    # By name: parameters, buffers, and the optimizer's squares.
    values: dict[str, torch.Tensor]
    # Of all plans, the stages and the notes.
    stages: list[int]
    notes: list[str]


def a_model(name: str, still: bool = False) -> tuple[nn.Module, Batch]:
    """One of ``helpers.models`` that gives its loss, with two batches in one.
    ``still``: without dropout."""
    model, batch = build_double(name, 2 * SAMPLES)
    for module in model.modules() if still else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for kept in ("dropout", "dropout_prob"):
            if isinstance(getattr(module, kept, None), float):
                setattr(module, kept, 0.0)
    return model, batch


def model_steps(
    make: Make, options: dict[str, Any] | None, form: str = "compile", rest: str = ""
) -> Left:
    """Steps of a model, on two batches in turn, with clipped gradients and a rate that
    falls; in an eager loop if ``options`` are None.

    ``form``: "compile", or "step" by ``fxpar.train_step``; ``rest``: "sharded" by
    ``fxpar.shard``.
    """
    before = len(fxpar.plans())
    with double():
        model, batch = make()
        if options and rest == "sharded":
            model = fxpar.shard(model, mesh=options["mesh"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
        parts = {k: x.split(SAMPLES) for k, x in batch.items()}
        batches = [{k: x[i % 2] for k, x in parts.items()} for i in range(STEPS)]
        torch.manual_seed(5)
        if options and form == "step":
            step = fxpar.train_step(
                model,
                lambda model, batch: model(**batch),
                optimizer,
                clip=CLIP,
                options=options,
            )
            losses, gradients = [], dict[str, torch.Tensor]()
            for each in batches:
                losses.append(step(each).item())
                rates.step()
        else:
            program: Any = model
            if options is not None:
                torch._dynamo.reset()
                program = torch.compile(model, backend="fxpar", options=options)
            losses, gradients = loop(
                program, optimizer, batches, model=model, clip=CLIP, after=rates.step
            )
        values = {name: whole(x) for name, x in model.state_dict().items()}
        for name, p in model.named_parameters():
            values[f"{name} squares"] = whole(optimizer.state[p]["exp_avg_sq"])
    plans = fxpar.plans()[before:]
    notes = [note for plan in plans for note in plan.notes]
    return Left(losses, gradients, values, [len(p.stages) for p in plans], notes)


def steps_of_one_device(make: Make, form: str) -> Left:
    """An eager loop; of what draws random numbers the same steps on one rank, since
    eager code draws others."""
    draws = isinstance(make, partial) and make.args[0] in DRAWS_RANDOM
    if draws and not make.keywords.get("still"):
        return model_steps(make, {"codegen": "eager", "mesh": "dp=1"}, form)
    return model_steps(make, None)


def compare_steps(runs: list[Left], want: Left) -> None:
    """Every rank's steps with those of one device, as float64 allows."""
    for got in runs:
        assert got.losses == pytest.approx(want.losses, rel=1e-10)
        assert got.losses == runs[0].losses
        assert got.values.keys() == want.values.keys()
        pairs = [(name, got.values[name], x) for name, x in want.values.items()]
        pairs += [(name, x, want.gradients[name]) for name, x in got.gradients.items()]
        for name, x, y in pairs:
            # A gradient that is zero but for rounding moves its parameter all the same.
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9, msg=name)
