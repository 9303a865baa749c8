"""A pipeline's border: stages that send slices, and whose messages keep fitting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from fxpar.errors import PlanError, ScheduleError
from fxpar.explain.dump import node_text
from fxpar.fusion import apply_stages
from fxpar.fusion.node_legality import CallableRegion
from tests.helpers.schedule_cases import (
    CHUNKED,
    FIRST,
    PIPE,
    SECOND,
    SHARED,
    behind,
    border,
    pipeline,
    recv,
    send,
    simulated,
)
from tests.helpers.toys import Toy, all_reduce


def text(graph: fx.Graph) -> str:
    lines = (node_text(n).partition("  #")[0] for n in graph.nodes)
    return "\n".join(line for line in lines if not line.endswith("input"))


def staged(toys: Sequence[Toy], schedule: str, **how: Any) -> list[fx.Graph]:
    specs = [toy.specs for toy in toys]
    graphs = [toy.before for toy in toys]
    return apply_stages(schedule, graphs, toys[0].mesh, "pp", inputs=specs, **how)


def equal(toys: Sequence[Toy], schedule: str) -> list[fx.Graph]:
    """The graphs after the schedule, which give every rank the same numbers."""
    before, after = [toy.before for toy in toys], staged(toys, schedule)
    pairs = zip(simulated(toys, before), simulated(toys, after), strict=True)
    for want, got in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    return after


def shows(graphs: Sequence[fx.Graph], *wants: str) -> None:
    for graph, want in zip(graphs, wants, strict=True):
        got = text(graph)
        assert got == "\n".join(line.strip() for line in want.strip().splitlines()), got


def test_a_border_before_and_after() -> None:
    toys = pipeline("").toys
    shows(
        staged(toys, "", lowered=False),
        """
        all_reduce: f64[8, 4] = all_reduce(x_1, sum, ('tp',))
        add: f64[8, 4] = aten.add.Tensor(all_reduce, b_1)
        tanh: f64[8, 4] = aten.tanh.default(add)
        add_1: f64[8, 4] = aten.add.Tensor(tanh, r_1)
        isend: f64[0] = send(add_1, 1, 0, ('pp',))
        return isend
        """,
        """
        empty: f64[8, 4] = aten.empty.memory_format([8, 4], dtype=torch.float64, device=cpu, pin_memory=False)
        irecv: f64[8, 4] = recv(empty, 0, 0, ('pp',))
        mm: f64[8, 4] = aten.mm.default(irecv, w_1)
        relu: f64[8, 4] = aten.relu.default(mm)
        mm_1: f64[8, 4] = aten.mm.default(relu, v_1)
        all_reduce: f64[8, 4] = all_reduce(mm_1, sum, ('tp',))
        return all_reduce
        """,  # noqa: E501
    )
    shows(
        staged(toys, SHARED, lowered=False),
        """
        rs: f64[4, 4] = reduce_scatter(x_1, 0, sum, ('tp',))
        add: f64[4, 4] = aten.add.Tensor(rs, b_1)
        tanh: f64[4, 4] = aten.tanh.default(add)
        slice_: f64[4, 4] = slice_(r_1, 0, ('tp',))
        add_1: f64[4, 4] = aten.add.Tensor(tanh, slice_)
        border: f64[0] = send(add_1, 1, 0, ('pp',))
        return border
        """,
        """
        empty_memory_format: f64[4, 4] = aten.empty.memory_format([4, 4], dtype=torch.float64, device=cpu)
        irecv: f64[4, 4] = recv(empty_memory_format, 0, 0, ('pp',))
        border: f64[8, 4] = all_gather(irecv, 0, ('tp',))
        mm: f64[8, 4] = aten.mm.default(border, w_1)
        relu: f64[8, 4] = aten.relu.default(mm)
        mm_1: f64[8, 4] = aten.mm.default(relu, v_1)
        all_reduce: f64[8, 4] = all_reduce(mm_1, sum, ('tp',))
        return all_reduce
        """,  # noqa: E501
    )
    equal(toys, SHARED)


def test_a_border_in_chunks() -> None:
    first, second = equal(pipeline("").toys, SHARED + CHUNKED)
    c10d = torch.ops._c10d_functional
    for graph, kind in ((first, c10d.isend), (second, c10d.irecv)):
        nodes = graph.find_nodes(op="call_function", target=kind.default)
        values = [n.args[0].meta["val"] for n in nodes]
        assert [list(v.shape) for v in values] == [[4, 2], [4, 2]]


def test_rows_are_multiplied_as_they_come() -> None:
    schedule = "overlap(add_1, isend, chunks=4)\noverlap(irecv, mm, chunks=4)"
    _, second = equal(pipeline("").toys, schedule)
    mm = torch.ops.aten.mm.default
    assert len(second.find_nodes(op="call_function", target=mm)) == 5


def test_send_is_fused() -> None:
    fused = SHARED.replace("share", "fuse([add, tanh, add_1], stage=0)\nshare")
    equal(pipeline("").toys, fused.replace("stage=0)\nshare", "stage=0) -> f\nshare"))
    whole = "fuse([add, tanh, add_1, isend], stage=0)\nfuse([irecv, mm, relu])"
    for schedule in (whole, SHARED + "fuse([tanh, slice_, add_1, border], stage=0)"):
        first, _ = staged(pipeline("").toys, schedule, lowered=False)
        (region,) = [n for n in first.nodes if isinstance(n.target, CallableRegion)]
        assert "send" in text(region.target.graph)
        equal(pipeline("").toys, schedule)


def middle(tag: int = 0, *, whole: bool = True) -> list[Toy]:
    """Three stages; the second adds to what it receives, and sends both on. The first
    sends what is ``whole``, or one summand of it."""
    mesh = "pp=3,tp=2"

    def first(x: Any) -> Any:
        return send(all_reduce(x) if whole else x)

    def second(w: Any, v: Any) -> Any:
        y = recv(8, 4)
        return send(y + all_reduce(y @ w @ v), peer=2, tag=tag)

    def third() -> Any:
        return recv(8, 4, peer=1, tag=tag) * 2

    weights = ("[_, tp]", (4, 4)), ("[tp, _]", (4, 4))
    return [
        Toy(first, ("[_, _] partial(sum: tp)", (8, 4)), mesh=mesh),
        Toy(second, *weights, mesh=mesh),
        Toy(third, mesh=mesh),
    ]


def test_what_is_received_varies_as_what_was_sent() -> None:
    after = equal(middle(), "share(axes=tp, dim=0)")
    sent = [n for g in after for n in g.nodes if "isend" in n.name]
    assert [list(n.args[0].meta["val"].shape) for n in sent] == [[4, 4], [4, 4]]


def test_what_differs_still_does_where_it_is_sent_on() -> None:
    equal(middle(tag=1), "share(axes=tp, tag=1)")
    with pytest.raises(ScheduleError, match="differs between ranks"):
        staged(middle(tag=1, whole=False), "share(axes=tp, tag=1)")


def two(first: Callable[..., Any], second: Callable[..., Any]) -> list[Toy]:
    return [Toy(first, *FIRST, mesh=PIPE), Toy(second, *SECOND, mesh=PIPE)]


def sending(x: Any, b: Any, r: Any) -> Any:
    return send(border(all_reduce(x), b, r))


def receiving(w: Any, v: Any) -> Any:
    return behind(all_reduce, recv(8, 4), w, v)


def uneven(rows: int) -> list[Toy]:
    first = Toy(lambda x: send(x), ("[_, _]", (rows, 3)), mesh=PIPE)
    return [first, Toy(lambda: recv(rows, 3) * 2, mesh=PIPE)]


def seen_by_others(w: Any, v: Any) -> Any:
    buffer = torch.empty(8, 4, dtype=torch.float64)
    c10d = torch.ops._c10d_functional
    got = c10d.wait_tensor(c10d.irecv(buffer, 0, 0, "fxpar:pp"))
    return behind(all_reduce, got, w, v), buffer * 2


def twice() -> list[Toy]:
    """Two messages that look the same."""

    def first(x: Any, y: Any) -> Any:
        return send(x * 2), send(y), x + y

    def second() -> Any:
        x, y = recv(8, 4), recv(8, 4)
        return x * 2, y * 3

    given = ("[_, _]", (8, 4)), ("[_, _]", (8, 4))
    return [Toy(first, *given, mesh=PIPE), Toy(second, mesh=PIPE)]


def answering() -> list[Toy]:
    """The second stage answers what it receives."""

    def first(x: Any) -> Any:
        return send(x), recv(8, 4, peer=1) + x

    def second() -> Any:
        return send(recv(8, 4) * 2, peer=0)

    return [Toy(first, ("[_, _]", (8, 4)), mesh=PIPE), Toy(second, mesh=PIPE)]


SHARE = "share(axes=tp, dim=0)"


@pytest.mark.parametrize(
    ("toys", "schedule", "why"),
    [
        # What is sent is a summand.
        (two(lambda x, b, r: send(x), receiving), SHARE, "differs between ranks"),
        (uneven(7), "share(axes=tp, dim=0)", "has no 2 parts along 0"),
        (uneven(7), "share(axes=tp)", "has no dim that 2 ranks divide"),
        (two(sending, receiving), "share(axes=pp)", "crosses"),
        (two(sending, receiving), "share(axes=tp, tag=3)", "no stage has all"),
        (two(sending, receiving), "share(axes=tp, stage=0)", "is received"),
        (two(sending, receiving), "share(axes=tp, stage=1)", "is received"),
        (two(sending, seen_by_others), SHARE, "that other values share"),
        (two(sending, receiving), "overlap(add_1, isend, chunks=2)", "is received"),
        (
            two(sending, receiving),
            "overlap(add_1, isend, chunks=2)\noverlap(irecv, mm, chunks=4)",
            "is received",
        ),
        (two(sending, receiving), "overlap(irecv, mm, chunks=2)", "is received"),
        (twice(), "merge(isend, isend_1, stage=0)", "is a message"),
        (middle(), "fuse([irecv, mm, isend])", "is between nodes of the region"),
        (
            middle(),
            "fuse([irecv, mm, mm_1, all_reduce, add, isend], stage=1)",
            "would communicate along",
        ),
        (answering(), "fuse([irecv, mul, isend])", "received and sent in one region"),
        (
            two(sending, receiving),
            "fuse([add, tanh, add_1, isend], stage=0)\n" + SHARE,
            "share it before fuse",
        ),
        # Two that stand in another order than the program has them in.
        (twice(), "sink(isend, stage=0)", "in another order"),
        (answering(), "sink(isend, stage=0)", "in another order"),
        (twice(), "overlap(irecv, mul, chunks=2)", "in another order"),
        (
            two(sending, receiving),
            "split(all_reduce, stage=0) -> rs, ag\n"
            "reorder([add, tanh, add_1, isend], ag)",
            "is a message",
        ),
        (two(sending, receiving), "drop(isend, stage=2)", "there is no stage 2"),
    ],
)
def test_what_would_not_fit(toys: list[Toy], schedule: str, why: str) -> None:
    before = [str(toy.before) for toy in toys]
    with pytest.raises(ScheduleError, match=why):
        staged(toys, schedule)
    assert [str(toy.before) for toy in toys] == before


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (lambda w, v: behind(all_reduce, recv(4, 4), w, v), r"\[8, 4\].*\[4, 4\]"),
        (lambda w, v: behind(all_reduce, recv(8, 4, tag=1), w, v), "with tag 1"),
        (lambda w, v: behind(all_reduce, recv(8, 4, peer=1), w, v), "to stage 1"),
        (lambda w, v: all_reduce(w @ v), "missing"),
    ],
)
def test_stages_that_do_not_fit(second: Any, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        staged(two(sending, second), SHARE)


def test_one_stage_alone_is_refused() -> None:
    first, second = two(sending, receiving)
    for toy, line in ((first, SHARE), (second, SHARE)):
        with pytest.raises(ScheduleError, match="apply_stages"):
            toy.after(line)
    with pytest.raises(ScheduleError, match="apply_stages"):
        first.after("overlap(add_1, isend, chunks=2)")
    with pytest.raises(ScheduleError, match="1 graphs for 2 stages"):
        staged([first], "")
    with pytest.raises(ScheduleError, match="inputs of 1"):
        graphs = [first.before, second.before]
        apply_stages("", graphs, first.mesh, "pp", inputs=[None])
    with pytest.raises(ScheduleError, match="no message has the tag 3"):
        first.after("share(axes=tp, tag=3)")


def test_messages_may_move_between_their_neighbours() -> None:
    equal(twice(), "sink(irecv_1)\nsink(irecv)\nhoist(isend)")
    chunks = "overlap(mul, isend, chunks=2)\noverlap(irecv, mul, chunks=2)"
    equal(twice(), "sink(irecv_1, stage=1)\n" + chunks)


def test_messages_along_another_axis() -> None:
    def along(axis: str) -> list[Toy]:
        def first(x: Any) -> Any:
            c10d = torch.ops._c10d_functional
            return c10d.wait_tensor(c10d.isend(x, 1, 0, f"fxpar:{axis}"))

        toy = Toy(first, ("[_, _]", (8, 4)), mesh=PIPE)
        return [toy, Toy(lambda: recv(8, 4) * 2, mesh=PIPE)]

    equal(along("pp"), "")
    with pytest.raises(ScheduleError, match="goes along"):
        staged(along("tp"), "")


def test_stages_that_wait_for_each_other() -> None:
    def first(x: Any, b: Any, r: Any) -> Any:
        got = recv(8, 4, peer=1)
        return send(got + r)

    def second(w: Any, v: Any) -> Any:
        got = recv(8, 4)
        return send(got @ w, peer=0)

    toys = two(first, second)
    with pytest.raises(PlanError, match="wait for messages that nobody sends"):
        simulated(toys, [toy.before for toy in toys])


def test_messages_that_do_not_fit_are_noticed_as_they_run() -> None:
    toys = two(sending, lambda w, v: behind(all_reduce, recv(8, 4, tag=1), w, v))
    with pytest.raises(PlanError, match=r"receives \[8, 4\] with tag 0"):
        simulated(toys, [toy.before for toy in toys])
