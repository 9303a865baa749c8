"""``fxpar.shard`` on a mesh with an axis of stages: each rank holds its part of every
parameter, gradient and moment, and steps are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import FxparError
from tests.helpers.spawn import ranks_of
from tests.helpers.training import loop, place_of, whole
from tests.helpers.whole_steps import whole_steps

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

WORDS, WIDTH, STEPS = 24, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """The first stage and the last read one weight; a parameter has an odd dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rest = nn.Sequential(*[Block() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.rest(self.embed(ids)) * self.scale @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def built() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def batches() -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(WORDS, (8, 6), generator=generator),) for _ in range(STEPS)]


def trained(options: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Steps under torch.compile with clipped gradients; a checkpoint is left."""
    model = built()
    if options:
        model = fxpar.shard(model, mesh=options["mesh"])
    run = torch.compile(model, backend="fxpar", options=options) if options else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, first = loop(run, optimizer, batches(), model=model, clip=0.3)
    state = model.state_dict()
    if folder:
        dcp.save({"model": state}, checkpoint_id=folder)
    parameters = list(model.parameters())
    at_rest = [
        parameters,
        [p.grad for p in parameters],
        [optimizer.state[p]["exp_avg"] for p in parameters],
        [optimizer.state[p]["exp_avg_sq"] for p in parameters],
    ]
    return {
        "losses": losses,
        "gradients": first,
        "state": {name: whole(x) for name, x in state.items()},
        "held": [sum(here(x).numel() for x in kind) for kind in at_rest],
    }


def here(x: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def read_back(mesh: str, folder: str) -> dict[str, torch.Tensor]:
    model = built()
    if mesh:
        model = fxpar.shard(model, mesh=mesh)
    for p in model.parameters():
        nn.init.zeros_(p)
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    return {name: whole(x) for name, x in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "parts"),
    [("pp=2", 1), ("pp=2", 2), ("pp=4", 2), ("pp=2,dp=2", 2), ("pp=2,tp=2", 4)],
)
def test_stages_train_what_rests_in_parts(
    mesh: str, parts: int, tmp_path: Path
) -> None:
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"}
    options["microbatches"] = parts
    want, pool = trained({}), ranks_of(mesh)
    for got in pool.run(trained, options, str(tmp_path)):
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for kind in ("gradients", "state"):
            for name, x in want[kind].items():
                torch.testing.assert_close(got[kind][name], x, rtol=1e-9, atol=1e-11)
        ranks = len(pool.run(len, ""))
        for held, all_ in zip(got["held"], want["held"], strict=True):
            assert held < 1.15 * all_ / ranks
    other = "dp=2" if mesh == "pp=2" else ""
    back = ranks_of("dp=2").run(read_back, other, str(tmp_path))
    for name, x in back[0].items():
        torch.testing.assert_close(x, want["state"][name], rtol=1e-9, atol=1e-11)


def reported(options: dict[str, Any]) -> list[torch.Tensor]:
    """A loss, the length of a parameter that the first and the last stage read too, and
    the gradients of their sum."""
    torch._dynamo.reset()
    model = built()
    if options:
        model = fxpar.shard(model, mesh=options["mesh"])

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(ids), model.embed.weight.square().mean().sqrt()

    run = torch.compile(step, backend="fxpar", options=options) if options else step
    loss, length = run(*batches()[0])
    (loss + length).backward()
    return [loss, length, *(whole(p.grad) for p in model.parameters())]


@pytest.mark.parametrize(
    ("mesh", "codegen"),
    [
        ("pp=2", "eager"),
        pytest.param("pp=4", "eager", marks=pytest.mark.slow),
        pytest.param("pp=2,dp=2", "eager", marks=pytest.mark.slow),
        pytest.param("pp=2", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_parameter_at_rest_may_be_a_part_of_the_result(
    mesh: str, codegen: str
) -> None:
    options = {"mesh": mesh, "codegen": codegen, "plan": "propagate"}
    options |= {"microbatches": 2, "verify": True}
    want = reported({})
    for got in ranks_of(mesh).run(reported, options):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("pp=2", "1f1b"),
        pytest.param("pp=2,dp=2", "interleaved", marks=pytest.mark.slow),
        pytest.param("pp=2", "zero_bubble", marks=pytest.mark.slow),
    ],
)
def test_whole_steps_update_what_rests_in_parts(mesh: str, schedule: str) -> None:
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"}
    options |= {"pipeline": schedule, "microbatches": 2}
    want = whole_steps(None, STEPS)
    for got in ranks_of(mesh).run(whole_steps, options, STEPS, True, timeout=900.0):
        assert any(f"{schedule}, 2 microbatches" in note for note in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for kind in ("state", "moments", "buffers"):
            for name, x in want[kind].items():
                torch.testing.assert_close(got[kind][name], x, rtol=1e-9, atol=1e-11)


class Straighten(torch.optim.Optimizer):
    """Its update reads all of a parameter, in another dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.dim() == 2:
                w = p.float()
                p.sub_(w @ w.T @ w, alpha=1e-2)
            p.sub_(p.grad, alpha=1e-2)


def straightened(options: dict[str, Any]) -> list[torch.Tensor]:
    model = built()
    if options:
        model = fxpar.shard(model, mesh=options["mesh"])
    optimizer = Straighten(model.parameters())
    if options:
        step = fxpar.train_step(model, Tied.forward, optimizer, options=options)
        losses = [step(*batch).item() for batch in batches()]
    else:
        losses, _ = loop(model, optimizer, batches())
    return [torch.tensor(losses), *(whole(p) for p in model.parameters())]


@pytest.mark.parametrize(
    "mesh", ["pp=2", pytest.param("pp=2,dp=2", marks=pytest.mark.slow)]
)
def test_updates_gather_what_rests_in_parts(mesh: str) -> None:
    options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"}
    want = straightened({})
    for got in ranks_of(mesh).run(straightened, options | {"microbatches": 2}):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class WidensAfterTheCut(nn.Module):
    """Its second stage computes with what arrives before it gathers a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.second = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(torch.cat([x.tanh(), x.sin()], 1))


def fed_in_parts(options: dict[str, Any]) -> list[torch.Tensor]:
    """Gradients of a step of which each place along ``dp`` fed a part."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = WidensAfterTheCut().double(), torch.randn(8, 16).double()
    if options:
        model = fxpar.shard(model, mesh=options["mesh"])
        place, places = place_of(options["mesh"])
        x = x.chunk(places)[place]
        model = torch.compile(model, backend="fxpar", options=options)
    model(x).square().mean().backward()
    return [whole(p.grad) for p in model.parameters()]


@pytest.mark.slow
def test_places_are_compared_before_a_stage_waits_for_another() -> None:
    options = {"mesh": "dp=2,pp=2", "codegen": "eager", "plan": "propagate"}
    options |= {"inputs": "local", "timeout": 5.0}
    want = fed_in_parts({})
    for got in ranks_of("dp=2,pp=2").run(fed_in_parts, options):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def epochs(
    mesh: str | None, form: str, folder: str, first: int, last: int
) -> dict[str, Any]:
    """Epochs ``first`` to ``last`` of a loop as users write it: a last batch that is
    smaller, a rate that falls, clipped gradients, an evaluation behind each epoch, and
    a checkpoint of all of it, from which later epochs go on."""
    torch._dynamo.reset()
    model = built()
    options = {"codegen": "eager", "plan": "propagate", "mesh": mesh}
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
    run = torch.compile(model, backend="fxpar", options=options) if mesh else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (22, 6), generator=generator)
    held = torch.randint(WORDS, (5, 6), generator=generator)

    def checkpoint() -> dict[str, Any]:
        state, moments = get_state_dict(model, optimizer)
        return {"model": state, "optimizer": moments, "rates": rates.state_dict()}

    if first:
        state = checkpoint()
        dcp.load(state, checkpoint_id=folder)
        both = {"model_state_dict": state["model"]}
        both["optim_state_dict"] = state["optimizer"]
        set_state_dict(model, optimizer, **both)
        rates.load_state_dict(state["rates"])
    step = None
    if form == "step" and mesh is not None:
        step = fxpar.train_step(
            model, lambda model, ids: model(ids), optimizer, clip=0.3, options=options
        )
    losses = []
    for _ in range(first, last):
        for batch in ids.split(8):
            if step is not None:
                losses.append(step(batch).item())
                rates.step()
                continue
            some, _ = loop(run, optimizer, [(batch,)], clip=0.3, after=rates.step)
            losses += some
        model.eval()
        with torch.no_grad():
            losses.append(run(held).item())
        model.train()
    if last == 1:
        dcp.save(checkpoint(), checkpoint_id=folder)
    state = model.state_dict()
    return {"losses": losses, "state": {name: whole(x) for name, x in state.items()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "other", "form"),
    [
        ("pp=2,dp=2", "tp=2", "compile"),
        ("pp=2", "pp=4", "step"),
        ("dp=2", "pp=2,tp=2", "step"),
    ],
)
def test_epochs_go_on_on_another_mesh(
    mesh: str, other: str, form: str, tmp_path: Path
) -> None:
    want = epochs(None, "", str(tmp_path / "of one"), 0, 2)
    folder = str(tmp_path / "saved")
    begun = ranks_of(mesh).run(epochs, mesh, form, folder, 0, 1, timeout=600.0)
    ended = ranks_of(other).run(epochs, other, form, folder, 1, 2, timeout=600.0)
    for got in ended:
        losses = begun[0]["losses"] + got["losses"]
        assert losses == pytest.approx(want["losses"], rel=1e-11)
        for name, x in want["state"].items():
            torch.testing.assert_close(got["state"][name], x, rtol=1e-9, atol=1e-11)


def hinted(mesh: str, hint: Any) -> str:
    try:
        fxpar.shard(built(), mesh=mesh, hints={"*.weight": hint})
    except FxparError as error:
        return str(error)
    return ""


def test_hints_along_stages_are_refused() -> None:
    for text in ranks_of("pp=2").run(hinted, "pp=2", ("pp", None)):
        assert "'pp'" in text and "embed.weight" in text


def test_pins_are_for_the_program() -> None:
    for text in ranks_of("pp=2").run(hinted, "pp=2", "pp=1"):
        assert (
            "'*.weight' pins parameters to a pipeline stage" in text
            and "FXPAR_HINTS" in text
        )
