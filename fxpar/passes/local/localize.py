"""Makes the local graph, which one rank runs, from the resharded one.

In: the resharded graph (global shapes). Out: a new graph in local shapes whose reshards
are steps, or once lowered ``_c10d_functional`` collectives on symbolic groups and local
slices, and whose shape arguments are local. The rank enters through ``rank_ints`` only.
Never: the graph differs between ranks, or its size depends on their number.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxpar.graph.builder import UNEVEN, VARIES, Builder, shape_of
from fxpar.graph.collective_nodes import all_reduce, emit
from fxpar.passes.local.local_ops import CUTS, cut, local_like, local_op
from fxpar.passes.lower import lower_graph
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Op
from fxpar.sharding.propagate.at_rest import gathered_again


def localize(graph: fx.Graph, decision: Decision, fake_mode: Any) -> fx.Graph:
    """Return the local graph of a resharded one, lowered. Raises as ``partition``."""
    return lower_graph(partition(graph, decision, fake_mode), decision.mesh, fake_mode)


def partition(graph: fx.Graph, decision: Decision, fake_mode: Any) -> fx.Graph:
    """Return the local graph of a resharded one. Its reshards are ``collective_nodes``;
    its inputs have their specs in ``meta["fxpar_spec"]`` and, if uneven, their global
    shapes in ``meta["fxpar_global_shape"]``. Raises PlanError, naming the op, if a
    shard comes out with another shape than its spec says."""
    return _Localizer(decision, fake_mode).run(graph)


class _Localizer:
    def __init__(self, decision: Decision, fake_mode: Any) -> None:
        self.decision, self.program = decision, decision.program
        self.mesh = decision.mesh
        self.graph = fx.Graph()
        self.mode = fake_mode
        self.build = Builder(self.graph, fake_mode, self.mesh)
        self.map: dict[fx.Node, Any] = {}
        self.of_parameters = gathered_again(self.program)

    def run(self, graph: fx.Graph) -> fx.Graph:
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        ends = self.program.signature.inputs
        for node, v, end in zip(nodes, self.program.inputs, ends, strict=True):
            self.map[node] = self._placeholder(node, v)
            if v is not None and end.kind != "parameter":
                self.map[node].meta[VARIES] = self.program.values[v].manual
        for node in graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.op != "placeholder":
                self.map[node] = self._local_value(node)
        _reduce_before_views(self.graph)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph

    def _local_value(self, node: fx.Node) -> Any:
        if "fxpar_reshard" in node.meta:
            with self.build.at(node):
                return self._reshard(node)
        if "fxpar_op" in node.meta:
            with self.build.at(node):
                return self._op(node, self.program.ops[node.meta["fxpar_op"]])
        return self._copy(node)

    def _placeholder(self, node: fx.Node, v: int | None) -> fx.Node:
        copy = self.graph.node_copy(node, self.map.__getitem__)
        if v is not None:
            spec = copy.meta["fxpar_spec"] = self.decision.edges.specs[v]
            copy.meta["val"] = local_like(node.meta["val"], spec, self.mesh, self.mode)
            copy.meta.pop("tensor_meta", None)
            shape = self.program.values[v].sizes
            if not spec.is_even(self.mesh, shape):
                copy.meta["fxpar_global_shape"] = shape
        return copy

    def _output(self, node: fx.Node) -> None:
        copy = self.graph.node_copy(node, self.map.__getitem__)
        copy.meta[UNEVEN] = not self.decision.is_even

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            results = self.map[node.args[0]]
            if isinstance(results, tuple):
                return results[node.args[1]]
        copy = self.graph.node_copy(node, self.map.__getitem__)
        copy.meta.pop("tensor_meta", None)
        if node.target is operator.getitem:
            source, key = copy.args
            copy.meta["val"] = source.meta["val"][key]
            cuts = source.meta.get(CUTS, {}).get(key)
            if cuts:
                with self.build.at(node):
                    return cut(self.build, copy, cuts)
        return copy

    def _reshard(self, node: fx.Node) -> fx.Node:
        reshard = node.meta["fxpar_reshard"]
        node.meta["fxpar_parameter"] = reshard.value in self.of_parameters
        shape = self.program.values[reshard.value].sizes
        steps = route(self.decision, reshard)
        x = self.map[node.args[0]]
        return emit(self.build, x, steps, reshard.source, shape)

    def _op(self, node: fx.Node, op: Op) -> Any:
        strategy = self.decision.strategies[op.index]
        local = self.map.__getitem__
        return local_op(self.build, node, op, self.program, strategy, local)


def _reduce_before_views(graph: fx.Graph) -> None:
    """Move all-reduces before a reshape that all their readers undo, as for the
    gradient of a weight whose heads are a dim: the value is reduced in the shape in
    which it is computed."""
    for node in graph.find_nodes(op="call_function", target=all_reduce):
        view: Any = node.args[0]
        if node.kwargs or not op_facts_of(view.target).reshapes:
            continue
        source, readers = view.args[0], list(node.users)
        if readers and all(_is_undone_by(reader, source) for reader in readers):
            node.args = (source, *node.args[1:])
            node.meta["val"] = readers[0].meta["val"]
            for reader in readers:
                reader.replace_all_uses_with(node)
                graph.erase_node(reader)


def _is_undone_by(reader: fx.Node, source: fx.Node) -> bool:
    """Return whether a node reshapes to the shape of ``source``, of known sizes."""
    if not op_facts_of(reader.target).reshapes:
        return False
    sizes, shape = shape_of(source), shape_of(reader)
    return all(type(n) is int for n in (*sizes, *shape)) and sizes == shape
