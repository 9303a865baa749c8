"""Step time of fxpar against what a user would write today, measured in pairs.

    python benchmarks/bench_step.py [--short] [--peer ddp|fsdp2|tp] [--json FILE]

- ``ddp``, mesh dp=2: DistributedDataParallel + torch.compile, each rank reading its
  half of the batch; fxpar reads the same halves (inputs=local), parameters whole.
- ``fsdp2``, mesh dp=2: fully_shard on every layer and the root, every layer compiled
  (as torchtitan does) or the whole model (``--compile whole``); fxpar's parameters
  rest split over dp (fxpar.shard).
- ``tp``, mesh tp=2: DTensor tensor parallelism (parallelize_module, the layout of
  Hugging Face's own plan for Llama, inputs of a block prepared once) + torch.compile;
  fxpar's parameters rest in the same layout (fxpar.shard with hints).

Both sides of a pair live in the same processes and see the same model, data, optimizer
and number of threads. Steps alternate, the order swapping from pair to pair, so that
drift of the machine hits both alike; what counts is the ratio within a pair. A step's
time is that of the slowest rank. Losses must agree, or there is no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _common import conditions, llama, spread, write

RANKS = 2
LAYERS, BATCH, LENGTH = 2, 8, 128
MESH = {"ddp": "dp=2", "fsdp2": "dp=2", "tp": "tp=2"}
LOCAL = {"ddp", "fsdp2"}  # each rank reads its part of the batch
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")
HINTS = {
    "fsdp2": None,
    "tp": {
        **{f"*{name}.weight": ("tp", None) for name in COLUMNS},
        **{f"*{name}.weight": (None, "tp") for name in ROWS},
    },
}
WARMUP = 3
AGREE = 1e-4  # relative difference of losses; the seeds of a mistake are far larger

# (seconds of forward and backward, of the whole step, loss)
Step = Callable[[int], tuple[float, float, Any]]


def batch(step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randint(2048, (BATCH, LENGTH), generator=generator)


def own_part(ids: Any) -> Any:
    """This rank's share of a batch, as a DistributedSampler would deal it."""
    import torch.distributed as dist

    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def trainer(model: Any, groups: Iterable[Any], part: Callable[[Any], Any]) -> Step:
    """A training step that times itself. ``groups``: the optimizer's parameters."""
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(groups, lr=1e-4)

    def step(index: int) -> tuple[float, float, Any]:
        ids = part(batch(index))
        dist.barrier()
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return middle - begun, end - begun, loss.detach()

    return step


def fxpar_side(peer: str, codegen: str) -> Step:
    import torch

    import fxpar

    model = llama(LAYERS)
    if peer in HINTS:
        model = fxpar.shard(model, mesh=MESH[peer], hints=HINTS[peer])
    options = {"mesh": MESH[peer], "codegen": codegen}
    if peer in LOCAL:
        options["inputs"] = "local"
    compiled = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    part = own_part if peer in LOCAL else lambda ids: ids
    return trainer(compiled, [{"params": list(model.parameters())}], part)


def averaged(step: Step) -> Step:
    """A step whose loss is the mean over ranks; outside the timed part."""
    import torch.distributed as dist

    def mean(index: int) -> tuple[float, float, Any]:
        *times, loss = step(index)
        dist.all_reduce(loss)
        return *times, loss / dist.get_world_size()

    return mean


def fsdp2_side(codegen: str, compiled: str) -> Step:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = llama(LAYERS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    backend = "inductor" if codegen == "inductor" else "aot_eager"
    for layer in model.model.layers:
        if compiled == "layers":
            layer.compile(backend=backend, dynamic=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    called = model
    if compiled == "whole":
        called = torch.compile(model, backend=backend, dynamic=False)
    return averaged(trainer(called, [{"params": list(model.parameters())}], own_part))


def ddp_side(codegen: str) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(llama(LAYERS), gradient_as_bucket_view=True)
    backend = "inductor" if codegen == "inductor" else "aot_eager"
    compiled = torch.compile(model, backend=backend, dynamic=False)
    return averaged(trainer(compiled, [{"params": list(model.parameters())}], own_part))


def tp_side(codegen: str) -> Step:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    model = llama(LAYERS)
    whole = Replicate()
    # One all-reduce per block in the backward, not one per projection.
    layout = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(whole,)
        ),
        **dict.fromkeys(
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ColwiseParallel(),
        ),
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], ColwiseParallel()),
        **dict.fromkeys(["self_attn.o_proj", "mlp.down_proj"], RowwiseParallel()),
    }
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, layout)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=whole)})
    backend = "inductor" if codegen == "inductor" else "aot_eager"
    compiled = torch.compile(model, backend=backend, dynamic=False)
    # Apart, since the foreach kernels do not mix tensors and DTensors.
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return trainer(compiled, [{"params": sharded}, {"params": plain}], lambda ids: ids)


