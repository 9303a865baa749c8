"""This module compares at every call of a graph values that must be equal on all ranks.

In: the arguments of a call, and gradients that reached backwards since the last call.
Out: a word for the meeting of the call; then nothing, or one error on all ranks. Never:
a collective, or a wait for a device (what a device computes is compared at a later
call).

- *Inputs*: sums of their bytes are compared at every call; a difference is an error.
- *Parameters and buffers* that several ranks hold are compared in full at the first
  call (``check_inputs``). Later one rank alone may write to them. So a word has the
  number of writes in place to each since all were equal, and at many calls some
  elements of one of them, of another one each time, for writes that torch does not
  count (to ``.data``). If these differ, ranks compare everything in full at once.
  Different numbers of writes with equal values (one rank loads, then broadcasts), and
  differences of rounding, are no errors; after each such comparison the next one waits
  longer.
- *Sharded parameters*, of which no two ranks hold the same part: the numbers of writes
  and the steps of optimizers must be equal.
- *Gradients* that reach a backward from code that is not compiled must belong to one
  loss, equal on all ranks up to rounding. Noise from a rank's own seed, or a rank's own
  labels, would give partial gradients that nobody sums.
"""

from __future__ import annotations

import functools
import json
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpar import _torch
from fxpar.errors import FxparError, GradientError, InputMismatchError
from fxpar.runtime.caches.program_identity import NamedInput
from fxpar.runtime.ranks import check_inputs, meeting, worlds
from fxpar.runtime.ranks.check_inputs import is_drift, on_its_way, sample, sketch
from fxpar.runtime.ranks.groups import HOME, OnMesh
from fxpar.runtime.ranks.meeting import meetings
from fxpar.runtime.ranks.presence import is_alone
from fxpar.sharding.mesh import Mesh

