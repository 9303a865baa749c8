"""Assigns each node of a local graph to a stage.

In: a local graph with its steps, forward and backward in one, of a program that is cut
along a pipeline axis. Out: the same graph; ``meta[STAGE]`` of a node is its
``StageHome``, if it has one. Nodes of the forward and of the backward (``Kinds``) each
belong to one stage; nodes of all places are the update, writes to inputs, and random
draws. All others have no home, and run wherever they are read: nodes computed from
weights alone, from the batch alone, or from constants, and views. The forward is cut
where it is cheapest (``search.price_stages``), in its order. An op of the backward
belongs to the stage of the op that it differentiates or, where autograd does not say,
to a stage that has the values and weights that it reads. Never: a stage of the forward
that reads from a later one, or an op of the backward at a later stage than what it
continues.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpar._torch.objects import tensors_in
from fxpar.errors import PlanError
from fxpar.graph import collective_nodes as steps
from fxpar.graph.builder import STAGE
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import bytes_of, flops_of, is_view, kernel_seconds
from fxpar.sharding.hints import pins_unfit
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import is_draw, op_facts_of
from fxpar.sharding.pipeline_axis import Pipeline, PipelineStage
from fxpar.sharding.program import Program, backward_of, followed, phase_of
from fxpar.sharding.propagate.conventions import batch_inputs
from fxpar.sharding.search.price_stages import between_ops, cut_chain

FORWARD, BACKWARD, EVERYWHERE = "forward", "backward", "everywhere"


class StageHome(NamedTuple):
    """Says where a node runs."""

    # FORWARD or BACKWARD of a stage; EVERYWHERE: at all places.
    phase: str
    stage: int


ALL = StageHome(EVERYWHERE, -1)


def home_of(node: fx.Node) -> StageHome | None:
    """Return the home of a node; None: it runs wherever it is read."""
    home: StageHome | None = node.meta.get(STAGE)
    return home


def home_in_stage(node: fx.Node) -> StageHome | None:
    """Return the home of a node of one stage; None for other nodes."""
    home = home_of(node)
    return None if home == ALL else home


def is_loose_view(node: fx.Node) -> bool:
    """Return whether a node only shows its operand, all of it, in another way."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if steps.is_step(node) or len(node.all_input_nodes) != 1 or not is_view(node):
        return False
    operands = tensors_in(node.all_input_nodes[0].meta.get("val"))
    results = tensors_in(node.meta.get("val"))
    return (
        len(results) == len(operands) == 1 and results[0].numel() >= operands[0].numel()
    )


def viewed_value(node: fx.Node) -> fx.Node:
    """Return the value that a chain of such views shows."""
    while is_loose_view(node):
        node = node.all_input_nodes[0]
    return node


class Kinds:
    """Sorts nodes into ``forward``, ``backward`` and ``everywhere``; all others run
    where they are read."""

    def __init__(self, graph: fx.Graph, program: Program) -> None:
        self.graph = graph
        self.forward: set[fx.Node] = set()
        self.backward: set[fx.Node] = set()
        self.everywhere: set[fx.Node] = set()
        placeholders = graph.find_nodes(op="placeholder")
        declared = program.signature.inputs
        inputs = list(zip(placeholders, declared, program.inputs, strict=True))
        # Inputs that are gradients of results.
        self.tangents = {node for node, x, _ in inputs if x.kind == "tangent"}
        batch_values = set(batch_inputs(program))
        batch = {node for node, _, v in inputs if v is not None and v in batch_values}
        of_batch = batch or {node for node, x, _ in inputs if x.kind == "input"}
        # Inputs that are weights, and their names.
        self.weights: dict[fx.Node, str] = {}
        for node, x, _ in inputs:
            value = node.meta.get("val")
            floating = tensors_in(value) and value.dtype.is_floating_point
            is_plain = x.kind == "input" and node not in of_batch
            if x.kind == "parameter" or (is_plain and floating):
                self.weights[node] = x.name
        tagged, of_weights = backward_of(graph), set(self.weights)
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            read = node.all_input_nodes
            of_batch.update([node] if not of_batch.isdisjoint(read) else [])
            of_weights.update([node] if not of_weights.isdisjoint(read) else [])
            staged = self._kind_by_operands(node, tagged)
            if staged is not None:
                staged.add(node)
            elif node in of_batch and not is_loose_view(node):
                weighed = node in of_weights or flops_of(node)
                self.forward.update([node] if weighed else [])

    def _kind_by_operands(
        self, node: fx.Node, tagged: Collection[fx.Node]
    ) -> set[fx.Node] | None:
        """Return the kind of a node if its operands decide it; None if they do not."""
        if steps.is_step(node) or node.target is operator.getitem:
            # It is of the kind of the value that it moves, or takes a part of.
            source: Any = node.args[0]
            return self.kind_of(viewed_value(source))
        writes = op_facts_of(node.target).mutates
        if phase_of(node) == "update" or writes or is_draw(node):
            return self.everywhere
        read = set(map(viewed_value, node.all_input_nodes))
        if is_loose_view(node):
            return None
        sources = [self.tangents, self.backward, *[self.forward] * (node in tagged)]
        is_backward = not all(kind.isdisjoint(read) for kind in sources)
        return self.backward if is_backward else None

    def kind_of(self, node: fx.Node) -> set[fx.Node] | None:
        """Return the kind that a node is of; None: it runs where it is read."""
        kinds = (self.forward, self.backward, self.everywhere)
        return next((kind for kind in kinds if node in kind), None)


