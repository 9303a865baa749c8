"""Applies verb ``reorder``: compute moves across a collective.

In: an Edit, nodes, and the collectives that they cross. Out: the collectives after
them.

``reorder([nodes], ag, ...) -> ag_1, ...``: nodes that read gathered values run on the
slices instead, and their results are gathered where others read them (CoCoNeT, section
3.2). Values equal on all ranks are sliced where an op needs it; values that only the
nodes read are computed on slices from the start. ``reorder([nodes], ar)``: nodes linear
in an all-reduce's result run on the summands, and their result is reduced instead.

A node may cross if ``slice_op`` lets it; random numbers count by global index, so they
may. Never rounds a summand that was not rounded before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.slice_op import Cutter, Refused, SlicePart, results_of
from fxpar.fusion.verbs.gathers import check_mean, take_back
from fxpar.graph import collective_nodes
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.read_program import RuleReader


def reorder(edit: Edit, nodes: tuple[fx.Node, ...], *over: fx.Node) -> list[fx.Node]:
    """Apply ``reorder``. Return the gathers of results that are read whole outside, in
    order of the nodes; for an all-reduce, the one after the nodes."""
    if over[0].target is collective_nodes.all_reduce:
        return _before_reduction(edit, nodes, *over)
    region = sorted(set(nodes))
    cutter = _cutter(edit, region, over)
    parts = {ag: SlicePart(ag.all_input_nodes[0], _along(ag)) for ag in over}
    slices = _on_slices(edit, region, cutter, parts)
    return _gathered(edit, region, slices, cutter)


def _along(gather: fx.Node) -> int:
    dim: Any = gather.args[1]
    return dim


def _cutter(edit: Edit, region: list[fx.Node], over: tuple[fx.Node, ...]) -> Cutter:
    axes = (
        collective_nodes.axes_of(over[0]) if collective_nodes.is_step(over[0]) else ()
    )
    for gather in over:
        if gather.target is not collective_nodes.all_gather:
            raise refuse("reorder", gather, "is no all-gather")
        if collective_nodes.axes_of(gather) != axes:
            raise refuse("reorder", gather, f"is not along {axes}, as {over[0].name}")
    return Cutter(edit.build, axes, edit.varies(), pull=frozenset(region))


def _on_slices(
    edit: Edit, region: list[fx.Node], cutter: Cutter, parts: dict[fx.Node, SlicePart]
) -> dict[fx.Node, SlicePart]:
    """Build the nodes on slices, each before itself. Return node -> its slice. A node
    that reads no slice stays, and is computed on slices where only these are read."""
    slices, by_result = dict(parts), dict[fx.Node, Any]()
    for node in region:
        if node in slices or not any(n in slices for n in node.all_input_nodes):
            continue
        try:
            with edit.before(node):
                by_result = results_of(node, cutter.on_parts(node, slices))
        except Refused as error:
            raise refuse("reorder", node, str(error)) from error
        for whole, (result, dim) in by_result.items():
            if dim is None:
                edit.swap(whole, result)
            else:
                slices[whole] = SlicePart(result, dim)
    if not by_result:
        raise refuse("reorder", region[0], "reads nothing that is gathered")
    return {node: part for node, part in slices.items() if node not in parts}


def _gathered(
    edit: Edit, region: list[fx.Node], slices: dict[fx.Node, SlicePart], cutter: Cutter
) -> list[fx.Node]:
    """Gather results that others read whole, and erase the nodes."""
    gathers = []
    for node in [n for n in sorted(slices) if any(u not in slices for u in n.users)]:
        part = slices[node]
        with edit.after(part.node, node) as build:
            args = collective_nodes.all_gather, part.node, part.dim, cutter.axes
            gathered = collective_nodes.step(build, *args)
        outside = [user for user in node.users if user not in slices]
        edit.read_instead(node, gathered, outside)
        take_back(edit, gathered)
        if gathered.users:
            gathers.append(gathered)
        else:
            edit.erase([gathered])
    names = {part.node: node.name for node, part in slices.items()}
    names |= {part: node.name for node, part in cutter.pulled.items()}
    edit.erase(sorted({*slices, *region}))
    present = {node.name for node in edit.graph.nodes}
    for node, name in names.items():
        if name not in present:
            node.name = name
    return gathers


def _check_holds(node: fx.Node, reduced: fx.Node) -> None:
    """Raise ScheduleError unless a dtype of summands of the node's result is as large,
    and as exact, as that of the reduced summands: a rounded sum is no sum of rounded
    values."""
    value, had = node.meta["val"], reduced.meta["val"].dtype
    if not isinstance(value, torch.Tensor):
        raise refuse("reorder", node, "gives several results, each to be reduced")
    if not _has_all_values(value.dtype, had):
        why = f"would round what is reduced, {had}, to {value.dtype}"
        raise refuse("reorder", node, why)


def _has_all_values(dtype: torch.dtype, every: torch.dtype) -> bool:
    """Return whether a dtype has every value of another."""
    if dtype == every:
        return True
    if every.is_complex or dtype.is_complex:
        return False
    if not dtype.is_floating_point:
        whole = not every.is_floating_point
        return whole and torch.promote_types(dtype, every) == dtype
    limits = torch.finfo(dtype)
    if every.is_floating_point:
        other_limits = torch.finfo(every)
        return limits.eps <= other_limits.eps and limits.max >= other_limits.max
    largest = 1 if every == torch.bool else torch.iinfo(every).max
    return 1 / limits.eps >= largest and limits.max >= largest


def _before_reduction(
    edit: Edit, nodes: tuple[fx.Node, ...], reduced: fx.Node, *extra: fx.Node
) -> list[fx.Node]:
    if extra:
        raise refuse(
            "reorder", extra[0], "is a second collective, next to an all-reduce"
        )
    op, axes = reduced.args[1], collective_nodes.axes_of(reduced)
    check_mean("reorder", reduced, op)
    varies, rules = edit.varies(), RuleReader()
    for node in nodes:
        if list(reduced.users) != [node]:
            raise refuse("reorder", node, f"is not all that reads {reduced.name}")
        rule, has_rule = rules(node)
        operands = tensor_nodes(node)
        mine = tuple(i for i, n in enumerate(operands) if n is reduced)
        passes = [p for p in rule.passages if p.operands == mine and op in p.reductions]
        if not has_rule or not passes:
            raise refuse("reorder", node, f"is not linear in {reduced.name}")
        _check_holds(node, reduced)
        read = [n for n in node.all_input_nodes if n is not reduced]
        unequal = [n for n in read if set(axes) & varies[n]]
        if unequal:
            raise refuse(
                "reorder", node, f"reads {unequal[0].name}, which differs along {axes}"
            )
        source = reduced.all_input_nodes[0]
        edit.read_instead(reduced, source, [node])
        with edit.after(node) as build:
            after = collective_nodes.step(
                build, collective_nodes.all_reduce, node, op, axes
            )
        edit.read_instead(node, after, [u for u in node.users if u is not after])
        edit.erase([reduced])
        reduced = after
        varies[after] = varies[node] - set(axes)
        varies[node] = varies[node] | set(axes)
    return [reduced]
