"""Adds up values of microbatches: its ops are written over the sum so far in compiled
code.

In: a local graph whose batch is in parts (``microbatches``). Out: the same graph,
changed in place: where a summand is a product of matrices that nothing else reads, the
product adds to the sum, and is never in memory by itself. Numbers are those of a
product and a sum. Inductor runs both ops in the memory of the sum so far, unless
something reads that later. Never: changes the order of a sum.
"""

from __future__ import annotations

import functools

import torch
from torch import fx
from torch.utils.flop_counter import register_flop_formula

from fxpar import _torch

aten = torch.ops.aten
ours = torch.ops.fxpar


@torch.library.custom_op("fxpar::accumulate", mutates_args=())
def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``total + x``, in the dtype of the total. It stays an op of its own in
    compiled code: fused into what reads the last total, sums would keep every summand
    until then."""
    return total + x


@torch.library.custom_op("fxpar::accumulate_product", mutates_args=())
def accumulate_product(
    total: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return ``total + x @ y`` of matrices of one dtype."""
    return torch.addmm(total, x, y)


def _like_total(total: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(total)


accumulate.register_fake(_like_total)
accumulate_product.register_fake(_like_total)


@register_flop_formula(ours.accumulate_product)
def _(total, x, y, **_) -> float:
    return 2.0 * x[0] * x[1] * y[1]


# The same ops, written over the total.
torch.library.define("fxpar::accumulate_", "(Tensor(a!) total, Tensor x) -> Tensor(a!)")
torch.library.define(
    "fxpar::accumulate_product_",
    "(Tensor(a!) total, Tensor x, Tensor y) -> Tensor(a!)",
)


@torch.library.impl("fxpar::accumulate_", "CompositeExplicitAutograd")
def _(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return total.add_(x)


@torch.library.impl("fxpar::accumulate_product_", "CompositeExplicitAutograd")
def _(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return total.addmm_(x, y)


@functools.cache
def register_lowering() -> None:
    """Let Inductor write sums over their totals."""
    lower = _torch.inductor_lowerings.lower_over_first
    lower(ours.accumulate.default, ours.accumulate_.default, aten.add_.Tensor)
    product, over = ours.accumulate_product.default, ours.accumulate_product_.default
    lower(product, over, aten.addmm_.default)


def accumulate_products(graph: fx.Graph) -> None:
    """Let products that are added to a sum, and read nowhere else, add to it."""
    for node in graph.find_nodes(op="call_function", target=ours.accumulate.default):
        total, product = node.args
        if product.target is not aten.mm.default or len(product.users) > 1:
            continue
        if total.meta["val"].dtype != product.meta["val"].dtype:
            continue
        node.target = ours.accumulate_product.default
        node.args = (total, *product.args)
        graph.erase_node(product)
