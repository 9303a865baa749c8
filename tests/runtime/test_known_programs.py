"""Programs that an earlier start compiled: what is found, what counts as none, and that
ranks which find more or less of it still run the same program."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import fxpar
from fxpar import _torch, cache_files, pipeline
from fxpar.config import Options
from fxpar.runtime.caches import known_programs
from fxpar.runtime.ranks.groups import Ranks
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Input
from fxpar.sharding.spec import Spec
from tests.helpers.caches import without_programs
from tests.helpers.spawn import shared_pool


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fxpar"


def relu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a @ b)


def text(
    rows: int = 4,
    width: int = 8,
    ranks: str = "dp=2",
    asked: tuple[Any, ...] = (),
    **options: Any,
) -> Any:
    gm = fx.symbolic_trace(relu)
    args = [torch.ones(shape, dtype=torch.float32) for shape in ((rows, 8), (8, width))]
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), args, strict=True):
        node.meta["example_value"] = x
    named = [Input("a", "input"), Input("b", "parameter")]
    place = Ranks(Mesh.parse(ranks), 0)
    return known_programs.text_of(gm, named, args, Options(**options), place, asked)


def test_the_key_has_all_that_a_program_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = text()
    assert same == text()
    others = {
        *(text(rows=6), text(width=4), text(ranks="dp=4"), text(plan="propagate")),
        *(text(asked=(True,)), text(asked=(False, (0, Spec("dp", None))))),
        *(
            text(hints={"b": (None, "dp")}),
            text(schedule="none"),
            text(hardware="a100"),
        ),
    }
    assert same not in others and len(others) == 9 and None not in others
    torch.set_default_dtype(torch.float64)
    try:
        assert text() != same
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(_torch.version, "own_version", lambda: "another")
    assert text() != same


@pytest.mark.parametrize(
    "how",
    [{"tune": True}, {"verify": True}, {"fuse": "interpret"}, {"codegen": "eager"}],
    ids=str,
)
def test_what_asks_for_more_is_not_kept(how: dict[str, Any]) -> None:
    assert text(**how) is None


def kept(disk: Path) -> tuple[known_programs.KnownProgram, Path]:
    plan = fxpar.plan(relu, torch.ones(4, 8), torch.ones(8, 8), mesh="dp=2")
    new = known_programs.look_up("a program", "tag")
    assert new is not None and new.plan is None
    results = {0: Spec("dp", None)}
    known = replace(
        new, plan=plan.result.plan, results=results, launches=("all_reduce",)
    )
    known_programs.keep(known)
    (path,) = disk.glob("*.program.json")
    found = known_programs.look_up("a program", "tag")
    assert found is not None and found.plan is not None
    assert found.plan.hash == plan.hash and found.number == new.number
    assert found.results == results and found.launches == ("all_reduce",)
    return found, path


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_text("")


def _binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def _edited(path: Path) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"launches": []}))


def _another(path: Path) -> None:
    data = json.loads(path.read_text())
    del data["format"], data["digest"]
    cache_files.write_record(path, known_programs.FORMAT, "another key", data)


def _older(path: Path) -> None:
    data = json.loads(path.read_text())
    cache_files.write_record(path, "fxpar program 0", data["key"], data)


@pytest.mark.parametrize(
    "damage",
    [_cut, _empty, _binary, _edited, _another, _older],
    ids=lambda f: f.__name__,
)
def test_a_damaged_or_foreign_file_counts_as_none(
    disk: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    before, path = kept(disk)
    damage(path)
    with caplog.at_level(logging.INFO, "fxpar"):
        found = known_programs.look_up("a program", "tag")
    assert found is not None and found.plan is None and found.number != before.number
    assert "it is made again" in caplog.text


def test_no_file_is_no_news(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fxpar"):
        found = known_programs.look_up("a program", "tag")
    assert found is not None and found.plan is None and not caplog.text


def unlike(words: list[str | None]) -> list[Any]:
    found = known_programs.look_up(words[dist.get_rank()], "tag")
    return [found and found.number, found and found.key]


@pytest.mark.multiprocess
def test_ranks_know_the_same(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    pool = shared_pool(2)
    first, second = pool.run(unlike, ["a program"] * 2, env=env)
    assert first == second and first[0]
    for words in (["a program", "another"], ["a program", None], [None, "a program"]):
        assert pool.run(unlike, words, env=env) == [[None, None]] * 2


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.two(torch.relu(self.one(x))) ** 2).mean()


def started(folders: list[str], **asked: Any) -> dict[str, Any]:
    """A start of the program: its loss and gradients, and what was found of it."""
    from torch._dynamo.utils import counters

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[dist.get_rank()]
    torch.compiler.reset()
    counters.clear()
    planned, decided = [], pipeline.decided
    pipeline.decided = lambda *args: planned.append(0) or decided(*args)
    try:
        torch.manual_seed(0)
        model = _Model().double()
        x = torch.randn(8, 16, dtype=torch.double)
        options = {"mesh": "dp=2", "plan": "propagate", **asked}
        program = torch.compile(model, backend="fxpar", options=options)
        loss = program(x)
        loss.backward()
        plain = model(x)
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        plain.backward()
        apart = [
            float((g - p.grad).abs().max())
            for g, p in zip(grads, model.parameters(), strict=True)
        ]
        return {
            "apart": max(*apart, abs(float(loss.detach()) - float(plain))),
            "hits": counters["aot_autograd"]["autograd_cache_hit"],
            "planned": len(planned),
            "plan": fxpar.plans()[-1].hash,
        }
    finally:
        pipeline.decided = decided
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[str]]:
    shared_pool(2).renew()
    yield [without_programs(tmp_path / name) for name in "ab"]
    shared_pool(2).renew()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_start_neither_traces_nor_plans(folders: list[str]) -> None:
    pool = shared_pool(2)
    cold = pool.run(started, folders[:1] * 2, timeout=600.0)
    warm = pool.run(started, folders[:1] * 2, timeout=600.0)
    for first, second in zip(cold, warm, strict=True):
        assert first["apart"] < 1e-12 and second["apart"] < 1e-12
        assert second["planned"] == 0 and second["hits"] == 1
        assert first["plan"] == second["plan"]
    # Rank 0 plans and compiles for both.
    assert [[each["planned"], each["hits"]] for each in cold] == [[1, 0], [0, 1]]
    # A damaged file of rank 0 is made anew.
    for path in Path(folders[0], "fxpar").glob("*.json"):
        _cut(path)
    again = pool.run(started, folders[:1] * 2, timeout=600.0)
    assert [[each["planned"], each["hits"]] for each in again] == [[1, 0], [0, 1]]
    assert all(each["apart"] < 1e-12 for each in again)


def started_on_parts(folders: list[str]) -> dict[str, Any]:
    return started(folders, inputs="local")


@pytest.mark.multiprocess
def test_each_place_finds_the_program_that_it_kept(folders: list[str]) -> None:
    """Ranks that are fed parts of a batch run programs of their own."""
    pool = shared_pool(2)
    for expected in ([1, 0], [0, 1]):
        starts = pool.run(started_on_parts, folders[:1] * 2, timeout=600.0)
        assert all(each["apart"] < 1e-12 for each in starts)
        assert [[each["planned"], each["hits"]] for each in starts] == [expected] * 2


@pytest.mark.multiprocess
def test_ranks_may_see_one_folder_by_two_paths(folders: list[str]) -> None:
    """As containers do that have it at different places: libraries, which are loaded
    by their paths, are each rank's own."""
    for folder in folders:
        path = Path(folder, "fxpar", "mark")
        path.parent.mkdir(parents=True)
        path.write_text("0" * 32)
    starts = shared_pool(2).run(started, folders, timeout=600.0)
    assert all(each["apart"] < 1e-12 for each in starts)


