"""Reads ``in_specs`` and ``out_specs`` as a user gave them into specs of a graph's
ends.

In: entries per tensor, and the graph with its Signature. Out: a Spec of all dims for
each tensor that was given one.
Never: chooses a spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxpar.errors import HintError
from fxpar.sharding.program import Signature
from fxpar.sharding.spec import Spec


def specs_of(
    specs: Sequence[Any] | None, count: int, name: str, counted: str
) -> list[Spec | None]:
    """Return the specs that a user gave, one per tensor, None where one is open.
    ``name``: of the argument that gave them; ``counted``: the things that it has one
    entry for each of, in the plural. Raises HintError."""
    if specs is None:
        return [None] * count
    if len(specs) != count:
        raise HintError(
            f"{name} has {len(specs)} entries for {count} {counted}",
            fix="give one entry per tensor; None leaves it open",
        )
    for spec in specs:
        if isinstance(spec, str):
            raise HintError(
                f"{name} has the text {spec!r} for a tensor",
                fix=f"give an entry per dim: ({spec!r}, None)",
            )
    return [
        spec if spec is None or isinstance(spec, Spec) else Spec(*spec)
        for spec in specs
    ]


def with_all_dims(signature: Signature, graph: fx.Graph) -> Signature:
    """Return the signature with a spec of all dims where one was given: dims left out
    are not split. Raises HintError if a tensor has fewer dims."""
    (output,) = graph.find_nodes(op="output")

    def of_all_dims(end: Any, node: Any) -> Any:
        if end.at_rest is None:
            return end
        shape, dims = node.meta["val"].shape, end.at_rest.dims
        if len(dims) > len(shape):
            raise HintError(
                f"spec given for {end.name}: {len(dims)} entries for a tensor of "
                f"{len(shape)} dims",
                fix="give at most one entry per dim; dims left out are not split",
            )
        missing = [()] * (len(shape) - len(dims))
        at_rest = Spec.of([*dims, *missing], end.at_rest.partial)
        return replace(end, at_rest=at_rest)

    inputs, outputs = (
        tuple(map(of_all_dims, ends, nodes))
        for ends, nodes in (
            (signature.inputs, graph.find_nodes(op="placeholder")),
            (signature.outputs, output.args[0]),
        )
    )
    return replace(signature, inputs=inputs, outputs=outputs)
