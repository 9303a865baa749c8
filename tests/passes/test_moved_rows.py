"""Rows that an op moves along a split dim: ranks exchange those that change ranks, and
gather none."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.features.uneven import share_exchanges
from fxpar.graph.builder import Builder
from fxpar.passes import moved_rows
from fxpar.passes.simulate.check_user_rules import OneOp
from fxpar.sharding import row_moves
from fxpar.sharding.factors import RowMoves, RowPiece
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.row_moves import Exchange
from fxpar.sharding.strategy import Strategy, fits
from tests.helpers.spawn import ranks_of

aten = torch.ops.aten

# Of n rows: op, arguments behind the operands; several operands where it joins them.
OPS: dict[str, tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
    "slice": (aten.slice.Tensor, lambda n: (0, 1, n)),
    "every second": (aten.slice.Tensor, lambda n: (0, 0, n, 2)),
    "scattered": (aten.slice_scatter.default, lambda n: (0, 1, n)),
    "every other": (aten.slice_scatter.default, lambda n: (0, 1, n, 2)),
    "joined": (aten.cat.default, lambda n: (0,)),
    "padded": (aten.constant_pad_nd.default, lambda n: ([0, 0, 2, 1], 7.0)),
    "cropped": (aten.constant_pad_nd.default, lambda n: ([0, 0, -1, 2], 7.0)),
    "repeated": (aten.repeat.default, lambda n: ([3, 1],)),
    "often": (aten.repeat.default, lambda n: ([23, 1],)),
    "split": (aten.split_with_sizes.default, lambda n: ([1, n - 1], 0)),
    "flipped": (aten.flip.default, lambda n: ([0],)),
}
MESHES = ("a=2", "a=3", "a=4", "a=2,b=2")
SIZES = (3, 5, 7, 8)


def called(name: str, n: int) -> OneOp:
    """An op on ``n`` rows of two columns."""
    op, more = OPS[name]
    x = torch.randn(n, 2, dtype=torch.float64)
    args: tuple[Any, ...] = (x, *more(n))
    if op is aten.cat.default:
        args = ([x, x[:2] + 1, x[:1]], 0)
    elif op is aten.slice_scatter.default:
        args = (x, x[slice(*more(n)[1:])] + 1, *more(n))
    return OneOp(op, args, {})


def tried(name: str, n: int, mesh: Mesh) -> int:
    """In how many ways of splitting its rows an op was right."""
    one = called(name, n)
    assert one.rule is not None
    assert one.rule.moves
    wants, draw, tries = one.expected(), torch.Generator().manual_seed(0), 0
    for axes in itertools.permutations(mesh.names):
        strategy = Strategy((("d0", axes),))
        if fits(one.rule, strategy.axes_of, mesh):
            one.check(strategy, mesh, wants, draw)
            tries += 1
    return tries


@pytest.mark.parametrize("name", OPS)
def test_each_rank_gets_its_rows(name: str) -> None:
    """Empty shards, and one row over all ranks, among them."""
    for n, mesh in itertools.product(SIZES, MESHES):
        assert tried(name, n, Mesh.parse(mesh))


@pytest.mark.parametrize("name", ["joined", "flipped", "every other", "split"])
def test_shares_that_differ(name: str) -> None:
    mesh = Mesh((("a", 3),), shares=((2.0, 1.0, 3.0),))
    assert all(tried(name, n, mesh) for n in SIZES)


def exchange_of_slice(n: int, first: int, rows: int, step: int = 1) -> Exchange:
    moves = RowMoves(0, (n,), (rows,), (RowPiece(0, 0, rows, first, step),))
    return Exchange(moves, ("a",), (True,), (True,))


def test_what_is_sent_is_counted() -> None:
    mesh = Mesh.parse("a=4")
    shifted = exchange_of_slice(16, 2, 12)  # 3 rows each, from 2, 5, 8, 11 on
    assert row_moves.crossing(shifted, mesh) == (1, 1)
    assert row_moves.message(shifted, mesh, 8) == ("permute", 8.0)
    alternate = exchange_of_slice(16, 0, 8, 2)
    assert row_moves.crossing(alternate, mesh) == (0, 0)
    assert row_moves.seconds(alternate, mesh, 8) == 0.0
    assert moved_rows.is_local(alternate, mesh)
    turned = exchange_of_slice(16, 15, 16, -1)
    assert row_moves.message(turned, mesh, 8) == ("permute", 32.0)
    assert Exchange.parse(turned.text) == turned


ROWS, COLUMNS = 16, 4
NBYTES = ROWS // 4 * COLUMNS * 8

# Ways to write a move, and what they send at most, in shards.
PROGRAMS: dict[str, tuple[Callable[..., Any], float]] = {
    "slice": (lambda x: x[2:14] * 2, 0.5),
    "step": (lambda x: x[::2] * 2, 0.0),
    "cat": (lambda x: torch.cat([x, x * 2]), 4),
    "class token": (lambda x: torch.cat([x.new_zeros(1, COLUMNS), x * 2]), 1.0),
    "pad": (lambda x: F.pad(x, (0, 0, 3, 2)) * 2, 1.0),
    "split": (lambda x: tuple(y * 2 for y in x.split([5, 11])), 5 / 3),
    "flip": (lambda x: x.flip(0) * 2, 1.0),
    "difference": (lambda x: x.diff(dim=0) * 2, 0.25),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_gathered(name: str) -> None:
    """Forward and backward send the rows that cross."""
    fn, most = PROGRAMS[name]
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float64, requires_grad=True)
    plan = fxpar.plan(
        fn, x, mesh="tp=4", in_specs=[("tp", None)], mode="propagate", grad=True
    )
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all"}
    assert sum(c.bytes for c in plan.collectives) <= 2 * most * NBYTES
    assert not [note for note in plan.notes if "reads dim" in note]


@pytest.mark.parametrize("times", [2, 4, 6, 400])
def test_no_row_is_sent_twice(times: int) -> None:
    """However often rows are repeated, a rank gets each once, and says so in as many
    words."""
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    lies = [("tp", None)]
    plan = fxpar.plan(
        lambda x: x.repeat(times, 1),
        x,
        mesh="tp=4",
        in_specs=lies,
        out_specs=lies,
        mode="propagate",
    )
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    moves = [n for n in plan.result.local.nodes if "move_rows" in str(n.target)]
    assert [c.kind for c in plan.collectives] == ["all_to_all"]
    # The bytes of an all-to-all that takes as long.
    assert plan.collectives[0].bytes <= 4 * NBYTES
    assert len(str(moves)) + len(plan.result.local.nodes) < 100


def repeated(times: Sequence[int], rows: int, mesh: str = "tp=4") -> Any:
    """The plan of rows repeated where they lie split, which is right."""
    x = torch.randn(rows, COLUMNS, dtype=torch.float64, requires_grad=True)
    new = len(times) - 2
    plan = fxpar.plan(
        lambda x: x.repeat(*times).sin(),
        x,
        mesh=mesh,
        in_specs=[("tp", None)],
        out_specs=[(*[None] * new, "tp", None)],
        mode="propagate",
        grad=True,
    )
    got, want = plan.outcome(x), plan.reference_outcome(x)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    return plan


@pytest.mark.parametrize("times", [(3, 1), (2, 3, 1), (2, 3, 2)])
@pytest.mark.parametrize("rows", [16, 13])
def test_a_repeat_and_its_gradient_gather_nothing(
    times: Sequence[int], rows: int
) -> None:
    """The gradient is summed on each rank, and then once over all."""
    plan = repeated(times, rows)
    assert "all_gather" not in {c.kind for c in plan.collectives}
    (sums,) = (c for c in plan.collectives if c.kind == "reduce_scatter")
    assert sums.bytes <= -(-rows // 4) * 4 * COLUMNS * 8
    assert not [note for note in plan.notes if "reads dim" in note]


@pytest.mark.parametrize("rows", [4, 5, 7, 9, 12])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_repeats_of_any_size(rows: int, mesh: str) -> None:
    for times in ((2, 1), (3, 1), (4, 1), (7, 1), (2, 3, 1)):
        repeated(times, rows, mesh)


def test_turns_that_begin_elsewhere_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard that begins within a turn is not the beginning of one."""
    monkeypatch.setattr(Builder, "own_start", lambda self, rows, axes, base=0: base)
    with pytest.raises(AssertionError):
        repeated((3, 1), 16)


