"""Code that Dynamo does not compile, in a model given to ``torch.compile``: said once,
and in local mode its gradients are those DistributedDataParallel gives."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar import FxparWarning
from fxpar.errors import RankMismatchError
from tests.helpers.pairs import diagonal
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

RANKS, STEPS = 2, 3
SKIPPED = "WithLSTM.forward is in no graph: .* LSTM"
BROKEN = r".* is in no graph[:.]|graph0 ends in a graph break"
# Torch 2.15 traces what stands before the LSTM.
LSTM = SKIPPED if torch.__version__ < "2.15" else BROKEN


class WithLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        h, _ = self.lstm(self.up(x).tanh())
        return self.down(h)


class WithGRU(WithLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.GRU(6, 6, batch_first=True)


class NonzeroLoop(nn.Module):
    """Ranks take different ways, and not all use ``extra``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)
        self.extra = nn.Linear(6, 6)

    def forward(self, x):
        h = self.up(x).tanh()
        for i in range(2):
            rows = torch.nonzero(x[:, i, 0] > 1.0).flatten()
            if len(rows):
                h = h + self.extra(h[rows]).mean(0)
        return self.down(h)


class ItemInTry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = self.up(x)
        try:
            h = h * (2 if h.square().mean().item() > 0.5 else 3)
        except ValueError:
            h = -h
        return self.down(h.tanh())


