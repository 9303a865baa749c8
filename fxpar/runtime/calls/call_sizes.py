"""Checks that all ranks call a graph with the same sizes and launch the same.

In: a Dynamo graph, and the arguments of each call. Out: the sizes of one rank's call
(``Sizes``), and an error where those of ranks differ: every rank raises it, since every
rank knows the sizes of all. Ranks also agree on what they launch on these sizes, once
each has compiled it. Never: an error on some ranks only.
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
    """Holds the sizes and numbers that one rank calls a graph with."""

    # Shapes of the tensors at ``Fed.tensors``.
    shapes: Shapes
    # Values of the inputs at ``Fed.numbers``.
    numbers: tuple[Any, ...]

    def distance(self, other: Sizes) -> float:
        """Return the largest ratio, at least 1, between a size and the same size of
        ``other``. Infinite if numbers of dims differ."""
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
    """Holds the inputs of a graph whose sizes may differ between calls.

    ``tensors``, ``numbers``: their positions; ``sources``: for a number that is the
    size of a tensor input, the position of that input and the dim.
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
            elif isinstance(value, torch.Tensor) and _can_vary(name, value):
                self.tensors.append(i)
        self.sources = _sources(values)

    def sizes(self, args: Sequence[Any]) -> Sizes:
        """Return the sizes and numbers among the arguments of a call of one rank."""
        return Sizes(
            tuple(tuple(args[i].shape) for i in self.tensors),
            tuple(args[i] for i in self.numbers),
        )

    def require_same(self, key: Sequence[Sizes]) -> None:
        """Raise InputMismatchError, on all ranks, if their sizes or numbers differ."""
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
    """Return an error that is marked as raised by every rank."""
    error = InputMismatchError(fact, where=where, fix=fix)
    error.is_reported = True
    return error


def _can_vary(entry: NamedInput, value: torch.Tensor) -> bool:
    """Return whether an input may have another shape at another call."""
    open_sizes = any(isinstance(size, torch.SymInt) for size in value.shape)
    return entry.kind == "input" or open_sizes


def _sources(values: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Map the position of each number that is a size to (input, dim). Of several
    inputs with that size the first counts."""
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
    """Wait until all ranks come to ``tag`` with the same launches, and return whether
    all compiled: False, on all ranks, if the launches of one are None.

    Raises RankMismatchError if theirs differ, or if one fails or does not come.
    """
    text = "\n".join(launches or ())
    digest = consensus.VOID if launches is None else consensus.digest_of(text)
    return consensus.agree(tag, digest, text, what="the collectives they launch")
