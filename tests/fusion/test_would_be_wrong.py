"""What is refused would be wrong: with the check taken away, a schedule is done, and
ranks get other numbers than before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion import node_legality, slice_op, varying_axes
from fxpar.fusion.verbs import fuse_nodes, overlap, reorder
from fxpar.graph import collective_nodes
from fxpar.sharding.cost.op import is_view
from fxpar.sharding.factors import Passage
from fxpar.sharding.op_facts import is_drawn_from_generator
from fxpar.sharding.spec import Spec
from tests.helpers.toys import Toy, all_gather, all_reduce, dropped, reduce_scatter

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Off = Callable[[pytest.MonkeyPatch], None]

SUMMANDS = "[_, _] partial(sum: tp)", (8, 4)
WHOLE = "[_, _]", (8, 4)
ROWS = "[tp, _]", (8, 4)
SQUARE = "[tp, _]", (8, 8)
PRODUCT = ("[_, tp]", (8, 8)), ("[tp, _]", (8, 8))
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
SPLIT = "split(all_reduce) -> rs, ag\n"
ALONG_1 = "split(all_reduce, dim=1) -> rs, ag\n"


@dataclass(frozen=True)
class Wrong:
    """``why``: part of the refusal. ``off``: takes away what refuses."""

    toy: Callable[[], Toy]
    schedule: str
    why: str
    off: Off


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _any_view(patch: pytest.MonkeyPatch) -> None:
    def seen(node: fx.Node) -> fx.Node:
        while is_view(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    patch.setattr(overlap, "_before_reshapes", seen)


def _one_part_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """A ring's ranks are taken to hold the same part."""

    def cutter(*args: Any, outside_axes: Any = (), **how: Any) -> slice_op.Cutter:
        return slice_op.Cutter(*args, **how)

    patch.setattr(overlap, "Cutter", cutter)


def _closed_regions(patch: pytest.MonkeyPatch) -> None:
    """What a region gives varies as what it reads."""

    def read(node: fx.Node, out: varying_axes.Varies) -> list[Any]:
        together = frozenset[str]().union(*(out[n] for n in node.all_input_nodes))
        return [together] * len(node.meta["val"])

    patch.setattr(varying_axes, "_of_region", read)


def _plain_ops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(varying_axes, "PRODUCTS", {})


def _all_come_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node_legality, "admit", _nothing)


def _any_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node_legality, "_chained", lambda graph: {})
    patch.setattr(node_legality, "check", _nothing)


def _any_cast(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reorder, "_check_holds", _nothing)


def _all_is_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slice_op.Cutter, "_check_equal", _nothing)


def _all_is_linear(patch: pytest.MonkeyPatch) -> None:
    class Reader(reorder.RuleReader):
        def __call__(self, node: fx.Node) -> Any:
            rule, known = super().__call__(node)
            return replace(rule, passages=(Passage((0,), ("sum",)),)), known

    patch.setattr(reorder, "RuleReader", Reader)


def _nothing_is_whole(patch: pytest.MonkeyPatch) -> None:
    class Reader(slice_op.RuleReader):
        def __call__(self, node: fx.Node) -> Any:
            rule, known = super().__call__(node)
            return replace(rule, whole=frozenset()), known

    patch.setattr(slice_op, "RuleReader", Reader)


def _added_by_each(patch: pytest.MonkeyPatch) -> None:
    kept = slice_op.Cutter._operand

    def operand(self: Any, node: fx.Node, spec: Any, known: Any) -> fx.Node:
        return kept(self, node, Spec.of(spec.dims), known)

    patch.setattr(slice_op.Cutter, "_operand", operand)


def _any_step(patch: pytest.MonkeyPatch) -> None:
    def step(self: Any, node: fx.Node, known: Any) -> slice_op.SlicedResult:
        part = known[node.args[0]]
        made = collective_nodes.step(self.build, node.target, part.node, *node.args[1:])
        return slice_op.SlicedResult(made, (part.dim,))

    patch.setattr(slice_op.Cutter, "_step", step)


def _one_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fuse_nodes, "_kind", lambda node: ())


def _coalesced(w: Any) -> Any:
    (part,) = c10d.reduce_scatter_tensor_coalesced([w], "sum", 4, "fxpar:tp")
    return c10d.wait_tensor(part) * 2


