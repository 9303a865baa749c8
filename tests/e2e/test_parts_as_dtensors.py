"""Global mode over parts of a batch that ranks read themselves: each feeds its rows as
a DTensor (``Shard(0)``), and results, gradients and buffers are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fxpar
from fxpar import FxparError
from tests.helpers.spawn import ranks_of
from tests.helpers.training import whole

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

STEPS = 3


class Contrastive(nn.Module):
    """Statistics of the whole batch, and each row against all others of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = fxpar.global_value(a), fxpar.global_value(b)
        a, b = (F.normalize(self.last(self.norm(self.first(x)).tanh())) for x in (a, b))
        logits = a @ b.T / 0.2
        return F.cross_entropy(logits, torch.arange(len(a))), logits


def batch(step: int, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (2, rows, 6)
    return list(torch.randn(*shape, generator=generator, dtype=torch.float64))


def devices_of(mesh: str) -> Any:
    names, sizes = zip(*(axis.split("=") for axis in mesh.split(",")), strict=True)
    return init_device_mesh("cpu", tuple(map(int, sizes)), mesh_dim_names=names)


def read(x: torch.Tensor, devices: Any, how: list | None = None) -> DTensor:
    """The batch of which this rank has read its rows only."""
    names = devices.mesh_dim_names
    how = how or [Shard(0) if name == "dp" else Replicate() for name in names]
    part = x.chunk(devices["dp"].size())[devices.get_local_rank("dp")].clone()
    return DTensor.from_local(part, devices, how, shape=x.shape, stride=x.stride())


def trained(
    mesh: str, rows: int, sharded: bool = False, codegen: str = "eager"
) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Contrastive().double()
    run: Any = model
    if mesh:
        devices = devices_of(mesh)
        if sharded:
            model = fxpar.shard(model, mesh=mesh)
        options = {"mesh": mesh, "codegen": codegen}
        run = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out: dict[str, Any] = {}
    for step in range(STEPS):
        loss, logits = run(
            *(read(x, devices) if mesh else x for x in batch(step, rows))
        )
        loss.backward()
        out |= {f"loss {step}": whole(loss), f"logits {step}": whole(logits)}
        named = model.named_parameters()
        out |= {f"{name} {step}": whole(p.grad) for name, p in named}
        optimizer.step()
        optimizer.zero_grad()
    return out | {name: whole(x) for name, x in model.state_dict().items()}


@pytest.mark.parametrize(
    ("mesh", "rows", "sharded", "codegen"),
    [
        pytest.param("dp=2", 8, False, "eager", marks=pytest.mark.slow),
        ("dp=2", 7, True, "eager"),
        pytest.param("dp=2", 8, True, "inductor", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", 7, False, "eager", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", 8, True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_results_are_those_of_one_device(
    mesh: str, rows: int, sharded: bool, codegen: str
) -> None:
    want = trained("", rows)
    for got in ranks_of(mesh).run(trained, mesh, rows, sharded, codegen):
        assert got.keys() == want.keys()
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-12, msg=name)


def in_eager_code() -> torch.Tensor:
    (x, _) = batch(0, 7)
    return fxpar.global_value(read(x, devices_of("dp=2")))


def test_eager_code_has_the_value() -> None:
    (x, _) = batch(0, 7)
    for value in ranks_of("dp=2").run(in_eager_code):
        assert torch.equal(value, x)


def sums() -> str:
    fed = read(batch(0, 8)[0], devices_of("dp=2"), [Partial()])
    torch._dynamo.reset()
    options = {"mesh": "dp=2", "codegen": "eager"}
    run = torch.compile(
        lambda x: fxpar.global_value(x) + 1, backend="fxpar", options=options
    )
    try:
        run(fed)
    except FxparError as error:
        return str(error)
    return ""


def test_a_sum_of_parts_is_refused() -> None:
    for text in ranks_of("dp=2").run(sums):
        assert "along dp was fed" in text and "fix: feed one whose" in text
