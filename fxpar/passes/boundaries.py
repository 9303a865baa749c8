"""Makes sharded parameters global inputs of a traced graph.

In: a joint graph in which a parameter enters as one rank's shard, crosses ``to_global``
where it is used, and its gradient crosses ``to_local`` before it is returned. Out: the
same graph without crossings, all shapes global; ``Boundaries`` has the specs at rest of
the inputs and gradients. Nodes between a crossing and an input or output are rewritten
to global shapes: views, casts, and the sum where several modules use a parameter. Any
other node there computes with one rank's shard, which is an error. Never plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.inductor import OpOverload
from fxpar.errors import MeshError, PlanError
from fxpar.graph.builder import Builder
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Signature, user_line
from fxpar.sharding.spec import Spec

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default

# Ops, in addition to casts and views, that may stand after a gradient's crossing.
_ON_GRADIENTS = {aten.add.Tensor, aten.clone.default}


@dataclass
class Boundaries:
    """Holds the specs at rest of the inputs and the gradients of a graph."""

    # Placeholder position -> (spec at rest, hint for its use; None without one).
    inputs: dict[int, tuple[Spec, tuple[str, ...] | None]] = field(default_factory=dict)
    # Output position -> spec at rest.
    gradients: dict[int, Spec] = field(default_factory=dict)

    def declare(self, signature: Signature) -> Signature:
        """Return the signature with these specs at rest."""
        inputs, outputs = list(signature.inputs), list(signature.outputs)
        for i, (spec, use) in self.inputs.items():
            inputs[i] = replace(inputs[i], at_rest=spec, use=use)
        for k, spec in self.gradients.items():
            outputs[k] = replace(outputs[k], at_rest=spec)
        return replace(signature, inputs=tuple(inputs), outputs=tuple(outputs))


def stated_use(hint: str) -> tuple[str, ...] | None:
    """Return the entries of a crossing's hint; None if all are open."""
    entries = tuple(hint.split(","))
    return entries if any(entry.strip("?_") for entry in entries) else None


def absorb(
    graph: fx.Graph, fake_mode: Any, mesh: Mesh, manual: Axes = ()
) -> Boundaries:
    """Remove the crossings from a graph, in place. ``manual``: axes over which each
    gradient becomes a mean.

    Raises MeshError if a parameter is sharded over another mesh, PlanError if the
    program computes with one rank's shard.
    """
    boundaries, rewriter = Boundaries(), Builder(graph, fake_mode)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    places = {node: i for i, node in enumerate(inputs)}
    for node in list(graph.nodes):
        if node.target is torch.ops.fxpar.to_global.default:
            _enter(node, places, boundaries, rewriter, mesh)
    leaving: dict[fx.Node, _Leaving] = {}
    result_owners = {
        _owner(x) for x in graph.output_node().args[0] if isinstance(x, fx.Node)
    }
    for node in list(graph.nodes):
        if node.target is torch.ops.fxpar.to_local.default:
            _leave(node, leaving, result_owners, rewriter, manual)
        elif node.op == "output":
            results = list(node.args[0])
            for k, arg in enumerate(results):
                if isinstance(arg, fx.Node) and arg in leaving:
                    boundaries.gradients[k] = leaving[arg].spec
                    if manual:
                        with rewriter.before(node):
                            results[k] = _mean(arg, leaving[arg], manual, rewriter)
            node.args = (type(node.args[0])(results),)
        elif any(arg in leaving for arg in node.all_input_nodes):
            _carry(node, leaving, rewriter)
    return boundaries


def _enter(
    node: fx.Node,
    places: dict[fx.Node, int],
    boundaries: Boundaries,
    rewriter: Builder,
    mesh: Mesh,
) -> None:
    """Replace a ``to_global`` by the parameter itself, in global shape."""
    local, shape, spec, hint, its_mesh, *_ = node.args
    if str(Mesh.parse(its_mesh).unrefined) != str(mesh.unrefined):
        raise MeshError(
            f"parameters or inputs are sharded over mesh {its_mesh}, the program "
            f"is for mesh {mesh}",
            where=user_line(node),
            fix="give fxpar.shard, DTensors and torch.compile one mesh, best by "
            "FXPAR_MESH alone",
        )
    views = []
    while local not in places:
        if not op_facts_of(local.target).renames:
            raise looks_inside(local)
        views.append(local)
        local = local.args[0]
    value = local.meta["val"]
    with rewriter.fake_mode:
        whole = torch.empty(tuple(shape), dtype=value.dtype, device=value.device)
    whole.requires_grad_(value.requires_grad)
    local.meta["val"] = whole
    local.meta.pop("tensor_meta", None)
    boundaries.inputs[places[local]] = (Spec.parse(spec), stated_use(hint))
    rewriter.replace(node, local)
    for view in views:
        if not view.users:
            rewriter.graph.erase_node(view)


