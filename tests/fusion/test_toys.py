# ruff: noqa: E501  (graphs as they are printed)
"""CoCoNeT's programs in small: each schedule's graph, and its numbers on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpar.errors import ScheduleError
from fxpar.fusion.node_legality import CallableRegion
from fxpar.graph import collective_nodes
from tests.helpers.toys import Toy, all_gather, all_reduce, reduce_scatter

GRADIENT = "[_, _] partial(sum: tp)", (8, 4)
STATE = "[_, _]", (8, 4)

SPLIT = "split(all_reduce) -> rs, ag\n"


def shows(toy: Toy, schedule: str, want: str, **how: Any) -> None:
    """The graph after the schedule reads as ``want``, and gives the same numbers."""
    got = toy.text(schedule, **how)
    assert got == "\n".join(line.strip() for line in want.strip().splitlines()), got
    toy.check(schedule, **how)


def test_split() -> None:
    shows(
        Toy(lambda x: all_reduce(x), GRADIENT),
        "split(all_reduce, dim=1) -> rs, ag",
        """
        rs: f64[8, 1] = reduce_scatter(x_1, 1, sum, ('tp',))
        ag: f64[8, 4] = all_gather(rs, 1, ('tp',))
        return ag
        """,
    )


def test_an_op_with_results_of_several_nodes() -> None:
    """Causal attention on slices of the queries counts its rows in the whole."""

    def program(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(all_reduce(q), k, v, is_causal=True)

    keys = "[_, _, _, _]", (1, 2, 8, 4)
    toy = Toy(program, ("[_, _, _, _] partial(sum: tp)", (1, 2, 8, 4)), keys, keys)
    (op,) = (n.name for n in toy.before.nodes if "attention" in n.name)
    after = toy.check(f"split(all_reduce, dim=2) -> rs, ag\nreorder([{op}], ag)")
    assert "causal_attention" in str(after)


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_is_bitwise_equal(op: str, dtype: torch.dtype) -> None:
    spec = f"[_, _] partial({op}: tp)"
    toy = Toy(lambda x: all_reduce(x, op=op), (spec, (8, 4)), dtype=dtype)
    parts = toy.parts()
    want = toy.run(toy.before, parts)
    got = toy.run(toy.after(SPLIT), parts)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def sgd(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w - 0.1 * all_reduce(g)


def test_sgd() -> None:
    shows(
        Toy(sgd, GRADIENT, STATE),
        SPLIT + "reorder([mul, sub], ag) -> w",
        """
        rs: f64[2, 4] = reduce_scatter(g_1, 0, sum, ('tp',))
        mul: f64[2, 4] = aten.mul.Tensor(rs, 0.1)
        slice_: f64[2, 4] = slice_(w_1, 0, ('tp',))
        sub: f64[2, 4] = aten.sub.Tensor(slice_, mul)
        w: f64[8, 4] = all_gather(sub, 0, ('tp',))
        return w
        """,
    )


def adam(g: Any, w: Any, m: Any, v: Any) -> Any:
    g = all_reduce(g)
    m1 = 0.9 * m + 0.1 * g
    v1 = 0.99 * v + 0.01 * g * g
    return w - 0.1 * m1 / (v1.abs().sqrt() + 1e-8), m1, v1


ADAM = Toy(adam, GRADIENT, STATE, STATE, STATE)
MOVED = SPLIT + (
    "reorder([mul, mul_1, add, mul_2, mul_3, mul_4, add_1, mul_5, abs_1, sqrt, add_2,"
    " div, sub], ag) -> m, v, w\n"
)


def gathers(graph: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=collective_nodes.all_gather))


def test_adam_gathers_three() -> None:
    assert gathers(ADAM.after(MOVED, lowered=False)) == 3
    ADAM.check(MOVED)


def test_adam_with_its_state_in_slices() -> None:
    schedule = MOVED + "as_slice(m_1, m)\nas_slice(v_1, v)"
    after = ADAM.after(schedule, lowered=False, permit=["m_1", "v_1"])
    assert gathers(after) == 1
    inputs = {n.name: n for n in after.find_nodes(op="placeholder")}
    assert [list(n.meta["val"].shape) for n in inputs.values()] == [
        [8, 4],
        [8, 4],
        [2, 4],
        [2, 4],
    ]
    assert str(inputs["m_1"].meta["fxpar_spec"]) == "[tp, _]"
    run = ADAM.after(schedule, lowered=True, permit=["m_1", "v_1"])
    parts = ADAM.parts()
    want = ADAM.run(ADAM.before, parts)
    sliced = [
        [g, w, m[2 * r : 2 * r + 2], v[2 * r : 2 * r + 2]]
        for r, (g, w, m, v) in enumerate(parts)
    ]
    for r, (w, m, v) in enumerate(ADAM.run(run, sliced)):
        torch.testing.assert_close(w, want[r][0])
        torch.testing.assert_close(m, want[r][1][2 * r : 2 * r + 2])
        torch.testing.assert_close(v, want[r][2][2 * r : 2 * r + 2])


def test_a_cast_comes_before_the_gather() -> None:
    def program(g: Any, w: Any) -> Any:
        new = w - 0.1 * all_reduce(g.to(torch.float32)).to(torch.float64)
        return new.to(torch.float32)

    toy = Toy(program, GRADIENT, STATE)
    schedule = SPLIT + "reorder([_to_copy_1, mul, sub, _to_copy_2], ag)"
    (gather,) = toy.after(schedule, lowered=False).find_nodes(
        op="call_function", target=collective_nodes.all_gather
    )
    assert gather.meta["val"].dtype == torch.float32
    toy.check(schedule)


def lamb(g: Any, w: Any) -> Any:
    u = all_reduce(g) + 0.01 * w
    ratio = (w * w).sum().sqrt() / (u * u).sum().sqrt()
    return w - 0.1 * ratio * u


def test_lamb_reduces_the_sums_of_its_norms() -> None:
    toy = Toy(lamb, GRADIENT, STATE)
    schedule = SPLIT + (
        "reorder([mul, add, mul_1, sum_1, sqrt, mul_2, sum_2, sqrt_1, div, mul_3,"
        " mul_4, sub], ag)"
    )
    after = toy.check(schedule)
    reduces = torch.ops._c10d_functional.all_reduce.default
    sums = after.find_nodes(op="call_function", target=reduces)
    assert [list(n.meta["val"].shape) for n in sums] == [[]]
    assert gathers(toy.after(schedule, lowered=False)) == 1


def test_what_is_fused_is_one_node() -> None:
    schedule = MOVED + (
        "as_slice(m_1, m)\nas_slice(v_1, v)\n"
        "fuse([rs, mul, mul_1, add, mul_2, mul_3, mul_4, add_1, mul_5, abs_1, sqrt,"
        " add_2, div, sub, w]) -> fused"
    )
    after = ADAM.after(schedule, lowered=False, permit=["m_1", "v_1"])
    regions = [n for n in after.nodes if isinstance(n.target, CallableRegion)]
    assert len(regions) == 1
    outside = [n for n in after.nodes if collective_nodes.is_step(n)]
    assert [n.target for n in outside] == [collective_nodes.slice_] * len(outside)
    fused = SPLIT + "reorder([mul, sub], ag) -> w\nfuse([rs, mul, sub, w]) -> f"
    Toy(sgd, GRADIENT, STATE).check(fused)


def dropped(size: list[int]) -> torch.Tensor:
    seed = torch.ops.fxpar.seeds(1, torch.device("cpu"))
    start = [0] * len(size)
    return torch.ops.fxpar.random(size, seed[0], "rand", size, start)


def block(x: Any, w: Any, b: Any, r: Any) -> Any:
    y = all_reduce(x @ w) + b
    keep = dropped(list(y.shape)) > 0.5
    return keep * y * 2.0 + r


BLOCK = Toy(
    block,
    ("[_, tp]", (16, 8)),
    ("[tp, _]", (8, 4)),
    ("[_]", (4,)),
    ("[_, _]", (16, 4)),
)
AFTER_PRODUCT = "[add, random, gt, mul, mul_1, add_1]"


def test_products_over_ranks_on_rows() -> None:
    shows(
        BLOCK,
        SPLIT + f"reorder({AFTER_PRODUCT}, ag) -> out",
        """
        mm: f64[16, 4] = aten.mm.default(x_1, w_1)
        rs: f64[4, 4] = reduce_scatter(mm, 0, sum, ('tp',))
        add: f64[4, 4] = aten.add.Tensor(rs, b_1)
        seeds: i64[1] = fxpar.seeds.default(1, cpu)
        select: i64[] = aten.select.int(seeds, 0, 0)
        offset: int = offset(tp=4, ('tp',), 4, 0)
        random: f32[4, 4] = fxpar.random.default([4, 4], select, rand, [16, 4], [offset, 0])
        gt: bool[4, 4] = aten.gt.Scalar(random, 0.5)
        mul: f64[4, 4] = aten.mul.Tensor(gt, add)
        mul_1: f64[4, 4] = aten.mul.Tensor(mul, 2.0)
        slice_: f64[4, 4] = slice_(r_1, 0, ('tp',))
        add_1: f64[4, 4] = aten.add.Tensor(mul_1, slice_)
        out: f64[16, 4] = all_gather(add_1, 0, ('tp',))
        return out
        """,
    )


def test_products_over_ranks_on_columns() -> None:
    schedule = f"split(all_reduce, dim=1) -> rs, ag\nreorder({AFTER_PRODUCT}, ag)"
    assert "slice_(b_1, 0, ('tp',))" in BLOCK.text(schedule)
    BLOCK.check(schedule)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("chunks", [2, 4])
def test_a_product_beside_its_reduction(dim: int, chunks: int) -> None:
    schedule = SPLIT + f"overlap(mm, rs, chunks={chunks}, dim={dim}) -> out"
    after = BLOCK.check(schedule)
    mm = torch.ops.aten.mm.default
    assert len(after.find_nodes(op="call_function", target=mm)) == chunks


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_gather_beside_its_product(chunks: int) -> None:
    def program(x: Any, w: Any, v: Any) -> Any:
        y = all_gather(x)
        return F.relu(y @ w), (y @ v).T, y

    toy = Toy(program, ("[tp, _]", (16, 8)), ("[_, tp]", (8, 8)), ("[_, tp]", (8, 4)))
    toy.check(f"overlap(all_gather_into_tensor, [relu, mm_1], chunks={chunks})")


def test_a_norm_on_rows() -> None:
    def program(x: Any, r: Any) -> Any:
        return F.layer_norm(all_reduce(x) + r, [4])

    toy = Toy(program, GRADIENT, STATE)
    schedule = SPLIT + "reorder([add, native_layer_norm], ag)"
    assert "native_layer_norm_default: (f64[2, 4], f64[2, 1]" in toy.text(schedule)
    toy.check(schedule)


def convolved(first: bool) -> Toy:
    """The gradient of a convolution's input or of its weight, the others left out."""

    def program(g: Any, x: Any, w: Any) -> Any:
        asked = [first, not first, False]
        made = torch.ops.aten.convolution_backward(
            all_reduce(g), x, w, [2], [1], [0], [1], False, [0], 1, asked
        )
        return made[int(not first)] * 2

    return Toy(
        program,
        ("[_, _, _] partial(sum: tp)", (8, 4, 3)),
        ("[_, _, _]", (8, 4, 3)),
        ("[_, _, _]", (4, 4, 1)),
    )


