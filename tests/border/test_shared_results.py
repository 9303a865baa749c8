"""Results of one graph that share memory: a write to one is seen in the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpar
from tests.helpers.spawn import shared_pool

Results = tuple[torch.Tensor, ...]


def with_rows(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = torch.relu(x @ w)
    return z, z[0], z.t(), z.view(-1)[3:9:2], z * 1, z.detach()[1:]


def the_largest_in_between(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = (x @ w).t()
    return z[1], z, z[2:4, ::2], z.sum(0), z[3:, 1:]


def thirds(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = (x @ w).relu()
    return *z.chunk(3, -1), z


def with_a_gradient(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = x @ w
    return z.relu().sum(), z, z.detach(), z.detach()[0]


def apart(x: torch.Tensor, w: torch.Tensor) -> Results:
    """The negative twin: nothing here shares memory."""
    z = torch.relu(x @ w)
    return z, z.clone(), z + 0


# With the collectives: one for each memory, and one for a gradient.
PROGRAMS = {
    with_rows: 2,
    the_largest_in_between: 2,
    thirds: 1,
    with_a_gradient: 3,
    apart: 3,
}


def write_to_each(fn: Callable[..., Results], x: Any, w: Any) -> list[torch.Tensor]:
    """Results before and after each of them is written to."""
    results = fn(x, w)
    if results[0].requires_grad:
        results[0].backward()
    before = [result.detach().clone() for result in results]
    for i, result in enumerate(results):
        result.detach().add_(i + 1)
    layout = [torch.tensor(result.stride()) for result in results]
    return [*before, *(result.detach().clone() for result in results), *layout]


def compare(dynamic: bool, codegen: str) -> list[int]:
    """With one device, twice; how many collectives each program has."""
    counts = []
    for fn in PROGRAMS:
        torch._dynamo.reset()
        how = {"mesh": "dp=2", "codegen": codegen, "hints": {"x": ("dp", None)}}
        compiled: Any = torch.compile(fn, backend="fxpar", dynamic=dynamic, options=how)
        for rows in (8, 6):
            torch.manual_seed(rows)
            x, w = torch.randn(rows, 8), torch.randn(8, 6)
            w.requires_grad_(fn is with_a_gradient)
            got, want = write_to_each(compiled, x, w), write_to_each(fn, x, w)
            torch.testing.assert_close(got, want)
        counts.append(len(fxpar.plans()[-1].collectives))
    return counts


@pytest.mark.multiprocess
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_device(dynamic: bool) -> None:
    """What covers the others is gathered, and they are views of it."""
    for counts in shared_pool(2).run(compare, dynamic, "eager"):
        assert counts == list(PROGRAMS.values())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_inductor() -> None:
    shared_pool(2).run(compare, False, "inductor", timeout=400.0)
