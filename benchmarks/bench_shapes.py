"""Sequence lengths that change, and a cache that grows, beside torch's own.

    python benchmarks/bench_shapes.py [--ranks N] [--layers N] [--width N]
        [--part lengths|generate] [--repeat N] [--json FILE]

``lengths``: a Llama, forward, backward and AdamW, one step for each of six sequence
lengths: DistributedDataParallel + torch.compile beside fxpar, which is fed the same
parts of the batch. A ``cold`` start from empty caches, then a ``warm`` one. ``steps``:
seconds of each step of the slowest rank; ``cpu``: CPU seconds of each, of all ranks;
``total``: seconds of all.

``generate``: ``model.generate()`` of 64 tokens with a dynamic and with a static cache:
DTensor tensor parallelism + torch.compile beside fxpar with the same axis, and along
dp. ``first``: seconds with what is compiled on the way; ``rate``: tokens a second of
the same prompt again, by all sequences of the batch together; ``same``: whether they
are those of one device.

Each side is a job of its own; sides alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import conditions, write

LENGTHS = (64, 48, 80, 56, 72, 40)
TOKENS = 64
SIDES = {
    "lengths": ("ddp", "fxpar"),
    "generate": ("dtensor", "fxpar", "fxpar_dp"),
}
LIMIT = 1800  # seconds that one job may take


def llama(args: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
    )
    return LlamaForCausalLM(config)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """A step for each length."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import fxpar

    model = run = llama(args)
    optimizer = torch.optim.AdamW(model.parameters())
    if args.side == "ddp":
        run = torch.compile(DistributedDataParallel(model))
    else:
        options = {"mesh": f"dp={args.ranks}", "inputs": "local"}
        run = torch.compile(model, backend="fxpar", options=options)
    seconds, cpu = [], []
    for length in LENGTHS:
        ids = torch.randint(0, 1024, (4, length))
        dist.barrier()
        begun, used = time.perf_counter(), cpu_seconds()
        run(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken = torch.tensor(time.perf_counter() - begun)
        used_by_all = torch.tensor(cpu_seconds() - used)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(used_by_all)
        seconds.append(round(float(taken), 3))
        cpu.append(round(float(used_by_all), 2))
    plans = len(fxpar.plans()) if args.side == "fxpar" else None
    total = round(sum(seconds), 3)
    return {"steps": seconds, "cpu": cpu, "total": total, "plans": plans}


def cpu_seconds() -> float:
    """Of this process and of the children that ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def generate(args: argparse.Namespace) -> dict[str, Any]:
    """64 tokens, twice, with each cache."""
    import torch

    import fxpar

    figures: dict[str, Any] = {}
    for cache in ("dynamic", "static"):
        torch._dynamo.reset()
        model = llama(args).eval()
        model.generation_config.disable_compile = True
        ids = torch.randint(
            0, 1024, (4, 16), generator=torch.Generator().manual_seed(0)
        )
        how = {"cache_implementation": cache} if cache != "dynamic" else {}
        asked = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
        want = model.generate(ids, do_sample=False, **asked, **how)
        if args.side == "dtensor":
            _split(model, args.ranks)
            model.forward = torch.compile(model.forward)
        else:
            axis = "dp" if args.side == "fxpar_dp" else "tp"
            options = {"mesh": f"{axis}={args.ranks}"}
            model.forward = torch.compile(
                model.forward, backend="fxpar", options=options
            )
        seconds, before = [], len(fxpar.plans())
        for _ in range(2):
            begun = time.perf_counter()
            out = model.generate(ids, do_sample=False, **asked, **how)
            seconds.append(time.perf_counter() - begun)
        figures[cache] = {
            "first": seconds[0],
            "rate": out.shape[0] * TOKENS / seconds[1],
            "plans": len(fxpar.plans()) - before,
            "same": bool((out == want).all()),
        }
    return figures


def _split(model: Any, ranks: int) -> None:
    """Megatron's layout of each layer, by DTensor."""
    import torch
    from torch.distributed.tensor import parallel

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    for layer in model.model.layers:
        layout = {f"self_attn.{name}_proj": column() for name in "qkv"}
        layout |= {"self_attn.o_proj": row(), "mlp.down_proj": row()}
        layout |= {f"mlp.{name}_proj": column() for name in ("gate", "up")}
        parallel.parallelize_module(layer, mesh, layout)


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = train(args) if args.part == "lengths" else generate(args)
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(data))
    dist.barrier()
    dist.destroy_process_group()


def run(args: argparse.Namespace, part: str, side: str) -> dict[str, Any]:
    """A job from empty caches, of ``lengths`` another behind it; figures of both."""
    with tempfile.TemporaryDirectory() as cache:
        cold = start(args, part, side, cache)
        if part != "lengths":
            return cold
        return {"cold": cold, "warm": start(args, part, side, cache)}


def start(args: argparse.Namespace, part: str, side: str, cache: str) -> dict[str, Any]:
    """One job with caches in a folder; its figures."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        out = os.path.join(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--master-port", str(port), "--nproc-per-node", str(args.ranks)]
        command += [__file__, "--worker", out, "--side", side, "--part", part]
        command += ["--ranks", str(args.ranks), "--layers", str(args.layers)]
        command += ["--width", str(args.width)]
        subprocess.run(command, env=environment, check=True, timeout=LIMIT)
        figures: dict[str, Any] = json.loads(Path(out).read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--part", choices=tuple(SIDES))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    figures: dict[str, Any] = {"conditions": conditions()}
    for part in (args.part,) if args.part else SIDES:
        runs: dict[str, list[Any]] = {side: [] for side in SIDES[part]}
        for _ in range(args.repeat):
            for side, done in runs.items():
                done.append(run(args, part, side))
                print(part, side, done[-1], flush=True)
        figures[part] = runs
        if part == "lengths":
            for when in ("cold", "warm"):
                ddp, ours = (
                    statistics.median(r[when]["total"] for r in each)
                    for each in runs.values()
                )
                print(f"{when}: fxpar takes {ours / ddp:.2f} of DDP's seconds")
    if args.json:
        write(args.json, "shapes", figures)


if __name__ == "__main__":
    main()
