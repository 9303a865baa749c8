"""Verb ``overlap`` of gathers and an attention that reads them: which ring that is, if
it is one, and the lines that a graph takes."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_edit import Edit
from fxpar.fusion.verbs import overlap as chunked
from fxpar.fusion.verbs.attention_form import form_of
from fxpar.fusion.verbs.balanced_ring import BalancedRing
from fxpar.fusion.verbs.ring_attention import RingAttention
from fxpar.passes import collective_nodes


def rings_of(graph: fx.Graph) -> Schedule:
    """A line for each attention of a local graph with steps whose keys and values are
    gathered for it."""
    lines = []
    for node in graph.nodes:
        form = form_of(node.target)
        if form is None:
            continue
        sources = [_gather_of(node.args[form.keys + i]) for i in range(2)]
        gathers = [gather for gather in sources if gather is not None]
        names = tuple(dict.fromkeys(gather.name for gather in gathers))
        if len(gathers) == 2 and len({gather.args[1:] for gather in gathers}) == 1:
            lines.append(Line("overlap", (names, node.name), (("ring", 1),)))
    return Schedule(tuple(lines))


def _gather_of(x: Any) -> fx.Node | None:
    """The gather from which alone a value is made."""
    while x.target is not collective_nodes.all_gather:
        if len(x.all_input_nodes) != 1:
            return None
        (x,) = x.all_input_nodes
    return x


def overlap(
    edit: Edit,
    starts: tuple[fx.Node, ...],
    ends: tuple[fx.Node, ...],
    chunks: int | None = None,
    dim: int | None = None,
    ring: int | None = None,
    fused: int = 0,
) -> list[fx.Node]:
    """``overlap([ag, ag_1], attention, ring=1)``: gives its output, or the gradients of
    keys and values; anything else is ``overlap.overlap``."""
    form = form_of(ends[0].target) if len(ends) == 1 else None
    if form is not None and ring is not None and not fused:
        scheme = RingAttention if form.sets == 1 else BalancedRing
        return scheme(edit, form, starts, ends[0], chunks, dim, ring).run()
    return chunked.overlap(edit, starts, ends, chunks, dim, ring, fused)
