"""Computes the sizes of a local graph on one rank, where shards are uneven.

In: a local graph, whose fake values are those of the largest shard, with its
communication as steps or as collectives. Out: the fake value of a node on one rank
(``restate``), a copy of the graph with them (``sized``), or the nodes whose sizes
differ between ranks (``uneven_nodes``). Never changes the graph. NumPy is not needed
here, as where there are only kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType
from typing import Any

from torch import fx

from fxpar._torch import fake
from fxpar.graph import collective_nodes, size_nodes
from fxpar.graph.builder import value_of
from fxpar.graph.graph_bodies import bodies_of
from fxpar.sharding import rank_ints
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_table import tensors_of


def is_size(node: fx.Node) -> bool:
    """Return whether a node computes a size from other sizes."""
    return isinstance(node.target, BuiltinFunctionType | type) and (
        isinstance(node.meta.get("val"), int) and node.target is not operator.getitem
    )


def sized(graph: fx.Graph, mesh: Mesh, rank: int, fake_mode: Any) -> fx.Graph:
    """Return a copy of the local graph with the numbers and fake values of one rank,
    for a simulation of that rank."""
    return _sized(graph, mesh, rank, fake_mode)[0]


def uneven_nodes(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> set[fx.Node]:
    """Return the nodes whose values have different sizes on different ranks."""
    differing = set[fx.Node]()
    for rank in _corners(mesh):
        _, own = _sized(graph, mesh, rank, fake_mode)
        differing.update(
            node for node in graph.nodes if not has_local_shape(node, own.get(node))
        )
    return differing


def _corners(mesh: Mesh) -> Iterator[int]:
    """Yield ranks that together have every shard size of the mesh: the first, those
    that differ from it along one axis, and the last."""
    for rank in range(mesh.size):
        places = [mesh.index(rank, (axis,)) for axis in mesh.names]
        if sum(place > 0 for place in places) <= 1 or rank == mesh.size - 1:
            yield rank


def _sized(
    graph: fx.Graph, mesh: Mesh, rank: int, fake_mode: Any
) -> tuple[fx.Graph, dict[fx.Node, Any]]:
    """Return (the graph of one rank, each node's copy or number in it)."""
    rank_graph, bound = fx.Graph(), dict[fx.Node, Any]()
    for node in graph.nodes:
        if node.target in rank_ints.PLACES:
            at = rank_ints.place(node.target, value_of(node.args), rank)
            bound[node] = size_nodes.as_nodes(rank_graph, at)
            continue
        args = fx.node.map_arg(node.args, bound.__getitem__)
        if is_size(node) and all(isinstance(x, int) for x in args):
            bound[node] = node.target(*args)
            continue
        copy = bound[node] = rank_graph.node_copy(node, bound.__getitem__)
        copy.meta = dict(node.meta)
        restate(copy, node, bound, mesh, rank, fake_mode)
    return rank_graph, bound


def restate(
    copy: fx.Node,
    node: fx.Node,
    bound: Mapping[fx.Node, Any],
    mesh: Mesh,
    rank: int,
    fake_mode: Any,
) -> None:
    """Set the fake value of ``copy`` to the one on this rank; in a local graph it is
    that of the largest shard. ``bound``: each earlier node's copy or number."""
    if "fxpar_global_shape" in node.meta:
        shape = node.meta["fxpar_global_shape"]
        shape = node.meta["fxpar_spec"].rank_shape(mesh, shape, rank)
        copy.meta["val"] = fake.resized(node.meta["val"], shape, fake_mode)
    if node.op != "call_function" or bodies_of(node):
        return
    is_step = collective_nodes.is_step(node)
    moves = node.target is collective_nodes.move_rows
    # These may give ranks uneven shards, even from even ones.
    can_cut = is_step and (moves or collective_nodes.cut_of(node) is not None)
    reads = node.all_input_nodes
    if not can_cut and all(has_local_shape(read, bound[read]) for read in reads):
        return
    if is_step:
        operand = bound[node.all_input_nodes[0]].meta["val"]
        shape = collective_nodes.shape_after(node, operand.shape, mesh, rank)
        copy.meta["val"] = fake.resized(node.meta["val"], shape, fake_mode)
        return
    bound_args = fx.node.map_arg((node.args, node.kwargs), bound.__getitem__)
    args, kwargs = value_of(bound_args)
    with fake_mode:
        copy.meta["val"] = node.target(*args, **kwargs)
    copy.meta.pop("tensor_meta", None)


def has_local_shape(node: fx.Node, bound: Any) -> bool:
    """Return whether a value has the same shape on this rank as in the local graph."""
    if not isinstance(bound, fx.Node):
        return not (node.target in rank_ints.SIZES or is_size(node))
    pairs = zip(
        tensors_of(node.meta.get("val")), tensors_of(bound.meta.get("val")), strict=True
    )
    return all(a is b or a.shape == b.shape for a, b in pairs)