def interleaved(rows: int, times: int, mesh: str = "tp=4") -> Any:
    """The plan of rows repeated one by one, split as they lie, which is right."""
    x = torch.randn(rows, COLUMNS, dtype=torch.float64, requires_grad=True)
    lies = [("tp", None)]
    plan = fxpar.plan(
        lambda x: x.repeat_interleave(times, 0).sin(),
        x,
        mesh=mesh,
        in_specs=lies,
        out_specs=lies,
        mode="propagate",
        grad=True,
    )
    got, want = plan.outcome(x), plan.reference_outcome(x)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    return plan


@pytest.mark.parametrize("rows", [33, 37, 64])
@pytest.mark.parametrize("times", [2, 5])
def test_rows_repeated_one_by_one_go_to_neighbours(rows: int, times: int) -> None:
    """A few rows at the ends of shards that are not alike; of others none."""
    plan = interleaved(rows, times)
    names = [str(node.target) for node in plan.result.normalized.nodes]
    assert ("aten.index.Tensor" in names) == (rows != 64)
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all"}
    assert sum(c.bytes for c in plan.collectives) <= (1 + times) * 4 * COLUMNS * 8
    assert bool(plan.collectives) == (rows != 64)
    # Few rows may be heads, which are whole where no axis divides them.
    few = interleaved(9, times).result.normalized.nodes
    assert "aten.index.Tensor" not in [str(node.target) for node in few]


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=2,dp=2"])
def test_rows_repeated_one_by_one_on_other_meshes(mesh: str) -> None:
    for rows, times in ((35, 2), (41, 3), (47, 4)):
        interleaved(rows, times, mesh)


