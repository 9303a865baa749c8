"""Registers the ops at the borders of stages, in the graph of all stages and in that of
one place, and makes messages of several tensors with them.

``transfer``, ``spread`` and ``scatter`` stand in the graph of all stages, which is one
text on every rank: they bring a value of one place along the pipeline axis to another
place, to all of them, or in parts to all. The graph of one place has ``send`` and
``receive`` instead, which start a message and do not wait, and ``share``. Each takes
the message ``before`` it: compiled code keeps their order, and all ranks have the same
one. ``after_sends`` lets a result wait for what was sent.

A received tensor is waited for by ``_c10d_functional.wait_tensor``, like the result of
a collective. Bytes are sent, whatever the dtype.

In: nodes of a graph of stages that is being laid out (``lay_out_stages``). Out: nodes
appended to it: tensors are joined to one, which crosses, and split again. A value that
is sharded along the axis is gathered where it is read (``gather_at``), a gradient that
one place has is scattered (``scatter_from``), a result goes to all places
(``broadcast_from``). The group is that of the axis. Never: an op that waits to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import LostRankError
from fxpar.graph.builder import PLACE, joined, split
from fxpar.sharding.cost.op import bytes_of

ours = torch.ops.fxpar


@torch.library.custom_op("fxpar::transfer", mutates_args=())
def transfer(x: torch.Tensor, source: int, target: int, group: str) -> torch.Tensor:
    """Bring the value at place ``source`` to place ``target``."""
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("fxpar::spread", mutates_args=())
def spread(x: torch.Tensor, source: int, group: str) -> torch.Tensor:
    """Bring the value at place ``source`` to every place."""
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("fxpar::scatter", mutates_args=())
def scatter(x: torch.Tensor, source: int, places: int, group: str) -> torch.Tensor:
    """Bring part i of ``x`` at ``source``, in ``places`` parts, to place i; on one
    device, return the part of ``source``."""
    return x.chunk(places)[source].clone()


@torch.library.custom_op("fxpar::send", mutates_args=())
def send(
    x: torch.Tensor, before: torch.Tensor | None, peer: int, tag: int, group: str
) -> torch.Tensor:
    """Start to send a copy of ``x``; return an empty tensor to wait for."""
    token = x.new_empty(0)
    if x.numel():
        sent = _bytes(x.clone(memory_format=torch.contiguous_format))
        ends = peer, tag, group
        _torch.distributed.start_message("send", sent, *ends, token, _failed(peer))
    return token


@torch.library.custom_op("fxpar::receive", mutates_args=())
def receive(
    before: torch.Tensor | None,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    peer: int,
    tag: int,
    group: str,
) -> torch.Tensor:
    """Start to receive a tensor; it is there once it was waited for."""
    out = torch.empty(size, dtype=dtype, device=device)
    if out.numel():
        ends = peer, tag, group
        _torch.distributed.start_message("recv", _bytes(out), *ends, out, _failed(peer))
    return out


@torch.library.custom_op("fxpar::share", mutates_args=())
def share(
    x: torch.Tensor, before: torch.Tensor | None, source: int, group: str
) -> torch.Tensor:
    """Start to give every member the value of ``source``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if _torch.distributed.group_named(group).rank() == source:
        out.copy_(x)
    if out.numel():
        failed = _failed(source, to_all=True)
        _torch.distributed.start_broadcast(_bytes(out), source, group, out, failed)
    return out


