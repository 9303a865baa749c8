"""Attention by the kernels that torch has on this device, split along heads, queries or
keys: results and gradients are as near to float64 as the same kernel's on one device.

On the CPU few of them exist; a GPU has the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxpar
from tests.helpers.device import compute_exactly

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
BATCH, HEADS, ROWS, WIDTH = 2, 4, 256, 64

KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16, ()),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, [ON_GPU]),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32, [ON_GPU]),
    "math": (SDPBackend.MATH, torch.float32, ()),
    "by torch": (None, torch.bfloat16, ()),
}
PLACES = {
    "heads": ("tp=2", (None, "tp", None, None), None),
    "sequence": ("cp=2", (None, None, "cp", None), None),
    "sequence of four": ("dp=2,cp=4", ("dp", None, "cp", None), None),
    "keys": ("cp=2", None, (None, None, "cp", None)),
}


def causal(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v)


def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def grouped(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True
    )


FORMS = (causal, full, biased, grouped)
# What a kernel does not serve.
UNSERVED = {("flash", biased), ("efficient", grouped), ("math", grouped)}


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = BATCH, HEADS, ROWS, WIDTH
    made = [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(3)]
    bias = torch.randn(ROWS, ROWS, device=DEVICE, dtype=dtype)
    return [*(x.requires_grad_() for x in made), bias]


def exactly(form: Callable[..., Any], args: list[torch.Tensor]) -> list[Any]:
    """The result and gradients of its sum, in float64."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in args]
    with sdpa_kernel(SDPBackend.MATH):
        out = form(*wide)
        return [out, *torch.autograd.grad(out.sum(), wide[:3])]


def apart(got: Any, want: Any) -> float:
    """The largest difference relative to the largest number; infinite of NaNs."""
    differences = [
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(got, want, strict=True)
    ]
    return max(math.inf if x != x else x for x in differences)


def flat(outcome: Any) -> list[Any]:
    result, gradients = outcome
    return [result, *gradients.values()]


def cases() -> Iterator[Any]:
    """Quick is every form of each kernel at one place; the places take turns."""
    for k, (name, (*_, marks)) in enumerate(KERNELS.items()):
        for (f, form), (p, place) in itertools.product(
            enumerate(FORMS), enumerate(PLACES)
        ):
            if (name, form) not in UNSERVED:
                slow = [pytest.mark.slow] if (k + f + p) % len(PLACES) else []
                case = f"{name}-{form.__name__}-{place}"
                yield pytest.param(name, form, place, marks=[*marks, *slow], id=case)


@pytest.mark.parametrize(("kernel", "form", "place"), list(cases()))
def test_kernels(kernel: str, form: Callable[..., Any], place: str) -> None:
    compute_exactly()
    backend, dtype, _ = KERNELS[kernel]
    mesh, rows, keys = PLACES[place]
    args = tensors(dtype)
    backends = list(SDPBackend.__members__.values()) if backend is None else [backend]
    with sdpa_kernel([b for b in backends if b is not SDPBackend.ERROR]):
        plan = fxpar.plan(
            form,
            *args,
            mesh=mesh,
            in_specs=[rows, keys or rows, keys or rows, None],
            mode="propagate",
            grad=True,
        )
        split = flat(plan.simulate(*args))
        whole = flat(plan.reference(*args))
    want = exactly(form, args)
    ours, torchs = apart(split, want), apart(whole, want)
    floor = 4 * torch.finfo(dtype).eps
    assert ours <= max(2 * torchs, floor), (ours, torchs)
    assert torchs <= 16 * floor


# Packed documents.

CUTS = {
    "alike": [0, 64, 128, 192, 256],
    "across parts": [0, 10, 100, 101, 250, 256],
    "one": [0, 256],
}


@ON_GPU
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "tp=2"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 0)])
@pytest.mark.parametrize("cut", CUTS)
def test_packed_documents(cut: str, window: Any, mesh: str) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    torch.manual_seed(0)
    made = [
        torch.randn(256, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(3)
    ]
    args = [x.requires_grad_() for x in made]
    starts = torch.tensor(CUTS[cut], device=DEVICE, dtype=torch.int32)
    how = {"window_size": window}

    def attend(q: Any, k: Any, v: Any, starts: Any) -> Any:
        return varlen.varlen_attn(q, k, v, starts, starts, 256, 256, **how)

    lie = ("cp", None, None) if "cp" in mesh else (None, "tp", None)
    specs = {"in_specs": [lie] * 3 + [(None,)], "out_specs": [lie]}
    plan = fxpar.plan(
        attend, *args, starts, mesh=mesh, mode="propagate", grad=True, **specs
    )
    split, whole = (
        flat(plan.simulate(*args, starts)),
        flat(plan.reference(*args, starts)),
    )
    want = documents_exactly(args, CUTS[cut], window)
    ours, torchs = apart(split, want), apart(whole, want)
    assert ours <= max(2 * torchs, 4 * torch.finfo(torch.bfloat16).eps), (ours, torchs)


def documents_exactly(args: list[Any], cuts: list[int], window: Any) -> list[Any]:
    """Result and gradients in float64, document by document."""
    wide = [x.detach().double().requires_grad_() for x in args]
    outs = []
    for begin, end in itertools.pairwise(cuts):
        q, k, v = (x[begin:end].transpose(0, 1) for x in wide)
        ahead = torch.arange(end - begin, device=DEVICE)
        behind = ahead[:, None] - ahead
        left, right = window
        hidden = (-behind > right) & (right >= 0) | (behind > left) & (left >= 0)
        scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(hidden, -math.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    out = torch.cat(outs)
    return [out, *torch.autograd.grad(out.sum(), wide)]