def test_copies_of_one_row_are_split() -> None:
    x = torch.randn(1, COLUMNS, dtype=torch.float64)
    lies = [("tp", None, None)]
    plan = fxpar.plan(
        lambda x: x.repeat(40, 8, 1), x, mesh="tp=4", out_specs=lies, mode="propagate"
    )
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    assert not plan.collectives
    (repeat,) = (n for n in plan.result.local.nodes if "repeat" in str(n.target))
    assert repeat.args[1] == [10, 8, 1]


Stencil = Callable[[torch.Tensor], torch.Tensor]


def all_of_three(x: torch.Tensor) -> torch.Tensor:
    return x[2:] & x[1:-1] & x[:-2]


# Slices of one tensor, and rows that they send at most: by themselves, and at once.
STENCILS: dict[str, tuple[Stencil, int, int]] = {
    "three points": (lambda x: x[2:] - 2 * x[1:-1] + x[:-2], 6, 3),
    "five points": (
        lambda x: x[4:] - x[3:-1] - 2 * x[2:-2] - x[1:-3] + x[:-4],
        11,
        5,
    ),
    "truths": (lambda x: all_of_three(x > 0), 6, 3),
}


def sent_rows(stencil: Stencil, rows: int, mesh: str = "tp=4") -> float:
    """Rows that a rank sends at most, of two columns."""
    x = torch.randn(rows, 2, dtype=torch.float64)
    spec = [("tp", None)]
    plan = fxpar.plan(stencil, x, mesh=mesh, in_specs=spec, mode="propagate")
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    itemsize = plan.reference(x).dtype.itemsize
    share = {"permute": 1.0, "all_to_all": 1 - 1 / Mesh.parse(mesh).size}
    return sum(c.bytes * share[c.kind] for c in plan.collectives) / 2 / itemsize


