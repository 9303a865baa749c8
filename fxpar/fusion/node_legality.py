"""What an op of a local graph is besides its arithmetic: one place for all verbs.

In: a node of a local graph. Out: whether it communicates, writes over what it reads,
draws from a generator, is a message or a region. Verbs move, repeat and leave out nodes
by the values that these read alone; ``admit`` refuses, where a graph comes in, each
node for which that is not all that counts. Of what must keep its order, ``order`` takes
care. Never changes a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import ScheduleError
from fxpar.passes import collective_nodes
from fxpar.passes.graph_bodies import all_nodes, bodies_of
from fxpar.sharding.program import user_line
from fxpar.sharding.rules.op_facts import op_facts_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar

# Products with their collective as one op, and what they communicate.
PRODUCTS = {
    ours.gather_matmul.default: "all_gather",
    ours.matmul_scatter.default: "reduce_scatter",
}

_SILENT = {*PRODUCTS, c10d.wait_tensor.default}


class CallableRegion:
    """A subgraph as a callable: inputs in order, results as a tuple."""

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


def flat(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes in the order in which they run, those of regions in their place."""
    for node in graph.nodes:
        if isinstance(node.target, CallableRegion):
            yield from flat(node.target.graph)
        else:
            yield node


def is_message(node: fx.Node) -> bool:
    """Whether a node sends to another stage or receives from it."""
    return node.target in collective_nodes.MESSAGES


def draws(node: fx.Node) -> bool:
    """Whether an op takes numbers from a generator, so that what draws before it
    counts. Numbers by index (``fxpar::random``) do not."""
    if not op_facts_of(node.target).draws:
        return False
    return _argument(node, "dropout_p") != 0.0  # attention without dropout draws none


def _argument(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name, or its default; None if it has none such."""
    target: Any = node.target
    for i, argument in enumerate(_torch.objects.schema_of(target).arguments):
        if argument.name == name:
            given = node.args[i] if i < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def communicates(node: fx.Node) -> bool:
    """Whether ranks meet in an op that is no step, and none of ``PRODUCTS``."""
    return node.target not in _SILENT and op_facts_of(node.target).communicates


def _writes(node: fx.Node) -> bool:
    return op_facts_of(node.target).mutates


def is_fresh(node: fx.Node) -> bool:
    """Whether a node makes memory that holds no other value, to be written over."""
    return op_facts_of(node.target).constant == "filled"


def _over_what_others_see(node: fx.Node) -> bool:
    if node.target is not collective_nodes.recv:
        return False
    buffer = node.all_input_nodes[0]
    own = buffer.op == "placeholder" or is_fresh(buffer)
    return not own or list(buffer.users) != [node]


def _holds_graphs(node: fx.Node) -> bool:
    """Whether nothing is known of graphs that an op runs, or they do more than give
    values."""
    higher = getattr(node.target, "namespace", "") == "higher_order"
    graphs = [n for n in node.all_input_nodes if n.op == "get_attr"]
    if higher and any("val" not in n.meta for n in graphs):
        return True
    inside = (n for body in bodies_of(node) for n in all_nodes(body.graph))
    return any(communicates(n) or _writes(n) for n in inside)


def _is_no_op(node: fx.Node) -> bool:
    return node.op in ("call_method", "call_module")


# (of which nodes, why no schedule is applied to them, what to do)
_REFUSED: tuple[tuple[Callable[[fx.Node], bool], str, str], ...] = (
    (
        communicates,
        "communicates, and no step stands for it",
        "trace collectives of one tensor each: all_reduce, reduce_scatter_tensor, "
        "all_gather_into_tensor, all_to_all_single, isend, irecv",
    ),
    (
        _writes,
        "writes over what it reads, past which nothing could be moved",
        "trace torch.func.functionalize(fn) instead of fn",
    ),
    (
        _over_what_others_see,
        "is written over memory which others see",
        "receive into a fresh torch.empty that nothing else reads",
    ),
    (
        _holds_graphs,
        "runs graphs of its own, which no verb looks into",
        "trace what it does without it",
    ),
    (_is_no_op, "is no op", "trace the graph with make_fx(..., tracing_mode='fake')"),
)


def admit(graph: fx.Graph) -> None:
    """Raise ScheduleError on a node of which verbs would take for granted what is not
    so. ``graph``: its collectives are steps."""
    for node in flat(graph):
        for refused, why, fix in _REFUSED:
            if refused(node):
                what = f"{node.name} ({node.target}) {why}"
                raise ScheduleError(what, where=user_line(node), fix=fix)
