"""Registers causal attention of queries that begin at any place of the sequence.

``fxpar::causal_attention(q, k, v, ahead, scale)``: query ``i`` sees keys up to
``i + ahead``, where ``ahead`` is the place of the first query minus that of the first
key. It gives the output and the log-sum-exp of each query's scores, ``-inf`` where it
sees no key. ``fxpar::causal_attention_backward`` takes the log-sum-exps over all keys,
of which ``k`` and ``v`` may be a part.

``fxpar::balanced_causal_attention(near, k, v, far, near_ahead, far_ahead, gap, scale)``
is ``fxpar::causal_attention`` of each set on the same keys, and gives both outputs and
both log-sum-exps. Where the two sets of a rank are equally far from the two ends of the
sequence, each rank has as much to do as if it saw all keys of one of its sets; the cost
model prices the call so.

The second half of the keys begins ``gap`` places after the first: right after it, or,
in a ring, elsewhere. Then queries see all of a half, a square of it, or nothing: places
differ by whole halves.

Kernels have no mask that begins elsewhere. Keys that all queries see and the square in
which queries begin to see keys are attended separately, each by the fastest kernel that
the device has, and merged by their log-sum-exp. In: tensors
[batch, heads, rows, features]; several query heads may share one key head. Out: the
same, and log-sum-exps [batch, heads, rows]. Never: computes scores of keys that no
query sees, or communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
ours = torch.ops.fxpar

Result = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class VisibleBlock:
    """Is a block of queries and keys that see one another."""

    # Rows of the queries.
    rows: slice
    # Rows of the keys that these see.
    keys: slice
    # True: a square in which a query sees the keys up to its own; False: it sees all.
    causal: bool


def blocks(rows: int, keys: int, ahead: int) -> list[VisibleBlock]:
    """Return the blocks of keys that queries see, each pair once, at most two blocks
    for each query, for these numbers of queries and keys. Queries in no block see
    nothing."""
    first, ahead = max(0, -ahead), max(0, ahead)
    square = max(0, min(rows - first, keys - ahead))
    end = first + square
    candidates = [
        VisibleBlock(slice(first, end), slice(0, ahead), False),
        VisibleBlock(slice(first, end), slice(ahead, ahead + square), True),
        VisibleBlock(slice(end, rows), slice(0, keys), False),
    ]
    return [b for b in candidates if b.rows.start < b.rows.stop and b.keys.stop]


def rows_like(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return an empty tensor of the rows of ``x``: in memory heads are inside of
    rows."""
    shape = (*x.shape[:3], width)
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device)


