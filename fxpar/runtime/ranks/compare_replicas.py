"""Parameters and buffers that ranks hold alike, compared at every call of a graph.

In full they are compared at the first call (``check_inputs``). Later one rank may write
to them by itself: it alone loads a checkpoint, or takes averaged weights. So the word
of each call (``meeting``) says two things more: how often each tensor was written in
place since all were alike, and at many calls a sum of some elements of one tensor,
another each time, for writes that torch does not count (to ``.data``). Where these
differ, ranks compare the tensors in full, then and there. Ranks may count unlike where
what they hold is alike (one loads, then sends it to all), and replicas may drift apart
by rounding: neither is an error, and after each such look the next one waits longer. Of
parameters in parts, which no two ranks hold alike, the counts of all writes are
compared alone, at every call: one that only some ranks wrote to is an error.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpar import _torch
from fxpar.errors import InputMismatchError
from fxpar.runtime.ranks import check_inputs, worlds
from fxpar.runtime.ranks.comparison_backoff import Backoff
from fxpar.runtime.ranks.element_samples import (
    ALLOWED,
    sample,
    sample_turn,
    sketch,
    sum_of_bits,
)
from fxpar.runtime.ranks.meeting import call_number
from fxpar.sharding.mesh import Mesh

_WRITE_FIX = (
    "write to it alike on every rank (load the checkpoint on all of them), or send "
    "what one rank wrote to all by torch.distributed.broadcast before the next call"
)
_PARTS_FIX = (
    "write to it alike on every rank, each its part: load the checkpoint on all of them"
)
_STEP_FIX = (
    "take every step of an optimizer on every rank, at the same learning rate: decide "
    "by what all ranks have, as a loss that torch.distributed.all_reduce averaged"
)
_UPDATE_FIX = (
    "change gradients, learning rates and parameters alike on every rank: draw noise "
    "from one seed, decide by what all ranks have alike"
)


@dataclass(frozen=True)
class _Held:
    """A parameter or a buffer among the inputs of a graph."""

    # Position among the arguments.
    place: int
    # As the user knows it.
    name: str
    # "parameter" or "buffer".
    kind: str
    # For each rank the rank whose values it must equal.
    models: tuple[int, ...]


class Replicas:
    """The parameters and buffers of one graph. Each rank gives ``word`` at every call,
    then ``compare`` what all gave; after a comparison of all inputs in full it calls
    ``settle``. ``held``: their names and kinds, by position."""

    def __init__(
        self,
        held: Mapping[int, tuple[str, str]],
        examples: Sequence[Any],
        mesh: Mesh,
    ) -> None:
        self.held = [
            _Held(i, *names, models)
            for i, names in held.items()
            if (models := _models(examples[i], mesh)) is not None
        ]
        # Names of those of which every rank holds a part, by position.
        self.parts = {
            i: name for i, (name, _) in held.items() if _is_in_parts(examples[i], mesh)
        }
        # Writes to each tensor so far, at this call, and when all ranks were alike.
        self._now: tuple[int, ...] = ()
        self._alike: tuple[int, ...] = ()
        self._backoff = Backoff()
        self._sum: tuple[int, Callable[[], int]] | None = None  # made beside a call

    def word(self, args: Sequence[Any]) -> str:
        """What to compare at this call."""
        if not self.held and not self.parts:
            return ""
        tensors = [args[x.place] for x in self.held]
        self._now = _torch.objects.versions_of(tensors)
        writes = ""
        if self._now != self._alike:
            writes = f"{hash(_written_since(self._now, self._alike)):x}"
        word = f"{writes} {self._next_sum(tensors) if tensors else ' '}"
        if not self.parts:
            return word
        parts = [args[i] for i in self.parts]
        written = hash(_torch.objects.versions_of(parts))
        return f"{word} {written:x} {_steps_word(parts)}"

    def _part_writes(self, args: Sequence[Any]) -> tuple[int, ...]:
        """How often each part was written to, since its parameter was split."""
        return _torch.objects.versions_of([args[i] for i in self.parts])

    def compare_parts(self, words: Sequence[str], args: Sequence[Any]) -> None:
        """Raise InputMismatchError, on all ranks, if only some wrote to a parameter of
        which each holds a part, or took a step of its optimizer otherwise."""
        if not self.parts:
            return
        ends = [word.split(" ")[-2:] for word in words]
        for rank, (_, steps) in enumerate(ends):
            if steps != ends[0][1]:
                raise _told(
                    "optimizers of parameters of which each rank holds a part took "
                    f"other steps (learning rates by group): {ends[0][1] or 'none'} on "
                    f"rank 0, {steps or 'none'} on rank {rank}",
                    _STEP_FIX,
                )
        if len({writes for writes, _ in ends}) == 1:
            return
        writes = list(map(torch.tensor, self._part_writes(args)))
        gathered = check_inputs.gather_numbers(writes)
        unlike = (gathered != gathered[0]).any(0).nonzero().flatten().tolist()
        names = list(self.parts.values())
        apart = gathered[:, unlike[0]].tolist()
        rank = next(r for r, count in enumerate(apart) if count != apart[0])
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        raise _told(
            f"parameter {names[unlike[0]]}{more}, of which each rank holds a part, was "
            f"written to {apart[0]} times on rank {worlds.global_rank(0)} and "
            f"{apart[rank]} times on rank {worlds.global_rank(rank)}",
            _PARTS_FIX,
        )

    def compare(self, words: Sequence[str], args: Sequence[Any]) -> None:
        """Raise InputMismatchError, on all ranks, if one holds other values than it
        should."""
        if len(set(words)) == 1 or not self._suspicious(words):
            self._alike = self._now
            return
        if not self._backoff.pauses():
            self.look(args)
            self._alike = self._now

    def settle(self, args: Sequence[Any]) -> None:
        """All ranks were just made alike."""
        self._alike = _torch.objects.versions_of([args[x.place] for x in self.held])
        self._backoff = Backoff()

    def _suspicious(self, words: Sequence[str]) -> bool:
        """Whether ranks count other writes, or one has other values."""
        fields = (word.split(" ")[:3] for word in words)
        writes, places, sums = zip(*fields, strict=True)
        if not self.held:
            return False
        if len(set(writes)) > 1 or len(set(places)) > 1:
            return True
        if not places[0]:
            return False
        models = self.held[int(places[0])].models
        return any(sums[rank] != sums[model] for rank, model in enumerate(models))

    def _next_sum(self, tensors: Sequence[torch.Tensor]) -> str:
        """A tensor's number and the sum of some of its elements; on a device those of
        an earlier call."""
        turn = sample_turn(call_number(), on_cpu=tensors[0].device.type == "cpu")
        if turn is None:
            return " "
        turn, n = divmod(turn, len(tensors))
        if tensors[n].device.type == "cpu":
            return f"{n} {int(_sample_sum(tensors[n], turn)):x}"
        before = self._sum
        self._sum = n, check_inputs.on_its_way(_sample_sum(tensors[n], turn))
        return " " if before is None else f"{before[0]} {before[1]():x}"

    def look(self, args: Sequence[Any]) -> None:
        """Compare all in full, as ``compare`` does where ranks tell other things. Every
        rank comes here at the same call."""
        if not self.held:
            return
        values = [_values(args[x.place]) for x in self.held]
        writes = map(torch.tensor, _written_since(self._now, self._alike))
        sums = [check_inputs.checksum(x) for x in values]
        gathered = check_inputs.gather_numbers([*sums, *writes]).tolist()
        n = len(values)
        unlike: dict[int, int] = {}  # the first rank that differs, by tensor
        for i, held in enumerate(self.held):
            for rank, model in enumerate(held.models):
                if gathered[rank][i] != gathered[model][i]:
                    unlike.setdefault(i, rank)
        alone = [
            i
            for i, rank in unlike.items()
            if gathered[rank][n + i] != gathered[self.held[i].models[rank]][n + i]
        ]
        wrong = alone or (list(unlike) if self._far_apart(unlike, values) else [])
        if wrong:
            raise _unlike(
                [self.held[i] for i in wrong], unlike[wrong[0]], alone=bool(alone)
            )

    def _far_apart(
        self, unlike: Mapping[int, int], values: Sequence[torch.Tensor]
    ) -> bool:
        """Whether tensors that differ do so by more than rounding, all together."""
        floats = [i for i in unlike if values[i].is_floating_point()]
        if len(floats) < len(unlike):
            return True
        if not floats:
            return False
        numbers = [part for i in floats for part in sketch(values[i])]
        gathered = check_inputs.gather_numbers(
            [torch.tensor(x, dtype=torch.float64) for x in numbers]
        ).tolist()
        apart = size = 0.0
        for n, i in enumerate(floats):
            rank, model = unlike[i], self.held[i].models[unlike[i]]
            (norm, wave), (other_norm, other_wave) = (
                gathered[r][2 * n : 2 * n + 2] for r in (rank, model)
            )
            apart += max((norm - other_norm) ** 2, 2 * (wave - other_wave) ** 2)
            size += max(norm, other_norm) ** 2
        return math.sqrt(apart) > ALLOWED * math.sqrt(size)


def _written_since(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Of each tensor, how often it was written since."""
    return tuple(map(operator.sub, now, before or now))


