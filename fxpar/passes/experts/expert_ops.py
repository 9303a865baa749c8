"""Products of rows with the weights of their experts: ops of graphs, and their kernels.

``fxpar::expert_mm`` and ``fxpar::expert_outer`` stand in graphs of global shapes. Their
rows lie as tokens do, in no order of experts; ``ids`` says whose each is. So rows are a
factor that may be split like any other. Of ``groups`` > 1 each row comes once for each
group of experts, ``[groups * rows, k]``, and counts in the group of its expert alone:
a group is what one rank has of the experts. ``room``: rows that a rank has room for, in
multiples of its even share, or 0 for all: of one device's numbers no concern. Where
``ids`` has as many rows as ``x``, each group has rows of its own (``dispatch_ops``),
``room`` times as many as count. ``k`` and ``n`` may each be several dims, as where a
gate and an up-projection share a weight.

``fxpar::own_expert_mm`` and ``fxpar::own_expert_outer`` stand in local graphs: ``ids``
says of each row which of a rank's own experts it belongs to; rows of any other number
count nowhere. ``spread``: of so many rows one counts, if experts get alike many; of
``room`` > 0 rows in multiples of that share no rank may have more, and ranks along
``axes`` tell one another.

``fxpar::grouped_mm`` and ``fxpar::grouped_outer`` stand in local graphs: rows sorted by
expert, and where each expert's end. Rows behind the last end belong to no expert; they
are zero in results. ``rows``: how many count as they are priced, if experts get alike
many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fxpar.errors import RoomError


def _owned(
    ids: torch.Tensor, rows: int, experts: int, groups: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(expert, its rows of ``[groups * rows]``) for each expert."""
    shared = ids.shape[0] < rows
    for expert in range(experts):
        group, count = expert // (experts // groups), rows // groups
        chosen = ids if shared else ids[group * count : (group + 1) * count]
        yield expert, (chosen == expert).nonzero().flatten() + group * count


@torch.library.custom_op("fxpar::expert_mm", mutates_args=())
def expert_mm(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, groups: int, room: float
) -> torch.Tensor:
    """``x[i] @ weight[ids[i]]``: [groups * rows, k], [experts, k, n], [rows] ->
    [groups * rows, n]. Zero where a row's expert is in another group, or none."""
    out = x.new_zeros(x.shape[0], *weight.shape[x.dim() :])
    for expert, rows in _owned(ids, len(x), weight.shape[0], groups):
        out[rows] = torch.tensordot(x[rows], weight[expert], x.dim() - 1)
    return out


@expert_mm.register_fake
def _(x, weight, ids, groups, room):
    return x.new_empty(x.shape[0], *weight.shape[x.dim() :])


@torch.library.custom_op("fxpar::expert_outer", mutates_args=())
def expert_outer(
    x: torch.Tensor,
    y: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    groups: int,
    room: float,
) -> torch.Tensor:
    """``x[rows].T @ y[rows]`` for the rows of each expert: [groups * rows, k],
    [groups * rows, n], [rows] -> [experts, k, n]."""
    out = x.new_zeros(experts, *x.shape[1:], *y.shape[1:])
    for expert, rows in _owned(ids, len(x), experts, groups):
        out[expert] = torch.tensordot(x[rows], y[rows], [[0], [0]])
    return out


@expert_outer.register_fake
def _(x, y, ids, experts, groups, room):
    return x.new_empty(experts, *x.shape[1:], *y.shape[1:])


@torch.library.custom_op("fxpar::own_expert_mm", mutates_args=())
def own_expert_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    spread: float,
    room: float,
    axes: str,
) -> torch.Tensor:
    """``x[i] @ weight[ids[i]]``: [rows, k], [own experts, k, n], [rows] -> [rows, n].
    Zero where a row is of no own expert."""
    return expert_mm(x, weight, ids, 1, 0.0)


@own_expert_mm.register_fake
def _(x, weight, ids, spread, room, axes):
    return x.new_empty(x.shape[0], *weight.shape[x.dim() :])


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
    """``x[rows].T @ y[rows]`` for the rows of each own expert: [rows, k], [rows, n],
    [rows] -> [experts, k, n]."""
    return expert_outer(x, y, ids, experts, 1, 0.0)


@own_expert_outer.register_fake
def _(x, y, ids, experts, spread, room, axes):
    return x.new_empty(experts, *x.shape[1:], *y.shape[1:])


