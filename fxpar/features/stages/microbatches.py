"""Cuts the batch into parts that one rank computes one after the other.

A microbatch is an axis in time: the factor rules that split a program over ranks say
which of its values follow the batch. In: a local graph with its steps, after the mesh
was decided. It is planned once more, over the one axis ``TIME`` whose places are the
parts, and partitioned; then every op on a part has one node for each part, and each
collective over ``TIME`` becomes ops that join the parts: a sum is accumulated, and
communicated once. Out: a local graph of the same inputs and results. Ops that need all
parts (statistics over the batch) wait for them; other than that one part is done before
the next one begins, so that its activations can be freed. Never: communicates, or
changes a number except by the order of sums.

Sources: GSPMD (arXiv 2105.04663) section 3.3; GPipe (arXiv 1811.06965) section 2.2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.features.stages.assign_stages import viewed_value
from fxpar.features.stages.rows_of_parts import NOTED, rows_of_parts
from fxpar.features.stages.sums_of_parts import accumulate_products
from fxpar.graph import collective_nodes as steps
from fxpar.graph.builder import OURS, PART, STAGE, Builder, copy_of
from fxpar.passes.localize import insert_reshards, partition
from fxpar.passes.moved_rows import exchanged
from fxpar.sharding import rank_ints
from fxpar.sharding.candidates import parts_of
from fxpar.sharding.decide import Decision, decide_in_time, whole_in_time
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program, demand, user_line
from fxpar.sharding.propagate.conventions import TIME, batch_inputs, plain_inputs
from fxpar.sharding.read_program import read
from fxpar.sharding.reshard.steps import MASKED
from fxpar.sharding.row_moves import Exchange

aten = torch.ops.aten

_UNEVEN = "the batch is not cut, since shards of some dim are unequal"

# Sums in these types are accumulated in float32.
_NARROW = (torch.bfloat16, torch.float16)


def cut_microbatches(
    graph: fx.Graph,
    decision: Decision,
    parts: int,
    fake_mode: Any,
    *,
    required: bool,
) -> tuple[fx.Graph, tuple[str, ...]]:
    """Return the graph with its batch in ``parts``, and notes on the cut.

    If ``parts`` does not divide the rows, the largest smaller number that does is
    taken; where some shards are larger than others the batch stays whole. Unless
    ``required``, there are as many parts as possible, and it is no error if no input
    holds a batch; else that raises PlanError.
    """
    if not decision.is_even:
        return graph, (f"microbatches={parts}: {_UNEVEN}",)
    whole, graph = graph, _without_reshards(graph)
    program = whole_in_time(read(graph, decision.program.signature))
    batch = _batch_values(program, decision.program)
    if not batch and any(v.shape[:1] == (1,) for v in plain_inputs(decision.program)):
        return whole, (f"microbatches={parts}: a batch of one row is not cut",)
    if not batch and not required:
        return whole, ("the batch is not cut: no input holds one",)
    if not batch:
        raise PlanError(
            f"microbatches={parts}: no input holds a batch",
            fix="feed a tensor whose dim 0 is the batch, mend the graph break before "
            "this graph (TORCH_LOGS=graph_breaks shows it), or set microbatches=1",
        )
    rows = min(program.values[v].shape[0] for v in batch)
    count = parts_of(rows, parts)
    notes = list[str]()
    if count < parts and required:
        notes.append(
            f"microbatches: {rows} rows on a rank do not divide into {parts} parts, "
            f"and are cut into {count}"
        )
    if count == 1:
        return whole, tuple(notes)
    gathered_rows = rows_of_parts(graph, decision.mesh, count)
    gathered_rows.mark(decision.mesh)
    time_decision = _decide_parts(graph, decision, count)
    if not gathered_rows.is_cut_along(time_decision, TIME):
        gathered_rows.unmark()
        time_decision = _decide_parts(graph, decision, count)
    if not time_decision.is_even:
        return whole, (f"microbatches={parts}: {_UNEVEN}",)
    in_time = partition(insert_reshards(graph, time_decision), time_decision, fake_mode)
    _accumulate_by_stage(in_time)
    unrolled = _Unroller(count, decision.mesh, fake_mode)
    unrolled.run(in_time)
    notes += unrolled.notes()
    in_parts = _ordered(unrolled)
    accumulate_products(in_parts)
    return in_parts, tuple(notes)


def _decide_parts(graph: fx.Graph, decision: Decision, count: int) -> Decision:
    """Return the decision for the graph over ``count`` places in time."""
    program = whole_in_time(read(graph, decision.program.signature))
    batch = _batch_values(program, decision.program)
    fit = (v for v in batch if program.values[v].shape[0] % count == 0)
    return decide_in_time(program, count, fit)


def _accumulate_by_stage(graph: fx.Graph) -> None:
    """Accumulate the operands of sums of two stages' values before the sum, as for
    gradients of a tied weight: so they cross once, not with every part. In place."""
    queue = graph.find_nodes(op="call_function", target=steps.all_reduce)
    while queue:
        node = queue.pop()
        total = node.args[0]
        if node.args[1:] != ("sum", (TIME,)) or not _is_sum_over_stages(total):
            continue
        with graph.inserting_before(node):
            pair = tuple(
                graph.call_function(node.target, (x, *node.args[1:]))
                for x in total.args
            )
            sum_of_pair = graph.call_function(total.target, pair)
        for step in (*pair, sum_of_pair):
            step.meta = dict(node.meta)
        sum_of_pair.meta[STAGE] = total.meta[STAGE]
        node.replace_all_uses_with(sum_of_pair)
        graph.erase_node(node)
        graph.erase_node(total)
        queue += pair


def _is_sum_over_stages(node: fx.Node) -> bool:
    """Return whether a sum that is read once is of values of two stages, of one
    shape."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.users) > 1:
        return False
    homes = [
        viewed_value(x).meta.get(STAGE) for x in node.args if isinstance(x, fx.Node)
    ]
    shapes = {x.meta["val"].shape for x in (node, *node.all_input_nodes)}
    in_two_stages = len(homes) == 2 and None not in homes and homes[0] != homes[1]
    return in_two_stages and len(shapes) == 1


