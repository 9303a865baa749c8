"""Rows sent to the experts that they choose, and back: ops of graphs, and what they do.

The rows of a batch come in ``sources`` parts, one of each rank that has some, and go to
``groups`` of experts. Of each part a group has room for so many rows, in slots
``[groups, sources, room]``: a shape that does not depend on what is chosen, so that the
exchange between sources and groups is an all-to-all of one size. Where more rows of a
part choose a group, nothing is right: ``most`` says how many do, for ``fxpar::within``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxpar.passes.local.local_call import LocalCall, Localizer

# Of a slot that no row is in; of a row that is in no slot.
NONE = -1


@torch.library.custom_op("fxpar::dispatch_slots", mutates_args=())
def dispatch_slots(
    ids: torch.Tensor, experts: int, groups: int, sources: int, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows] -> which row of its part is in each slot, [groups, sources, room]; in
    which slot of its part, of ``groups * room``, each row is, [rows]; how many rows of
    each part choose the same group at most, [sources]. Rows of one group keep their
    order."""
    count, device = ids.shape[0] // sources, ids.device
    group = (ids // (experts // groups)).reshape(sources, 1, count)
    group_numbers = torch.arange(groups, device=device)[:, None]
    chosen = group == group_numbers
    place = chosen.cumsum(2) - 1
    inside = chosen & (place < room)
    slot = torch.where(inside, place + group_numbers * room, 0).sum(1)
    slots = torch.where(inside.any(1), slot, NONE).flatten()
    part = torch.arange(sources, device=device)[:, None, None]
    last = groups * sources * room
    index = torch.where(inside, place + (group_numbers * sources + part) * room, last)
    numbers = torch.arange(count, device=device).expand(index.shape)
    rows = ids.new_full((last + 1,), NONE).scatter(
        0, index.flatten(), numbers.flatten()
    )
    most = chosen.sum(2).amax(1)
    return rows[:last].reshape(groups, sources, room), slots, most


@dispatch_slots.register_fake
def _(ids, experts, groups, sources, room):
    return (
        ids.new_empty(groups, sources, room),
        ids.new_empty(ids.shape[0]),
        ids.new_empty(sources),
    )


@torch.library.custom_op("fxpar::dispatch_rows", mutates_args=())
def dispatch_rows(
    x: torch.Tensor, rows: torch.Tensor, copies: int, fill: int
) -> torch.Tensor:
    """[rows / copies, ...], [groups, sources, room] -> [groups, sources, room, ...]:
    in each slot its row; ``fill`` where there is none. ``copies``: rows of one of
    ``x``."""
    sources = rows.shape[1]
    first = torch.arange(sources, device=x.device)[:, None] * (x.shape[0] // sources)
    rows_read = x[rows.clamp(min=0) // copies + first]
    empty = (rows == NONE).reshape(*rows.shape, *[1] * (x.dim() - 1))
    return rows_read.masked_fill_(empty, fill)


@dispatch_rows.register_fake
def _(x, rows, copies, fill):
    return x.new_empty(*rows.shape, *x.shape[1:])


@torch.library.custom_op("fxpar::combine_rows", mutates_args=())
def combine_rows(y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[groups, sources, room, ...], [rows] -> [rows, ...]: each row as it is in its
    slot; zero if it is in none."""
    sources, room = y.shape[1:3]
    slot = slots.reshape(sources, -1)
    part = torch.arange(sources, device=y.device)[:, None]
    own_slot = slot.clamp(min=0)
    index = (own_slot // room * sources + part) * room + own_slot % room
    rows_read = y.flatten(0, 2)[index.flatten()]
    return rows_read.masked_fill_((slots == NONE).reshape(-1, *[1] * (y.dim() - 3)), 0)


@combine_rows.register_fake
def _(y, slots):
    return y.new_empty(slots.shape[0], *y.shape[3:])


def _dispatch_slots(
    call: LocalCall, ids: fx.Node, experts: int, groups: int, sources: int, room: int
) -> Any:
    own_sources = sources // call.build.mesh.count(call.results[0].dims[1])
    return call.same(ids, experts, groups, own_sources, room)


LOCAL: dict[Any, Localizer] = {"fxpar::dispatch_slots": _dispatch_slots}


def room_of(rows: int, groups: int, sources: int, share: float) -> int:
    """Rows of one part that there is room for in one group, ``share`` times as many as
    if all groups were chosen alike; 0: for all of them."""
    of_part = rows // sources
    even = math.ceil(share * of_part / groups) if share else of_part
    return min(even, of_part)