@dataclass(frozen=True)
class StageCosts:
    """Prices ops and messages, to cut stages by."""

    # The hardware whose prices are used.
    hardware: Hardware
    # The mesh with the hardware's links.
    mesh: Mesh
    # The axis of stages.
    pipeline: Pipeline
    # How many microbatches a step has.
    microbatches: int
    # Steps that are sent once for all microbatches.
    once: frozenset[fx.Node] = frozenset()

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds that a node takes for one microbatch."""
        if node in self.once:
            return 0.0
        if steps.is_step(node):
            return steps.step_seconds(node, self.mesh, 1 / self.microbatches)
        return kernel_seconds(node, self.hardware, 1 / self.microbatches)

    def crossing(self, nbytes: float) -> float:
        """Return the seconds to send ``nbytes`` of a batch to the next stage, a part at
        a time."""
        link = self.mesh.link(self.pipeline.axis)
        return collectives.message(link, nbytes / self.microbatches)


def assign_stages(
    graph: fx.Graph,
    program: Program,
    priced: StageCosts,
    places: Sequence[int],
    pinned: Mapping[str, int],
    begins_at: Sequence[str],
) -> tuple[PipelineStage, ...]:
    """Give nodes their homes, in place; return the stages. ``places``: the place of
    each stage along the pipeline axis; ``pinned``: parameter -> the stage of its
    readers; ``begins_at``: the ops that stages after the first begin at, if that was
    decided.

    Raises PlanError if there is nothing to cut, HintError if it cannot be cut so.
    """
    kinds = Kinds(graph, program)
    chain = [
        n
        for n in graph.nodes
        if n in kinds.forward and n.target is not operator.getitem
    ]
    count = len(places)
    if len(chain) < count:
        axis, ops = priced.pipeline.axis, len(chain)
        raise PlanError(
            f"{axis}={priced.pipeline.places}: the program has {ops} ops on the batch, "
            f"too few for {count} stages",
            fix=f"leave {axis} out of the mesh, or give the ranks another axis",
        )
    priced = replace(priced, once=_gradient_steps(kinds))
    backward = [n for n in graph.nodes if n in kinds.backward]
    total = sum(map(priced.seconds, chain)) or 1.0
    share = 1.0 + sum(map(priced.seconds, backward)) / total
    seconds = [priced.seconds(node) * share for node in chain]
    trains = 2 if backward else 1
    crossing = [trains * priced.crossing(n) for n in _crossing_bytes(chain, kinds)]
    crossing = between_ops(chain, crossing, count)
    begins = _places_of(chain, program, begins_at)
    if len(begins) != count - 1:
        pins = _pins(chain, kinds, pinned)
        speeds, parts = priced.pipeline.speeds(places), priced.microbatches
        begins = cut_chain(seconds, crossing, count, parts, pins, speeds=speeds)
    if len(begins) < count - 1:
        raise pins_unfit(pinned, len(chain), count)
    cuts = (*begins, len(chain))
    stage = 0
    for i, node in enumerate(chain):
        while i >= cuts[stage]:
            stage += 1
        node.meta[STAGE] = StageHome(FORWARD, stage)
    for node in graph.nodes:
        if node in kinds.everywhere:
            node.meta[STAGE] = ALL
        elif node in kinds.forward and node.target is operator.getitem:
            node.meta[STAGE] = viewed_value(node.args[0]).meta[STAGE]
    _assign_backward(kinds, count)
    begin_names = [_origin(chain[i]) for i in (0, *begins)]
    return _stages(priced, places, kinds, begin_names)


def _places_of(
    chain: Sequence[fx.Node], program: Program, begins_at: Sequence[str]
) -> tuple[int, ...]:
    """Return where in the chain ops of the program begin, by their names: at the op, or
    the first after it that the rank has a part of; empty if that is not a cut."""
    order = {op.name: op.index for op in program.ops}
    indices = [order.get(_origin(node), -1) for node in chain]
    begins = []
    for name in begins_at:
        later = (i for i, index in enumerate(indices) if index >= order.get(name, 0))
        begins.append(next(later, 0))
    return tuple(begins) if begins and begins == sorted({*begins} - {0}) else ()


def _origin(node: fx.Node) -> str:
    """Return the name of the op of the program that a rank's node comes from."""
    return str(node.meta.get("fxpar_origin", node.name))


