"""Prepare the forward of a training step for its trace: global values in, a loss out.

In: the graph Dynamo made of a forward, and the values it is called with. Out: the same
graph taking parameters at rest by their global value, without the crossings, with facts
on each input; and the parameters that the loss depends on. Never: a computation on
values, or a change to a user's value.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from fxpar import _torch
from fxpar._torch.segment_kinds import SegmentKind
from fxpar.errors import PlanError
from fxpar.runtime.at_rest.sharded_modules import to_global_unreduced
from fxpar.runtime.caches.program_identity import NamedInput
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import user_line
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class StepInput(NamedInput):
    """Is an input of a step."""

    # The spec in which it is sharded; None if each rank holds the whole.
    at_rest: Spec | None = None
    # The hint on its use in the program, an entry per dim; None without one.
    use: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Forward:
    """Is a forward that takes parameters by their global value."""

    # The graph, without the crossings of parameters at rest.
    module: fx.GraphModule
    # One per input.
    ends: tuple[StepInput, ...]
    # Positions of inputs that are parameters with a gradient.
    trained: tuple[int, ...]
    # Layers that repeat; the ops of each kind are known once ``reached`` ran them.
    kinds: tuple[SegmentKind, ...] = ()


def spec_of(x: Any) -> Spec | None:
    """Return the spec of a DTensor; None for a plain tensor."""
    if not isinstance(x, DTensor):
        return None
    mesh = Mesh.from_device_mesh(x.device_mesh)
    return Spec.from_placements(x.placements, mesh, x.dim())


def globally(
    gm: fx.GraphModule, inputs: Sequence[NamedInput], examples: Sequence[Any]
) -> Forward:
    """Return the forward on global parameters: crossings of parameters at rest are
    removed.

    Raises PlanError if the program looks at one rank's part of a parameter.
    """
    _open_checkpoints(gm)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    ends, trained = [], []
    for i, (node, name, x) in enumerate(zip(nodes, inputs, examples, strict=True)):
        hint = _take_out(gm.graph, node) if isinstance(x, DTensor) else None
        use = hint if hint and any(entry.strip("?_") for entry in hint) else None
        ends.append(StepInput(name.name, name.kind, spec_of(x), use))
        if isinstance(x, torch.nn.Parameter) and x.requires_grad:
            trained.append(i)
    gm.graph.lint()
    gm.recompile()
    return Forward(gm, tuple(ends), tuple(trained))


def _open_checkpoints(gm: fx.GraphModule) -> None:
    """Replace checkpointed regions by their ops, as parameters at rest cross inside;
    the ops are tagged to be computed again, except where the user chooses for each
    op."""
    calls = [
        node
        for node in gm.graph.nodes
        if _torch.aot.higher_order_name(node.target) == _torch.aot.CHECKPOINT
    ]
    for call in calls:
        body = gm.get_submodule(call.args[0].target)
        _open_checkpoints(body)
        if _torch.aot.CHOOSES_SAVED not in body.meta:
            for node in body.graph.nodes:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        for node in body.graph.find_nodes(op="get_attr"):
            name = f"{call.args[0].target}_{node.target}".replace(".", "_")
            setattr(gm, name, operator.attrgetter(node.target)(body))
            node.target = name
        placeholders = body.graph.find_nodes(op="placeholder")
        values = dict(zip(placeholders, call.args[1:], strict=True))
        with gm.graph.inserting_before(call):
            results = gm.graph.graph_copy(body.graph, values)
        for item in list(call.users):
            item.replace_all_uses_with(results[item.args[1]])
            gm.graph.erase_node(item)
        (held, *_) = call.args
        gm.graph.erase_node(call)
        if not held.users:
            gm.graph.erase_node(held)


def _take_out(graph: fx.Graph, parameter: fx.Node) -> tuple[str, ...] | None:
    """Let the readers of a parameter's global value read the parameter itself. Returns
    the hint on it."""
    packet, hint = torch.ops.fxpar.to_global, None
    crossings = (packet, packet.default, to_global_unreduced)
    for user in list(parameter.users):
        local = _torch.dynamo.is_to_local(user)
        for node in list(user.users) if local else [user]:
            if node.target not in crossings:
                raise PlanError(
                    f"{node.name} ({node.target}) computes with one rank's part of a "
                    "parameter that fxpar.shard split",
                    where=user_line(node),
                    fix="use the parameter as the module's attribute, which is the "
                    "global value",
                )
            # Parameter or part, shape, spec, hint, ...
            hint = tuple(node.args[3].split(",")) if node.args[3] else None
            node.replace_all_uses_with(parameter)
            graph.erase_node(node)
        if local:
            graph.erase_node(user)
    return hint


def fake_of(x: Any, mode: Any) -> Any:
    """Return a fake of the global value of ``x``, in memory of its own; else ``x``."""
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, DTensor):
        strides = torch.empty(x.shape, device="meta").stride()
    else:
        strides = x.stride()
    with mode:
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def reached(forward: Forward, args: Sequence[Any]) -> set[int]:
    """Return the positions of the trained parameters that the loss depends on, found
    without computing.

    Raises PlanError if the loss is no scalar, or depends on none.
    """
    mode = _torch.fake.new_fake_mode(symbols=True)
    fakes = [fake_of(x, mode) for x in args]
    with mode, torch.enable_grad():
        for i in forward.trained:
            fakes[i].requires_grad_()
        results = _torch.traced_once.run(forward.module, forward.kinds, *fakes)
        loss = loss_of(results, forward)
    ids = {id(fakes[i]): i for i in forward.trained}
    positions, seen, functions = set(), set(), [loss.grad_fn]
    while functions:
        function = functions.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        positions.add(ids.get(id(getattr(function, "variable", None)), -1))
        functions += [before for before, _ in function.next_functions]
    return positions - {-1}


def loss_of(results: Any, forward: Forward) -> torch.Tensor:
    """Return the first result. Raises PlanError if it is no scalar with a gradient."""
    loss = results[0] if results else None
    what = "what loss_fn gives first is the loss: "
    where = user_line(forward.module.graph.output_node().all_input_nodes[0])
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss)
        raise PlanError(
            f"{what}it should be a scalar, and is {shape}",
            where=where,
            fix="reduce it: loss.mean()",
        )
    if not loss.requires_grad:
        raise PlanError(
            f"{what}it depends on no parameter that requires a gradient",
            where=where,
            fix="compute it from the model's outputs, without detach or no_grad",
        )
    return loss


def refuse_shared_memory(
    ends: Sequence[StepInput], args: Sequence[Any], written: Collection[int]
) -> None:
    """Raise PlanError if an input that a step writes shares memory with another: a
    graph takes each as a separate value, so the other would not change with it."""
    extents = [_extent(x) for x in args]
    for i in sorted(written):
        for j, extent in enumerate(extents):
            if i == j or not _has_overlap(extents[i], extent):
                continue
            raise PlanError(
                f"{ends[i].name} and {ends[j].name} share memory, and the step writes "
                f"to {ends[i].name}",
                fix="keep one of them, and take the other from it in the forward, or "
                "torch.compile the model and call optimizer.step()",
            )


def _extent(x: Any) -> tuple[int, int, int] | None:
    """Return storage, first and last element's address in bytes; None if empty."""
    x = x.to_local() if isinstance(x, DTensor) else x
    if not isinstance(x, torch.Tensor) or not x.numel():
        return None
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    first = x.data_ptr()
    return x.untyped_storage().data_ptr(), first, first + reach * x.element_size()


def _has_overlap(
    a: tuple[int, int, int] | None, b: tuple[int, int, int] | None
) -> bool:
    """Return whether two extents share memory."""
    return (
        a is not None
        and b is not None
        and a[0] == b[0]
        and a[1] <= b[2]
        and b[1] <= a[2]
    )


def refuse_hooks(forward: Forward, args: Sequence[Any]) -> None:
    """Raise PlanError if a trained parameter has hooks: its gradient never leaves the
    graph. Hooks of ``fxpar.no_sync`` are allowed, as they have nothing to do here."""
    for i in forward.trained:
        hooks = _torch.objects.gradient_hooks(args[i])
        if any(not str(hook.__module__).startswith("fxpar.") for hook in hooks):
            raise PlanError(
                f"parameter {forward.ends[i].name} has a hook on its gradient, which "
                "fxpar.train_step does not show",
                fix="remove the hook, or torch.compile the model and call "
                "optimizer.step()",
            )
