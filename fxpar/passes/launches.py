"""What one rank launches to run a local graph, as data: kernels, collectives, waits.

``inductor_launches`` makes it of a graph, ``simulate_step`` times it. Also here: which
ops are collectives and waits.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.passes.lower import LOWERINGS

c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar

# Collectives of a local graph, as ``reshard.steps`` names them.
KINDS: dict[Any, str] = {
    op: kind for kind, lowering in LOWERINGS.items() for op in lowering.emulations()
}
# Products with their collective as one op, and what they communicate.
PRODUCTS = {
    ours.gather_matmul.default: "all_gather",
    ours.matmul_scatter.default: "reduce_scatter",
}
WAITS = {c10d.wait_tensor.default, ours.wait_gather.default}


@dataclass(eq=False)
class Buffer:
    """One tensor."""

    node: fx.Node
    nbytes: int
    # Whether it is in memory; what only its own kernel reads is not.
    written: bool = True
    # Place in the order from which on it can be read; None while its kernel grows.
    ready: float | None = -1.0
    # The collective to be waited for before.
    late: Launch | None = None


@dataclass(eq=False)
class Launch:
    """A kernel, a collective, or a wait."""

    # "fused", "contraction" or "alone"; a collective's; or "wait".
    kind: str
    # What it computes.
    nodes: list[fx.Node]
    # Its place.
    order: float
    backward: bool
    # Bytes of each buffer.
    reads: dict[Buffer, int] = field(default_factory=dict)
    makes: list[Buffer] = field(default_factory=list)
    # Of a contraction.
    flops: float = 0.0
    least: float = math.inf
    dtype: torch.dtype = torch.float32
    family: str = ""
    # Operations on elements, as ``Hardware.light`` counts.
    light: Counter[str] = field(default_factory=Counter)
    # Of a collective, and bytes on this rank before and after it.
    axes: tuple[str, ...] = ()
    before: int = 0
    after: int = 0
    # What a wait waits for.
    of: Launch | None = None

    @property
    def name(self) -> str:
        """That of its last op; unique."""
        implied = self.kind == "wait" and self.nodes[-1].target not in WAITS
        return self.nodes[-1].name + ("_wait" if implied else "")

    @property
    def writes(self) -> list[Buffer]:
        """What it leaves in memory."""
        return [buffer for buffer in self.makes if buffer.written]

    @property
    def moved(self) -> int:
        """Bytes that pass between the device and its memory."""
        return sum(self.reads.values()) + sum(b.nbytes for b in self.writes)


@dataclass(frozen=True)
class Launches:
    """All of a graph, in order; what it is given and what it returns."""

    launches: list[Launch]
    inputs: list[Buffer]
    # Of each result those of its tensors.
    outputs: list[list[Buffer]]


def crossings(graph: fx.Graph, *, even: bool = True) -> list[str]:
    """The collectives of a graph in order, a line for each: what ranks that run it
    together must have alike, whatever else they compute. Unless shards are ``even``,
    sizes are alike only within a group, and are left out."""
    out = []
    for node in graph.nodes:
        name = str(node.target)
        if node.target in WAITS or not ("c10d" in name or node.target in KINDS):
            continue
        operands = [
            f"{value.dtype}{list(value.shape) if even else ''}".removeprefix("torch.")
            for value in (n.meta.get("val") for n in node.all_input_nodes)
            if isinstance(value, torch.Tensor)
        ]
        out.append(f"{name.removeprefix('_c10d_functional.')} of {', '.join(operands)}")
    return out
