"""Steps of reshards as nodes of a local graph: one node each, on any dim.

A local graph is first made with these, so that rewrites see one ``all_gather(x, dim,
axes)`` where later a collective stands between views and copies; ``lower`` makes it
those. What a node gives is contiguous. ``call_of`` writes a step of
``sharding.reshard`` as such a call, ``emit`` appends it. The functions only name what
is to be done: a graph runs once it is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar.passes.builder import Builder
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard import steps

Axes = tuple[str, ...]


def _unlowered() -> NoReturn:
    raise RuntimeError("a graph with steps runs once it is lowered")


def slice_(x: Any, dim: int, axes: Axes) -> Any:
    """This rank's part of ``dim``."""
    _unlowered()


def mask(x: Any, op: str, axes: Axes) -> Any:
    """The value on the first rank, the reduction's identity on the others."""
    _unlowered()


def all_reduce(x: Any, op: str, axes: Axes) -> Any:
    """The reduction of all ranks' values, on each of them."""
    _unlowered()


def reduce_scatter(x: Any, dim: int, op: str, axes: Axes) -> Any:
    """This rank's part, along ``dim``, of the reduction of all ranks' values."""
    _unlowered()


def all_gather(x: Any, dim: int, axes: Axes) -> Any:
    """All ranks' values, joined along ``dim``."""
    _unlowered()


def all_to_all(x: Any, source_dim: int, target_dim: int, axes: Axes) -> Any:
    """``source_dim`` gathered, ``target_dim`` split."""
    _unlowered()


def permute(x: Any, sources: tuple[int, ...], axes: Axes) -> Any:
    """The value of member ``sources[i]``, i being this rank's place in mesh order."""
    _unlowered()


def send(x: Any, peer: int, tag: int, axes: Axes) -> Any:
    """Gives member ``peer`` of this rank's group the value; here, an empty tensor."""
    _unlowered()


def recv(x: Any, peer: int, tag: int, axes: Axes) -> Any:
    """What member ``peer`` of this rank's group sends, written over ``x``."""
    _unlowered()


def call_of(step: steps.Step, mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, its arguments after ``x``) of a step."""
    axes = step.axes
    match step:
        case steps.Slice(dim=dim):
            return slice_, (dim, axes)
        case steps.Mask(op=op):
            return mask, (op, axes)
        case steps.AllReduce(op=op):
            return all_reduce, (op, axes)
        case steps.ReduceScatter(dim=dim, op=op):
            return reduce_scatter, (dim, op, axes)
        case steps.AllGather(dim=dim):
            return all_gather, (dim, axes)
        case steps.AllToAll(source_dim=source, target_dim=target):
            return all_to_all, (source, target, axes)
        case steps.Permute():
            return permute, (step.sources(mesh), axes)
    raise TypeError(f"no step: {step}")


def _cut(shape: list[int], dim: int, k: int) -> None:
    shape[dim] //= k


def _grow(shape: list[int], dim: int, k: int) -> None:
    shape[dim] *= k


def _exchange(shape: list[int], source: int, target: int, k: int) -> None:
    shape[source] *= k
    shape[target] //= k


def _empty(shape: list[int], *_: int) -> None:
    shape[:] = [0]


# What a step does to the shape of one rank's value: (shape, its dims, ranks).
_RESIZE: dict[Any, Callable[..., None] | None] = {
    slice_: _cut,
    mask: None,
    all_reduce: None,
    reduce_scatter: _cut,
    all_gather: _grow,
    all_to_all: _exchange,
    permute: None,
    send: _empty,
    recv: None,
}

# Those between ranks that run different graphs, and all that communicate.
MESSAGES = {send, recv}
COLLECTIVE = {all_reduce, reduce_scatter, all_gather, all_to_all, permute, *MESSAGES}


def is_step(node: fx.Node) -> bool:
    """Whether a node is a step."""
    return node.target in _RESIZE


def axes_of(node: fx.Node) -> Axes:
    """The axes that a step goes over."""
    axes: Any = node.args[-1]
    return axes


def step(build: Builder, target: Callable[..., Any], x: fx.Node, *args: Any) -> fx.Node:
    """Append one step, with its fake value."""
    node = build.graph.call_function(target, (x, *args))
    value, shape = x.meta["val"], [int(n) for n in x.meta["val"].shape]
    resize = _RESIZE[target]
    if resize is not None:
        dims = [arg for arg in args if isinstance(arg, int)]
        resize(shape, *dims, build.mesh.count(args[-1]))
    with build.fake_mode:
        node.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
    build.stamp(node)
    return node


def emit(build: Builder, x: fx.Node, way: Iterable[steps.Step]) -> fx.Node:
    """Append the steps of a reshard; ``x`` itself if there are none."""
    for found in way:
        target, args = call_of(found, build.mesh)
        x = step(build, target, x, *args)
    return x


def chains(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The steps among ``nodes``, in runs: each but the last of a run is read by the
    next alone."""
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if not is_step(node):
            continue
        source: Any = node.args[0]
        alone = len(source.users) == 1
        out[node] = [*(out.pop(source, []) if alone else []), node]
    return list(out.values())