def test_several_results_some_of_them_none() -> None:
    schedule = SPLIT + "reorder([convolution_backward, mul], ag)"
    convolved(True).check(schedule)
    on_channels = "split(all_reduce, dim=1) -> rs, ag\n"
    convolved(False).check(on_channels + "reorder([convolution_backward, mul], ag)")
    with pytest.raises(ScheduleError, match="would have to be reduced"):
        convolved(False).after(schedule)


def test_views_of_what_was_permuted() -> None:
    def program(x: Any) -> Any:
        turned = (all_reduce(x) * 2).permute(1, 0)
        return turned.permute(1, 0).view(32)

    toy = Toy(program, GRADIENT)
    toy.check(SPLIT + "reorder([mul, permute], ag)")


def test_a_gather_after_the_next_product() -> None:
    def program(x: Any, w: Any, b: Any, r: Any, v: Any) -> Any:
        return block(x, w, b, r) @ v

    given = zip(map(str, BLOCK.specs), BLOCK.shapes, strict=True)
    toy = Toy(program, *given, ("[_, _]", (4, 8)))
    schedule = SPLIT + f"reorder({AFTER_PRODUCT}, ag) -> out\nreorder([mm_1], out)"
    assert "mm_1: f64[4, 8]" in toy.text(schedule)
    toy.check(schedule)


