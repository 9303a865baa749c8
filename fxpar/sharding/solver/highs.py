"""Runs HiGHS with a limit of work that holds, and one of wall-clock time far above it.

In: a mixed-integer program as arrays, and seconds of work (``work_clock``). Out: the
answer of HiGHS, or None if it did not answer. HiGHS has limits on the steps of a
relaxation and on the nodes of a program, but none on the time of the first node: so the
relaxation is solved first, and if many of its variables are no integers, so that the
first node would take long, the program is left (``highs_process``). Larger programs run
in a worker process, started when first needed and kept, so that it can be ended when
wall-clock time is up. Never: waits longer than wall-clock time allows.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import subprocess
import sys
import time
from typing import Any

from fxpar.sharding.solver import highs_process, work_clock
from fxpar.sharding.solver.highs_process import INSIDE, HighsOutcome, solved


def run(program: dict[str, Any], seconds: float) -> HighsOutcome | None:
    """Minimise ``cost @ x`` over 0 <= x <= 1 with ``equal @ x == right`` and, unless
    None, ``below @ x <= top``; ``whole``: which x are integers; ``gap``: relative."""
    if len(program["cost"]) <= INSIDE:
        outcome = solved(program, seconds)
        work_clock.did(outcome.work)
        return outcome
    deadline = time.perf_counter() + work_clock.wall_left()
    worker, answer = _worker(deadline), None
    try:
        if worker is not None:
            _write(worker, pickle.dumps((program, seconds)))
            answer = _read(worker, deadline)
    except (OSError, EOFError):  # it has died
        _end()
        return None
    if answer is None:
        _end()
        work_clock.stop()
        return None
    outcome = HighsOutcome(*pickle.loads(answer))
    work_clock.did(outcome.work)
    return outcome


# The worker by process id, as a forked child must not talk to its parent's.
_running: dict[int, subprocess.Popen] = {}


def _worker(deadline: float) -> subprocess.Popen | None:
    """Return a worker that is ready, or None if none is by the deadline."""
    running = _running.get(os.getpid())
    if running is not None and running.poll() is None:
        return running
    _end()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # Run by its path: the package's own imports are not needed there.
    process = subprocess.Popen(
        [sys.executable, highs_process.__file__],
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
    """Return one message, or None at the deadline. Raises EOFError if the worker has
    ended."""
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
