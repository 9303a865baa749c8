"""What is done to a forward or backward by itself changes its order, never its numbers.

Small graphs by hand: their collectives before and after, equal results on every rank of
a mesh of four, run in one process; and beside each graph that changes one that must
not. Then every graph that a sharded model really compiles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import fx, nn

import fxpar
from fxpar.passes.order.forward_backward import (
    Orders,
    PhasedGraph,
    as_run,
    split_phases,
)
from fxpar.passes.order.order_collectives import (
    Settings,
    drop_unread,
    give_outputs,
    prefetch,
    schedule,
)
from fxpar.passes.simulate.launches import WAIT
from tests.helpers.sketch import (
    COUNT,
    DP,
    FLOATS,
    GATHER,
    INTO,
    REDUCE,
    TP,
    Sketch,
    aten,
    c10d,
    check_equal,
    is_collective,
    shape,
)
from tests.helpers.spawn import shared_pool


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


def check_values(graph: fx.Graph) -> None:
    """Nodes know their values: each op gives the shape written beside it."""
    graph.lint()
    for node in graph.find_nodes(op="output"):
        for read in node.all_input_nodes:
            assert isinstance(read.meta["val"], torch.Tensor)


# What nobody reads


def test_a_dead_wait_goes_with_its_chain(sketch: Sketch) -> None:
    x = sketch.input(4, 4)
    dead = sketch.reduce(sketch.call(aten.sin, x))
    dead = sketch.gather(sketch.call(aten.cos, dead))
    kept = sketch.reduce(sketch.call(aten.exp, x))
    sketch.reduce(dead)
    sketch.output(kept, x)
    want = sketch.run()
    drop_unread(sketch.graph)
    assert sketch.order() == ["exp", "reduce_1", "wait_2"]
    check_equal(sketch.run(), want)


def test_a_dead_draw_of_several_values_goes(sketch: Sketch) -> None:
    """A partitioner repeats it in a backward, as attention with dropout, and the next
    step would draw others than one device does."""
    x = sketch.input(4, 4)
    dead = sketch.call(aten.sin, x)
    sketch.call(aten.native_dropout, dead, 0.5, True)
    read = sketch.call(aten.native_dropout, x, 0.5, True)
    sketch.output(sketch.graph.call_function(operator.getitem, (read, 0)))
    drop_unread(sketch.graph)
    assert sketch.order() == ["native_dropout_1", "getitem"]


def test_a_wait_that_is_read_stays(sketch: Sketch) -> None:
    x = sketch.input(4, 4)
    sketch.output(sketch.gather(sketch.reduce(x)))
    before = sketch.order()
    drop_unread(sketch.graph)
    assert sketch.order() == before


# Buckets


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
def test_gathers_of_parameters_become_one(sketch: Sketch, dtype: torch.dtype) -> None:
    a, b, c = (sketch.input(*s, dtype=dtype) for s in [(2, 3), (4,), (1, 5, 2)])
    first = sketch.call(aten.clone, sketch.gather(a))
    second = sketch.gather(b)
    turned = sketch.call(aten.permute, c, [2, 0, 1])
    third = sketch.gather(turned)
    sketch.output(first, second, sketch.call(aten.clone, third))
    want = sketch.run()
    sketch.bucket()
    assert sketch.moved() == [("all_gather_into_tensor", (1, 20), (2, 20))]
    assert shape(sketch.graph.output_node().args[0][2]) == (4, 1, 5)
    check_values(sketch.graph)
    check_equal(sketch.run(), want)


def test_a_gather_of_what_the_graph_casts_is_of_a_parameter(sketch: Sketch) -> None:
    waits = []
    for n in (3, 5):
        cast = torch.ops.prims.convert_element_type
        x = sketch.call(cast, sketch.input(2, n), torch.float32)
        waits.append(sketch.gather(x))
    sketch.output(*waits)
    want = sketch.run()
    sketch.bucket()
    assert sketch.moved() == [("all_gather_into_tensor", (1, 16), (2, 16))]
    check_equal(sketch.run(), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_scatters_of_gradients_become_one(
    sketch: Sketch, op: str, dtype: torch.dtype
) -> None:
    x = sketch.input(4, 6, dtype=dtype)
    a = sketch.scatter(sketch.call(aten.sin, x), op)
    turned = sketch.call(aten.permute, sketch.call(aten.cos, x), [1, 0])
    b = sketch.call(aten.permute, sketch.scatter(turned, op), [1, 0])
    c = sketch.call(aten.view, sketch.scatter(sketch.input(8, dtype=dtype), op), [2, 2])
    sketch.output(a, sketch.call(aten.exp, x), b, c)
    want = sketch.run()
    sketch.bucket()
    assert sketch.moved() == [("reduce_scatter_tensor", (2, 28), (1, 28))]
    check_values(sketch.graph)
    check_equal(sketch.run(), want)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reductions_of_gradients_become_one(
    sketch: Sketch, op: str, dtype: torch.dtype
) -> None:
    x, scalar = sketch.input(4, 6, dtype=dtype), sketch.input(dtype=dtype)
    turned = sketch.call(aten.permute, x, [1, 0])
    a = sketch.reduce(turned, op)
    b = sketch.reduce(scalar, op)
    c = sketch.reduce(sketch.call(aten.neg, sketch.input(0, 3, dtype=dtype)), op)
    scaled = sketch.rewriter.call(aten.mul.Tensor, b, scalar)
    sketch.output(a, scaled, c)
    want = sketch.run()
    sketch.bucket()
    assert sketch.moved() == [("all_reduce", (1, 25), (1, 25))]
    check_values(sketch.graph)
    check_equal(sketch.run(), want)


def test_both_halves_of_a_reduction_over_two_axes_become_one_each(
    sketch: Sketch,
) -> None:
    """Scattered over one axis and then reduced over the other."""
    outs = []
    for n in (4, 6):
        part = sketch.scatter(sketch.call(aten.sin, sketch.input(n, 2)))
        outs.append(sketch.reduce(part, group=TP))
    sketch.output(*outs)
    want = sketch.run()
    sketch.bucket()
    assert sketch.moved() == [
        ("reduce_scatter_tensor", (2, 10), (1, 10)),
        ("all_reduce", (1, 10), (1, 10)),
    ]
    check_equal(sketch.run(), want)


def _copied(sketch: Sketch) -> int:
    """How many tensors are copied into buckets."""
    cats = sketch.graph.find_nodes(op="call_function", target=aten.cat.default)
    return sum(len(cat.args[0]) for cat in cats)


@pytest.mark.parametrize("reduced", [(0, 1, 2), (0, 1), (1, 2)])
@pytest.mark.parametrize("first", [Sketch.scatter, Sketch.reduce])
def test_a_bucket_of_neighbours_in_another_is_no_copy(
    sketch: Sketch, first: Any, reduced: tuple[int, ...]
) -> None:
    waits = [first(sketch, sketch.input(*s)) for s in [(4, 2), (2, 3), (8,)]]
    for i in reduced:
        waits[i] = sketch.reduce(waits[i], group=TP)
    sketch.output(*waits)
    want = sketch.run()
    sketch.bucket()
    assert len(sketch.moved()) == 2
    assert _copied(sketch) == 3
    check_values(sketch.graph)
    check_equal(sketch.run(), want)


@pytest.mark.parametrize(
    ("divisors", "is_read", "count"),
    [((2, 2, 2), False, 1), ((2, 2, 3), False, 3), ((2, 2, 2), True, 3)],
)
def test_a_reduced_bucket_is_divided_at_once(
    sketch: Sketch, divisors: tuple[int, ...], is_read: bool, count: int
) -> None:
    """Unless what reads the parts could be fused with the divisions."""
    waits = [sketch.reduce(sketch.input(2, 2)) for _ in divisors]
    parts = [
        sketch.rewriter.call(aten.div.Scalar, wait, divisor)
        for wait, divisor in zip(waits, divisors, strict=True)
    ]
    if is_read:
        parts = [sketch.call(aten.permute, part, [1, 0]) for part in parts]
    sketch.output(*parts)
    want = sketch.run()
    sketch.bucket()
    divisions = sketch.graph.find_nodes(op="call_function", target=aten.div.Scalar)
    assert len(divisions) == count
    check_values(sketch.graph)
    check_equal(sketch.run(), want)


def test_a_part_that_is_divided_twice_is_no_other_part(sketch: Sketch) -> None:
    """One is divided twice, the other is not read: as many divisions as parts."""
    waits = [sketch.reduce(sketch.input(2, 2)) for _ in range(2)]
    sketch.output(
        *(sketch.rewriter.call(aten.div.Scalar, waits[0], 2) for _ in range(2))
    )
    want = sketch.run()
    sketch.bucket()
    check_equal(sketch.run(), want)


@pytest.mark.parametrize("reduced", [(1, 0), (0, 2), (0, 0)])
def test_a_bucket_of_what_is_no_neighbour_is_a_copy(
    sketch: Sketch, reduced: tuple[int, ...]
) -> None:
    waits = [sketch.reduce(sketch.input(*s)) for s in [(4, 2), (2, 3), (8,)]]
    again = [sketch.reduce(waits[i], group=TP) for i in reduced]
    sketch.output(*waits, *again)
    want = sketch.run()
    sketch.bucket()
    assert len(sketch.moved()) == 2
    assert _copied(sketch) == 5
    check_equal(sketch.run(), want)


def test_a_bucket_of_columns_of_more_rows_is_a_copy(sketch: Sketch) -> None:
    x = sketch.input(2, 8)
    ends = (0, 4), (4, 8)
    halves = [sketch.rewriter.call(aten.slice.Tensor, x, 1, *end) for end in ends]
    rows = [sketch.call(aten.reshape, half, [8]) for half in halves]
    sketch.output(*(sketch.reduce(row) for row in rows))
    want = sketch.run()
    sketch.bucket()
    assert len(sketch.moved()) == 1
    assert _copied(sketch) == 2
    check_equal(sketch.run(), want)


def test_cut_results_are_contiguous(sketch: Sketch) -> None:
    """Also one that is its bucket's columns as they stand, of a row a rank."""
    a, b = sketch.gather(sketch.input(1, 6)), sketch.gather(sketch.input(4))
    sketch.output(sketch.call(aten.view, a, [3, 4]), b)
    want = sketch.run()
    sketch.bucket()
    assert len(sketch.moved()) == 1
    check_equal(sketch.run(), want)


