"""What a rank of a sharded model holds, and a model that one process cannot hold."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpar
from tests.helpers.models import NAMES, build_loss
from tests.helpers.scripts import run_script
from tests.helpers.spawn import shared_pool
from tests.helpers.training import loop

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

RANKS = 4
MORE = 1.1  # of what an even split would be

WIDTH, LAYERS, BATCH = 2048, 12, 8
STATES = 4  # a parameter, its gradient, AdamW's two moments
NEEDED = STATES * LAYERS * WIDTH * WIDTH * 4  # 768 MiB


class Deep(nn.Module):
    """NEEDED bytes of parameters, gradients and moments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 1.5 / WIDTH)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's parts. Those that are views of one buffer (gradients that
    were reduced together) count once."""
    from torch.distributed.tensor import DTensor

    parts = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    storages = (part.untyped_storage() for part in parts)
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def measure(name: str, mesh: str | None) -> tuple[int, int]:
    """Bytes of parameters, gradients and moments after a step: of all, and of those
    that lie whole on every rank."""
    model, batch = build_loss(name)
    compiled = model
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
        options = {"mesh": mesh, "codegen": "eager"}
        compiled = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop(compiled, optimizer, [batch])
    every, whole = [], []
    for p in model.parameters():
        state = optimizer.state[p]
        every += [p, p.grad, state["exp_avg"], state["exp_avg_sq"]]
        if mesh is not None and all(x.is_replicate() for x in p.placements):
            whole += every[-4:]
    return held(every), held(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_its_share(name: str) -> None:
    one, _ = measure(name, None)
    for every, whole in shared_pool(RANKS).run(measure, name, "dp=4", timeout=300.0):
        assert every <= MORE * one / RANKS + whole
        assert whole <= one / 100  # heads of few classes, and their like


def limited(extra: int) -> None:
    """Let this process take so many bytes more."""
    status = Path("/proc/self/status").read_text()
    now = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + extra, now + extra))


def big(extra: int, sharded: bool) -> None:
    """Two steps of Deep in little memory; the script of the test below."""
    torch.set_num_threads(1)
    batch = {"x": torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))}
    torch.manual_seed(0)
    tiny = nn.Linear(4, 4)
    if sharded:  # what the first compile and collectives need is not counted
        tiny = fxpar.shard(tiny)
    options = {"codegen": "eager"}
    loop(
        torch.compile(lambda x: tiny(x).sum(), backend="fxpar", options=options),
        torch.optim.AdamW(tiny.parameters()),
        [{"x": torch.ones(4, 4)}] * 2,
    )
    torch._dynamo.reset()
    limited(extra)
    with torch.device("meta"):
        model = Deep()
    if sharded:
        model = fxpar.shard(model)
    model.to_empty(device="cpu")
    model.apply(initialize)
    compiled = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    losses, _ = loop(compiled, optimizer, [batch] * 2)
    print("losses", *losses, flush=True)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_model_larger_than_a_process() -> None:
    """Memory for what the model holds between steps, and nothing else: too little for
    one process; four hold a quarter each, and gather weights beside it."""
    extra = str(NEEDED)
    env = {"FXPAR_MESH": f"dp={RANKS}"}
    (alone,) = run_script(__file__, extra, "whole", ranks=1, timeout=120.0)
    assert alone.code != 0 and "can't allocate memory" in alone.output
    (roomy,) = run_script(__file__, str(4 * NEEDED), "whole", ranks=1, timeout=120.0)
    want = losses_of(roomy.output)
    assert want[1] < want[0]
    for rank in run_script(
        __file__, extra, "sharded", ranks=RANKS, env=env, timeout=240.0
    ):
        assert rank.code == 0, rank.output
        assert losses_of(rank.output) == pytest.approx(want, rel=1e-4)


def losses_of(output: str) -> list[float]:
    line = next(x for x in output.splitlines() if x.startswith("losses "))
    return [float(word) for word in line.split()[1:]]


if __name__ == "__main__":
    big(int(sys.argv[1]), sys.argv[2] == "sharded")
    sys.stdout.flush()
    os._exit(0)
