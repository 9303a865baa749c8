"""Small blocks as experts split them, for ``every``: each rank's part of a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.helpers.every_schedule import Block
from tests.helpers.toys import all_gather, all_reduce, reduce_scatter


def mlp(x: Any, up: Any, down: Any) -> Any:
    """Megatron's: columns, then rows; what is reduced is added to the input."""
    return (x + all_reduce(F.gelu(x @ up) @ down),)


def normed(x: Any, w: Any, r: Any, after: Any) -> Any:
    """The end of one block and the begin of the next."""
    y = all_reduce(x @ w) + r
    z = F.layer_norm(y, [y.shape[-1]])
    return y, z @ after


def attention(q: Any, k: Any, v: Any, out: Any, r: Any) -> Any:
    """Heads are split over ranks."""
    p = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
    y = torch.bmm(p, v)
    heads, rows, width = y.shape
    y = y.permute(1, 0, 2).reshape(rows, heads * width)
    return (r + all_reduce(y @ out),)


def gathered(x: Any, up: Any, down: Any, after: Any) -> Any:
    """Rows of the sequence are split between products, as sequence parallelism has
    it: two gathers and a reduce-scatter."""
    y = F.gelu(all_gather(x, 8) @ up) @ down
    z = x + reduce_scatter(y, 8)
    return z, all_gather(z, 8) @ after


def gradients(x: Any, dy: Any, w: Any, v: Any) -> Any:
    """Two weights' gradients and that of what they read."""
    dw = all_reduce(x.t() @ dy, "dp")
    dx = all_reduce(dy @ w.t(), "tp")
    dv = all_reduce(dx.t() @ x, "dp")
    return dw, dv, dx


def twice(x: Any, w: Any) -> Any:
    """Summands of ranks along two axes."""
    return (torch.tanh(all_reduce(x @ w, "dp+tp")) * 2,)


TP8, BOTH = "tp=8", "dp=2,tp=4"

BLOCKS = {
    block.name: block
    for block in (
        Block(
            "mlp",
            mlp,
            TP8,
            ("[_, _]", "[_, tp]", "[tp, _]"),
            lambda n: ((n, n), (n, 4 * n), (4 * n, n)),
            4096,
            192,
        ),
        Block(
            "normed",
            normed,
            TP8,
            ("[_, tp]", "[tp, _]", "[_, _]", "[_, tp]"),
            lambda n: ((n, n), (n, n), (n, n), (n, n)),
            4096,
            192,
        ),
        Block(
            "attention",
            attention,
            TP8,
            ("[tp, _, _]", "[tp, _, _]", "[tp, _, _]", "[tp, _]", "[_, _]"),
            lambda n: (
                (16, n, n // 16),
                (16, n, n // 16),
                (16, n, n // 16),
                (n, n),
                (n, n),
            ),
            2048,
            192,
        ),
        Block(
            "gathered",
            gathered,
            TP8,
            ("[tp, _]", "[_, tp]", "[tp, _]", "[_, tp]"),
            lambda n: ((n, n), (n, 4 * n), (4 * n, n), (n, 3 * n)),
            4096,
            192,
        ),
        Block(
            "gradients",
            gradients,
            BOTH,
            ("[dp, _]", "[dp, tp]", "[_, tp]", "[_, tp]"),
            lambda n: ((2 * n, n), (2 * n, n), (n, n), (n, n)),
            4096,
            192,
        ),
        Block(
            "twice",
            twice,
            BOTH,
            ("[_, dp+tp]", "[dp+tp, _]"),
            lambda n: ((n, n), (n, n)),
            4096,
            192,
        ),
    )
}
