"""Which nodes of a graph are alike: equal ops on equal shapes, by number.

In: the calls of a graph, in order. Out: a number each, equal for those that differ in
what they read alone; rows of layers are found in these by ``search.layers``. Never
changes a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import fx

from fxpar.sharding.cost.op import tensors_in

# Bytes to which kernels may want what they read aligned.
ALIGNED = 16


def labels_of(nodes: Iterable[fx.Node]) -> np.ndarray:
    """A number per call: of its op, its constants, and all shapes at it."""
    numbers: dict[Any, int] = {}

    @cache
    def number_of(node: fx.Node) -> int:
        return numbers.setdefault(_value_key(node), len(numbers))

    return _numbers(_label(node, number_of) for node in nodes)


def with_reads(nodes: Sequence[fx.Node], labels: np.ndarray) -> np.ndarray:
    """Labels in which those of what an op reads count too, and of what that reads, so
    that few ops of one layer are alike."""
    place = {node: i for i, node in enumerate(nodes)}
    last = len(nodes)  # of what is not among the nodes
    reads = [[place.get(r, last) for r in node.all_input_nodes] for node in nodes]
    for _ in range(3):
        at = [*labels.tolist(), -1]
        labels = _numbers(
            (at[i], *[at[j] for j in read]) for i, read in enumerate(reads)
        )
    return labels


def is_aligned(x: torch.Tensor) -> bool:
    """Whether a tensor begins where kernels may read many elements at once."""
    return x.storage_offset() * x.dtype.itemsize % ALIGNED == 0


def _label(node: fx.Node, number_of: Callable[[fx.Node], int]) -> Any:
    """Equal for ops that are alike, what they read left out; ``number_of``: equal for
    values that are alike."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: ...)
    values = tuple(map(number_of, node.all_input_nodes))
    return node.target, repr(args), repr(kwargs), number_of(node), values


def _value_key(node: fx.Node) -> tuple[Any, ...]:
    return tuple(
        (x.dtype, tuple(x.shape), x.stride(), x.device, is_aligned(x))
        for x in tensors_in(node.meta.get("val"))
    )


def _numbers(labels: Iterable[Any]) -> np.ndarray:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], int)
