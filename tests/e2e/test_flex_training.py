"""Models with flex_attention trained on ranks: packed documents, a captured bias."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)

import fxpar
from tests.helpers import device
from tests.helpers.spawn import ranks_of
from tests.helpers.training import loop

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.usefixtures("propagated"),
]

# Kernels of a GPU take blocks of 128 rows; a CPU has no kernel for gradients.
GPU = device.NAME == "cuda"
ROWS, BLOCK = (512, 128) if GPU else (32, 4)
DTYPE = torch.float32 if GPU else torch.float64
HEADS, WIDTH, STEPS = 4, 16, 3

BATCH, HEAD, SEQUENCE = (0, "dp"), (1, "tp"), (2, "cp")

# Of one direction, in the names of the gathers of keys and values.
RING = """
overlap([all_gather, all_gather_1], flex_attention, ring=1)
overlap([all_gather, all_gather_1], flex_attention_backward, ring=1)
"""


class Attends(nn.Module):
    """One layer; of ``split`` a dim of queries, keys and values goes over an axis."""

    def __init__(self, split: tuple[int, str] | None) -> None:
        super().__init__()
        self.inner, self.outer = (
            nn.Linear(HEADS * WIDTH, n * HEADS * WIDTH) for n in (3, 1)
        )
        self.bias = nn.Parameter(torch.randn(HEADS, ROWS) / 4)
        self.split = split

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        heads = self.inner(x).unflatten(-1, (3 * HEADS, WIDTH)).transpose(1, 2)
        qkv = heads.chunk(3, 1)
        if self.split is not None:
            spec: list[Any] = [None] * 4
            spec[self.split[0]] = self.split[1]
            qkv = [fxpar.constrain(x, *spec) for x in qkv]

        def score(s, b, h, i, j):
            return s * (1 + h) - 0.01 * (i - j).abs() + self.bias[h, j]

        out = flex_attention(*qkv, score_mod=score, block_mask=mask)
        return self.outer(out.transpose(1, 2).flatten(2)).square().mean()


def masked() -> BlockMask:
    """Of packed documents that end within blocks, causal."""
    documents = device.put(torch.arange(ROWS) // (ROWS // 3))

    def visible(b, h, i, j):
        return (i >= j) & (documents[i] == documents[j])

    return create_block_mask(visible, None, None, ROWS, ROWS, device.NAME, BLOCK)


def trained(
    split: tuple[int, str] | None, options: dict[str, Any] | None
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses, gradients of the first step, and how queries are split."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = device.put(Attends(split).to(DTYPE))
    x = device.put(torch.randn(4, ROWS, HEADS * WIDTH, dtype=DTYPE))
    compiled: Any = model
    if options is not None:
        compiled = torch.compile(
            model, backend="fxpar", options=options, fullgraph=True
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    name = "torch.nn.attention.flex_attention._validate_device"
    with mock.patch(name, lambda *_: None):
        losses, grads = loop(compiled, optimizer, [(x, masked())] * STEPS, model=model)
    if options is None:
        return losses, grads, []
    nodes = fxpar.plans()[-1].nodes
    queries = [str(n.operands[0]) for n in nodes if n.name.startswith("flex_attention")]
    return losses, grads, queries


@pytest.mark.parametrize(
    "split, schedule",
    [(BATCH, "none"), (HEAD, "none"), (SEQUENCE, "none"), (SEQUENCE, RING)],
    ids=["dp", "tp", "cp", "ring"],
)
def test_steps_are_those_of_one_device(split: tuple[int, str], schedule: str) -> None:
    mesh = f"{split[1]}=2"
    codegen = "inductor" if GPU else "eager"
    options = {"mesh": mesh, "plan": "propagate", "codegen": codegen}
    options["schedule"] = schedule
    want = trained(None, None)
    lies = ["_"] * 4
    lies[split[0]] = split[1]
    for losses, grads, queries in ranks_of(mesh).run(
        trained, split, options, timeout=300.0
    ):
        assert queries and set(queries) == {f"[{', '.join(lies)}]"}
        torch.testing.assert_close(losses, want[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(grads, want[1], rtol=1e-4, atol=1e-6)