def _fits_torch(*operands: torch.Tensor) -> bool:
    """Whether torch's own kernel takes them: bfloat16, in rows of 16 bytes."""
    sizes = [n for x in operands for n in x.shape[-2:]]
    return (
        operands[0].is_cuda
        and all(x.dtype == torch.bfloat16 for x in operands)
        and not any(n % 8 for n in sizes)
    )


def _ends(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(group, its rows), of groups that have some."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = max(start, end)


@torch.library.custom_op("fxpar::grouped_mm", mutates_args=())
def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, rows: int
) -> torch.Tensor:
    """``x[i] @ weight[g]`` for rows in groups that end at ``offs``: [m, k], [g, k, n],
    [g] -> [m, n]."""
    if _fits_torch(x, weight):
        product = torch.ops.aten._grouped_mm.default(x.contiguous(), weight, offs)
        places = torch.arange(x.shape[0], device=x.device)
        return product.masked_fill_((places >= offs[-1])[:, None], 0)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for group, own in _ends(offs):
        torch.mm(x[own], weight[group], out=out[own])
    return out


@grouped_mm.register_fake
def _(x, weight, offs, rows):
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("fxpar::grouped_outer", mutates_args=())
def grouped_outer(
    x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, rows: int
) -> torch.Tensor:
    """``x[rows].T @ y[rows]`` for rows in groups that end at ``offs``: [m, k], [m, n],
    [g] -> [g, k, n]."""
    if _fits_torch(x, y) and not x.shape[0] % 8:
        return torch.ops.aten._grouped_mm.default(
            x.contiguous().T, y.contiguous(), offs
        )
    out = x.new_zeros(offs.shape[0], x.shape[1], y.shape[1])
    for group, own in _ends(offs):
        torch.mm(x[own].T, y[own], out=out[group])
    return out


@grouped_outer.register_fake
def _(x, y, offs, rows):
    return x.new_empty(offs.shape[0], x.shape[1], y.shape[1])


@torch.library.custom_op("fxpar::within", mutates_args=())
def within(
    x: torch.Tensor, most: torch.Tensor, room: int, where: str, axes: str = ""
) -> torch.Tensor:
    """``x``, if ``most`` rows, [] or of each part, are no more than there is room for.
    Raises RoomError; on a GPU its kernel stops the program, and nothing waits for it.
    ``axes``, of a local graph: ranks along them tell one another how many there are, so
    that all of them find the same, and none waits for one that has raised."""
    if most.is_cuda:
        fits = most.amax() <= room
        torch.ops.aten._assert_async.msg(fits, _FULL.format("more", room))
    elif int(most.amax()) > room:
        rows = int(most.amax())
        raise RoomError(_FULL.format(rows, room), where=where, fix=_FIX)
    return x.clone()


_FULL = "experts of one rank are chosen for {} rows, and expert_room leaves room for {}"
_FIX = "raise expert_room (FXPAR_EXPERT_ROOM), or unset it: then there is room for all"


@within.register_fake
def _(x, most, room, where, axes=""):
    return torch.empty_like(x)


def _counting(x: Any, ids: Any, room: float) -> float:
    """Rows that are multiplied, by the shapes of a product's operands."""
    return float(ids[0] if ids[0] < x[0] or not room else ids[0] / room)


@register_flop_formula(torch.ops.fxpar.expert_mm)
def _(x, weight, ids, groups, room, **_) -> float:
    return 2.0 * _counting(x, ids, room) * math.prod(weight[1:])


@register_flop_formula(torch.ops.fxpar.expert_outer)
def _(x, y, ids, experts, groups, room, **_) -> float:
    return 2.0 * _counting(x, ids, room) * math.prod([*x[1:], *y[1:]])


@register_flop_formula(torch.ops.fxpar.own_expert_mm)
def _(x, weight, ids, spread, room, axes, **_) -> float:
    return 2.0 * x[0] / spread * math.prod(weight[1:])


@register_flop_formula(torch.ops.fxpar.own_expert_outer)
def _(x, y, ids, experts, spread, room, axes, **_) -> float:
    return 2.0 * x[0] / spread * math.prod([*x[1:], *y[1:]])


@register_flop_formula(torch.ops.fxpar.grouped_mm)
def _(x, weight, offs, rows, **_) -> float:
    return 2.0 * rows * weight[1] * weight[2]


@register_flop_formula(torch.ops.fxpar.grouped_outer)
def _(x, y, offs, rows, **_) -> float:
    return 2.0 * rows * x[1] * y[1]