def _in_place(w: Any, g: Any) -> Any:
    y = all_gather(w)
    w.sub_(g)
    return y + 1, w * 2


def _draws(x: Any, r: Any) -> Any:
    """What is drawn first is doubled after the second draw."""
    first, second = dropped(x), dropped(r)
    return first * 2, second


def _delayed(x: Any, y: Any, r: Any) -> Any:
    """A bucket of both gathers stands behind the second draw."""
    first, second = dropped(all_gather(x)), dropped(r)
    return first, second, all_gather(y)


FUSED = f"overlap({GATHER}, mm, fused=1)"
RING = f"overlap({GATHER}, all_reduce, ring=1)"

CASES: dict[str, Wrong] = {
    "a product of what is gathered, transposed": Wrong(
        lambda: Toy(lambda x, w: all_gather(x).T @ w, SQUARE, ("[_, _]", (8, 4))),
        FUSED,
        "is no product of the rows",
        _any_view,
    ),
    "a product scattered transposed": Wrong(
        lambda: Toy(lambda x, w: reduce_scatter((x @ w).T), *PRODUCT),
        f"overlap(mm, {SCATTER}, fused=1)",
        "does not reduce the rows of a product",
        _any_view,
    ),
    "a ring around a reduction along it": Wrong(
        lambda: Toy(
            lambda x, w: all_reduce(all_gather(x) @ w),
            ROWS,
            ("[_, _] partial(sum: tp)", (4, 4)),
        ),
        RING,
        "communicates along the same axes",
        _one_part_at_a_time,
    ),
    "a ring behind a reduction along it": Wrong(
        lambda: Toy(lambda x, w: reduce_scatter(all_reduce(x) * w), SUMMANDS, SUMMANDS),
        f"overlap([all_reduce, mul], {SCATTER}, ring=1)",
        "communicates along the same axes",
        _one_part_at_a_time,
    ),
    "a ring along two axes around a reduction along one": Wrong(
        lambda: Toy(
            lambda x, w: all_reduce(all_gather(x, 4, "dp+tp") @ w),
            ("[dp+tp, _]", (8, 4)),
            ("[_, _] partial(sum: tp)", (4, 4)),
            mesh="dp=2,tp=2",
        ),
        RING,
        "communicates along the same axes",
        _one_part_at_a_time,
    ),
    "slices that a region makes": Wrong(
        lambda: Toy(lambda w: (w * 2) + 1, ("[_, _]", (16, 4))),
        "cut(w_1, axes=tp, dim=0) -> part, ag\nreorder([mul], ag)\n"
        "fuse([part, mul])\ncut(getitem, axes=tp, dim=1)",
        "differs between ranks",
        _closed_regions,
    ),
    "what is left of a fused product": Wrong(
        lambda: Toy(
            lambda x, w: reduce_scatter(x @ w) * 2,
            ("[_, _]", (16, 8)),
            ("[_, _]", (8, 4)),
        ),
        f"overlap(mm, {SCATTER}, fused=1) -> o\ncut(o, axes=tp, dim=1)",
        "differs between ranks",
        _plain_ops,
    ),
    "a collective that no step stands for": Wrong(
        lambda: Toy(_coalesced, ("[_, _]", (16, 4))),
        "cut(wait_tensor, axes=tp, dim=1)",
        "communicates by an op that schedules do not know",
        _all_come_in,
    ),
    "an op in place": Wrong(
        lambda: Toy(_in_place, ROWS, ROWS),
        f"sink({GATHER})",
        "writes to its operand",
        _all_come_in,
    ),
    "a region that draws later": Wrong(
        lambda: Toy(_draws, WHOLE, WHOLE),
        "fuse([native_dropout, getitem, mul])",
        "random numbers in another order",
        _any_order,
    ),
    "a sum that is rounded before": Wrong(
        lambda: Toy(lambda x: all_reduce(x).to(torch.bfloat16), SUMMANDS),
        "reorder([_to_copy], all_reduce)",
        "would round what is reduced",
        _any_cast,
    ),
    "an operand that differs between ranks": Wrong(
        lambda: Toy(lambda x, r: all_reduce(x) + r, SUMMANDS, SUMMANDS),
        SPLIT + "reorder([add], ag)",
        "differs between ranks",
        _all_is_equal,
    ),
    "a nonlinear op before the reduction": Wrong(
        lambda: Toy(lambda x: torch.tanh(all_reduce(x)), SUMMANDS),
        "reorder([tanh], all_reduce)",
        "is not linear",
        _all_is_linear,
    ),
    "a sum with another before the reduction": Wrong(
        lambda: Toy(lambda x, r: all_reduce(x) + r, SUMMANDS, WHOLE),
        "reorder([add], all_reduce)",
        "is not linear",
        _all_is_linear,
    ),
    "a norm along what is sliced": Wrong(
        lambda: Toy(lambda x: torch.softmax(all_reduce(x), 1), SUMMANDS),
        ALONG_1 + "reorder([_softmax], ag)",
        "reads all of the dim",
        _nothing_is_whole,
    ),
    "chunks of a norm": Wrong(
        lambda: Toy(lambda x: all_reduce(torch.softmax(x, 1)), ROWS),
        "overlap(_softmax, all_reduce, chunks=2, dim=1)",
        "reads all",
        _nothing_is_whole,
    ),
    "a bias of what is summed over": Wrong(
        lambda: Toy(
            lambda x, w, b: torch.conv1d(all_reduce(x), w, b),
            ("[_, _, _] partial(sum: tp)", (8, 4, 3)),
            ("[_, _, _]", (4, 4, 1)),
            ("[_]", (4,)),
        ),
        ALONG_1 + "reorder([convolution], ag)",
        "once on each rank",
        _added_by_each,
    ),
    "a reduction along the axes of the gather": Wrong(
        lambda: Toy(lambda x: all_reduce(all_gather(x) * 2), ROWS),
        f"reorder([mul, all_reduce], {GATHER})",
        "communicates along the same axes",
        _any_step,
    ),
    "a scatter of the dim that is sliced": Wrong(
        lambda: Toy(
            lambda x: reduce_scatter(all_gather(x, 2) * 2, 2, "dp"),
            ("[tp, _] partial(sum: dp)", (8, 4)),
            mesh="dp=2,tp=2",
        ),
        f"reorder([mul, {SCATTER}], {GATHER})",
        "moves the dim that is sliced",
        _any_step,
    ),
    "a bucket of two dtypes": Wrong(
        lambda: Toy(
            lambda x: (all_reduce(x), all_reduce(x.to(torch.float32))), SUMMANDS
        ),
        "bucket([all_reduce, all_reduce_1])",
        "not of the kind",
        _one_kind,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_and_wrong_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    toy = case.toy()
    before = str(toy.before)
    with pytest.raises(ScheduleError, match=case.why):
        toy.after(case.schedule)
    assert str(toy.before) == before
    case.off(monkeypatch)
    with pytest.raises(AssertionError):
        toy.check(case.schedule)


def test_a_bucket_keeps_the_order_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, schedule = Toy(_delayed, ROWS, ROWS, WHOLE), f"bucket([{GATHER}, {GATHER}_1])"
    toy.check(schedule)
    _any_order(monkeypatch)
    with pytest.raises(AssertionError):
        toy.check(schedule)


def test_draws_that_wait_for_each_other() -> None:
    def program(x: Any, y: Any, r: Any) -> Any:
        first, second = dropped(all_gather(x)), dropped(r)
        return first, all_gather(y + second)

    toy = Toy(program, ROWS, ROWS, ("[_, _]", (2, 4)))
    with pytest.raises(ScheduleError, match="would wait for itself"):
        toy.after(f"bucket([{GATHER}, {GATHER}_1])")


def test_what_is_drawn_for_nobody_is_still_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(x: Any, r: Any) -> Any:
        all_gather(torch.rand_like(x))
        return dropped(r)

    toy = Toy(program, ROWS, WHOLE)
    toy.check(f"drop({GATHER})")
    monkeypatch.setattr(node_legality, "is_free", lambda node: True)
    with pytest.raises(ScheduleError, match="would be left out"):
        toy.after(f"drop({GATHER})")
    monkeypatch.setattr(node_legality, "check", _nothing)
    with pytest.raises(AssertionError):
        toy.check(f"drop({GATHER})")


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
