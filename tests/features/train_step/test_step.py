"""``fxpar.train_step`` on one process: optimizers, settings that change, refusals.

The op-by-op path runs the whole pipeline on a mesh of one rank, so that nothing here
waits for a kernel to be generated but one test, which is about generated kernels.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import while_loop
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fxpar
from fxpar import _torch, compilation
from fxpar.errors import FxparWarning, OptionError, PlanError
from tests.helpers.step_programs import (
    OPTIMIZERS,
    Counts,
    Make,
    batches,
    build,
    loss_fn,
)
from tests.helpers.training import loop

STEPS = 5
LOG = logging.getLogger("a user's")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
    torch._dynamo.reset()


def train_step(model: Any, optimizer: Any, loss: Any = loss_fn, **how: Any) -> Any:
    how = {"options": {"codegen": "eager"}} | how
    return fxpar.train_step(model, loss, optimizer, **how)


def eager_step(model: Any, optimizer: Any, batch: Any, clip: float | None) -> float:
    (loss,), _ = loop(functools.partial(loss_fn, model), optimizer, [batch], clip=clip)
    return loss


def same(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    """Equal losses, states of models and states of optimizers."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compare(
    make: Make,
    *,
    clip: float | None = None,
    schedule: Callable[[Any], Any] | None = None,
    steps: int = STEPS,
    tolerance: float = 1e-10,
) -> int:
    """Train by both; how many programs were compiled."""
    runs, before = [], len(fxpar.plans())
    for compiled in (False, True):
        model = build()
        optimizer = make(model.parameters())
        scheduler = schedule(optimizer) if schedule else None
        step = train_step(model, optimizer, clip=clip) if compiled else None
        losses = []
        for batch in batches(steps):
            losses.append(
                step(*batch).item()
                if step
                else eager_step(model, optimizer, batch, clip)
            )
            if scheduler:
                scheduler.step()
        runs.append((losses, model.state_dict(), optimizer.state_dict()))
    same(runs[1], runs[0], tolerance)
    return len(fxpar.plans()) - before


QUICK = ("nesterov", "counts")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_as_the_eager_loop(name: str) -> None:
    make, programs = OPTIMIZERS[name]
    steps = 8 if name == "radam" else STEPS  # from the sixth on it does otherwise
    assert compare(make, steps=steps) == programs


@pytest.mark.parametrize("norm", [0.05, pytest.param(1e3, marks=pytest.mark.slow)])
def test_clipping(norm: float) -> None:
    compare(OPTIMIZERS["sgd"][0], clip=norm)


# NAdam keeps a product besides, rounded in every step before it is read.
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_single_precision_counts_steps_as_python_does(kind: Any) -> None:
    """``step`` is a float32 tensor, and what comes of it double in the eager loop."""
    torch.set_default_dtype(torch.float32)
    p, q = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    eager, ours = (kind([x], 0.01) for x in (p, q))

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = q

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.q * x).pow(2).sum()

    step = train_step(Held(), ours, lambda model, x: model(x))
    for i in range(3):
        x = torch.arange(4, dtype=torch.float64) + i
        eager.zero_grad()
        (p * x).pow(2).sum().backward()
        eager.step()
        step(x)
    same(q, p)
    assert ours.state[q]["step"].dtype == torch.float32
    same(ours.state_dict(), eager.state_dict())


