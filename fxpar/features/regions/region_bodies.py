"""traced -> traced: keeps one body of each manual region that has several.

In: a joint graph in which each body of such a region is traced, from
``fxpar::fork_bodies(x, bodies, region)``, which gives each body its own argument, to
``fxpar::choose_body(results, region)``. The gradient of one is the other, so that a
backward is chosen with its forward. Out: the graph with one body of each region.
Regions that one line calls on the same shapes, as layers do, are one choice. Never:
nodes of the other bodies in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import user_line
from fxpar.units import percent_more

torch.library.define(
    "fxpar::fork_bodies", "(Tensor x, int bodies, int region) -> Tensor[]"
)
torch.library.define("fxpar::choose_body", "(Tensor[] results, int region) -> Tensor")

FORK, CHOOSE = torch.ops.fxpar.fork_bodies, torch.ops.fxpar.choose_body


@torch.library.register_fake("fxpar::fork_bodies")
def _(x, bodies, region):
    return [torch.empty_like(x) for _ in range(bodies)]


@torch.library.register_fake("fxpar::choose_body")
def _(results, region):
    return torch.empty_like(results[0])


def _fork_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.region = inputs[2]


def _choose_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.bodies, ctx.region = len(inputs[0]), inputs[1]


torch.library.register_autograd(
    "fxpar::fork_bodies",
    lambda ctx, grads: (CHOOSE(list(grads), ctx.region), None, None),
    setup_context=_fork_context,
)
torch.library.register_autograd(
    "fxpar::choose_body",
    lambda ctx, grad: (FORK(grad, ctx.bodies, ctx.region), None),
    setup_context=_choose_context,
)


def choose(
    graph: fx.Graph, request: Request, seconds_of: Callable[[Request], float]
) -> tuple[Request, list[str]]:
    """Return the request with a body of each choice, one chosen after the other, as a
    ``Choose`` does."""
    counts, notes = [bodies for _, bodies in _choices(graph).values()], []
    bodies = [0] * len(counts)
    for i, count in enumerate(counts):
        seconds = []
        for body in range(count):
            trial = (*bodies[:i], body, *bodies[i + 1 :])
            seconds.append(seconds_of(replace(request, bodies=trial)))
        bodies[i] = min(range(count), key=seconds.__getitem__)
        times = ", ".join(percent_more(s, min(seconds)) for s in seconds)
        notes.append(
            f"body {bodies[i]} of {count} of manual region {i} is chosen: compared "
            f"with the fastest, a step with each is estimated to take {times}"
        )
    return replace(request, bodies=tuple(bodies) if any(bodies) else ()), notes


def _choices(graph: fx.Graph) -> dict[Any, tuple[set[int], int]]:
    """Return line and shapes of each choice -> (its regions, number of bodies)."""
    shapes: dict[int, list[Any]] = {}
    first: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if _is(node, CHOOSE):
            region = node.args[1]
            shapes.setdefault(region, []).append(_shape(node.args[0][0]))
            first.setdefault(region, node)
    choice_of: dict[Any, tuple[set[int], int]] = {}
    for region, node in first.items():
        bodies = len(node.args[0])
        key = user_line(node), bodies, tuple(shapes[region])
        choice_of.setdefault(key, (set(), bodies))[0].add(region)
    return choice_of


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return () if value is None else tuple(value.shape)


def keep_bodies(graph: fx.Graph, bodies: Sequence[int] = ()) -> None:
    """Keep one body of each region, in place. ``bodies``: one for each choice, in
    order; empty: the first of each.

    Raises PlanError if they belong to another program.
    """
    all_choices = list(_choices(graph).values())
    bodies = bodies or [0] * len(all_choices)
    if len(bodies) != len(all_choices) or any(
        body >= count for body, (_, count) in zip(bodies, all_choices, strict=True)
    ):
        counts = [count for _, count in all_choices]
        raise PlanError(
            f"the plan chooses bodies {list(bodies)} of manual regions, the "
            f"program has {counts}",
            fix="plan this program again",
        )
    of = {
        region: body
        for body, (regions, _) in zip(bodies, all_choices, strict=True)
        for region in regions
    }
    dropped: set[fx.Node] = set()
    for node in list(graph.nodes):
        if _is(node, FORK):
            body = of[node.args[2]]
            for piece in list(node.users):
                if piece.args[1] == body:
                    piece.replace_all_uses_with(node.args[0])
                dropped.add(piece)
            dropped.add(node)
        elif _is(node, CHOOSE):
            body_result = node.args[0][of[node.args[1]]]
            node.replace_all_uses_with(body_result)
            dropped.add(node)
        elif not dropped.isdisjoint(node.all_input_nodes):
            dropped.add(node)
    for node in reversed(list(graph.nodes)):
        if node in dropped and not node.users:
            graph.erase_node(node)


def _is(node: fx.Node, op: Any) -> bool:
    """Return whether a node calls an op, which Dynamo's graphs name without its
    overload."""
    return node.target in (op, op.default)
