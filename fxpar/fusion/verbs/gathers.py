"""Applies verbs on collectives alone: split, cut, hierarchical, merge, drop, hoist,
sink; and as_slice.

In: an Edit and the nodes a line names. Out: the nodes that later lines may name. Never
changes a number, and never leaves a reader without its value: such lines are refused.

``as_slice(m, m_1)``: optimizer state ``m``, equal on all ranks and read only through
slices, and ``m_1``, the gathered new state that the graph returns, computed from ``m``
(CoCoNeT's asSlice and dead). State that is read and not written has no ``m_1``. From
then on the input has the shape of a slice, and so has the output. The graph does not
show how the owner uses an input, so it must be permitted by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.fusion.schedule_edit import Axes, Edit, refuse
from fxpar.graph import collective_nodes
from fxpar.sharding.program import descendants
from fxpar.sharding.spec import Spec


def split(edit: Edit, reduced: fx.Node, dim: int | None = None) -> list[fx.Node]:
    """Apply ``split(ar, dim=) -> rs, ag``: an all-reduce as a reduce-scatter along
    ``dim`` and an all-gather (CoCoNeT, ARSplitRSAG). By default the first dim that
    divides."""
    axes, op = _reduction("split", edit, reduced)
    dim = dividing("split", edit, reduced, dim, axes)
    return _split(edit, reduced, dim, op, axes, ())


def cut(
    edit: Edit, value: fx.Node, axes: Axes, dim: int | None = None
) -> list[fx.Node]:
    """Apply ``cut(w, axes=, dim=) -> part, ag``: a value equal on all ranks as the
    gather of its slices, across which its readers may then move."""
    if not isinstance(value.meta.get("val"), torch.Tensor):
        raise refuse("cut", value, "is no tensor")
    check_equal("cut", edit, value, axes)
    dim = dividing("cut", edit, value, dim, axes)
    readers = list(value.users)
    if not readers:
        raise refuse("cut", value, "is not read by any op")
    at = min(readers) if value.op == "placeholder" else value.next
    with edit.graph.inserting_before(at), edit.build.at(value):
        part = collective_nodes.step(
            edit.build, collective_nodes.slice_, value, dim, axes
        )
        whole = collective_nodes.step(
            edit.build, collective_nodes.all_gather, part, dim, axes
        )
    edit.read_instead(value, whole, readers)
    return [part, whole]


def hierarchical(
    edit: Edit, reduced: fx.Node, inner: Axes, outer: Axes, dim: int | None = None
) -> list[fx.Node]:
    """Apply ``hierarchical(ar, inner=, outer=) -> rs, ar, ag``: reduce-scatter along
    the inner axes, where links are fast, all-reduce of the part along the outer ones,
    all-gather along the inner ones."""
    axes, op = _reduction("hierarchical", edit, reduced)
    if sorted(inner + outer) != sorted(axes):
        why = f"reduces over {axes}, not {inner + outer}"
        raise refuse("hierarchical", reduced, why)
    check_mean("hierarchical", reduced, op)
    dim = dividing("hierarchical", edit, reduced, dim, inner)
    return _split(edit, reduced, dim, op, inner, outer)


def _split(
    edit: Edit, reduced: fx.Node, dim: int, op: str, inner: Axes, outer: Axes
) -> list[fx.Node]:
    x: Any = reduced.args[0]
    with edit.before(reduced) as build:
        steps = [
            collective_nodes.step(
                build, collective_nodes.reduce_scatter, x, dim, op, inner
            )
        ]
        if outer:
            steps.append(
                collective_nodes.step(
                    build, collective_nodes.all_reduce, steps[-1], op, outer
                )
            )
        steps.append(
            collective_nodes.step(
                build, collective_nodes.all_gather, steps[-1], dim, inner
            )
        )
    edit.swap(reduced, steps[-1])
    return steps


def _reduction(verb: str, edit: Edit, node: fx.Node) -> tuple[Axes, str]:
    """Return (axes, op) of an all-reduce of summands. Raises ScheduleError."""
    if node.target is not collective_nodes.all_reduce:
        raise refuse(verb, node, "is no all-reduce")
    axes, source = collective_nodes.axes_of(node), node.all_input_nodes[0]
    equal = [a for a in axes if a not in edit.varies()[source]]
    if equal:
        raise refuse(
            verb, node, f"reduces {source.name}, which is equal on all ranks of {equal}"
        )
    op: Any = node.args[1]
    return axes, op


def check_mean(verb: str, node: fx.Node, op: Any) -> None:
    """Raise ScheduleError on a mean of integers: rounding in two steps, or before later
    ops, gives another result."""
    dtype = node.meta["val"].dtype
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise refuse(verb, node, "is a mean that is rounded to a whole number")


def check_equal(verb: str, edit: Edit, value: fx.Node, axes: Axes) -> None:
    """Raise ScheduleError unless ``value`` is equal on all ranks along the axes that a
    line names."""
    unknown = [axis for axis in axes if axis not in edit.mesh.names]
    if unknown:
        raise refuse(verb, value, f"cannot be cut along {unknown} of {edit.mesh}")
    differ = [axis for axis in axes if axis in edit.varies()[value]]
    if differ:
        raise refuse(verb, value, f"differs between ranks along {differ}")


def dividing(verb: str, edit: Edit, node: fx.Node, dim: int | None, axes: Axes) -> int:
    """Return ``dim``, by default the first that ranks along the axes divide. Raises
    ScheduleError."""
    shape, count = list(node.meta["val"].shape), edit.mesh.count(axes)
    if dim is None:
        dim = next((d for d, n in enumerate(shape) if n % count == 0 and n), -1)
        if dim < 0:
            raise refuse(verb, node, f"has no dim that {count} ranks divide: {shape}")
    if not 0 <= dim < len(shape) or shape[dim] % count:
        raise refuse(verb, node, f"of shape {shape} has no {count} parts along {dim}")
    return dim


def merge(edit: Edit, *nodes: fx.Node) -> list[fx.Node]:
    """Apply ``merge(ag, ag_1) -> ag``: equal steps of one value become one; a gather of
    another gather's result along the same dim, or an all-reduce of an all-reduce's,
    becomes one over the axes of both."""
    first, *others = nodes
    for node in others:
        if node.target in collective_nodes.MESSAGES:
            raise refuse("merge", node, "is a message, of which each arrives")
        if not collective_nodes.is_step(node) or node.target is not first.target:
            raise refuse("merge", node, f"is not of the kind of {first.name}")
        if node.args == first.args:
            earlier, later = (first, node) if first < node else (node, first)
            edit.swap(later, earlier)
            first = earlier
        elif node.args[0] is first and list(first.users) == [node]:
            first = _nested(edit, first, node)
        else:
            raise refuse("merge", node, f"moves another value than {first.name}")
    return [first]


def _nested(edit: Edit, first: fx.Node, node: fx.Node) -> fx.Node:
    axes = (*collective_nodes.axes_of(node), *collective_nodes.axes_of(first))
    if (
        node.target is not collective_nodes.all_gather
        and node.target is not collective_nodes.all_reduce
    ):
        raise refuse("merge", node, "is neither a gather nor an all-reduce")
    if node.args[1] != first.args[1]:
        raise refuse("merge", node, "is along another dim, or of another op")
    if len(set(axes)) < len(axes):
        raise refuse("merge", node, f"is along axes of {first.name} again")
    check_mean("merge", node, node.args[1])
    with edit.before(node) as build:
        step = collective_nodes.step(
            build, node.target, first.args[0], node.args[1], axes
        )
    edit.swap(node, step)
    return step


def drop(edit: Edit, *nodes: fx.Node) -> list[fx.Node]:
    """Apply ``drop(ag)``: remove a gather that nobody reads, or whose readers all take
    back this rank's slice; or a gather of the slices of a value equal on all ranks,
    which is then read itself."""
    for node in nodes:
        if node.target is not collective_nodes.all_gather:
            raise refuse("drop", node, "is no all-gather")
        whole = [user for user in node.users if not _is_undone_by(user, node)]
        if whole and not _is_there(edit, node):
            names = ", ".join(user.name for user in whole[:3])
            raise refuse("drop", node, f"is read whole by {names}")
        take_back(edit, node)
        if node.users:
            edit.swap(node, node.all_input_nodes[0].all_input_nodes[0])
        else:
            edit.erase([node])
    return []


def _is_there(edit: Edit, gathered: fx.Node) -> bool:
    """Return whether a gather joins slices of a value that all ranks hold."""
    part = gathered.all_input_nodes[0]
    if not _is_undone_by(part, gathered):
        return False
    return edit.varies()[part.all_input_nodes[0]].isdisjoint(
        collective_nodes.axes_of(gathered)
    )


def _is_undone_by(user: fx.Node, gathered: fx.Node) -> bool:
    return user.target is collective_nodes.slice_ and user.args[1:] == gathered.args[1:]


def take_back(edit: Edit, gathered: fx.Node) -> None:
    """Let readers of slices of a gathered value read the gather's operand."""
    for user in list(gathered.users):
        if _is_undone_by(user, gathered):
            edit.swap(user, gathered.all_input_nodes[0])


