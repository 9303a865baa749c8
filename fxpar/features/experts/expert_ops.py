"""Registers ops on rows of tokens and their experts, with their kernels: products with
the weights of experts, and rows sent to the experts that they choose, and back.

``fxpar::expert_mm`` and ``fxpar::expert_outer`` stand in graphs of global shapes. Their
rows are in the order of tokens, not of experts; ``ids`` gives the expert of each. So
rows are a factor that may be split like any other. With ``groups`` > 1 each row comes
once for each group of experts, ``[groups * rows, k]``, and counts only in the group of
its expert: a group is the experts of one rank. ``room``: rows that a rank has room for,
in multiples of its even share, or 0 for all; it does not change what one device
computes. Where ``ids`` has as many rows as ``x``, each group has rows of its own
(``dispatch_slots``), ``room`` times as many as count. ``k`` and ``n`` may each be
several dims, as where a gate and an up-projection share a weight.

``fxpar::own_expert_mm`` and ``fxpar::own_expert_outer`` stand in local graphs: ``ids``
says for each row to which of a rank's own experts it belongs; rows with any other
number count nowhere. ``spread``: one row in so many counts, if experts get equally
many; with ``room`` > 0 no rank may have more than ``room`` times that share, and ranks
along ``axes`` exchange their counts.

``fxpar::grouped_mm`` and ``fxpar::grouped_outer`` stand in local graphs: rows sorted by
expert, and where each expert's end. Rows after the last end belong to no expert; they
are zero in results. ``rows``: how many rows the cost model counts, if experts get
equally many.

``fxpar::dispatch_slots``: the rows of a batch come in ``sources`` parts, one from each
rank that has some, and go to ``groups`` of experts. A group has slots for ``room`` rows
of each part, ``[groups, sources, room]``: a shape that does not depend on what is
chosen, so that the exchange between sources and groups is an all-to-all of one size.
Where more rows of a part choose a group, results are wrong: ``most`` says how many do,
for ``fxpar::within`` to check.

``fxpar::exchange_slots`` and ``fxpar::return_slots``: ranks along manual ``axes``, each
with slots of rows of its own, send the slots of each group to the rank that has its
experts (``sharding.manual_axes``), and get them back; on one device they are views.

In: tensors. Out: tensors. Never: a shape that depends on values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import register_flop_formula

from fxpar.errors import RoomError
from fxpar.graph.exact_ops import NONE
from fxpar.sharding.ops import LOCAL
from fxpar.sharding.ops.local_call import LocalCall


def _owned(
    ids: torch.Tensor, rows: int, experts: int, groups: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (expert, its rows of ``[groups * rows]``) for each expert."""
    shared = ids.shape[0] < rows
    for expert in range(experts):
        group, count = expert // (experts // groups), rows // groups
        chosen = ids if shared else ids[group * count : (group + 1) * count]
        yield expert, (chosen == expert).nonzero().flatten() + group * count


@torch.library.custom_op("fxpar::expert_mm", mutates_args=())
def expert_mm(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, groups: int, room: float
) -> torch.Tensor:
    """Return ``x[i] @ weight[ids[i]]``: [groups * rows, k], [experts, k, n], [rows] ->
    [groups * rows, n]. Zero where a row's expert is in another group, or none."""
    out = x.new_zeros(x.shape[0], *weight.shape[x.dim() :])
    for expert, rows in _owned(ids, len(x), weight.shape[0], groups):
        out[rows] = torch.tensordot(x[rows], weight[expert], x.dim() - 1)
    return out


@torch.library.custom_op("fxpar::expert_outer", mutates_args=())
def expert_outer(
    x: torch.Tensor,
    y: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    groups: int,
    room: float,
) -> torch.Tensor:
    """Return ``x[rows].T @ y[rows]`` for the rows of each expert: [groups * rows, k],
    [groups * rows, n], [rows] -> [experts, k, n]."""
    out = x.new_zeros(experts, *x.shape[1:], *y.shape[1:])
    for expert, rows in _owned(ids, len(x), experts, groups):
        out[expert] = torch.tensordot(x[rows], y[rows], [[0], [0]])
    return out


