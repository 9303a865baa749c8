"""Gives one mixed-integer program to HiGHS, for a number of seconds of work.

In: a program as arrays. Out: ``HighsOutcome``. As a script this file answers programs
from standard input. Never: imports anything of the package, so that it starts soon.
"""

from __future__ import annotations

import os
import pickle
from typing import Any, NamedTuple

import numpy as np

# Programs with no more variables end in milliseconds.
INSIDE = 500
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


class HighsOutcome(NamedTuple):
    """Is an answer of HiGHS; ``status`` as in scipy.optimize.milp (0 optimal, 2
    infeasible)."""

    status: int
    x: np.ndarray | None  # the best point or None
    bound: float | None  # the dual bound or None
    work: float  # seconds of work that it took


def solved(program: dict[str, Any], seconds: float) -> HighsOutcome:
    """Return the answer of HiGHS to a program (``highs.run``) in about ``seconds`` of
    work; for one that would take longer, the bound of its relaxation."""
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp

    equal, right, below = program["equal"], program["right"], program["below"]
    entries = equal.nnz + (0 if below is None else below.nnz)
    work, relaxed = _ENTRY * entries, None
    if len(program["cost"]) > INSIDE:
        if work > seconds:
            return HighsOutcome(1, None, None, 0.0)
        relaxed = linprog(
            program["cost"],
            A_eq=equal,
            b_eq=right,
            A_ub=below,
            b_ub=program["top"],
            bounds=(0, 1),
            method="highs-ds",
            options={"maxiter": max(1, int((seconds - work) / _STEP))},
        )
        work += _STEP * relaxed.nit
        if relaxed.status == 1:
            return HighsOutcome(1, None, None, work)
        if relaxed.status == 2:
            return HighsOutcome(2, None, None, work)
    broken, bound = 0.0, None
    if relaxed is not None and relaxed.status == 0:
        whole, bound = relaxed.x[program["whole"] > 0], relaxed.fun
        count = int((np.abs(whole - np.rint(whole)) > _ROUNDING).sum())
        broken = count**2 / max(len(whole), 1)
        if not broken:
            return HighsOutcome(0, relaxed.x, bound, work)
    first = _FIRST * work + _BROKEN * entries * broken
    if relaxed is not None and work + first > seconds:
        return HighsOutcome(1, None, bound, work)
    node = first * _NODE
    limits = [LinearConstraint(equal, right, right)]
    if below is not None:
        limits.append(LinearConstraint(below, -np.inf, program["top"]))
    result = milp(
        program["cost"],
        integrality=program["whole"],
        bounds=Bounds(0, 1),
        constraints=limits,
        options={
            "node_limit": max(1, int((seconds - work - first) / node)),
            "mip_rel_gap": program["gap"],
        },
    )
    work += first + node * (result.mip_node_count or 0)
    return HighsOutcome(result.status, result.x, result.mip_dual_bound, work)


def _serve() -> None:
    """Answer programs from standard input until it closes."""
    import scipy.optimize  # noqa: F401  loaded before "ready" is sent

    take = os.fdopen(os.dup(0), "rb")
    give = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that HiGHS prints must not get between the answers

    def answer(data: bytes) -> None:
        give.write(len(data).to_bytes(8, "little") + data)
        give.flush()

    answer(b"ready")
    while head := take.read(8):
        program, seconds = pickle.loads(take.read(int.from_bytes(head, "little")))
        answer(pickle.dumps(tuple(solved(program, seconds))))


if __name__ == "__main__":
    _serve()
