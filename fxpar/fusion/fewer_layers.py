"""Makes a local graph with fewer layers, on which schedules are tried, and repeats the
lines found there for all layers.

``FewerLayers``. In: a local graph with steps, joint or not. Out: a copy in which most
of the layers that repeat are left out, in forward, backward and update, so that trying
lines costs the same for 8 layers and for 100; and which ops were left out. The copy
computes something else: a reader of a layer that is left out reads the layer before. It
has the same ops on the same shapes, in the same order. Never runs the copy and never
changes the graph. Layers are rows of ops of the same kind at one distance, as in the
search for plans (``layers``). The row that is cut is the longest of the forward, in its
middle; from each other row the layers that read cut ones are left out, if it has as
many of them: updates of parameters, one by one, stay.

Lines. In: a schedule of a graph with fewer layers. Out: one of the whole graph. A line
belongs to the layer of the last op that it names: a line of the layer right before
those left out is repeated for each of these, right after it, with new names for its
results. A line of a later layer names the ops of its own layer. Only ``reorder`` names
ops of many layers: it names those of the layers left out as well. Never decides whether
a line is legal: the verb does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import fx

from fxpar.fusion.schedule import Argument, Line, Schedule
from fxpar.layers import labels_of, rows_of_layers, with_reads
from fxpar.sharding.program import depending_on_tangents, phase_of

# Layers of the cut row that stay, and the least number of layers to leave out.
STAY, LEAST = 4, 4


@dataclass(frozen=True)
class RowOfLayers:
    """Holds ops that repeat, layer by layer."""

    nodes: tuple[fx.Node, ...]  # in order of the graph
    # Numbers of ops after which the row repeats, ascending: that of a layer, or of a
    # part of a layer or several layers.
    distances: tuple[int, ...]


@dataclass(frozen=True)
class RowCut:
    """Is a row of layers some of which are left out."""

    nodes: tuple[fx.Node, ...]  # ops of the whole row, in order of the graph
    distance: int  # ops of a layer
    begin: int  # place in ``nodes`` of the first op that is left out
    end: int  # place of the first op after those

    @property
    def left_out(self) -> tuple[fx.Node, ...]:
        return self.nodes[self.begin : self.end]

    def instead(self, place: int) -> fx.Node | None:
        """Return the op that corresponds to the one at a place, in the layer before
        those that are left out, or else in the one after; None if neither has it."""
        first = self.begin - self.distance
        at = (first if first >= 0 else self.end) + (place - self.begin) % self.distance
        return self.nodes[at] if at < len(self.nodes) else None


@dataclass(frozen=True)
class FewerLayers:
    """Is a graph without some of its layers."""

    graph: fx.Graph  # the shorter graph
    # Rows of the whole graph: the longest of the forward, then those that read it.
    rows: tuple[RowCut, ...]
    removed: int  # number of layers that are left out
    layers: int  # number of layers of the whole graph


def fewer_layers(graph: fx.Graph) -> FewerLayers | None:
    """Return the graph with fewer layers; None if it has few already, or layers cannot
    be separated."""
    counts = Counter(node.target for node in graph.nodes)
    if max(counts.values()) < STAY + LEAST:
        return None
    rows = list(_rows(graph))
    backward = depending_on_tangents(graph)
    early = (row for row in rows if not any(_is_later(n, backward) for n in row.nodes))
    most = max(early, key=lambda row: len(row.nodes), default=None)
    if most is None:
        return None
    later_rows = rows[rows.index(most) + 1 :]
    for distance in most.distances:
        cuts = _cuts(most, distance, later_rows)
        shorter = cuts and _without(graph, cuts)
        if cuts and shorter:
            removed = (cuts[0].end - cuts[0].begin) // distance
            layers = len(most.nodes) // distance
            return FewerLayers(shorter, cuts, removed, layers)
    return None


def _cuts(
    most: RowOfLayers,
    distance: int,
    later_rows: Sequence[RowOfLayers],
) -> tuple[RowCut, ...] | None:
    """Return the middle of a row, and the parts that read it of later rows that have as
    many layers for it. None if the row is short."""
    removed = len(most.nodes) // distance - STAY
    if removed < LEAST:
        return None
    begin = STAY // 2 * distance
    cuts = [RowCut(most.nodes, distance, begin, begin + removed * distance)]
    left_out = set(cuts[0].left_out)
    for row in later_rows:
        reads = [i for i, n in enumerate(row.nodes) if left_out & {*n.all_input_nodes}]
        if not reads:
            continue
        first, last = reads[0], reads[-1]
        fits = (d for d in row.distances if last < first + (removed + 1) * d)
        step = next(fits, len(row.nodes))
        end = first + removed * step
        if end > len(row.nodes):
            continue  # as updates of parameters one by one: these stay
        cuts.append(RowCut(row.nodes, step, first, end))
        left_out.update(cuts[-1].left_out)
    return tuple(cuts)


def _rows(graph: fx.Graph) -> Iterator[RowOfLayers]:
    """Yield rows of layers, in the order of the graph."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    labels = labels_of(calls)
    for begin, end, distance in sorted(
        rows_of_layers(labels, with_reads(calls, labels))
    ):
        row = labels[begin:end]
        shorter = (d for d in range(1, distance) if distance % d == 0)
        periods = (d for d in shorter if np.array_equal(row[d:], row[:-d]))
        yield RowOfLayers(tuple(calls[begin:end]), (*periods, distance))


