"""Programs at the border of what ``fxpar.plan`` traces: effects, complex numbers and
empty tensors are simulated; what depends on data is an error with the user's line."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import fxpar
from fxpar.errors import FxparWarning, PlanError

pytestmark = pytest.mark.usefixtures("propagated")

torch.manual_seed(0)
X = torch.randn(8, 4)
SQUARE = torch.randn(4, 4, dtype=torch.float64)
S = SQUARE @ SQUARE.mT + 4 * torch.eye(4, dtype=torch.float64)

linalg = torch.linalg
CHECKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "cholesky": linalg.cholesky,
    "eig": lambda s: linalg.eig(s)[0].abs().sum(),
    "inv": linalg.inv,
    "solve": lambda s: linalg.solve(s, s[0]),
    "ldl_factor": lambda s: linalg.ldl_factor(s)[0],
    "lu_factor": lambda s: linalg.lu_factor(s)[0],
    "matrix_power": lambda s: linalg.matrix_power(s, -2),
    "tensorinv": lambda s: linalg.tensorinv(s.reshape(2, 2, 4), ind=2),
    "tensorsolve": lambda s: linalg.tensorsolve(s, s[0]),
    "eigvals": lambda s: linalg.eigvals(s).abs().sum(),
}


@pytest.mark.parametrize("name", CHECKED)
def test_linalg_that_checks_its_input_is_simulated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is an effect, kept in order by a token that is no argument."""
    monkeypatch.setenv("FXPAR_STRICT", "1")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plan = fxpar.plan(CHECKED[name], S, mesh="dp=2")
    torch.testing.assert_close(plan.simulate(S), CHECKED[name](S))
    texts = [str(w.message) for w in seen if w.category is FxparWarning]
    assert not any("no sharding rule" in text for text in texts)


@pytest.mark.parametrize("offset", [0, 12])
def test_memory_around_a_tensor_is_not_read(offset: int) -> None:
    """A view of the middle of some memory, and strides that leave it."""
    x = torch.arange(16.0)[8:12]

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2,), (2,), offset)

    with pytest.raises(PlanError, match="reads memory beyond the tensor"):
        fxpar.plan(f, x, mesh="dp=2", in_specs=[("dp",)])


def test_strides_count_from_where_a_tensor_begins() -> None:
    """What is gathered begins at the start of its memory, its whole did not."""
    x = torch.arange(16.0)[2:10]

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (1, 1), 3)

    plan = fxpar.plan(f, x, mesh="dp=2", in_specs=[("dp",)])
    torch.testing.assert_close(plan.simulate(x), f(x))


def test_an_empty_dim_is_reduce_scattered() -> None:
    x, w = torch.randn(0, 8), torch.randn(8, 6)
    specs: dict[str, Any] = {"in_specs": [(None, "tp"), ("tp", None)]}
    plan = fxpar.plan(
        torch.matmul, x, w, mesh="tp=2", out_specs=[("tp", None)], **specs
    )
    assert [c.kind for c in plan.collectives] == ["reduce_scatter"]
    assert plan.simulate(x, w).shape == (0, 6)