@pytest.mark.parametrize(
    ("name", "schedule", "programs"),
    [
        ("adamw", lambda o: lr_scheduler.StepLR(o, 1, 0.7), 1),
        # Momentum is a constant until it is seen to change, then an input for good.
        *(
            pytest.param(
                name,
                lambda o, rate=rate: lr_scheduler.OneCycleLR(o, rate, total_steps=10),
                2,
                marks=pytest.mark.slow,
            )
            for name, rate in (("nesterov", 0.2), ("adamw", 0.02))
        ),
    ],
)
def test_schedulers_do_not_compile_again(
    name: str, schedule: Any, programs: int
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before")
        assert compare(OPTIMIZERS[name][0], schedule=schedule, steps=8) == programs


@pytest.mark.slow
def test_how_an_optimizer_computes_stays_its_own() -> None:
    """A traced step works without, as one that branches on its count must."""
    model = build()
    how = {"foreach": True, "capturable": False}
    optimizer = torch.optim.RAdam(model.parameters(), 0.01, **how)
    step = train_step(model, optimizer)
    for batch in batches(2):
        step(*batch)
        (group,) = optimizer.param_groups
        assert how.items() <= group.items()


@pytest.mark.slow
class Summed(nn.Module):
    """Reads the sum of two parameters, so that they have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.a + self.b)).square().mean()


def test_state_of_equal_gradients_has_memory_of_its_own() -> None:
    """Momentum begins as a copy of the gradient."""
    each = []
    for traced in (False, True):
        model, x = Summed(), torch.randn(8, 4, generator=torch.manual_seed(0))
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
        step = train_step(model, sgd, lambda model, x: model(x)) if traced else None
        for _ in range(3):
            sgd.zero_grad()
            if step is not None:
                step(x)
            else:
                model(x).backward()
                sgd.step()
        each.append(model.state_dict())
    torch.testing.assert_close(*each)


def test_groups() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        groups = [
            {"params": [first], "lr": 0.02, "weight_decay": 0.3},
            {"params": rest, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    assert compare(make) == 1


@pytest.mark.slow
def test_decay_that_becomes_zero() -> None:
    """The optimizer branches on it, so that there are two programs."""
    runs = []
    for compiled in (False, True):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.3)
        step = train_step(model, optimizer) if compiled else None
        before = len(fxpar.plans())
        losses = []
        for decay, batch in zip((0.3, 0.2, 0.1, 0.0, 0.0), batches(5), strict=True):
            optimizer.param_groups[0]["weight_decay"] = decay
            loss = step(*batch) if step else eager_step(model, optimizer, batch, None)
            losses.append(float(loss))
        runs.append((losses, model.state_dict()))
        programs = len(fxpar.plans()) - before
    same(runs[1], runs[0])
    assert programs == 3  # constant, input not zero, input zero


@pytest.mark.slow
def test_what_a_step_does_not_touch() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    unused, frozen = model.unused.clone(), model.frozen.clone()

    def looks(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return loss_fn(model, x, y), 2 * model.unused

    loss, seen = train_step(model, optimizer, looks)(*batches(1)[0])
    assert not seen.requires_grad
    assert not loss.requires_grad and loss.shape == ()
    assert torch.equal(model.unused, unused) and torch.equal(model.frozen, frozen)
    assert model.unused not in optimizer.state and model.frozen not in optimizer.state
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_the_eager_loop_goes_on() -> None:
    """After two steps each on its own, a stock optimizer takes over the state."""
    model, want = build(), build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    reference = torch.optim.AdamW(want.parameters(), 0.01)
    step = train_step(model, optimizer)
    for batch in batches(2):
        step(*batch)
        eager_step(want, reference, batch, None)
    taken = torch.optim.AdamW(model.parameters(), 0.5)
    taken.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in batches(2):
        loss = eager_step(model, taken, batch, None)
        assert loss == pytest.approx(eager_step(want, reference, batch, None))
    same(model.state_dict(), want.state_dict())
    same(taken.state_dict(), reference.state_dict())


def test_state_that_is_loaded_is_used() -> None:
    """``load_state_dict`` puts other tensors in the place of those a step was with."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = train_step(model, optimizer)
    first, second = batches(2)
    step(*first)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before = len(fxpar.plans())
    want = step(*second).item()
    after = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert step(*second).item() == want
    same((model.state_dict(), optimizer.state_dict()), after, 0.0)
    assert len(fxpar.plans()) == before


@pytest.mark.slow
def test_another_batch_size_compiles_again() -> None:
    model, want = build(), build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    reference = torch.optim.AdamW(want.parameters(), 0.01)
    step, before = train_step(model, optimizer), len(fxpar.plans())
    for size in (8, 6, 8):
        (batch,) = batches(1, size)
        loss = step(*batch).item()
        assert loss == pytest.approx(eager_step(want, reference, batch, None))
    same(model.state_dict(), want.state_dict())
    assert len(fxpar.plans()) - before <= 3


def test_python_values_are_guarded() -> None:
    """What the forward reads in Python is looked at again in every step."""
    model = build()
    factor = [1.0]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return factor[0] * loss_fn(model, x, y)

    step, (batch,) = train_step(model, optimizer, loss), batches(1)
    first = step(*batch).item()
    factor[0] = 3.0
    assert step(*batch).item() == pytest.approx(3 * first)
    mean = model.norm.running_mean.clone()
    model.eval()
    step(*batch)
    assert torch.equal(model.norm.running_mean, mean)


def test_logging_does_not_break_the_graph() -> None:
    model = build()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        LOG.warning("a step")
        return loss_fn(model, x, y)

    step = train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    batch = batches(1)[0]
    want = loss_fn(build(), *batch).item()
    assert step(*batch).item() == pytest.approx(want)


def test_more_results_and_keywords() -> None:
    model = build()

    def loss(model: nn.Module, *, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        return F.mse_loss(out, y), {"out": out}

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batches(1)[0]
    want = copy.deepcopy(model)(x)
    got, more = train_step(model, optimizer, loss)(x=x, y=y)
    same(more["out"], want.detach())
    same(got, F.mse_loss(want, y).detach())


def test_dropout_draws_as_the_compiled_loop() -> None:
    runs = []
    for whole in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"codegen": "eager"}
        step = train_step(model, optimizer)
        compiled = torch.compile(model, backend="fxpar", options=options)
        torch.manual_seed(3)
        losses = [
            step(*batch).item()
            if whole
            else eager_step(compiled, optimizer, batch, None)
            for batch in batches(3)
        ]
        runs.append((losses, model.state_dict()))
    same(runs[1], runs[0])


def test_checkpointed_layers_draw_once() -> None:
    """A backward that computes a checkpointed region again uses its first mask."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(layers.parameters(), 1.0)

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        out = checkpoint(model, x, use_reentrant=False)
        return out.sum(), out

    before = layers[0].weight.detach().clone()
    x = torch.ones(4, 8)
    _, out = train_step(layers, optimizer, loss)(x)
    scale = (out != 0).double() * 2
    same(before - layers[0].weight, scale.T @ x)


def test_post_hooks_run() -> None:
    model, seen = build(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: seen.append(model.scale.item()))
    step = train_step(model, optimizer)
    for batch in batches(2):
        step(*batch)
    assert len(seen) == 2 and seen[-1] == model.scale.item()


def test_every_op_knows_its_phase(tmp_path: Any) -> None:
    """The border between backward and update stays visible in what is run."""

    kept: list[Any] = []
    run = compilation.run_op_by_op

    def keep(gm: Any, examples: Any) -> Any:
        kept.append(gm.graph)
        return run(gm, examples)

    compilation.run_op_by_op = keep  # type: ignore[assignment]
    try:
        model = build()
        train_step(model, torch.optim.SGD(model.parameters(), 0.1))(*batches(1)[0])
    finally:
        compilation.run_op_by_op = run
    (graph,) = kept
    calls = [n for n in graph.nodes if n.op == "call_function"]
    phases = [n.meta.get("custom", {}).get("fxpar_phase") for n in calls]
    assert set(phases) == {"forward", "backward", "update"}
    order = [phases.index(phase) for phase in ("forward", "backward", "update")]
    assert order == sorted(order)
    assert set(phases[order[2] :]) == {"update"}


def test_generated_kernels() -> None:
    # Large enough for corrections of bias by a kernel of their own.
    model, want = (
        nn.Sequential(nn.Linear(8, 8192), nn.ReLU(), nn.Linear(8192, 4))
        for _ in range(2)
    )
    want.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    reference = torch.optim.AdamW(want.parameters(), 0.01)
    step = train_step(model, optimizer, options={"codegen": "inductor"})
    for batch in batches(3):
        loss = step(*batch).item()
        assert loss == pytest.approx(eager_step(want, reference, batch, None))
    same(model.state_dict(), want.state_dict())
    same(optimizer.state_dict(), reference.state_dict())


# What is refused


class Attribute(Counts):
    count = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.done = 0

    def step(self) -> None:
        self.done += 1


class Item(Counts):
    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-1 / float(p.grad.abs().max()))


class Branches(Counts):
    """Asks for a number that it changed before: that of this step is not known."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None and group["count"] > 1:
                    p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.filterwarnings("ignore:count of Branches")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Branches, "Branches counts steps in 'count' of a group"),
        (Attribute, "changes its attribute 'done'"),
        (Item, "step of Item cannot be traced: it reads the value of a tensor"),
        (
            lambda p: torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1),
            "SGD holds no parameter that the loss depends on",
        ),
    ],
)
def test_optimizers_that_cannot_be_traced(make: Make, says: str) -> None:
    model = build()
    step = train_step(model, make(model.parameters()))
    with pytest.raises(PlanError, match=says) as raised:
        step(*batches(1)[0])
    assert "fix:" in str(raised.value)


