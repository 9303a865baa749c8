"""Registers ops of one rank, with their kernels, that send rows by exact numbers to the
ranks of their experts, and back.

In: tensors of one rank. Out: tensors of one rank. Never: shapes that depend on how many
rows are sent: what is received has room for all rows. How many rows go to each member
and come from each are small tensors, which the host reads: on a device that runs later
than the host, it would wait. All but ``fxpar::exact_places`` are collectives of a local
graph: the last argument is their group, symbolic until it is bound.

``fxpar::exact_places``: which row is in each slot, ``[groups, parts, room]`` as
``fxpar::dispatch_slots`` gives it, and the experts in slots that were received ->
``rows``: numbers of the rows that a rank sends, in the order they are sent; ``sent``,
``got``: how many, by member; ``slots``: the slot of each row that comes, in the order
they come; entries after the last row mean nothing.

``fxpar::send_rows``: row ``rows[j] // copies`` of ``x`` is the j-th that is sent; the
j-th that comes is row ``places[j]`` of the result. Other rows are zero. And back,
``fxpar::return_rows``: row ``places[j]`` of ``y`` is the j-th that is sent; the j-th
that comes is row ``rows[j]`` of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

c10d = torch.ops._c10d_functional

# A slot without a row; a row without a slot.
NONE = -1
# (rows in the order they are sent, how many come, how many go) -> those that come.
Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


@torch.library.custom_op("fxpar::exact_places", mutates_args=())
def exact_places(
    slot_rows: torch.Tensor, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run ``fxpar::exact_places`` (see above). ``ids``: of all slots that a rank
    receives, ``NONE`` where a slot is empty. Each of the ``count`` rows of a rank is in
    some slot."""
    groups, parts, room = slot_rows.shape
    first = torch.arange(parts, device=ids.device)[:, None] * (count // parts)
    is_sent, comes = slot_rows != NONE, ids.flatten() != NONE
    slots = ids.new_zeros(ids.numel())
    numbers = comes.nonzero().flatten()
    slots[: numbers.numel()] = numbers
    return (
        (slot_rows + first)[is_sent],
        is_sent.flatten(1).sum(1),
        comes.reshape(-1, parts * room).sum(1),
        slots,
    )


@exact_places.register_fake
def _(slot_rows, ids, count):
    groups, parts, room = slot_rows.shape
    return (
        slot_rows.new_empty(count),
        slot_rows.new_empty(groups),
        ids.new_empty(ids.numel() // (parts * room)),
        ids.new_empty(ids.numel()),
    )


def sent_rows(
    exchange: Exchange,
    x: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    sent: torch.Tensor,
    got: torch.Tensor,
    copies: int,
) -> torch.Tensor:
    """Run ``fxpar::send_rows`` over an exchange."""
    gives, takes = sent.tolist(), got.tolist()
    came = exchange(x[rows // copies if copies > 1 else rows], takes, gives)
    count = sum(takes)
    make = x.new_empty if count == places.shape[0] else x.new_zeros
    out = make(places.shape[0], *x.shape[1:])
    return out.index_copy_(0, places[:count], came)


def returned_rows(
    exchange: Exchange,
    y: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    sent: torch.Tensor,
    got: torch.Tensor,
) -> torch.Tensor:
    """Run ``fxpar::return_rows`` over an exchange."""
    gives, takes = got.tolist(), sent.tolist()
    came = exchange(y[places[: sum(gives)]], takes, gives)
    return torch.empty_like(came).index_copy_(0, rows, came)


def _over(group: str) -> Exchange:
    """Return an exchange by an all-to-all of rows as bytes, which takes any dtype."""

    def exchange(
        rows: torch.Tensor, takes: list[int], gives: list[int]
    ) -> torch.Tensor:
        features = rows.shape[1:]
        whole = rows.reshape(rows.shape[0], features.numel()).contiguous()
        came = c10d.all_to_all_single(whole.view(torch.uint8), takes, gives, group)
        came = c10d.wait_tensor(came).view(rows.dtype)
        return came.reshape(sum(takes), *features)

    return exchange


@torch.library.custom_op("fxpar::send_rows", mutates_args=())
def send_rows(
    x: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    sent: torch.Tensor,
    got: torch.Tensor,
    copies: int,
    group: str,
) -> torch.Tensor:
    """Send rows by exact numbers (see above)."""
    return sent_rows(_over(group), x, rows, places, sent, got, copies)


@send_rows.register_fake
def _(x, rows, places, sent, got, copies, group):
    return x.new_empty(places.shape[0], *x.shape[1:])


@torch.library.custom_op("fxpar::return_rows", mutates_args=())
def return_rows(
    y: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    sent: torch.Tensor,
    got: torch.Tensor,
    group: str,
) -> torch.Tensor:
    """Return rows by exact numbers (see above)."""
    return returned_rows(_over(group), y, rows, places, sent, got)


@return_rows.register_fake
def _(y, rows, places, sent, got, group):
    return y.new_empty(rows.shape[0], *y.shape[1:])


SEND, RETURN = torch.ops.fxpar.send_rows.default, torch.ops.fxpar.return_rows.default


def bytes_sent(value: torch.Tensor, rows: torch.Tensor) -> int:
    """Return the bytes that a rank sends, for rows of the size of one of ``value``, if
    it sends as many rows as it has."""
    return rows.shape[0] * value[:1].numel() * value.dtype.itemsize


def in_lockstep(
    run: Callable[..., torch.Tensor], members: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return what each member of a group receives. ``run``: ``sent_rows`` or
    ``returned_rows``; ``members``: the arguments of each, without the exchange."""
    whole: list[torch.Tensor] = []
    splits: list[list[int]] = []

    def note(rows: torch.Tensor, takes: list[int], gives: list[int]) -> torch.Tensor:
        whole.append(rows)
        splits.append(gives)
        return rows.new_zeros(sum(takes), *rows.shape[1:])

    for member in members:
        run(note, *member)
    cut = [x.split(gives) for x, gives in zip(whole, splits, strict=True)]

    def received(i: int) -> Exchange:
        return lambda *_: torch.cat([pieces[i] for pieces in cut])

    return [run(received(i), *member) for i, member in enumerate(members)]
