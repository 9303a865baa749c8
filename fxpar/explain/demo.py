"""Compare the losses of one script on one device and on a mesh: the demo.

In: a script and a mesh. Out: the losses side by side, and an exit status. The first run
is plain PyTorch, with torch.compile switched off, so that fxpar is compared with
something it has no part in. The second is the same script under torchrun on gloo. The
output of a child is shown while it runs; if one fails, so does the demo, with the tail
of what the failing rank wrote. The predicted seconds of a step are shown next to the
measured ones, from one printed loss to the next. Never: a child left running.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fxpar.errors import OptionError
from fxpar.sharding.mesh import Mesh
from fxpar.units import short_seconds

SCRIPT = Path(__file__).parents[2] / "examples" / "train_llama.py"
TOLERANCE = 1e-5  # relative; the effect of another order of rounding on a float32 loss
HEARTBEAT = 15.0
TAIL = 30

_LOSS = re.compile(r"^step (\d+) loss (\S+)$")
_PREDICTED = re.compile(r"^predicted: (.*?) a step\b")
# A rank that failed: on its own, or with an error of fxpar that ``run`` printed.
_ERROR = re.compile(r"^(Traceback|fxpar: )", re.MULTILINE)
_WARNING = re.compile(r"FxparWarning: (.*\n(?:  (?:at|fix): .*\n)*)")


class ChildFailed(Exception):
    """Says that a run ended with an error or ran out of time, by its message."""


def demo(
    script: str | None = None,
    mesh: str = "dp=2,tp=2",
    *,
    codegen: str | None = None,
    steps: int = 5,
    timeout: float = 600.0,
) -> int:
    """Run the comparison and print it. Returns 0 if every loss agrees, else 1.

    ``script`` prints ``step N loss X`` on rank 0 and takes ``--steps``. Raises
    OptionError if it is not there, MeshError if the mesh cannot be read.
    """
    path = Path(script) if script else SCRIPT
    if not path.is_file():
        raise OptionError(
            f"the demo script {path} is not here",
            fix="run it in a checkout of fxpar, or name a script: fxpar demo train.py",
        )
    ranks = Mesh.parse(mesh).size
    relative_path = os.path.relpath(path)
    arguments = [str(path), "--steps", str(steps)]
    try:
        print(f"[1/2] one device, plain PyTorch: python {relative_path}", flush=True)
        alone = _run([sys.executable, *arguments], _environment(1, plain=True), timeout)
        print(
            f'[2/2] FXPAR_MESH="{mesh}" torchrun --standalone '
            f"--nproc-per-node {ranks} -m fxpar run {relative_path}",
            flush=True,
        )
        environment = _environment(ranks, mesh=mesh, codegen=codegen)
        with tempfile.TemporaryDirectory(prefix="fxpar-demo-") as logs:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(ranks), "--log-dir", logs]
            command += ["--redirects", "2", "-m", "fxpar", "run", *arguments]
            together = _run(command, environment, timeout, Path(logs))
            for warning in _warnings(Path(logs)):
                print(f"warning: {warning}", flush=True)
    except ChildFailed as failure:
        print(f"FAILED: {failure}", flush=True)
        return 1
    status = report(_losses(alone), _losses(together), mesh)
    print(_times(alone, together, mesh), flush=True)
    return status


def report(
    device_losses: Mapping[int, float], mesh_losses: Mapping[int, float], mesh: str
) -> int:
    """Print losses side by side, and return 0 if all are there and agree, else 1."""
    print(f"\n{'step':>4}  {'one device':>14}  {mesh:>14}  relative difference")
    worst = 0.0
    for step in sorted(device_losses.keys() | mesh_losses.keys()):
        a, b = device_losses.get(step, math.nan), mesh_losses.get(step, math.nan)
        difference = abs(a - b) / abs(a) if a else abs(b)
        # A missing or infinite loss makes a nan, which must count as wrong.
        worst = max(worst, math.inf if math.isnan(difference) else difference)
        print(f"{step:>4}  {a:>14.8f}  {b:>14.8f}  {difference:.1e}")
    if not device_losses:
        print("FAILED: the script printed no line of the form 'step 0 loss 5.54'")
        return 1
    if worst > TOLERANCE:
        print(f"FAILED: losses differ by {worst:.1e} relative, more than {TOLERANCE:g}")
        return 1
    print(f"ok: every loss equals the one-device loss to within {TOLERANCE:g} relative")
    return 0


def _environment(
    ranks: int,
    *,
    mesh: str | None = None,
    codegen: str | None = None,
    plain: bool = False,
) -> dict[str, str]:
    """Return the children's environment: a thread per rank, cores shared to compile."""
    out = {k: v for k, v in os.environ.items() if k != "FXPAR_MESH"}
    out.setdefault("OMP_NUM_THREADS", "1")
    out.setdefault("TOKENIZERS_PARALLELISM", "false")
    cores = os.cpu_count() or 1
    out.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // ranks)))
    if plain:
        out["TORCH_COMPILE_DISABLE"] = "1"
    if mesh:
        out["FXPAR_MESH"] = mesh
    if codegen:
        out["FXPAR_CODEGEN"] = codegen
    # The children import this very fxpar, installed or not.
    root = str(Path(__file__).parents[2])
    out["PYTHONPATH"] = os.pathsep.join(filter(None, [root, out.get("PYTHONPATH")]))
    return out


