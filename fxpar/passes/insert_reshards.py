"""Inserts explicit ``fxpar::reshard`` nodes into a planned graph where specs differ.

In: the planned graph and its Decision. Out: a new graph, still in global shapes and
still equal to the one-device graph when run, in which every op reads its operands in
exactly the specs its strategy needs. Op nodes carry ``meta["fxpar_op"]``, their index
in the Program; reshard nodes ``meta["fxpar_reshard"]``, the Reshard they stand for.
Never changes the planned graph.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import PROVENANCE
from fxpar.sharding.decide import Decision
from fxpar.sharding.plan_facts import cause
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