def _of_another_program(path: Path) -> None:
    """Give a record the plan of another program."""
    plan = fxpar.plan(relu, torch.ones(4, 8), torch.ones(8, 8), mesh="dp=2").result.plan
    data = json.loads(path.read_text()) | {"plan": plan.to_record()}
    form, key, _ = (data.pop(name) for name in ("format", "key", "digest"))
    cache_files.write_record(path, form, key, data)


@pytest.mark.multiprocess
def test_a_plan_that_does_not_fit_counts_as_none(folders: list[str]) -> None:
    """On all ranks, also where it does not fit on one alone: the other has what was
    compiled, and knows nothing of the plan."""
    pool = shared_pool(2)
    pool.run(started, folders, timeout=600.0)
    for path in Path(folders[0], "fxpar").glob("*.program.json"):
        _of_another_program(path)
    shutil.rmtree(Path(folders[1], "aotautograd"))
    after = pool.run(started, folders, timeout=600.0)
    assert [each["planned"] for each in after] == [1, 2]
    assert all(each["apart"] < 1e-12 for each in after)
    # And is kept for the next start.
    last = pool.run(started, folders, timeout=600.0)
    assert all(each["apart"] < 1e-12 for each in last)
    assert [[each["planned"], each["hits"]] for each in last] == [[0, 1]] * 2
    assert last[0]["plan"] == after[1]["plan"]


