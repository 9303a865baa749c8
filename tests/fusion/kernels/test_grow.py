"""What becomes a region, what does not, and what is said of it."""

from __future__ import annotations

from typing import Any

import torch

from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.emit import kernel_of
from fxpar.fusion.kernels.fuse_regions import drop_double_permutes, fuse_graph
from fxpar.fusion.kernels.region_program import RegionProgram, op_name, stages_of
from fxpar.graph.builder import REGION
from tests.helpers.kernels.fused_graphs import (
    ELSEWHERE,
    GRAPHS,
    GROUP,
    IN_PLACE,
    ROWS,
    WIDTH,
    all_reduce,
    c10d,
    facts,
    fused,
    graph_of,
    in_other_place,
    in_place,
    lines,
    norm,
    ops,
)


def test_from_one_product_to_the_next() -> None:
    graph, found = fused(GRAPHS["epilogue"])
    assert ops(graph) == ["mm", "region", "getitem", "getitem", "mm"]
    assert str(found.programs[0]).splitlines()[1:] == [
        "in0: f32[6, 24] = input (24, 1)",
        "in1: f32[6, 24] = input (24, 1)",
        "all_reduce: f32[6, 24] = _c10d_functional.all_reduce.default(in0, sum, group)",
        "wait_tensor: f32[6, 24] = _c10d_functional.wait_tensor.default(all_reduce)",
        "add: f32[6, 24] = aten.add.Tensor(wait_tensor, in1)",
        "var_mean: tuple[] = aten.var_mean.correction(add, [1], correction=0, "
        "keepdim=True)",
        "getitem: f32[6, 1] = getitem(var_mean, 0)",
        "getitem_1: f32[6, 1] = getitem(var_mean, 1)",
        "add_1: f32[6, 1] = aten.add.Tensor(getitem, 1e-05)",
        "rsqrt: f32[6, 1] = aten.rsqrt.default(add_1)",
        "sub: f32[6, 24] = aten.sub.Tensor(add, getitem_1)",
        "mul: f32[6, 24] = aten.mul.Tensor(sub, rsqrt)",
        "return add, mul",
    ]
    assert (found.before, found.after) == (4 * 576 + 2 * 576, 2 * 576 + 2 * 576)
    assert not found.near_misses


