"""``fxpar.train_step`` with gradients of several calls and with ``GradScaler``: losses,
parameters, state and scale are those of the eager loop on one device, in float64, for
whole and for sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import OptionError, PlanError
from tests.helpers.spawn import shared_pool

CALLS = 7  # two updates of three, and one that is left open
CLIP = 0.2


class Gated(nn.Module):
    """With buffers, a parameter nobody uses, and one that a flag leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)
        self.down, self.unused = nn.Linear(16, 4), nn.Parameter(torch.ones(3))
        self.scale, self.gated = nn.Parameter(torch.tensor(1.5)), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.norm(self.up(x)).tanh())
        return x * self.scale if self.gated else x


def build() -> Gated:
    torch.manual_seed(0)
    return Gated().double()


def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def batches(bad: tuple[int, ...] = ()) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those numbered ``bad`` give gradients that are not finite, in one row."""
    made = torch.Generator().manual_seed(1)
    shapes = (8, 8), (8, 4)
    data = [
        [torch.randn(shape, generator=made).double() for shape in shapes]
        for _ in range(CALLS)
    ]
    for i in bad:
        data[i][1][-1, 0] = torch.inf
    return [(x, y) for x, y in data]


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def scaler_of(scales: bool) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(
        "cpu", init_scale=64.0, growth_interval=2, enabled=scales
    )


Run = tuple[list[float], dict[str, torch.Tensor], list[float]]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {p: name for name, p in model.named_parameters()}
    out = {name: full(x) for name, x in model.state_dict().items()}
    for p, state in optimizer.state.items():
        out |= {f"{names[p]}:{key}": full(x) for key, x in state.items()}
    return out


def full(x: Any) -> Any:
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def loop(
    kind: str, accumulate: int, scales: bool, bad: tuple[int, ...], parts: int = 1
) -> Run:
    """The eager loop on one device; of several ``parts`` of a batch the mean loss, and
    buffers that rank 0 writes, as under DDP."""
    model, scaler = build(), scaler_of(scales)
    optimizer = make(kind, model)
    losses, scale = [], []
    for i, batch in enumerate(batches(bad)):
        loss, before, kept = 0.0, model.norm._buffers, []
        for part in zip(*(x.chunk(parts) for x in batch), strict=True):
            model.norm._buffers = {key: x.clone() for key, x in before.items()}
            loss = loss + loss_fn(model, *part) / parts
            kept.append(model.norm._buffers)
        model.norm._buffers = kept[0]
        scaler.scale(loss / accumulate).backward()
        losses.append(loss.item())
        if (i + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scale.append(scaler.get_scale())
    return losses, state_of(model, optimizer), scale


def stepped(
    kind: str,
    accumulate: int,
    scales: bool,
    bad: tuple[int, ...],
    shard: bool,
    inputs: str = "global",
    codegen: str = "eager",
) -> Run:
    """By ``fxpar.train_step``; with local inputs each rank gives its rows."""
    model: Any = build()
    if shard:
        model = fxpar.shard(model)
    optimizer, scaler = make(kind, model), scaler_of(scales)
    step = fxpar.train_step(
        model,
        loss_fn,
        optimizer,
        clip=CLIP,
        accumulate=accumulate,
        scaler=scaler if scales else None,
        options={"codegen": codegen, "inputs": inputs},
    )
    losses, scale = [], []
    for batch in batches(bad):
        if inputs == "local":
            ranks, rank = (
                torch.distributed.get_world_size(),
                torch.distributed.get_rank(),
            )
            batch = tuple(x.chunk(ranks)[rank] for x in batch)
        loss = step(*batch)
        if inputs == "local":  # the rank's own
            torch.distributed.all_reduce(loss)
            loss /= ranks
        losses.append(loss.item())
        scale.append(scaler.get_scale())
        for p in step.gradients:
            kept = step.gradients[p]
            assert getattr(kept, "placements", 0) == getattr(p, "placements", 0)
    assert all(p.grad is None for p in model.parameters())
    return losses, state_of(model, optimizer), scale


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, equal_nan=True)


SLOW = pytest.mark.slow
CASES = [
    ("dp=2", "adamw", 3, False, True, "local"),
    ("dp=2", "sgd", 2, True, False, "global"),
    pytest.param("dp=2", "adamw", 3, False, False, "global", marks=SLOW),
    pytest.param("dp=2", "sgd", 2, True, True, "global", marks=SLOW),
    pytest.param("dp=2", "adamw", 1, True, False, "local", marks=SLOW),
    *(
        pytest.param(mesh, "adamw", calls, scales, shard, "global", marks=SLOW)
        for mesh in ("dp=4", "dp=2,tp=2")
        for calls, scales in ((3, False), (1, True), (2, True))
        for shard in (False, True)
    ),
]


@pytest.mark.parametrize(
    ("mesh", "kind", "accumulate", "scales", "shard", "inputs"), CASES
)
def test_as_the_loop_on_one_device(
    mesh: str, kind: str, accumulate: int, scales: bool, shard: bool, inputs: str
) -> None:
    bad = (2,) if scales else ()
    pool = shared_pool(4 if mesh != "dp=2" else 2)
    env = {"FXPAR_MESH": mesh}
    runs = pool.run(stepped, kind, accumulate, scales, bad, shard, inputs, env=env)
    want = loop(kind, accumulate, scales, bad, 2 if inputs == "local" else 1)
    for rank, run in enumerate(runs):
        if inputs == "local" and rank:  # what it wrote in the last call is its own
            for key in [key for key in run[1] if "running" in key]:
                run[1][key] = want[1][key]
        same(run, want)
        assert run[2] == want[2] and run[2] == runs[0][2]
    if scales:
        assert len(set(want[2])) > 1, "the scale never changed"


@SLOW
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
@pytest.mark.parametrize(("accumulate", "scales"), [(3, False), (2, True)])
def test_generated_code(mesh: str, accumulate: int, scales: bool) -> None:
    bad = (2,) if scales else ()
    case = "adamw", accumulate, scales, bad
    pool = shared_pool(2 if mesh == "dp=2" else 1)
    runs = pool.run(
        stepped, *case, False, "global", "inductor", env={"FXPAR_MESH": mesh}
    )
    for run in runs:
        same(run, loop(*case))


def gated(first: bool, last: bool, size: int) -> tuple[float, bool]:
    """Two calls of one update, the last on ``size`` rows, in which ``scale`` is used by
    the forward or is not: the largest difference from the eager loop, and whether its
    moment is there."""
    models = build(), build()
    optimizers = [make("adamw", model) for model in models]
    options = {"codegen": "eager"}
    step = fxpar.train_step(
        models[1], loss_fn, optimizers[1], accumulate=2, options=options
    )
    for used, rows, (x, y) in zip((first, last), (8, size), batches(), strict=False):
        for model in models:
            model.gated = used
        (loss_fn(models[0], x[:rows], y[:rows]) / 2).backward()
        step(x[:rows], y[:rows])
    optimizers[0].step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    off = max((p - q).abs().max().item() for p, q in pairs)
    return off, models[1].scale in optimizers[1].state


ALONE = {"FXPAR_MESH": "dp=1"}


def test_calls_of_one_update_may_differ() -> None:
    """A parameter that just the last call reaches; another size of the batch."""
    runs = shared_pool(2).run(gated, False, True, 4, env={"FXPAR_MESH": "dp=2"})
    assert all(off < 1e-12 and there for off, there in runs)


def test_a_parameter_that_no_call_reaches_is_not_updated() -> None:
    [(off, there)] = shared_pool(1).run(gated, False, False, 8, env=ALONE)
    assert off < 1e-12 and not there


def test_a_gradient_whose_parameter_is_no_input_is_refused() -> None:
    (error,) = shared_pool(1).errors(gated, True, False, 8, env=ALONE)
    assert isinstance(error, PlanError)
    assert "scale has a gradient of an earlier call" in str(error)


def hundredfold(scales: bool) -> float:
    """The weight after one step whose gradient is no float16 number when scaled."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=scales)
    step = fxpar.train_step(
        model,
        lambda model, x: model(x).half().float().sum() * 100,
        optimizer,
        scaler=scaler,
        options={"codegen": "eager"},
    )
    before = model.weight.detach().clone()
    step(torch.ones(2, 4))
    return (model.weight - before).abs().max().item()


def test_a_scale_that_overflows_leaves_the_update_out() -> None:
    pool, env = shared_pool(2), {"FXPAR_MESH": "dp=2"}
    assert pool.run(hundredfold, True, env=env) == [0.0, 0.0]
    assert min(pool.run(hundredfold, False, env=env)) > 1.0


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("accumulate", 0), ("accumulate", 1.5), ("accumulate", True), ("scaler", 1024.0)],
)
def test_what_is_no_setting_is_refused(keyword: str, value: Any) -> None:
    model = build()
    with pytest.raises(OptionError, match=f"{keyword} cannot be {value}"):
        fxpar.train_step(model, loss_fn, make("sgd", model), **{keyword: value})
