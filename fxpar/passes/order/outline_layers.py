"""Outlines repeated layers into calls of one body, which is compiled once.

In: a forward or a backward as it goes to Inductor. Out: the same graph, changed in
place: the repeated segment of a layer, consecutive ops, is a call of a body that all of
its kind share, so that Inductor lowers and generates it once. There is one segment for
each layer unless an op in it must stay outside; layers begin where no collective is
under way, and few values go from one to the next. Layers of a kind are identical in
every constant, shape and stride. Bodies hold ops that compute, and collectives from
start to wait. Never in a body: other collectives, writes, seeds and a rank's
coordinates, so that only memory of the outer graph is written, or under way where a
body begins or ends. A body's results have memory of their own; if several views of one
are read outside, they are made there, and so are views of operands. A reduction that
starts inside a layer and ends after it, such as a bucket that is full in the middle of
it, starts right after the layer, and so do reductions of its result over another axis:
other layers of the kind have none there. Additions to sums over microbatches, which are
in place, run right after the layer, and small gradients are handed over there.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import calls_where, tensors_in
from fxpar.graph.builder import PROVENANCE, part_of
from fxpar.layers import (
    RepeatedOps,
    first_border,
    is_aligned,
    labels_of,
    rows_of_layers,
    with_reads,
)
from fxpar.passes.order.delay_work import is_chunk
from fxpar.passes.order.hand_over import CHUNK
from fxpar.passes.simulate.launches import WAIT
from fxpar.sharding.cost.op import bytes_of, is_view
from fxpar.sharding.op_facts import is_drawn_from_generator, op_facts_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

# Ops that start collectives which may be in bodies.
REDUCTIONS = {c10d.all_reduce.default, c10d.reduce_scatter_tensor.default}
STARTS = {*REDUCTIONS, c10d.all_gather_into_tensor.default}
# The op that starts the gather of a result of the graph.
GATHER = torch.ops.fxpar.all_gather_into_tensor.default
HAND_OVER = torch.ops.fxpar.hand_over.default

# The least number of calls of a body, and of its ops.
LEAST_CALLS, LEAST_OPS = 3, 5

# Devices on which calls of bodies launch no more kernels, move no more bytes and hold
# no more memory than the flat graph: timed on CPUs, for CUDA by the code alone
# (benchmarks/bench_layers.py --device cuda).
DEVICES = {"cpu", "cuda"}

# The op that calls a body.
INVOKE = _torch.inductor.invoke_subgraph()


def outline_layers(graph: fx.Graph, *, even: bool = True) -> int:
    """Replace repeated layers by calls of bodies; return the number of calls. ``even``:
    all shards are even (see ``_segments``)."""
    root, inputs = graph.owning_module, graph.find_nodes(op="placeholder")
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs):
        return 0  # sizes are open
    if root is None or not _torch.inductor.can_call_bodies():
        return 0
    kinds: dict[Any, list[LayerSegment]] = defaultdict(list)
    for segment in _segments(graph, even=even):
        kinds[segment.text].append(segment)
    calls = 0
    for equal_segments in kinds.values():
        first = equal_segments[0]
        if len(equal_segments) < LEAST_CALLS or not _has_only_tensors(first):
            continue
        if all(map(_is_update, equal_segments)):
            continue
        names = (f"layer{i}" for i in count())
        name = next(name for name in names if not hasattr(root, name))
        root.add_module(name, _body(first))
        for segment in equal_segments:
            _call(graph, segment, name)
        calls += len(equal_segments)
    return calls


def _is_update(segment: LayerSegment) -> bool:
    """Return whether most bytes of a segment's results are written to memory of the
    outer graph: those of a body would be copied there, where a kernel outside writes in
    place."""
    inside, bytes_to = set(segment.nodes), {True: 0, False: 0}
    for result in segment.results:
        readers = {user.target for user in result.users if user not in inside}
        bytes_to[readers == {aten.copy_.default}] += bytes_of(result)
    return bytes_to[True] > bytes_to[False]


def _has_only_tensors(segment: LayerSegment) -> bool:
    """Return whether all operands and results are aligned tensors, and there is a
    result."""
    ends = (*_operands_of(segment.nodes), *segment.results)
    values = [node.meta.get("val") for node in ends]
    tensors = all(isinstance(x, torch.Tensor) and is_aligned(x) for x in values)
    return tensors and bool(segment.results)


def _body(segment: LayerSegment) -> fx.GraphModule:
    graph = part_of(_operands_of(segment.nodes), segment.nodes, segment.results)
    graph.eliminate_dead_code()
    _torch.inductor.keep_strides(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def _call(graph: fx.Graph, segment: LayerSegment, name: str) -> None:
    """Replace a segment by a call of the body ``name``."""
    inside = set(segment.nodes)
    first, last = segment.nodes[0], segment.nodes[-1]
    moved = _move_after(segment)
    operands = _operands_of(segment.nodes)
    origin = {key: first.meta[key] for key in PROVENANCE if key in first.meta}
    results: dict[fx.Node, fx.Node] = {}
    with graph.inserting_after(last):
        at = graph.get_attr(name)
    with graph.inserting_after(at):
        call = graph.call_function(INVOKE, (at, name, *operands))
        call.meta = origin | {"val": tuple(n.meta["val"] for n in segment.results)}
    place = call
    for i, node in enumerate(segment.results):
        with graph.inserting_after(place):
            place = results[node] = graph.call_function(operator.getitem, (call, i))
        place.meta = dict(node.meta)

    def outside(node: fx.Node) -> fx.Node:
        """Return the value of a node of the segment, after the call."""
        nonlocal place
        if node not in inside:
            return node
        if node not in results:
            reads = {n: outside(n) for n in node.all_input_nodes}
            with graph.inserting_after(place):
                place = results[node] = graph.node_copy(node, reads.__getitem__)
        return results[node]

    for node in segment.nodes:
        if any(user not in inside for user in node.users):
            users = [user for user in node.users if user not in inside]
            value = outside(node)
            for user in users:
                user.replace_input_with(node, value)
    for node in moved:
        place.append(node)
        place = node
    for node in reversed(segment.nodes):
        graph.erase_node(node)


def _move_after(segment: LayerSegment) -> list[fx.Node]:
    """Return the nodes between a segment's nodes that must move after it: reductions,
    sums, and nodes that read the segment, in order. The others, views of earlier
    memory, are moved before it."""
    inside, moved = set(segment.nodes), dict[fx.Node, None]()
    first, last = segment.nodes[0], segment.nodes[-1]
    node = first
    while node is not last:
        node, between = node.next, node
        if between in inside:
            continue
        reads_late = any(r in inside or r in moved for r in between.all_input_nodes)
        if reads_late or _can_come_later(between):
            moved[between] = None
        else:
            first.prepend(between)
    return list(moved)


@dataclass(frozen=True)
class LayerSegment:
    """Is a run of consecutive ops, as a function of their operands."""

    # The ops, in order.
    nodes: tuple[fx.Node, ...]
    # Nodes with memory that is read after the segment, directly or through views.
    results: tuple[fx.Node, ...]
    # Equal for segments that compute the same function.
    text: tuple[Any, ...]


def _segments(graph: fx.Graph, *, even: bool) -> Iterator[LayerSegment]:
    """Yield the segments of the graph's layers that can be bodies. Unless shards are
    ``even``, other segments may repeat on other ranks, which must start collectives in
    the same order: then bodies have no collectives, and none that is moved after a body
    passes another."""
    label_of = dict(zip(graph.nodes, labels_of(graph.nodes).tolist(), strict=True))
    pairs = _repeated_pairs(graph, label_of) if even else {}
    crossing = set[fx.Node]()  # collectives that start in a body and end outside
    while True:
        pairs = {start: pairs[start] for start in pairs if start not in crossing}
        nodes, ends = _computing(graph, {*pairs, *pairs.values()})
        labels = np.array([label_of[node] for node in nodes], int)
        patterns = _patterns(nodes, ends, labels)
        place = {node: i for i, node in enumerate(nodes)}
        places = [(place[start], place[wait]) for start, wait in pairs.items()]
        crossing = {
            nodes[pair[0]]
            for pair in places
            if any(_is_cut_at(whole, *pair) for whole in patterns)
        }
        if not crossing:
            break
    outlined = np.zeros(len(nodes), bool)
    for whole in patterns:
        if whole.stop - whole.start >= LEAST_OPS and not outlined[whole].any():
            for at in _matches(labels, ends, labels[whole], outlined):
                if not any(_is_cut_at(at, *pair) for pair in places):
                    yield _segment(nodes[at], labels[at])


def fits(node: fx.Node) -> bool:
    """Return whether an op may be in a body: it only computes tensors from tensors, of
    known sizes on a device in ``DEVICES``."""
    results = tensors_in(node.meta.get("val"))
    if node.op != "call_function" or not results:
        return False
    if node.target is operator.getitem:
        return fits(node.args[0])
    if is_drawn_from_generator(node):
        return False
    return _is_pure(node.target) and _is_of_known_tensors(node)


def _is_of_known_tensors(node: fx.Node) -> bool:
    """Return whether a node's operands and results are tensors with sizes that are
    numbers, on a device in ``DEVICES``."""
    reads = node.all_input_nodes
    return all(map(_is_known, (node, *reads))) and all(
        tensors_in(read.meta.get("val")) for read in reads
    )


def _is_known(node: fx.Node) -> bool:
    """Return whether a node's results have sizes that are numbers and are on a device
    in ``DEVICES``."""
    return all(
        x.device.type in DEVICES
        and {int}.issuperset(map(type, (*x.shape, *x.stride())))
        for x in tensors_in(node.meta.get("val"))
    )


def _repeated_pairs(
    graph: fx.Graph, label_of: Mapping[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    """Return {op that starts a collective: its wait} of collectives that start and end
    at the same places of all layers, except one at most."""
    node_kinds, _ = _kinds(graph, ())
    nodes = [node for node in graph.nodes if node_kinds[node] == "computes"]
    inside, kinds = set(nodes), defaultdict[Any, dict[fx.Node, fx.Node]](dict)
    counts = np.cumsum([node in inside for node in graph.nodes]).tolist()
    place = dict(zip(graph.nodes, counts, strict=True))
    labels = np.array([label_of[node] for node in nodes], int)
    pairs, candidates = dict[fx.Node, fx.Node](), list(_pairs(graph))
    for begin, end, distance in _rows(nodes, labels):
        for start, wait in candidates:
            first, length = place[start] - begin, place[wait] - place[start]
            if first >= 0 and place[wait] <= end and length < distance:
                kind = begin, first % distance, length, label_of[start]
                kinds[kind][start] = wait
                if len(kinds[kind]) >= (end - begin) // distance - 1:
                    pairs |= kinds[kind]
    return pairs


def _pairs(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (op that starts it, its wait) of collectives that may be in bodies."""
    for start in calls_where(graph, STARTS.__contains__):
        if _is_of_known_tensors(start):
            wait, *others = start.users
            if wait.target is WAIT and not others:
                yield start, wait


