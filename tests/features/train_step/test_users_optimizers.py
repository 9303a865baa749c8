"""``fxpar.train_step`` with optimizers that keep values in places of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fxpar
from fxpar.errors import PlanError


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Scaled(torch.optim.Optimizer):
    """Descends with a gradient times what ``factor`` gives, each step another."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "odd": False})
        self._done, self.notes = 0, {"done": 0}

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        return 1

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * self.factor(p, group), alpha=group["lr"])


class PrivateCount(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        self._done += 1
        return self._done


class CountInDict(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        self.notes["done"] += 1
        return self.notes["done"]


class CountInObject(Scaled):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.tracker = SimpleNamespace(done=0)

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        self.tracker.done += 1
        return self.tracker.done


class TensorAttribute(Scaled):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.scale = torch.ones(())

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        return self.scale.mul_(2)


class Wraps(Scaled):
    """Leaves the step to another, whose parameters have no gradients here."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = torch.optim.SGD(parameters, 0.1)

    def step(self) -> None:
        self.inner.step()


class Drops(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        return 1 + self.state[p].pop("once", None) if self.state[p] else self.make(p)

    def make(self, p: torch.Tensor) -> int:
        self.state[p]["once"] = torch.ones_like(p)
        return 1


class OfNoParameter(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        self.state["done"] = self.state.get("done", 0) + 1
        return self.state["done"]


class History(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        self.state[p].setdefault("history", []).append(p.grad)
        return len(self.state[p]["history"])


class Nested(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        inside = self.state[p].setdefault("inside", {"m": torch.zeros_like(p)})
        return inside["m"].add_(1)


class CountInsideOfState(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        notes = self.state[p].setdefault("notes", {"done": 0})
        notes["done"] += 1
        return notes["done"]


class CountInObjectOfGroup(Scaled):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["tracker"] = SimpleNamespace(done=0)

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        group["tracker"].done += 1
        return group["tracker"].done


class FlagOfState(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        self.state[p]["odd"] = not self.state[p].get("odd", False)
        return 1 if self.state[p]["odd"] else 3


class FlagOfGroup(Scaled):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> Any:
        group["odd"] ^= p.dim() == 2
        return 1 if group["odd"] else 3


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def made() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2).double()


X = torch.arange(12, dtype=torch.float64).view(3, 4) / 12


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return fxpar.train_step(model, mean, optimizer, options={"codegen": "eager"})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (PrivateCount, "changes its attribute '_done'"),
        (CountInDict, "changes its attribute 'notes'"),
        (CountInObject, "changes its attribute 'tracker'"),
        (TensorAttribute, "keeps an object of Tensor in its attribute 'scale'"),
        (Wraps, "keeps an object of SGD in its attribute 'inner'"),
        (Drops, "takes 'once' away"),
        (OfNoParameter, "keeps state that belongs to no parameter, 'done'"),
        (History, "makes 'history', of several values, longer"),
        (Nested, "keeps tensors inside of 'inside' of its state"),
        (CountInsideOfState, "changes what is inside of 'notes'"),
        (CountInObjectOfGroup, "changes what is inside of 'tracker'"),
    ],
)
def test_values_that_no_graph_gives(make: Callable[..., Any], says: str) -> None:
    model = made()
    with pytest.raises(PlanError, match=says) as raised:
        step = step_of(model, make(model.parameters()))
        for _ in range(2):
            step(X)
    assert "fix:" in str(raised.value)


@pytest.mark.parametrize("make", [FlagOfState, FlagOfGroup])
def test_flags_choose_among_graphs(make: Callable[..., Any]) -> None:
    eager, ours = made(), made()
    optimizer, loop = make(ours.parameters()), make(eager.parameters())
    step = step_of(ours, optimizer)
    before = len(fxpar.plans())
    for _ in range(5):
        loss = mean(eager, X)
        loop.zero_grad()
        loss.backward()
        loop.step()
        torch.testing.assert_close(step(X), loss.detach())
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), loop.state_dict())
    assert len(fxpar.plans()) - before <= 3


def test_hooks_that_come_later() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step, calls = step_of(model, optimizer), list[Any]()
    seen = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    step(X)
    assert calls == [1]
    seen.remove()
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(PlanError, match="a hook that runs before its step"):
        step(X)
    hook.remove()
    hook = model.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(PlanError, match="parameter bias has a hook on its gradient"):
        step(X)
    hook.remove()
    step(X)
    assert calls == [1]
