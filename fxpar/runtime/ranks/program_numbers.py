"""This module compares a program's Python numbers across ranks before it runs.

Dynamo makes constants of ints (an attribute, an argument, what a script draws), and the
text by which ranks know a program leaves them out, since sizes are ints too. In: a
graph that all ranks planned on the same sizes, so that every number in it must be the
same. Out: nothing, or an error on all ranks with the lines that differ. Never: a
changed graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.graph.graph_bodies import body_of
from fxpar.runtime.ranks import consensus
from fxpar.runtime.ranks.check_inputs import checksum
from fxpar.sharding.program import user_line

_FIX = (
    "a Python number must be equal on all ranks, with FXPAR_INPUTS=local too: "
    "all_reduce a count, draw it from one seed; what differs by sample goes in a "
    "tensor"
)

# Constants of up to so many numbers are written out.
_WRITTEN_OUT = 8


def agree_on_numbers(tag: str, graph: fx.Graph, root: torch.nn.Module) -> None:
    """Return once all ranks came with the same numbers in a graph of the same nodes,
    whose constants ``root`` holds.

    Raises RankMismatchError on all ranks if they differ, or if one does not come.
    """
    text = numbers_text(graph, root)
    what = "numbers of Python in the program"
    consensus.agree(tag, consensus.digest_of(text), text, what=what, fix=_FIX)


def numbers_text(graph: fx.Graph, root: torch.nn.Module) -> str:
    """Return a line for each node of a graph and its bodies that holds numbers or a
    constant."""
    lines = []
    for node in graph.nodes:
        text, body = "", body_of(node)
        if node.op == "call_function":
            arguments = list(map(_text, (*node.args, *node.kwargs.values())))
            name = getattr(node.target, "__name__", str(node.target))
            if any(x.strip("[., ]") for x in arguments):
                text = f"{name}({', '.join(arguments)})"
        elif body is not None:
            text = numbers_text(body.graph, body)
        elif node.op == "get_attr":
            text = _constant(operator.attrgetter(str(node.target))(root))
        if text:
            line = user_line(node) if body is None else None
            lines.append(text + (f"  # {line}" if line else ""))
    return "\n".join(lines)


def _text(x: Any) -> str:
    """Return the text of an argument; what is no number is a dot."""
    if isinstance(x, (tuple, list)):
        return f"[{', '.join(map(_text, x))}]"
    return repr(x) if isinstance(x, (bool, int, float, complex)) else "."


def _constant(value: Any) -> str:
    """Return the text of a tensor that the graph holds; "" if it is no plain tensor."""
    if type(value) is not torch.Tensor or value.is_meta:
        return ""
    with _torch.aot.as_compiled():
        numbers = f" {value.tolist()}" if value.numel() <= _WRITTEN_OUT else ""
        return f"constant of {int(checksum(value)):x}{numbers}"
