"""Several gloo ranks for tests: functions in ranks that stay alive, or whole scripts.

``Pool(n)`` keeps n processes that share a process group, forks of one that has imported
torch and fxpar, since those imports cost seconds. ``pool.run(fn, *args)`` calls a
function that can be imported by name on every rank and returns the results in order of
ranks; ``pool.errors`` what they raised. ``shared_pool(n)`` is n ranks of one pool for
the test session, ``ranks_of(mesh)`` as many of it as a mesh has. ``run_script`` starts
a script as torchrun does. Nothing outlives its timeout, and no port is guessed: this
process holds the store that ranks meet at.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import math
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANKS = 4  # of the session's pool
TAIL = 4000  # characters of a rank's output shown when it fails
# What ranks have imported when they start; what is not installed is left out.
IMPORTED = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "fxpar.backend",
    "numba",
    "scipy.optimize",
    "transformers.models.llama.modeling_llama",
]


_Process = subprocess.Popen | multiprocessing.Process


class RankError(AssertionError):
    """Ranks raised, ended, or did not finish in time."""


@dataclass
class _Rank:
    process: multiprocessing.Process
    pipe: connection.Connection
    output: Any

    def tail(self) -> str:
        self.output.flush()
        text = Path(self.output.name).read_text(errors="replace")
        return text[-TAIL:]


class Pool:
    """``size`` ranks, started when first used and again after one was lost.

    ``env``: variables they start with, each in a new interpreter then; ``group``:
    whether they are a process group.
    """

    def __init__(
        self, size: int, *, env: Mapping[str, str] | None = None, group: bool = True
    ) -> None:
        self.size, self.env, self.group = size, dict(env or {}), group
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._life = self._world = 0
        self._fresh = True

    def run(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """Results of ``fn(*args)``, one per rank.

        ``ranks``: use only so many; ``env``: variables to set meanwhile; ``timeout``:
        seconds. Raises RankError with the tracebacks if a rank raised.
        """
        __tracebackhide__ = True
        outcomes = self._outcomes(fn, args, **how)
        failed = {r: text for r, (kind, _, text) in enumerate(outcomes) if kind != "ok"}
        if failed:
            texts = (f"--- rank {rank}\n{text}" for rank, text in failed.items())
            raise RankError("\n".join([f"ranks {list(failed)} raised:", *texts]))
        return [value for _, value, _ in outcomes]

    def errors(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """What ``fn(*args)`` raised on each rank, None where it did not raise."""
        outcomes = self._outcomes(fn, args, **how)
        return [value if kind == "error" else None for kind, value, _ in outcomes]

    def renew(self) -> None:
        """Start a new process group for the next call."""
        self._fresh = True

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send_bytes(b"")
        _end([rank.process for rank in self._ranks], patience=2.0)
        for rank in self._ranks:
            rank.pipe.close()
            rank.output.close()
        self._ranks, self._store, self._fresh = [], None, True

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _outcomes(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> list[tuple[str, Any, str]]:
        count = ranks or self.size
        if not self._ranks:
            self._start()
        if self._fresh or count != self._world:
            self._life, self._world, self._fresh = self._life + 1, count, False
        job = {
            "fn": (fn.__module__, fn.__qualname__),
            "args": args,
            "world": count,
            "life": self._life if self.group else None,
            "env": dict(env or {}),
        }
        members = self._ranks[:count]
        for rank in members:
            rank.pipe.send_bytes(pickle.dumps(job))
        outcomes = self._collect(members, timeout)
        if any(kind == "error" for kind, *_ in outcomes):
            self._fresh = True  # ranks may have left collectives half done
        return outcomes

    def _collect(
        self, members: Sequence[_Rank], timeout: float
    ) -> list[tuple[str, Any, str]]:
        waiting = {rank.pipe: i for i, rank in enumerate(members)}
        got: dict[int, tuple[str, Any, str]] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = connection.wait(list(waiting), deadline - time.monotonic())
            if not ready:
                late = sorted(waiting.values())
                self._lost(members, late, f"did not finish in {timeout:.0f} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    got[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._lost(members, [rank], "ended")
        return [got[rank] for rank in range(len(members))]

    def _lost(self, members: Sequence[_Rank], ranks: Sequence[int], how: str) -> None:
        _end([rank.process for rank in self._ranks], patience=0.0)
        tails = [f"--- rank {r}\n{members[r].tail()}" for r in ranks]
        self.close()
        raise RankError("\n".join([f"ranks {list(ranks)} {how}:", *tails]))

    def _start(self) -> None:
        self._store, port = _host_store()
        method = "spawn" if self.env else "forkserver"
        context: Any = multiprocessing.get_context(method)
        context.set_forkserver_preload(IMPORTED)
        environment = _environment(self.env)
        for rank in range(self.size):
            ours, theirs = connection.Pipe()
            output = _log(rank)
            process = context.Process(
                target=_serve, args=(theirs, output.name, environment, port, rank)
            )
            with _variables(environment):  # an interpreter may start
                process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, output))


@dataclass(frozen=True)
class SharedPool:
    """``size`` ranks of a pool that has at least as many."""

    size: int
    pool: Pool

    def run(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """As ``Pool.run``."""
        __tracebackhide__ = True
        return self.pool.run(fn, *args, **{"ranks": self.size} | how)

    def errors(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """As ``Pool.errors``."""
        return self.pool.errors(fn, *args, **{"ranks": self.size} | how)

    def renew(self) -> None:
        """As ``Pool.renew``."""
        self.pool.renew()


def shared_pool(size: int) -> SharedPool:
    """``size`` ranks of the session's one pool, which start once for all tests."""
    return SharedPool(size, _session_pool(max(size, RANKS)))


