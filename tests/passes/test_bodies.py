"""Ops that run graphs of their own, planned and simulated on all ranks in float64: the
numbers of one device, and split where their bodies allow it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as over_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxpar
from fxpar.errors import FxparWarning, PlanError
from fxpar.passes.normalize import body_seeds
from fxpar.passes.simulate import loop_steps
from fxpar.passes.simulate.loop_steps import STEPS
from fxpar.planning import TracedPlan
from fxpar.sharding.program import Input, Signature
from fxpar.sharding.read_program import inside_of, read
from tests.helpers.bodies import CONTROL, NOISY, UNKNOWN_LENGTH, attention

BATCH = ("dp", None, None)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    return x + 0.2, torch.randn(8, 8, dtype=torch.float64) * 0.4


def planned(fn: Callable[..., Any], mesh: str = "dp=2", **how: Any) -> TracedPlan:
    how = {"mode": "propagate", "in_specs": [BATCH, None]} | how
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)
        return fxpar.plan(fn, *inputs(), mesh=mesh, **how)


def assert_equal(plan: TracedPlan) -> None:
    torch.testing.assert_close(plan.simulate(*inputs()), plan.reference(*inputs()))


def higher(plan: TracedPlan) -> list[Any]:
    """Plan's entries of ops that run graphs."""
    assert plan.result is not None
    ops = plan.result.decision.program.ops
    names = {op.name for op in ops if type(op.target).__module__ != "torch._ops"}
    return [node for node in plan.nodes if node.name in names]


SPLIT = [*(CONTROL.keys() - {"until_small"})]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPLIT))
def test_the_batch_is_split_inside(name: str) -> None:
    plan = planned(CONTROL[name])
    assert_equal(plan)
    assert not plan.unknown
    (node, *_) = higher(plan)
    assert any("dp" in spec.sharded_axes for spec in node.operands)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONTROL.keys() - UNKNOWN_LENGTH))
