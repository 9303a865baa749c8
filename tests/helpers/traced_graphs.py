"""Graphs as they are traced, compared node by node."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.symbols import hint_of
from fxpar.graph import builder
from fxpar.passes.repeated_segments import repeated_segments

Tensor = torch.Tensor

LAYERS, WIDTH = 4, 8


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
        number = entries.get(builder._NUMBER)
        return repr(
            entries | {builder._NUMBER: numbers.setdefault(number, len(numbers))}
        )

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


class Capture:
    """A joint graph that AOTAutograd traced, and the kinds of segments in it."""

    def __init__(self, *, once: bool) -> None:
        self.graphs: list[fx.Graph] = []
        self.kinds: list[Any] = []
        self.once = once

    def compile(self, gm: fx.GraphModule, examples: Any) -> None:
        """Trace a graph up to its joint graph. Raises Captured."""
        repeated = self._find if self.once else None
        _torch.aot.compile_fx(
            gm, examples, joint_pass=self._joint_pass, repeated=repeated
        )

    def _joint_pass(self, gm: fx.GraphModule) -> None:
        self.graphs.append(gm.graph)
        raise Captured

    def _find(self, gm: fx.GraphModule) -> list[Any]:
        self.kinds.extend(repeated_segments(gm))
        return self.kinds


def traced(
    fn: Callable[..., Any], *args: Any, once: bool, is_open: bool = False, **kwargs: Any
) -> tuple[fx.Graph, list[Any]]:
    """The joint graph of a call, and the kinds of segments in it. ``is_open``: Dynamo
    leaves sizes open; AOTAutograd is given those of the call."""
    capture = Capture(once=once)

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        capture.compile(gm, list(map(hint_of, examples)))

    torch._dynamo.reset()
    with pytest.raises(Exception, match="Captured"):
        torch.compile(fn, backend=backend, dynamic=is_open)(*args, **kwargs)
    return capture.graphs[0], capture.kinds


def check(
    fn: Callable[..., Any],
    *args: Any,
    copied: int | None,
    ordered: bool = True,
    **kwargs: Any,
) -> int:
    """Trace both ways and compare, node by node if they come in the same order;
    ``copied`` segments are copies, if it is given. How many are."""
    plain, _ = traced(fn, *args, once=False, **kwargs)
    once, kinds = traced(fn, *args, once=True, **kwargs)
    same(plain, once, ordered=ordered)
    kept = [kind for kind in kinds if not kind.refused]
    count = sum(len(kind.segments) - 1 for kind in kept)
    assert copied is None or count == copied
    return count


def chain(h: Tensor) -> Tensor:
    """Ops of which no two are alike."""
    h = (h * 0.5 + h.sigmoid()).tanh() - 0.25
    return (h.sin() * 0.75 + h.cos().abs()).softmax(1) / 3
