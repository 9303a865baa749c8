"""Training loops as users of DistributedDataParallel write them, each a function of an
``as_ddp.Side``. ``LOOPS`` has them by name; add yours with ``@loop()``, and it runs
under DDP and under fxpar on every mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from tests.helpers.as_ddp import Loop, Side

LOOPS: dict[str, Loop] = {}

BRANCHES = "ranks that branch gather other parameters"
OWN = "what a rank has by itself is no part of a sharded gradient"


def loop(**why: Any) -> Callable[[Callable[[Side], None]], Callable[[Side], None]]:
    """Put a function among the loops; ``why``: the fields of ``Loop``."""

    def register(run: Callable[[Side], None]) -> Callable[[Side], None]:
        LOOPS[run.__name__] = Loop(run, **why)
        return run

    return register


def mlp(inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Forward(nn.Module):
    """Modules, and a function of them and the arguments as the forward."""

    def __init__(self, fn: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


# Losses


@loop()
def mean_loss(use: Side) -> None:
    model = use.model(mlp())
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = F.mse_loss(run(use.rows(4, 6)), use.rows(4, 3))
        loss.backward()
        use.note(loss=loss)


@loop()
def loss_in_the_graph(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m.net(x), y)

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6), use.ints(3, 4))
        loss.backward()
        use.note(loss=loss)


@loop()
def losses_in_a_dict(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> dict[str, Any]:
        y = m.net(x)
        parts = (y.square().mean(), y.abs().sum(), y.amax())
        return {"loss": parts[0] + 0.01 * parts[1], "parts": parts, "rows": len(x)}

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        results = run(use.rows(use.own(5, 3, 1, 4), 6))
        (results["loss"] + 0.1 * results["parts"][2]).backward()
        use.note(results=results)


@loop()
def python_numbers_returned(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> tuple[Any, ...]:
        y = m.net(x)
        return y.square().sum(), x.shape[0], 1.0 / x.shape[0], "mean"

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        total, rows, share, name = run(use.rows(use.own(5, 3, 1, 4), 6))
        (total * share).backward()
        use.note(total=total, rows=rows, share=share, name=name)


@loop()
def tokens_counted_outside(use: Side) -> None:
    """The mean over all tokens, by counts that ranks add up."""

    def forward(m: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m.net(m.words(ids)).flatten(0, 1), labels.flatten())

    model = use.model(Forward(forward, words=nn.Embedding(11, 6), net=mlp(6, 11)))
    run = use.wrap(model)
    world = dist.get_world_size()
    scale = torch.ones(())

    def scaled() -> None:
        for p in model.parameters():
            p.grad *= scale

    for _ in use.steps(model, before=scaled):
        labels = use.ints(11, 4, 5)
        labels[use.ints(2, 4, 5) * (use.place + 1) > 1] = -100
        labels[0, 0] = 3
        count = (labels != -100).sum()
        loss = run(use.ints(11, 4, 5), labels) * count
        loss.backward()
        dist.all_reduce(count)
        scale = world / count
        use.note(loss=loss, count=count)


@loop(eager="unequal: the functional form's gradient is all-reduced again")
def cross_correlation(use: Side) -> None:
    """As Barlow twins: a matrix that ranks add up inside the forward."""

    def forward(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = m.norm(m.net(a)).T @ m.norm(m.net(b)) / (len(a) * dist.get_world_size())
        dist.all_reduce(c)
        on = c.diagonal().sub(1).square().sum()
        return on + 0.05 * (c - c.diagonal().diag()).square().sum()

    norm = nn.BatchNorm1d(3, affine=False)
    model = use.model(Forward(forward, net=mlp(), norm=norm))
    run = use.wrap(model, broadcast_buffers=False)
    model.norm.track_running_stats = False
    for _ in use.steps(model):
        x = use.rows(4, 6)
        loss = run(x, x + 0.1 * use.rows(4, 6))
        loss.backward()
        use.note(loss=loss)


@loop(eager="unequal: the functional form's gradient is all-reduced again")
def sum_over_ranks_in_the_forward(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        total = m.net(x).square().sum()
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        dist.all_reduce(total)
        return total / count

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, 1, 4), 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def count_over_ranks_in_the_forward(use: Side) -> None:
    """The mean over all rows, by a count without gradient."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        count = torch.full((), len(x), dtype=torch.float64)
        dist.all_reduce(count)
        return m.net(x).square().sum() * dist.get_world_size() / count

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, 1, 4), 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def contrastive(use: Side) -> None:
    """Pairs against all others of the rank's own rows."""

    def forward(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (F.normalize(m.net(x), dim=-1) for x in (a, b))
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        x = use.rows(use.own(5, 3, 2, 4), 6)
        loss = run(x, x * 0.9)
        loss.backward()
        use.note(loss=loss)


# Halves of the rows


def pairs(use: Side, split: Callable[[torch.Tensor], Any]) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        chosen, rejected = split(m.net(x).squeeze(-1))
        return -F.logsigmoid(chosen - rejected).mean()

    model = use.model(Forward(forward, net=mlp(6, 1)))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def halves_by_chunk(use: Side) -> None:
    pairs(use, lambda x: x.chunk(2))


@loop()
def halves_by_view(use: Side) -> None:
    pairs(use, lambda x: x.view(2, -1))


@loop()
def pairs_by_steps(use: Side) -> None:
    pairs(use, lambda x: (x[::2], x[1::2]))


@loop()
def halves_outside(use: Side) -> None:
    model = use.model(mlp(6, 1))
    run = use.wrap(model)
    for _ in use.steps(model):
        chosen, rejected = run(use.rows(4, 6)).chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        loss.backward()
        use.note(loss=loss)


# The number of rows


def by_rows(use: Side, forward: Callable[..., Any], least: int = 1) -> None:
    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, least, 4), 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def uneven_rows(use: Side) -> None:
    by_rows(use, lambda m, x: m.net(x).square().mean())