def _models(x: torch.Tensor, mesh: Mesh) -> tuple[int, ...] | None:
    """For each rank the first that has the same part of a tensor; None if no two
    ranks have."""
    if mesh.size == 1 or x.device.type == "meta":
        return None
    if not isinstance(x, DTensor):
        return (0,) * mesh.size
    grid = x.device_mesh.mesh
    same = [dim for dim, placed in enumerate(x.placements) if placed.is_replicate()]
    if not same or not _holds_on_all(x, mesh):
        return None
    first = grid.amin(same, keepdim=True).expand_as(grid).flatten().tolist()
    part_of = dict(zip(grid.flatten().tolist(), first, strict=True))
    parts = [part_of[worlds.global_rank(rank)] for rank in range(mesh.size)]
    return None if len(set(parts)) == mesh.size else tuple(map(parts.index, parts))


def _holds_on_all(x: DTensor, mesh: Mesh) -> bool:
    """Whether every rank of the world holds a part of a tensor."""
    ranks = map(worlds.global_rank, range(mesh.size))
    return set(x.device_mesh.mesh.flatten().tolist()).issuperset(ranks)


def _is_in_parts(x: torch.Tensor, mesh: Mesh) -> bool:
    """Whether every rank holds a part of a tensor, and no two the same."""
    if not isinstance(x, DTensor) or mesh.size == 1 or x.device.type == "meta":
        return False
    return _holds_on_all(x, mesh) and _models(x, mesh) is None


