"""Says which nodes of a local graph a schedule may move, repeat or leave out.

In: a node of a local graph. Out: whether it communicates, writes over what it reads,
draws from a generator, is a message or a region. Verbs move, repeat and leave out nodes
by data dependencies alone; ``admit`` refuses, where a graph comes in, each node with
other effects. Never changes a graph but for its order (``arrange``), the numbers that
``number`` notes and the regions of ``close``.

A generator gives its numbers in turn, so that ops which draw from it must stay in the
order of the program, each once. Messages between two stages are matched by their order,
and stages that receive before they send may wait for each other, so that the messages
of a graph keep one order too, sent and received ones together; the chunks of one
message stay together. So do exchanges of rows in exact numbers, at which ranks meet. No
value connects these nodes, so that their order must be noted: ``number`` notes it;
``arrange`` puts all nodes after what they read and after the one before in this order;
``check`` raises ScheduleError if a verb has changed the order.

``close`` makes each op that reads or makes a value which is not as large on every
rank a region of its own (``UnevenOp``). Verbs cut all shards equally, so that they
never look into it; all other nodes stay, so that verbs apply around it.
``inline`` opens the regions again.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import ScheduleError
from fxpar.graph import collective_nodes
from fxpar.graph.builder import (
    REGION,
    UNEVEN,
    is_uneven,
    part_of,
    put_after_reads,
    replace_items,
)
from fxpar.graph.graph_bodies import all_nodes, bodies_of
from fxpar.passes.rank_sizes import is_size, uneven_nodes
from fxpar.passes.simulate.launches import EXACT, PRODUCTS
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import is_drawn_from_generator, op_facts_of
from fxpar.sharding.program import user_line
from fxpar.sharding.rank_ints import PLACES, SIZES

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar
_SILENT = {*PRODUCTS, *EXACT, c10d.wait_tensor.default}


class CallableRegion:
    """Is a subgraph as a callable: inputs in order, results as a tuple."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    @property
    def __name__(self) -> str:
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        return "region_" + "_".join(n.name for n in calls[:4])

    def __call__(self, *args: Any) -> Any:
        return torch.fx.Interpreter(fx.GraphModule(torch.nn.Module(), self.graph)).run(
            *args
        )


class UnevenOp(CallableRegion):
    """Is a region of one op on unequal shards."""


def has_uneven_ops(graph: fx.Graph) -> bool:
    """Return whether some shards of a graph are unequal, and its ops are not closed
    yet."""
    if any(isinstance(node.target, UnevenOp) for node in graph.nodes):
        return False
    return is_uneven(graph) or bool(graph.output_node().meta.get(UNEVEN))


def is_closed(node: fx.Node) -> bool:
    """Return whether a node is a result of a closed op."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and isinstance(source.target, UnevenOp)


def flat(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes in the order in which they run, those of regions in their
    place."""
    for node in graph.nodes:
        if isinstance(node.target, CallableRegion):
            yield from flat(node.target.graph)
        else:
            yield node


def is_message(node: fx.Node) -> bool:
    """Return whether a node sends to another stage or receives from it."""
    return node.target in collective_nodes.MESSAGES


def has_meeting(node: fx.Node) -> bool:
    """Return whether ranks meet in an op that is no step, and neither one of
    ``PRODUCTS`` nor of ``EXACT``."""
    return node.target not in _SILENT and op_facts_of(node.target).communicates


def _is_write(node: fx.Node) -> bool:
    return op_facts_of(node.target).mutates


def is_fresh(node: fx.Node) -> bool:
    """Return whether a node makes memory that holds no other value, to be written
    over."""
    return op_facts_of(node.target).constant == "filled"


def _is_over_shared_memory(node: fx.Node) -> bool:
    if node.target is not collective_nodes.recv:
        return False
    buffer = node.all_input_nodes[0]
    unshared = buffer.op == "placeholder" or is_fresh(buffer)
    return not unshared or list(buffer.users) != [node]


