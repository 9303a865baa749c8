"""Graphs as they are traced, compared node by node."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Any

import torch
from torch import fx

from fxpar.runtime.train_step import trace

Tensor = torch.Tensor


class Captured(Exception):
    """A graph was traced, and is not to be compiled."""


def what(node: fx.Node) -> str:
    """The op of a node; a constant by its value."""
    held = node.op == "get_attr"
    return str(getattr(node.graph.owning_module, node.target) if held else node.target)


def text(x: Any) -> str:
    """Without addresses."""
    return re.sub("0x[0-9a-f]+", "", repr(x))


def rows(graph: fx.Graph) -> list[Any]:
    """All that is said of each node, by place in the graph."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    memories: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    regions: dict[Any, int] = {}

    def memory(x: Any) -> Any:
        if isinstance(x, Tensor):
            number = x.untyped_storage()._cdata
            return memories.setdefault(number, len(memories)), repr(x)
        return [memory(i) for i in x] if isinstance(x, (list, tuple)) else text(x)

    def custom(entries: dict[str, Any]) -> str:
        number = entries.get(trace._NUMBER)
        return repr(entries | {trace._NUMBER: numbers.setdefault(number, len(numbers))})

    said = []
    for node in graph.nodes:
        meta = {name: x for name, x in node.meta.items() if name != "from_node"}
        number, region = meta.pop("seq_nr", None), meta.pop("ac_graph_id", None)
        if "is_gradient_acc" in meta:  # it has that of whatever came last
            number = None
        user = custom(meta.pop("custom", None) or {})
        said.append(
            {
                "op": (
                    node.op,
                    what(node),
                    node.name.rpartition("constant")[0] or node.name,
                ),
                "args": str(
                    fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{at[n]}")
                ),
                "val": memory(meta.pop("val", None)),
                "number": numbers.setdefault(number, len(numbers)),
                "region": regions.setdefault(region, len(regions)),
                "user": user,
                **{name: repr(x) for name, x in meta.items()},
            }
        )
    return said


def structure(graph: fx.Graph) -> Any:
    """How often each value is computed, whatever the order; and the results."""
    keys: dict[fx.Node, int] = {}
    numbers: dict[Any, int] = {}
    for i, node in enumerate(graph.nodes):
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{keys[n]}")
        own = i if node.op == "placeholder" else None
        key = what(node), str(args), text(node.meta.get("val")), own
        keys[node] = numbers.setdefault(key, len(numbers))
    names = {number: key for key, number in numbers.items()}

    def full(key: int) -> str:
        target, args, val, own = names[key]
        inner = re.sub(r"%(\d+)", lambda m: ids[int(m[1])], args)
        return hashlib.sha256(f"{target}{inner}{val}{own}".encode()).hexdigest()

    ids: dict[int, str] = {}
    for key in sorted(names):
        ids[key] = full(key)
    return Counter(ids[keys[node]] for node in graph.nodes)


def same(plain: fx.Graph, once: fx.Graph, *, ordered: bool = True) -> None:
    """Both say the same, node by node if they come in the same order."""
    assert structure(plain) == structure(once)
    if ordered:
        for a, b in zip(rows(plain), rows(once), strict=True):
            assert a == b
