"""Parameters and buffers that one rank alone changes between calls: an error on all
ranks at the next call; writes that torch does not count with ``FXPAR_VERIFY`` alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import InputMismatchError
from fxpar.runtime.ranks import check_inputs, drift
from fxpar.sharding.mesh import Mesh
from tests.helpers.spawn import ranks_of, shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]


class Apart(Exception):
    """Where ranks were told."""


# Each parameter lies whole along one axis at least.
HINTS = {"3.weight": (None, "tp"), "3.bias": (None,)}


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


def local_parts(model: nn.Module) -> list[torch.Tensor]:
    return [
        p.to_local().detach() if isinstance(p, DTensor) else p.data
        for p in model.parameters()
    ]


def loaded(model: nn.Module) -> None:
    state = {name: x * 1.0001 for name, x in model.state_dict().items()}
    model.load_state_dict(state)


def written_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("3.bias").mul_(1.5)


def written_through_data(model: nn.Module) -> None:
    for p in local_parts(model):
        p.mul_(1.5)


def one_written_through_data(model: nn.Module) -> None:
    local_parts(model)[0].mul_(1.5)


def swapped(model: nn.Module) -> None:
    p = model.get_parameter("0.weight")
    p.data = p.data * 1.5


def initialized(model: nn.Module) -> None:
    nn.init.zeros_(model.get_parameter("3.weight"))


def buffer(model: nn.Module) -> None:
    model.get_buffer("1.running_mean").add_(1.0)


def counter(model: nn.Module) -> None:
    model.get_buffer("1.num_batches_tracked").add_(1)


def trained_alone(model: nn.Module) -> None:
    """Statistics of a norm that is in training move."""
    with fxpar.alone(), torch.no_grad():
        torch.compile(model, backend="fxpar")(torch.ones(4, 8).double())


def updated_apart(model: nn.Module) -> None:
    """Gradients get noise of a rank's own."""
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))


def rounded(model: nn.Module) -> None:
    """As replicas may drift apart."""
    for p in local_parts(model):
        p.mul_(1 + 1e-9)


def put_back(model: nn.Module) -> None:
    kept = copy.deepcopy(model.state_dict())
    written_in_place(model)
    model.load_state_dict(kept)


def train(
    write: Callable[[nn.Module], None],
    ranks: tuple[int, ...],
    mesh: str,
    mode: str,
    inputs: str,
    then_sent: bool,
    verify: bool = False,
) -> float:
    """Steps on every rank; before the fourth some ranks write."""
    torch._dynamo.reset()
    model = made()
    if mode == "shard":
        model = fxpar.shard(model, mesh=mesh, hints=HINTS)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    options = {"codegen": "eager", "mesh": mesh, "inputs": inputs, "verify": verify}
    if mode == "step":
        step = fxpar.train_step(
            model, lambda m, x: m(x).square().mean(), optimizer, options=options
        )
    else:
        run = torch.compile(model, backend="fxpar", options=options)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    loss = torch.zeros(())
    generator = torch.Generator().manual_seed(1)
    for n in range(12):
        x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        if n == 3:
            if dist.get_rank() in ranks:
                write(model)
            if then_sent:
                for part in (*local_parts(model), *model.buffers()):
                    dist.broadcast(part, src=0)
        try:
            loss = step(x)
        except InputMismatchError as error:
            raise Apart(f"step {n}: {error}") from error
    return loss.item()


AT_ONCE = {
    loaded: "0.weight",
    written_in_place: "3.bias",
    initialized: "3.weight",
    buffer: "1.running_mean",
    counter: "1.num_batches_tracked",
    trained_alone: "1.num_batches_tracked",
}


