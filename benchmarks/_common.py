"""What the benchmarks share: the model, the machine they ran on, where figures go."""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # this fxpar, installed or not
# What is measured is one thing at a time; a benchmark of schedules asks for them.
os.environ.setdefault("FXPAR_SCHEDULE", "none")


# Shapes of Llamas by scale; the first three run here or on one GPU, others are to plan.
LLAMAS: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "512": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "1024": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "405b": {
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    },
}


def llama(layers: int, *, scale: str = "small") -> Any:
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **LLAMAS[scale])
    return LlamaForCausalLM(config)


def cpu_seconds() -> float:
    """Return CPU seconds of this process and of those it started, once they ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def cpu_name() -> str:
    """Return the operating system's name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the checkout's commit, marked if files have changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def conditions() -> dict[str, Any]:
    """Return the conditions of a measurement, which are stored with every figure."""
    import torch

    def shown(word: str) -> str:
        return os.path.relpath(word, ROOT) if os.path.isabs(word) else word

    return {
        "command": " ".join(["python", *map(shown, sys.argv)]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_before": os.getloadavg()[0],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median with quartiles and extremes."""
    q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median": statistics.median(values),
        "q1": q1,
        "q3": q3,
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def on_ranks(
    script: str,
    ranks: int,
    *words: Any,
    timeout: float = 3600.0,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run ``script --worker FILE words`` by torchrun, and return what the ranks write
    to FILE as JSON. ``timeout``: seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), script, "--worker", str(out)]
        command += map(str, words)
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
        subprocess.run(command, env=variables, check=True, timeout=timeout)
        return json.loads(out.read_text())


def write(path: str | None, name: str, data: dict[str, Any]) -> None:
    """Write figures as JSON; without a path to ``.benchmarks/<name>.json``."""
    target = Path(path) if path else ROOT / ".benchmarks" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {os.path.relpath(target)}")
