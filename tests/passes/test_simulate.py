"""What a step is predicted to cost, against closed forms.

Graphs by hand on a machine of round figures: a byte of memory takes a nanosecond, a
flop a picosecond, a byte sent a microsecond, a launch a thousand seconds, so that each
is read off the sum. Times of random tasks are those of a plain event simulation, and a
changed simulation is the one built anew. Then graphs of real models.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import register_flop_formula

import fxpar
import fxpar.features.experts.expert_ops
import fxpar.features.stages.sums_of_parts  # registers an op
from fxpar._torch.fake import new_fake_mode
from fxpar.choose_plan import fastest_plan
from fxpar.errors import PlanError
from fxpar.graph.builder import Builder
from fxpar.passes.order.forward_backward import (
    as_run,
)
from fxpar.passes.simulate.launches import launches_of
from fxpar.passes.simulate.simulate_step import Simulation, Task, Timeline, simulate
from fxpar.planning import TracedPlan
from fxpar.runtime.tracing import TracedCall, read_signature
from fxpar.sharding.cost.hardware_table import (
    LIGHT,
    Hardware,
    Level,
    Peak,
    ProductDims,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.ops import FACTS
from fxpar.sharding.plan import asdict_shallow
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Output
from fxpar.sharding.spec import Spec
from tests.helpers.models import build_loss

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar

LAUNCH, BYTE, FLOP, SEND = 1e3, 1e-9, 1e-12, 1e-6


def machine(**changed: Any) -> Hardware:
    """Two ranks send ``SEND`` seconds a byte of an all-reduce."""
    figures: dict[str, Any] = {
        "name": "round",
        "peaks": (("float32", Peak(1 / FLOP)), ("bfloat16", Peak(4 / FLOP))),
        "bandwidth": 1 / BYTE,
        "memory": 1e9,
        "launch": LAUNCH,
        "eager_launch": 2 * LAUNCH,
        "levels": (Level(0, 1 / SEND, 0.0, 0.0),),
    }
    return Hardware(**{**figures, **changed})


MESH = Mesh.parse("dp=2,tp=2,pp=2")


class Sketch:
    """A local graph that grows at its end, with fake values."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), new_fake_mode()
        self.build = Builder(self.graph, self.mode, MESH)
        self.inputs = 0

    def input(self, *shape: int, dtype: Any = torch.float32, name: str = "x") -> Any:
        node = self.graph.placeholder(f"{name}{self.inputs}")
        self.inputs += 1
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        op = op.default if hasattr(op, "overloads") else op
        return self.build.call(op, *args, **kwargs)

    def reduce(self, x: Any, axes: str = "dp") -> Any:
        return self(c10d.all_reduce, x, "sum", f"fxpar:{axes}")

    def wait(self, x: Any) -> Any:
        return self(c10d.wait_tensor, x)

    def run(self, *results: Any, **options: Any) -> Timeline:
        self.graph.output(results)
        self.graph.lint()
        hardware = options.pop("hardware", machine())
        return simulate(self.graph, hardware.on(MESH), hardware, **options)


def kinds(timeline: Timeline) -> list[str]:
    return [event.kind for event in timeline.events]


