"""The sizes that ranks call a graph with, and how those of all ranks go together.

Where they differ, ranks may still run together: parts of a batch of unlike sizes, or
other dims that differ while what crosses ranks does not. Anything else is an error that
every rank raises, since every rank knows the sizes of all. Ranks also agree on what
they launch on these sizes, once each has compiled it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.dynamo import example_of
from fxpar.errors import FxparError, InputMismatchError, RankMismatchError
from fxpar.runtime.caches.program_identity import NamedInput, placeholders
from fxpar.runtime.ranks import consensus
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.conventions import batch_axes

# How ranks' sizes go together: alike; other sizes in other dims than the batch; parts
# of the batch of unlike sizes.
SAME, UNLIKE, UNEVEN = "same", "unlike", "uneven"

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


@dataclass(frozen=True)
class SizeAgreement:
    """How the sizes of all ranks go together."""

    # SAME, UNLIKE or UNEVEN.
    kind: str
    # What to raise where that cannot be run.
    mismatch: InputMismatchError | None = None


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class Fed:
    """The inputs of a graph whose sizes may differ between calls, or between ranks.

    ``tensors``, ``numbers``: their positions; ``sources``: of a number that is a size,
    the input and dim it is that of. ``local``: inputs of which each rank feeds a part.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[NamedInput],
        local: Sequence[int],
        mesh: Mesh,
        where: str | None,
    ) -> None:
        self.inputs, self.mesh, self.where = inputs, mesh, where
        self.local = frozenset(local)
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

    def agreement(self, key: tuple[Sizes, ...]) -> SizeAgreement:
        """How sizes go together. Raises InputMismatchError, on all ranks, if they do
        not."""
        if len(set(key)) == 1:
            return SizeAgreement(SAME)
        for n, i in enumerate(self.numbers):
            values = [sizes.numbers[n] for sizes in key]
            if i not in self.sources and len(set(values)) > 1:
                raise self._other_numbers(i, values)
        kind, mismatch = SAME, None
        for n, i in enumerate(self.tensors):
            shapes = [sizes.shapes[n] for sizes in key]
            if len(set(shapes)) == 1:
                continue
            mismatch = self._mismatch(i, shapes)
            rows, tails = zip(*((x[:1], x[1:]) for x in shapes), strict=True)
            now = UNEVEN if len(set(rows)) > 1 else UNLIKE
            both = now == UNEVEN and len(set(tails)) > 1
            if both or kind not in (SAME, now) or not self._by_parts(i, shapes):
                raise mismatch
            kind = now
        if kind == UNEVEN:
            self._require_one_split(key)
        return SizeAgreement(kind, mismatch)

    def _by_parts(self, i: int, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether an input is fed in parts, and has one size on ranks of one part."""
        mesh = self.mesh
        others = [axis for axis in mesh.names if axis not in batch_axes(mesh)]
        alike = len(set(map(len, shapes))) == 1
        return (
            alike
            and i in self.local
            and all(
                shape == shapes[mesh.group(rank, others)[0]]
                for rank, shape in enumerate(shapes)
            )
        )

    def _require_one_split(self, key: tuple[Sizes, ...]) -> None:
        """Raise InputMismatchError if inputs split the batch in other shares."""
        rows = {
            i: [sizes.shapes[n][0] for sizes in key]
            for n, i in enumerate(self.tensors)
            if i in self.local
        }
        one, first = next(iter(rows.items()))
        for i, each in rows.items():
            shares = zip(first, each, strict=True)
            if any(a * sum(each) != b * sum(first) for a, b in shares):
                raise self._other_shares(one, first, i, each)

    def _other_numbers(self, i: int, values: Sequence[Any]) -> InputMismatchError:
        text = ", ".join(f"{x} on rank {rank}" for rank, x in enumerate(values))
        return _on_all_ranks(
            f"number {self.inputs[i].name} differs between ranks: {text}",
            "give it one value on every rank",
            self.where,
        )

    def _other_shares(
        self, one: int, first: Sequence[int], other: int, each: Sequence[int]
    ) -> InputMismatchError:
        texts = [
            f"{self.inputs[i].name} {', '.join(map(str, counts))}"
            for i, counts in ((one, first), (other, each))
        ]
        return _on_all_ranks(
            f"inputs are no parts of one batch: on ranks in turn {texts[0]} rows, "
            f"{texts[1]}",
            "choose rows of all of them at once, in one function under "
            "torch.compiler.disable; or keep all rows, and mask",
            self.where,
        )

    def _mismatch(
        self, i: int, shapes: Sequence[tuple[int, ...]]
    ) -> InputMismatchError:
        other = next(r for r, shape in enumerate(shapes) if shape != shapes[0])
        fact = (
            f"input {self.inputs[i].name} has other sizes on other ranks: "
            f"{list(shapes[0])} on rank 0, {list(shapes[other])} on rank {other}"
        )
        fix = "give every rank tensors of one shape; where each rank feeds its own "
        fix += "part of the batch, set FXPAR_INPUTS=local"
        if i in self.local:
            fix = "let ranks differ in the size of the batch alone, or pad to one "
            fix += "length on all ranks; a smaller last batch: "
            fix += "DataLoader(drop_last=True)"
        return _on_all_ranks(fact, fix, self.where)


def sizes_of(entry: Sequence[Any]) -> Sizes:
    return Sizes(tuple(map(tuple, entry[3])), tuple(entry[4]))


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


def agree_on_launches(
    tag: str, launches: Sequence[str] | None, size_match: SizeAgreement
) -> bool:
    """Return once all ranks came to ``tag`` with the same launches; False on all ranks
    if one has none (None), since it did not compile.

    Raises RankMismatchError if theirs differ, or if one fails or does not come;
    InputMismatchError where they differ because sizes do.
    """
    text, mismatch = "\n".join(launches or ()), size_match.mismatch
    subject, fix = "the collectives they launch", None
    error: type[FxparError] = RankMismatchError
    if size_match.kind == UNLIKE and mismatch is not None:
        subject = f"what crosses between them: {mismatch.what}; more than sums do"
        error, fix = InputMismatchError, mismatch.fix
    digest = consensus.VOID if launches is None else consensus.digest_of(text)
    return consensus.agree(tag, digest, text, what=subject, fix=fix, error=error)
