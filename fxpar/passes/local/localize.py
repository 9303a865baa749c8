"""Makes the local graph, which one rank runs, from a planned one: first with explicit
reshards, then in local shapes, op by op (``local_ops``).

``insert_reshards``. In: the planned graph and its Decision. Out: a new graph, still in
global shapes and still equal to the one-device graph when run, in which every op reads
its operands in exactly the specs its strategy needs, by ``fxpar::reshard`` nodes where
specs differ. Op nodes carry ``meta["fxpar_op"]``, their index in the Program; reshard
nodes ``meta["fxpar_reshard"]``, the Reshard they stand for.

``partition``. In: that graph. Out: a new graph in local shapes whose reshards are
steps, or once lowered (``localize``) ``_c10d_functional`` collectives on symbolic
groups and local slices, and whose shape arguments are local. The rank enters through
``rank_ints`` only.
Never: changes the graph that comes in; the graph differs between ranks, or its size
depends on their number.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import PROVENANCE, UNEVEN, VARIES, Builder, shape_of
from fxpar.graph.collective_nodes import all_reduce, emit
from fxpar.passes.local.local_ops import copied_node, local_like, local_op
from fxpar.passes.lower import lower_graph
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.plan_facts import cause
from fxpar.sharding.program import Op
from fxpar.sharding.propagate.at_rest import gathered_again
from fxpar.sharding.reshard.route import Reshard
from fxpar.sharding.spec import Spec


def insert_reshards(graph: fx.Graph, decision: Decision) -> fx.Graph:
    """Return the resharded copy of a planned graph."""
    return _Inserter(graph, decision).run()


class _Inserter:
    def __init__(self, graph: fx.Graph, decision: Decision) -> None:
        self.graph, self.decision, self.program = graph, decision, decision.program
        self.resharded = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        # (value, spec) -> the node that has the value in this spec
        self.versions: dict[tuple[int, Spec], fx.Node] = {}
        self.early: dict[int, list[Reshard]] = defaultdict(list)
        self.before: dict[int, list[Reshard]] = defaultdict(list)
        self.last: list[Reshard] = []
        for reshard in decision.edges.reshards:
            if reshard.early:
                self.early[reshard.value].append(reshard)
            elif reshard.reader is not None:
                self.before[reshard.reader].append(reshard)
            else:
                self.last.append(reshard)

    def run(self) -> fx.Graph:
        op_of = {op.node: op for op in self.program.ops}
        for node in self.graph.nodes:
            if node.op == "output":
                self._output(node)
                continue
            op = op_of.get(node)
            if op is None:
                self._copy(node)
                continue
            for reshard in self.before[op.index]:
                self._reshard(reshard, op.node)
            reads = iter(
                (v, self.decision.edges.reads[op.index, i])
                for i, v in enumerate(op.operands)
            )
            self._copy(node, reads)
            self.copies[node].meta["fxpar_op"] = op.index
        self.resharded.lint()
        return self.resharded

    def _copy(self, node: fx.Node, reads: Any = None) -> None:
        def argument(n: fx.Node) -> fx.Node:
            if reads is not None and isinstance(n.meta.get("val"), torch.Tensor):
                return self.versions[next(reads)]
            return self.copies[n]

        copy = self.resharded.node_copy(node, argument)
        self.copies[node] = copy
        v = self.program.value_of.get((node, 0))
        if v is not None and isinstance(node.meta.get("val"), torch.Tensor):
            copy.meta["fxpar_value"] = v
            self.versions.setdefault((v, self.decision.edges.specs[v]), copy)
            for reshard in self.early.pop(v, ()):
                self._reshard(reshard, node)

    def _reshard(self, reshard: Reshard, origin: fx.Node) -> None:
        source = self.versions[reshard.value, reshard.source]
        mesh = str(self.decision.mesh)
        copy = self.resharded.call_function(
            torch.ops.fxpar.reshard.default,
            (source, str(reshard.source), str(reshard.target), mesh),
        )
        copy.meta = {k: origin.meta[k] for k in PROVENANCE if k in origin.meta}
        copy.meta["val"] = source.meta["val"]
        copy.meta["fxpar_reshard"] = reshard
        copy.meta["fxpar_cause"] = cause(self.decision, reshard)
        self.versions[reshard.value, reshard.target] = copy

    def _output(self, node: fx.Node) -> None:
        for reshard in self.last:
            value = self.program.values[reshard.value]
            origin = self.program.producers.get(value.index)
            ops = self.program.ops
            self._reshard(reshard, ops[origin[0]].node if origin else node)
        results = []
        for k, arg in enumerate(node.args[0]):
            v, spec = self.program.outputs[k], self.decision.edges.outputs[k]
            if v is None or spec is None:
                result = self.copies.get(arg, arg) if isinstance(arg, fx.Node) else arg
            else:
                result = self.versions[v, spec]
            results.append(result)
        copy = self.resharded.output(type(node.args[0])(results))
        copy.meta = dict(node.meta)


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
        return copied_node(self.graph, node, self.map)

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
