"""Moves waits, and work that can wait, to where they overlap with collectives.

``sink_waits``. In: a local graph. Out: the same nodes, changed in place only in their
order: a wait, and ops that only rearrange its result, are right before its first
reader. A collective so overlaps with all work that does not depend on it; a gradient's
reduction with the rest of the backward. Never moves a collective, so all ranks keep one
order of them.

``delay``. In: a forward or a backward by itself, whose waits are where their results
are first needed. Out: the same graph, changed in place: where there is no work between
a collective of a computed value and its wait, contractions before it that it does not
need move after it, with the nodes that read only them. The gradients of weights then
overlap with the all-reduce of an input's gradient, as Megatron-LM writes by hand
(Korthikanti et al. 2022, section 4.2.2), and with the permutes of its halos; for that a
convolution's backward, which computes the gradients of the input, the weight and the
bias at once, is split in two calls (``part``), and joined again where nothing was moved
(``join``): libraries have a kernel for each gradient either way.

Never: a node moves across a wait or a write, or one that does more than compute, so
that collectives, draws and writes keep their order on all ranks. A moved node keeps its
operands alive for longer: the nearest are moved, up to ``HELD`` times the bytes of the
collective.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import calls_where
from fxpar.graph.builder import region_of
from fxpar.graph.size_nodes import is_arithmetic
from fxpar.passes.simulate.launches import KINDS, PRODUCTS, WAIT, is_collective
from fxpar.sharding.cost.op import bytes_of, is_contraction, is_light, is_view, viewed
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import ancestors

_SEND = torch.ops._c10d_functional.isend.default


def sink_waits(graph: fx.Graph) -> None:
    """Move every wait, and views of its result, before their first readers; the wait
    for a sent message, which has none, to the end."""
    waits = graph.find_nodes(op="call_function", target=WAIT)
    waited = derived_from(waits, lambda node: op_facts_of(node.target).sinks)
    for node in sorted(n for n in waited if not n.users):
        if node.target is WAIT and node.args[0].target is _SEND:
            graph.output_node().prepend(node)
    sink(graph, waited)


def is_chunk(node: fx.Node) -> bool:
    """Return whether a schedule made a collective a chunk, to overlap with work: it is
    neither joined with others nor waited for before its result is needed."""
    return bool(node.meta.get("fxpar_chunk"))


def sink(graph: fx.Graph, nodes: Collection[fx.Node]) -> None:
    """Move each of ``nodes`` right before its first reader, or before a later write to
    memory that it reads (a wait reads the memory of its collective); nodes of one
    reader keep their order."""
    writes = _writes(graph)
    first: dict[fx.Node, fx.Node] = {}
    for node in sorted(nodes, reverse=True):
        if node.users:
            reader = min(node.users)
            if writes:
                after = [w for m in _reads(node) for w in writes.get(m, ()) if node < w]
                reader = min([reader, *after])
            first.get(reader, reader).prepend(node)
            first[reader] = node


def needed(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and the nodes it is computed from, without placeholders, in
    order."""
    return sorted(n for n in ancestors([node]) if n.op != "placeholder")


def hoist(node: fx.Node, before: fx.Node) -> None:
    """Move ``node``, with the nodes it is computed from, before another node."""
    for each in needed(node):
        if before < each:
            before.prepend(each)


def _writes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that write to a memory, by the node that allocates it."""
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in _torch.objects.calls_where(graph, is_write):
        for read in node.all_input_nodes:
            out.setdefault(viewed(read), []).append(node)
    return out


def is_write(target: Any) -> bool:
    """Return whether an op writes to its operands."""
    return op_facts_of(target).mutates


def _reads(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose memory an op reads; for a wait, also its collective's."""
    read = set(node.all_input_nodes)
    if node.target is WAIT:
        read.update(*(n.all_input_nodes for n in node.all_input_nodes))
    return {viewed(n) for n in read}


