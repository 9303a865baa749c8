"""Schedules tried on few of a program's layers, and said for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxpar
from fxpar.fusion import choose_schedule
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.choose_schedule import Chosen, begin, choose
from fxpar.fusion.fewer_layers import (
    LEAST,
    STAY,
    FewerLayers,
    NotOfLayers,
    fewer_layers,
    lines_of_layers,
)
from fxpar.fusion.overlap_candidates import shapes_of
from fxpar.fusion.schedule import Schedule
from fxpar.graph import collective_nodes
from fxpar.sharding.mesh import Mesh
from tests.helpers.every_schedule import graph_of, hardware_of
from tests.helpers.toys import Toy, all_reduce

LAYERS = STAY + LEAST + 1


def mlps(x: Any, *weights: Any) -> Any:
    """Layers as Megatron splits them."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + all_reduce(F.gelu(x @ up) @ down) * 1e-3
    return (x,)


def stack(
    n: int, layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16, fn: Any = mlps
) -> Toy:
    weights = [("[_, tp]", (n, 4 * n)), ("[tp, _]", (4 * n, n))]
    return Toy(fn, ("[_, _]", (n, n)), *weights * layers, mesh="tp=8", dtype=dtype)


def chosen(toy: Toy, network: str, *, whole: bool = False) -> Chosen:
    """What is chosen, on few layers or on all."""
    all_layers = mock.patch.object(choose_schedule, "fewer_layers", lambda _: None)
    if not whole:
        return choose(begin(graph_of(toy), toy.mesh, hardware_of(network)))
    with all_layers:
        return choose(begin(graph_of(toy), toy.mesh, hardware_of(network)))