def test_a_stage_receives_slices() -> None:
    """The activation that all ranks of a stage hold is sent in slices, each once, and
    gathered by those who receive it."""

    def program(x: Any, b: Any, r: Any) -> Any:
        y = torch.tanh(all_reduce(x) + b) + r
        return torch.ops.fxpar.permute(y, [1, 0], "fxpar:pp")

    toy = Toy(
        program,
        ("[_, _] partial(sum: tp+pp)", (8, 4)),
        ("[_]", (4,)),
        ("[_, _]", (8, 4)),
        mesh="pp=2,tp=2",
    )
    shows(
        toy,
        SPLIT + "reorder([add, tanh, add_1, permute], ag)",
        """
        rs: f64[4, 4] = reduce_scatter(x_1, 0, sum, ('tp',))
        add: f64[4, 4] = aten.add.Tensor(rs, b_1)
        tanh: f64[4, 4] = aten.tanh.default(add)
        slice_: f64[4, 4] = slice_(r_1, 0, ('tp',))
        add_1: f64[4, 4] = aten.add.Tensor(tanh, slice_)
        permute: f64[4, 4] = permute(add_1, (1, 0), ('pp',))
        all_gather_1: f64[8, 4] = all_gather(permute, 0, ('tp',))
        return all_gather_1
        """,
    )
    in_chunks = toy.check(
        SPLIT + "reorder([add, tanh, add_1, permute], ag) -> out\n"
        "overlap(rs, out, chunks=2)"
    )
    sends = torch.ops.fxpar.permute.default
    assert len(in_chunks.find_nodes(op="call_function", target=sends)) == 2


