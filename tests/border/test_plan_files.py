"""Plan files that are broken: a PlanError that names the place, or a plan that still
gives the numbers of one device. Never a raw exception, never another number."""

from __future__ import annotations

import copy
import functools
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.cache_files import write_asked
from fxpar.errors import FxparError, OptionError, PlanError, ScheduleError
from fxpar.sharding.plan import Plan

MESH = "dp=2,tp=2"
SEEDS = [*range(25), *(pytest.param(i, marks=pytest.mark.slow) for i in range(25, 160))]


@functools.cache
def program() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)
    return nn.Sequential(*layers).double(), torch.randn(8, 8, dtype=torch.float64)


@functools.cache
def saved() -> str:
    """The text of a good plan, with links and a schedule."""
    model, x = program()
    plan = fxpar.plan(model, x, mesh=MESH, grad=True, mode="propagate")
    record = plan.to_record()
    link = {"bandwidth": 1e9, "latency": 1e-6, "overhead": 1e-5, "tree": False}
    link |= {"inside": 1, "inner": None, "kinds": []}
    record |= {"links": [link, {**link, "inner": link, "kinds": [["permute", link]]}]}
    return json.dumps(record | {"schedule": "buckets(bytes=1024)"}, indent=1)


def places(data: Any, at: tuple = ()) -> Iterator[tuple]:
    """The way to every value of the file."""
    inside = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in inside:
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))


WRONG = (None, 7, -1, 10**12, 0.5, True, "", "no", "[zz, _]", "[tp]", [], ["dp"], {})
WRONG += ("[dp, tp]", "[tp, dp]", "[_, _] partial(sum: tp)", "[_, _] partial(no: tp)")
WRONG += ([[["dp", "sum", 0]]], [["d0", ["tp", "dp"]]], [["m", ["dp"]], ["n", ["dp"]]])


def broken(seed: int) -> str:
    """The good file, broken once."""
    dice = random.Random(seed)
    if seed % 10 == 0:
        text = saved()
        return text[: dice.randrange(len(text))]
    data = json.loads(saved())
    # Fields before their elements, which are far more.
    *way, key = dice.choice([p for p in places(data) if len(p) <= 1 + seed % 5])
    holder = functools.reduce(lambda x, k: x[k], way, data)
    how = dice.choice(("remove", "change", "change", "swap", "repeat"))
    if how == "remove":
        del holder[key]
    elif how == "change":
        holder[key] = dice.choice(WRONG)
    elif how == "repeat" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        twins = list(holder) if isinstance(holder, dict) else range(len(holder))
        other = dice.choice(twins)
        holder[key], holder[other] = holder[other], holder[key]
    return json.dumps(data)


def shown(plan: Plan, path: Path) -> None:
    """All that can be done with a plan without its program."""
    str(plan), plan.summary(), plan.hash, plan.diff(plan)
    plan.to_html(path)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_broken_file_is_a_plan_error_or_harmless(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(broken(seed))
    model, x = program()
    try:
        shown(Plan.load(path), tmp_path / "plan.html")
        plan = fxpar.plan(model, x, mesh=MESH, grad=True, mode=str(path))
        got, want = plan.simulate(x), plan.reference(x)
    except PlanError as error:
        assert any(
            word in str(error) for word in ("at ", "fit", "cannot read", "for", "not")
        )
        assert error.fix
    except ScheduleError as error:
        assert "buckets" in str(error) or "line" in str(error)
    else:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("nodes", 2, "settled", 0), 5, r"nodes\[2\]\.settled\[0\]: text .* not 5"),
        (("nodes", 1, "factors"), {}, r"nodes\[1\]\.factors: a list"),
        (("nodes", 0), {}, r"nodes\[0\]\.name: it is missing"),
        (("mesh",), "dp", "at mesh: cannot read mesh 'dp'"),
        (("values", 3, 1), "[zz]", r"values\[3\]\[1\]: .* names axis 'zz'"),
        (("collectives", 0, "bytes"), -4, r"collectives\[0\]\.bytes: a number from 0"),
        (("nodes", 0, "reads"), [0] * 9, r"nodes\[0\]\.reads: .* expected, not 9"),
        (("nodes", 0, "factors"), [["zz", ["tp"]]], "fit op .* it splits 'zz'"),
        (("nodes", 1, "passes"), [["tp", "sum", 9]], "uses axis tp twice"),
        (("nodes", 9, "passes"), [["tp", "sum", 9]], "has no way 9 for partial"),
        (("nodes", 0, "op"), "aten.mm.default", "it was made for aten.mm.default"),
        (("nodes", 0, "reads", 0), 999, r"nodes\[0\]\.reads\[0\]: a number from 0"),
        (("values", 0, 0), "other", "no spec for value"),
        (("nodes", 0, "name"), "other", r"nodes\[0\]\.name: no value is named other"),
        (("values", 0, 1), "[_]", "does not fit value .* has 1 dims"),
    ],
)
def test_the_file_and_the_place_are_named(
    way: tuple, value: Any, message: str, tmp_path: Path
) -> None:
    data = json.loads(saved())
    functools.reduce(lambda x, k: x[k], way[:-1], data)[way[-1]] = value
    path, (model, x) = tmp_path / "plan.json", program()
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=rf"{path}: .*{message}"):
        fxpar.plan(model, x, mesh=MESH, grad=True, mode=str(path))
    Path(path).write_text(saved())
    with pytest.raises(PlanError, match=rf"{path}: the plan is for mesh"):
        fxpar.plan(model, x, mesh="dp=4", grad=True, mode=str(path))


def test_what_is_broken_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(saved().replace('"mesh": "dp=2,tp=2"', '"mesh": 3'))
    with pytest.raises(PlanError, match=rf"{path}: the saved plan is broken at mesh"):
        Plan.load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(PlanError, match="cannot read the plan file"):
        Plan.load(path)


def test_a_plan_of_other_shapes_is_refused(tmp_path: Path) -> None:
    """Four outputs are split over tp; one cannot be."""
    path = tmp_path / "plan.json"
    model = nn.Linear(8, 4)
    plan = fxpar.plan(model, torch.randn(8, 8), mesh=MESH, mode="propagate")
    plan.save(path)
    with pytest.raises(FxparError, match="does not fit .* not divide"):
        fxpar.plan(nn.Linear(8, 1), torch.randn(8, 8), mesh=MESH, mode=str(path))


def test_ranks_that_write_one_file_leave_a_whole_one(tmp_path: Path) -> None:
    """Who reads it meanwhile sees a whole file, of one of them."""
    path, texts = tmp_path / "plan.json", ["a" * 400_000, "b" * 300_000]
    seen, over = set[str](), threading.Event()

    def write(text: str) -> None:
        for _ in range(20):
            write_asked(path, text)

    def read() -> None:
        while not over.is_set():
            seen.add(path.read_text() if path.exists() else texts[0])

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    reader.join()
    assert seen <= set(texts) and [*tmp_path.iterdir()] == [path]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    plan = Plan.from_dict(json.loads(saved()))
    for write in (plan.save, plan.to_html):
        with pytest.raises(OptionError, match="cannot be written: No such file"):
            write(tmp_path / "missing" / "plan")


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_asked(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
