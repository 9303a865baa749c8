"""Rewrites attention masks and split softmaxes: steps of the pipeline.

In: a traced graph, or a local one, with the state of the pipeline. Out: the graph,
changed in place. Never: a difference between ranks.
"""

from __future__ import annotations

from torch import fx

from fxpar.features.sequences import normalize_masks
from fxpar.features.sequences.softmax_pairs import exchange_pairs
from fxpar.passes.order.order_collectives import of_build
from fxpar.runtime.steps.pipeline_state import JointState

causal_masks = of_build(normalize_masks.causal_masks)


def pair_reductions(graph: fx.Graph, state: JointState) -> None:
    """Replace the all-reduces that normalize a softmax along a split dim by one
    exchange, where that pays."""
    hardware, mesh = state.request.hardware, state.decided.mesh
    if hardware is not None and mesh.size > 1 and state.decided.is_even:
        exchange_pairs(graph, state.build, hardware.at_speed(mesh.slowest).on(mesh))
