"""Holds the request of a compilation (``CompileJob``), and the programs that a graph
was compiled to so far (``Variants``), for open sizes or for the sizes of one call.

In: a Dynamo graph and the sizes of a call. Out: the program that holds for these sizes,
if there is one. Never: compiles.

Dynamo traces code again for a tensor with other strides (columns of a larger one, as
``ids[:, :-1]``), and gives the same program: inputs with other strides than it was
compiled for are copied, and results written to a copy are written back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar.config import Options
from fxpar.runtime.caches.program_identity import NamedInput
from fxpar.runtime.calls.call_sizes import Sizes
from fxpar.runtime.calls.open_sizes import (
    OpenProgram,
    SizeRange,
)
from fxpar.runtime.ranks.groups import Ranks
from fxpar.sharding.plan import Plan
from fxpar.sharding.spec import Spec

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
            if args[i].stride() != stride and not _has_strides(args[i], stride)
        }
        if not copies:
            return run(*args)
        results = run(*(copies.get(i, x) for i, x in enumerate(args)))
        with torch.no_grad():
            for i in copies.keys() & set(written):
                args[i].copy_(copies[i])
        return results

    return call


def _has_strides(x: torch.Tensor, stride: Strides) -> bool:
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


# Sizes that differ by this factor may be better off with another plan.
TWICE = 2.0


@dataclass(frozen=True)
class CompileJob:
    """Holds all that the compilation of a graph takes, except the graph itself."""

    # Options of the compiled function, as they were read.
    options: Options
    # This rank in the mesh, and its process groups.
    ranks: Ranks
    # One for each input of the graph, in order.
    named_inputs: Sequence[NamedInput]
    # Specs that results must have, by position.
    rest_specs: Mapping[int, Spec] = field(default_factory=dict)
    # Inputs are written, and keep their layout.
    writes: bool = False
    # The graph takes its open sizes as symbols.
    open: OpenProgram | None = None
    # A plan to follow; None: one is made.
    recalled: Plan | None = None
    # A plan that is left only for one that is faster by ``options.replan``.
    rival: Plan | None = None
    # As of the request.
    sent_room: int | None = None
    # Notes of the plan on how it was made.
    notes: tuple[str, ...] = ()


# Compiles a graph with its examples as a job says.
CompileGraph = Callable[[CompileJob, fx.GraphModule, Sequence[Any]], Any]


@dataclass
class Variants:
    """Holds what was compiled of graphs with the same content."""

    # Compiled callables by number, which is the same on all ranks.
    run: dict[int, Callable[..., Any]] = field(default_factory=dict)
    # The number of the variant for sizes.
    keys: dict[Sizes, int] = field(default_factory=dict)
    # The number of the variant last run for sizes.
    last: dict[Sizes, int] = field(default_factory=dict)
    # By number: the sizes that a variant with open sizes holds for.
    ranges: dict[int, SizeRange] = field(default_factory=dict)
    # Why the last variant with open sizes could not be made; "" if it could.
    refused: str = ""
    # How many of those could not be made; two end the attempts.
    refusals: int = 0
    # Names of sizes that could not be left open.
    closed: set[str] = field(default_factory=set)
    # Sizes that a plan was made for, or looked for, and the variant that they run.
    planned_for: dict[Sizes, int] = field(default_factory=dict)

    def in_range(self, sizes: Sizes, *, far: bool = True) -> int:
        """Return the number of the variant with open sizes that holds for ``sizes``,
        the one planned for the nearest sizes. 0 if none does, or, unless ``far``, if
        some size differs from the planned one by TWICE or more."""
        hold = {
            number
            for number in set(self.planned_for.values())
            if self.ranges[number].contains(sizes.shapes, sizes.numbers)
        }
        if far and len(hold) < 2:
            return next(iter(hold), 0)
        distances = [
            (sizes.distance(planned), number)
            for planned, number in self.planned_for.items()
            if number in hold
        ]
        distance, number = min(distances, default=(math.inf, 0))
        return number if far or distance < TWICE else 0


def is_strided(x: Any) -> bool:
    """Return whether a value is a tensor with strides, and not a DTensor."""
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return strided and not isinstance(x, DTensor)
