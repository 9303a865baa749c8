"""Processes of tests: new interpreters, or forks of one that has imported torch and
fxpar, since those imports cost seconds; what they print, and how they end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TAIL = 4000  # characters of a rank's output shown when it fails
Process = subprocess.Popen | multiprocessing.Process


def collect_rarely() -> None:
    """Let Python look for garbage more rarely: it would look through a million objects
    of torch again and again, for a sixth of the time of the tests."""
    gc.set_threshold(10_000, 20, 50)


def set_aside() -> None:
    """Let Python look no more for garbage among what there is, 600,000 objects of
    libraries at first, nor fxpar for optimizers, which takes a tenth of a second.
    Where objects are frozen, fxpar leaves garbage to Python: this is rare, too."""
    from fxpar._torch import dtensor, objects

    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    count = gc.get_freeze_count()  # goes through all of them
    gc.get_freeze_count = lambda: count
    for module in (dtensor, objects):
        module.thawed = contextlib.nullcontext


def forget_plans() -> None:
    """Drop what this process compiled: a thousand plans are a million objects, which
    Python looks through."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    if graphs := sys.modules.get("fxpar.runtime.calls.compiled_graph"):
        graphs._PLANS.clear()


def rest() -> None:
    """Let ranks of this session, if there are any, rest until they are called."""
    if spawn := sys.modules.get("tests.helpers.spawn"):
        spawn.rest()


class RankError(AssertionError):
    """Ranks raised, ended, or did not finish in time."""


def start(
    fn: Callable[..., Any],
    log: Any,
    env: Mapping[str, str],
    *args: Any,
    fork: bool = True,
) -> multiprocessing.Process:
    """A fork, or else a new interpreter, that calls ``fn(*args)`` with these variables
    and prints to ``log``."""
    context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
    context.set_forkserver_preload(["tests.helpers.prepared"])
    process = context.Process(target=_call, args=(fn, log.name, dict(env), args))
    with variables(env):  # of an interpreter that may start
        process.start()
    return process


def _call(
    fn: Callable[..., Any], output: str, env: Mapping[str, str], args: Sequence[Any]
) -> None:
    if "tests.helpers.prepared" not in sys.modules:
        collect_rarely()
    os.setsid()  # an interrupt is for the process that started it
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    with open(output, "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    fn(*args)


def log(rank: int) -> Any:
    """A file for what a rank prints."""
    return tempfile.NamedTemporaryFile(prefix=f"rank{rank}_", suffix=".log")


def end(processes: Sequence[Process], patience: float) -> None:
    """End processes: those that do not end by themselves print their stacks first."""
    deadline = time.monotonic() + patience
    for sent in (None, signal.SIGABRT, signal.SIGKILL):
        for process in processes:
            if sent is not None and is_alive(process):
                os.kill(process.pid, sent)
        while any(map(is_alive, processes)) and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + 1.0


def code(process: Process) -> Any:
    """A process's exit status, None while it runs."""
    if isinstance(process, subprocess.Popen):
        return process.poll()
    return process.exitcode


def is_alive(process: Process) -> bool:
    return code(process) is None


def host_store() -> tuple[Any, int]:
    """A store that ranks meet at, and its port."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def of_the_test() -> dict[str, str]:
    """Variables that ``conftest`` sets, else empty, as if unset."""
    names = "FXPAR_PLAN", "FXPAR_SCHEDULE", "FXPAR_MEASURE"
    return {name: os.environ.get(name, "") for name in names}


def environment(*more: Mapping[str, str]) -> dict[str, str]:
    """Variables of a rank: those of this process, and more; of fxpar's the test's."""
    out = {k: v for k, v in os.environ.items() if not k.startswith("FXPAR_")}
    out |= of_the_test()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    out |= {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
    for given in more:
        out |= given
    return out


@contextlib.contextmanager
def variables(env: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has these variables too."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