def _is_later(node: fx.Node, backward: Collection[fx.Node]) -> bool:
    """Return whether an op is of the backward, or of an update."""
    return node in backward or phase_of(node) in ("backward", "update")


def _without(graph: fx.Graph, cuts: Sequence[RowCut]) -> fx.Graph | None:
    """Return a copy without the cut layers, their results, and nodes that nothing else
    needs. None if an op would read a value that is not there before it."""
    instead = {
        node: cut.instead(place)
        for cut in cuts
        for place, node in enumerate(cut.left_out, cut.begin)
    }
    left_out, output = set(instead), graph.output_node()
    results = [r for r in output.args[0] if r not in left_out]
    ends = [n for n in graph.nodes if not n.users and n.op == "call_function"]
    ancestors = _ancestors([*results, *ends], instead)
    shorter, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in ancestors or node in left_out:
            continue
        for read in node.all_input_nodes:
            if read in left_out:
                if instead[read] not in copies:
                    return None
                copies[read] = copies[instead[read]]
        copies[node] = shorter.node_copy(node, copies.__getitem__)
    shorter.output([copies.get(r, r) for r in results])
    shorter.output_node().meta = dict(output.meta)
    return shorter


def _ancestors(
    ends: Sequence[Any], instead: Mapping[fx.Node, fx.Node | None]
) -> set[fx.Node]:
    """Return the nodes among the ends, and all that they are computed from."""
    ancestors: set[fx.Node] = set()
    pending = [end for end in ends if isinstance(end, fx.Node)]
    while pending:
        node = pending.pop()
        node = instead.get(node, node) or node
        if node not in ancestors:
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors


# The verb that names any number of ops.
_OF_MANY = "reorder"


class NotOfLayers(Exception):
    """Is raised when a line names ops of layers that are far from each other."""


def lines_of_layers(schedule: Schedule, fewer: FewerLayers) -> Schedule:
    """Return the schedule for all layers, with the same settings. Raises
    NotOfLayers."""
    repeats = _Repeats(fewer)
    lines = [line for short in schedule.lines for line in repeats.lines(short)]
    return replace(schedule, lines=tuple(lines))


class _Repeats:
    """Repeats lines for the layers left out. ``places``: of the ops of layers that
    stay, and of results of lines, the row and the place in it without the layers left
    out; ``again``: for names in the layer right before those left out, the
    corresponding names in it and in each of these."""

    def __init__(self, fewer: FewerLayers) -> None:
        self.fewer = fewer
        self.places: dict[str, tuple[int, int]] = {}
        self.again: dict[str, list[str]] = {}
        for i, row in enumerate(fewer.rows):
            names = [n.name for n in row.nodes]
            stay = names[: row.begin] + names[row.end :]
            self.places |= {name: (i, at) for at, name in enumerate(stay)}
            for at in range(max(0, row.begin - row.distance), row.begin):
                self.again[names[at]] = names[at : row.end : row.distance]

    def lines(self, line: Line) -> Iterator[Line]:
        """Yield a line for each layer that it stands for."""
        places = [self.places[name] for name in line.names if name in self.places]
        if not places:
            yield line
            return
        first, ats = min(places)[0], [at for _, at in places]
        row, home = self.fewer.rows[first], max(ats)
        is_of_many = home - min(ats) >= 2 * row.distance
        if is_of_many or any(other != first for other, _ in places):
            yield self._of_many(line)
            return
        self.places |= dict.fromkeys(line.gives, (first, home))
        layers = range(self.fewer.removed + 1)
        if home < row.begin - row.distance:
            layers = layers[:1]
        elif home >= row.begin:
            layers = layers[-1:]
        else:
            for name in line.gives:
                self.again[name] = [name, *(f"{name}_layer{i}" for i in layers[1:])]
        for i in layers:
            later = partial(self._later, begin=row.begin, layers=i)
            gives = (self.again[n][i] if n in self.again else n for n in line.gives)
            yield replace(line.renamed(later), gives=tuple(gives))

    def _later(self, name: str, begin: int, layers: int) -> str:
        """Return the name of an op before ``begin``, ``layers`` layers later."""
        i, at = self.places.get(name, (0, begin))
        if at >= begin or not layers:
            return name
        if name in self.again:
            return self.again[name][layers]
        row = self.fewer.rows[i]
        if row.nodes[at].name != name:  # a result of a line of an earlier layer
            raise NotOfLayers(name)
        return row.nodes[at + layers * row.distance].name

    def _of_many(self, line: Line) -> Line:
        """Return a line that names ops of many layers, with those of the layers left
        out."""
        if line.verb != _OF_MANY or line.gives:
            raise NotOfLayers(str(line))

        def all_of(names: Argument) -> list[str]:
            each = names if isinstance(names, tuple) else (str(names),)
            return [more for name in each for more in self.again.get(name, [name])]

        first, *gathers = line.arguments
        more = [name for gather in gathers for name in all_of(gather)]
        return replace(line, arguments=(tuple(all_of(first)), *more))
