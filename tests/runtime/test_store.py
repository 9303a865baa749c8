"""Plans on disk: hits, misses, and what must never be taken for a plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar import _torch, choose_plan, pipeline, units
from fxpar.errors import is_library
from fxpar.explain.dump import graph_text
from fxpar.runtime.caches import plan_store
from fxpar.runtime.ranks import meeting
from fxpar.runtime.steps import lowering_steps
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.tracing import TracedCall, read_signature
from fxpar.sharding import decide
from fxpar.sharding import ops as rule_table
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request, candidates
from fxpar.sharding.search.run_search import SearchOptions
from tests.helpers.machines import machine
from tests.helpers.programs import batch

SECONDS = 5.0


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of plans; empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    return tmp_path / "caches" / "fxpar"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of every search that is run."""
    run, original = [], decide.search

    def counted(
        program: Any, mesh: Any, asked: SearchOptions, *args: Any, **kw: Any
    ) -> Any:
        run.append(asked.seconds)
        return original(program, mesh, asked, *args, **kw)

    monkeypatch.setattr(decide, "search", counted)
    return run


def layer() -> nn.Module:
    """The smallest program with something to decide."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU()).double()


def planned(
    model: Any = None,
    x: Any = None,
    *,
    mesh: str = "dp=2,tp=2",
    rank: int = 0,
    keep: bool = True,
    asked: SearchOptions | None = None,
    change: Callable[[Request], Request] = lambda request: request,
) -> JointState:
    call = TracedCall(model or layer(), (batch() if x is None else x,), {}, False)
    module, mode = call.trace()

    def declare(kind: str, payload: Any, node: Any) -> Any:
        return call.declare(kind, payload, node, [None])

    signature = read_signature(module.graph, declare)
    asked = asked or SearchOptions(machine(), SECONDS)
    request = Request(
        Mesh.parse(mesh), signature, {}, asked, name="g", rank=rank
    ).with_options(cache_plans=keep)
    return choose_plan.planned(module.graph, mode, change(request))


def files(disk: Path) -> list[Path]:
    return sorted(disk.glob("*")) if disk.exists() else []


def test_a_plan_found_before_is_taken(
    disk: Path, searches: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    first = planned()
    assert len(searches) == 1 and [p.suffix for p in files(disk)] == [".json"]
    with caplog.at_level(logging.INFO, "fxpar"):
        second = planned()
    assert len(searches) == 1 and "nothing is searched" in caplog.text
    assert second.plan.hash == first.plan.hash
    assert graph_text(second.local) == graph_text(first.local)
    assert second.plan.mesh == first.plan.mesh  # with its links
    assert second.plan.reasons == first.plan.reasons
    assert second.plan.notes[:-1] == first.plan.notes
    assert second.plan.notes[-1].startswith(f"stored plan: {files(disk)[0]}")


def test_a_plan_says_what_its_step_is_predicted_to_take() -> None:
    """Where it was searched, now or at an earlier start; not of a plan handed in."""
    first = planned().plan
    assert first.step_seconds and len(first.predicted_texts()) == 1
    assert planned().plan.step_seconds == first.step_seconds
    followed = planned(change=lambda request: replace(request, mode=first)).plan
    assert followed.hash == first.hash and not followed.predicted_texts()


def test_it_is_not_kept_unless_asked_for(disk: Path, searches: list[float]) -> None:
    from torch._inductor import config

    planned(keep=False)
    with config.patch(force_disable_caches=True):
        planned()
    assert len(searches) == 2 and not files(disk)


def one_hint(request: Request) -> Request:
    return replace(request, hints={"0.weight": ("tp", None)})


def kept_gathered(request: Request) -> Request:
    return request.with_options(reshard_after_forward=False)


def resting(request: Request) -> Request:
    first, *rest = request.signature.inputs
    first = replace(first, at_rest=fxpar.Spec("dp", None))
    return replace(request, signature=replace(request.signature, inputs=(first, *rest)))


def open_mesh(request: Request) -> Request:
    return replace(request, meshes=candidates(4, machine()))


@pytest.mark.parametrize(
    "other",
    [
        {"x": batch(rows=16)},
        {"x": batch().float(), "model": layer().float()},
        {"model": nn.Sequential(*layer(), nn.ReLU())},
        {"mesh": "dp=4"},
        {"mesh": "tp=2,dp=2"},
        {"asked": SearchOptions(replace(machine(), bandwidth=2e8), SECONDS)},
        {"asked": SearchOptions(machine(), SECONDS, memory=1e9)},
        {"change": one_hint},
        {"change": kept_gathered},
        {"change": resting},
        {"change": open_mesh},
    ],
    ids=lambda other: "+".join(getattr(v, "__name__", k) for k, v in other.items()),
)
def test_another_question_is_another_plan(
    other: dict[str, Any], disk: Path, searches: list[float]
) -> None:
    planned()
    planned(**other)
    assert len(files(disk)) == 2


def test_rules_count(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    monkeypatch.setattr(rule_table, "_USER", {})
    fxpar.rule("aten::relu", "a b -> a b")  # the table says more
    planned()
    assert len(files(disk)) == 2


@pytest.mark.parametrize("version", ["torch", "fxpar"])
def test_other_versions_count(
    version: str, disk: Path, searches: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    if version == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99")
    else:
        monkeypatch.setattr(_torch.version, "own_version", lambda: "another")
    planned()
    assert len(searches) == 2 and len(files(disk)) == 2


def test_fxpars_version_is_that_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fxpar"
    (package / "part").mkdir(parents=True)
    (package / "a.py").write_text("x = 1")
    monkeypatch.setattr(_torch.version, "__file__", str(package / "part" / "file.py"))
    _torch.version.own_version.cache_clear()
    first = _torch.version.own_version()
    (package / "a.py").write_text("x = 2")
    _torch.version.own_version.cache_clear()
    assert _torch.version.own_version() != first
    _torch.version.own_version.cache_clear()


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def altered(text: str) -> str:
    data = json.loads(text)
    data["plan"]["nodes"][0]["factors"] = []
    return json.dumps(data)


def a_list(text: str) -> str:
    return "[]"


def without_digest(text: str) -> str:
    return "{}"


def signed(data: dict[str, Any]) -> str:
    """A record with the digest of its other entries."""
    del data["digest"]
    digest = units.digest(json.dumps(data, sort_keys=True), 64)
    return json.dumps(data | {"digest": digest})


def anothers(text: str) -> str:
    data = json.loads(text) | {"key": "f" * 64}
    return signed(data)


def no_plan(text: str) -> str:
    data = json.loads(text) | {"plan": {"mesh": "dp=2"}}
    return signed(data)


def no_mesh(text: str) -> str:
    data = json.loads(text)
    data["plan"]["mesh"] = "nonsense"
    return signed(data)


def another_programs(text: str) -> str:
    """A plan in order that does not fit the program."""
    other = nn.Sequential(*layer(), nn.BatchNorm1d(64).double())
    data = json.loads(text) | {"plan": planned(other, keep=False).plan.to_record()}
    return signed(data)


@pytest.mark.parametrize(
    "spoil",
    [
        *(truncated, altered, a_list, without_digest, anothers, no_plan, no_mesh),
        another_programs,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_spoiled_file_is_none(
    spoil: Callable[[str], str], disk: Path, searches: list[float]
) -> None:
    first = planned()
    (path,) = files(disk)
    path.write_text(spoil(path.read_text()))
    count = len(searches)
    assert planned().plan.hash == first.plan.hash
    assert len(searches) == count + 1
    planned()  # and was written again
    assert len(searches) == count + 1


def test_bytes_that_are_no_text_are_none(disk: Path, searches: list[float]) -> None:
    planned()
    (path,) = files(disk)
    path.write_bytes(b"\xff\xfe\x00")
    planned()
    path.unlink()
    path.mkdir()
    planned()  # neither read nor written
    assert len(searches) == 3


def test_a_folder_that_cannot_be_is_no_error(disk: Path, searches: list[float]) -> None:
    disk.parent.mkdir()
    disk.write_text("a file")
    planned()
    planned()
    assert len(searches) == 2


@pytest.mark.parametrize("schedule", ["auto", "none"])
def test_a_schedule_is_chosen_once(
    disk: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """With its plan, for each plan that is compared; a later start chooses none, but if
    another schedule was asked for when the plan was kept."""
    chosen: list[Any] = []
    choose = lowering_steps.choose_or_warn

    def counted(*args: Any, **options: bool) -> Any:
        chosen.append(choose(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(lowering_steps, "choose_or_warn", counted)
    monkeypatch.setattr("fxpar.fusion.choose_schedule.LEAST", -1.0)

    def asks(schedule: str) -> Callable[[Request], Request]:
        return lambda request: replace(
            request.with_options(schedule=schedule), hardware=machine()
        )

    first = planned(change=asks(schedule))
    count = len(chosen)
    assert (count > 0) == (schedule == "auto")
    second = planned(change=asks("auto"))
    if schedule == "auto":
        assert len(chosen) == count
        assert str(second.schedule) == str(first.schedule)
        assert graph_text(second.local) == graph_text(first.local)
        assert second.plan.near == first.plan.near
    else:
        assert len(chosen) > count
    count = len(chosen)
    tuned = planned(change=lambda r: asks("auto")(r).with_options(tune=True))
    assert len(chosen) == count + 1 and tuned.unscheduled is not None


def test_another_schedule_changes_nothing_else_of_a_plan() -> None:
    """What was chosen before it, as bodies of regions, is the plan's own."""
    result = planned(
        keep=False, change=lambda r: r.with_options(schedule="none", tune=True)
    )
    result.request = replace(result.request, bodies=(1,), experts_over=("dp",))
    result.plan = replace(result.plan, notes=("of the choice",))
    again = pipeline.with_schedule(result, "")
    assert again.plan.bodies == (1,) and again.plan.experts == ("dp",)
    assert "of the choice" in again.plan.notes


