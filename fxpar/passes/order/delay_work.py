"""bound -> bound: work that can wait stands behind the start of a collective.

In: a forward or a backward by itself, whose waits stand where their results are first
needed. Out: the same graph, changed in place: where nothing stands between a collective
of what was computed and its wait, contractions that stood before it and that it does
not need come behind it, with what only they lead to. The gradients of weights run
beside the all-reduce of an input's gradient, as Megatron-LM writes by hand (Korthikanti
et al. 2022, section 4.2.2), and beside the permutes of its halos; a convolution's
backward, which makes both, is parted for that (``parted_gradients``).

Only ops that compute are moved, never across a wait or a write, so that collectives,
draws and writes keep their order on all ranks. What is moved holds what it reads for
longer: the nearest are moved, up to ``HELD`` times the bytes of the collective.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import fx

from fxpar._torch.nodes_by_target import calls_where
from fxpar.passes.order.joinable_collectives import from_inputs, region_of
from fxpar.passes.order.parted_gradients import computed_of, join, part_nearest
from fxpar.passes.order.sink_waits import is_chunk
from fxpar.passes.order.small_collectives import only_computes
from fxpar.passes.simulate.launches import KINDS, PRODUCTS, WAITS, is_collective
from fxpar.sharding.cost.op import bytes_of, contracts, viewed
from fxpar.sharding.op_facts import op_facts_of

# Bytes that are held for longer, in those of the collective. The gradients of a
# transformer block's weights read up to ten times what is reduced of its input's.
HELD = 16

# So many nodes before a collective are looked at.
_FAR = 1000


def delay(graph: fx.Graph) -> None:
    """Put work behind each collective that has none beside it."""
    waits_of = _all_waits_of(graph)
    if not waits_of:
        return
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    heavy = set(calls_where(graph, _is_work))
    work = list(accumulate((n in heavy for n in nodes), initial=0))
    borders = set(calls_where(graph, _is_border))
    delayed: set[fx.Node] = set()
    # ``prefetch`` hides these.
    input_derived = from_inputs(graph, through={*KINDS, *WAITS})
    begin = 0  # behind the last wait or write
    waited_at: set[int] = set()  # where results of no wait are first read
    for at, node in enumerate(nodes):
        if node in borders:
            begin = at + 1
        if at in waited_at:
            begin = at
        if node not in waits_of:
            continue
        end = min(map(place.__getitem__, waits_of[node]))
        if end > at and nodes[end].target not in WAITS:
            waited_at.add(end)
        has_work_beside = end <= at or work[end] > work[at + 1] or node in input_derived
        if (
            has_work_beside
            or not node.all_input_nodes  # a message that comes
            or is_chunk(node)
            or region_of(node)
            or work[at] == work[begin]
        ):
            continue
        movable = _movable(node, nodes[max(begin, at - _FAR) : at], delayed)
        if any(_is_work(moved.target) for moved in movable):
            movable = _without_operands(movable, nodes[at + 1 : end])
            behind = _last_start(nodes[at:end], movable, waits_of)
            for work_node in reversed(movable):
                behind.append(work_node)
            delayed.update(movable)


def _is_work(target: Any) -> bool:
    return contracts(target) or target in PRODUCTS


def _is_border(target: Any) -> bool:
    """Whether an op waits, or writes: nothing is moved across it."""
    return target in WAITS or op_facts_of(target).mutates


def _all_waits_of(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each collective the nodes that wait for it; its readers, where it is not
    lowered yet to one with a wait."""
    waits_of: dict[fx.Node, list[fx.Node]] = {}
    for wait in calls_where(graph, WAITS.__contains__):
        waits_of.setdefault(wait.args[0], []).append(wait)
    for node in calls_where(graph, KINDS.__contains__):
        if node.users and node not in waits_of and is_collective(node):
            waits_of[node] = list(node.users)
    return waits_of


def _without_operands(
    movable: Sequence[fx.Node], then: Sequence[fx.Node]
) -> list[fx.Node]:
    """Without light work that what starts next needs, and which needs no other."""
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
    """Of collectives from the first of ``nodes`` on, up to a node that reads what is
    moved, the last: all are under way then."""
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
    """What of the nodes ``since`` a wait can come behind ``node``, in order. Of a
    convolution's backward whose gradient of the input ``node`` needs, the others are
    made by a call of its own. These hold nothing for longer than the one call did."""
    half = part_nearest(node, since)
    if half is None:
        return _unneeded(node, since, delayed)
    call = half.prev
    at = since.index(call) + 1
    parted = [*since[:at], half, *since[at:]]
    movable = _unneeded(node, parted, delayed, computed_of(half, parted[at + 1 :]))
    if half not in movable:
        join(call, half)
    return movable


def _unneeded(
    node: fx.Node,
    since: Sequence[fx.Node],
    delayed: Collection[fx.Node],
    free: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """Of the nodes ``since`` a wait, in order, those that neither ``node`` needs nor
    anything that stays. What else reads an all-reduce's operand stays: it is done in
    place if nothing does later. ``free``: what these hold is not counted."""
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
            candidate in stay_reads
            or candidate in delayed
            or not only_computes(candidate)
        )
        if stays or size > room or source in reads:
            stay_reads.update(candidate.all_input_nodes)
            continue
        movable.append(candidate)
        read_longer.update(reads)
        room -= size
    return movable[::-1]