def derived_from(
    sources: Iterable[fx.Node], allows: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Return ``sources`` and the nodes computed from them alone by nodes that
    ``allows`` takes."""
    derived = set(sources)
    pending = list(derived)
    while pending:
        for user in pending.pop().users:
            is_new = user not in derived and allows(user)
            if is_new and derived.issuperset(user.all_input_nodes):
                derived.add(user)
                pending.append(user)
    return derived


def from_inputs(graph: fx.Graph, through: Collection[Any] = ()) -> set[fx.Node]:
    """Return the nodes computed from graph inputs by cheap ops and ops in ``through``
    only."""
    inputs = graph.find_nodes(op="placeholder")
    return derived_from(inputs, lambda n: is_cheap(n) or n.target in through)


def is_cheap(node: fx.Node) -> bool:
    """Return whether an op only moves, reshapes or casts, so that it may be between a
    joinable collective and an input or output of the graph. Arithmetic of sizes is,
    since ranks find their shards of an open size by more or less of it."""
    facts = op_facts_of(node.target)
    return facts.moves or facts.reshapes or facts.casts or is_arithmetic(node)


BACKWARD = torch.ops.aten.convolution_backward.default


def part_nearest(node: fx.Node, since: Sequence[fx.Node]) -> fx.Node | None:
    """Split the last convolution's backward among ``since`` whose gradient of the input
    is needed by ``node``; return the new call for the others. None if there is none or
    ``node`` needs another of its gradients."""
    if all(call.target is not BACKWARD for call in since):
        return None
    sources = ancestors([node], set(since))
    for call in reversed(since):
        if call in sources and call.target is BACKWARD:
            if any(user.target is not operator.getitem for user in call.users):
                return None  # a part of a graph may return the whole tuple
            others = [user for user in call.users if user.args[1]]
            return part(call) if others and sources.isdisjoint(others) else None
    return None


def part(call: fx.Node) -> fx.Node:
    """Add a call for the gradients of weight and bias after ``call``, and return it;
    ``call`` then computes the input's gradient only."""
    mask = _mask(call)
    with call.graph.inserting_after(call):
        half = call.graph.call_function(BACKWARD, call.args)
    half.meta = dict(call.meta)
    _ask_for(half, [False, *mask[1:]], call.meta["val"])
    for user in list(call.users):
        if user.args[1]:
            user.replace_input_with(call, half)
    _ask_for(call, [mask[0], False, False], call.meta["val"])
    return half


def join(call: fx.Node, half: fx.Node) -> None:
    """Undo ``part``."""
    mask = [_mask(call)[0], *_mask(half)[1:]]
    values = (call.meta["val"][0], *half.meta["val"][1:])
    half.replace_all_uses_with(call)
    call.graph.erase_node(half)
    _ask_for(call, mask, values)


def _mask(call: fx.Node) -> list[bool]:
    mask: Any = call.args[-1]
    return list(mask)


def _ask_for(call: fx.Node, mask: Sequence[bool], values: Sequence[Any]) -> None:
    """Make a call compute the gradients in ``mask`` only; ``values``: fake values."""
    call.args = (*call.args[:-1], list(mask))
    call.meta["val"] = tuple(
        value if is_asked else None
        for value, is_asked in zip(values, mask, strict=True)
    )


# The most bytes that are held for longer, in multiples of the collective's bytes. The
# gradients of a transformer block's weights read up to ten times the bytes of the
# reduction of its input's gradient.
HELD = 16

# The number of nodes before a collective that are examined.
_FAR = 1000


def delay(graph: fx.Graph) -> None:
    """Move work after each collective that overlaps with none, in place."""
    waits_of = _all_waits_of(graph)
    if not waits_of:
        return
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    heavy = set(calls_where(graph, _is_work))
    work = list(accumulate((n in heavy for n in nodes), initial=0))
    borders = set(calls_where(graph, _is_border))
    delayed: set[fx.Node] = set()
    # ``prefetch`` overlaps these.
    input_derived = from_inputs(graph, through={*KINDS, WAIT})
    begin = 0  # after the last wait or write
    waited_at: set[int] = set()  # where results without a wait are first read
    for at, node in enumerate(nodes):
        if node in borders:
            begin = at + 1
        if at in waited_at:
            begin = at
        if node not in waits_of:
            continue
        end = min(map(place.__getitem__, waits_of[node]))
        if end > at and nodes[end].target is not WAIT:
            waited_at.add(end)
        can_overlap = end <= at or work[end] > work[at + 1] or node in input_derived
        if (
            can_overlap
            or not node.all_input_nodes  # a message that is received
            or is_chunk(node)
            or region_of(node)
            or work[at] == work[begin]
        ):
            continue
        movable = _movable(node, nodes[max(begin, at - _FAR) : at], delayed)
        if any(_is_work(moved.target) for moved in movable):
            movable = _without_operands(movable, nodes[at + 1 : end])
            late_work = _last_start(nodes[at:end], movable, waits_of)
            for work_node in reversed(movable):
                late_work.append(work_node)
            delayed.update(movable)


def _is_work(target: Any) -> bool:
    return is_contraction(target) or target in PRODUCTS


def _is_border(target: Any) -> bool:
    """Return whether an op waits or writes, so that no node is moved across it."""
    return target is WAIT or is_write(target)


def _all_waits_of(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the waits of each collective, or its readers if it has no wait because it
    is not lowered yet."""
    waits_of: dict[fx.Node, list[fx.Node]] = {}
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        waits_of.setdefault(wait.args[0], []).append(wait)
    for node in calls_where(graph, KINDS.__contains__):
        if node.users and node not in waits_of and is_collective(node):
            waits_of[node] = list(node.users)
    return waits_of


def _without_operands(
    movable: Sequence[fx.Node], then: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return ``movable`` without light work that the nodes ``then`` need and that reads
    none of the heavy work."""
    heavy: set[fx.Node] = set()
    for node in movable:
        if _is_work(node.target) or not heavy.isdisjoint(node.all_input_nodes):
            heavy.add(node)
    staying = set(then)
    for node in reversed(movable):
        if node not in heavy and not staying.isdisjoint(node.users):
            staying.add(node)
    return [node for node in movable if node not in staying]


def _last_start(
    nodes: Sequence[fx.Node],
    movable: Sequence[fx.Node],
    waits_of: Mapping[fx.Node, Sequence[fx.Node]],
) -> fx.Node:
    """Return the last collective among ``nodes`` before one that reads a moved node:
    work after it overlaps with all of them."""
    last, moved = nodes[0], set(movable)
    for node in nodes:
        if not moved.isdisjoint(node.all_input_nodes):
            break
        if node in waits_of:
            last = node
    return last


def _movable(
    node: fx.Node, since: Sequence[fx.Node], delayed: Collection[fx.Node]
) -> list[fx.Node]:
    """Return the nodes among ``since`` that can move after ``node``, in order. A
    convolution's backward whose gradient of the input ``node`` needs is split, the
    other gradients in a call of their own, which holds nothing for longer than the one
    call did."""
    half = part_nearest(node, since)
    if half is None:
        return _unneeded(node, since, delayed)
    call = half.prev
    at = since.index(call) + 1
    halved = [*since[:at], half, *since[at:]]
    computed = derived_from([half], {*halved[at + 1 :]}.__contains__)
    movable = _unneeded(node, halved, delayed, computed)
    if half not in movable:
        join(call, half)
    return movable


def _unneeded(
    node: fx.Node,
    since: Sequence[fx.Node],
    delayed: Collection[fx.Node],
    free: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """Return the nodes among ``since``, in order, that neither ``node`` nor any node
    that stays needs. Other readers of an all-reduce's operand stay: without later
    readers it runs in place. ``free``: nodes whose operands are not counted as held."""
    stay_reads, operand = set(node.all_input_nodes), node.all_input_nodes[0]
    source = viewed(operand) if KINDS.get(node.target) == "all_reduce" else None
    room = HELD * max(bytes_of(node), bytes_of(operand))
    read_longer: set[fx.Node] = set()
    movable = []
    for candidate in reversed(since):
        reads = {viewed(n) for n in candidate.all_input_nodes}
        longer = [n for n in reads - read_longer if not any(node < u for u in n.users)]
        size = sum(map(bytes_of, longer)) - (
            bytes_of(candidate) if candidate in read_longer else 0
        )
        if candidate in free:
            size = 0
        stays = (
            candidate in stay_reads or candidate in delayed or not is_pure(candidate)
        )
        if stays or size > room or source in reads:
            stay_reads.update(candidate.all_input_nodes)
            continue
        movable.append(candidate)
        read_longer.update(reads)
        room -= size
    return movable[::-1]


def is_pure(node: fx.Node) -> bool:
    """Return whether an op does nothing but compute its result."""
    target = node.target
    if node.op != "call_function" or node.is_impure() or region_of(node):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return False
    if target is operator.getitem or is_contraction(target) or is_arithmetic(node):
        return True
    is_core = getattr(target, "namespace", "") in ("aten", "prims")
    return (
        is_core and (is_light(target) or is_view(node)) and "assert" not in str(target)
    )
