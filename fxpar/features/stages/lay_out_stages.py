"""Lays out stages in the order of a schedule, with the messages between them.

In: a local graph, its batch in parts or not, whose nodes know their homes
(``assign_stages``) and parts (``microbatches``), and the order of actions. Out: a new
graph of the same inputs and results, still one text for all ranks: ``meta[PLACE]`` of a
node says at which place along the pipeline axis it runs; where a value crosses to
another place there is a ``fxpar::transfer``, where all need it a ``fxpar::spread``.

Every rank runs the nodes of its place in the order of this one graph, in which a
transfer comes after the node of its value. Messages are thus sent and received in one
order, and no rank waits for a message that comes after one it has yet to send. Never: a
deadlock, whatever the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.features.stages.assign_stages import (
    ALL,
    BACKWARD,
    home_in_stage,
    home_of,
)
from fxpar.graph import collective_nodes as steps
from fxpar.graph import pipeline_ops as messages
from fxpar.graph.builder import PART, PLACE, STAGE, Builder
from fxpar.graph.custom_ops import group_name
from fxpar.graph.pipeline_ops import EVERY
from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.cost.op import bytes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import Pipeline
from fxpar.sharding.pipeline_schedule import Action
from fxpar.sharding.program import demand, descendants, followed

ours = torch.ops.fxpar


def lay_out_stages(
    graph: fx.Graph,
    pipeline: Pipeline,
    places: Sequence[int],
    actions: Sequence[Action],
    fake_mode: Any,
    mesh: Mesh,
) -> fx.Graph:
    """Return the graph of all stages. ``places``: the place of each stage; ``actions``:
    in the order in which they begin."""
    order = _ordered(graph, actions)
    layout = _StageLayout(graph, places, order, fake_mode, mesh, pipeline.axis)
    layout.run()
    layout.staged.lint()
    return layout.staged


# The order


def _ordered(graph: fx.Graph, actions: Sequence[Action]) -> list[fx.Node]:
    """Return the nodes, each after all that it reads: inputs, nodes of all places that
    no stage feeds, the actions in turn, nodes of all places that stages feed."""
    nodes = [n for n in graph.nodes if n.op != "output"]
    groups = _groups(nodes, actions)
    order: dict[fx.Node, None] = dict.fromkeys(
        n for n in nodes if n.op == "placeholder"
    )
    staged = descendants(filter(home_in_stage, nodes))
    demand((n for n in nodes if home_of(n) == ALL and n not in staged), order)
    for action in actions:
        demand(groups[action], order)
        _append_shared(groups[action], order)
    demand((n for n in nodes if home_of(n) is not None), order)
    demand(nodes, order)
    return list(order)


def _groups(
    nodes: Sequence[fx.Node], actions: Sequence[Action]
) -> Mapping[Action, list[fx.Node]]:
    """Return the nodes of each action; nodes that belong to all parts are in none."""
    parts_of_inputs = [action for action in actions if action.kind == schedules.INPUTS]
    parts = {action.part for action in actions}
    out: dict[Action, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        part = node.meta.get(PART, 0 if len(parts) == 1 else None)
        if (home := home_in_stage(node)) is None or part is None:
            continue
        kind = schedules.BACKWARD if home.phase == BACKWARD else schedules.FORWARD
        out[Action(home.stage, kind, part)].append(node)
    for action in parts_of_inputs:
        backward = out.pop(action._replace(kind=schedules.BACKWARD), [])
        awaited = _awaited(backward) if backward else {}
        out[action] = [*awaited]
        weights = action._replace(kind=schedules.WEIGHTS)
        out[weights] = [node for node in backward if node not in awaited]
    return out


def _awaited(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes of a backward that stages before it wait for; all, where none
    waits."""
    own, home = set(nodes), home_in_stage(nodes[0])
    assert home is not None, "a backward belongs to a stage"

    def has_no_home(x: fx.Node) -> bool:
        return home_of(x) is None and x.op != "output"

    def is_awaited(node: fx.Node) -> bool:
        readers = followed(node, lambda x: x.users, has_no_home)
        waits = (x for x in map(home_of, readers) if x and x.phase == BACKWARD)
        return any(x.stage < home.stage for x in waits)

    ends = list(filter(is_awaited, nodes))
    awaited, stack = set(ends), list(ends)
    while stack:
        for read in followed(stack.pop(), lambda x: x.all_input_nodes, has_no_home):
            if read in own and read not in awaited:
                awaited.add(read)
                stack.append(read)
    return dict.fromkeys(n for n in nodes if n in awaited or not ends)


