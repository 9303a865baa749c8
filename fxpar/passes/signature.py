"""What the inputs and outputs of an AOTAutograd graph are, read off its descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar.sharding.program import Input, Output, Signature

# (kind, name) -> Input; lets the caller say where inputs rest.
MakeInput = Callable[[str, Any, fx.Node], Input]
MakeOutput = Callable[[str, str, int | None], Output]


def make_plain_output(kind: str, name: str, of: int | None) -> Output:
    """An output that lies as the plan has it."""
    return Output(name, kind, of)


def read_signature(
    graph: fx.Graph,
    make_input: MakeInput,
    make_output: MakeOutput = make_plain_output,
) -> Signature:
    """The Signature of a graph whose placeholders and output carry ``meta["desc"]``.

    ``make_input(kind, payload, node)`` names an input and says where it rests;
    ``make_output(kind, name, of)`` does so for an output.
    """
    inputs: list[Input] = []
    index_of: dict[Any, int] = {}
    tangent_of: list[tuple[int, Any]] = []
    output: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            desc = node.meta.get("desc")
            kind, payload = _torch.aot.descriptor(desc)
            if kind == "tangent":
                tangent_of.append((len(inputs), payload))
            index_of[_torch.aot.bare(desc)] = len(inputs)
            inputs.append(make_input(kind, payload, node))
        elif node.op == "output":
            output = node
    assert output is not None
    outputs: list[Output] = []
    position_of: dict[Any, int] = {}
    descs = output.meta.get("desc") or [None] * len(output.args[0])
    for k, desc in enumerate(descs):
        kind, payload = _torch.aot.descriptor(desc)
        position_of[_torch.aot.bare(desc)] = k
        of = index_of.get(payload) if kind in ("gradient", "mutation") else None
        name = inputs[of].name if of is not None else f"output_{payload}"
        outputs.append(make_output(kind, name, of))
    tangents = tuple(
        (i, position_of[desc]) for i, desc in tangent_of if desc in position_of
    )
    return Signature(tuple(inputs), tuple(outputs), tangents)
