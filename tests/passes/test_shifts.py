"""Rows that move by a constant number: a few rows of a neighbour, not a gather; and
positions that every rank computes itself are never sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fxpar
from fxpar import _torch
from fxpar.features.uneven.normalize_shifts import find_shifts
from fxpar.graph import size_nodes
from fxpar.graph.builder import Builder
from fxpar.graph.custom_ops import shift
from fxpar.sharding.shift_messages import pieces

N = 16


def positions(by: int) -> torch.Tensor:
    return (torch.arange(N) + by) % N


# Each gives row i + by of its argument, around the end or zero beyond it.
SHIFTS = {
    "roll": (1, lambda x: torch.roll(x, -1, 0)),
    "back": (-1, lambda x: torch.roll(x, 1, 0)),
    "far": (6, lambda x: torch.roll(x, -6, 0)),
    "whole shards": (8, lambda x: torch.roll(x, 8, 0)),
    "cat": (1, lambda x: torch.cat([x[1:], x[:1]])),
    "cat zeros": (1, lambda x: torch.cat([x[1:], torch.zeros_like(x[:1])])),
    "zeros first": (-2, lambda x: torch.cat([torch.zeros_like(x[:2]), x[:-2]])),
    "pad": (-1, lambda x: F.pad(x, (0, 0, 1, 0))[:-1]),
    "pad with 7": (1, lambda x: F.pad(x, (0, 0, 0, 1), value=7.0)[1:]),
    "index": (1, lambda x: x[positions(1)]),
    "negative": (-1, lambda x: x[torch.arange(N) - 1]),
    "index_select": (3, lambda x: x.index_select(0, positions(3))),
    "gather": (1, lambda x: x.gather(0, positions(1)[:, None].expand(N, 8))),
    "twice": (2, lambda x: torch.roll(torch.roll(x, -1, 0), -1, 0)),
}


def moved(plan) -> list[tuple[str, str, int]]:
    return [(c.kind, "+".join(c.axes), c.bytes) for c in plan.collectives]


def matches(plan, *args) -> None:
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(N, 8, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "mode", ["propagate", pytest.param("search", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", SHIFTS)
def test_a_shift_sends_the_rows_that_cross(name: str, mode: str, x) -> None:
    by, fn = SHIFTS[name]
    lie = [("tp", None)]
    plan = fxpar.plan(fn, x, mesh="tp=4", in_specs=lie, out_specs=lie, mode=mode)
    row, size = 8 * 8, N // 4
    crossing = [p for p in pieces(size, by, by + size) if p.further % 4]
    assert moved(plan) == [("permute", "tp", row * (p.end - p.start)) for p in crossing]
    assert sum(c.bytes for c in plan.collectives) <= row * min(abs(by), size)
    matches(plan, x)
    torch.testing.assert_close(plan.simulate(x), fn(x).detach())


@pytest.mark.parametrize("name", SHIFTS)
def test_its_gradient_is_a_shift_back(name: str, x) -> None:
    lie = [("tp", "dp")]
    plan = fxpar.plan(
        lambda x: SHIFTS[name][1](x) * x,
        x,
        mesh="dp=2,tp=4",
        in_specs=lie,
        out_specs=lie,
        mode="propagate",
        grad=True,
    )
    assert {c.kind for c in plan.collectives} == {"permute"}
    by, size = SHIFTS[name][0], N // 4
    crossing = sum(p.further % 4 > 0 for p in pieces(size, by, by + size))
    assert len(plan.collectives) == 2 * crossing
    matches(plan, x)


@pytest.mark.parametrize("lie", [("dp+tp", None), ("tp+dp", None), ("tp", "dp")])
def test_along_a_dim_that_several_axes_split(lie: tuple, x) -> None:
    spec = fxpar.Spec(*(tuple(a.split("+")) if a else None for a in lie))
    plan = fxpar.plan(
        lambda x: torch.roll(x, 1, 0),
        x,
        mesh="dp=2,tp=2",
        in_specs=[spec],
        out_specs=[spec],
        mode="propagate",
    )
    assert [c.kind for c in plan.collectives] == ["permute"]
    matches(plan, x)


def _cut_pad(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 1), value=7.0)[:, 1:]


# Readers of a slice that skips over memory, and whether a shift can be read instead.
READERS = {
    "contiguous": (lambda x: x.contiguous(), True),
    "pointwise": (lambda x: x * 2 + x.cos(), True),
    "flat": (lambda x: x.reshape(-1), True),
    "returned": (lambda x: x, False),
    "seen by strides": (
        lambda x: x.as_strided((8, N), (N + 1, 1), 1).contiguous(),
        False,
    ),
    "both": (lambda x: (x.cos(), x.as_strided((8, N), (N + 1, 1), 1) * 2), False),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pad_cut_in_its_last_dim(name: str, x) -> None:
    """So labels of a language model are shifted."""
    x, (reader, shifts) = x.detach().t().contiguous(), READERS[name]
    plan = fxpar.plan(
        lambda x: reader(_cut_pad(x)),
        x,
        mesh="tp=4",
        in_specs=[(None, "tp")],
        mode="propagate",
    )
    targets = [str(node.target) for node in plan.result.normalized.nodes]
    assert ("fxpar.shift.default" in targets) == shifts
    assert ("aten.constant_pad_nd.default" in targets) != shifts
    if shifts:
        assert moved(plan)[0] == ("permute", "tp", 8 * 8)
        assert plan.result.decision.is_even
    matches(plan, x)
    torch.testing.assert_close(plan.simulate(x), reader(_cut_pad(x)))


def _joined(x: torch.Tensor, before: int, after: int = 0) -> torch.Tensor:
    """``x`` between rows of other tensors."""
    ends = x[:, :before] - 1, x[:, :after] * 3
    return torch.cat([ends[0], x, ends[1]], 1)


# Slices of joins, and whether each is of one part and the rows beside it.
JOINS = {
    "differences": (lambda x: torch.diff(x, prepend=x[:, :1] - 1), True),
    "differences with the next": (lambda x: torch.diff(x, append=x[:, :1]), True),
    "the last rows": (lambda x: _joined(x, 0, 3)[:, 3:] * 2, True),
    "some beside": (lambda x: _joined(x, 3, 2)[:, 1 : N + 1] * 2, True),
    "flags": (lambda x: torch.cat([x[:, :1] > 9, x > 0], 1)[:, :-1] & (x > 0), True),
    "beyond the part beside": (
        lambda x: torch.cat([x[:, :1], x[:, 1:2] * 2, x], 1)[:, :N].cos(),
        False,
    ),
    "no part of so many rows": (lambda x: _joined(x, 1, 1)[:, :-1].cos(), False),
    "returned": (lambda x: _joined(x, 1)[:, :N], False),
}


@pytest.mark.parametrize("name", JOINS)
def test_a_slice_of_a_join(name: str, x) -> None:
    """So documents that are packed in a row are told apart by their positions."""
    x = x.detach().t().contiguous().requires_grad_(name != "flags")
    fn, of_one_part = JOINS[name]
    options = {"mesh": "tp=4", "in_specs": [(None, "tp")], "mode": "propagate"}
    plan = fxpar.plan(fn, x, **options)
    targets = [str(node.target) for node in plan.result.normalized.nodes]
    assert ("aten.cat.default" in targets) != of_one_part
    assert plan.result.decision.is_even or not of_one_part
    torch.testing.assert_close(plan.simulate(x), fn(x).detach())
    if x.requires_grad:
        matches(fxpar.plan(fn, x, **options, grad=True), x)


def test_what_is_predicted_counts_the_rows(x, monkeypatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    lie = [("tp", None)]
    fn = SHIFTS["roll"][1]
    plan = fxpar.plan(fn, x, mesh="tp=4", in_specs=lie, out_specs=lie, mode="search")
    assert dict(plan.predicted.sent) == {"tp": 64}
    assert "permute" in str(plan)
    whole = fxpar.plan(fn, x, mesh="tp=4", in_specs=[(None, None)], mode="search")
    assert not whole.collectives  # where nothing is split nothing is sent


NOT_SHIFTS = {
    "data": lambda x, i: x[i],
    "clamped": lambda x, i: x[(torch.arange(N) + 1).clamp(max=N - 1)],
    "reversed": lambda x, i: x[N - 1 - torch.arange(N)],
    "two tensors": lambda x, i: torch.cat([x[1:], (x * 2)[:1]]),
    "other rows": lambda x, i: torch.cat([x[1:], x[1:2]]),
    "two constants": lambda x, i: torch.cat(
        [torch.zeros(1, 8).double(), x[1:-1], torch.ones(1, 8).double()]
    ),
    "pads that stay": lambda x, i: (
        F.pad(x, (0, 0, 1, 1))[1:-1] + F.pad(x, (0, 0, 1, 0))[:N]
    ),
    "added twice": lambda x, i: x.new_zeros(N, 8).index_put(
        [(torch.arange(N) + 1) % (N - 1)], x, accumulate=True
    ),
}


@pytest.mark.parametrize("name", NOT_SHIFTS)
def test_what_is_no_shift_stays_what_it_is(name: str, x) -> None:
    i = torch.randperm(N)
    fn = NOT_SHIFTS[name]
    plan = fxpar.plan(
        fn, x, i, mesh="tp=4", in_specs=[("tp", None), None], mode="propagate"
    )
    targets = [str(node.target) for node in plan.result.normalized.nodes]
    assert ("fxpar.shift.default" in targets) == (name == "pads that stay")
    matches(plan, x, i)


def test_rows_in_place_are_a_copy(x) -> None:
    """The result is no alias of the argument, which the user may write to."""
    plan = fxpar.plan(
        lambda x: x[torch.arange(N)], x, mesh="tp=4", in_specs=[("tp", None)]
    )
    assert not plan.collectives
    matches(plan, x)
    y = torch.ones(4, 2)
    assert shift(y, 0, 0) is not y and torch.equal(shift(y, 0, 0), y)


def test_it_can_be_left_out(x, monkeypatch) -> None:
    monkeypatch.setenv("FXPAR_DISABLE", "find_shifts")
    lie = [("tp", None)]
    plan = fxpar.plan(
        SHIFTS["cat"][1], x, mesh="tp=4", in_specs=lie, out_specs=lie, mode="propagate"
    )
    assert len(plan.collectives) > 1


@pytest.mark.parametrize("mode", ["propagate", "search"])
def test_positions_are_never_gathered(mode: str, x) -> None:
    """Each rank computes the part, or all, of what no input has a part in."""

    def fn(x, table):
        at = (torch.arange(N) * 5 + 2).clamp(max=N - 1)
        return table[at] + x, at * 2

    plan = fxpar.plan(
        fn,
        x,
        x,
        mesh="tp=4",
        in_specs=[("tp", None), ("tp", None)],
        out_specs=[("tp", None), ("tp",)],
        mode=mode,
    )
    assert sum(c.bytes for c in plan.collectives) <= x.nbytes
    assert len(plan.collectives) == 1  # of the rows that were looked up
    matches(plan, x, x)


def test_positions_that_come_as_an_argument_are_data(x) -> None:
    plan = fxpar.plan(
        lambda x, at: x[at] + x,
        x,
        torch.arange(N),
        mesh="tp=4",
        in_specs=[("tp", None), ("tp",)],
        out_specs=[("tp", None)],
        mode="propagate",
    )
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    matches(plan, x, torch.arange(N))


# Stages alike, as GSPMD has them (arXiv 2105.04663, 3.3): layers are stacked on a
# dim that a mesh axis splits; each tick all of them compute, then rows move on by one.
STAGES, TICKED, ROW = 4, 6, (2, 8)


def _rolled(state: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    is_first = torch.arange(STAGES)[:, None, None] == 0
    return torch.where(is_first, row[None], torch.roll(state, 1, 0))


def stacked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Microbatches ``x`` through layers ``w``, all stages at work each tick."""
    state, results = x.new_zeros(STAGES, *ROW), []
    for tick in range(TICKED + STAGES - 1):
        row = x[tick] if tick < TICKED else x.new_zeros(ROW)
        state = _rolled(state, row)
        state = torch.tanh(torch.einsum("sbd,sde->sbe", state, w))
        if tick >= STAGES - 1:
            results.append(state[-1])
    return torch.stack(results)


