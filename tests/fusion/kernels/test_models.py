"""Real models: their regions' kernels equal the regions, and they train as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fxpar.fusion.kernels import launch
from tests.e2e.test_training import Run, compare, train
from tests.spawn import Pool, shared_pool

ROOT = Path(__file__).parents[3]
F32 = 1e-6

# Regions of forward and backward on tp=2.
REGIONS = {"llama": (5, 5), "gpt2": (5, 1), "bert": (4, 0)}


def regions(tmp_path: Path, *names: str) -> list[dict[str, Any]]:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.fusion.kernels.model_regions", str(path)]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "tp=2", *names], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str, tmp_path: Path) -> None:
    found = regions(tmp_path, name)
    counts = {"forward": 0, "backward": 0}
    for graph in found:
        counts[graph["which"]] += graph["regions"]
        before, after = graph["bytes"]
        assert after < before or not graph["regions"]
        for case in graph["cases"]:
            assert case["kernel"] and case["error"] <= F32
    near = [graph["near"] for graph in found]
    assert tuple(counts.values()) == REGIONS[name], near


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_training_interpreted(codegen: str) -> None:
    """Op by op, regions change no bit; in compiled code, what stands around them."""
    options = {"mesh": "tp=2", "codegen": codegen}
    pool = shared_pool(2)
    want = pool.run(train, "llama", options, 1, timeout=600.0)
    got = pool.run(train, "llama", options | {"fuse": "interpret"}, 1, timeout=600.0)
    for a, b in zip(want, got, strict=True):
        if codegen == "inductor":
            compare([b], a)
            continue
        assert a.losses == b.losses
        assert all(a.gradients[n].equal(b.gradients[n]) for n in a.gradients)


def train_counting(name: str, options: dict[str, str]) -> tuple[Run, int]:
    """As ``train``, and how often a kernel was launched."""
    with mock.patch.object(launch, "function_of", wraps=launch.function_of) as asked:
        return train(name, options, 2), asked.call_count


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_training_by_kernels(name: str, monkeypatch) -> None:
    """With generated kernels, in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = {"mesh": "tp=2", "codegen": "eager"}
    with Pool(2) as pool:  # Triton is an interpreter from its first import on
        want = pool.run(train, name, options, 2, timeout=600.0)
        got = pool.run(
            train_counting, name, options | {"fuse": "triton"}, timeout=600.0
        )
    for a, (b, launched) in zip(want, got, strict=True):
        compare([b], a)
        assert launched > 0
