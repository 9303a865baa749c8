"""A few steps of ``fxpar.train_step`` beside the same in an eager loop."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import fxpar
from tests.helpers.models import double
from tests.helpers.step_programs import OPTIMIZERS, batches, build, loss_fn
from tests.helpers.training import loop, part, whole


def whole_steps(
    options: dict[str, Any] | None, steps: int, shard: bool = False, size: int = 8
) -> dict[str, Any]:
    """Losses and the state after some steps of ``train_step``; as an eager loop without
    options."""
    with double():
        model, before = build(), len(fxpar.plans())
        if shard:
            model = fxpar.shard(model, mesh=(options or {}).get("mesh", "dp=2"))
        optimizer = OPTIMIZERS["adamw"][0](model.parameters())
        given = batches(steps, size)
        if options is None:
            program = lambda x, y: loss_fn(model, x, y)  # noqa: E731
            losses, _ = loop(program, optimizer, given, clip=0.3)
        else:
            step = fxpar.train_step(
                model, loss_fn, optimizer, clip=0.3, options=options
            )
            if options.get("inputs") == "local":
                given = [tuple(part(dict(enumerate(b)), 2).values()) for b in given]
            each = [step(*batch).clone() for batch in given]
            if options.get("inputs") == "local":  # each rank's own
                for loss in each:
                    dist.all_reduce(loss)
                each = [loss / dist.get_world_size() for loss in each]
            losses = [loss.item() for loss in each]
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
        "stages": [
            (stage.forward_seconds, stage.backward_seconds)
            for plan in plans
            for stage in plan.stages
        ],
        "notes": [note for plan in plans for note in plan.notes],
        "collectives": [len(plan.collectives) for plan in plans],
    }