@pytest.mark.parametrize(
    "mesh", ["st=4", pytest.param("st=2,dp=2", marks=pytest.mark.slow)]
)
def test_stacked_stages_send_one_row_a_tick(mesh: str) -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(TICKED, *ROW, generator=made, dtype=torch.double)
    w = torch.randn(STAGES, 8, 8, generator=made, dtype=torch.double).requires_grad_()
    split = ("st", None, None)
    specs = [None, split]
    plan = fxpar.plan(
        stacked, x, w, mesh=mesh, in_specs=specs, mode="propagate", grad=True
    )
    torch.testing.assert_close(plan.simulate(x, w), plan.reference(x, w))
    want = x
    for layer in w:
        want = torch.tanh(want @ layer)
    torch.testing.assert_close(plan.reference(x, w)[0], want)
    along = [c for c in plan.collectives if "st" in c.axes]
    moved = [c.bytes for c in along if c.kind == "permute"]
    # The first state is zeros; what comes of the last stage is collected once.
    assert len(moved) == 2 * (TICKED + STAGES - 2) and len(along) == len(moved) + 1
    assert max(moved) <= x[0].nbytes


def test_a_batch_of_one(x) -> None:
    """Its labels are contiguous behind the pad, so that views read them at once."""
    x = x.detach().t()[:1].contiguous()
    plan = fxpar.plan(
        lambda x: _cut_pad(x).contiguous().view(-1) * 2,
        x,
        mesh="tp=4",
        in_specs=[(None, "tp")],
        mode="propagate",
    )
    assert moved(plan) == [("permute", "tp", 8)] and not plan.notes
    matches(plan, x)