@loop()
def one_row_and_four(use: Side) -> None:
    model = use.model(mlp())
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(1, 4, 2, 7), 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def rows_behind_a_break(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y, n = m.net(x), x.shape[0]
        torch._dynamo.graph_break()
        return (y.sum(-1) * torch.arange(n)).sum() / n

    by_rows(use, forward)


@loop()
def rows_in_an_attribute(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.n = x.shape[0]
        y = m.net(x)
        torch._dynamo.graph_break()
        return y.square().sum() / m.n + (y[:, 0] * torch.arange(m.n)).mean()

    by_rows(use, forward)


@loop()
def counts_across_a_break(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(m.net(x), y, reduction="none", ignore_index=0)
        count = max(int((y != 0).sum()), 1)
        return losses.sum() / count

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(6, 6), use.ints(3, 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def lengths_that_change(use: Side) -> None:
    """Tokens padded to the longest of the rank's own rows, another in every step."""

    def forward(m: Any, ids: torch.Tensor) -> torch.Tensor:
        x = m.words(ids)
        weight = (x @ x.mT).softmax(-1)
        return F.cross_entropy(
            m.net(weight @ x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )

    model = use.model(Forward(forward, words=nn.Embedding(11, 6), net=mlp(6, 11)))
    run = use.wrap(model)
    for step in use.steps(model):
        loss = run(use.ints(11, use.own(2, 3), 3 + 2 * use.place + step))
        loss.backward()
        use.note(loss=loss)


@loop()
def batch_second(use: Side) -> None:
    """Time first, then the batch, of another number of rows on each rank."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.net(x).cumsum(0)
        return (y - y.mean(1, keepdim=True)).square().mean() + y[-1].amax()

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(5, use.own(4, 2, 3, 1), 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def bags_with_offsets(use: Side) -> None:
    def forward(m: Any, ids: torch.Tensor, begins: torch.Tensor, y: Any) -> Any:
        return F.cross_entropy(m.net(m.bag(ids, begins)), y)

    bag = nn.EmbeddingBag(11, 6, mode="mean")
    model = use.model(Forward(forward, bag=bag, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        lengths = use.own((2, 3, 1), (4, 1), (3, 3, 2), (1,))
        begins = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        loss = run(use.ints(11, sum(lengths)), begins, use.ints(3, len(lengths)))
        loss.backward()
        use.note(loss=loss)


# What leaves a graph and what eager code does with it


@loop()
def metrics(use: Side) -> None:
    """Correct rows and losses, added up as tensors and Python numbers."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = m.net(x)
        correct = (logits.argmax(-1) == y).sum()
        return F.cross_entropy(logits, y), correct, logits.detach().topk(2).indices

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    total, right, rows = 0.0, torch.zeros((), dtype=torch.long), 0
    for _ in use.steps(model):
        x = use.rows(use.own(5, 3, 1, 4), 6)
        loss, correct, best = run(x, use.ints(3, len(x)))
        loss.backward()
        total, right, rows = total + loss.item(), right + correct, rows + len(x)
        use.note(total=total, right=right, rate=right.item() / rows, best=best)


@loop()
def only_the_loss_compiled(use: Side) -> None:
    model = use.model(mlp())
    run = use.parallel(model)
    criterion = use.compile(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1))
    for _ in use.steps(model):
        loss = criterion(run(use.rows(4, 6)), use.ints(3, 4))
        loss.backward()
        use.note(loss=loss)


@loop(alone="the model is in DDP", whole="DDP takes no sharded parameters")
def only_the_loss_compiled_in_ddp(use: Side) -> None:
    model = use.model(mlp())
    run = nn.parallel.DistributedDataParallel(model)
    criterion = use.compile(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1))
    for _ in use.steps(model):
        loss = criterion(run(use.rows(4, 6)), use.ints(3, 4))
        loss.backward()
        use.note(loss=loss)


@loop(alone="the model is in DDP", whole="DDP takes no sharded parameters")
def in_ddp_as_well(use: Side) -> None:
    model = use.model(mlp())
    run = nn.parallel.DistributedDataParallel(use.compile(model))
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, 1, 4), 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def parameters_as_arguments(use: Side) -> None:
    function = use.compile(lambda x, w, b: F.linear(x, w, b).tanh())

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(function(x, m.first.weight, m.first.bias))

    model = Forward(forward, first=nn.Linear(6, 8), last=nn.Linear(8, 3))
    model = use.model(model)
    run = use.parallel(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def blocks_compiled_one_by_one(use: Side) -> None:
    model = use.model(nn.Sequential(*(mlp(6, 6) for _ in range(3))))
    blocks = [use.compile(block) for block in model]
    model.forward = lambda x: blocks[2](blocks[1](blocks[0](x)))
    run = use.parallel(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop(whole=OWN, alone="nothing is averaged under DDP")
def gradients_without_backward(use: Side) -> None:
    """``autograd.grad`` gives each rank its own."""
    model = use.model(mlp())
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        use.note(loss=loss, grads=grads)
        for p, g in zip(model.parameters(), grads, strict=True):
            dist.all_reduce(g)
            p.grad = g / dist.get_world_size()


@loop(whole=OWN)
def hooks_on_parameters(use: Side) -> None:
    """Each rank clamps its own gradients, before their mean."""
    model = use.model(mlp())
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.02))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def hooks_on_activations(use: Side) -> None:
    """What leaves a graph has the gradient of the rank's own loss."""
    model = use.model(Forward(lambda m, x: m.b(m.a(x)), a=mlp(6, 6), b=mlp()))
    a, b = use.compile(model.a), use.compile(model.b)
    model.fn = lambda m, x: b(hooked(a(x)))
    grads: list[torch.Tensor] = []

    def hooked(y: torch.Tensor) -> torch.Tensor:
        y.register_hook(grads.append)
        return y

    run = use.parallel(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        use.note(loss=loss, gradient=grads.pop())


@loop()
def inputs_that_need_gradients(use: Side) -> None:
    model = use.model(mlp())
    run = use.wrap(model)
    for _ in use.steps(model):
        x = use.rows(4, 6).requires_grad_()
        loss = run(x).square().mean()
        loss.backward()
        use.note(loss=loss, x=x.grad)


# How often forwards and backwards run


@loop()
def parameter_in_two_graphs(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.net(x)
        torch._dynamo.graph_break()
        return m.net(y + x)

    model = use.model(Forward(forward, net=mlp(6, 6)))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop(whole="a sum of a tensor and a DTensor is an error")
def weight_used_outside_too(use: Side) -> None:
    """A parameter has gradients from a graph and from eager code."""
    model = use.model(mlp())
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss = loss + (use.rows(8) * model[0].weight.sum(1)).mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def checkpoint_reentrant(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x)
        return m.last(checkpoint(m.mid, y, use_reentrant=True)).square().mean()

    model = Forward(forward, first=nn.Linear(6, 6), mid=mlp(6, 6), last=mlp())
    model = use.model(model)
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def checkpoint_around_a_graph(use: Side) -> None:
    model = use.model(Forward(lambda m, x: x, mid=mlp(6, 6), last=mlp()))
    mid = use.compile(model.mid)
    model.fn = lambda m, x: m.last(checkpoint(mid, x, use_reentrant=False))
    run = use.parallel(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6).requires_grad_()).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def validation_between_steps(use: Side) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model = use.model(net)
    run = use.wrap(model)
    for _ in use.steps(model):
        model.train()
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        model.eval()
        with torch.no_grad():
            validation = run(use.rows(use.own(5, 3, 1, 4), 6))
        use.note(loss=loss, validation=validation, mean=validation.mean().item())


# Ranks that differ


@loop(whole=BRANCHES)
def another_order_on_each_rank(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = (m.a, m.b) if m.turned else (m.b, m.a)
        return second(first(x)).square().mean()

    model = use.model(Forward(forward, a=mlp(6, 6), b=mlp(6, 6)))
    model.turned = use.own(False, True)
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6))
        loss.backward()
        use.note(loss=loss)


@loop(whole=BRANCHES)
def other_parameters_on_each_rank(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x) if m.turned else m.b(x)
        return m.last(y).square().mean()

    model = use.model(Forward(forward, a=mlp(6, 6), b=mlp(6, 6), last=mlp()))
    model.turned = use.own(False, True)
    run = use.wrap(model, find_unused_parameters=True)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6))
        loss.backward()
        use.note(loss=loss)


