"""HiGHS with a time limit that holds: larger programs run in a process one can end.

In: a mixed-integer program as arrays. Out: what HiGHS says, or None if it did not
answer in time. HiGHS looks at its clock rarely, and can overrun a limit of seconds by a
minute; so a worker process, started when first needed and kept, is ended when it is
late. As a script this file is that worker. Never decides what is solved.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np

# Programs with no more variables run in this process: they end in milliseconds.
_INSIDE = 500
# The share of the time HiGHS is told, since what it has found is lost if it is ended;
# and seconds kept for the answer to come back.
_SHARE, _LATE = 0.7, 0.1


class HighsOutcome(NamedTuple):
    """``status`` as scipy.optimize.milp has it (0 optimal, 2 infeasible)."""

    status: int
    # The best point or None.
    x: np.ndarray | None
    # The dual bound or None.
    bound: float | None


def run(program: dict[str, Any], seconds: float) -> HighsOutcome | None:
    """Minimise ``cost @ x`` over 0 <= x <= 1 with ``equal @ x == right`` and, unless
    None, ``below @ x <= top``; ``whole``: which x are integers; ``gap``: relative."""
    if len(program["cost"]) <= _INSIDE:
        return _solve(program, seconds)
    deadline = time.perf_counter() + seconds
    worker = _worker(deadline)
    if worker is None:
        return None
    try:
        seconds_left = deadline - time.perf_counter()
        data = pickle.dumps((program, min(_SHARE * seconds_left, seconds_left - _LATE)))
        _write(worker, data)
        answer = _read(worker, deadline)
    except (OSError, EOFError):
        answer = None
    if answer is None:
        _end()
        return None
    return HighsOutcome(*pickle.loads(answer))


def _solve(program: dict[str, Any], seconds: float) -> HighsOutcome:
    from scipy.optimize import Bounds, LinearConstraint, milp

    right = program["right"]
    limits = [LinearConstraint(program["equal"], right, right)]
    if program["below"] is not None:
        limits.append(LinearConstraint(program["below"], -np.inf, program["top"]))
    result = milp(
        program["cost"],
        integrality=program["whole"],
        bounds=Bounds(0, 1),
        constraints=limits,
        options={"time_limit": max(seconds, 0.01), "mip_rel_gap": program["gap"]},
    )
    return HighsOutcome(result.status, result.x, result.mip_dual_bound)


# The worker by process id, as a forked child must not talk to its parent's.
_running: dict[int, subprocess.Popen] = {}


def _worker(deadline: float) -> subprocess.Popen | None:
    """A worker that is ready, or None if none is by the deadline."""
    running = _running.get(os.getpid())
    if running is not None and running.poll() is None:
        return running
    _end()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # Run by its path: the package's own imports are not needed there.
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    _running[os.getpid()] = process
    try:
        ready = _read(process, deadline)
    except EOFError:
        ready = None
    if ready is None:
        _end()
        return None
    return process


@atexit.register
def _end() -> None:
    """End the worker; a later program starts a new one."""
    process = _running.pop(os.getpid(), None)
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def _write(process: subprocess.Popen, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(data).to_bytes(8, "little") + data)
    process.stdin.flush()


def _read(process: subprocess.Popen, deadline: float) -> bytes | None:
    """One message, or None at the deadline. Raises EOFError if the worker has ended."""
    assert process.stdout is not None
    pipe, data, length = process.stdout.fileno(), bytearray(), 8
    while len(data) < length:
        seconds_left = deadline - time.perf_counter()
        if not select.select([pipe], [], [], max(seconds_left, 0.0))[0]:
            if seconds_left <= 0:
                return None
            continue
        part = os.read(pipe, 1 << 20)
        if not part:
            raise EOFError
        data += part
        if len(data) >= 8:
            length = 8 + int.from_bytes(data[:8], "little")
    return bytes(data[8:])


def _serve() -> None:
    """Answer programs from standard input until it closes."""
    import scipy.optimize  # noqa: F401  loaded before "ready" is said

    take = os.fdopen(os.dup(0), "rb")
    give = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what HiGHS prints must not get between the answers

    def answer(data: bytes) -> None:
        give.write(len(data).to_bytes(8, "little") + data)
        give.flush()

    answer(b"ready")
    while head := take.read(8):
        program, seconds = pickle.loads(take.read(int.from_bytes(head, "little")))
        answer(pickle.dumps(tuple(_solve(program, seconds))))


if __name__ == "__main__":
    _serve()