# Sizes that are left open


def opened(fn: Any, n: int) -> tuple[fx.GraphModule, Any]:
    """A function traced with the rows of its input open, and shifts found; a check of
    the guards for an input."""
    table = _torch.inductor.decompositions()
    traced = make_fx(fn, decomposition_table=table, tracing_mode="symbolic")
    gm = traced(torch.zeros(n, 3))
    gm.graph.eliminate_dead_code()
    (value,) = (node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
    mode = value.fake_mode
    size_nodes.lift_sizes(gm.graph)
    find_shifts(gm.graph, Builder(gm.graph, mode))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm, lambda x: mode.shape_env.evaluate_guards_for_args([value], [x])


OPEN = {
    "cat": (1, lambda x: torch.cat([x[1:], x[:1]])),
    "cat zeros": (-2, lambda x: torch.cat([torch.zeros(2, 3), x[:-2]])),
    "of the end": (-1, lambda x: torch.cat([x[-1:], x[:-1]])),
    "pad": (1, lambda x: F.pad(x, (0, 0, 0, 1), value=7.0)[1:]),
    "twice": (3, lambda x: F.pad(F.pad(x[1:], (0, 0, 0, 1))[2:], (0, 0, 0, 2))),
}


@pytest.mark.parametrize("name", OPEN)
def test_rows_of_a_dim_that_is_left_open(name: str) -> None:
    """Found once, and right for every size that keeps the guards."""
    by, fn = OPEN[name]
    gm, keeps = opened(fn, 16)
    shifts = [x for x in gm.graph.nodes if "shift" in str(x.target)]
    assert [x.args[2] for x in shifts] == [by]
    ours = [n for n in range(2, 40) if keeps(torch.zeros(n, 3))]
    assert ours[-1] == 39 and ours[0] <= 16
    for n in ours:
        x = torch.randn(n, 3)
        torch.testing.assert_close(gm(x), fn(x), rtol=0, atol=0)


NO_SHIFTS = {
    # Rows counted from the end are the first ones at the size that is traced alone.
    "ends meet": lambda x: torch.cat([x[8:], x[-16:-8]]),
    # No constant number.
    "by the size": lambda x: torch.cat([x[x.shape[0] // 4 :], x[: x.shape[0] // 4]]),
    "every other": lambda x: torch.cat([x[::2], x[1::2]]),
}


@pytest.mark.parametrize("name", NO_SHIFTS)
def test_what_is_a_shift_at_one_size_stays(name: str) -> None:
    fn = NO_SHIFTS[name]
    gm, keeps = opened(fn, 16)
    assert not any("shift" in str(node.target) for node in gm.graph.nodes)
    for n in (10, 16, 20, 30):
        x = torch.randn(n, 3)
        if keeps(x):
            torch.testing.assert_close(gm(x), fn(x), rtol=0, atol=0)
