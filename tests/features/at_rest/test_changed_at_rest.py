"""Models of ``fxpar.shard`` that are changed afterwards compute as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fxpar
from fxpar.errors import InputMismatchError, ShardError
from tests.helpers.spawn import shared_pool
from tests.helpers.training import whole

pytestmark = pytest.mark.multiprocess

HINTS = {"words.weight": ("dp", None), "head.weight": (None, "dp")}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(ids)) * self.scale)


def made(mesh: str | None, hints: Any = HINTS) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Words().double()
    return fxpar.shard(model, mesh=mesh, hints=hints) if mesh else model


def compiled(model: Any, mesh: str | None, *, verify: bool = False) -> Any:
    if mesh is None:
        return model
    options = {"codegen": "eager", "mesh": mesh, "verify": verify}
    return torch.compile(model, backend="fxpar", options=options)


def trained(model: Any, run: Any, steps: int = 3) -> list[Any]:
    """Results before, losses of steps, and the parameters behind them."""
    ids = torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    with torch.no_grad():
        out: list[Any] = [run(ids)]
    for _ in range(steps):
        loss = F.cross_entropy(run(ids), (ids * 3) % 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out + [whole(p) for p in model.parameters()]


def tied(mesh: str | None) -> list[Any]:
    model = made(mesh)
    model.head.weight = model.words.weight
    return trained(model, compiled(model, mesh)) + trained(model, model, 1)


def assigned(mesh: str | None) -> list[Any]:
    """After a compiled call; the other model lies otherwise."""
    model, other = made(mesh), made(mesh, {"words.weight": (None, "dp")})
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    run = compiled(model, mesh)
    run(torch.arange(8))
    model.load_state_dict(other.state_dict(), assign=True)
    return trained(model, run)


@pytest.mark.parametrize(
    "change", [pytest.param(tied, marks=pytest.mark.slow), assigned]
)
def test_a_parameter_that_lies_otherwise(change: Callable[..., list[Any]]) -> None:
    """It is read as it lies, not as that which it takes the place of did."""
    want = change(None)
    for got in shared_pool(2).run(change, "dp=2"):
        torch.testing.assert_close(got, want)


def of_another_mesh() -> None:
    model = made("dp=2")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model.head.weight = nn.Parameter(
        distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)])
    )


def test_a_parameter_of_another_mesh() -> None:
    for error in shared_pool(2).errors(of_another_mesh):
        assert isinstance(error, ShardError), repr(error)
        assert "'weight' of a Linear is replaced" in str(error) and __file__ in str(
            error
        )


def converted() -> bool:
    """Ranks train at different rates what was converted after it was split."""
    model = made(None)
    model.scale.is_special = True
    model = fxpar.shard(model, mesh="dp=2").float()
    assert model.scale.is_special and model.scale.dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * (1 + dist.get_rank()))
    run, ids = compiled(model, "dp=2", verify=True), torch.arange(8)
    for _ in range(3):
        F.cross_entropy(run(ids), ids).backward()
        optimizer.step()
    return True


def test_converted_parameters_are_still_parts() -> None:
    for error in shared_pool(2).errors(converted):
        assert isinstance(error, InputMismatchError), repr(error)
        assert "SGD(0.1) on rank 0, SGD(0.2) on rank 1" in str(error)


def of_another_model() -> None:
    """One rank alone takes a step of a model that no graph reads any more."""
    gone = fxpar.shard(made(None), mesh="dp=2")
    optimizer = torch.optim.SGD(gone.parameters(), 0.1 * (1 + dist.get_rank()))
    if dist.get_rank() == 0:
        optimizer.step()
    model = fxpar.shard(made(None), mesh="dp=2")
    run, ids = compiled(model, "dp=2", verify=True), torch.arange(8)
    for _ in range(2):
        F.cross_entropy(run(ids), ids).backward()


@pytest.mark.slow
def test_steps_of_another_model_are_not_compared() -> None:
    shared_pool(2).run(of_another_model)


def in_another_order() -> None:
    """Rank 1 calls the second of two models of one form where rank 0 calls the
    first."""
    torch._dynamo.reset()
    models = [fxpar.shard(Words().double(), mesh="dp=2") for _ in range(2)]
    runs, ids = [compiled(model, "dp=2") for model in models], torch.arange(8)
    for run in runs:  # after these nothing moves
        run(ids)
    runs[dist.get_rank()](ids)


def test_models_that_ranks_call_in_another_order_are_not_mixed() -> None:
    for error in shared_pool(2).errors(in_another_order):
        assert isinstance(error, InputMismatchError), repr(error)
        assert "rank 1 calls another model of fxpar.shard than rank 0" in str(error)


def extremes(mesh: str | None) -> list[float]:
    """Of gradients of which the last row, another rank's than the first, is NaN."""
    model, out = made(mesh), []
    grad = torch.ones(8, 6, dtype=torch.float64)
    grad[7, 3] = torch.nan
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    weight = model.words.weight
    if mesh:
        grad = distribute_tensor(grad, weight.device_mesh, weight.placements)
    weight.grad = grad
    for order in (torch.inf, -torch.inf):
        for foreach in (True, False):
            gradients = [p.grad for p in model.parameters()]
            norm = nn.utils.get_total_norm(gradients, order, foreach=foreach)
            out.append(whole(norm).item())
    grad = weight.grad
    extreme = [
        grad.max(),
        grad.min(),
        grad.amax(0)[3],
        grad.amax(0)[2],
        grad.abs().amax(),
    ]
    return out + [whole(x).item() for x in extreme]


