"""Defines ops of fixed sizes for torch's losses that have data-dependent sizes.

``fxpar::ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)``
gives the loss of each sequence. torch's own op also returns its table of alignments,
as long as the longest target; here the backward computes that table again.

In: the tensors of ``torch.nn.functional.ctc_loss``. Out: losses, unreduced; gradients
of ``log_probs``. Never: a result has a data-dependent size.
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
