"""Reads AOTAutograd's descriptors of the inputs and outputs of a graph.

In: a descriptor. Out: its kind and payload, or another descriptor. Never: reads a
graph.
"""

from __future__ import annotations

from typing import Any


def descriptor(desc: Any) -> tuple[str, Any]:
    """Return the (kind, payload) of an AOTAutograd descriptor.

    Inputs: ("parameter", name), ("buffer", name), ("input", index), ("tangent", output
    desc), ("state", "token") for what keeps effects in order, ("state", None). Outputs:
    ("output", index), ("gradient", input desc), ("mutation", input desc), ("state",
    None).
    """
    from torch._functorch._aot_autograd import descriptors as d

    if not _is_bare(desc):
        return "state", None
    desc = bare(desc)
    if isinstance(desc, d.ParamAOTInput):
        return "parameter", desc.target
    if isinstance(desc, d.BufferAOTInput):
        return "buffer", desc.target
    if isinstance(desc, d.PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, d.TangentAOTInput):
        return "tangent", desc.output
    if isinstance(desc, (d.ForwardTokenAOTInput, d.BackwardTokenAOTInput)):
        return "state", "token"
    if isinstance(desc, d.PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, d.GradAOTOutput):
        return "gradient", desc.grad_of
    if isinstance(desc, d.InputMutationAOTOutput):
        return "mutation", desc.mutated_input
    return "state", None


_LOCAL = "_local_tensor"  # the one tensor of a DTensor


def _is_bare(desc: Any) -> bool:
    """Return whether a descriptor is of a tensor, or of the tensor inside a DTensor."""
    return getattr(desc, "attr", _LOCAL) == _LOCAL


def bare(desc: Any) -> Any:
    """Return the descriptor of a DTensor, given that of its local tensor; others as
    they are."""
    from torch._functorch._aot_autograd import descriptors as d

    parts = (d.SubclassGetAttrAOTInput, d.SubclassGetAttrAOTOutput)
    return desc.base if isinstance(desc, parts) and desc.attr == _LOCAL else desc


def written_input(desc: Any) -> Any:
    """Return the descriptor of a new value of the input that ``desc`` describes."""
    from torch._functorch._aot_autograd import descriptors as d

    return d.InputMutationAOTOutput(bare(desc))
