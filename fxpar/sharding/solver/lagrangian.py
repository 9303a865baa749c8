"""Puts prices on memory rows: a lower bound for choices that fit, and choices near
them.

In: a Flat with memory rows and a clock. Out: prices, the bound they prove, and the
cheapest choice met that fits. The bound is that of message passing on costs plus priced
usage, less the price of all room (Lagrangian duality); it holds for any prices, so
rounding and early ends cost tightness only.

Steps: Polyak's, with a deflected subgradient (Camerini, Fratta and Maffioli, "On
improving relaxation methods by modified gradient techniques", 1975). Never: claims a
bound that message passing has not proved.

Where nothing may fit, ``least_excess`` finds how far over the limit one must go: a
choice whose largest excess over a row's room is small, and a lower bound on the largest
excess of any choice; a positive bound proves that nothing fits. Costs are ignored,
except that forbidden stays forbidden. The bound is a zero-sum game of choices against
weights on rows, played by multiplicative weights (Arora, Hazan and Kale, Theory of
Computing 8, 2012).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpar.sharding.solver import message_passing, work_clock
from fxpar.sharding.solver.network import Flat, cost_of, fits, usage_of

# Seconds of work of pricing one usage.
_PRICE = 6e-9


@dataclass
class Priced:
    """Holds the results of a search of prices on memory rows."""

    prices: np.ndarray  # (rows,) >= 0, the prices of the best bound
    bound: float  # the best bound so far: no choice within memory costs less
    choice: np.ndarray | None  # the cheapest that fits among those met, or None
    cost: float  # cost of that choice; infinite if there is none


def priced_unary(flat: Flat, prices: np.ndarray) -> np.ndarray:
    """Return unary costs plus the price of each strategy's usage."""
    work_clock.did(_PRICE * len(flat.usage))
    total = np.append(0.0, np.cumsum(prices))
    owner = flat.holder
    price = total[flat.end] - total[flat.begin]
    size = flat.size[owner]
    entry = np.repeat(np.arange(len(owner)), size)
    within = np.arange(len(flat.usage)) - np.repeat(flat.use, size)
    out = flat.unary.copy()
    np.add.at(out, flat.at[owner][entry] + within, flat.usage * price[entry])
    return out


def prices_at(flat: Flat, price_at: Sequence[tuple[int, float]]) -> np.ndarray:
    """Return (rows,) prices given by time, each at the row that has begun by then."""
    out = np.zeros(len(flat.room))
    for when, price in price_at:
        if len(out):
            out[max(int(np.searchsorted(flat.when, when, "right")) - 1, 0)] += price
    return out


def prices_by_moment(flat: Flat, prices: np.ndarray) -> tuple[tuple[int, float], ...]:
    """Return (time, price) of the rows that have a price, as ``prices_at`` takes
    them."""
    where = np.flatnonzero(prices).tolist()
    return tuple((int(flat.when[r]), float(prices[r])) for r in where)


def raise_prices(
    flat: Flat,
    deadline: float,
    *,
    target: float = math.inf,
    prices: np.ndarray | None = None,
    patience: int = 40,
    tolerance: float = 1e-6,
) -> Priced:
    """Ascend the bound until it is within ``tolerance`` of ``target`` (the cost of a
    known choice), steps become tiny, or the deadline. ``prices``: the prices to begin
    with."""
    state = message_passing.start(flat)
    prices = np.zeros(len(flat.room)) if prices is None else prices.copy()
    best = Priced(prices, -math.inf, None, math.inf)
    unary = priced_unary(flat, prices)
    begun = work_clock.now()
    enough = target - tolerance * abs(target) if math.isfinite(target) else math.inf
    enough += float(prices @ flat.room) - flat.constant
    until = begun + 0.6 * (deadline - begun)
    message_passing.converge(state, unary, until, patience=6, enough=enough)
    direction = np.zeros(len(prices))
    step, stalled = 1.0, 0
    ceiling = _ceiling(flat)  # a bound above it means that nothing fits
    while step > 1e-3:
        begun = work_clock.now()
        bound = state.sweep(unary, 2) + flat.constant - float(prices @ flat.room)
        usage = _note(best, flat, state)
        gain = bound - best.bound
        if bound > ceiling:
            break
        if gain > 0:
            best.bound, best.prices = bound, prices
        stalled = 0 if gain > 1e-4 * abs(bound) else stalled + 1
        goal = min(target, best.cost)
        if math.isfinite(goal) and goal - best.bound <= tolerance * abs(goal):
            break
        if stalled > patience:
            step, stalled, prices = step / 2, 0, best.prices
        excess = usage - flat.room
        direction = 0.6 * direction + 0.4 * excess
        direction[(prices <= 0) & (direction < 0)] = 0
        square = float(direction @ direction)
        if square == 0:
            break
        if not math.isfinite(goal):
            goal = bound + 0.1 * abs(bound)
        ahead = max(goal - bound, 1e-3 * abs(bound)) * step
        prices = np.maximum(prices + ahead / square * direction, 0.0)
        unary = priced_unary(flat, prices)
        if work_clock.left(deadline) < 1.5 * (work_clock.now() - begun):
            break
    return best


def _ceiling(flat: Flat) -> float:
    """Return more than any allowed choice costs."""
    allowed = flat.pool[np.isfinite(flat.pool)]
    top = float(np.abs(allowed).max(initial=0)) * len(flat.other)
    return top + 2 * float(np.abs(flat.unary).sum()) + abs(flat.constant) + 1e-300


def _note(best: Priced, flat: Flat, state: message_passing.Messages) -> np.ndarray:
    """Keep the decoding if it is the cheapest that fits; return its usage."""
    choice = state.choice.copy()
    usage, cost = usage_of(flat, choice), cost_of(flat, choice)
    if cost < best.cost and fits(flat, usage):
        best.choice, best.cost = choice, cost
    return usage


class Excess(NamedTuple):
    """Says how far over the limit the best choice met is, and any must be."""

    choice: np.ndarray | None  # of least ``excess`` met (None: none was allowed)
    excess: float
    bound: float  # no choice has less excess


def without_costs(flat: Flat) -> Flat:
    """Return the same Flat in which all that is allowed is free."""
    free = copy(flat)
    free.pool, free.low, free.high = (
        np.where(np.isinf(part), np.inf, 0.0)
        for part in (flat.pool, flat.low, flat.high)
    )
    free.unary, free.constant = np.zeros_like(flat.unary), 0.0
    return free


def least_excess(flat: Flat, deadline: float) -> Excess:
    """Play until a choice fits, the bound proves that none does, 400 rounds are over or
    the clock passes the deadline."""
    free = without_costs(flat)
    state = message_passing.start(free)
    count = len(flat.room)
    score = np.zeros(count)
    best = Excess(None, math.inf, -math.inf)
    scale = max(float(np.abs(flat.room).max(initial=0)), 1e-300)
    for turn in range(400):
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
        if work_clock.left(deadline) < 0:
            break
        score += (
            4.0 / math.sqrt(turn + 1) * over / max(np.abs(over).max(), 1e-9 * scale)
        )
    return best
