"""From the start of a collective to its wait nobody frees, reuses or writes its memory.

Small graphs in which something else would like that memory: what Inductor writes for
each collective and each kind of operand is read line by line
(tests/helpers/wrapper.py), and so is what it writes for buckets, prefetch, chunks and
rings. Below, writes that no order of nodes may cross.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar.fusion.kernels.fuse_regions import fuse_graph
from fxpar.fusion.kernels.implementations import GroupFacts
from fxpar.passes.order.delay_work import sink_waits
from fxpar.passes.order.order_collectives import Settings, schedule
from fxpar.passes.simulate.launches import WAIT
from tests.helpers.overlaps import CHUNKS, RINGS, bound
from tests.helpers.pairs import diagonal
from tests.helpers.wrapper import code_of, fake_group, hazards, launches

c10d = torch.ops._c10d_functional

Tensor = torch.Tensor


@pytest.fixture
def group() -> Iterator[str]:
    with fake_group(4) as name:
        yield name


LAUNCHES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all_gather": lambda x, g: c10d.all_gather_into_tensor(x, 4, g),
    "all_reduce": lambda x, g: c10d.all_reduce(x, "sum", g),
    "reduce_scatter": lambda x, g: c10d.reduce_scatter_tensor(x, "sum", 4, g),
    "all_to_all": lambda x, g: c10d.all_to_all_single(x, [2] * 4, [2] * 4, g),
    "broadcast": lambda x, g: c10d.broadcast(x, 0, g),
    "isend": lambda x, g: c10d.isend(x, 1, 0, g),
}

# What is sent, made of x [8, 8] and of what was received before, y [32, 8].
OPERANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "input": lambda x, y: x,
    "computed": lambda x, y: x * 2,
    "part of what was gathered": lambda x, y: y[8:16] * 2,
    "view of what was gathered": lambda x, y: y[8:16],
    "transposed": lambda x, y: (x + 1).permute(1, 0),
    "product": lambda x, y: x @ x,
}


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.Graph:
    graph = make_fx(fn, tracing_mode="fake")(*map(torch.zeros, shapes)).graph
    graph.eliminate_dead_code()
    return graph


def busy(launch: Any, operand: Any, group: str) -> Callable[..., Any]:
    """Two collectives under way, beside them work that wants memory of their size."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 4, group))
        first = launch(operand(x, y), group)
        second = launch(operand(x + 3, y), group)
        h = (x * 5) @ w
        h = (h + 1) @ w
        one = c10d.wait_tensor(first)
        h = (h + one.sum()) @ w
        h = (h + 7) @ w
        return h, c10d.wait_tensor(second) * 2

    return fn


@pytest.mark.parametrize(
    ("kind", "operand"), diagonal([*LAUNCHES], [*OPERANDS], turns=2)
)
def test_each_collective(kind: str, operand: str, group: str, monkeypatch: Any) -> None:
    if kind == "isend" and torch.__version__ < "2.13":
        pytest.skip("torch has no functional sends: ours send a copy")
    fn = busy(LAUNCHES[kind], OPERANDS[operand], group)
    graph = traced(fn, (8, 8), (8, 8))
    schedule(graph, backward=True, disable=("bucket",))
    code = code_of(graph, monkeypatch)
    assert launches(code) >= 2
    assert hazards(code) == []


def index_put(x: Tensor, w: Tensor, group: str) -> Tensor:
    rows = torch.ops.prims.convert_element_type(w[0, :2], torch.int64)
    return torch.ops.aten.index_put(x, [rows], w[:2])


