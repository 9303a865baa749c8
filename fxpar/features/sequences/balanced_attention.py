"""Registers causal attention of two sets of queries at two places of the sequence.

``fxpar::balanced_causal_attention(near, k, v, far, near_ahead, far_ahead,
scale)`` is ``fxpar::causal_attention`` of each set on the same keys, and gives both
outputs and both log-sum-exps. Where the two sets of a rank are equally far from the two
ends of the sequence, each rank has as much to do as if it saw all keys of one of its
sets; the cost model prices the call so.

``fxpar::mirrored_causal_attention(near, k, v, far, near_ahead, far_ahead, gap, scale)``
is the same on keys at two places: the second half of ``k`` begins ``gap`` places after
the first. Queries see all of such a half, a square of it, or nothing: places differ by
whole halves.

In: tensors [batch, heads, rows, features]. Out: outputs and log-sum-exps, or gradients.
Never: communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fxpar.features.sequences.causal_attention import merged, rows_like

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
    """Return gradients of both sets of queries, of keys and of values."""
    differentiate = ours.causal_attention_backward
    arguments = near_grad, near, k, v, near_out, near_lse, near_ahead, scale
    near_dq, near_dk, near_dv = differentiate(*arguments)
    arguments = far_grad, far, k, v, far_out, far_lse, far_ahead, scale
    far_dq, far_dk, far_dv = differentiate(*arguments)
    return near_dq, far_dq, near_dk + far_dk, near_dv + far_dv


_PLACES = "SymInt near_ahead, SymInt far_ahead, SymInt gap, float? scale"
torch.library.define(
    "fxpar::mirrored_causal_attention",
    f"(Tensor near, Tensor k, Tensor v, Tensor far, {_PLACES}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "fxpar::mirrored_causal_attention_backward",
    "(Tensor near_grad, Tensor near, Tensor k, Tensor v, Tensor near_out, "
    "Tensor near_lse, Tensor far_grad, Tensor far, Tensor far_out, Tensor far_lse, "
    f"{_PLACES}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _seen(keys: int, ahead: int, gap: int) -> Iterator[tuple[slice, int]]:
    """Yield the halves of the keys that queries see, and how far the queries are ahead
    of each. ``keys``: how many there are."""
    half = keys // 2
    for i, before in enumerate((ahead, ahead - gap)):
        if before > -half:
            yield slice(i * half, (i + 1) * half), before


def _attend(q, k, v, ahead, gap, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of one set of queries."""
    parts = [
        ours.causal_attention(q, k[:, :, keys], v[:, :, keys], before, scale)
        for keys, before in _seen(k.shape[2], ahead, gap)
    ]
    if not parts:
        return ours.causal_attention(q, k, v, -k.shape[2], scale)
    return parts[0] if len(parts) == 1 else merged(*parts[0], *parts[1])


def _differentiate(grad, q, k, v, out, lse, ahead, gap, scale) -> Tensors:
    """Return gradients of one set of queries, and its summands of those of keys and
    values."""
    dq, dk, dv = (rows_like(x, x.shape[3]).zero_() for x in (q, k, v))
    for keys, before in _seen(k.shape[2], ahead, gap):
        part = k[:, :, keys], v[:, :, keys]
        gradients = ours.causal_attention_backward(
            grad, q, *part, out, lse, before, scale
        )
        dq = dq + gradients[0]
        dk[:, :, keys], dv[:, :, keys] = gradients[1:]
    return dq, dk, dv


def _mirrored(near, k, v, far, near_ahead, far_ahead, gap, scale) -> Tensors:
    sets = ((near, near_ahead), (far, far_ahead))
    (near_out, near_lse), (far_out, far_lse) = (
        _attend(q, k, v, ahead, gap, scale) for q, ahead in sets
    )
    return near_out, near_lse, far_out, far_lse


def _mirrored_backward(
    near_grad, near, k, v, near_out, near_lse,
    far_grad, far, far_out, far_lse, near_ahead, far_ahead, gap, scale,
) -> Tensors:  # fmt: skip
    """Return gradients of both sets of queries, of keys and of values."""
    arguments = near_grad, near, k, v, near_out, near_lse, near_ahead
    near_dq, near_dk, near_dv = _differentiate(*arguments, gap, scale)
    arguments = far_grad, far, k, v, far_out, far_lse, far_ahead
    far_dq, far_dk, far_dv = _differentiate(*arguments, gap, scale)
    return near_dq, far_dq, near_dk + far_dk, near_dv + far_dv


@torch.library.register_fake("fxpar::mirrored_causal_attention")
def _(near, k, v, far, near_ahead, far_ahead, gap, scale):
    attend = ours.causal_attention
    return *attend(near, k, v, 0, scale), *attend(far, k, v, 0, scale)


@torch.library.register_fake("fxpar::mirrored_causal_attention_backward")
def _(
    near_grad, near, k, v, near_out, near_lse,
    far_grad, far, far_out, far_lse, near_ahead, far_ahead, gap, scale,
):  # fmt: skip
    differentiate = ours.causal_attention_backward
    near_dq, dk, dv = differentiate(near_grad, near, k, v, near_out, near_lse, 0, scale)
    far_dq, _, _ = differentiate(far_grad, far, k, v, far_out, far_lse, 0, scale)
    return near_dq, far_dq, dk, dv


_FUNCTIONS: dict[str, Callable[..., Tensors]] = {
    "fxpar::balanced_causal_attention": _forward,
    "fxpar::balanced_causal_attention_backward": _backward,
    "fxpar::mirrored_causal_attention": _mirrored,
    "fxpar::mirrored_causal_attention_backward": _mirrored_backward,
}
for _name, _function in _FUNCTIONS.items():
    torch.library.impl(_name, "CompositeExplicitAutograd")(_function)
for _name in [*_FUNCTIONS][:2]:
    torch.library.register_fake(_name)(_FUNCTIONS[_name])
