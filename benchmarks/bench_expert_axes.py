"""Where a search puts experts: whole, or on the ranks of an axis, under one cost model.

    python benchmarks/bench_expert_axes.py [--short] [--json FILE] [--models NAME ...]

Mixtral 8x7B and Qwen3-30B-A3B of Hugging Face, one layer, on fake tensors in bfloat16,
forward and backward of the loss, planned for H100s, parameters wherever they are best.
``whole``: the fastest plan without experts on ranks, of all there are (data parallel,
FSDP, Megatron's, mixed). Beside it the fastest with experts over the named axes, tokens
gathered or sent into slots, 1.25 times as many as even choices need.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from _common import conditions, write
from bench_experts import free_search, program_of
from expert_models import MIXTURES

from fxpar.config import Options

# model, mesh, batch; of 4,096 tokens
ROWS = [
    (name, mesh, batch)
    for name in MIXTURES
    for mesh, batch in (
        ("dp=8", 8),
        ("dp=8", 64),
        ("dp=2,tp=4", 8),
        ("dp=16", 16),
        ("dp=64", 64),
        ("dp=8,tp=8", 64),
    )
]
SHORT = [("mixtral-8x7b", "dp=8", 8)]
ROOM = 1.25


def run(name: str, text: str, batch: int) -> Iterator[dict[str, Any]]:
    """The fastest plans of a model on a mesh."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fxpar.sharding.mesh import Mesh

    mesh = Mesh.parse(text)
    sets: list[tuple[str, ...]] = [(axis,) for axis in mesh.names]
    sets += [tuple(mesh.names)] if len(sets) > 1 else []
    cases: list[tuple[tuple[str, ...], str]] = [((), "whole")]
    cases += [(axes, way) for axes in sets for way in ("gather", "all_to_all")]
    for axes, way in cases:
        how: dict[str, Any] = {"experts_over": axes}
        if axes:
            how["options"] = Options(expert_exchange=way, expert_room=ROOM)
        with FakeTensorMode():
            torch.set_default_dtype(torch.bfloat16)
            program = program_of(*MIXTURES[name](1, batch), mesh=mesh, **how)
        found = free_search(program, mesh, None)
        yield {
            "model": name,
            "mesh": text,
            "batch": batch,
            "axes": "+".join(axes),
            "way": way,
            "seconds": found.predicted,
            "peak": found.solution.peak,
            "gap": found.solution.gap,
            "search_seconds": found.built + found.solution.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--models", nargs="*", default=list(MIXTURES))
    args = parser.parse_args()
    before, out, begun = conditions(), [], time.time()
    for row in SHORT if args.short else ROWS:
        if row[0] not in args.models:
            continue
        for each in run(*row):
            out.append(each)
            print(
                f"{each['model']:14} {each['mesh']:10} batch {each['batch']:3} "
                f"{each['way']:10} {each['axes']:6} {each['seconds'] * 1e3:8.2f} ms "
                f"{each['peak'] / 2**30:6.1f} GiB gap {each['gap'] * 100:.2f}% "
                f"{each['search_seconds']:.0f} s",
                flush=True,
            )
    report = {"conditions": before, "took": time.time() - begun, "rows": out}
    write(args.json, "bench_expert_axes", report)


if __name__ == "__main__":
    main()
