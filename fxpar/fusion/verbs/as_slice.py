"""Verb ``as_slice``: an input of which only slices are read is kept in slices.

``as_slice(m, m_1)``: optimizer state ``m``, equal on all ranks and read by slices
alone, and ``m_1``, the gathered new state that the graph returns, computed from ``m``
(CoCoNeT's asSlice and dead). Only state that is read and not written has none. The
input's shape is that of a slice from then on, and so is the output's. What an input
means to its owner cannot be seen in a graph, so it must be permitted by name.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.fusion.schedule_edit import Axes, Edit, refuse
from fxpar.fusion.verbs.gathers import take_back
from fxpar.passes import collective_nodes
from fxpar.sharding.spec import Spec


def as_slice(
    edit: Edit, state: fx.Node, updated: fx.Node | None = None
) -> list[fx.Node]:
    """``as_slice(state, updated)``; of ``updated`` the output returns the slice."""
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
        if updated not in _computed_from(state):
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
    """Whether a node gathers slices as those of the state are."""
    value, own = node.meta["val"], state.meta["val"]
    alike = node.target is collective_nodes.all_gather and node.args[1:] == (dim, axes)
    return alike and value.shape == own.shape and value.dtype == own.dtype


def _computed_from(state: fx.Node) -> set[fx.Node]:
    """What a change of the state may change."""
    out, rest = set[fx.Node](), [state]
    while rest:
        for user in rest.pop().users:
            if user not in out:
                out.add(user)
                rest.append(user)
    return out


def _check_read_only(edit: Edit, state: fx.Node, dim: int, axes: Axes) -> None:
    """Raise ScheduleError if an output may be the state's new value, still whole."""
    found = _computed_from(state)
    for node in edit.graph.output_node().all_input_nodes:
        if node in found and _is_gathered(node, state, dim, axes):
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
    part = updated.all_input_nodes[0]
    output.replace_input_with(updated, part)
    edit.erase([updated])