def test_what_kernels_apart_move_is_what_is_simulated() -> None:
    """What is reduced is in memory once, though it is returned as well."""

    def both(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(x @ w)
        return y, y.exp()

    _, found = fused(both)
    # The collective reads and writes, the kernel behind it too; one kernel reads once.
    assert (found.before, found.after) == (4 * 576, 3 * 576)


def test_up_to_what_is_computed_for_it_alone() -> None:
    graph, found = fused(GRAPHS["prologue"])
    assert ops(graph) == ["mm", "region", "getitem", "mm"]
    assert lines(found) == [["tanh", "mul", "all_reduce", "wait_tensor"]]


def test_sums_along_columns_end_a_region() -> None:
    graph, found = fused(GRAPHS["backward"])
    assert ops(graph) == ["mm", "region", "getitem", "getitem", "mm"]
    assert [t.shape for t in found.programs[0].outputs] == [(24,), (6, 24)]


def test_views_stay_outside() -> None:
    graph, found = fused(GRAPHS["views"])
    assert ops(graph) == [
        "mm",
        "view",
        "region",
        *["getitem"] * 2,
        "view",
        "mm",
        "view",
    ]
    assert lines(found) == [["all_reduce", "wait_tensor", "mul", "view", "add"]]
    assert [t.name for t in found.programs[0].outputs] == ["mul", "add"]


def test_an_optimizers_step_is_one_region() -> None:
    graph, found = fused(GRAPHS["update"])
    assert ops(graph) == ["mm", "region", "getitem", "getitem", "mm"]
    moves = [line.op for line in found.programs[0].lines if "c10d" in line.op]
    assert [op.split(".")[1] for op in moves] == [
        "reduce_scatter_tensor",
        "wait_tensor",
        "all_gather_into_tensor",
        "wait_tensor",
    ]


def test_state_is_written_in_place() -> None:
    for fn in IN_PLACE.values():
        graph, found = fused(fn)
        assert found.programs
        assert "region_" in ops(graph) and "copy_" not in ops(graph), fn.__name__
    _, found = fused(in_place)
    # Read: the summed product, x, r. Written: x, r.
    assert found.after == 5 * 576


def test_what_others_still_read_is_not_overwritten() -> None:
    for fn in ELSEWHERE.values():
        graph, found = fused(fn)
        assert found.programs
        assert "region" in ops(graph) and "copy_" in ops(graph), fn.__name__


def test_a_kernel_writes_over_what_it_reads_in_that_order_alone() -> None:
    def fits(fn: Any, reads: list[torch.Tensor], *over: int) -> list[bool]:
        """Of each output, over one of the tensors that are read."""
        (program,) = fused(fn)[1].programs
        (part,) = [s for s in stages_of(program) if isinstance(s, RegionProgram)]
        kernel = kernel_of(part)
        pairs = zip(kernel.writes, over, strict=True)
        return [run_kernels.fits(kernel, reads, t, reads[i]) for t, i in pairs]

    r, g, x = apart = [torch.zeros(ROWS, WIDTH) for _ in range(3)]
    assert fits(in_place, apart, 0, 2) == [True, True]
    near = [*torch.zeros(2, ROWS, WIDTH)]  # in one piece of memory
    assert fits(in_place, [near[0], g, near[1]], 0, 2) == [False, False]
    turned = r.view(WIDTH, ROWS).t()
    assert fits(in_other_place, [g, turned, x], 2) == [True]
    assert fits(in_other_place, [g, turned, r], 2) == [False]


def test_a_kernel_waits_inside_only_while_no_other_collective_runs() -> None:
    def beside(x: Any, w: Any, r: Any) -> Any:
        g = c10d.reduce_scatter_tensor(r @ w, "sum", 1, GROUP)
        y = norm(all_reduce(x @ w) + r)
        return y @ w, c10d.wait_tensor(g)

    def done(x: Any, w: Any, r: Any) -> Any:
        g = c10d.wait_tensor(c10d.reduce_scatter_tensor(r @ w, "sum", 1, GROUP))
        y = norm(all_reduce((x + g) @ w) + r)
        return y @ w, g

    assert fused(done, "triton")[1].programs
    graph, found = fused(beside, "triton")
    assert not found.programs
    assert "reduce_scatter_tensor runs at the same time" in str(found.near_misses)
    assert fused(beside, "interpret")[1].programs
    # Asked for, its collective runs between kernels.
    (start,) = [n for n in graph.nodes if op_name(n).endswith("all_reduce.default")]
    wait = next(iter(start.users))
    for node in (start, wait, *wait.users):
        node.meta["custom"] = {REGION: "asked"}
    asked = fuse_graph(graph, facts_of=lambda _: facts("triton"), beyond_schedule=False)
    (made,) = graph.find_nodes(
        op="call_function", target=torch.ops.fxpar.region.default
    )
    assert made.args[-1] == "nccl" and asked.rungs[0].name == "nccl"


def test_nothing_to_fuse() -> None:
    graph, found = fused(lambda x, w, r: all_reduce(x @ w) @ w)
    assert ops(graph) == ["mm", "all_reduce", "wait_tensor", "mm"]
    assert not found.programs and not found.near_misses


def test_what_runs_beside_work_is_left() -> None:
    """Twin of ``epilogue``: a product runs while the collective does."""

    def beside(x: Any, w: Any, r: Any) -> Any:
        started = c10d.all_reduce(x @ w, "sum", GROUP)
        other = r @ w
        return norm(c10d.wait_tensor(started) + other)

    graph, found = fused(beside)
    assert "all_reduce" in ops(graph) and not found.programs
    assert "it runs at the same time as mm_1" in found.near_misses[0]


def test_it_waits_for_no_later_product() -> None:
    """Twin of ``epilogue``: the residual comes from a product behind the collective."""

    def late(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(x @ w) * 2
        return y, y + torch.sigmoid(y @ w @ r.t()) @ r

    graph, found = fused(late)
    assert lines(found) == [["all_reduce", "wait_tensor", "mul"]]

    def other(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(x @ w) * 2
        return (y @ w) @ w, y.exp() + r @ w

    graph, found = fused(other)
    (program,) = found.programs
    assert [line.name for line in program.lines][-1] != "add"
    assert any("would wait for mm" in text for text in found.near_misses)


def test_a_region_is_convex() -> None:
    """What reads the region by way of a product is not in it, nor what reads that."""

    def around(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(x @ w) * 2
        return (torch.tanh(y @ w) + y) * r

    _, found = fused(around)
    assert lines(found) == [["all_reduce", "wait_tensor", "mul"]]


def test_a_way_around_by_a_light_op() -> None:
    def around(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(x @ w) * 2
        return (y.cumsum(0) + y) @ w, y @ w

    graph, found = fused(around)
    assert lines(found) == [["all_reduce", "wait_tensor", "mul"]]
    assert ops(graph).index("cumsum") > ops(graph).index("region")


def test_what_reads_a_sum_along_columns_is_outside() -> None:
    """Also where a column has as many elements as a row."""

    def square(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(w @ w) * 2
        return y @ w, y.sum(0).exp()

    _, found = fused(square)
    assert lines(found) == [["all_reduce", "wait_tensor", "mul", "sum"]]
    assert not found.near_misses


def test_an_unknown_op_is_told_with_its_line() -> None:
    def unknown(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(x @ w) + r
        return y.cumsum(-1) @ w, y

    graph = graph_of(unknown)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cumsum.default)
    node.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    y.cumsum(-1)'
    found = fuse_graph(graph, facts_of=lambda group: facts("interpret"))
    assert len(found.programs) == 1
    assert found.near_misses == [
        "near miss: cumsum (aten.cumsum.default) is not fused with all_reduce: "
        "aten.cumsum.default has no form in a generated kernel\n"
        "  at: model.py:7: y.cumsum(-1)",
    ]


def test_other_rows_are_left_out() -> None:
    def other(x: Any, w: Any, r: Any) -> Any:
        y = (all_reduce(x @ w) + r).softmax(-1)
        return y @ w, y.view(3, 2 * WIDTH).amax(-1)

    _, found = fused(other)
    assert found.programs
    assert any("reduces rows of 48, others of 24" in text for text in found.near_misses)


def test_float64_is_left_alone() -> None:
    def wide(x: Any, w: Any, r: Any) -> Any:
        return (all_reduce((x @ w).double()) + r).float() @ w

    _, found = fused(wide)
    assert not found.programs
    assert any("it is of dtype float64" in text for text in found.near_misses)


def test_it_must_save_bytes() -> None:
    """A result that others could have computed in one kernel with it is now written
    for them, and read again."""

    def lost(x: Any, w: Any, r: Any) -> Any:
        return (all_reduce(x @ w) * 2).cumsum(-1) @ w

    graph, found = fused(lost)
    assert not found.programs and "all_reduce" in ops(graph)
    assert any("in one kernel it would move" in text for text in found.near_misses)


def test_two_permutes_that_cancel() -> None:
    def twice(x: Any, w: Any, r: Any) -> Any:
        return all_reduce(x @ w).t().t() + r, x.t().t().t()

    graph = graph_of(twice)
    assert ops(graph).count("permute") + ops(graph).count("t") == 5
    drop_double_permutes(graph)
    assert ops(graph).count("permute") + ops(graph).count("t") == 1
    graph, found = fused(twice)
    assert lines(found) == [["all_reduce", "wait_tensor", "add"]]


def test_regions_come_one_after_the_other() -> None:
    graph, found = fused(GRAPHS["two"])
    assert ops(graph).count("region") == 2
    graph.lint()
    positions = [i for i, op in enumerate(ops(graph)) if op == "region"]
    assert "mm" in ops(graph)[positions[0] : positions[1]]
