"""This module compares at every call of a graph values that must be equal on all ranks.

In: the arguments of a call, and gradients that reached backwards since the last call.
Out: a word for the meeting of the call; then nothing, or one error on all ranks. Never:
a collective, or a wait for a device (what a device computes is compared at a later
call).

- *Inputs*: sums of their bytes are compared at every call; a difference is an error.
- *Parameters and buffers* that several ranks hold are compared in full at the first
  call (``check_inputs``). Later one rank alone may write to them. So a word has the
  number of writes in place to each since all were equal; if these differ, ranks compare
  everything in full at once. Different numbers of writes with equal values (one rank
  loads, then broadcasts), and differences of rounding, are no errors; after each such
  comparison the next one waits longer.
- *Sharded parameters*, of which no two ranks hold the same part: the numbers of writes
  must be equal, and the model the same.
- *Gradients* that reach a backward from code that is not compiled must belong to one
  loss, equal on all ranks up to rounding. Noise from a rank's own seed, or a rank's own
  labels, would give partial gradients that nobody sums.

With ``FXPAR_VERIFY`` parameters and buffers are compared in full at every call, which
finds writes that torch does not count (to ``.data``), and so are the learning rates of
their optimizers.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import GradientError, InputMismatchError
from fxpar.runtime.ranks import check_inputs, meeting, worlds
from fxpar.runtime.ranks.check_inputs import is_drift, on_its_way, sample, sketch
from fxpar.runtime.ranks.groups import HOME
from fxpar.runtime.ranks.meeting import meetings
from fxpar.runtime.ranks.presence import is_alone
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Input

# Meetings that pass at most between two comparisons in full that show no error.
_LONGEST = 64
# Mean number of meetings after which gradients are read again, which costs some tens of
# microseconds (or several launches): not whole, so that among graphs that are called in
# turn each is compared. On the CPU they are read at each of the first meetings.
_SPACING, _FIRST = (11 + 5**0.5) / 2, 32
# Most gradients that are kept between two calls.
_MOST = 64
# Made once: ``json.dumps`` makes an encoder at each call.
_as_text = json.JSONEncoder(separators=(",", ":")).encode

_WRITE_FIX = (
    "write the same values to it on every rank (load the checkpoint on all of "
    "them), or send what one rank wrote to all by torch.distributed.broadcast "
    "before the next call"
)
_PARTS_FIX = (
    "write to it on every rank, each its own part: load the checkpoint on all of them"
)
_STEP_FIX = (
    "take every step of an optimizer on every rank, at the same learning rate: "
    "decide by a value that is equal on all ranks, as a loss that "
    "torch.distributed.all_reduce averaged"
)
_MODEL_FIX = "call models in the same order on every rank"
_UPDATE_FIX = (
    "change gradients, learning rates and parameters in the same way on every "
    "rank: draw noise from one seed, decide by values that are equal on all ranks"
)
_LOSS_FIX = (
    "compute the same loss on every rank, with noise and dropout from one seed; "
    "or, to feed each rank its own part of the batch, set FXPAR_INPUTS=local"
)


@dataclass(frozen=True)
class _Held:
    """Is a parameter or a buffer of which several ranks hold equal values."""

    place: int  # position among the arguments
    name: str  # as the user knows it
    kind: str  # "parameter" or "buffer"
    models: tuple[int, ...]  # for each rank the rank whose values it must equal
    is_exact: bool  # any difference is an error: whole numbers are not rounded


class Drift:
    """Compares the values of one graph. At every call each rank gives ``word`` to the
    meeting and the words of all to ``compare``; after a comparison of all inputs in
    full it calls ``settle``."""

    def __init__(
        self,
        inputs: Sequence[Input],
        examples: Sequence[Any],
        fed: Iterable[int],
        mesh: Mesh,
        *,
        verify: bool,
    ) -> None:
        """``fed``: positions of tensors among the arguments whose shapes may vary;
        ``verify``: whether to compare parameters and buffers in full at every call."""
        several = mesh.size > 1
        self.verify = verify and several
        # Inputs, those on the CPU first: position -> (name, count of dims).
        self.fed = {
            i: (inputs[i].name, examples[i].dim())
            for i in sorted(fed, key=lambda i: examples[i].device.type != "cpu")
            if several
            and inputs[i].kind == "input"
            and not isinstance(examples[i], DTensor)
        }
        self.held: list[_Held] = []
        # By position, names of tensors of which every rank holds a different part.
        self.parts: dict[int, str] = {}
        # Position of a tensor of ``fxpar.shard``, on a mesh of several ranks.
        self.at_rest: int | None = None
        for i, (entry, x) in enumerate(zip(inputs, examples, strict=True)):
            if entry.kind == "input" or not (several and isinstance(x, torch.Tensor)):
                continue
            if self.at_rest is None and isinstance(x, DTensor):
                self.at_rest = i
            models = _models(x, mesh)
            if models == tuple(range(mesh.size)):
                self.parts[i] = entry.name
            elif models is not None:
                is_exact = not (x.is_floating_point() or x.is_complex())
                held = _Held(i, entry.name, entry.kind, models, is_exact)
                self.held.append(held)
        # Writes to each tensor until this call, and until all ranks were last equal.
        self._now: tuple[int, ...] = ()
        self._equal: tuple[int, ...] = ()
        # Comparisons in full since then, and the meeting from which there may be
        # another.
        self._looks, self._pause_ends = 0, 0
        self._sums: Callable[[], list[Any]] = list  # of the last inputs on a device

    def word(self, args: Sequence[Any]) -> str:
        """Return this rank's word for the meeting of this call: sums of inputs, the
        number of the model, hashes of how often parts and other tensors were written
        to, and gradients."""
        self._now = _torch.objects.versions_of([args[x.place] for x in self.held])
        writes = 0  # as on all ranks
        if self._now != self._equal:
            writes = hash(_written_since(self._now, self._equal))
        home = self.at_rest is not None and getattr(args[self.at_rest], HOME, None)
        number = home.round if home else 0
        parts = hash(self._parts_written(args)) if self.parts else 0
        sums, now = self._fed_sums(args), meetings() + 1
        due = [(line, read()) for at, line, read in _GRADIENTS if at <= now]
        _GRADIENTS[:] = [x for x in _GRADIENTS if x[0] > now]
        return _as_text([sums, number, parts, writes, due])

    def compare(self, words: Sequence[str], args: Sequence[Any], *, held: bool) -> None:
        """Raise InputMismatchError or GradientError, on all ranks, if values differ
        that must be equal. ``held``: whether to compare parameters and buffers, too."""
        differ, error = False, None
        if len(set(words)) > 1:
            columns = zip(*map(json.loads, words), strict=True)
            fed, numbers, parts, writes, gradients = columns
            self._compare_fed(fed)
            if (rank := meeting.first_other(numbers)) is not None:
                raise _reported(
                    f"rank {worlds.global_rank(rank)} calls another model of "
                    f"fxpar.shard than rank {worlds.global_rank(0)}: both have the "
                    "same structure",
                    _MODEL_FIX,
                )
            if len(set(parts)) > 1:
                raise self._parts_error(args)
            differ, error = len(set(writes)) > 1, _gradient_error(gradients)
        if held:
            if self.verify:
                self._compare_rates(args)  # what they made differ comes after
            looks = self.verify or error is not None or (differ and self._may_look())
            if looks:
                self.look(args)  # raises if a parameter is the cause
            if looks or not differ:
                self._equal = self._now
        if error is not None:
            raise error

    def settle(self, args: Sequence[Any]) -> None:
        """Note that all ranks were just made to hold equal values."""
        self._equal = _torch.objects.versions_of([args[x.place] for x in self.held])
        self._looks, self._pause_ends = 0, 0

    def _fed_sums(self, args: Sequence[Any]) -> list[int]:
        fed = [args[i] for i in self.fed]
        sums = [check_inputs.quick_sum(x) for x in fed if x.device.type == "cpu"]
        if len(sums) < len(fed):
            own = list(map(check_inputs.checksum, fed[len(sums) :]))
            sums += self._sums()
            self._sums = on_its_way(torch.stack([x.to(own[0].device) for x in own]))
        return sums

    def _compare_fed(self, ranks: Sequence[Sequence[int]]) -> None:
        for (name, dims), *sums in zip(self.fed.values(), *ranks, strict=False):
            if (rank := meeting.first_other(sums)) is not None:
                raise check_inputs.differ([name], rank, dims)

    def _may_look(self) -> bool:
        """Return whether it is time for another comparison in full, and count it."""
        if meetings() < self._pause_ends:
            return False
        self._looks += 1
        self._pause_ends = meetings() + min(2**self._looks, _LONGEST)
        return True

    def look(self, args: Sequence[Any]) -> None:
        """Compare in full the parameters and buffers of all ranks, which must call this
        at the same call of the graph. Raises InputMismatchError."""
        if not self.held:
            return
        values = [_values(args[x.place]) for x in self.held]
        differing = check_inputs.differing(values, [x.models for x in self.held])
        if not differing:
            return
        writes = _written_since(self._now, self._equal)
        own_rows = {i: [writes[i], sketch(values[i]).tolist()] for i in differing}
        rows = meeting.gather_data("parameters and buffers", own_rows)
        # By tensor: the rows of the first rank that differs, and of its model.
        pairs = {
            i: (rows[rank][str(i)], rows[self.held[i].models[rank]][str(i)])
            for i, rank in differing.items()
        }
        alone = [i for i, (own, other) in pairs.items() if own[0] != other[0]]
        is_far = is_drift((own[1], other[1]) for own, other in pairs.values())
        is_far |= any(self.held[i].is_exact for i in differing)
        wrong = alone or ([*differing] if is_far else [])
        if wrong:
            rank = differing[wrong[0]]
            raise _drift_error([self.held[i] for i in wrong], rank, alone=bool(alone))

    def _compare_rates(self, args: Sequence[Any]) -> None:
        """Raise InputMismatchError, on all ranks, if learning rates of the optimizers
        of this graph's parameters differ."""
        ours = {id(args[i]) for i in (*self.parts, *(x.place for x in self.held))}
        texts = set[str]()
        for optimizer in _torch.objects.live_optimizers():
            if any(id(p) in ours for p in _torch.objects.parameters_of(optimizer)):
                rates = (f"{float(g.get('lr', 0))}" for g in optimizer.param_groups)
                texts.add(f"{type(optimizer).__name__}({','.join(rates)})")
        every = meeting.gather_data("learning rates", "+".join(sorted(texts)))
        if (rank := meeting.first_other(every)) is not None:
            raise _reported(
                "optimizers have different learning rates on different ranks: "
                f"{every[0] or 'none'} on {meeting.named([0])}, "
                f"{every[rank] or 'none'} on {meeting.named([rank])}",
                _STEP_FIX,
            )

    def _parts_written(self, args: Sequence[Any]) -> tuple[int, ...]:
        return _torch.objects.versions_of([args[i] for i in self.parts])

    def _parts_error(self, args: Sequence[Any]) -> InputMismatchError:
        """Return the error for ranks that wrote different numbers of times to a sharded
        parameter; all ranks call this."""
        own = self._parts_written(args)
        columns = list(zip(*meeting.gather_data("writes", own), strict=True))
        differing = [i for i, counts in enumerate(columns) if len(set(counts)) > 1]
        name, counts = list(self.parts.values())[differing[0]], columns[differing[0]]
        rank = meeting.first_other(counts) or 0
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        return _reported(
            f"parameter {name}{more}, of which each rank holds a part, was "
            f"written to {counts[0]} times on rank {worlds.global_rank(0)} and "
            f"{counts[rank]} times on rank {worlds.global_rank(rank)}",
            _PARTS_FIX,
        )