@pytest.mark.parametrize(
    "write",
    [
        *(loaded, buffer, trained_alone),
        *(
            pytest.param(write, marks=pytest.mark.slow)
            for write in (written_in_place, initialized, counter)
        ),
    ],
    ids=lambda fn: fn.__name__,
)
def test_all_ranks_are_told_at_the_next_call(write) -> None:
    args = (train, write, (0,), "dp=2", "compile", "global", False)
    errors = shared_pool(2).errors(*args, timeout=60.0)
    assert [type(error) for error in errors] == [Apart, Apart], errors
    assert str(errors[0]) == str(errors[1])
    assert str(errors[0]).startswith("step 3: ")
    assert AT_ONCE[write] in str(errors[0])
    assert "rank 1 does not hold what rank 0 holds; one of them" in str(errors[0])


@pytest.mark.parametrize(
    ("write", "mesh", "mode", "inputs"),
    [
        (written_in_place, "tp=2", "compile", "global"),
        pytest.param(
            written_in_place, "pp=2", "compile", "global", marks=pytest.mark.slow
        ),
        (written_in_place, "dp=2", "step", "global"),
        pytest.param(
            written_through_data, "dp=2", "compile", "global", marks=pytest.mark.slow
        ),
        pytest.param(
            written_through_data, "dp=2,tp=2", "shard", "global", marks=pytest.mark.slow
        ),
        pytest.param(initialized, "tp=2", "shard", "global", marks=pytest.mark.slow),
        (initialized, "tp=2", "shard", "local"),
    ],
)
def test_on_any_mesh(write, mesh: str, mode: str, inputs: str) -> None:
    args = (train, write, (1,), mesh, mode, inputs, False)
    verify = write is written_through_data
    for error in ranks_of(mesh).errors(*args, verify, timeout=90.0):
        assert isinstance(error, Apart), error
        assert str(error).startswith("step 3: ")


@pytest.mark.parametrize(
    "write",
    [one_written_through_data, pytest.param(swapped, marks=pytest.mark.slow)],
)
def test_what_torch_does_not_count_is_found_where_all_is_compared(write) -> None:
    args = (train, write, (1,), "dp=2", "compile", "global", False, True)
    for error in shared_pool(2).errors(*args, timeout=60.0):
        assert isinstance(error, Apart), error
        assert "step 3: parameter 0.weight is no longer equal" in str(error)


def test_updates_of_a_rank_s_own_are_found_where_all_is_compared() -> None:
    args = (train, updated_apart, (1,), "dp=2", "compile", "global", False, True)
    for error in shared_pool(2).errors(*args, timeout=60.0):
        assert isinstance(error, Apart), error
        assert "are no longer equal on all ranks" in str(error)
        assert "draw noise from one seed" in str(error)


@pytest.mark.parametrize(
    "write",
    [buffer, pytest.param(counter, marks=pytest.mark.slow)],
    ids=lambda fn: fn.__name__,
)
def test_buffers_of_rank_0_are_taken_where_ranks_feed_parts(write) -> None:
    args = (train, write, (1,), "dp=2", "compile", "local", False)
    same = (train, write, (), "dp=2", "compile", "local", False)
    assert shared_pool(2).run(*args) == shared_pool(2).run(*same)


