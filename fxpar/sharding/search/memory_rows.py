"""Memory as the solver takes it: bytes of each entry under each strategy of a node.

In: entries of ``memory``, and which node decides how each version of a value lies. Out:
``solver.Live``. What lives between two nodes (a copy made for one reader, the buffers
of a collective) belongs to none of them and is left out; partial results, which are
always brought to another spec, are counted beside it while their op runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.search.memory_entries import Entry
from fxpar.sharding.search.variables import End, Node
from fxpar.sharding.solver import Live
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class Places:
    """``makers``: what makes each value, or the input it is. ``settling``: nodes in
    which it settles, by phase. ``readers``: of values that do not settle, their only
    reader. ``gradients``: where each of these values rests at the end."""

    nodes: Sequence[Node]
    makers: Mapping[int, End]
    settling: Mapping[int, tuple[int, int]]
    readers: Mapping[int, End]
    gradients: Mapping[int, End]


def rows(
    live: Sequence[Entry], places: Places, pool: Sequence[Spec], mesh: Mesh
) -> list[Live]:
    """One per entry, at most, with those that need nothing left out."""
    share = np.array([1 / mesh.count(spec.sharded_axes) for spec in pool])
    partial = np.array([bool(spec.partial) for spec in pool])
    out = []
    for entry in live:
        for end, counts in _ends(entry, places, partial):
            column = places.nodes[end.node].specs[:, end.column]
            usage = entry.nbytes * share[column]
            if counts is not None:
                usage = np.where(counts, usage, 0.0)
            if usage.any():
                out.append(Live(end.node, entry.begin, entry.end, usage))
    return out


def _ends(
    entry: Entry, places: Places, partial: np.ndarray
) -> Iterator[tuple[End, np.ndarray | None]]:
    """Which node decides an entry's spec; which of its strategies count, if not all."""
    v, nodes = entry.value, places.nodes
    maker, settled = places.makers[v], places.settling.get(v)
    if entry.kind == "made":
        if settled is not None:
            yield maker, partial[nodes[maker.node].specs[:, maker.column]]
    elif entry.kind == "gradient":
        if v in places.gradients:
            yield places.gradients[v], None
    elif entry.kind == "gathered" and nodes[maker.node].kind == "input":
        yield from _copy(entry, places)
    elif settled is not None and nodes[maker.node].kind != "input":
        yield End(settled[entry.phase], 0), None
    elif entry.kind != "gathered":
        yield maker, None


def _copy(entry: Entry, places: Places) -> Iterator[tuple[End, np.ndarray | None]]:
    """Of an input: where it settles or is read in another spec than it rests in."""
    v, nodes = entry.value, places.nodes
    if v in places.settling:
        node = places.settling[v][entry.phase]
        yield End(node, 0), nodes[node].copies
    elif v in places.readers:
        rests = nodes[places.makers[v].node].specs[:, 0]
        reader = places.readers[v]
        if len(rests) == 1:
            yield reader, nodes[reader.node].specs[:, reader.column] != rests[0]
