"""Nodes by what holds of their targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar._torch.nodes_by_target import calls_where

aten = torch.ops.aten


def test_a_target_is_asked_once_and_calls_are_in_order() -> None:
    graph, asked = fx.Graph(), list[Any]()
    x = graph.placeholder("relu")
    nodes = [
        graph.call_function(target, (x,))
        for target in (aten.sin.default, aten.cos.default, aten.sin.default)
    ]
    nodes[0].prepend(nodes[2])
    graph.erase_node(nodes[1])
    graph.output((nodes[0], nodes[2]))

    def holds(target: Any) -> bool:
        asked.append(target)
        return True

    assert calls_where(graph, holds) == [nodes[2], nodes[0]]
    assert asked == [aten.sin.default]
    nodes[0].target = aten.exp.default
    assert calls_where(graph, lambda target: target is aten.exp.default) == [nodes[0]]
