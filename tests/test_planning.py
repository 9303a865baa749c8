"""``fxpar.plan``: the public call, its arguments, its result, its errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxpar
from fxpar import FxparError, Mesh, Spec
from fxpar.errors import HintError, OptionError, PlanError
from fxpar.runtime.steps.verify import feeds_of, verify
from fxpar.sharding.plan import Plan

pytestmark = pytest.mark.usefixtures("propagated")


def two(x, w, *, scale=1.0, extra=None):
    y = x @ w * scale
    return {"y": y, "sum": (y.sum(), extra)}


def test_structures_of_arguments_and_results_are_kept():
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    plan = fxpar.plan(two, x, w, scale=2.0, extra="kept", mesh="dp=2,tp=2")
    out = plan.simulate(x, w, scale=2.0, extra="kept")
    torch.testing.assert_close(out["y"], x @ w * 2)
    torch.testing.assert_close(out["sum"][0], (x @ w * 2).sum())
    assert out["sum"][1] == "kept"
    assert len(plan.inputs) == 2 and len(plan.outputs) == 2
    assert plan.spec("x") == plan.inputs[0]


def test_gradients_of_arguments_that_ask_for_them():
    x, w = torch.randn(8, 4), torch.randn(4, 6, requires_grad=True)
    plan = fxpar.plan(lambda x, w: (x @ w).square().sum(), x, w, mesh="dp=4", grad=True)
    value, gradients = plan.simulate(x, w)
    (x @ w).square().sum().backward()
    assert set(gradients) == {"w"}
    torch.testing.assert_close(gradients["w"], w.grad)
    torch.testing.assert_close(value, (x @ w).square().sum().detach())


def test_modules_a_function_closes_over_keep_their_parameters():
    model = nn.Linear(4, 4)

    def loss(x, y):
        return (model(x) - y).square().mean()

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plan = fxpar.plan(loss, x, y, mesh="dp=2", grad=True)
    _, gradients = plan.simulate(x, y)
    loss(x, y).backward()
    torch.testing.assert_close(gradients["model.weight"], model.weight.grad)
    torch.testing.assert_close(gradients["model.bias"], model.bias.grad)


def test_meta_tensors_are_planned_without_memory():
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
        x = torch.empty(1 << 16, 1 << 20)
    plan = fxpar.plan(model, x, mesh="dp=64,tp=64")
    assert dict(plan.parameters)["weight"] == Spec("tp", None)


def test_meta_tensors_have_gradients():
    """Those of a cross entropy too, which torch's joint graph on meta lacks."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x, words):
            return nn.functional.cross_entropy(self.linear(x), words)

    with torch.device("meta"):
        model, x = Head(), torch.empty(4, 8)
        words = torch.empty(4, dtype=torch.int64)
    plan = fxpar.plan(model, x, words, mesh="dp=2", grad=True)
    assert {name for name, _ in plan.gradients} == {"linear.weight", "linear.bias"}


@pytest.mark.parametrize("mesh", ["dp=64", "a=4,b=4,c=4", "dp=2,tp=32"])
def test_meshes_of_64_ranks_are_simulated(mesh):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).double()
    x = torch.randn(64, 64, dtype=torch.float64)
    plan = fxpar.plan(model, x, mesh=mesh, grad=True)
    assert plan.mesh.size == 64
    torch.testing.assert_close(
        plan.simulate(x), plan.reference(x), rtol=1e-9, atol=1e-9
    )


def test_the_plan_does_not_depend_on_the_number_of_ranks():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        x = torch.empty(1 << 14, 64)
    small = fxpar.plan(model, x, mesh="dp=2,tp=2", grad=True)
    large = fxpar.plan(model, x, mesh="dp=8192,tp=8", grad=True)
    assert [n.factors for n in small.nodes] == [n.factors for n in large.nodes]
    graphs = [plan.result.local for plan in (small, large)]
    assert len({len(graph.nodes) for graph in graphs}) == 1


