"""Losses of torch whose graphs have sizes that data says, as ops of fixed sizes.

``fxpar::ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)``:
of each sequence what the targets cost. torch's own op gives its table of alignments
too, as long as the longest target; here the backward makes that table once more.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def _table(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor],
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """(targets where torch's kernel wants them, its results)."""
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
    """Of ``[time, batch, classes]``, a cost for each of the batch."""
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
    """Of ``log_probs``."""
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
