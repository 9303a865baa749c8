"""Programs in stages along a pipeline axis, simulated: numbers are those of one device,
stages are contiguous, one message a value and microbatch crosses a border."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import FxparError, HintError, MeshError, OptionError, PlanError
from fxpar.features.stages.assign_stages import home_of
from fxpar.features.stages.lay_out_stages import PLACE
from fxpar.features.stages.program_at_place import program_at
from fxpar.graph import pipeline_ops
from fxpar.passes.simulate.lockstep import run_stages
from fxpar.passes.simulate.simulate_step import predict_step
from fxpar.sharding.cost.hardware_table import Level, of_kind
from fxpar.sharding.pipeline_schedule import SCHEDULES
from fxpar.sharding.plan import Plan
from tests.helpers.machines import machine
from tests.helpers.models import ODD_NAMES, build_double, double

WIDTH, ROWS = 16, 8
ours, aten, c10d = torch.ops.fxpar, torch.ops.aten, torch.ops._c10d_functional


def exact(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(drop)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def blocks() -> nn.Module:
    return exact(nn.Sequential(*[Block() for _ in range(4)]))


def dropped() -> nn.Module:
    return exact(nn.Sequential(*[Block(0.4) for _ in range(4)]))


def normed() -> nn.Module:
    """Statistics of the whole batch: parts wait for one another."""
    return exact(
        nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block(), nn.BatchNorm1d(WIDTH))
    )


class Skips(nn.Module):
    """What the first stage makes is read by all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x = torch.tanh(self.first(x))
        for block in self.rest:
            x = block(x) * kept
        return x + kept


class Nested(nn.Module):
    """Skips over all other stages, the first made the last read."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], -1)))
        return x


class Losses(nn.Module):
    """Every stage makes a loss, over rows that a label counts, and a part of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        labels = torch.arange(x.shape[0]) % 6
        losses, total = [], x.new_zeros(())
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            losses.append(F.cross_entropy(head(x), labels, ignore_index=2))
            total = total + x.square().mean()
        weights = torch.softmax(torch.stack(losses).detach(), 0)
        return {"loss": (weights * torch.stack(losses)).sum(), "parts": (total, x)}


class Checkpointed(nn.Module):
    """What crosses between stages is in a region that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.blocks, x, use_reentrant=False)


class Tied(nn.Module):
    """The first stage and the last read one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.rest = nn.Sequential(Block(), Block())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.rest(self.embed(ids)) @ self.embed.weight.T
        return F.cross_entropy(x.flatten(0, 1), ids.flatten(), ignore_index=3)


def rows(count: int = ROWS) -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=made, dtype=torch.double)


def ids() -> torch.Tensor:
    return torch.randint(20, (ROWS, 6), generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "blocks": (blocks, rows),
    "dropped": (dropped, rows),
    "normed": (normed, rows),
    "skips": (lambda: exact(Skips()), rows),
    "nested": (lambda: exact(Nested()), rows),
    "losses": (lambda: exact(Losses()), rows),
    "checkpointed": (lambda: exact(Checkpointed()), rows),
    "tied": (lambda: exact(Tied()), ids),
}


def planned(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mesh: str,
    parts: int | None = None,
    schedule: str = "auto",
    **how: Any,
) -> Any:
    if parts is not None:
        monkeypatch.setenv("FXPAR_MICROBATCHES", str(parts))
    monkeypatch.setenv("FXPAR_PIPELINE", schedule)
    make, feed = MODELS[name]
    return fxpar.plan(
        make(), feed(), mesh=mesh, **{"mode": "propagate", "grad": True} | how
    )


def error_of(plan: Any, x: torch.Tensor) -> float:
    """The largest difference from one device, of the result and all gradients."""
    torch.manual_seed(3)
    got = plan.outcome(x)
    torch.manual_seed(3)
    want = plan.reference_outcome(x)
    results = tree_leaves(got.result), tree_leaves(want.result)
    pairs = [*zip(*results, strict=True)]
    pairs += [(got.gradients[k], y) for k, y in want.gradients.items()]
    pairs += [(got.mutations[k], y) for k, y in want.mutations.items()]
    return max((a - b).abs().max().item() for a, b in pairs)


