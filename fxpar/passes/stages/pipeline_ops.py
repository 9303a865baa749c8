"""Ops at the borders of stages: of the graph of all stages, and of what one runs.

``transfer``, ``spread`` and ``scatter`` stand in the graph of all stages, which is one
text on every rank: a value that one place along the pipeline axis makes, at another
place, at all of them, or in parts. What one place runs
has ``send`` and ``receive`` in their stead, which start a message and do not wait, and
``share``. Each takes the message ``before`` it: compiled code keeps their order, and
all ranks have one. ``behind`` lets a result wait for what was sent.

A received tensor is waited for by ``_c10d_functional.wait_tensor``, as that of a
collective is. Bytes are sent, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpar import _torch

ours = torch.ops.fxpar


@torch.library.custom_op("fxpar::transfer", mutates_args=())
def transfer(x: torch.Tensor, source: int, target: int, group: str) -> torch.Tensor:
    """What place ``source`` has, at place ``target``."""
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("fxpar::spread", mutates_args=())
def spread(x: torch.Tensor, source: int, group: str) -> torch.Tensor:
    """What place ``source`` has, at every place."""
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("fxpar::scatter", mutates_args=())
def scatter(x: torch.Tensor, source: int, places: int, group: str) -> torch.Tensor:
    """At place i part i of the ``places`` parts of what ``source`` has; here, that of
    ``source``."""
    return x.chunk(places)[source].clone()


@torch.library.custom_op("fxpar::send", mutates_args=())
def send(
    x: torch.Tensor, before: torch.Tensor | None, peer: int, tag: int, group: str
) -> torch.Tensor:
    """Starts to send a copy of ``x``; an empty tensor to wait for."""
    token = x.new_empty(0)
    if x.numel():
        sent = _bytes(x.clone(memory_format=torch.contiguous_format))
        _torch.distributed.start_message("send", sent, peer, tag, group, token)
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
    """Starts to receive a tensor; it is there once it was waited for."""
    out = torch.empty(size, dtype=dtype, device=device)
    if out.numel():
        _torch.distributed.start_message("recv", _bytes(out), peer, tag, group, out)
    return out


@torch.library.custom_op("fxpar::share", mutates_args=())
def share(
    x: torch.Tensor, before: torch.Tensor | None, source: int, group: str
) -> torch.Tensor:
    """Starts to give every member what ``source`` holds."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        _torch.distributed.start_broadcast(_bytes(out), source, group, out)
    return out


@torch.library.custom_op("fxpar::behind", mutates_args=())
def behind(x: torch.Tensor, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of ``x``, when all messages were sent."""
    for token in sent:
        torch.ops._c10d_functional.wait_tensor(token)
    return x.clone()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    flat = torch.view_as_real(x) if x.is_complex() else x
    return flat.reshape(-1).view(torch.uint8)


def _empty_like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _op in (transfer, spread, share):
    _op.register_fake(_empty_like)
scatter.register_fake(
    lambda x, source, places, group: x.new_empty(x.shape[0] // places)
)
behind.register_fake(lambda x, sent: torch.empty_like(x))
send.register_fake(lambda x, *_: x.new_empty(0))
receive.register_fake(
    lambda before, size, dtype, device, *_: torch.empty(
        size, dtype=dtype, device=device
    )
)
