"""Regions of activation checkpointing in plans: what they hold, and what is said where
that is still too much."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import PlanError
from fxpar.planning import plan_call
from tests.helpers.spawn import shared_pool

WIDTH, ROWS, LAYERS = 64, 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """``reentrant``: how layers are checkpointed; None: they are not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


def planned(
    reentrant: bool | None,
    memory: int | None = None,
    *,
    requires_grad: bool = False,
    **how: Any,
) -> Any:
    x = torch.ones(ROWS, WIDTH, requires_grad=requires_grad)
    how = {"mode": "propagate", **how}
    asked = {} if memory is None else {"memory": memory}
    return plan_call(Blocks(reentrant), (x,), {}, asked, mesh="dp=2", grad=True, **how)


@pytest.mark.parametrize(
    "mode", [pytest.param("propagate", marks=pytest.mark.slow), "search"]
)
def test_a_checkpointed_plan_holds_less_and_takes_longer(mode: str) -> None:
    # No gradient passes a reentrant region whose inputs require none.
    plain, *others = (
        planned(how, mode=mode, requires_grad=True) for how in (None, False, True)
    )
    inner = ROWS // 2 * 4 * WIDTH * 4  # bytes of what a region does not keep
    for plan in others:
        assert plan.held_bytes <= plain.held_bytes - 2 * inner
        assert plan.predicted.compute > plain.predicted.compute
        if mode == "search":
            peaks = [x.result.decision.search.solution.peak for x in (plan, plain)]
            assert peaks[0] <= peaks[1] - inner
    assert others[0].memory == others[1].memory


def trained() -> tuple[int, tuple[tuple[str, int], ...]]:
    """Bytes that a forward keeps for its backward, and the plan's memory."""
    x, sizes = torch.ones(ROWS, WIDTH), dict[int, int]()
    model = Blocks(False)
    compiled = torch.compile(
        model,
        backend="fxpar",
        options={"mesh": "dp=2", "codegen": "eager", "plan": "propagate"},
    )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compiled(x)
    saved = sum(n for at, n in sizes.items() if at not in own)
    return saved, fxpar.plans()[-1].memory


@pytest.mark.multiprocess
def test_a_plan_holds_what_a_training_step_holds() -> None:
    saved, memory = shared_pool(2).run(trained, timeout=200.0)[0]
    plan = planned(False)
    names = ("saved for the backward", "passing")
    told, compiled = (
        {k: dict(m).get(k, 0) for k in names} for m in (plan.memory, memory)
    )
    assert told == compiled, (plan.memory, memory)
    assert 0 < saved <= sum(told.values())


def test_no_plan_fits_by_kind_and_line_with_fixes() -> None:
    with pytest.raises(PlanError) as error:
        planned(None, 200_000, mode="search")
    what, fix = error.value.what, error.value.fix
    assert "no plan fits in 200 kB a rank" in what
    assert re.search(r"kB parameters: .*layers\.\d\.(up|down)\.weight", what)
    assert "optimizer state: " in what
    line = r"test_checkpointed\.py:\d+: return x \+ self\.down"
    assert re.search(rf" MB saved for the backward: .* MB .*{line}", what)
    assert "checkpoint" in fix and "fewer rows" in fix and "twice as many ranks" in fix
    assert len(re.findall(r"[\d.]+ [kM]B less", fix)) == 3
    with pytest.raises(PlanError) as error:
        planned(False, 200_000, mode="search")
    assert "checkpoint" not in str(error.value.fix), "they are"
