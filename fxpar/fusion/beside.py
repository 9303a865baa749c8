"""Where a product could run beside its own collective: candidates for ``overlap``.

In: a local graph with steps, seconds of ops and collectives. Out: ``Site``s, those of
equal shapes together: a product whose result is reduced and nothing else, through views
at most; a gather that products of the same phase read. What is saved at most is the
lesser of the two, but for one chunk; what overlap costs, more and smaller launches, the
simulation says. Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar.fusion.schedule import Line
from fxpar.passes import steps
from fxpar.passes.arithmetic import contracts, is_view, tensors_in
from fxpar.passes.launches import depending_on_tangents

_REDUCING = (steps.reduce_scatter, steps.all_reduce)


@dataclass(frozen=True)
class Site:
    """``first`` and ``second`` as ``overlap`` takes them. ``alike``: equal for sites
    that are chosen together. ``seconds``: that could be saved at most."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    alike: tuple[Any, ...]
    seconds: float

    def line(self, chunks: int) -> Line:
        """The verb in so many chunks."""
        ends = [
            names[0] if len(names) == 1 else names
            for names in (self.first, self.second)
        ]
        return Line("overlap", tuple(ends), (("chunks", chunks),))


Seconds = Callable[[fx.Node], float]


def sites(graph: fx.Graph, work: Seconds, moved: Seconds) -> list[Site]:
    """All sites in order. ``work``: seconds of a product; ``moved``: of a step."""
    late = depending_on_tangents(graph)
    out: list[Site] = []
    for node in graph.nodes:
        if node.target in _REDUCING:
            out += _before(node, work, moved)
        elif node.target is steps.all_gather:
            out += _behind(node, late, work, moved)
    return out


def _before(node: fx.Node, work: Seconds, moved: Seconds) -> Iterator[Site]:
    """The product whose result a reduction takes."""
    source = node.all_input_nodes[0]
    while is_view(source) and len(source.users) == 1 and source.all_input_nodes:
        source = source.all_input_nodes[0]
    if contracts(source.target) and len(source.users) == 1:
        taken, product = moved(node), work(source)
        alike = (node.target, node.args[1:], _shapes(source))
        yield Site((source.name,), (node.name,), alike, min(taken, product))


def _behind(node: fx.Node, late: Any, work: Seconds, moved: Seconds) -> Iterator[Site]:
    """The products that read what is gathered, in the phase it is gathered in."""
    ends: list[fx.Node] = []
    rest = list(node.users)
    while rest:
        user = rest.pop(0)
        if (user in late) != (node in late):
            continue
        if contracts(user.target):
            ends.append(user)
        elif is_view(user):
            rest += user.users
    if ends:
        taken, product = moved(node), sum(map(work, ends))
        alike = (node.target, node.args[1:], *map(_shapes, ends))
        names = tuple(end.name for end in sorted(set(ends)))
        yield Site((node.name,), names, alike, min(taken, product))


def _shapes(node: fx.Node) -> tuple[Any, ...]:
    read = (*node.all_input_nodes, node)
    values = [v for n in read for v in tensors_in(n.meta.get("val"))]
    return node.target, *((tuple(v.shape), v.dtype) for v in values)
