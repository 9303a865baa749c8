"""Whole scripts on several ranks, started as torchrun does."""

from __future__ import annotations

import atexit
import contextlib
import runpy
import subprocess
import sys
import time
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.processes import (
    ROOT,
    TAIL,
    Process,
    RankError,
    code,
    end,
    environment,
    host_store,
    is_alive,
    log,
    start,
)


@dataclass(frozen=True)
class Ended:
    """How a rank of a script ended."""

    code: int
    output: str


def run_script(
    script: str | Path,
    *arguments: str,
    ranks: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    fork: bool = False,
    stopped: Collection[int] = (),
) -> list[Ended]:
    """Run a Python file, or code, on several ranks with the environment of torchrun.

    ``fork``: in forks that have imported what ranks of a pool have, which saves seconds
    where the script is not about how a process starts. ``stopped``: ranks that are not
    waited for, and killed once the others have ended.
    Raises RankError if a rank is still running at the timeout, or 10 s after another
    one failed.
    """
    store, port = host_store()
    launch = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0",
    }
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(log(rank)) for rank in range(ranks)]
        begin = _forked if fork else _started
        processes = [
            begin(
                [str(script), *arguments],
                logs[rank],
                environment(launch, {"RANK": str(rank)}, env or {})
                | {"LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        stack.callback(end, processes, patience=0.0)
        waited = [p for rank, p in enumerate(processes) if rank not in stopped]
        late = _wait(waited, timeout)
        end(processes, patience=0.0)
        outputs = [Path(log.name).read_text(errors="replace") for log in logs]
    del store
    if late:
        tails = [f"--- rank {r}\n{outputs[r][-TAIL:]}" for r in range(ranks)]
        raise RankError("\n".join([f"ranks {late} did not finish:", *tails]))
    return [Ended(code(p), out) for p, out in zip(processes, outputs, strict=True)]


def _started(command: list[str], output: Any, env: dict[str, str]) -> Process:
    """A new interpreter that runs a file, or code, with arguments."""
    is_file = command[0].endswith(".py")
    return subprocess.Popen(
        [sys.executable, *([] if is_file else ["-c"]), *command],
        stdout=output,
        stderr=output,
        env=env,
        cwd=ROOT,
        start_new_session=True,
    )


def _forked(command: list[str], output: Any, env: dict[str, str]) -> Process:
    """As ``_started``, a fork."""
    return start(_run_main, output, env, command)


def _run_main(command: list[str]) -> None:
    """Run a file, or code, as if this process had begun with it."""
    sys.argv = command
    failed = False
    try:
        if command[0].endswith(".py"):
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(command[0], "<string>", "exec"), main.__dict__)
    except Exception as error:
        failed, trace = True, error.__traceback__
        while trace is not None and trace.tb_frame.f_globals["__name__"] != "__main__":
            trace = trace.tb_next
        sys.last_value = error  # as Python itself does
        sys.excepthook(type(error), error, trace)
    finally:
        atexit._run_exitfuncs()
    sys.exit(int(failed))


def _wait(processes: Sequence[Process], timeout: float) -> list[int]:
    """Ranks that still run at the end."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [code(process) for process in processes]
        if None not in codes:
            return []
        if any(codes):
            deadline = min(deadline, time.monotonic() + 10.0)
        time.sleep(0.02)
    return [rank for rank, process in enumerate(processes) if is_alive(process)]
