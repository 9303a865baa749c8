"""Golden graphs of programs of which every shard is as large as every other.

What is done for uneven dims, parts of an axis and rows that move must leave them as
they are: what the last rank runs is compared, line by line, with
``golden_even_programs.txt``. EXPECTTEST_ACCEPT=1 writes that file again; its diff says
what has changed. Another torch may decompose ops in another way: there only what ranks
send is compared.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpar
from fxpar.explain.dump import graph_text
from fxpar.runtime.steps.binding import bind
from fxpar.sharding.mesh import Mesh

GOLDEN = Path(__file__).parent / "golden_even_programs.txt"
# Whose decompositions the text has.
TORCH = "2.13."

MESHES = ("dp=2", "tp=2", "dp=2,tp=2")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, rows, 3, 4, width // 4)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        heads = (weights @ v).transpose(1, 2).reshape(batch, rows, width)
        return x + self.out(heads)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.avg_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(rows.mean((2, 3)))


PROGRAMS = {
    "mlp": (MLP, (4, 8)),
    "attention": (Attention, (4, 6, 16)),
    "conv_net": (ConvNet, (4, 4, 8, 8)),
}
KEYS = [f"{name} {mesh}" for name in PROGRAMS for mesh in MESHES]


@cache
def bound_graph(key: str) -> fx.Graph:
    """What the last rank runs of a training step, forward and backward."""
    name, mesh = key.split()
    made, shape = PROGRAMS[name]
    plan = fxpar.plan(made(), torch.ones(shape), mesh=mesh, mode="propagate", grad=True)
    return bind(
        plan.result.local,
        Mesh.parse(mesh),
        plan.mesh.size - 1,
        lambda axes: f"group of {axes}",
        next(n.meta["val"].fake_mode for n in plan.result.local.nodes),
        inductor=False,
    )


def text_of(graph: fx.Graph) -> str:
    """A line per node, without the line of the user's that it comes from."""
    return "".join(
        line.partition("  # ")[0] + "\n" for line in graph_text(graph).splitlines()
    )


def golden_texts() -> dict[str, str]:
    sections = GOLDEN.read_text().split("== ")[1:] if GOLDEN.exists() else []
    return dict(section.split("\n", 1) for section in sections)


def sent(text: str) -> list[str]:
    """What each collective of a graph gives, and which it is."""
    lines = (line.partition(": ")[2] for line in text.splitlines())
    sends = [line for line in lines if " = _c10d_functional." in line]
    return [line.partition("(")[0] for line in sends if "wait_tensor" not in line]


@pytest.mark.parametrize("key", KEYS)
def test_even_programs_are_unchanged(key: str) -> None:
    text, golden = text_of(bound_graph(key)), golden_texts()
    if os.environ.get("EXPECTTEST_ACCEPT"):
        sections = golden | {key: text}
        GOLDEN.write_text("".join(f"== {k}\n{sections[k]}" for k in sections))
        return
    if torch.__version__.startswith(TORCH):
        assert text.splitlines() == golden[key].splitlines()
    else:
        assert sorted(sent(text)) == sorted(sent(golden[key]))


def test_the_golden_file_has_these_programs_alone() -> None:
    assert list(golden_texts()) == KEYS
    assert all(sent(text) for text in golden_texts().values())
