"""Checks along which axes values inside manual regions differ between ranks.

In: a joint graph whose regions have ``fxpar::collective`` for their collectives. Out:
the axes along which each value differs. A value that is declared whole and differs, or
that leaves a region other than by its edges, is an error. ``scale_equal`` turns sums of
equal values into multiples, in place. Never: sends anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import RegionError
from fxpar.graph.builder import Builder
from fxpar.graph.region_ops import EDGES
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import has_random_numbers, op_facts_of
from fxpar.sharding.ops.own_op_rules import LEAVE, manual_axes, sizes_of
from fxpar.sharding.program import user_line
from fxpar.sharding.spec import Spec

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar

Axes = frozenset[str]

# The fix for any other collective.
FUNCTIONAL = (
    "call torch.distributed._functional_collectives (all_reduce, all_gather_tensor, "
    "reduce_scatter_tensor, all_to_all_single) or fxpar.permute with an axis for the "
    "group"
)


def check_regions(graph: fx.Graph, mesh: Mesh) -> dict[fx.Node, Axes]:
    """Return the axes of its regions along which each value inside may differ between
    ranks.

    Raises RegionError where a declaration is wrong.
    """
    inside = manual_axes(graph)
    varying: dict[fx.Node, Axes] = {}
    regions: dict[fx.Node, frozenset[int]] = {}
    random: set[fx.Node] = set()
    over = {n.args[4]: n.args[3].split("+") for n in graph.nodes if n.target in EDGES}
    for node in graph.nodes:
        reads = node.all_input_nodes
        own = frozenset[int]().union(*(regions.get(n, frozenset()) for n in reads))
        axes = frozenset[str]().union(*(varying.get(n, frozenset()) for n in reads))
        if node.op == "output":
            _check_ends(node, inside)
            continue
        _check_group(node, node in inside, mesh)
        _check_regions_separate(node, own, over)
        if has_random_numbers(node) or not random.isdisjoint(reads):
            _check_draws(node, node in inside)
            random.add(node)
        if node.target in EDGES:
            own, axes = _cross(node, own, axes)
            random.discard(node)
        elif node in inside:
            axes = _after(node, axes)
        regions[node], varying[node] = own, axes
    return varying


def _cross(
    node: fx.Node, regions: frozenset[int], axes: Axes
) -> tuple[frozenset[int], Axes]:
    """Return the regions a value is in after an edge, and along which axes it
    differs."""
    _, text, _, _, number = node.args
    spec, names = Spec.parse(text), frozenset(sizes_of(node))
    if str(node.target) != LEAVE:
        return regions | {number}, axes | names.intersection(spec.sharded_axes)
    wrong = sorted(axes & names - set(spec.axes))
    if wrong:
        axis = wrong[0]
        producer = node.args[0]
        raise RegionError(
            f"a result of a manual region is said to be whole along {axis!r}, but "
            f"{producer.name} ({producer.target}) differs between ranks: it is a part "
            "or a summand",
            where=user_line(producer) or user_line(node),
            fix=f'reduce it inside (all_reduce(x, "sum", "{axis}")), or give its spec '
            f'in out_specs: a dim over "{axis}", or partial={{"{axis}": "sum"}}',
        )
    return regions - {number}, axes - names


def _after(node: fx.Node, axes: Axes) -> Axes:
    """Return the axes along which the result of an op inside differs."""
    own = frozenset(sizes_of(node))
    if node.target is ours.axis_index.default:
        return own
    if node.target is not ours.collective.default:
        return axes
    kind = node.args[1]
    if kind in ("all_reduce", "all_gather"):
        return axes - own
    return axes if kind == "permute" else axes | own


def _check_ends(output: fx.Node, inside: Any) -> None:
    """Check that nothing leaves the graph without leaving its region."""
    for arg in output.all_input_nodes:
        if arg in inside and str(arg.target) != LEAVE:
            raise RegionError(
                f"{arg.name} ({arg.target}) of a manual region is read outside of "
                "it and is not a result: a graph break cuts the region, or it "
                "reads a tensor that needs a gradient and is not an argument",
                where=user_line(arg),
                fix="pass every tensor that fn reads as an argument of it, and keep it "
                "free of graph breaks",
            )


def _check_regions_separate(
    node: fx.Node, regions: frozenset[int], over: Mapping[int, Sequence[str]]
) -> None:
    """Check that values of two regions over one axis meet outside of both."""
    axes = [axis for number in regions for axis in over[number]]
    if len(set(axes)) < len(axes):
        raise RegionError(
            f"{node.name} ({node.target}) reads values of two manual regions: one "
            "of them is not a result of its region",
            where=user_line(node),
            fix="return from fn what is read outside of it",
        )


def _check_group(node: fx.Node, inside: bool, mesh: Mesh) -> None:
    """Check that each collective in a region is along axes of the mesh."""
    facts = op_facts_of(node.target)
    if not facts.communicates or node.target is c10d.wait_tensor.default:
        return
    if node.target is ours.collective.default:
        return
    if inside:
        group = node.kwargs.get("group_name", node.args[-1] if node.args else "")
        raise RegionError(
            f"{node.target} over group {group!r} inside a manual region: the "
            f"group is not an axis of mesh {mesh}, or the op is a collective of "
            "torch.distributed itself",
            where=user_line(node),
            fix=f"{FUNCTIONAL}: {', '.join(mesh.names)}",
        )


def _check_draws(node: fx.Node, inside: bool) -> None:
    if inside and node.target not in EDGES:
        raise RegionError(
            f"{node.name} ({node.target}) is random inside a manual region: all ranks "
            "would draw the same numbers for their parts",
            where=user_line(node),
            fix="draw outside, and pass the numbers (or the mask) as an argument",
        )


def scale_equal(build: Builder, varying: dict[fx.Node, Axes], mesh: Mesh) -> None:
    """Replace a sum over ranks of a value that is equal on them by a multiple: nothing
    is sent. Gradients of reduced values are such: each rank has its share of them."""
    for node in list(build.graph.nodes):
        if node.target is not ours.collective.default or node.args[1] != "all_reduce":
            continue
        x, _, _, op, _, axes = node.args
        over = axes.split("+")
        if not varying.get(x, frozenset()).isdisjoint(over):
            continue
        if op == "sum":
            with build.before(node):
                scaled = _scaled(build, x, mesh.count(over))
            node.replace_all_uses_with(scaled)
        elif op in ("avg", "max", "min"):
            node.replace_all_uses_with(x)


def _scaled(build: Builder, x: fx.Node, by: int) -> fx.Node:
    """Return ``x`` times a number; if ``x`` is a multiple of a value, a multiple of
    that value."""
    factor: float = by
    if x.target is aten.mul.Tensor and isinstance(x.args[1], (int, float)):
        x, factor = x.args[0], x.args[1] * by
    return x if factor == 1 else build.call(aten.mul.Tensor, x, factor)
