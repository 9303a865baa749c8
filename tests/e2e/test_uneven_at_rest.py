"""Parameters that rest in shards that are not alike, as DTensor's ``Shard`` cuts them.

Widths and words are odd, so that no axis divides a dim of a matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor

import fxpar
from tests.helpers.spawn import ranks_of
from tests.helpers.training import loop, whole

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

WORDS, WIDTH, ROWS = 101, 37, 6
STEPS = 10
HINTS = {"table.weight": ("tp",), "words.weight": ("tp",), "inner.weight": ("tp",)}


class Odd(nn.Module):
    """Words to words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, 5)
        self.outer = nn.Linear(5, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(x)
        hidden = self.norm(hidden + self.outer(torch.relu(self.inner(hidden))))
        return nn.functional.cross_entropy(self.words(hidden), labels)


def built(mesh: str | None, hints: Any = None) -> nn.Module:
    torch.manual_seed(3)
    model = Odd().double()
    return model if mesh is None else fxpar.shard(model, mesh=mesh, hints=hints)


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    return [
        {k: torch.randint(0, WORDS, (ROWS,)) for k in ("x", "labels")}
        for _ in range(STEPS)
    ]


def trained(
    mesh: str | None,
    hints: Any = None,
    how: str = "compiled",
    adam: str | None = None,
) -> Any:
    """Losses, gradients of the first step, and parameters and moments at the end, all
    whole; shapes of what rests here; how many values the moments have here."""
    model = built(mesh, hints)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, **{adam: True} if adam else {}
    )
    program: Any = model
    codegen = "inductor" if how == "inductor" else "eager"
    options = {"mesh": mesh, "codegen": codegen, "plan": "propagate"}
    if how == "step" and mesh is not None:
        step = fxpar.train_step(
            model, lambda m, *b: m(*b), optimizer, clip=0.5, options=options
        )
        losses = [step(*batch.values()).item() for batch in batches()]
        first: dict[str, torch.Tensor] = {}
    else:
        if how != "eager" and mesh is not None:
            torch._dynamo.reset()
            program = torch.compile(model, backend="fxpar", options=options)
        losses, first = loop(program, optimizer, batches(), model=model, clip=0.5)
    values = {name: whole(p) for name, p in model.named_parameters()}
    moments = {
        name: whole(optimizer.state[p]["exp_avg"])
        for name, p in model.named_parameters()
    }
    local = {n: tuple(part(p).shape) for n, p in model.named_parameters()}
    for p in model.parameters():
        assert part(optimizer.state[p]["exp_avg"]).shape == part(p).shape
    return losses, first, values, moments, local


