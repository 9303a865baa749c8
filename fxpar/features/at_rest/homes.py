"""Define the data that all sharded parameters of a model share, and the data of each.

In: reads of parameters by eager code. Out: a ``Home`` on each adopted module
(``sharded_modules``) and each of its parameters, a ``ParameterAtRest`` on the module
that holds the parameter; and ShardError for writes to what eager code read. Never: a
value kept after the forward that read it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.runtime.ranks.groups import OnMesh

AT_REST = "_fxpar_rests"  # on adopted modules: parameter name -> ParameterAtRest
_NUMBERS = itertools.count()
_HOMES: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Home(OnMesh):
    """Holds what all sharded parameters of one model share, read while it is traced.
    ``HOME`` of adopted modules and their parameters."""

    batch: tuple[str, ...]  # axes that the batch is split over
    # As the option of this name; None if it is not set.
    param_dtype: torch.dtype | None = None
    reduce_dtype: str = ""  # as the option of this name, as text; "" if it is not set
    waiting: bool = False  # whether the code is inside ``no_sync``
    unreduced: bool = False  # whether gradients of earlier steps wait to be reduced
    # By id, weak references to the parameters that have a hook which reduces them.
    hooked: dict[int, Any] = field(default_factory=dict)
    # The last read of each parameter by eager code, until the forward ends: by the id
    # of the parameter, or by the graph that it leaves and its place there.
    reads: dict[Hashable, EagerRead] = field(default_factory=dict)
    # The latest of them with its value, which the code may write to by ``.data``, and a
    # copy.
    latest: tuple[EagerRead, torch.Tensor, torch.Tensor] | None = None
    # Names of parameters that the first graph to read them lays out as it uses them.
    movable: set[str] = field(default_factory=set)
    is_even: bool = True  # whether all shards of each parameter have equal shapes
    # The adopted modules by id, as users' classes may have no hash.
    modules: weakref.WeakValueDictionary[int, nn.Module] = field(
        default_factory=weakref.WeakValueDictionary
    )
    # The Homes of the model and of its copies, in order of creation.
    copies: list[weakref.ref[Home]] = field(default_factory=list)
    # The number by which graphs name it (``home_of``).
    number: int = field(default_factory=_NUMBERS.__next__)

    def __post_init__(self) -> None:
        _HOMES[self.number] = self
        self.copies.append(weakref.ref(self))

    def __deepcopy__(self, _: Any) -> Home:
        """Return a Home of its own for a copied model."""
        return Home(
            self.mesh,
            self.batch,
            self.param_dtype,
            self.reduce_dtype,
            movable=set(self.movable),
            is_even=self.is_even,
            copies=self.copies,
            round=self.round,
        )


@dataclass(frozen=True)
class EagerRead:
    """Records that eager code read a parameter's global value, and may not write it."""

    parameter: str  # "Class.name" of the parameter
    line: str  # where the user's code read it
    value: weakref.ref[torch.Tensor]  # the global value, while it is alive
    memory: int  # the value's memory when it was read, as ``memory_of`` numbers it
    # Shares the count of writes to the global value, and holds none of its memory.
    counter: torch.Tensor
    writes: int  # the count of writes when it was read

    @staticmethod
    def of(value: torch.Tensor, parameter: str, line: str) -> EagerRead:
        """Return the record of a read of ``value`` in the user's ``line``."""
        counter = value.detach()  # shares the count of writes
        counter.data = value.new_empty(0)
        writes, memory = _torch.objects.version_of(value), _memory(value)
        return EagerRead(parameter, line, weakref.ref(value), memory, counter, writes)

    def refuse_writes(self) -> None:
        """Raise ShardError if the value was written to, in place or by ``.data = ``:
        the changed value is lost."""
        value = self.value()
        moved = value is not None and _memory(value) != self.memory
        if moved or _torch.objects.version_of(self.counter) != self.writes:
            raise written_parameter(self.parameter, self.line)


_memory = _torch.objects.memory_of


def home_of(number: int) -> Home | None:
    """Return the Home with this number, None if its model is gone."""
    return _HOMES.get(number)


def live_homes() -> list[Home]:
    """Return the Homes of all live models."""
    return list(_HOMES.values())


@dataclass(frozen=True)
class ParameterAtRest:
    """Holds the layout of a parameter at rest, and the hint on its use in programs."""

    shape: tuple[int, ...]  # shape of the global value
    spec: str  # spec of the shards, as text
    hint: str  # a hint as ``constrain`` takes it; "" if there is none
    name: str  # first name of the parameter in its model


def refuse_writes(home: Home, *, ends: bool = True) -> None:
    """Raise ShardError if eager code wrote to a parameter that it read. ``ends``: the
    forward ends, and the values that it read are gone."""
    reads, latest = list(home.reads.values()), home.latest
    if ends:
        home.reads, home.latest = {}, None
    for read in reads:
        read.refuse_writes()
    _refuse_changes(latest)


def _refuse_changes(
    latest: tuple[EagerRead, torch.Tensor, torch.Tensor] | None,
) -> None:
    """Raise ShardError if eager code wrote to the latest value that it read by its
    ``.data``, which counts no writes."""
    if latest is not None:
        read, value, copy = latest
        read.refuse_writes()
        now, then = (x.detach().reshape(-1).view(torch.uint8) for x in (value, copy))
        if not torch.equal(now, then):
            raise written_parameter(read.parameter, read.line)


def note_read(
    home: Home, key: Hashable, value: torch.Tensor, parameter: str, line: str
) -> None:
    """Record that eager code reads the ``value`` of a parameter. Raises ShardError if
    it wrote to the value that it read of this parameter before, or to the one that it
    read last."""
    latest, home.latest = home.latest, None
    _refuse_changes(latest)
    if key in home.reads:
        home.reads.pop(key).refuse_writes()
    read = home.reads[key] = EagerRead.of(value, parameter, line)
    home.latest = read, value, value.detach().clone()


def written_parameter(parameter: str, line: str | None) -> ShardError:
    """Return the error for a parameter that the forward writes to."""
    return ShardError(
        f"the forward writes to a parameter of a model that fxpar.shard split, "
        f"{parameter}",
        where=line,
        fix="write to it outside of the forward, or use fxpar.train_step; "
        "nn.Embedding(max_norm=...) writes to its table",
    )