def _is_cut_at(whole: slice, *pair: int) -> bool:
    """Return whether exactly one op of a pair is inside."""
    return len({whole.start <= i < whole.stop for i in pair}) > 1


def _patterns(
    nodes: Sequence[fx.Node], ends: np.ndarray, labels: np.ndarray
) -> list[slice]:
    """Return the parts of layers that may each be one body."""
    patterns: list[slice] = []
    for row in _rows(nodes, labels):
        first = first_border(nodes, row, LEAST_CALLS, ends, STARTS)
        for layer in range(first, row.end - row.distance + 1, row.distance):
            patterns += _runs(ends, layer, layer + row.distance)
    return patterns


def _rows(nodes: Sequence[fx.Node], labels: np.ndarray) -> list[RepeatedOps]:
    return rows_of_layers(labels, with_reads(nodes, labels), overlap=True)


def _matches(
    labels: np.ndarray,
    ends: np.ndarray,
    pattern: np.ndarray,
    outlined: np.ndarray,
) -> Iterator[slice]:
    """Yield the places where the labels have a pattern that may be one body and that no
    other body has. ``ends``: see ``_computing``."""
    for first in np.flatnonzero(labels == pattern[0]).tolist():
        at = slice(first, first + len(pattern))
        if outlined[at].any() or not np.array_equal(labels[at], pattern):
            continue
        if ends[first + 1 : at.stop].min(initial=at.stop) >= at.stop:
            outlined[at] = True
            yield at


