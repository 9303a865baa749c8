"""Strategies that can still be in a better choice, and what is solved of them alone.

In: a Flat with priced costs, a clock. Out: a choice and a bound for all of the Flat. A
strategy's excess over the bound of message passing is what a choice with it costs more
at least; strategies above a cut are left out, and the bound is the lesser of what is
then proved and the cut. Never claims more than it has shown.

Source: reduced-cost fixing, here by min-marginals (as Savchynskyy et al., "Global MAP
optimality by shrinking the combinatorial search area", NIPS 2013, use them).
"""

from __future__ import annotations

import math
import time

import numpy as np

from fxpar.sharding.solver import message_passing, neighborhood_search
from fxpar.sharding.solver.exact_reductions import reduce
from fxpar.sharding.solver.flat_arrays import Flat, cost_of, flatten
from fxpar.sharding.solver.problem import Infeasible

# Variables of the programs that are tried, one after the other.
_LADDER = (3_000, 12_000, 50_000)


def solve_near(
    flat: Flat,
    unary: np.ndarray,
    off: float,
    choice: np.ndarray | None,
    deadline: float,
    tolerance: float = 1e-9,
) -> tuple[np.ndarray | None, float]:
    """(the best choice that fits, or None; a bound).

    ``unary``: with prices, ``off``: what the prices of all room take off the bound.
    ``choice``: the best known, or None. Ends once they are within ``tolerance``.
    """
    state = message_passing.start(flat)
    now = time.perf_counter()
    _, before = message_passing.converge(state, unary, now + 0.3 * (deadline - now))
    base = bound = before + flat.constant - off
    everything = np.arange(len(flat.size))
    for most in _LADDER:
        cost = math.inf if choice is None else cost_of(flat, choice)
        now = time.perf_counter()
        near = choice is not None and cost - bound <= tolerance * abs(cost)
        if near or deadline - now < 0.05:
            break
        cut = _cut(flat, state.excess, cost - base, most)
        start = state.choice.copy() if choice is None else choice
        keep = state.excess <= cut
        keep[flat.at[:-1] + start] = True
        until = now + 0.5 * (deadline - now)
        found, proved = neighborhood_search.solve_window(
            flat, start, everything, until, keep
        )
        if found is not None and cost_of(flat, found) < cost:
            choice, cost = found, cost_of(flat, found)
        if proved:
            # The program ends within a hundred thousandth of its optimum.
            bound = max(bound, min(cost - 1e-5 * abs(cost), base + cut))
        if not proved or cut >= cost - base:
            break
    return choice, bound


def pass_pruned(
    flat: Flat, upper: float, deadline: float, tolerance: float
) -> tuple[np.ndarray | None, float]:
    """(a choice or None, a bound that holds for all that is below ``upper``): messages
    on everything, then without the strategies that are in nothing below ``upper``,
    reduced. Memory is left aside."""
    begun = time.perf_counter()
    state = message_passing.start(flat)
    enough = upper - tolerance * abs(upper) - flat.constant
    until = begun + 0.35 * (deadline - begun)
    bound, before = message_passing.converge(state, flat.unary, until, enough=enough)
    bound += flat.constant
    choice = state.choice.copy()
    state.descend(flat.unary, choice)
    if upper - bound <= tolerance * abs(upper):
        return choice, bound
    keep = state.excess <= upper - (before + flat.constant) + 1e-9 * abs(upper)
    net = neighborhood_search.restrict(flat, choice, np.arange(len(flat.size)))
    try:
        for i in range(len(flat.size)):
            net.keep(i, np.flatnonzero(keep[flat.at[i] : flat.at[i + 1]]))
        now = time.perf_counter()
        # What dominates costs more to find here than it saves.
        reduce(net, now + 0.5 * (deadline - now), dominance=False)
    except Infeasible:  # ``upper`` is the optimum, but for rounding
        return choice, max(bound, upper)
    core = flatten(net)
    better, _, higher = message_passing.pass_messages(
        core, deadline, tolerance=tolerance
    )
    bound = max(bound, min(higher, upper))
    if better is None:
        return choice, bound
    found = {int(i): int(k) for i, k in zip(core.nodes, better, strict=True)}
    return np.array(net.expand(found), np.int64), bound


def _cut(flat: Flat, excess: np.ndarray, enough: float, most: int) -> float:
    """The largest cut, at most ``enough``, with no more than ``most`` variables."""
    levels = np.unique(excess[np.isfinite(excess)])
    levels = levels[levels <= enough]
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        count = neighborhood_search.variables_of(flat, excess <= levels[middle]).sum()
        low, high = (middle + 1, high) if count <= most else (low, middle)
    if low == len(levels):
        return enough if math.isfinite(enough) else math.inf
    return float(levels[low - 1]) if low else 0.0
