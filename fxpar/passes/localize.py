"""Makes the local graph, which one rank runs, from a planned one: first with explicit
reshards, then in local shapes, op by op.

``insert_reshards``. In: the planned graph and its Decision. Out: a new graph, still in
global shapes and still equal to the one-device graph when run, in which every op reads
its operands in exactly the specs its strategy needs, by ``fxpar::reshard`` nodes where
specs differ. Op nodes carry ``meta["fxpar_op"]``, their index in the Program; reshard
nodes ``meta["fxpar_reshard"]``, the Reshard they stand for.

``partition``. In: that graph. Out: a new graph in local shapes whose reshards are
steps, or once lowered (``localize``) ``_c10d_functional`` collectives on symbolic
groups and local slices, and whose shape arguments are local. The rank enters through
``rank_ints`` only.

``local_op``. In: a call in global shapes, its rule and strategy, and the local nodes of
its operands. Out: the call in local shapes, appended. Most ops compute their shard from
the shards of their operands unchanged. For the others the row (``sharding.ops``) has a
local form: an index into a split dim must be shifted by the rank's offset and masked
where it points elsewhere, a size among the arguments must become the local one, a
random op must count by global index. Ops that move rows of a split dim (``Rule.moves``)
exchange them (``sharding.ops.reads``). A body with split values is made local too, op
by op.

Never: changes the graph that comes in; the graph differs between ranks, or its size
depends on their number; an op inside a body communicates (``sharding.body_rules``).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.graph import region_ops as _region_ops  # noqa: F401  (registers ops)
from fxpar.graph import size_nodes
from fxpar.graph.builder import (
    PROVENANCE,
    UNEVEN,
    VARIES,
    Builder,
    shape_of,
    value_of,
)
from fxpar.graph.collective_nodes import all_reduce, emit
from fxpar.graph.graph_bodies import body_of, module_of, new_body
from fxpar.passes.lower import lower_graph, restrided
from fxpar.sharding.body_rules import FORMS, Inside
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.op_table import look_up, tensors_of
from fxpar.sharding.ops import LOCAL, reads, row_of
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.plan_facts import cause
from fxpar.sharding.program import Op, Program, tensors_among
from fxpar.sharding.read_program import inside_of
from fxpar.sharding.reshard.route import Reshard
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, specs


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
        self.of_parameters = self.program.gathered_again

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
                op = self.program.ops[node.meta["fxpar_op"]]
                strategy = self.decision.strategies[op.index]
                local = self.map.__getitem__
                return local_op(self.build, node, op, self.program, strategy, local)
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


# Op by op


def local_form(call: LocalCall, args: Any, kwargs: Any) -> Any:
    """Append one op on local arguments: its local form, or the op itself, with the
    shape argument, if its row marks one, made local. An operand of which a rank holds
    no rows is padded to a row of zeros for an op that cannot run without rows; the row
    is cut off the results."""
    n = len(call.operands)
    read = {(window.position, window.dim) for window in call.rule.windows}
    empty = [
        [d for d in call.empty_dims(spec, shape) if (i, d) not in read]
        for i, (spec, shape) in enumerate(
            zip(call.operands + call.results, call.shapes, strict=True)
        )
    ]
    if call.rule.empty != "fill" or not any(empty):
        return _local_form(call, args, kwargs)
    filled_call = replace(call, least=1)
    reads = tensors_among((args, kwargs))
    filled = {}
    for i, (x, dims) in enumerate(zip(reads, empty[:n], strict=True)):
        pairs = zip(filled_call.operand_shape(i), call.operand_shape(i), strict=True)
        missing = [call.build.missing(*pair) for pair in pairs]
        padding = [m if d in dims else 0 for d, m in enumerate(missing)]
        filled[x] = call.build.pad(x, padding)
    args, kwargs = fx.node.map_arg((args, kwargs), lambda x: filled.get(x, x))
    result = _local_form(filled_call, args, kwargs)
    cuts = [
        [(d, call.local_shape(i)[d]) for d in dims] for i, dims in enumerate(empty[n:])
    ]
    value = value_of(result)
    if isinstance(value, torch.Tensor):
        return call.build.first_rows(result, cuts[0])
    if not isinstance(result, tuple):
        item = partial(call.build.call, operator.getitem, result)
        result = tuple(item(k) for k in range(len(value)))
    ends = iter(cuts)
    return tuple(
        call.build.first_rows(x, next(ends)) if isinstance(y, torch.Tensor) else x
        for x, y in zip(result, value, strict=True)
    )


def _local_form(call: LocalCall, args: Any, kwargs: Any) -> fx.Node:
    target = call.node.target
    local = look_up(LOCAL, target)
    if call.rule.moves and reads.is_exchange(call):
        return reads.moved(call, tensors_among((args, kwargs)))
    if local is not None:
        return local(call, *args, **kwargs)
    row = row_of(target)
    if row is not None and row.shape is not None and row.shape < len(args):
        shape = list(call.local_shape())
        args = (*args[: row.shape], shape, *args[row.shape + 1 :])
    return call.build.call(target, *args, **kwargs)


Local = Callable[[fx.Node], Any]


def local_like(value: torch.Tensor, spec: Spec, mesh: Mesh, mode: Any) -> Any:
    """Return a fake tensor of the largest shard, with the dim order of ``value``."""
    if spec.is_whole:
        return value
    return _torch.fake.resized(value, spec.local_shape(mesh, value.shape), mode)


def local_op(
    build: Builder,
    node: fx.Node,
    op: Op,
    program: Program,
    strategy: Strategy,
    local: Local,
) -> fx.Node | tuple[fx.Node | None, ...]:
    """Append an op under a strategy; return its node, or a tuple of nodes if several
    give its results. ``local``: node that it reads -> its local node.

    Raises PlanError if a shard comes out with another shape than its spec says.
    """
    n, tensor_specs = len(op.operands), specs(op.rule, strategy)
    operands, results = tensor_specs[:n], tensor_specs[n:]
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: _symbolic_size(n) or local(n)
    )
    all_whole = all(s.is_whole for s in tensor_specs)
    is_kept = all_whole and not op_facts_of(op.target).replaced
    if is_kept and _has_global_layouts(node, local):
        return _copied(build, node, args, kwargs)
    shapes = _shapes(op, program)
    call = LocalCall(build, node, op.rule, operands, results, shapes)
    if _torch.aot.higher_order_name(node.target) in FORMS:
        args = _local_bodies(call, args, strategy.axes_of)
    result = local_form(call, args, kwargs)
    _check(result, op, program, results, build.mesh)
    return result


def _has_global_layouts(node: fx.Node, local: Local) -> bool:
    """Return whether a node's operands have the same memory layout as in the global
    graph."""
    pairs = ((n.meta["val"], local(n).meta["val"]) for n in node.all_input_nodes)
    return all(
        a is b
        or not isinstance(a, torch.Tensor)
        or (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
        for a, b in pairs
    )


def _symbolic_size(node: fx.Node) -> Any:
    """Return the symbolic size that a node computes, which local forms take as a
    number; None for other nodes."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.SymInt) else None