def test_more_seconds_search_again_what_is_not_proved(disk: Path) -> None:
    plan = replace(planned().plan, notes=())
    found = planned(keep=False).decision.search
    assert found is not None and found.is_proved
    key, (path,) = "1" * 64, files(disk)

    def kept(seconds: float, **how: Any) -> None:
        plan_store.save(key, plan, replace(found, **how), seconds, chosen=False)

    late = replace(found.solution, bound=0.9 * found.solution.cost)
    kept(10.0, solution=replace(late, stopped=True))  # another run finds another
    assert plan_store.load(key, 1.0) is None
    kept(10.0, solution=late)
    assert plan_store.load(key, 20.0) is None
    loaded = plan_store.load(key, 10.0)
    assert loaded is not None and loaded[0].hash == plan.hash and not loaded[1]
    assert "not proved, searched 10 s" in loaded[0].notes[-1]
    kept(10.0, rivals=found.predicted / 2)  # another mesh may be better
    assert plan_store.load(key, 20.0) is None
    kept(10.0)
    assert plan_store.load(key, 20.0) is not None
    assert path.exists() and not list(disk.glob("*.new"))


def test_a_chosen_mesh_is_kept_too(disk: Path, searches: list[float]) -> None:
    def pairs(request: Request) -> Request:
        return replace(request, meshes=(Mesh.parse("dp=4"), Mesh.parse("dp=2,tp=2")))

    first = planned(mesh="dp=4", change=pairs)
    count = len(searches)
    second = planned(mesh="dp=4", change=pairs)
    assert len(searches) == count >= 2
    assert second.plan.hash == first.plan.hash
    assert second.plan.mesh == first.plan.mesh