def test_an_optimizer_with_a_closure() -> None:
    model = build()
    with pytest.raises(PlanError, match="LBFGS calls a closure"):
        train_step(model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_with_a_pre_hook() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(PlanError, match="hook that runs before"):
        train_step(model, optimizer)


def test_a_pre_hook_of_all_optimizers() -> None:
    model = build()
    step = train_step(model, torch.optim.SGD(model.parameters(), 0.1))
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(PlanError, match="hook that runs before"):
            step(*batches(1)[0])
    finally:
        hook.remove()
    step(*batches(1)[0])


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda m, x, y: (m(x) - y) ** 2, "should be a scalar, and is"),
        (lambda m, x, y: loss_fn(m, x, y).detach(), "depends on no parameter"),
        (lambda m, x, y: (torch._dynamo.graph_break(), m(x).sum())[1], "not one graph"),
    ],
)
def test_losses_that_are_none(loss: Any, says: str) -> None:
    model = build()
    step = train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    with pytest.raises(PlanError, match=says) as raised:
        step(*batches(1)[0])
    assert "fix:" in str(raised.value)


def test_all_values_of_a_float_have_one_program() -> None:
    """More of them than Dynamo compiles a function for."""
    losses, before = [], len(fxpar.plans())
    x, y = batches(1)[0]
    for compiled in (False, True):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss(m: Any, x: torch.Tensor, y: torch.Tensor, k: float) -> torch.Tensor:
            return loss_fn(m, x, y) * k + (1 - k) * m(x).square().mean()

        step = train_step(model, optimizer, loss) if compiled else None
        for i in range(torch._dynamo.config.recompile_limit + 2):
            call = functools.partial(loss, model, k=i / 10)
            losses.append(
                step(x, y, k=i / 10).item()
                if step
                else loop(call, optimizer, [(x, y)])[0][0]
            )
    count = len(losses) // 2
    same(losses[count:], losses[:count])
    assert len(fxpar.plans()) - before == 2  # Dynamo takes the first for fixed


