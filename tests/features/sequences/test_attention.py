"""Attention split along the sequence: queries, keys, or both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.errors import PlanError, ScheduleError
from fxpar.features.sequences import (
    causal_attention,
    ring_attention,
)
from fxpar.passes.order.forward_backward import as_run
from fxpar.sharding.cost.recompute import phases
from fxpar.sharding.ops import LOCAL, row_of
from fxpar.sharding.ops.local_call import form_of_feature

ours = torch.ops.fxpar

BATCH, HEADS, ROWS, WIDTH = 2, 4, 16, 8


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def tensors(rows: int = ROWS, keys: int = ROWS, heads: int = HEADS) -> list:
    torch.manual_seed(0)
    return [
        draw(BATCH, HEADS, rows, WIDTH),
        draw(BATCH, heads, keys, WIDTH),
        draw(BATCH, heads, keys, WIDTH),
    ]


def matches(plan: Any, *args: Any) -> None:
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def kinds(plan: Any) -> set[str]:
    return {c.kind for c in plan.collectives}


def targets(plan: Any) -> list[str]:
    return [str(node.target) for node in plan.result.local.nodes]


# The op


def seen(rows: int, keys: int, ahead: int) -> torch.Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(ahead)


@pytest.mark.parametrize("rows, keys", [(4, 4), (4, 8), (8, 4), (1, 8), (3, 1)])
def test_blocks_have_each_pair_once(rows: int, keys: int) -> None:
    for ahead in range(-rows - 2, keys + 3):
        count = torch.zeros(rows, keys, dtype=torch.long)
        for block in causal_attention.blocks(rows, keys, ahead):
            part = count[block.rows, block.keys]
            part += part.new_ones(part.shape).tril() if block.causal else 1
            assert part.shape[0] == part.shape[1] or not block.causal
        assert torch.equal(count.bool(), seen(rows, keys, ahead)), ahead
        assert count.max() <= 1


@pytest.mark.parametrize("kernel", ["cpu", "math"])
@pytest.mark.parametrize("heads", [HEADS, 2])
@pytest.mark.parametrize("rows, keys", [(4, 8), (8, 4)])
def test_attention_at_any_place(
    rows: int, keys: int, heads: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        causal_attention, "_kernel", lambda *_: causal_attention._KERNELS[kernel]
    )
    q, k, v = tensors(rows, keys, heads)
    for ahead in (-rows, -1, 0, 3, keys):
        mask = seen(rows, keys, ahead)
        groups = HEADS // heads
        scores = q @ k.repeat_interleave(groups, 1).mT * 0.3
        scores = scores.masked_fill(~mask, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse.isinf(), 0).unsqueeze(-1)).exp()
        want = weights @ v.repeat_interleave(groups, 1)
        got, weight = ours.causal_attention(q, k, v, ahead, 0.3)
        torch.testing.assert_close((got, weight), (want, lse), rtol=1e-9, atol=1e-9)
        grad = torch.randn_like(want)
        made = ours.causal_attention_backward(grad, q, k, v, got, weight, ahead, 0.3)
        wanted = torch.autograd.grad(want, (q, k, v), grad)
        torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)


# Plans


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


SEQUENCE = (None, None, "cp", None)


def planned(fn: Any, *args: Any, mesh: str = "cp=4", specs: Any = None, **more: Any):
    specs = specs or [SEQUENCE] * 3
    more = {"mode": "propagate", "grad": True, **more}
    return fxpar.plan(fn, *args, mesh=mesh, in_specs=specs, **more)


@pytest.mark.parametrize("fn", [causal, full])
@pytest.mark.parametrize("mesh", ["cp=2", "dp=2,cp=4"])
def test_queries_stay_and_keys_are_gathered(fn: Any, mesh: str) -> None:
    args = tensors()
    plan = planned(fn, *args, mesh=mesh)
    assert {"all_gather", "reduce_scatter"} <= kinds(plan)
    assert ("fxpar.causal_attention.default" in targets(plan)) == (fn is causal)
    matches(plan, *args)


def test_without_the_feature_a_split_causal_mask_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for op in list(LOCAL):
        row = row_of(op)
        if row is not None and row.local is form_of_feature:
            monkeypatch.setitem(LOCAL, op, row.local)
    with pytest.raises(PlanError, match="attention.* a feature of fxpar adds it"):
        planned(causal, *tensors())


@pytest.mark.parametrize("fn", [causal, full])
def test_queries_of_more_rows_than_keys(fn: Any) -> None:
    for sizes in ((32, 16), (16, 32), (10, 14)):
        args = tensors(*sizes)
        specs = [SEQUENCE, None, None]
        matches(planned(fn, *args, specs=specs), *args)


@pytest.mark.parametrize("mask", ["bool", "additive", "row"])
def test_masks_are_split_along_queries(mask: str) -> None:
    args = tensors()
    allowed = torch.rand(BATCH, 1, ROWS, ROWS) < 0.7
    allowed |= torch.eye(ROWS, dtype=torch.bool)
    given = {
        "bool": allowed,
        "additive": torch.randn(ROWS, ROWS, dtype=torch.float64),
        "row": torch.randn(BATCH, 1, 1, ROWS, dtype=torch.float64),
    }[mask]

    def fn(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask)

    plan = planned(fn, *args, given, specs=[SEQUENCE] * 3 + [None])
    matches(plan, *args, given)


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return full(q, k, v)


def test_a_cache_split_along_its_sequence_is_not_gathered() -> None:
    args = tensors(1, 64)
    specs = [None, SEQUENCE, SEQUENCE]
    plan = planned(decode, *args, specs=specs, grad=False)
    sent = sum(c.bytes for c in plan.collectives)
    assert sent < args[1].numel() * 8 / 4  # of a rank's keys
    matches(plan, *args)


# The ring

GATHERS = "[all_gather, all_gather_1]"


def ring_lines(fn: Any, *args: Any, **options: Any) -> list[str]:
    """A line for each attention."""
    plan = planned(fn, *args, schedule="none", **options)
    nodes = plan.result.local.nodes
    found = [n.name for n in nodes if ring_attention.form_of(n.target)]
    return [f"overlap({GATHERS}, {name}, ring=1)" for name in found]


RINGS = [
    (causal, "cp=4"),
    (full, "cp=4"),
    pytest.param(causal, "dp=2,cp=2", marks=pytest.mark.slow),
    pytest.param(causal, "cp=3", marks=pytest.mark.slow),
    pytest.param(full, "dp=2,cp=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fn, mesh", RINGS)
def test_keys_travel_in_a_ring(fn: Any, mesh: str) -> None:
    args = tensors(12, 12) if mesh == "cp=3" else tensors()
    lines = ring_lines(fn, *args, mesh=mesh)
    plan = planned(fn, *args, mesh=mesh, schedule="\n".join(lines))
    count = int(mesh[-1])
    assert kinds(plan) == {"permute"}
    # Keys and values forward and backward, and their gradients.
    permutes = [c.bytes for c in plan.collectives if c.axes == ("cp",)]
    assert len(permutes) == 3 * (count - 1) and len(set(permutes)) == 1
    matches(plan, *args)


@pytest.mark.parametrize("which", [0, 1])
def test_a_ring_of_the_forward_or_the_backward_alone(which: int) -> None:
    args = tensors()
    line = ring_lines(causal, *args)[which]
    matches(planned(causal, *args, schedule=line), *args)


def test_a_ring_holds_no_keys_of_all_ranks() -> None:
    args = tensors()
    lines = ring_lines(causal, *args)
    plan = planned(causal, *args, schedule="\n".join(lines))
    whole = args[1].numel()
    local = as_run(plan.result.local)
    assert max(n.meta["val"].numel() for n in local.nodes if is_tensor(n)) < whole
    forward, backward = phases(local)
    kept = [n for n in forward if any(user in backward for user in n.users)]
    assert all(n.meta["val"].numel() <= whole // 4 for n in kept if is_tensor(n))


def is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


REFUSED = {
    "overlap([all_gather, all_gather_1], ATTENTION, ring=2)": "in one direction",
    "overlap([all_gather, all_gather_1], ATTENTION, ring=1, dim=2)": "leave out",
    "overlap(all_gather, ATTENTION, ring=1)": "no parts of the sequence",
    "overlap([all_gather, primals_1], ATTENTION, ring=1)": "no gather of keys",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_no_ring_does_is_refused(line: str) -> None:
    args = tensors()
    name = ring_lines(causal, *args)[0].split(", ")[-2]
    with pytest.raises(ScheduleError) as caught:
        planned(causal, *args, schedule=line.replace("ATTENTION", name))
    assert REFUSED[line] in str(caught.value)


def turned(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(
        pairs * torch.polar(torch.ones_like(places), places)
    ).flatten(-2)


@pytest.mark.parametrize("which", [0, 1])
def test_a_ring_of_several_types_is_refused(which: int) -> None:
    """Keys of a complex rotary embedding are gathered as complex numbers."""
    args = tensors()

    def fn(q, k, v):
        return causal(q, turned(k), v)

    line = ring_lines(fn, *args)[which]
    with pytest.raises(ScheduleError, match="several types"):
        planned(fn, *args, schedule=line)


def test_heads_instead_of_queries() -> None:
    """Two all-to-alls: Ulysses."""
    args = tensors()

    def fn(q, k, v):
        heads = [fxpar.constrain(x, None, "cp", None, None) for x in (q, k, v)]
        return causal(*heads)

    specs = {"in_specs": [SEQUENCE] * 3, "out_specs": [SEQUENCE]}
    plan = fxpar.plan(fn, *args, mesh="cp=4", mode="propagate", grad=True, **specs)
    assert kinds(plan) == {"all_to_all"}
    matches(plan, *args)


def test_a_ring_is_chosen_where_it_hides_what_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    for rows, rings in ((1 << 17, True), (1 << 12, False)):
        shape = (1, 32, rows, 128)
        args = [
            torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for _ in range(3)
        ]
        options = {"mesh": "cp=8", "out_specs": [SEQUENCE], "schedule": "auto"}
        plan = planned(full, *args, **options)
        assert (kinds(plan) == {"permute"}) == rings
        if rings:
            assert plan.predicted.exposed < plan.predicted.hidden


def test_shared_keys_are_gathered_before_they_are_repeated() -> None:
    args = tensors(heads=2)

    def fn(q, k, v):
        k, v = (
            x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (k, v)
        )
        return causal(q, k, v)

    plan = planned(fn, *args)
    sent = [c.bytes for c in plan.collectives if c.kind == "all_gather"]
    assert sent == [args[1].numel() * 8] * 2
    matches(plan, *args)
