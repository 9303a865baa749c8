"""Calls of flex_attention on CPU, and what kernels of it look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.passes.decompose import op_by_op
from fxpar.planning import TracedPlan


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch (2.13) refuses gradients of flex_attention on CPU, where Inductor has no
    kernel for them; run op by op they are right."""
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._validate_device", lambda *_: None
    )


def calls(plan: TracedPlan) -> list[Any]:
    """Plan's entries of attention."""
    return [node for node in plan.nodes if node.name.startswith("flex_attention")]


def _named(number: Tensor | None, index: Tensor, like: Tensor) -> Tensor:
    """Which blocks lists name: [batch, heads, blocks, blocks]."""
    named = torch.zeros_like(like, dtype=torch.bool)
    if number is None:
        return named
    listed = torch.arange(index.shape[-1]) < number.unsqueeze(-1)
    for at in listed.nonzero().tolist():
        named[(*at[:3], int(index[tuple(at)]))] = True
    return named


def _seen(mask: tuple[Any, ...], first: int) -> Callable[..., Tensor]:
    """A mask function that is asked of blocks in such lists, and not of full ones."""
    turned = first == 6
    number, index, full_number, full_index = mask[first : first + 4]
    sizes = [-(-n // size) for n, size in zip(mask[:2], mask[-3:-1], strict=True)]
    like = torch.zeros(*index.shape[:2], *(sizes[::-1] if turned else sizes))
    some, full = _named(number, index, like), _named(full_number, full_index, like)
    if turned:
        some, full = some.mT, full.mT

    def visible(b, h, i, j, *captured):
        at = b % some.shape[0], h % some.shape[1], i // mask[-3], j // mask[-2]
        return full[at] | (some[at] & mask[-1](b, h, i, j, *captured))

    return visible


def by_lists(target: Any, *dtype: Any) -> Any:
    """Attention as kernels do it: of queries by lists of keys, of keys by lists of
    queries."""
    if "flex_attention" not in str(target):
        return target
    backward = "backward" in str(target)
    place = 9 if backward else 4

    def run(*args: Any) -> Any:
        op = op_by_op(target)
        mask = args[place]
        results = []
        for first in (2, 6) if backward else (2,):
            own = (*mask[:-1], _seen(mask, first))
            results.append(op(*args[:place], own, *args[place + 1 :]))
        if not backward:
            return results[0]
        by_queries, by_keys = results
        return by_queries[0], *by_keys[1:3], by_queries[3]

    return run


def check_by_lists(
    plan: TracedPlan, args: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan gives the numbers of one device where kernels look at lists alone."""
    want = plan.reference(*args)
    monkeypatch.setattr("fxpar.passes.simulate.lockstep.op_by_op", by_lists)
    torch.testing.assert_close(plan.simulate(*args), want)


def give_largest_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch (2.13) has them on no CPU but op by op."""
    name = "torch.nn.attention.flex_attention._apply_kernel_options"
    apply = torch.nn.attention.flex_attention._apply_kernel_options
    monkeypatch.setattr(name, lambda *args: apply(*args[:5]))
