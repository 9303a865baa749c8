"""traced -> normalized: turns masks that are causal into the ``is_causal`` of
attention.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. A mask made of positions that count up, compared and
combined, is read as a function of places: integers as affine functions of an element's
place, booleans as the inequalities that hold. Where ``query >= key`` is all that is
left of a mask (a window as long as the sequence and a single document hide nothing
more), the kernel gets ``is_causal``; where nothing is left, there is no mask. Never:
follows values that depend on inputs: padding and packed documents stay masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.features.sequences.local_attention import arguments_of, in_order
from fxpar.features.sequences.place_rules import PlaceFunctions, function_of
from fxpar.graph.builder import shape_of
from fxpar.passes.normalize.place_functions import (
    Affine,
    TwoValued,
    is_constant,
    is_equal_size,
    with_opposite_bound,
)
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding.op_facts import BIASES


def causal_masks(graph: fx.Graph, _: JointState) -> None:
    """Give attention under a causal mask ``is_causal`` instead, and drop masks that
    hide nothing."""
    functions: PlaceFunctions = {}
    for node in graph.nodes:
        arguments = _named_arguments(node)
        name = next((n for n in BIASES if isinstance(arguments.get(n), fx.Node)), None)
        if name is None or arguments.get("is_causal", True):
            continue
        # A gradient of the mask is read.
        if any(arguments.get("grad_input_mask", ())[3:]):
            continue
        causal = _is_causal(arguments, arguments[name], functions)
        if causal is not None:
            changed = arguments | {name: None, "is_causal": causal}
            node.args, node.kwargs = in_order(node.target, changed)


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an attention by name, with defaults; none for another
    call."""
    if node.op != "call_function" or "attention" not in str(node.target):
        return {}
    if _torch.objects.schema_of(node.target) is None:
        return {}
    return arguments_of(node.target, node.args, node.kwargs)


def _is_causal(
    arguments: dict[str, Any], mask: fx.Node, functions: PlaceFunctions
) -> bool | None:
    """Return whether a mask is causal (True) or hides nothing (False); None for another
    mask."""
    function, dtype = function_of(mask, functions), mask.meta["val"].dtype
    sees = dtype is torch.bool
    if is_constant(function):
        return False if function.constant == sees else None
    if isinstance(function, TwoValued) and len(function.bounds) == 1:
        function = function if function.yes == sees else with_opposite_bound(function)
    if not isinstance(function, TwoValued) or function.yes != sees:
        return None
    least = 0 if sees else torch.finfo(dtype).min
    rows, keys = (shape_of(arguments[name])[-2] for name in ("query", "key"))
    if function.no > least or not is_equal_size(rows, keys):
        return None
    rank = len(shape_of(mask))
    visible = Affine((*(0,) * (rank - 2), 1, -1), 0) if rank > 1 else None
    return True if function.bounds == {visible} else None