def ranks_of(mesh: str) -> SharedPool:
    """The ranks of a mesh such as "dp=2,tp=2"."""
    return shared_pool(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")))


@functools.cache
def _session_pool(size: int) -> Pool:
    pool = Pool(size)
    atexit.register(pool.close)
    return pool


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
) -> list[Ended]:
    """Run a Python file, or code, on several ranks with the environment of torchrun.

    ``fork``: in forks that have imported what ranks of a pool have, which saves seconds
    where the script is not about how a process starts.
    Raises RankError if a rank is still running at the timeout, or 10 s after another
    one failed.
    """
    store, port = _host_store()
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
        logs = [stack.enter_context(_log(rank)) for rank in range(ranks)]
        start = _forked if fork else _started
        processes = [
            start(
                [str(script), *arguments],
                logs[rank],
                _environment(launch, {"RANK": str(rank)}, env or {})
                | {"LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        stack.callback(_end, processes, patience=0.0)
        late = _wait(processes, timeout)
        _end(processes, patience=0.0)
        outputs = [Path(log.name).read_text(errors="replace") for log in logs]
    del store
    if late:
        tails = [f"--- rank {r}\n{outputs[r][-TAIL:]}" for r in range(ranks)]
        raise RankError("\n".join([f"ranks {late} did not finish:", *tails]))
    return [Ended(_code(p), out) for p, out in zip(processes, outputs, strict=True)]


def _started(command: list[str], log: Any, env: dict[str, str]) -> _Process:
    """A new interpreter that runs a file, or code, with arguments."""
    is_file = command[0].endswith(".py")
    return subprocess.Popen(
        [sys.executable, *([] if is_file else ["-c"]), *command],
        stdout=log,
        stderr=log,
        env=env,
        cwd=ROOT,
        start_new_session=True,
    )


def _forked(command: list[str], log: Any, env: dict[str, str]) -> _Process:
    """As ``_started``, a fork."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_run_main, args=(command, log.name, env))
    with _variables(env):
        process.start()
    return process


def _run_main(command: list[str], output: str, env: Mapping[str, str]) -> None:
    """Run a file, or code, as if this process had begun with it."""
    _begin(output, env)
    sys.argv = command
    try:
        if command[0].endswith(".py"):
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
        else:
            exec(compile(command[0], "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


def _begin(output: str, env: Mapping[str, str]) -> None:
    """Let this fork have these variables, and print to a file."""
    os.setsid()  # an interrupt is for the process that started it
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    with open(output, "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _log(rank: int) -> Any:
    return tempfile.NamedTemporaryFile(prefix=f"rank{rank}_", suffix=".log")


def _wait(processes: Sequence[_Process], timeout: float) -> list[int]:
    """Ranks that still run at the end."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [_code(process) for process in processes]
        if None not in codes:
            return []
        if any(codes):
            deadline = min(deadline, time.monotonic() + 10.0)
        time.sleep(0.02)
    return [rank for rank, process in enumerate(processes) if _is_alive(process)]


def _end(processes: Sequence[_Process], patience: float) -> None:
    """End processes: those that do not end by themselves print their stacks first."""
    deadline = time.monotonic() + patience
    for sent in (None, signal.SIGABRT, signal.SIGKILL):
        for process in processes:
            if sent is not None and _is_alive(process):
                os.kill(process.pid, sent)
        while any(map(_is_alive, processes)) and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + 1.0


def _code(process: _Process) -> Any:
    """A process's exit status, None while it runs."""
    if isinstance(process, subprocess.Popen):
        return process.poll()
    return process.exitcode


def _is_alive(process: _Process) -> bool:
    return _code(process) is None


def _host_store() -> tuple[Any, int]:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def _environment(*more: Mapping[str, str]) -> dict[str, str]:
    # Of fxpar's own variables the defaults that tests/conftest.py sets.
    ours = ("FXPAR_PLAN", "FXPAR_SCHEDULE")
    out = {
        k: v for k, v in os.environ.items() if not k.startswith("FXPAR_") or k in ours
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    out |= {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
    for variables in more:
        out |= variables
    return out


class _Worker:
    """One rank of a pool: takes jobs from its pipe until the pipe closes."""

    def __init__(self, pipe: connection.Connection, port: int, rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist, self.pipe, self.rank = torch, dist, pipe, rank
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.life: int | None = None

    def serve(self) -> None:
        while True:
            try:
                message = self.pipe.recv_bytes()
            except EOFError:
                return
            if not message:
                return
            self.pipe.send_bytes(self._outcome(pickle.loads(message)))

    def _outcome(self, job: Mapping[str, Any]) -> bytes:
        try:
            self._join(job["world"], job["life"])
            with _variables(job["env"]):
                return pickle.dumps(("ok", _function(*job["fn"])(*job["args"]), ""))
        except BaseException as error:
            text = traceback.format_exc()
            # A copy without traceback and chained errors, which hold frames.
            for kept in (error.with_traceback(None), RuntimeError(repr(error))):
                kept.__cause__ = kept.__context__ = None
                with contextlib.suppress(Exception):
                    message = pickle.dumps(("error", kept, text))
                    pickle.loads(message)
                    return message
            raise
        finally:
            if "torch._dynamo" in sys.modules:
                self.torch._dynamo.reset()

    def _join(self, world: int, life: int) -> None:
        if self.life == life:
            return
        if self.dist.is_initialized():
            self.dist.destroy_process_group()
        self.life = None
        self.dist.init_process_group(
            "gloo",
            store=self.dist.PrefixStore(str(life), self.store),
            rank=self.rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        self.life = life


def _function(module: str, name: str) -> Callable[..., Any]:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


@contextlib.contextmanager
def _variables(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    pipe: connection.Connection, output: str, env: Mapping[str, str], *where: int
) -> None:
    """Be a rank until the pipe closes, with these variables; print to ``output``."""
    _begin(output, env)
    _Worker(pipe, *where).serve()
    os._exit(0)  # gloo's threads may hold tensors still: see fxpar.runtime.groups
