"""Dims that others leave whole: 50,257 words on two ranks, images split over height.

    python benchmarks/bench_uneven.py [--pairs N] [--only gpt|convnet|resnet50]
        [--pixels N] [--json FILE]

``gpt``: a training step of a GPT-2 of small width with its 50,257 words, ``tp=2``.
fxpar cuts words into 25,129 and 25,128, at rest too. DTensor tensor parallelism with
torch.compile has the same layout of the blocks, and words whole, or padded by hand to
50,258. ``convnet``: forward and backward of one image of 256 x 256, split over height,
beside the whole image on every rank with stock torch.compile; ``resnet50`` the same of
a ResNet-50 and an image of ``--pixels`` (1,024) each way. All sides run in the same
two processes of one thread each, steps alternate, and losses must agree. ``state``:
bytes of parameters, gradients and AdamW's state on a rank; ``bytes``, ``peak``: of a
step, as ``_traffic.py`` counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import conditions, spread, write
from _traffic import watched

LIMIT = 900  # seconds that the job may take
WORDS, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 50257, 128, 4, 2, 2, 64
PIXELS, CHANNELS = 256, 32
TOLERANCE = 1e-4  # relative difference of losses
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")
HINTS = {
    "words.weight": ("tp", None),
    "head.weight": ("tp", None),
    **{f"*.{name}.weight": ("tp", None) for name in COLUMNS},
    **{f"*.{name}.bias": ("tp",) for name in COLUMNS},
    **{f"*.{name}.weight": (None, "tp") for name in ROWS},
}

# Forward and backward, and the update if there is one: the loss.
Step = Callable[[], Any]


def gpt(words: int = WORDS) -> Any:
    """GPT-2 with separate projections; logits of ``WORDS`` words, whatever ``words``
    the tables have."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.out = nn.Linear(WIDTH, WIDTH)
            self.up, self.down = (
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x: Any) -> Any:
            h = self.norm(x)
            shape = (*h.shape[:2], -1, WIDTH // HEADS)
            q, k, v = (
                project(h).view(shape).transpose(1, 2)
                for project in (self.q, self.k, self.v)
            )
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(h.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.words = nn.Embedding(words, WIDTH)
            self.head = nn.Linear(WIDTH, words, bias=False)
            with torch.no_grad():  # the same first rows, however many there are
                for table in (self.words.weight, self.head.weight):
                    draw = torch.Generator().manual_seed(1)
                    table[:WORDS] = 0.02 * torch.randn(WORDS, WIDTH, generator=draw)

        def forward(self, ids: Any) -> Any:
            x = self.words(ids) + self.places
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))[..., :WORDS]
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    torch.manual_seed(0)
    return Model()


def trainer(model: Any, called: Any) -> Step:
    """A step with AdamW. What lies in parts is updated apart from what does not, which
    foreach kernels cannot mix."""
    import torch
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    parts = [p for p in parameters if isinstance(p, DTensor)]
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    groups = [{"params": each} for each in (parts, plain) if each]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(WORDS, (BATCH, LENGTH), generator=draw)

    def step() -> Any:
        optimizer.zero_grad()
        loss = called(ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.held = lambda: held(optimizer)  # type: ignore[attr-defined]
    return step


def held(optimizer: Any) -> int:
    """Bytes of parameters, gradients and state on this rank."""
    import torch

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    tensors += [
        x
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, torch.Tensor)
    ]
    locals_ = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum(x.numel() * x.dtype.itemsize for x in locals_)


def gpt_by_fxpar() -> Step:
    import torch

    import fxpar

    model = fxpar.shard(gpt(), mesh="tp=2", hints=HINTS)
    options = {"mesh": "tp=2"}
    called = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    return trainer(model, called)


