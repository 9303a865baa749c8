"""Ranks that are forks of this process: for what a process has imported or set up."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_forked(
    fn: Callable[..., Any], ranks: int, *args: Any, seconds: int = 120
) -> list[Any]:
    """Results of ``fn(folder, rank, ranks, *args)``, one per rank, each in a fork.

    ``folder`` is empty and one for all; a fork that lasts longer than ``seconds`` is
    ended. Raises AssertionError if one of them failed, whose traceback is printed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forks = [_fork(fn, folder, rank, ranks, args, seconds) for rank in range(ranks)]
        codes = [os.waitpid(fork, 0)[1] for fork in forks]
        assert not any(codes), f"ranks ended with {codes}"
        files = [_result(folder, rank) for rank in range(ranks)]
        return [torch.load(file, weights_only=False) for file in files]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result.{rank}"


def _fork(
    fn: Callable[..., Any],
    folder: Path,
    rank: int,
    ranks: int,
    args: tuple[Any, ...],
    seconds: int,
) -> int:
    fork = os.fork()
    if fork:
        return fork
    code = 1
    try:
        signal.alarm(seconds)
        torch.save(fn(folder, rank, ranks, *args), _result(folder, rank))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
