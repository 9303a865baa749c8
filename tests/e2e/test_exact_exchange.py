"""Rows sent to their experts by exact numbers, on ranks, in float64: whatever is
chosen, and whatever a rank feeds.

Memory that nothing wrote holds NaN: what lies behind a rank's last row is not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.mixture import mixture
from tests.helpers.spawn import ranks_of

pytest.importorskip("transformers.integrations.moe")
pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

TOKENS, WIDTH, EXPERTS = 16, 8, 4
# The expert that each token chooses; those of a rank are 0 and 1, or 2 and 3.
CHOICES: dict[str, list[int]] = {
    "alike": [0, 1, 2, 3] * 4,
    "one has all": [0] * TOKENS,
    "the last has all": [3] * TOKENS,
    "none of a rank's": [2, 3] * 8,
    "a rank sends none away": [0] * 8 + [2] * 8,
    "a rank sends all away": [2] * 8 + [0] * 8,
}


class Mixture(nn.Module):
    """One expert for each token; results are added where tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        scores = (self.router(x) + wanted).softmax(-1)
        return mixture(x, scores, self.up, self.down).square().mean()


def built() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixture().double()
    return model, torch.randn(TOKENS, WIDTH, dtype=torch.float64)


def wanted(name: str) -> torch.Tensor:
    """Added to scores, makes tokens choose so."""
    return 50.0 * torch.eye(EXPERTS, dtype=torch.float64)[CHOICES[name]]


Step = tuple[float, dict[str, torch.Tensor]]


def step(run: Any, model: nn.Module, *batch: torch.Tensor) -> Step:
    """The loss and the gradients."""
    model.zero_grad()
    loss = run(*batch)
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name: p.grad.clone() for name, p in named}  # type: ignore


@contextlib.contextmanager
def unwritten_memory_shows() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compiled(model: nn.Module, codegen: str, **more: Any) -> Any:
    torch._dynamo.reset()
    options = {"mesh": "ep=2", "codegen": codegen, "plan": "propagate", **more}
    options["expert_exchange"] = "exact"
    return torch.compile(model, backend="fxpar", options=options)


def of_choices(codegen: str) -> dict[str, Step]:
    """Steps of a rank."""
    model, x = built()
    run = compiled(model, codegen)
    with unwritten_memory_shows():
        return {name: step(run, model, x, wanted(name)) for name in CHOICES}


def one_device(names: Sequence[str]) -> dict[str, Step]:
    model, x = built()
    return {name: step(model, model, x, wanted(name)) for name in names}


def compare(got: Step, want: Step) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-12)
    torch.testing.assert_close(got[1], want[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_whatever_is_chosen(codegen: str) -> None:
    want = one_device(list(CHOICES))
    results = ranks_of("ep=2").run(of_choices, codegen, timeout=300.0)
    for steps in results:
        for name in CHOICES:
            compare(steps[name], want[name])


# Rows of rank 0 of each step, the others are rank 1's.
PARTS = [8, 15, 1, 13]


def fed_in_parts(first: Sequence[int]) -> list[Step]:
    """Steps of a rank in local mode."""
    model, x = built()
    run, rank = compiled(model, "eager", inputs="local"), torch.distributed.get_rank()
    own = [slice(rows) if rank == 0 else slice(rows, None) for rows in first]
    return [step(run, model, x[part], wanted("alike")[part]) for part in own]


def test_parts_of_any_size() -> None:
    """Each rank has its own loss, and the mean of gradients."""
    model, x = built()
    steps_of_ranks = ranks_of("ep=2").run(fed_in_parts, PARTS, timeout=200.0)
    for n, rows in enumerate(PARTS):
        parts = slice(rows), slice(rows, None)
        each = [step(model, model, x[p], wanted("alike")[p]) for p in parts]
        means = {k: (g + each[1][1][k]) / 2 for k, g in each[0][1].items()}
        for rank, steps in enumerate(steps_of_ranks):
            compare(steps[n], (each[rank][0], means))
