"""Closes ops on unequal shards into regions, so that a schedule can skip them.

In: a local graph with steps. Out: the same graph in which each op that reads or makes a
value which is not as large on every rank is a region of its own (``UnevenOp``). Verbs
cut all shards equally, so that they never look into it; all other nodes stay, so that
verbs apply around it. ``fuse_nodes.inline`` opens the regions again.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar.fusion.node_legality import UnevenOp
from fxpar.passes.rank_sizes import is_size, uneven_nodes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.rank_ints import PLACES, SIZES


def close(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> None:
    """Make each op on unequal shards a region, in place."""
    values = uneven_nodes(graph, mesh, fake_mode)
    values.update(n for n in graph.nodes if n.target in SIZES)
    for node in list(graph.nodes):
        reads = not values.isdisjoint(node.all_input_nodes)
        if is_size(node):
            values.update([node] if reads else [])
        elif (
            node.op == "call_function"
            and node.target not in PLACES
            and (reads or node in values)
        ):
            item = _close(graph, node)
            values.update([item] if node in values else [])
    graph.lint()


def _close(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Put an op into a region. Return the region's item, under the op's name, that is
    read instead of the op."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for read in node.all_input_nodes:
        copies[read] = part.placeholder(read.name)
        copies[read].meta = dict(read.meta)
    inner = part.node_copy(node, copies.__getitem__)
    inner.meta = dict(node.meta)
    part.output((inner,))
    with graph.inserting_before(node):
        region = graph.call_function(UnevenOp(part), tuple(copies))
        region.meta = {"val": (node.meta.get("val"),)}
        region.meta["fxpar_origin"] = node.meta.get("fxpar_origin", node.name)
        item = graph.call_function(operator.getitem, (region, 0))
    item.meta = dict(node.meta)
    node.replace_all_uses_with(item)
    name = node.name
    graph.erase_node(node)
    _torch.objects.rename(item, name)
    return item