@pytest.mark.parametrize("name", STENCILS)
def test_slices_of_one_tensor_share_an_exchange(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stencil, apart, once = STENCILS[name]
    rows = 20 if name == "five points" else 18
    assert round(sent_rows(stencil, rows)) == once
    monkeypatch.setenv("FXPAR_DISABLE", "share_exchanges")
    assert round(sent_rows(stencil, rows)) >= apart


@pytest.mark.parametrize("rows", [9, 13, 16, 21])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_stencils_of_any_size(mesh: str, rows: int) -> None:
    for stencil, *_ in STENCILS.values():
        sent_rows(stencil, rows, mesh)


def test_slices_that_send_less_by_themselves_stay() -> None:
    """From far apart; or one of them sends nothing."""
    assert round(sent_rows(lambda x: x[:16] + x[16:], 32)) <= 8 + 8
    assert sent_rows(lambda x: x[1:] - x[:-1], 16) == 1


def test_a_window_cut_at_the_wrong_row_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = share_exchanges.copied_rows

    def first(build: Any, x: Any, dim: int, start: int, end: Any) -> Any:
        return real(build, x, dim, 0, build.compute(operator.sub, end, start))

    monkeypatch.setattr(share_exchanges, "copied_rows", first)
    with pytest.raises(AssertionError):
        sent_rows(STENCILS["three points"][0], 18)


def gradient_rows(stencil: Stencil, rows: int, mesh: str = "tp=4") -> float:
    """Rows that a rank sends at most in forward and backward, of two columns."""
    x = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
    spec = [("tp", None)]
    plan = fxpar.plan(
        lambda x: stencil(x).sin(),
        x,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        mode="propagate",
        grad=True,
    )
    got, want = plan.outcome(x), plan.reference_outcome(x)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    share = {"all_to_all": 1 - 1 / Mesh.parse(mesh).size}
    return sum(c.bytes * share.get(c.kind, 1.0) for c in plan.collectives) / 16


FLOATING = ["three points", "five points"]


@pytest.mark.parametrize("name", FLOATING)
def test_gradients_of_slices_share_an_exchange(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stencil, apart, once = STENCILS[name]
    rows = 20 if name == "five points" else 18
    assert round(gradient_rows(stencil, rows)) == 2 * once
    monkeypatch.setenv("FXPAR_DISABLE", "share_exchanges")
    assert round(gradient_rows(stencil, rows)) >= 2 * apart


def weighed(x: torch.Tensor) -> torch.Tensor:
    """Of slices beside one another, twice of one, and of rows that are read whole."""
    slices = x[2:], x[1:-1].exp(), x[1:-1], x[:-2] * 3
    return sum(y.tanh() for y in slices) + x[:1]


@pytest.mark.parametrize("rows", [9, 13, 16, 21])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_gradients_of_any_size(mesh: str, rows: int) -> None:
    """Of nine rows over four ranks the last has none."""
    for stencil in (*(STENCILS[name][0] for name in FLOATING), weighed):
        gradient_rows(stencil, rows, mesh)


def test_gradients_put_at_the_wrong_row_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = row_moves.firsts_of
    monkeypatch.setattr(
        row_moves, "firsts_of", lambda exchanges: sorted(real(exchanges))
    )
    with pytest.raises(AssertionError):
        gradient_rows(weighed, 18)


def test_a_search_finds_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is priced: what lies split and is wanted so is not gathered."""
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    x, lies = torch.randn(1 << 16, 64), [("tp", None)]
    plan = fxpar.plan(
        lambda x: torch.cat([x.sin(), x.cos()])[100:-100],
        x,
        mesh="tp=4",
        in_specs=lies,
        out_specs=lies,
        mode="search",
    )
    assert {c.kind for c in plan.collectives} <= {"permute", "all_to_all"}
    assert dict(plan.predicted.sent)["tp"] <= 3 * x.nbytes // 4


# What is broken, and an op that must notice.


def one_row_short(patch: pytest.MonkeyPatch) -> None:
    meeting = row_moves._meeting

    def wrong(*args: int) -> range:
        rows = meeting(*args)
        return rows[:-1] if len(rows) > 1 else rows

    patch.setattr(row_moves, "_meeting", wrong)


def not_turned(patch: pytest.MonkeyPatch) -> None:
    taken = moved_rows._taken

    def wrong(call: Any, x: Any, dim: int, run: row_moves.Run) -> Any:
        first = min(run.first, run.first + run.step * (run.count - 1))
        turned = row_moves.Run(first, abs(run.step), run.count, run.at, run.stride)
        return taken(call, x, dim, turned)

    patch.setattr(moved_rows, "_taken", wrong)


def of_the_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    runs = row_moves.runs

    def wrong(exchange: Exchange, mesh: Mesh) -> row_moves.Runs:
        return runs(exchange, mesh)[::-1]

    patch.setattr(moved_rows, "runs", wrong)


def only_what_begins_a_turn(patch: pytest.MonkeyPatch) -> None:
    """A rank gets nothing of a turn that began before its rows."""
    read = row_moves._read

    def wrong(moves: RowMoves, to: Sequence[tuple[int, int]]) -> Sequence[RowPiece]:
        return [piece for piece in read(moves, to) if piece.at == to[0][0]]

    patch.setattr(row_moves, "_read", wrong)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (only_what_begins_a_turn, "repeated"),
        (one_row_short, "slice"),
        (not_turned, "flipped"),
        (of_the_wrong_rank, "joined"),
        (of_the_wrong_rank, "padded"),
    ],
)
def test_what_is_wrong_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh.parse("a=2")
    assert tried(name, 8, mesh)
    row_moves.runs.cache_clear()
    broken(monkeypatch)
    try:
        with pytest.raises((AssertionError, RuntimeError)):
            tried(name, 8, mesh)
    finally:
        row_moves.runs.cache_clear()
        row_moves.crossing.cache_clear()


def moved(x: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of uneven shards, along both dims, of truths too."""
    joined = torch.cat([x[1:], x.new_ones(1, 6), x * 2])
    padded = F.pad(joined, (2, 1, 1, 0), value=3.0).flip(0)
    return padded.sin() * padded, F.pad(flags.logical_not(), (0, 0, 1, 1))


def run_moved(codegen: str, hints: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    flags = torch.rand(7, 6) > 0.5
    options = {
        "mesh": "tp=2",
        "plan": "propagate",
        "codegen": codegen,
        "hints": hints,
        "schedule": "none",
    }
    got = torch.compile(moved, backend="fxpar", options=options)(x, flags)
    want = moved(x, flags)
    torch.testing.assert_close(got, want)
    (gradient,) = torch.autograd.grad(got[0].sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(want[0].sum(), x)[0])


HINTS: Sequence[Any] = (
    {"x": ("tp", None), "flags": ("tp", None)},
    {"x": (None, "tp"), "flags": (None, "tp")},
)


@pytest.mark.parametrize("hints", HINTS)
def test_two_ranks(hints: Any) -> None:
    ranks_of("tp=2").run(run_moved, "eager", hints)


@pytest.mark.slow
def test_generated_kernels() -> None:
    ranks_of("tp=2").run(run_moved, "inductor", HINTS[0], timeout=300.0)


def run_repeated_weight() -> None:
    """A weight that is repeated for each sample, as in an instance norm, takes no row
    of the batch: what is made of both stays this rank's part."""
    rank = torch.distributed.get_rank()
    parts = [torch.arange(12.0).reshape(4, 3) + 100 * i for i in range(2)]
    options = {"mesh": "dp=2", "inputs": "local", "codegen": "eager"}
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x.flatten() * weight.repeat(len(x))).view_as(x)

    got = torch.compile(scaled, backend="fxpar", options=options)(parts[rank])
    torch.testing.assert_close(got, parts[rank] * weight)


def test_weights_repeated_for_parts_that_ranks_feed() -> None:
    ranks_of("dp=2").run(run_repeated_weight)