def all_reduce(x: Tensor, w: Tensor, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


def written(write: Any, kind: str, group: str, monkeypatch: Any) -> Any:
    """The code of an op that Inductor does in place where nothing reads its input
    later, while a collective reads it."""

    def fn(x: Tensor, w: Tensor) -> Any:
        product = x @ w
        launch = LAUNCHES[kind](product, group)
        y = write(product, w, group) @ w
        return y, c10d.wait_tensor(launch)

    graph = traced(fn, (8, 8), (8, 8))
    schedule(graph, backward=True, disable=("bucket",))
    return code_of(graph, monkeypatch)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("write", [index_put, all_reduce])
def test_nothing_is_written_over_an_operand(
    write: Any, kind: str, group: str, monkeypatch: Any
) -> None:
    code = written(write, kind, group, monkeypatch)
    assert launches(code) == (1 if write is index_put else 2)
    assert hazards(code) == []


@pytest.mark.parametrize("write", [index_put, all_reduce])
def test_inductor_writes_over_operands(
    write: Any, group: str, monkeypatch: Any
) -> None:
    """If this fails, torch is mended: ``_hold_operands`` and ``fxpar::hold`` can go."""
    monkeypatch.setattr(_torch.inductor, "_hold_operands", lambda gm: None)
    assert hazards(written(write, "all_gather", group, monkeypatch))


def parameters(group: str) -> Callable[..., Any]:
    """Parameters gathered over two axes, all together over the first."""

    def gather(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, group))

    def fn(x: Tensor, *ws: Tensor) -> Any:
        for w in ws:
            x = torch.relu(x @ gather(gather(w)).permute(1, 0)) * 2
        return (x,)

    return fn


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("fill", [0, 1 << 20])
def test_buckets_and_prefetch(
    fill: int, ahead: int, group: str, monkeypatch: Any
) -> None:
    graph = traced(parameters(group), (32, 32), *[(2, 32)] * 5)
    settings = Settings(bucket=fill, gathers=fill, ahead=ahead)
    schedule(graph, backward=False, settings=settings)
    code = code_of(graph, monkeypatch)
    assert launches(code) == (6 if fill else 10)
    assert hazards(code) == []


FORMS = {n: f for n, f in (CHUNKS | RINGS).items() if n != "parameter, mm"}
QUICK = ["mm, rs, 4 on 1", "mm, ar on 0", "ag, mm on 0", "mm, rs, ag: rs"]
QUICK += ["ag, mm, ring 2", "mm, rs, ring 1"]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in FORMS)]
)
def test_chunks_and_rings(name: str, group: str, monkeypatch: Any) -> None:
    form = FORMS[name]
    graph = bound(form.toy, form.toy.after(form.schedule, lowered=True), group)
    schedule(graph, backward=False)
    code = code_of(graph, monkeypatch)
    assert launches(code) > 1
    assert hazards(code) == []


