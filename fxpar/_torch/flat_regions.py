"""Replaces calls of Dynamo's compile regions by the ops of the regions.

In: a Dynamo graph, which may call regions: bodies that Dynamo traced once for several
calls, of functions that the user marked (``torch.compiler.nested_compile_region``) and
of layers that repeat (``layer_regions``). Out: a graph with the ops of a region in the
place of each of its calls, under the names of the modules that are called there. Never:
changes the graph that comes in.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.dynamo import copy_graph
from fxpar._torch.inductor import invoke_subgraph

# Metadata of a call of a region: ``RenamedModules``, if its modules have other names.
RENAMED = "fxpar_renamed_modules"

# Dynamo's metadata: the user's lines and the modules around an op, and its fake result.
LINES = "stack_trace"
_MODULES, _VALUE = "nn_module_stack", "example_value"


@dataclass(frozen=True)
class RenamedModules:
    """Says what the modules and lines around the ops of a region are at one of its
    calls."""

    # Dynamo's keys of the modules that were traced -> keys of the modules in their
    # place.
    keys: Mapping[str, str]
    # The path of the layer that was traced, and of the one in its place.
    paths: tuple[str, str]
    # The lines that call the layer that was traced, and those that call this one.
    lines: tuple[str, str]

    def apply(self, meta: dict[str, Any]) -> None:
        """Change metadata of an op of the body to that of its copy."""
        if _MODULES in meta:
            meta[_MODULES] = dict(map(self._module, meta[_MODULES].items()))
        traced, instead = self.lines
        if traced and meta.get(LINES, "").startswith(traced):
            meta[LINES] = instead + meta[LINES][len(traced) :]

    def _module(self, named: tuple[str, tuple[str, Any]]) -> tuple[str, Any]:
        (key, (path, kind)), (traced, instead) = named, self.paths
        module, at, count = key.partition("@")
        if path == traced or path.startswith(traced + "."):
            path = instead + path[len(traced) :]
        return self.keys.get(module, module) + at + count, (path, kind)


def without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a Dynamo graph that calls no regions; ``gm`` itself if it calls none."""
    bodies = [body for body in gm.modules() if isinstance(body, fx.GraphModule)]
    if not any(_is_region(node) for body in bodies for node in body.graph.nodes):
        return gm
    flat, attributes = fx.Graph(), dict[str, Any]()
    results = _append(flat, attributes, gm, {})
    output = flat.output(results)
    output.meta = dict(gm.graph.output_node().meta)
    _remove_unread_sizes(flat)
    copy = fx.GraphModule(attributes, flat, type(gm).__name__)
    copy.meta = dict(gm.meta)
    copy.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
    return copy


def _is_region(node: Any) -> bool:
    is_call = isinstance(node, fx.Node) and node.op == "call_function"
    return is_call and node.target is invoke_subgraph()


def _append(
    flat: fx.Graph,
    attributes: dict[str, Any],
    gm: fx.GraphModule,
    copies: dict[fx.Node, Any],
    renamed: RenamedModules | None = None,
) -> Any:
    """Append copies of the ops of a graph to ``flat``, with the ops of regions for
    their calls; return the copies of its results. ``copies``: of operands to begin
    with. ``attributes``: those of ``flat``, by name."""
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        if node in copies:
            continue
        if _is_region(node):
            body = operator.attrgetter(node.args[0].target)(gm)
            inputs = body.graph.find_nodes(op="placeholder")
            operands = fx.node.map_arg(node.args[2:], copies.__getitem__)
            inside = dict(zip(inputs, operands, strict=True))
            names = node.meta.get(RENAMED, renamed)
            copies[node] = _append(flat, attributes, body, inside, names)
        elif node.target is operator.getitem and _is_region(node.args[0]):
            copies[node] = result = copies[node.args[0]][node.args[1]]
            # The results of a call are in memory of their own.
            result.meta[_VALUE] = node.meta.get(_VALUE, result.meta.get(_VALUE))
        elif node.op != "get_attr" or not all(map(_is_region, node.users)):
            copies[node] = copy = flat.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(gm)
                if isinstance(value, fx.GraphModule):
                    value = _body(value, renamed)
                copy.target = _named(attributes, str(node.target), value)
            _drop_region(copy.meta)
            if renamed is not None:
                renamed.apply(copy.meta)
    results = gm.graph.output_node().args[0]
    return fx.node.map_arg(results, copies.__getitem__)


def _drop_region(meta: dict[str, Any]) -> None:
    """Remove from the metadata of a copied node that it was in a region."""
    meta.pop("creation_timestamp", None)
    if "source_fn_stack" in meta:
        call, stack = invoke_subgraph(), meta["source_fn_stack"]
        meta["source_fn_stack"] = [each for each in stack if each[1] is not call]


def _body(gm: fx.GraphModule, renamed: RenamedModules | None) -> fx.GraphModule:
    """Return the body of an op that calls one, as of a checkpoint, without regions; a
    copy for each call of a region, since bodies of a checkpoint are marked."""
    flat = without_regions(gm)
    if renamed is None:
        return flat
    flat = copy_graph(flat)
    flat.meta = dict(gm.meta)
    for body in flat.modules():
        nodes = body.graph.nodes if isinstance(body, fx.GraphModule) else ()
        for node in nodes:
            _drop_region(node.meta)
            renamed.apply(node.meta)
    return flat


def _named(attributes: dict[str, Any], name: str, value: Any) -> str:
    """Return the name under which a value is an attribute: its own if no other has
    it."""
    some, count = name, 0
    while attributes.setdefault(some, value) is not value:
        some, count = f"{name}_{count}", count + 1
    return some


def _remove_unread_sizes(graph: fx.Graph) -> None:
    """Remove sizes, and values computed from them, that nothing reads: Dynamo leaves
    them in bodies, and not elsewhere."""
    for node in reversed(graph.nodes):
        value = node.meta.get(_VALUE)
        is_size = isinstance(value, (int, torch.Size, torch.SymInt, torch.SymBool))
        if is_size and not node.users and node.op.startswith("call_"):
            graph.erase_node(node)