MESHES = [
    ("pp=2", 4),
    ("pp=2,dp=2", 2),
    ("pp=2,tp=2", 1),
    ("pp=4", 8),
    ("pp=4", 2),
    ("dp=2,pp=2,tp=2", 2),
    ("stage=2", 1),
]
SLOW = pytest.mark.slow
QUICK_MESHES = {
    ("normed", "pp=2", 4),
    ("nested", "pp=2", 4),
    ("losses", "pp=4", 2),
}
QUICK = {("tied", "interleaved"), ("skips", "zero_bubble"), ("tied", "dualpipev")}
TWICE = [name for name, s in SCHEDULES.items() if s.rounds == 2]  # stages a place


@pytest.mark.parametrize(
    ("name", "mesh", "parts"),
    [
        pytest.param(name, *mesh, marks=() if (name, *mesh) in QUICK_MESHES else SLOW)
        for name in MODELS
        for mesh in MESHES
    ],
)
def test_numbers_are_those_of_one_device(
    name: str, mesh: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, name, mesh, parts)
    assert error_of(plan, MODELS[name][1]()) < 1e-11
    assert len(plan.stages) == (4 if "pp=4" in mesh else 2)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=() if (name, schedule) in QUICK else SLOW)
        for name in MODELS
        for schedule in SCHEDULES
    ],
)
def test_schedules_do_not_change_numbers(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, name, "pp=2", 4, schedule)
    assert len(plan.stages) == (4 if schedule in TWICE else 2)
    assert error_of(plan, MODELS[name][1]()) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "dualpipev"])
@pytest.mark.parametrize("name", ["losses", "nested", "normed"])
def test_schedules_of_few_parts_and_many(
    name: str, schedule: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, name, "pp=2", parts, schedule)
    assert error_of(plan, rows()) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sixteen_stages(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_MICROBATCHES", "16")
    monkeypatch.setenv("FXPAR_PIPELINE", schedule)
    mesh, x = "pp=8" if schedule in TWICE else "pp=16", rows(16)
    plan = fxpar.plan(exact(Skips()), x, mesh=mesh, mode="propagate", grad=True)
    assert len(plan.stages) == 16
    assert error_of(plan, x) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["search", "replicate"])
def test_plans_of_other_modes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, "blocks", "pp=2,dp=2", 2, mode=mode)
    assert error_of(plan, rows()) < 1e-11


@pytest.mark.slow
def test_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, "blocks", "pp=4", grad=False)
    torch.testing.assert_close(plan.simulate(rows()), plan.reference(rows()))
    assert all(stage.backward_seconds == 0 for stage in plan.stages)


def crossings(plan: Any) -> list[fx.Node]:
    return [n for n in plan.result.local.nodes if n.target is ours.transfer.default]


def test_stages_are_contiguous_and_messages_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(monkeypatch, "blocks", "pp=4", 2)
    # A value forth and its gradient back, for each border and microbatch.
    assert len(crossings(plan)) == 3 * 2 * 2
    assert all(len(stage.parameters) == 6 for stage in plan.stages)
    # To all places: the result, and of each stage all gradients at once.
    spread = [n for n in plan.result.local.nodes if n.target is ours.spread.default]
    assert len(spread) == 1 + 4
    kinds = {c.kind for c in plan.collectives}
    assert kinds == {"send", "broadcast"}
    late = False
    for node in plan.result.local.nodes:
        home = home_of(node)
        if home is None or PLACE not in node.meta:
            continue
        for read in map(home_of, node.all_input_nodes):
            if read is not None and read.phase == home.phase == "forward":
                assert read.stage <= home.stage
            if read is not None and read.phase == home.phase == "backward":
                late = True
                assert read.stage >= home.stage
    assert late


