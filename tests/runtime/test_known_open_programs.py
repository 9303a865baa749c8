"""Programs that leave sizes open, at a second start: nothing is planned, and what
cannot stay open is not tried again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxpar
from fxpar import pipeline
from fxpar.runtime.caches import known_programs
from fxpar.sharding import read_program
from tests.helpers.caches import without_programs
from tests.helpers.spawn import shared_pool


class _Model(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("count", torch.zeros(()))
        self.flip = flip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x.sum())
        h = torch.relu(self.one(x))
        return (self.two(h.flip(1) if self.flip else h) ** 2).mean()


def start(
    folder: str, lengths: Sequence[int], flip: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """A start of the program: how far from one device's it is, what was done for it.
    Rows of a size that is left open are told to move, which nothing can lower."""
    from torch._dynamo.utils import counters

    planned, decided = [], pipeline.decided
    before = len(fxpar.plans())
    torch.compiler.reset()
    counters.clear()

    def counted(*args: Any) -> Any:
        planned.append(args)
        return decided(*args)

    alone, model = _Model(flip).double(), _Model(flip).double()
    run = torch.compile(
        model, backend="fxpar", options={"mesh": "dp=2"} | options, dynamic=True
    )
    apart = []
    with (
        mock.patch.object(read_program, "_at_open_sizes", lambda rule, _: rule),
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
        mock.patch.object(pipeline, "decided", counted),
    ):
        for length in lengths:
            x = torch.randn(4, length, 16, dtype=torch.double)
            losses = [each(x) for each in (alone, run)]
            for loss in losses:
                loss.backward()
            apart.append(float((losses[0] - losses[1]).abs()))
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    apart += [float((a.grad - b.grad).abs().max()) for a, b in pairs]
    return {
        "apart": max(*apart, float((alone.count - model.count).abs())),
        "planned": len(planned),
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "ranges": [
            note
            for plan in fxpar.plans()[before:]
            for note in plan.notes
            if note.startswith(("valid for", "sizes are fixed"))
        ],
    }


def two_starts(
    folder: Path, lengths: Sequence[int], flip: bool = False, **options: Any
) -> list[list[dict[str, Any]]]:
    """What each rank says of a cold start and of the next, in other processes."""
    pool, caches = shared_pool(2), without_programs(folder)
    starts = []
    for _ in range(2):
        pool.renew()
        given = caches, lengths, flip, options
        starts.append(pool.run(start, *given, timeout=600.0))
    for each in (rank for ranks in starts for rank in ranks):
        assert each["apart"] < 1e-10, each
    assert [each["planned"] for each in starts[1]] == [0, 0]
    assert [each["ranges"] for each in starts[0]] == [
        each["ranges"] for each in starts[1]
    ]
    return starts


@pytest.mark.multiprocess
def test_a_range_is_known_at_the_next_start(tmp_path: Path) -> None:
    """Its plan asks that lengths divide: both what it asks and the program that is
    traced so are known."""
    options = {"plan": "propagate", "hints": {"x": (None, "dp")}}
    cold, warm = two_starts(tmp_path, [8, 12], **options)
    text = "valid for 2 <= x.shape[0]/2 and 2 <= x.shape[1]/2"
    assert [each["ranges"] for each in warm] == [[text]] * 2
    assert [[each["planned"], each["hits"]] for each in cold] == [[2, 0], [0, 1]]
    assert [each["hits"] for each in warm] == [1, 1]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_cannot_stay_open_is_known_too(tmp_path: Path) -> None:
    """The sizes are fixed at once, and each set of them is known."""
    options = {"plan": "propagate", "hints": {"x": (None, "dp")}}
    cold, warm = two_starts(tmp_path, [8, 12], flip=True, **options)
    for each in (*cold, *warm):
        assert all(note.startswith("sizes are fixed: ") for note in each["ranges"])
        assert len(each["ranges"]) == 2
    assert [each["hits"] for each in warm] == [2, 2]


def test_a_refusal_that_is_known_is_led_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 would go on, and others wait for its plan."""
    store = SimpleNamespace(get=lambda key: b"one")
    world = SimpleNamespace(
        presence=SimpleNamespace(prefix=""), ranks=[0, 1], store=store
    )
    monkeypatch.setattr(known_programs, "current", lambda: world)
    program = known_programs.KnownProgram("key", "number")
    assert known_programs.is_led(program, [])
    refused = replace(program, refused="branches and loops")
    assert not known_programs.is_led(refused, [])
