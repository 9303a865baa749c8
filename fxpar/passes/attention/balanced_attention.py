"""Causal attention of two sets of queries that begin at two places of the sequence.

``fxpar::balanced_causal_attention(near, k, v, far, near_ahead, far_ahead, scale)`` is
``fxpar::causal_attention`` of each set on the same keys, and gives both outputs and
both log-sum-exps. Where the sets of a rank stand as far from the two ends of the
sequence, all ranks have as much to do as if each saw all keys of one of its sets; that
is what the call is priced as.
"""

from __future__ import annotations

import torch

from fxpar.passes.attention import causal_attention as _ops  # noqa: F401  (registers ops)

ours = torch.ops.fxpar

Tensors = tuple[torch.Tensor, ...]

_PLACES = "SymInt near_ahead, SymInt far_ahead, float? scale"
torch.library.define(
    "fxpar::balanced_causal_attention",
    f"(Tensor near, Tensor k, Tensor v, Tensor far, {_PLACES}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "fxpar::balanced_causal_attention_backward",
    "(Tensor near_grad, Tensor near, Tensor k, Tensor v, Tensor near_out, "
    "Tensor near_lse, Tensor far_grad, Tensor far, Tensor far_out, Tensor far_lse, "
    f"{_PLACES}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _forward(near, k, v, far, near_ahead, far_ahead, scale) -> Tensors:
    first = ours.causal_attention(near, k, v, near_ahead, scale)
    return *first, *ours.causal_attention(far, k, v, far_ahead, scale)


def _backward(
    near_grad, near, k, v, near_out, near_lse,
    far_grad, far, far_out, far_lse, near_ahead, far_ahead, scale,
) -> Tensors:  # fmt: skip
    """Gradients of both sets of queries, of keys and of values."""
    differentiate = ours.causal_attention_backward
    arguments = near_grad, near, k, v, near_out, near_lse, near_ahead, scale
    near_dq, near_dk, near_dv = differentiate(*arguments)
    arguments = far_grad, far, k, v, far_out, far_lse, far_ahead, scale
    far_dq, far_dk, far_dv = differentiate(*arguments)
    return near_dq, far_dq, near_dk + far_dk, near_dv + far_dv


for _name, _function in (
    ("fxpar::balanced_causal_attention", _forward),
    ("fxpar::balanced_causal_attention_backward", _backward),
):
    torch.library.impl(_name, "CompositeExplicitAutograd")(_function)
    torch.library.register_fake(_name)(_function)
