"""Change gradients between the backward and the update of a traced training step.

In: parameters with their gradients in ``grad``, and what the user asks. Out: the same,
with gradients of earlier calls added, or without the scale of the loss; and the update
left out where a gradient is not finite. Never: other numbers than those of
``backward()`` called several times and of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpar import _torch
from fxpar.errors import OptionError
from fxpar.features.train_step.optimizer import is_number
from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers its ops)
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class GradientOptions:
    """Holds what the user asks of a step."""

    # The largest global norm of the gradients.
    clip: float | None = None
    # How many calls an update takes the mean gradient of.
    accumulate: int = 1
    # Scales the loss, where gradients may overflow.
    scaler: torch.amp.GradScaler | None = None

    def check(self) -> None:
        """Raise OptionError for values that are out of range or of a wrong type."""
        clip, calls = self.clip, self.accumulate
        if clip is not None and not (is_number(clip) and clip > 0):
            raise OptionError(
                f"clip cannot be {clip!r}", fix="give the largest norm, as clip=1.0"
            )
        if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
            raise OptionError(
                f"accumulate cannot be {calls!r}",
                fix="give the number of calls per update, as accumulate=4",
            )
        if self.scaler is not None and not isinstance(
            self.scaler, torch.amp.GradScaler
        ):
            raise OptionError(
                f"scaler cannot be {self.scaler!r}",
                fix="give a torch.amp.GradScaler",
            )

    @property
    def has_scaler(self) -> bool:
        """Return whether the loss is scaled."""
        return self.scaler is not None and self.scaler.is_enabled()


@dataclass(frozen=True)
class StepCall:
    """Holds what a step does in addition to forward and backward."""

    # The largest global norm of the gradients.
    clip: float | None = None
    # How many calls an update takes the mean gradient of.
    calls: int = 1
    # Whether this is the last of those calls.
    updates: bool = True
    # Positions of parameters whose gradients of earlier calls are inputs, and are
    # written unless this is the last call.
    accumulated: tuple[int, ...] = ()
    # Whether the loss is scaled, and an update left out if a gradient is not finite.
    scaled: bool = False
    # Whether gradients become means over ranks.
    averages: bool = False


def add_accumulated(
    forward_args: Sequence[Any], accumulated: Mapping[int, torch.Tensor], write: bool
) -> None:
    """Add gradients of earlier calls, ``accumulated`` by position of the parameter;
    ``write``: hold the sums for the next call."""
    with torch.no_grad():
        for i, before in accumulated.items():
            gradient = forward_args[i].grad
            total = before if gradient is None else before + gradient
            forward_args[i].grad = total
            if write and gradient is not None:
                before.copy_(total)


def average(
    forward_args: Sequence[Any],
    rest_specs: Mapping[int, Spec | None],
    *,
    in_parts: bool,
) -> None:
    """Make gradients means over the ranks of manual axes.

    rests: by position of a trained parameter, its spec at rest, None for a plain
    tensor. in_parts: average the gradients of sharded parameters, which stay sharded;
    else those of the others.
    """
    with torch.no_grad():
        for i, at_rest in rest_specs.items():
            x = forward_args[i]
            if x.grad is not None and in_parts == (at_rest is not None):
                spec = str(at_rest or Spec.whole(x.dim()))
                x.grad = torch.ops.fxpar.mean_over_ranks(x.grad, spec)


def unscale(
    forward_args: Sequence[Any], updated: Iterable[int], scale: torch.Tensor
) -> torch.Tensor:
    """Divide all gradients by the scale, and return how many numbers in those of the
    parameters at ``updated`` are not finite: a sum, which ranks add once for all of
    them."""
    with torch.no_grad():
        inverse = scale.double().reciprocal().float()
        bad = torch.zeros((), device=scale.device)
        for i in updated:
            gradient = forward_args[i].grad
            if gradient is not None:
                bad = bad + (~torch.isfinite(gradient)).float().sum()
        for x in forward_args:
            if isinstance(x, torch.Tensor) and x.is_leaf and x.grad is not None:
                wide = torch.promote_types(x.dtype, torch.float32)
                x.grad = (x.grad.to(wide) * inverse.to(wide)).to(x.dtype)
        return bad


@contextlib.contextmanager
def unless(bad: torch.Tensor | None, written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore tensors written inside to their old values if ``bad`` is positive."""
    if bad is None:
        yield
        return
    with torch.no_grad():
        before = [
            (x, x.detach().clone(), _torch.objects.version_of(x)) for x in written
        ]
        yield
        for x, old, version in before:
            if _torch.objects.version_of(x) != version:
                x.copy_(torch.where(bad > 0, old, x))