@dataclass(frozen=True)
class _Leaving:
    """Holds the arguments of the ``to_local`` through which a gradient is returned."""

    # Its spec at rest.
    spec: Spec
    # The mesh of all ranks, as text for Mesh.parse.
    mesh: str
    # The dtype in which it is reduced; "": its own.
    reduce: str


def _leave(
    node: fx.Node,
    leaving: dict[fx.Node, _Leaving],
    result_owners: set[fx.Node],
    rewriter: Builder,
    manual: Axes,
) -> None:
    """Replace a ``to_local`` by the gradient itself, in global shape. It owns its
    memory, since autograd adds to it in place: a gradient that is a view of one of
    ``result_owners``, whose memory other results have, is copied."""
    x, spec, mesh, reduce = node.args
    way = _Leaving(Spec.parse(spec), str(mesh), reduce)
    own_dtype = x.meta["val"].dtype
    if reduce and not manual and not way.spec.partial:
        dtype = getattr(torch, reduce)
        with rewriter.before(node):
            if dtype != own_dtype:
                x = rewriter.call(_CONVERT, x, dtype)
            x.meta["fxpar_reduce_here"] = True
            if dtype != own_dtype:
                x = rewriter.call(_CONVERT, x, own_dtype)
    # A node of its own, since one value may be the gradient of parameters with
    # different specs at rest.
    owner, strides = (
        _owner(x),
        zip(x.meta["val"].shape, x.meta["val"].stride(), strict=True),
    )
    expanded = any(size > 1 and not stride for size, stride in strides)
    with rewriter.before(node):
        if expanded or owner in result_owners or owner.op == "placeholder":
            copy = rewriter.copied(x)
        else:
            copy = rewriter.call(aten.alias.default, x)
    result_owners.add(owner)
    rewriter.replace(node, copy)
    leaving[copy] = way


def _mean(gradient: fx.Node, way: _Leaving, manual: Axes, rewriter: Builder) -> fx.Node:
    """Return the mean over ranks of a gradient that is already summed over its uses: a
    rank that reads the parameter more often does not reduce it more often."""
    if way.spec.partial:  # under ``no_sync`` it is summed over ranks later
        ranks = Mesh.parse(way.mesh).count(manual)
        return rewriter.call(aten.mul.Tensor, gradient, 1 / ranks)
    own_dtype = gradient.meta["val"].dtype
    dtype = getattr(torch, way.reduce) if way.reduce else own_dtype
    if dtype != own_dtype:
        gradient = rewriter.call(_CONVERT, gradient, dtype)
    if way.reduce:
        gradient.meta["fxpar_reduce_here"] = True
    text = str(way.spec)
    mean = rewriter.call(torch.ops.fxpar.mean_over_ranks.default, gradient, text)
    return mean if dtype == own_dtype else rewriter.call(_CONVERT, mean, own_dtype)


def _owner(x: fx.Node) -> fx.Node:
    """Return the node whose memory a value is a view of."""
    while isinstance(x.target, OpOverload):
        returns = _torch.objects.schema_of(x.target).returns
        if not returns or returns[0].alias_info is None:
            break
        x = x.args[0]
    return x


def _carry(node: fx.Node, leaving: dict[fx.Node, _Leaving], rewriter: Builder) -> None:
    """Rewrite an op between a gradient's crossing and the output to global shape."""
    ways = {leaving.get(arg) for arg in node.all_input_nodes}
    facts = op_facts_of(node.target)
    may_carry = facts.renames or facts.casts or node.target in _ON_GRADIENTS
    if len(ways) > 1 or not may_carry:
        raise looks_inside(node)
    if facts.renames:
        rewriter.replace(node, node.args[0])
        return
    with rewriter.before(node):
        copy = rewriter.call(node.target, *node.args, **node.kwargs)
    rewriter.replace(node, copy)
    way = ways.pop()
    assert way is not None
    leaving[copy] = way


def looks_inside(node: fx.Node) -> PlanError:
    """Return the error for a node that computes with one rank's part of a sharded
    parameter, or of its gradient."""
    return PlanError(
        f"{node.name} ({node.target}) computes with one rank's part of a parameter "
        f"that fxpar.shard split",
        where=user_line(node),
        fix="use the parameter as the module's attribute, which is the global value",
    )