def test_messages_of_a_checkpointed_region_are_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(monkeypatch, "checkpointed", "pp=2", 4)
    sends = [c for c in plan.collectives if c.kind == "send"]
    assert len(sends) == len(crossings(plan))
    assert error_of(plan, rows()) < 1e-11


def test_a_tied_weight_is_read_twice_and_its_gradients_cross_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(monkeypatch, "tied", "pp=2", 4)
    first, last = plan.stages
    assert {*first.parameters} & {*last.parameters} == {"embed.weight"}
    assert len(first.parameters) + len(last.parameters) == 14
    weights = [n for n in crossings(plan) if n.meta["val"].shape == (20, WIDTH)]
    assert len(weights) == 1


@pytest.mark.parametrize(
    ("hint", "cut"),
    [({"1.*": "pp=1"}, ["0", "123"]), ({"2.*": "pp=0"}, ["012", "3"])],
)
def test_hints_pin_parameters_to_stages(
    hint: dict[str, str], cut: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, "blocks", "pp=2", 2, hints=hint)
    names = [{name[0] for name in stage.parameters} for stage in plan.stages]
    assert names == [*map(set, cut)]
    assert error_of(plan, rows()) < 1e-11


@pytest.mark.parametrize(
    ("hints", "text"),
    [
        ({"3.*": "pp=0", "0.*": "pp=1"}, "no cut of"),
        ({"0.*": "pp=2"}, "stages are pp=0 to pp=1"),
        ({"0.*": "stage=0"}, "stages are pp=0 to pp=1"),
        ({"9.*": "pp=0"}, "matches no parameter"),
    ],
)
def test_pins_that_do_not_fit_are_refused(
    hints: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HintError, match=text):
        planned(monkeypatch, "blocks", "pp=2", 2, grad=False, hints=hints)


