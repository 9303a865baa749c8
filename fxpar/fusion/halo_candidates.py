"""Finds lines that run the inner windows of convolutions while a halo is on its way.

In: a local graph with steps, and the axes that its nodes vary over. Out: a
``HaloCandidate`` for the convolutions of each form that are predicted to be faster with
it, priced in a window of their own: the permutes, the joining of their rows, the
convolution. Never changes the graph.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar.fusion.collective_window import Varies, Window, cut_out
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.verbs import overlap_halo
from fxpar.fusion.verbs.overlap import between
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh


@dataclass(frozen=True)
class HaloCandidate:
    """Holds lines for all convolutions of one form."""

    # One line for each.
    lines: Schedule
    # Seconds that each could save.
    seconds: float


def halo_candidates(
    graph: fx.Graph, mesh: Mesh, hardware: Hardware, varies: Varies
) -> list[HaloCandidate]:
    """Return the candidates that save time, by simulation of their windows alone."""
    lines: dict[Any, list[Line]] = defaultdict(list)
    windows: dict[Any, Window] = {}
    for line, starts, node in overlap_halo.lines_of(graph):
        members = {*starts, *between(tuple(starts), (node,))}
        window = cut_out(members, [node], starts[0], varies)
        lines[window.form].append(line)
        windows.setdefault(window.form, window)
    out = []
    for form, alike in lines.items():
        before, after = (
            windows[form].seconds(schedule, mesh, hardware)
            for schedule in (Schedule(), Schedule(tuple(alike[:1])))
        )
        if after < before:
            out.append(HaloCandidate(Schedule(tuple(alike)), before - after))
    return out