def told_wrong(folder: str) -> dict[str, Any]:
    """A start of a program of which something else is known, whatever is planned."""
    plan = fxpar.plan(relu, torch.ones(4, 8), torch.ones(8, 8), mesh="dp=2").result.plan
    look_up, looks = known_programs.look_up, []

    def wrong(*args: Any, anew: bool) -> Any:
        looks.append(anew)
        return replace(look_up(*args, anew=anew), plan=plan)

    with mock.patch.object(known_programs, "look_up", wrong):
        return started([folder, folder]) | {"looks": looks}


@pytest.mark.multiprocess
def test_what_never_fits_is_planned_by_all(tmp_path: Path) -> None:
    folder = without_programs(tmp_path)
    for each in shared_pool(2).run(told_wrong, folder, timeout=600.0):
        assert each["looks"] == [False, True]
        assert each["apart"] < 1e-12 and each["planned"] == 3


def randomly(folder: str, fallback: bool) -> float:
    """A step with dropout, by Inductor's random numbers or torch's own: how far its
    gradient is from that of its mask."""
    from torch._inductor import config

    torch.compiler.reset()
    x = torch.ones(8, 16, requires_grad=True)
    program = torch.compile(
        lambda x: torch.nn.functional.dropout(x, 0.5) * 3.0,
        backend="fxpar",
        options={"mesh": "dp=2"},
    )
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
        config.patch(fallback_random=fallback),
    ):
        y = program(x)
        y.sum().backward()
    assert x.grad is not None and set(y.unique().tolist()) == {0.0, 6.0}
    return float((y.detach() - x.grad).abs().max())


def conjugated(folder: str, conj: bool) -> float:
    torch.compiler.reset()
    x = torch.randn(
        8, 4, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0)
    )
    x = x.conj() if conj else x
    program = torch.compile(
        lambda x: torch.view_as_real(x.resolve_conj()) * 2.0,
        backend="fxpar",
        options={"mesh": "dp=2"},
    )
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        y = program(x)
    return float((y - 2.0 * torch.view_as_real(x.resolve_conj())).abs().max())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "start", [pytest.param(randomly, marks=pytest.mark.slow), conjugated]
)
def test_what_tracing_depends_on_may_change_between_starts(
    tmp_path: Path, start: Callable[[str, bool], float]
) -> None:
    pool, folder = shared_pool(2), without_programs(tmp_path)
    for other in (False, True, False):
        apart = pool.run(start, folder, other, timeout=300.0)
        assert max(apart) < 1e-6


