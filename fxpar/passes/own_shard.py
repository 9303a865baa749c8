"""Defines ops that look up this rank's place in the mesh when they run.

In: nodes of one rank's graph that read ``offset``, which binding makes a number. Out:
these ops in their place, so that the graph, and the code compiled from it, is identical
on all ranks: one rank can compile for all. Inductor gets a lowering for both
(``register_lowering``): a slice is a view whose start is a symbol of the kernel that
reads it; its size and strides stay numbers. Never: a slice's size differs between
ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import define_op
from fxpar.graph.builder import Builder, value_of
from fxpar.sharding import rank_ints
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten
prims = torch.ops.prims


def own_shard(mesh: str, axes: str) -> int:
    """Return the index of the shard over ``axes`` ("dp+tp", major to minor) that this
    process holds."""
    return _shard(mesh, axes, rank_ints.rank_here())


@functools.cache
def _shard(mesh: str, axes: str, rank: int) -> int:
    return Mesh.parse(mesh).index(rank, tuple(axes.split("+")))


def _own_slice(x, dim, size, mesh, axes, stride, base):
    return x.narrow(dim, base + stride * own_shard(mesh, axes), size)


def _own_offset(mesh, axes, stride, base, device):
    at = base + stride * own_shard(mesh, axes)
    return torch.full((), at, dtype=torch.int64, device=device)


define_op(
    "fxpar::own_slice(Tensor(a) x, int dim, SymInt size, str mesh, str axes, "
    "SymInt stride, SymInt base) -> Tensor(a)",
    lambda x, dim, size, *_: x.narrow(dim, 0, size),
    _own_slice,
)
define_op(
    "fxpar::own_offset(str mesh, str axes, SymInt stride, SymInt base, Device device) "
    "-> Tensor",
    lambda *args: torch.empty((), dtype=torch.int64, device=args[-1]),
    _own_offset,
)


@functools.cache
def register_lowering() -> None:
    """Register Inductor lowerings of both ops; needed before it compiles either."""
    ours = torch.ops.fxpar
    _torch.inductor_lowerings.lower_own_shard(
        ours.own_slice.default, ours.own_offset.default, _count, __name__
    )
    _torch.aot.recompute_as_view(ours.own_slice)


def _count(mesh: str, axes: str) -> int:
    return Mesh.parse(mesh).count(tuple(axes.split("+")))


def bind_late(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return a node that computes what ``node`` does, with one of these ops in place
    of its offsets; None if its op takes numbers only. ``args``, ``kwargs``: those of
    ``node``, as nodes in the graph of ``build``, except for offsets."""
    read = [x for x in node.all_input_nodes if x.target in rank_ints.PLACES]
    form = _FORMS.get(node.target)
    if form is None or any(
        x.target is not rank_ints.offset or len(x.args) > 4 for x in read
    ):
        return None
    return form(build, node, args, kwargs)


def _slice(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return an ``own_slice``; None unless its number of rows is known and it is inside
    the dim on every rank."""
    _, dim, start, end, *step = node.args
    if kwargs or step or not all(isinstance(x, fx.Node) for x in (start, end)):
        return None
    mesh, axes, stride, base = value_of(start.args)
    *end_place, further = value_of(end.args)
    if [mesh, axes, stride] != end_place:
        return None
    size = further - base
    whole = args[0].meta["val"].shape[dim]
    last = base + stride * (_count(mesh, "+".join(axes)) - 1) + size
    if base < 0 or stride < 0 or last > whole:
        return None  # its size would differ between ranks
    own = torch.ops.fxpar.own_slice.default
    return build.call(own, args[0], dim, size, mesh, "+".join(axes), stride, base)


def _sub(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 2 or not isinstance(args[0], fx.Node):
        return None
    like = args[0].meta["val"]
    if like.dtype not in (torch.int64, torch.int32) or like.dim() == 0:
        return None
    return build.call(node.target, args[0], _offset(build, node.args[1], like.device))


def _full(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    size, value = node.args
    if size or kwargs.get("dtype") is not torch.int64 or not isinstance(value, fx.Node):
        return None
    return _offset(build, value, kwargs["device"])


def _iota(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if kwargs.get("dtype") is not torch.int64:
        return None
    start = _offset(build, node.kwargs["start"], kwargs["device"])
    from_zero = build.call(node.target, *args, **{**kwargs, "start": 0})
    return build.call(aten.add.Tensor, from_zero, start)


def _offset(build: Builder, offset: fx.Node, device: torch.device) -> Any:
    mesh, axes, stride, base = value_of(offset.args)
    own = torch.ops.fxpar.own_offset.default
    return build.call(own, mesh, "+".join(axes), stride, base, device)


# Op that reads offsets -> its form that looks them up when it runs.
_FORMS = {
    aten.slice.Tensor: _slice,
    aten.sub.Tensor: _sub,
    aten.full.default: _full,
    prims.iota.default: _iota,
}
