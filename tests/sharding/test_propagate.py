"""Propagation on small programs: what flows where, in which order, and why."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar import FxparError, Spec
from fxpar.errors import FxparWarning, HintError
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Op
from fxpar.sharding.propagate.propagation import (
    ALL,
    KEPT,
    LEVELS,
    PASS,
    TURN,
    Propagation,
)
from tests.helpers.mixture import mixture
from tests.helpers.random_programs import Case


def planned(fn, *args, **options):
    return fxpar.plan(fn, *args, mode="propagate", **options)


def test_axes_flow_forward_and_backward_through_pointwise_ops():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plan = planned(
        lambda x, y: torch.exp(x) + y.sin(),
        x,
        y,
        mesh="a=2,b=2",
        in_specs=[("a", None), None],
    )
    assert plan.inputs == (Spec("a", None), Spec("a", None))
    assert plan.outputs == (Spec("a", None),)
    assert not plan.collectives


def test_an_output_spec_flows_back_to_the_inputs():
    x = torch.randn(8, 4)
    plan = planned(lambda x: (x * 2).T, x, mesh="a=2,b=2", out_specs=[("b", "a")])
    assert plan.inputs == (Spec("a", "b"),)
    assert not plan.collectives


def test_views_split_and_merge_major_factors():
    x = torch.randn(4, 6, 8)
    plan = planned(
        lambda x: x.reshape(24, 8).reshape(4, 3, 2, 8),
        x,
        mesh="a=2",
        in_specs=[("a", None, None)],
    )
    assert plan.outputs == (Spec("a", None, None, None),)
    assert not plan.collectives


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", "ep=2,dp=2"])
def test_tokens_that_go_to_experts_stay_split_over_the_other_axis(mesh):
    """Whichever axis the mesh names first."""
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    x, scores, up, down = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((64, 16), (64, 8), (8, 16, 32), (8, 32, 16))
    )
    plan = planned(mixture, x, scores, up, down, mesh=mesh)
    assert plan.inputs[0] == Spec(("dp", "ep"), None)
    assert {axis for each in plan.collectives for axis in each.axes} == {"ep"}
    assert sum(each.bytes for each in plan.collectives) == 2 * 32 * (16 + 1) * 8
    got, want = plan.simulate(x, scores, up, down), mixture(x, scores, up, down)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("rows", "width", "axes"), [(201, 256, ("dp",)), (11, 16, ())], ids=["many", "few"]
)
def test_rows_of_experts_are_split_where_samples_make_no_shards(
    rows, width, axes, monkeypatch
):
    """Three samples over two ranks; few rows take less time to compute than to send."""
    pytest.importorskip("transformers.integrations.moe")
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    torch.manual_seed(0)
    shapes = (
        (3, rows, width),
        (3, rows, 8),
        (8, width, 2 * width),
        (8, 2 * width, width),
    )
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def of_samples(x, scores, up, down):
        tokens = x.tanh().flatten(0, 1), scores.flatten(0, 1)
        return mixture(*tokens, up, down).view_as(x)

    plan = planned(of_samples, *given, mesh="dp=2")
    products = [op for op in plan.result.decision.program.ops if "expert_mm" in op.name]
    assert {plan.spec(op.name).dims[0] for op in products} == {axes}
    torch.testing.assert_close(plan.simulate(*given), of_samples(*given))


class SequenceFirst(nn.Module):
    """Attention on [sequence, batch, features], as XLNet writes it."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(4, 16, 4, 8, dtype=torch.float64)
        self.weights = nn.ParameterList([*weights])
        self.embed = nn.Embedding(64, 16, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids.t())
        *weights, out = self.weights
        q, k, v = (torch.einsum("ibh,hnd->ibnd", x, w) for w in weights)
        scores = torch.einsum("ibnd,jbnd->bnij", q, k).softmax(3)
        heads = torch.einsum("bnij,jbnd->ibnd", scores, v)
        return torch.einsum("ibnd,hnd->ibh", heads, out) + x


def test_a_batch_behind_the_sequence_stays_split_and_so_do_heads():
    ids = torch.randint(0, 64, (4, 16))
    model = SequenceFirst()
    plan = planned(model, ids, mesh="dp=2,tp=2")
    assert plan.outputs == (Spec(None, "dp", None),)
    assert dict(plan.parameters)["weights.3"] == Spec(None, "tp", None)
    assert [(c.kind, c.axes, c.bytes) for c in plan.collectives] == [
        ("all_reduce", ("tp",), 16 * 2 * 16 * 8)
    ]
    torch.testing.assert_close(plan.simulate(ids), model(ids))