def test_results_read_in_another_shape_are_cut_in_it(sketch: Sketch) -> None:
    """Of gathers, whose columns are copied, each is copied once."""
    reduced = [sketch.reduce(sketch.input(1, 6)) for _ in range(2)]
    gathered = [sketch.gather(sketch.input(2, 3)) for _ in range(2)]
    results = [sketch.call(aten.view, x, [6]) for x in reduced]
    sketch.output(*results, *(sketch.call(aten.view, x, [12]) for x in gathered))
    want = sketch.run()
    sketch.bucket()
    views = (aten.view.default, aten.reshape.default)
    shown = [x for x in sketch.graph.nodes if x.target in views and len(shape(x)) == 1]
    cut = [x.args[0].target is aten.slice.Tensor for x in shown]
    assert cut == [True, True, False, False]
    check_values(sketch.graph)
    check_equal(sketch.run(), want)


# As the twin beside it, but for one thing


def _groups(sketch: Sketch, wrong: bool) -> None:
    a = sketch.reduce(sketch.input(4))
    b = sketch.reduce(sketch.input(4), group=TP if wrong else DP)
    sketch.output(a, b)


def _groups_of_gathers(sketch: Sketch, wrong: bool) -> None:
    a = sketch.gather(sketch.input(4))
    b = sketch.gather(sketch.input(4), TP if wrong else DP)
    sketch.output(a, b)