def hoist(edit: Edit, node: fx.Node) -> list[fx.Node]:
    """Apply ``hoist(ag)``: start a step as soon as its operand is there."""
    _step("hoist", node)
    source = node.all_input_nodes[0]
    if source.op == "placeholder":
        inputs = edit.graph.find_nodes(op="placeholder")
        source = max(inputs)
    source.append(node)
    return [node]


def sink(edit: Edit, node: fx.Node) -> list[fx.Node]:
    """Apply ``sink(ag)``: start a step right before its first reader."""
    _step("sink", node)
    if node.users:
        min(node.users).prepend(node)
    return [node]


def _step(verb: str, node: fx.Node) -> None:
    if not collective_nodes.is_step(node):
        raise refuse(verb, node, "is no collective")


def as_slice(
    edit: Edit, state: fx.Node, updated: fx.Node | None = None
) -> list[fx.Node]:
    """Apply ``as_slice(state, updated)``; the output then returns the slice of
    ``updated``."""
    if state.op != "placeholder":
        raise refuse("as_slice", state, "is no input")
    if state.name not in edit.permit:
        raise refuse(
            "as_slice",
            state,
            "may be read elsewhere, whole",
            fix=f'permit it, with permit=["{state.name}"]',
        )
    readers = list(state.users)
    cuts = {u.args[1:] for u in readers if u.target is collective_nodes.slice_}
    if len(cuts) != 1 or any(u.target is not collective_nodes.slice_ for u in readers):
        raise refuse("as_slice", state, "is not read by one and the same slice alone")
    ((dim, axes),) = cuts
    if updated is not None:
        if not _is_gathered(updated, state, dim, axes):
            raise refuse("as_slice", updated, f"is not gathered along dim {dim}")
        if updated not in descendants([state]):
            raise refuse("as_slice", updated, f"is not computed from {state.name}")
        _return_slice(edit, updated)
    else:
        _check_read_only(edit, state, dim, axes)
    spec: Spec = state.meta["fxpar_spec"]
    dims: Any = [(*d, *axes) if i == dim else d for i, d in enumerate(spec.dims)]
    state.meta["fxpar_spec"] = Spec.of(dims, spec.partial)
    state.meta["val"] = readers[0].meta["val"]
    state.meta.pop("tensor_meta", None)
    for reader in readers:
        edit.swap(reader, state)
    return [state]


