"""Adds nodes with fake values to a graph: what passes build and rewrite code with.

Every node made while ``at(node)`` or ``before(node)`` is active carries that node's
provenance (stack trace, module stack, recompute tags), so that an error, a profile or
activation checkpointing finds the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxpar.passes import custom_ops, size_nodes
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

# Of fxpar's own: the reshard, and what made it necessary; whether it is one of a
# parameter; whether it is one of the chunks in which a schedule runs a collective.
OURS = ("fxpar_reshard", "fxpar_cause", "fxpar_parameter", "fxpar_chunk")


def value_of(arg: Any) -> Any:
    """Arguments with nodes replaced by their fake values."""
    return fx.node.map_arg(arg, lambda node: node.meta["val"])


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's tensor value, open sizes as symbols."""
    return tuple(node.meta["val"].shape)


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have metadata of their own."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = new.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return new


class Builder:
    """``call`` adds one op and computes its fake value from those of its inputs.

    ``mesh``: of a local graph, whose nodes also carry what fxpar notes of them (their
    cause, their one-device node); None where a graph is rewritten in global shapes.
    """

    def __init__(
        self, graph: fx.Graph, fake_mode: Any, mesh: Mesh | None = None
    ) -> None:
        self.graph, self.fake_mode, self._mesh = graph, fake_mode, mesh
        self._origin: fx.Node | None = None
        self._noted: fx.Node | None = None

    @property
    def mesh(self) -> Mesh:
        assert self._mesh is not None, "of a graph in global shapes"
        return self._mesh

    @contextmanager
    def at(self, origin: fx.Node, noted: fx.Node | None = None) -> Iterator[None]:
        """Nodes made inside come from ``origin``; what fxpar notes of them is that of
        ``noted`` (default: of ``origin`` too)."""
        outer = self._origin, self._noted
        self._origin, self._noted = origin, noted or origin
        try:
            yield
        finally:
            self._origin, self._noted = outer

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Nodes made inside stand before ``node`` and come from it."""
        with self.graph.inserting_before(node), self.at(node):
            yield

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add ``target(*args, **kwargs)``; arguments may hold nodes, and open sizes,
        which become nodes."""
        args = size_nodes.as_nodes(self.graph, args)
        kwargs = size_nodes.as_nodes(self.graph, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        with self.fake_mode:
            node.meta["val"] = target(*value_of(args), **value_of(kwargs))
        self.stamp(node)
        return node

    def stamp(self, node: fx.Node) -> None:
        """Note where a node that was added comes from."""
        if self._origin is None or self._noted is None:
            return
        meta, noted = self._origin.meta, self._noted.meta
        node.meta.update({key: meta[key] for key in PROVENANCE if key in meta})
        if self._mesh is not None:
            node.meta.update({key: noted[key] for key in OURS if key in noted})
            node.meta["fxpar_origin"] = meta.get("fxpar_origin", self._origin.name)

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let ``by`` take every use of ``node`` and erase the node."""
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def offset(
        self, axes: Sequence[str], stride: int, base: int = 0, around: int = 0
    ) -> Any:
        """An int: ``base + stride * (this rank's shard of axes)``, its remainder by
        ``around`` unless that is 0; may be a node."""
        base = base % around if around else base
        if not axes or stride == 0:
            return base
        more = (around,) if around else ()
        args = str(self.mesh), tuple(axes), stride, base, *more
        node = self.graph.call_function(
            custom_ops.offset, size_nodes.as_nodes(self.graph, args)
        )
        node.meta["val"] = base
        return node

    def wait(self, collective: fx.Node) -> fx.Node:
        """The finished result of a functional collective."""
        return self.call(torch.ops._c10d_functional.wait_tensor.default, collective)
