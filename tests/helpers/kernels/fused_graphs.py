"""Small graphs with collectives, by hand, and their numbers on one rank before and
after regions were made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx

from fxpar.fusion.kernels import region_op
from fxpar.fusion.kernels.fuse_regions import Fused, fuse_graph
from fxpar.fusion.kernels.implementations import GroupFacts
from fxpar.fusion.kernels.region_program import op_name
from fxpar.passes.order.delay_work import sink_waits
from tests.helpers.forked import run_forked
from tests.helpers.kernels.compare_kernels import apart, traced
from tests.helpers.kernels.shared_memory import install, shared_files

c10d = torch.ops._c10d_functional
GROUP = "0"
ROWS, WIDTH = 6, 24


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", GROUP))


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 1, GROUP))


def all_gather(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 1, GROUP))


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, [WIDTH])


def epilogue(x: Any, w: Any, r: Any) -> Any:
    """A norm between two products: ends at the second one."""
    y = all_reduce(x @ w) + r
    return norm(y) @ w, y


def prologue(x: Any, w: Any, r: Any) -> Any:
    """What is computed for the collective alone."""
    return (all_reduce(torch.tanh(x @ w) * r) @ w,)


def backward(x: Any, w: Any, r: Any) -> Any:
    """As of an RMS norm: sums along rows and columns, both read by others."""
    g = all_reduce(x @ w)
    rate = torch.rsqrt((r * r).mean(-1, keepdim=True) + 1e-6)
    scaled = g * rate
    inner = (g * r).sum(-1, keepdim=True) * rate.pow(3) / WIDTH
    weight = (g * r * rate).sum(0)
    return (scaled - r * inner) @ w, weight


def views(x: Any, w: Any, r: Any) -> Any:
    """Views at the border, and one read inside and outside."""
    y = all_reduce((x @ w).view(2, 3, WIDTH)) * 2
    flat = y.view(ROWS, WIDTH)
    z = flat + r
    return flat @ w, z.view(3, 2, WIDTH)


def update(x: Any, w: Any, r: Any) -> Any:
    """An optimizer's step on slices."""
    g = reduce_scatter(x @ w)
    m = r * 0.9 + g
    p = x - 0.1 * m
    return all_gather(p) @ w, m


def gathered(x: Any, w: Any, r: Any) -> Any:
    """A gather on CPU, and what follows it."""
    y = all_gather(r * 2)
    return (norm(y + x) @ w,)


def dropout(x: Any, w: Any, r: Any) -> Any:
    """A mask by global index, of a seed among seeds."""
    seeds = torch.ops.fxpar.seeds(4, torch.device("cpu"))
    seed = torch.ops.prims.inductor_lookup_seed(seeds, 2)
    size, whole = [ROWS, WIDTH], [2 * ROWS, WIDTH]
    drawn = torch.ops.fxpar.random(size, seed, "rand", whole, [ROWS, 0])
    y = torch.where(drawn > 0.1, all_reduce(x @ w) / 0.9, 0.0) + r
    return y @ w, y


def two(x: Any, w: Any, r: Any) -> Any:
    """Two alike: one program."""
    y = norm(all_reduce(x @ w) + r)
    return (norm(all_reduce(y @ w) + r) @ w,)


def in_place(x: Any, w: Any, r: Any) -> Any:
    """An optimizer's step that writes where it reads; rows' norms are read first."""
    g = reduce_scatter(x @ w)
    m = r * 0.9 + g
    p = x - 0.1 * m / (x * x).sum(-1, keepdim=True)
    r.copy_(m)
    x.copy_(p)
    return (w * 2,)


def in_other_place(x: Any, w: Any, r: Any) -> Any:
    """What is written over is read in another order: not where it is written."""
    y = all_reduce(x @ w) + r.view(WIDTH, ROWS).t()
    r.copy_(y)
    return (w * 2,)