def _dtypes(sketch: Sketch, wrong: bool) -> None:
    a = sketch.scatter(sketch.input(4))
    dtype = torch.float32 if wrong else torch.float64
    sketch.output(a, sketch.scatter(sketch.input(4, dtype=dtype)))


def _dtypes_of_gathers(sketch: Sketch, wrong: bool) -> None:
    a = sketch.gather(sketch.input(4))
    dtype = torch.int64 if wrong else torch.float64
    sketch.output(a, sketch.gather(sketch.input(4, dtype=dtype)))


def _complex(sketch: Sketch, wrong: bool) -> None:
    dtype = torch.complex128 if wrong else torch.float64
    x, y = sketch.input(4, dtype=dtype), sketch.input(4, dtype=dtype)
    sketch.output(sketch.gather(x), sketch.gather(y))


def _reductions(sketch: Sketch, wrong: bool) -> None:
    a = sketch.reduce(sketch.input(4))
    b = sketch.reduce(sketch.input(4), "max" if wrong else "sum")
    sketch.output(a, b)


def _kinds(sketch: Sketch, wrong: bool) -> None:
    a, x = sketch.reduce(sketch.input(4)), sketch.input(4)
    sketch.output(a, sketch.scatter(x) if wrong else sketch.reduce(x))


def _operand_needs_result(sketch: Sketch, wrong: bool) -> None:
    """A reduction of what an earlier one gave."""
    x, y = sketch.input(4), sketch.input(2, 2)
    a = sketch.reduce(x)
    sketch.output(a, sketch.reduce(sketch.call(aten.view, a, [2, 2]) if wrong else y))


