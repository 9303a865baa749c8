"""The part of ``one_gpu.py`` that trains a Llama on one device in bfloat16 (B9): steps
of fxpar beside those of torch.compile, what is predicted of them, and first steps.

All sides have the same weights, batch and AdamW, fused. Losses must agree before
anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_here import Here, Side, Times, figures_of, measure, over
from torch import nn

MESH = "dp=1"
# Width, inner width, layers, heads, heads of keys, words; batch and length.
REAL = (2048, 5632, 4, 16, 8, 32_000), (4, 2048)
SMALL = (32, 64, 2, 4, 2, 64), (2, 16)
# Relative difference of losses: bfloat16 in another order.
NEAR = 2e-2
LONGEST = 8000.0

Step = Callable[[int], torch.Tensor]


class Loss(nn.Module):
    """The loss of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def llama(here: Here) -> tuple[nn.Module, torch.Tensor]:
    """A model and its batch, the same at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    (width, inner, layers, heads, keys, words), batch = here.pick(REAL, SMALL)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=words,
        max_position_embeddings=2 * batch[1],
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(here.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.randint(0, words, batch)
    return Loss(model), ids


def compiled_step(here: Here, backend: str) -> Step:
    """A step as users write it, the model by ``torch.compile``."""
    model, ids = llama(here)
    options = {"mesh": MESH} if backend == "fxpar" else None
    if not here.is_gpu:
        backend = "fxpar" if options else "aot_eager"
        options = options and options | {"codegen": "eager"}
    run: Any = torch.compile(model, backend=backend, options=options, dynamic=False)
    optimizer = adamw(model)

    def step(_: int) -> torch.Tensor:
        loss = run(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def whole_step(here: Here) -> Step:
    """The same by ``fxpar.train_step``."""
    import fxpar

    model, ids = llama(here)
    options: dict[str, Any] = {"mesh": MESH}
    options |= {} if here.is_gpu else {"codegen": "eager"}
    step = fxpar.train_step(
        model, lambda model, ids: model(ids), adamw(model), options=options
    )
    return lambda _: step(ids)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def steps(here: Here) -> None:
    """First steps, losses, steady steps and their prediction."""
    sides: dict[str, Step] = {
        "inductor": compiled_step(here, "inductor"),
        "fxpar": compiled_step(here, "fxpar"),
        "train_step": whole_step(here),
    }
    losses: dict[str, list[float]] = {}
    for name, step in sides.items():
        begun = time.perf_counter()
        first = float(step(0))
        here.value("b9 first", time.perf_counter() - begun, name)
        losses[name] = [first, *(float(step(i)) for i in (1, 2))]
    want = losses["inductor"]
    for name, got in losses.items():
        far = max(abs(a / b - 1.0) for a, b in zip(got, want, strict=True))
        here.check(f"step: losses of {name}", far <= NEAR, far / NEAR, losses=got)
    # A step's launches take the host longer than the device sleeps before short ones.
    timed = {name: Side(step) for name, step in sides.items()}
    times = measure(here, timed, longest=LONGEST)
    told = figures_of(times)
    predicted = predicted_seconds(here)
    for name in ("fxpar", "train_step"):
        ratio = over(times[name], times["inductor"])
        here.value(f"b9 {name}", ratio, "Llama bf16", times=told)
    model_only = forward_backward(here)
    here.value("b9 ms", model_only.ms, "Llama bf16", predicted=predicted * 1e3)


def forward_backward(here: Here) -> Times:
    """Of fxpar's forward and backward alone, as predicted."""
    model, ids = llama(here)
    options: dict[str, Any] = {"mesh": MESH}
    options |= {} if here.is_gpu else {"codegen": "eager"}
    run: Any = torch.compile(model, backend="fxpar", options=options, dynamic=False)

    def both(_: int) -> None:
        run(ids).backward()
        for p in model.parameters():
            p.grad = None

    return measure(here, {"both": Side(both)}, longest=LONGEST / 2)["both"]


def predicted_seconds(here: Here) -> float:
    """Of forward and backward, by the figures of this device."""
    import fxpar

    model, ids = llama(here)
    plan = fxpar.plan(model, ids, mesh=MESH, grad=True)
    here.tell(facts={"step predicted": str(plan.predicted)})
    return float(plan.predicted.seconds)


# Words of the names of kernels, the first that fits.
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "product": ("gemm", "nvjet", "cutlass", "xmma"),
    "generated": ("triton",),
}


def shares(here: Here) -> None:
    """Of fxpar's forward and backward: milliseconds of kernels by kind, and the longest
    kernels, as the profiler has them."""
    from torch.profiler import ProfilerActivity, profile

    model, ids = llama(here)
    options: dict[str, Any] = {"mesh": MESH}
    options |= {} if here.is_gpu else {"codegen": "eager"}
    run: Any = torch.compile(model, backend="fxpar", options=options, dynamic=False)
    for _ in range(3):
        run(ids).backward()
    here.sync()
    activity = ProfilerActivity.CUDA if here.is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for _ in range(3):
            run(ids).backward()
        here.sync()
    times: dict[str, float] = {}
    counts: dict[str, int] = {}
    for event in profiled.events():
        elapsed = event.device_time if here.is_gpu else event.cpu_time
        times[event.name] = times.get(event.name, 0.0) + elapsed / 3e3
        counts[event.name] = counts.get(event.name, 0) + 1
    kinds: dict[str, float] = {}
    for name, ms in times.items():
        fits = (k for k, words in KINDS.items() if any(w in name for w in words))
        kind = next(fits, "others")
        kinds[kind] = kinds.get(kind, 0.0) + ms
    longest = sorted(times, key=times.__getitem__, reverse=True)[:40]
    told = {name: [counts[name] / 3, times[name]] for name in longest}
    here.tell(facts={"ms by kind": kinds, "longest": told})