_SCHEMA = "(Tensor q, Tensor k, Tensor v, SymInt ahead, float? scale)"
torch.library.define("fxpar::causal_attention", f"{_SCHEMA} -> (Tensor, Tensor)")
torch.library.define(
    "fxpar::causal_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "SymInt ahead, float? scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("fxpar::causal_attention")
def _(q, k, v, ahead, scale):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return rows_like(q, v.shape[3]), lse


@torch.library.register_fake("fxpar::causal_attention_backward")
def _(grad, q, k, v, out, logsumexp, ahead, scale):
    return tuple(rows_like(x, x.shape[3]) for x in (q, k, v))


@torch.library.impl("fxpar::causal_attention", "CompositeExplicitAutograd")
def _forward(q, k, v, ahead, scale) -> Result:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out = rows_like(q, v.shape[3]).zero_()
    lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
    attend, _ = _kernel(q, k, v)
    covered = 0
    for block in blocks(q.shape[2], k.shape[2], ahead):
        rows, keys = block.rows, block.keys
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        attended, weight = attend(*part, block.causal, scale)
        if rows.stop <= covered:
            attended, weight = merged(
                out[:, :, rows], lse[:, :, rows], attended, weight
            )
        covered = rows.stop
        out[:, :, rows], lse[:, :, rows] = attended, weight
    return out, lse


@torch.library.impl("fxpar::causal_attention_backward", "CompositeExplicitAutograd")
def _backward(grad, q, k, v, out, logsumexp, ahead, scale) -> Gradients:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    _, differentiate = _kernel(q, k, v)
    all_blocks = blocks(q.shape[2], k.shape[2], ahead)
    # Two blocks may share queries or keys: gradients are summed in the wide type.
    sums = tuple(rows_like(x, x.shape[3]).to(dtype).zero_() for x in (q, k, v))
    for block in all_blocks:
        rows, keys = block.rows, block.keys
        results = (x[:, :, rows] for x in (out, logsumexp))
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        gradients = differentiate(
            grad[:, :, rows], *part, *results, block.causal, scale
        )
        for total, where, x in zip(sums, (rows, keys, keys), gradients, strict=True):
            total[:, :, where] += x
    dq, dk, dv = (total.to(q.dtype) for total in sums)
    return dq, dk, dv


def merged(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, weight: torch.Tensor
) -> Result:
    """Return the result of queries over two sets of keys, from their results over
    each."""
    total = torch.logaddexp(lse, weight)
    shift = total.masked_fill(total == -math.inf, 0)
    first, second = ((x - shift).exp().unsqueeze(-1) for x in (lse, weight))
    return (out * first + other * second).to(out.dtype), total


def _each(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return one head for each of the query heads that share one."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _shared(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the gradient of heads from that of ``_each``."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


# Kernels


# (q, k, v, causal, scale) of a block -> output and log-sum-exp; (grad, q, k, v, out,
# logsumexp, causal, scale) -> gradients of queries, keys and values.
AttentionKernel = tuple[Callable[..., Result], Callable[..., Gradients]]


def _cpu(q, k, v, causal, scale) -> Result:
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(grad, q, k, v, out, lse, causal, scale) -> Gradients:
    differentiate = aten._scaled_dot_product_flash_attention_for_cpu_backward
    # The kernel reads the log-sum-exp as its forward lays it out, and a key of each
    # query head.
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    keys, values = _each(k, groups), _each(v, groups)
    arguments = grad, q, keys, values, out, lse, 0.0, causal
    dq, dk, dv = differentiate(*arguments, scale=scale)
    return dq, _shared(dk, groups), _shared(dv, groups)


def _flash(q, k, v, causal, scale) -> Result:
    attend = aten._scaled_dot_product_flash_attention
    out, lse, *_ = attend(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(grad, q, k, v, out, lse, causal, scale) -> Gradients:
    differentiate = aten._scaled_dot_product_flash_attention_backward
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    arguments = grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2]
    return differentiate(*arguments, 0.0, causal, state[0], state[1], scale=scale)


def _efficient(q, k, v, causal, scale) -> Result:
    attend = aten._scaled_dot_product_efficient_attention
    out, lse, *_ = attend(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(grad, q, k, v, out, lse, causal, scale) -> Gradients:
    differentiate = aten._scaled_dot_product_efficient_attention_backward
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    lse = torch.nn.functional.pad(lse, (0, padding(q.shape[2])), value=math.inf)
    arguments = grad, q, k, v, None, out, lse.contiguous(), state[0], state[1], 0.0
    gradients = differentiate(
        *arguments, [True, True, True, False], causal, scale=scale
    )
    dq, dk, dv, *_ = gradients
    return dq, dk, dv


def padding(rows: int) -> int:
    """Return by how many rows the memory-efficient kernel's log-sum-exp is longer."""
    return -rows % 32


def _scores(q, k, causal, scale) -> torch.Tensor:
    k = _each(k, q.shape[1] // k.shape[1]).to(
        torch.promote_types(q.dtype, torch.float32)
    )
    scores = q.to(k.dtype) @ k.mT * scale
    if causal:
        unseen = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -math.inf)
    return scores


def _math(q, k, v, causal, scale) -> Result:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    v = _each(v, q.shape[1] // v.shape[1]).to(scores.dtype)
    return ((scores - lse.unsqueeze(-1)).exp() @ v).to(q.dtype), lse


def _math_backward(grad, q, k, v, out, lse, causal, scale) -> Gradients:
    weights = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    dtype, groups = weights.dtype, q.shape[1] // k.shape[1]
    grad, out = grad.to(dtype), out.to(dtype)
    keys, values = (_each(x, groups).to(dtype) for x in (k, v))
    centered = grad @ values.mT - (grad * out).sum(-1, keepdim=True)
    scores = weights * centered * scale
    dk, dv = scores.mT @ q.to(dtype), weights.mT @ grad
    dk, dv = (_shared(x, groups).to(k.dtype) for x in (dk, dv))
    return (scores @ keys).to(q.dtype), dk, dv


_KERNELS: dict[str, AttentionKernel] = {
    "cpu": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "math": (_math, _math_backward),
}


def _kernel(q: Any, k: Any, v: Any) -> AttentionKernel:
    """Return the fastest kernel for such tensors, by device, dtype and heads."""
    if q.device.type == "cpu" and q.shape[3] == v.shape[3]:
        return _KERNELS["cpu"]
    if q.device.type == "cuda":
        cuda = torch.backends.cuda
        params = cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
        if cuda.can_use_flash_attention(params):
            return _KERNELS["flash"]
        if cuda.can_use_efficient_attention(params):
            return _KERNELS["efficient"]
    return _KERNELS["math"]


# Two sets of queries


_PLACES = "SymInt near_ahead, SymInt far_ahead, SymInt gap, float? scale"
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


def _seen(keys: int, ahead: int, gap: int) -> Iterator[tuple[slice, int]]:
    """Yield the halves of the keys that queries see, and how far the queries are ahead
    of each. ``keys``: how many there are."""
    half = keys // 2
    for i, before in enumerate((ahead, ahead - gap)):
        if before > -half:
            yield slice(i * half, (i + 1) * half), before


def _attend(q, k, v, ahead, gap, scale) -> Result:
    """Return output and log-sum-exp of one set of queries."""
    keys = k.shape[2]
    if 2 * gap == keys:
        return ours.causal_attention(q, k, v, ahead, scale)
    parts = [
        ours.causal_attention(q, k[:, :, half], v[:, :, half], before, scale)
        for half, before in _seen(keys, ahead, gap)
    ]
    if not parts:
        return ours.causal_attention(q, k, v, -keys, scale)
    return parts[0] if len(parts) == 1 else merged(*parts[0], *parts[1])


def _differentiate(
    grad, q, k, v, out, lse, ahead, gap, scale
) -> tuple[torch.Tensor, ...]:
    """Return gradients of one set of queries, and its summands of those of keys and
    values."""
    differentiate, keys = ours.causal_attention_backward, k.shape[2]
    if 2 * gap == keys:
        return differentiate(grad, q, k, v, out, lse, ahead, scale)
    dq, dk, dv = (rows_like(x, x.shape[3]).zero_() for x in (q, k, v))
    for half, before in _seen(keys, ahead, gap):
        part = k[:, :, half], v[:, :, half]
        gradients = differentiate(grad, q, *part, out, lse, before, scale)
        dq = dq + gradients[0]
        dk[:, :, half], dv[:, :, half] = gradients[1:]
    return dq, dk, dv


@torch.library.impl("fxpar::balanced_causal_attention", "CompositeExplicitAutograd")
def _(near, k, v, far, near_ahead, far_ahead, gap, scale) -> tuple[torch.Tensor, ...]:
    first = _attend(near, k, v, near_ahead, gap, scale)
    return *first, *_attend(far, k, v, far_ahead, gap, scale)


@torch.library.impl(
    "fxpar::balanced_causal_attention_backward", "CompositeExplicitAutograd"
)
def _(
    near_grad, near, k, v, near_out, near_lse,
    far_grad, far, far_out, far_lse, near_ahead, far_ahead, gap, scale,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return gradients of both sets of queries, of keys and of values."""
    arguments = near_grad, near, k, v, near_out, near_lse, near_ahead
    near_dq, near_dk, near_dv = _differentiate(*arguments, gap, scale)
    arguments = far_grad, far, k, v, far_out, far_lse, far_ahead
    far_dq, far_dk, far_dv = _differentiate(*arguments, gap, scale)
    return near_dq, far_dq, near_dk + far_dk, near_dv + far_dv


@torch.library.register_fake("fxpar::balanced_causal_attention")
def _(near, k, v, far, near_ahead, far_ahead, gap, scale):
    attend = ours.causal_attention
    return *attend(near, k, v, 0, scale), *attend(far, k, v, 0, scale)


@torch.library.register_fake("fxpar::balanced_causal_attention_backward")
def _(near_grad, near, k, v, near_out, near_lse, far_grad, far, *_):
    return tuple(rows_like(x, x.shape[3]) for x in (near, far, k, v))