def regions(group: str) -> Callable[..., Any]:
    """Two collectives that become regions, one of which writes where it reads, while a
    third is under way."""

    def fn(x: Tensor, w: Tensor, r: Tensor) -> Any:
        gathered = c10d.all_gather_into_tensor((x + 3) * 2, 4, group)
        y = torch.relu(c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", group)) * 3)
        total = c10d.wait_tensor(c10d.all_reduce(y @ w, "sum", group))
        r.copy_(r * 0.9 + total)
        return c10d.wait_tensor(gathered), (y @ w) * 2

    return fn


def test_regions_beside_collectives(group: str, monkeypatch: Any) -> None:
    graph = traced(regions(group), (8, 8), (8, 8), (8, 8))
    schedule(graph, backward=False)
    fused = fuse_graph(
        graph, facts_of=lambda _: GroupFacts(4, kernels=False, shared=True)
    )
    assert len(fused.programs) >= 2
    code = code_of(graph, monkeypatch)
    assert "fxpar.region_.default(" in code and "fxpar.region.default(" in code
    assert launches(code) >= 1
    assert hazards(code) == []


SNIPPET = """
def call(self, args):
    x, w = args
    buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
    cpp_fused_mul_0(x, buf0)
    buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 4, '0')
    {between}
    torch.ops._c10d_functional.wait_tensor.default(buf1)
    del buf0
    return (buf1,)
"""
KERNEL = (
    "cpp_fused_mul_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''"
)

# One result of an op that gives two is reduced, something else is done meanwhile.
ONE_OF_TWO = """buf2 = torch.ops.aten.max.dim(x, 0)
    buf3 = buf2[0]
    buf4 = buf2[1]
    del buf2
    torch.ops._c10d_functional.all_reduce_.default(buf4, 'sum', '0')
    {meanwhile}
    torch.ops._c10d_functional.wait_tensor.default(buf4)"""
WAIT_TWICE = "torch.ops._c10d_functional.wait_tensor.default(buf4)"

BETWEEN = {
    ONE_OF_TWO.format(meanwhile="cpp_fused_mul_0(buf3, w)"): None,
    ONE_OF_TWO.format(meanwhile="cpp_fused_mul_0(buf4, w)"): "result of .* is read",
    ONE_OF_TWO.format(meanwhile="del buf4"): "result of .* is freed",
    ONE_OF_TWO.format(meanwhile=WAIT_TWICE): None,
    "torch.ops._c10d_functional.wait_tensor.default(buf0)": "waits for nothing",
    "pass": None,
    "cpp_fused_mul_0(buf0, w)": None,
    "buf2 = reinterpret_tensor(buf0, (64,), (1,), 0)  # alias": None,
    "cpp_fused_mul_0(w, buf0)": "operand of .* is written",
    "buf2 = buf0; del buf0  # reuse": "operand of .* is reused",
    "extern_kernels.mm(x, w, out=buf0)": "operand of .* is written",
    "del buf0": "operand of .* is freed",
    "cpp_fused_mul_0(buf1, w)": "result of .* is read",
    "cpp_fused_mul_0(w, buf1)": "result of .* is written",
    "torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')": "operand of",
    "b = torch.ops.fxpar.region_.default([buf0], [w], [0], [], 'h', '0', 'nccl')": None,
    "b = torch.ops.fxpar.region_.default([w], [buf0], [0], [], 'h', '0', 'nccl')": (
        "operand of .* is written"
    ),
    "b = torch.ops.fxpar.region.default([w, buf1], [1], 'h', '0', 'nccl')": (
        "result of .* is read"
    ),
}


@pytest.mark.parametrize("line", BETWEEN)
def test_what_reads_wrappers_sees(line: str) -> None:
    found = hazards(KERNEL + SNIPPET.format(between=line))
    if (want := BETWEEN[line]) is None:
        assert found == []
    else:
        assert any(re.search(want, text) for text in found)


# Writes


def updated(group: str, read: Callable[[Tensor], Tensor]) -> fx.Graph:
    """A buffer that is gathered, then written; what was gathered is read last."""

    def fn(x: Tensor, buffer: Tensor) -> Any:
        y = c10d.wait_tensor(c10d.all_gather_into_tensor(read(buffer), 4, group))
        z = x @ x
        buffer.copy_(z)
        return z, y

    return traced(fn, (8, 8), (8, 8))


@pytest.mark.parametrize("read", [lambda b: b, lambda b: b.view(64)])
def test_no_wait_crosses_a_write_of_what_is_sent(read: Any, group: str) -> None:
    graph = updated(group, read)
    (write,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    sink_waits(graph)
    (wait,) = graph.find_nodes(op="call_function", target=WAIT)
    assert wait < write
    product = next(n for n in graph.nodes if "mm" in n.name)
    assert product < wait, "but it runs beside what stands before"


def test_no_gather_of_a_parameter_crosses_its_update(group: str) -> None:
    graph = updated(group, lambda b: b)
    schedule(graph, backward=False)
    order = [n.name for n in graph.nodes]
    gather, write, wait = (
        next(i for i, name in enumerate(order) if part in name)
        for part in ("all_gather", "copy_", "wait")
    )
    assert gather < wait < write


def test_a_wait_crosses_writes_of_other_memory(group: str) -> None:
    graph = updated(group, lambda b: b * 2)
    sink_waits(graph)
    (write,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    (wait,) = graph.find_nodes(op="call_function", target=WAIT)
    assert write < wait
