"""Passes messages on a Flat: finds a lower bound, and choices read off the messages.

In: a Flat and a clock. Out: the best bound and the cheapest allowed choice met. With
prices on memory rows the bound holds for choices that fit. Never: proves that nothing
fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.network import Flat, build, cost_of
from fxpar.sharding.solver.problem import Edge, Problem


@dataclass
class Messages:
    """Is the state of message passing on one Flat: messages and the last decoding."""

    flat: Flat
    values: np.ndarray  # all messages; those of an entry begin at its ``Flat.message``
    choice: np.ndarray  # the last decoding, by node
    # (strategies,) how much a strategy of a node raises the bound; this plus the bound
    # before the last pass holds for every choice with the strategy, since each chain
    # through the node then costs its min-marginal (reduced cost).
    excess: np.ndarray

    def sweep(self, unary: np.ndarray, rounds: int) -> float:
        """Pass messages; return the bound for these unary costs, without the
        constant."""
        from fxpar.sharding.solver import numba_loops

        work_clock.did(rounds * self.flat.sweep_seconds)
        written = self.values, self.choice, self.excess
        return float(numba_loops.sweep(self.flat.arrays, unary, *written, rounds))

    def descend(self, unary: np.ndarray, choice: np.ndarray, rounds: int = 20) -> None:
        """Improve a choice in place by single moves."""
        from fxpar.sharding.solver import numba_loops

        work_clock.did(self.flat.look_seconds)
        numba_loops.descend(self.flat.arrays, unary, choice, rounds)


def converge(
    state: Messages,
    unary: np.ndarray,
    deadline: float,
    patience: int = 60,
    enough: float = math.inf,
) -> tuple[float, float]:
    """Sweep until the bound stalls or is ``enough``, or the deadline. Return the bound,
    and the one before the last sweep, to which ``state.excess`` belongs, both without
    the constant."""
    bound = before = state.sweep(unary, 1)
    rounds, stalled = 2, 0
    while True:
        before = max(before, state.sweep(unary, rounds))
        now = state.sweep(unary, 1)
        stalled = 0 if now - bound > 1e-6 * abs(now) else stalled + rounds + 1
        bound = max(now, bound)
        seconds_left, each = work_clock.left(deadline), state.flat.sweep_seconds
        if stalled > patience or bound >= enough or seconds_left < 3 * each:
            return bound, before
        rounds = max(1, min(2 * rounds, int(seconds_left / each / 2), 20))


def start(flat: Flat) -> Messages:
    """Return messages of zero."""
    return Messages(
        flat,
        np.zeros(flat.messages),
        np.zeros(len(flat.size), np.int64),
        np.zeros(len(flat.unary)),
    )


def pass_messages(
    flat: Flat, deadline: float, *, tolerance: float = 1e-9, patience: int = 60
) -> tuple[np.ndarray | None, float, float]:
    """Return (cheapest allowed choice met or None, its cost, bound), ignoring memory.

    Ends when the gap is within ``tolerance`` of the cost, when ``patience`` sweeps in a
    row raised the bound by less than a ten thousandth of the gap, or at the deadline.
    """
    state = start(flat)
    best, cost, bound = None, math.inf, -math.inf
    rounds, stalled, sweeps = 2, 0, 0
    while True:
        now = state.sweep(flat.unary, rounds) + flat.constant
        gain, bound = now - bound, max(bound, now)
        gap = cost - bound if math.isfinite(cost) else abs(bound) / 100
        stalled = 0 if gain > 1e-4 * gap else stalled + rounds
        sweeps += rounds
        choice = state.choice.copy()
        if math.isfinite(cost_of(flat, choice)):
            state.descend(flat.unary, choice)
        value = cost_of(flat, choice)
        if value < cost:
            best, cost = choice, value
        if cost - bound <= tolerance * abs(cost) or stalled > patience:
            return best, cost, bound
        seconds_left, each = work_clock.left(deadline), flat.sweep_seconds
        if seconds_left < 2 * each:
            return best, cost, bound
        rounds = max(1, min(2 * rounds, sweeps, int(seconds_left / each / 2), 50))


def warm() -> None:
    """Load the kernels, compiling them if this machine has not yet."""
    network = build(Problem((np.zeros(1), np.zeros(1)), (Edge(0, 1, 0),), (np.eye(1),)))
    flat = Flat(network)
    state = start(flat)
    state.sweep(flat.unary, 1)
    state.descend(flat.unary, state.choice)
