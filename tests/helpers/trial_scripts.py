"""Training scripts as users write them, each a function of a ``trials.Setting``.

They are small and in float64, and return what is compared with one device. ``SCRIPTS``
lists them with the modes they can run in: "compile" and "shard" where a script calls
backward by itself, "step" too where it leaves that to a step; "local" where ranks may
feed parts of its batches, whose losses and results are their own, and "local shard".
"""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

Values = dict[str, Any]


class Residual(nn.Module):
    def __init__(self, inputs: int = 8, outputs: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.dropout = nn.Dropout(0.0)
        self.last = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.last(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rows = nn.LayerNorm(16), nn.Linear(16, 48)
        self.out, self.up = nn.Linear(16, 16), nn.Linear(16, 33)
        self.down = nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(self.norm(x)).view(*x.shape[:2], 3, 4, 4)
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    """Tied, with blocks that are computed again in the backward."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.again = again
        self.words = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            again = self.again and self.training
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(x)


class Ring(nn.Module):
    """Keeps features of former batches in a buffer, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(12, 8))
        self.register_buffer("begin", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        rows = (self.begin + torch.arange(len(x))) % 12
        with torch.no_grad():
            self.kept[rows] = y.detach()
            self.begin.add_(len(x)).remainder_(12)
        return (y @ self.kept.T).softmax(-1).square().mean()


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def state(*modules: nn.Module) -> list[Values]:
    """Parameters and buffers, as they now are."""
    return [
        {name: x.detach() for name, x in module.state_dict().items()}
        for module in modules
    ]


def gradients(module: nn.Module) -> Values:
    named = module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def token_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def language_model(use: Any) -> Values:
    """Clipped steps of a tied model, then three tokens by greedy decoding."""
    model = use.model(Language())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = use.step(model, token_loss, optimizer, clip=0.5)
    ids = [torch.randint(31, (8, 8)) for _ in range(3)]
    losses = [step(use.part(batch)) for batch in ids]
    model.eval()
    run, said = use.compile(model), ids[0][:1, :3]
    with torch.no_grad():
        for _ in range(3 if use.inputs == "global" else 0):
            said = torch.cat([said, run(said)[:, -1:].argmax(-1)], 1)
    return {"losses": losses, "state": state(model), "said": said}


def groups(use: Any) -> Values:
    """Two groups of parameters, a schedule each, batches of two sizes."""
    model = use.model(Residual())
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.1},
            {"params": others, "lr": 3e-2, "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda n: 1 / (1 + n), lambda n: 1.0]
    )
    step = use.step(model, lambda m, x, y: F.mse_loss(m(x), y), optimizer, clip=0.5)
    losses = []
    for size in (8, 8, 6, 8):
        losses.append(step(use.part(rows(size, 8)), use.part(rows(size, 4))))
        rates.step()
    return {"losses": losses, "state": state(model)}


def ring(use: Any) -> Values:
    model = use.model(Ring())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = use.step(model, lambda m, x: m(x), optimizer)
    losses = [step(rows(size, 8)) for size in (8, 8, 5, 8)]
    return {"losses": losses, "state": state(model)}


def two_models(use: Any) -> Values:
    """One function of two models."""
    first, second = use.model(Residual(8, 6)), use.model(Residual(6, 3))
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)

    def losses(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = first(x)
        loss = F.cross_entropy(second(hidden), y) + 0.1 * hidden.square().mean()
        return loss, second(hidden.detach()).argmax(-1)

    run, out = use.compile(losses), []
    for _ in range(3):
        loss, best = run(rows(8, 8), torch.randint(3, (8,)))
        loss.backward()
        out += [loss.detach(), best, gradients(first)]
        optimizer.step()
        optimizer.zero_grad()
    return {"out": out, "state": state(first, second)}


def adversaries(use: Any) -> Values:
    """Two models against each other, an optimizer each."""
    maker, judge = use.model(Residual(4, 8)), use.model(Residual(8, 1))
    makes = torch.optim.Adam(maker.parameters(), 1e-2)
    judges = torch.optim.Adam(judge.parameters(), 1e-2)
    made, judged = use.compile(maker), use.compile(judge)
    losses = []
    for _ in range(2):
        fake = made(use.part(rows(8, 4)))
        loss = F.softplus(-judged(use.part(rows(8, 8)))).mean()
        loss = loss + F.softplus(judged(fake.detach())).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        fooled = F.softplus(-judged(fake)).mean()
        makes.zero_grad()
        fooled.backward()
        makes.step()
        losses += [loss.detach(), fooled.detach()]
    return {"losses": losses, "state": state(maker, judge)}


def variational(use: Any) -> Values:
    """Two models in one function, their loss a sum over the batch and a mean."""
    encoder, decoder = use.model(Residual(8, 6)), use.model(Residual(3, 8))
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)

    def loss(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log = encoder(x).chunk(2, 1)
        guess = decoder(mean + noise * (log / 2).exp())
        rebuilt = F.mse_loss(guess, x, reduction="sum") / len(x)
        return rebuilt - 0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()

    run, losses = use.compile(loss), []
    for _ in range(2):
        value = run(use.part(rows(8, 8)), use.part(rows(8, 3)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return {"losses": losses, "state": state(encoder, decoder)}


def frozen(use: Any) -> Values:
    """Layers are frozen and thawed between steps."""
    model = use.model(Residual(layers=3))
    run, out = use.compile(model), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for i in range(4):
        for j, layer in enumerate(model.layers):
            layer.requires_grad_(j != i % 3)
        loss = run(rows(8, 8)).square().mean()
        loss.backward()
        out += [loss.detach(), sorted(gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    return {"out": out, "state": state(model)}


def many_sizes(use: Any) -> Values:
    """A sum over a list of inputs of other sizes at each step; nothing is zeroed."""
    model = use.model(Residual())
    run, out = use.compile(model), []
    for sizes in ((4, 6), (2,), (4, 4, 4), (1, 7)):
        total = sum((run(rows(size, 8)) - 1).square().sum() for size in sizes)
        loss = total / sum(sizes)
        loss.backward()
        out += [loss.detach(), gradients(model)]
    return {"out": out}


def resumed(use: Any) -> Values:
    """Saved in the middle, and resumed in a model of its own."""

    def made() -> tuple[nn.Module, Any, Any]:
        model = use.model(Residual())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(parts: tuple[nn.Module, Any, Any], batches: list[torch.Tensor]) -> None:
        model, optimizer, rates = parts
        run = use.compile(model)
        for batch in batches:
            run(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.step()

    one, batches, file = made(), [rows(8, 8) for _ in range(4)], io.BytesIO()
    train(one, batches[:2])
    torch.save([part.state_dict() for part in one], file)
    train(one, batches[2:])
    file.seek(0)
    two = made()
    for part, saved in zip(two, torch.load(file, weights_only=False), strict=True):
        part.load_state_dict(saved)
    train(two, batches[2:])
    return {"one": state(one[0]), "two": state(two[0])}


def epochs(use: Any) -> Values:
    """Two epochs of a loader with a short last batch, gradients of two batches at once,
    then what all was right; the best weights are put back."""
    model = use.model(Residual(8, 3))
    run = use.compile(model)
    x, y = rows(29, 8), torch.randint(3, (29,))
    order = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    best, kept, out = float("inf"), {}, []
    for _ in range(2):
        model.train()
        total = 0.0
        for i, (inputs, classes) in enumerate(loader):
            loss = F.cross_entropy(run(inputs), classes)
            (loss / 2).backward()
            total += loss.item() * len(classes)
            if i % 2 or i + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            right = sum((run(a).argmax(-1) == b).sum().item() for a, b in loader)
        if total < best:
            best, kept = total, copy.deepcopy(model.state_dict())
        out += [torch.tensor(total), right]
    model.load_state_dict(kept)
    with torch.no_grad():
        out.append(run(x[:1]))
    return {"out": out, "state": state(model)}


def many_backwards(use: Any) -> Values:
    """Several backwards of one graph, and gradients that are asked for."""
    model = use.model(Residual())

    def losses(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = model(x)
        return y[:, 0].square().mean(), y[:, 1:].abs().mean(), y

    run, out = use.compile(losses), []
    for _ in range(2):
        one, two, _ = run(rows(8, 8))
        one.backward(retain_graph=True)
        out.append(gradients(model))
        two.backward()
        out += [one.detach(), two.detach(), gradients(model)]
    one, two, y = run(rows(8, 8))
    parameters = list(model.parameters())
    out += torch.autograd.grad(two, parameters, retain_graph=True)
    out += torch.autograd.grad(one + y.sum(), [model.last.weight])
    return {"out": out}


def ensemble(use: Any) -> Values:
    """Four models as one by vmap, over stacked parameters."""
    models = [Residual().double() for _ in range(4)]
    stacked, _ = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.Adam(stacked.values(), 1e-2)

    def one(parameters: Values, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(base, parameters, (x,))

    run = use.compile(lambda p, x: torch.func.vmap(one, (0, None))(p, x))
    out = []
    for _ in range(2):
        y = run(stacked, rows(8, 8))
        loss = y.square().mean() + y.var(0).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out += [loss.detach(), y.detach()]
    return {"out": out, "state": dict(stacked)}


def turns(use: Any) -> Values:
    """Forwards without gradients between training ones of the same shape, and an
    average of the weights."""
    model = use.model(Residual())
    run, out = use.compile(model), []
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        batch = rows(8, 8)
        with torch.no_grad():
            out.append(run(batch))
        loss = run(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.2)
        with torch.inference_mode():
            out.append(run(batch) * 1)
        out.append(loss.detach())
    for p, mean in zip(model.parameters(), average, strict=True):
        p.data = mean.data
    with torch.no_grad():
        out.append(run(rows(8, 8)))
    return {"out": out, "average": average}


BY_HAND, LOCAL = ("compile", "shard"), ("local", "local shard")
SCRIPTS: dict[str, tuple[str, ...]] = {
    "language_model": (*BY_HAND, "step", *LOCAL),
    "groups": (*BY_HAND, "step", *LOCAL),
    "ring": (*BY_HAND, "step"),
    "two_models": BY_HAND,
    "adversaries": (*BY_HAND, *LOCAL),
    "variational": (*BY_HAND, *LOCAL),
    "frozen": BY_HAND,
    "many_sizes": BY_HAND,
    "resumed": BY_HAND,
    "epochs": BY_HAND,
    "many_backwards": BY_HAND,
    "ensemble": ("compile",),
    "turns": BY_HAND,
}
