"""Finds the products by expert, and the axes over which a search may split experts
where no axis is named for them.

A grouped product is given where each group of rows ends. The groups are experts if the
ends are a running count of the values that the rows were sorted by, and these values
are places along a dim, so that none is negative. Splitting experts over the ranks of an
axis gives another program than whole experts (``normalize_experts``), so each is
planned by itself, and the one that is predicted to be faster is taken.

Rows of experts are split without an axis of their own, too, where the ranks do not
divide the batch: unequal shards of samples are no shards of merged rows, so that each
rank would compute all rows (``seed_rows``).

In: a traced graph and a request, or the engine of a propagation in which the batch has
its axes. Out: data, or seeds in that engine. Never: changes a graph, or rows that have
an axis, or runs anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import argument
from fxpar.graph.builder import shape_of
from fxpar.graph.graph_bodies import body_of
from fxpar.graph.size_nodes import is_open
from fxpar.passes.row_wise import call_of
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import seconds, work_alone
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.pipeline_axis import pipeline_axis
from fxpar.sharding.plan_request import Request
from fxpar.sharding.propagate.conventions import EXPERT_MM
from fxpar.sharding.propagate.propagation import Propagation, Seed
from fxpar.sharding.reshard.route import price
from fxpar.sharding.search.run_search import SearchOptions
from fxpar.sharding.shard_sizes import can_split
from fxpar.sharding.strategy import Strategy, operand_spec
from fxpar.units import percent_more

aten = torch.ops.aten

SORTS = (aten.sort.default, aten.sort.stable)
# Compared by name: transformers registers them.
_GROUPED = (
    "transformers.grouped_mm_fallback.default",
    "transformers.grouped_mm_fallback_backward.default",
)
# The defaults of the arguments of ``histc`` after the first.
_BINS = (100, 0, 0)
# Types in which expert numbers are exact.
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


def products_by(sort: fx.Node) -> dict[fx.Node, int]:
    """Return grouped products of rows that a sort put in order -> how many experts."""
    if argument(sort, "descending"):
        return {}
    out = {}
    for node in sort.graph.nodes:
        is_aten = node.target is aten._grouped_mm.default
        is_plain = is_aten and len(node.args) == 3 and not node.kwargs
        if is_plain or str(node.target) in _GROUPED:
            ends = node.args[2]  # of groups
            if _is_row_ends(ends, sort):
                out[node] = shape_of(ends)[0]
    return out


def _is_row_ends(ends: fx.Node, sort: fx.Node) -> bool:
    """Return whether these are the ends of each expert's rows among those that are
    sorted."""
    total = _through_casts(ends)
    if total.target is not aten.cumsum.default or total.args[1] not in (0, -1):
        return False
    count = _through_casts(total.args[0])
    if count.target is not aten.histc.default:
        return False
    experts, bins_given = shape_of(ends)[0], len(count.args) - 1
    bins, low, high = list(count.args[1:]) + list(_BINS[bins_given:])
    if (bins, low) != (experts, 0) or high not in (experts - 1, experts):
        return False
    values, key = _through_casts(count.args[0]), _through_casts(sort.args[0])
    if values.target is operator.getitem and values.args == (sort, 0):
        values = key
    return values is key and _is_place(key)


def _through_casts(node: Any) -> fx.Node:
    """Return the value that a chain of exact casts starts from."""
    while True:
        facts = op_facts_of(node.target)
        casts = facts.casts and node.meta["val"].dtype in _EXACT
        if not (casts or facts.renames or node.target is aten.clone.default):
            return node
        node = node.args[0]


def _is_place(node: Any) -> bool:
    """Return whether elements are places along a dim, and so not negative."""
    while op_facts_of(node.target).reshapes or op_facts_of(node.target).view:
        node = _through_casts(node.args[0])
    source, i = call_of(node)
    return op_facts_of(source.target).places == i


# A plan with experts split must be faster by this share: a prediction is a model.
_SAME = 0.02


def choices(graph: fx.Graph, request: Request) -> list[Axes]:
    """Return the axes to choose from, none first; empty where there is nothing to
    choose."""
    mode, mesh = request.mode, request.mesh
    if not isinstance(mode, SearchOptions) or request.meshes or request.expert_axes:
        return []
    if mesh.is_refined or is_open(graph) or any(map(body_of, graph.nodes)):
        return []
    if pipeline_axis(mesh) is not None or (
        request.manual is not None and request.manual.expert_axes
    ):
        return []
    counts = {
        experts
        for node in graph.nodes
        if node.target in SORTS and len(shape_of(node.args[0])) == 1
        for experts in products_by(node).values()
    }
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    sets = dict.fromkeys([*((axis,) for axis in axes), tuple(axes)])
    fit = [a for a in sets if a and not any(n % mesh.count(a) for n in counts)]
    return [(), *fit] if counts and fit else []


def best(seconds: Mapping[Axes, float]) -> tuple[Axes, str]:
    """Return (the axes whose plan takes the fewest seconds, a note that says so); no
    axes where that saves little."""
    axes = min(seconds, key=seconds.__getitem__)
    if not axes or seconds[axes] >= seconds[()] * (1 - _SAME):
        return (), ""
    more = percent_more(seconds[()], seconds[axes])
    return axes, (
        f"experts are split over {'+'.join(axes)}: a step is estimated to take {more} "
        f"if each rank has all of them"
    )


def choose(
    graph: fx.Graph, request: Request, seconds_of: Callable[[Request], float]
) -> tuple[Request, list[str]]:
    """Return the request with the axes to split experts over, as a ``Choose`` does."""
    over = {
        axes: seconds_of(replace(request, experts_over=axes))
        for axes in choices(graph, request)
    }
    if not over:
        return request, []
    axes, note = best(over)
    return replace(request, experts_over=axes), [note] if note else []


def seed_rows(engine: Propagation, axes: Axes, mesh: Mesh, hardware: Hardware) -> None:
    """Split rows of experts over ``axes`` if this saves more seconds of their products
    than gathering the rows takes. ``mesh``: with links; ``hardware``: for the prices.
    """
    program, state = engine.program, engine.state
    products = [op for op in program.ops if str(op.target) == EXPERT_MM]
    for op in products if axes else ():
        v = op.operands[0]
        value, rows = program.values[v], op.rule.operands[0][0]
        if len(rows) != 1 or not state.origins[v].keys().isdisjoint(axes):
            continue
        if not can_split(value.shape[0], mesh, axes, even=program.even):
            continue
        split, work = Strategy(((rows[0], axes),)), work_alone(op, program.values)
        whole, part = (
            seconds(op, work, each, mesh, hardware) for each in (Strategy(), split)
        )
        ends = operand_spec(op.rule, split, 0), operand_spec(op.rule, Strategy(), 0)
        gather = price(*ends, mesh, value.shape, value.dtype.itemsize)
        if whole - part > gather:
            dims: tuple[Axes, ...] = (axes, *[()] * (len(value.shape) - 1))
            shut = (False,) * len(dims)
            what = f"rows of experts of {value.name}"
            engine.seed([Seed(v, dims, shut, what, batch=True)])
