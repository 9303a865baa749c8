"""No wait is issued before its work could overlap, in what ``overlap`` makes of a
graph, in what is done to it before it runs, and in what Inductor makes of that.

Two properties of the order of nodes, by position:

- *Not early*: directly behind a wait, other waits, views and what only rearranges
  waited results left aside, stands an op that reads what was waited for. So a wait
  never stands before an op that does not need it.
- *Beside*: between the start of a chunk's collective and its wait stands a product of
  another chunk: of the next one, where products come first, whenever there is a next
  one; of the one before, where the collective comes first, whenever there is one. Where
  there are no products, the start of another chunk's collective.

A graph that waits eagerly, or multiplies all chunks first, has neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from fxpar import _torch
from fxpar.passes.order.delay_work import sink_waits
from fxpar.passes.order.order_collectives import schedule as as_run
from fxpar.passes.simulate.launches import WAIT
from tests.helpers.overlaps import (
    CHUNKS,
    PRODUCTS,
    RINGS,
    STARTS,
    Form,
    bound,
)
from tests.helpers.schedule_cases import CHUNKED, SHARED, pipeline
from tests.helpers.spawn import shared_pool
from tests.helpers.wrapper import code_of, fake_group

aten, c10d, ours = torch.ops.aten, torch.ops._c10d_functional, torch.ops.fxpar

VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.select.int,
}
MOVES = {aten.clone.default, *VIEWS}


class Order:
    """A graph's nodes with their places, and what each is computed from."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.before: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            read = set(node.all_input_nodes)
            self.before[node] = read.union(*(self.before[n] for n in read))

    def waits(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Each wait, and the collective that it ends."""
        for node in self.nodes:
            if node.target is WAIT:
                yield node, node.args[0]

    def early(self) -> list[str]:
        """Waits that stand before an op which does not need them."""
        return [wait.name for wait, of in self.waits() if not self._is_needed(wait, of)]

    def _is_needed(self, wait: fx.Node, of: fx.Node) -> bool:
        values = {wait, of}
        for node in self.nodes[self.place[wait] + 1 :]:
            moved = values.intersection(node.all_input_nodes)
            if node.target in MOVES and moved:
                values.add(node)
            elif node.target in {WAIT, *VIEWS} or self._moves_waited(node):
                continue
            else:
                return bool(moved)
        return True

    def _moves_waited(self, node: fx.Node) -> bool:
        if node.target not in MOVES:
            return False
        read: Any = node.args[0]
        return read.target in {WAIT, *STARTS} or self._moves_waited(read)

    def beside(self, start: fx.Node) -> list[fx.Node]:
        """What stands between the start of a collective and its wait, and belongs
        neither to what it waits for, nor waits for it."""
        (end,) = (wait for wait, of in self.waits() if of is start)
        between = self.nodes[self.place[start] + 1 : self.place[end]]
        return [n for n in between if start not in self.before[n]]

    def exposed(self, kind: Callable[[fx.Node], bool], work: set[Any]) -> list[str]:
        """Collectives of a kind beside which no such work of another chunk runs."""
        out = []
        for start in filter(kind, self.nodes):
            found = [n for n in self.beside(start) if n.target in work]
            if all(n in self.before[start] for n in found):
                out.append(start.name)
        return out


def check(form: Form, graph: fx.Graph) -> None:
    order = Order(graph)
    kind = lambda n: n.target in STARTS and form.kind in n.name  # noqa: E731
    kinds = [n for n in order.nodes if kind(n)]
    assert len(kinds) > 1
    assert order.early() == []
    assert len(order.exposed(kind, set(form.work))) == form.exposed


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_a_lowered_graph(name: str) -> None:
    form = CHUNKS[name]
    check(form, form.toy.after(form.schedule, lowered=True))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [*CHUNKS, *RINGS])
def test_chunks_as_they_run(name: str, backward: bool) -> None:
    form = (CHUNKS | RINGS)[name]
    graph = bound(form.toy, form.toy.after(form.schedule, lowered=True))
    as_run(graph, backward=backward)
    gather = c10d.all_gather_into_tensor.default
    assert not graph.find_nodes(op="call_function", target=gather)
    check(form, graph)


def eager(graph: fx.Graph) -> None:
    """Wait for each collective at once."""
    for wait, of in list(Order(graph).waits()):
        of.append(wait)


def products_first(graph: fx.Graph) -> None:
    """Start the first collective once all chunks are multiplied."""
    order = Order(graph)
    last = max(n for n in order.nodes if n.target in PRODUCTS)
    for node in reversed(order.nodes):
        first = [n for n in order.nodes if n.target in STARTS]
        if node < last and any(s in order.before[node] or s is node for s in first):
            last.append(node)


@pytest.mark.parametrize("name", CHUNKS)
def test_an_eager_wait_is_noticed(name: str) -> None:
    form = CHUNKS[name]
    graph = form.toy.after(form.schedule, lowered=True)
    eager(graph)
    graph.lint()
    assert Order(graph).early()
    with pytest.raises(AssertionError):
        check(form, graph)


@pytest.mark.parametrize("name", ["mm, rs, 4 on 0", "mm, ar on 1", "mm, rs, ag: rs"])
def test_products_that_come_first_are_noticed(name: str) -> None:
    form = CHUNKS[name]
    graph = form.toy.after(form.schedule, lowered=True)
    products_first(graph)
    sink_waits(graph)
    with pytest.raises(AssertionError):
        check(form, graph)


def test_messages_of_a_pipeline() -> None:
    first, second = pipeline(SHARED + CHUNKED).graphs()[1]
    sent, received = Order(first), Order(second)
    assert received.early() == []
    # Only what was sent is waited for at the end, behind all else.
    late = [n for n in sent.nodes if n.target is WAIT and n.args[0].target in STARTS]
    sends = [n for n in late if n.args[0].target is c10d.isend.default]
    assert sent.nodes[-3:-1] == sends and len(sends) == 2
    starts = set(STARTS)
    assert sent.exposed(lambda n: "reduce_scatter" in n.name, starts) == []
    assert received.exposed(lambda n: "irecv" in n.name, starts) == []
    assert len(received.exposed(lambda n: "all_gather" in n.name, starts)) == 1


_START = re.compile(r"(?:(buf\d+) = )?torch\.ops\.\w+\.(\w+)\.default\((buf\d+)?")


def exposed(code: str) -> list[str]:
    """Collectives of a wrapper between whose start and wait no product stands."""
    started: dict[str, tuple[str, int]] = {}
    also: dict[str, str] = {}
    products, out = 0, []
    for line in code.splitlines():
        found = _START.search(line)
        if re.search(r"extern_kernels\.(add)?b?mm", line):
            products += 1
        elif alias := re.search(r"(buf\d+) = (buf\d+)$", line):
            also[alias[1]] = also.get(alias[2], alias[2])
        elif found and "wait" in found[2]:
            kind, before = started.pop(also.get(found[3], found[3]))
            out += [kind] if before == products else []
        elif found and found[2] != "empty":
            started[found[1] or found[3]] = found[2], products
    assert not started
    return out


@pytest.fixture
def group() -> Iterator[str]:
    """A group of four that does not communicate."""
    with fake_group(4) as name:
        yield name


GENERATED = ["mm, rs, 4 on 1", "ag, mm on 0", "mm, rs, ring 2", "ag, mm, ring 1"]


@pytest.mark.parametrize("name", GENERATED)
def test_inductor_keeps_the_order(name: str, group: str, monkeypatch: Any) -> None:
    form = (CHUNKS | RINGS)[name]
    graph = bound(form.toy, form.toy.after(form.schedule, lowered=True), group)
    as_run(graph, backward=False)
    assert len(exposed(code_of(graph, monkeypatch))) == form.exposed


def test_inductor_would_change_the_order(group: str, monkeypatch: Any) -> None:
    form = CHUNKS["mm, rs, 4 on 1"]
    graph = bound(form.toy, form.toy.after(form.schedule, lowered=True), group)
    as_run(graph, backward=False)
    monkeypatch.setattr(_torch.inductor, "_name", lambda target: "")  # no wait is seen
    assert len(exposed(code_of(graph, monkeypatch))) > form.exposed


LINES = {
    "rs": "split(all_reduce) -> rs, ag\noverlap(mm_default_1, rs, chunks=4, dim=1)",
    "ring": "split(all_reduce) -> rs, ag\noverlap(mm_default_1, rs, ring=1)",
    "ag": "overlap(all_gather, relu_default, chunks=4)",
}


def compiled(schedule: str, rows: str | None) -> list[str]:
    """Collectives of a compiled program beside which no product runs."""
    from torch._inductor.utils import run_and_get_code

    import fxpar

    def program(x: Any, w: Any, v: Any) -> Any:
        x = torch.tanh(x) if rows is None else fxpar.constrain(x.tanh(), rows, None)
        return torch.relu(x @ w) @ v

    torch.manual_seed(0)
    given = torch.randn(64, 32), torch.randn(32, 64), torch.randn(64, 32)
    hints = {"w": (None, "tp"), "v": ("tp", None)}
    options = {"mesh": "tp=2", "schedule": schedule, "hints": hints}
    with torch.no_grad():
        run = torch.compile(program, backend="fxpar", options=options)
        got, (code,) = run_and_get_code(run, *given)
        torch.testing.assert_close(got, program(*given), rtol=1e-4, atol=1e-4)
    return exposed(code)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LINES)
def test_inductor_keeps_the_order_on_ranks(name: str) -> None:
    rows = "tp" if name == "ag" else None
    whole = {"rs": ["reduce_scatter_tensor"], "ring": [], "ag": []}
    ends = {"ag": ["all_gather_into_tensor", "all_reduce_"]}
    want = whole[name] + ends.get(name, ["all_gather_into_tensor"])
    for out in shared_pool(4).run(compiled, LINES[name], rows, ranks=2, timeout=400.0):
        assert out == want
