"""Axes named ``cp``, ``sp`` or ``seq`` split sequences."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.features.sequences.overlap_attention import rings_of
from fxpar.fusion import choose_schedule
from fxpar.fusion.apply_schedule import apply
from tests.helpers import models

ROWS, WIDTH, WORDS = 8, 16, 32


class Decoder(nn.Module):
    """Embeddings, one causal attention, a loss on the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(ROWS, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.embed(tokens) + self.place(places)
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.mix(x).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + seen.transpose(1, 2).flatten(2))
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def matches(plan: Any, *args: Any) -> None:
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def made(rows: int = ROWS) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Decoder().double(), *torch.randint(0, WORDS, (2, 4, rows))


@pytest.mark.parametrize("mesh", ["cp=4", "dp=2,sp=2"])
def test_such_an_axis_splits_tokens_and_all_they_become(mesh: str) -> None:
    model, tokens, labels = made()
    plan = fxpar.plan(model, tokens, labels, mesh=mesh, mode="propagate", grad=True)
    axis = mesh[-4:-2]
    inputs = [plan.spec(name) for name in ("tokens", "labels")]
    assert all(spec.dims[1] == (axis,) for spec in inputs)
    attended = [c for c in plan.collectives if "attention" in c.source]
    kinds = [(c.kind, c.axes) for c in attended]
    assert Counter(kinds) == {
        (kind, (axis,)): 2 for kind in ("all_gather", "reduce_scatter")
    }
    matches(plan, tokens, labels)


def test_features_are_no_sequence() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    plan = fxpar.plan(model, x, mesh="cp=2", mode="propagate")
    assert plan.spec("weight").dims[0] == ("cp",)


def test_a_hint_says_otherwise() -> None:
    model, tokens, labels = made()
    plan = fxpar.plan(
        model,
        *(tokens, labels),
        mesh="cp=2",
        mode="propagate",
        hints={"head.weight": ("cp", None)},
        grad=True,
    )
    assert plan.spec("tokens").is_whole
    matches(plan, tokens, labels)


def test_a_sequence_of_fewer_rows_than_ranks_is_noted() -> None:
    model, tokens, labels = made(3)
    plan = fxpar.plan(model, tokens, labels, mesh="cp=4", mode="propagate")
    assert any("sequence dim of tokens (3)" in note for note in plan.notes)
    matches(plan, tokens, labels)


def test_a_sequence_that_does_not_divide() -> None:
    model, tokens, labels = made(7)
    plan = fxpar.plan(model, tokens, labels, mesh="cp=2", mode="propagate", grad=True)
    matches(plan, tokens, labels)


class Loss(nn.Module):
    """The loss of a Hugging Face model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids, **given).loss


def packed(batch: int) -> dict[str, torch.Tensor]:
    """Two documents a row, whose positions begin anew."""
    half = torch.arange(models.LENGTH // 2)
    return {"position_ids": torch.cat([half, half]).repeat(batch, 1)}


def rings(state: choose_schedule.Attempts, **_: Any) -> choose_schedule.Chosen:
    """A ring of each attention, whatever it takes."""
    schedule = rings_of(state.local)
    assert len(schedule.lines) == 2  # forward and backward
    after = apply(schedule, state.local, state.mesh)
    return choose_schedule.Chosen(schedule, after, (1, 1), (1, 1))


def hugging_face(more: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Llama, and a batch that is ``more`` than tokens."""
    model, batch = models.build("llama/1", 4)
    if more == "packed":
        batch |= packed(4)
    elif more == "padded":
        mask = torch.ones_like(batch["input_ids"])
        mask[::2, models.LENGTH // 2 :] = 0
        mask[1::2, : models.LENGTH // 2] = 0
        batch |= {"attention_mask": mask}
    return Loss(model.double()), batch


def same_numbers(mesh: str, more: str, schedule: str) -> Any:
    model, batch = hugging_face(more)
    options = {"mode": "propagate", "grad": True, "schedule": schedule}
    plan = fxpar.plan(model, mesh=mesh, **options, **batch)
    got, want = plan.simulate(**batch), plan.reference(**batch)
    # The model takes its loss in float32.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("more", ["plain", "packed", "padded"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2"])
def test_an_unmodified_llama(mesh: str, more: str) -> None:
    same_numbers(mesh, more, "none")


SOON = {("cp=2", "plain")}


@pytest.mark.parametrize(
    "mesh, more",
    [
        pytest.param(m, k, marks=() if (m, k) in SOON else pytest.mark.slow)
        for m in ("cp=2", "cp=4", "dp=2,cp=2")
        for k in ("plain", "packed", "padded")
    ],
)
def test_an_unmodified_llama_in_rings(
    mesh: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_schedule, "choose", rings)
    plan = same_numbers(mesh, more, "auto")
    ours = any(
        "causal_attention" in str(node.target) for node in plan.result.local.nodes
    )
    assert ours == (more == "plain")
    sent = [c for c in plan.collectives if "attention" in c.source]
    assert {c.kind for c in sent} == {"permute"}