def test_that_a_batch_ends_in_a_merged_dim_is_noted():
    x = torch.randn(4, 6)
    plan = planned(lambda x: (x * 2).t().reshape(24).sin(), x, mesh="dp=2")
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    (note,) = [note for note in plan.notes if "cannot be split over dp" in note]
    assert "dim 0 of [24]" in note and "batch dim of x" in note


def test_that_a_parameter_over_the_batch_s_axis_ends_in_a_view_is_not_noted():
    layer, x = nn.Linear(12, 36), torch.randn(4, 12)
    hints = {"layer.weight": ("dp", None), "layer.bias": ("dp",)}
    plan = planned(lambda x: layer(x).chunk(3, -1), x, mesh="dp=2", hints=hints)
    assert plan.outputs[0] == Spec("dp", None)
    assert not [note for note in plan.notes if "cannot be split" in note]


def test_a_minor_factor_of_a_merged_dim_is_gathered_not_mixed_up():
    x = torch.randn(4, 8)
    plan = planned(lambda x: x.reshape(32) + 1, x, mesh="a=2", in_specs=[(None, "a")])
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def test_a_small_operand_does_not_decide_for_a_large_one():
    """The batch of x outranks an axis that only a bias carries."""
    x, bias = torch.randn(8, 8), torch.randn(8)
    plan = planned(
        lambda x, bias: x + bias, x, bias, mesh="a=2", in_specs=[("a", None), ("a",)]
    )
    assert plan.outputs == (Spec("a", None),)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 32)]


def test_the_batch_keeps_its_axis_where_a_weight_wants_it_too():
    x, w = torch.randn(8, 16), torch.randn(16, 64)
    plan = planned(
        torch.matmul, x, w, mesh="dp=4", in_specs=[("dp", None), (None, "dp")]
    )
    assert plan.outputs == (Spec("dp", None),)
    assert [c.kind for c in plan.collectives] == ["all_gather"]


@pytest.mark.parametrize(
    ("axis", "sent"),
    [
        ("x", {"all_to_all": 12288, "reduce_scatter": 32768}),
        ("dp", {"all_gather": 3 << 20}),
    ],
)
def test_an_axis_not_named_for_the_batch_moves_where_that_is_cheaper(axis, sent):
    """A small left operand goes to the rows of a large right one, which stay; of an
    axis that is named for the batch the batch stays."""
    a = torch.randn(8, 768, dtype=torch.float64)
    b = torch.randn(512, 768, dtype=torch.float64)
    lie = [(axis, None), (None, axis)]
    plan = planned(lambda a, b: a @ b.t(), a, b, mesh=f"{axis}=4", in_specs=lie)
    assert {c.kind: c.bytes for c in plan.collectives} == sent
    torch.testing.assert_close(plan.simulate(a, b), plan.reference(a, b))


def test_axes_that_two_operands_swap_go_by_one_permute():
    a, b = torch.randn(128, 8), torch.randn(128, 8)
    lie = [("x", "y"), ("y", "x")]
    plan = planned(lambda a, b: a + b, a, b, mesh="x=2,y=2", in_specs=lie)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("permute", 1024)]
    torch.testing.assert_close(plan.simulate(a, b), plan.reference(a, b))


@pytest.mark.parametrize(
    ("k", "sent"),
    [
        (8, {"all_gather": (512 * 8 + 4 * 1024 + 8 * 1024) * 8}),
        (512, {"all_gather": 256 * 1024 * 8, "all_reduce": 512 * 1024 * 8}),
    ],
)
def test_few_rows_are_gathered_where_their_product_is_large(k, sent):
    """Axes are swapped between operands."""
    a = torch.randn(1024, k, dtype=torch.float64)
    b = torch.randn(k, 1024, dtype=torch.float64)
    lie = [("x", "y"), ("y", "x")]
    plan = planned(torch.matmul, a, b, mesh="x=2,y=2", in_specs=lie)
    kinds: dict[str, int] = {}
    for each in plan.collectives:
        kinds[each.kind] = kinds.get(each.kind, 0) + each.bytes
    assert kinds == sent
    torch.testing.assert_close(plan.simulate(a, b), plan.reference(a, b))