# (line that was printed, the time at which it was).
_Lines = Sequence[tuple[str, float]]


def _losses(lines: _Lines) -> dict[int, float]:
    """Return the loss of each step that was printed."""
    matches = (_LOSS.match(line) for line, _ in lines)
    return {int(match[1]): float(match[2]) for match in matches if match}


def _times(alone: _Lines, together: _Lines, mesh: str) -> str:
    """Describe the seconds of a step, the median from one loss to the next after the
    first step, and those that the first plan predicted."""
    parts = []
    ranks, cores = Mesh.parse(mesh).size, os.cpu_count() or 1
    shared = f" ({ranks} ranks on {cores} cores)" if ranks > cores else ""
    for name, lines in (("one device", alone), (f"{mesh}{shared}", together)):
        at = [moment for line, moment in lines if _LOSS.match(line)][1:]
        if len(at) > 1:
            step = statistics.median(b - a for a, b in itertools.pairwise(at))
            parts.append(f"{short_seconds(step)} on {name}")
    matches = (_PREDICTED.match(line) for line, _ in together)
    predicted = [match[1] for match in matches if match]
    text = f"a step takes {', '.join(parts) or 'unknown time'}"
    if predicted:
        text += f"; predicted {predicted[0]} and the optimizer's update"
    return text


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    logs: Path | None = None,
) -> list[tuple[str, float]]:
    """Run a command, show its lines as they come, and return each with its time. Raises
    ChildFailed if it fails or takes too long."""
    begun, lines = time.monotonic(), []
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child,
        _ended(child),
    ):
        for line in _lines(child, begun + timeout):
            if line is None:
                seconds = time.monotonic() - begun
                print(f"  ... {seconds:.0f} s, still running", flush=True)
            else:
                print(f"  {line}", flush=True)
                lines.append((line, time.monotonic()))
        try:
            code = child.wait(max(0.0, begun + timeout - time.monotonic()))
            reason = f"the run ended with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            reason = f"the run did not end within {timeout:.0f} s"
        if reason:
            errors.seek(0)
            raise ChildFailed(f"{reason}\n{_tail(errors.read(), logs)}")
    print(f"  done in {time.monotonic() - begun:.1f} s", flush=True)
    return lines


def _lines(child: subprocess.Popen[str], deadline: float) -> Iterator[str | None]:
    """Yield lines of a child's output; None now and then while it is silent."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert child.stdout is not None
    stdout = child.stdout

    def read() -> None:
        for line in stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=min(HEARTBEAT, seconds_left))
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


@contextlib.contextmanager
def _ended(child: subprocess.Popen[str]) -> Iterator[None]:
    """End the child and all it started on exit, whatever happened."""
    try:
        yield
    finally:
        if child.poll() is None:
            for kind in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, kind)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(40)  # torchrun gives its ranks 30 s to end
                    break


def _tail(errors: str, logs: Path | None) -> str:
    """Return the end of what the first failing rank wrote, else of the child's."""
    title = "stderr ends with:"
    for rank, text in _written(logs):
        if _ERROR.search(text):
            errors, title = text, f"stderr of rank {rank} ends with:"
            break
    return "\n".join([title, *errors.rstrip().splitlines()[-TAIL:]])


def _warnings(logs: Path) -> list[str]:
    """Return fxpar's warnings in any rank, each once."""
    texts = (match for _, text in _written(logs) for match in _WARNING.findall(text))
    return list(dict.fromkeys(text.rstrip() for text in texts))


def _written(logs: Path | None) -> Iterator[tuple[str, str]]:
    """Yield (rank, its stderr) of every rank."""
    for file in sorted(logs.rglob("stderr.log")) if logs else []:
        yield file.parent.name, file.read_text(errors="replace")
