"""Orders the phases of a local graph under several settings, each order built once.

In: a local graph split into forward and backward. Out: for given settings the two
graphs, each as ``order_collectives`` orders it; settings that order a phase in the same
way get the same graph object, so that a trial costs only what it changes. Never changes
the split graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from torch import fx

from fxpar.passes.order.bucket_collectives import join_buckets
from fxpar.passes.order.forward_backward import PhasedGraph, phase_graph
from fxpar.passes.order.joinable_collectives import Joinable
from fxpar.passes.order.order_collectives import (
    BEFORE_BUCKETS,
    BEHIND_BUCKETS,
    DEFAULT,
    DELAY,
    PhaseGraph,
    Settings,
    buckets_of,
    gathers_started,
    prefetched,
)
from fxpar.passes.simulate.launches import PhasesAsRun


class Orders:
    """Orders a split graph under one settings after the other, with a cache."""

    def __init__(self, parts: PhasedGraph) -> None:
        self.parts = parts
        self._phases = [_PhaseOrders(parts, i) for i in range(parts.count)]

    @property
    def started(self) -> int:
        """Return the number of gathers that may start ahead, the phases' largest."""
        return max(phase.started for phase in self._phases)

    def of(self, settings: Settings) -> Hashable:
        """Return a key that is equal for settings that give the graph one order."""
        return tuple(phase.of(settings) for phase in self._phases)

    def as_run(self, settings: Settings) -> PhasesAsRun:
        """Return the phases in the order of settings."""
        graphs = [phase.graph(settings) for phase in self._phases]
        return PhasesAsRun(tuple(graphs), self.parts.is_gradient)


class _PhaseOrders:
    """Orders one phase. ``started``: number of gathers that may start ahead."""

    def __init__(self, parts: PhasedGraph, i: int) -> None:
        self._parts, self._i = parts, i
        inputs = (*parts.inputs, *parts.saved) if i else parts.inputs
        self.started = gathers_started((parts.forward, parts.backward)[i], inputs)
        self._ordered: dict[Hashable, fx.Graph] = {}
        first = self._fresh(DEFAULT)
        self._first: PhaseGraph | None = first
        self._joinable = (
            Joinable.of(first.graph, reductions=first.backward)
            if first.waits
            else Joinable(())
        )

    def _fresh(self, settings: Settings) -> PhaseGraph:
        """Return a copy of the phase after the passes before "bucket"."""
        phase = phase_graph(self._parts, self._i, settings)
        for row in BEFORE_BUCKETS:
            row.run(phase.graph, phase)
        return phase

    def of(self, settings: Settings) -> Hashable:
        """Return a key that is equal for settings that give the phase one order."""
        ahead = prefetched(settings.ahead, self.started)
        return ahead, buckets_of(self._joinable, settings)

    def graph(self, settings: Settings) -> fx.Graph:
        """Return the phase in the order of settings; it must not be changed."""
        order = self.of(settings)
        if order not in self._ordered:
            self._ordered[order] = self._order(settings)
        return self._ordered[order]

    def _order(self, settings: Settings) -> fx.Graph:
        """Return an ordered copy; the first call uses the copy made in ``__init__``."""
        first, self._first = self._first, None
        phase = replace(first, settings=settings) if first else self._fresh(settings)
        if phase.waits:
            buckets = buckets_of(self._joinable, settings)
            join_buckets(phase.graph, phase.build, buckets)
        for row in (*BEHIND_BUCKETS, DELAY):
            row.run(phase.graph, phase)
        return phase.graph
