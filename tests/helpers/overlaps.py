"""Overlaps in chunks and in rings: toys, schedules, and the graph a rank runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpar import _torch
from fxpar.runtime.steps.binding import bind
from tests.helpers.toys import Toy, all_gather, all_reduce, reduce_scatter

aten, c10d, ours = torch.ops.aten, torch.ops._c10d_functional, torch.ops.fxpar

STARTS = {
    c10d.all_reduce.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_gather_into_tensor.default,
    ours.all_gather_into_tensor.default,
    c10d.all_to_all_single.default,
    c10d.irecv.default,
    c10d.isend.default,
}

PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def scattered(x: Any, w: Any) -> Any:
    return (reduce_scatter(F.relu(x) @ w) * 2,)


def reduced(x: Any, w: Any) -> Any:
    return (all_reduce(x @ w) * 2,)


def gathered(x: Any, w: Any, v: Any) -> Any:
    y = all_gather(x * 2)
    return F.relu(y @ w), (y @ v) * 2


def parameter(x: Any, w: Any) -> Any:
    """What is gathered is an input, as a parameter at rest is."""
    return w @ all_gather(x)


def block(x: Any, w: Any, b: Any, v: Any) -> Any:
    return torch.tanh(all_reduce(x @ w) + b) * 3, v


ROWS = ("[_, tp]", (16, 8)), ("[tp, _]", (8, 8))

SIDE = ("[tp, _]", (16, 8)), ("[_, tp]", (8, 8)), ("[_, tp]", (8, 16))

NORM = "split(all_reduce) -> rs, ag\nreorder([add, tanh, mul], ag) -> out\n"


@dataclass(frozen=True)
class Form:
    """``kind`` of collectives, of which so many are ``exposed``: the first one of those
    that come before products, the last of those that come after. ``work``: what must
    run beside."""

    fn: Callable[..., Any]
    given: tuple[Any, ...]
    schedule: str
    kind: str
    exposed: int = 1
    work: frozenset[Any] = frozenset(PRODUCTS)

    @property
    def toy(self) -> Toy:
        return Toy(self.fn, *self.given)


def _forms() -> Iterator[tuple[str, Form]]:
    chunks = "overlap(mm, {}, chunks={}, dim={})"
    for dim in (0, 1):
        for n in (2, 4):
            line = chunks.format("reduce_scatter_tensor", n, dim)
            form = Form(scattered, ROWS, line, "reduce_scatter")
            yield f"mm, rs, {n} on {dim}", form
        line = chunks.format("all_reduce", 4, dim)
        yield f"mm, ar on {dim}", Form(reduced, ROWS, line, "all_reduce")
        line = f"overlap(all_gather_into_tensor, [relu, mm_1], chunks=2, dim={dim})"
        if dim == 0:
            yield f"ag, mm on {dim}", Form(gathered, SIDE, line, "all_gather")
    line = "overlap(all_gather_into_tensor, mm, chunks=2, dim=1)"
    given = ("[tp, _]", (16, 8)), ("[_, _]", (8, 16))
    yield "parameter, mm", Form(parameter, given, line, "all_gather")
    given = *ROWS, ("[_]", (8,)), ("[_, _]", (2, 2))
    line = NORM + "overlap(mm, out, chunks=4, dim=1)"
    yield "mm, rs, ag: rs", Form(block, given, line, "reduce_scatter")
    # The last two gathers have no product left, but the reduction of the last chunk.
    yield "mm, rs, ag: ag", Form(block, given, line, "all_gather", 2)
    line = NORM + "overlap(rs, out, chunks=4, dim=1)"
    starts = frozenset(STARTS)
    yield "rs, ag: rs", Form(block, given, line, "reduce_scatter", 0, starts)
    yield "rs, ag: ag", Form(block, given, line, "all_gather", 1, starts)


def _rings() -> Iterator[tuple[str, Form]]:
    for ways in (1, 2):
        line = f"overlap(all_gather_into_tensor, [relu, mm_1], ring={ways})"
        yield f"ag, mm, ring {ways}", Form(gathered, SIDE, line, "all_to_all", 0)
        line = f"overlap(mm, reduce_scatter_tensor, ring={ways})"
        yield f"mm, rs, ring {ways}", Form(scattered, ROWS, line, "all_to_all", 0)


CHUNKS, RINGS = dict(_forms()), dict(_rings())


def bound(toy: Toy, graph: fx.Graph, group: str = "tp") -> fx.Graph:
    """As rank 0 runs it."""
    fake_mode = _torch.fake.fake_mode_of([n.meta.get("val") for n in graph.nodes])
    return bind(graph, toy.mesh, 0, lambda _: group, fake_mode, inductor=False)