def _computed(sketch: Sketch, wrong: bool) -> None:
    """A gather of an activation."""
    x, y = sketch.input(4), sketch.input(4)
    a = sketch.gather(x)
    op = aten.sin if wrong else aten.clone
    sketch.output(a, sketch.gather(sketch.call(op, y)))


def _gathered(sketch: Sketch, wrong: bool) -> None:
    """A gather of what another one gave."""
    x, y = sketch.input(2), sketch.input(4)
    a = sketch.gather(x)
    sketch.output(a, sketch.gather(a if wrong else y))


def _used(sketch: Sketch, wrong: bool) -> None:
    """A reduction whose result is computed with."""
    x, y = sketch.input(4, 4), sketch.input(4, 4)
    a, b = sketch.reduce(x), sketch.reduce(y)
    used = sketch.call(aten.mm, b, y) if wrong else sketch.call(aten.clone, b)
    sketch.output(a, b, used)


def _used_behind_a_view(sketch: Sketch, wrong: bool) -> None:
    x, y = sketch.input(4, 4), sketch.input(4, 4)
    a = sketch.scatter(x)
    b = sketch.call(aten.view, sketch.scatter(y), [4, 2])
    sketch.output(a, b, sketch.call(aten.sum if wrong else aten.clone, b))


PAIRS: list[Callable[[Sketch, bool], None]] = [
    _groups,
    _groups_of_gathers,
    _dtypes,
    _dtypes_of_gathers,
    _complex,
    _reductions,
    _kinds,
    _operand_needs_result,
    _computed,
    _gathered,
    _used,
    _used_behind_a_view,
]


@pytest.mark.parametrize("wrong", [False, True], ids=["joined", "left"])
@pytest.mark.parametrize("draw", PAIRS, ids=lambda draw: draw.__name__[1:])
def test_joined_but_for_one_thing(
    sketch: Sketch, draw: Callable[[Sketch, bool], None], wrong: bool
) -> None:
    draw(sketch, wrong)
    want, before = sketch.run(), sketch.order()
    assert len(sketch.moved()) == 2
    sketch.bucket()
    assert len(sketch.moved()) == (2 if wrong else 1)
    if wrong:
        assert sketch.order() == before
    check_equal(sketch.run(), want)


@pytest.mark.parametrize("reductions", [False, True])
def test_a_forward_keeps_its_reductions(sketch: Sketch, reductions: bool) -> None:
    x = sketch.input(4, 4)
    a, b = sketch.reduce(x), sketch.reduce(sketch.call(aten.neg, x))
    c, d = sketch.scatter(x), sketch.scatter(sketch.call(aten.neg, x))
    sketch.output(a, b, c, d, sketch.gather(x), sketch.gather(sketch.input(2)))
    want = sketch.run()
    sketch.bucket(reductions=reductions)
    assert len(sketch.moved()) == (3 if reductions else 5)
    check_equal(sketch.run(), want)


