"""Schedules of whole models: chosen or written by hand, they change no number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import ScheduleError
from fxpar.fusion.verbs import gathers
from tests.helpers.machines import machine
from tests.helpers.models import NAMES, build_double
from tests.helpers.spawn import shared_pool
from tests.helpers.training import compare, one_device, train

pytestmark = pytest.mark.usefixtures("propagated")

TP: dict[str, dict[str, Any]] = {
    "llama": {
        **{f"*.{n}_proj.weight": ("tp", None) for n in ("q", "k", "v", "gate", "up")},
        **{f"*.{n}_proj.weight": (None, "tp") for n in ("o", "down")},
    },
    "gpt2": {
        **{f"*.{n}.weight": (None, "tp") for n in ("c_attn", "c_fc")},
        **{f"*.{n}.bias": ("tp",) for n in ("c_attn", "c_fc")},
        "*.c_proj.weight": ("tp", None),
    },
    "bert": {
        **{
            f"*.{n}.weight": ("tp", None)
            for n in ("query", "key", "value", "intermediate.dense")
        },
        "*.layer.*.output.dense.weight": (None, "tp"),
    },
}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hardware on which splitting pays for small models."""
    path = str(tmp_path / "slow.json")
    machine().save(path)
    monkeypatch.setenv("FXPAR_HARDWARE", path)
    return path


def along_tp(plan: Any, kind: str) -> list[int]:
    """Bytes of the collectives of a kind."""
    return [c.bytes for c in plan.collectives if (c.kind, c.axes) == (kind, ("tp",))]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("name", TP)
def test_activations_between_blocks_are_sliced(name: str, mesh: str, slow: str) -> None:
    model, batch = build_double(name)

    def planned(schedule: str) -> Any:
        how: Any = {"mode": "propagate", "grad": True, "schedule": schedule}
        return fxpar.plan(model, **batch, mesh=mesh, hints=TP[name], **how)

    plain, plan = planned("none"), planned("auto")
    assert plan.schedule and not plain.schedule
    assert plan.predicted.seconds < plain.predicted.seconds
    assert plan.predicted.peak_bytes <= plain.predicted.peak_bytes
    reduced = along_tp(plain, "all_reduce")
    assert len(reduced) >= 8
    assert along_tp(plan, "reduce_scatter") == reduced
    torch.manual_seed(1)
    loss, gradients = plan.simulate(**batch)
    torch.manual_seed(1)
    want, wanted = plan.reference(**batch)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    for key, x in wanted.items():
        torch.testing.assert_close(gradients[key], x, rtol=1e-9, atol=1e-11)


def scheduled(name: str, options: dict[str, Any], steps: int) -> Any:
    """A run, and what was done."""
    before = len(fxpar.plans())
    run = train(name, options, steps)
    return run, [plan.schedule for plan in fxpar.plans()[before:]]


# Where nothing pays.
GIVEN = {"resnet": "buckets(bytes=4096)\nprefetch(ahead=2)"}


def parity(name: str, mesh: str, hardware: str, steps: int) -> None:
    options = {"mesh": mesh, "codegen": "eager", "hardware": hardware}
    pool = shared_pool(4)
    plain = pool.run(train, name, options | {"schedule": "none"}, steps, timeout=400.0)
    given = options | {"schedule": GIVEN.get(name, "auto")}
    results = pool.run(scheduled, name, given, steps, timeout=400.0)
    for (run, schedules), before in zip(results, plain, strict=True):
        assert any(schedules)
        assert run.losses == pytest.approx(before.losses, rel=1e-6, abs=0.0)
    compare([run for run, _ in results], one_device(name, steps))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_losses_are_those_without_a_schedule(slow: str) -> None:
    parity("gpt2", "tp=4", slow, 5)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("name", NAMES)
def test_five_models(name: str, mesh: str, slow: str) -> None:
    parity(name, mesh, slow, 20)


BY_HAND = """
split(all_reduce) -> rs, ag
reorder([add_tensor_1], ag)
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


BLOCK = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}


def blocks(schedule: str, plan: str = "propagate") -> Any:
    """Results of a block under a schedule, and the plan's text of it."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    x = torch.randn(8, 8)
    options = {"mesh": "tp=4", "codegen": "eager", "schedule": schedule}
    options |= {"hints": BLOCK, "plan": plan, "verify": True}
    with torch.no_grad():
        out = torch.compile(Block(), backend="fxpar", options=options)(x)
        want = Block()(x)
    torch.testing.assert_close(out, want)
    return fxpar.plans()[-1].schedule, Counter(
        c.kind for c in fxpar.plans()[-1].collectives
    )


@pytest.mark.multiprocess
def test_a_schedule_written_by_hand(tmp_path: Path) -> None:
    pool = shared_pool(4)
    path = tmp_path / "schedule.txt"
    path.write_text(BY_HAND)
    for given in (BY_HAND, str(path)):
        for text, counts in pool.run(blocks, given):
            assert text == BY_HAND.strip()
            assert counts == {"reduce_scatter": 1, "all_gather": 1}
    errors = pool.errors(blocks, BY_HAND.replace("add_tensor_1", "relu_default"))
    for error in errors:
        assert isinstance(error, ScheduleError)
        assert "reads nothing that is gathered" in str(error)
        assert "relu" in str(error) and "at:" in str(error)


def test_a_saved_plan_keeps_its_schedule(tmp_path: Path) -> None:
    x, path = torch.randn(8, 8), tmp_path / "plan.json"
    how: Any = {"mesh": "tp=4", "hints": BLOCK}
    plan = fxpar.plan(Block(), x, **how, mode="propagate", schedule=BY_HAND)
    plan.save(path)
    again = fxpar.plan(Block(), x, mesh="tp=4", mode=str(path), schedule="auto")
    assert again.schedule == plan.schedule == BY_HAND.strip()
    assert again.hash == plan.hash
    assert "reorder([add_tensor_1], ag)" in str(again)
    torch.testing.assert_close(again.simulate(x), again.reference(x))
    other = fxpar.plan(Block(), x, **how, mode="propagate", schedule="none")
    assert other.hash != plan.hash


def broken(*_: Any) -> Any:
    """Under a split that scatters without reducing, FXPAR_VERIFY raises."""
    kept = gathers.split

    def wrong(edit: Any, reduced: Any, dim: int | None = None) -> Any:
        made = kept(edit, reduced, dim)
        made[0].target = gathers.collective_nodes.slice_
        made[0].args = (made[0].args[0], 0, made[0].args[-1])
        return made

    from fxpar.fusion import apply_schedule as apply

    known = dict(apply.VERBS)
    apply.VERBS["split"] = replace(known["split"], run=wrong)
    try:
        return blocks(BY_HAND)
    finally:
        apply.VERBS.update(known)


@pytest.mark.multiprocess
def test_verify_notices_a_wrong_schedule() -> None:
    for error in shared_pool(4).errors(broken):
        assert error is not None and "differ" in str(error), error
