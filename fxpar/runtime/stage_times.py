"""Where the seconds of compiling go, by stage, in this process.

``with stage("search")`` counts the seconds inside for that stage, without those of
stages inside it: so the seconds of all stages add up to those of the whole. ``table``
gives them as text, with what torch says of its own parts, and begins anew.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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

# By the names that torch times them under: the stage they are counted in, the one they
# are of, and the phase inside that is not counted with them.
INSIDE = {
    cpp_kernels.LOADING: (INDUCTOR, COMPILER, ""),
    cpp_kernels.BEHIND_ALL: (TRACE, COMPILER, ""),
    "PyCodeCache.load_by_key_path": (INDUCTOR, LOAD, cpp_kernels.LOADING),
}

_TOTAL = "together"


@dataclass
class _Stages:
    # Of each stage by itself, since the last table.
    seconds: dict[str, float] = field(default_factory=dict)
    # What torch had counted when the last table was made.
    torch: Mapping[str, float] = field(default_factory=dict)


_STAGES = _Stages()
_OPEN = threading.local()  # of each stage that is open, the seconds of those inside


@dataclass
class Elapsed:
    """How long a stage took."""

    # With those of stages inside it; 0 until it is over.
    seconds: float = 0.0


@contextlib.contextmanager
def stage(name: str, *, nested: bool = False) -> Iterator[Elapsed]:
    """Count the seconds inside for a stage; if it is ``nested``, only where it is
    inside another."""
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
    _STAGES.seconds[name] = _STAGES.seconds.get(name, 0.0) + seconds


def table() -> str:
    """Seconds of each stage since the last table, a line each, and their sum."""
    now = _torch.dynamo.seconds_by_phase()
    spent = {key: now[key] - _STAGES.torch.get(key, 0.0) for key in now}
    frame = spent.get("entire_frame_compile", 0.0) - spent.get("backend_compile", 0.0)
    _add(DYNAMO, max(0.0, frame))
    for phase, (counted, name, inside) in INSIDE.items():
        alone = max(0.0, spent.get(phase, 0.0) - spent.get(inside, 0.0))
        part = min(alone, _STAGES.seconds.get(counted, 0.0))
        _add(name, part)
        _add(counted, -part)
    seconds = _STAGES.seconds
    _STAGES.seconds, _STAGES.torch = {}, now
    rows = [(name, seconds[name]) for name in ORDER if name in seconds]
    rows.append((_TOTAL, sum(seconds.values())))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}} {took:8.2f}" for name, took in rows)
