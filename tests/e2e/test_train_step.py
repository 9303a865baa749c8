"""``fxpar.train_step`` on several ranks: every loss, parameter, buffer and state of the
optimizer is that of the eager loop on one device, for whole parameters and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxpar
from fxpar import compilation
from fxpar.errors import PlanError
from fxpar.passes.order import order_collectives
from fxpar.passes.order.order_collectives import recompute_in_step
from tests.helpers.models import NAMES, build_double, double
from tests.helpers.spawn import ranks_of, shared_pool
from tests.helpers.step_programs import OPTIMIZERS, batches, build, loss_fn
from tests.helpers.training import MESHES, loop, part

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

STEPS = 5
CLIP = 0.3
WIDTH, WORDS, LENGTH = 16, 32, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Transformer(nn.Module):
    """With the embedding tied to the last layer."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


def next_word(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def sentences(count: int) -> list[tuple[torch.Tensor]]:
    made = torch.Generator().manual_seed(2)
    return [(torch.randint(WORDS, (8, LENGTH), generator=made),) for _ in range(count)]


def make(kind: str) -> tuple[nn.Module, Any, list[Any]]:
    """A model, its loss and its batches, the same in every process."""
    if kind == "net":
        return build(), loss_fn, batches(STEPS)
    torch.manual_seed(4)
    model = Transformer(1, 0.3) if kind == "dropout" else Transformer(2, 0.0)
    return model, next_word, sentences(STEPS)


def full(x: Any) -> Any:
    """A value in whole, a copy."""
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors that a step writes, by name."""
    names = {p: name for name, p in model.named_parameters()}
    out = {name: full(x) for name, x in model.state_dict().items()}
    for p, state in optimizer.state.items():
        out |= {f"{names[p]}:{key}": full(x) for key, x in state.items()}
    return out


Run = tuple[list[float], dict[str, Any], int]


def train(kind: str, name: str, mesh: str, shard: bool, **options: Any) -> Run:
    """Losses, state at the end, and the number of programs compiled."""
    with double():
        model, loss, data = make(kind)
        if shard:
            model = fxpar.shard(model, mesh=mesh)
        optimizer = OPTIMIZERS[name][0](model.parameters())
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.8)
        options = {"codegen": "eager", "mesh": mesh} | options
        step = fxpar.train_step(model, loss, optimizer, clip=CLIP, options=options)
        before, losses = len(fxpar.plans()), []
        local = options.get("inputs") == "local"
        torch.manual_seed(5)
        for batch in data:
            if local:
                batch = part(dict(enumerate(batch)), MESHES[mesh]).values()
            losses.append(step(*batch).item())
            scheduler.step()
        for p, state in optimizer.state.items():
            for key, x in state.items():
                if shard and key != "step":
                    assert x.placements == p.placements
        return losses, state_of(model, optimizer), len(fxpar.plans()) - before


def one_device(kind: str, name: str) -> Run:
    """The eager loop; what draws random numbers by the same step on one rank, since
    eager code draws others."""
    if kind == "dropout":
        return train(kind, name, "dp=1", False)
    with double():
        model, loss_of, data = make(kind)
        optimizer = OPTIMIZERS[name][0](model.parameters())
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.8)
        losses, _ = loop(
            partial(loss_of, model),
            optimizer,
            data,
            clip=CLIP,
            after=scheduler.step,
        )
        return losses, state_of(model, optimizer), 0


def near(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check(kind: str, name: str, mesh: str, shard: bool) -> None:
    runs = ranks_of(mesh).run(train, kind, name, mesh, shard, timeout=300.0)
    losses, state, _ = one_device(kind, name)
    for run in runs:
        near(run[0], losses)
        near(run[1], state)
        assert run[0] == runs[0][0] and run[2] == OPTIMIZERS[name][1]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


QUICK = [("net", "lamb", "dp=2", True)]
SLOW = [("net", "lamb", "dp=4", True), ("net", "adamw", "dp=2,tp=2", False)] + [
    (kind, name, mesh, shard)
    for kind, name in (
        ("net", "adam"),
        ("net", "dampening"),
        ("transformer", "nesterov"),
        ("dropout", "adamw"),
        ("dropout", "nesterov"),
    )
    for mesh in ("dp=4", "tp=4", "dp=2,tp=2")
    for shard in (False, True)
]


@pytest.mark.parametrize(("kind", "name", "mesh", "shard"), QUICK)
def test_as_one_device(kind: str, name: str, mesh: str, shard: bool) -> None:
    check(kind, name, mesh, shard)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "mesh", "shard"), SLOW)
def test_more_as_one_device(kind: str, name: str, mesh: str, shard: bool) -> None:
    check(kind, name, mesh, shard)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks(shard: bool) -> None:
    check("net", "adamw", "dp=2", shard)


def collectives(mesh: str) -> list[str]:
    """Those that the compiled step of a small net runs, parameters whole."""

    kept: list[str] = []
    run = compilation.run_op_by_op

    def keep(gm: Any, examples: Any) -> Any:
        kept.extend(str(node.target) for node in gm.graph.nodes)
        return run(gm, examples)

    compilation.run_op_by_op = keep  # type: ignore[assignment]
    try:
        with double():
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            step = fxpar.train_step(
                model,
                lambda model, x: model(fxpar.constrain(x, "dp")).sum(),
                optimizer,
                clip=CLIP,
                options={"codegen": "eager", "mesh": mesh},
            )
            step(torch.ones(8, 8))
    finally:
        compilation.run_op_by_op = run
    return [name for name in kept if "all_reduce" in name]


def test_gradients_are_reduced_together() -> None:
    for found in ranks_of("dp=2").run(collectives, "dp=2"):
        assert len(found) <= 2, found  # the loss, and all eight gradients


def train_with(kind: str, name: str, mesh: str, shard: bool, options: Any) -> Run:
    return train(kind, name, mesh, shard, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"codegen": "inductor"},
        {"plan": "search", "hardware": "h100"},
        {"verify": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("shard", [False, True])
def test_options(shard: bool, options: dict[str, Any]) -> None:
    args = "transformer", "adamw", "dp=2,tp=2", shard, options
    runs = shared_pool(4).run(train_with, *args, timeout=900.0)
    losses, state, _ = one_device("transformer", "adamw")
    for run in runs:
        near(run[:2], (losses, state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shard"), [("dp=2", True), ("dp=2,tp=2", True), ("dp=2,tp=2", False)]
)
def test_each_rank_feeds_its_part(mesh: str, shard: bool) -> None:
    """Losses are each rank's own, and so would be statistics of a batch."""
    args = "transformer", "adamw", mesh, shard, {"inputs": "local"}
    runs = ranks_of(mesh).run(train_with, *args, env={"FXPAR_INPUTS": "local"})
    losses, state, _ = one_device("transformer", "adamw")
    own = zip(*(run[0] for run in runs), strict=True)
    near([sum(of_ranks) / len(runs) for of_ranks in own], losses)
    for run in runs:
        near(run[1], state)


# Checkpoints


def saved_and_loaded(mesh: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint, of the run that wrote it and of one that read it."""
    with double():
        data = batches(STEPS)

        def start() -> tuple[Any, Any, Any]:
            model = fxpar.shard(build(), mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            options = {"codegen": "eager", "mesh": mesh}
            step = fxpar.train_step(model, loss_fn, optimizer, options=options)
            return model, optimizer, step

        model, optimizer, step = start()
        for batch in data[:2]:
            step(*batch)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder)
        went_on = [step(*batch).item() for batch in data[2:]]

        model, optimizer, step = start()
        step(*data[0])  # so that there is state to load into
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return went_on, [step(*batch).item() for batch in data[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_a_checkpoint_of_a_sharded_run(mesh: str, tmp_path: Any) -> None:
    for went_on, loaded in ranks_of(mesh).run(saved_and_loaded, mesh, str(tmp_path)):
        assert loaded == went_on


def eager_after_sharded() -> tuple[list[float], dict[str, Any]]:
    """Two steps in one program, then the eager loop on the same optimizer."""
    with double():
        model = fxpar.shard(build(), mesh="dp=4")
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        options = {"codegen": "eager", "mesh": "dp=4"}
        step = fxpar.train_step(model, loss_fn, optimizer, options=options)
        compiled = torch.compile(model, backend="fxpar", options=options)
        losses = []
        for i, batch in enumerate(batches(4)):
            if i < 2:
                losses.append(step(*batch).item())
                continue
            optimizer.zero_grad()
            loss = loss_fn(compiled, *batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, state_of(model, optimizer)


@pytest.mark.slow
def test_steps_of_both_kinds_take_turns() -> None:
    with double():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses = []
        for batch in batches(4):
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        want = losses, state_of(model, optimizer)
    for got in shared_pool(4).run(eager_after_sharded):
        near(got, want)


# Real models


def real(name: str, mesh: str) -> Run:
    with double():
        model, batch = build_double(name)
        model = fxpar.shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"codegen": "eager", "mesh": mesh}
        step = fxpar.train_step(
            model, lambda model, batch: model(**batch), optimizer, options=options
        )
        torch.manual_seed(5)
        losses = [step(batch).item() for _ in range(STEPS)]
        return losses, {n: full(p) for n, p in model.named_parameters()}, 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bert"])
def test_real_models(name: str) -> None:
    with double():
        model, batch = build_double(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for got, _, _ in shared_pool(4).run(real, name, "dp=2,tp=2", timeout=300.0):
        near(got, losses, 1e-7)


class Regions(nn.Module):
    """A checkpointed region inside of another, and a branch in the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(x))
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.sin(), (x,))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.outer, x, use_reentrant=False) + self.first(x)