@pytest.mark.parametrize(
    "network", ["h100", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_few_layers_choose_as_all_do(network: str) -> None:
    """The same, or what is predicted to be as fast: products in chunks beside their
    collective, and slices with rings where the network is slow."""
    toy = stack(4096)
    few, all_layers = chosen(toy, network), chosen(toy, network, whole=True)
    assert few.seconds[0] == all_layers.seconds[0]
    assert few.seconds[1] < 0.99 * few.seconds[0], "there is something to choose"
    assert few.seconds[1] <= 1.001 * all_layers.seconds[1]
    assert few.peak[1] <= 1.001 * all_layers.peak[1]
    small = stack(192, dtype=torch.float64)
    small.check(str(few.schedule))


def test_it_has_the_ops_of_few_layers() -> None:
    graph = graph_of(stack(192))
    fewer = fewer_layers(graph)
    assert fewer is not None
    assert fewer.layers - fewer.removed == STAY
    reduces = fewer.graph.find_nodes(
        op="call_function", target=collective_nodes.all_reduce
    )
    assert len(reduces) == LAYERS - fewer.removed
    inputs = fewer.graph.find_nodes(op="placeholder")
    assert len(inputs) == 1 + 2 * len(reduces), "with their weights"


MESH = "dp=2,tp=2"


class Attention(torch.nn.Module):
    """A layer with three products of one shape, whose input another layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))
        self.norm, self.out = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.out((self.q(y) * self.k(y)).softmax(-1) * self.v(y))


def mlp() -> torch.nn.Module:
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
    return torch.nn.Sequential(*layers)


def joint_graph(layers: int, layer: Callable[[], torch.nn.Module] = mlp) -> fx.Graph:
    """Forward and backward of layers as one rank has them, communication as steps."""
    model = torch.nn.Sequential(*(layer() for _ in range(layers)))
    plan = fxpar.plan(model, torch.randn(8, 16), mesh=MESH, mode="propagate", grad=True)
    return shapes_of(apply("", plan.result.local, MESH, lowered=False))


def targets(graph: fx.Graph) -> list[str]:
    return sorted(str(n.target) for n in graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("layer", [mlp, Attention])
def test_layers_go_forward_and_backward_alike(layer: Any) -> None:
    """What is left is the program of a model with so many layers."""
    fewer = fewer_layers(joint_graph(LAYERS, layer))
    assert fewer is not None
    assert len(fewer.rows) == 3, "the last makes gradients lie as parameters do"
    like = joint_graph(LAYERS - fewer.removed, layer)
    assert targets(fewer.graph) == targets(like)
    results, wanted = (g.output_node().args[0] for g in (fewer.graph, like))
    assert len(results) == len(wanted)
    mesh, hardware = Mesh.parse(MESH), hardware_of("h100")
    few, short = (choose(begin(g, mesh, hardware)) for g in (fewer.graph, like))
    assert few.seconds[0] == pytest.approx(short.seconds[0], rel=1e-3)
    assert few.peak[0] == pytest.approx(short.peak[0], rel=1e-2)


def far(x: Any, *weights: Any) -> Any:
    """Layer by layer as ``mlps``, the fifth with one more op."""
    for i, (up, down) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
        y = F.gelu(x @ up)
        x = x + all_reduce((y.tanh() if i == 4 else y) @ down)
    return (x,)


def test_too_few_or_unlike_layers_are_left_whole() -> None:
    assert fewer_layers(graph_of(stack(192, STAY + LEAST - 1))) is None
    assert fewer_layers(graph_of(stack(192, fn=far))) is None


def kept(x: Any, *weights: Any) -> Any:
    """Layer by layer as ``mlps``, and then ops of one kind on what they give, not layer
    by layer, as a training step updates parameters."""
    outs = []
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + all_reduce(F.gelu(x @ up) @ down) * 1e-3
        outs.append(x)
    return tuple(x * 2 for several in (outs, outs) for x in several)


def test_rows_of_other_layers_stay_whole() -> None:
    fewer = fewer_layers(graph_of(stack(192, fn=kept)))
    assert fewer is not None and fewer.layers - fewer.removed == STAY


def kinds(fewer: FewerLayers, of: Callable[[fx.Node], bool]) -> list[str]:
    """Names of ops of the whole graph's row, one a layer."""
    (row,) = fewer.rows
    return [node.name for node in row.nodes if of(node)]


def test_lines_are_said_for_all_layers() -> None:
    """A line of one layer for each; one over the seam for each pair; names that lines
    give stay apart; ``reorder`` names all ops."""
    fewer = fewer_layers(graph_of(stack(192)))
    assert fewer is not None
    reduces = kinds(fewer, lambda n: n.target is collective_nodes.all_reduce)
    adds = kinds(fewer, lambda n: "add" in n.name)
    seam = STAY // 2
    stay = [i for i in range(len(reduces)) if not seam <= i < seam + fewer.removed]
    first, *_, last = stay
    text = "\n".join(f"split({reduces[i]}, dim=0) -> s{i}, g{i}" for i in stay)
    text += f"\nreorder([{', '.join(adds[i] for i in stay)}], "
    text += ", ".join(f"g{i}" for i in stay) + ")"
    whole = lines_of_layers(Schedule.parse(text), fewer)
    splits = [line for line in whole.lines if line.verb == "split"]
    assert [line.arguments[0] for line in splits] == reduces
    assert len({name for line in splits for name in line.gives}) == 2 * len(reduces)
    (reorder,) = (line for line in whole.lines if line.verb == "reorder")
    assert reorder.arguments[0] == tuple(adds)
    assert reorder.arguments[1:] == tuple(line.gives[1] for line in splits)
    before, behind = seam - 1, seam + fewer.removed
    pair = f"overlap({reduces[before]}, {reduces[behind]}, chunks=2)"
    (line,) = lines_of_layers(Schedule.parse(pair), fewer).lines
    assert line.arguments == (reduces[behind - 1], reduces[behind])
    with pytest.raises(NotOfLayers):
        lines_of_layers(
            Schedule.parse(f"overlap({reduces[first]}, {reduces[last]})"), fewer
        )


def test_a_schedule_that_does_not_hold_for_all_is_looked_for_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines that are refused on the whole program are not taken."""
    toy = stack(4096)
    want = chosen(toy, "h100", whole=True)

    def wrong(schedule: Schedule, _: Any) -> Schedule:
        return Schedule.parse("overlap(mm, mm_1, chunks=2)") if schedule else schedule

    monkeypatch.setattr(choose_schedule, "lines_of_layers", wrong)
    assert chosen(toy, "h100").schedule == want.schedule
