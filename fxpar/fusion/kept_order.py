"""What keeps its order whatever a schedule does: random draws, and messages.

A generator gives its numbers in turn, so that ops which draw from it must stay in the
order the program has them in, each once. Messages between two stages are matched by
their order, and stages that receive before they send may wait for each other, so that
the messages of a graph stay in one order too, sent and received alike; the chunks of
one stand together. Nothing else says so: no value goes from one of them to the next.

In: a graph, at first to be numbered (``number``). Out: the same graph in an order in
which all stand behind what they read and behind those that come first (``arrange``);
ScheduleError if a verb has put them in another (``check``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion.node_legality import CallableRegion, draws, flat, is_message
from fxpar.sharding.program import user_line

# Which of its kind a node is, in the order the given graph has them in.
_NUMBER = "fxpar_order"

# kind -> (which nodes, what a verb that moves one would do)
_KINDS: dict[str, tuple[Callable[[fx.Node], bool], str]] = {
    "draw": (draws, "would draw random numbers before or after others than it does"),
    "message": (is_message, "would be a message before or after others than it is"),
}

_FIX = "leave what draws or communicates where it is: name other nodes"


def number(graph: fx.Graph) -> Counter[str]:
    """Note the order of what keeps it; how many there are of each kind."""
    found = Counter[str]()
    for node in flat(graph):
        for kind, (belongs, _) in _KINDS.items():
            if belongs(node):
                node.meta[_NUMBER] = found[kind]
                found[kind] += 1
    return found


def instead(old: fx.Node, new: fx.Node) -> None:
    """``new`` stands for a message, or is one of its parts."""
    new.meta[_NUMBER] = old.meta[_NUMBER]


def check(graph: fx.Graph, verb: str, found: Counter[str]) -> None:
    """Raise ScheduleError unless all draws are there, once, and all in the order they
    were numbered in. ``found``: as of ``number``."""
    last, drawn = dict.fromkeys(_KINDS, -1), 0
    for node in flat(graph):
        for kind, (belongs, why) in _KINDS.items():
            if not belongs(node):
                continue
            now = node.meta.get(_NUMBER, -1)
            if now < last[kind] + (kind == "draw"):
                what = f"{verb}: {node.name} {why}"
                raise ScheduleError(what, where=user_line(node), fix=_FIX)
            last[kind] = now
            drawn += kind == "draw"
    if drawn < found["draw"]:
        what = f"{verb}: random numbers that others draw after would not be drawn"
        raise ScheduleError(what, fix=_FIX)


def is_free(node: fx.Node) -> bool:
    """Whether nothing changes if a node that nobody reads goes."""
    return not any(belongs(node) for belongs, _ in _KINDS.values())


def arrange(graph: fx.Graph) -> None:
    """Order nodes so that each stands behind what it reads and, of what keeps its
    order, behind the one before it; otherwise as they are. Raises ScheduleError if
    there is no such order."""
    first = _chained(graph)
    done: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    order: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            at = stack.pop()
            needed = (*at.all_input_nodes, *first.get(at, ()))
            missing = next((n for n in needed if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(at)
                continue
            done.add(at)
            order.append(at)
            stack += reversed(waiting.pop(at, []))

    for node in graph.nodes:
        if node not in done:
            place(node)
    left = next((node for node in graph.nodes if node not in done), None)
    if left is not None:
        what = f"{left.name} would wait for itself: random draws and messages keep"
        raise ScheduleError(f"{what} their order", where=user_line(left), fix=_FIX)
    _put(graph, order)


def _chained(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> those of its kinds right before it."""
    out: dict[fx.Node, list[fx.Node]] = {}
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        for kind in _kinds(node):
            if kind in last:
                out.setdefault(node, []).append(last[kind])
            last[kind] = node
    return out


def _kinds(node: fx.Node) -> Iterator[str]:
    inside = (
        list(flat(node.target.graph)) if isinstance(node.target, CallableRegion) else []
    )
    for kind, (belongs, _) in _KINDS.items():
        if any(map(belongs, inside or [node])):
            yield kind


def _put(graph: fx.Graph, order: list[fx.Node]) -> None:
    before: fx.Node | None = None
    for node in order:
        if before is not None and before.next is not node:
            before.append(node)
        before = node
    graph.lint()