def _without_reshards(graph: fx.Graph) -> fx.Graph:
    """Return a copy in which no node belongs to a reshard, since there will be others.
    Steps keep their metadata under ``NOTED``."""
    graph = copy_of(graph)
    for node in graph.nodes:
        step_meta = {key: node.meta.pop(key) for key in OURS if key in node.meta}
        if steps.is_step(node):
            node.meta[NOTED] = step_meta
        for key in ("fxpar_op", "fxpar_value"):
            node.meta.pop(key, None)
    return graph


def _batch_values(program: Program, planned: Program) -> list[int]:
    """Return the values that hold a rank's rows of the batch: inputs, or slices of
    inputs that a rank has whole. ``planned``: the program in global shapes, of the same
    inputs."""
    batch = set(batch_inputs(planned, fed=True))
    places = [i for i, v in enumerate(planned.inputs) if v in batch]
    queue = [v for i in places if (v := program.inputs[i]) is not None]
    values: list[int] = []
    while queue:
        v = queue.pop()
        readers = [program.ops[index] for index, _ in program.uses[v]]
        slices = (op for op in readers if op.node.target is steps.slice_)
        cuts = [op for op in slices if op.node.args[1] == 0]
        queue += [result for op in cuts for result in op.results]
        if len(cuts) < len(readers):
            values.append(v)
    return sorted(values)


# Unrolling