@pytest.mark.parametrize("mode", ["propagate", pytest.param("search", marks=SLOW)])
def test_slower_places_get_fewer_ops(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of places of 1 and 1/2 take equally long, and longer if cut in halves."""
    model = exact(nn.Sequential(*[blocks() for _ in range(2)]))
    monkeypatch.setenv("FXPAR_MICROBATCHES", "4")

    def plan_on(mesh: str, **more: Any) -> Any:
        return fxpar.plan(model, rows(), mesh=mesh, mode=mode, grad=True, **more)

    plan, half = plan_on("pp=2{1.0,0.5}"), plan_on("pp=2")
    fast, slow = plan.stages
    assert len(fast.parameters) > len(half.stages[0].parameters)
    assert not any("unlike" in note for note in plan.notes)
    assert slow.seconds == pytest.approx(fast.seconds, rel=0.35)
    pins = {
        name: f"pp={stage.index}"
        for stage in half.stages
        for name in stage.parameters
        if name.endswith("up.weight")
    }
    halves = plan_on("pp=2{1.0,0.5}", hints=pins)
    assert len(halves.stages[0].parameters) < len(fast.parameters)
    assert plan.predicted.seconds < halves.predicted.seconds
    assert error_of(plan, rows()) < 1e-11


def test_only_the_axis_of_stages_may_be_unlike() -> None:
    for mesh in ("pp=2,dp=2{1.0,0.5}", "pp=2{1.0,0.5}[1,2]"):
        with pytest.raises(MeshError, match="stages"):
            fxpar.plan(blocks(), rows(), mesh=mesh, mode="propagate")


@pytest.mark.slow
def test_microbatches_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, "blocks", "pp=2")
    assert any("stages: 2 along pp, gpipe, 8 microbatches" in x for x in plan.notes)
    assert not planned(monkeypatch, "blocks", "dp=2").stages


def test_a_plan_is_saved_and_applied_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, "blocks", "pp=2,dp=2", 2)
    plan.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    assert saved.stages == plan.stages and saved.hash == plan.hash
    again = planned(
        monkeypatch, "blocks", "pp=2,dp=2", 2, mode=str(tmp_path / "plan.json")
    )
    assert again.hash == plan.hash
    assert "stages, each of one microbatch" in str(plan)


@pytest.mark.slow
def test_a_plan_of_more_stages_is_cut_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, "blocks", "pp=2", 2, "interleaved")
    plan.save(tmp_path / "plan.json")
    mode = str(tmp_path / "plan.json")
    again = planned(monkeypatch, "blocks", "pp=2", 2, "1f1b", mode=mode)
    assert len(plan.stages) == 4 and len(again.stages) == 2
    assert error_of(again, rows()) < 1e-11


def test_a_message_with_another_tag_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(monkeypatch, "blocks", "pp=2", 2, grad=False)
    programs = [program_at(plan.result.local, place) for place in range(2)]
    (first, *_) = programs[0].find_nodes(op="call_function", target=ours.send.default)
    first.args = (first.args[0], None, 1, 7, *first.args[4:])  # with another tag
    inputs = [[*plan.call.inputs((rows(),), {})]] * 2
    with pytest.raises(PlanError, match="tag 7"):
        run_stages(programs, plan.mesh, "pp", inputs)


def test_what_cannot_be_in_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="too few for 2 stages"):
        fxpar.plan(lambda x: x + 1, rows(), mesh="pp=2", mode="propagate")
    with pytest.raises(OptionError, match="no axis of stages"):
        planned(monkeypatch, "blocks", "dp=2", schedule="1f1b")
    with pytest.raises(OptionError, match="PIPELINE cannot be 'gpype'"):
        planned(monkeypatch, "blocks", "pp=2", schedule="gpype")
    with pytest.raises(FxparError, match="programs without stages"):
        monkeypatch.setenv("FXPAR_PIPELINE", "auto")
        text = "buckets(bytes=1)"
        fxpar.plan(blocks(), rows(), mesh="pp=2", mode="propagate", schedule=text)
    hints = {"0.weight": ("tp", None)}
    with pytest.raises(PlanError, match=r"0.weight .*31@tp.* are unequal"):
        fxpar.plan(odd(), rows(), mesh="pp=2,tp=2", mode="propagate", hints=hints)


def odd() -> nn.Module:
    return exact(nn.Sequential(nn.Linear(WIDTH, 31), nn.ReLU(), nn.Linear(31, 8)))


@pytest.mark.parametrize(("mesh", "count"), [("pp=2,dp=2", 7), ("pp=2,tp=2", 8)])
def test_what_ranks_do_not_divide_is_whole_beside_stages(
    mesh: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last batch of a loader; without stages it would be split unevenly."""
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    how: dict[str, Any] = {"mode": "propagate", "grad": True}
    alone = fxpar.plan(odd(), rows(count), mesh=mesh.removeprefix("pp=2,"), **how)
    assert not alone.result.decision.is_even
    plan = fxpar.plan(odd(), rows(count), mesh=mesh, **how)
    assert len(plan.stages) == 2 and plan.result.decision.is_even
    assert error_of(plan, rows(count)) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "count", "order"),
    [
        ("interleaved", 7, "looped_bfs"),
        ("interleaved_zero_bubble", 5, "looped_bfs"),
        ("dualpipev", 2, "zbv"),
    ],
)
@pytest.mark.parametrize("mode", ["propagate", "search"])
def test_a_last_batch_that_is_smaller_has_an_order(
    mode: str,
    schedule: str,
    count: int,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many parts as rows, for which the schedule has no order; where so many were
    asked for it is an error."""
    monkeypatch.setenv("FXPAR_PIPELINE", schedule)
    how: dict[str, Any] = {"mesh": "pp=2", "mode": mode, "grad": True}
    monkeypatch.setenv("FXPAR_MICROBATCHES", "8")
    plan = fxpar.plan(blocks(), rows(count), **how)
    assert any(f"{order}, {count} microbatches" in note for note in plan.notes)
    assert error_of(plan, rows(count)) < 1e-11
    monkeypatch.setenv("FXPAR_MICROBATCHES", str(count))
    with pytest.raises(PlanError, match=f"'{schedule}' has no order for {count}"):
        fxpar.plan(blocks(), rows(count), **how)


REAL = ("llama", "gpt2", "bert", "t5", "whisper", "vit", "resnet")


def check_real_model(name: str, mesh: str) -> None:
    """Loss and gradients are those of one device."""
    with double():
        model, batch = build_double(name)
        plan = fxpar.plan(model, mesh=mesh, grad=True, mode="propagate", **batch)
        torch.manual_seed(1)
        got = plan.outcome(**batch)
        torch.manual_seed(1)
        want = plan.reference_outcome(**batch)
    assert len(plan.stages) > 1
    torch.testing.assert_close(got.result, want.result)
    largest = max(x.abs().max().item() for x in want.gradients.values())
    for key, x in want.gradients.items():
        torch.testing.assert_close(
            got.gradients[key], x, rtol=1e-8, atol=1e-12 * largest
        )


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("mesh", ["pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("name", REAL)
def test_real_models(
    name: str, mesh: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_MICROBATCHES", str(parts))
    check_real_model(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "dp=4,pp=2"])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_real_models_of_odd_sizes(
    name: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    check_real_model(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "gpipe"])
@pytest.mark.parametrize("mesh", ["pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("name", REAL)
def test_real_models_in_every_schedule(
    name: str, mesh: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_MICROBATCHES", "8" if mesh == "pp=4" else "4")
    monkeypatch.setenv("FXPAR_PIPELINE", schedule)
    check_real_model(name, mesh)


@pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)]
)
def test_the_predicted_step_is_that_of_the_formula(
    schedule: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal stages a step takes what they compute, and the bubble."""
    places, parts = 4, 4
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    monkeypatch.setenv("FXPAR_MICROBATCHES", str(parts))
    monkeypatch.setenv("FXPAR_PIPELINE", schedule)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(places)])
        x = torch.randn(16384, 2048, requires_grad=True)
    plan = fxpar.plan(model, x, mesh="pp=4", mode="propagate", grad=True)
    line, wait = plan.timeline, (places - 1) / (parts + places - 1)
    assert line.seconds == pytest.approx(line.compute_seconds / (1 - wait), rel=0.1)
    names = {event.name for event in line.events if event.stream == "place 3"}
    assert {"3F0", "3B0", "3F3", "3B3"} <= names
    assert plan.predicted.sent[0][0] == "pp"
    plan.to_trace(tmp_path / "trace.json")
    assert "place 3" in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize("parts", [1, pytest.param(4, marks=SLOW)])
