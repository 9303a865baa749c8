"""Inputs that lie in memory otherwise than those a program was compiled for: columns of
a larger tensor after whole ones, and parts of a batch that are such columns at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fxpar.runtime.calls.call_variants import for_any_strides
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.usefixtures("propagated")


def layouts(rows: int) -> list[torch.Tensor]:
    """Tensors of one shape."""
    torch.manual_seed(1)
    wide = torch.randn(rows, 16, dtype=torch.float64)
    return [wide[:, ::2], wide[:, :8].contiguous(), wide[:, 8:]]


def differs(inputs: str) -> list[float]:
    """By how much results and gradients of each call differ from one device's, at the
    most."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(8, 8).double()
    options = {"mesh": "dp=2", "inputs": inputs}
    run = torch.compile(model, backend="fxpar", options=options)
    rank, out = dist.get_rank(), []
    for x in layouts(8):
        part = x.chunk(2)[rank] if inputs == "local" else x
        leaf = part.detach().requires_grad_()
        result = run(leaf)
        want = model(x)
        (gradient,) = torch.autograd.grad(result.square().sum(), leaf)
        expected = 2 * want @ model.weight
        if inputs == "local":
            want, expected = want.chunk(2)[rank], expected.chunk(2)[rank]
        apart = (result - want).abs().max(), (gradient - expected).abs().max()
        out.append(max(map(float, apart)))
    return out


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "inputs", [pytest.param("global", marks=pytest.mark.slow), "local"]
)
def test_a_program_takes_inputs_that_lie_in_any_way(inputs: str) -> None:
    for apart in shared_pool(2).run(differs, inputs):
        assert max(apart) < 1e-12


def of_models() -> list[float]:
    """By how much results of models differ whose weights lie each in another way."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    wide, x = torch.randn(16, 16).double(), torch.randn(8, 8).double()
    kept, out = [], []
    for weight in (wide[:8, :8].contiguous(), wide[:8, ::2], wide[::2, :8]):
        model = nn.Linear(8, 8).double()
        model.weight = nn.Parameter(weight)
        run = torch.compile(model, backend="fxpar", options={"mesh": "dp=2"})
        kept.append(run)  # what is compiled for it stays, too
        out.append(float((run(x) - model(x)).abs().max()))
    return out


@pytest.mark.multiprocess
def test_models_whose_weights_lie_otherwise_are_other_programs() -> None:
    for apart in shared_pool(2).run(of_models):
        assert max(apart) < 1e-12


def written() -> list[tuple[bool, bool]]:
    """Whether what a program wrote is there, and nothing else was written."""
    torch._dynamo.reset()

    def add(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    run = torch.compile(add, backend="fxpar", options={"mesh": "dp=2"})
    out = []
    for columns in (slice(8), slice(0, 8), slice(1, 16, 2)):
        wide = torch.zeros(4, 8 if columns == slice(8) else 16)
        with torch.no_grad():
            result = run(wide[:, columns])
        right = bool((wide[:, columns] == 1).all() and (result == 2).all())
        out.append((right, wide.sum().item() == 32))
    return out


@pytest.mark.multiprocess
def test_what_is_written_to_a_copy_is_written_back() -> None:
    assert shared_pool(2).run(written) == [[(True, True)] * 3] * 2


@pytest.mark.parametrize("place", ["dense", "wide", "repeated", "one row", "empty"])
def test_inputs_are_copied_where_they_must_be(place: str) -> None:
    wide = torch.arange(32.0).view(4, 8)
    x, strides = {
        "dense": (wide[:, :4].contiguous(), (4, 1)),
        "wide": (wide[:, :4], (4, 1)),
        "repeated": (wide[0, :8:2].expand(4, 4), (0, 1)),
        "one row": (wide[:1, :4], (4, 1)),
        "empty": (wide[:0, :4], (4, 1)),
    }[place]
    seen: list[Any] = []
    for_any_strides(seen.append, {0: strides}, ())(x)
    assert torch.equal(seen[0], x)
    assert (seen[0] is x) == (place not in ("wide", "repeated"))
    if seen[0] is not x:
        assert seen[0].stride() == strides
