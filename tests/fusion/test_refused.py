"""What a schedule must not do: each legality condition has a case that is refused, and
what it would have done is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpar.errors import ScheduleError
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.verbs import apply
from tests.fusion.toys import Toy, all_gather, all_reduce

SUMMANDS = "[_, _] partial(sum: tp)", (8, 4)
WHOLE = "[_, _]", (8, 4)
SPLIT = "split(all_reduce) -> rs, ag\n"


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
    refused(toy, "fuse([add, mul])", "lies between nodes of the region")
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


def test_a_bucket_of_two_dtypes() -> None:
    def program(x: Any) -> Any:
        return all_reduce(x), all_reduce(x.to(torch.float32))

    refused(
        Toy(program, SUMMANDS), "bucket([all_reduce, all_reduce_1])", "not of the kind"
    )


def test_a_gather_that_is_read() -> None:
    toy = Toy(lambda x: all_gather(x) + 1, ("[tp, _]", (8, 4)))
    refused(toy, "drop(all_gather_into_tensor)", "is read whole by add")


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
        ("split(all_reduce, dim=1, dim2=3)", "unexpected keyword"),
        ("split(all_reduce, dim=7)", "has no 4 parts along 7"),
        ("split(add)", "is no all-reduce"),
        ("split(nothing)", "no node named 'nothing'"),
        ("divide(all_reduce)", "is no verb"),
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
    "line", ["split", "split(", "split(a) ->", "split(a) -> 1", "a.b(c)", "split(a[0])"]
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
    with pytest.raises(ScheduleError, match="does not say how it lies"):
        apply(SPLIT, toy.before, "tp=4")
    with pytest.raises(ScheduleError, match="has 2 entries for 1"):
        apply(SPLIT, toy.before, "tp=4", inputs=[None, None])


def test_a_graph_must_know_its_values() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x)).graph
    with pytest.raises(ScheduleError, match="have no fake values"):
        apply("", graph, "tp=4")