def where(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Start and end of each collective, in bytes of an all-reduce of two."""
    return {
        e.name: (round(e.start / SEND), round(e.end / SEND))
        for e in timeline.events
        if e.axes
    }


def test_a_part_of_a_graph_may_be_given_the_results_of_an_op():
    """As a window behind the backward of a convolution is: one of them may be None."""
    s = Sketch()
    given = s.input(4)
    given.meta["val"] = [None, s.input(4).meta["val"], s.input(8).meta["val"]]
    out = s.run(s(aten.exp, s(operator.getitem, given, 2)))
    (event,) = out.events
    assert event.bytes == 2 * 8 * 4


# Kernels


def test_a_product_is_a_roofline():
    for m, k, n in ((64, 64, 64), (4, 4096, 4)):
        s = Sketch()
        out = s.run(s(aten.mm, s.input(m, k), s.input(k, n)))
        work, moved = 2 * m * k * n * FLOP, 4 * (m * k + k * n + m * n) * BYTE
        assert out.seconds == pytest.approx(LAUNCH + max(work, moved), rel=1e-15)
        assert out.events[0].flops == 2 * m * k * n
        assert out.exposed_seconds == out.hidden_seconds == 0.0


@pytest.mark.parametrize(
    ("op", "shapes", "args", "flops", "dims"),
    [
        (aten.bmm, [(3, 8, 16), (3, 16, 4)], [], 2 * 3 * 8 * 16 * 4, (8, 4, 16)),
        (aten.addmm, [(4,), (8, 16), (16, 4)], [], 2 * 8 * 16 * 4, (8, 4, 16)),
        (
            aten.convolution,
            [(2, 4, 8, 8), (6, 4, 3, 3)],
            [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1],
            2 * 2 * 64 * 6 * 36,
            (2 * 64, 6, 36),
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            [(2, 3, 16, 4), (2, 3, 32, 4), (2, 3, 32, 4)],
            [],
            4 * 2 * 3 * 16 * 32 * 4,
            (16, 32, 4),
        ),
        (
            ours.dot,
            [(2, 8, 16), (16, 4)],
            ["b s h, h o -> b s o"],
            4 * 8 * 64,
            (16, 4, 16),
        ),
    ],
    ids=["bmm", "addmm", "convolution", "attention", "dot"],
)
def test_contractions_have_flops_and_dims(op, shapes, args, flops, dims):
    s = Sketch()
    made = s(op, *[s.input(*shape) for shape in shapes], *args)
    s.graph.output((made,))
    (launch,) = launches_of(s.graph).launches
    assert (launch.kind, launch.flops) == ("contraction", flops)
    assert launch.dims == ProductDims(*dims)


def test_gradients_of_experts_contract_rows():
    s = Sketch()
    rows, ids = (s.input(64, 16), s.input(64, 4)), s.input(64, dtype=torch.int64)
    made = s(ours.expert_outer, *rows, ids, 8, 1, 0.0)
    s.graph.output((made,))
    (launch,) = launches_of(s.graph).launches
    assert (launch.flops, launch.dims) == (2 * 64 * 16 * 4, ProductDims(16, 4, 64))


def test_backwards_of_convolution_and_attention_have_flops():
    s = Sketch()
    x, w, g = s.input(2, 4, 8, 8), s.input(6, 4, 3, 3), s.input(2, 6, 8, 8)
    rest = [[6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]]
    conv = s(aten.convolution_backward, g, x, w, *rest)
    q, k, v, o = (s.input(2, 3, n, 4) for n in (16, 32, 32, 16))
    late = s.graph.call_function(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (o, q, k, v, o, o, 0.0, False),
    )
    late.meta["val"] = tuple(n.meta["val"] for n in (q, k, v))
    s.graph.output((conv, late))
    by = {x.nodes[0]: x for x in launches_of(s.graph).launches}
    assert by[conv].flops == 2 * (2 * 2 * 64 * 6 * 36)
    assert by[conv].dims == ProductDims(2 * 64, 6, 36)
    assert by[late].flops == 10 * 2 * 3 * 16 * 32 * 4
    assert by[late].dims == ProductDims(16, 32, 4)


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_channels_multiply_only_one_another(transposed):
    """Each gradient takes what the forward does."""
    s = Sketch()
    x, g = s.input(2, 8, 8, 8), s.input(2, 4, 8, 8)
    if transposed:
        x, g = g, x
    w = s.input(4, 2, 3, 3)
    rest = [[1, 1], [1, 1], [1, 1], transposed, [0, 0], 4]
    forward = s(aten.convolution, x, w, None, *rest)
    late = s(aten.convolution_backward, g, x, w, None, *rest, [True, True, False])
    s.graph.output((forward, late))
    by = {x.nodes[0]: x for x in launches_of(s.graph).launches}
    assert by[forward].flops == 2 * 2 * 64 * 4 * 2 * 9
    assert by[late].flops == 2 * by[forward].flops
    assert by[forward].dims == by[late].dims == ProductDims(2 * 64, 1, 2 * 9)


def test_a_sequence_before_heads_is_the_sequence():
    s = Sketch()
    q, k, v = (s.input(2, n, 3, 4, dtype=torch.float16) for n in (16, 32, 32))
    rest = (None, None, 16, 32, 0.0, False, False)
    with FakeTensorMode():
        out = torch.empty(2, 16, 3, 4, dtype=torch.float16)
    node = s.graph.call_function(
        aten._flash_attention_forward.default, (q, k, v, *rest)
    )
    node.meta["val"] = (out,)
    s.graph.output((node,))
    (launch,) = launches_of(s.graph).launches
    assert launch.flops == 4 * 2 * 3 * 16 * 32 * 4
    assert launch.dims == ProductDims(16, 32, 4)


@pytest.mark.parametrize("name", ["paged_attention", "causal_conv"])
def test_flops_of_a_users_op_are_what_its_formula_says(name):
    """Whatever it is called, nothing is known of its operands."""

    @torch.library.custom_op(f"test_simulate::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    op.register_fake(torch.empty_like)
    register_flop_formula(getattr(torch.ops.test_simulate, name))(
        lambda x, **_: 7 * x[0]
    )
    s = Sketch()
    s.graph.output((s(getattr(torch.ops.test_simulate, name), s.input(16, 4)),))
    (launch,) = launches_of(s.graph).launches
    assert (launch.flops, launch.dims) == (7 * 16, ProductDims())


def test_a_product_in_another_dtype_has_flops():
    s = Sketch()
    x, y = (s.input(2, 4, 4, dtype=torch.bfloat16) for _ in range(2))
    node = s.graph.call_function(aten.bmm.dtype, (x, y, torch.float32))
    node.meta["val"] = x.meta["val"].float()
    s.graph.output((node,))
    (launch,) = launches_of(s.graph).launches
    assert (launch.flops, launch.dims) == (2 * 2 * 4 * 4 * 4, ProductDims(4, 4, 4))


@pytest.mark.parametrize(("masked", "pairs"), [(0.0, 16 * 17 // 2), (1.0, 16 * 16)])
def test_pairs_that_a_causal_mask_hides_are_computed_or_not(masked, pairs):
    s = Sketch()
    shape = (2, 3, 16, 4)
    given = [s.input(*shape) for _ in range(3)]
    out = s(aten._scaled_dot_product_flash_attention_for_cpu, *given, 0.0, True)
    slow = machine(peaks=(("float32", Peak(1e3)),), launch=0.0)
    timeline = s.run(out, hardware=dataclasses.replace(slow, masked=masked))
    assert timeline.seconds == pytest.approx(4 * 2 * 3 * pairs * 4 / 1e3)


def test_dtype_chooses_the_peak():
    peaks = (("float32", Peak(1e9)), ("bfloat16", Peak(1e10)))
    fast = machine(peaks=peaks, bandwidth=math.inf)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        s = Sketch()
        a, b = s.input(64, 64, dtype=dtype), s.input(64, 64, dtype=dtype)
        out = s.run(s(aten.mm, a, b), hardware=fast)
        found.append(round((out.seconds - LAUNCH) * 1e9 / (2 * 64**3), 6))
    assert found == [1.0, 0.1]


def test_light_ops_are_one_kernel_that_moves_what_enters_and_leaves():
    s = Sketch()
    x, y = s.input(8, 16), s.input(8, 16)
    a = s(aten.mul.Tensor, x, y)
    b = s(aten.relu, s(aten.add.Tensor, a, x))
    out = s.run(s(aten.sum.dim_IntList, b, [1]))
    assert kinds(out) == ["fused"]
    assert out.events[0].nodes == 4
    assert out.events[0].bytes == 4 * (128 + 128 + 8)
    assert out.seconds == LAUNCH + 4 * (128 + 128 + 8) * BYTE


def test_without_fusion_each_op_is_a_kernel():
    s = Sketch()
    x = s.input(8, 16)
    out = s.run(s(aten.relu, s(aten.neg, s(aten.permute, x, [1, 0]))), fused=False)
    assert kinds(out) == ["fused", "fused"]
    assert out.seconds == 4 * LAUNCH + 4 * 4 * 128 * BYTE


def test_what_a_product_reads_is_written_and_a_later_reader_joins():
    s = Sketch()
    x, w = s.input(8, 16), s.input(16, 4)
    a = s(aten.relu, x)
    out = s.run(s(aten.mm, a, w), s(aten.sum.dim_IntList, a, [0]))
    assert [(e.kind, e.name, e.nodes) for e in out.events] == [
        ("fused", "sum_dim_int_list", 2),
        ("contraction", "mm_default", 1),
    ]
    assert out.events[0].bytes == 4 * (128 + 128 + 16)


def test_a_later_reader_of_something_newer_does_not_join():
    s = Sketch()
    x, w = s.input(8, 8), s.input(8, 8)
    a = s(aten.relu, x)
    m = s(aten.mm, a, w)
    out = s.run(m, s(aten.add.Tensor, a, m))
    assert kinds(out) == ["fused", "contraction", "fused"]


def test_fusion_does_not_cross_a_wait():
    s = Sketch()
    x, y = s.input(8, 8), s.input(8, 8)
    sent = s.reduce(y)
    a = s(aten.relu, x)
    s(aten.mm, a, x)
    b = s(aten.mul.Tensor, a, s.wait(sent))
    out = s.run(b)
    assert kinds(out) == ["all_reduce", "fused", "contraction", "wait", "fused"]


def test_what_only_one_reader_needs_runs_with_it_after_the_wait():
    s = Sketch()
    x, y = s.input(8, 8), s.input(8, 8)
    sent = s.reduce(y)
    out = s.run(s(aten.mul.Tensor, s(aten.relu, x), s.wait(sent)))
    assert kinds(out) == ["all_reduce", "wait", "fused"]


@pytest.mark.parametrize(
    ("first", "second", "kernels"),
    [
        ([1], [1], 1),  # a norm: rows, and again rows
        ([1], [0], 2),  # rows, then columns
        ([0, 1], [1], 2),
    ],
)
def test_reductions_share_a_kernel_if_they_reduce_alike(first, second, kernels):
    s = Sketch()
    x = s.input(8, 16)
    mean = s(aten.mean.dim, x, first, True)
    y = s(aten.sub.Tensor, x, mean)
    out = s.run(s(aten.sum.dim_IntList, s(aten.mul.Tensor, y, y), second))
    assert len(out.events) == kernels


def test_a_long_sum_ends_its_kernel():
    s = Sketch()
    x = s.input(1 << 16)
    total = s(aten.sum.dim_IntList, x, [0])
    assert kinds(s.run(s(aten.div.Tensor, x, total))) == ["fused", "fused"]


def test_a_reduced_value_joins_what_has_its_rows_or_its_points():
    for width, kernels in ((1, 1), (16, 1), (32, 2)):
        s = Sketch()
        total = s(aten.sum.dim_IntList, s.input(8, 16), [1], True)
        out = s.run(s(aten.mul.Tensor, s.input(8, width), total))
        assert len(out.events) == kernels


def test_rows_of_scans_are_whole():
    for dim, kernels in ((1, 1), (0, 2)):
        s = Sketch()
        y = s(aten.cumsum, s.input(8, 16), 1)
        assert len(s.run(s(aten.sum.dim_IntList, y, [dim])).events) == kernels


def test_constants_are_made_by_every_kernel_that_needs_them():
    s = Sketch()
    x, one = s.input(8, 8), s(aten.full, [8, 8], 1.0)
    a = s(aten.add.Tensor, x, one)
    b = s(aten.add.Tensor, s(aten.mm, a, a), one)
    out = s.run(b, s(aten.mm, one, b))
    assert kinds(out) == ["fused", "contraction", "fused", "fused", "contraction"]
    assert [e.bytes // 256 for e in out.events] == [2, 2, 2, 1, 3]


def test_what_changes_an_operand_needs_no_memory_of_its_own():
    s = Sketch()
    x, y = s.input(8, 8), s.input(8, 8)
    out = s.run(s(aten.copy_, x, s(aten.neg, y)))
    assert kinds(out) == ["fused", "alone"]
    assert [n for _, n in out.memory] == [768, 512]


def test_softmax_is_one_kernel():
    s = Sketch()
    x = s.input(8, 16)
    most = s(aten.amax, x, [1], True)
    e = s(aten.exp, s(aten.sub.Tensor, x, most))
    total = s(aten.sum.dim_IntList, e, [1], True)
    out = s.run(s(aten.div.Tensor, e, total))
    assert [(e.kind, e.bytes) for e in out.events] == [("fused", 4 * 256)]


def test_views_slices_lookups_and_constants_move_what_they_show():
    s = Sketch()
    x, table, rows = s.input(8, 16), s.input(1000, 4), s.input(3, dtype=torch.int64)
    part = s(aten.slice.Tensor, x, 0, 0, 2)
    wide = s(aten.expand, s(aten.slice.Tensor, x, 0, 0, 1), [8, 16])
    one = s(aten.full, [8, 16], 1.0)
    found = s(aten.embedding, table, rows)
    shown = s(aten.add.Tensor, s(aten.mul.Tensor, wide, one), 1)
    out = s.run(s(aten.neg, part), shown, found)
    moved = {e.name: e.bytes for e in out.events}
    assert moved == {
        "neg_default": 4 * (32 + 32),
        "add_tensor": 4 * (8 * 16 + 8 * 16),  # never more than there is
        "embedding_default": 4 * (3 * 4 + 3 * 4) + 8 * 3,
    }


def test_a_kernel_reads_a_slice_once_and_what_nobody_reads_is_not_run():
    s = Sketch()
    part = s(aten.slice.Tensor, s.input(64, 16), 0, 0, 2)
    s(aten.exp, part)
    both = s(aten.add.Tensor, s(aten.neg, part), s(aten.sin, part))
    out = s.run(s(aten.mul.Tensor, both, part))
    assert [(e.nodes, e.bytes) for e in out.events] == [(4, 4 * (32 + 32))]


def test_a_broadcast_reads_no_more_than_there_is():
    s = Sketch()
    row = s.input(1, 16)
    out = s.run(s(aten.neg, s(aten.expand, row, [8, 16])))
    assert out.events[0].bytes == 4 * (16 + 128)


@pytest.mark.parametrize("strided", [False, True], ids=["view", "copy"])
def test_a_reshape_costs_where_it_copies(strided):
    s = Sketch()
    x, w = s.input(4, 8, 16), s.input(16, 4)
    if strided:
        x = s(aten.permute, x, [1, 0, 2])
    flat = s(aten.reshape, x, [32, 16])
    out = s.run(s(aten.mm, flat, w))
    assert kinds(out) == (["fused"] if strided else []) + ["contraction"]


def test_nothing_follows_writes_in_any_order():
    for alone in (True, False):
        s = Sketch()
        x, index = s.input(8, 16), s.input(8, 1, dtype=torch.int64)
        base = s(aten.neg, x) if alone else s(aten.full_like, x, 0.0)
        out = s.run(s(aten.neg, s(aten.scatter.value, base, 1, index, -1.0)))
        assert kinds(out) == ["fused"] * (1 + alone)


def test_ops_that_inductor_does_not_generate_run_alone():
    s = Sketch()
    x = s.input(8, 16)
    values = s.graph.call_function(aten.sort.default, (s(aten.neg, x),))
    values.meta["val"] = (x.meta["val"], x.meta["val"].to(torch.int64))
    first = s.graph.call_function(operator.getitem, (values, 0))
    first.meta["val"] = x.meta["val"]
    assert kinds(s.run(s(aten.neg, first))) == ["fused", "alone", "fused"]


# Streams


def overlapped(size: int, *, at_once: bool = False) -> Timeline:
    """An all-reduce of 256 bytes beside a product that takes ``size`` times as long."""
    s = Sketch()
    x, a, b = s.input(8, 8), s.input(10, 10), s.input(10, 10)
    sent = s.reduce(x)
    if at_once:
        done = s.wait(sent)
    m = s(aten.mm, a, b)
    if not at_once:
        done = s.wait(sent)
    hardware = machine(
        launch=0.0, bandwidth=math.inf, peaks=(("float32", Peak(2000 / size)),)
    )
    hardware = dataclasses.replace(hardware, levels=(Level(0, 256.0, 0.0, 0.0),))
    return s.run(done, m, hardware=hardware)


@pytest.mark.parametrize(
    ("size", "at_once", "seconds", "exposed", "hidden"),
    [
        (4, False, 4, 0, 1),  # behind the product
        (0.25, False, 1, 0.75, 0.25),  # longer than the product
        (4, True, 5, 1, 0),  # waited for at once
    ],
)
def test_communication_hides_behind_what_runs_until_the_wait(
    size, at_once, seconds, exposed, hidden
):
    out = overlapped(size, at_once=at_once)
    assert out.seconds == pytest.approx(seconds)
    assert out.compute_seconds == pytest.approx(size)
    assert out.communication_seconds == pytest.approx(1)
    assert out.exposed_seconds == pytest.approx(exposed)
    assert out.hidden_seconds == pytest.approx(hidden)


def collectives(*axes: str) -> Timeline:
    """All-reduces of 100 bytes along these axes, all called before the first wait."""
    s = Sketch()
    x = s.input(25)
    sent = [s.reduce(x, along) for along in axes]
    return s.run(*[s.wait(y) for y in sent])


@pytest.mark.parametrize(
    ("axes", "spans"),
    [
        (["dp", "dp"], [(0, 100), (100, 200)]),
        (["dp", "tp"], [(0, 100), (0, 100)]),
        (["dp", "dp+tp", "tp"], [(0, 100), (100, 250), (250, 350)]),
        (["dp+tp", "pp", "tp", "dp"], [(0, 150), (0, 100), (150, 250), (150, 250)]),
    ],
    ids=["one axis", "two axes", "shared in between", "shared"],
)
def test_collectives_take_turns_on_an_axis_they_share(axes, spans):
    out = collectives(*axes)
    assert list(where(out).values()) == spans
    assert out.seconds == pytest.approx(max(end for _, end in spans) * SEND)


def test_parts_of_an_axis_share_its_links():
    s = Sketch()
    mesh = Mesh.parse("x=4")
    v = s.input(25)
    sent = [s.reduce(v, axis) for axis in ("x:(1)2", "x:(2)2")]
    s.graph.output([s.wait(y) for y in sent])
    out = simulate(s.graph, machine().on(mesh), machine())
    assert list(where(out).values()) == [(0, 100), (100, 200)]


def test_a_collective_starts_when_all_launched_before_it_has_run():
    s = Sketch()
    x, a = s.input(25), s.input(4, 4)
    m = s(aten.mm, a, a)
    out = s.run(s.wait(s.reduce(x)), m)
    assert out.events[1].start == out.events[0].end > LAUNCH


def test_kinds_take_what_collectives_say_and_send_what_a_ring_sends():
    s = Sketch()
    x, group = s.input(4, 8), "fxpar:dp"
    made = [
        s(c10d.all_gather_into_tensor, x, 2, group),
        s(c10d.reduce_scatter_tensor, x, "sum", 2, group),
        s(c10d.all_to_all_single, x, [2, 2], [2, 2], group),
        s.reduce(x),
    ]
    out = s.run(*[s.wait(y) for y in made])
    sizes = {t.kind: (t.calls, t.bytes, t.sent) for t in out.traffic}
    assert sizes == {
        "all_gather": (1, 256, 128),
        "reduce_scatter": (1, 128, 64),
        "all_to_all": (1, 128, 64),
        "all_reduce": (1, 128, 128),
    }
    assert {e.kind: e.bytes for e in out.events if e.axes} == {
        kind: nbytes for kind, (_, nbytes, _) in sizes.items()
    }
    assert out.sent == {"dp": 128 + 64 + 64 + 128}
    spans = [b - a for a, b in where(out).values()]
    assert spans == [128, 64, 64, 128]


def test_a_permute_is_waited_for_where_it_is_read():
    s = Sketch()
    x, a = s.input(8, 8), s.input(8, 8)
    moved = s(ours.permute, x, [1, 0], "fxpar:dp")
    m = s(aten.mm, a, a)
    out = s.run(s(aten.add.Tensor, s(aten.view, moved, [8, 8]), m))
    assert kinds(out) == ["permute", "contraction", "wait", "fused"]
    assert out.events[2].of == "permute_default"


def test_gathers_on_cpu_and_coalesced_ones_are_waited_for():
    s = Sketch()
    x, y = s.input(4, 8), s.input(2, 2)
    made = s.wait(s(ours.all_gather_into_tensor, x, 2, "fxpar:dp"))
    pair = s(c10d.all_reduce_coalesced, [x, y], "sum", "fxpar:tp")
    parts = []
    for i in range(2):
        part = s.graph.call_function(operator.getitem, (pair, i))
        part.meta["val"] = pair.meta["val"][i]
        parts.append(s.wait(part))
    out = s.run(s(aten.neg, made), *parts)
    assert kinds(out) == ["all_gather", "wait", "all_reduce", "wait", "fused"]
    assert [t.bytes for t in out.traffic] == [256, 128 + 16]


def test_what_cannot_be_simulated_is_refused():
    s = Sketch()
    x = s.input(4)
    s.graph.output((s.wait(s(c10d.broadcast, x, 0, "fxpar:dp")),))
    with pytest.raises(PlanError, match="cannot simulate"):
        simulate(s.graph, MESH, machine())
    s = Sketch()
    s.graph.output((s.wait(s(c10d.all_reduce, s.input(4), "sum", "7")),))
    with pytest.raises(PlanError, match="names no mesh axes"):
        simulate(s.graph, MESH, machine())


def test_an_empty_step_takes_no_time():
    s = Sketch()
    out = s.run(s.input(4))
    assert (out.seconds, out.events, out.peak_bytes) == (0.0, (), 16)


# Memory


def test_memory_by_hand():
    s = Sketch()
    x, w = s.input(10, 10), s.input(10, 10)  # 400 bytes each, throughout
    a = s(aten.mm, x, w)  # 400
    sent = s.reduce(a)  # in its place: nobody else reads it
    b = s(aten.mm, w, w)  # 400
    c = s(aten.relu, s(aten.neg, b))  # neg is never in memory
    d = s(aten.mm, c, s.wait(sent))  # 400
    out = s.run(s(aten.sum.dim_IntList, d, [0]))
    # With the first product 1200; second product; relu; the second product gone, and d;
    # relu and what was sent gone, and the sum; d gone.
    assert [n for _, n in out.memory] == [1200, 1600, 2000, 2000, 1240, 840]
    assert [t for t, _ in out.memory] == [e.start for e in out.events if not e.axes][
        :3
    ] + [e.start for e in out.events[-2:]] + [out.seconds]
    assert out.peak_bytes == 2000
    assert {h.name for h in out.held} == {
        *("x0", "x1", "all_reduce_default", "mm_default_1", "relu_default")
    }


def test_a_reduction_is_in_place_where_nobody_else_reads_its_operand():
    def peak(fused: bool = True, *, again: bool = False, given: bool = False) -> int:
        s = Sketch()
        x = s.input(10, 10)
        a = x if given else s(aten.mm, x, x)
        y = s.wait(s.reduce(a))
        out = s(aten.mm, y, a) if again else s(aten.sum.dim_IntList, y, [0])
        return s.run(out, fused=fused).peak_bytes

    assert peak() == 840  # the input, the operand that becomes its sum, the result
    assert peak(fused=False) == 1200  # the input, the operand, its sum
    assert peak(again=True) == 1600  # and the product
    assert peak(given=True) == 840  # an input is never written over


def test_a_sum_of_parts_is_in_place_where_nobody_else_reads_the_sum_so_far():
    def peak(fused: bool = True, *, again: bool = False, given: bool = False) -> int:
        s = Sketch()
        x = s.input(10, 10)
        a = x if given else s(aten.mm, x, x)
        y = s(ours.accumulate_product, a, x, x)
        z = s(ours.accumulate, y, x)
        out = s(aten.mm, z, a) if again else z
        return s.run(out, fused=fused).peak_bytes

    assert peak() == 800  # the input, the sum
    assert peak(fused=False) == 1200  # the input, the sum so far, the next
    assert peak(again=True) == 1600  # and the product
    assert peak(given=True) == 800  # an input is never written over


def test_views_keep_what_they_look_at_and_outputs_stay():
    s = Sketch()
    x = s.input(10, 10)
    a = s(aten.mm, x, x)
    v = s(aten.view, s(aten.permute, a, [1, 0]), [10, 10])
    b = s(aten.mm, x, x)
    c = s(aten.mm, b, v)
    out = s.run(b, c)
    assert [n for _, n in out.memory] == [800, 1200, 1600, 1200]
    s = Sketch()
    x = s.input(10, 10)
    a = s(aten.mm, x, x)
    out = s.run(s(aten.mm, a, a), s(aten.view, a, [100]))
    assert out.memory[-1][1] == 1200


def test_the_largest_at_the_peak_come_with_their_lines():
    s = Sketch()
    small = [s.input(i + 1) for i in range(12)]
    a = s.input(10, 10)
    m = s(aten.mm, a, a)
    m.meta["stack_trace"] = '  File "train.py", line 7, in loss\n    y = a @ a\n'
    out = s.run(m, *small)
    assert [(h.name, h.bytes) for h in out.held[:2]] == [("x12", 400), (m.name, 400)]
    assert out.held[1].line == out.events[0].line == "train.py:7: y = a @ a"
    assert len(out.held) == 10


# Forward and backward


def joint(*, tag: bool = False) -> fx.Graph:
    """A gathered weight, a product, an activation, and their backward."""
    s = Sketch()
    w, x, g = s.input(4, 8), s.input(8, 8), s.input(8, 8, name="tangents_")
    gathered = s(c10d.all_gather_into_tensor, w, 2, "fxpar:dp")
    whole = s.wait(gathered)
    for node in (gathered, whole):
        if tag:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    h = s(aten.mm, x, whole)
    y = s(aten.relu, s(aten.mul.Tensor, h, 2.0))
    on = s(aten.gt.Scalar, y, 0)
    on.meta["partitioner_tag"] = "is_backward"
    gh = s(aten.mul.Tensor, s(aten.mul.Tensor, g, on), 2.0)
    gx = s(aten.mm, gh, s(aten.permute, whole, [1, 0]))
    gw = s(aten.mm, s(aten.permute, x, [1, 0]), gh)
    part = s(c10d.reduce_scatter_tensor, gw, "sum", 2, "fxpar:dp")
    s.graph.output((y, s.wait(part), gx))
    s.graph.lint()
    return s.graph


def test_the_backward_begins_where_tangents_are_read():
    out = simulate(joint(), machine().on(MESH), machine())
    (first,) = (e for e in out.events if e.start == out.backward)
    assert (first.name, first.nodes) == ("mul_tensor_2", 3)
    names = [e.name for e in out.events if e.start < out.backward]
    assert "mm_default" in names and "mm_default_1" not in names
    # Kept for the backward, and so of the forward, the mask is part of a kernel there.
    out = simulate(as_run(joint()), machine().on(MESH), machine())
    (first,) = (e for e in out.events if e.start == out.backward)
    assert (first.name, first.nodes) == ("mul_tensor_2", 2)
    s = Sketch()
    assert s.run(s(aten.neg, s.input(4))).backward is None


def test_a_forward_is_copied_once():
    """And a backward twice: each candidate for a schedule is parted anew."""
    graph = joint()
    names = [node.name for node in graph.nodes]
    copy_node = fx.Graph.node_copy
    with mock.patch.object(
        fx.Graph, "node_copy", autospec=True, side_effect=copy_node
    ) as copy:
        run = as_run(graph, disable={"bucket", "prefetch"})
    made = Counter(call.args[1].target for call in copy.call_args_list)
    assert (made[aten.relu.default], made[c10d.reduce_scatter_tensor.default]) == (1, 2)
    assert names == [node.name for node in graph.nodes]  # it stays as it is
    kept = {id(node.meta) for node in graph.nodes}
    assert kept.isdisjoint(id(node.meta) for node in run.nodes)


def test_what_is_computed_again_is_named_so():
    names = {node.name for node in as_run(joint(tag=True)).nodes}
    again = {name for name in names if name.endswith("_again")}
    gather = "all_gather_into_tensor_default"
    assert again == {f"{gather}_again", "wait_tensor_default_again"}
    assert {gather, "mm_default", "mm_default_1", "mm_default_2"} <= names


def test_tagged_values_are_made_again_in_the_backward():
    for tag, gathers in ((False, 1), (True, 2)):
        graph = as_run(joint(tag=tag), disable={"prefetch"})
        out = simulate(graph, machine().on(MESH), machine())
        started = [e.start for e in out.events if e.kind == "all_gather"]
        assert len(started) == gathers
        assert (started[-1] >= out.backward) == tag


@pytest.mark.parametrize("phase", [None, "update"])
def test_gradients_of_a_training_step_are_joined(phase: str | None):
    """Its one graph has its backward inside."""
    s = Sketch()
    updated = []
    for _ in range(2):
        w = s.input(4, 4)
        gradient = s.wait(s.reduce(s(aten.mm, w, w)))
        updated.append(s(aten.sub.Tensor, w, gradient))
        updated[-1].meta["custom"] = {"fxpar_phase": phase} if phase else {}
    s.graph.output(tuple(updated))
    out = simulate(as_run(s.graph), machine().on(MESH), machine())
    assert kinds(out).count("all_reduce") == (1 if phase else 2)


def test_what_is_kept_for_the_backward_weighs_least():
    graph = as_run(joint())
    late = {n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_backward"}
    kept = {n.target for n in graph.nodes if n not in late and late & set(n.users)}
    placeholders = {n.target for n in graph.nodes if n.op == "placeholder"}
    # Of y = relu(2 h) the backward reads a mask of a byte an element.
    gathered = c10d.wait_tensor.default
    assert kept - placeholders == {aten.gt.Scalar, gathered}


def given(s: Sketch, y: Any, back: Any) -> set[str]:
    """What a forward of result ``y`` keeps for a backward of result ``back``."""
    s.graph.output((y, back))
    graph = as_run(s.graph)
    tags = {n: n.meta["partitioner_tag"] for n in graph.nodes if n.op != "output"}
    late = {n for n, tag in tags.items() if tag == "is_backward"}
    return {
        n.name
        for n in tags
        if n not in late and n.op != "placeholder" and not late.isdisjoint(n.users)
    }


def test_light_values_are_computed_again_from_what_is_kept_anyway():
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    h = s(aten.mm, x, x)
    wide = s(aten.mul.Tensor, h, s(aten.sigmoid, h))
    back = s(aten.mm, s(aten.mul.Tensor, g, wide), h)
    assert given(s, s(aten.mm, wide, wide), back) == {"mm_default"}


def test_sums_of_two_values_are_kept_themselves():
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    y = s(aten.add.Tensor, s(aten.mm, x, x), s(aten.mm, x, s(aten.neg, x)))
    assert given(s, y, s(aten.mul.Tensor, g, y)) == {"add_tensor"}
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    before = s(aten.mm, x, x)
    after = s(aten.add.Tensor, before, s(aten.mm, before, x))
    back = s(aten.mul.Tensor, s(aten.mul.Tensor, g, after), before)
    assert given(s, after, back) == {"mm_default", "add_tensor"}


def test_of_functions_of_one_value_that_one_is_kept():
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    h = s(aten.mm, x, x)
    one, other = s(aten.sin, h), s(aten.cos, h)
    back = s(aten.mul.Tensor, s(aten.mul.Tensor, g, one), other)
    assert given(s, s(aten.mm, one, other), back) == {"mm_default"}


def test_what_a_product_of_the_backward_reads_is_kept():
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    a = s(aten.relu, x)
    y = s(aten.mm, a, x)
    assert given(s, y, s(aten.mm, g, s(aten.permute, a, [1, 0]))) == {"relu_default"}
    assert given_relu_read_lightly() == set()


def given_relu_read_lightly() -> set[str]:
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    a = s(aten.relu, x)
    return given(s, s(aten.mm, a, x), s(aten.mul.Tensor, g, a))


def test_long_chains_are_not_computed_again():
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    a = x
    for _ in range(40):
        a = s(aten.add.Tensor, s(aten.sin, a), x)
    kept = given(s, s(aten.mm, a, x), s(aten.mul.Tensor, g, a))
    assert 0 < len(kept) < 8


def test_chains_are_counted_from_what_is_kept():
    s = Sketch()
    x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
    a = x
    for _ in range(12):
        a = s(aten.sin, a)
    b = a
    for _ in range(10):
        b = s(aten.mul.Tensor, b, a)
    back = s(aten.mul.Tensor, s(aten.mm, g, a), b)
    assert given(s, s(aten.mm, b, x), back) == {a.name}


def test_the_user_says_what_is_kept():
    for policy, kept in (
        (CheckpointPolicy.MUST_SAVE, {"relu_default"}),
        (CheckpointPolicy.PREFER_RECOMPUTE, set()),
    ):
        s = Sketch()
        x, g = s.input(8, 8), s.input(8, 8, name="tangents_")
        a = s(aten.relu, x)
        a.meta["recompute"] = policy
        b = s(aten.mm, g, a) if not kept else s(aten.mul.Tensor, g, a)
        assert given(s, s(aten.mm, a, x), b) == kept


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)]
    return nn.Sequential(*layers).double(), torch.randn(8, 8, dtype=torch.float64)


def resting(model: nn.Module, mesh: Mesh, *args: Any) -> TracedPlan:
    """A plan of a model whose parameters lie split over all of the mesh."""
    call = TracedCall(model, args, {}, True)
    module, mode = call.trace()

    def make_input(kind: str, payload: Any, node: fx.Node) -> Any:
        made = call.declare(kind, payload, node, [None] * call.count)
        if kind != "parameter":
            return made
        rest = Spec.of([mesh.names, *[()] * (node.meta["val"].dim() - 1)])
        return dataclasses.replace(made, at_rest=rest)

    def make_output(kind: str, name: str, of: int | None) -> Output:
        return Output(name, kind, of)

    signature = read_signature(module.graph, make_input, make_output)
    result = fastest_plan(module.graph, mode, Request(mesh, signature))
    return TracedPlan(
        **asdict_shallow(result.plan), result=result, call=call, module=module
    )


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4"])
@pytest.mark.parametrize("rest", [False, True], ids=["whole", "resting"])
def test_as_run_computes_the_same(mesh, rest):
    model, x = mlp()
    parsed = Mesh.parse(mesh)
    if rest:
        plan = resting(model, parsed, x)
    else:
        plan = fxpar.plan(model, x, mesh=parsed, grad=True)
    before = str(plan.result.local)
    graph = as_run(plan.result.local)
    assert str(plan.result.local) == before, "the graph is left as it was"
    result = dataclasses.replace(plan.result, graph=graph)
    moved = dataclasses.replace(plan, result=result)
    torch.testing.assert_close(moved.simulate(x), plan.reference(x))


def by_kind(records: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for record in records:
        out[record.kind] = out.get(record.kind, 0) + record.bytes
    return out


def test_resting_parameters_are_gathered_for_forward_and_backward():
    model, x = mlp()
    plan = resting(model, Mesh.parse("dp=4"), x)
    graph = as_run(plan.result.local)
    out = simulate(graph, machine().on(plan.mesh), machine())
    assert by_kind(out.traffic) == by_kind(plan.collectives)
    assert by_kind(out.traffic)["all_gather"] > 0
    graph = as_run(plan.result.local, disable={"bucket"})
    apart = simulate(graph, machine().on(plan.mesh), machine())
    calls, more = ({t.kind: t.calls for t in line.traffic} for line in (out, apart))
    assert more == Counter(c.kind for c in plan.collectives)
    assert all(calls[kind] < more[kind] for kind in ("all_gather", "all_reduce"))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_llama_sends_what_its_plan_says(grad, monkeypatch):
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    model, batch = build_loss("llama")
    hints = {"*.q_proj.weight": ("tp", None), "*.o_proj.weight": (None, "tp")}
    plan = fxpar.plan(model, mesh="dp=2,tp=2", hints=hints, grad=grad, **batch)
    line, predicted = plan.timeline, plan.predicted
    assert by_kind(line.traffic) == by_kind(plan.collectives) != {}
    assert dict(predicted.sent) == line.sent
    assert predicted.seconds == line.seconds > line.compute_seconds > 0
    total = predicted.compute + predicted.exposed
    assert predicted.seconds == pytest.approx(total)
    parameters = sum(p.numel() * 4 for p in model.parameters()) // 2
    assert parameters < predicted.peak_bytes < 20 * parameters
    assert (line.backward is not None) == grad
    text = str(predicted)
    assert "a step on h100" in text and "over dp" in text and "over tp" in text
    products = [e for e in line.events if e.kind == "contraction"]
    # 7 products and attention a layer, the head; thrice with the backward, in which
    # attention is one.
    assert len(products) == (2 * (3 * 7 + 2) + 3 if grad else 2 * 8 + 1)
    light = sum(n.op == "call_function" for n in plan.result.local.nodes)
    assert len(line.events) < light / 3


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpt2", "bert", "vit")
        ),
        "resnet",
    ],
)
def test_models_send_what_their_plans_say(name, monkeypatch):
    monkeypatch.setenv("FXPAR_HARDWARE", "a100")
    model, batch = build_loss(name)
    plan = fxpar.plan(model, mesh="dp=2,tp=2", grad=True, **batch)
    assert by_kind(plan.timeline.traffic) == by_kind(plan.collectives) != {}
    assert {e.kind for e in plan.timeline.events} >= {"fused", "contraction", "wait"}


def test_faster_links_and_memory_are_never_slower():
    model, x = mlp()
    graph = as_run(fxpar.plan(model, x, mesh="dp=2,tp=2", grad=True).result.local)
    rng = random.Random(0)
    mesh = Mesh.parse("dp=2,tp=2")
    for _ in range(20):
        slow = machine(
            launch=rng.choice([0.0, 1e-6]),
            bandwidth=10 ** rng.uniform(6, 10),
            levels=(Level(0, 10 ** rng.uniform(6, 10), 1e-6, 1e-6),),
        )
        (level,) = slow.levels
        times = [simulate(graph, slow.on(mesh), slow).seconds]
        for changed in (
            {"bandwidth": 2 * slow.bandwidth},
            {"levels": (dataclasses.replace(level, bandwidth=3 * level.bandwidth),)},
            {"levels": (dataclasses.replace(level, latency=0.0),)},
            {"peaks": (("float32", Peak(1e14)),)},
        ):
            fast = dataclasses.replace(slow, **changed)
            times.append(simulate(graph, fast.on(mesh), fast).seconds)
        assert all(t <= times[0] for t in times[1:])
        assert min(times[1:]) < times[0]


# Simulation


def random_tasks(rng: random.Random, count: int) -> list[Task]:
    tasks: list[Task] = []
    waiting: list[int] = []
    for i in range(count):
        kind = rng.random()
        if kind < 0.25:
            axes = tuple(rng.sample(["a", "b", "c", "a:(1)2"], rng.randint(1, 2)))
            tasks.append(Task(f"t{i}", rng.choice([0.0, 1.0, rng.random() * 5]), axes))
            waiting.append(i)
        elif kind < 0.5 and waiting:
            of = waiting.pop(rng.randrange(len(waiting)))
            tasks.append(Task(f"t{i}", of=of))
        else:
            tasks.append(Task(f"t{i}", rng.choice([0.0, 1.0, rng.random()])))
    return tasks


def by_events(tasks: list[Task]) -> list[tuple[float, float]]:
    """Start and end of each task, from what each has to wait for."""
    spans: list[tuple[float, float]] = []
    for i, task in enumerate(tasks):
        compute = [j for j in range(i) if not tasks[j].axes]
        ready = max((spans[j][1] for j in compute), default=0.0)
        if task.of is not None:
            spans.append((ready, max(ready, spans[task.of][1])))
            continue
        if task.axes and task.seconds:
            mine = {axis.split(":")[0] for axis in task.axes}
            for j in range(i):
                theirs = {axis.split(":")[0] for axis in tasks[j].axes}
                if mine & theirs and tasks[j].seconds:
                    ready = max(ready, spans[j][1])
        spans.append((ready, ready + task.seconds))
    return spans


def spans_of(simulation: Simulation) -> list[tuple[float, float]]:
    return list(map(tuple, zip(simulation.starts, simulation.ends, strict=True)))


def test_tasks_run_as_what_each_waits_for_says() -> None:
    rng = random.Random(1)
    for _ in range(60):
        tasks = random_tasks(rng, rng.randint(1, 60))
        simulation = Simulation(tasks)
        assert spans_of(simulation) == by_events(tasks)
        assert simulation.seconds == max(end for _, end in by_events(tasks))
    assert Simulation([]).seconds == 0.0


def test_kernels_of_light_ops_count_what_they_do():
    s = Sketch()
    x = s.input(100, 30)
    drawn = s(
        ours.random, [100, 30], s.input(dtype=torch.int64), "rand", [100, 30], [0, 0]
    )
    y = s(aten.mul.Tensor, s(aten.exp, s(aten.mul.Tensor, x, 2.0)), drawn)
    rates = (("step", 1e2), ("exp", 1e1), ("draw", 1e0))
    out = s.run(
        s(aten.sum.dim_IntList, y, [1]), hardware=machine(launch=0.0, light=rates)
    )
    # Two products and a sum of 3000 elements, an exponential and a draw of each.
    assert out.compute_seconds == pytest.approx(3 * 30 + 300 + 3000)
    s = Sketch()
    found = s(aten.erf, s(aten.div.Tensor, s.input(8), s.input(8)))
    rates = (("root", 1.0), ("erf", 0.5))
    out = s.run(found, hardware=machine(launch=0.0, light=rates))
    assert out.compute_seconds == pytest.approx(8 + 16)
    assert {facts["work"] for facts in FACTS.values() if "work" in facts} < set(LIGHT)


def test_pools_do_something_with_each_element_of_each_window():
    """Forward and backward, of which one gives and the other reads what is smaller."""
    windows = [3, 2, 1], [2, 2, 1], [1, 1, 0], [1, 1, 1], False
    s = Sketch()
    x, smaller = s.input(4, 8, 16, 16, 2), 4 * 8 * 8 * 9 * 2
    pooled = s(aten.max_pool3d_with_indices, x, *windows)
    most, places = (s(operator.getitem, pooled, i) for i in range(2))
    assert math.prod(most.meta["val"].shape) == smaller
    back = s(aten.max_pool3d_with_indices_backward, most, x, *windows, places)
    s.graph.output((most, back))
    counts = [x.light["pool"] for x in launches_of(s.graph).launches]
    assert sum(counts) == 2 * 6 * smaller


@pytest.mark.parametrize("beside", [0.0, 0.25, 1.0])
def test_collectives_may_hold_kernels_up(beside):
    """Of D seconds beside C of kernels, a share of D is lost, the rest is hidden."""
    hardware = machine(beside=beside, launch=0.0, bandwidth=1e7)
    lines = []
    for n in (1, 3000):
        s = Sketch()
        x, y = s.input(1000, 1000), s.input(n, n)
        sent = s.reduce(x)
        made = s(aten.neg, y)
        lines.append(s.run(s.wait(sent), made, hardware=hardware))
    for line in lines:
        sent = line.communication_seconds
        assert sent == pytest.approx(4e6 * SEND)
        kernels, rest = line.compute_seconds, (1 - beside) * sent
        assert line.seconds == pytest.approx(beside * sent + max(kernels, rest))
        assert line.exposed_seconds == pytest.approx(line.seconds - kernels)
        by_kind = {event.kind: event for event in line.events}
        assert by_kind["all_reduce"].duration == pytest.approx(sent)
        assert by_kind["all_reduce"].start == 0.0
        assert by_kind["fused"].start == pytest.approx(beside * sent)
    assert lines[0].compute_seconds < 1e-3 and lines[1].compute_seconds > 4.0


def test_ops_that_give_nothing_are_timed() -> None:
    """An assertion in the graph, as one_hot leaves one."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x, 4)

    plan = fxpar.plan(program, torch.tensor([0, 1, 2]), mesh="dp=2", mode="replicate")
    assert plan.predicted.seconds > 0
