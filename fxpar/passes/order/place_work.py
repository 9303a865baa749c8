"""Work put beside collectives that have none, in a forward or a backward by itself.

In: the graph of one of the two, its waits where results are first needed. Out: the same
nodes, in another order. Where nothing stands between a collective of what was computed
and its wait, contractions that stood before it and that it does not need come behind it
(``delay``), with what only they lead to: the gradients of weights run beside the
all-reduce of an input's gradient, as Megatron-LM writes by hand (Korthikanti et al.
2022, section 4.2.2). Where there are none, contractions behind the wait that do not
need it come before it (``advance``), with what they need: shared experts run while rows
come back from the others.

Only ops that compute are moved, never across another wait or a write, so that
collectives, draws and writes keep their order on all ranks. What is moved holds what it
reads, or gives, for longer: the nearest are moved, up to ``HELD`` times the bytes of
the collective.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import fx

from fxpar.passes.order.bucket_collectives import from_inputs, region_of
from fxpar.passes.order.sink_waits import is_chunk
from fxpar.passes.simulate.launches import KINDS, PRODUCTS, WAITS
from fxpar.sharding.cost.op import bytes_of, contracts, is_light, is_view, viewed
from fxpar.sharding.rules.op_facts import op_facts_of

# Bytes that are held for longer, in those of the collective. The gradients of a
# transformer block's weights read up to ten times what is reduced of its input's.
HELD = 16

# So many nodes before a collective are looked at.
_FAR = 1000


def work_beside(graph: fx.Graph) -> None:
    """Both: work before a collective, else work behind its wait."""
    delay(graph)
    advance(graph)


def delay(graph: fx.Graph) -> None:
    """Put work behind each collective that has none beside it."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    work = list(accumulate((_is_work(n) for n in nodes), initial=0))
    delayed: set[fx.Node] = set()
    # ``prefetch`` hides these.
    input_derived = from_inputs(graph, through=(*KINDS, *WAITS))
    begin = 0  # behind the last wait or write
    for at, node in enumerate(nodes):
        if node.target in WAITS or op_facts_of(node.target).mutates:
            begin = at + 1
        end = min((place[u] for u in node.users if _is_wait_of(u, node)), default=at)
        has_work_beside = end <= at or work[end] > work[at + 1] or node in input_derived
        if (
            has_work_beside
            or not node.all_input_nodes  # a message that comes
            or is_chunk(node)
            or region_of(node)
            or work[at] == work[begin]
        ):
            continue
        movable = _unneeded(node, nodes[max(begin, at - _FAR) : at], delayed)
        if any(map(_is_work, movable)):
            for work_node in reversed(movable):
                node.append(work_node)
            delayed.update(movable)
    graph.lint()


def _is_work(node: fx.Node) -> bool:
    return contracts(node.target) or node.target in PRODUCTS


def _is_wait_of(user: fx.Node, node: fx.Node) -> bool:
    return user.target in WAITS and user.args[0] is node


def _unneeded(
    node: fx.Node, since: Sequence[fx.Node], delayed: Collection[fx.Node]
) -> list[fx.Node]:
    """Of the nodes ``since`` a wait, in order, those that neither ``node`` needs nor
    anything that stays. What else reads an all-reduce's operand stays: it is done in
    place if nothing does later."""
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
        stays = (
            candidate in stay_reads or candidate in delayed or not _may_move(candidate)
        )
        if stays or size > room or source in reads:
            stay_reads.update(candidate.all_input_nodes)
            continue
        movable.append(candidate)
        read_longer.update(reads)
        room -= size
    return movable[::-1]


def _may_move(node: fx.Node) -> bool:
    """Whether an op does nothing but compute its result."""
    target = node.target
    if node.op != "call_function" or node.is_impure() or region_of(node):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return False
    if target is operator.getitem or contracts(target):
        return True
    is_core = getattr(target, "namespace", "") in ("aten", "prims")
    return (
        is_core and (is_light(target) or is_view(node)) and "assert" not in str(target)
    )


def advance(graph: fx.Graph) -> None:
    """Put work that stands behind the wait of a collective before it, where there is
    none beside."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    work = list(accumulate((_is_work(n) for n in nodes), initial=0))
    input_derived = from_inputs(graph, through=(*KINDS, *WAITS))
    stops = [i for i, node in enumerate(nodes) if _bounds(node)] + [len(nodes)]
    for at, node in enumerate(nodes):
        end = min((place[u] for u in node.users if _is_wait_of(u, node)), default=at)
        stop = stops[bisect_right(stops, end)]
        if (
            end <= at
            or work[end] > work[at + 1]
            or work[stop] == work[end]
            or node in input_derived
            or not node.all_input_nodes
            or is_chunk(node)
            or region_of(node)
        ):
            continue
        for work_node in _independent(node, nodes[end : min(stop, end + _FAR)]):
            nodes[end].prepend(work_node)
    graph.lint()


def _bounds(node: fx.Node) -> bool:
    """Whether work behind a node stays behind it."""
    is_write = op_facts_of(node.target).mutates
    return node.target in WAITS or node.target in KINDS or is_write


def _independent(node: fx.Node, since: Sequence[fx.Node]) -> list[fx.Node]:
    """Of the nodes ``since`` a collective's wait, in order, the contractions that need
    neither it nor anything that stays, and what they need."""
    wait, *behind = since
    stays, movable = {wait}, []
    for candidate in behind:
        if stays.isdisjoint(candidate.all_input_nodes) and _may_move(candidate):
            movable.append(candidate)
        else:
            stays.add(candidate)
    leading: set[fx.Node] = set()
    for candidate in reversed(movable):
        if _is_work(candidate) or not leading.isdisjoint(candidate.users):
            leading.add(candidate)
    room = HELD * max(bytes_of(node), bytes_of(node.all_input_nodes[0]))
    moved = []
    for candidate in movable:
        if candidate in leading:
            room -= 0 if is_view(candidate) else bytes_of(candidate)
            if room < 0:
                break
            moved.append(candidate)
    while moved and not _is_work(moved[-1]):
        moved.pop()
    return moved