def part(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def check(
    mesh: str, hints: Any = None, how: str = "compiled", adam: str | None = None
) -> list[dict[str, tuple[int, ...]]]:
    """Train on the mesh as on one device; what each rank holds of each parameter."""
    want = trained(None)
    runs = ranks_of(mesh).run(trained, mesh, hints, how, adam, timeout=900.0)
    for run in runs:
        for ours, theirs in zip(run[:4], want[:4], strict=True):
            if ours or how != "step":
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    return [run[4] for run in runs]


def test_parts_that_are_not_alike() -> None:
    first, last = check("dp=2")
    assert first["table.weight"] == (51, 37) and last["table.weight"] == (50, 37)
    assert first["inner.weight"] == (5, 19) and last["inner.weight"] == (5, 18)
    assert first["norm.weight"] == last["norm.weight"] == (37,)  # a vector lies whole


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled", "step"])
def test_words_split_as_they_are_used(how: str) -> None:
    for words, rows in zip(check("tp=2", HINTS, how), (51, 50), strict=True):
        assert words["table.weight"] == words["words.weight"] == (rows, 37)
        assert words["outer.weight"] == (37, 5)


@pytest.mark.slow
@pytest.mark.parametrize("adam", ["foreach", "fused"])
def test_other_forms_of_the_optimizer(adam: str) -> None:
    check("dp=2", None, "eager", adam)


CUT = HINTS | {"outer.weight": (None, "tp"), "inner.*": ("tp",)}
FOUR = [("dp=4", None), ("tp=4", CUT), ("dp=2,tp=2", None), ("dp=2,tp=2", CUT)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled", "eager", "step"])
@pytest.mark.parametrize(("mesh", "hints"), FOUR)
def test_four_ranks(mesh: str, hints: Any, how: str) -> None:
    """Of five rows over ``tp=4`` the last rank has none."""
    held = check(mesh, hints, how)
    rows = [(x["table.weight"], x["inner.weight"]) for x in held]
    if mesh == "tp=4":
        assert rows[0] == ((26, 37), (2, 37)) and rows[3] == ((23, 37), (0, 37))
    elif hints is None:
        assert len({x for x, _ in rows}) == 2  # two axes on one dim, or one


def norms(mesh: str, hints: Any) -> None:
    """Norms of all orders over all parameters, as one device has them."""
    model, one = built(mesh, hints), built(None)
    ours, theirs = list(model.parameters()), list(one.parameters())
    for order in (2.0, 1.0, 3.0, 0.0, float("inf"), -float("inf")):
        for foreach in (True, False):
            have, want = (
                nn.utils.get_total_norm(list(x), order, foreach=foreach)
                for x in (ours, theirs)
            )
            torch.testing.assert_close(whole(have), whole(want), rtol=1e-12, atol=0)


def test_norms_over_parts() -> None:
    ranks_of("tp=2").run(norms, "tp=2", CUT)


@pytest.mark.slow
def test_norms_where_a_rank_has_nothing() -> None:
    """It would refuse the largest of nothing, while the others wait."""
    ranks_of("tp=4").run(norms, "tp=4", CUT)


def draws(mesh: str, hints: Any) -> None:
    model, one = built(mesh, hints), built(None)
    for each in (model, one):
        torch.manual_seed(7)
        for p in each.parameters():
            nn.init.trunc_normal_(p, std=0.3)
            nn.init.uniform_(p)
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "hints"), FOUR)
def test_random_values_are_those_of_one_device(mesh: str, hints: Any) -> None:
    ranks_of(mesh).run(draws, mesh, hints)


def saved(mesh: str | None, hints: Any, path: str) -> None:
    dcp.save(built(mesh, hints).state_dict(), checkpoint_id=path, no_dist=mesh is None)


def loaded(mesh: str | None, hints: Any, path: str) -> None:
    """What a checkpoint holds, and what whole state dicts hold, in other layouts."""
    model, want = built(mesh, hints), built(None)

    def is_as_saved() -> None:
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(whole(p), whole(q))
            with torch.no_grad():
                p.fill_(7)

    state = model.state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    dcp.load(state, checkpoint_id=path, no_dist=mesh is None)
    model.load_state_dict(state)
    is_as_saved()
    model.load_state_dict(want.state_dict())
    is_as_saved()
    whole_state = states.StateDictOptions(full_state_dict=True)
    if mesh is not None:
        states.set_model_state_dict(model, want.state_dict(), options=whole_state)
        full = states.get_model_state_dict(model, options=whole_state)
        assert all(torch.equal(full[k], v) for k, v in want.state_dict().items())
        is_as_saved()


@pytest.mark.slow
def test_a_checkpoint_for_another_mesh_and_one_device(tmp_path: Path) -> None:
    path = str(tmp_path)
    ranks_of("tp=2").run(saved, "tp=2", CUT, path)
    ranks_of("dp=2").run(loaded, "dp=2", None, path)
    loaded(None, None, path)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "hints"), FOUR)
def test_checkpoints_of_four_ranks(mesh: str, hints: Any, tmp_path: Path) -> None:
    path = str(tmp_path)
    ranks_of(mesh).run(saved, mesh, hints, path)
    for other, other_hints in [*FOUR, ("dp=2", None)]:
        ranks_of(other).run(loaded, other, other_hints, path)
    loaded(None, None, path)


@pytest.mark.slow
def test_generated_kernels() -> None:
    """Each rank compiles its own program."""
    want = trained(None)
    for run in ranks_of("tp=2").run(trained, "tp=2", HINTS, "inductor", timeout=900.0):
        for ours, theirs in zip(run[:4], want[:4], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
