"""Names of graph inputs as the user knows them, from where Dynamo found them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

_PART = re.compile(r"_(modules|parameters|buffers)\['([^']+)'\]")
_KEY = re.compile(r"\['([^']+)'\]|\[(\d+)\]")


# Mark of a tensor of which a compiled graph gave each rank a summand.
SUMMAND_MARK = "_fxpar_summand"


@dataclass(frozen=True)
class Named:
    """``kind``: "parameter", "buffer", "input", or "summand", an input of which each
    rank holds a summand; ``name``: as in the user's code."""

    name: str
    kind: str


def _source(node: fx.Node) -> str:
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return node.name
    name = source.name
    return name() if callable(name) else str(name)


def _named(source: str, example: Any) -> Named:
    parts = _PART.findall(source)
    if parts:
        name = ".".join(key for _, key in parts)
        kind = {"parameters": "parameter", "buffers": "buffer"}.get(parts[-1][0])
        if kind is None:  # an attribute of a module, neither parameter nor buffer
            name = f"{name}.{source.rsplit('.', 1)[-1]}"
            kind = "buffer"
    else:
        keys = [a or b for a, b in _KEY.findall(source)]
        named = [key for key in keys if not key.isdigit()]
        name = keys[-1] if keys else source
        if name.isdigit() and named:
            name = f"{named[-1]}_{name}"
        tail = source.rsplit("]", 1)[-1]
        name = f"{name}{tail}"
        kind = "input"
    if isinstance(example, nn.Parameter):
        kind = "parameter"
    if getattr(example, SUMMAND_MARK, False):
        kind = "summand"
    return Named(name, kind)


def name_inputs(graph: fx.Graph, examples: Sequence[Any]) -> list[Named]:
    """One Named per placeholder of a Dynamo graph, names unique."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    found = [
        _named(_source(node), example)
        for node, example in zip(nodes, examples, strict=True)
    ]
    total = Counter(named.name for named in found)
    seen: Counter[str] = Counter()
    out = []
    for named in found:
        name = named.name
        if total[name] > 1:
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name}#{seen[name]}"
        out.append(Named(name, named.kind))
    return out
