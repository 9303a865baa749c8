"""Verb ``balance``: causal attention in which all ranks have as much to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.errors import ScheduleError
from fxpar.features.sequences import (
    causal_attention,
    overlap_attention,
)
from fxpar.fusion.verbs.ring import Ring

HEADS, WIDTH = 4, 8
SEQUENCE = (None, None, "cp", None)


def tensors(rows: int = 16, heads: int = HEADS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(2, HEADS, rows, WIDTH), *[(2, heads, rows, WIDTH)] * 2]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


FORWARD = "balance(causal_attention_default)"
BOTH = f"{FORWARD}\nbalance(causal_attention_backward_default)"


def planned(args: Any, schedule: str, mesh: str = "cp=4", **more: Any) -> Any:
    more = {"in_specs": [SEQUENCE] * 3, "mode": "propagate", "grad": True, **more}
    return fxpar.plan(attend, *args, mesh=mesh, schedule=schedule, **more)


def matches(plan: Any, *args: Any) -> None:
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [HEADS, 2])
@pytest.mark.parametrize(
    "mesh",
    ["cp=4", *(pytest.param(m, marks=pytest.mark.slow) for m in ("dp=2,cp=2", "cp=3"))],
)
def test_equal_numbers(mesh: str, heads: int) -> None:
    args = tensors(12 if mesh == "cp=3" else 16, heads)
    plan = planned(args, BOTH, mesh)
    sent = {c.kind for c in plan.collectives if "cp" in c.axes}
    assert sent == {"all_gather", "reduce_scatter", "permute"}
    matches(plan, *args)


def test_the_forward_alone() -> None:
    args = tensors()
    matches(planned(args, FORWARD), *args)


def pairs(rows: int, keys: int, ahead: int) -> int:
    """How many pairs of a query and a key that it sees."""
    return sum(
        len(range(*b.rows.indices(rows))) * len(range(*b.keys.indices(keys)))
        for b in causal_attention.blocks(rows, keys, ahead)
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_ranks_have_as_much_to_do(ranks: int) -> None:
    half = 4
    keys = 2 * half * ranks
    work = {
        pairs(half, keys, 2 * r * half)
        + pairs(half, keys, (2 * ranks - 1 - 2 * r) * half)
        for r in range(ranks)
    }
    assert len(work) == 1
    plain = [pairs(2 * half, keys, 2 * half * r) for r in range(ranks)]
    assert max(plain) > 1.3 * work.pop()


def test_queries_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_attention._Halves, "swapped", lambda self, x: x)
    args = tensors()
    plan = planned(args, FORWARD)
    with pytest.raises(AssertionError):
        matches(plan, *args)


def test_chosen_where_attention_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    for rows, pays in ((1 << 15, True), (1 << 8, False)):
        args = [
            torch.empty(
                (1, heads, rows, 128),
                dtype=torch.bfloat16,
                device="meta",
                requires_grad=True,
            )
            for heads in (32, 8, 8)
        ]
        plan = planned(args, "auto", "cp=8", out_specs=[SEQUENCE])
        chosen = [line.verb for line in plan.result.schedule.lines]
        assert ("balance" in chosen) == pays
        if pays:
            before = planned(args, "none", "cp=8", out_specs=[SEQUENCE])
            assert plan.predicted.seconds < 0.7 * before.predicted.seconds


REFUSED = [
    ("full", 16, "cp=4", "not attention with a causal mask"),
    ("causal", 12, "cp=4", "cannot be halved"),
    ("heads", 16, "cp=4", "not attention with a causal mask"),
    ("keys", 16, "cp=4", "all keys, in order"),
]


@pytest.mark.parametrize("kind, rows, mesh, why", REFUSED)
def test_refused(kind: str, rows: int, mesh: str, why: str) -> None:
    args = tensors(rows)
    specs = [SEQUENCE] * 3
    options = {"in_specs": specs, "mesh": mesh, "mode": "propagate"}

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=kind != "full")

    if kind == "heads":
        options["in_specs"] = [(None, "cp", None, None)] * 3
    if kind == "keys":
        options["in_specs"] = [SEQUENCE, None, None]
        args = [args[0], *tensors(2 * rows)[1:]]
    plan = fxpar.plan(fn, *args, **options, schedule="none")
    (name,) = (n.name for n in plan.result.local.nodes if "attention" in str(n.target))
    with pytest.raises(ScheduleError, match=why):
        fxpar.plan(fn, *args, **options, schedule=f"balance({name})")


RING = """
overlap([all_gather, all_gather_1], balanced_causal_attention_default, ring=1)
overlap([all_gather, all_gather_1], balanced_causal_attention_backward_default, ring=1)
"""


@pytest.mark.parametrize("heads", [HEADS, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mesh",
    ["cp=4", *(pytest.param(m, marks=pytest.mark.slow) for m in ("dp=2,cp=2", "cp=3"))],
)
def test_a_balanced_ring(mesh: str, heads: int) -> None:
    """Keys travel in halves that changed places as queries did."""
    args = tensors(12 if mesh == "cp=3" else 16, heads)
    plan = planned(args, BOTH + RING, mesh)
    assert {c.kind for c in plan.collectives if "cp" in c.axes} == {"permute"}
    matches(plan, *args)


def test_a_balanced_ring_of_the_forward_alone() -> None:
    args = tensors()
    matches(planned(args, FORWARD + RING.rsplit("overlap", 1)[0]), *args)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_hop_of_a_balanced_ring_is_as_much_work(ranks: int) -> None:
    """In each hop two of the four pairs of halves see one another; in the first one
    more, of which as of another nothing above the diagonal."""
    half = 4
    for hop in range(ranks):
        work = set()
        for rank in range(ranks):
            start = (rank + hop) % ranks * 2 * half
            gap = (2 * ranks - 1) * half - 2 * start
            places = (2 * rank * half, (2 * ranks - 1 - 2 * rank) * half)
            work.add(
                sum(
                    pairs(half, half, before)
                    for place in places
                    for _, before in causal_attention._seen(
                        2 * half, place - start, gap
                    )
                )
            )
        assert work == {(2 if hop else 3) * half * half}


def turned(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Attention of keys that know their places once they are gathered."""
    k = fxpar.constrain(k, None, None, None, None) * table
    return attend(q, fxpar.constrain(k, None, None, None, None), v)