def swapped(x: Any, w: Any, r: Any) -> Any:
    """Each is written where the other one was."""
    y = all_reduce(x @ w) * 0
    old = x + y, r + y
    x.copy_(old[1])
    r.copy_(old[0])
    return (w * 2,)


def read_elsewhere(x: Any, w: Any, r: Any) -> Any:
    """The old value is also read by what does not come before."""
    m = all_reduce(torch.tanh(x @ w)) + r
    old = (r @ w).sum()
    r.copy_(m)
    return (old,)


def read_by_a_view(x: Any, w: Any, r: Any) -> Any:
    """So it is, by a view of it."""
    m = all_reduce(torch.tanh(x @ w)) + r
    old = (r.view(WIDTH, ROWS) * 3).sum()
    r.copy_(m)
    return (old,)


IN_PLACE = {f.__name__: f for f in (in_place, in_other_place, swapped)}
ELSEWHERE = {f.__name__: f for f in (read_elsewhere, read_by_a_view)}

GRAPHS: dict[str, Callable[..., Any]] = (
    IN_PLACE
    | ELSEWHERE
    | {
        f.__name__: f
        for f in (
            epilogue,
            prologue,
            backward,
            views,
            update,
            gathered,
            dropout,
            two,
        )
    }
)


def facts(how: str) -> GroupFacts:
    """Of any group."""
    return GroupFacts(2, kernels=how == "triton", shared=True)


def inputs(rank: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3 + rank)
    shapes = ((ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    return [torch.randn(shape, generator=draw) for shape in shapes]


def graph_of(fn: Callable[..., Any]) -> fx.Graph:
    """As it is when regions are made: waits right before what reads them."""
    graph = traced(fn, inputs())
    sink_waits(graph)
    return graph


def fused(fn: Callable[..., Any], how: str = "interpret") -> tuple[fx.Graph, Fused]:
    graph = graph_of(fn)
    return graph, fuse_graph(graph, facts_of=lambda group: facts(how))


@dataclass(frozen=True)
class Outcome:
    """A graph after regions were made of it, beside the graph before, on one rank."""

    error: float  # as ``compare_kernels.apart``
    regions: int
    inside: int = 0  # kernels with a collective inside that were launched


# Those that say nothing of how many ranks there are.
OF_TWO = ("epilogue", "prologue", "backward", "views", "two", "in_other_place")


def outcome(name: str, how: str, rank: int = 0) -> Outcome:
    fn, values = GRAPHS[name], inputs(rank)
    torch.manual_seed(0)
    want = (*fx.GraphModule({}, graph_of(fn))(*values), *values)
    graph, regions = fused(fn, how)
    torch.manual_seed(0)
    values = inputs(rank)
    got = (*fx.GraphModule({}, graph)(*values), *values)
    return Outcome(max(map(apart, got, want)), len(regions.programs))


def on_one_rank(name: str, how: str) -> Outcome:
    """In a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return outcome(name, how)
    finally:
        dist.destroy_process_group()


def on_two_ranks(names: Sequence[str]) -> list[dict[tuple[str, str], Outcome]]:
    """On two ranks, whose kernels reach each other's memory."""
    return run_forked(_of_two, 2, names, seconds=200)


def _of_two(
    folder: Path, rank: int, ranks: int, names: Sequence[str]
) -> dict[tuple[str, str], Outcome]:
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    provider = shared_files(store, rank, ranks, name="two")
    install(GROUP, "cpu", provider)
    out = {}
    with mock.patch.object(region_op, "launched", wraps=region_op.launched) as launched:
        for name, how in itertools.product(names, ("interpret", "triton")):
            launched.reset_mock()
            graph = outcome(name, how, rank)
            out[name, how] = replace(graph, inside=launched.call_count)
    dist.barrier()
    return out


def ops(graph: fx.Graph) -> list[str]:
    """Short names of a graph's calls."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return [op_name(n).split(".")[1 if "." in op_name(n) else 0] for n in calls]


def lines(found: Fused) -> list[list[str]]:
    return [[line.name for line in p.lines] for p in found.programs]
