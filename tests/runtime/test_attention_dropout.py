"""Attention with dropout has no kernel in programs of several ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import FxparWarning
from fxpar.runtime import tracing
from fxpar.runtime.tracing import (
    attend_by_products,
    warn_of_products,
    without_kernels,
)

ATTEND = F.scaled_dot_product_attention


class Attends(nn.Module):
    """Attention with dropout and without, the first inside a checkpointed region."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        def dropped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return ATTEND(q, k, k, dropout_p=self.chance, is_causal=True)

        x = checkpoint(dropped, q, k, use_reentrant=False)
        return x + ATTEND(q, k, k, None, self.chance) + ATTEND(q, k, k)


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, 8, 8, requires_grad=True) for _ in range(2)]


def traced(module: nn.Module) -> fx.GraphModule:
    """Dynamo's graph."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(module, backend=keep, fullgraph=True)(*tensors())
    return graphs[0]


def attentions(gm: fx.GraphModule) -> list[Any]:
    """Of a graph and its bodies."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    return [x for x in targets if x in (ATTEND, attend_by_products)]


def test_attention_with_dropout_is_found_in_bodies_too() -> None:
    gm = traced(Attends(0.5))
    new = without_kernels(gm)
    assert attentions(gm) == [ATTEND] * 3, "Dynamo's own graph is changed"
    assert sorted(map(id, attentions(new))) == sorted(
        map(id, [ATTEND, attend_by_products, attend_by_products])
    )
    results = []
    for module in (gm, new):
        torch.manual_seed(1)
        results.append(module(*tensors()))
    torch.testing.assert_close(*results)


def test_products_are_said_where_there_are_kernels() -> None:
    new = without_kernels(traced(Attends(0.5)))
    with pytest.warns(
        FxparWarning, match=r"by matrix products, .* \(2 calls\)(.|\n)*fix: set"
    ):
        warn_of_products(new, {"cuda"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_products(new, {"cpu"})
        warn_of_products(traced(Attends(0.0)), {"cuda"})


def test_without_dropout_nothing_changes() -> None:
    gm = traced(Attends(0.0))
    assert without_kernels(gm) is gm


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_a_kernel_is_asked_for_without_dropout_alone(
    chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a program is planned without Dynamo."""
    calls = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return attend_by_products(*args, **kwargs)

    monkeypatch.setattr(tracing, "attend_by_products", counted)
    q, k = tensors()
    plan = fxpar.plan(
        lambda q, k: ATTEND(q, k, k, dropout_p=chance), q, k, mesh="tp=2", grad=True
    )
    kernels = ["attention" in str(n.target) for n in plan.result.normalized.nodes]
    assert bool(calls) == (chance > 0) and any(kernels) == (chance == 0)