@pytest.mark.slow
def test_extremes_keep_nan() -> None:
    want = extremes(None)
    for got in shared_pool(2).run(extremes, "dp=2"):
        assert str(got) == str(want) and "1.0" in str(got)


def scaled_losses(mesh: str | None) -> list[Any]:
    """Each expression several times: DTensor remembers how an op ran."""
    model, out = made(mesh), []
    run, ids, weight = compiled(model, mesh), torch.arange(8), model.head.weight
    for _ in range(2):
        for combine in (
            lambda loss: loss + weight.norm(),
            lambda loss: loss * (1 + 0.1 * weight.square().sum()),
            lambda loss: weight.abs().mean() / loss - loss / weight.norm(),
        ):
            loss = combine(F.cross_entropy(run(ids), (ids * 3) % 8))
            model.zero_grad()
            loss.backward()
            out += [float(whole(loss)), *(whole(p.grad) for p in model.parameters())]
    return out


@pytest.mark.slow
def test_losses_that_weights_scale() -> None:
    want = scaled_losses(None)
    for got in shared_pool(2).run(scaled_losses, "dp=2"):
        torch.testing.assert_close(got, want)


def rprop(mesh: str | None) -> list[Any]:
    model = made(mesh)
    run, ids = compiled(model, mesh), torch.arange(8)
    optimizer = torch.optim.Rprop(model.parameters(), 0.01, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(run(ids), (ids * 3) % 8).backward()
        optimizer.step()
    return [whole(p) for p in model.parameters()]


@pytest.mark.slow
def test_rprop_of_a_parameter_without_dims() -> None:
    want = rprop(None)
    for got in shared_pool(2).run(rprop, "dp=2"):
        torch.testing.assert_close(got, want)


def saved(path: str, by: str) -> None:
    """By rank 0 alone, or by each rank its own file."""
    rank = dist.get_rank()
    if by == "each" or rank == 0:
        torch.save(made("dp=2").state_dict(), f"{path}/{rank}.pt")


def loaded(path: str, by: str) -> None:
    model, other = made("dp=2"), made("dp=2")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    name = f"{path}/{dist.get_rank() if by == 'each' else 0}.pt"
    model.load_state_dict(torch.load(name, weights_only=False))
    for p, want in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), want.to_local())


@pytest.mark.slow
def test_a_part_that_another_rank_saved(tmp_path: Any) -> None:
    """Rank 0 alone saves its parts, which rank 1 would take for its own."""
    pool = shared_pool(2)
    pool.run(saved, str(tmp_path), "each")
    pool.run(loaded, str(tmp_path), "each")
    of_first, of_second = pool.errors(loaded, str(tmp_path), "first")
    assert of_first is None and isinstance(of_second, ShardError), repr(of_second)
    assert "rank 1 loads the part of words.weight that rank 0 saved" in str(of_second)
    assert __file__ in str(of_second) and "get_model_state_dict" in str(of_second)