def test_an_existing_mesh_is_taken():
    x = torch.randn(4, 4)
    assert fxpar.plan(torch.relu, x, mesh=Mesh((("dp", 2),))).mesh.size == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "dp"}, "cannot read mesh"),
        ({"mesh": "dp=2,dp=2"}, "appears twice"),
        ({"in_specs": [None]}, "in_specs has 1 entries for 2 tensor arguments"),
        ({"out_specs": [None, None]}, "out_specs has 2 entries for 1 tensor result"),
        ({"in_specs": ["dp", None]}, "in_specs has 'dp' for a tensor"),
        ({"in_specs": [0, None]}, "in_specs has 0 for a tensor"),
        ({"in_specs": [("dp", 0), None]}, "a dim cannot be split over 0"),
        ({"in_specs": [("dp", None, None), None]}, "3 entries for a tensor of 2 dims"),
        ({"out_specs": [("dp", None, None)]}, "3 entries for a tensor of 2 dims"),
        ({"in_specs": [("no", None), None]}, "has no axis 'no'"),
        ({"in_specs": [("dp", "dp"), None]}, "used twice"),
        ({"hints": {"z": ("dp",)}}, "matches no parameter"),
        ({"hints": {"x": ("dp", None, None)}}, "3 entries for a tensor of 2 dims"),
        ({"mode": "no such file"}, "cannot read the plan file"),
        ({"mode": 3}, "mode cannot be 3"),
        ({"hints": 3}, "cannot read the hints file 3"),
    ],
)
def test_errors_name_what_is_wrong(options, message):
    x, w = torch.randn(8, 5), torch.randn(5, 8)
    with pytest.raises(FxparError, match=message):
        fxpar.plan(lambda x, w: x @ w, x, w, **{"mesh": "dp=2,tp=2", **options})


def test_a_program_without_tensors_is_refused():
    with pytest.raises(PlanError, match="has no tensors.*\n.*fix: give tensors"):
        fxpar.plan(lambda k: k * 2, 3, mesh="dp=2")
    made = fxpar.plan(lambda k: torch.ones(4) * k, 3, mesh="dp=2", mode="propagate")
    assert torch.equal(made.simulate(3), torch.full((4,), 3.0))


@pytest.mark.parametrize("mode", ["propagate", "search"])
def test_dims_left_out_of_a_spec_are_not_split(mode):
    x, w = torch.randn(8, 5).double(), torch.randn(5, 8).double()
    options = {"mesh": "dp=2", "mode": mode, "out_specs": [(None,)]}
    plan = fxpar.plan(lambda x, w: x @ w, x, w, in_specs=[("dp",), Spec()], **options)
    assert plan.spec("x") == Spec("dp", None)
    assert plan.spec("w") == Spec(None, None)
    torch.testing.assert_close(plan.simulate(x, w), x @ w)


def test_other_shapes_than_planned_are_refused():
    plan = fxpar.plan(torch.relu, torch.randn(8, 4), mesh="dp=2")
    with pytest.raises(FxparError, match="planned with"):
        plan.simulate(torch.randn(4, 4))


def test_verify_finds_a_local_graph_that_computes_something_else():
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    plan = fxpar.plan(lambda x, w: (x @ w) * 3.0, x, w, mesh="dp=2")
    local, normalized = plan.result.local, plan.result.normalized
    feeds = feeds_of(normalized, [x, w], [0, 1])
    verify(local, normalized, plan.result.decision, plan.module, feeds)
    wrong = fx.Graph()
    wrong.output(wrong.graph_copy(local, {}))
    node = next(n for n in wrong.nodes if n.target is torch.ops.aten.mul.Tensor)
    node.args = (node.args[0], 4.0)
    with pytest.raises(FxparError, match="FXPAR_VERIFY: output output_0 differs"):
        verify(wrong, normalized, plan.result.decision, plan.module, feeds)


def test_hints_from_a_toml_file(tmp_path):
    file = tmp_path / "hints.toml"
    file.write_text('"0.weight" = ["tp", "_"]\n2.weight = ["?", "tp"]\n')
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = fxpar.plan(model, torch.randn(4, 8), mesh="tp=2", hints=str(file))
    assert dict(plan.parameters)["0.weight"] == Spec("tp", None)
    assert dict(plan.parameters)["2.weight"] == Spec(None, "tp")
    file.write_text("this is not toml")
    with pytest.raises(FxparError, match="cannot read the hints file"):
        fxpar.plan(model, torch.randn(4, 8), mesh="tp=2", hints=str(file))


