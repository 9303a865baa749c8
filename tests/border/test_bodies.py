"""Branches, loops and attention by functions of scores under ``torch.compile`` on two
ranks: the results and gradients of one device, op by op and by Inductor."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import flex_attention

import fxpar
from fxpar.errors import FxparWarning
from tests.helpers import bodies
from tests.helpers.spawn import shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]


def decoded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The last row of a sequence over keys that ranks have parts of."""
    q, k = (x @ w)[:, None, -1:].sin(), x[:, None].sin()
    k = fxpar.constrain(k, None, None, "dp", None)
    tilt = w.sum(0)
    return flex_attention(q, k, k, lambda s, b, h, i, j: s - tilt[j])


PROGRAMS = {
    **bodies.CONTROL,
    "attention": bodies.attention,
    "decoded": decoded,
}
SINGLE = {"attention", "decoded"}  # torch has no backward of these on CPU


def scored(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Attention of one head with scores by distance, of any batch."""
    q = (x @ w)[:, None]
    return flex_attention(q, q, q, lambda s, b, h, i, j: s - (i - j).abs() * 0.1)


def differ(name: str, grad: bool, **options: str) -> tuple[float, list[str]]:
    """By how much a program's results and gradients differ from one device's, relative
    to the largest of each; and what fxpar says."""
    torch.compiler.reset()
    torch.manual_seed(0)
    fn = PROGRAMS[name]
    dtype = torch.float32 if name in SINGLE else torch.float64
    x = (torch.randn(4, 4, 8, dtype=dtype) + 0.2).requires_grad_(grad)
    w = (torch.randn(8, 8, dtype=dtype) * 0.4).requires_grad_(grad)

    def run(compiled) -> list[torch.Tensor]:
        out = compiled(x, w)
        return [out, *(torch.autograd.grad(out.square().sum(), [x, w]) if grad else ())]

    # Without it Dynamo gives up on loops with gradients, here and below.
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
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


@pytest.mark.parametrize(
    "name", ["branches", pytest.param("steps", marks=pytest.mark.slow)]
)
def test_backward_on_two_ranks(name: str) -> None:
    assert compared(name, True, "eager") == []


def test_what_runs_whole_is_said_with_its_line() -> None:
    (text,) = compared("until_small", True, "eager")
    assert "while_loop" in text and "bodies.py" in text


EVERY = [(name, c) for name in sorted(PROGRAMS) for c in ("eager", "inductor")]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["search", "propagate", "replicate"])
@pytest.mark.parametrize(("name", "codegen"), EVERY)
def test_every_program(name: str, codegen: str, plan: str) -> None:
    compared(name, name not in SINGLE, codegen, plan)


@pytest.mark.slow
def test_weights_of_keys_on_two_ranks() -> None:
    """Inductor (2.13) has no kernel on CPU that gives them."""
    shapes = (4, 4, 8), (8, 8)
    args = [torch.zeros(shape) for shape in shapes]
    plan = fxpar.plan(decoded, *args, mesh="dp=2", mode="propagate")
    (node,) = (n for n in plan.nodes if n.name.startswith("flex_attention"))
    assert node.operands[1].dims[2] == ("dp",)
    assert compared("decoded", False, "inductor") == []


def noisy(name: str, codegen: str, plan: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a program that draws random numbers gives, on ranks whose generators have
    drifted apart, and its gradient times its input, which is the same."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x = (torch.randn(4, 4, 8) + 0.2).requires_grad_()
    options = {"mesh": f"dp={dist.get_world_size()}", "codegen": codegen, "plan": plan}
    run = torch.compile(bodies.NOISY[name], backend="fxpar", options=options)
    torch.manual_seed(1 + dist.get_rank())
    out = run(x, torch.ones(8, 8))
    (grad,) = torch.autograd.grad(out.sum(), x)
    return out.detach(), grad * x.detach()


@pytest.mark.parametrize(
    ("name", "codegen", "plan"),
    [
        ("noisy_branches", "eager", "propagate"),
        *(
            pytest.param(name, codegen, plan, marks=pytest.mark.slow)
            for name in bodies.NOISY
            for codegen in ("eager", "inductor")
            for plan in ("propagate", "search", "replicate")
            if (name, codegen, plan) != ("noisy_branches", "eager", "propagate")
        ),
    ],
)
def test_a_backward_has_the_numbers_of_its_forward_on_all_ranks(
    name: str, codegen: str, plan: str
) -> None:
    """And they are those of one rank alone."""
    ((want, _),) = shared_pool(1).run(noisy, name, "eager", plan, timeout=400.0)
    for out, same in shared_pool(2).run(noisy, name, codegen, plan, timeout=400.0):
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(same, out, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_one_rank_under_inductor_draws_as_many_do() -> None:
    ((want, _),) = shared_pool(1).run(noisy, "noisy_branches", "eager", "propagate")
    ((out, same),) = shared_pool(1).run(
        noisy, "noisy_branches", "inductor", "propagate"
    )
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(same, out, rtol=1e-5, atol=1e-6)


def part_of_a_batch() -> None:
    """A branch fed a slice of this rank's part, itself part of a larger tensor."""
    torch.compiler.reset()
    x = torch.ones(8, 6, 5).chunk(2)[dist.get_rank()]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x[:, 1:],))

    options = {"mesh": "dp=2", "codegen": "eager", "inputs": "local"}
    torch.compile(fn, backend="fxpar", options=options)(x)


@pytest.mark.slow
def test_bodies_fed_parts_of_larger_tensors_are_said_so() -> None:
    for error in shared_pool(2).errors(part_of_a_batch):
        text = str(error)
        assert "x begins inside a larger tensor" in text, text
        assert "pass a copy, x.clone()" in text, text