def test_a_bucket_is_filled_and_what_is_larger_goes_alone(sketch: Sketch) -> None:
    """Whole, in float64: 64, 64, 256 (too large), 64, 64, 192 and 128 bytes."""
    inputs = [sketch.input(n) for n in (4, 4, 16, 4, 4, 12, 8)]
    sketch.output(*map(sketch.gather, inputs))
    want = sketch.run()
    sketch.bucket(most=1, gathers=256)
    operands = [operand for _, operand, _ in sketch.moved()]
    assert operands == [(1, 16), (16,), (12,), (8,)]
    check_equal(sketch.run(), want)


@pytest.mark.parametrize(
    ("room", "joined"),
    [
        (320, [(5,), *([(1, 16)] * 4), (3,)]),  # a layer is 256 bytes
        (192, [(5,), *([(1, 16)] * 4), (3,)]),
        (512, [(5,), (1, 32), (1, 32), (3,)]),
        (136, [(5,), *([(8,), (1, 8)] * 4), (3,)]),
        (4096, [(1, 72)]),
    ],
)
def test_layers_are_cut_at_the_same_places(
    sketch: Sketch, room: int, joined: list[tuple[int, ...]]
) -> None:
    inputs = [sketch.input(n) for n in (5, *([8, 4, 4] * 4), 3)]
    sketch.output(*map(sketch.gather, inputs))
    want = sketch.run()
    sketch.bucket(most=1, gathers=room)
    assert [operand for _, operand, _ in sketch.moved()] == joined
    check_equal(sketch.run(), want)


def test_gathers_have_a_size_of_their_own(sketch: Sketch) -> None:
    """32 bytes a gather whole, 16 a reduction."""
    sketch.output(
        *(sketch.gather(sketch.input(2)) for _ in range(4)),
        *(sketch.reduce(sketch.input(2)) for _ in range(4)),
    )
    want = sketch.run()
    sketch.bucket(most=64, gathers=64)
    assert [operand for _, operand, _ in sketch.moved()] == [(1, 4), (1, 4), (1, 8)]
    check_equal(sketch.run(), want)


def test_what_reads_a_result_moves_behind_the_bucket(sketch: Sketch) -> None:
    """Reductions are sent when the last is ready; work between them stays."""
    x = sketch.input(4, 4)
    a = sketch.reduce(x)
    a = sketch.call(aten.view, a, [16])
    work = sketch.call(aten.mm, x, x)
    b = sketch.reduce(sketch.call(aten.sin, work))
    sketch.output(a, b, work)
    want = sketch.run()
    sketch.bucket()
    assert sketch.order()[:2] == ["mm", "sin"]
    assert sketch.order().index("view") > sketch.order().index("wait_2")
    check_values(sketch.graph)
    check_equal(sketch.run(), want)


def test_buckets_do_not_wait_for_each_other(sketch: Sketch) -> None:
    """One gradient is scattered, then reduced, another reduced, then scattered."""
    x, y = sketch.input(8), sketch.input(8)
    a, b = sketch.scatter(x), sketch.reduce(y, group=TP)
    c = sketch.scatter(b)
    d = sketch.reduce(a, group=TP)
    sketch.output(c, d)
    want = sketch.run()
    sketch.bucket()
    check_values(sketch.graph)
    assert len(sketch.moved()) == 3
    check_equal(sketch.run(), want)


# One gather ahead


def layers(sketch: Sketch, count: int) -> None:
    """h = h @ gathered weight, with the gather right before its use."""
    h = sketch.input(4, 4)
    weights = [sketch.input(2, 4) for _ in range(count)]
    for w in weights:
        w = sketch.call(aten.alias, w)
        h = sketch.call(aten.mm, h, sketch.gather(w))
    sketch.output(h)


def test_a_gather_starts_where_the_one_before_is_read(sketch: Sketch) -> None:
    layers(sketch, 3)
    want = sketch.run()
    prefetch(sketch.graph)
    sketch.graph.lint()
    assert sketch.order() == [
        *("alias", "gather", "alias_1", "gather_1", "wait", "mm"),
        *("alias_2", "gather_2", "wait_1", "mm_1"),
        *("wait_2", "mm_2"),
    ]
    check_equal(sketch.run(), want)


