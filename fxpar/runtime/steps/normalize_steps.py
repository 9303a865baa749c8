"""Turn a traced graph into the normalized one: steps of the pipeline.

In: a ``JointState`` with the graph as it was traced. Out: the same state, its graph
normalized. Never: a difference between ranks. The order of the steps is
``fxpar.pipeline``'s; the steps that plan are in ``plan_steps``.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from fxpar.passes.normalize.split_merged_batch import split_merged_batch
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding import shard_sizes
from fxpar.sharding.propagate.conventions import batch_axes, sequence_axes


def split_batch(graph: fx.Graph, state: JointState) -> None:
    """Keep a batch as a dim if its axes do not divide it or its sequence is split."""
    if state.open:  # a plan may split open sizes only where the axes divide them
        return
    mesh = state.request.mesh
    axes, along, unequal = batch_axes(mesh), sequence_axes(mesh), mesh.unlike
    can_split = partial(shard_sizes.can_split, even=state.request.pipeline is not None)

    def splits(rows: int, next_size: int) -> bool:
        if along and rows > 1 and can_split(next_size, mesh, along):
            return True
        # A search may choose the shares of ranks of different speed.
        even = shard_sizes.is_exact(rows, mesh, axes) and set(axes).isdisjoint(unequal)
        return not even and can_split(rows, mesh, axes)

    split_merged_batch(graph, state.build, splits)


def drop_dead(graph: fx.Graph, _: JointState) -> None:
    """Remove nodes that nothing reads."""
    graph.eliminate_dead_code()
    graph.lint()