def _computing(
    graph: fx.Graph, communicating: Collection[fx.Node]
) -> tuple[list[fx.Node], np.ndarray]:
    """Return the ops that may be in bodies, ``communicating`` ones included, and an
    array of ends: for the place before each op, and after the last, how far a body that
    begins earlier may reach. That is the place itself if a node there cuts (it may be
    in no body, and is no view of outer memory), as far as a reduction that starts there
    can be put off, or else the last op."""
    kinds, packs = _kinds(graph, communicating)
    nodes = [node for node in graph.nodes if kinds[node] == "computes"]
    counts = np.cumsum([kinds[node] == "computes" for node in graph.nodes]).tolist()
    place = dict(zip(graph.nodes, counts, strict=True))  # ops of bodies up to a node
    place.update((node, i) for i, node in enumerate(nodes))
    ends = np.full(len(nodes) + 1, len(nodes))
    put_off: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if kinds[node] == "computes":
            continue
        put_off[node] = place[node]
        if node in packs or kinds[node] == "shows" or _can_come_later(node):
            readers = (max(place[u], put_off.get(u, 0)) for u in node.users)
            put_off[node] = min(readers, default=len(nodes))
        if kinds[node] == "cuts":
            ends[place[node]] = min(ends[place[node]], put_off[node])
    return nodes, ends


