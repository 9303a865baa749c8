"""What a schedule must not do: each legality condition has a case that is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpar.errors import ScheduleError
from fxpar.fusion import apply_schedule, choose_schedule
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.verbs import reorder
from fxpar.sharding.op_facts import is_drawn_from_generator
from fxpar.sharding.spec import Spec
from tests.helpers.toys import Toy, all_gather, all_reduce, dropped, reduce_scatter

c10d = torch.ops._c10d_functional

SUMMANDS = "[_, _] partial(sum: tp)", (8, 4)
WHOLE = "[_, _]", (8, 4)
SPLIT = "split(all_reduce) -> rs, ag\n"
GATHER = "all_gather_into_tensor"


def refused(toy: Toy, schedule: str, reason: str, **how: Any) -> None:
    before = str(toy.before)
    with pytest.raises(ScheduleError, match=reason):
        toy.after(schedule, **how)
    assert str(toy.before) == before


def test_a_nonlinear_op_before_the_reduction() -> None:
    toy = Toy(lambda x: torch.tanh(all_reduce(x)), SUMMANDS)
    refused(toy, "reorder([tanh], all_reduce)", "is not linear")


def test_a_sum_with_another_before_the_reduction() -> None:
    toy = Toy(lambda x, r: all_reduce(x) + r, SUMMANDS, WHOLE)
    refused(toy, "reorder([add], all_reduce)", "is not linear")


def test_a_reduction_that_others_read() -> None:
    toy = Toy(lambda x: (all_reduce(x) * 2, all_reduce(x)), SUMMANDS)
    toy.check("reorder([mul], all_reduce)")

    def twice(x: Any) -> Any:
        y = all_reduce(x)
        return y * 2, y

    refused(Toy(twice, SUMMANDS), "reorder([mul], all_reduce)", "is not all that reads")


def test_a_product_along_what_is_summed() -> None:
    def program(x: Any, w: Any) -> Any:
        return all_reduce(x) @ w

    toy = Toy(program, SUMMANDS, ("[_, _]", (4, 4)))
    schedule = "split(all_reduce, dim=1) -> rs, ag\nreorder([mm], ag)"
    after = toy.check(schedule)  # the summands are reduced
    assert "reduce_scatter" in str(after) and "all_reduce" in str(after)


def test_a_norm_along_what_is_sliced() -> None:
    def program(x: Any, r: Any) -> Any:
        return F.layer_norm(all_reduce(x) + r, [4])

    refused(
        Toy(program, SUMMANDS, WHOLE),
        "split(all_reduce, dim=1) -> rs, ag\nreorder([add, native_layer_norm], ag)",
        "reads all of the dim",
    )


def test_an_operand_that_differs_between_ranks() -> None:
    def program(x: Any, r: Any) -> Any:
        return all_reduce(x) + r

    toy = Toy(program, SUMMANDS, SUMMANDS)
    refused(toy, SPLIT + "reorder([add], ag)", "differs between ranks")
    weights = Toy(lambda x, w: all_reduce(x) @ w, SUMMANDS, ("[_, tp]", (4, 16)))
    refused(weights, SPLIT + "reorder([mm], ag)", "differs between ranks")


def test_a_reduction_of_what_is_equal() -> None:
    refused(Toy(lambda x: all_reduce(x), WHOLE), SPLIT, "is equal on all ranks")


def test_numbers_drawn_by_local_index() -> None:
    def program(x: Any) -> Any:
        y = all_reduce(x)
        return y + torch.rand_like(y)

    toy = Toy(program, SUMMANDS)
    refused(toy, SPLIT + "reorder([rand_like, add], ag)", "reads all of the dim")
    made = Toy(lambda x: all_reduce(x) + torch.rand(8, 4), SUMMANDS)
    refused(made, SPLIT + "reorder([rand, add], ag)", "needs rand on slices")


def test_rows_that_each_rank_picks_for_itself() -> None:
    def program(x: Any, w: Any) -> Any:
        return reduce_scatter(all_gather(x) @ w)

    toy = Toy(program, ("[tp, _]", (8, 4)), ("[_, _]", (4, 4)))
    ring = "overlap(mm, reduce_scatter_tensor, ring=1)\n"
    toy.check(ring)
    reason = "which rows are cut out of a split dim is dynamic"
    refused(toy, ring + f"overlap({GATHER}, select_int, ring=1)", reason)


def test_state_that_is_read_whole_later() -> None:
    def program(g: Any, m: Any) -> Any:
        new = m + all_reduce(g)
        return new, m.sum()

    toy = Toy(program, SUMMANDS, WHOLE)
    schedule = SPLIT + "reorder([add], ag) -> m\nas_slice(m_1, m)"
    refused(toy, schedule, "is not read by one and the same slice", permit=["m_1"])

    def again(g: Any, m: Any) -> Any:
        new = m + all_reduce(g)
        return new, new.sum()

    refused(Toy(again, SUMMANDS, WHOLE), schedule, "read whole", permit=["m_1"])


def test_state_whose_update_is_another() -> None:
    def program(g: Any, m: Any, v: Any) -> Any:
        reduced = all_reduce(g)
        return m + reduced, v * reduced

    toy = Toy(program, SUMMANDS, WHOLE, WHOLE)
    schedule = SPLIT + "reorder([add, mul], ag) -> m, v\n"
    how: Any = {"permit": ["m_1"]}
    toy.after(schedule + "as_slice(m_1, m)", **how)
    refused(toy, schedule + "as_slice(m_1, v)", "is not computed from m_1", **how)
    refused(toy, schedule + "as_slice(m_1)", "may be what m_1 becomes", **how)
    refused(toy, schedule + "as_slice(m_1, mul)", "is not gathered along", **how)


def test_state_that_is_only_read() -> None:
    def program(g: Any, m: Any) -> Any:
        return (m + all_reduce(g)).sum(0)

    toy = Toy(program, SUMMANDS, WHOLE)
    schedule = SPLIT + "reorder([add, sum_1], ag)\nas_slice(m_1)"
    after = toy.after(schedule, permit=["m_1"])
    (state,) = [n for n in after.find_nodes(op="placeholder") if n.name == "m_1"]
    assert list(state.meta["val"].shape) == [2, 4]


def test_state_without_permission() -> None:
    toy = Toy(lambda g, m: m + all_reduce(g), SUMMANDS, WHOLE)
    schedule = SPLIT + "reorder([add], ag) -> m\nas_slice(m_1, m)"
    refused(toy, schedule, "may be read elsewhere")
    toy.after(schedule, permit=["m_1"])


def test_a_region_with_a_way_out_and_back() -> None:
    def program(x: Any) -> Any:
        a = x + 1
        return torch.tanh(a) * a

    toy = Toy(program, WHOLE)
    refused(toy, "fuse([add, mul])", "is between nodes of the region")
    toy.check("fuse([add, tanh, mul])")


def test_two_reductions_in_one_region() -> None:
    toy = Toy(lambda x, y: all_reduce(x) + all_reduce(y), SUMMANDS, SUMMANDS)
    refused(toy, "fuse([all_reduce, all_reduce_1, add])", "second reduction")


def test_a_bucket_of_what_waits_for_each_other() -> None:
    toy = Toy(lambda x: all_reduce(all_gather(x) * 2), ("[tp, _]", (8, 4)))
    refused(toy, "bucket([all_reduce, all_gather_into_tensor])", "not of the kind")

    def chain(x: Any) -> Any:
        return all_gather(all_gather(x) * 2)

    names = "all_gather_into_tensor"
    toy = Toy(chain, ("[tp, _]", (8, 4)))
    refused(toy, f"bucket([{names}, {names}_1])", "waits for one of them")


def test_a_bucket_of_one_and_what_is_computed_from_it() -> None:
    names = "all_gather_into_tensor"
    toy = Toy(lambda x: all_gather(all_gather(x)), ("[tp, _]", (8, 4)))
    refused(toy, f"bucket([{names}, {names}_1])", "is computed from another")
    toy = Toy(lambda x: all_reduce(all_reduce(x)), SUMMANDS)
    refused(toy, "bucket([all_reduce, all_reduce_1])", "is computed from another")


def test_steps_along_the_same_axes_do_not_merge() -> None:
    names = "all_gather_into_tensor"
    toy = Toy(lambda x: all_gather(all_gather(x)), ("[tp, _]", (8, 4)))
    refused(toy, f"merge({names}, {names}_1)", "is along axes of")
    toy = Toy(lambda x: all_reduce(all_reduce(x)), SUMMANDS)
    refused(toy, "merge(all_reduce, all_reduce_1)", "is along axes of")


@pytest.mark.parametrize(
    ("dtype", "to", "may"),
    [
        (torch.float64, torch.float32, False),
        (torch.float32, torch.float64, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.bfloat16, torch.float32, True),
        (torch.int64, torch.float32, False),
        (torch.int16, torch.float32, True),
        (torch.int64, torch.int32, False),
        (torch.int32, torch.int64, True),
        (torch.bool, torch.float16, True),
        (torch.float32, torch.int64, False),
        (torch.float32, torch.complex64, False),
    ],
)
def test_casts_that_hold_every_value(
    dtype: torch.dtype, to: torch.dtype, may: bool
) -> None:
    assert reorder._has_all_values(to, dtype) == may


def test_a_tuple_before_the_reduction() -> None:
    toy = Toy(lambda x: torch.ops.aten.split.Tensor(all_reduce(x), 4)[0], SUMMANDS)
    refused(toy, "reorder([split], all_reduce)", "gives several results")


def test_a_factor_that_differs_before_the_reduction() -> None:
    toy = Toy(lambda x, r: all_reduce(x) * r, SUMMANDS, SUMMANDS)
    refused(toy, "reorder([mul], all_reduce)", "reads r_1, which differs along")


TWO_AXES: Any = {"mesh": "dp=2,tp=2"}


def test_gathers_along_two_axes() -> None:
    toy = Toy(
        lambda x, y: all_gather(x, 2) + all_gather(y, 2, "dp"),
        ("[tp, _]", (8, 4)),
        ("[dp, _]", (8, 4)),
        **TWO_AXES,
    )
    names = "all_gather_into_tensor"
    refused(toy, f"reorder([add], {names}, {names}_1)", "is not along")
    refused(toy, f"fuse([{names}, {names}_1, add])", "would communicate along")


def test_what_is_sliced_in_no_piece() -> None:
    toy = Toy(lambda x: all_reduce(x).view(32), SUMMANDS)
    schedule = "split(all_reduce, dim=1) -> rs, ag\nreorder([view], ag)"
    refused(toy, schedule, "would not have contiguous slices")


def test_chunks_through_the_parts_of_ranks() -> None:
    toy = Toy(lambda x: (all_gather(x) * 2).view(4, 4, 4), ("[tp, _]", (16, 4)))
    names = "all_gather_into_tensor"
    refused(toy, f"overlap({names}, view, chunks=2)", "would cut through the parts")


def test_chunks_of_what_is_read_whole() -> None:
    def program(x: Any, w: Any) -> Any:
        doubled = all_gather(x) * 2
        return doubled @ w, doubled.sum()

    toy = Toy(program, ("[tp, _]", (8, 4)), ("[_, _]", (4, 4)))
    line = "overlap(all_gather_into_tensor, mm, chunks=2)"
    refused(toy, line, "is read outside of what runs in chunks")


def unknown_group(x: Any) -> Any:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "mine"))


def uneven(x: Any) -> Any:
    sizes = [3, 1, 2, 2]
    return c10d.wait_tensor(c10d.all_to_all_single(x, sizes, sizes, "fxpar:tp"))


def twice_along(x: Any) -> Any:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "fxpar:tp+tp"))


def broadcasting(x: Any) -> Any:
    return c10d.wait_tensor(c10d.broadcast(x, 0, "fxpar:tp"))


def in_place(x: Any) -> Any:
    y = x * 2
    y.view(-1).add_(1.0)
    return y + 1


def received_over(x: Any) -> Any:
    y = x * 2
    return c10d.wait_tensor(c10d.irecv(y, 0, 0, "fxpar:tp")), y


def with_graphs(x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (with_graphs, "runs graphs of its own"),
        (unknown_group, "whose axes are unknown"),
        (uneven, "pieces of unequal size"),
        (twice_along, "twice along one axis"),
        (broadcasting, "communicates by an op that schedules do not know"),
        (in_place, "writes to its operand"),
        (received_over, "memory that other values share"),
    ],
)
def test_programs_that_no_schedule_is_for(program: Any, reason: str) -> None:
    """Whatever a schedule would do: an empty one is refused too."""
    refused(Toy(program, WHOLE), "", reason)


def test_a_bucket_of_two_dtypes() -> None:
    def program(x: Any) -> Any:
        return all_reduce(x), all_reduce(x.to(torch.float32))

    refused(
        Toy(program, SUMMANDS), "bucket([all_reduce, all_reduce_1])", "not of the kind"
    )


def test_a_gather_that_is_read() -> None:
    toy = Toy(lambda x: all_gather(x) + 1, ("[tp, _]", (8, 4)))
    refused(toy, "drop(all_gather_into_tensor)", "is read whole by add")


def test_a_gather_of_what_ranks_hold_parts_of() -> None:
    """Slices of a value that differs between ranks are not those of any whole value,
    and slices along another dim are others."""
    toy = Toy(lambda w: w + 1, WHOLE)
    graph = toy.after("cut(w_1, axes=tp, dim=0) -> part, ag", lowered=False)
    apply("drop(ag)", graph, toy.mesh)
    given, part = (next(n for n in graph.nodes if n.name == x) for x in ("w_1", "part"))
    spec = given.meta["fxpar_spec"]
    given.meta["fxpar_spec"] = Spec.parse(SUMMANDS[0])
    with pytest.raises(ScheduleError, match="is read whole by add"):
        apply("drop(ag)", graph, toy.mesh)
    given.meta["fxpar_spec"] = spec
    part.args = part.args[0], 1, part.args[2]
    with pytest.raises(ScheduleError, match="is read whole by add"):
        apply("drop(ag)", graph, toy.mesh)


def test_gathers_of_other_values() -> None:
    toy = Toy(
        lambda x, y: all_gather(x) + all_gather(y),
        ("[tp, _]", (8, 4)),
        ("[tp, _]", (8, 4)),
    )
    names = "all_gather_into_tensor"
    refused(toy, f"merge({names}, {names}_1)", "moves another value")


def test_chunks_of_what_is_read_between() -> None:
    def program(x: Any, w: Any) -> Any:
        y = x @ w
        return all_reduce(y), y.sum()

    toy = Toy(program, ("[_, tp]", (8, 8)), ("[tp, _]", (8, 4)))
    refused(toy, "overlap(mm, all_reduce, chunks=2)", "is read by sum_1 too")


def test_chunks_of_a_norm() -> None:
    def program(x: Any) -> Any:
        return all_reduce(torch.softmax(x, 1))

    toy = Toy(program, ("[tp, _]", (8, 4)))
    refused(toy, "overlap(_softmax, all_reduce, chunks=2, dim=1)", "reads all")
    toy.check("overlap(_softmax, all_reduce, chunks=2, dim=0)")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "split(all_reduce, dim=1, dim2=3)",
            r"dim2= is not one of its options \(dim\)",
        ),
        ("split(all_reduce, dim=7)", "has no 4 parts along 7"),
        ("split(add)", "is no all-reduce"),
        ("split(nothing)", "no node named 'nothing'"),
        ("divide(all_reduce)", "is not a verb"),
        ("split(all_reduce) -> a, b, c", "gives 2 values"),
        ("overlap(mm, all_reduce, chunks=3)", "no 3 chunks"),
        ("hierarchical(all_reduce, inner=tp, outer=dp)", "reduces over"),
        ("hoist(mm)", "is no collective"),
    ],
)
def test_lines_that_do_not_fit(line: str, reason: str) -> None:
    toy = Toy(
        lambda x, w: all_reduce(x @ w) + 1, ("[_, tp]", (8, 8)), ("[tp, _]", (8, 4))
    )
    refused(toy, line, reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("split(all_reduce, dim=a)", "dim is a, not a number"),
        ("split(all_reduce, dim=-1)", "dim is -1, not a number that is at least 0"),
        ("split(all_reduce, dim=[mm])", r"dim is \[mm\], not a number"),
        ("split([all_reduce])", r"argument 1 is \[all_reduce\], not the name"),
        ("split()", "0 arguments are given, at least 1"),
        ("hoist([all_reduce])", "not the name of a node"),
        ("sink(all_reduce, mm)", "2 arguments are given, of at most 1"),
        ("cut(mm, axes=3)", "axes is 3, not axes"),
        ("cut(mm, axes=tp_and_tp)", "not axes, each once"),
        ("cut(mm)", "axes= is missing"),
        ("cut(mm, axes=dp)", "cannot be cut along"),
        ("hierarchical(all_reduce, inner=1, outer=tp)", "inner is 1, not axes"),
        ("reorder(add, all_reduce)", "not a list of names"),
        ("reorder([], all_reduce)", "not a list of names"),
        ("reorder([add], [all_reduce])", "argument 2 is"),
        ("reorder([add])", "1 arguments are given, at least 2"),
        ("bucket(all_reduce)", "not a list of names"),
        ("bucket([])", "not a list of names"),
        ("fuse([])", "not a list of names"),
        ("fuse([mm, mm])", "mm is named twice"),
        ("merge()", "0 arguments are given, at least 2"),
        ("merge(all_reduce, all_reduce)", "is named twice"),
        ("drop()", "0 arguments are given, at least 1"),
        ("overlap([], all_reduce)", "argument 1 is"),
        ("overlap(mm, all_reduce, chunks=0)", "chunks is 0, not a number"),
        ("overlap(mm, all_reduce, chunks=1)", "chunks is 1, not a number"),
        ("overlap(mm, all_reduce, ring=3)", "ring is 3, not 1 or 2"),
        ("overlap(mm, all_reduce, fused=7)", "fused is 7, not 0 or 1"),
        ("overlap(mm, all_reduce, fused=1)", "no product before a reduce-scatter"),
        ("overlap(mm, add, fused=1)", "is no gather before products"),
        ("buckets(bytes=a)", "bytes is a, not a number"),
        ("share(axes=tp)", "no message has the tag 0"),
    ],
)
def test_lines_that_say_what_a_verb_does_not_take(line: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason) as error:
        ONE.after(line)
    assert error.value.fix
    assert f"in the schedule: {line}" in error.value.__notes__


ONE = Toy(lambda x, w: all_reduce(x @ w) + 1, ("[_, tp]", (8, 8)), ("[tp, _]", (8, 4)))


def test_every_verb_says_what_it_takes() -> None:
    for verb, takes in apply_schedule.VERBS.items():
        (line,) = Schedule.parse(takes.form).lines
        assert line.verb == verb
        assert set(dict(line.options)) <= set(takes.options)
        found = inspect.signature(takes.run).parameters
        assert set(takes.options) <= set(found)


def test_what_goes_wrong_in_a_verb_names_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a mistake of ours")

    hoist = replace(apply_schedule.VERBS["hoist"], run=broken)
    monkeypatch.setitem(apply_schedule.VERBS, "hoist", hoist)
    with pytest.raises(
        apply_schedule.Unexpected, match=r"hoist\(all_reduce\): KeyError"
    ):
        ONE.after("hoist(all_reduce)")
    search = choose_schedule.Attempts.__new__(choose_schedule.Attempts)
    search.near_misses, search.schedule = [], Schedule()
    monkeypatch.setattr(search, "timeline", lambda s: ONE.after(str(s)))
    with pytest.raises(apply_schedule.Unexpected):  # it is no near miss
        search.attempt(Schedule.parse("hoist(all_reduce)"), "")
    assert not search.attempt(Schedule.parse("split(mm)"), "") and search.near_misses


@pytest.mark.parametrize("given", ["mm_default_1", "slice_tensor", "torch"])
def test_names_that_other_nodes_have_or_get(given: str) -> None:
    schedule = f"split(all_reduce) -> rs, {given}\noverlap(mm, rs, chunks=2)"
    ONE.check(schedule + f"\nreorder([add], {given})")


@pytest.mark.parametrize(
    "line",
    [
        "split",
        "split(",
        "split(a) ->",
        "split(a) -> 1",
        "split(a) -> in",
        "split(a) -> b, b",
        "a.b(c)",
        "split(a[0])",
        "split(a, dim=0, dim=1)",
    ],
)
def test_lines_that_cannot_be_read(line: str) -> None:
    with pytest.raises(ScheduleError, match="line 2 of the schedule"):
        Schedule.parse(f"# first\n{line}")


def test_text_and_back() -> None:
    text = "split(ar, dim=1) -> rs, ag\nreorder([a, b], ag) -> c\noverlap(mm, rs, n=4)"
    schedule = Schedule.parse(f"# a comment\n\n{text}  # and another")
    assert str(schedule) == text
    assert schedule.lines[1] == Line("reorder", (("a", "b"), "ag"), (), ("c",))
    assert Schedule.parse(str(schedule)) == schedule


def test_an_input_must_say_how_it_lies() -> None:
    toy = Toy(lambda x: all_reduce(x), SUMMANDS)
    with pytest.raises(ScheduleError, match="has no spec on the mesh"):
        apply(SPLIT, toy.before, "tp=4")
    with pytest.raises(ScheduleError, match="has 2 entries for 1"):
        apply(SPLIT, toy.before, "tp=4", inputs=[None, None])


def test_a_graph_must_know_its_values() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x)).graph
    with pytest.raises(ScheduleError, match="have no fake values"):
        apply("", graph, "tp=4")


def test_a_gather_that_is_read_whole_once_another_is_dropped() -> None:
    toy = Toy(lambda x: all_gather(torch.tanh(x)) * 2, ("[tp, _]", (8, 4)))
    schedule = f"cut({GATHER}, axes=tp, dim=0) -> part, ag\ndrop(ag, {GATHER})"
    refused(toy, schedule, "is read whole by mul")
    toy.check(f"cut({GATHER}, axes=tp, dim=0) -> part, ag\ndrop(ag)")


def test_state_that_is_a_result_twice() -> None:
    def program(g: Any, m: Any) -> Any:
        new = m + all_reduce(g)
        return new, new

    schedule = SPLIT + "reorder([add], ag) -> m\nas_slice(m_1, m)"
    toy = Toy(program, SUMMANDS, WHOLE)
    refused(toy, schedule, "is a result twice", permit=["m_1"])


@pytest.mark.parametrize("wider", [torch.int32, torch.float32])
def test_a_sum_of_whole_numbers_that_wraps(wider: torch.dtype) -> None:
    """Sums of 8 bits wrap, those of what they were cast to do not."""
    toy = Toy(lambda x: all_reduce(x).to(wider), SUMMANDS, dtype=torch.int8)
    refused(toy, "reorder([_to_copy], all_reduce)", "is not linear")
    most = Toy(lambda x: all_reduce(x, op="max").to(wider), SUMMANDS, dtype=torch.int8)
    assert most.after("reorder([_to_copy], all_reduce)")


def test_means_of_whole_numbers_are_rounded_once() -> None:
    two = "[_, _] partial(sum: dp+tp)", (8, 4)
    how: Any = {"dtype": torch.int32, "mesh": "dp=2,tp=2"}
    over = Toy(lambda x: all_reduce(x, "dp+tp", "avg"), two, **how)
    why = "is a mean that is rounded"
    refused(over, "hierarchical(all_reduce, inner=tp, outer=dp)", why)
    nested = Toy(
        lambda x: all_reduce(all_reduce(x, "tp", "avg"), "dp", "avg"), two, **how
    )
    refused(nested, "merge(all_reduce, all_reduce_1)", why)
    scaled = Toy(lambda x: all_reduce(x, op="avg") * 2, SUMMANDS, dtype=torch.int32)
    refused(scaled, "reorder([mul], all_reduce)", why)


def test_a_mean_of_whole_numbers_is_one() -> None:
    toy = Toy(lambda x: all_reduce(x, op="avg") + 1, SUMMANDS, dtype=torch.int32)
    parts = [[torch.full((8, 4), value, dtype=torch.int32)] for value in (1, 2, -9, 0)]
    for out in toy.run(toy.after("split(all_reduce)", lowered=True), parts):
        assert out.dtype == torch.int32 and out.eq(0).all()


ROWS = "[tp, _]", (8, 4)
SQUARE = "[tp, _]", (8, 8)
PRODUCT = ("[_, tp]", (8, 8)), ("[tp, _]", (8, 8))
SCATTER = "reduce_scatter_tensor"
ALONG_1 = "split(all_reduce, dim=1) -> rs, ag\n"
FUSED = f"overlap({GATHER}, mm, fused=1)"
RING = f"overlap({GATHER}, all_reduce, ring=1)"


def _draws(x: Any, r: Any) -> Any:
    """What is drawn first is doubled after the second draw."""
    first, second = dropped(x), dropped(r)
    return first * 2, second


# Name -> program, schedule, part of the refusal.
REFUSED: dict[str, tuple[Callable[[], Toy], str, str]] = {
    "a product of what is gathered, transposed": (
        lambda: Toy(lambda x, w: all_gather(x).T @ w, SQUARE, ("[_, _]", (8, 4))),
        FUSED,
        "is no product of the rows",
    ),
    "a product scattered transposed": (
        lambda: Toy(lambda x, w: reduce_scatter((x @ w).T), *PRODUCT),
        f"overlap(mm, {SCATTER}, fused=1)",
        "does not reduce the rows of a product",
    ),
    "a ring around a reduction along it": (
        lambda: Toy(
            lambda x, w: all_reduce(all_gather(x) @ w),
            ROWS,
            ("[_, _] partial(sum: tp)", (4, 4)),
        ),
        RING,
        "communicates along the same axes",
    ),
    "a ring behind a reduction along it": (
        lambda: Toy(lambda x, w: reduce_scatter(all_reduce(x) * w), SUMMANDS, SUMMANDS),
        f"overlap([all_reduce, mul], {SCATTER}, ring=1)",
        "communicates along the same axes",
    ),
    "a ring along two axes around a reduction along one": (
        lambda: Toy(
            lambda x, w: all_reduce(all_gather(x, 4, "dp+tp") @ w),
            ("[dp+tp, _]", (8, 4)),
            ("[_, _] partial(sum: tp)", (4, 4)),
            mesh="dp=2,tp=2",
        ),
        RING,
        "communicates along the same axes",
    ),
    "slices that a region makes": (
        lambda: Toy(lambda w: (w * 2) + 1, ("[_, _]", (16, 4))),
        "cut(w_1, axes=tp, dim=0) -> part, ag\nreorder([mul], ag)\n"
        "fuse([part, mul])\ncut(getitem, axes=tp, dim=1)",
        "differs between ranks",
    ),
    "what is left of a fused product": (
        lambda: Toy(
            lambda x, w: reduce_scatter(x @ w) * 2,
            ("[_, _]", (16, 8)),
            ("[_, _]", (8, 4)),
        ),
        f"overlap(mm, {SCATTER}, fused=1) -> o\ncut(o, axes=tp, dim=1)",
        "differs between ranks",
    ),
    "a region that draws later": (
        lambda: Toy(_draws, WHOLE, WHOLE),
        "fuse([native_dropout, getitem, mul])",
        "random numbers in another order",
    ),
    "a sum that is rounded before": (
        lambda: Toy(lambda x: all_reduce(x).to(torch.bfloat16), SUMMANDS),
        "reorder([_to_copy], all_reduce)",
        "would round what is reduced",
    ),
    "a bias of what is summed over": (
        lambda: Toy(
            lambda x, w, b: torch.conv1d(all_reduce(x), w, b),
            ("[_, _, _] partial(sum: tp)", (8, 4, 3)),
            ("[_, _, _]", (4, 4, 1)),
            ("[_]", (4,)),
        ),
        ALONG_1 + "reorder([convolution], ag)",
        "once on each rank",
    ),
    "a reduction along the axes of the gather": (
        lambda: Toy(lambda x: all_reduce(all_gather(x) * 2), ROWS),
        f"reorder([mul, all_reduce], {GATHER})",
        "communicates along the same axes",
    ),
    "a scatter of the dim that is sliced": (
        lambda: Toy(
            lambda x: reduce_scatter(all_gather(x, 2) * 2, 2, "dp"),
            ("[tp, _] partial(sum: dp)", (8, 4)),
            mesh="dp=2,tp=2",
        ),
        f"reorder([mul, {SCATTER}], {GATHER})",
        "moves the dim that is sliced",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_is_refused(name: str) -> None:
    toy, schedule, reason = REFUSED[name]
    refused(toy(), schedule, reason)


def _delayed(x: Any, y: Any, r: Any) -> Any:
    """A bucket of both gathers stands behind the second draw."""
    first, second = dropped(all_gather(x)), dropped(r)
    return first, second, all_gather(y)


def test_a_bucket_keeps_the_order_of_draws() -> None:
    Toy(_delayed, ROWS, ROWS, WHOLE).check(f"bucket([{GATHER}, {GATHER}_1])")


def test_draws_that_wait_for_each_other() -> None:
    def program(x: Any, y: Any, r: Any) -> Any:
        first, second = dropped(all_gather(x)), dropped(r)
        return first, all_gather(y + second)

    toy = Toy(program, ROWS, ROWS, ("[_, _]", (2, 4)))
    with pytest.raises(ScheduleError, match="would wait for itself"):
        toy.after(f"bucket([{GATHER}, {GATHER}_1])")


def test_what_is_drawn_for_nobody_is_still_drawn() -> None:
    def program(x: Any, r: Any) -> Any:
        all_gather(torch.rand_like(x))
        return dropped(r)

    Toy(program, ROWS, WHOLE).check(f"drop({GATHER})")


def test_attention_without_dropout_draws_nothing() -> None:
    def program(dropout: float) -> Any:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        shape = ("[_, _, _, _]", (1, 1, 4, 4))
        toy = Toy(lambda q: op(q, q, q, dropout)[0], shape)
        assert toy.before.find_nodes(op="call_function", target=op)
        return [node for node in toy.before.nodes if is_drawn_from_generator(node)]

    assert not program(0.0)
    assert len(program(0.5)) == 1


def test_groups_have_their_members_in_mesh_order() -> None:
    """Whatever the order of the axes that a user writes."""

    def program(x: Any) -> Any:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, "mine")) * 1

    how: Any = {"mesh": "dp=2,tp=2"}
    want = Toy(lambda x: all_gather(x, 4, "dp+tp") * 1, ("[dp+tp, _]", (8, 4)), **how)
    toy = Toy(program, ("[dp+tp, _]", (8, 4)), **how)
    for axes in (("dp", "tp"), ("tp", "dp")):
        after = toy.after("", groups={"mine": axes}, lowered=True)
        got = toy.run(after, toy.parts())
        assert all(map(torch.equal, got, want.run(want.before, want.parts())))
    with pytest.raises(ScheduleError, match="twice along one axis"):
        toy.after("", groups={"mine": ("tp", "tp")})
