"""Keeps Inductor from computing two parts of a batch side by side in one kernel.

In: graphs whose nodes know their part (``PART``). Out: a context of Inductor's codegen.
Inductor (2.13) makes one kernel of light ops that read the same tensor, as the norms of
two parts read one weight: the first part then waits for all operands of the second,
which may have to arrive yet, and the activations of both are in memory. Never: prevents
the fusion of ops that read one another, as a sum over parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any
from unittest import mock

from torch import fx

# Metadata key of a node: its part of the batch.
PART = "fxpar_part"


def keep_parts_separate(
    graphs: Iterable[fx.Graph],
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Inductor fuses no ops of different parts that do not
    read one another."""
    from torch._inductor.choices import InductorChoices

    if not any(PART in node.meta for graph in graphs for node in graph.nodes):
        return contextlib.nullcontext()
    may_fuse = InductorChoices.can_fuse_horizontal

    def can_fuse_horizontal(scheduler: Any, one: Any, other: Any, score: int) -> bool:
        first, second = _parts_of(one), _parts_of(other)
        if first and second and first != second:
            return False
        return may_fuse(scheduler, one, other, score)

    return mock.patch.object(
        InductorChoices, "can_fuse_horizontal", staticmethod(can_fuse_horizontal)
    )


def _parts_of(node: Any) -> set[int]:
    """Return the parts that a node of Inductor's schedule computes."""
    return {
        origin.meta[PART]
        for each in node.get_nodes()
        if each.node is not None
        for origin in each.node.get_origins()
        if PART in origin.meta
    }