def test_two_gathers_ahead(sketch: Sketch) -> None:
    layers(sketch, 4)
    want = sketch.run()
    prefetch(sketch.graph, 2)
    sketch.graph.lint()
    assert sketch.order() == [
        *("alias", "gather", "alias_1", "gather_1", "alias_2", "gather_2"),
        *("wait", "mm", "alias_3", "gather_3", "wait_1", "mm_1"),
        *("wait_2", "mm_2", "wait_3", "mm_3"),
    ]
    check_equal(sketch.run(), want)


@pytest.mark.parametrize("count", range(1, 7))
def test_more_ahead_is_another_order_where_a_gather_could_start_earlier(
    count: int,
) -> None:
    """Settings of one order give the very same program, and of others another."""
    sketch = Sketch()
    layers(sketch, count)
    parts = split_phases(sketch.graph)
    assert max(started for _, started in Orders(parts)._phases) == count
    settings = [Settings(ahead=ahead, gathers=0) for ahead in (1, 2, 4)]
    check_orders(parts, settings)


def check_orders(parts: PhasedGraph, settings: Sequence[Settings]) -> int:
    """Settings are of one order if and only if they give one program; how many."""
    orders = Orders(parts)
    pairs = {(orders.of(s), str(as_run(parts.graph, settings=s))) for s in settings}
    count = len({order for order, _ in pairs})
    assert len(pairs) == count == len({text for _, text in pairs})
    return count


def test_buckets_that_hold_the_same_are_of_one_order(sketch: Sketch) -> None:
    """Gathers of the forward, and reductions of the backward, of several sizes, one of
    which reads another's result."""
    weights = [sketch.input(rows, 4) for rows in (2, 3, 5)]
    tangents = [sketch.input(rows, 4, name="tangents") for rows in (2, 3, 5, 7)]
    gathered = [sketch.gather(w) for w in weights]
    sums = [sketch.reduce(sketch.call(aten.sin, t)) for t in tangents]
    sums.append(sketch.reduce(sketch.call(aten.maximum, sums[0], tangents[0])))
    sketch.output(*(sketch.call(aten.sin, w) for w in gathered), *sums)
    parts, row = split_phases(sketch.graph), 4 * 8
    sizes = [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 16, 17, 20, 21, 99]
    bytes_of_buckets = [row * size for size in sizes]
    reductions = [Settings(bucket=size, gathers=0) for size in bytes_of_buckets]
    gathers = [Settings(bucket=0, gathers=size) for size in bytes_of_buckets]
    assert 2 < check_orders(parts, reductions) < len(sizes)
    assert 2 < check_orders(parts, gathers) < len(sizes)


def test_gathers_that_start_ahead_are_those_that_are_read_next(sketch: Sketch) -> None:
    """Not of what was computed, nor those that are gathered over more axes first."""
    x, w = sketch.input(4, 4), sketch.input(1, 4)
    h = sketch.call(aten.mm, x, sketch.gather(sketch.gather(w, TP)))
    sketch.output(sketch.gather(sketch.call(aten.sin, h)))
    ((_, started),) = Orders(split_phases(sketch.graph))._phases
    assert started == 1


def test_gathers_at_the_top_go_to_where_they_are_read(sketch: Sketch) -> None:
    """As in a backward, where the partitioner puts them in the forward's order."""
    h, sent = sketch.input(4, 4), []
    for w in [sketch.input(2, 4) for _ in range(3)]:
        sent.append(sketch.call(GATHER, sketch.call(aten.alias, w), COUNT, DP))
    for gather in reversed(sent):
        h = sketch.call(aten.mm, h, sketch.call(c10d.wait_tensor, gather))
    sketch.output(h)
    want = sketch.run()
    prefetch(sketch.graph)
    assert sketch.order() == [
        *("alias_2", "gather_2", "alias_1", "gather_1", "wait", "mm"),
        *("alias", "gather", "wait_1", "mm_1"),
        *("wait_2", "mm_2"),
    ]
    check_equal(sketch.run(), want)


def test_gathers_over_two_axes_move_together(sketch: Sketch) -> None:
    h = sketch.input(4, 4)
    for w in [sketch.input(1, 4) for _ in range(2)]:
        h = sketch.call(aten.mm, h, sketch.gather(sketch.gather(w, TP)))
    sketch.output(h)
    want = sketch.run()
    prefetch(sketch.graph)
    assert sketch.order() == [
        *("gather", "wait", "gather_1"),
        *("gather_2", "wait_2", "gather_3", "wait_1", "mm"),
        *("wait_3", "mm_1"),
    ]
    check_equal(sketch.run(), want)