@pytest.mark.parametrize(
    ("write", "ranks", "then_sent"),
    [
        (loaded, (0, 1), False),
        pytest.param(swapped, (0, 1), False, marks=pytest.mark.slow),
        pytest.param(written_through_data, (0, 1), False, marks=pytest.mark.slow),
        pytest.param(loaded, (0,), True, marks=pytest.mark.slow),
        pytest.param(put_back, (0,), False, marks=pytest.mark.slow),
        (rounded, (1,), False),
    ],
)
def test_what_leaves_ranks_alike_is_no_error(write, ranks, then_sent) -> None:
    verify = write in (swapped, written_through_data, rounded)
    args = (train, write, ranks, "dp=2", "compile", "global", then_sent, verify)
    results = shared_pool(2).run(*args, timeout=60.0)
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def looked() -> int:
    """How often ranks compare in full where each writes some parameters and sends
    them."""
    torch._dynamo.reset()
    model, seen = made(), []
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=1e-2, overlap_with_ddp=False
    )
    options = {"codegen": "eager", "mesh": "dp=2"}
    run = torch.compile(model, backend="fxpar", options=options)
    look = drift.Drift.look

    def counted(*args) -> None:
        seen.append(1)
        look(*args)

    drift.Drift.look = counted
    try:
        for _ in range(40):
            run(torch.ones(4, 8).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():  # as an optimizer that shares its work
                if dist.get_rank():
                    p.data.copy_(p), p.detach().mul_(1.0)
    finally:
        drift.Drift.look = look
    return len(seen)


@pytest.mark.slow
def test_where_ranks_always_write_unlike_the_looks_become_rare() -> None:
    first, second = shared_pool(2).run(looked, timeout=60.0)
    assert first == second and 1 <= first <= 6


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("graphs", [1, 2, 3, 4, 7, 8])
def test_samples_come_to_every_part_in_graphs_called_in_turn(
    graphs: int, on_cpu: bool
) -> None:
    assert drift._FIRST == 32
    for graph in range(graphs):
        calls = range(graph, 3000, graphs)
        turns = [drift.sample_turn(number, on_cpu=on_cpu) for number in calls]
        summed = [turn for turn in turns if turn is not None]
        assert {turn % 12 for turn in summed} == set(range(12))
        assert len(turns) // 8 < len(summed) <= len(turns) // 5 + 32
    first = [drift.sample_turn(number, on_cpu=on_cpu) for number in range(32)]
    assert (None in first) != on_cpu


DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 900, 5000, 100_003])
def test_samples_come_to_every_element(size: int, dtype: torch.dtype) -> None:
    x = torch.arange(size).remainder(5).to(dtype)

    def read(x: torch.Tensor) -> list[list[float]]:
        turns = range(size // 512 + 2)
        return [
            check_inputs.sketch(check_inputs.sample(x, turn)).tolist() for turn in turns
        ]

    before = read(x)
    for at in {0, size // 2, size - 1} if size else ():
        other = x.clone()
        other[at] = ~other[at] if dtype is torch.bool else other[at] + 1
        assert read(other) != before
    assert read(x.clone() * 1) == before


def models_at_rest() -> tuple[object, ...]:
    torch._dynamo.reset()
    mesh = Mesh.parse("dp=2,tp=2")
    model = fxpar.shard(made(), mesh="dp=2,tp=2", hints=HINTS)
    split = fxpar.shard(made(), mesh="dp=2,tp=2")
    names = "0.weight", "3.weight", "3.bias"
    parameters = [model.get_parameter(name) for name in names]
    parameters += [split.get_parameter("0.weight"), torch.ones(3)]
    return tuple(drift._models(p, mesh) for p in parameters)


def test_ranks_that_hold_one_shard_are_compared() -> None:
    assert shared_pool(4).run(models_at_rest)[2] == (
        (0, 0, 2, 2),
        (0, 1, 0, 1),
        (0, 0, 0, 0),
        (0, 1, 2, 3),
        (0, 0, 0, 0),
    )


class Queue(nn.Module):
    """Reads where it stands in a queue of many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.tensor([5000]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("place")


def one_place_further() -> None:
    torch._dynamo.reset()
    model = Queue()
    options = {"mesh": "dp=2", "verify": True}
    run = torch.compile(model, backend="fxpar", options=options)
    for _ in range(3):
        run(torch.ones(4, 2))
    if dist.get_rank():
        model.get_buffer("place").data.add_(1)
    for _ in range(3):
        run(torch.ones(4, 2))


@pytest.mark.slow
def test_whole_numbers_have_no_rounding() -> None:
    for error in shared_pool(2).errors(one_place_further):
        assert isinstance(error, InputMismatchError), error
        assert "place" in str(error)
