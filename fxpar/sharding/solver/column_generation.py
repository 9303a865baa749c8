"""Prices on memory rows by column generation, which for small problems is quick.

In: a Flat with memory rows and a clock. Out: prices, the bound they prove, and the
choices met, as ``prices.raise_prices`` has them. A linear program over the choices met
so far says what prices would be best if there were no others; message passing at prices
between these and the best ones answers with another choice. Never claims a bound that
message passing has not proved.

Source: Kelley's cutting planes (J. SIAM 8, 1960) for the Lagrangian dual; the prices in
between are Wentges's (Int. Trans. Oper. Res. 4, 1997).
"""

from __future__ import annotations

import math
import time

import numpy as np

from fxpar.sharding.solver import message_passing
from fxpar.sharding.solver.flat_arrays import Flat, cost_of, fits, usage_of
from fxpar.sharding.solver.lagrangian import Priced, in_turn, priced_unary

# Sweeps at each prices; how near prices stay to the best ones; rounds without a new
# choice that end it.
_SWEEPS, _STAY, _IDLE = 10, 0.5, 3


def generate(
    flat: Flat, deadline: float, prices: np.ndarray, tolerance: float = 1e-5
) -> Priced:
    """Prices from ``prices`` on, until no choice met later can raise the bound by more
    than ``tolerance`` of it, nothing new is met, or the deadline."""
    state = message_passing.start(flat)
    best = Priced(prices, -math.inf, None, math.inf)
    met: dict[bytes, tuple[np.ndarray, float, np.ndarray]] = {}
    idle, most = 0, 1.0
    message_passing.converge(state, priced_unary(flat, prices), deadline, patience=6)
    while idle < _IDLE and time.perf_counter() < deadline:
        unary = priced_unary(flat, prices)
        bound = state.sweep(unary, _SWEEPS) + flat.constant - float(prices @ flat.room)
        if bound > best.bound:
            best.bound, best.prices = bound, prices
        before = len(met)
        for rounds in (0, 20):
            choice = state.choice.copy()
            state.descend(unary, choice, rounds)
            _meet(flat, best, met, choice)
        idle = 0 if len(met) > before else idle + 1
        if not met:
            break
        most = max(most, 10 * abs(bound))
        goal, ahead = _master(flat, list(met.values()), most)
        if goal - best.bound <= tolerance * abs(goal):
            break
        stay = _STAY if idle == 0 else 0.0
        prices = stay * best.prices + (1 - stay) * ahead
    best.met = in_turn(flat, best.prices, [choice for choice, _, _ in met.values()])
    return best


def _meet(flat: Flat, best: Priced, met: dict, choice: np.ndarray) -> None:
    """Remember a choice that is allowed, and the cheapest that fits."""
    cost, key = cost_of(flat, choice), choice.tobytes()
    if key in met or not math.isfinite(cost):
        return
    used = usage_of(flat, choice)
    met[key] = choice, cost, used - flat.room
    if cost < best.cost and fits(flat, used):
        best.choice, best.cost = choice, cost


def _master(flat: Flat, met: list, most: float) -> tuple[float, np.ndarray]:
    """(bound, prices) that would be the best if there were no other choices; the price
    of all room is ``most`` at most."""
    from scipy.optimize import linprog

    costs = np.array([cost for _, cost, _ in met])
    over = np.stack([excess for _, _, excess in met])
    scale = float(np.abs(flat.room).max()) or 1.0
    rows = np.flatnonzero((over > 0).any(0))
    prices = np.zeros(len(flat.room))
    if not len(rows):
        return float(costs.min()), prices
    # bound - sum over rows of price * excess <= cost, for every choice.
    matrix = np.hstack([np.ones((len(met), 1)), -over[:, rows] / scale])
    total = np.append(0.0, np.ones(len(rows)))
    result = linprog(
        np.append(-1.0, np.zeros(len(rows))),
        A_ub=np.vstack([matrix, total]),
        b_ub=np.append(costs, most),
        bounds=[(None, None)] + [(0, None)] * len(rows),
        method="highs",
    )
    if result.x is None:
        return math.inf, prices
    prices[rows] = result.x[1:] / scale
    return float(result.x[0]), prices