def _written_since(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Return how often each tensor was written to since ``before``."""
    return tuple(map(operator.sub, now, before or now))


def _models(x: torch.Tensor, mesh: Mesh) -> tuple[int, ...] | None:
    """Return for each rank the first rank that holds the same part of a tensor; None if
    some ranks hold nothing of it."""
    if x.device.type == "meta":
        return None
    if not isinstance(x, DTensor):
        return (0,) * mesh.size
    grid = first = x.device_mesh.mesh
    same = [dim for dim, placed in enumerate(x.placements) if placed.is_replicate()]
    if same:
        first = grid.amin(same, keepdim=True).expand_as(grid)
    part_of = dict(zip(grid.flatten().tolist(), first.flatten().tolist(), strict=True))
    parts = [part_of.get(worlds.global_rank(rank)) for rank in range(mesh.size)]
    return None if None in parts else tuple(map(parts.index, parts))


def _values(x: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    with torch.no_grad():
        return x.to_local() if isinstance(x, DTensor) else x.detach()


def _drift_error(
    wrong: Sequence[_Held], rank: int, *, alone: bool
) -> InputMismatchError:
    """Return the error that every rank raises. ``alone``: whether ranks count different
    writes to the tensors."""
    kinds = sorted({held.kind for held in wrong}, reverse=True)
    what = " and ".join(kinds if len(wrong) == 1 else [f"{kind}s" for kind in kinds])
    names = check_inputs.listed(held.name for held in wrong)
    why = "one of them alone wrote to it"
    if not alone:
        why = "one of them alone changed a gradient or an optimizer, or wrote "
        why += "through .data"
    return _reported(
        f"{what} {names} {'is' if len(wrong) == 1 else 'are'} no longer equal "
        f"on all ranks: rank {worlds.global_rank(rank)} does not hold what rank "
        f"{worlds.global_rank(wrong[0].models[rank])} holds; {why} since an "
        "earlier call",
        _WRITE_FIX if alone else _UPDATE_FIX,
    )


def _reported(fact: str, fix: str) -> InputMismatchError:
    return meeting.as_reported(InputMismatchError(fact, fix=fix))


def sample_turn(number: int, *, on_cpu: bool) -> int | None:
    """Return how many meetings before the one of this number compared gradients; None
    if that one compares none."""
    if on_cpu and number < _FIRST:
        return number
    turn = int(number / _SPACING)
    return turn + _FIRST if turn > int((number - 1) / _SPACING) else None


# Gradients to compare, in the order in which they came: the number of a meeting late
# enough not to wait for a device, the user's line of a result, and what reads a sketch
# of some elements.
_GRADIENTS: list[tuple[int, str | None, Callable[[], list[Any]]]] = []


def forget() -> None:
    """Drop gradients that were noted, of programs that are gone."""
    _GRADIENTS.clear()


def note_gradients(source_line: str | None, gradients: Sequence[Any]) -> None:
    """Let a later call compare the gradients that reach the backward of a graph now.
    ``source_line``: the user's line of a result of the graph."""
    if is_alone():
        return
    now = meetings()
    for x in gradients:
        if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
            continue
        on_cpu = x.device.type == "cpu"
        turn = sample_turn(now, on_cpu=on_cpu)
        if turn is not None and len(_GRADIENTS) < _MOST:
            due, read = now + (0 if on_cpu else 2), on_its_way(sketch(sample(x, turn)))
            _GRADIENTS.append((due, source_line, read))


def _gradient_error(ranks: Sequence[Sequence[Any]]) -> GradientError | None:
    """Return the error to raise on all ranks if their gradients differ by more than
    rounding (NaN is equal to NaN). Different numbers of gradients, as of a rank that
    left out a backward, are found elsewhere."""
    if len({*map(len, ranks)}) > 1:
        return None
    for readings in zip(*ranks, strict=True):
        line, first = readings[0]
        for rank, (_, own) in enumerate(readings):
            if repr(own) != repr(first) and is_drift([(own, first)]):
                error = GradientError(
                    "gradients of results of a compiled graph differed between ranks: "
                    "code that is not compiled computes another loss of them on rank "
                    f"{worlds.global_rank(rank)} than on rank {worlds.global_rank(0)}",
                    where=line,
                    fix=_LOSS_FIX,
                )
                return meeting.as_reported(error)
    return None