def worker(peer: str, pairs: int, codegen: str, compiled: str, out: str) -> None:
    """What each rank runs: build both sides, warm up, alternate, write the figures."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    peers = {
        "ddp": lambda: ddp_side(codegen),
        "fsdp2": lambda: fsdp2_side(codegen, compiled),
        "tp": lambda: tp_side(codegen),
    }
    sides = {"peer": peers[peer](), "fxpar": fxpar_side(peer, codegen)}
    worst, first = 0.0, {}
    for name, step in sides.items():
        begun = time.perf_counter()
        step(0)
        first[name] = time.perf_counter() - begun
    for index in range(1, WARMUP):
        losses = [step(index)[2] for step in sides.values()]
        worst = max(worst, abs(1 - float(losses[1] / losses[0])))
    if worst > AGREE:
        raise SystemExit(f"losses differ by {worst:.1e} relative: no comparison")

    times = torch.zeros(pairs, 2, 2, dtype=torch.float64)
    for k in range(pairs):
        order = list(enumerate(sides.values()))
        for i, step in order if k % 2 == 0 else reversed(order):
            times[k, i, 0], times[k, i, 1], _ = step(WARMUP + k)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        data = {
            "times": times.tolist(),
            "loss_difference": worst,
            "first_step": first,
        }
        Path(out).write_text(json.dumps(data))
    dist.barrier()
    dist.destroy_process_group()


def measure(peer: str, pairs: int, codegen: str, compiled: str) -> dict[str, Any]:
    """Run the ranks of one comparison; its figures."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    cores = max(1, (os.cpu_count() or 1) // RANKS)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), __file__, "--worker", out]
        command += ["--peer", peer, "--pairs", str(pairs), "--codegen", codegen]
        command += ["--compile", compiled]
        subprocess.run(command, env=environment, check=True, timeout=1800)
        data = json.loads(Path(out).read_text())
    figures: dict[str, Any] = {"peer": peer, "mesh": MESH[peer], "pairs": pairs}
    figures["compiled"] = compiled if peer == "fsdp2" else "whole"
    for j, what in enumerate(("forward_backward", "step")):
        theirs = [pair[0][j] for pair in data["times"]]
        ours = [pair[1][j] for pair in data["times"]]
        figures[what] = {
            "peer_seconds": spread(theirs),
            "fxpar_seconds": spread(ours),
            "ratio": spread([a / b for a, b in zip(ours, theirs, strict=True)]),
        }
    return figures | data


def show(figures: dict[str, Any]) -> None:
    for what in ("forward_backward", "step"):
        case = figures[what]
        ratio = case["ratio"]
        print(
            f"{figures['mesh']}  {what:16}  "
            f"{figures['peer']} {case['peer_seconds']['median'] * 1e3:7.1f} ms  "
            f"fxpar {case['fxpar_seconds']['median'] * 1e3:7.1f} ms  "
            f"ratio {ratio['median']:.3f} [{ratio['q1']:.3f}, {ratio['q3']:.3f}] "
            f"of {ratio['n']} pairs"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="7 pairs instead of 30")
    parser.add_argument("--peer", choices=sorted(MESH), action="append")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--codegen", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--compile", choices=["layers", "whole"], default="layers")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    pairs = args.pairs or (7 if args.short else 30)
    if args.worker:
        worker(args.peer[0], pairs, args.codegen, args.compile, args.worker)
        return
    before = conditions()
    cases = []
    for peer in args.peer or sorted(MESH):
        cases.append(measure(peer, pairs, args.codegen, args.compile))
        show(cases[-1])
    model = {"layers": LAYERS, "batch": BATCH, "length": LENGTH}
    data = {"conditions": before, "model": model, "codegen": args.codegen}
    write(args.json, "bench_step", data | {"cases": cases})


if __name__ == "__main__":
    main()