@loop(whole=BRANCHES)
def a_branch_by_data(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        if y.sum().item() > 0:
            y = m.b(y)
        return y.square().mean()

    model = use.model(Forward(forward, a=mlp(6, 6), b=mlp(6, 6)))
    run = use.wrap(model, find_unused_parameters=True)
    for _ in use.steps(model):
        loss = run(use.rows(2, 6))
        loss.backward()
        use.note(loss=loss)


@loop(whole=BRANCHES)
def one_rank_breaks_its_graph(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        if m.breaks:
            torch._dynamo.graph_break()
        return m.b(y).square().mean()

    model = use.model(Forward(forward, a=mlp(6, 6), b=mlp()))
    model.breaks = use.own(False, True)
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6))
        loss.backward()
        use.note(loss=loss)


@loop()
def unused_parameters(use: Side) -> None:
    """Some that no rank ever uses, some that are used in the second step only."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x)
        if m.step == 1:
            y = y + m.second(x)
        return y.square().mean()

    model = Forward(forward, first=mlp(), second=mlp(), never=mlp())
    model = use.model(model)
    run = use.wrap(model, find_unused_parameters=True)
    for step in use.steps(model):
        model.step = step
        loss = run(use.rows(4, 6))
        loss.backward()
        use.note(loss=loss)


# Buffers


@loop()
def batch_norm(use: Side) -> None:
    conv, norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
    model = use.model(nn.Sequential(conv, norm, nn.Tanh(), nn.Flatten(), mlp(64)))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, 1, 4), 2, 4, 4)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def batch_norm_in_eval(use: Side) -> None:
    norm = nn.BatchNorm1d(8)
    norm.running_mean += torch.arange(8)
    model = use.model(nn.Sequential(nn.Linear(6, 8), norm, mlp(8)))
    run = use.wrap(model)
    model.eval()
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


@loop()
def batch_norm_without_momentum(use: Side) -> None:
    norm = nn.BatchNorm1d(8, momentum=None)
    model = use.model(nn.Sequential(nn.Linear(6, 8), norm, mlp(8)))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(4, 6)).square().mean()
        loss.backward()
        use.note(loss=loss)


def running_mean(
    use: Side, dtype: torch.dtype, write: Callable[[Any, torch.Tensor], None]
) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x)
        write(m, y.detach().mean(0))
        m.count.add_(len(x))
        return m.last(y - m.mean).square().mean() / m.count.log1p()

    model = Forward(forward, first=nn.Linear(6, 8), last=mlp(8))
    model.register_buffer("mean", torch.zeros(8))
    model.register_buffer("count", torch.zeros((), dtype=dtype))
    model = use.model(model)
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, 1, 4), 6))
        loss.backward()
        use.note(loss=loss, mean=model.mean)


@loop()
def queue_of_features(use: Side) -> None:
    """As MoCo: rows of the rank's own enter a queue in a buffer."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.normalize(m.net(x), dim=-1)
        loss = (y @ m.queue.clone().T).logsumexp(-1).mean()
        m.queue.copy_(torch.cat([y.detach(), m.queue])[: len(m.queue)])
        return loss

    model = Forward(forward, net=mlp())
    model.register_buffer("queue", F.normalize(torch.randn(8, 3), dim=-1))
    model = use.model(model)
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(2, 6))
        loss.backward()
        use.note(loss=loss, queue=model.queue)


