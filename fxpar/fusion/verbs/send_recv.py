"""Applies verb ``share``: ranks that hold the same value send it to another stage in
slices.

``share(axes=tp, tag=0, dim=0)``: each rank along the axes sends its slice of a message
whose value is equal on all of them, and the receivers gather the slices: at the border
of a pipeline the gather moves to the receivers (CoCoNeT, section 3.2, T12 of its
programs). Both stages must do so: the same lines change the graphs of all stages
(``apply_schedule.apply_stages``).

In: an Edit of one stage. Out: the nodes that later lines may name. Never changes one
end of a message alone: a single graph is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion import node_legality
from fxpar.fusion.node_legality import flat, is_fresh, is_message
from fxpar.fusion.schedule_edit import Axes, Edit, check_staged, refuse
from fxpar.fusion.verbs.gathers import check_equal, dividing, take_back
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder

aten = torch.ops.aten


def share(
    edit: Edit, axes: Axes, tag: int = 0, dim: int | None = None
) -> list[fx.Node]:
    """Apply ``share``, by default along the first dim that divides. Return the sends of
    the slices, or the gathers of the received ones."""
    matching = with_tag(edit, tag)
    if not matching:
        what = f"share: no message has the tag {tag}"
        raise ScheduleError(what, fix="write tag= as the program does")
    changed = [
        _receive if n.target is collective_nodes.recv else _send for n in matching
    ]
    for node in matching:
        check_staged("share", edit, node)
        if node.graph is not edit.graph:
            raise refuse("share", node, "is in a region", fix="share it before fuse")
        clash = set(axes) & set(collective_nodes.axes_of(node))
        if clash:
            raise refuse("share", node, f"crosses {sorted(clash)} itself")
    return [
        change(edit, node, axes, dim)
        for change, node in zip(changed, matching, strict=True)
    ]


def with_tag(edit: Edit, tag: int) -> list[fx.Node]:
    """Return the messages with this tag, in order, those of regions too."""
    return [n for n in flat(edit.graph) if is_message(n) and n.args[2] == tag]


def _send(edit: Edit, node: fx.Node, axes: Axes, dim: int | None) -> fx.Node:
    value = node.all_input_nodes[0]
    check_equal("share", edit, value, axes)
    dim = dividing("share", edit, value, dim, axes)
    with edit.before(node) as build:
        part = collective_nodes.step(build, collective_nodes.slice_, value, dim, axes)
        message = collective_nodes.step(
            build, collective_nodes.send, part, *node.args[1:]
        )
    node_legality.instead(node, message)
    _instead(edit, node, message)
    if value.target is collective_nodes.all_gather:
        take_back(edit, value)
        edit.erase([value])
    return message


def _receive(edit: Edit, node: fx.Node, axes: Axes, dim: int | None) -> fx.Node:
    check_equal("share", edit, node, axes)
    dim = dividing("share", edit, node, dim, axes)
    shape = list(node.meta["val"].shape)
    shape[dim] //= edit.mesh.count(axes)
    check_buffer("share", node)
    with edit.before(node) as build:
        message = received(build, node, shape)
        whole = collective_nodes.step(
            build, collective_nodes.all_gather, message, dim, axes
        )
    _instead(edit, node, message, whole)
    return whole


def _instead(
    edit: Edit, old: fx.Node, stand_in: fx.Node, read: fx.Node | None = None
) -> None:
    """Put ``stand_in`` in the place of ``old``, with its name; readers of ``old`` read
    ``read``, by default ``stand_in``."""
    name = old.name
    edit.swap(old, read or stand_in)
    stand_in.name = name


def check_buffer(verb: str, node: fx.Node) -> None:
    """Raise ScheduleError unless the buffer of a message belongs to the graph alone."""
    buffer: Any = node.args[0]
    if not is_fresh(buffer):
        raise refuse(verb, node, f"is written over {buffer.name}, which others see")


def received(build: Builder, like: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Append a received message of another shape, otherwise equal to ``like``."""
    value = like.meta["val"]
    how = {"dtype": value.dtype, "device": value.device}
    buffer = build.call(aten.empty.memory_format, list(shape), **how)
    message = collective_nodes.step(
        build, collective_nodes.recv, buffer, *like.args[1:]
    )
    message.meta["fxpar_sent"] = like.meta["fxpar_sent"]
    node_legality.instead(like, message)
    return message


Message = tuple[int, tuple[int, ...], torch.dtype]  # tag, shape, dtype


def messages(
    graph: fx.Graph, stage: int, axis: str
) -> dict[tuple[int, int], list[fx.Node]]:
    """Return the messages of a stage's graph in order, by (sender, receiver). Raises
    ScheduleError on one that crosses other axes than ``axis``."""
    by_ends: dict[tuple[int, int], list[fx.Node]] = {}
    for node in flat(graph):
        if is_message(node):
            axes: Axes = collective_nodes.axes_of(node)
            if axes != (axis,):
                raise refuse("stages", node, f"goes along {axes}, not along {axis!r}")
            peer: Any = node.args[1]
            ends = (
                (stage, peer) if node.target is collective_nodes.send else (peer, stage)
            )
            by_ends.setdefault(ends, []).append(node)
    return by_ends


def content(node: fx.Node) -> Message:
    """Return (tag, shape, dtype), on which both ends of a message must agree."""
    value: Any = node.args[0]
    value = value.meta["val"]
    tag: Any = node.args[2]
    return tag, tuple(value.shape), value.dtype
