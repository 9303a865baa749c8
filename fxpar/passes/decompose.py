"""Replaces ops that run in one way only: those for which Inductor has no kernel
(``decompose``), and those that torch runs in compiled code only (``op_by_op``).

``decompose``. In: the graph one rank runs. Out: the same graph, changed in place,
computing the same values. AOTAutograd traces a program with Inductor's decompositions;
ops that passes add later were never traced, and Inductor refuses an op that it
decomposes. It also refuses (2.13) flex_attention on CPU that returns log-sum-exps: that
is written out by products and a softmax over all scores, whose functions of scores and
masks are graphs. Never: an op that Inductor takes is touched, or a graph that is run op
by op; the lists of blocks of a flex_attention are not read: they say what a kernel
skips, not what a query sees.

``op_by_op``. In: the target of a call, and the dtype that it names. Out: the function
to call in its place; for most ops the target itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar._torch.objects import calls_where
from fxpar.graph.builder import Builder, replace_items
from fxpar.graph.graph_bodies import body_of

Function = Callable[..., torch.Tensor]

# The argument of a function that is counted along each dim of scores, innermost first:
# key, query, head, batch.
_DIMS = (3, 2, 1, 0)


def can_be_written_out(target: Any) -> bool:
    """Return whether calls of a target may need to be written out."""
    return _torch.aot.higher_order_name(target) == "higher_order::flex_attention"


def is_written_out(node: fx.Node) -> bool:
    """Return whether Inductor has no kernel for a call."""
    if not can_be_written_out(node.target):
        return False
    query, options = node.args[0], node.args[6]
    on_cpu = query.meta["val"].device.type == "cpu"
    return on_cpu and bool(options.get("OUTPUT_LOGSUMEXP"))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Function, mask: Any,
    scale: float, options: Any, score_captured: Any = (), mask_captured: Any = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return output, log-sum-exps to base 2 and largest scores, as ``flex_attention``
    does."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).to(dtype) for x in (k, v))
    scores = (q.to(dtype) @ keys.mT) * scale
    places = [torch.arange(n, device=q.device) for n in scores.shape]
    seen = _over_places(mask[-1], 0, len(mask_captured))(*places, *mask_captured)
    changed = _over_places(score, 1, len(score_captured))
    scores = changed(scores, *places, *score_captured).to(dtype)
    scores = torch.where(seen, scores, -math.inf)
    most = scores.amax(-1)
    shift = torch.where(most == -math.inf, 0.0, most)
    weights = (scores - shift.unsqueeze(-1)).exp()
    sums = weights.sum(-1)
    seen_sums = torch.where(sums == 0, 1.0, sums)
    out = (weights @ values) / seen_sums.unsqueeze(-1)
    lse = torch.where(sums == 0, -math.inf, sums.log() + shift)
    logs, most = ((x / math.log(2)).float() for x in (lse, most))
    return out.to(q.dtype), logs, most


def _over_places(function: Function, scores: int, captured: int) -> Function:
    """Return a function of one place, and of its score if it takes one, mapped over all
    places."""
    for dim in _DIMS:
        counted = [0 if i == dim else None for i in range(len(_DIMS))]
        in_dims = (*[0] * scores, *counted, *[None] * captured)
        function = torch.func.vmap(function, in_dims=in_dims)
    return function


def decompose(graph: fx.Graph, fake_mode: Any) -> None:
    """Decompose the ops of a graph that Inductor has no kernel for, in place."""
    build = Builder(graph, fake_mode)
    table = _torch.inductor.decompositions()
    decomposed = calls_where(graph, _torch.inductor.is_decomposed)
    written_out = calls_where(graph, can_be_written_out)
    written_out = [n for n in written_out if is_written_out(n)]
    for node in decomposed:
        _decompose_node(build, node, node.target, table)
    for node in written_out:
        _decompose_node(build, node, attend, table)
    if decomposed or written_out:
        graph.lint()


def _decompose_node(
    build: Builder,
    node: fx.Node,
    function: Callable[..., Any],
    table: Mapping[Any, Any],
) -> None:
    """Replace a node by the decomposed trace of a function that computes the same."""
    bodies = {n: n.meta["val"] for n in node.all_input_nodes if body_of(n) is not None}
    operands = [n for n in node.all_input_nodes if n not in bodies]

    def call(*values: Any) -> Any:
        value_of = bodies | dict(zip(operands, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of.__getitem__)
        return function(*args, **kwargs)

    with build.fake_mode, torch.no_grad():
        values = [operand.meta["val"] for operand in operands]
        parts = make_fx(call, decomposition_table=dict(table))(*values).graph
    if parts.find_nodes(op="get_attr"):
        return  # a constant that the graph would have to hold
    copies = dict(zip(parts.find_nodes(op="placeholder"), operands, strict=True))
    with build.before(node):
        for part in parts.nodes:
            if part.op == "call_function":
                copies[part] = build.graph.node_copy(part, copies.__getitem__)
                copies[part].meta = {"val": part.meta["val"]}
                build.stamp(copies[part])
    result: Any = fx.node.map_arg(parts.output_node().args[0], copies.__getitem__)
    replace = build.replace if isinstance(result, fx.Node) else replace_items
    replace(node, result)


# Ops that torch runs in compiled code only, where ops run one by one

_IOTA = torch.ops.prims.iota.default

# torch makes an identity matrix of the smallest dtype that counts its rows; on CPU it
# (2.13) has no iota in these dtypes.
_WIDE = (torch.uint16, torch.uint32, torch.uint64)


def op_by_op(target: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the function to call for an op."""
    if target is _IOTA and dtype in _WIDE:
        return count
    if _torch.aot.higher_order_name(target) == "higher_order::flex_attention_backward":

        def run(*args: Any) -> Any:
            return _with_gradients(target, *args)

        return run
    return target


def count(length: int, *, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """Return ``length`` evenly spaced integers, as ``prims.iota``, in any dtype."""
    return _IOTA(length, dtype=torch.int64, **options).to(dtype)


def _with_gradients(target: Any, *args: Any) -> Any:
    """Run the backward of flex_attention, which (torch 2.13) computes gradients of
    captured tensors only if they require gradients when it runs."""
    joint, captured = args[8], args[12] if len(args) > 12 else ()
    (results,) = joint.graph.output_node().args
    operands = [
        x if grad is None else x.detach().requires_grad_()
        for x, grad in zip(captured, results[5:], strict=True)
    ]
    with torch.no_grad():
        return target(*args[:12], tuple(operands), *args[13:])
