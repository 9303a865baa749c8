"""How the tensors of an op that runs graphs of its own become those of these graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar import _torch


@dataclass(frozen=True)
class Ties:
    """How a call's tensors become those of its bodies, which take the same inputs."""

    # As the call has them: branches, or the test of a loop and its step.
    bodies: tuple[fx.GraphModule, ...]
    # For each placeholder the position of the operand it comes from (None: no tensor),
    # and whether it is one slice of that along dim 0.
    inputs: tuple[tuple[int | None, bool], ...]
    # For each body and each of its outputs the result it gives (None: none), and
    # whether it is a slice.
    outputs: tuple[tuple[tuple[int | None, bool], ...], ...]
    # So many outputs of the last body are its first inputs next.
    carried: int = 0
    # Whether slices may be taken by different ranks.
    splits_slices: bool = False


def _inputs(
    *groups: tuple[Sequence[Any], bool], first: int = 0
) -> tuple[tuple[int | None, bool], ...]:
    """Of groups of arguments, the second of each says whether slices are given."""
    out: list[tuple[int | None, bool]] = []
    for values, sliced in groups:
        for x in values:
            is_tensor = isinstance(x, torch.Tensor)
            out.append((first if is_tensor else None, sliced))
            first += is_tensor
    return tuple(out)


def _outputs(count: int, whole: int) -> tuple[tuple[int | None, bool], ...]:
    """So many results, those behind the first ``whole`` stacked from slices."""
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


# op -> (number of results, *arguments) -> how its tensors become those of its bodies.
TIES: dict[str, Callable[..., Ties]] = {
    "higher_order::cond": _cond,
    "higher_order::map_impl": _map,
    "higher_order::scan": _scan,
    "higher_order::while_loop": _while,
}


def ties_of(target: Any, args: Sequence[Any], result: Any) -> Ties | None:
    """How a call's tensors become those of its bodies; None if that is not known, or
    some of what it takes or gives in a loop is no tensor."""
    make = TIES.get(_torch.aot.higher_order_name(target))
    results = result if isinstance(result, (list, tuple)) else [result]
    if make is None or not all(isinstance(x, torch.Tensor) for x in results):
        return None
    ties = make(len(results), *args)
    carried = ties.inputs[: ties.carried]
    return None if any(i is None for i, _ in carried) else ties
