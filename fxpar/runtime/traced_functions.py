"""Replace functions of torch that break a graph, or cannot be split, in a trace.

In: calls of ``gaussian_nll_loss``, which checks values, and ``ctc_loss``, which has an
op whose sizes depend on data; a trace ends at either. Out: importing this module makes
Dynamo trace the functions here instead; ``AsOneGraph`` does so where Dynamo is not.
``fxpar::ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)``
gives the unreduced loss of each sequence; torch's own op also returns its table of
alignments, as long as the longest target: here the backward computes that table again.

Attention with dropout becomes products, a softmax and a mask of random numbers: kernels
of CUDA draw their masks by the index within the rank's shard, so that each would run
whole on every rank; numbers drawn by global index can be split like any others. On the
CPU, which has no such kernel, torch does the same.

Never: a result of data-dependent size; other numbers or other errors than torch's; a
change to attention without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpar import _torch
from fxpar.errors import warn
from fxpar.sharding.program import user_line

aten = torch.ops.aten


def _table(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor],
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return (targets on the device and in the dtype that torch's kernel wants, its
    losses and table)."""
    targets = targets.to(log_probs.device, torch.long)
    return targets, aten._ctc_loss.Tensor(
        log_probs, targets, *lengths, blank, zero_infinity
    )


@torch.library.custom_op("fxpar::ctc", mutates_args=())
def ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Return the losses ``[batch]`` of ``log_probs`` ``[time, batch, classes]``."""
    lengths = (input_lengths, target_lengths)
    if not log_probs.shape[1]:
        return log_probs.new_empty(0)
    _, (costs, _) = _table(log_probs, targets, lengths, blank, zero_infinity)
    return costs


@ctc.register_fake
def _(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("fxpar::ctc_backward", mutates_args=())
def ctc_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Return the gradient of ``log_probs``; ``grad`` is that of the losses."""
    lengths = (input_lengths, target_lengths)
    if not log_probs.shape[1]:
        return log_probs.new_empty(log_probs.shape)
    targets, table = _table(log_probs, targets, lengths, blank, zero_infinity)
    return aten._ctc_loss_backward.Tensor(
        grad, log_probs, targets, *lengths, *table, blank, zero_infinity
    ).contiguous()


@ctc_backward.register_fake
def _(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape)


def _context(ctx, inputs, output) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad: torch.Tensor):
    of_probs = torch.ops.fxpar.ctc_backward(
        grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity
    )
    return of_probs, *[None] * 5


ctc.register_autograd(_gradients, setup_context=_context)


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return torch's loss, with the check of the variances as an op of the graph."""
    message = "var has negative entry/entries"
    if not isinstance(var, torch.Tensor):
        if var < 0:
            raise ValueError(message)
        var = var * torch.ones_like(input)
    else:
        _torch.dynamo.assert_in_graph(~torch.any(var < 0), message)
    if var.size() != input.size():
        if input.size()[:-1] == var.size():
            var = torch.unsqueeze(var, -1)
        elif input.ndim != var.ndim or not _is_broadcast(input.size(), var.size()):
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _is_broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether sizes differ in a dim of one row, by torch's own test."""
    return sum(y for x, y in zip(one, other, strict=True) if x != y) == 1


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return torch's loss, from an op whose results have fixed sizes."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not a valid value for reduction")
    is_batch = log_probs.dim() == 3
    if not is_batch:
        log_probs = log_probs.unsqueeze(1)
    if log_probs.dtype in (torch.float16, torch.bfloat16):
        log_probs = log_probs.float()
    steps, labels = (
        torch.as_tensor(lengths).reshape(-1)
        for lengths in (input_lengths, target_lengths)
    )
    losses = torch.ops.fxpar.ctc(
        log_probs, targets, steps, labels, blank, zero_infinity
    )
    if zero_infinity:
        losses = torch.where(losses == math.inf, torch.zeros_like(losses), losses)
    if reduction == "mean":
        counts = labels.to(losses.device, losses.dtype).clamp_min(1)
        losses = losses / counts
    return _reduced(losses if is_batch else losses.squeeze(0), reduction)


_INSTEAD: dict[Any, Any] = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.ctc_loss: ctc_loss,
}
for _original, _instead in _INSTEAD.items():
    _torch.dynamo.trace_instead(_original, _instead)


_READS = (torch.Tensor.item, torch.Tensor.__bool__)


class AsOneGraph(TorchFunctionMode):
    """Is a mode inside which these losses are those of this module, attention with
    dropout uses no kernel, and a check that all elements of a tensor hold
    (``torch._check_tensor_all``, validation of ``torch.distributions``) is an assertion
    in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.checks: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _torch.dynamo.IS_ALL_TRUE:
            self.checks.append(torch.all(*args))
            return self.checks[-1]
        if func in _READS and any(args[0] is check for check in self.checks):
            _torch.dynamo.assert_in_graph(args[0], "a check of values does not hold")
            return True
        if func is _ATTEND and _has_dropout(args, kwargs or {}):
            func = attend_by_products
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


_ATTEND = torch.nn.functional.scaled_dot_product_attention
# Position of ``dropout_p`` among the arguments.
_PLACE = 4


def attend_by_products(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``scaled_dot_product_attention``, computed without its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return _ATTEND(*args, **kwargs)


def without_kernels(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a Dynamo graph whose attentions with dropout use no kernel,
    those in bodies included; ``gm`` itself if there are none."""
    if not any(map(_calls, _graphs(gm))):
        return gm
    copy = _torch.dynamo.copy_graph(gm)
    copy.meta = dict(gm.meta)
    for module in _graphs(copy):
        for node in _calls(module):
            node.target = attend_by_products
        module.recompile()
    return copy


def warn_of_products(gm: fx.GraphModule, device_types: Iterable[str]) -> None:
    """Warn that attention of a graph from ``without_kernels`` uses no kernel, where its
    device has some. ``device_types``: of the graph's inputs."""
    nodes = [
        node
        for module in _graphs(gm)
        for node in module.graph.find_nodes(
            op="call_function", target=attend_by_products
        )
    ]
    if not nodes or "cuda" not in device_types:
        return
    warn(
        "attention with dropout is computed by matrix products, not by a fused "
        f"kernel ({len(nodes)} calls): its memory grows with the square of the "
        "sequence, and its random mask differs from that of the kernel on one "
        "device",
        where=user_line(nodes[0]),
        fix="set the dropout of attention to 0 (attn_pdrop, "
        "attention_probs_dropout_prob, attention_dropout), which uses the kernels",
    )


def _graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    nodes = gm.graph.find_nodes(op="call_function", target=_ATTEND)
    return [node for node in nodes if _has_dropout(node.args, node.kwargs)]


def _has_dropout(args: Any, kwargs: Any) -> bool:
    chance = args[_PLACE] if len(args) > _PLACE else kwargs.get("dropout_p", 0.0)
    return not isinstance(chance, (int, float)) or chance > 0
