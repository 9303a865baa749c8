"""Training scripts whose layers, losses or results are of an odd kind, as those of
``trial_scripts``: statistics of the whole batch, sizes and rows of parameters that
leave a model, spectra, capacities of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.trial_scripts import (
    BY_HAND,
    LOCAL,
    Residual,
    Values,
    rows,
    state,
)


def decorrelated(use: Any) -> Values:
    """Two views whose features are to be alike and uncorrelated over the batch."""
    norm = nn.BatchNorm1d(6, affine=False)
    model = use.model(nn.Sequential(Residual(8, 6), norm))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def loss(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        a, b = model(one), model(two)
        both, own = a.T @ b / len(a), a - a.mean(0)
        spread = F.relu(1 - (own.var(0) + 1e-4).sqrt()).mean()
        among = (own.T @ own / (len(own) - 1)).square().sum()
        pull = (both.diagonal() - 1).square().sum() + 0.01 * both.square().sum()
        return pull + spread + 0.1 * among + F.mse_loss(a, b)

    run, losses = use.compile(loss), []
    for _ in range(3):
        value = run(use.part(rows(8, 8)), use.part(rows(8, 8)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return {"state_losses": losses, "state": state(model)}


class Normed(nn.Module):
    """Norms by batch, by groups and by sample, each with running statistics or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.groups, self.third = nn.GroupNorm(2, 8), nn.Conv2d(8, 6, 3, stride=2)
        self.own = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.batch(self.first(x)))
        x = F.silu(self.groups(self.second(x))) + x
        return self.last(self.own(self.third(x)).tanh().mean((2, 3)))


def norms(use: Any) -> Values:
    """Training and evaluation in turns, the loss outside of the model."""
    model = use.model(Normed())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = use.step(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)
    run, out = use.compile(model), []
    for _ in range(3):
        model.train()
        labels = torch.randint(4, (8,))
        out.append(step(use.part(rows(8, 3, 6, 6)), use.part(labels)))
        model.eval()
        with torch.no_grad():
            out.append(run(use.part(rows(8, 3, 6, 6))).square().mean())
    return {"losses": out, "state": state(model)}


def rows_of_weights(use: Any) -> Values:
    """Means by feature and norms of a weight's rows, beside the loss."""
    model = use.model(Residual(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = model(x)
        return y.square().mean(), y.mean(0), model.first.weight.norm(dim=1)

    run, out = use.compile(loss), []
    for _ in range(3):
        value, *others = run(use.part(rows(8, 8)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        out += [value.detach(), *(x.detach() for x in others)]
    return {"state_out": out, "state": state(model)}


def sums_over_sizes(use: Any) -> Values:
    """A sum over the batch, and the size that it is divided by outside."""
    model = use.model(Residual(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(x) - 1).square().sum(), x.shape[0] * 4

    run = use.compile(loss)
    for size in (8, 8, 4, 8):
        total, count = run(use.part(rows(size, 8)))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"state": state(model)}


class Spectrum(nn.Module):
    """A weight for each frequency, and the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.rand(9, 1)), nn.Linear(64, 3)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.stft(x, 16, 8, window=self.window, return_complex=True)
        return self.last(torch.istft(y * self.weight, 16, 8, window=self.window))


def spectra(use: Any) -> Values:
    model = use.model(Spectrum())
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    run = use.compile(model)
    for _ in range(2):
        loss = run(use.part(rows(8, 64))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "state": state(model)}


class Capacity(nn.Module):
    """Four experts with room for some of the tokens, as einsums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 12, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        room, chances = len(tokens) // 2, self.gate(tokens).softmax(-1)
        weights, experts = chances.topk(2, -1)
        chosen = F.one_hot(experts, 4)
        places = (chosen.flatten(0, 1).cumsum(0) - 1).view(-1, 2, 4) * chosen
        kept = ((places < room) & (chosen > 0))[..., None]
        sent = (F.one_hot(places.clamp(max=room - 1), room) * kept).to(x.dtype)
        inside = torch.einsum("nec,nd->ecd", sent.sum(1), tokens)
        inside = F.gelu(torch.einsum("ecd,edf->ecf", inside, self.up))
        inside = torch.einsum("ecf,efd->ecd", inside, self.down)
        back = torch.einsum("nk,nkec->nec", weights, sent)
        y = torch.einsum("nec,ecd->nd", back, inside)
        shares = chosen[:, 0].to(x.dtype).mean(0) * chances.mean(0)
        return (tokens + y).view_as(x), 4 * shares.sum()


def capacity(use: Any) -> Values:
    model = use.model(Capacity())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z, balance = m(x)
        return F.mse_loss(z, y) + 0.01 * balance

    step = use.step(model, loss_fn, optimizer)
    batches = [(rows(8, 4, 8), rows(8, 4, 8)) for _ in range(2)]
    losses = [step(use.part(x), use.part(y)) for x, y in batches]
    return {"losses": losses, "state": state(model)}


SCRIPTS: dict[str, tuple[str, ...]] = {
    "decorrelated": (*BY_HAND, *LOCAL),
    "norms": (*BY_HAND, "step", *LOCAL),
    "rows_of_weights": (*BY_HAND, *LOCAL),
    "sums_over_sizes": (*BY_HAND, *LOCAL),
    "spectra": (*BY_HAND, *LOCAL),
    "capacity": (*BY_HAND, "step", *LOCAL),
}
