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

from fxpar._torch.node_copies import copy_node
from fxpar.errors import PlanError
from fxpar.passes.builder import UNEVEN, Builder, shape_of
from fxpar.passes.collective_nodes import all_gather, all_reduce, emit, slice_, step
from fxpar.passes.local.known_forms import KnownForms
from fxpar.passes.local.local_ops import CUTS, cut, local_like
from fxpar.passes.lower import lower_graph
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.program import Op, user_line
from fxpar.sharding.propagate.at_rest import gathered_again
from fxpar.sharding.rules.op_facts import op_facts_of
from fxpar.sharding.sample_dims import sample_dims
from fxpar.sharding.spec import Spec


def localize(graph: fx.Graph, decision: Decision, fake_mode: Any) -> fx.Graph:
    """The local graph of a resharded one, lowered. Raises as ``partition``."""
    return lower_graph(partition(graph, decision, fake_mode), decision.mesh, fake_mode)


def partition(graph: fx.Graph, decision: Decision, fake_mode: Any) -> fx.Graph:
    """The local graph of a resharded one; its reshards are ``collective_nodes``,
    its inputs know their specs (``meta["fxpar_spec"]``), and where not all ranks hold
    as much of one, its global shape (``meta["fxpar_global_shape"]``). Raises PlanError
    if a shard comes out with another shape than its spec says, naming the op."""
    return _Localizer(decision, fake_mode).run(graph)