def test_gradients_are_those_of_one_device(name: str) -> None:
    plan = planned(CONTROL[name], grad=True)
    assert_equal(plan)
    assert all(
        any(spec.sharded_axes or spec.partial for spec in (*n.operands, *n.results))
        for n in higher(plan)
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2", "tp=2,dp=2", "dp=3"])
@pytest.mark.parametrize("mode", ["search", "propagate", "replicate"])
@pytest.mark.parametrize("name", sorted(CONTROL))
def test_any_mesh(
    name: str, mode: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    assert_equal(planned(CONTROL[name], mesh, mode=mode, in_specs=None, grad=True))


def test_a_loop_whose_test_sums_over_the_batch_runs_whole() -> None:
    with pytest.warns(FxparWarning, match=r"while_loop.*\n.*test_bodies|bodies.py"):
        plan = fxpar.plan(
            CONTROL["until_small"], *inputs(), mesh="dp=2", in_specs=[BATCH, None]
        )
    assert_equal(plan)
    assert plan.unknown == ("while_loop",)


def times(count: int) -> Callable[..., Any]:
    """A loop of so many steps, which only running it tells."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        _, out = while_loop(
            lambda i, x: i < count,
            lambda i, x: (i + 1, torch.tanh(x @ w) + 0.5 * x),
            (torch.zeros((), dtype=torch.int64), x),
        )
        return out * w[0]

    return fn


def one_by_one(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the gradients of ``times(count)``, without a loop in the graph."""
    x, w = (t.requires_grad_() for t in inputs())
    out = x
    for _ in range(count):
        out = torch.tanh(out @ w) + 0.5 * out
    out = out * w[0]
    return out.detach(), *torch.autograd.grad(out.sum(), [x, w])


@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (1, "dp=2"),
        (STEPS + 3, "dp=2"),
        pytest.param(3, "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param(STEPS, "dp=2,tp=3", marks=pytest.mark.slow),
        pytest.param(STEPS - 1, "dp=4", marks=pytest.mark.slow),
    ],
)
def test_the_backward_of_a_loop_of_unknown_length(count: int, mesh: str) -> None:
    plan = planned(times(count), mesh, grad=True)
    out, grads = plan.simulate(*inputs())
    got = out, grads["x"], grads["w"]
    torch.testing.assert_close(got, one_by_one(count))
    assert plan.unknown == ("while_loop",)


@pytest.mark.slow
def test_the_number_of_steps_is_that_of_each_call() -> None:
    """One plan, called with inputs of which the loop takes more steps or fewer."""
    plan = planned(CONTROL["until_small"], grad=True)
    x, w = inputs()
    for scale in (1e-3, 1.0, 1e6):
        got, want = plan.simulate(x * scale, w), plan.reference(x * scale, w)
        torch.testing.assert_close(got, want)


def test_another_op_on_the_steps_of_a_loop_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is not known to leave the number of steps alone."""
    monkeypatch.setattr(loop_steps, "_READERS", set())
    with pytest.raises(PlanError, match="reads all steps of a loop"):
        planned(times(2), "dp=2", grad=True)


def test_a_size_that_depends_on_data_otherwise_is_refused() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(torch.ones(4))
        graph = make_fx(lambda x: x.nonzero().sum(0))(x).graph
    with pytest.raises(PlanError, match="nonzero.* has a size that depends on data"):
        read(graph, Signature((Input("x"),), ()))


def test_a_loop_carries_partial_sums_and_reduces_them_once() -> None:
    plan = planned(CONTROL["summed_up"])
    (node,) = higher(plan)
    assert dict(node.operands[0].partial) == {"dp": "sum"}
    assert dict(node.results[0].partial) == {"dp": "sum"}
    assert_equal(plan)


def _squared(x: Tensor, w: Tensor) -> Tensor:
    """What is carried is a sum over the batch of which each step needs the square."""

    def step(total, row):
        return total.square() + row.mT @ row, row.sum() * 1.0

    return scan(step, torch.ones_like(w), x, dim=1)[0]


def _one_branch_sums(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 1e9, lambda x, w: x.sum((0, 1)), lambda x, w: w[0] * 2, (x, w)
    )


def _both_sum(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 1e9, lambda x, w: x.sum((0, 1)), lambda x, w: x.cos().sum((0, 1)),
        (x, w),
    )  # fmt: skip


def _against_itself(x: Tensor, w: Tensor) -> Tensor:
    """Each sample meets all others."""
    return torch.cond(
        x.sum() > 0, lambda x: x[:, 0] @ x[:, 0].mT, lambda x: x[:, :, 0] * 1.0, (x,)
    )


@pytest.mark.parametrize(
    ("fn", "splits"),
    [
        (_both_sum, True),
        (_squared, False),
        (_one_branch_sums, False),
        (_against_itself, False),
    ],
)
def test_what_may_be_partial_inside(fn: Callable[..., Any], splits: bool) -> None:
    plan = planned(fn)
    (node,) = higher(plan)
    assert any("dp" in spec.sharded_axes for spec in node.operands) == splits
    assert_equal(plan)


@pytest.mark.slow
def test_rows_of_a_map_are_split_as_such() -> None:
    plan = planned(lambda x, w: over_rows(lambda row, w: row @ w.mT @ row.mT, x, w))
    (node,) = higher(plan)
    assert node.operands[0].dims[0] == ("dp",)
    assert_equal(plan)


@pytest.mark.slow
def test_positions_inside_count_by_global_index() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        def count(x):
            places = torch.arange(4, dtype=x.dtype)
            return x * places[:, None, None]

        return torch.cond(x.sum() > 0, count, lambda x: x * 2, (x,))

    for sign in (1, -1):
        plan = planned(fn)
        x, w = inputs()
        got, want = plan.simulate(sign * x, w), plan.reference(sign * x, w)
        torch.testing.assert_close(got, want)


# Random numbers


def _of_seed(run: Callable[..., Any], seed: int) -> Any:
    given = inputs()
    torch.manual_seed(seed)
    return run(*given)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("noisy_branches", "dp=2"),
        ("noisy_loop", "dp=2"),
        *(
            pytest.param(name, mesh, marks=pytest.mark.slow)
            for name in NOISY
            for mesh in ("dp=2", "dp=4", "dp=2,tp=2")
            if (name, mesh) not in {("noisy_branches", "dp=2"), ("noisy_loop", "dp=2")}
        ),
    ],
)
def test_random_numbers_inside_do_not_depend_on_the_mesh(name: str, mesh: str) -> None:
    """And the backward has those of the forward: a program gives its input times random
    factors, so its gradient is the factors."""
    plan = planned(NOISY[name], mesh, grad=True)
    out, grads = _of_seed(plan.simulate, 1)
    want, _ = _of_seed(plan.reference, 1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(grads["x"] * inputs()[0], out)
    other, _ = _of_seed(plan.simulate, 2)
    assert not torch.equal(other, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noisy_rows", "noisy_scan", "noisy_loop"])
def test_what_draws_is_split_without_gradients(name: str) -> None:
    plan = planned(NOISY[name])
    got, want = _of_seed(plan.simulate, 1), _of_seed(plan.reference, 1)
    torch.testing.assert_close(got, want)
    (node, *_) = higher(plan)
    assert any("dp" in spec.sharded_axes for spec in node.operands)


MANY = 2048


def _of_rows(x: Tensor, w: Tensor) -> Tensor:
    return over_rows(lambda row: torch.rand(MANY) * row.sum().sign().abs(), x)


def _of_scan(x: Tensor, w: Tensor) -> Tensor:
    def step(h, row):
        return h + 1.0, torch.rand(MANY) * row.sum().sign().abs()

    return scan(step, torch.zeros(()), x)[1]


def _of_loop(x: Tensor, w: Tensor) -> Tensor:
    def step(i, out):
        at = (torch.arange(4) == i)[:, None]
        return i + 1, torch.where(at, torch.rand(MANY), out)

    start = torch.zeros((), dtype=torch.int64), torch.zeros(4, MANY)
    return while_loop(lambda i, out: i < 4, step, start)[1]


def _of_nested_loops(x: Tensor, w: Tensor) -> Tensor:
    """Two draws each in two steps of a loop in a branch."""

    def step(i, out):
        at = torch.arange(4)[:, None]
        out = torch.where(at == 2 * i, torch.rand(MANY), out)
        return i + 1, torch.where(at == 2 * i + 1, torch.rand(MANY), out)

    def inner(out):
        start = torch.zeros((), dtype=torch.int64), out * 1.0
        return while_loop(lambda i, out: i < 2, step, start)[1]

    zeros = torch.zeros(4, MANY)
    return torch.cond(x.sum() > -1e9, inner, lambda out: out * 1.0, (zeros,))


@pytest.mark.parametrize(
    "fn",
    [
        _of_loop,
        *(
            pytest.param(fn, marks=pytest.mark.slow)
            for fn in (_of_rows, _of_scan, _of_nested_loops)
        ),
    ],
)
def test_each_step_draws_numbers_of_its_own(fn: Callable[..., Any]) -> None:
    rows = _of_seed(planned(fn).simulate, 1).double()
    assert rows.shape == (4, MANY)
    assert len(rows.unique()) > 0.99 * rows.numel()
    assert rows.mean().item() == pytest.approx(0.5, abs=0.02)
    assert rows.var().item() == pytest.approx(1 / 12, rel=0.05)
    assert (torch.corrcoef(rows) - torch.eye(4)).abs().max().item() < 0.1


# What may be drawn inside a body, and its mean.
DRAWN: dict[str, tuple[Callable[[Tensor], Any], float]] = {
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.25)), 0.25),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.25), 0.25),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 2), 0.5),
    "normal_": (lambda x: torch.empty_like(x).normal_(3.0, 0.5), 3.0),
    "normal": (lambda x: torch.normal(torch.full_like(x, 3.0), 0.5), 3.0),
    "normal of a size": (lambda x: torch.normal(3.0, 0.5, (4, 4, 8)), 3.0),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.5), 2.0),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(0.0, 0.25), 1.03),
    "rand": (lambda x: torch.rand(4, 4, 8), 0.5),
    "randn_like": (lambda x: torch.randn_like(x) + 1, 1.0),
    "randint": (lambda x: torch.randint(0, 5, (4, 4, 8)), 2.0),
    "randint_like": (lambda x: torch.randint_like(x, 2, 5), 3.0),
    "dropout1d": (lambda x: F.dropout1d(torch.ones_like(x), 0.5), 1.0),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.ones_like(x), 0.25, True), 1.0),
    "attention": (
        lambda x: F.scaled_dot_product_attention(
            x, x * 0, torch.ones_like(x), dropout_p=0.5
        ),
        1.0,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "bernoulli_" else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAWN
    ],
)
def test_what_may_be_drawn_inside(name: str) -> None:
    draw, mean = DRAWN[name]

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > -1e9, lambda x: x * draw(x), lambda x: x * 1.0, (x,)
        )

    plan = planned(fn, grad=True)
    out, grads = _of_seed(plan.simulate, 1)
    torch.testing.assert_close(out, _of_seed(plan.reference, 1)[0])
    if name != "attention":
        torch.testing.assert_close(grads["x"] * inputs()[0], out)
    factors = out / inputs()[0]
    assert factors.mean().item() == pytest.approx(mean, abs=0.25)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.poisson(x.abs()),
        pytest.param(lambda x: x[torch.randperm(4)], marks=pytest.mark.slow),
        pytest.param(
            lambda x: x * torch.multinomial(x.abs()[0], 8), marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_drawn_in_order_is_refused_inside(draw: Callable[..., Any]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, draw, lambda x: x * 1.0, (x,))

    with pytest.raises(PlanError, match="same random numbers") as error:
        planned(fn)
    assert "test_bodies.py" in str(error.value)
    assert "pass them in" in str(error.value)


def test_bodies_that_take_no_seed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_seeds, "_has_draws", lambda *_: False)
    with pytest.raises(PlanError, match="same random numbers"):
        planned(NOISY["noisy_branches"])


def test_a_body_that_draws_otherwise_in_its_backward_is_refused() -> None:
    sizes, seed = iter([2, 2, 3]), torch.zeros((), dtype=torch.int64)
    body = body_seeds.with_seed(lambda: (torch.rand(next(sizes)),), 0)
    assert torch.equal(body(seed)[0], body(seed)[0])
    with pytest.raises(PlanError, match="in another order in its backward"):
        body(seed)


# Attention


@pytest.mark.parametrize("use", ["batch", "heads"])
def test_attention_by_functions_is_split(use: str) -> None:
    spec = BATCH if use == "batch" else None
    weight = None if use == "batch" else (None, "dp")
    plan = planned(attention, in_specs=[spec, weight])
    (node,) = higher(plan)
    dim = 0 if use == "batch" else 1
    assert node.operands[0].dims[dim] == ("dp",)
    assert_equal(plan)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "dp=4"])
def test_gradients_of_attention(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch)
    plan = planned(attention, mesh, grad=True)
    assert all(n.operands[0].dims[0] == ("dp",) for n in higher(plan))
    assert len(higher(plan)) == 2
    assert_equal(plan)


def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch (2.13) refuses gradients of flex_attention on CPU, where Inductor has no
    kernel for them; run op by op they are right."""
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._validate_device", lambda *_: None
    )


def test_a_result_that_is_a_slice_on_a_rank() -> None:
    """The backward puts rows into a split dim with a spare one, which it cuts off."""

    def fn(p: Tensor, x: Tensor) -> Tensor:
        return torch.cond(
            p.sum() > 0,
            lambda x: x.topk(2, 1)[0] * 1,
            lambda x: x.topk(2, 1, largest=False)[0] * 1,
            (x,),
        ).sum()

    args = torch.ones(2), torch.randn(6, 8, requires_grad=True)
    how = {"mesh": "tp=2", "mode": "propagate", "in_specs": [None, (None, "tp")]}
    plan = fxpar.plan(fn, *args, grad=True, **how)
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.gradients, want.gradients)


def test_classes_are_of_the_dims_that_factors_join() -> None:
    plan = planned(CONTROL["mapped"])
    assert plan.result is not None
    (op,) = (op for op in plan.result.decision.program.ops if op.name.startswith("map"))
    found = inside_of(op.node)
    assert found is not None and str(found.rule) == "f0 f1 _, _ f2 -> f0 f1 f2"
