"""Buckets of values that lie in memory: one copy of torch's, and no loop for each."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.passes.order.bucket_collectives import LEAST, copy_into_buckets

aten = torch.ops.aten


def graph_of(computed: int, given: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A bucket of values that are computed, and of others that are given."""
    xs = [torch.randn(n + 2, 3) for n in range(computed + given)]

    def bucket(*xs: torch.Tensor) -> torch.Tensor:
        parts = [x * 2 for x in xs[:computed]] + list(xs[computed:])
        return torch.cat([x.reshape(1, -1) for x in parts], 1)

    return make_fx(bucket, tracing_mode="fake")(*xs), xs


def test_what_lies_in_memory_is_copied_by_one_call() -> None:
    module, xs = graph_of(2, 12)
    want = module(*xs)
    before = run_and_get_code(torch.compile(module), *xs)[1][0]
    copy_into_buckets(module.graph)
    module.recompile()
    assert torch.equal(module(*xs), want)
    torch._dynamo.reset()
    value, (code,) = run_and_get_code(torch.compile(module), *xs)
    assert torch.equal(value, want)
    assert "aten.cat" in code and "aten.cat" not in before
    assert code.count("for(int64_t") < before.count("for(int64_t") / 3


def test_a_dim_that_is_named_is_kept() -> None:
    module, xs = graph_of(0, 9)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    node.args, node.kwargs = node.args[:1], {"dim": node.args[1]}
    want = module(*xs)
    copy_into_buckets(module.graph)
    module.recompile()
    assert node.target is torch.ops.fxpar.join.default
    assert torch.equal(module(*xs), want)


def test_what_is_computed_goes_where_it_belongs() -> None:
    for computed, given in ((8, LEAST), (0, LEAST - 1)):
        module, _ = graph_of(computed, given)
        text = str(module.graph)
        copy_into_buckets(module.graph)
        assert str(module.graph) == text
