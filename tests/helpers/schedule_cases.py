"""CoCoNeT's programs (T1 to T13) to be run by ranks: graphs before and after schedules.

A ``Case`` has one graph, or one for each stage of a pipeline; the same program written
for one device, whose collectives give what they get; and how results lie on the mesh.
``run_all`` is what a rank of a process group does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpar import _torch
from fxpar.fusion.apply_schedule import apply_stages
from fxpar.passes.order.delay_work import sink_waits
from fxpar.passes.simulate.emulate_collectives import gather, scatter
from fxpar.passes.simulate.lockstep import run_lockstep, run_stages
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec
from tests.helpers.toys import Toy, all_gather, all_reduce, reduce_scatter

c10d = torch.ops._c10d_functional

# Collectives along tp of 4 ranks, and on one device, where all is whole.
FOUR = SimpleNamespace(
    all_reduce=all_reduce, reduce_scatter=reduce_scatter, all_gather=all_gather
)
ALONE = SimpleNamespace(
    all_reduce=lambda x: x, reduce_scatter=lambda x: x, all_gather=lambda x: x
)


def send(x: torch.Tensor, peer: int = 1, tag: int = 0) -> torch.Tensor:
    return c10d.wait_tensor(c10d.isend(x, peer, tag, "fxpar:pp"))


def recv(*shape: int, peer: int = 0, tag: int = 0) -> torch.Tensor:
    buffer = torch.empty(shape, dtype=torch.float64)
    return c10d.wait_tensor(c10d.irecv(buffer, peer, tag, "fxpar:pp"))


@dataclass(frozen=True)
class Case:
    """``toys``: one, or one per stage along pp. ``alone``: what one device computes
    from all their whole inputs: of each toy its results. ``gives``, ``then``: how these
    lie on the mesh, before and after the schedule."""

    toys: tuple[Toy, ...]
    schedule: str
    alone: Callable[..., Any]
    gives: tuple[tuple[str, ...], ...] = ()
    then: tuple[tuple[str, ...], ...] = ()
    permit: tuple[str, ...] = ()
    tolerance: float = 1e-12

    @property
    def mesh(self) -> Mesh:
        return self.toys[0].mesh

    def stage(self, rank: int) -> int:
        return self.mesh.index(rank, ["pp"]) if len(self.toys) > 1 else 0

    def graphs(self) -> tuple[list[fx.Graph], list[fx.Graph]]:
        """Before and after the schedule."""
        before = [toy.before for toy in self.toys]
        if len(before) == 1:
            how: Any = {"permit": self.permit, "lowered": True}
            return before, [self.toys[0].after(self.schedule, **how)]
        specs = [toy.specs for toy in self.toys]
        after = apply_stages(self.schedule, before, self.mesh, "pp", inputs=specs)
        return before, after

    def inputs(self) -> list[list[list[torch.Tensor]]]:
        """Of each toy, what each rank is given."""
        return [toy.parts(seed) for seed, toy in enumerate(self.toys)]

    def feeds(self, graphs: Sequence[fx.Graph]) -> list[list[torch.Tensor]]:
        """What each rank gives its graph; state that is kept in slices, its slice."""
        given, out = self.inputs(), []
        for rank in range(self.mesh.size):
            stage = self.stage(rank)
            inputs = graphs[stage].find_nodes(op="placeholder")
            specs = self.toys[stage].specs
            mine = []
            for node, spec, x in zip(inputs, specs, given[stage][rank], strict=True):
                now = node.meta.get("fxpar_spec", spec)
                cut = now != spec and spec.is_whole
                mine.append(scatter(x, now, self.mesh)[rank] if cut else x.clone())
            out.append(mine)
        return out

    def simulated(self, graphs: Sequence[fx.Graph]) -> list[Any]:
        """What each rank gives, by simulation."""
        modules = [fx.GraphModule(torch.nn.Module(), graph) for graph in graphs]
        given = self.feeds(graphs)
        torch.manual_seed(1)
        if len(modules) == 1:
            return run_lockstep(modules[0], self.mesh, given)
        return run_stages(modules, self.mesh, "pp", given)

    def one_device(self, gives: tuple[tuple[str, ...], ...]) -> list[list[Any]]:
        """What each rank has to give, by one device."""
        whole = []
        for toy, ranks in zip(self.toys, self.inputs(), strict=True):
            for i, spec in enumerate(toy.specs):
                whole.append(gather([rank[i] for rank in ranks], spec, toy.mesh))
        torch.manual_seed(1)
        results = self.alone(*whole)
        stages = results if len(self.toys) > 1 else (results,)
        out: list[list[Any]] = [[] for _ in range(self.mesh.size)]
        for i, stage in enumerate(stages):
            each = stage if isinstance(stage, tuple) else (stage,)
            specs = gives[i] if gives else [""] * len(each)
            for x, text in zip(each, specs, strict=True):
                spec = Spec.parse(text) if text else Spec.whole(x.dim())
                for rank, part in enumerate(scatter(x, spec, self.mesh)):
                    if self.stage(rank) == i:
                        out[rank].append(part)
        return out

    def run(self, rank: int) -> tuple[Any, Any]:
        """What this rank of a process group gives, before and after."""
        return tuple(self._run(graphs, rank) for graphs in self.graphs())

    def _run(self, graphs: Sequence[fx.Graph], rank: int) -> Any:
        from fxpar.runtime.ranks.groups import group_of
        from fxpar.runtime.steps.binding import bind

        graph = graphs[self.stage(rank)]
        for axis in self.mesh.names:  # groups are made by all ranks together
            group_of(self.mesh, [axis])
        fake_mode = _torch.fake.fake_mode_of([n.meta.get("val") for n in graph.nodes])

        def group(axes: tuple[str, ...]) -> str:
            return group_of(self.mesh, axes)

        bound = bind(graph, self.mesh, rank, group, fake_mode, inductor=False)
        sink_waits(bound)
        given = self.feeds(graphs)[rank]
        torch.manual_seed(1)
        return fx.GraphModule(torch.nn.Module(), bound)(*given)


def run_all(names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Of each case what this rank gives, before and after its schedule."""
    import torch.distributed as dist

    rank = dist.get_rank()
    return {name: CASES[name]().run(rank) for name in names}


