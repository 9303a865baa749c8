"""Copies the inputs of a call to the strides that the program was compiled for.

Dynamo traces code again for a tensor with other strides (columns of a larger one, as
``ids[:, :-1]``), and gives the same program. In: the compiled program, and the strides
of its inputs. Out: a callable that takes inputs of any strides: it copies those with
other strides, and writes back what the program writes to a copy. Never: a copy of an
input that has the compiled strides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

Strides = tuple[int, ...]


def for_any_strides(
    run: Callable[..., Any], strides: Mapping[int, Strides], written: Collection[int]
) -> Callable[..., Any]:
    """Return ``run`` for inputs of any strides. ``strides``: those that ``run`` takes,
    by input position; ``written``: positions of the inputs that ``run`` writes to."""
    if not strides:
        return run

    def call(*args: Any) -> Any:
        copies = {
            i: _copied(args[i], stride)
            for i, stride in strides.items()
            if args[i].stride() != stride and not _lies_so(args[i], stride)
        }
        if not copies:
            return run(*args)
        results = run(*(copies.get(i, x) for i, x in enumerate(args)))
        with torch.no_grad():
            for i in copies.keys() & set(written):
                args[i].copy_(copies[i])
        return results

    return call


def _lies_so(x: torch.Tensor, stride: Strides) -> bool:
    """Return whether ``x`` has these strides; dims of one element do not count."""
    if not x.numel():
        return True
    dims = zip(x.shape, x.stride(), stride, strict=True)
    return all(n == 1 or own == other for n, own, other in dims)


def _copied(x: torch.Tensor, stride: Strides) -> torch.Tensor:
    """Return a copy with other strides, through which gradients flow. Along dims of
    stride 0 only the first element is copied."""
    rows = x
    for d, step in enumerate(stride):
        rows = rows if step else rows.narrow(d, 0, min(x.shape[d], 1))
    copy = torch.empty_strided(rows.shape, stride, dtype=x.dtype, device=x.device)
    return copy.copy_(rows).expand(x.shape)
