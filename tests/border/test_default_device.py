"""Tensors that a script makes without a device lie where it says; fxpar's own do not.

The default device is one whose tensors hold nothing, so that any number that is read
from a tensor of fxpar's own that was made there is an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from tests.helpers.spawn import ranks_of
from tests.helpers.training import part

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

STEPS = 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 33)

    def forward(self, ids: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(self.words(ids))).cumsum(1)[:, ::2]
        return F.cross_entropy(self.head(x).flatten(0, 1), next_ids[:, ::2].flatten())


def trained(how: str, options: dict[str, Any] | None) -> list[float]:
    """Losses of steps where all tensors are made beforehand."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Words().double()
    batch = {"ids": torch.randint(0, 32, (8, 12)), "next_ids": torch.arange(96) % 33}
    batch["next_ids"] = batch["next_ids"].view(8, 12)
    with torch.device("meta") if options else torch.device("cpu"):
        if options and how == "at rest":
            model = fxpar.shard(model, mesh=options["mesh"])
            batch = part(batch, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        if options and how == "step":
            step = fxpar.train_step(
                model,
                lambda model, **x: model(**x),
                optimizer,
                clip=1.0,
                options=options,
            )
            return [float(step(**batch)) for _ in range(STEPS)]
        run = torch.compile(model, backend="fxpar", options=options)
        losses = []
        for _ in range(STEPS):
            loss = run(**batch) if options else model(**batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "how", ["at rest", "step", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_a_default_device_is_the_users_alone(how: str) -> None:
    options = {"mesh": "dp=2", "codegen": "eager", "plan": "propagate"}
    if how == "at rest":
        options["inputs"] = "local"
    runs = ranks_of("dp=2").run(trained, how, options)
    want = trained(how, None)
    if how == "at rest":  # each rank has the loss of its part
        runs = [[sum(both) / 2 for both in zip(*runs, strict=True)]]
    for run in runs:
        assert run == pytest.approx(want, rel=1e-12)