def _kinds(
    graph: fx.Graph, communicating: Collection[fx.Node]
) -> tuple[dict[fx.Node, str], set[fx.Node]]:
    """Return for each node "computes" (may be in a body), "cuts" (may not), or "shows"
    (is a view of memory outside of bodies), and the nodes that pack the operand of a
    collective, which cut."""
    kinds: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if _can_share_memory(node) and kinds[node.all_input_nodes[0]] != "computes":
            kinds[node] = "shows"
        else:
            is_inside = node in communicating or fits(node)
            kinds[node] = "computes" if is_inside else "cuts"
    packs: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_pack = node.target is aten.cat.default or _can_share_memory(node)
        is_pack = is_pack and kinds[node] == "computes" and bool(node.users)
        if is_pack and all(kinds[u] == "cuts" and u.op != "output" for u in node.users):
            kinds[node] = "cuts"
            packs.add(node)
    return kinds, packs


def _can_start_later(node: fx.Node) -> bool:
    """Return whether a node starts a reduction, or gathers a result of the graph, and
    no schedule placed it."""
    starts = node.target in REDUCTIONS or node.target is GATHER
    return starts and not is_chunk(node)


# Ops that add to a sum over microbatches.
SUMS = {"fxpar.accumulate.default", "fxpar.accumulate_product.default"}


def _can_come_later(node: fx.Node) -> bool:
    """Return whether a node starts such a reduction, waits for one that only further
    ones read (a gradient is reduced axis by axis), adds to a sum over microbatches, or
    hands gradients over that are small: larger ones are handed over where they are
    computed, which is at the same places of all layers, and frees their memory."""
    if str(node.target) in SUMS:
        return True
    if node.target is HAND_OVER:
        return sum(map(bytes_of, node.args[0])) < 2 * CHUNK
    if node.target is not WAIT:
        return _can_start_later(node)
    ends = (node.args[0], *node.users)
    return bool(node.users) and all(map(_can_start_later, ends))


@cache
def _is_pure(target: Any) -> bool:
    """Return whether an op's result and its strides depend on its operands only."""
    if not isinstance(target, _torch.inductor.OpOverload):
        return False
    facts = op_facts_of(target)
    if facts.chosen_strides or facts.mutates:
        return False
    # A random op that reads no generator has a seed as an operand.
    return facts.random or target.namespace in ("aten", "prims")


def _runs(ends: np.ndarray, begin: int, end: int) -> Iterator[slice]:
    """Yield the maximal parts of [begin, end) that may be one body."""
    first = begin
    while first < end:
        last, reach = first + 1, end
        while last < end and (reach := min(reach, int(ends[last]))) > last:
            last += 1
        yield slice(first, last)
        first = last


def _segment(nodes: Sequence[fx.Node], labels: np.ndarray) -> LayerSegment:
    inside = {node: i for i, node in enumerate(nodes)}
    place = {node: -1 - i for i, node in enumerate(_operands_of(nodes))} | inside
    lines = [
        (label, tuple(map(place.__getitem__, _reads(node))))
        for node, label in zip(nodes, labels.tolist(), strict=True)
    ]
    read_outside: dict[fx.Node, list[fx.Node]] = {}  # of memory: what shows it
    for node in nodes:
        if any(user not in inside for user in node.users):
            read_outside.setdefault(_home(node), []).append(node)
    results = tuple(
        readers[0] if len(readers) == 1 and _is_of_all_memory(readers[0]) else home
        for home, readers in sorted(
            read_outside.items(), key=lambda item: inside.get(item[0], -1)
        )
        if home in inside
    )
    return LayerSegment(
        tuple(nodes), results, (*lines, tuple(map(inside.get, results)))
    )


def _reads(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments of a call, in order, with repeats."""
    reads: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), reads.append)
    return reads


def _operands_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the other nodes that nodes read, in order of first use."""
    inside = set(nodes)
    reads = (read for node in nodes for read in _reads(node) if read not in inside)
    return list(dict.fromkeys(reads))


def _home(node: fx.Node) -> fx.Node:
    """Return the op that allocates the memory of a chain of views."""
    while _can_share_memory(node):
        node = node.all_input_nodes[0]
    return node


def _is_of_all_memory(node: fx.Node) -> bool:
    """Return whether a node is a view of all of its memory, or no view."""
    while _can_share_memory(node):
        facts = op_facts_of(node.target)
        if not (facts.reshapes or facts.keeps_order or facts.permutes):
            return False
        node = node.all_input_nodes[0]
    return True


def _can_share_memory(node: fx.Node) -> bool:
    """Return whether an op's result may share memory with its operand."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        return _can_share_memory(node.args[0])
    if op_facts_of(node.target).reshapes:  # may copy, whatever its schema says
        return is_view(node)
    return is_view(node) or _can_alias(node.target)


@cache
def _can_alias(target: Any) -> bool:
    """Return whether, by its schema, an op's result may alias an operand."""
    schema = _torch.objects.schema_of(target)
    returns = schema.returns if schema is not None else ()
    return any(x.alias_info is not None for x in returns)
