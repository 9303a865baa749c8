"""Small graphs with collectives, by hand, and their numbers on one rank before and
after regions were made of them."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.fusion.kernels.fuse_regions import Fused, fuse_graph
from fxpar.fusion.kernels.implementations import Facts
from fxpar.fusion.kernels.trace_region import op_name
from fxpar.passes.builder import Builder
from fxpar.passes.order_collectives import give_outputs
from fxpar.passes.sink_waits import sink_waits

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


def facts(how: str) -> Facts:
    """Of any group."""
    return Facts(2, kernels=how == "triton", shared=True)


def inputs(rank: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3 + rank)
    shapes = ((ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    return [torch.randn(shape, generator=draw) for shape in shapes]


def graph_of(fn: Callable[..., Any]) -> fx.Graph:
    """As it is when regions are made: waits right before what reads them, gathers as
    they are on CPU."""
    from tests.helpers.kernels.interpreted import traced

    graph = traced(fn, inputs())
    sink_waits(graph)
    fake_mode = _torch.fake.fake_mode_of([n.meta.get("val") for n in graph.nodes])
    give_outputs(graph, Builder(graph, fake_mode))
    return graph


def fused(fn: Callable[..., Any], how: str = "interpret") -> tuple[fx.Graph, Fused]:
    graph = graph_of(fn)
    return graph, fuse_graph(graph, facts_of=lambda group: facts(how))


def run() -> dict[str, Any]:
    """How far results after are from those before, for each graph and runner."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    out = compared(GRAPHS)
    dist.destroy_process_group()
    return out


# Those that say nothing of how many ranks there are.
OF_TWO = ("epilogue", "prologue", "backward", "views", "two", "in_other_place")


def run_two() -> dict[str, Any]:
    """The same on two ranks, whose kernels reach each other's memory: the larger error,
    and how many kernels had a collective inside."""
    graphs = {name: GRAPHS[name] for name in OF_TWO}
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            child = os.fork()
            if child:
                children.append(child)
                continue
            code = 1
            try:
                signal.alarm(200)
                torch.save(_of_two(graphs, rank, folder), f"{folder}/{rank}")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        ended = [os.waitpid(child, 0)[1] for child in children]
        assert not any(ended), f"ranks ended with {ended}"
        found = [torch.load(f"{folder}/{rank}") for rank in range(2)]
    return {
        name: {key: max(f[name][key] for f in found) for key in found[0][name]}
        for name in found[0]
    }


def _of_two(graphs: dict[str, Any], rank: int, folder: str) -> dict[str, Any]:
    """One rank."""
    import torch.distributed as dist

    from fxpar.fusion.kernels import run_fused
    from fxpar.fusion.kernels.symmetric_memory import shared_files

    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    provider = shared_files(store, rank, 2, name="two")
    run_fused.install(GROUP, "cpu", provider)
    out, keep, inside = {}, run_fused.launched, [0]

    def counted(*args: Any) -> Any:
        inside[0] += 1
        return keep(*args)

    run_fused.launched = counted
    for name, fn in graphs.items():
        before = inside[0]
        for key, case in compared({name: fn}, rank).items():
            out[key] = case | {"inside": inside[0] - before}
    dist.barrier()
    return out


def compared(graphs: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """Of a rank, each graph by each runner beside the graph before."""
    from tests.helpers.kernels.interpreted import apart

    out = {}
    for name, fn in graphs.items():
        given, before = inputs(rank), fx.GraphModule({}, graph_of(fn))
        torch.manual_seed(0)
        want = (*before(*given), *given)
        for how in ("interpret", "triton"):
            graph, found = fused(fn, how)
            torch.manual_seed(0)
            given = inputs(rank)
            got = (*fx.GraphModule({}, graph)(*given), *given)
            error = max(map(apart, got, want))
            out[f"{name} {how}"] = {"error": error, "regions": len(found.programs)}
    return out


def ops(graph: fx.Graph) -> list[str]:
    """Short names of a graph's calls."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return [op_name(n).split(".")[1 if "." in op_name(n) else 0] for n in calls]


def lines(found: Fused) -> list[list[str]]:
    return [[line.name for line in p.lines] for p in found.programs]