def gpt_by_dtensor(padded: bool) -> Step:
    """Tensor parallel blocks; ``padded``: words too, one more than there are."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = gpt(WORDS + WORDS % 2 if padded else WORDS)
    layer: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel())
    layer |= dict.fromkeys(ROWS, RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, layer)
    if padded:
        whole = Replicate()
        root = {
            "words": RowwiseParallel(input_layouts=whole),
            "head": ColwiseParallel(output_layouts=whole),
        }
        parallelize_module(model, mesh, root)
    return trainer(model, torch.compile(model, dynamic=False))


def convnet() -> Any:
    """Residual blocks of 3 x 3 convolutions, the first of each stage of stride 2."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inner: int, outer: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
            self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
            self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            h = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(self.norms[1](self.second(h)) + self.short(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [3, CHANNELS, CHANNELS, 2 * CHANNELS, 2 * CHANNELS]
            self.blocks = nn.Sequential(
                *(
                    Block(inner, outer, 1 + i % 2)
                    for i, (inner, outer) in enumerate(
                        zip(sizes, sizes[1:], strict=False)
                    )
                )
            )

        def forward(self, x: Any) -> Any:
            return self.blocks(x).square().mean()

    torch.manual_seed(0)
    return Model()


def resnet50() -> Any:
    """ResNet-50, its loss the mean of squared logits."""
    import torch
    from torch import nn
    from transformers import ResNetConfig, ResNetForImageClassification

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck")
            self.model = ResNetForImageClassification(config)

        def forward(self, x: Any) -> Any:
            return self.model(x).logits.square().mean()

    torch.manual_seed(0)
    return Model()


def image_step(called: Any, model: Any, pixels: int) -> Step:
    import torch

    draw = torch.Generator().manual_seed(3)
    x = torch.randn(1, 3, pixels, pixels, generator=draw)

    def step() -> Any:
        model.zero_grad()
        loss = called(x)
        loss.backward()
        return loss.detach()

    return step


def image_by_fxpar(make: Callable[[], Any], pixels: int) -> Step:
    import torch

    model = make()
    height = {"x": ("_", "_", "h", "_")}
    options = {"mesh": "h=2", "hints": height, "plan": "propagate"}
    called = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    return image_step(called, model, pixels)


def image_on_one_rank(make: Callable[[], Any], pixels: int) -> Step:
    import torch

    model = make()
    return image_step(torch.compile(model, dynamic=False), model, pixels)


def image_sides(make: Callable[[], Any], pixels: int) -> dict[str, Callable[[], Step]]:
    """Split over height, and whole on every rank."""
    return {
        "fxpar": lambda: image_by_fxpar(make, pixels),
        "one rank": lambda: image_on_one_rank(make, pixels),
    }


# Of which programs there are sides.
PROGRAMS = ("gpt", "convnet", "resnet50")


def sides_of(program: str, pixels: int) -> dict[str, Callable[[], Step]]:
    """The sides of a program, fxpar's first. ``pixels``: of ResNet-50's image."""
    if program == "gpt":
        return {
            "fxpar": gpt_by_fxpar,
            "DTensor, words whole": lambda: gpt_by_dtensor(False),
            "DTensor, words padded": lambda: gpt_by_dtensor(True),
        }
    if program == "convnet":
        return image_sides(convnet, PIXELS)
    return image_sides(resnet50, pixels)


def measured(program: str, pairs: int, pixels: int) -> dict[str, Any]:
    """Of each side: seconds of a step on the slowest rank, what it sends and holds."""
    import torch
    import torch.distributed as dist

    steps, seconds, figures = dict[str, Step](), dict[str, list[float]](), {}
    for name, make in sides_of(program, pixels).items():
        torch._dynamo.reset()
        steps[name], seconds[name] = make(), []
        losses = [float(steps[name]()) for _ in range(2)]
        first = figures.setdefault("losses", losses)
        wrong = [
            a
            for a, b in zip(first, losses, strict=True)
            if abs(a - b) > TOLERANCE * abs(a)
        ]
        assert not wrong, f"{program}, {name}: losses {losses}, fxpar's are {first}"
    for _ in range(pairs):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            taken = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name].append(float(taken))
    for name, step in steps.items():
        traffic = watched(step).figures()
        state = getattr(step, "held", lambda: 0)()
        figures[name] = {**traffic, "state": state, "seconds": seconds[name]}
    return figures


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs = [args.only] if args.only else list(PROGRAMS)
    figures = {
        program: measured(program, args.pairs, args.pixels) for program in programs
    }
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", choices=list(PROGRAMS))
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    before = conditions()
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--worker", out]
        command += sys.argv[1:]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, timeout=LIMIT)
        figures = json.loads(Path(out).read_text())
    for program, sides in figures.items():
        sides.pop("losses")
        base = sides["fxpar"]["seconds"]
        for name, side in sides.items():
            ratios = [a / b for a, b in zip(base, side["seconds"], strict=True)]
            side["ratio"] = spread(ratios)
            print(
                f"{program:8} {name:22} {statistics.median(side['seconds']):7.3f} s, "
                f"sends {side['bytes'] / 2**20:6.1f} MiB, peak of a step "
                f"{side['peak'] / 2**20:6.1f} MiB, state {side['state'] / 2**20:6.1f} "
                f"MiB; fxpar takes {side['ratio']['median']:.3f} of it"
            )
    write(args.json, "bench_uneven", {"conditions": before, "figures": figures})


if __name__ == "__main__":
    main()