def _append_shared(placed: Iterable[fx.Node], order: dict[fx.Node, None]) -> None:
    """Append nodes that belong to all parts of a stage and now have all that they
    read."""
    stack = list(placed)
    while stack:
        for user in stack.pop().users:
            shared = PART not in user.meta and user.op != "output"
            ready = all(read in order for read in user.all_input_nodes)
            if shared and home_of(user) != ALL and ready and user not in order:
                order[user] = None
                stack.append(user)


# Places, and what crosses between them


@dataclass
class _StageLayout:
    """Copies each node to where it runs."""

    # The local graph, with a home on each node (``home_of``).
    graph: fx.Graph
    # The place of each stage.
    places: Sequence[int]
    # Nodes in the order in which places run them.
    order: Sequence[fx.Node]
    # The mode of the graph's values.
    fake_mode: Any
    # The mesh of all ranks.
    mesh: Mesh
    # The axis along which stages are placed.
    axis: str
    # The graph that is built.
    staged: fx.Graph = field(default_factory=fx.Graph)
    # (node, place it is needed at) -> its copy, or the value that arrives there.
    value_at: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    # Nodes that all places wait for and that are not sent yet, by the message that they
    # may share.
    waiting: dict[Any, list[fx.Node]] = field(default_factory=dict)
    # Nodes that were sent to all places but not read yet: a message is split only where
    # it is read, so that nothing waits before.
    unread: dict[fx.Node, tuple[Sequence[fx.Node], messages.Arrivals]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.build = Builder(self.staged, self.fake_mode, self.mesh)
        self.group = group_name(self.mesh, (self.axis,))

    def run(self) -> None:
        places_of = self._places_by_node()
        inputs = [node for node in self.order if node.op in ("placeholder", "get_attr")]
        for node in inputs:
            self.value_at[node, EVERY] = self._copy(node, EVERY)
        self._gather_weights(places_of)
        for node in self.order:
            if node.op in ("placeholder", "get_attr"):
                continue
            at = self._place(node)
            if at is not None and self._is_dealt(node):
                self._await(node, at)
            elif at is not None:
                self.value_at[node, at] = self._copy(node, at)
                targets = places_of[node] - {at, EVERY} if at != EVERY else ()
                for target in sorted(targets):
                    self._cross(node, at, target)
                if at != EVERY and EVERY in places_of[node]:
                    self._await(node, at)
        output = self.graph.output_node()
        results = fx.node.map_arg(output.args[0], lambda n: self.at(n, EVERY))
        self.staged.output(results).meta = dict(output.meta)

    def _place(self, node: fx.Node) -> int | None:
        """Return where a node runs; None: wherever it is read."""
        home = home_of(node)
        if home is None:
            return None
        return EVERY if home == ALL else self.places[home.stage]

    def _places_by_node(self) -> Mapping[fx.Node, set[int]]:
        """Return the places at which each node is read."""
        out: dict[fx.Node, set[int]] = defaultdict(set)
        for read in self.graph.output_node().all_input_nodes:
            out[read].add(EVERY)
        for node in reversed(self.order):
            at = self._place(node)
            for read in node.all_input_nodes:
                out[read].update(out[node] if at is None else {at})
        return out

    def at(self, node: fx.Node, place: int) -> fx.Node:
        """Return a node's value at a place."""
        if (node, place) not in self.value_at and node in self.unread:
            self._read(node)
        value = self.value_at.get((node, place)) or self.value_at.get((node, EVERY))
        if value is not None and (node, place) in self.value_at:
            return value
        home = self._place(node)
        if value is not None and (home == EVERY or node.op != "call_function"):
            return value
        if value is not None and self._is_along_stages(node):
            return value
        if self._is_dealt(node):
            self._send_waiting(node)
            self._read(node)
            return self.value_at[node, EVERY]
        if home is None:
            self.value_at[node, place] = self._copy(node, place)
        else:
            self._cross(node, home, place)
        return self.value_at[node, place]

    def _copy(self, node: fx.Node, place: int) -> fx.Node:
        copy = self.staged.node_copy(node, lambda n: self.at(n, place))
        if node.op == "call_function":
            copy.meta[PLACE] = place
        return copy

    def _cross(self, node: fx.Node, source: int, target: int) -> None:
        """Bring the value of a place to another, or to every one."""
        if target == EVERY:
            self._await(node, source)
            self._send_waiting(node)
            self._read(node)
            return
        value, transfer = self.value_at[node, source], ours.transfer.default
        with self.build.at(value):
            self.value_at[node, target] = self._put(
                target, transfer, value, source, target, self.group
            )

    def _put(self, place: int, target: Any, *args: Any) -> fx.Node:
        node = self.build.call(target, *args)
        node.meta[PLACE] = place
        for of_origin in (STAGE, "fxpar_reshard", "fxpar_parameter"):
            node.meta.pop(of_origin, None)
        if target in messages.CROSSINGS:  # once: no backward asks for it again
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return node

    # Values sharded along the axis, and values that all places wait for

    def _is_along_stages(self, node: fx.Node) -> bool:
        return steps.is_step(node) and steps.axes_of(node) == (self.axis,)

    def _is_dealt(self, node: fx.Node) -> bool:
        """Return whether each place takes its part of a stage's value."""
        return home_in_stage(node) is not None and self._is_along_stages(node)

    def _gather_weights(self, places_of: Mapping[fx.Node, set[int]]) -> None:
        """Gather values that are sharded along the axis at the places that read
        them."""
        gathers = [
            node
            for node in self.order
            if self._place(node) is None
            and self._is_along_stages(node)
            and node.target is steps.all_gather
        ]
        places = range(self.mesh.axis_size(self.axis))
        for target in (EVERY, *places):
            reads = [
                node
                for node in gathers
                if target in places_of[node] and (node, EVERY) not in self.value_at
            ]
            for bucket in messages.buckets(reads):
                shards = [[self.at(n.args[0], i) for n in bucket] for i in places]
                dims = [n.args[1] for n in bucket]
                with self.build.at(bucket[0]):
                    gathered = messages.gather_at(
                        self._put, target, shards, dims, self.group
                    )
                for node, value in zip(bucket, gathered, strict=True):
                    self.value_at[node, target] = value

    def _key(self, node: fx.Node) -> Any:
        home = home_of(node)
        assert home is not None, "what is sent has a place"
        place, is_dealt = self.places[home.stage], self._is_dealt(node)
        return place, home.phase, is_dealt, *messages.kind_of(node)

    def _await(self, node: fx.Node, source: int) -> None:
        """Let all places wait for a node's value, which is sent with others, up to some
        bytes."""
        waiting = self.waiting.setdefault(self._key(node), [])
        if node in waiting:
            return
        if self._is_dealt(node):
            self.at(node.args[0], source)
        waiting.append(node)
        if sum(map(bytes_of, waiting)) >= messages.BUCKET:
            self._send_waiting(node)

    def _send_waiting(self, node: fx.Node) -> None:
        nodes, group = self.waiting.pop(self._key(node)), self.group
        (source, *_), is_dealt = self._key(node), self._is_dealt(node)
        values = [self.at(n.args[0] if is_dealt else n, source) for n in nodes]
        with self.build.at(values[0]):
            if is_dealt:
                dims, places = (
                    [n.args[1] for n in nodes],
                    self.mesh.axis_size(self.axis),
                )
                arrived = messages.scatter_from(
                    self._put, source, values, dims, places, group
                )
            else:
                arrived = messages.broadcast_from(self._put, source, values, group)
        self.unread |= dict.fromkeys(nodes, (nodes, arrived))

    def _read(self, node: fx.Node) -> None:
        """Split the message in which a node was sent."""
        nodes, arrived = self.unread[node]
        with self.build.at(node):
            for each, value in zip(nodes, arrived(), strict=True):
                self.value_at[each, EVERY] = value
                del self.unread[each]
