"""Of a manual region with several bodies a search keeps the fastest, for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives as collectives
from torch.nn.functional import scaled_dot_product_attention

import fxpar
from fxpar.errors import PlanError, RegionError
from tests.helpers.spawn import shared_pool

SPLIT = (None, None, "cp", None)
SPECS = [SPLIT] * 3, [SPLIT]


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values travel."""
    n = fxpar.axis_size("cp")
    on = [(i + 1) % n for i in range(n)]
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -1e9)
    for step in range(n):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        both = torch.logaddexp(lse, scores.logsumexp(-1))
        weights = (scores - both[..., None]).exp()
        out = out * (lse - both).exp()[..., None] + weights @ v
        lse = both
        if step < n - 1:
            k, v = fxpar.permute(k, on, "cp"), fxpar.permute(v, on, "cp")
    return out


def gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (collectives.all_gather_tensor(x, 2, "cp") for x in (k, v))
    return scaled_dot_product_attention(q, k, v)


def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """My part of the sequence, all heads -> all of it, my heads; and back."""
    n, (b, h, s, d) = fxpar.axis_size("cp"), q.shape

    def exchange(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(b, n, h // n, s, d).transpose(0, 1).contiguous()
        x = collectives.all_to_all_single(x, None, None, "cp")
        return x.permute(1, 2, 0, 3, 4).reshape(b, h // n, n * s, d)

    out = scaled_dot_product_attention(exchange(q), exchange(k), exchange(v))
    out = out.reshape(b, h // n, n, s, d).permute(2, 0, 1, 3, 4).contiguous()
    out = collectives.all_to_all_single(out, None, None, "cp")
    return out.transpose(0, 1).reshape(b, h, s, d)


BODIES = (ring, gather, heads)
KINDS = {0: {"permute"}, 1: {"all_gather", "reduce_scatter"}, 2: {"all_to_all"}}


def attention(order: Sequence[int] = (0, 1, 2), layers: int = 1) -> Callable[..., Any]:
    first, *others = [(BODIES[i], *SPECS) for i in order]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            q = fxpar.shard_map(*first, axes="cp", bodies=others)(q.sin(), k, v)
        return q

    return attend


def whole(layers: int, *qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv
    for _ in range(layers):
        q = scaled_dot_product_attention(q.sin(), k, v)
    return q


def arguments(device: str = "cpu", *shape: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if shape else torch.float64
    how = {"device": device, "dtype": dtype, "requires_grad": True}
    return [torch.randn(*(shape or (2, 4, 8, 4)), **how) for _ in range(3)]


@pytest.fixture(autouse=True)
def _on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")


def check(plan: Any, layers: int, qkv: Sequence[torch.Tensor]) -> None:
    """Numbers and gradients are those of one device."""
    want = whole(layers, *qkv)
    result, gradients = plan.simulate(*qkv)
    torch.testing.assert_close(result, want)
    expected = torch.autograd.grad(want.sum(), qkv)
    torch.testing.assert_close(tuple(gradients.values()), expected)


def kinds(plan: Any) -> set[str]:
    return {c.kind for c in plan.collectives}


@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 2),
        pytest.param((1, 2, 0), marks=pytest.mark.slow),
        pytest.param((2, 0, 1), marks=pytest.mark.slow),
    ],
)
def test_propagation_takes_the_first(order: tuple[int, ...]) -> None:
    qkv = arguments()
    plan = fxpar.plan(attention(order), *qkv, mesh="cp=2", mode="propagate", grad=True)
    check(plan, 1, qkv)
    assert (plan.bodies, kinds(plan)) == ((), KINDS[order[0]])


def test_one_device_runs_the_first() -> None:
    def refuses(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("another body runs")

    qkv = arguments()
    mapped = fxpar.shard_map(ring, *SPECS, bodies=[(refuses, *SPECS)])
    torch.testing.assert_close(mapped(*qkv), scaled_dot_product_attention(*qkv))


@pytest.mark.parametrize(
    "mesh, shape",
    [
        pytest.param("cp=4", (), marks=pytest.mark.slow),
        pytest.param("cp=2", (1, 8, 2**14, 64), marks=pytest.mark.slow),
        pytest.param("cp=8", (1, 8, 2**14, 64), marks=pytest.mark.slow),
    ],
)
def test_search_keeps_the_fastest(mesh: str, shape: tuple[int, ...]) -> None:
    """As plans of each body by itself say."""
    qkv = arguments("meta" if shape else "cpu", *shape)
    how: dict[str, Any] = {"mesh": mesh, "mode": "search", "grad": True}
    alone = [fxpar.plan(attention((i,)), *qkv, **how) for i in range(3)]
    seconds = [plan.result.decision.search.predicted for plan in alone]
    best = min(range(3), key=seconds.__getitem__)
    plan = fxpar.plan(attention(), *qkv, **how)
    assert plan.bodies == ((best,) if best else ())
    assert kinds(plan) == kinds(alone[best]) == KINDS[best]
    assert any(f"body {best} of 3 of manual region 0" in note for note in plan.notes)
    if not shape:
        check(plan, 1, qkv)


@pytest.mark.slow
def test_what_is_fastest_depends_on_the_program() -> None:
    how: dict[str, Any] = {"mode": "search", "grad": True}
    short = fxpar.plan(attention(), *arguments(), mesh="cp=2", **how)
    long = fxpar.plan(
        attention(), *arguments("meta", 1, 8, 2**14, 64), mesh="cp=8", **how
    )
    assert short.bodies != long.bodies


def test_layers_are_one_choice_and_the_plan_keeps_it(tmp_path: Path) -> None:
    qkv, path = arguments(), tmp_path / "plan.json"
    how: dict[str, Any] = {"mesh": "cp=2", "grad": True}
    plan = fxpar.plan(attention((0, 1), 2), *qkv, mode="search", **how)
    check(plan, 2, qkv)
    assert plan.bodies == (1,)
    plan.save(path)
    again = fxpar.plan(attention((0, 1), 2), *qkv, mode=str(path), **how)
    assert (again.hash, again.bodies) == (plan.hash, plan.bodies)
    check(again, 2, qkv)
    with pytest.raises(PlanError, match=r"bodies \[1\] .* program has \[\]"):
        fxpar.plan(attention((0,), 2), *qkv, mode=str(path), **how)


def total(x: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(x.sum(), "sum", "cp")


CP = (("cp",),)
SINE, TOTAL = (torch.sin, CP, CP), (total, CP, (None,))
# The first body, another one, and words of the error.
WRONG = {
    "shape": (SINE, (lambda x: torch.cat([x, x]), CP, CP), r"is torch.float32 \[16\]"),
    "dtype": (SINE, (lambda x: x.double(), CP, CP), "torch.float64"),
    "structure": (SINE, (lambda x: (x, x), CP, CP * 2), "another structure"),
    "specs": (SINE, (torch.sin, CP, (("xx",),)), "names axis 'xx'"),
    "varies": (TOTAL, (lambda x: x.sum(), CP, (None,)), "said to be whole"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_bodies_are_refused(name: str) -> None:
    first, other, words = WRONG[name]

    def model(x: torch.Tensor) -> torch.Tensor:
        return fxpar.shard_map(*first, bodies=[other])(x)

    with pytest.raises(RegionError, match=words) as raised:
        fxpar.plan(model, torch.randn(8), mesh="cp=2", mode="search")
    assert __file__ in str(raised.value.where) and raised.value.fix


def compiled(mesh: str) -> tuple[Any, ...]:
    qkv, before = arguments(), len(fxpar.plans())
    options = {"mesh": mesh, "plan": "search", "codegen": "eager"}
    torch.compiler.reset()
    run = torch.compile(attention((0, 1)), backend="fxpar", options=options)
    result = run(*qkv)
    gradients = torch.autograd.grad(result.sum(), qkv)
    return result.detach(), gradients, {plan.bodies for plan in fxpar.plans()[before:]}


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["cp=2", pytest.param("cp=1", marks=pytest.mark.slow)])
def test_ranks_keep_the_same_body(mesh: str) -> None:
    qkv = arguments()
    want = whole(1, *qkv)
    expected = torch.autograd.grad(want.sum(), qkv)
    pool = shared_pool(fxpar.Mesh.parse(mesh).size)
    env = {"FXPAR_HARDWARE": "h100"}
    for result, gradients, bodies in pool.run(compiled, mesh, env=env):
        torch.testing.assert_close(result, want)
        torch.testing.assert_close(gradients, expected)
        assert bodies == {(1,)}