# Optimizers and what stands around them


@loop(whole="parameters() are this rank's parts, which a program may not compute with")
def weight_penalty_in_the_forward(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in m.net.parameters())
        return m.net(x).square().mean() + 0.01 * penalty

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, 1, 4), 6))
        loss.backward()
        use.note(loss=loss)


@loop(whole="a sum of a tensor and a DTensor is an error")
def weight_penalty_outside(use: Side) -> None:
    model = use.model(mlp())
    run = use.wrap(model)
    for _ in use.steps(model):
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = run(use.rows(4, 6)).square().mean() + 0.01 * penalty
        loss.backward()
        use.note(loss=loss)


@loop()
def scaled_gradients(use: Side) -> None:
    """GradScaler; the second step overflows on one rank, and no rank updates."""
    model = use.model(mlp())
    run = use.wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def update(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    for step in use.steps(model, update=update):
        loss = run(use.rows(4, 6)).square().mean()
        if step == 1 and use.place == 0:
            loss = loss * 1e308
        scaler.scale(loss).backward()
        use.note(loss=loss, scale=scaler.get_scale())


@loop()
def average_of_weights(use: Side) -> None:
    """A copy that follows, as teacher of the model."""
    model = use.model(mlp())
    teacher = copy.deepcopy(model).requires_grad_(False)
    run, teach = use.wrap(model), use.compile(teacher)

    def follow() -> None:
        for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
            p.lerp_(q.detach(), 0.3)

    for _ in use.steps(model, before=follow):
        x = use.rows(4, 6)
        with torch.no_grad():
            target = teach(x)
        loss = F.mse_loss(run(x), target + 0.1) + run(x[:2]).mean()
        loss.backward()
        use.note(loss=loss, target=target)
    use.note(teacher=dict(teacher.named_parameters()))


@loop()
def closures(use: Side) -> None:
    """LBFGS reads each rank's own loss and gradients that are means."""
    model = use.model(mlp())
    run = use.wrap(model)
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, tolerance_change=0.0
    )
    for _ in range(3):
        x = use.rows(4, 6)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            use.note(loss=loss)
            return loss

        use.note(first=optimizer.step(closure))
        use.gradients(model)
    use.note(parameters=dict(model.named_parameters()))