def _sample_sum(x: torch.Tensor, turn: int) -> torch.Tensor:
    """The sum of the bits of some elements, other ones at each turn."""
    return sum_of_bits(sample(_values(x), turn))


def _values(x: torch.Tensor) -> torch.Tensor:
    """What this rank holds."""
    with torch.no_grad():
        return x.to_local() if isinstance(x, DTensor) else x.detach()


def _unlike(wrong: Sequence[_Held], rank: int, *, alone: bool) -> InputMismatchError:
    """The error, which every rank raises. ``alone``: whether ranks count other writes
    to the tensors."""
    kinds = sorted({held.kind for held in wrong}, reverse=True)
    what = " and ".join(kinds if len(wrong) == 1 else [f"{kind}s" for kind in kinds])
    names = check_inputs.listed(held.name for held in wrong)
    why = "one of them wrote to it by itself"
    if not alone:
        why = "one of them changed a gradient or an optimizer by itself, or wrote "
        why += "through .data"
    return _told(
        f"{what} {names} {'is' if len(wrong) == 1 else 'are'} no longer alike on all "
        f"ranks: rank {worlds.global_rank(rank)} does not hold what rank "
        f"{worlds.global_rank(wrong[0].models[rank])} holds; {why} since an earlier "
        "call",
        _WRITE_FIX if alone else _UPDATE_FIX,
    )


def _told(fact: str, fix: str) -> InputMismatchError:
    error = InputMismatchError(fact, fix=fix)
    error.told = True
    return error


# The last steps of optimizers since a graph read the parts that they update, by the
# owner of the parts.
_STEPS: weakref.WeakKeyDictionary[Any, deque[str]] = weakref.WeakKeyDictionary()
_OwnerOf = Callable[[torch.Tensor], Any]
_OWNERS: list[_OwnerOf] = []


@functools.cache
def note_steps(owner_of: _OwnerOf) -> None:
    """From now on, a call compares the steps of the optimizers of its parts since the
    call before. ``owner_of``: the model that a part belongs to, None for others."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owners = {*map(owner_of, _torch.objects.parameters_of(optimizer))} - {None}
        if not owners:
            return
        rates = (
            "?" if isinstance(rate := group.get("lr"), torch.Tensor) else f"{rate}"
            for group in optimizer.param_groups
        )
        step = f"{type(optimizer).__name__}({','.join(rates)})"
        for owner in owners:
            _STEPS.setdefault(owner, deque(maxlen=64)).append(step)

    _OWNERS.append(owner_of)
    register_optimizer_step_pre_hook(note)


def _steps_word(parts: Sequence[torch.Tensor]) -> str:
    """Return the steps since the last call that read parts of these models."""
    if not _STEPS:
        return ""
    owners = dict.fromkeys(owner_of(part) for owner_of in _OWNERS for part in parts)
    owners.pop(None, None)
    steps = (step for owner in owners for step in _STEPS.pop(owner, ()))
    return "+".join(steps).replace(" ", "")


def forget_steps() -> None:
    """Compare nothing of the steps so far: they belong to programs that are gone."""
    _STEPS.clear()
