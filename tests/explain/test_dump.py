"""What FXPAR_DUMP writes: readable text, and Python that computes the same."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpar
from fxpar.sharding.plan_text import line_text

STAGES = ["traced", "normalized", "planned", "resharded", "local"]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_dumped_stages_run(
    grad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_DUMP", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(4, 4)
    plan = fxpar.plan(model, x, mesh="dp=2,tp=2", grad=grad)
    for i, stage in enumerate(STAGES):
        text = (tmp_path / "plan" / f"{i}_{stage}.txt").read_text()
        assert f"{Path(__file__).name}:" in text, "a user line"
        assert ("all_reduce" in text) == (stage == "local")
    nodes = [n for n in plan.result.normalized.nodes if n.op == "placeholder"]
    inputs = [torch.randn(n.meta["val"].shape) for n in nodes]
    results = [
        runpy.run_path(str(tmp_path / "plan" / f"{i}_{stage}.py"))["forward"](
            None, *inputs
        )
        for i, stage in enumerate(STAGES[:-1])
    ]
    for result in results[1:]:
        torch.testing.assert_close(list(result), list(results[0]))


def test_a_stage_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ops of fxpar that it calls."""
    monkeypatch.setenv("FXPAR_DUMP", str(tmp_path))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).train()
    plan = fxpar.plan(model, torch.ones(4, 4), mesh="dp=2", grad=True)
    graph = plan.result.normalized
    assert any(str(node.target) == "fxpar.random.default" for node in graph.nodes)
    inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    given = [f"torch.zeros({[*x.shape]}, dtype={x.dtype})" for x in inputs]
    script = (tmp_path / "plan" / "1_normalized.py").read_text()
    script += f"\nprint(len(forward(None, {', '.join(given)})))\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    count = len(graph.output_node().args[0])
    assert done.stdout == f"{count}\n", done.stderr


def test_parts_of_an_axis_count_as_the_axis() -> None:
    hints = {"weight": ("tp:2", None)}
    plan = fxpar.plan(nn.Linear(8, 8), torch.ones(4, 8), mesh="tp=4", hints=hints)
    assert plan.mesh.is_refined
    split = sum(any(axes for _, axes in node.factors) for node in plan.nodes)
    text = f"tp splits {split} of {len(plan.nodes)} ops, 2 of 2 parameters; "
    assert split and line_text(plan).startswith(text)