def test_a_place_that_waits_leaves_its_cores_to_others(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a core that all places share is never idle; with one for each all is as where
    nothing is shared."""
    monkeypatch.setenv("FXPAR_MICROBATCHES", str(parts))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        x = torch.randn(2048, 256, requires_grad=True)
    plan = fxpar.plan(model, x, mesh="pp=4", mode="propagate", grad=True)
    free = replace(machine(), levels=(Level(0, 1e30, 0.0, 0.0),), bandwidth=1e30)
    apart, shared, half, four = (
        predict_step(plan.result.local, plan.mesh, replace(free, cores=n).with_ranks(4))
        for n in (0, 1, 2, 4)
    )
    work = 4 * apart.compute_seconds
    assert apart == four and apart.seconds < 0.8 * work
    assert shared.seconds == pytest.approx(work, rel=0.02)
    assert max(work / 2, apart.seconds) <= half.seconds < 0.8 * shared.seconds
    for line in (shared, half):
        assert apart.compute_seconds < 1.001 * line.compute_seconds <= line.seconds


@pytest.mark.parametrize("own", [False, True], ids=["all kinds", "permutes alone"])
def test_messages_of_a_place_leave_one_after_the_other(
    own: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What crosses takes as long in parts as at once; a step waits for its results. A
    message is a permute, which may be measured to have a link of its own."""
    speed = 1e4
    level = Level(0, speed, 0.0, 0.0)
    if own:
        kinds = (("permute", of_kind(0.0, 0.0, speed)),)
        level = Level(0, 100 * speed, 0.0, 0.0, kinds=kinds)
    slow = replace(machine(), levels=(level,))
    slow.save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))
    plan = planned(monkeypatch, "blocks", "pp=2", 4, grad=False)
    crossing = ROWS * WIDTH * 8 / speed
    assert plan.predicted.seconds == pytest.approx(2 * crossing, rel=0.1)


