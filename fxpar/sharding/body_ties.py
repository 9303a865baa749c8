"""Says how the tensors of an op that runs graphs of its own become tensors of these
graphs.

In: an op, its arguments and its result. Out: ``Ties``, or None for an op that is not
known.
Never: looks into the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar import _torch


@dataclass(frozen=True)
class Ties:
    """Says how a call's tensors become tensors of its bodies, which take equal
    inputs."""

    # In the order of the call: branches, or the condition of a loop and its step.
    bodies: tuple[fx.GraphModule, ...]
    # For each placeholder the position of its operand (None: no tensor), and whether it
    # is one slice of the operand along dim 0.
    inputs: tuple[tuple[int | None, bool], ...]
    # For each body, for each of its outputs, the position of the result that it gives
    # (None: none), and whether it is a slice of it.
    outputs: tuple[tuple[tuple[int | None, bool], ...], ...]
    # How many outputs of the last body are its first inputs in the next iteration.
    carried: int = 0
    # Whether different ranks may take different slices.
    splits_slices: bool = False


def _inputs(
    *groups: tuple[Sequence[Any], bool], first: int = 0
) -> tuple[tuple[int | None, bool], ...]:
    """Return ``Ties.inputs`` for groups of (arguments, whether slices are given)."""
    out: list[tuple[int | None, bool]] = []
    for values, sliced in groups:
        for x in values:
            is_tensor = isinstance(x, torch.Tensor)
            out.append((first if is_tensor else None, sliced))
            first += is_tensor
    return tuple(out)


def _outputs(count: int, whole: int) -> tuple[tuple[int | None, bool], ...]:
    """Return ``count`` results, where those after the first ``whole`` are stacked
    slices."""
    return tuple((i, i >= whole) for i in range(count))


def _cond(count: int, pred: Any, yes: Any, no: Any, operands: Sequence[Any]) -> Ties:
    first = int(isinstance(pred, torch.Tensor))
    outputs = _outputs(count, count)
    return Ties((yes, no), _inputs((operands, False), first=first), (outputs, outputs))


def _map(count: int, body: Any, xs: Sequence[Any], others: Sequence[Any]) -> Ties:
    inputs = _inputs((xs, True), (others, False))
    return Ties((body,), inputs, (_outputs(count, 0),), splits_slices=True)


def _scan(
    count: int, body: Any, init: Sequence[Any], xs: Sequence[Any], others: Sequence[Any]
) -> Ties:
    inputs = _inputs((init, False), (xs, True), (others, False))
    outputs = _outputs(count, len(init))
    return Ties((body,), inputs, (outputs,), carried=len(init))


def _while(
    count: int, test: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]
) -> Ties:
    inputs = _inputs((carried, False), (others, False))
    outputs = _outputs(count, count)
    return Ties((test, body), inputs, (((None, False),), outputs), carried=len(carried))


# op -> function of (number of results, *arguments) that returns its Ties.
TIES: dict[str, Callable[..., Ties]] = {
    "higher_order::cond": _cond,
    "higher_order::map_impl": _map,
    "higher_order::scan": _scan,
    "higher_order::while_loop": _while,
}


def ties_of(target: Any, args: Sequence[Any], result: Any) -> Ties | None:
    """Return how a call's tensors become tensors of its bodies; None if the op is not
    known, or if a loop takes, carries or gives a value that is no tensor."""
    make = TIES.get(_torch.aot.higher_order_name(target))
    results = result if isinstance(result, (list, tuple)) else [result]
    if make is None or not all(isinstance(x, torch.Tensor) for x in results):
        return None
    ties = make(len(results), *args)
    carried = ties.inputs[: ties.carried]
    return None if any(i is None for i, _ in carried) else ties
