"""Parts of ``one_gpu.py`` that train a small model: by two processes on one GPU, and by
one that is alone.

Compared are losses of some steps, in float32, with those of eager steps on one device;
with dropout those with and without fused regions, whose masks are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_here import Here, fill
from gpu_programs import F32
from gpu_ranks import all_say, collectives, decomposed, leave, start
from torch import nn

from fxpar.fusion.kernels import region_op

# Relative difference of losses after some steps, float32.
NEAR_LOSS = 1e-4


class Block(nn.Module):
    """A product split by columns, one by rows, and what stands behind it."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(rate)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.drop(self.down(nn.functional.gelu(self.up(x))))
        size = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * size * self.scale


class Model(nn.Module):
    """Two blocks, and the mean square of what they miss."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width, rate), Block(width, rate))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.blocks(x) - y).pow(2).mean()


HINTS = {"*up.weight": ("tp", None), "*up.bias": ("tp",), "*down.weight": (None, "tp")}
WIDTH, BATCH, STEPS = 256, 128, 3
SPLIT: dict[str, Any] = {"plan": "propagate", "schedule": "none", "hints": HINTS}


def built(here: Here, rate: float) -> tuple[nn.Module, list[torch.Tensor], Any]:
    """A model, its batch and its optimizer, alike in every process."""
    torch.manual_seed(3)
    model = Model(WIDTH, rate).to(here.device)
    batch = [fill(here, (BATCH, WIDTH), F32, s) for s in (1, 2)]
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)


def losses(
    here: Here, options: dict[str, Any] | None, rate: float = 0.0
) -> list[float]:
    """Of some steps; eager without options."""
    torch._dynamo.reset()
    model, batch, optimizer = built(here, rate)
    run: Any = model
    if options is not None:
        given = {"codegen": "inductor" if here.is_gpu else "eager"} | options
        run = torch.compile(model, backend="fxpar", options=given)
    torch.manual_seed(5)
    out = []
    for _ in range(STEPS):
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def far(got: Sequence[float], want: Sequence[float]) -> float:
    """The largest relative difference; of NaNs infinite."""
    found = [abs(a / b - 1.0) for a, b in zip(got, want, strict=True)]
    return max(x if x == x else float("inf") for x in found)


def shared_device(here: Here) -> None:
    """NCCL between processes of one GPU: collectives, and a model on a mesh."""
    from fxpar.runtime.ranks import groups

    # Ranks on one device are an error elsewhere: here they are the point.
    groups.check_sharing = lambda hosts, devices: None
    group = start(here, "cpu:gloo,cuda:nccl")
    good = collectives(here, group)
    version = ".".join(map(str, torch.cuda.nccl.version())) if here.is_gpu else "gloo"
    good = all_say(here, group, "collectives", good)
    here.check("nccl: collectives", good, note=f"{here.ranks} ranks, {version}")
    mesh = f"tp={here.ranks}"
    want = losses(here, None)
    for rate, fuse in ((0.0, "none"), (0.0, "triton"), (0.1, "none"), (0.1, "triton")):
        got, regions, fused = counted(here, SPLIT | {"mesh": mesh, "fuse": fuse}, rate)
        if rate and fuse == "none":
            want = got
            continue
        beside = "fuse=none with dropout" if rate else "one device"
        name = f"model {mesh} {fuse}{' dropout' if rate else ''}"
        note = f"beside {beside}; {regions} regions, {fused} kernels"
        wrong = far(got, want)
        good = wrong <= NEAR_LOSS and (regions > 0 and fused > 0) == (fuse == "triton")
        good = all_say(here, group, name, good)
        here.check(name, good, wrong / NEAR_LOSS, note=note, losses=got, want=want)
    leave(here, group)


def counted(here: Here, options: dict[str, Any], rate: float) -> Any:
    """Losses, regions that graphs had, and calls of kernels with collectives inside."""
    from fxpar.runtime.steps import lowering_steps

    place: Any = lowering_steps
    regions, calls = [0], [0]
    fuse, launched = place.fuse_graph, region_op.launched

    def fusing(*args: Any, **kwargs: Any) -> Any:
        found = fuse(*args, **kwargs)
        regions[0] += len(found.programs)
        for program in found.programs if here.mode == "try" else ():
            path = Path(here.out).parent / f"program_{program.hash}.json"
            path.write_text(program.text)
        return found

    def launching(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return launched(*args, **kwargs)

    place.fuse_graph, region_op.launched = fusing, launching
    try:
        return losses(here, options, rate), regions[0], calls[0]
    finally:
        place.fuse_graph, region_op.launched = fuse, launched


# Alone.


def alone(here: Here) -> None:
    """One process: NCCL and symmetric memory of one rank, what is decomposed for one
    rank beside what is whole, models, and a compiled training step."""
    group = start(here, "cpu:gloo,cuda:nccl")
    good = collectives(here, group)
    here.check("one rank: collectives", good, note="NCCL" if here.is_gpu else "gloo")
    if here.is_gpu:
        from torch.distributed import _symmetric_memory

        memory: Any = _symmetric_memory
        own = memory.empty(1 << 16, dtype=torch.uint8, device=here.device)
        handle = memory.rendezvous(own, group)
        good = list(handle.buffer_ptrs) == [own.data_ptr()]
        here.check("one rank: symmetric memory", good)
    error, bits = decomposed(here, group)
    here.check("one rank: decomposed", error <= 1.0, error, note=bits)
    want = losses(here, None)
    for codegen in ("inductor", "eager") if here.is_gpu else ("eager",):
        got = losses(here, {"mesh": "tp=1", "plan": "propagate", "codegen": codegen})
        wrong = far(got, want)
        name = f"one rank: model, {codegen}"
        here.check(name, wrong <= NEAR_LOSS, wrong / NEAR_LOSS, losses=got)
        got = stepped(here, codegen)
        wrong = far(got, want)
        name = f"one rank: train_step, {codegen}"
        here.check(name, wrong <= NEAR_LOSS, wrong / NEAR_LOSS, losses=got)


def stepped(here: Here, codegen: str) -> list[float]:
    """Losses of ``fxpar.train_step``."""
    import fxpar

    torch._dynamo.reset()
    model, batch, optimizer = built(here, 0.0)
    options = {"mesh": "tp=1", "plan": "propagate", "codegen": codegen}
    step = fxpar.train_step(
        model, lambda model, *batch: model(*batch), optimizer, options=options
    )
    return [float(step(*batch)) for _ in range(STEPS)]
