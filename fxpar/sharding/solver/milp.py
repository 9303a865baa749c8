"""Turns a Flat into a mixed-integer program, which HiGHS solves.

In: a Flat and a deadline. Out: a choice, if one was found, and a lower bound. Edge
variables are continuous and tied to strategies by equality marginals, the strongest
pairwise relaxation; forbidden pairs have no variable. Memory rows are added when they
are exceeded. HiGHS runs in this process and lets other threads run meanwhile. Never:
returns a choice that does not fit.

The form is that of Shlezinger's local polytope as used by Zheng et al., "Alpa", OSDI
2022, section 4.2, with the inequalities made equalities.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.network import Flat, cost_of, fits, usage_of


class MilpSolution(NamedTuple):
    """Is the answer of an integer program."""

    choice: np.ndarray | None  # a choice that fits, or None
    bound: float  # no choice that fits costs less
    proved: bool  # whether the choice is optimal, or, without one, none fits


def variables(flat: Flat) -> int:
    """Return how many variables the program would have, at most."""
    owner = flat.owner
    pairs = int((flat.size[owner] * flat.size[flat.other]).sum()) // 2
    return int(flat.size.sum()) + pairs


def solve_program(
    flat: Flat, deadline: float, *, magnitude: float, gap: float = 0.0
) -> MilpSolution:
    """Solve until proved to a relative ``gap`` or the work passes ``deadline``.

    ``magnitude``: about the cost of the optimum, which sets HiGHS's absolute
    tolerances.
    """
    from scipy import sparse

    cost, marginals, total = _program(flat)
    scale = magnitude / 1e4 or 1.0
    singles = len(flat.unary)
    integrality = np.zeros(len(cost))
    integrality[:singles] = 1
    rows = _first_rows(flat)
    best, bound = None, -math.inf
    while True:
        seconds = work_clock.left(deadline)
        if seconds <= 0.01:
            return MilpSolution(best, bound, False)
        below = top = None
        if len(rows):
            memory = sparse.csr_array(_memory_rows(flat, rows))
            memory.resize((len(rows), len(cost)))
            size = np.maximum(flat.room[rows], 1e-9 * np.abs(flat.usage).max())
            below = sparse.csr_array(sparse.diags_array(1 / size) @ memory)
            top = flat.room[rows] / size
        program = {"cost": cost / scale, "whole": integrality, "gap": gap}
        program |= {"equal": marginals, "right": total, "below": below, "top": top}
        result = run_highs(program, seconds)
        if result.status == 2:
            return MilpSolution(None, math.inf, True)
        if result.bound is not None:
            bound = max(bound, result.bound * scale + flat.constant)
        if result.x is None:
            return MilpSolution(best, bound, False)
        choice = _read(flat, result.x)
        over = _exceeded(flat, choice)
        if not len(over):
            if best is None or cost_of(flat, choice) < cost_of(flat, best):
                best = choice
            return MilpSolution(best, bound, result.status == 0)
        if set(over) <= set(rows.tolist()):  # only within HiGHS's own tolerance
            return MilpSolution(best, bound, False)
        rows = np.union1d(rows, over)


def _program(flat: Flat):
    """Return (cost per variable, marginal matrix, its right-hand side)."""
    from scipy import sparse

    count, singles = len(flat.size), len(flat.unary)
    owner = np.repeat(np.arange(count), flat.size)
    cost = [flat.unary]
    row, column, value = [owner], [np.arange(singles)], [np.ones(singles)]
    right = [np.ones(count)]
    height, width = count, singles
    for i in range(count):
        for e in range(flat.first[i], flat.first[i + 1]):
            j = int(flat.other[e])
            if j < i:
                continue
            a, b = int(flat.size[i]), int(flat.size[j])
            table = flat.pool[flat.table[e] : flat.table[e] + a * b].reshape(a, b)
            x, y = np.nonzero(np.isfinite(table))
            z = width + np.arange(len(x))
            cost.append(table[x, y])
            row += [height + x, height + a + y, height + np.arange(a + b)]
            ends = (flat.at[i] + np.arange(a), flat.at[j] + np.arange(b))
            column += [z, z, np.concatenate(ends)]
            value += [np.ones(2 * len(x)), np.full(a + b, -1.0)]
            right.append(np.zeros(a + b))
            height += a + b
            width += len(x)
    matrix = sparse.csr_array(
        (np.concatenate(value), (np.concatenate(row), np.concatenate(column))),
        shape=(height, width),
    )
    return np.concatenate(cost), matrix, np.concatenate(right)


def _memory_rows(flat: Flat, rows: np.ndarray):
    """Return (rows, strategies) a sparse matrix of usages at some rows."""
    from scipy import sparse

    owner = flat.holder
    row, column, value = [], [], []
    for at, r in enumerate(rows):
        for m in np.flatnonzero((flat.begin <= r) & (r < flat.end)):
            i = owner[m]
            row.append(np.full(flat.size[i], at))
            column.append(flat.at[i] + np.arange(flat.size[i]))
            value.append(flat.usage[flat.use[m] : flat.use[m] + flat.size[i]])
    if not row:
        return sparse.csr_array((len(rows), len(flat.unary)))
    return sparse.csr_array(
        (np.concatenate(value), (np.concatenate(row), np.concatenate(column))),
        shape=(len(rows), len(flat.unary)),
    )


def _first_rows(flat: Flat) -> np.ndarray:
    """Return all rows if they are few; else none, and those that matter are added
    later."""
    count = len(flat.room)
    entries = int((flat.end - flat.begin).sum())
    if count <= 200 and entries <= 50_000:
        return np.arange(count)
    return np.zeros(0, np.int64)


def _exceeded(flat: Flat, choice: np.ndarray) -> np.ndarray:
    """Return rows a choice exceeds: local peaks of the excess, the 40 largest, largest
    first."""
    used = usage_of(flat, choice)
    if fits(flat, used):
        return np.zeros(0, np.int64)
    over = used - flat.room
    padded = np.concatenate([[-np.inf], over, [-np.inf]])
    peaks = (over > flat.slack) & (over >= padded[:-2]) & (over > padded[2:])
    where = np.flatnonzero(peaks)
    return where[np.argsort(-over[where], kind="stable")][:40]


def _read(flat: Flat, x: np.ndarray) -> np.ndarray:
    """Return the strategy with the largest variable of each node."""
    pick = [
        int(np.argmax(x[a:b])) for a, b in zip(flat.at[:-1], flat.at[1:], strict=True)
    ]
    return np.array(pick, np.int64)


# Programs with no more variables end in milliseconds.
_QUICK = 500
# Seconds of work of a relaxation: of an entry of its matrix, of a step of its simplex
# method.
_ENTRY, _STEP = 3e-6, 2e-5
# How far rounding may put an integer off.
_ROUNDING = 1e-7
# Seconds of work of the first node of a program, as a multiple of those of its
# relaxation; in addition, for each entry and each variable that is no integer there,
# times their share of all that should be. Of each further node, as a multiple of the
# first.
_FIRST, _BROKEN, _NODE = 2.0, 1e-6, 0.5


class HighsAnswer(NamedTuple):
    """Is an answer of HiGHS. ``status``: as in scipy.optimize.milp (0 optimal, 1 ended
    by a limit, 2 infeasible)."""

    status: int
    x: np.ndarray | None = None  # the best point or None
    bound: float | None = None  # the dual bound or None


def run_highs(program: dict[str, Any], seconds: float) -> HighsAnswer:
    """Minimise ``cost @ x`` over 0 <= x <= 1 with ``equal @ x == right`` and, unless
    None, ``below @ x <= top``, in about ``seconds`` of work; ``whole``: which x are
    integers; ``gap``: relative.

    HiGHS has limits on the steps of a relaxation and on the nodes of a program, but
    none on the work of the first node. So the relaxation is solved first, and if many
    of its variables are no integers, so that the first node would take long, its bound
    is the answer.
    """
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp

    equal, right, below = program["equal"], program["right"], program["below"]
    entries = equal.nnz + (0 if below is None else below.nnz)
    work, broken, bound = _ENTRY * entries, 0.0, None
    is_quick = len(program["cost"]) <= _QUICK
    if not is_quick:
        if work > seconds:
            return HighsAnswer(1)
        relaxed = linprog(
            program["cost"],
            A_eq=equal,
            b_eq=right,
            A_ub=below,
            b_ub=program["top"],
            bounds=(0, 1),
            method="highs-ds",
            options={"maxiter": _whole((seconds - work) / _STEP)} | _time_limit(),
        )
        work += _STEP * relaxed.nit
        if relaxed.status in (1, 2):
            work_clock.did(work)
            return HighsAnswer(relaxed.status)
        if relaxed.status == 0:
            whole, bound = relaxed.x[program["whole"] > 0], relaxed.fun
            count = int((np.abs(whole - np.rint(whole)) > _ROUNDING).sum())
            broken = count**2 / max(len(whole), 1)
            if not broken:
                work_clock.did(work)
                return HighsAnswer(0, relaxed.x, bound)
    first = _FIRST * work + _BROKEN * entries * broken
    if not is_quick and work + first > seconds:
        work_clock.did(work)
        return HighsAnswer(1, None, bound)
    node, limits = first * _NODE, [LinearConstraint(equal, right, right)]
    if below is not None:
        limits.append(LinearConstraint(below, -np.inf, program["top"]))
    nodes = _whole((seconds - work - first) / node)
    result = milp(
        program["cost"],
        integrality=program["whole"],
        bounds=Bounds(0, 1),
        constraints=limits,
        options={"node_limit": nodes, "mip_rel_gap": program["gap"]} | _time_limit(),
    )
    work_clock.did(work + first + node * (result.mip_node_count or 0))
    return HighsAnswer(result.status, result.x, result.mip_dual_bound)


def _whole(limit: float) -> int:
    """Return a limit as a positive number that HiGHS can hold."""
    return int(min(max(limit, 1), 2**31 - 1))


def _time_limit() -> dict[str, float]:
    """Return the option of HiGHS by which wall-clock time ends it."""
    return {"time_limit": max(work_clock.wall_left(), 0.01)}
