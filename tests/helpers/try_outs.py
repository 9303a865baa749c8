"""Try-outs of the benchmarks for GPUs, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.processes import ROOT


def try_out(
    script: str, path: Path, *words: str, timeout: float
) -> tuple[int, str, dict[str, Any]]:
    """Run a script of benchmarks/ with ``--try`` and ``words``, and return its exit
    status, what it printed, and the JSON that it wrote to ``path``. ``timeout``:
    seconds."""
    command = [sys.executable, str(Path(ROOT, "benchmarks", script)), "--try"]
    done = subprocess.run(
        [*command, "--json", str(path), *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=path.parent,
    )
    return done.returncode, done.stdout, json.loads(path.read_text())
