"""Ranks that feed the same at first, and drift apart: an error on all ranks within two
steps, at every call and for every input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.errors import InputMismatchError, RankMismatchError
from fxpar.runtime.ranks import check_inputs
from tests.helpers.spawn import shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]


class Apart(Exception):
    """Where ranks were told."""


def drifting(which: str, mesh: str, how: str, sizes: tuple[int, int]) -> None:
    """Rank 1 feeds something else at step 3, in one input of two."""
    torch._dynamo.reset()
    weight = torch.ones(sizes[1], 3, requires_grad=True)

    def fn(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((x @ weight) * scale).sum()

    options = {"codegen": "eager", "mesh": mesh, "inputs": how}
    run = torch.compile(fn, backend="fxpar", options=options)
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(*sizes, generator=generator)
        scale = torch.ones(3)
        if step == 3 and dist.get_rank() == 1:
            if which == "x":
                x = x.flip(0)
            else:
                scale[2] += 1e-6
        try:
            run(x, scale)
        except InputMismatchError as error:
            raise Apart(f"step {step}: {error}") from error


@pytest.mark.parametrize(
    ("which", "mesh", "how", "sizes"),
    [
        ("x", "dp=2", "global", (4, 5)),
        ("scale", "dp=2", "global", (4, 5)),
        ("x", "tp=2", "local", (4, 5)),
        ("x", "dp=2", "global", (64, 2048)),
    ],
)
def test_every_rank_is_told_within_two_steps(
    which: str, mesh: str, how: str, sizes: tuple[int, int]
) -> None:
    errors = shared_pool(2).errors(drifting, which, mesh, how, sizes, timeout=60.0)
    for error in errors:
        assert isinstance(error, Apart), error
        assert f"input {which} differs between ranks: rank 1" in str(error)
        assert str(error).startswith(("step 3", "step 4"))
    assert str(errors[0]) == str(errors[1])


# Programs that hold a number of Python, which Dynamo makes a constant of.
OF_A_NUMBER: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "scaled": lambda x, n: x * n,
    "power": lambda x, n: x**n,
    "a part": lambda x, n: x[:, n : n + 2],
    "a column": lambda x, n: x[:, n],
    "listed columns": lambda x, n: x[:, [0, n]],
    "constant tensor": lambda x, n: x * torch.tensor(n),
    "filled": lambda x, n: x + torch.full((6,), n),
}


class Numbered(torch.nn.Module):
    """An int that is an attribute: Dynamo traces again for each value."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.n = torch.nn.Parameter(torch.ones(6)), 2
        self.fn = OF_A_NUMBER[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x * self.weight, self.n).sum()


def own_number(name: str, how: str, numbers: tuple[tuple[int, int], ...]) -> None:
    """At each step rank r has ``numbers[step][r]``."""
    torch._dynamo.reset()
    model = Numbered(name)
    options = {"codegen": "eager", "mesh": "dp=2", "inputs": how}
    run = torch.compile(model, backend="fxpar", options=options)
    for step, each in enumerate(numbers):
        model.n = each[dist.get_rank()]
        try:
            run(torch.ones(4, 6))
        except RankMismatchError as error:
            raise Apart(f"step {step}: {error}") from error


LATER = ((2, 2), (3, 3), (2, 3))


@pytest.mark.parametrize(
    ("name", "how", "numbers"),
    [
        *((name, "global", ((2, 3),)) for name in OF_A_NUMBER),
        ("scaled", "global", LATER),
    ],
)
def test_a_number_of_python_that_differs_between_ranks(
    name: str, how: str, numbers: tuple[tuple[int, int], ...]
) -> None:
    """Sizes are alike, so that only the number tells the programs apart."""
    args = (own_number, name, how, numbers)
    for error in shared_pool(2).errors(*args, timeout=60.0):
        assert isinstance(error, Apart), error
        assert str(error).startswith(f"step {len(numbers) - 1}: ")
        assert "disagree about numbers of Python" in str(error)
        assert f"{name}" in str(error) and "test_drift.py" in str(error)


def test_numbers_that_are_alike_may_change() -> None:
    alike = ((2, 2), (3, 3), (2, 2))
    assert shared_pool(2).run(own_number, "scaled", "local", alike) == [None, None]


def first_call() -> list[str]:
    """Stages that a rank came to when inputs differ at the first call."""
    torch._dynamo.reset()
    before = _torch.aot.compile_fx
    came: list[str] = []

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        came.append("compiles")
        return before(*args, **kwargs)

    _torch.aot.compile_fx = compile_fx
    run = torch.compile(
        lambda x: x * 2, backend="fxpar", options={"codegen": "eager", "mesh": "dp=2"}
    )
    try:
        run(torch.full((4,), float(dist.get_rank())))
    except InputMismatchError:
        came.append("told")
    finally:
        _torch.aot.compile_fx = before
    return came


def test_the_first_call_compares_before_it_compiles() -> None:
    assert shared_pool(2).run(first_call) == [["told"], ["told"]]


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("size", [0, 1, 7, 5000, 100_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_see_every_element(size: int, dtype: torch.dtype) -> None:
    x = torch.arange(size).remainder(5).to(dtype)
    own = check_inputs.quick_sum(x)
    assert own == check_inputs.quick_sum(x.clone())
    assert own == check_inputs.quick_sum(torch.stack([x, x], dim=1)[:, 1])
    for at in {0, size // 2, size - 1} if size else ():
        other = x.clone()
        other[at] = not other[at] if dtype is torch.bool else other[at] + 1
        assert check_inputs.quick_sum(other) != own
    if size > 1:
        assert check_inputs.quick_sum(x.roll(1)) != own
        assert check_inputs.quick_sum(x[1:]) != own


def categories(x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(x.exp(), 2) + x.sum()


def counts(x: torch.Tensor) -> torch.Tensor:
    return torch.poisson(x.exp()) + x


def drawn(which: str, seed: int) -> list[torch.Tensor]:
    """What a rank draws whose generator stands elsewhere than others'."""
    torch._dynamo.reset()
    torch.manual_seed(seed + dist.get_rank())
    fn = {"categories": categories, "counts": counts}[which]
    x = torch.linspace(0, 1, 32).view(4, 8)
    run = torch.compile(fn, backend="fxpar", options={"codegen": "eager"})
    out = [run(x), run(x)]
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        out += [fn(x), fn(x)]
    return out


@pytest.mark.parametrize("which", ["categories", "counts"])
def test_numbers_drawn_in_order_are_those_of_rank_0(which: str) -> None:
    first, second = shared_pool(2).run(drawn, which, 5)
    assert not torch.equal(first[0], first[1])
    for mine, want, other in zip(first[:2], first[2:], second, strict=True):
        torch.testing.assert_close(mine, want)
        assert torch.equal(mine, other)
