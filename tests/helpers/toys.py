"""Small local graphs written by hand, and their numbers on all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.explain.dump import node_text
from fxpar.fusion.apply_schedule import apply
from fxpar.passes.simulate import lockstep
from fxpar.passes.simulate.lockstep import run_lockstep
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import is_drawn_from_generator
from fxpar.sharding.spec import Spec

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Given = tuple[str, tuple[int, ...]]  # spec, global shape


def all_reduce(x: torch.Tensor, axes: str = "tp", op: str = "sum") -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, f"fxpar:{axes}"))


def reduce_scatter(x: torch.Tensor, k: int = 4, axes: str = "tp") -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", k, f"fxpar:{axes}"))


def all_gather(x: torch.Tensor, k: int = 4, axes: str = "tp") -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, k, f"fxpar:{axes}"))


@contextmanager
def own_generators(ranks: int) -> Iterator[None]:
    """In ``run_lockstep``, each rank draws from a generator of its own; all begin in
    the state that there is now."""
    kept, states = lockstep._compute, [torch.get_rng_state()] * ranks

    def compute(node: fx.Node, env: Any, size: int) -> list[Any]:
        if not is_drawn_from_generator(node):
            return kept(node, env, size)
        out = []
        for rank in range(size):
            torch.set_rng_state(states[rank])
            out.append(lockstep._call(node, env, rank))
            states[rank] = torch.get_rng_state()
        return out

    with mock.patch.object(lockstep, "_compute", compute):
        yield


class Toy:
    """``fn`` as one rank runs it. ``given``: (spec, global shape) of its inputs."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *given: Given,
        mesh: str = "tp=4",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.mesh, self.dtype = Mesh.parse(mesh), dtype
        self.specs = [Spec.parse(spec) for spec, _ in given]
        self.shapes = [shape for _, shape in given]
        local = [
            torch.zeros(s.local_shape(self.mesh, n), dtype=dtype)
            for s, n in zip(self.specs, self.shapes, strict=True)
        ]
        self.before = make_fx(fn, tracing_mode="fake")(*local).graph

    def after(self, schedule: str, **how: Any) -> fx.Graph:
        return apply(schedule, self.before, self.mesh, inputs=self.specs, **how)

    def text(self, schedule: str, **how: Any) -> str:
        """The graph after the schedule, communication as steps."""
        graph = self.after(schedule, lowered=False, **how)
        lines = [
            node_text(n).partition("  #")[0]
            for n in graph.nodes
            if n.op != "placeholder"
        ]
        return "\n".join(lines)

    def parts(self, seed: int = 0) -> list[list[torch.Tensor]]:
        """Inputs of each rank: slices, and random summands."""
        torch.manual_seed(seed)
        ranks: list[list[torch.Tensor]] = [[] for _ in range(self.mesh.size)]
        for spec, shape in zip(self.specs, self.shapes, strict=True):
            made: dict[Any, torch.Tensor] = {}
            for rank, out in enumerate(ranks):
                where = tuple(
                    self.mesh.index(rank, axes)
                    for axes in (*spec.dims, *((a,) for a in spec.partial_axes))
                )
                if where not in made:
                    local = spec.local_shape(self.mesh, shape)
                    made[where] = torch.randn(local, dtype=self.dtype)
                out.append(made[where])
        return ranks

    def run(self, graph: fx.Graph, parts: Sequence[Sequence[Any]]) -> list[Any]:
        module = fx.GraphModule(torch.nn.Module(), graph)
        torch.manual_seed(1)
        copies = [[x.clone() for x in rank] for rank in parts]
        with own_generators(self.mesh.size):
            return run_lockstep(module, self.mesh, copies)

    def check(self, schedule: str, **how: Any) -> fx.Graph:
        """The graph after the schedule, which gives every rank the same numbers."""
        after, parts = self.after(schedule, lowered=True, **how), self.parts()
        want, got = self.run(self.before, parts), self.run(after, parts)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        return after


def form_of(line: str) -> str:
    """The verb of a line; of an overlap, which."""
    verb, _, rest = line.partition("(")
    forms = ("chunks", "ring", "fused") if verb == "overlap" else ()
    return next((form for form in forms if f"{form}=" in rest), verb)


def dropped(x: Any) -> Any:
    return aten.native_dropout(x, 0.5, True)[0]