GRADIENT = "[_, _] partial(sum: tp)", (8, 4)
STATE = "[_, _]", (8, 4)
SPLIT = "split(all_reduce) -> rs, ag\n"


def _split() -> Case:
    toy = Toy(lambda x: all_reduce(x), GRADIENT)
    return Case((toy,), "split(all_reduce, dim=1)", lambda x: x)


def _sgd() -> Case:
    def program(c: Any, g: Any, w: Any) -> Any:
        return w - 0.1 * c.all_reduce(g)

    toy = Toy(lambda g, w: program(FOUR, g, w), GRADIENT, STATE)
    schedule = SPLIT + "reorder([mul, sub], ag) -> w"
    return Case((toy,), schedule, lambda g, w: program(ALONE, g, w))


def adam(c: Any, g: Any, w: Any, m: Any, v: Any) -> Any:
    g = c.all_reduce(g)
    m1 = 0.9 * m + 0.1 * g
    v1 = 0.99 * v + 0.01 * g * g
    return w - 0.1 * m1 / (v1.abs().sqrt() + 1e-8), m1, v1


_ADAM = SPLIT + (
    "reorder([mul, mul_1, add, mul_2, mul_3, mul_4, add_1, mul_5, abs_1, sqrt, add_2,"
    " div, sub], ag) -> m, v, w\n"
)
_SLICED = _ADAM + "as_slice(m_1, m)\nas_slice(v_1, v)\n"
_FUSED = _SLICED + (
    "fuse([rs, mul, mul_1, add, mul_2, mul_3, mul_4, add_1, mul_5, abs_1, sqrt, add_2,"
    " div, sub, w])"
)


