"""Parts of ``one_gpu.py`` and ``gpu_peers.py`` as processes, which are started early,
let go, watched and ended.

In: which part, how many ranks, how long. Out: how it ended, the rows it reported until
then, the end of what it printed. Every process is the first of a session of its own and
is ended with all it started: when its time is over, and when another rank of its part
has failed. Who starts them touches no GPU, nor imports torch; ``work`` does, in a
process of a part.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TAIL = 1500  # characters of what a part printed that are kept if it fails
STUCK = 5.0  # seconds that a killed process may need to be gone
LACKS = 77  # exit status of a process that needs a package which is not there

# What all parts run with. Kernels that wait for each other must not stand in one
# hardware queue.
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "FXPAR_PLAN": "propagate",
    "FXPAR_SCHEDULE": "none",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


@dataclass(frozen=True)
class Outcome:
    """``status``: "done", "failed", "late" (ended at its limit), "skipped" or "lacks"
    (a package that it needs)."""

    status: str
    seconds: float
    rows: tuple[dict[str, Any], ...] = ()
    tail: str = ""


@dataclass
class Running:
    """The processes of a part, which wait to be told to go."""

    processes: list[subprocess.Popen[bytes]]
    outs: list[Path]
    logs: list[Path]
    begun: float = field(default_factory=time.monotonic)


def start(
    script: Path,
    name: str,
    mode: str,
    ranks: int,
    folder: Path,
    more: Mapping[str, str],
    place: Path | None = None,
) -> Running:
    """Start a part's processes; they import what they need and wait for ``go``.
    ``folder``: of caches; ``place``: of what they say, there too by default."""
    port = _free_port()
    running = Running([], [], [])
    for rank in range(ranks):
        out, log = (
            (place or folder) / f"{name}.{rank}.{end}" for end in ("rows", "log")
        )
        command = [sys.executable, str(script), "--part", name, "--mode", mode]
        command += ["--rank", str(rank), "--ranks", str(ranks)]
        command += ["--port", str(port), "--out", str(out)]
        environment = _environment(folder, mode, rank, ranks, port)
        environment |= {k: v.format(rank=rank) for k, v in more.items()}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        running.processes.append(process)
        running.outs.append(out)
        running.logs.append(log)
    return running


def finish(running: Running, limit: float) -> Outcome:
    """Let a part go, and wait for its end, ``limit`` seconds at most."""
    running.begun = time.monotonic()
    go(running)
    status = _wait(running.processes, running.begun + limit)
    end(running)
    rows = tuple(row for out in running.outs[:1] for row in _rows(out))
    tail = "" if status == "done" else _tails(running)
    return Outcome(status, time.monotonic() - running.begun, rows, tail)


def go(running: Running) -> None:
    """Tell a part's processes to begin."""
    for process in running.processes:
        with contextlib.suppress(OSError):  # it has ended already
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()


def end(running: Running) -> None:
    """End processes with all that they have started."""
    for process in running.processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + STUCK
    for process in running.processes:
        # One that hangs in a driver is left behind, not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``start`` gives to a process of a part."""
    for name, kind in {"rank": int, "ranks": int, "port": int}.items():
        parser.add_argument(f"--{name}", type=kind, default=0, help=argparse.SUPPRESS)
    for name in ("part", "mode", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)


def work(args: argparse.Namespace, find: Callable[[], Callable[[Any], None]]) -> None:
    """Run the function that ``find`` returns in a process of a part: import, wait for
    the signal to go, call it with a ``Here``, and exit without any teardown, since a
    teardown that hangs would be waited for."""
    code = 1
    try:
        import torch
        from gpu_here import Here

        found = find()
        sys.stdin.readline()
        device = "cpu" if args.mode == "try" else f"cuda:{os.environ['LOCAL_RANK']}"
        if args.mode == "gpu":
            torch.cuda.set_device(device)
        here = Here(
            args.mode, torch.device(device), args.rank, args.ranks, args.port, args.out
        )
        found(here)
        here.sync()
        code = 0
    except BaseException as error:
        traceback.print_exc()
        package = lacking(error)
        if package:
            print(f"needs {package}, which is not installed")
            code = LACKS
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def lacking(error: BaseException | None) -> str:
    """Return the foreign package whose absence caused an error; "" for other errors."""
    ours = {"fxpar", *(path.stem for path in Path(__file__).parent.glob("*.py"))}
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            return "" if package in ours else package
        error = error.__cause__ or error.__context__
    return ""


def write_json(place: Path, data: Any) -> None:
    """Write data in one step."""
    write_text(place, json.dumps(_finite(data), indent=1) + "\n")


def write_text(place: Path, text: str) -> None:
    """Write a file in one step."""
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f"{place.name}.new")
    new.write_text(text)
    os.replace(new, place)


def _finite(x: Any) -> Any:
    """Replace numbers that JSON does not have by their text."""
    if isinstance(x, Mapping):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> str:
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if LACKS in codes:
            return "lacks"
        if any(codes):
            return "failed"
        if None not in codes:
            return "done"
        time.sleep(0.02)
    return "late"


def _rows(out: Path) -> list[dict[str, Any]]:
    """What was told; the last line may have been cut off."""
    found = []
    if out.is_file():
        for line in out.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def _tails(running: Running) -> str:
    """The ends of all logs, that of a rank which failed by itself first."""
    codes = [process.poll() for process in running.processes]
    later = (None, 0, -signal.SIGKILL)
    order = sorted(range(len(codes)), key=lambda r: codes[r] in later)
    texts = []
    for rank in order:
        text = running.logs[rank].read_text(errors="replace")[-TAIL:]
        texts.append(f"--- rank {rank}, exit {codes[rank]}\n{text}")
    return "\n".join(texts)


def _environment(
    folder: Path, mode: str, rank: int, ranks: int, port: int
) -> dict[str, str]:
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    launched = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # all share one device
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    out = {k: v for k, v in os.environ.items() if not k.startswith("FXPAR_")}
    path = [str(ROOT), str(_metadata(folder)), os.environ.get("PYTHONPATH", "")]
    out |= ENVIRONMENT | caches | launched
    out["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    out.pop("TRITON_INTERPRET", None)
    if mode != "gpu":
        out |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if mode == "try":
        out["TRITON_INTERPRET"] = "1"
    return out


def _metadata(folder: Path) -> Path:
    """A directory for PYTHONPATH: a checkout that was never installed has no version
    that Python knows, which cache keys of compiled graphs begin with, and is no backend
    that Dynamo finds by its name."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    sys.path.insert(0, str(ROOT))
    try:
        importlib.metadata.version("fxpar")
    except importlib.metadata.PackageNotFoundError:
        info = site / "fxpar-0.dist-info"
        info.mkdir(exist_ok=True)
        text = "Metadata-Version: 2.1\nName: fxpar\nVersion: 0\n"
        (info / "METADATA").write_text(text)
        text = "[torch_dynamo_backends]\nfxpar = fxpar.backend:fxpar\n"
        (info / "entry_points.txt").write_text(text)
    finally:
        sys.path.remove(str(ROOT))
    return site


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
