"""Branches, loops and attention by functions of scores under ``torch.compile`` on two
ranks: the results and gradients of one device, op by op and by Inductor."""

from __future__ import annotations

import warnings

import pytest
import torch

from fxpar.errors import FxparWarning
from tests.helpers import bodies
from tests.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

PROGRAMS = {**bodies.CONTROL, "attention": bodies.attention}


def differ(name: str, grad: bool, **options: str) -> tuple[float, list[str]]:
    """By how much a program's results and gradients differ from one device's, relative
    to the largest of each; and what fxpar says."""
    torch.compiler.reset()
    torch.manual_seed(0)
    fn = PROGRAMS[name]
    dtype = torch.float64 if name != "attention" else torch.float32
    x = (torch.randn(4, 4, 8, dtype=dtype) + 0.2).requires_grad_(grad)
    w = (torch.randn(8, 8, dtype=dtype) * 0.4).requires_grad_(grad)

    def run(compiled) -> list[torch.Tensor]:
        out = compiled(x, w)
        return [out, *(torch.autograd.grad(out.square().sum(), [x, w]) if grad else ())]

    want = run(torch.compile(fn, backend="aot_eager"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = run(
            torch.compile(fn, backend="fxpar", options={"mesh": "dp=2"} | options)
        )
    texts = [str(w.message) for w in said if issubclass(w.category, FxparWarning)]
    worst = max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(got, want, strict=True)
    )
    return worst, texts


def _differ(name: str, grad: bool, codegen: str, plan: str) -> tuple[float, list[str]]:
    return differ(name, grad, codegen=codegen, plan=plan)


def compared(name: str, grad: bool, codegen: str, plan: str = "propagate") -> list[str]:
    env = {"FXPAR_HARDWARE": "h100"}
    pool = shared_pool(2)
    ranks = pool.run(_differ, name, grad, codegen, plan, env=env, timeout=400.0)
    assert all(worst < 1e-5 for worst, _ in ranks)
    return ranks[0][1]


@pytest.mark.parametrize("name", ["branches", "steps"])
def test_backward_on_two_ranks(name: str) -> None:
    assert compared(name, True, "eager") == []


def test_what_runs_whole_is_said_with_its_line() -> None:
    (text,) = compared("until_small", False, "eager")
    assert "while_loop" in text and "bodies.py" in text


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["search", "propagate", "replicate"])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_program(name: str, codegen: str, plan: str) -> None:
    # torch has no backward of flex_attention on CPU.
    compared(name, name not in {*bodies.OPEN, "attention"}, codegen, plan)