def _is_gathered(node: fx.Node, state: fx.Node, dim: int, axes: Axes) -> bool:
    """Return whether a node gathers slices like those of the state."""
    value, state_value = node.meta["val"], state.meta["val"]
    is_equal = node.target is collective_nodes.all_gather and node.args[1:] == (
        dim,
        axes,
    )
    return (
        is_equal
        and value.shape == state_value.shape
        and value.dtype == state_value.dtype
    )


def _check_read_only(edit: Edit, state: fx.Node, dim: int, axes: Axes) -> None:
    """Raise ScheduleError if an output may be the state's new value, still whole."""
    readers = descendants([state])
    for node in edit.graph.output_node().all_input_nodes:
        if node in readers and _is_gathered(node, state, dim, axes):
            raise refuse(
                "as_slice",
                node,
                f"may be what {state.name} becomes, and would stay whole",
                fix=f"name it: as_slice({state.name}, {node.name})",
            )


def _return_slice(edit: Edit, updated: fx.Node) -> None:
    take_back(edit, updated)
    output = edit.graph.output_node()
    if list(updated.users) != [output]:
        raise refuse("as_slice", updated, "is read whole within the graph")
    if _torch.fake.tree_leaves(output.args).count(updated) > 1:
        raise refuse("as_slice", updated, "is a result twice, whole in one of them")
    part = updated.all_input_nodes[0]
    output.replace_input_with(updated, part)
    edit.erase([updated])
