"""Models whose parameters rest sharded train as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.sharding.plan import Plan
from tests.helpers.spawn import ranks_of
from tests.helpers.training import (
    gradients,
    loop,
    whole,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled(model: Any, mesh: str, **options: Any) -> Any:
    chosen = {"codegen": "eager", "mesh": mesh} | options
    return torch.compile(model, backend="fxpar", options=chosen)


def near(got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Within a tolerance, through lists and dicts; what is no number must be equal."""
    if isinstance(want, dict):
        assert list(got) == list(want)
        got, want = list(got.values()), list(want.values())
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            near(a, b, rtol, atol)
    elif isinstance(want, (torch.Tensor, float)):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    else:
        assert got == want


def alike(fn: Callable[..., Any], mesh: str, *args: Any, timeout: float = 120.0) -> Any:
    """What ``fn`` returns on every rank of a mesh, which must be equal."""
    first, *others = ranks_of(mesh).run(fn, mesh, *args, timeout=timeout)
    for other in others:
        near(other, first, rtol=0.0, atol=0.0)
    return first


# A small model for everything

ON_ONE_AXIS = pytest.mark.parametrize(
    "mesh", ["dp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)]
)

WIDTH, WORDS = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Tied weights, a parameter of size 1, one that divides by nothing."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.odd = nn.Parameter(torch.ones(3, 1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * self.scale * self.odd.sum()
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def small(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Small(layers)


def batches(count: int, size: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (count, size, 4), generator=generator)
    return [{"ids": x, "labels": x.roll(1, 1)} for x in ids]


Change = Callable[[nn.Module], Any]


def steps(
    model: nn.Module,
    program: Any,
    optimizer: torch.optim.Optimizer,
    count: int = 4,
    after: Callable[[], Any] = lambda: None,
) -> list[Any]:
    """Losses, first gradients, parameters at the end."""
    losses, first = loop(program, optimizer, batches(count), model=model, after=after)
    state = {name: whole(p) for name, p in model.named_parameters()}
    return [losses, first, state]


def prepared(
    mesh: str | None, change: Change | None = None, layers: int = 2
) -> tuple[nn.Module, Any]:
    """The small model and what to call: sharded and compiled, or as it is."""
    model = small(layers)
    if change is not None:
        change(model)
    if mesh is None:
        return model, model
    model = fxpar.shard(model, mesh=mesh)
    return model, compiled(model, mesh)


# Accumulation


def accumulated(mesh: str | None, wait: bool) -> list[Any]:
    model, program = prepared(mesh, layers=1)
    before = len(fxpar.plans())
    for i, batch in enumerate(batches(3)):
        waits = mesh is not None and wait and i < 2
        with fxpar.no_sync(model) if waits else contextlib.nullcontext():
            program(**batch).backward()
    found = [of_parameters(plan) for plan in fxpar.plans()[before:]]
    return [gradients(model), found]


def of_parameters(plan: Plan) -> list[str]:
    """Kinds of the collectives that are as large as a weight."""
    large = [c for c in plan.collectives if c.bytes >= 4 * WIDTH * WIDTH]
    return sorted({c.kind for c in large})


def test_no_sync_reduces_once() -> None:
    want, _ = accumulated(None, True)
    got, plans = alike(accumulated, "dp=2", True)
    near(got, want)
    assert plans[0] == ["all_gather"], "gradients are left unreduced"
    assert "reduce_scatter" not in plans[-1] or len(plans) == 1


@pytest.mark.slow
def test_without_no_sync_every_backward_reduces() -> None:
    want, _ = accumulated(None, True)
    got, plans = alike(accumulated, "dp=2", False)
    near(got, want)
    assert plans == [["all_gather", "reduce_scatter"]]


@pytest.mark.slow
def test_no_sync_without_batch_axes() -> None:
    want, _ = accumulated(None, True)
    got, _ = alike(accumulated, "tp=2", True)
    near(got, want)


class Twins(nn.Module):
    """Two parameters have one gradient, that of a third is one value expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, WIDTH))
        self.b = nn.Parameter(torch.ones(3, WIDTH))
        self.c = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.a + self.b).t()).square().mean() * self.c.sum()


def twins(mesh: str | None) -> Any:
    model = Twins()
    program = model
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
        program = compiled(model, mesh)
    for _ in range(3):
        program(rows()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return gradients(model)


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_every_gradient_owns_its_memory(mesh: str) -> None:
    near(alike(twins, mesh), twins(None))


# Shared parameters, parametrizations


def share_blocks(model: nn.Module) -> None:
    model.layers[1].up.weight = model.layers[0].up.weight
    model.layers[1].norm = model.layers[0].norm


def normalize_weights(model: nn.Module) -> None:
    for layer in model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.up)


def changed(mesh: str | None, change: Change) -> list[Any]:
    model, program = prepared(mesh, change)
    return steps(model, program, torch.optim.SGD(model.parameters(), lr=0.1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("change", [share_blocks, normalize_weights])
def test_unusual_parameters(change: Change, mesh: str) -> None:
    near(alike(changed, mesh, change), changed(None, change), rtol=1e-4)


# Dtypes


def mixed(mesh: str | None, param: str, reduce: str | None) -> list[Any]:
    """With parameters and inputs cast by options, or by hand."""
    model = mlp()
    x = rows()
    if mesh is None:
        dtype = getattr(torch, param)
        cast = {n: p.to(dtype) for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, cast, (x.to(dtype),))
        loss.backward()
        return [loss.float().item(), gradients(model), []]
    model = fxpar.shard(model, mesh=mesh)
    program = compiled(model, mesh, param_dtype=param, reduce_dtype=reduce)
    before = len(fxpar.plans())
    loss = program(x)
    loss.backward()
    (plan,) = fxpar.plans()[before:]
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    return [loss.float().item(), gradients(model), sizes_of(plan)]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).square().sum() / 64


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def rows(size: int = 8) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1))


def sizes_of(plan: Plan) -> list[tuple[str, int]]:
    """Kind and bytes an element of the collectives on weights."""
    count = 2 * WIDTH * WIDTH
    return sorted(
        {(c.kind, c.bytes // count) for c in plan.collectives if c.bytes >= count}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("reduce", "size"), [(None, 2), ("float32", 4)])
def test_parameters_are_cast_before_the_gather(reduce: str | None, size: int) -> None:
    loss, grads, sizes = alike(mixed, "dp=2", "bfloat16", reduce)
    want, wanted, _ = mixed(None, "bfloat16", None)
    assert loss == pytest.approx(want, rel=1e-2)
    near(grads, wanted, rtol=2e-2, atol=2e-2)
    assert sizes == [("all_gather", 2), ("reduce_scatter", size)]


def autocast(mesh: str | None) -> list[Any]:
    model, x = mlp(), rows()
    program = model
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
        program = compiled(model, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = program(x)
    loss.backward()
    found = [] if mesh is None else sizes_of(fxpar.plans()[-1])
    return [loss.float().item(), gradients(model), found]


def test_autocast_gathers_what_it_casts() -> None:
    loss, grads, sizes = alike(autocast, "dp=2")
    want, wanted, _ = autocast(None)
    assert loss == pytest.approx(want, rel=1e-2)
    near(grads, wanted, rtol=2e-2, atol=2e-2)
    assert ("all_gather", 2) in sizes and ("all_gather", 4) not in sizes


# Layout from a sample


def with_sample(mesh: str) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    model = fxpar.shard(model, mesh=mesh, sample=((rows(),), {}))
    lies = {n: " ".join(map(str, p.placements)) for n, p in model.named_parameters()}
    before = len(fxpar.plans())
    compiled(model, mesh)(rows()).square().mean().backward()
    plan = fxpar.plans()[before]
    return [gradients(model), lies, [(c.kind, *c.axes) for c in plan.collectives]]


def test_a_layout_from_a_sample_is_never_gathered_on_tp() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    model(rows()).square().mean().backward()
    got, lies, collectives = alike(with_sample, "dp=2,tp=2")
    near(got, gradients(model), rtol=1e-4)
    assert not [c for c in collectives if c[0] != "all_reduce" and "tp" in c]
    assert ("all_reduce", "tp") in collectives
    up, down = lies["0.up.weight"], lies["0.down.weight"]
    assert up.split()[-1] == "S(0)" and down.split()[-1] == "S(1)"
    assert lies["0.norm.weight"].split()[-1] == "R"


# Eager, and gathered once


def uncompiled(mesh: str | None) -> list[Any]:
    model = small()
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return steps(model, model, optimizer, 2)


@ON_ONE_AXIS
def test_eager_use_is_correct(mesh: str) -> None:
    near(alike(uncompiled, mesh), uncompiled(None), rtol=1e-4)


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH, False), nn.Tanh())]
    return nn.Sequential(*layers)


def kept(mesh: str) -> list[Any]:
    """Gathers of weights with and without the second one for the backward."""
    out = []
    for again in (True, False):
        torch._dynamo.reset()
        model = fxpar.shard(deep(), mesh=mesh)
        program = compiled(model, mesh, reshard_after_forward=again)
        program(rows()).square().mean().backward()
        gathers = [c for c in fxpar.plans()[-1].collectives if c.kind == "all_gather"]
        out.append([gradients(model), len(gathers)])
    return out


@pytest.mark.slow
def test_gathered_parameters_may_be_kept() -> None:
    (first, often), (second, once) = alike(kept, "dp=2")
    model = deep()
    model(rows()).square().mean().backward()
    near([first, second], [gradients(model)] * 2)
    # Not needed again is the first layer's weight; still there the last one's. The
    # result is gathered too.
    assert (often, once) == (4 + 2 + 1, 4 + 1)
