"""Turn a traced graph into the normalized one: steps of the pipeline.

In: a ``JointState`` with the graph as it was traced. Out: the same state, its graph
normalized. Never: a difference between ranks. The order of the steps is
``fxpar.pipeline``'s; the steps that plan are in ``plan_steps``.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from fxpar.passes.normalize.keep_batch_apart import keep_batch_apart
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding import shard_sizes
from fxpar.sharding.propagate.conventions import batch_axes, sequence_axes


def split_batch(graph: fx.Graph, state: JointState) -> None:
    """Keep a batch as a dim if its axes do not divide it or its sequence is split."""
    if state.open:  # a plan may split open sizes only where the axes divide them
        return
    mesh = state.request.mesh
    axes, along, unlike = batch_axes(mesh), sequence_axes(mesh), mesh.unlike
    may_split = partial(shard_sizes.may_split, even=state.request.pipeline is not None)

    def splits(rows: int, behind: int) -> bool:
        if along and rows > 1 and may_split(behind, mesh, along):
            return True
        # A search may choose the shares of ranks of different speed.
        even = shard_sizes.divides(rows, mesh, axes) and set(axes).isdisjoint(unlike)
        return not even and may_split(rows, mesh, axes)

    keep_batch_apart(graph, state.build, splits)


def drop_dead(graph: fx.Graph, _: JointState) -> None:
    """Remove nodes that nothing reads."""
    graph.eliminate_dead_code()
    graph.lint()