def _pins(
    chain: Sequence[fx.Node], kinds: Kinds, pinned: Mapping[str, int]
) -> dict[int, int]:
    """Return the position of each op that reads a pinned parameter -> its stage, the
    last one if it reads parameters of several."""
    pins = {}
    for i, node in enumerate(chain if pinned else ()):
        names = (kinds.weights[weight] for weight in _weights_of(node, kinds))
        stages = [pinned[name] for name in names if name in pinned]
        if stages:
            pins[i] = max(stages)
    return pins


def _gradient_steps(kinds: Kinds) -> frozenset[fx.Node]:
    """Return the steps on gradients of weights: only results or the update are computed
    from them. The gradients are accumulated first."""
    ends: set[fx.Node] = set()
    for node in reversed(kinds.graph.nodes):
        facts = op_facts_of(node.target)
        is_cheap = facts.moves or facts.reshapes or facts.casts or facts.scales
        passes = node in kinds.backward and (is_cheap or steps.is_step(node))
        is_read_at_end = all(
            x in ends or x.op == "output" or x in kinds.everywhere for x in node.users
        )
        if (passes or is_loose_view(node)) and is_read_at_end:
            ends.add(node)
    return frozenset(n for n in ends if steps.is_step(n))


def _crossing_bytes(chain: Sequence[fx.Node], kinds: Kinds) -> list[int]:
    """Return the bytes that are sent if a stage begins at each op: of values that are
    made before it and read at it or after it, in the forward."""
    place = {node: i for i, node in enumerate(chain)}
    for node in kinds.graph.nodes:
        if node in kinds.forward and node.target is operator.getitem:
            place[node] = place[viewed_value(node.args[0])]
    last: dict[fx.Node, int] = {}
    for node in reversed(kinds.graph.nodes):
        at = place.get(node, last.get(node, -1))
        if node in place or is_loose_view(node):
            for read in node.all_input_nodes:
                last[read] = max(last.get(read, -1), at)
    changes = [0] * (len(chain) + 1)
    for node, i in place.items():
        # Of several results the items cross.
        if last.get(node, -1) > i and isinstance(node.meta.get("val"), torch.Tensor):
            changes[i + 1] += bytes_of(node)
            changes[last[node] + 1] -= bytes_of(node)
    out, total = [], 0
    for i in range(len(chain)):
        total += changes[i]
        out.append(total)
    return out