@pytest.mark.parametrize("hint", [5, None, {"a": 1}, b"[tp]"], ids=str)
def test_what_is_no_hint_is_a_hint_error(hint: object) -> None:
    how: dict[str, Any] = {"mesh": "tp=2", "mode": "propagate"}
    with pytest.raises(HintError, match="hint 'weight': cannot read"):
        fxpar.plan(nn.Linear(4, 4), torch.ones(2, 4), hints={"weight": hint}, **how)


def test_a_hints_file_of_other_bytes_is_a_hint_error(tmp_path: Path) -> None:
    path = tmp_path / "hints.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(HintError, match="cannot read the hints file"):
        fxpar.plan(nn.Linear(4, 4), torch.ones(2, 4), mesh="tp=2", hints=str(path))
    path.write_text('"weight" = 5')
    with pytest.raises(HintError, match=f"{path}: hint 'weight': cannot read 5"):
        fxpar.plan(nn.Linear(4, 4), torch.ones(2, 4), mesh="tp=2", hints=str(path))


def test_every_collective_names_the_node_and_line_it_is_for():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def loss(x):
        return model(x).square().mean()

    plan = fxpar.plan(loss, torch.randn(8, 8), mesh="dp=2,tp=2", grad=True)
    assert plan.collectives
    assert all(__file__ in c.source for c in plan.collectives)
    sent = [
        node
        for node in plan.result.local.nodes
        if "_c10d_functional" in str(node.target)
    ]
    assert all(__file__ in node.meta["fxpar_cause"] for node in sent)


# What a plan says of itself


def wide(x, w):
    return torch.relu(x @ w) @ w.t()


def test_a_plan_tells_memory_and_the_dearest_reshards(monkeypatch):
    monkeypatch.delenv("FXPAR_HARDWARE", raising=False)
    x, w = torch.randn(8, 4), torch.randn(4, 16)
    hints = {"x": ("dp", None), "w": (None, "tp")}
    plan = fxpar.plan(wide, x, w, mesh="dp=2,tp=2", hints=hints, mode="propagate")
    text = plan.summary()
    held = dict(plan.memory)
    assert f"memory per rank at its peak: {sum(held.values()):,} bytes" in text
    # x over dp, w over tp
    assert held["inputs and buffers"] == 8 * 4 * 4 // 2 + 4 * 16 * 4 // 2
    (moved,) = plan.dearest
    assert (moved.calls, moved.bytes, moved.seconds) == (1, 4 * 4 * 4, None)
    assert moved.steps == ("all_reduce tp",) and "return torch.relu" in moved.line
    assert "[dp, _] partial(sum: tp) -> [dp, _]  (all_reduce tp)" in text


def test_reshards_are_priced_where_the_hardware_is_said(monkeypatch, tmp_path):
    x, w = torch.randn(8, 4), torch.randn(4, 16)
    given = {"mesh": "dp=2,tp=2", "hints": {"w": (None, "tp")}, "mode": "propagate"}
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    plan = fxpar.plan(wide, x, w, **given)
    assert plan.dearest[0].seconds > 0
    assert re.search(r"[\d.]+ us +64 bytes +1 calls", plan.summary())
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.hash == plan.hash
    # What a step takes is known of what was traced.
    assert str(again) == re.sub(r"predicted: .*\n", "", str(plan))
    monkeypatch.setenv("FXPAR_HARDWARE", "v100")
    assert fxpar.plan(wide, x, w, **given).dearest[0].seconds > plan.dearest[0].seconds
    record = plan.to_record()
    for holder in (record, *record["nodes"]):
        for beside in ("reads", "memory", "dearest"):
            holder.pop(beside, None)
    old = Plan.from_dict(record)
    assert old.hash == plan.hash and "memory" not in old.summary()


