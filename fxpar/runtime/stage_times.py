"""Measure where the seconds of compiling go, by stage, in this process.

In: ``with stage("search")``, which counts the seconds inside for that stage, without
those of stages inside it: so the seconds of all stages add up to the whole. Out:
``table`` gives them as text, with what torch reports of its own parts, and begins anew.
Never: time of other processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fxpar import _torch
from fxpar._fast import cpp_kernels

# Stages, in the order they are shown in.
DYNAMO, TRACE = "Dynamo", "AOTAutograd"
INDUCTOR, COMPILER, LOAD = "Inductor", "C++ or Triton compiler", "load compiled code"
WAIT, CHECKS, PLAN = "wait for other ranks", "check inputs", "plan"
LAYOUT = "lay parameters out"
SEARCH, SCHEDULE = "search", "choose a schedule"
NORMALIZE, PARTITION, PHASE = "normalize", "partition", "bind and order"
FIRST = "first run"
ORDER = (
    *(DYNAMO, LAYOUT, CHECKS, TRACE, NORMALIZE, PLAN, SEARCH, PARTITION, SCHEDULE),
    *(PHASE, INDUCTOR, COMPILER, LOAD, WAIT, FIRST),
)

# By the name under which torch times a phase: the stage in which its seconds are
# counted, the stage they belong to, and the phase inside whose seconds are left out.
INSIDE = {
    cpp_kernels.LOADING: (INDUCTOR, COMPILER, ""),
    cpp_kernels.BEHIND_ALL: (TRACE, COMPILER, ""),
    "PyCodeCache.load_by_key_path": (INDUCTOR, LOAD, cpp_kernels.LOADING),
}

_TOTAL = "together"


# Seconds by stage, without the stages inside it, since the last table; and torch's own
# counts when that was made.
_SECONDS, _OF_TORCH = dict[str, float](), dict[str, float]()
_OPEN = threading.local()  # for each open stage, the seconds of stages inside


@dataclass
class Elapsed:
    """Holds how long a stage took."""

    # Including stages inside it; 0 until it is over.
    seconds: float = 0.0


@contextlib.contextmanager
def stage(name: str, *, nested: bool = False) -> Iterator[Elapsed]:
    """Count the seconds inside for a stage; a ``nested`` one only inside another."""
    inside: list[float] = _OPEN.__dict__.setdefault("inside", [])
    if nested and not inside:
        yield Elapsed()
        return
    inside.append(0.0)
    elapsed, start = Elapsed(), time.perf_counter()
    try:
        yield elapsed
    finally:
        elapsed.seconds = time.perf_counter() - start
        _add(name, elapsed.seconds - inside.pop())
        if inside:
            inside[-1] += elapsed.seconds


def _add(name: str, seconds: float) -> None:
    _SECONDS[name] = _SECONDS.get(name, 0.0) + seconds


def table() -> str:
    """Return the seconds of each stage since the last table, by line, and their sum."""
    now = _torch.dynamo.seconds_by_phase()
    spent = {key: now[key] - _OF_TORCH.get(key, 0.0) for key in now}
    frame = spent.get("entire_frame_compile", 0.0) - spent.get("backend_compile", 0.0)
    _add(DYNAMO, max(0.0, frame))
    for phase, (counted, name, inside) in INSIDE.items():
        alone = max(0.0, spent.get(phase, 0.0) - spent.get(inside, 0.0))
        part = min(alone, _SECONDS.get(counted, 0.0))
        _add(name, part)
        _add(counted, -part)
    _OF_TORCH.clear()
    _OF_TORCH.update(now)
    rows = [(name, _SECONDS[name]) for name in ORDER if name in _SECONDS]
    rows.append((_TOTAL, sum(_SECONDS.values())))
    _SECONDS.clear()
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}} {took:8.2f}" for name, took in rows)
