"""Defines a launch: a kernel, collective or wait, with the tensors it reads and makes.

In: the fields: ``fused_kernels`` fills them from nodes, ``passes.simulate`` adds
collectives, times them and adds up their memory. Out: ``Launches``, all of a graph, in
order. Never: reads a graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpar.sharding.cost.hardware import NO_DIMS, ProductDims


@dataclass(eq=False, slots=True)
class Buffer:
    """Is one tensor that a launch reads or makes."""

    # The node that makes it, or the placeholder of an input.
    node: fx.Node
    # Bytes of all of it, at the sizes of the graph.
    nbytes: int
    # Whether it is in memory; a tensor that only its own kernel reads is not.
    written: bool = True
    # Place in the order from which on it can be read; None while its kernel grows.
    ready: float | None = -1.0
    # The collective that is waited for before the buffer is read.
    late: Launch | None = None


@dataclass(eq=False, slots=True)
class Launch:
    """Is a kernel, a collective, or a wait."""

    # "fused", "contraction" or "alone"; the kind of a collective; or "wait".
    kind: str
    # The nodes it computes.
    nodes: list[fx.Node]
    # Its place in the order of the graph.
    order: float
    # Whether it belongs to the backward.
    backward: bool
    # Bytes it reads of each buffer.
    reads: dict[Buffer, int] = field(default_factory=dict)
    # Results of its nodes, in memory or not.
    makes: list[Buffer] = field(default_factory=list)
    # Flops of a contraction.
    flops: float = 0.0
    # Flops of the pairs that the causal mask of an attention hides.
    hidden_flops: float = 0.0
    # Dims of a contraction.
    dims: ProductDims = NO_DIMS
    # Dtype of the first floating-point operand of a contraction.
    dtype: torch.dtype = torch.float32
    # The family by which ``Hardware.peak`` finds the peak of a contraction.
    family: str = ""
    # Operations on elements, as ``Hardware.light`` counts.
    light: Counter[str] = field(default_factory=Counter)
    # Axes of a collective; none for any other launch.
    axes: tuple[str, ...] = ()
    # Bytes on this rank before a collective.
    before: int = 0
    # Bytes on this rank after it.
    after: int = 0
    # The collective that a wait waits for.
    of: Launch | None = None

    @property
    def name(self) -> str:
        """Return the name of its last op; unique."""
        implied = self.of is not None and self.nodes[-1] is self.of.nodes[-1]
        return self.nodes[-1].name + ("_wait" if implied else "")

    @property
    def writes(self) -> list[Buffer]:
        """Return the buffers it leaves in memory."""
        return [buffer for buffer in self.makes if buffer.written]

    @property
    def moved(self) -> int:
        """Return the bytes that pass between the device and its memory."""
        return sum(self.reads.values()) + sum(b.nbytes for b in self.writes)


@dataclass(frozen=True)
class Launches:
    """Holds all launches of a graph, its inputs and its results."""

    # Sorted by their places in the order.
    launches: list[Launch]
    # Placeholders and constants of the graph.
    inputs: list[Buffer]
    # Buffers of the tensors of each result.
    outputs: list[list[Buffer]]
