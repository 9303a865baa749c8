"""Axes that a search splits experts over, where none is named for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from fxpar.features.experts import expert_axes
from fxpar.planning import TracedPlan
from fxpar.sharding.plan import Plan

pytest.importorskip("transformers.integrations.moe")


def mixture(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As transformers dispatches tokens to two experts each."""
    weights, ids = torch.topk(scores, 2, dim=-1)
    key, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(key.float(), up.shape[0], 0, up.shape[0] - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    grouped = torch.ops.transformers.grouped_mm_fallback
    rows = torch.relu(grouped(x[order // 2], up, offs=ends))
    rows = grouped(rows, down, offs=ends) * weights.reshape(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, order // 2, rows)


def arguments(
    tokens: int, width: int, inner: int, experts: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (
        (tokens, width),
        (tokens, experts),
        (experts, width, inner),
        (experts, inner, width),
    )
    return [torch.rand(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def searched(args: list[torch.Tensor], mesh: str, mode: Any = "search") -> TracedPlan:
    return fxpar.plan(mixture, *args, mesh=mesh, mode=mode, grad=True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, float]]:
    """The last of the choices is taken, whatever it costs; what each was to cost."""
    seen: list[dict[Any, float]] = []

    def last(seconds: dict[Any, float]) -> tuple[Any, str]:
        seen.append(dict(seconds))
        return list(seconds)[-1], "the last"

    monkeypatch.setattr(expert_axes, "best", last)
    return seen


@pytest.mark.parametrize(
    "exchange", ["all_to_all", pytest.param("gather", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "mesh", ["x=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)]
)
def test_the_same_numbers(
    mesh: str,
    exchange: str,
    taken: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With experts over any axes; a plan that is saved is made again."""
    monkeypatch.setenv("FXPAR_EXPERT_EXCHANGE", exchange)
    args = arguments(16, 8, 12, 4, torch.float64)
    plan = searched(args, mesh)
    assert plan.experts == tuple(plan.mesh.names)
    assert list(taken[0])[0] == () and len(taken[0]) == (2 if mesh == "x=2" else 4)
    assert "the last" in plan.notes
    result, gradients = plan.simulate(*args)
    want = mixture(*args)
    torch.testing.assert_close(result, want)
    grads = torch.autograd.grad(want.sum(), args)
    torch.testing.assert_close(list(gradients.values()), list(grads))
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.from_dict(json.loads(path.read_text())).experts == plan.experts
    assert searched(args, mesh, str(path)).hash == plan.hash
    assert len(taken) == 1


@pytest.mark.parametrize(
    "experts, mesh",
    [(3, "x=2"), pytest.param(4, "dp=2,ep=2", marks=pytest.mark.slow)],
)
def test_nothing_to_choose(experts: int, mesh: str, taken: list[Any]) -> None:
    """Experts that no axis divides, or that an axis is named for."""
    plan = searched(arguments(16, 8, 12, experts, torch.float64), mesh)
    assert not taken and plan.experts == ()


def test_what_saves_little_is_left() -> None:
    whole: tuple[str, ...] = ()
    assert expert_axes.best({whole: 1.0, ("x",): 0.99}) == ((), "")
    axes, note = expert_axes.best({whole: 1.0, ("x",): 0.9, ("y",): 0.8})
    assert axes == ("y",)
    assert "over y" in note


@pytest.mark.slow
@pytest.mark.parametrize("tokens, axes", [(1 << 14, ("x",)), (1 << 17, ())])
def test_experts_are_split_where_it_pays(
    tokens: int, axes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens travel to many weights; many have their own copy of few."""
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    monkeypatch.setenv("FXPAR_EXPERT_ROOM", "1.25")
    many = 64 if axes else 4
    plan = searched(arguments(tokens, 1024, 1024, many, torch.bfloat16), "x=4")
    assert plan.experts == axes
    if axes:
        assert plan.inputs[2].dims[0] == plan.inputs[3].dims[0] == axes
