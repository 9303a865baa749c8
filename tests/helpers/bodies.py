"""Programs whose ops run graphs of their own: branches, loops, attention by functions
of scores. Each takes x of [4, 4, 8] and a weight of [8, 8], of one dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as over_rows
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Program = Callable[[Tensor, Tensor], Tensor]


def branches(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0, lambda x, w: (x @ w).relu(), lambda x, w: x.sin() * 2, (x, w)
    )


def other_branch(x: Tensor, w: Tensor) -> Tensor:
    return branches(x - 10, w)


def nested_branches(x: Tensor, w: Tensor) -> Tensor:
    def inner(x, w):
        return torch.cond(w.mean() > 0, lambda x: x.cos(), lambda x: x * 3, (x @ w,))

    return torch.cond(x.sum() > 0, inner, lambda x, w: x.exp() @ w, (x, w))


def mapped(x: Tensor, w: Tensor) -> Tensor:
    return over_rows(lambda row, w: torch.tanh(row @ w), x, w)


def steps(x: Tensor, w: Tensor) -> Tensor:
    """A recurrence along dim 1."""

    def step(h, row):
        h = torch.sin(h @ w) + row
        return h * 1.0, h.cos() * row

    last, each = scan(step, torch.zeros_like(x[:, 0]), x, dim=1)
    return last.sum(-1) + each.sum((0, 2))


def repeated(x: Tensor, w: Tensor) -> Tensor:
    count = torch.zeros((), dtype=torch.int64)
    return while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(x @ w) + x), (count, x)
    )[1]


def until_small(x: Tensor, w: Tensor) -> Tensor:
    """How often it is repeated depends on the sum over what ranks may have parts of."""
    return while_loop(
        lambda x, w: x.abs().sum() > 1, lambda x, w: ((x @ w) * 0.1, w * 1.0), (x, w)
    )[0]


def summed_up(x: Tensor, w: Tensor) -> Tensor:
    """A loop that carries a sum over the batch."""

    def step(total, row):
        return total + row.mT @ row, row @ w

    total, each = scan(step, torch.ones_like(w), x, dim=1)
    return each.sum(1) + total.sum()


# Programs that draw random numbers inside, each x times factors that do not depend on
# x: so the gradient of its sum for x is what it gives over x, if the backward has the
# numbers of the forward.


def noisy_branches(x: Tensor, w: Tensor) -> Tensor:
    def noise(x):
        return F.dropout(x, 0.5) * torch.rand_like(x)

    return torch.cond(x.sum() > 0, noise, lambda x: x * torch.randn_like(x), (x,))


def noisy_rows(x: Tensor, w: Tensor) -> Tensor:
    return over_rows(lambda row: F.dropout(row, 0.5) * torch.rand_like(row), x)


def noisy_scan(x: Tensor, w: Tensor) -> Tensor:
    def step(h, row):
        h = h * torch.rand_like(h)
        return h * 1.0, h * row

    # Steps are the first dim of what they give, in torch 2.11 whatever ``dim`` says.
    return scan(step, torch.ones_like(x[:, 0]), x.transpose(0, 1))[1].transpose(0, 1)


def noisy_loop(x: Tensor, w: Tensor) -> Tensor:
    return while_loop(
        lambda i, x: i < 3,
        lambda i, x: (i + 1, F.dropout(x, 0.25) * (torch.rand_like(x) + 0.5)),
        (torch.zeros((), dtype=torch.int64), x),
    )[1]


def noisy_test(x: Tensor, w: Tensor) -> Tensor:
    """A loop of a random number of steps."""
    return while_loop(
        lambda x: torch.rand((), dtype=x.dtype) < 0.7,
        lambda x: (x * (torch.rand_like(x) + 0.5),),
        (x,),
    )[0]


def noisy_nest(x: Tensor, w: Tensor) -> Tensor:
    """A branch of each row in each step of a loop; what is around them draws too."""

    def some(row):
        return torch.cond(
            row.mean() > 9, lambda r: r * 2.0, lambda r: F.dropout(r, 0.5), (row,)
        )

    def body(i, x):
        rows = over_rows(lambda row: some(row) * torch.rand_like(row), x)
        return i + 1, rows * (torch.rand_like(x) + 0.5)

    start = torch.zeros((), dtype=torch.int64), x * torch.rand_like(x)
    return while_loop(lambda i, x: i < 2, body, start)[1] * torch.rand_like(x)


def attention(x: Tensor, w: Tensor) -> Tensor:
    """Four heads over two of keys; scores by batch and head, a mask by batch."""
    q = (x @ w).view(4, 4, 4, 2).transpose(1, 2)
    k = x[..., :4].reshape(4, 4, 2, 2).transpose(1, 2)
    tilt, starts = w[0, :4], torch.arange(4) % 2

    def score(s, b, h, i, j):
        return s + tilt[h] * (i - j) + w[b, h].sin()

    def visible(b, h, i, j):
        return (i >= j) & (j >= starts[b])

    blocks = create_block_mask(visible, 4, None, 4, 4, device="cpu", BLOCK_SIZE=4)
    out, lse = flex_attention(
        q, k, k, score_mod=score, block_mask=blocks, enable_gqa=True, return_lse=True
    )
    return (
        out.transpose(1, 2).reshape(4, 4, 8) + lse.exp().nan_to_num().mean(1)[..., None]
    )


CONTROL: dict[str, Program] = {
    fn.__name__: fn
    for fn in (
        branches,
        other_branch,
        nested_branches,
        mapped,
        steps,
        summed_up,
        repeated,
        until_small,
    )
}
NOISY: dict[str, Program] = {
    fn.__name__: fn
    for fn in (
        noisy_branches,
        noisy_rows,
        noisy_scan,
        noisy_loop,
        noisy_test,
        noisy_nest,
    )
}
# Loops of a length that depends on data run whole where they have a backward.
UNKNOWN_LENGTH = {"repeated", "until_small"}