@pytest.mark.parametrize("opened", [False, True])
def test_other_ranks_follow_rank_0s_links(
    opened: bool, disk: Path, monkeypatch: pytest.MonkeyPatch, searches: list[float]
) -> None:
    """Even one whose own hardware has other links, and none of the files."""
    told: list[str] = []

    def gather(tag: str, text: str) -> list[str]:
        told.append(text)
        return [told[0]]

    monkeypatch.setattr(meeting, "gather", gather)
    change = open_mesh if opened else resting
    mine = planned(mesh="dp=4" if opened else "dp=2,tp=2", change=change)
    count = len(searches)
    other = SearchOptions(replace(machine(), levels=machine().levels[1:]), SECONDS)
    theirs = planned(
        mesh="dp=4" if opened else "dp=2,tp=2", rank=1, asked=other, change=change
    )
    assert len(searches) == count and len(files(disk)) == 1
    assert theirs.plan.hash == mine.plan.hash and theirs.plan.mesh == mine.plan.mesh
    assert graph_text(theirs.local) == graph_text(mine.local)


def test_the_package_knows_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of its source is of all modules, and none of its lines is a user's."""
    package, digested = Path(fxpar.__file__).parent, set[Path]()
    read_bytes = Path.read_bytes

    def noted(path: Path) -> bytes:
        digested.add(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    _torch.version.own_version.__wrapped__()
    assert digested == set(package.rglob("*.py"))
    assert all(is_library(str(file)) for file in digested)