def test_a_scale_before_the_reduction() -> None:
    shows(
        Toy(lambda x: all_reduce(x) * 2.0, GRADIENT),
        "reorder([mul], all_reduce) -> ar",
        """
        mul: f64[8, 4] = aten.mul.Tensor(x_1, 2.0)
        ar: f64[8, 4] = all_reduce(mul, sum, ('tp',))
        return ar
        """,
    )


def test_two_levels() -> None:
    toy = Toy(
        lambda x: all_reduce(x, "dp+tp"),
        ("[_, _] partial(sum: dp+tp)", (8, 4)),
        mesh="dp=2,tp=4",
    )
    shows(
        toy,
        "hierarchical(all_reduce, inner=tp, outer=dp) -> rs, ar, ag",
        """
        rs: f64[2, 4] = reduce_scatter(x_1, 0, sum, ('tp',))
        ar: f64[2, 4] = all_reduce(rs, sum, ('dp',))
        ag: f64[8, 4] = all_gather(ar, 0, ('tp',))
        return ag
        """,
    )


def test_buckets() -> None:
    def program(a: Any, b: Any, c: Any, d: Any) -> Any:
        reduced = all_reduce(a), all_reduce(b * 2)
        scattered = reduce_scatter(a), reduce_scatter(b + 1)
        return *reduced, *scattered, all_gather(c), all_gather(d * 3)

    toy = Toy(
        program,
        GRADIENT,
        ("[_, _, _] partial(sum: tp)", (4, 3, 2)),
        ("[tp, _]", (8, 3)),
        ("[tp]", (4,)),
    )
    schedule = """
        bucket([all_reduce, all_reduce_1]) -> ar
        bucket([reduce_scatter_tensor, reduce_scatter_tensor_1]) -> rs
        bucket([all_gather_into_tensor, all_gather_into_tensor_1]) -> ag
    """
    after = toy.after(schedule, lowered=False)
    assert sum(collective_nodes.is_step(n) for n in after.nodes) == 3
    toy.check(schedule)


def test_buckets_of_nothing() -> None:
    """Values without elements next to others."""

    def fn(x: Any, y: Any) -> Any:
        scattered = reduce_scatter(x), reduce_scatter(y)
        return *scattered, all_gather(x), all_gather(y)

    varies = "[_, _] partial(sum: tp)"
    toy = Toy(fn, (varies, (8, 0)), (varies, (8, 3)))
    toy.check(
        """
        bucket([reduce_scatter_tensor, reduce_scatter_tensor_1]) -> rs
        bucket([all_gather_into_tensor, all_gather_into_tensor_1]) -> ag
        """
    )


def test_views_of_what_came_in_a_bucket() -> None:
    toy = Toy(lambda x: all_reduce(x).view(32), GRADIENT)
    toy.check("split(all_reduce, dim=1) -> rs, ag\nbucket([ag])")


def test_gathers_merge_move_and_go() -> None:
    toy = Toy(
        lambda x, y: (
            all_gather(x, 2) + 1,
            all_gather(x, 2) * 2,
            all_gather(all_gather(y, 2), 2, "dp"),
        ),
        ("[tp, _]", (8, 4)),
        ("[dp+tp, _]", (8, 4)),
        mesh="dp=2,tp=2",
    )
    names = "all_gather_into_tensor"
    schedule = f"""
        merge({names}, {names}_1)
        merge({names}_2, {names}_3) -> both
        hoist(both)
        sink(both)
    """
    after = toy.after(schedule, lowered=False)
    assert gathers(after) == 2
    toy.check(schedule)


def test_a_gather_of_what_all_hold_gives_way_to_it() -> None:
    """Who reads whole what was cut reads it as it was before."""
    toy = Toy(lambda w: (w * 2, w + 1), ("[_, _]", (8, 4)))
    schedule = "cut(w_1, axes=tp, dim=0) -> part, ag\nreorder([mul], ag) -> scaled\n"
    assert gathers(toy.after(schedule, lowered=False)) == 2
    after = toy.after(schedule + "drop(ag)", lowered=False)
    assert gathers(after) == 1
    add = next(node for node in after.nodes if node.name == "add")
    assert add.args[0].op == "placeholder"
    toy.check(schedule + "drop(ag)")


def test_a_gather_that_is_sliced_again_goes() -> None:
    toy = Toy(sgd, GRADIENT, STATE)
    twice = SPLIT + "reorder([mul], ag) -> whole\nreorder([sub], whole)"
    after = toy.check(twice)
    assert gathers(toy.after(twice, lowered=False)) == 1
    assert after is not toy.before