def _has_opaque_graphs(node: fx.Node) -> bool:
    """Return whether an op runs graphs of which nothing is known, or which do more than
    give values."""
    graphs = [n for n in node.all_input_nodes if n.op == "get_attr"]
    if not graphs:
        return False
    higher = getattr(node.target, "namespace", "") == "higher_order"
    if higher and any("val" not in n.meta for n in graphs):
        return True
    inside = (n for body in bodies_of(node) for n in all_nodes(body.graph))
    return any(has_meeting(n) or _is_write(n) for n in inside)


# (which nodes, why no schedule is applied to them, what to do)
_REFUSED: tuple[tuple[Callable[[fx.Node], bool], str, str], ...] = (
    (
        has_meeting,
        "communicates by an op that schedules do not know",
        "trace collectives of one tensor each: all_reduce, reduce_scatter_tensor, "
        "all_gather_into_tensor, all_to_all_single, isend, irecv",
    ),
    (
        _is_write,
        "writes to its operand in place, so that nothing could be moved past it",
        "trace torch.func.functionalize(fn) instead of fn",
    ),
    (
        _is_over_shared_memory,
        "writes to memory that other values share",
        "receive into a fresh torch.empty that nothing else reads",
    ),
    (
        _has_opaque_graphs,
        "runs graphs of its own, which no verb edits",
        "trace what it does without it",
    ),
    (
        lambda node: node.op in ("call_method", "call_module"),
        "is no op",
        "trace the graph with make_fx(..., tracing_mode='fake')",
    ),
)


def admit(graph: fx.Graph) -> None:
    """Raise ScheduleError on a node that verbs cannot handle. ``graph``: its
    collectives are steps."""
    for node in flat(graph):
        for refused, why, fix in _REFUSED:
            if refused(node):
                what = f"{node.name} ({node.target}) {why}"
                raise ScheduleError(what, where=user_line(node), fix=fix)


# The key in ``meta`` of a node's number among its kind, in order of the given graph.
_NUMBER = "fxpar_order"

# kind -> (which nodes, what a verb that moves one would do)
_KINDS: dict[str, tuple[Callable[[fx.Node], bool], str]] = {
    "draw": (
        is_drawn_from_generator,
        "would draw random numbers in another order",
    ),
    # Ranks exchange exact numbers of rows, which the host waits for.
    "exchange": (
        lambda node: node.target in EXACT,
        "would send rows in another order",
    ),
    "message": (is_message, "would send or receive in another order"),
}

_FIX = "leave what draws or communicates where it is: name other nodes"


def number(graph: fx.Graph) -> Counter[str]:
    """Note the order of nodes that keep it. Return how many there are of each kind."""
    counts = Counter[str]()
    for node in flat(graph):
        for kind, (belongs, _) in _KINDS.items():
            if belongs(node):
                node.meta[_NUMBER] = counts[kind]
                counts[kind] += 1
    return counts


def instead(old: fx.Node, new: fx.Node) -> None:
    """Note that ``new`` replaces the message ``old``, or is a part of it."""
    new.meta[_NUMBER] = old.meta[_NUMBER]


def check(graph: fx.Graph, verb: str, counts: Counter[str]) -> None:
    """Raise ScheduleError unless all draws are there, once, and all nodes that keep an
    order in the order of ``number``. ``counts``: the result of ``number``."""
    last, draw_count = dict.fromkeys(_KINDS, -1), 0
    for node in flat(graph):
        for kind, (belongs, why) in _KINDS.items():
            if not belongs(node):
                continue
            now = node.meta.get(_NUMBER, -1)
            if now < last[kind] + (kind == "draw"):
                what = f"{verb}: {node.name} {why}"
                raise ScheduleError(what, where=user_line(node), fix=_FIX)
            last[kind] = now
            draw_count += kind == "draw"
    if draw_count < counts["draw"]:
        what = (
            f"{verb}: a draw of random numbers would be left out, so that later draws "
            "would differ"
        )
        raise ScheduleError(what, fix=_FIX)


