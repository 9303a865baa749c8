"""The list of steps: what it says of itself, what can be left out, what is printed."""

from __future__ import annotations

import logging
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar import pipeline
from fxpar.config import Options
from fxpar.errors import OptionError
from fxpar.features import FEATURES
from fxpar.graph.builder import copy_of
from fxpar.passes.order.order_collectives import LAST, ORDER
from fxpar.pipeline import PHASE, STEPS
from fxpar.sharding.manual_axes import ManualAxes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request, candidates
from fxpar.sharding.program import Input, Output, Signature
from fxpar.sharding.search.run_search import SearchOptions
from fxpar.sharding.spec import Spec
from tests.helpers.machines import machine

pytestmark = pytest.mark.usefixtures("propagated")

MESH = Mesh.parse("dp=2")
# The steps that run for ``layers``: those of features are left out.
DENSE = [
    *("undo_views_around_matmul", "keep_batch_dim"),
    *("drop_dead", "look_up_plan", "expand_moments", "plan"),
    *("insert_reshards", "localize", "schedule", "lower", "sink_waits"),
    *("reshard_after_forward", "describe", "keep_plan"),
]
EAGER_PHASE = [
    *(row.name for row in ORDER),
    "fuse_regions",
    *(row.name for row in LAST),
    "separate_results",
]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).double()


def planned(monkeypatch: pytest.MonkeyPatch, **options: str) -> Any:
    for name, value in options.items():
        monkeypatch.setenv(f"FXPAR_{name.upper()}", value)
    x = torch.ones(4, 4, dtype=torch.float64)
    return fxpar.plan(layers(), x, mesh=MESH, mode="propagate", grad=True)


def printed(text: str, label: str) -> list[str]:
    """Steps that FXPAR_DEBUG=2 says were run."""
    return re.findall(rf"{label}: (\w+) \d+\.\d{{3}} s: ", text)


def test_a_request_pickles() -> None:
    inputs = (Input("x", at_rest=Spec("dp", None)), Input("w", "parameter"))
    request = Request(
        MESH,
        Signature(inputs, (Output("output_0"),)),
        {"w": ("dp", None)},
        SearchOptions(machine()),
        meshes=candidates(4, machine()),
        manual=ManualAxes(MESH, ("dp",)),
        hardware=machine(),
        options=Options(schedule="prefetch(ahead=2)"),
        rank=1,
    )
    again = pickle.loads(pickle.dumps(request))
    assert again == request and again.as_planned == request.as_planned
    plan = fxpar.plan(torch.relu, torch.ones(4), mesh=MESH, mode="propagate")
    of_plan = replace(request, mode=Plan.from_dict(plan.to_record()))
    assert pickle.loads(pickle.dumps(of_plan)).mode.hash == plan.hash


def test_rows_of_features_are_in_the_list() -> None:
    for feature in FEATURES:
        rows = [row for rows in feature.rows.values() for row in rows]
        assert [sum(row is step for step in STEPS) for row in rows] == [1] * len(rows)


def test_a_prediction_runs_the_steps_of_a_phase() -> None:
    names = [step.name for step in PHASE]
    predicted = [row.name for row in (*ORDER, *LAST)]
    only_compiled = {"drop_kept", "fuse_regions", "outline_layers", "copy_together"}
    only_compiled |= {"separate_results", "hand_over", "compare_places"}
    assert [name for name in names if name not in only_compiled] == predicted


def test_each_step_is_printed_with_what_it_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(monkeypatch, debug="2")
    assert printed(caplog.text, "plan") == DENSE == list(plan.timings)
    lowered = next(r.message for r in caplog.records if "plan: lower " in r.message)
    assert "_c10d_functional.all_reduce.default 0 -> " in lowered
    assert "wait_tensor.default 0 -> " in lowered
    assert "keep_plan" in caplog.text and "the same ops" in caplog.text


def test_other_ranks_print_no_steps(caplog: pytest.LogCaptureFixture) -> None:
    graph = torch.fx.Graph()
    graph.output([])
    options = Options(debug=2, codegen="eager")
    request = Request(MESH, Signature((), ()), options=options, name="g", rank=1)
    pipeline.scheduled(graph, request, None, backward=False)
    assert not caplog.text
    pipeline.scheduled(graph, replace(request, rank=0), None, backward=False)
    assert printed(caplog.text, "rank0/g/forward") == EAGER_PHASE


@pytest.mark.parametrize("name", [step.name for step in STEPS if step.optional])
def test_what_can_be_left_out_is(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = "no_verb(x)" if name == "schedule" else "none"  # which is never read
    plan = planned(monkeypatch, debug="2", disable=name, schedule=given)
    x = torch.ones(4, 4, dtype=torch.float64)
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    options = Options(debug=2, codegen="eager", disable=frozenset({name}))
    request = Request(MESH, Signature((), ()), options=options)
    graph = copy_of(plan.result.local)
    with caplog.at_level(logging.WARNING, "fxpar"):
        pipeline.scheduled(graph, request, plan.result, backward=True)
    run = printed(caplog.text, "plan") + printed(caplog.text, "plan/backward")
    every = *DENSE, *EAGER_PHASE
    assert run == [step for step in every if step != name]


@pytest.mark.parametrize(
    ("name", "near"),
    [("shedule", "schedule"), ("fuse_region", "fuse_regions"), ("drian", "drain")],
)
def test_another_name_is_an_error(name: str, near: str) -> None:
    with pytest.raises(OptionError, match=f"did you mean '{near}'"):
        Options.read({"disable": f"delay,{name}"}, {})


def test_a_step_that_others_need_cannot_be_left_out() -> None:
    for step in STEPS:
        if not step.optional:
            with pytest.raises(OptionError, match="passes are share_by_speed"):
                Options.read({"disable": step.name}, {})


def test_the_planned_stage_says_the_spec_of_every_tensor(tmp_path: Path) -> None:
    """Other stages have none: there nothing is decided, or dims are those of a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXPAR_DUMP", str(tmp_path))
        fxpar.plan(
            lambda x, w: (x @ w).relu(),
            torch.ones(4, 6),
            torch.ones(6, 8),
            mesh="dp=2,tp=2",
            in_specs=[("dp", None), (None, "tp")],
        )
    lines = (tmp_path / "plan/2_planned.txt").read_text().splitlines()
    left, right, *made = [line.partition(" = ")[0] for line in lines if " = " in line]
    assert left.endswith("f32[4, 6] [dp, _]") and right.endswith("f32[6, 8] [_, tp]")
    assert made and all(line.endswith("f32[4, 8] [dp, tp]") for line in made)
    assert "[dp, tp]" not in (tmp_path / "plan/4_local.txt").read_text()
