"""resharded -> local: what one rank runs, the same text on every rank.

In: the resharded graph (global shapes). Out: a new graph in local shapes whose reshards
are steps, or once lowered ``_c10d_functional`` collectives on symbolic groups and local
slices, and whose shape arguments are local. The rank enters through ``offset`` ints
alone, so the graph is equal on all ranks and its size does not depend on their number.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpar.passes.builder import Builder
from fxpar.passes.local_op import local_like, local_op
from fxpar.passes.lower import lower_graph
from fxpar.passes.steps import all_reduce, emit, step
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.program import Op
from fxpar.sharding.rest import gathered_again
from fxpar.sharding.spec import Spec


def localize(graph: fx.Graph, decision: Decision, fake_mode: Any) -> fx.Graph:
    """The local graph of a resharded one, lowered. Raises as ``partition``."""
    return lower_graph(partition(graph, decision, fake_mode), decision.mesh, fake_mode)


def partition(graph: fx.Graph, decision: Decision, fake_mode: Any) -> fx.Graph:
    """The local graph of a resharded one; its reshards are nodes of ``passes.steps``,
    its inputs know their specs (``meta["fxpar_spec"]``). Raises PlanError if a shard
    comes out with another shape than its spec says, naming the op."""
    return _Localizer(decision, fake_mode).run(graph)


class _Localizer:
    def __init__(self, decision: Decision, fake_mode: Any) -> None:
        self.decision, self.program = decision, decision.program
        self.mesh = decision.mesh
        self.graph = fx.Graph()
        self.mode = fake_mode
        self.build = Builder(self.graph, fake_mode, self.mesh)
        self.map: Mapping[fx.Node, Any] = {}
        # Values from tangents that ranks need not have alike, as the mean over the
        # ranks of those tangents makes them.
        self.alike: dict[fx.Node, fx.Node] = {}
        self.of_parameters = gathered_again(self.program)

    def run(self, graph: fx.Graph) -> fx.Graph:
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        made: dict[fx.Node, Any] = {}
        self.map = made
        for node, v in zip(nodes, self.program.inputs, strict=True):
            made[node] = self._placeholder(node, v)
        made.update(self._scaled_tangents(nodes))
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._output(node)
                continue
            made[node] = self._made(node)
            if self._may_differ(node):
                self.map = ChainMap(self.alike, made)
                self.alike[node] = self._made(node)
                self.map = made
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph

    def _made(self, node: fx.Node) -> fx.Node:
        if "fxpar_reshard" in node.meta:
            with self.build.at(node):
                return self._reshard(node)
        if "fxpar_op" in node.meta:
            with self.build.at(node):
                return self._op(node, self.program.ops[node.meta["fxpar_op"]])
        return self._other(node)

    def _placeholder(self, node: fx.Node, v: int | None) -> fx.Node:
        copy = self.graph.node_copy(node)
        copy.meta = dict(node.meta)
        if v is not None:
            spec = copy.meta["fxpar_spec"] = self.decision.edges.made[v]
            copy.meta["val"] = local_like(node.meta["val"], spec, self.mesh, self.mode)
            copy.meta.pop("tensor_meta", None)
        return copy

    def _scaled_tangents(self, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """In local mode each rank differentiates the mean over its own part; the mean
        over all parts has a gradient smaller by their number. Of a result that all
        ranks have alike they may still make losses that are not."""
        signature, out = self.program.signature, dict[fx.Node, fx.Node]()
        parts = self.mesh.count(signature.batch)
        if parts == 1:
            return out
        for i, _ in signature.tangents:
            v, node = self.program.inputs[i], nodes[i]
            if v is None:
                continue
            with self.build.at(node):
                tangent, mul = self.map[node], torch.ops.aten.mul.Tensor
                if self._on_batch(self.decision.edges.made[v]):
                    out[node] = self.build.call(mul, tangent, 1 / parts)
                else:
                    total = step(
                        self.build, all_reduce, tangent, "sum", signature.batch
                    )
                    self.alike[node] = self.build.call(mul, total, 1 / parts)
        return out

    def _may_differ(self, node: fx.Node) -> bool:
        """Whether ranks compute a value each for itself, from tangents of their own."""
        if not any(x in self.alike for x in node.all_input_nodes):
            return False
        batch = set(self.program.signature.batch)
        if "fxpar_reshard" in node.meta:
            return batch.isdisjoint(node.meta["fxpar_reshard"].target.axes)
        if "fxpar_op" not in node.meta:
            return True
        results = self.program.ops[node.meta["fxpar_op"]].results
        made = (self.decision.edges.made[v] for v in results)
        return all(batch.isdisjoint(spec.axes) for spec in made)

    def _output(self, node: fx.Node) -> None:
        """The outputs; gradients of local inputs as a rank alone would see them."""
        signature = self.program.signature
        parts = self.mesh.count(signature.batch)
        results = list(fx.node.map_arg(node.args[0], self.map.__getitem__))
        for k, out in enumerate(signature.outputs):
            spec = self.decision.edges.outputs[k]
            results[k] = self.alike.get(node.args[0][k], results[k])
            fed = out.of is not None and signature.inputs[out.of].kind == "input"
            scaled = out.kind == "gradient" and fed and parts > 1
            if scaled and spec is not None and self._on_batch(spec):
                with self.build.at(node.args[0][k]):
                    results[k] = self.build.call(
                        torch.ops.aten.mul.Tensor, results[k], parts
                    )
        copy = self.graph.output(type(node.args[0])(results))
        copy.meta = dict(node.meta)

    def _on_batch(self, spec: Spec) -> bool:
        return spec.dims[:1] == (self.program.signature.batch,)

    def _other(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, self.map.__getitem__)
        copy.meta = dict(node.meta)
        copy.meta.pop("tensor_meta", None)
        if node.target is operator.getitem:
            source, key = copy.args
            copy.meta["val"] = source.meta["val"][key]
        return copy

    def _reshard(self, node: fx.Node) -> fx.Node:
        reshard = node.meta["fxpar_reshard"]
        node.meta["fxpar_parameter"] = reshard.value in self.of_parameters
        return emit(self.build, self.map[node.args[0]], route(self.decision, reshard))

    def _op(self, node: fx.Node, op: Op) -> fx.Node:
        strategy = self.decision.strategies[op.index]
        return local_op(
            self.build, node, op, self.program, strategy, self.map.__getitem__
        )