def turned_plan(args: Any) -> Any:
    return fxpar.plan(
        turned,
        *args,
        mesh="cp=4",
        in_specs=[*[SEQUENCE] * 3, None],
        mode="propagate",
        schedule=FORWARD + RING.rsplit("overlap", 1)[0],
    )


def test_a_balanced_ring_of_keys_that_know_their_places() -> None:
    args = [*tensors(), torch.randn(16, WIDTH, dtype=torch.float64)]
    matches(turned_plan(args), *args)


def test_places_of_keys_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*tensors(), torch.randn(16, WIDTH, dtype=torch.float64)]
    monkeypatch.setattr(overlap_attention._HalvesRing, "cut", Ring.cut)
    plan = turned_plan(args)
    with pytest.raises(AssertionError):
        matches(plan, *args)


def test_a_ring_of_halves_that_stay_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = overlap_attention.BalancedRing
    monkeypatch.setattr(ring, "_home", lambda self, build, x, dim: x)
    args = tensors()
    plan = planned(args, BOTH + RING)
    with pytest.raises(AssertionError):
        matches(plan, *args)


def test_a_ring_is_not_balanced_twice() -> None:
    args = tensors()
    line = "overlap([all_gather, all_gather_1], causal_attention_default, ring=1)"
    with pytest.raises(ScheduleError):
        planned(args, f"{FORWARD} -> y\n{line}")