def test_only_gathers_of_parameters_start_early(sketch: Sketch) -> None:
    x, w = sketch.input(4, 4), sketch.input(2, 4)
    h = sketch.call(aten.mm, x, sketch.gather(w))
    h = sketch.gather(sketch.call(aten.sin, h))
    other = sketch.reduce(sketch.input(4))
    sketch.output(h, other)
    before = sketch.order()
    prefetch(sketch.graph)
    assert sketch.order() == before


def test_gathers_that_were_sent_already_stay(sketch: Sketch) -> None:
    a = sketch.call(GATHER, sketch.input(4), COUNT, DP)
    b = sketch.call(GATHER, sketch.input(4), COUNT, DP)
    sketch.output(sketch.call(c10d.wait_tensor, a), sketch.call(c10d.wait_tensor, b))
    before = sketch.order()
    prefetch(sketch.graph)
    assert sketch.order() == before


# Few reduce-scatters at a time


@pytest.mark.parametrize("disable", [[], ["drain"]])
def test_a_scatter_is_waited_for_before_the_next_but_one(
    sketch: Sketch, disable: list[str]
) -> None:
    x = sketch.input(4, 4)
    scattered = []
    for _ in range(4):
        x = sketch.call(aten.mm, x, x)
        scattered.append(sketch.scatter(x))
    sketch.output(*scattered)
    want = sketch.run()
    none = Settings(bucket=0)
    schedule(sketch.graph, backward=True, disable=disable, settings=none)
    under_way, most = 0, 0
    for node in sketch.graph.nodes:
        under_way += is_collective(node) - (node.target is WAIT)
        most = max(most, under_way)
    assert most == (4 if disable else 2)
    check_equal(sketch.run(), want)


# Gathers into a tensor made before


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
def test_gathers_on_cpu_are_given_their_output(
    sketch: Sketch, dtype: torch.dtype
) -> None:
    x = sketch.input(2, 4, dtype=dtype)
    sketch.output(sketch.gather(x), sketch.gather(sketch.call(aten.clone, x), TP))
    want = sketch.run()
    give_outputs(sketch.graph)
    sketch.graph.lint()
    assert not sketch.graph.find_nodes(op="call_function", target=GATHER.default)
    made = sketch.graph.find_nodes(op="call_function", target=INTO.default)
    assert [shape(n) for n in made] == [(4, 4), (4, 4)]
    for node in made:
        assert node.meta["val"].dtype is dtype
        first = min(node.users)
        assert first.target is WAIT
        assert first.args == (node,)
    check_equal(sketch.run(), want)


def test_gathers_elsewhere_and_of_complex_numbers_stay(sketch: Sketch) -> None:
    z = sketch.input(4, dtype=torch.complex64)
    far = sketch.input(4)
    with sketch.mode:
        far.meta["val"] = torch.empty(4, device="meta")
    sketch.output(sketch.gather(z), sketch.gather(far))
    before = sketch.order()
    give_outputs(sketch.graph)
    assert sketch.order() == before


# All of them


def everything(sketch: Sketch) -> None:
    """Something for each pass: two small gathers, one that is too large for a bucket,
    a wait before its time."""
    x, small, other = sketch.input(4, 4), sketch.input(2, 4), sketch.input(2, 4)
    large = sketch.input(16, 4)
    early = sketch.reduce(x)
    h = sketch.call(aten.mm, x, sketch.gather(small))
    h = sketch.call(aten.mm, h, sketch.gather(other))
    g = sketch.call(aten.cat, [x, x, h, h, x, h, h, h], 1)
    h = sketch.call(aten.mm, g, sketch.gather(large))
    sketch.output(h, early)