@torch.library.custom_op("fxpar::own_expert_mm", mutates_args=())
def own_expert_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    spread: float,
    room: float,
    axes: str,
) -> torch.Tensor:
    """Return ``x[i] @ weight[ids[i]]``: [rows, k], [own experts, k, n], [rows] ->
    [rows, n]. Zero where a row belongs to none of the rank's own experts."""
    return expert_mm(x, weight, ids, 1, 0.0)


@torch.library.custom_op("fxpar::own_expert_outer", mutates_args=())
def own_expert_outer(
    x: torch.Tensor,
    y: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    spread: float,
    room: float,
    axes: str,
) -> torch.Tensor:
    """Return ``x[rows].T @ y[rows]`` for the rows of each own expert: [rows, k],
    [rows, n], [rows] -> [experts, k, n]."""
    return expert_outer(x, y, ids, experts, 1, 0.0)


def _has_torch_kernel(*operands: torch.Tensor) -> bool:
    """Return whether torch's own kernel takes them: bfloat16, in rows of 16 bytes."""
    sizes = [n for x in operands for n in x.shape[-2:]]
    return (
        operands[0].is_cuda
        and all(x.dtype == torch.bfloat16 for x in operands)
        and not any(n % 8 for n in sizes)
    )


def _ends(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (group, its rows) for each group that has some."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = max(start, end)


@torch.library.custom_op("fxpar::grouped_mm", mutates_args=())
def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return ``x[i] @ weight[g]`` for rows in groups that end at ``offs``: [m, k],
    [g, k, n], [g] -> [m, n]."""
    if _has_torch_kernel(x, weight):
        product = torch.ops.aten._grouped_mm.default(x.contiguous(), weight, offs)
        places = torch.arange(x.shape[0], device=x.device)
        return product.masked_fill_((places >= offs[-1])[:, None], 0)
    out, end = x.new_empty(x.shape[0], weight.shape[2]), 0
    for group, own in _ends(offs):
        torch.mm(x[own], weight[group], out=out[own])
        end = own.stop
    out[end:].zero_()
    return out


@torch.library.custom_op("fxpar::grouped_outer", mutates_args=())
def grouped_outer(
    x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return ``x[rows].T @ y[rows]`` for rows in groups that end at ``offs``: [m, k],
    [m, n], [g] -> [g, k, n]."""
    if _has_torch_kernel(x, y) and not x.shape[0] % 8:
        return torch.ops.aten._grouped_mm.default(
            x.contiguous().T, y.contiguous(), offs
        )
    out = x.new_empty(offs.shape[0], x.shape[1], y.shape[1])
    with_rows = dict(_ends(offs))
    for group, product in enumerate(out):
        if group in with_rows:
            own = with_rows[group]
            torch.mm(x[own].T, y[own], out=product)
        else:
            product.zero_()
    return out


@torch.library.custom_op("fxpar::within", mutates_args=())
def within(
    x: torch.Tensor, most: torch.Tensor, room: int, where: str, axes: str = ""
) -> torch.Tensor:
    """Return ``x`` if ``most``, rows of all or of each part, does not exceed the room.
    Raises RoomError; on a GPU its kernel stops the program, and nothing waits for it.
    ``axes``, in a local graph: ranks along them exchange their counts, so that all of
    them decide the same, and none waits for one that has raised."""
    fits = (most <= room).all()
    if most.is_cuda:
        torch.ops.aten._assert_async.msg(fits, _FULL.format("more", room))
    elif not fits:
        rows = int(most.amax())
        raise RoomError(_FULL.format(rows, room), where=where, fix=_FIX)
    return x.clone()


_FULL = "experts of one rank are chosen for {} rows, and expert_room leaves room for {}"
_FIX = "raise expert_room (FXPAR_EXPERT_ROOM), or unset it: then there is room for all"


@within.register_fake
def _(x, most, room, where, axes=""):
    return torch.empty_like(x)


# Kind of products -> how many rows are multiplied, by the shapes of the rows and of
# their experts, and the options after these.
_ROWS: dict[str, Callable[..., float]] = {
    "expert": lambda x, ids, *options: (
        ids[0] / (1 if ids[0] < x[0] else options[-1] or 1)
    ),
    "own_expert": lambda x, _, *options: x[0] / options[-3],
    "grouped": lambda x, _, rows: rows,
}


def _register(mm: Any, outer: Any, kind: str) -> None:
    """Register shapes and flops of products and of their weight gradients."""
    rows_of, packets = _ROWS[kind], torch.ops.fxpar

    @mm.register_fake
    def _(x, weight, *_):
        return x.new_empty(x.shape[0], *weight.shape[x.dim() :])

    @outer.register_fake
    def _(x, y, ids, experts, *_):
        count = ids.shape[0] if kind == "grouped" else experts
        return x.new_empty(count, *x.shape[1:], *y.shape[1:])

    @register_flop_formula(getattr(packets, f"{kind}_mm"))
    def _(x, weight, *options, **_) -> float:
        return 2.0 * rows_of(x, *options) * math.prod(weight[1:])

    @register_flop_formula(getattr(packets, f"{kind}_outer"))
    def _(x, y, *options, **_) -> float:
        return 2.0 * rows_of(x, *options) * math.prod([*x[1:], *y[1:]])


_register(expert_mm, expert_outer, "expert")
_register(own_expert_mm, own_expert_outer, "own_expert")
_register(grouped_mm, grouped_outer, "grouped")


@torch.library.custom_op("fxpar::dispatch_slots", mutates_args=())
def dispatch_slots(
    ids: torch.Tensor, experts: int, groups: int, sources: int, room: int, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [rows] -> which row of its part is in each slot, [groups, sources, room];
    in which slot of its part, of ``groups * room``, each row is, [rows]; how many rows
    of each part choose the same group at most, [sources]. Rows of one group keep their
    order. ``exact``: slots without a row are not sent (``exact_exchanges``)."""
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
def _(ids, experts, groups, sources, room, exact):
    return (
        ids.new_empty(groups, sources, room),
        ids.new_empty(ids.shape[0]),
        ids.new_empty(sources),
    )


@torch.library.custom_op("fxpar::dispatch_rows", mutates_args=())
def dispatch_rows(
    x: torch.Tensor, rows: torch.Tensor, copies: int, fill: int
) -> torch.Tensor:
    """Return the row in each slot, ``fill`` where there is none: [rows / copies, ...],
    [groups, sources, room] -> [groups, sources, room, ...]. ``copies``: how many rows
    are made of one row of ``x``."""
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
    """Return each row from its slot, zero if it has none: [groups, sources, room, ...],
    [rows] -> [rows, ...]."""
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


@torch.library.custom_op("fxpar::exchange_slots", mutates_args=())
def exchange_slots(slots: torch.Tensor, axes: str) -> torch.Tensor:
    """Return, on a rank, the slots for its group from all ranks along the axes, in
    their order: [groups, sources, room, ...] -> [groups * sources * room, ...]."""
    return slots.flatten(0, 2).clone()


@exchange_slots.register_fake
def _(slots, axes):
    return slots.new_empty(math.prod(slots.shape[:3]), *slots.shape[3:])


@torch.library.custom_op("fxpar::return_slots", mutates_args=())
def return_slots(
    rows: torch.Tensor, groups: int, sources: int, axes: str
) -> torch.Tensor:
    """Undo ``fxpar::exchange_slots``: [groups * sources * room, ...] ->
    [groups, sources, room, ...]."""
    return rows.unflatten(0, (groups, sources, -1)).clone()


@return_slots.register_fake
def _(rows, groups, sources, axes):
    room = rows.shape[0] // (groups * sources)
    return rows.new_empty(groups, sources, room, *rows.shape[1:])


def _dispatch_slots(
    call: LocalCall,
    ids: fx.Node,
    experts: int,
    groups: int,
    sources: int,
    *options: Any,
) -> Any:
    own_sources = sources // call.build.mesh.count(call.results[0].dims[1])
    return call.same(ids, experts, groups, own_sources, *options)


LOCAL["fxpar::dispatch_slots"] = _dispatch_slots


def room_of(rows: int, groups: int, sources: int, share: float) -> int:
    """Return the rows of one part that a group has room for: ``share`` times as many as
    if all groups were chosen equally often; ``share`` 0: all of the part."""
    of_part = rows // sources
    even = math.ceil(share * of_part / groups) if share else of_part
    return min(even, of_part)