def is_free(node: fx.Node) -> bool:
    """Return whether a node that nobody reads can go without effect."""
    return not any(belongs(node) for belongs, _ in _KINDS.values())


def arrange(graph: fx.Graph) -> None:
    """Order nodes so that each is after what it reads and, if it keeps its order, after
    the one before it; otherwise leave them. Raises ScheduleError if there is no such
    order."""
    stuck = put_after_reads(graph, _chained(graph))
    if stuck is not None:
        what = f"{stuck.name} would wait for itself: random draws and messages keep"
        raise ScheduleError(f"{what} their order", where=user_line(stuck), fix=_FIX)


def _chained(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node that keeps its order, the nodes of its kinds right before
    it."""
    before: dict[fx.Node, list[fx.Node]] = {}
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        for kind in _kinds(node):
            if kind in last:
                before.setdefault(node, []).append(last[kind])
            last[kind] = node
    return before


def _kinds(node: fx.Node) -> Iterator[str]:
    inside = (
        list(flat(node.target.graph)) if isinstance(node.target, CallableRegion) else []
    )
    for kind, (belongs, _) in _KINDS.items():
        if any(map(belongs, inside or [node])):
            yield kind


def close(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> None:
    """Make each op on unequal shards a region, in place."""
    values = uneven_nodes(graph, mesh, fake_mode)
    values.update(n for n in graph.nodes if n.target in SIZES)
    for node in list(graph.nodes):
        reads = not values.isdisjoint(node.all_input_nodes)
        if is_size(node):
            values.update([node] if reads else [])
        elif (
            node.op == "call_function"
            and node.target not in PLACES
            and (reads or node in values)
        ):
            item = _close(graph, node)
            values.update([item] if node in values else [])
    graph.lint()


def _close(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Put an op into a region. Return the region's item, under the op's name, that is
    read instead of the op."""
    name = node.name
    _, (item,) = outlined(graph, [node], [node], UnevenOp)
    _torch.objects.rename(item, name)
    return item


def outlined(
    graph: fx.Graph,
    members: Sequence[fx.Node],
    results: Sequence[fx.Node],
    kind: type[CallableRegion],
) -> tuple[fx.Node, list[fx.Node]]:
    """Put members, given in order, into a region after the last of them. Return it, and
    its items that others read instead of ``results``."""
    inside = set(members)
    read = {n: None for m in members for n in m.all_input_nodes if n not in inside}
    part = part_of(read, members, tuple(results))
    last, items = members[-1], list[fx.Node]()
    with graph.inserting_before(last.next):
        region = graph.call_function(kind(part), tuple(read))
        region.meta = {"val": tuple(node.meta.get("val") for node in results)}
        region.meta["fxpar_origin"] = last.meta.get("fxpar_origin", last.name)
        for i, node in enumerate(results):
            items.append(graph.call_function(operator.getitem, (region, i)))
            items[-1].meta = dict(node.meta)
            node.replace_all_uses_with(
                items[-1], delete_user_cb=lambda user: user not in inside
            )
    for node in reversed(members):
        graph.erase_node(node)
    return region, items


def inline(graph: fx.Graph) -> None:
    """Put the nodes of every region back, in place, marked with their region."""
    regions = [n for n in graph.nodes if isinstance(n.target, CallableRegion)]
    for region in regions:
        part = region.target.graph
        inputs = part.find_nodes(op="placeholder")
        copies = dict(zip(inputs, region.args, strict=True))
        with graph.inserting_before(region):
            for node in part.nodes:
                if node.op == "call_function":
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                    copies[node].meta = {**node.meta}
                    if not isinstance(region.target, UnevenOp):
                        custom = node.meta.get("custom") or {}
                        copies[node].meta["custom"] = custom | {REGION: region.name}
        results: Any = part.output_node().args[0]
        replace_items(region, fx.node.map_arg(results, copies.__getitem__))
    if regions:
        graph.lint()
