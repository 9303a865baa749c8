"""Several gloo ranks for tests: functions in ranks that stay alive.

``Pool(n)`` keeps n processes that share a process group, forks of one that has imported
torch and fxpar. ``pool.run(fn, *args)`` calls a function that can be imported by name
on every rank and returns the results in order of ranks; ``pool.errors`` what they
raised. ``shared_pool(n)`` is n ranks of one pool for the test session,
``ranks_of(mesh)`` as many of it as a mesh has. Nothing outlives its timeout, and no
port is guessed: this process holds the store that ranks meet at.
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
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.helpers import device
from tests.helpers.processes import (
    TAIL,
    RankError,
    end,
    environment,
    forget_plans,
    host_store,
    log,
    of_the_test,
    set_aside,
    start,
    variables,
)

# Of the session's pool.
RANKS = 4 if device.NAME == "cpu" else 2


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

    def rest(self) -> None:
        """Let ranks leave their process group, whose threads never sleep long, until
        the next call, and set aside what they hold."""
        if not self._world:
            return
        self._world, self._fresh = 0, True
        job = {"fn": (set_aside.__module__, "set_aside"), "args": (), "env": {}}
        job |= {"world": 0, "life": None}
        with contextlib.suppress(RankError, OSError):  # lost: all start again
            for rank in self._ranks:
                rank.pipe.send_bytes(pickle.dumps(job))
            self._collect(self._ranks, 60.0)

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send_bytes(b"")
        end([rank.process for rank in self._ranks], patience=2.0)
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
            "env": of_the_test() | dict(env or {}),
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
                except (EOFError, ConnectionError):
                    self._lost(members, [rank], "ended")
        return [got[rank] for rank in range(len(members))]

    def _lost(self, members: Sequence[_Rank], ranks: Sequence[int], how: str) -> None:
        end([rank.process for rank in self._ranks], patience=0.0)
        tails = [f"--- rank {r}\n{members[r].tail()}" for r in ranks]
        self.close()
        raise RankError("\n".join([f"ranks {list(ranks)} {how}:", *tails]))

    def _start(self) -> None:
        self._store, port = host_store()
        for rank in range(self.size):
            ours, theirs = connection.Pipe()
            output, env = log(rank), environment(self.env)
            # A fork of a process that has asked for devices can not use them.
            fork = not self.env and device.NAME == "cpu"
            process = start(_serve, output, env, theirs, port, rank, fork=fork)
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


_POOLS: list[Pool] = []  # of the session


def rest() -> None:
    """Let the session's ranks rest until they are called."""
    for pool in _POOLS:
        pool.rest()


def shared_pool(size: int) -> SharedPool:
    """``size`` ranks of the session's one pool, which start once for all tests."""
    return SharedPool(size, _session_pool(max(size, RANKS)))


def ranks_of(mesh: str) -> SharedPool:
    """The ranks of a mesh such as "dp=2,tp=2"."""
    return shared_pool(math.prod(map(int, re.findall(r"=(\d+)", mesh))))


@functools.cache
def _session_pool(size: int) -> Pool:
    pool = Pool(size)
    _POOLS.append(pool)
    atexit.register(pool.close)
    return pool


class _Worker:
    """One rank of a pool: takes jobs from its pipe until the pipe closes."""

    def __init__(self, pipe: connection.Connection, port: int, rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        device.be_a_rank(rank)
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
            with variables(job["env"]):
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
            forget_plans()

    def _join(self, world: int, life: int) -> None:
        if self.life == life:
            return
        if self.dist.is_initialized():
            self.dist.destroy_process_group()
        self.life = None
        if life is None:
            return
        self.dist.init_process_group(
            device.BACKEND,
            store=self.dist.PrefixStore(str(life), self.store),
            rank=self.rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        self.life = life


def _function(module: str, name: str) -> Callable[..., Any]:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _serve(pipe: connection.Connection, *where: int) -> None:
    """Be a rank until the pipe closes."""
    _Worker(pipe, *where).serve()
    os._exit(0)  # gloo's threads may hold tensors still: see fxpar.runtime.ranks.groups