@pytest.mark.parametrize(("axis", "kind"), [("x", "all_gather"), ("dp", "all_reduce")])
def test_sums_over_what_is_named_for_the_batch_are_reduced(axis, kind):
    a, b = torch.randn(8, 1024), torch.randn(8, 1024)
    lie = [(axis, None), (axis, None)]
    plan = planned(lambda a, b: a.t() @ b, a, b, mesh=f"{axis}=4", in_specs=lie)
    assert {c.kind for c in plan.collectives} == {kind}


def test_a_sum_that_goes_into_a_smaller_one_is_left_partial():
    a, b = torch.randn(1024, 8), torch.randn(8, 1024)
    lie = [(None, "x"), ("x", None)]
    plan = planned(lambda a, b: (a @ b).sum(), a, b, mesh="x=4", in_specs=lie)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_reduce", 4)]


@pytest.mark.parametrize(
    ("columns", "sent"), [(64, 128 * 8), (1, 128 * 4)], ids=["wide", "narrow"]
)
def test_rows_are_looked_up_by_what_was_gathered(columns, sent):
    """Ids are sent, or rows of fewer bytes."""
    table, ids = torch.randn(8, columns), torch.randint(0, 8, (128,))

    def looked_up(table, ids):
        rows = torch.nn.functional.embedding(ids, table)
        return torch.fft.fft(rows.reshape(-1)).abs()

    lie = [(None, None), ("x",)]
    plan = planned(looked_up, table, ids, mesh="x=2", in_specs=lie)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", sent)]
    torch.testing.assert_close(plan.simulate(table, ids), plan.reference(table, ids))


def test_a_wider_dtype_is_made_of_what_was_gathered():
    x = torch.randn(64, 64, dtype=torch.bfloat16)

    def wide(x):
        return torch.fft.fft((x * 2).double().view(-1)).abs()

    plan = planned(wide, x, mesh="x=2", in_specs=[("x", None)])
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 8192)]
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def test_a_value_is_exchanged_once_for_a_reader_and_those_of_its_views():
    def sorts(x):
        rows = x.reshape(64, 8, 8).permute(1, 2, 0)
        return x.sort(0).values, x.t().sort(1).values, rows.sort(2).values

    x = torch.randn(64, 64)
    plan = planned(sorts, x, mesh="x=4", in_specs=[("x", None)])
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_to_all", 4096)]
    for one, other in zip(plan.simulate(x), plan.reference(x), strict=True):
        torch.testing.assert_close(one, other)


def test_a_view_that_is_read_as_it_lies_too_is_made_before_the_exchange():
    def both(x):
        rows = x.t()
        return x.sort(0).values, rows.sort(1).values, rows * 2

    x = torch.randn(64, 64)
    lies = [(None, "x"), ("x", None), (None, "x")]
    plan = planned(both, x, mesh="x=4", in_specs=[("x", None)], out_specs=lies)
    assert plan.spec("permute") == Spec(None, "x")
    for one, other in zip(plan.simulate(x), plan.reference(x), strict=True):
        torch.testing.assert_close(one, other)


def test_shared_constants_do_not_couple_their_users():
    def fn(x, y):
        one = torch.ones(8, 4)
        return x + one, y + one

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plan = planned(fn, x, y, mesh="a=2", in_specs=[("a", None), (None, "a")])
    assert plan.outputs == (Spec("a", None), Spec(None, "a"))
    assert not plan.collectives


def test_gradients_follow_their_parameters():
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    plan = planned(model, x, mesh="tp=2", hints={"weight": ("tp", None)}, grad=True)
    assert dict(plan.gradients)["weight"] == Spec("tp", None)
    assert dict(plan.gradients)["bias"] == dict(plan.parameters)["bias"]


def test_closed_dims_take_no_more_axes_and_open_ones_do():
    x, y = torch.randn(8, 8), torch.randn(8, 8)

    def spec_of_x(hint):
        plan = planned(
            lambda x, y: x + y, x, y, mesh="a=2,b=2", hints={"y": ("a", "b"), "x": hint}
        )
        return plan.inputs[0]

    assert spec_of_x(("a", None)) == Spec("a", None)
    assert spec_of_x(("a", "?")) == Spec("a", "b")
    assert spec_of_x(("a",)) == Spec("a", "b")


def test_a_hint_in_code_holds():
    def fn(x):
        return fxpar.constrain(x * 2, None, "a") + 1

    x = torch.randn(8, 8)
    plan = planned(fn, x, mesh="a=2")
    assert plan.outputs == (Spec(None, "a"),)
    assert torch.equal(fxpar.constrain(x, "a"), x)
    with pytest.raises(FxparError, match="3 entries for a tensor of 2 dims"):
        fxpar.constrain(x, "a", None, None)