def test_reshards_alike_are_told_as_one():
    def layers(x, w):
        for _ in range(3):
            x = torch.relu(x @ w) @ w.t()
        return x

    x, w = torch.randn(8, 4), torch.randn(4, 16)
    plan = fxpar.plan(
        layers, x, w, mesh="tp=2", hints={"w": (None, "tp")}, mode="propagate"
    )
    (moved,) = plan.dearest
    assert moved.calls == 3 and moved.bytes == 3 * 8 * 4 * 4


def test_a_diff_tells_what_it_costs(monkeypatch):
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    x, w = torch.randn(8, 4), torch.randn(4, 16)
    split, whole = (
        fxpar.plan(wide, x, w, mesh="tp=2", hints={"w": hint}, mode="propagate")
        for hint in ((None, "tp"), (None, None))
    )
    assert split.diff(split) == ""
    lines = split.diff(whole).splitlines()
    assert "w: [_, tp] | [_, _]" in lines
    assert "all_reduce tp: 128 | 0 bytes" in lines
    assert any(re.fullmatch(r"passing: [\d,]+ \| [\d,]+ bytes", line) for line in lines)
    assert re.fullmatch(r"a step: .* us \| .* us", lines[-1])
    assert "a step" not in split.diff(Plan.from_dict(whole.to_record()))


def test_why_says_who_laid_an_input():
    """A parameter at rest is a fact, and told as one; of others the search chose."""
    x, w = torch.randn(8, 4), torch.randn(4, 16)
    plan = fxpar.plan(
        wide, x, w, mesh="tp=2", in_specs=[None, (None, "tp")], mode="search"
    )
    assert "tp: w at rest" in plan.why("w") and "no other choice" in plan.why("w")
    assert "resharding it takes" in plan.why("x")
    assert "at rest in [tp, _]" in plan.why("x") or "tp: search" in plan.why("x")


def test_a_module_used_twice_is_left_as_it_was() -> None:
    layer = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(layer, torch.nn.GELU(), layer)
    weight, x = layer.weight, torch.randn(4, 8)
    for _ in range(2):
        plan = fxpar.plan(model, x, mesh="dp=2", grad=True)
        assert layer.weight is weight
    got, want = plan.simulate(x), plan.reference(x)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1]["0.weight"], want[1]["0.weight"])


class Counting(nn.Module):
    """Gives one buffer a new tensor, and changes another in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, before = self.linear(x) * self.mean, self.mean
        self.mean = self.mean * 0.9 + y.mean(0) * 0.1
        self.calls += 1
        return y.square().sum(), before


@pytest.mark.parametrize("grad", [False, True])
def test_new_tensors_of_buffers_are_outcomes(grad: bool) -> None:
    model, x = Counting(), torch.randn(4, 8)
    plan = fxpar.plan(model, x, mesh="dp=2", mode="propagate", grad=grad)
    assert torch.equal(model.mean, torch.ones(8))
    outcomes = plan.outcome(x), plan.reference_outcome(x)
    result = model(x)
    want = dict(model.named_buffers())
    if grad:
        sum(y.sum() for y in result).backward()
    for got in outcomes:
        torch.testing.assert_close(got.result, result)
        torch.testing.assert_close(got.mutations, want)
        if grad:
            weight = model.linear.weight
            torch.testing.assert_close(got.gradients["linear.weight"], weight.grad)


def test_options_among_the_arguments_are_refused() -> None:
    """A model that takes any keyword, as those of transformers do, would swallow it."""

    def takes_any(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x * 2

    def takes_one(x: torch.Tensor, memory: float) -> torch.Tensor:
        return x * memory

    x = torch.ones(4)
    with pytest.raises(OptionError, match="FXPAR_HARDWARE"):
        fxpar.plan(takes_any, x, mesh="dp=2", hardware="h100")
    with pytest.raises(OptionError, match="options="):
        fxpar.plan(takes_any, x, mesh="dp=2", outputs="dtensor")
    fxpar.plan(takes_any, x, mesh="dp=2", memory=x)
    plan = fxpar.plan(takes_one, x, mesh="dp=2", memory=3.0)
    assert torch.equal(plan.simulate(x, memory=3.0), x * 3)
