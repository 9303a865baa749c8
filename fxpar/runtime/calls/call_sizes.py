"""The sizes that ranks call a graph with, which must be the same on all of them.

Where they differ every rank raises the error, since every rank knows the sizes of all.
Ranks also agree on what they launch on these sizes, once each has compiled it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.dynamo import example_of
from fxpar.errors import InputMismatchError
from fxpar.runtime.caches.program_identity import NamedInput, placeholders
from fxpar.runtime.ranks import consensus

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """What one rank calls a graph with."""

    # Of the tensors at ``Fed.tensors``.
    shapes: Shapes
    # Values of the inputs at ``Fed.numbers``.
    numbers: tuple[Any, ...]

    def apart(self, other: Sizes) -> float:
        """How many times as large a size is as the other's, or that as this; of the
        sizes for which that is the most. Infinite if they are of unlike ranks."""
        pairs = zip(
            (self.numbers, *self.shapes), (other.numbers, *other.shapes), strict=True
        )
        most = 1.0
        for mine, theirs in pairs:
            if len(mine) != len(theirs):
                return math.inf
            for a, b in zip(mine, theirs, strict=True):
                if a != b:
                    small, large = sorted((abs(a), abs(b)))
                    most = max(most, large / small if small else math.inf)
        return most


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class Fed:
    """The inputs of a graph whose sizes may differ between calls.

    ``tensors``, ``numbers``: their positions; ``sources``: of a number that is a size,
    the input and dim it is that of.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[NamedInput],
        where: str | None,
    ) -> None:
        self.inputs, self.where = inputs, where
        values = [example_of(node) for node in placeholders(gm)]
        self.tensors, self.numbers = list[int](), list[int]()
        for i, (name, value) in enumerate(zip(inputs, values, strict=True)):
            if isinstance(value, _NUMBERS):
                self.numbers.append(i)
            elif isinstance(value, torch.Tensor) and _varies(name, value):
                self.tensors.append(i)
        self.sources = _sources(values)

    def sizes(self, args: Sequence[Any]) -> Sizes:
        """What one rank calls the graph with."""
        return Sizes(
            tuple(tuple(args[i].shape) for i in self.tensors),
            tuple(args[i] for i in self.numbers),
        )

    def require_same(self, key: Sequence[Sizes]) -> None:
        """Raise InputMismatchError, on all ranks, if ranks call with other sizes."""
        for n, i in enumerate(self.numbers):
            values = [sizes.numbers[n] for sizes in key]
            if i not in self.sources and len(set(values)) > 1:
                raise self._other_numbers(i, values)
        for n, i in enumerate(self.tensors):
            shapes = [sizes.shapes[n] for sizes in key]
            if len(set(shapes)) > 1:
                raise self._mismatch(i, shapes)

    def _other_numbers(self, i: int, values: Sequence[Any]) -> InputMismatchError:
        text = ", ".join(f"{x} on rank {rank}" for rank, x in enumerate(values))
        return _on_all_ranks(
            f"number {self.inputs[i].name} differs between ranks: {text}",
            "give it one value on every rank",
            self.where,
        )

    def _mismatch(
        self, i: int, shapes: Sequence[tuple[int, ...]]
    ) -> InputMismatchError:
        other = consensus.first_other(shapes) or 0
        fact = (
            f"input {self.inputs[i].name} has other sizes on other ranks: "
            f"{list(shapes[0])} on rank 0, {list(shapes[other])} on rank {other}"
        )
        fix = "give every rank tensors of one shape; where each rank feeds its own "
        fix += "part of the batch, set FXPAR_INPUTS=local"
        return _on_all_ranks(fact, fix, self.where)


def _on_all_ranks(fact: str, fix: str, where: str | None) -> InputMismatchError:
    """The error, which every rank raises."""
    error = InputMismatchError(fact, where=where, fix=fix)
    error.told = True
    return error


def _varies(entry: NamedInput, value: torch.Tensor) -> bool:
    """Whether an input may have another shape at another call."""
    open_sizes = any(isinstance(size, torch.SymInt) for size in value.shape)
    return entry.kind == "input" or open_sizes


def _sources(values: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Numbers among the inputs that are sizes: position -> (input, dim). Rows come
    first: a size may be that of several inputs."""
    places: dict[str, tuple[int, int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    places.setdefault(str(size), (i, dim))
    return {
        i: places[str(value)]
        for i, value in enumerate(values)
        if isinstance(value, torch.SymInt) and str(value) in places
    }


def agree_on_launches(tag: str, launches: Sequence[str] | None) -> bool:
    """Return once all ranks came to ``tag`` with the same launches; False on all ranks
    if one has none (None), since it did not compile.

    Raises RankMismatchError if theirs differ, or if one fails or does not come.
    """
    text = "\n".join(launches or ())
    digest = consensus.VOID if launches is None else consensus.digest_of(text)
    return consensus.agree(tag, digest, text, what="the collectives they launch")
