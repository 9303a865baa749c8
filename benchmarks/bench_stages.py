"""Stages found by the search, predicted: Llama 70B and 405B on H100s, Alpa's models on
V100s, GSPMD's Transformer on TPU v3.

    python benchmarks/bench_stages.py [--only TEXT] [--by-hand] [--json FILE]

Parameters and inputs are fake tensors; forward and backward of the loss are planned
together, parameters free to lie as the plan wants. A row searches a mesh for so many
devices with ``FXPAR_MESH=auto`` and 60 s (meshes without stages, then with), and once
each of the meshes that others chose by hand. Beside a prediction stands what was
published; README.md says in what the two differ. ``traced``: seconds of tracing. Each
row runs in a process of its own, on one core; all seconds, those a search is given
too, are CPU time of that process and of its solver's, so that other jobs on the machine
do not cut it short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from _common import conditions, cpu_seconds, write
from stage_models import build

SECONDS = 60.0  # of search, without stages and again with them


@dataclass(frozen=True)
class StagesRow:
    """One model on one machine."""

    model: str
    layers: int
    hardware: str
    ranks: int
    # Sequences of a step, and their tokens.
    batch: int
    length: int
    # Meshes that others chose, with a number of microbatches and a schedule each.
    by_hand: tuple[tuple[str, int, str], ...] = ()
    # What is published: (what, tokens/s of a device or TFLOP/s of it).
    published: tuple[tuple[str, float], ...] = ()
    dtype: str = "bfloat16"
    searched: bool = True


def _alpa(
    ranks: int,
    model: str,
    layers: int,
    measured: float,
    mesh: str = "",
    parts: int = 0,
    **how: Any,
) -> StagesRow:
    """Of Alpa's weak scaling (arXiv 2201.12023, figure 7): 1024 sequences of 1024
    tokens, V100s of 16 GB. ``measured``: its TFLOP/s a device, the forward counted
    twice; ``mesh``: its stages, if they are of equal ranks, with so many
    microbatches."""
    published = (("Alpa, TFLOP/s", measured),)
    by_hand = ((mesh, parts, "1f1b"),) if mesh else ()
    shape = {"dtype": "float16", "batch": 1024, "length": 1024} | how
    return StagesRow(
        model, layers, "v100-dgx1", ranks, by_hand=by_hand, published=published, **shape
    )


def _images(batch: int) -> dict[str, Any]:
    return {"batch": batch, "length": 224, "dtype": "float32"}


def _gspmd(chips: int, batch: int, tokens: float) -> StagesRow:
    """Of Lingvo's DenseLm128B on TPU v3 (comments of its synthetic_packed_input.py): a
    chip has two of the cores that it counts."""
    published = (("Lingvo, tokens/s a chip", tokens / chips),)
    name, hardware = "dense-8192-65536", "tpu-v3"
    return StagesRow(name, 64, hardware, chips, batch, 1024, published=published)


# torchtitan's benchmarks of 2024-12 and 2025-06; 405B runs its products in float8.
ROWS = (
    StagesRow("70b", 80, "h100", 64, 128, 8192),
    StagesRow(
        "70b",
        80,
        "h100",
        256,
        512,
        8192,
        published=(("torchtitan FSDP32 TP8, tokens/s", 597.3),),
    ),
    StagesRow("70b", 80, "h100", 512, 1024, 8192),
    StagesRow(
        "405b",
        126,
        "h100",
        512,
        256,
        8192,
        by_hand=(("pp=8,dp=8,tp=8", 32, "1f1b"), ("pp=8,dp=8,tp=8", 32, "interleaved")),
        published=(
            ("torchtitan FP8 1F1B, tokens/s", 100.0),
            ("torchtitan FP8 interleaved, tokens/s", 128.0),
        ),
    ),
    _alpa(4, "gpt-2048-32", 24, 58.2, "pp=2,dp=2", 128),
    _alpa(8, "gpt-2560-32", 32, 61.6),
    _alpa(16, "gpt-4096-32", 32, 60.0, "pp=2,dp=2,tp=4", 64),
    _alpa(32, "gpt-5120-32", 48, 59.9, "pp=4,dp=2,tp=4", 128),
    _alpa(64, "gpt-8192-64", 48, 57.0, "pp=16,tp=4", 1024),
    _alpa(4, "moe-768-16", 16, 40.0, "pp=2,dp=2", 32),
    _alpa(8, "moe-1024-16", 16, 46.0, "pp=2,dp=4", 32),
    _alpa(16, "moe-1536-32", 16, 45.4, "pp=2,dp=8", 16),
    _alpa(32, "moe-2048-48", 16, 38.8, "pp=8,dp=4", 128),
    _alpa(64, "moe-2048-64", 32, 36.6, "pp=8,dp=8", 64),
    _alpa(4, "wresnet-320-2", 50, 8.2, **_images(1536)),
    _alpa(8, "wresnet-448-2", 50, 8.0, **_images(1536)),
    _alpa(16, "wresnet-640-2", 50, 6.8, **_images(1536)),
    _alpa(32, "wresnet-320-16", 50, 6.6, "pp=4,dp=8", 32, **_images(1536)),
    _alpa(64, "wresnet-320-16", 101, 5.3, "pp=8,dp=8", 38, **_images(1520)),
    _gspmd(64, 16, 3.7e3),
    _gspmd(256, 128, 18e3),
)


def _flops(program: Any) -> float:
    from fxpar.sharding.cost.program_kernels import flops_of_op

    return float(sum(map(flops_of_op, program.ops)))


def run(row: StagesRow) -> dict[str, Any]:
    """The row's plans."""
    from fxpar._fast.python_memory import old_objects_kept

    request, program, traced = _traced(row)
    with old_objects_kept():
        plans = _plans(row, request, program)
    counts = {"ops": len(program.ops), "flops": _flops(program)}
    return counts | {"traced": traced, "plans": plans}


