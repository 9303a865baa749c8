"""Verb ``as_slice``: an input of which only slices are read is kept in slices.

``as_slice(m, m_1)``: optimizer state ``m``, equal on all ranks and read by slices
alone, and ``m_1``, the gathered new state that the graph returns (CoCoNeT's asSlice and
dead). The input's shape is that of a slice from then on, and so is the output's. What
an input means to its owner cannot be seen in a graph, so it must be permitted by name.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.fusion.edit import Edit, refuse
from fxpar.fusion.gathers import take_back
from fxpar.passes import steps
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
    cuts = {u.args[1:] for u in readers if u.target is steps.slice_}
    if len(cuts) != 1 or any(u.target is not steps.slice_ for u in readers):
        raise refuse("as_slice", state, "is not read by one and the same slice alone")
    ((dim, axes),) = cuts
    if updated is not None:
        if updated.target is not steps.all_gather or updated.args[1:] != (dim, axes):
            raise refuse("as_slice", updated, f"is not gathered along dim {dim}")
        _return_slice(edit, updated)
    spec: Spec = state.meta["fxpar_spec"]
    dims: Any = [(*d, *axes) if i == dim else d for i, d in enumerate(spec.dims)]
    state.meta["fxpar_spec"] = Spec.of(dims, spec.partial)
    state.meta["val"] = readers[0].meta["val"]
    state.meta.pop("tensor_meta", None)
    for reader in readers:
        edit.swap(reader, state)
    return [state]


def _return_slice(edit: Edit, updated: fx.Node) -> None:
    take_back(edit, updated)
    output = edit.graph.output_node()
    if list(updated.users) != [output]:
        raise refuse("as_slice", updated, "is read whole within the graph")
    part = updated.all_input_nodes[0]
    output.replace_input_with(updated, part)
    edit.erase([updated])