@loop()
def accumulated_without_sync(use: Side) -> None:
    model = use.model(mlp())
    run = use.wrap(model)
    for _ in use.steps(model):
        with use.no_sync(run, model):
            first = run(use.rows(4, 6)).square().mean() / 2
            first.backward()
        second = run(use.rows(use.own(5, 3, 1, 4), 6)).square().mean() / 2
        second.backward()
        use.note(first=first, second=second)


# torch.func


@loop(whole="DTensors are no arguments of functional_call in a graph", alone=OWN)
def gradients_per_row(use: Side) -> None:
    model = use.model(mlp())

    def loss_of(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(model, weights, (x,)), y)

    per_row = use.compile(vmap(grad(loss_of), (None, 0, 0)))
    for _ in use.steps(model):
        weights = {n: p.detach() for n, p in model.named_parameters()}
        grads = per_row(weights, use.rows(4, 6), use.rows(4, 3))
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(
            dim=0
        )
        use.note(norms=norms)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("r,r...->...", 1 / norms, grads[name])
            dist.all_reduce(p.grad)


@loop(whole="DTensors are no arguments of functional_call in a graph")
def tangents_in_the_loss(use: Side) -> None:
    """A penalty on the slope by each row's input, taken inside the forward."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        slopes = vmap(grad(lambda row: m.net(row).square().sum()))(x)
        return m.net(x).square().mean() + slopes.square().sum(-1).mean()

    model = use.model(Forward(forward, net=mlp()))
    run = use.wrap(model)
    for _ in use.steps(model):
        loss = run(use.rows(use.own(5, 3, 1, 4), 6))
        loss.backward()
        use.note(loss=loss)


# Models


@loop()
def recurrent(use: Side) -> None:
    def forward(m: Any, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, h = m.cell(x, h)
        return m.last(y), h.detach()

    cell = nn.GRU(6, 8, batch_first=True)
    model = use.model(Forward(forward, cell=cell, last=nn.Linear(8, 3)))
    run = use.wrap(model)
    h = use.rows(1, 3, 8) * 0
    for _ in use.steps(model):
        y, h = run(use.rows(3, 5, 6), h)
        loss = y.square().mean()
        loss.backward()
        use.note(loss=loss, h=h)


@loop()
def convolutions(use: Side) -> None:
    model = use.model(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.0),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )
    run = use.wrap(model)
    for _ in use.steps(model):
        rows = use.own(4, 2, 3, 1)
        loss = F.cross_entropy(run(use.rows(rows, 3, 8, 8)), use.ints(3, rows))
        loss.backward()
        use.note(loss=loss)


@loop()
def adapters_added_later(use: Side) -> None:
    """A frozen base that evaluates first, then trains with adapters."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.base(x)
        return y + m.up(m.down(x)) if hasattr(m, "up") else y

    model = use.model(Forward(forward, base=mlp()))
    model.base.requires_grad_(False)
    with torch.no_grad():
        use.note(before=use.compile(model)(use.rows(4, 6)))
    model.down, model.up = nn.Linear(6, 2).double(), nn.Linear(2, 3).double()
    run = use.wrap(model)
    for _ in use.steps(model.down, model.up):
        loss = run(use.rows(use.own(5, 3, 1, 4), 6)).square().mean()
        loss.backward()
        use.note(loss=loss, base=[p.grad for p in model.base.parameters()])


@loop(relative=1e-6)
def llama(use: Side) -> None:
    """As Transformers' Trainer: the loss is a sum over the number of all tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    model = use.model(LlamaForCausalLM(config))
    run = use.wrap(model)
    world = dist.get_world_size()
    for _ in use.steps(model):
        ids = use.ints(31, 2, 6 + use.place)
        labels = ids.masked_fill(use.ints(3, *ids.shape) == 0, -100)
        count = (labels[:, 1:] != -100).sum()
        dist.all_reduce(count)
        result = run(input_ids=ids, labels=labels, num_items_in_batch=count)
        loss = result.loss * world
        loss.backward()
        use.note(loss=loss, logits=result.logits)
