"""Rows of several tensors in turn, and what is made of them: ranks exchange the few
rows that change ranks, at any size."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import associative_scan

import fxpar
from fxpar.errors import FxparWarning
from fxpar.features.uneven import uneven_steps
from fxpar.sharding import shard_sizes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from tests.helpers.pairs import diagonal
from tests.helpers.spawn import ranks_of

COLUMNS = 3
MESHES = {"tp=4": ("tp",), "dp=2,tp=2": ("dp", "tp")}


def tensors(count: int, *shape: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.rand(*shape, dtype=torch.float64, requires_grad=True)
        for _ in range(count)
    ]


def right(
    fn: Callable[..., Any], xs: Sequence[torch.Tensor], mesh: str, dim: int = 0
) -> Any:
    """The plan of a program whose tensors lie split along a dim, forward and backward
    as on one device."""
    spec: list[Any] = [None] * xs[0].dim()
    spec[dim] = MESHES[mesh]
    lies = [tuple(spec)]
    want = fn(*xs)
    results = [want] if isinstance(want, torch.Tensor) else want
    plan = fxpar.plan(
        fn,
        *xs,
        mesh=mesh,
        in_specs=lies * len(xs),
        out_specs=lies * len(results),
        mode="propagate",
        grad=True,
    )
    got = plan.outcome(*xs)
    gradients = torch.autograd.grad(sum(y.sum() for y in results), xs)
    near = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(got.result, want, **near)
    torch.testing.assert_close([*got.gradients.values()], [*gradients], **near)
    return plan


def in_turn(dim: int = 0) -> Callable[..., torch.Tensor]:
    """A program of rows in turn."""

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        scaled = [x * (i + 2) for i, x in enumerate(xs)]
        return torch.stack(scaled, dim + 1).flatten(dim, dim + 1).sin()

    return fn


def calls(plan: Any) -> int:
    """How often a plan has rows in turn as one op."""
    nodes = plan.result.normalized.nodes
    return sum("fxpar.interleave" in str(node.target) for node in nodes)


def sent(plan: Plan, mesh: str) -> float:
    """Bytes that a rank sends at most, as a plan says."""
    share = {"all_to_all": 1 - 1 / Mesh.parse(mesh).size}
    return sum(c.bytes * share.get(c.kind, 1.0) for c in plan.collectives)


def crossing(reads: Callable[[int], int], rows: int, of: int, mesh: str) -> int:
    """Rows that a rank gets or gives at most, where row i of ``rows`` is made of row
    ``reads(i)`` of ``of``, as counted by hand."""
    parsed = Mesh.parse(mesh)
    gets, gives = [0] * parsed.size, [0] * parsed.size
    shards = [
        [range(s, s + k) for s, k in (shard_sizes.shard(n, parsed, axes, rank),)][0]
        for n, axes in ((rows, MESHES[mesh]), (of, MESHES[mesh]))
        for rank in range(parsed.size)
    ]
    made, held = shards[: parsed.size], shards[parsed.size :]
    for taker, own in enumerate(made):
        for i in own:
            (giver,) = (rank for rank, has in enumerate(held) if reads(i) in has)
            if giver != taker:
                gets[taker] += 1
                gives[giver] += 1
    return max(*gets, *gives)


def by_hand(parts: int, rows: int, mesh: str) -> int:
    """Rows that a program written by hand sends: those of the parts at once, and the
    gradient of each."""
    n = rows * parts
    forward = crossing(lambda i: i // parts, n, rows, mesh)
    backward = (
        crossing(lambda j, i=i: j * parts + i, rows, n, mesh) for i in range(parts)
    )
    return forward + sum(backward)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("rows", [33, 35, 50])
def test_few_rows_are_sent(rows: int, parts: int, mesh: str) -> None:
    """As many as a program written by hand sends."""
    plan = right(in_turn(), tensors(parts, rows, COLUMNS), mesh)
    assert calls(plan) == 1
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all"}
    assert round(sent(plan, mesh)) <= by_hand(parts, rows, mesh) * COLUMNS * 8


def test_without_the_op_values_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_DISABLE", "take_rows_in_turn")
    plan = right(in_turn(), tensors(2, 33, COLUMNS), "tp=4")
    assert "all_gather" in {c.kind for c in plan.collectives}
    assert sent(plan, "tp=4") > 10 * by_hand(2, 33, "tp=4") * COLUMNS * 8


@pytest.mark.parametrize("mesh", MESHES)
def test_many_parts(mesh: str) -> None:
    for parts in (4, 5):
        plan = right(in_turn(), tensors(parts, 67, COLUMNS), mesh)
        assert round(sent(plan, mesh)) <= by_hand(parts, 67, mesh) * COLUMNS * 8


@pytest.mark.parametrize(("rows", "mesh"), diagonal([1, 2, 3, 5, 7, 9, 13], [*MESHES]))
def test_any_size(rows: int, mesh: str) -> None:
    """Fewer rows than ranks, and shards without a row, among them."""
    for parts in (2, 3, 4):
        plan = right(in_turn(), tensors(parts, rows, COLUMNS), mesh)
        assert calls(plan) == 1


@pytest.mark.parametrize("shape", [(13,), (2, 13), (2, 13, COLUMNS), (13, 2, 2)])
def test_any_dim(shape: tuple[int, ...]) -> None:
    dim = shape.index(13)
    plan = right(in_turn(dim), tensors(2, *shape), "tp=4", dim)
    assert calls(plan) == 1
    assert "all_gather" not in {c.kind for c in plan.collectives}


def test_shares_that_differ() -> None:
    mesh = Mesh((("tp", 3),), shares=((2.0, 1.0, 3.0),))
    xs, lies = tensors(2, 13, COLUMNS), [("tp", None)]
    plan = fxpar.plan(
        in_turn(), *xs, mesh=mesh, in_specs=lies * 2, out_specs=lies, mode="propagate"
    )
    torch.testing.assert_close(plan.simulate(*xs), in_turn()(*xs))
    assert calls(plan) == 1


def test_rows_that_no_axis_splits_are_views_again() -> None:
    xs = tensors(3, 13, COLUMNS)
    plan = fxpar.plan(in_turn(), *xs, mesh="tp=2", mode="replicate", grad=True)
    assert calls(plan) == 1
    names = {str(node.target) for node in plan.result.local.nodes}
    assert not [name for name in names if "fxpar" in name]
    assert "aten.cat.default" in names


def padded(a: torch.Tensor, b: torch.Tensor, *ends: int) -> torch.Tensor:
    """As an associative scan has more rows of one than of the other in turn."""
    b = F.pad(b.exp(), (0, 0, *ends))
    return torch.stack([a.cos(), b], 1).flatten(0, 1)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rows", [2, 5, 14, 34, 41])
def test_one_row_more_of_the_first(rows: int, mesh: str) -> None:
    """What was padded is not computed, forward or backward."""
    (a,), (b,) = tensors(1, rows, COLUMNS), tensors(1, rows - 1, COLUMNS)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return padded(a, b, 0, 1)[:-1].sin()

    plan = right(fn, [a, b], mesh)
    (call,) = (n for n in plan.result.normalized.nodes if "interleave" in n.name)
    assert call.meta["val"].shape == (2 * rows - 1, COLUMNS)
    targets = {str(node.target) for node in plan.result.normalized.nodes}
    assert targets.isdisjoint({"aten.constant_pad_nd.default"})
    if rows > 32:
        assert "all_gather" not in {c.kind for c in plan.collectives}


def test_rows_all_over_a_dim_are_not_summed() -> None:
    """Every eighth row lies where it is needed; of few rows together all are summed."""
    (x,) = tensors(1, 512, COLUMNS)
    lies = [("tp", None)]

    def kinds(fn: Callable[..., Any]) -> set[str]:
        plan = fxpar.plan(fn, x, mesh="tp=4", in_specs=lies, mode="propagate")
        torch.testing.assert_close(plan.simulate(x), fn(x))
        return {c.kind for c in plan.collectives}

    assert not kinds(lambda x: x[3::8].sin())
    assert kinds(lambda x: x[3:19].sin()) == {"all_reduce"}


# What looks like rows in turn, and is not, and whether a part of it is.
TWINS: dict[str, tuple[Callable[..., torch.Tensor], int, int]] = {
    "one after the other": (lambda a, b: torch.stack([a, b], 0).flatten(0, 1), 13, 0),
    "rows of unlike parts": (
        lambda a, b: torch.cat([a, b[:, :1]], 1).view(26, 2),
        13,
        0,
    ),
    "columns": (lambda a, b: torch.stack([a, b], 2).flatten(0, 1), 13, 0),
    "both dims at once": (lambda a, b: torch.stack([a, b], 1).view(39, 2), 13, 0),
    "a dim that axes divide": (
        lambda a, b: torch.stack([a, b], 1).flatten(0, 1),
        16,
        0,
    ),
    "a row that is cut off": (
        lambda a, b: torch.stack([a, b], 1).flatten(0, 1)[:-1],
        13,
        1,
    ),
    "padded by two": (lambda a, b: padded(a, b[2:], 0, 2)[:-1], 13, 1),
    "padded before": (lambda a, b: padded(a, b[1:], 1, 0)[:-1], 13, 1),
    "cut off before": (lambda a, b: padded(a, b[1:], 0, 1)[1:], 13, 1),
}


@pytest.mark.parametrize("name", TWINS)
def test_what_looks_like_it_stays(name: str) -> None:
    fn, rows, found = TWINS[name]
    plan = right(lambda a, b: fn(a * 2, b * 3).sin(), tensors(2, rows, COLUMNS), "tp=4")
    assert calls(plan) == found
    for node in plan.result.normalized.nodes:
        if "fxpar.interleave" in str(node.target):
            assert node.meta["val"].shape == (2 * rows, COLUMNS)


@pytest.mark.parametrize("name", ["a row that is cut off", "padded before"])
def test_a_row_that_was_no_padding_is_missed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = uneven_steps._is_end_pad
    monkeypatch.setattr(
        uneven_steps,
        "_is_end_pad",
        lambda node, dim, rows: rows > 0 or real(node, dim, rows),
    )
    fn, rows, _ = TWINS[name]
    with pytest.raises((AssertionError, RuntimeError, fxpar.errors.FxparError)):
        right(lambda a, b: fn(a * 2, b * 3).sin(), tensors(2, rows, COLUMNS), "tp=4")


def scan(x: torch.Tensor, y: torch.Tensor) -> Any:
    """A linear recurrence, as torch's own form computes it."""

    def combine(p: Any, q: Any) -> Any:
        return p[0] * q[0], q[0] * p[1] + q[1]

    return associative_scan(combine, (x, y), 0, combine_mode="generic")