@pytest.mark.parametrize("mode", ["propagate", "search"])
def test_a_value_stays_whole_along_an_axis_that_is_named(mode):
    x, w = torch.randn(8, 16), torch.randn(16, 32)

    def fn(x, w):
        return fxpar.constrain(x @ w, "!tp") * 2

    lie = [("dp", None), (None, "tp")]
    plan = fxpar.plan(fn, x, w, mesh="dp=2,tp=2", in_specs=lie, mode=mode)
    assert "tp" not in plan.spec("constrain").axes
    assert plan.spec("dot_default") == Spec("dp", "tp")
    torch.testing.assert_close(plan.simulate(x, w), plan.reference(x, w))


def test_a_parameter_stays_whole_along_an_axis_that_is_named():
    plan = planned(
        nn.Linear(16, 32),
        torch.randn(8, 16),
        mesh="dp=2,tp=2",
        hints={"weight": ("!tp",), "input": ("dp", "tp")},
    )
    assert plan.spec("weight") == Spec(None, None)


def test_no_axis_passes_a_barrier():
    x = torch.randn(8, 16)

    def fn(word):
        return lambda x: fxpar.constrain(x * 2, word).sin()

    open_, shut = (
        planned(fn(word), x, mesh="a=2,b=2", in_specs=[("a", None)]) for word in "?|"
    )
    assert open_.outputs == (Spec("a", None),)
    assert shut.spec("constrain") == Spec("a", None)
    assert shut.outputs == (Spec(None, None),)
    torch.testing.assert_close(shut.simulate(x), shut.reference(x))


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("tp", "tp p1", Spec("tp", None)),
        ("tp p1", "tp", Spec(None, "tp")),
        ("tp p3", "tp p2", Spec(None, "tp")),
    ],
)
def test_a_dim_spreads_when_its_priority_says(left, right, result):
    hints = {"x": (left, None), "y": (None, right)}
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    plan = planned(lambda x, y: x @ y, x, y, mesh="tp=2", hints=hints)
    assert plan.spec("dot_default") == result
    assert plan.inputs == (Spec("tp", None), Spec(None, "tp"))


def test_a_dim_that_waits_keeps_its_axis():
    """Else it would get ``b`` on its first dim, from the other operand."""
    hints = {"x": ("?", "b p2"), "y": ("b", "?")}
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    plan = planned(lambda x, y: x + y, x, y, mesh="a=2,b=2", hints=hints)
    assert plan.inputs == (Spec(None, "b"), Spec("b", None))


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (("!ep",), "has no axis 'ep'"),
        (("tp", "!tp"), "axis 'tp' splits a dim, and the tensor is to be whole"),
        (("_ p1",), "a dim that stays whole has no priority"),
        (("!",), "cannot read entry '!'"),
        (("|dp",), "cannot read entry '|dp'"),
        (("?", "!tp", "?", "?"), "3 entries for a tensor of 2 dims"),
        (("tp p",), "has no axis 'tp p'"),
    ],
)
def test_words_of_hints_that_mean_nothing_are_refused(hint, said):
    x = torch.randn(8, 8)
    with pytest.raises(HintError) as error:
        planned(lambda x: x.sin(), x, mesh="dp=2,tp=2", hints={"x": hint})
    assert said in str(error.value)


def test_dims_that_cannot_be_split_stay_whole_and_are_noted():
    x = torch.randn(6, 5)
    w = torch.randn(5, 10)
    plan = planned(
        lambda x, w: (x @ w).reshape(6, 2, 5).transpose(0, 1),
        x,
        w,
        mesh="a=5",
        in_specs=[None, (None, "a")],
    )
    assert any("cannot be split over a" in note for note in plan.notes)
    torch.testing.assert_close(plan.simulate(x, w), plan.reference(x, w))


def test_a_batch_that_no_axis_divides_is_split_and_noted():
    x = torch.randn(6, 4)
    plan = planned(torch.relu, x, mesh="dp=4")
    assert plan.outputs == (Spec("dp", None),)
    (note,) = (note for note in plan.notes if "idle" in note)
    assert "6 rows of arg0 over dp: the largest of 4 shards has 2" in note
    assert "25%" in note
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def test_a_batch_of_fewer_samples_than_ranks_is_left_whole_and_noted():
    plan = planned(torch.relu, torch.randn(3, 4), mesh="dp=4")
    assert plan.outputs == (Spec.whole(2),)
    assert any("is not split over dp" in note for note in plan.notes)