@dataclass
class _Unroller:
    """Unrolls a graph over ``TIME`` to one in which every part has ops of its own."""

    # How many parts.
    parts: int
    # The mesh without ``TIME``.
    mesh: Mesh
    # The mode in which the values of new nodes are computed.
    fake_mode: Any
    # The new graph.
    graph: fx.Graph = field(default_factory=fx.Graph)
    # Node of the old graph -> its value in each part, or the one that all parts share.
    values: dict[fx.Node, Any] = field(default_factory=dict)
    # Sums that continue the sum of the parts before.
    sums: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.build = Builder(self.graph, self.fake_mode, self.mesh)

    def run(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target in rank_ints.PLACES and TIME in node.args[1]:
                self.values[node] = [self._place(node, p) for p in range(self.parts)]
            elif steps.is_step(node) and steps.axes_of(node) == (TIME,):
                self._join(node)
            elif node.op != "output" and self._is_shared(node):
                self.values[node] = self._copy(node, 0)
            elif node.op != "output":
                self.values[node] = [
                    self.of_part(p, functools.partial(self._copy, node, p))
                    for p in range(self.parts)
                ]
            else:
                assert self._is_shared(node), "results are whole in time"
                self._copy(node, 0)

    def _join(self, node: fx.Node) -> None:
        """Replace a step over time. The new nodes belong to the stage of its
        operand."""
        operands = self._each(node.args[0])
        join = functools.partial(_JOINS[node.target], self, operands, *node.args)
        with self.build.at(node):
            self.values[node], added = self._added(join)
        home = node.meta[STAGE] = viewed_value(node.args[0]).meta.get(STAGE)
        for step in added:
            step.meta[STAGE] = home

    def _added(self, make_node: Callable[[], Any]) -> tuple[Any, list[fx.Node]]:
        """Return what ``make_node`` makes, and the nodes that it adds."""
        before = next(iter(reversed(self.graph.nodes)), None)
        value = make_node()
        nodes = reversed(self.graph.nodes)
        return value, list(itertools.takewhile(lambda x: x is not before, nodes))

    def of_part(self, part: int, make_node: Callable[[], Any]) -> Any:
        """Return what ``make_node`` makes; the nodes it adds belong to ``part``."""
        value, added = self._added(make_node)
        for node in added:
            node.meta[PART] = part
        return value

    def _is_shared(self, node: fx.Node) -> bool:
        return not any(isinstance(self.values[n], list) for n in node.all_input_nodes)

    def _each(self, node: Any) -> list[fx.Node]:
        """Return the value in each part."""
        value = self.values[node]
        return value if isinstance(value, list) else [value] * self.parts

    def _copy(self, node: fx.Node, part: int) -> fx.Node:
        copy = self.graph.node_copy(
            node, lambda n: x[part] if isinstance(x := self.values[n], list) else x
        )
        copy.meta.update(copy.meta.pop(NOTED, {}))
        return copy

    def _place(self, node: fx.Node, part: int) -> Any:
        """Return the value for a part, on this rank, of an op of
        ``rank_ints.PLACES``."""
        axes = node.args[1]
        if axes == (TIME,):
            return rank_ints.place(node.target, node.args, part)
        _, _, *numbers = node.args
        is_added = node.target is rank_ints.offset and len(numbers) == 2
        if axes[-1] != TIME or not is_added:
            raise PlanError(
                f"{node.name} numbers rows over {'+'.join(axes)}, which "
                "microbatches cannot",
                where=user_line(node),
                fix="set microbatches=1",
            )
        stride, base = numbers
        return self.build.offset(axes[:-1], stride * self.parts, base + stride * part)

    # These replace collectives over time.

    def total(self, values: Sequence[fx.Node], op: str) -> fx.Node:
        """Return the reduction of the parts, accumulated in their order."""
        build, dtype = self.build, values[0].meta["val"].dtype
        convert = torch.ops.prims.convert_element_type.default
        target = _REDUCTIONS["or" if dtype == torch.bool and op == "sum" else op]
        total, accumulates_wide = values[0], target is _ADD and dtype in _NARROW
        if accumulates_wide:
            total = self.of_part(0, lambda: build.call(convert, total, torch.float32))
        for p, value in enumerate(values[1:], 1):
            add = functools.partial(build.call, target, total, value)
            total = self.of_part(p, add)
            self.sums.add(total)
        if op == "avg":
            total = build.call(aten.div.Scalar, total, self.parts)
        return build.call(convert, total, dtype) if accumulates_wide else total

    def slices(self, x: fx.Node, dim: int) -> list[fx.Node]:
        """Return the slice of ``dim`` that each part has."""
        size = x.meta["val"].shape[dim] // self.parts

        def piece(p: int) -> fx.Node:
            cut = self.build.call(aten.slice.Tensor, x, dim, p * size, (p + 1) * size)
            return self.build.contiguous(cut)

        return [self.of_part(p, functools.partial(piece, p)) for p in range(self.parts)]

    def joined(self, values: Sequence[fx.Node], dim: int) -> fx.Node:
        """Return all parts in one value."""
        return self.build.call(aten.cat.default, list(values), dim)

    def moved(self, values: Sequence[fx.Node], text: str) -> Any:
        """Return the rows of each part after they are moved; one value if all have the
        same."""
        time, exchange = Mesh(((TIME, self.parts),)), Exchange.parse(text)
        moved_rows = exchanged(self.build.call, values, exchange, time)
        return moved_rows if any(exchange.split_targets) else moved_rows[0]

    def identities(self, values: Sequence[fx.Node], op: str) -> list[fx.Node]:
        """Return the value for the first part, the reduction's identity for the
        others."""
        if op not in MASKED:
            return list(values)
        full = functools.partial(
            self.build.call, aten.full_like.default, values[0], int(op == "product")
        )
        fills = [self.of_part(p, full) for p in range(1, self.parts)]
        return [values[0], *fills]

    def notes(self) -> list[str]:
        """Return the note that the batch is cut, and where parts wait for one
        another."""
        waits = [node for node in self.joins() if node.all_input_nodes]
        text = f"in parts: the batch is cut in {self.parts} microbatches"
        if waits:
            line = next(filter(None, map(user_line, waits)), waits[0].name)
            text += f"; they wait for one another at {len(waits)} ops, first at {line}"
        return [text]

    def joins(self) -> list[fx.Node]:
        """Return the values of all parts that are made of parts and that some op on a
        part reads: these come before what reads them in any part."""
        from_parts = {node for node in self.graph.nodes if PART in node.meta}
        out = []
        for node in self.graph.nodes:
            if not from_parts.isdisjoint(node.all_input_nodes):
                from_parts.add(node)
            crosses = node in from_parts and any(
                user.meta.get(PART) not in (None, node.meta.get(PART))
                and not (user in self.sums and user.args[0] is node)
                for user in node.users
            )
            if crosses:
                out.append(node)
        return out


_ADD = torch.ops.fxpar.accumulate.default

_REDUCTIONS = steps.COMBINE | {"sum": _ADD, "avg": _ADD}

# Step -> (unroller, its operand in each part, its own arguments) -> its value in each
# part, or the one of all.
_JOINS: dict[Any, Callable[..., Any]] = {
    steps.slice_: lambda un, xs, _, dim, axes: un.slices(xs[0], dim),
    steps.mask: lambda un, xs, _, op, axes: un.identities(xs, op),
    steps.all_reduce: lambda un, xs, _, op, axes: un.total(xs, op),
    steps.reduce_scatter: lambda un, xs, _, dim, op, axes: un.slices(
        un.total(xs, op), dim
    ),
    steps.all_gather: lambda un, xs, _, dim, axes: un.joined(xs, dim),
    steps.all_to_all: lambda un, xs, _, source, target, axes: un.slices(
        un.joined(xs, source), target
    ),
    steps.permute: lambda un, xs, _, sources, axes: [xs[i] for i in sources],
    steps.move_rows: lambda un, xs, _, text, axes: un.moved(xs, text),
}


def _ordered(unrolled: _Unroller) -> fx.Graph:
    """Return the unrolled graph with one part after the other: first the inputs, then
    what parts wait for and its operands, then part by part, then all others."""
    graph = unrolled.graph
    *nodes, output = graph.nodes
    order: dict[fx.Node, None] = dict.fromkeys(
        node for node in nodes if node.op == "placeholder"
    )
    demand(unrolled.joins(), order)
    for part in range(unrolled.parts):
        demand((n for n in nodes if n.meta.get(PART) == part), order)
    demand(nodes, order)
    for node in order:
        output.prepend(node)
    graph.eliminate_dead_code()
    graph.lint()
    return graph