def _shapes(op: Op, program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the global shapes of an op's tensors, open sizes as symbols."""
    return tuple(program.values[v].sizes for v in op.tensors)


def _copied(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """Copy an op on whole values, fake value included."""
    args = size_nodes.as_nodes(build.graph, args)
    kwargs = size_nodes.as_nodes(build.graph, kwargs)
    copy = build.graph.create_node(node.op, node.target, args, kwargs)
    copy.meta.update({k: v for k, v in node.meta.items() if k != "tensor_meta"})
    copy.meta["fxpar_origin"] = node.name
    return copy


def _check(
    result: Any, op: Op, program: Program, results: tuple[Spec, ...], mesh: Mesh
) -> None:
    got = [tuple(t.shape) for t in tensors_of(value_of(result))]
    shapes = _shapes(op, program)[len(op.operands) :]
    want = [
        spec.local_shape(mesh, shape)
        for spec, shape in zip(results, shapes, strict=True)
    ]
    if got != want:
        raise PlanError(
            f"{op.name} ({op.target}) under rule '{op.rule}' gives local shapes "
            f"{got}, its specs say {want}",
            fix="its row needs a `shape` mark or a local form "
            "(docs/howto/add_an_op.md)",
        )


def _local_bodies(call: LocalCall, args: Any, axes: Mapping[str, Axes]) -> Any:
    """Return the arguments with local bodies in place of the global ones; the bodies
    are appended."""
    bodies = inside_of(call.node)
    assert bodies is not None
    count = iter(range(len(bodies.programs)))

    def local(node: fx.Node) -> fx.Node:
        if body_of(node) is None:
            return node
        body = _local_body(call.build, bodies, next(count), axes)
        return new_body(call.build, node, body, call.node.name)

    return fx.node.map_arg(args, local)


def _local_body(
    build: Builder, bodies: Inside, b: int, axes: Mapping[str, Axes]
) -> fx.GraphModule:
    """Return a body in local shapes. ``axes``: factor of the call that runs it -> the
    axes that split it."""
    program, body = bodies.programs[b], bodies.ties.bodies[b]
    inner = Builder(fx.Graph(), build.fake_mode, build.mesh)
    op_of = {op.node: op for op in program.ops}
    copies: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        op = op_of.get(node)
        if op is not None:
            strategy = bodies.strategy(b, op, axes)
            with inner.at(node):
                copies[node] = local_op(
                    inner, node, op, program, strategy, copies.__getitem__
                )
            continue
        if node.op == "output":
            results = fx.node.map_arg(node.args, partial(_result, inner, copies))
            inner.graph.output(*results).meta = dict(node.meta)
            continue
        copy = copies[node] = copied_node(inner.graph, node, copies)
        if node.op == "placeholder" and (node, 0) in program.value_of:
            spec = Spec.of(bodies.axes_of(program.value_of[node, 0], b, axes))
            copy.meta["val"] = local_like(
                node.meta["val"], spec, build.mesh, build.fake_mode
            )
    inner.graph.eliminate_dead_code()
    inner.graph.lint()
    return module_of(body, inner.graph)


def _result(build: Builder, copies: Mapping[fx.Node, Any], node: fx.Node) -> fx.Node:
    """Return the local result of a body in the memory layout of the global one: the
    calls that run bodies refuse slices of tensors."""
    copy, value = copies[node], node.meta.get("val")
    with build.at(node):
        is_tensor = isinstance(value, torch.Tensor)
        return restrided(build, copy, value) if is_tensor else copy


def copied_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any]) -> Any:
    """Return the copy of a node that is no op: of an item of an op, the node that gives
    it."""
    item = node.target is operator.getitem
    results: Any = copies[node.args[0]] if item else None
    if isinstance(results, tuple):
        return results[node.args[1]]
    copy = graph.node_copy(node, copies.__getitem__)
    copy.meta.pop("tensor_meta", None)
    if item:
        copy.meta["val"] = results.meta["val"][node.args[1]]
    return copy
