"""Which axes each value of a local graph varies over.

In: a local graph with steps, whose inputs know their specs (``meta["fxpar_spec"]``).
Out: for every node the axes along which ranks may hold different values. A value that
does not vary over an axis is replicated along it, so that each rank may compute on a
slice; one that varies is a shard, a summand, or something of one rank alone, and what
it is the steps that follow say. What another stage sends varies as it did there
(``meta["fxpar_sent"]``). Never changes the graph.

The analysis is that of ``jax.shard_map``'s varying axes.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.errors import ScheduleError
from fxpar.passes import ops, steps
from fxpar.sharding.spec import Spec

Axes = frozenset[str]

# Steps after which ranks along the axes hold the same.
_EQUAL = {steps.all_reduce, steps.all_gather}


def varying(graph: fx.Graph) -> dict[fx.Node, Axes]:
    """Raises ScheduleError if an input does not know its spec."""
    out: dict[fx.Node, Axes] = {}
    for node in graph.nodes:
        read: Axes = frozenset().union(*(out[n] for n in node.all_input_nodes))
        if node.op == "placeholder":
            out[node] = of_spec(node)
        elif node.target is ops.offset:
            out[node] = frozenset(node.args[1])
        elif node.target is steps.recv:
            out[node] = node.meta["fxpar_sent"]
        elif node.target in _EQUAL:
            out[node] = read - set(steps.axes_of(node))
        elif steps.is_step(node):
            out[node] = read | set(steps.axes_of(node))
        else:
            out[node] = read
    return out


def of_spec(node: fx.Node) -> Axes:
    """The axes an input varies over."""
    spec = node.meta.get("fxpar_spec")
    if isinstance(spec, Spec):
        return frozenset(spec.sharded_axes) | frozenset(spec.partial_axes)
    if isinstance(node.meta.get("val"), torch.Tensor):
        raise ScheduleError(
            f"input {node.name} does not say how it lies on the mesh",
            fix="pass inputs=[Spec, ...], one for each tensor the graph takes",
        )
    return frozenset()
