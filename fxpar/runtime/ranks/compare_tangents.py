"""Gradients that reach the backward of a graph from outside, compared at the next call.

In global mode they are those of one loss, alike on all ranks. Code in no graph may make
others of a rank's own: noise or dropout drawn from its own seed, labels of its own. A
rank then computes parts of a gradient that nobody has. So some elements of each such
gradient are kept until a call to come, whose word has their sums (``meeting``); where
these differ, ranks compare the elements. They may differ by rounding, and after each
such look the next one waits longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxpar.errors import GradientError
from fxpar.runtime.ranks import check_inputs, worlds
from fxpar.runtime.ranks.comparison_backoff import Backoff
from fxpar.runtime.ranks.element_samples import (
    ALLOWED,
    sample,
    sample_turn,
    sum_of_bits,
)
from fxpar.runtime.ranks.meeting import call_number
from fxpar.runtime.ranks.presence import is_alone

# Gradients that are kept at most between two calls.
_MOST = 64


@dataclass(frozen=True)
class _Tangent:
    """A gradient that reached a backward."""

    # The user's line of a result of the graph.
    made_at: str | None
    # Some of its elements.
    elements: torch.Tensor
    # The sum of their bits.
    total: Callable[[], int]
    # The number of the call that it is told at, so that nobody waits for a device.
    told_at: int


@dataclass
class _Memory:
    """What this rank keeps."""

    # In the order they came.
    tangents: list[_Tangent] = field(default_factory=list)
    # Those that the word of this call has.
    in_word: list[_Tangent] = field(default_factory=list)
    # At elements that may differ.
    backoff: Backoff = field(default_factory=Backoff)


_memory = _Memory()


def forget() -> None:
    """Keep nothing of what came so far: it belongs to programs that are gone."""
    _memory.tangents.clear()
    _memory.in_word.clear()
    _memory.backoff = Backoff()


def note(made_at: str | None, gradients: Sequence[Any]) -> None:
    """Let a call to come compare what reaches the backward of a graph now.
    ``made_at``: the user's line of a result of it."""
    if is_alone():
        return
    now = call_number()
    for x in gradients:
        if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
            continue
        on_cpu = x.device.type == "cpu"
        turn = sample_turn(now, on_cpu=on_cpu)
        if turn is None or len(_memory.tangents) == _MOST:
            continue
        elements, told_at = sample(x.detach(), turn).clone(), now
        total = sum_of_bits(elements)
        read: Callable[[], int] = partial(int, total)
        if not on_cpu:
            read, told_at = check_inputs.on_its_way(total), told_at + 2
        _memory.tangents.append(_Tangent(made_at, elements, read, told_at))


def word() -> str:
    """What to compare at this call."""
    if not _memory.tangents:
        return ""
    now = call_number() + 1
    _memory.in_word = [x for x in _memory.tangents if x.told_at <= now]
    _memory.tangents = [x for x in _memory.tangents if x.told_at > now]
    if not _memory.in_word:
        return ""
    totals = tuple(x.total() for x in _memory.in_word)
    count = sum(x.elements.numel() for x in _memory.in_word)
    return f"{len(totals)}/{count} {hash(totals):x}"


def compare(words: Sequence[str]) -> GradientError | None:
    """What to raise, on all ranks, if what they told differs by more than rounding.
    Ranks that told of other counts, as one that left out a backward, are for
    others to find."""
    tangents, _memory.in_word = _memory.in_word, []
    counts = {word.split(" ")[0] for word in words}
    if len(set(words)) == 1 or len(counts) > 1 or _memory.backoff.pauses():
        return None
    mine = torch.cat([_reals(x.elements).cpu().double() for x in tangents])
    every, begin = check_inputs.gather_rows(mine), 0
    for x in tangents:
        end = begin + _reals(x.elements).numel()
        parts, begin = every[:, begin:end], end
        apart = (parts - parts[0]).norm(dim=1)
        far = apart > ALLOWED * parts.norm(dim=1).max()
        if far.any():
            return _differs(x.made_at, int(far.nonzero()[0]))
    return None


def _reals(x: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).flatten()


def _differs(made_at: str | None, rank: int) -> GradientError:
    error = GradientError(
        "gradients of results of a compiled graph differed between ranks: code that is "
        f"not compiled computes another loss of them on rank "
        f"{worlds.global_rank(rank)} than on rank {worlds.global_rank(0)}",
        where=made_at,
        fix="compute the loss alike on every rank, with noise and dropout from one "
        "seed; or, where each rank has its own part of the batch, set "
        "FXPAR_INPUTS=local and feed it so",
    )
    error.told = True
    return error
