"""Verb ``share``: ranks that hold the same value send it to another stage in slices.

``share(axes=tp, tag=0, dim=0)``: of a message whose value is equal on all ranks along
the axes, each sends its slice, and those who receive it gather the slices: the border
of a pipeline, across which the gather moves to the receivers (CoCoNeT, section 3.2, T12
of its programs). Both stages must do so: the graphs of all stages are changed by the
same lines (``stages.apply_stages``), and a graph alone is refused.

In: an Edit of one stage. Out: the nodes that later lines may name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.fusion.edit import Axes, Edit, refuse
from fxpar.fusion.gathers import dividing, equal_along, take_back
from fxpar.passes import steps
from fxpar.passes.builder import Builder

aten = torch.ops.aten

# What makes memory that nothing has been written to, or that is written over.
_FRESH = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
}


def share(edit: Edit, axes: str, tag: int = 0, dim: int | None = None) -> list[fx.Node]:
    """Gives the sends of the slices, or the gathers behind what is received. Axes as in
    ``hierarchical``; by default the first dim that divides."""
    found = with_tag(edit, tag)
    changed = [_receive if n.target is steps.recv else _send for n in found]
    for node in found:
        check_staged("share", edit, node)
        clash = set(axes.split("_and_")) & set(steps.axes_of(node))
        if clash:
            raise refuse("share", node, f"crosses {sorted(clash)} itself")
    return [
        change(edit, node, axes, dim)
        for change, node in zip(changed, found, strict=True)
    ]


def with_tag(edit: Edit, tag: int) -> list[fx.Node]:
    """The messages with this tag, in order."""
    found = [n for n in edit.graph.nodes if n.target in steps.MESSAGES]
    return [n for n in found if n.args[2] == tag]


def check_staged(verb: str, edit: Edit, node: fx.Node) -> None:
    """Raise ScheduleError if the other end of a message is not at hand."""
    if not edit.staged:
        raise refuse(
            verb,
            node,
            "would not fit what the other stage does",
            fix="give the graphs of all stages to fxpar.fusion.apply_stages",
        )


def _send(edit: Edit, node: fx.Node, axes: str, dim: int | None) -> fx.Node:
    value = node.all_input_nodes[0]
    over = equal_along("share", edit, value, axes)
    dim = dividing("share", edit, value, dim, over)
    with edit.before(node) as build:
        part = steps.step(build, steps.slice_, value, dim, over)
        made = steps.step(build, steps.send, part, *node.args[1:])
    _instead(edit, node, made)
    if value.target is steps.all_gather:
        take_back(edit, value)
        edit.erase([value])
    return made


def _receive(edit: Edit, node: fx.Node, axes: str, dim: int | None) -> fx.Node:
    over = equal_along("share", edit, node, axes)
    dim = dividing("share", edit, node, dim, over)
    shape = list(node.meta["val"].shape)
    shape[dim] //= edit.mesh.count(over)
    check_buffer("share", node)
    with edit.before(node) as build:
        made = received(build, node, shape)
        whole = steps.step(build, steps.all_gather, made, dim, over)
    _instead(edit, node, made, whole)
    return whole


def _instead(
    edit: Edit, old: fx.Node, new: fx.Node, read: fx.Node | None = None
) -> None:
    """``new`` takes the name of ``old``, and what is ``read`` (itself) its readers."""
    name = old.name
    edit.swap(old, read or new)
    new.name = name


def check_buffer(verb: str, node: fx.Node) -> None:
    """Raise ScheduleError unless what is received is seen through the node alone."""
    buffer: Any = node.args[0]
    if buffer.target not in _FRESH or list(buffer.users) != [node]:
        raise refuse(verb, node, f"is written over {buffer.name}, which others see")


def received(build: Builder, like: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Append a message of another shape, of which the rest is that of ``like``."""
    value = like.meta["val"]
    how = {"dtype": value.dtype, "device": value.device}
    buffer = build.call(aten.empty.memory_format, list(shape), **how)
    made = steps.step(build, steps.recv, buffer, *like.args[1:])
    made.meta["fxpar_sent"] = like.meta["fxpar_sent"]
    return made


Message = tuple[int, tuple[int, ...], torch.dtype]  # tag, shape, dtype


def messages(
    graph: fx.Graph, stage: int, axis: str
) -> dict[tuple[int, int], list[fx.Node]]:
    """The messages of a stage's graph in order, by (sender, receiver). Raises
    ScheduleError on one that crosses other axes than ``axis``."""
    out: dict[tuple[int, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in steps.MESSAGES:
            axes: Axes = steps.axes_of(node)
            if axes != (axis,):
                raise refuse("stages", node, f"goes along {axes}, not along {axis!r}")
            peer: Any = node.args[1]
            ends = (stage, peer) if node.target is steps.send else (peer, stage)
            out.setdefault(ends, []).append(node)
    return out


def content(node: fx.Node) -> Message:
    """What both ends of a message must agree on."""
    value: Any = node.args[0]
    value = value.meta["val"]
    tag: Any = node.args[2]
    return tag, tuple(value.shape), value.dtype