def product(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (z * x).abs().square().sum()


@pytest.mark.parametrize("asked", [False, True])
def test_complex_arguments_have_gradients(asked: bool) -> None:
    z, x = torch.randn(8, 4, dtype=torch.complex128), torch.randn(8, 4).double()
    if asked:
        z.requires_grad_()
    plan = fxpar.plan(product, z, x, mesh="dp=2", grad=True)
    result, gradients = plan.simulate(z, x)
    leaves = [t.detach().requires_grad_() for t in (z, x)]
    product(*leaves).backward()
    torch.testing.assert_close(result, product(z, x).detach())
    torch.testing.assert_close(gradients["z"], leaves[0].grad)
    assert ("x" in gradients) is not asked


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x


def selects(x: torch.Tensor) -> torch.Tensor:
    return x[x.nonzero()[:, 0]]


def counts(x: torch.Tensor) -> torch.Tensor:
    return x.sum() * torch.bincount((x[:, 0] > 0).long())


def aligns(x: torch.Tensor) -> torch.Tensor:
    log = x.reshape(8, 1, 4).log_softmax(-1)
    targets, lengths = torch.ones(1, 2, dtype=torch.long), torch.tensor([8])
    return torch.ctc_loss(log, targets, lengths, torch.tensor([2]))


def updates(x: torch.Tensor) -> torch.Tensor:
    moments = [torch.zeros_like(x)], [torch.zeros_like(x)]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    step = [torch.ones(())]
    torch._fused_adamw_(
        [x], [x * 2], *moments, [], step, **rates, amsgrad=False, maximize=False
    )
    return x


class Clamped(nn.Module):
    """Writes a parameter before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.proj.weight.data.clamp_(-0.1, 0.1)
        return self.proj(x).square()


class Accumulates(torch.autograd.Function):
    """``x + f(x)``, computed again in the backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Callable[..., Any]) -> torch.Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + f(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.f(x)
        torch.autograd.backward(y, dy)
        return dy + x.grad, None


class Returns(torch.autograd.Function):
    """The same, with the gradients of parameters as results."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, f: nn.Module, *_: torch.Tensor
    ) -> torch.Tensor:
        return Accumulates.forward(ctx, x, f)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.f(x)
        dx, *rest = torch.autograd.grad(y, [x, *ctx.f.parameters()], dy)
        return dy + dx, None, *rest


class Layers(nn.Module):
    """Layers that ``call(f, x)`` runs."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call, self.first = call, nn.Linear(4, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square()


def cut_off(f: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A reentrant checkpoint that gives ``f`` no gradient: its input requires none."""
    return f(x) + checkpoint(f, x.detach(), use_reentrant=True)


def in_a_list(f: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A reentrant checkpoint gives no gradient to what it returns in a list."""
    y, (z,) = checkpoint(lambda x: (f(x), [x.sin()]), x, use_reentrant=True)
    return y * z


def without_contexts(f: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def contexts() -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()

    return checkpoint(f, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize(
    "make",
    [
        Clamped,
        lambda: Layers(lambda f, x: Returns.apply(x, f, *f.parameters())),
        lambda: Layers(lambda f, x: checkpoint(f, x, use_reentrant=False)),
        lambda: Layers(lambda f, x: checkpoint(f, x, use_reentrant=True)),
        lambda: Layers(cut_off),
        lambda: Layers(in_a_list),
        lambda: Layers(without_contexts),
        lambda: Layers(lambda f, x: CheckpointFunction.apply(f, True, x)),
    ],
    ids=[
        "written",
        "recomputed",
        "checkpointed",
        "reentrant",
        "cut off",
        "in a list",
        "without contexts",
        "imported",
    ],
)
def test_gradients_are_those_of_eager(make: Callable[[], nn.Module]) -> None:
    """``plan.reference`` runs the traced graph, which would share a wrong gradient."""
    model, x = make().double(), torch.randn(4, 4, dtype=torch.float64)
    result, gradients = fxpar.plan(model, x, mesh="dp=2", grad=True).simulate(x)
    assert all(p.grad is None for p in model.parameters())
    want = model(x)
    want.sum().backward()
    torch.testing.assert_close(result, want.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


READS: dict[str, Callable[[torch.Tensor], bool]] = {
    "the grad mode": lambda x: torch.is_grad_enabled(),
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "is_leaf": lambda x: not x.is_leaf,
}


def by_grad_mode(what: str, reentrant: bool, detach: bool) -> Callable[..., Any]:
    """Layers whose checkpointed code asks whether gradients are taken."""

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if READS[what](x) else 3)

    def call(f: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach() if detach else x
        return x + checkpoint(lambda x: asks(f(x)), x, use_reentrant=reentrant)

    return call


@pytest.mark.parametrize("what", READS)
def test_a_reentrant_region_that_asks_for_the_grad_mode_is_refused(what: str) -> None:
    """On one device the loss is of one answer, the gradients of the other."""
    with pytest.raises(PlanError, match="whether gradients are taken") as error:
        fxpar.plan(Layers(by_grad_mode(what, True, False)), X, mesh="dp=2", grad=True)
    assert error.value.fix == "checkpoint with use_reentrant=False"
    assert "test_planned_programs.py" in (error.value.where or "")


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize(
    ("reentrant", "detach", "grad"),
    [(True, True, True), (True, False, False), (False, False, True)],
)
def test_the_grad_mode_of_one_answer_is_read(
    what: str, reentrant: bool, detach: bool, grad: bool
) -> None:
    model = Layers(by_grad_mode(what, reentrant, detach)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    got = fxpar.plan(model, x, mesh="dp=2", grad=grad).outcome(x).result
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(got, model(x).detach())


WEIGHT = torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda f, x: Accumulates.apply(x, f), "torch.autograd.backward(y, dy)"),
        (
            lambda f, x: Accumulates.apply(x, lambda y: y @ WEIGHT),
            "torch.autograd.backward(y, dy)",
        ),
    ],
)
def test_accumulated_gradients_are_refused(call: Any, line: str) -> None:
    """A graph has no place for them: none reaches tensors of the caller either."""
    model = Layers(call)
    with pytest.raises(PlanError, match="accumulates gradients") as error:
        fxpar.plan(model, X, mesh="dp=2", grad=True)
    assert "torch.autograd.grad" in error.value.fix
    assert line in (error.value.where or line)
    assert all(p.grad is None for p in [WEIGHT, *model.parameters()])


def checked(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x > 0, lambda: "not positive")
    return x * 2


def distributed(validate: bool | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def log_prob(x: torch.Tensor) -> torch.Tensor:
        normal = torch.distributions.Normal(x, x, validate_args=validate)
        return normal.log_prob(x)

    return log_prob


@pytest.mark.parametrize(
    ("fn", "asserts"),
    [(checked, True), (distributed(True), True), (distributed(None), False)],
)
def test_checks_of_values_are_in_the_graph(fn: Any, asserts: bool) -> None:
    """Distributions check if asked to, as under Dynamo."""
    x = X.abs() + 0.1
    plan = fxpar.plan(fn, x, mesh="dp=2", in_specs=[("dp", None)])
    torch.testing.assert_close(plan.simulate(x), fn(x))
    x[5, 2] = -1.0  # on one rank
    if asserts:
        with pytest.raises(RuntimeError, match="a check of values does not hold"):
            plan.simulate(x)
    else:
        plan.simulate(x)


def closing() -> Callable[[torch.Tensor], torch.Tensor]:
    start, weight = torch.randn(8, 4), torch.rand(8, 4)

    def lerps(x: torch.Tensor) -> torch.Tensor:
        return torch.lerp(x, start, weight)

    return lerps


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("fn", "fact", "line", "fix"),
    [
        (reads, "reads the value of a tensor", "x.sum().item()", "no item()"),
        (branches, "reads the value of a tensor", "if x.sum() > 0", "torch.where"),
        (selects, "shape depends on values", "x.nonzero()", "fixed shape"),
        (counts, "shape depends on values", "torch.bincount", "fixed shape"),
        (aligns, "shape depends on values", "ctc_loss", "fixed shape"),
        (updates, "lists of tensors in place", "torch._fused_adamw_(", "fused=False"),
    ],
)
def test_what_is_not_one_graph_is_refused(
    fn: Any, fact: str, line: str, fix: str, grad: bool
) -> None:
    with pytest.raises(PlanError, match=fact) as error:
        fxpar.plan(fn, X, mesh="dp=2", grad=grad)
    assert error.value.where.startswith(__file__) and line in error.value.where
    assert fix in error.value.fix


def test_a_closed_over_tensor_that_cannot_be_traced_is_refused() -> None:
    fn = closing()
    fxpar.plan(fn, X, mesh="dp=2")
    with pytest.raises(PlanError, match="closes over a tensor") as error:
        fxpar.plan(fn, X, mesh="dp=2", grad=True)
    assert "def lerps" in error.value.where
    assert "pass the tensor as an argument" in error.value.fix


class Remembers(nn.Module):
    """A module that sets attributes, buffers and parameters where it runs."""

    def __init__(self, does_read: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.does_read, self.runs, self.last = does_read, 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.last = self.linear(x)
        self.register_buffer("seen", x.detach().sum(0))
        self.linear.weight_of_last = self.linear.weight * 2
        if self.does_read and self.last.sum() > 0:
            self.train(False)
        return self.last + self.seen


@pytest.mark.parametrize("does_read", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_plan_leaves_modules_as_they_were(grad: bool, does_read: bool) -> None:
    """Also one that raises: no traced tensor is left in them."""
    module = Remembers(does_read)
    before = [dict(vars(each)) for each in module.modules()]
    tensors = {name: id(x) for name, x in module.state_dict(keep_vars=True).items()}
    if does_read:
        with pytest.raises(PlanError, match="reads the value of a tensor"):
            fxpar.plan(module, X, mesh="dp=2", grad=grad)
    else:
        plan = fxpar.plan(module, X, mesh="dp=2", grad=grad, mode="propagate")
        out = plan.simulate(X)
        y = out[0] if grad else out
        torch.testing.assert_close(y, module.linear(X) + X.sum(0))
    after = [dict(vars(each)) for each in module.modules()]
    assert after == before
    now = module.state_dict(keep_vars=True).items()
    assert {name: id(x) for name, x in now} == tensors
