"""Appends nodes with local fake values to a graph: what passes build local code with.

Every node made while ``at(node)`` is active carries that node's provenance (stack
trace, module stack, recompute tags), so that an error, a profile or activation
checkpointing finds the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxpar.passes import custom_ops
from fxpar.sharding.mesh import Mesh

# What a rewritten node keeps of the node it comes from.
PROVENANCE = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "seq_nr",
    "partitioner_tag",
    "recompute",
    "ac_graph_id",
    "custom",
    "original_aten",
    "from_node",
    "has_backward_hook",
    "quantization_tag",
)

# Of fxpar's own: what made a reshard necessary; whether it is one of a parameter;
# whether it is one of the chunks in which a schedule runs a collective.
OURS = ("fxpar_cause", "fxpar_parameter", "fxpar_chunk")


def value_of(arg: Any) -> Any:
    """Arguments with nodes replaced by their fake values."""
    return fx.node.map_arg(arg, lambda node: node.meta["val"])


class Builder:
    """``call`` appends one op and computes its fake value from those of its inputs."""

    def __init__(self, graph: fx.Graph, fake_mode: Any, mesh: Mesh) -> None:
        self.graph, self.fake_mode, self.mesh = graph, fake_mode, mesh
        self._origin: fx.Node | None = None

    @contextmanager
    def at(self, origin: fx.Node) -> Iterator[None]:
        """Nodes made inside come from ``origin``."""
        before, self._origin = self._origin, origin
        try:
            yield
        finally:
            self._origin = before

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append ``target(*args, **kwargs)``; arguments may hold nodes."""
        node = self.graph.call_function(target, args, kwargs)
        with self.fake_mode:
            node.meta["val"] = target(*value_of(args), **value_of(kwargs))
        self.stamp(node)
        return node

    def stamp(self, node: fx.Node) -> None:
        """Note where a node that was appended comes from."""
        if self._origin is not None:
            meta = self._origin.meta
            keys = (*PROVENANCE, *OURS)
            node.meta.update({key: meta[key] for key in keys if key in meta})
            node.meta["fxpar_origin"] = meta.get("fxpar_origin", self._origin.name)

    def offset(
        self, axes: Sequence[str], stride: int, base: int = 0, around: int = 0
    ) -> Any:
        """An int: ``base + stride * (this rank's shard of axes)``, its remainder by
        ``around`` unless that is 0; may be a node."""
        base = base % around if around else base
        if not axes or stride == 0:
            return base
        more = (around,) if around else ()
        node = self.graph.call_function(
            custom_ops.offset, (str(self.mesh), tuple(axes), stride, base, *more)
        )
        node.meta["val"] = base
        return node

    def wait(self, collective: fx.Node) -> fx.Node:
        """The finished result of a functional collective."""
        return self.call(torch.ops._c10d_functional.wait_tensor.default, collective)
