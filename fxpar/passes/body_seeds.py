"""Random numbers in bodies: the seeds are drawn outside and passed in.

In: a traced graph whose bodies are known (``graph_bodies.show_bodies``). Out: the same
graph, changed in place, in which no body draws a seed: a branch of ``cond`` takes them
as one more operand, each step of ``map`` and ``scan`` a row of its own. So rank 0 draws
for all, as for the graph itself, and numbers count by global index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.passes.builder import Builder, shape_of
from fxpar.passes.graph_bodies import bodies_of
from fxpar.passes.normalize import random_by_index
from fxpar.sharding.program import depending_on_tangents, user_line

aten = torch.ops.aten


@dataclass(frozen=True)
class _Taker:
    """Where an op takes one more operand for its bodies.

    ``group``: of its arguments the list that it stands last in.
    ``place``: the op's arguments -> its position among the inputs of each body.
    ``steps``: whether it is one slice a step that each run of a body takes.
    """

    group: int
    place: Callable[[Any], int]
    steps: bool


_TAKERS = {
    "higher_order::cond": _Taker(3, lambda args: len(args[3]), False),
    "higher_order::map_impl": _Taker(1, lambda args: len(args[1]), True),
    "higher_order::scan": _Taker(2, lambda args: len(args[1]) + len(args[2]), True),
}


def lift_seeds(graph: fx.Graph, fake_mode: Any) -> None:
    """Let the bodies of a graph take their seeds, and bodies in them.

    Raises PlanError where a body draws what no seed says, where the number of its steps
    is not known, and in a backward, which would not draw what the forward drew."""
    rewriter, late = Builder(graph, fake_mode), depending_on_tangents(graph)
    for node in list(graph.nodes):
        bodies = bodies_of(node)
        for body in bodies:
            lift_seeds(body.graph, fake_mode)
            _torch.inductor.replace_random(body, fake_mode)
            random_by_index(body.graph, Builder(body.graph, fake_mode))
        drawn = [x for body in bodies for x in body.graph.nodes if _draws(x)]
        if not drawn:
            continue
        taker = _TAKERS.get(_torch.aot.higher_order_name(node.target))
        others = [x for x in drawn if x.target is not torch.ops.fxpar.seeds.default]
        if others or taker is None or node in late:
            inner = (others or drawn)[0]
            raise _refused(node, inner, backward=not others and taker is not None)
        with rewriter.before(node):
            _pass_seeds(rewriter, node, taker, bodies)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _refused(node: fx.Node, inner: fx.Node, *, backward: bool) -> PlanError:
    what = f"{node.target} draws random numbers ({inner.target}) in a graph of its own"
    if backward:
        why = "and draws them again in its backward, which would not be the same"
    else:
        why = "where ranks would not draw the same random numbers"
    return PlanError(
        f"{what}, {why}",
        where=user_line(inner) or user_line(node),
        fix="draw the numbers outside and pass them in",
    )


def _pass_seeds(
    rewriter: Builder, node: fx.Node, taker: _Taker, bodies: list[fx.GraphModule]
) -> None:
    """Draw the seeds of a call before it; its bodies take what they drew."""
    place = taker.place(node.args)
    drawn = [[x for x in body.graph.nodes if _draws(x)] for body in bodies]
    count = max(sum(x.args[0] for x in seeds) for seeds in drawn)
    device = next(x.args[1] for seeds in drawn for x in seeds)
    rows = shape_of(node.args[taker.group][0])[0] if taker.steps else 1
    made = rewriter.call(torch.ops.fxpar.seeds.default, rows * count, device)
    if taker.steps:
        made = rewriter.call(aten.view.default, made, [rows, count])
    node.update_arg(taker.group, (*node.args[taker.group], made))
    for body, seeds in zip(bodies, drawn, strict=True):
        _take_seeds(Builder(body.graph, rewriter.fake_mode), seeds, place, made)
        body.recompile()


def _take_seeds(
    rewriter: Builder, drawn: list[fx.Node], place: int, made: fx.Node
) -> None:
    """Give a body an input, its ``place``-th, in the place of what it draws. ``made``:
    the operand of the call."""
    count = shape_of(made)[-1]
    nodes = list(rewriter.graph.nodes)  # inputs first
    with rewriter.graph.inserting_before(nodes[place]):
        taken = rewriter.graph.placeholder("seeds")
    with rewriter.fake_mode:
        taken.meta["val"] = made.meta["val"].new_empty([count])
    start = 0
    for node in drawn:
        for user in list(node.users):
            if user.target is _torch.inductor.inductor_lookup_seed():
                # Inductor looks seeds up from where memory begins, not from where a
                # row of it does.
                with rewriter.before(user):
                    seed = rewriter.call(
                        aten.select.int, taken, 0, start + user.args[1]
                    )
                rewriter.replace(user, seed)
        with rewriter.before(node):
            end = start + node.args[0]
            part = rewriter.call(aten.slice.Tensor, taken, 0, start, end)
        rewriter.replace(node, part)
        start = end
    rewriter.graph.eliminate_dead_code()