def _traced(row: StagesRow) -> tuple[Any, Any, float]:
    """(request, program, seconds that it took to trace)."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fxpar.pipeline import JOINT, run_steps
    from fxpar.runtime.steps.pipeline_state import JointState
    from fxpar.runtime.tracing import TracedCall, read_signature
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.mesh import Mesh
    from fxpar.sharding.plan_request import Request
    from fxpar.sharding.program import Input, Output
    from fxpar.sharding.search.run_search import SearchOptions

    with FakeTensorMode():
        torch.set_default_dtype(getattr(torch, row.dtype))
        model, given = build(row.model, row.layers, row.batch, row.length)
    begun = time.process_time()
    call = TracedCall(model, (), given, True)
    module, fake_mode = call.trace()
    traced = time.process_time() - begun
    rests = [None] * max(call.count, 1)
    signature = read_signature(
        module.graph,
        lambda kind, payload, node: call.declare(kind, payload, node, rests),
        lambda kind, name, of: Output(name, kind, of, None),
    )
    assert all(isinstance(x, Input) for x in signature.inputs)
    on = lookup(row.hardware)
    asked, line = SearchOptions(on, SECONDS), Mesh((("dp", row.ranks),))
    request = Request(line, signature, mode=asked).with_options(
        pipeline="1f1b", cache_plans=False
    )
    request = request.with_open_mesh(line)
    state = JointState(
        graph=module.graph,
        request=request,
        fake_mode=fake_mode,
        normalized=module.graph,
        open=False,
    )
    names = [step.name for step in JOINT]
    run_steps(JOINT[: names.index("plan")], state)
    return state.request, state.program, traced


def _plans(row: StagesRow, request: Any, program: Any) -> list[dict[str, Any]]:
    from fxpar.sharding.candidates import choose

    on, total = request.mode.hardware, _flops(program)

    def told(decision: Any, seconds: float, took: float) -> dict[str, Any]:
        return {
            "mesh": str(decision.mesh),
            "seconds": seconds,
            "tokens_per_device": row.batch * row.length / seconds / row.ranks,
            "tflops_per_device": total / seconds / row.ranks / 1e12,
            "gap": decision.search.solution.gap,
            "took": took,
            "notes": [n for n in decision.notes if n.startswith(("mesh", "stages"))],
        }

    out = []
    if row.searched:
        begun = time.perf_counter()
        decision, chosen_request = choose(program, request)
        took = time.perf_counter() - begun
        seconds, staged = decision.search.predicted, chosen_request.pipeline
        found = told(decision, seconds, took)
        if staged is not None:
            found |= _staged(decision, chosen_request, on)
            found["tokens_per_device"] *= seconds / found["seconds"]
            found["tflops_per_device"] *= seconds / found["seconds"]
        out.append({"by": "search", **found})
    for mesh, parts, schedule in row.by_hand:
        out.append(_by_hand(program, request, row, mesh, parts, schedule, total))
    return out


def _staged(decision: Any, request: Any, on: Any) -> dict[str, Any]:
    from fxpar.sharding.search.price_stages import price_stages

    order, budget = request.pipeline_order, request.mode.budget
    step = price_stages(decision.search, request.pipeline, order, on, budget)
    assert step is not None
    return {"mesh": str(request.whole_mesh), **asdict(step)}


def _by_hand(
    program: Any,
    request: Any,
    row: StagesRow,
    mesh: str,
    parts: int,
    schedule: str,
    total: float,
) -> dict[str, Any]:
    """What a mesh that others chose takes, its plan searched."""
    from fxpar.errors import FxparError
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.decide import cut_in_time, decide_on
    from fxpar.sharding.mesh import Mesh
    from fxpar.sharding.search.batch_parts import PartProgram

    here = request.with_options(pipeline=schedule).on(Mesh.parse(mesh))
    cut, places = cut_in_time(program), here.pipeline.places
    assert cut is not None
    begun = time.perf_counter()
    part = PartProgram(program, cut, parts, places, min(places, parts))
    told: dict[str, Any] = {"by": f"{mesh}, {schedule}", "mesh": mesh}
    compared = replace(request.mode, ranked=False)
    for asked in (compared, replace(compared, memory=1e15)):
        try:
            decision = decide_on(program, replace(here, mode=asked), parts=part)
            break
        except FxparError as error:
            told["error"] = str(error.what).splitlines()[0]
    else:
        return told
    told |= _staged(decision, here, lookup(row.hardware))
    tokens = row.batch * row.length / told["seconds"] / row.ranks
    return told | {
        "fits": max(told["memory"]) <= lookup(row.hardware).memory,
        "tokens_per_device": tokens,
        "tflops_per_device": total / told["seconds"] / row.ranks / 1e12,
        "gap": decision.search.solution.gap,
        "took": time.perf_counter() - begun,
    }


def _show(row: StagesRow, plan: dict[str, Any]) -> None:
    if "seconds" not in plan:
        print(f"  {plan['by']}: {plan['error']}", flush=True)
        return
    held = max(plan.get("memory", [0.0])) / 2**30
    print(
        f"  {plan['by']}: {plan['mesh']}, {plan.get('parts', 1)} microbatches, "
        f"{plan['seconds'] * 1e3:.4g} ms, {plan['tokens_per_device']:.0f} tokens/s and "
        f"{plan['tflops_per_device']:.1f} TFLOP/s a device, gap {plan['gap']:.2%}, "
        f"waits {plan.get('bubble', 0.0):.0%}, {held:.1f} GiB, "
        f"{plan['took']:.0f} s of search",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--by-hand", action="store_true", help="search no mesh")
    parser.add_argument("--json")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        time.perf_counter = cpu_seconds
        print(
            "ROW", json.dumps(run(replace(ROWS[args.row], searched=not args.by_hand)))
        )
        return
    before, out = conditions(), []
    for i, row in enumerate(ROWS):
        name = f"{row.model} x{row.layers} on {row.ranks} {row.hardware}"
        if args.only not in name:
            continue
        command = [sys.executable, __file__, "--row", str(i)]
        command += ["--by-hand"] if args.by_hand else []
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = [x for x in done.stdout.splitlines() if x.startswith("ROW")]
        if not lines:
            sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
        found = json.loads(lines[0].removeprefix("ROW"))
        print(
            f"{name}: {found['ops']} ops, {found['traced']:.0f} s of tracing; "
            f"published {dict(row.published)}"
        )
        for plan in found["plans"]:
            _show(row, plan)
        out.append({**asdict(row), **found})
        write(args.json, "bench_stages", {"conditions": before, "rows": out})


if __name__ == "__main__":
    main()