def _assign_backward(kinds: Kinds, count: int) -> None:
    every = frozenset(range(count))
    stages_with = _stages_with_value(kinds, every)
    # By the number that autograd gives to an op and to its derivative, the op's stage.
    forward: dict[Any, int] = {}
    for node in kinds.graph.nodes:
        home = home_of(node)
        if home is not None and home.phase == FORWARD:
            forward.setdefault(node.meta.get("seq_nr"), home.stage)
    forward.pop(None, None)
    for node in kinds.graph.nodes:
        if node in kinds.backward:
            source: Any = node.args[0] if node.args else None
            if node.target is operator.getitem or steps.is_step(node):
                base = viewed_value(source)
                node.meta[STAGE] = base.meta[STAGE]
                continue
            limit, common = count - 1, every
            for read in map(viewed_value, node.all_input_nodes):
                home = home_of(read)
                if home is not None and home.phase == BACKWARD:
                    limit = min(limit, home.stage)
                else:
                    common = common & stages_with.get(read, every)
            own = forward.get(node.meta.get("seq_nr"))
            candidates = [at for at in common if at <= limit]
            stage = max(candidates, default=limit) if own is None else min(own, limit)
            node.meta[STAGE] = StageHome(BACKWARD, stage)


def _stages_with_value(
    kinds: Kinds, every: frozenset[int]
) -> dict[fx.Node, frozenset[int]]:
    """Return the stages that have a value in the forward, because they make or read it.
    A value that is computed from weights is at the stages that have all of them."""
    read: dict[fx.Node, set[int]] = {}
    for node in reversed(kinds.graph.nodes):
        home = home_of(node)
        if node in kinds.backward or node in kinds.everywhere or node.op == "output":
            continue
        stages = {home.stage} if home is not None else read.get(node, set())
        for operand in node.all_input_nodes:
            read.setdefault(operand, set()).update(stages)
    stages_with: dict[fx.Node, frozenset[int]] = {}
    for node in kinds.graph.nodes:
        home = home_of(node)
        if node in kinds.weights:
            stages_with[node] = frozenset(read.get(node, ())) or every
        elif home is not None and home.phase == FORWARD:
            stages_with[node] = frozenset((home.stage, *read.get(node, ())))
        elif node.op == "call_function" and home is None:
            common = every
            for operand in node.all_input_nodes:
                common = common & stages_with.get(operand, every)
            stages_with[node] = common
    return stages_with


def _stages(
    priced: StageCosts,
    places: Sequence[int],
    kinds: Kinds,
    begin_names: Sequence[str],
) -> tuple[PipelineStage, ...]:
    ops: list[list[str]] = [[] for _ in places]
    seconds: list[dict[str, float]] = [{FORWARD: 0.0, BACKWARD: 0.0} for _ in places]
    read: list[dict[fx.Node, str]] = [{} for _ in places]
    sent, speeds = [0] * len(places), priced.pipeline.speeds(places)
    for node in kinds.graph.nodes:
        home = home_in_stage(node)
        if home is None:
            continue
        ops[home.stage].append(node.name)
        seconds[home.stage][home.phase] += priced.seconds(node) / speeds[home.stage]
        for weight in _weights_of(node, kinds):
            read[home.stage][weight] = kinds.weights[weight]
        readers = followed(node, lambda x: x.users, is_loose_view)
        reading_stages = {at.stage for at in map(home_in_stage, readers) if at}
        reading_stages.discard(home.stage)
        sent[home.stage] += bytes_of(node) * len(reading_stages) // priced.microbatches
    return tuple(
        PipelineStage(
            i,
            place,
            tuple(ops[i]),
            tuple(read[i].values()),
            sum(map(bytes_of, read[i])),
            sent[i],
            begin_names[i],
            seconds[i][FORWARD],
            seconds[i][BACKWARD],
        )
        for i, place in enumerate(places)
    )


def _weights_of(node: fx.Node, kinds: Kinds) -> list[fx.Node]:
    """Return the weights that a node reads, through nodes that run where they are
    read."""
    out: dict[fx.Node, None] = {}
    stack, seen = [*node.all_input_nodes], set[fx.Node]()
    while stack:
        read = stack.pop()
        if read in seen or kinds.kind_of(read) is not None:
            continue
        seen.add(read)
        if read in kinds.weights:
            out[read] = None
        stack += read.all_input_nodes
    return list(out)
