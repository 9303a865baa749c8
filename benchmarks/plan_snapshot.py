"""Snapshot of plans: what is decided for a set of programs, to compare two trees.

    python benchmarks/plan_snapshot.py FILE             # write
    python benchmarks/plan_snapshot.py FILE --against OLD    # and print what differs

For each of the five models of ``tests/helpers/models.py`` and some toys on the figures
of a CPU, and for a wide Llama and a wide mixture on those of an H100, on three meshes,
by propagation and by search: the plan's hash, the specs of inputs and parameters, the
collectives, the schedule, the ops of the local graph, and the predicted seconds and
bytes of a step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _common import llama
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpar

os.environ.pop("FXPAR_SCHEDULE", None)  # as users have it, which _common does not
sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.helpers.models import NAMES, build

MESHES = ("dp=4", "tp=4", "dp=2,tp=2")
WIDE_MESHES = ("dp=8", "tp=8", "dp=2,tp=4")
MODES = ("propagate", "search")


class Mixture(nn.Module):
    """A router, experts as one batched matmul, and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, 8)
        self.up = nn.Parameter(torch.randn(8, width, 2 * width))
        self.down = nn.Parameter(torch.randn(8, 2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        inner = torch.einsum("bd,edf->bef", x, self.up).relu()
        return torch.einsum("bef,efd,be->bd", inner, self.down, weights).sum()


def _mlp() -> tuple[nn.Module, dict[str, Any]]:
    layers = nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
    return nn.Sequential(*layers), {"input": torch.randn(32, 64)}


def _convolutions() -> tuple[nn.Module, dict[str, Any]]:
    layers = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64, 4))
    return model, {"input": torch.randn(8, 4, 8, 8)}


def _mixture() -> tuple[nn.Module, dict[str, Any]]:
    return Mixture(), {"x": torch.randn(16, 16)}


def _attention() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return model, {"src": torch.randn(8, 16, 32)}


TOYS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": _mlp,
    "convolutions": _convolutions,
    "mixture": _mixture,
    "attention": _attention,
}


def _wide_llama() -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.zeros(64, 512, dtype=torch.long)
    return llama(2, scale="8b"), {"input_ids": ids, "labels": ids}


def _wide_mixture() -> tuple[nn.Module, dict[str, Any]]:
    return Mixture(4096), {"x": torch.randn(8192, 4096)}


WIDE = {"wide llama": _wide_llama, "wide mixture": _wide_mixture}


def programs() -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """(name, module, arguments by name); the wide ones hold fake tensors."""
    for name in NAMES:
        yield name, *build(name)
    for name, toy in TOYS.items():
        torch.manual_seed(0)
        yield name, *toy()
    for name, make in WIDE.items():
        with FakeTensorMode():
            yield name, *make()


def facts(plan: Any) -> dict[str, Any]:
    """What the plan decides and predicts; JSON."""
    local = [re.sub(" at 0x.*", "", str(n.target)) for n in plan.result.local.nodes]
    text = "\n".join(local)
    predicted = plan.predicted
    return {
        "hash": plan.hash,
        "inputs": list(map(str, plan.inputs)),
        "parameters": {name: str(spec) for name, spec in plan.parameters},
        "gradients": {name: str(spec) for name, spec in plan.gradients},
        "collectives": dict(
            Counter(f"{c.kind} {'+'.join(c.axes)} {c.bytes}" for c in plan.collectives)
        ),
        "schedule": plan.schedule.splitlines(),
        "local": [len(local), hashlib.sha256(text.encode()).hexdigest()[:12]],
        "seconds": predicted.seconds,
        "bytes": [*map(list, predicted.sent)],
        "peak": predicted.peak_bytes,
        "memory": [list(kind) for kind in plan.memory],
        "notes": [note.split(";")[0] for note in plan.notes],  # without seconds
    }


def snapshot(only: str) -> dict[str, Any]:
    """Facts of every case whose name holds ``only``."""
    cases: dict[str, Any] = {}
    for name, module, arguments in programs():
        os.environ["FXPAR_HARDWARE"] = "h100" if name in WIDE else "cpu"
        for mesh in WIDE_MESHES if name in WIDE else MESHES:
            for mode in MODES:
                case = f"{name} {mesh} {mode}"
                if only not in case:
                    continue
                plan = fxpar.plan(module, mesh=mesh, mode=mode, grad=True, **arguments)
                cases[case] = facts(plan)
                print(case, plan.hash, f"{plan.predicted.seconds:.6g}", flush=True)
    return cases


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print each fact that differs; how many cases do."""
    differing = 0
    for case in sorted(old.keys() & new.keys()):
        lines = []
        for key, was in old[case].items():
            now = new[case].get(key)
            same = now == was
            if key == "seconds" and now is not None:
                same = abs(now - was) <= 1e-9 * was
            if not same:
                lines.append(f"  {key}: {was} -> {now}"[:2000])
        if lines:
            differing += 1
            print(case, *lines, sep="\n")
    print(f"{differing} of {len(old.keys() & new.keys())} differ")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    cases = json.loads(json.dumps(snapshot(args.only)))
    args.file.write_text(json.dumps(cases, indent=1) + "\n")
    if args.against:
        return compare(json.loads(args.against.read_text()), cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