def seen(sketch: Sketch) -> dict[str, bool]:
    """What each pass did."""
    nodes = list(sketch.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    gathers = [n for n in nodes if n.target in (GATHER.default, INTO.default)]
    waits = {n.args[0]: place[n] for n in nodes if n.target is WAIT}
    (early,) = sketch.graph.find_nodes(op="call_function", target=REDUCE.default)
    products = sketch.graph.find_nodes(op="call_function", target=aten.mm.default)
    return {
        "bucket": len(gathers) == 2,
        "sink_waits": waits[early] > place[products[-1]],
        "prefetch": place[gathers[-1]] < waits[gathers[-2]],
    }


PASSES = ("bucket", "sink_waits", "prefetch")


@pytest.mark.parametrize("left_out", [None, *PASSES])
@pytest.mark.parametrize("backward", [False, True])
def test_passes_run_unless_left_out(
    sketch: Sketch,
    left_out: str | None,
    backward: bool,
) -> None:
    everything(sketch)
    want = sketch.run()
    assert not any(seen(sketch).values())
    schedule(
        sketch.graph,
        backward=backward,
        disable=[left_out] if left_out else [],
        settings=Settings(bucket=512),
    )
    assert seen(sketch) == {name: name != left_out for name in PASSES}
    assert not sketch.graph.find_nodes(op="call_function", target=GATHER.default)
    check_equal(sketch.run(), want)


def test_a_graph_without_communication_stays(sketch: Sketch) -> None:
    x = sketch.input(4, 4)
    sketch.output(sketch.call(aten.mm, x, x))
    schedule(sketch.graph, backward=True)
    assert sketch.order() == ["mm"]


# Graphs that are compiled


class Masked(nn.Module):
    """Its results are bools too, which are gathered as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.down(F.gelu(self.up(x))))
        return y, y > 0


def masked() -> tuple[Masked, torch.Tensor]:
    torch.manual_seed(0)
    return Masked(), torch.randn(8, 8)


Step = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def step(model: nn.Module, program: Any, x: torch.Tensor) -> Step:
    """One training step and one call without gradients."""
    y, mask = program(x)
    y.square().mean().backward()
    with torch.no_grad():
        program(x)
    return y.detach(), mask, [whole(p.grad) for p in model.parameters()]


def compiled_graphs(codegen: str, sharded: bool) -> tuple[Step, list[list[str]]]:
    """A step, and the ops of each graph that went to code generation. Those bound for
    Inductor run op by op as well."""
    from fxpar import _torch

    graphs: list[list[str]] = []

    def inner(gm: fx.GraphModule, _: Any, **__: Any) -> Any:
        graphs.append([str(n.target) for n in gm.graph.nodes])
        return _torch.inductor.make_boxed(gm.forward)

    model, x = masked()
    if sharded:
        fxpar.shard(model, mesh="dp=2")
    options = {"codegen": codegen, "mesh": "dp=2"}
    program = torch.compile(model, backend="fxpar", options=options)
    with (
        mock.patch("fxpar.compilation.run_op_by_op", inner),
        mock.patch("torch._inductor.compile_fx.compile_fx_inner", inner),
    ):
        return step(model, program, x), graphs


@pytest.fixture
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("codegen", "sharded"),
    [
        pytest.param("eager", True, id="eager-sharded"),
        pytest.param("eager", False, id="eager-replicated"),
        pytest.param("inductor", True, id="inductor-sharded", marks=pytest.mark.slow),
        pytest.param(
            "inductor", False, id="inductor-replicated", marks=pytest.mark.slow
        ),
    ],
)
def test_no_compiled_graph_gathers_coalesced(codegen: str, sharded: bool) -> None:
    """``all_gather_into_tensor`` corrupts the heap on gloo: see ``give_outputs``."""
    model, x = masked()
    want = step(model, model, x)
    runs = shared_pool(2).run(compiled_graphs, codegen, sharded)
    for (y, mask, grads), graphs in runs:
        assert len(graphs) == 3, "forward, backward, and one without gradients"
        forward, backward, inference = graphs
        assert str(INTO.default) in forward and str(INTO.default) in inference
        assert (str(INTO.default) in backward) == sharded
        for ops in graphs:
            assert str(GATHER.default) not in ops
            assert not any("coalesced" in op for op in ops)
        torch.testing.assert_close(y, want[0])
        assert torch.equal(mask, want[1])
        for got, wanted in zip(grads, want[2], strict=True):
            torch.testing.assert_close(got, wanted)
