"""Models whose layers are marked with ``torch.compiler.nested_compile_region``: Dynamo
traces a layer once, and each is planned as if it was not marked."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar._torch.flat_regions import without_regions
from fxpar.errors import FxparWarning
from fxpar.runtime.calls.compiled_graph import plans
from tests.helpers.spawn import shared_pool


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """A block that checkpoints its inside, and gives two values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Inner(), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + checkpoint(self.inner, self.norm(x), use_reentrant=False)
        return x, x.square().mean()


class Marked(Layer):
    forward = torch.compiler.nested_compile_region(Layer.forward)


class Model(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x, penalty = layer(x)
            total = total + penalty
        return x.square().mean() + 0.1 * total


def _steps(model: nn.Module, call) -> list[float]:
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        loss = call(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(at_rest: bool) -> tuple[list[float], list[float], list[str], list[str]]:
    torch.compiler.reset()
    torch.manual_seed(0)
    marked, plain = Model(Marked).double(), Model(Layer).double()
    plain.load_state_dict(marked.state_dict())
    want = _steps(plain, plain)
    hints = {"layers.*.inner.up.weight": ("tp", None)}
    options = {"codegen": "eager", "hints": hints}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = fxpar.shard(marked, hints=hints) if at_rest else marked
        got = _steps(model, torch.compile(model, backend="fxpar", options=options))
    texts = [str(w.message) for w in said if issubclass(w.category, FxparWarning)]
    return want, got, texts, [each.kind for each in plans()[-1].collectives]


@pytest.mark.parametrize("at_rest", [pytest.param(False, marks=pytest.mark.slow), True])
def test_marked_layers_are_split(at_rest: bool) -> None:
    env = {"FXPAR_MESH": "tp=2", "FXPAR_PLAN": "propagate"}
    for want, got, said, kinds in shared_pool(2).run(trained, at_rest, env=env):
        assert got == pytest.approx(want, rel=1e-9)
        assert kinds and not any("no sharding rule" in text for text in said)


def test_a_region_stands_in_the_place_of_its_calls() -> None:
    traced = []

    def backend(gm: fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        traced.append((gm, examples))
        return gm.forward

    torch.compiler.reset()
    model, x = Model(Marked).double(), torch.randn(4, 8, dtype=torch.float64)
    want = torch.compile(model, backend=backend, fullgraph=True)(x)
    ((gm, examples),) = traced
    before = str(gm.graph)
    flat = without_regions(gm)
    targets = [str(node.target) for node in flat.graph.nodes]
    # Of torch 2.13 Dynamo keeps what is called twice.
    assert before.count("invoke_subgraph](") in (2, 3)
    assert not any("invoke_subgraph" in target for target in targets)
    assert sum("tag_activation_checkpoint" in target for target in targets) == 3
    torch.testing.assert_close(flat(*examples), (want,))
    assert str(gm.graph) == before
    assert without_regions(flat) is flat