class Disabled(nn.Module):
    """The disabled part reads a weight that a graph reads too."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)
        self.mid = nn.Linear(6, 6)
        self.last = self.mid if tied else nn.Linear(6, 6)

    @torch._dynamo.disable
    def middle(self, h):
        return self.mid(h).tanh()

    def forward(self, x):
        return self.down(self.last(self.middle(self.up(x).tanh())))


class WhollyDisabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    @torch._dynamo.disable
    def forward(self, x):
        return self.down(self.up(x).tanh())


class Whole(nn.Module):
    """All of it in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class WithNorm(nn.Module):
    """Skipped code that writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(6)

    @torch._dynamo.disable
    def normed(self, h):
        return self.norm(h.flatten(0, 1)).view(h.shape)

    def forward(self, x):
        return self.down(self.normed(self.up(x)))


class BrokenAtOnce(nn.Module):
    """The norm reads how many batches there were: a break before anything is traced,
    behind which a module of torch, that Dynamo does not compile by itself, is run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.BatchNorm1d(3, momentum=None), nn.Linear(4, 1)

    def forward(self, x):
        return self.down(self.norm(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": WithLSTM,
    "gru": WithGRU,
    "nonzero": NonzeroLoop,
    "item": ItemInTry,
    "disabled": Disabled,
    "tied": lambda: Disabled(tied=True),
    "all disabled": WhollyDisabled,
    "whole": Whole,
    "norm": WithNorm,
    "broken at once": BrokenAtOnce,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batches() -> Iterator[torch.Tensor]:
    """This rank's parts: on rank 0 alone a value is above 1 at first."""
    rank = dist.get_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(RANKS * step + rank)
        x = torch.rand(4, 3, 4, generator=generator, dtype=torch.float64)
        x[: 2 * step + 1 - rank, 0, 0] += 1.0 - rank * (step == 0)
        yield x


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"codegen": "eager", "inputs": "local"} | options
    return torch.compile(model, backend="fxpar", options=options)


def train(
    run: Any, model: nn.Module, *, rounds: int = 1, clip: float = 0.0, penalty: bool
) -> dict[str, torch.Tensor]:
    """Parameters and buffers after STEPS steps of ``rounds`` backwards each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    for x in batches():
        optimizer.zero_grad()
        for i in range(rounds):
            loss = (run(x * (i + 1)) - x.sum(2, keepdim=True)).square().mean()
            if penalty:
                loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def against_ddp(name: str, how: dict[str, Any], by: str) -> list[Any]:
    """What fxpar makes of a model, and DDP."""
    model = made(name)
    if by == "method":
        model.compile(backend="fxpar", options={"codegen": "eager", "inputs": "local"})
        run: Any = model
    elif by == "function":
        run = compiled(lambda x: model(x))
    else:
        run = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)
        got = train(run, model, **how)
    same = made(name)
    ddp = nn.parallel.DistributedDataParallel(same, find_unused_parameters=True)
    want = train(ddp, same, **how)
    return [got, want]


PLAIN: dict[str, Any] = {"penalty": False}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "how", "by"),
    [
        ("lstm", PLAIN, "module"),
        slow("lstm", PLAIN, "method"),
        slow("lstm", PLAIN, "function"),
        ("nonzero", PLAIN, "module"),
        slow("item", PLAIN, "module"),
        slow("disabled", PLAIN, "module"),
        slow("tied", PLAIN, "module"),
        slow("all disabled", PLAIN, "module"),
        slow("all disabled", PLAIN, "function"),
        slow("whole", {"penalty": True}, "module"),
        slow("lstm", {"penalty": True, "rounds": 2, "clip": 0.5}, "module"),
        slow("tied", {"penalty": True, "rounds": 2, "clip": 0.5}, "module"),
        slow("norm", PLAIN, "module"),
    ],
)
def test_trains_as_ddp(name: str, how: dict[str, Any], by: str) -> None:
    runs = shared_pool(RANKS).run(against_ddp, name, how, by)
    for got, want in runs:
        assert got.keys() == want.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-12)
            if "running" not in key:
                assert torch.equal(got[key], runs[0][0][key]), key


def sharded(name: str, inputs: str) -> list[Any]:
    """Whole parameters after training a sharded model, and on one device."""
    model, alone = made(name), made(name)
    alike = torch.Generator().manual_seed(7)
    fxpar.shard(model)
    run = compiled(model, inputs=inputs)
    ours = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    theirs = torch.optim.SGD(alone.parameters(), 0.5, momentum=0.5)
    for _ in range(STEPS):
        x = torch.randn(4, 3, 4, generator=alike, dtype=torch.float64)
        part = x.chunk(RANKS)[dist.get_rank()] if inputs == "local" else x
        for optimizer, call, fed in ((ours, run, part), (theirs, alone, x)):
            optimizer.zero_grad()
            (call(fed) - fed.sum(2, keepdim=True)).square().mean().backward()
            optimizer.step()
    got = {k: p.full_tensor().detach() for k, p in model.named_parameters()}
    return [got, {k: p.detach() for k, p in alone.named_parameters()}]


@pytest.mark.parametrize("inputs", [slow("global"), "local"])
@pytest.mark.parametrize(
    "name", ["lstm", slow("gru"), slow("tied"), slow("all disabled")]
)
def test_sharded_parameters_train_as_on_one_device(name: str, inputs: str) -> None:
    for got, want in shared_pool(RANKS).run(sharded, name, inputs):
        assert got.keys() == want.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-12)


def sharded_on_other_ways() -> None:
    model = made("nonzero")
    fxpar.shard(model)
    train(compiled(model), model, penalty=False)


def test_ranks_of_a_sharded_model_that_go_other_ways_are_told() -> None:
    for error in shared_pool(RANKS).errors(sharded_on_other_ways):
        assert isinstance(error, RankMismatchError)
        assert "code that no graph contains" in str(error)


def warned(name: str, inputs: str) -> list[str]:
    """What is said in two calls."""
    run = compiled(made(name), inputs=inputs, plan="propagate")  # which splits it
    x = torch.ones(4, 3, 4).double()
    if inputs == "local":  # one batch on all ranks is said as well
        x *= 1 + dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(x).sum().backward()
    return [str(w.message) for w in caught if w.category is FxparWarning]


# What is said of a model, and a word of the line.
SAID = {
    "lstm": (LSTM, "self.lstm"),
    "nonzero": ("NonzeroLoop.forward is in no graph: Dynamic shape", "nonzero"),
    "item": ("ItemInTry.forward is in no graph: .*item", ".item()"),
    "all disabled": ("WhollyDisabled is in no graph: .*disable", None),
    "broken at once": ("code at a graph break is in no graph: .*item", "self.norm"),
}


@pytest.mark.parametrize(("name", "inputs"), diagonal([*SAID], ["global", "local"]))
def test_a_skipped_frame_is_said_once(name: str, inputs: str) -> None:
    why, line = SAID[name]
    first, *others = shared_pool(RANKS).run(warned, name, inputs)
    (text,) = first
    assert re.match(why, text)
    is_break = name == "lstm" and LSTM is BROKEN
    cost = "whole on every rank" if is_break else "nothing of it is split"
    assert ("as under DDP" if inputs == "local" else cost) in text
    if line is not None:
        (at,) = [row for row in text.splitlines() if row.startswith("  at:")]
        assert "test_skipped_frames.py" in at and line in at
    assert not any(others)


def test_a_break_in_local_mode_is_said_once() -> None:
    first, *others = shared_pool(RANKS).run(warned, "disabled", "local")
    (text,) = first
    assert "graph break" in text and "as under DDP" in text
    assert "self.middle(" in text
    assert not any(others)


def head_outside(how: str) -> list[Any]:
    """Part of the model is not compiled at all."""
    body, head = made("whole"), nn.Linear(1, 1).double()
    run = compiled(body)
    outside: Any = head
    if how == "ddp":
        outside = nn.parallel.DistributedDataParallel(head)
    else:  # nothing of a parameter without elements differs
        head.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    both = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(both, 0.5)
    for x in batches():
        optimizer.zero_grad()
        outside(run(x)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in both]


@pytest.mark.parametrize("how", ["plain", slow("ddp")])
def test_code_that_is_not_compiled_is_averaged(how: str) -> None:
    """What one optimizer trains together."""
    first, second = shared_pool(RANKS).run(head_outside, how)
    for mine, other in zip(first, second, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


def head_of_its_own(how: str) -> list[Any]:
    """The head has an optimizer of its own, or is in use from the second step on, or
    is trained on one rank only."""
    body, head = made("whole"), nn.Linear(1, 1).double()
    run = compiled(body)
    outside: Any = head
    if how == "ddp":
        outside = nn.parallel.DistributedDataParallel(head)
    else:  # nothing of a parameter without elements differs
        head.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    both = [*body.parameters(), *head.parameters()]
    if how == "late":
        optimizers = [torch.optim.SGD(both, 0.5)]
    else:
        optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (body, head)]
    for step, x in enumerate(batches()):
        y = run(x)
        if how == "one rank":
            y.square().mean().backward()
            if dist.get_rank() == 0:
                outside(y.detach()).sum().backward()
        elif how == "late" and not step:
            y.square().mean().backward()
        else:
            outside(y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in both]


def steps_of_its_own() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head_of_its_own("own")
        torch.manual_seed(0)
        model = nn.Linear(4, 4)  # its gradients are of the whole batch on each rank
        options = {"codegen": "eager", "inputs": "global"}
        run = torch.compile(model, backend="fxpar", options=options)
        run(torch.randn(4, 4))
        model.weight.grad = torch.ones(4, 4)
        torch.optim.SGD(model.parameters(), 0.5).step()
    texts = (str(w.message) for w in caught if w.category is FxparWarning)
    return [text for text in texts if "are not averaged" in text]


def test_gradients_that_nobody_averages_are_said() -> None:
    for texts in shared_pool(RANKS).run(steps_of_its_own):
        (text,) = texts
        assert "SGD steps" in text and "number 0 [1, 1], number 1 [1]" in text
        assert "fxpar.alone()" in text and "test_skipped_frames.py" in text


@pytest.mark.parametrize("how", [slow("ddp"), slow("one rank"), "late"])
def test_gradients_that_are_alike_or_of_one_rank_are_no_error(how: str) -> None:
    first, second = shared_pool(RANKS).run(head_of_its_own, how)
    for mine, other in zip(first[:4], second[:4], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


def whole_step(name: str) -> list[Any]:
    """The compiled function runs the backward itself; other backwards fail between."""
    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x):
        model(x).square().mean().backward()

    run = compiled(step)
    for x in batches():
        y = model(x)
        y.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            (y.sum() + model.down.bias.sum()).backward()
        optimizer.zero_grad()
        run(x)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", [slow("lstm"), "disabled"])
def test_a_compiled_function_that_runs_the_backward(name: str) -> None:
    first, second = shared_pool(RANKS).run(whole_step, name)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def unfrozen() -> list[Any]:
    """A parameter that is frozen in the first steps."""
    model = made("lstm")
    run = compiled(model)
    model.down.requires_grad_(False)
    run(next(batches())).sum().backward()
    model.down.requires_grad_(True)
    model.zero_grad()
    run(next(batches())).sum().backward()
    return [model.down.weight.grad.clone(), model.up.weight.grad.clone()]


def test_a_parameter_that_was_frozen() -> None:
    first, second = shared_pool(RANKS).run(unfrozen)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)