@torch.library.custom_op("fxpar::after_sends", mutates_args=())
def after_sends(x: torch.Tensor, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of ``x`` once all messages were sent."""
    for token in sent:
        torch.ops._c10d_functional.wait_tensor(token)
    return x.clone()


def _failed(place: int, *, to_all: bool = False) -> _torch.distributed.Failed:
    """Return what makes the error if a message from or to a place does not get through.
    ``to_all``: members pass it on to one another, and any of them may be the one that
    does not."""

    def error(rank: int, cause: Exception) -> LostRankError:
        sender = f"rank {rank}, at position {place} of the pipeline,"
        what = f"{sender} ended or hangs: a message between it and this rank failed"
        fix = f"see what rank {rank} printed; if it"
        if to_all:
            what = f"a value that {sender} sends to all ranks did not arrive: one of "
            what += "the stages ended or hangs"
            fix = "see what the ranks printed, first of all the first that failed; if "
            fix += "one"
        reason = str(cause).split(". ")[0].partition("\n")[0]  # without advice
        fix += " computes for longer than a message may take, give init_process_group "
        return LostRankError(
            f"{what} ({reason})",
            rank=None if to_all else rank,
            fix=f"{fix}a longer timeout",
        )

    return error


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    flat = torch.view_as_real(x) if x.is_complex() else x
    return flat.reshape(-1).view(torch.uint8)


for _op in (transfer, spread, share):
    _op.register_fake(
        lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format)
    )
scatter.register_fake(
    lambda x, source, places, group: x.new_empty(x.shape[0] // places)
)
after_sends.register_fake(lambda x, sent: torch.empty_like(x))
send.register_fake(lambda x, *_: x.new_empty(0))
receive.register_fake(
    lambda before, size, dtype, device, *_: torch.empty(
        size, dtype=dtype, device=device
    )
)


aten = torch.ops.aten

# Ops between places of a pipeline, in the graph of all stages (with their kinds) and in
# that of one place; the group is the last argument.
CROSSINGS = {
    ours.transfer.default: "send",
    ours.spread.default: "broadcast",
    ours.scatter.default: "scatter",
}
MESSAGES = (ours.send.default, ours.receive.default, ours.share.default)

# The place of nodes that run at all places.
EVERY = -1

# What stages add to the core: "program_at", of the graph of all stages and a place the
# graph of the ranks there; "simulate", the timeline of a step of all places.
OF_STAGES: dict[str, Callable[..., Any]] = {}


def is_laid_out(graph: fx.Graph) -> bool:
    """Return whether a graph is one of stages."""
    return any(PLACE in node.meta for node in graph.nodes)


# The most bytes that a message has, unless one tensor has more.
BUCKET = 4 << 20

# (place, op, its arguments) -> the node, appended.
Put = Callable[..., fx.Node]

# Appends the nodes that split a message; whoever reads them waits for the message.
Arrivals = Callable[[], list[fx.Node]]


def buckets(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Return nodes of one kind in runs of up to ``BUCKET`` bytes, in order."""
    runs: list[list[fx.Node]] = []
    open_runs: dict[Any, tuple[list[fx.Node], int]] = {}
    for node in nodes:
        key, size = kind_of(node), bytes_of(node)
        run, total = open_runs.get(key, ([], 0))
        if not run or total + size > BUCKET:
            run, total = [], 0
            runs.append(run)
        run.append(node)
        open_runs[key] = run, total + size
    return runs


def kind_of(node: fx.Node) -> Any:
    """Return what tensors of one message have in common: dtype and device."""
    return node.meta["val"].dtype, node.meta["val"].device


def gather_at(
    put: Put,
    target: int,
    shards: Sequence[Sequence[fx.Node]],
    dims: Sequence[int],
    group: str,
) -> list[fx.Node]:
    """Gather tensors at a place, or at all. ``shards``: by place, then by tensor;
    ``dims``: along which each tensor is split."""
    arrived: list[Sequence[fx.Node]] = []
    for source, own in enumerate(shards):
        if source == target:
            arrived.append(own)
        elif target == EVERY:
            arrived.append(broadcast_from(put, source, own, group)())
        else:
            flat = joined(partial(put, source), own)
            message = put(target, ours.transfer.default, flat, source, target, group)
            arrived.append(split(partial(put, target), message, own))
    columns = zip(*arrived, strict=True)
    return [
        put(target, aten.cat.default, list(parts), dim)
        for parts, dim in zip(columns, dims, strict=True)
    ]


def scatter_from(
    put: Put,
    source: int,
    values: Sequence[fx.Node],
    dims: Sequence[int],
    places: int,
    group: str,
) -> Arrivals:
    """Send every place its part, along a dim each, of the values of one place."""
    pieces: list[fx.Node] = []
    for i in range(places):
        for value, dim in zip(values, dims, strict=True):
            size = value.meta["val"].shape[dim] // places
            bounds = i * size, (i + 1) * size
            pieces.append(put(source, aten.slice.Tensor, value, dim, *bounds))
    flat = joined(partial(put, source), pieces)
    own = put(EVERY, ours.scatter.default, flat, source, places, group)
    return lambda: split(partial(put, EVERY), own, pieces[: len(values)])


def broadcast_from(
    put: Put, source: int, values: Sequence[fx.Node], group: str
) -> Arrivals:
    """Send every place the values of one."""
    if len(values) == 1:
        one = put(EVERY, ours.spread.default, values[0], source, group)
        return lambda: [one]
    flat = joined(partial(put, source), values)
    whole = put(EVERY, ours.spread.default, flat, source, group)
    return lambda: split(partial(put, EVERY), whole, values)
