"""Lets rows of split dims move, and shards be uneven: steps of the pipeline.

In: a graph, and the state of the pipeline. Out: the graph, changed in place. Never: a
difference between ranks.
"""

from __future__ import annotations

from torch import fx

from fxpar.features.uneven import (
    backward_scans,
    joint_cuts,
    normalize_shifts,
    repeated_rows,
    rows_in_turn,
)
from fxpar.passes.local import share_exchanges as exchanges
from fxpar.passes.order.order_collectives import of_build
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding import shard_sizes

find_shifts = of_build(normalize_shifts.find_shifts)
find_backward_scans = of_build(backward_scans.find_backward_scans)
part_repeats = of_build(repeated_rows.part_repeats)
join_cuts = of_build(joint_cuts.join_cuts)


def interleave_rows(graph: fx.Graph, state: JointState) -> None:
    """Let rows that are repeated one by one be split unevenly."""
    mesh = state.request.mesh
    if state.open or mesh.size == 1:
        return

    def splits(rows: int) -> bool:
        divides = (shard_sizes.is_exact(rows, mesh, (axis,)) for axis in mesh.names)
        return rows >= shard_sizes.LONG * mesh.size and not all(divides)

    repeated_rows.interleave_rows(graph, state.build, splits)


def take_rows_in_turn(graph: fx.Graph, state: JointState) -> None:
    """Let rows that are taken from several tensors in turn be split unevenly."""
    mesh = state.request.mesh
    if state.open or mesh.size == 1:
        return

    def splits(rows: int) -> bool:
        return not shard_sizes.is_exact(rows, mesh, mesh.names)

    rows_in_turn.take_rows_in_turn(graph, state.build, splits)


def share_exchanges(graph: fx.Graph, state: JointState) -> None:
    """Cut slices of one tensor from rows that are exchanged once, where that pays."""
    if state.decided.mesh.size > 1 and not state.open:
        exchanges.share_exchanges(graph, state.build, state.decided.mesh)
