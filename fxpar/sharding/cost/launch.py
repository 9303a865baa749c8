"""A launch as data: a kernel, a collective or a wait, with the tensors it reads and
makes.

``Launches`` are all of a graph, in order. ``fused_kernels`` reads them off nodes,
``passes.simulate`` adds collectives, times them and adds up their memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpar.sharding.cost.hardware import NO_DIMS, ProductDims


@dataclass(eq=False, slots=True)
class Buffer:
    """One tensor."""

    # What makes it; of what the graph is given, the node that stands for it.
    node: fx.Node
    # Of all of it, at the sizes of the graph.
    nbytes: int
    # Whether it is in memory; what only its own kernel reads is not.
    written: bool = True
    # Place in the order from which on it can be read; None while its kernel grows.
    ready: float | None = -1.0
    # The collective to be waited for before.
    late: Launch | None = None


@dataclass(eq=False, slots=True)
class Launch:
    """A kernel, a collective, or a wait."""

    # "fused", "contraction" or "alone"; a collective's; or "wait".
    kind: str
    # What it computes.
    nodes: list[fx.Node]
    # Its place.
    order: float
    # Whether it belongs to the backward.
    backward: bool
    # Bytes of each buffer.
    reads: dict[Buffer, int] = field(default_factory=dict)
    # What its nodes give, in memory or not.
    makes: list[Buffer] = field(default_factory=list)
    # Of a contraction.
    flops: float = 0.0
    # Flops of what the causal mask of an attention hides.
    hidden_flops: float = 0.0
    # Of a contraction.
    dims: ProductDims = NO_DIMS
    # Of the first floating-point operand of a contraction.
    dtype: torch.dtype = torch.float32
    # Which peak a contraction has, as ``Hardware.peak`` knows it.
    family: str = ""
    # Operations on elements, as ``Hardware.light`` counts.
    light: Counter[str] = field(default_factory=Counter)
    # Of a collective; none for any other launch.
    axes: tuple[str, ...] = ()
    # Bytes on this rank before a collective.
    before: int = 0
    # Bytes on this rank after it.
    after: int = 0
    # What a wait waits for.
    of: Launch | None = None

    @property
    def name(self) -> str:
        """That of its last op; unique."""
        implied = self.of is not None and self.nodes[-1] is self.of.nodes[-1]
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
    """All of a graph; what it is given and what it returns."""

    # By their places in the order.
    launches: list[Launch]
    # What the graph is given, by placeholders and constants.
    inputs: list[Buffer]
    # Of each result those of its tensors.
    outputs: list[list[Buffer]]
