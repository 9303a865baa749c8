"""Buckets of values in memory: one copy of torch's, and no loop for each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.graph.builder import Builder
from fxpar.passes.order.copy_buckets import LEAST, copy_into_buckets, copy_together

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


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
    for computed, given in ((24, LEAST), (0, LEAST - 1)):
        module, _ = graph_of(computed, given)
        text = str(module.graph)
        copy_into_buckets(module.graph)
        assert str(module.graph) == text


def products(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """A bucket of products, with a row for each of two ranks."""
    parts = (x.t() @ y, z, z.t() @ x)
    return torch.cat([part.reshape(2, -1) for part in parts], 1)


@pytest.mark.parametrize("is_sent", [True, False])
def test_products_that_are_sent_are_copied_by_one_call(is_sent: bool) -> None:
    """Else Inductor may fuse them with what reads them."""
    xs = [torch.randn(6, 16), torch.randn(6, 8), torch.randn(6, 4)]
    module = make_fx(products, tracing_mode="fake")(*xs)
    graph, want = module.graph, module(*xs)
    (bucket,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    with graph.inserting_after(bucket):
        sent = graph.call_function(c10d.all_reduce.default, (bucket, "sum", "0"))
    if not is_sent:
        graph.erase_node(sent)
    copy_together(graph)
    assert (bucket.target is torch.ops.fxpar.join.default) == is_sent
    if not is_sent:
        return
    graph.erase_node(sent)
    module.recompile()
    value, (code,) = run_and_get_code(torch.compile(module), *xs)
    torch.testing.assert_close(value, want)
    assert "aten.cat.default(" in code and "for(int64_t" not in code


def gathered(
    places: Sequence[tuple[int, int]], ranks: int, *, is_reduced: bool = False
) -> fx.GraphModule:
    """Read parameters at these places of a bucket of 68 elements of each rank, which
    was gathered or, as an activation may be, reduced."""
    with FakeTensorMode() as mode:
        graph, value = fx.Graph(), torch.empty(ranks if is_reduced else 1, 68)
    build, x = Builder(graph, mode), graph.placeholder("x")
    x.meta["val"] = value
    if is_reduced:
        start = build.call(c10d.all_reduce.default, x, "sum", "0")
    else:
        start = build.call(c10d.all_gather_into_tensor.default, x, ranks, "0")
    wait = build.call(c10d.wait_tensor.default, start)
    parts = []
    for begin, end in places:
        piece = build.call(aten.slice.Tensor, wait, 1, begin, end)
        parts.append(build.call(aten.reshape.default, piece, [4, -1]))
    graph.output(tuple(build.call(aten.sin.default, part) for part in parts))
    return fx.GraphModule({}, graph)


SPLIT = torch.ops.fxpar.split_copied.default


@pytest.mark.parametrize(
    ("places", "ranks", "is_split"),
    [
        (((0, 16), (16, 48), (48, 52), (52, 68)), 2, True),
        (((48, 68), (0, 48)), 2, True),  # read in another order
        (((0, 48), (48, 68)), 1, False),  # parts of one row need no copy
        (((0, 48), (44, 68)), 2, False),  # the parts overlap
        (((0, 48), (48, 64)), 2, False),  # nothing reads the rest
        (((0, 68),), 2, False),
    ],
)
def test_a_gathered_bucket_is_split_at_once(
    places: tuple[tuple[int, int], ...], ranks: int, is_split: bool
) -> None:
    module = gathered(places, ranks)
    x = torch.randn(ranks, 68)
    wants = [x[:, a:b].reshape(4, -1).sin() for a, b in places]
    copy_together(module.graph)
    module.graph.lint()
    assert len(module.graph.find_nodes(op="call_function", target=SPLIT)) == is_split
    (wait,) = module.graph.find_nodes(
        op="call_function", target=c10d.wait_tensor.default
    )
    (given,) = module.graph.find_nodes(op="placeholder")
    wait.replace_all_uses_with(given)
    for node in (wait, wait.args[0]):
        module.graph.erase_node(node)
    module.recompile()
    for value, want in zip(module(x), wants, strict=True):
        assert torch.equal(value, want)
    values, (code,) = run_and_get_code(torch.compile(module), x)
    torch.testing.assert_close(values, tuple(wants))
    assert ("split_copied" in code) == is_split


def test_other_values_that_ranks_sent_are_read_where_they_are() -> None:
    """A kernel that reads a part of an activation needs no copy."""
    module = gathered(((0, 48), (48, 68)), 2, is_reduced=True)
    text = str(module.graph)
    copy_together(module.graph)
    assert str(module.graph) == text


@pytest.mark.parametrize("begin", [None, "a size"])
def test_parts_at_places_that_are_not_known_stay_slices(begin: str | None) -> None:
    module = gathered(((0, 48), (48, 68)), 2)
    graph = module.graph
    piece, _ = graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    (given,) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(given):
        size = graph.call_function(aten.sym_size.int, (given, 0))
    piece.args = (piece.args[0], 1, size if begin else None, 48)
    copy_together(graph)
    assert not graph.find_nodes(op="call_function", target=SPLIT)


def test_a_part_that_is_a_result_stays_a_view() -> None:
    """The backward, which is compiled by itself, expects its strides."""
    module = gathered(((0, 48), (48, 68)), 2)
    output, (piece, _) = (
        module.graph.output_node(),
        module.graph.find_nodes(op="call_function", target=aten.slice.Tensor),
    )
    output.args = ((*output.args[0], piece),)
    text = str(module.graph)
    copy_together(module.graph)
    assert str(module.graph) == text
