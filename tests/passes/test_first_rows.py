"""Rows behind the last of a rank's own: of which values they are not computed.

Memory that nothing wrote holds NaN here, so that whatever reads it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar.features.experts import first_rows
from fxpar.graph.builder import Builder
from fxpar.passes.row_wise import RowCall

aten = torch.ops.aten
ROOM, WIDTH, EXPERTS = 12, 4, 3
ENDS = [3, 3, 7]  # one has none; five rows are of nobody


@pytest.fixture(autouse=True)
def _unwritten_memory_shows() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


Between = Callable[[torch.Tensor], torch.Tensor]


def program(between: Between) -> Callable[..., Any]:
    """Two products by expert, and the gradient of the second's weight."""

    def run(x: Any, up: Any, down: Any, ends: Any) -> Any:
        rows = between(torch.ops.fxpar.grouped_mm(x, up, ends, ROOM))
        result = torch.ops.fxpar.grouped_mm(rows, down, ends, ROOM)
        return result, torch.ops.fxpar.grouped_outer(rows, result, ends, ROOM)

    return run


def arguments(ends: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (ROOM, WIDTH), (EXPERTS, WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH)
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [*values, torch.tensor(ends, dtype=torch.int32)]


def computed(between: Between) -> tuple[fx.Graph, fx.GraphModule]:
    """A graph, and the same with first rows alone where they suffice."""
    mode = _torch.fake.new_fake_mode(symbols=True)
    fakes = [mode.from_tensor(x, static_shapes=True) for x in arguments(ENDS)]
    graph = make_fx(program(between))(*fakes).graph
    first_rows.mark_first_rows(graph)
    rewritten = fx.Graph()
    rewritten.output(rewritten.graph_copy(graph, {}))
    first_rows.compute_first_rows(rewritten, Builder(rewritten, mode))
    return graph, fx.GraphModule({}, rewritten)


def check(between: Between, *, at: list[int] = ENDS) -> tuple[fx.Graph, int]:
    """The results of both; how many ops of the new one have rows as data says."""
    graph, module = computed(between)
    args = arguments(at)
    torch.testing.assert_close(module(*args), program(between)(*args))
    values = [n.meta["val"] for n in module.graph.nodes if n.op == "call_function"]
    open_ones = [v for v in values if isinstance(v, torch.Tensor)]
    return graph, sum(_torch.symbols.is_open(v) for v in open_ones)


def marked(graph: fx.Graph, op: Any) -> bool:
    return all(map(first_rows.is_of_first_rows, graph.find_nodes(**call(op))))


def call(op: Any) -> dict[str, Any]:
    return {"op": "call_function", "target": op}


@pytest.mark.parametrize("ends", [ENDS, [0, 0, 0], [0, ROOM, ROOM], [5, 5, 5]])
def test_first_rows_suffice(ends: list[int]) -> None:
    """Of none, of one expert that has all, of some."""
    graph, rows = check(torch.sigmoid, at=ends)
    assert rows >= 3
    assert marked(graph, aten.sigmoid.default)


# What a row is made of besides itself.
MIXED: dict[str, tuple[Between, Any]] = {
    "reversed": (lambda rows: rows.flip(0), aten.flip.default),
    "softmax": (lambda rows: rows.softmax(0), aten._softmax.default),
    "summed": (lambda rows: rows.cumsum(0), aten.cumsum.default),
    "centred": (lambda rows: rows - rows.mean(0), aten.mean.dim),
    "moved": (lambda rows: rows.roll(1, 0), aten.roll.default),
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet_others_are_all_computed(name: str) -> None:
    between, op = MIXED[name]
    graph, _ = check(between)
    (mixed,) = graph.find_nodes(**call(op))
    assert not first_rows.is_of_first_rows(mixed.all_input_nodes[0])


def take_for_row_wise(patch: pytest.MonkeyPatch, op: Any) -> None:
    """Let an op pass for one that makes each row of the same row of its operand."""

    def with_op(name: str, said: Callable[[fx.Node], Any]) -> None:
        plain = getattr(first_rows, name)
        patch.setattr(
            first_rows,
            name,
            lambda node, *rest: said(node) if node.target is op else plain(node, *rest),
        )

    with_op("row_result", lambda node: 0)
    with_op("rows_read", lambda node: {node.args[0]: 0})
    with_op("row_call", lambda node: RowCall(node, (0,), (0,)))


@pytest.mark.parametrize("name", ["reversed", "softmax"])
def test_a_mark_through_rows_that_meet_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    between, op = MIXED[name]
    take_for_row_wise(monkeypatch, op)
    graph, _ = computed(between)
    assert marked(graph, op)
    with pytest.raises(AssertionError, match="not close"):
        check(between)


def test_one_row_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    count = first_rows._Rewritten._count

    def short(self: Any) -> fx.Node:
        number = count(self)
        last: Any = number.args[0]
        with self.build.before(number):
            number.args = (self.build.call(aten.sub.Tensor, last, 1),)
        return number

    monkeypatch.setattr(first_rows._Rewritten, "_count", short)
    with pytest.raises(AssertionError, match="not close"):
        check(torch.sigmoid)


def test_a_result_of_all_rows_has_them() -> None:
    """What leaves the graph unmarked is read to its end."""

    def run(x: Any, up: Any, down: Any, ends: Any) -> Any:
        rows = torch.ops.fxpar.grouped_mm(x, up, ends, ROOM).sigmoid()
        return rows, torch.ops.fxpar.grouped_mm(rows, down, ends, ROOM)

    mode = _torch.fake.new_fake_mode(symbols=True)
    fakes = [mode.from_tensor(x, static_shapes=True) for x in arguments(ENDS)]
    graph = make_fx(run)(*fakes).graph
    first_rows.mark_first_rows(graph)
    assert not marked(graph, aten.sigmoid.default)
    first_rows.compute_first_rows(graph, Builder(graph, mode))
    args = arguments(ENDS)
    torch.testing.assert_close(fx.GraphModule({}, graph)(*args), run(*args))