class _Localizer:
    def __init__(self, decision: Decision, fake_mode: Any) -> None:
        self.decision, self.program = decision, decision.program
        self.mesh = decision.mesh
        self.graph = fx.Graph()
        self.mode = fake_mode
        self.build = Builder(self.graph, fake_mode, self.mesh)
        self.known_forms = KnownForms(self.build, self.program)
        self.map: Mapping[fx.Node, Any] = {}
        # Values from tangents that ranks need not have alike and from no sample, as
        # the mean over the ranks of those tangents makes them.
        self.common: dict[fx.Node, fx.Node] = {}
        self.of_parameters = gathered_again(self.program)
        inputs = [v for v in self.program.inputs if v is not None]
        specs = {v: decision.edges.specs[v] for v in inputs}
        self.samples = sample_dims(self.program, specs)

    def run(self, graph: fx.Graph) -> fx.Graph:
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        local_values: dict[fx.Node, Any] = {}
        self.map = local_values
        for node, v in zip(nodes, self.program.inputs, strict=True):
            local_values[node] = self._placeholder(node, v)
        local_values.update(self._scaled_tangents(nodes))
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._output(node)
                continue
            local_values[node] = self._local_value(node)
            if not any(x in self.common for x in node.all_input_nodes):
                continue
            samples = self._samples_in(node)
            if not samples:
                self.map = ChainMap(self.common, local_values)
                self.common[node] = self._local_value(node)
                self.map = local_values
            elif not self._is_split(*samples):
                with self.build.at(node):
                    local_values[node] = self._of_own_samples(
                        local_values[node], *samples
                    )
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
        copy = copy_node(self.graph, node, self.map.__getitem__)
        if v is not None:
            spec = copy.meta["fxpar_spec"] = self.decision.edges.specs[v]
            copy.meta["val"] = local_like(node.meta["val"], spec, self.mesh, self.mode)
            copy.meta.pop("tensor_meta", None)
            shape = self.program.values[v].sizes
            if not spec.is_even(self.mesh, shape):
                copy.meta["fxpar_global_shape"] = shape
        return copy

    def _scaled_tangents(self, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """In local mode each rank differentiates the mean over its own part; the mean
        over all parts has a gradient smaller by their number. Of a result that all
        ranks have alike they may still make losses that are not."""
        signature, scaled = self.program.signature, dict[fx.Node, fx.Node]()
        parts = self.mesh.count(signature.batch)
        if parts == 1:
            return scaled
        for i, _ in signature.tangents:
            v, node = self.program.inputs[i], nodes[i]
            if v is None:
                continue
            with self.build.at(node):
                tangent, mul = self.map[node], torch.ops.aten.mul.Tensor
                if self._on_batch(self.decision.edges.specs[v]):
                    scaled[node] = self.build.call(mul, tangent, 1 / parts)
                    continue
                total = step(self.build, all_reduce, tangent, "sum", signature.batch)
                mean = self.build.call(mul, total, 1 / parts)
                # Each rank has all samples of a result that is whole.
                tangents = scaled if self._samples_in(node) else self.common
                tangents[node] = mean
        return scaled

    def _samples_in(self, node: fx.Node) -> tuple[Spec, int] | None:
        """The spec of a node's value and its dim that holds samples; None if it has
        none, and so is computed alike from alike tangents, shards included."""
        for v, spec in self._values(node):
            for d in range(len(spec.dims)):
                if (v, d) in self.samples:
                    return spec, d
        return None

    def _is_split(self, spec: Spec, d: int) -> bool:
        """Whether each rank has none but its own samples."""
        return set(self.program.signature.batch) <= set(spec.dims[d])

    def _of_own_samples(self, x: fx.Node, spec: Spec, d: int) -> fx.Node:
        """Each rank's own samples from what it has of them all by its own tangents,
        put together again. Other dims that axes of the batch split are whole meanwhile:
        ranks along those have unlike parts of a sample."""
        batch = self.program.signature.batch
        is_partial = bool(set(spec.partial_axes) & set(batch))
        if is_partial or not isinstance(x.meta["val"], torch.Tensor):
            makes = "summands" if is_partial else "several values"
            raise PlanError(
                f"{x.name} ({x.target}) makes {makes} of all samples, each by "
                "gradients of one rank",
                where=user_line(x),
                fix="split the batch over the ranks (FXPAR_PLAN=propagate), or feed "
                "the global batch (FXPAR_INPUTS=global)",
            )
        split = [
            (i, dim_axes)
            for i, dim_axes in enumerate(spec.dims)
            if dim_axes and (i == d or set(dim_axes) & set(batch))
        ]
        for i, dim_axes in split:
            x = step(self.build, all_gather, x, i, dim_axes)
        x = step(self.build, slice_, x, d, batch)
        x = step(self.build, all_gather, x, d, batch)
        for i, dim_axes in split:
            x = step(self.build, slice_, x, i, dim_axes)
        return x

    def _values(self, node: fx.Node) -> list[tuple[int, Spec]]:
        """The values of the program that a node makes, and their specs."""
        specs = self.decision.edges.specs
        if "fxpar_reshard" in node.meta:
            reshard = node.meta["fxpar_reshard"]
            return [(reshard.value, reshard.target)]
        if "fxpar_op" in node.meta:
            results = self.program.ops[node.meta["fxpar_op"]].results
            return [(v, specs[v]) for v in results]
        v = node.meta.get("fxpar_value")
        return [] if v is None else [(v, specs[v])]

    def _output(self, node: fx.Node) -> None:
        """The outputs; gradients of local inputs as a rank alone would see them."""
        signature = self.program.signature
        parts = self.mesh.count(signature.batch)
        results = list(fx.node.map_arg(node.args[0], self.map.__getitem__))
        for k, output in enumerate(signature.outputs):
            spec = self.decision.edges.outputs[k]
            results[k] = self.common.get(node.args[0][k], results[k])
            is_fed = (
                output.of is not None and signature.inputs[output.of].kind == "input"
            )
            scaled = output.kind == "gradient" and is_fed and parts > 1
            if scaled and spec is not None and self._on_batch(spec):
                with self.build.at(node.args[0][k]):
                    results[k] = self.build.call(
                        torch.ops.aten.mul.Tensor, results[k], parts
                    )
        copy = self.graph.output(type(node.args[0])(results))
        copy.meta = dict(node.meta)
        copy.meta[UNEVEN] = not self.decision.is_even

    def _on_batch(self, spec: Spec) -> bool:
        return spec.dims[:1] == (self.program.signature.batch,)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            results = self.map[node.args[0]]
            if isinstance(results, tuple):
                return results[node.args[1]]
        copy = copy_node(self.graph, node, self.map.__getitem__)
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
        return self.known_forms.local_op(node, op, strategy, self.map.__getitem__)


def _reduce_before_views(graph: fx.Graph) -> None:
    """Where a value is reduced in another shape than it is made in, and read in that
    again, as the gradient of a weight whose heads are a dim, it is reduced in that."""
    for node in graph.find_nodes(op="call_function", target=all_reduce):
        view: Any = node.args[0]
        if node.kwargs or not op_facts_of(view.target).reshapes:
            continue
        source, readers = view.args[0], list(node.users)
        if readers and all(_gives_back(reader, source) for reader in readers):
            node.args = (source, *node.args[1:])
            node.meta["val"] = readers[0].meta["val"]
            for reader in readers:
                reader.replace_all_uses_with(node)
                graph.erase_node(reader)


def _gives_back(reader: fx.Node, source: fx.Node) -> bool:
    """Whether what a node shows has the shape of ``source``, of known sizes."""
    if not op_facts_of(reader.target).reshapes:
        return False
    sizes, shape = shape_of(source), shape_of(reader)
    return all(type(n) is int for n in (*sizes, *shape)) and sizes == shape