def test_the_limit_of_dynamo_is_an_error_with_a_fix() -> None:
    model, (x, y) = build(), batches(1)[0]

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor, way: str) -> torch.Tensor:
        return loss_fn(m, x, y) * (2 if way == "twice" else 1)

    step = train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    with torch._dynamo.config.patch(recompile_limit=1):
        step(x, y, "once")
        with pytest.raises(PlanError, match="as often as.*\n.*as a tensor"):
            step(x, y, "twice")


def test_the_line_of_what_is_not_one_graph_is_the_users() -> None:
    """A module of torch's looks at the values of a mask."""
    attention = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 1
    )

    def loss(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return m(x, mask=mask).square().mean()

    step = train_step(attention, torch.optim.SGD(attention.parameters(), 0.1), loss)
    with pytest.raises(PlanError, match="not one graph") as raised:
        step(torch.randn(2, 3, 4), torch.full((3, 3), -1.0).triu(1))
    assert "m(x, mask=mask)" in (raised.value.where or "")


def test_a_folder_beside_torchs_is_the_users() -> None:
    torch_file, beside = torch.__file__, torch.__file__.replace("/torch/", "/torchx/")
    error = torch._dynamo.exc.Unsupported("no", case_name="")
    frames = [(beside, 3, "f"), (torch_file, 7, "g")]
    error.real_stack = traceback.StackSummary.from_list(
        [traceback.FrameSummary(*frame, line="x") for frame in frames]
    )
    assert _torch.dynamo.why_not_one_graph(error) == ("no", f"{beside}:3: x")


class Repeated(nn.Module):
    """Three rounds of a loop, whose result no gradient flows to unless ``trained``."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first, self.last, self.trained = nn.Linear(4, 4), nn.Linear(4, 4), trained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = torch.tensor(0), self.first(x)
        with torch.set_grad_enabled(self.trained):
            _, y = while_loop(
                lambda i, y: i < 3, lambda i, y: (i + 1, 2 * torch.tanh(y)), start
            )
        return self.last(y)


def test_a_loop_of_steps_unknown() -> None:
    x, runs = torch.randn(6, 4), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Repeated(trained=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
            return (m(x) ** 2).mean()

        if compiled:
            value = train_step(model, optimizer, loss)(x)
        else:
            value = loss(model, x)
            value.backward()
            optimizer.step()
        runs.append((value.detach(), model.state_dict()))
    same(runs[1], runs[0])
    model = Repeated(trained=True)
    step = train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    with pytest.raises(PlanError, match="how many steps a while_loop keeps") as raised:
        step(x)
    assert f"at: {__file__}" in str(raised.value) and "scan" in str(raised.value)


def test_a_hook_on_a_gradient() -> None:
    model = build()
    model.scale.register_hook(lambda gradient: 2 * gradient)
    step = train_step(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(PlanError, match="parameter scale has a hook"):
        step(*batches(1)[0])


class Rows(nn.Module):
    """Adds to a row of a buffer, which is a buffer too, and reads another tensor."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        table = torch.zeros(3, 4)
        self.register_buffer("row", table[1])
        self.register_buffer("read", table if shared else table[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.row.add_(x.detach().sum(0))
        return self.linear(x) + self.read.sum()


@pytest.mark.parametrize("shared", [True, False])
def test_buffers_that_share_memory(shared: bool) -> None:
    """Of which one is written: refused. Rows that lie beside each other are not."""
    model = Rows(shared)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.randn(2, 4)
    expected = loss(copy.deepcopy(model), x)
    step = train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    if shared:
        with pytest.raises(PlanError, match="share memory, and the step writes"):
            step(x)
    else:
        torch.testing.assert_close(step(x), expected.detach())
        torch.testing.assert_close(model.row, x.sum(0))


@pytest.mark.parametrize("name", ["reduce_dtype", "outputs"])
def test_options_that_a_step_has_not(name: str) -> None:
    model = build()
    value = {"reduce_dtype": "float32", "outputs": "dtensor"}[name]
    with pytest.raises(OptionError, match=f"no option '{name}'"):
        train_step(
            model, torch.optim.SGD(model.parameters(), 0.1), options={name: value}
        )


def test_clip_is_a_norm() -> None:
    model = build()
    with pytest.raises(OptionError, match="clip cannot be"):
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), clip=-1.0)


class Root(Counts):
    """Takes the root of the learning rate in Python, where it cannot be an input."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-math.sqrt(group["lr"]))


def test_a_rate_that_cannot_be_an_input() -> None:
    with pytest.warns(FxparWarning, match="lr of Root is a constant"):
        programs = compare(
            Root, schedule=lambda o: lr_scheduler.StepLR(o, 2, 0.5), steps=4
        )
    assert programs == 2