def at_rest(folder: str, whole: bool) -> dict[str, Any]:
    """A start of three steps with parameters at rest, as one program (``whole``) or
    with an optimizer behind: parameters beside one device's."""
    from torch._dynamo.utils import counters

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()
    counters.clear()
    planned, decided = [], pipeline.decided
    pipeline.decided = lambda *args: planned.append(0) or decided(*args)
    try:
        torch.manual_seed(0)
        alone = _Model().double()
        model = fxpar.shard(copy.deepcopy(alone), mesh="dp=2")
        x = torch.randn(8, 16, dtype=torch.double)
        options = {"plan": "propagate", "schedule": "none"}
        optimizers = [torch.optim.AdamW(m.parameters()) for m in (alone, model)]
        if whole:
            step = fxpar.train_step(
                model, lambda m, x: m(x), optimizers[1], options=options
            )
        else:
            program = torch.compile(model, backend="fxpar", options=options)
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            alone(x).backward()
            optimizers[0].step()
            if whole:
                step(x)
            else:
                program(x).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # reads meshes
                optimizers[1].step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return {
            "apart": max(float((a.full_tensor() - b).abs().max()) for a, b in pairs),
            "hits": counters["aot_autograd"]["autograd_cache_hit"],
            "planned": len(planned),
            "shared": any("stored plan" in n for n in fxpar.plans()[-1].notes),
        }
    finally:
        pipeline.decided = decided
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("whole", [False, True], ids=["shard", "train_step"])
def test_programs_with_parameters_at_rest_are_known_too(
    folders: list[str], whole: bool
) -> None:
    pool = shared_pool(2)
    cold = pool.run(at_rest, folders[0], whole, timeout=600.0)
    # Process groups of another start have other names.
    pool.renew()
    pool.run(more_groups)
    warm = pool.run(at_rest, folders[0], whole, timeout=600.0)
    assert all(each["apart"] < 1e-12 for each in (*cold, *warm))
    assert [[each["planned"], each["hits"]] for each in cold] == [[1, 0], [0, 1]]
    assert [[each["planned"], each["hits"]] for each in warm] == [[0, 1], [0, 1]]
    assert all(each["shared"] for each in warm)


def more_groups() -> None:
    for _ in range(3):
        dist.new_group([0, 1])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_whose_folder_is_lost_plans_what_the_others_found(
    folders: list[str], who: int
) -> None:
    pool = shared_pool(2)
    pool.run(started, folders, timeout=600.0)
    shutil.rmtree(Path(folders[who], "aotautograd"))
    if who:
        shutil.rmtree(Path(folders[who], "fxpar"))
    after = pool.run(started, folders, timeout=600.0)
    assert [each["planned"] for each in after] == [int(r == who) for r in range(2)]
    assert all(each["apart"] < 1e-12 for each in after)
    # All that rank 0 knew is lost: both plan anew.
    shutil.rmtree(Path(folders[0], "fxpar"))
    after = pool.run(started, folders, timeout=600.0)
    assert all(each["planned"] == 1 and each["apart"] < 1e-12 for each in after)


def led(fails: str, factor: float) -> list[str]:
    """What a call says where rank 0 fails to plan, or to compile, for both."""
    options: dict[str, Any] = {"mesh": "dp=2", "plan": "propagate"}
    if fails == "plan":
        options["hints"] = {"x": ("dp", "dp")}
    torch.compiler.reset()
    program = torch.compile(
        lambda x: (x * factor).relu(), backend="fxpar", options=options
    )

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no compiler here")

    bound = pipeline.bound
    if fails == "compile" and dist.get_rank() == 0:
        pipeline.bound = broken
    try:
        program(torch.ones(4, 4))
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        pipeline.bound = bound
    return ["", ""]


@pytest.mark.multiprocess
def test_who_follows_hears_of_a_failure() -> None:
    pool, factor = shared_pool(2), float(time.time_ns())  # a program of this run alone
    # What is wrong with the program, all ranks say by themselves.
    for kind, text in pool.run(led, "plan", factor):
        assert kind == "HintError" and "used twice" in text
    (kind, _), (other, told) = pool.run(led, "compile", factor)
    assert kind == "ValueError" and other == "RankMismatchError"
    assert "rank 0 failed" in told and "no compiler here" in told
    assert pool.run(led, "", factor) == [["", ""]] * 2