# Rows that a scan sends of each of its two tensors, for each time that it halves them:
# it slices five times, joins, and takes in turn, and each of these sends a row or two;
# its backward does all of it once more.
A_LEVEL = 10


@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        (67, "tp=4"),
        *(
            pytest.param(rows, mesh, marks=pytest.mark.slow)
            for rows in (67, 201, 1003)
            for mesh in MESHES
            if (rows, mesh) != (67, "tp=4")
        ),
    ],
)
def test_a_scan_sends_few_rows(rows: int, mesh: str) -> None:
    plan = right(scan, tensors(2, rows, COLUMNS), mesh)
    assert calls(plan) > 4
    levels = math.log2(rows)
    assert sent(plan, mesh) <= 2 * 2 * A_LEVEL * levels * COLUMNS * 8


def test_a_scan_of_rows_that_axes_divide_halves_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schedule is chosen for it too, though regions have more items than are looked
    at."""
    monkeypatch.setenv("FXPAR_SCHEDULE", "auto")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=FxparWarning)
        plan = right(scan, tensors(2, 16, 4), "dp=2,tp=2")
    assert sent(plan, "dp=2,tp=2") <= 2 * 2 * A_LEVEL * 4 * 4 * 8


@pytest.mark.parametrize(
    ("shape", "reverse"), diagonal([(13,), (2, 21), (2, 21, 2)], [False, True])
)
def test_scans_of_any_dim(shape: tuple[int, ...], reverse: bool) -> None:
    dim = min(len(shape) - 1, 1)

    def fn(x: torch.Tensor) -> Any:
        return associative_scan(
            torch.mul, x, dim, reverse=reverse, combine_mode="generic"
        )

    right(fn, tensors(1, *shape), "tp=4", dim)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_scans_of_any_size(mesh: str) -> None:
    for rows in (*range(2, 24), 31, 33, 47, 65):
        right(scan, tensors(2, rows, 2), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_all_sizes(mesh: str) -> None:
    for rows, parts in itertools.product(range(1, 40), (2, 3, 5)):
        right(in_turn(), tensors(parts, rows, 2), mesh)


def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A kernel that makes rows of what was exchanged reads a sum over ranks, too."""
    rows = torch.stack([x.sin(), y.cos()], 1).flatten(0, 1)
    return rows.exp() * padded(x, y[1:], 0, 1)[:-1].sum()


def run_mixed(codegen: str) -> None:
    x, y = tensors(2, 7, 2)
    options = {
        "mesh": "tp=2",
        "plan": "propagate",
        "codegen": codegen,
        "hints": {"x": ("tp", None), "y": ("tp", None)},
        "schedule": "none",
    }
    got = torch.compile(mixed, backend="fxpar", options=options)(x, y)
    want = mixed(x, y)
    torch.testing.assert_close(got, want)
    gradients = torch.autograd.grad(got.sum(), (x, y))
    torch.testing.assert_close(gradients, torch.autograd.grad(want.sum(), (x, y)))


@pytest.mark.slow
def test_two_ranks() -> None:
    ranks_of("tp=2").run(run_mixed, "eager")


@pytest.mark.slow
def test_generated_kernels() -> None:
    """Inductor puts no kernel before the reduction that it reads."""
    ranks_of("tp=2").run(run_mixed, "inductor", timeout=300.0)