def regions(parallel: bool) -> list[torch.Tensor]:
    """Losses and parameters of two steps."""
    with double():
        torch.manual_seed(0)
        model, x = Regions(), torch.randn(4, 8)
        model = fxpar.shard(model, mesh="dp=2") if parallel else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"codegen": "eager", "mesh": "dp=2"}

        def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().sum()

        if parallel:
            step = fxpar.train_step(model, loss_of, optimizer, options=options)
            losses = [step(x) for _ in range(2)]
            return losses + [p.full_tensor() for p in model.parameters()]
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(loss_of(model, x))
            losses[-1].backward()
            optimizer.step()
        return [x.detach() for x in (*losses, *model.parameters())]


@pytest.mark.slow
def test_checkpointed_regions_of_parameters_at_rest() -> None:
    for got in shared_pool(2).run(regions, True):
        torch.testing.assert_close(got, regions(False), rtol=1e-9, atol=1e-11)


REGIONS = ("none", "all", "chosen")


def products(regions: str) -> tuple[list[float], int]:
    """The losses of two steps, and the products that one runs. ``regions``: what of it
    is in checkpointed ones."""
    counts = []

    def counted(graph: torch.fx.Graph) -> None:
        recompute_in_step(graph)
        mm = torch.ops.aten.mm.default
        counts.append(len(graph.find_nodes(op="call_function", target=mm)))

    def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        policy = CheckpointPolicy
        return policy.MUST_SAVE if is_product else policy.PREFER_RECOMPUTE

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        how: dict[str, Any] = {"use_reentrant": False}
        if regions == "chosen":
            chosen = partial(create_selective_checkpoint_contexts, keep_products)
            how["context_fn"] = chosen
        out = model(x) if regions == "none" else checkpoint(model, x, **how)
        return out.square().sum()

    with double(), mock.patch.object(order_collectives, "recompute_in_step", counted):
        torch.manual_seed(0)
        layers = nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.5), nn.Linear(8, 8)
        model, x = nn.Sequential(*layers), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"codegen": "eager", "mesh": "dp=2"}
        step = fxpar.train_step(model, loss_of, optimizer, options=options)
        return [float(step(x)) for _ in range(2)], counts[-1]


def test_a_checkpointed_region_is_computed_again() -> None:
    """Its products too, with the mask that it drew; not where ops are chosen."""
    runs = {kind: shared_pool(2).run(products, kind) for kind in REGIONS}
    for rank in range(2):
        (want, few), (all_again, more), (chosen, same) = (
            runs[kind][rank] for kind in REGIONS
        )
        assert (all_again, chosen) == (want, want)
        assert more > few == same


# What is refused


def made_before_shard() -> None:
    with double():
        model = build()
        other = torch.optim.SGD(build().parameters(), 0.1)
        model = fxpar.shard(model, mesh="dp=2")
        options = {"codegen": "eager", "mesh": "dp=2"}
        fxpar.train_step(model, loss_fn, other, options=options)(*batches(1)[0])


def test_an_optimizer_of_another_model() -> None:
    for error in shared_pool(2).errors(made_before_shard):
        assert isinstance(error, PlanError)
        assert "holds no parameter that the loss depends on" in str(error)
