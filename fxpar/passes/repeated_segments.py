"""Finds segments of a Dynamo graph that repeat: layers that are identical node by node.

In: a graph as Dynamo traced it. Out: kinds of segments, each with its nodes, the values
they read from outside and the results read outside; AOTAutograd traces one of a kind
(``_torch.traced_once``). Segments of a kind have equal ops on equal constants, dtypes,
sizes, strides and ``requires_grad``, wired equally. Of a traced graph that writes in
place (``_torch.aot.trace_flat``), whose values share memory where tensors did, it says
which values are unchanged until they are last read. Never changes a graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from fxpar._torch.aot import CHECKPOINT, higher_order_name
from fxpar._torch.dynamo import example_of
from fxpar._torch.objects import is_mutable, memory_of, tensors_in, written_by
from fxpar._torch.traced_once import SegmentKind
from fxpar._torch.traced_values import attribute, layout_of, part_of
from fxpar.layers import (
    RepeatedOps,
    first_border,
    label_of,
    labels_of,
    rows_at_all_distances,
    with_reads,
    without_overlaps,
)


def kept_values(graph: fx.Graph) -> set[fx.Node]:
    """Return the values to whose memory nothing writes before they and their views are
    last read, through which nothing writes at all, and of which no view is a result of
    the graph; none whose memory is unknown."""
    lasting, changed = set[fx.Node](), set[fx.Node]()
    at = {node: i for i, node in enumerate(graph.nodes)}
    memories = {
        node: {
            memory_of(x)
            for x in tensors_in(node.meta.get("val"))
            if x.layout is torch.strided
        }
        for node in graph.nodes
    }
    written = {node: set(written_by(node)) for node in graph.nodes}
    last: dict[fx.Node, int] = {}  # where a value or a view of it is last read
    writers: dict[int, list[int]] = defaultdict(list)  # by memory, of the later ops
    for node in reversed(graph.nodes):
        views = {user for user in node.users if memories[user] & memories[node]}
        reads = (max(at[u], last[u] * (u in views)) for u in node.users)
        last[node] = max(reads, default=0)
        is_changed = any(u.op == "output" or node in written[u] for u in node.users)
        later = [i for memory in memories[node] for i in writers[memory]]
        if is_changed or changed & views:
            changed.add(node)
        elif memories[node] and not any(i < last[node] for i in later):
            lasting.add(node)
        for memory in {m for target in written[node] for m in memories[target]}:
            writers[memory].append(at[node])
    return lasting


# The least numbers of nodes that copies save, and of nodes of a segment: each segment
# costs some work too.
LEAST_SAVED, LEAST_SIZE = 10, 4

# Ops that run graphs and are traced as the ops of these graphs.
_INLINED = (
    CHECKPOINT,
    "higher_order::autograd_function_apply",
)

Operands = list[tuple[fx.Node, int | None]]


def repeated_segments(gm: fx.GraphModule) -> list[SegmentKind]:
    """Return the kinds of segments that repeat. Symbolic sizes are numbers that a
    segment reads."""
    ends = ("placeholder", "output")
    nodes = [node for node in gm.graph.nodes if node.op not in ends]
    labels = labels_of(nodes, _facts_at, _target)
    sizes = np.array(list(map(_size, nodes)))

    def saved(row: RepeatedOps) -> int:
        begin, end, distance = row
        count = int(sizes[begin : end - distance].sum())
        pays = sizes[begin : begin + distance].sum() >= LEAST_SIZE
        return count if pays and count >= LEAST_SAVED else 0

    rows = filter(saved, rows_at_all_distances(labels, with_reads(nodes, labels)))
    kinds: list[SegmentKind] = []
    lasting = kept_values(gm.graph)
    for row in without_overlaps(
        sorted(rows, key=lambda r: (-saved(r), r.distance)), labels
    ):
        begin, size = first_border(nodes, row, least=2), row.distance
        starts = range(begin, row.end - size + 1, size)
        kinds += _kinds([nodes[i : i + size] for i in starts], lasting)
    return kinds


def _kinds(
    segments: Sequence[list[fx.Node]], lasting: Collection[fx.Node]
) -> Iterator[SegmentKind]:
    """Yield the kinds among segments of equal ops: those with equal wiring."""
    by_wiring: dict[Any, list[tuple[list[fx.Node], Operands]]] = {}
    for nodes in segments:
        wiring, operands = _wiring(nodes)
        if all(_is_tensor(node) or _is_number(node) for node, _ in operands):
            by_wiring.setdefault(wiring, []).append((nodes, operands))
    for group in by_wiring.values():
        first, _ = group[0]
        results = sorted({i for nodes, _ in group for i in _read_outside(nodes)})
        gives = bool(results) or any(is_mutable(node.target) for node in first)
        if len(group) > 1 and gives and all(_is_tensor(first[i]) for i in results):
            yield SegmentKind(
                [nodes for nodes, _ in group],
                [[x for x in reads if _is_tensor(x[0])] for _, reads in group],
                [[node for node, _ in reads if _is_number(node)] for _, reads in group],
                results,
                [all(nodes[i] in lasting for nodes, _ in group) for i in results],
            )


def _read_outside(nodes: Sequence[fx.Node]) -> list[int]:
    inside = set(nodes)
    return [i for i, node in enumerate(nodes) if not inside.issuperset(node.users)]


def _wiring(nodes: Sequence[fx.Node]) -> tuple[Any, Operands]:
    """Return the wiring of a segment (which nodes or operands each node reads) and its
    operands from outside. A value with a gradient that is also read elsewhere is one
    operand per reader, the last reader first: its gradients are added in this order."""
    at = {node: i for i, node in enumerate(nodes)}
    operands: dict[tuple[fx.Node, int | None], int] = {}
    wiring: list[tuple[int, int | None, int | None]] = []
    for i, node in reversed(list(enumerate(nodes))):
        for read in node.all_input_nodes:
            if read in at:
                wiring.append((i, at[read], None))
                continue
            is_shared = not at.keys() >= read.users.keys()
            has_gradient = _is_tensor(read) and example_of(read).requires_grad
            own = i if is_shared and has_gradient else None
            place = operands.setdefault((read, own), len(operands))
            wiring.append((i, None, place))
    return tuple(wiring), list(operands)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(example_of(node), torch.Tensor)


def _is_number(node: fx.Node) -> bool:
    return isinstance(example_of(node), (int, torch.SymInt))


def _target(node: fx.Node) -> Any:
    """Return a key of the op, or of the attribute's value. A call that runs graphs
    equals no other, unless it is inlined."""
    name = higher_order_name(node.target)
    if name and name not in _INLINED:
        return node
    if node.op != "get_attr":
        return node.op, node.target
    held = attribute(node)
    return _body(held) if isinstance(held, fx.GraphModule) else id(held)


def _body(body: fx.GraphModule) -> Any:
    """Return a key that is equal for identical graphs with equal metadata."""
    nodes = list(body.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    keys = [
        (*(at[read] for read in node.all_input_nodes), node.op)
        + (() if node.op == "placeholder" else label_of(node, _facts_at, _target(node)))
        for node in nodes
    ]
    return tuple(keys), tuple((name, repr(x)) for name, x in sorted(body.meta.items()))


def _size(node: fx.Node) -> int:
    """Return 1, or the number of nodes of a body that the node holds."""
    held = attribute(node) if node.op == "get_attr" else None
    if isinstance(held, fx.GraphModule):
        return sum(map(_size, held.graph.nodes))
    return 1


def _facts_at(node: fx.Node) -> Any:
    return _facts(example_of(node))


def _facts(value: Any) -> Any:
    """Return the facts of a value on which a trace may depend."""
    if isinstance(value, torch.Tensor):
        numbers = *value.shape, *value.stride(), value.storage_offset()
        where = [n if type(n) is int else str(n) for n in numbers]
        own = value.dtype, *where, str(value.device), value.requires_grad, type(value)
        layout = layout_of(value)
        return own if layout is None else (*own, layout, *_facts(part_of(value)))
    if isinstance(value, (list, tuple)):
        return type(value), *map(_facts, value)
    return type(value)