def _adam(schedule: str, then: tuple[str, ...] = (), **how: Any) -> Case:
    toy = Toy(lambda g, w, m, v: adam(FOUR, g, w, m, v), GRADIENT, *[STATE] * 3)
    return Case(
        (toy,),
        schedule,
        lambda g, w, m, v: adam(ALONE, g, w, m, v),
        then=(then,) if then else (),
        **how,
    )


def _adam_in_slices(schedule: str) -> Case:
    return _adam(schedule, ("", "[tp, _]", "[tp, _]"), permit=("m_1", "v_1"))


def _mixed() -> Case:
    """The master weights are float64, what is gathered is float32."""

    def program(c: Any, g: Any, w: Any) -> Any:
        g = c.all_reduce(g.to(torch.float32)).to(torch.float64)
        return (w - 0.1 * g).to(torch.float32)

    toy = Toy(lambda g, w: program(FOUR, g, w), GRADIENT, STATE)
    schedule = SPLIT + "reorder([_to_copy_1, mul, sub, _to_copy_2], ag)"
    alone = lambda g, w: program(ALONE, g, w)  # noqa: E731
    return Case((toy,), schedule, alone, tolerance=1e-6)


def _lamb() -> Case:
    def program(c: Any, g: Any, w: Any) -> Any:
        u = c.all_reduce(g) + 0.01 * w
        ratio = (w * w).sum().sqrt() / (u * u).sum().sqrt()
        return w - 0.1 * ratio * u

    toy = Toy(lambda g, w: program(FOUR, g, w), GRADIENT, STATE)
    schedule = SPLIT + (
        "reorder([mul, add, mul_1, sum_1, sqrt, mul_2, sum_2, sqrt_1, div, mul_3,"
        " mul_4, sub], ag)"
    )
    return Case((toy,), schedule, lambda g, w: program(ALONE, g, w))


def block(c: Any, x: Any, w: Any, b: Any, r: Any) -> Any:
    y = c.all_reduce(x @ w) + b
    seed = torch.ops.fxpar.seeds(1, torch.device("cpu"))
    size = list(y.shape)
    drawn = torch.ops.fxpar.random(size, seed[0], "rand", size, [0] * len(size))
    return (drawn > 0.5) * y * 2.0 + r


BLOCK = ("[_, tp]", (16, 8)), ("[tp, _]", (8, 4)), ("[_]", (4,)), ("[_, _]", (16, 4))
_AFTER = "reorder([add, random, gt, mul, mul_1, add_1], ag) -> out\n"


def _block(schedule: str) -> Case:
    toy = Toy(lambda x, w, b, r: block(FOUR, x, w, b, r), *BLOCK)
    return Case((toy,), schedule, lambda x, w, b, r: block(ALONE, x, w, b, r))


def _norm() -> Case:
    def program(c: Any, x: Any, r: Any) -> Any:
        return F.layer_norm(c.all_reduce(x) + r, [4])

    toy = Toy(lambda x, r: program(FOUR, x, r), GRADIENT, STATE)
    schedule = SPLIT + "reorder([add, native_layer_norm], ag)"
    return Case((toy,), schedule, lambda x, r: program(ALONE, x, r))


def _sunk() -> Case:
    def program(c: Any, x: Any, w: Any, b: Any, r: Any, v: Any) -> Any:
        return block(c, x, w, b, r) @ v

    given = *BLOCK, ("[_, _]", (4, 8))
    toy = Toy(lambda x, w, b, r, v: program(FOUR, x, w, b, r, v), *given)
    schedule = SPLIT + _AFTER + "reorder([mm_1], out)"
    alone = lambda x, w, b, r, v: program(ALONE, x, w, b, r, v)  # noqa: E731
    return Case((toy,), schedule, alone)


GATHER = ("[tp, _]", (16, 8)), ("[_, tp]", (8, 8)), ("[_, tp]", (8, 4))


def _gathered(how: str) -> Case:
    def program(c: Any, x: Any, w: Any, v: Any) -> Any:
        y = c.all_gather(x)
        return F.relu(y @ w), (y @ v).T, y

    toy = Toy(lambda x, w, v: program(FOUR, x, w, v), *GATHER)
    schedule = f"overlap(all_gather_into_tensor, [relu, mm_1], {how})"
    alone = lambda x, w, v: program(ALONE, x, w, v)  # noqa: E731
    gives = (("[_, tp]", "[tp, _]", ""),)
    return Case((toy,), schedule, alone, gives, gives)


