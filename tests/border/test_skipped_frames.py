"""Code that Dynamo does not compile, in a model given to ``torch.compile``: said once,
and in local mode its gradients are those DistributedDataParallel gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fxpar import FxparWarning
from tests.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

RANKS, STEPS = 2, 3


class WithLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        h, _ = self.lstm(self.up(x).tanh())
        return self.down(h)


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
            pass
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
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(6), Disabled()
        self.out = nn.Linear(6, 4)

    @torch._dynamo.disable
    def normed(self, h):
        return self.norm(h.flatten(0, 1)).view(h.shape)

    def forward(self, x):
        return self.out(self.normed(self.up(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": WithLSTM,
    "nonzero": NonzeroLoop,
    "item": ItemInTry,
    "disabled": Disabled,
    "tied": lambda: Disabled(tied=True),
    "all disabled": WhollyDisabled,
    "whole": Whole,
    "norm": WithNorm,
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
    return [got, train(ddp, same, **how)]


PLAIN: dict[str, Any] = {"penalty": False}


@pytest.mark.parametrize(
    ("name", "how", "by"),
    [
        ("lstm", PLAIN, "module"),
        ("lstm", PLAIN, "method"),
        ("lstm", PLAIN, "function"),
        ("nonzero", PLAIN, "module"),
        ("item", PLAIN, "module"),
        ("disabled", PLAIN, "module"),
        ("tied", PLAIN, "module"),
        ("all disabled", PLAIN, "module"),
        ("all disabled", PLAIN, "function"),
        ("whole", {"penalty": True}, "module"),
        ("lstm", {"penalty": True, "rounds": 2, "clip": 0.5}, "module"),
        ("tied", {"penalty": True, "rounds": 2, "clip": 0.5}, "module"),
    ],
)
def test_trains_as_ddp(name: str, how: dict[str, Any], by: str) -> None:
    runs = shared_pool(RANKS).run(against_ddp, name, how, by)
    for got, want in runs:
        assert got.keys() == want.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-12)
            assert torch.equal(got[key], runs[0][0][key]), key
