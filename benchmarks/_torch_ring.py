"""Torch's own ring attention on CPU, under an unmodified Llama: a peer of ``cp``.

``context_parallel`` (torch 2.13, experimental) has no attention on CPU: its dispatcher
knows kernels of GPUs alone. What it dispatches to, ``_templated_ring_attention`` and
its backward, takes any kernel; here it is given that of the CPU, and balances causal
work as it does by default: a rank holds a part of the front of the sequence and one as
far from its end. The rest is what a user writes around it: each rank's tokens, labels
and positions, and sums of gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel import _attention as cp

aten = torch.ops.aten


def _heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def _kernel(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Any:
    keys, values = _heads(key, query), _heads(value, query)
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, keys, values, 0.0, is_causal, scale=scale)


def _kernel_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any,
    is_causal: bool, scale: float,
) -> Any:  # fmt: skip
    differentiate = aten._scaled_dot_product_flash_attention_for_cpu_backward
    # The kernel reads the log-sum-exp as its forward lays it out.
    lse = logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    results = out.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = grad_out, query, _heads(key, query), _heads(value, query), results, lse
    dq, *rest = differentiate(*tensors, 0.0, is_causal, scale=scale)
    dk, dv = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in rest)
    return dq, dk, dv


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        group = dist.group.WORLD
        out, lse = cp._templated_ring_attention(
            group, 2, _kernel, q, k, v, is_causal=True, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = cp._templated_ring_attention_backward(
            dist.group.WORLD, 2, _kernel_backward, grad, "grad_out", q, k, v, out, lse,
            True, scale=ctx.scale,
        )  # fmt: skip
        return *gradients[:3], None


@torch.compiler.disable
def _attend(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any
) -> Any:
    return _Ring.apply(q, k, v, scaling).transpose(1, 2).contiguous(), None


def _own(x: torch.Tensor) -> torch.Tensor:
    """A rank's part of a sequence [batch, rows]: two chunks, as far from its ends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(2 * ranks, 1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], 1)


class TorchRing:
    """A training step: ``step(ids)`` is the loss of the whole sequence; gradients of
    all ranks are summed, in one message."""

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("torch_ring", _attend)
        model.config._attn_implementation = "torch_ring"
        self.model, self.compiled = model, torch.compile(model, dynamic=False)

    def step(self, ids: torch.Tensor) -> float:
        later = F.pad(ids[:, 1:], (0, 1), value=-100)
        places = torch.arange(ids.shape[1])[None]
        tokens, labels, places = _own(ids), _own(later), _own(places)
        logits = self.compiled(input_ids=tokens, position_ids=places).logits
        total = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
        )
        loss = total / (ids.numel() - ids.shape[0])
        loss.backward()
        gradients = [p.grad for p in self.model.parameters()]
        flat = torch.cat([loss.detach()[None], *(g.flatten() for g in gradients)])
        dist.all_reduce(flat)
        sizes = [1, *(g.numel() for g in gradients)]
        whole, *sums = flat.split(sizes)
        for gradient, summed in zip(gradients, sums, strict=True):
            gradient.copy_(summed.view_as(gradient))
        return whole.item()