def test_messages_take_from_what_computes_beside_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cores that compute also send: three of four parts meet a message at either
    end of it."""
    message, seconds = 3e-5, []
    level = Level(0, 2 * WIDTH * 8 / message, 0.0, 0.0)
    for beside in (0.0, 1.0):
        name = tmp_path / f"{beside}.json"
        replace(machine(), levels=(level,), beside=beside).save(name)
        monkeypatch.setenv("FXPAR_HARDWARE", str(name))
        plan = planned(monkeypatch, "blocks", "pp=2", 4, grad=False)
        seconds.append(plan.predicted.seconds)
    alone, together = seconds
    assert together - alone == pytest.approx(3 * message, rel=0.1)


@pytest.mark.slow
def test_stages_pay_for_collectives_of_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of activations are summed in each microbatch, those of weights once."""
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    by_tp, by_dp = (
        planned(monkeypatch, "blocks", mesh, 2).stages
        for mesh in ("pp=2,tp=2", "pp=2,dp=2")
    )
    for split, whole in zip(by_tp, by_dp, strict=True):
        assert split.backward_seconds > 0.9 * split.forward_seconds
        assert split.backward_seconds > 1.2 * whole.backward_seconds


def test_a_split_into_one_part_is_cut_where_it_is_read() -> None:
    """As ``jacrev`` makes it of one argument: it shows all of its operand."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).double()

    def jacobians(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.jacrev(lambda v: torch.tanh(model(v))))(x)

    x = torch.randn(8, 8, dtype=torch.float64)
    plan = fxpar.plan(jacobians, x, mesh="pp=2", mode="propagate")
    assert len(plan.stages) == 2
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def test_no_place_waits_for_what_only_results_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of a stage that are sent to all while another still computes are taken
    out of their message at the end."""
    monkeypatch.setattr(pipeline_ops, "BUCKET", 6000)
    plan = planned(monkeypatch, "blocks", "pp=2", 4)
    waits = 0
    for place in range(2):
        program = program_at(plan.result.local, place)
        order = {node: i for i, node in enumerate(program.nodes)}
        last = max(i for n, i in order.items() if n.target is aten.mm.default)
        shares = program.find_nodes(op="call_function", target=ours.share.default)
        for share in shares:
            (wait,) = (n for n in share.users if n.target is c10d.wait_tensor.default)
            waits += order[share] < last
            assert order[wait] > last
    assert waits


def test_a_stage_does_not_blame_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stage gives to all fails at its own rank too when another has ended."""
    raised: list[Any] = []
    distributed = pipeline_ops._torch.distributed
    group = SimpleNamespace(rank=lambda: 1)
    monkeypatch.setattr(distributed, "group_named", lambda name: group)
    monkeypatch.setattr(distributed, "start_broadcast", lambda *x: raised.append(x[-1]))
    pipeline_ops.share(torch.ones(2), None, 1, "g")
    text = str(raised[0](1, RuntimeError("closed by peer")))
    assert "a value that rank 1, at position 1 of the pipeline, sends" in text
    assert "one of the stages ended" in text and "rank 1) ended" not in text


def test_a_lost_rank_can_be_handed_on() -> None:
    """To another process: launchers pickle what a rank raises."""
    error = pipeline_ops._failed(1)(3, RuntimeError("closed by peer"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank) == (str(error), 3)
