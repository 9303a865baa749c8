"""``buckets`` and ``prefetch``: lines that act on forward and backward, parted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import ScheduleError
from fxpar.fusion import choose_schedule
from fxpar.fusion.choose_schedule import Chosen
from fxpar.fusion.schedule import Schedule
from fxpar.passes.order.order_collectives import DEFAULT, Settings
from tests.helpers.machines import machine

LAYERS = 4


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", DEFAULT),
        ("buckets(bytes=0)", Settings(bucket=0)),
        ("buckets(bytes=8, gathers=4)", Settings(8, 4)),
        ("buckets(bytes=8, again=2)", Settings(8, again=2)),
        ("prefetch(ahead=3)", Settings(ahead=3)),
        ("buckets(bytes=8)\nprefetch(ahead=2)", Settings(8, None, 2)),
        (
            "split(all_reduce) -> rs, ag\nbuckets(bytes=8)\nbuckets(bytes=9)",
            Settings(9),
        ),
    ],
)
def test_lines_say_settings(text: str, settings: Settings) -> None:
    schedule = Schedule.parse(text)
    assert schedule.settings == settings
    assert Schedule.parse(str(schedule)) == schedule
    assert bool(schedule) == bool(text)
    assert (Schedule() + schedule) == schedule == (schedule + Schedule())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def planned(schedule: str, **hints: Any) -> Any:
    how: Any = {"mode": "propagate", "in_specs": [("dp", None)], "grad": True}
    x, how = torch.randn(16, 8), {**how, **hints, "schedule": schedule}
    return fxpar.plan(Net(), x, mesh="dp=2", **how)


def launched(plan: Any, kind: str = "all_reduce") -> int:
    """Return how many collectives of a kind a step would run."""
    return Counter(e.kind for e in plan.timeline.events)[kind]


def test_buckets_are_as_large_as_said() -> None:
    """Gradients: 4 weights of 256 bytes and 4 biases of 32; the loss besides."""
    default, none, some = map(
        planned, ("none", "buckets(bytes=0)", "buckets(bytes=600)")
    )
    assert launched(default) == 2
    assert launched(none) == 2 * LAYERS + 1
    assert launched(some) == 3
    assert len({plan.hash for plan in (default, none, some)}) == 3
    assert none.collectives == default.collectives  # before they are joined
    x = torch.randn(16, 8)
    loss, gradients = some.simulate(x)
    want, wanted = some.reference(x)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize(
    "line",
    ["buckets(bytes=-1)", "prefetch(ahead=0)", "buckets(4)", "prefetch(bytes=1)"],
)
def test_what_a_line_may_not_say(line: str) -> None:
    with pytest.raises(ScheduleError):
        planned(line)


def slow(latency: float) -> Any:
    """Hardware whose collectives take so long to begin, and nearly nothing besides."""
    base = machine()
    level = replace(base.levels[0], latency=latency, bandwidth=1e12, kinds=())
    return replace(base, levels=(level,))


@pytest.mark.parametrize(("latency", "joined"), [(1e-3, True), (1e-12, False)])
def test_buckets_are_chosen_by_cost(
    latency: float, joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a collective takes long to begin, all gradients go together, though they
    would fill several buckets of the usual size."""
    monkeypatch.setattr("fxpar.passes.order.order_collectives.FULL", 300)
    slow(latency).save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))
    plan = planned("auto")
    assert ("buckets(" in plan.schedule) == joined
    assert launched(planned("none")) > 3
    if joined:
        assert launched(plan) == 2
        assert plan.predicted.seconds < planned("none").predicted.seconds


def test_buckets_that_take_too_much_memory_are_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpar.passes.order.order_collectives.FULL", 300)
    slow(1e-3).save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))
    plain, tried = planned("none").predicted.peak_bytes, list[str]()

    def choose(*args: Any, **options: Any) -> Chosen:
        chosen = kept(*args, **options)
        tried[:] = map(str, (chosen.schedule, *chosen.others))
        return chosen

    kept = choose_schedule.choose
    monkeypatch.setattr(choose_schedule, "choose", choose)
    assert planned("auto").predicted.peak_bytes > plain
    assert any("buckets(" in each for each in tried)
    monkeypatch.setattr("fxpar.fusion.choose_schedule.LITTLE", 0)
    monkeypatch.setattr("fxpar.fusion.choose_schedule._ROOM", 0.0)
    assert planned("auto").predicted.peak_bytes <= plain
    assert not any("buckets(" in each for each in tried)  # nor tried by ``tune``


@pytest.mark.parametrize("free", [True, False])
def test_gathers_of_a_small_model_go_together(
    free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where parameters are split, buckets hold them whole; a few bytes are free."""
    monkeypatch.setattr("fxpar.passes.order.order_collectives.FULL", 300)
    slow(1e-3).save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))
    if not free:
        monkeypatch.setattr("fxpar.fusion.choose_schedule.LITTLE", 0)
        monkeypatch.setattr("fxpar.fusion.choose_schedule._ROOM", 0.0)
    hints = {"*.weight": ("dp", None), "*.bias": ("dp",)}
    none, auto = (planned(how, hints=hints) for how in ("none", "auto"))
    assert launched(none, "all_gather") > 2
    fewer = launched(auto, "all_gather") <= 2
    assert fewer == free == (auto.predicted.peak_bytes > none.predicted.peak_bytes)