def _scattered(how: str) -> Case:
    def program(c: Any, x: Any, w: Any) -> Any:
        return c.reduce_scatter(F.silu(x) @ w) * 2

    toy = Toy(lambda x, w: program(FOUR, x, w), *BLOCK[:2])
    schedule = f"overlap(mm, reduce_scatter_tensor, {how})"
    alone = lambda x, w: program(ALONE, x, w)  # noqa: E731
    return Case((toy,), schedule, alone, (("[tp, _]",),), (("[tp, _]",),))


def border(x: Any, b: Any, r: Any) -> Any:
    return torch.tanh(x + b) + r


def behind(reduce: Callable[[Any], Any], y: Any, w: Any, v: Any) -> Any:
    return reduce(torch.relu(y @ w) @ v)


PIPE = "pp=2,tp=2"
FIRST = ("[_, _] partial(sum: tp)", (8, 4)), ("[_]", (4,)), ("[_, _]", (8, 4))
SECOND = ("[_, tp]", (4, 8)), ("[tp, _]", (8, 4))
SHARED = """
split(all_reduce, stage=0) -> rs, ag
reorder([add, tanh, add_1], ag)
share(axes=tp, dim=0) -> border
"""
CHUNKED = (
    "overlap(rs, border, chunks=2, dim=1)\noverlap(irecv, border, chunks=2, dim=1)"
)


def pipeline(schedule: str) -> Case:
    """All ranks of a stage hold the activation, which each sends to its peer."""
    first = Toy(lambda x, b, r: send(border(all_reduce(x), b, r)), *FIRST, mesh=PIPE)
    second = Toy(lambda w, v: behind(all_reduce, recv(8, 4), w, v), *SECOND, mesh=PIPE)

    def alone(x: Any, b: Any, r: Any, w: Any, v: Any) -> Any:
        return torch.empty(0, dtype=x.dtype), behind(lambda y: y, border(x, b, r), w, v)

    return Case((first, second), schedule, alone)


CASES: dict[str, Callable[[], Case]] = {
    "T1 split": _split,
    "T2 SGD": _sgd,
    "T3 Adam": lambda: _adam(_ADAM),
    "T4 Adam, state in slices": lambda: _adam_in_slices(_SLICED),
    "T5 mixed precision": _mixed,
    "T6 LAMB": _lamb,
    "T7 fused": lambda: _adam_in_slices(_FUSED),
    "T8 block, rows": lambda: _block(SPLIT + _AFTER),
    "T8 block, columns": lambda: _block(SPLIT.replace(")", ", dim=1)", 1) + _AFTER),
    "T9 product and reduction": lambda: _block(SPLIT + "overlap(mm, rs, chunks=4)"),
    "T9 within parts": lambda: _block(SPLIT + "overlap(mm, rs, chunks=2, dim=0)"),
    "T9 ring": lambda: _scattered("ring=1"),
    "T9 ring, both directions": lambda: _scattered("ring=2"),
    "T10 norm": _norm,
    "T11 next product": _sunk,
    "T11 gather and products": lambda: _gathered("chunks=2"),
    "T11 ring": lambda: _gathered("ring=1"),
    "T11 ring, both directions": lambda: _gathered("ring=2"),
    "T12 pipeline": lambda: pipeline(SHARED),
    "T13 pipeline in chunks": lambda: pipeline(SHARED + CHUNKED),
}


def simulated(toys: Sequence[Toy], graphs: Sequence[fx.Graph]) -> list[Any]:
    mesh = toys[0].mesh
    parts = [toy.parts(seed) for seed, toy in enumerate(toys)]
    given = [parts[mesh.index(r, ["pp"])][r] for r in range(mesh.size)]
    modules = [fx.GraphModule(torch.nn.Module(), graph) for graph in graphs]
    return run_stages(modules, mesh, "pp", given)
