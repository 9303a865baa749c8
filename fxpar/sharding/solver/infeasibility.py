"""How far over the limit one must go: choices of least excess, and a bound on it.

In: a Flat with memory rows. Out: a choice whose largest excess over a row's room is
small, and a lower bound on the largest excess of any choice; a positive bound proves
that nothing fits. Costs are left aside, except that forbidden stays forbidden.

The bound is a zero-sum game of choices against weights on rows, played by
multiplicative weights (Arora, Hazan and Kale, Theory of Computing 8, 2012).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fxpar.sharding.solver import message_passing
from fxpar.sharding.solver.flat_arrays import Flat, cost_of, usage_of
from fxpar.sharding.solver.lagrangian import priced_unary


class Excess(NamedTuple):
    """``choice``: that of least ``excess`` met (None: none was allowed); ``bound``: no
    choice has less."""

    choice: np.ndarray | None
    excess: float
    bound: float


def without_costs(flat: Flat) -> Flat:
    """The same Flat in which whatever is allowed is free."""
    pool, low, high = (
        np.where(np.isinf(part), np.inf, 0.0)
        for part in (flat.pool, flat.low, flat.high)
    )
    return replace(
        flat,
        unary=np.zeros_like(flat.unary),
        pool=pool,
        low=low,
        high=high,
        constant=0.0,
    )


def excess_of(flat: Flat, choice: np.ndarray) -> float:
    """The largest excess over a row's room; negative if every row has some left."""
    return float((usage_of(flat, choice) - flat.room).max(initial=-math.inf))


def least_excess(flat: Flat, deadline: float, rounds: int = 400) -> Excess:
    """Play until a choice fits, the bound proves that none does, ``rounds`` are over or
    the clock passes the deadline."""
    free = without_costs(flat)
    state = message_passing.start(free)
    count = len(flat.room)
    score = np.zeros(count)
    best = Excess(None, math.inf, -math.inf)
    scale = max(float(np.abs(flat.room).max(initial=0)), 1e-300)
    for turn in range(rounds):
        weights = np.exp(score - score.max(initial=0))
        weights /= weights.sum()
        unary = priced_unary(free, weights)
        value = state.sweep(unary, 2) - float(weights @ flat.room)
        bound = max(best.bound, value - flat.slack)
        choice = state.choice.copy()
        state.descend(unary, choice, 2)
        over = usage_of(flat, choice) - flat.room
        best = best._replace(bound=bound)
        if math.isfinite(cost_of(free, choice)) and over.max() < best.excess:
            best = Excess(choice, float(over.max()), bound)
        if best.excess <= flat.slack or best.bound > flat.slack:
            break
        if time.perf_counter() > deadline:
            break
        score += (
            4.0 / math.sqrt(turn + 1) * over / max(np.abs(over).max(), 1e-9 * scale)
        )
    return best
