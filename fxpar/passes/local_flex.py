"""Local form of flex_attention: its score and mask functions count batch and heads by
global index, so that they see what they see on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.passes.builder import Builder
from fxpar.passes.graph_bodies import body_of, module_of, new_body
from fxpar.passes.local_call import LocalCall, Localizer

# Where a score function has batch and head among its arguments, and a mask function.
_SCORE, _MASK = (1, 2), (0, 1)


def _shifted(call: LocalCall, node: fx.Node, places: tuple[int, int]) -> fx.Node:
    """A function of scores, its batch and head moved on by where this rank's begin."""
    body = body_of(node)
    assert body is not None
    inputs = body.graph.find_nodes(op="placeholder")
    moved = [
        (inputs[place], call.operands[0].dims[d], call.operand_shape(0)[d])
        for d, place in enumerate(places)
    ]
    moved = [(x, axes, size) for x, axes, size in moved if x.users and axes]
    if not moved:
        return node
    build = Builder(fx.Graph(), call.build.fake_mode, call.build.mesh)
    done: dict[fx.Node, Any] = {}
    for old in body.graph.nodes:
        done[old] = build.graph.node_copy(old, done.__getitem__)
        done[old].meta = dict(old.meta)
        if old is inputs[-1]:
            for x, axes, size in moved:
                start = build.offset(axes, size)
                done[x] = build.call(torch.ops.aten.add.Tensor, done[x], start)
    made = module_of(body, build.graph)
    return new_body(call.build, node, made, call.node.name)


def _forward(
    call: LocalCall, q: Any, k: Any, v: Any, score: Any, mask: Any, *rest: Any
):
    mask = (*mask[:-1], _shifted(call, mask[-1], _MASK))
    return call.same(q, k, v, _shifted(call, score, _SCORE), mask, *rest)


def _backward(call: LocalCall, *args: Any):
    *given, forward, joint, mask = args[:10]
    functions = (_shifted(call, body, _SCORE) for body in (forward, joint))
    mask = (*mask[:-1], _shifted(call, mask[-1], _MASK))
    return call.same(*given, *functions, mask, *args[10:])


def op_by_op(target: Any) -> Any:
    """What to call for an op outside of Inductor: the op itself, save for the backward
    of flex_attention, which (torch 2.13) gives gradients of captured tensors only where
    these require them as they are run."""
    if _torch.aot.higher_order_name(target) == "higher_order::flex_attention_backward":

        def run(*args: Any) -> Any:
            return _with_gradients(target, *args)

        return run
    return target


def _with_gradients(target: Any, *args: Any) -> Any:
    joint, others = args[8], args[12] if len(args) > 12 else ()
    (results,) = joint.graph.output_node().args
    wanted = [
        x if grad is None else x.detach().requires_grad_()
        for x, grad in zip(others, results[5:], strict=True)
    ]
    with torch.no_grad():
        return target(*args[:12], tuple(wanted), *args[13:])


LOCAL: dict[Any, Localizer] = {
    "higher_order::flex_attention": _forward,
    "higher_order::flex_attention_backward": _backward,
}