def test_a_hint_that_does_not_divide_holds():
    x = torch.randn(3, 4)
    plan = planned(lambda x: x.exp().sum(), x, mesh="tp=2", hints={"x": ("tp",)})
    assert plan.inputs == (Spec("tp", None),)
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def test_why_names_the_seed_and_the_way():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = planned(model, torch.randn(4, 8), mesh="tp=2", hints={"0.weight": ("tp",)})
    said = plan.why("relu")
    assert "tp: hint '0.weight' on 0.weight" in said
    assert "through relu" in said
    assert "no axis reached it" in plan.why("2.bias")
    with pytest.raises(FxparError, match="no value named"):
        plan.why("nothing")


def test_a_residual_stream_is_left_whole_by_convention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 16)
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
            self.c, self.d = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            h = self.embed(x)
            h = h + self.b(F.gelu(self.a(F.layer_norm(h, (16,)))))
            return h + self.d(F.gelu(self.c(F.layer_norm(h, (16,)))))

    plan = planned(Block(), torch.randn(4, 6, 4), mesh="tp=2")
    specs = dict(plan.parameters)
    assert specs["embed.weight"].is_whole
    assert specs["a.weight"] == specs["c.weight"] == Spec("tp", None)
    assert specs["b.weight"] == specs["d.weight"] == Spec(None, "tp")
    assert [c.kind for c in plan.collectives] == ["all_reduce"] * 2


def test_propagation_is_deterministic():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(8, 8)
    plans = [planned(model, x, mesh="dp=2,tp=2", grad=True) for _ in range(2)]
    assert plans[0].hash == plans[1].hash
    assert str(plans[0]) == str(plans[1])


@pytest.mark.parametrize("slow", ["kernels", "links"])
def test_ties_are_priced_on_the_hardware_that_is_named(slow, tmp_path, monkeypatch):
    """Rows, columns or neither: slow kernels split the product and gather its result,
    slow links gather the smaller operands and let every rank compute all of it."""
    hardware = lookup("h100")
    levels = [replace(x, bandwidth=x.bandwidth * 1e-6) for x in hardware.levels]
    named = {
        "kernels": hardware.at_speed(1e-6),
        "links": replace(hardware, levels=tuple(levels)),
    }
    named[slow].save(tmp_path / "machine.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "machine.json"))
    plan = planned(
        torch.mm,
        torch.empty(512, 64, device="meta"),
        torch.empty(64, 512, device="meta"),
        mesh="tp=4",
        in_specs=[("tp", None), (None, "tp")],
        out_specs=[(None, None)],
    )
    (product,) = plan.nodes
    assert bool(product.factors) == (slow == "kernels")


def test_columns_of_a_gate_and_of_what_it_gates_lie_together() -> None:
    """Not the gate on one rank, and what it gates on the other."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(8, 24, bias=False)
            self.down = nn.Linear(12, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.both(x).chunk(2, -1)
            return self.down(torch.relu(gate) * up)

    x = torch.randn(2, 4, 8)
    plan = fxpar.plan(Gated(), x, mesh="tp=2", mode="propagate")
    assert plan.spec("down.weight") == Spec(None, "tp")
    assert [c.kind for c in plan.collectives] == ["all_reduce"]


# Levels


def decided(seed: int) -> tuple[Any, ...]:
    """What is decided of a random program, with the origins of its axes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)  # dims that do not divide
        decision = Case(seed).plan().result.decision
    return decision.strategies, decision.settled, decision.origins


def at_levels(monkeypatch, seed: int, levels: Sequence[int]) -> tuple[Any, ...]:
    def of_op(engine: Propagation, op: Op) -> list[int]:
        first = PASS if not op.rule.contracted else KEPT
        turns = op_facts_of(op.target).orders and op.operands
        return [n for n in levels if n >= first and (n != TURN or turns)]

    with monkeypatch.context() as patch:
        patch.setattr(Propagation, "_levels_of", of_op)
        return decided(seed)


def test_levels_at_which_an_op_does_nothing_more_are_left_out(monkeypatch):
    seeds = range(6)
    few = [decided(seed) for seed in seeds]
    assert [at_levels(monkeypatch, seed, range(LEVELS)) for seed in seeds] == few
    fewer = (PASS, KEPT, ALL, TURN)
    assert [at_levels(monkeypatch, seed, fewer) for seed in seeds] != few
