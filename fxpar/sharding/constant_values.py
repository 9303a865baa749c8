"""Computes values that are made of constants alone, while a program is planned.

In: a node of a graph. Out: its value, for positions that count up and masks of them.
Never: a value that is drawn, or one of more than ``MOST`` elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar import _torch

# The most elements of a value that is computed while planning.
MOST = 1 << 20


def computed(node: Any, values: dict[fx.Node, Any]) -> Any:
    """Return the value of a node that is made of constants alone; None for any other.
    ``values``: the nodes computed so far, to which it adds."""
    if node in values:
        return values[node]
    values[node] = None
    if not _is_arithmetic(node):
        return None
    if any(computed(x, values) is None for x in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    values[node] = node.target(*args, **kwargs)
    return values[node]


def _is_arithmetic(node: fx.Node) -> bool:
    """Return whether a call's result follows from its arguments, and has at most
    ``MOST`` elements."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    target: Any = node.target
    return (
        getattr(target, "namespace", "") in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not _torch.objects.is_mutable(target)
        and value.numel() <= MOST
        and not value.dtype.is_complex
        and not target.name().startswith("aten::empty")
    )