# Meetings that pass at most between two comparisons in full that show no error.
_LONGEST = 64
# Mean number of meetings after which elements are read again, which costs some tens of
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
        inputs: Sequence[NamedInput],
        examples: Sequence[Any],
        fed: Iterable[int],
        mesh: Mesh,
    ) -> None:
        """``fed``: positions of tensors among the arguments whose shapes may vary."""
        several = mesh.size > 1
        # Inputs, those on the CPU first: position -> (name, count of dims).
        self.fed = {
            i: (inputs[i].name, examples[i].dim())
            for i in sorted(fed, key=lambda i: examples[i].device.type != "cpu")
            if several
            and inputs[i].kind == "input"
            and not isinstance(examples[i], DTensor)
        }
        state = [
            (i, entry)
            for i, (entry, x) in enumerate(zip(inputs, examples, strict=True))
            if entry.kind in ("parameter", "buffer") and isinstance(x, torch.Tensor)
        ]
        of_rank = {i: _models(examples[i], mesh) for i, _ in state}
        own = tuple(range(mesh.size))
        self.held = [
            _Held(i, entry.name, entry.kind, models, _is_exact(examples[i]))
            for i, entry in state
            if (models := of_rank[i]) and models != own
        ]
        # By position, names of tensors of which every rank holds a different part.
        self.parts = {i: entry.name for i, entry in state if of_rank[i] == own}
        # Position of a tensor of ``fxpar.shard``, on a mesh of several ranks.
        self.at_rest = next(
            (i for i, _ in state if several and isinstance(examples[i], DTensor)), None
        )
        # Writes to each tensor until this call, and until all ranks were last equal.
        self._now: tuple[int, ...] = ()
        self._equal: tuple[int, ...] = ()
        # Comparisons in full since then, and the meeting from which there may be
        # another.
        self._looks, self._pause_ends = 0, 0
        self._sums: Callable[[], list[Any]] = list  # of the last inputs on a device
        self._readings: list[_Reading] = []  # elements to compare

    def word(self, args: Sequence[Any]) -> str:
        """Return this rank's word for the meeting of this call."""
        state = self._written(args), self._elements(args)
        fields = self._fed_sums(args), *state, self._parts_word(args)
        return _as_text([*fields, [x.read() for x in _take_due(_GRADIENTS, _IN_WORD)]])

    def compare(self, words: Sequence[str], args: Sequence[Any], *, held: bool) -> None:
        """Raise InputMismatchError or GradientError, on all ranks, if values differ
        that must be equal. ``held``: whether to compare parameters and buffers, too."""
        if len(set(words)) == 1:
            self._equal = self._now if held else self._equal
            return
        columns = zip(*map(json.loads, words), strict=True)
        fed, writes, elements, parts, gradients = columns
        self._compare_fed(fed)
        self._compare_parts(parts, args)
        if held and (len(set(writes)) > 1 or self._are_far(elements)):
            if not self._is_paused():
                self.look(args)
                self._equal = self._now
        elif held:
            self._equal = self._now
        error = _compare_gradients(gradients)
        if error is not None:
            if held:
                self.look(args)  # raises if the cause is a parameter
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

    def _written(self, args: Sequence[Any]) -> int:
        """Return a hash of how often tensors were written to; 0: as on all ranks."""
        tensors = [args[x.place] for x in self.held]
        self._now = _torch.objects.versions_of(tensors) if tensors else ()
        if self._now == self._equal:
            return 0
        return hash(_written_since(self._now, self._equal))

    def _elements(self, args: Sequence[Any]) -> list[tuple[int, list[float]]]:
        """Return at some calls the index of a tensor with a sketch of some elements, on
        a device as they were at an earlier call."""
        if not self.held:
            return []
        turn = sample_turn(
            meetings(), on_cpu=args[self.held[0].place].device.type == "cpu"
        )
        if turn is not None:
            turn, n = divmod(turn, len(self.held))
            values = _values(args[self.held[n].place])
            self._readings.append(_Reading.of_elements(n, values, turn))
        return [(x.of, x.read()) for x in _take_due(self._readings)]

    def _are_far(self, ranks: Sequence[Sequence[tuple[int, list[float]]]]) -> bool:
        """Return whether elements differ that must be equal."""
        if len({tuple(n for n, _ in each) for each in ranks}) > 1:
            return True
        for readings in zip(*ranks, strict=True):
            held, sketches = self.held[readings[0][0]], [x for _, x in readings]
            differs = operator.ne if held.is_exact else _is_far
            models = (sketches[model] for model in held.models)
            if any(map(differs, sketches, models)):
                return True
        return False

    def _is_paused(self) -> bool:
        """Return whether it is too early for another comparison in full; if not, count
        one."""
        if meetings() < self._pause_ends:
            return True
        self._looks += 1
        self._pause_ends = meetings() + min(2**self._looks, _LONGEST)
        return False

    def look(self, args: Sequence[Any]) -> None:
        """Compare in full the parameters and buffers of all ranks, which must call this
        at the same call of the graph. Raises InputMismatchError."""
        if not self.held:
            return
        values = [_values(args[x.place]) for x in self.held]
        sums = check_inputs.checksums(values)
        writes = _written_since(self._now, self._equal)
        sketches = [sketch(x).tolist() for x in values]
        rows = [*map(list, zip(sums, writes, sketches, strict=True))]
        gathered = meeting.gather_data("parameters and buffers", rows)
        # By tensor: the first rank that differs, and the rows of both.
        differing: dict[int, tuple[int, Any, Any]] = {}
        for i, held in enumerate(self.held):
            for rank, model in enumerate(held.models):
                own, other = gathered[rank][i], gathered[model][i]
                if own[0] != other[0]:
                    differing.setdefault(i, (rank, own, other))
        alone = [i for i, (_, own, other) in differing.items() if own[1] != other[1]]
        pairs = [(own[2], other[2]) for _, own, other in differing.values()]
        is_exact = any(self.held[i].is_exact for i in differing)
        wrong = alone or ([*differing] if is_exact or is_drift(pairs) else [])
        if wrong:
            rank, *_ = differing[wrong[0]]
            raise _drift_error([self.held[i] for i in wrong], rank, alone=bool(alone))

    def _parts_word(self, args: Sequence[Any]) -> str:
        """Return how often sharded tensors were written to, the optimizer steps since
        the last call, and the number of their model."""
        if self.at_rest is None:
            return ""
        parts = [args[i] for i in self.parts]
        model = getattr(args[self.at_rest], HOME, None)
        number = 0 if model is None else model.round
        writes = hash(_torch.objects.versions_of(parts))
        return f"{writes:x} {_steps_word(parts)} {number}"

    def _compare_parts(self, words: Sequence[str], args: Sequence[Any]) -> None:
        """Raise InputMismatchError if ranks wrote different numbers of times to a
        sharded parameter, took different steps of its optimizer, or call different
        models of one structure."""
        if len(set(words)) == 1:
            return
        _, every, models = zip(*(word.split(" ") for word in words), strict=True)
        if (rank := meeting.first_other(models)) is not None:
            raise _reported(
                f"rank {worlds.global_rank(rank)} calls another model of "
                f"fxpar.shard than rank {worlds.global_rank(0)}: both have the "
                "same structure",
                _MODEL_FIX,
            )
        if (rank := meeting.first_other(every)) is not None:
            raise _reported(
                "optimizers of sharded parameters took different steps on "
                f"different ranks (learning rates by group): {every[0] or 'none'} "
                f"on {meeting.named([0])}, {every[rank] or 'none'} on "
                f"{meeting.named([rank])}",
                _STEP_FIX,
            )
        own = _torch.objects.versions_of([args[i] for i in self.parts])
        columns = list(zip(*meeting.gather_data("writes", own), strict=True))
        differing = [i for i, counts in enumerate(columns) if len(set(counts)) > 1]
        name, counts = list(self.parts.values())[differing[0]], columns[differing[0]]
        rank = meeting.first_other(counts) or 0
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise _reported(
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
    some ranks hold nothing of it, or there is one rank."""
    if mesh.size == 1 or x.device.type == "meta":
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


def _is_exact(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _values(x: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    with torch.no_grad():
        return x.to_local() if isinstance(x, DTensor) else x.detach()


def _drift_error(wrong: Sequence[_Held], rank: int, *, alone: bool) -> FxparError:
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


def _reported(fact: str, fix: str) -> FxparError:
    return meeting.as_reported(InputMismatchError(fact, fix=fix))


def sample_turn(number: int, *, on_cpu: bool) -> int | None:
    """Return how many meetings before the one of this number compared elements; None if
    that one compares none."""
    if on_cpu and number < _FIRST:
        return number
    turn = int(number / _SPACING)
    return turn + _FIRST if turn > int((number - 1) / _SPACING) else None


# The last steps of optimizers since a graph read the tensors that they update, by the
# model that owns the tensors.
_STEPS: weakref.WeakKeyDictionary[Any, deque[str]] = weakref.WeakKeyDictionary()


@functools.cache
def note_steps() -> None:
    """Let each call compare the steps since the last call of the optimizers of its
    sharded tensors."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owners = _owners(_torch.objects.parameters_of(optimizer))
        if not owners:
            return
        rates = (
            "?" if isinstance(rate := group.get("lr"), torch.Tensor) else f"{rate}"
            for group in optimizer.param_groups
        )
        step = f"{type(optimizer).__name__}({','.join(rates)})"
        for owner in owners:
            _STEPS.setdefault(owner, deque(maxlen=64)).append(step)

    register_optimizer_step_pre_hook(note)


def _owners(parts: Iterable[torch.Tensor]) -> list[OnMesh]:
    """Return the models that own tensors, each once."""
    owners = dict.fromkeys(getattr(part, HOME, None) for part in parts)
    return [owner for owner in owners if owner is not None]


def _steps_word(parts: Sequence[torch.Tensor]) -> str:
    """Return the optimizer steps since the last call that read these models."""
    if not _STEPS:
        return ""
    steps = (step for owner in _owners(parts) for step in _STEPS.pop(owner, ()))
    return "+".join(steps).replace(" ", "")


@dataclass(frozen=True)
class _Reading:
    """Is a sketch of some elements of a tensor, to be compared at a later call."""

    of: Any  # index of a parameter; of a gradient, the user's line of its result
    read: Callable[[], list[Any]]  # the sketch
    due: int  # number of a meeting late enough not to wait for a device

    @staticmethod
    def of_elements(of: Any, x: torch.Tensor, turn: int) -> _Reading:
        due = meetings() + (0 if x.device.type == "cpu" else 2)
        return _Reading(of, on_its_way(sketch(sample(x, turn))), due)


def _is_far(one: list[float], other: list[float]) -> bool:
    """Return whether two sketches differ by more than rounding; NaN is equal to NaN."""
    return repr(one) != repr(other) and is_drift([(one, other)])


def _take_due(
    readings: list[_Reading], in_word: list[_Reading] | None = None
) -> list[_Reading]:
    """Return the readings that are due at this call, which then are no longer among
    ``readings``; they are also put in ``in_word``."""
    now = meetings() + 1
    due = [x for x in readings if x.due <= now]
    readings[:] = [x for x in readings if x.due > now]
    if in_word is not None:
        in_word[:] = due
    return due


# Gradients to compare, in the order in which they came; those in this call's word.
_GRADIENTS: list[_Reading] = []
_IN_WORD: list[_Reading] = []


def forget() -> None:
    """Drop steps and gradients that were noted, of programs that are gone."""
    _STEPS.clear()
    _GRADIENTS.clear()
    _IN_WORD.clear()


def note_gradients(source_line: str | None, gradients: Sequence[Any]) -> None:
    """Let a later call compare the gradients that reach the backward of a graph now.
    ``source_line``: the user's line of a result of the graph."""
    if is_alone():
        return
    now = meetings()
    for x in gradients:
        if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
            continue
        turn = sample_turn(now, on_cpu=x.device.type == "cpu")
        if turn is not None and len(_GRADIENTS) < _MOST:
            _GRADIENTS.append(_Reading.of_elements(source_line, x, turn))


def _compare_gradients(ranks: Sequence[Sequence[list[float]]]) -> GradientError | None:
    """Return the error to raise on all ranks if their gradients differ by more than
    rounding. Different numbers of gradients, as of a rank that left out a backward, are
    found elsewhere."""
    if len({*map(len, ranks)}) > 1:
        return None
    for gradient, *sketches in zip(_IN_WORD, *ranks, strict=True):
        for rank, own in enumerate(sketches):
            if _is_far(own, sketches[0]):
                error = GradientError(
                    "gradients of results of a compiled graph differed between ranks: "
                    "code that is not compiled computes another loss of them on rank "
                    f"{worlds.global_rank(rank)} than on rank {worlds.global_rank(0)}",
                    where=gradient.of,
                    fix=_LOSS_FIX,
                )
                return meeting.as_reported(error)
    return None
