"""FlexFlow's random walk over the choices of a solver's problem, in the simulator.

``walk`` is Metropolis's: of random changes a better one is taken, a worse one with
probability exp(-(more seconds) / heat). It never leaves the memory limit, counts
proposals, not time, and is the same for the same seed.

In: a Formulation, a choice, random numbers. Out: changes of it, node -> strategy. Three
kinds: an op takes a random strategy; so do all ops tied to it (layers that repeat); an
op passes its strategy on to neighbours, each of which takes one that the edge between
them costs least with. Nodes that are no ops (where values settle, inputs and outputs
rest) then follow to where they cost least. What a change leads to is not asked here,
but for ``Room``: whether it fits in memory.

Source: FlexFlow (Jia, Zaharia and Aiken, SysML 2019, section 6.2), and its release of
July 2022 for passing on, and for the restarts at the best plan.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from simulated_choice import Overlap

from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.search.run_search import DISCOUNTS, SearchResult, cheaper
from fxpar.sharding.solver import Problem

# How often an op that was given a strategy passes it on once more.
_AGAIN = 0.75
# How far from an op that changes others follow: an input is behind where it settles.
_ROUNDS = 2
# Heat of the walk as a share of the step; back to the best plan so many times.
HEAT, RESTARTS = 2e-4, 20


class Moves:
    """Proposals for one problem; ``choice`` is read at each and never changed."""

    def __init__(self, found: Formulation, choice: list[int], seed: int = 0) -> None:
        self.problem: Problem = found.problem
        self.choice = choice
        self.random = random.Random(seed)
        self.sizes = [len(cost) for cost in self.problem.costs]
        self.is_op = [node.kind == "op" for node in found.nodes]
        self.ops = [i for i, n in enumerate(self.sizes) if self.is_op[i] and n > 1]
        self.together = self._together()
        # (other node, table, whether rows are of this node)
        self.beside: list[list[tuple[int, int, bool]]] = [[] for _ in self.sizes]
        for i, j, table in self.problem.edges:
            if self.together[i] is not self.together[j]:
                self.beside[i].append((j, table, True))
                self.beside[j].append((i, table, False))
        alike = defaultdict(list)
        tied = self.problem.tied or range(len(self.sizes))
        for i in self.ops:
            alike[tied[i]].append(i)
        self.alike = {i: alike[tied[i]] for i in self.ops}
        self.kinds: tuple[Callable[[], dict[int, int]], ...] = (
            self._one,
            self._layers,
            self._passed,
        )

    def _together(self) -> list[list[int]]:
        """For each node those that have one strategy with it: gradients and their
        parameters, tangents and their outputs."""
        groups = [[i] for i in range(len(self.sizes))]
        for i, j, t in self.problem.edges:
            table = self.problem.tables[t]
            if self.is_op[i] or self.is_op[j] or groups[i] is groups[j]:
                continue
            square = table.shape[0] == table.shape[1] > 1
            if square and np.array_equal(np.isfinite(table), np.eye(len(table)) > 0):
                groups[i] += groups[j]
                for node in groups[j]:
                    groups[node] = groups[i]
        return groups

    def propose(self) -> dict[int, int]:
        """A change; empty if nothing came of it."""
        kind = self.kinds[self.random.randrange(len(self.kinds))]
        return self._differs(self._followed(kind())) if self.ops else {}

    def _differs(self, changes: Mapping[int, int]) -> dict[int, int]:
        return {i: k for i, k in changes.items() if self.choice[i] != k}

    def _one(self) -> dict[int, int]:
        op = self.random.choice(self.ops)
        return {op: self.random.randrange(self.sizes[op])}

    def _layers(self) -> dict[int, int]:
        ((op, k),) = self._one().items()
        return dict.fromkeys(self.alike[op], k)

    def _passed(self) -> dict[int, int]:
        """From an op with its own strategy, or a random one, on to its neighbours."""
        op = self.random.choice(self.ops)
        start = self.choice[op]
        if self.random.random() < 0.5:
            start = self.random.randrange(self.sizes[op])
        changes, node = {op: start}, op
        while self.beside[node]:
            other, table, rows = self.random.choice(self.beside[node])
            if other not in changes:
                pairs = self.problem.tables[table]
                cost = pairs[changes[node]] if rows else pairs[:, changes[node]]
                least = np.flatnonzero(cost <= cost.min())
                k = int(least[self.random.randrange(len(least))])
                changes.update(dict.fromkeys(self.together[other], k))
            node = other
            if self.random.random() > _AGAIN:
                break
        return changes

    def _followed(self, changes: dict[int, int]) -> dict[int, int]:
        """With the nodes around that are no ops, unless they have a part in it."""
        given, edge = set(changes), list(changes)
        for _ in range(_ROUNDS):
            near = {
                self.together[other][0]: None
                for node in edge
                for other, _, _ in self.beside[node]
                if not self.is_op[other] and other not in given
            }
            edge = []
            for head in near:
                group = self.together[head]
                if self.sizes[head] > 1 and given.isdisjoint(group):
                    changes.update(dict.fromkeys(group, self._best(group, changes)))
                    edge += group
        return changes

    def _best(self, group: Sequence[int], changes: Mapping[int, int]) -> int:
        """The strategy that a group costs least with, all else being as it is."""
        total = np.zeros(self.sizes[group[0]])
        for node in group:
            total += self.problem.costs[node]
            for other, table, rows in self.beside[node]:
                k = changes.get(other, self.choice[other])
                pairs = self.problem.tables[table]
                total += pairs[:, k] if rows else pairs[k]
        here = changes.get(group[0], self.choice[group[0]])
        best = int(total.argmin())
        return here if total[here] <= total[best] else best

    def allowed(self, changes: Mapping[int, int]) -> bool:
        """Whether no cost of a change is forbidden."""
        for node, k in changes.items():
            if np.isinf(self.problem.costs[node][k]):
                return False
            for other, table, rows in self.beside[node]:
                a, b = k, changes.get(other, self.choice[other])
                pairs = self.problem.tables[table]
                if np.isinf(pairs[(a, b) if rows else (b, a)]):
                    return False
        return True


class Room:
    """What a choice occupies over time, against the limit."""

    def __init__(self, problem: Problem, choice: list[int]) -> None:
        self.limit, self.choice = problem.limit, choice
        entries = [m for m in problem.memory if m.begin < m.end]
        times = np.unique([m.begin for m in entries]) if entries else np.zeros(0)
        self.used = np.zeros(len(times))
        self.of: dict[int, list[tuple[slice, np.ndarray]]] = defaultdict(list)
        for m in entries if self.limit is not None else ():
            begin, end = np.searchsorted(times, (m.begin, m.end))
            self.of[m.node].append((slice(begin, end), m.usage))
            self.used[begin:end] += m.usage[choice[m.node]]

    def after(self, changes: Mapping[int, int]) -> np.ndarray:
        """(times,) what is occupied after a change."""
        used = self.used.copy()
        for node, k in changes.items():
            for span, usage in self.of.get(node, ()):
                used[span] += usage[k] - usage[self.choice[node]]
        return used

    def fits(self, used: np.ndarray) -> bool:
        """Whether it is within the limit, or no more than now."""
        if self.limit is None:
            return True
        most = np.maximum(self.limit, self.used)
        return bool((used <= most * (1 + 1e-12)).all())


@dataclass(frozen=True)
class Walk:
    """``choice``: the best that was met, ``seconds`` of its simulated step, those of
    the ``start``; of so many ``proposals`` so many were ``accepted``."""

    choice: tuple[int, ...]
    seconds: float
    start: float
    proposals: int
    accepted: int


def ranked(
    found: SearchResult, seconds: float, known: Sequence[Sequence[int]] = ()
) -> list[tuple[float, tuple[int, ...]]]:
    """(seconds of the simulated step, choice): of what a search found first, then of
    what is best with communication at a discount, and of ``known`` choices."""
    choices = [found.solution.choice, *cheaper(found, DISCOUNTS, seconds), *known]
    return [(Overlap(found.formulation, x).seconds, tuple(x)) for x in choices]


def walk(
    found: Formulation,
    start: Sequence[int],
    proposals: int,
    *,
    seed: int = 0,
    heat: float = HEAT,
) -> Walk:
    """A random walk from a choice that fits; never worse than it."""
    step = Overlap(found, start)
    moves, room = Moves(found, step.choice, seed), Room(found.problem, step.choice)
    chance = random.Random(seed)
    begun = least = step.seconds
    best, accepted = list(start), 0
    every = max(1, proposals // RESTARTS)
    for n in range(1, proposals + 1):
        if n % every == 0 and step.seconds > least:
            back = {i: k for i, k in enumerate(best) if step.choice[i] != k}
            room.used = room.after(back)
            step.change(back)
        changes = moves.propose()
        if not changes or not moves.allowed(changes):
            continue
        used = room.after(changes)
        if not room.fits(used):
            continue
        more = step.seconds_with(changes) - step.seconds
        if more > 0 and chance.random() >= math.exp(-more / (heat * begun)):
            continue
        step.change(changes)
        room.used = used
        accepted += 1
        if step.seconds < least:
            best, least = list(step.choice), step.seconds
    return Walk(tuple(best), least, begun, proposals, accepted)
