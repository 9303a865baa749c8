"""Defines the steps of reshards as nodes of a local graph: one node each, on any dim.

In: steps of ``sharding.reshard``. Out: nodes. A local graph is first made with these,
so that rewrites see one ``all_gather(x, dim, axes)`` where later there are a
collective, views and copies, which ``lower`` makes. A node's result is contiguous.
``call_of`` writes a step as such a call, ``emit`` appends all steps of a reshard. The
functions are names only: never run, since a graph runs once it is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar._fast import known_values
from fxpar.graph.builder import Builder, Size
from fxpar.sharding import shard_sizes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.op import bytes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.steps import KINDS, Step, permutation
from fxpar.sharding.row_moves import Exchange, most_rows, own_rows, seconds
from fxpar.sharding.spec import Spec

Axes = tuple[str, ...]
Shape = Sequence[int]


def _unlowered() -> NoReturn:
    raise RuntimeError("a graph with steps runs once it is lowered")


def slice_(x: Any, dim: int, axes: Axes) -> Any:
    """Return this rank's part of ``dim``."""
    _unlowered()


def mask(x: Any, op: str, axes: Axes) -> Any:
    """Return ``x`` on the first rank, the reduction's identity on the others."""
    _unlowered()


def all_reduce(x: Any, op: str, axes: Axes) -> Any:
    """Return the reduction of all ranks' values."""
    _unlowered()


def reduce_scatter(x: Any, dim: int, op: str, axes: Axes) -> Any:
    """Return this rank's part, along ``dim``, of the reduction of all ranks' values."""
    _unlowered()


def all_gather(x: Any, dim: int, axes: Axes) -> Any:
    """Return all ranks' values, joined along ``dim``."""
    _unlowered()


def all_to_all(x: Any, source_dim: int, target_dim: int, axes: Axes) -> Any:
    """Return ``x`` with ``source_dim`` gathered and ``target_dim`` split."""
    _unlowered()


def permute(x: Any, sources: tuple[int, ...], axes: Axes) -> Any:
    """Return the value of member ``sources[i]``; ``i``: this rank's place in mesh
    order."""
    _unlowered()


def move_rows(x: Any, exchange: str, axes: Axes) -> Any:
    """Return this rank's rows of the results of an op that moves rows of ``x``, its
    joined operands, between ranks. ``exchange``: text of ``row_moves.Exchange``."""
    _unlowered()


def send(x: Any, peer: int, tag: int, axes: Axes) -> Any:
    """Send ``x`` to member ``peer`` of this rank's group; return an empty tensor."""
    _unlowered()


def recv(x: Any, peer: int, tag: int, axes: Axes) -> Any:
    """Return the value that member ``peer`` of this rank's group sends, written over
    ``x``."""
    _unlowered()


# Kind -> function: steps of reshards, rows that an op moves between ranks, and messages
# between ranks that run different graphs.
NODES: dict[str, Callable[..., Any]] = {
    "slice": slice_,
    "mask": mask,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "permute": permute,
    "move_rows": move_rows,
    "send": send,
    "recv": recv,
}
MESSAGES = {send, recv}
# The functions by which reshards communicate, and all that communicate.
RESHARDS = {
    function
    for kind, function in NODES.items()
    if kind in KINDS and not KINDS[kind].local
}
COLLECTIVE = RESHARDS | MESSAGES | {move_rows}
# Reduction -> the op that combines two of its summands.
COMBINE: dict[str, Any] = {
    "sum": torch.ops.aten.add.Tensor,
    "avg": torch.ops.aten.add.Tensor,
    "product": torch.ops.aten.mul.Tensor,
    "max": torch.ops.aten.maximum.default,
    "min": torch.ops.aten.minimum.default,
    "or": torch.ops.aten.bitwise_or.Tensor,
}
_KIND = {function: kind for kind, function in NODES.items()}


def call_of(step: Step, mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return (function, its arguments after ``x``) of a step; the arguments are dims,
    then the reduction or the members that a permute reads, then axes."""
    args: tuple[Any, ...] = (*step.dims, step.op) if step.op else step.dims
    if step.kind == "permute":
        args = (permutation(step, mesh),)
    return NODES[step.kind], (*args, step.axes)


def is_step(node: fx.Node) -> bool:
    """Return whether a node is a step."""
    return node.target in _KIND


def kind_of(node: fx.Node) -> str:
    """Return the kind of a step, a key of ``NODES``."""
    return _KIND[node.target]


def axes_of(node: fx.Node) -> Axes:
    """Return the axes over which a step communicates or slices."""
    axes: Any = node.args[-1]
    return axes


def changed_dims(node: fx.Node) -> list[int]:
    """Return the dims that a step splits or joins, or whose rows it moves."""
    if node.target is move_rows:
        text: Any = node.args[1]
        return [Exchange.parse(text).moves.dim]
    return [arg for arg in node.args[1:-1] if isinstance(arg, int)]


def step_seconds(node: fx.Node, mesh: Mesh, share: float = 1.0) -> float:
    """Return the seconds that the collective of a step takes for a share of its
    operand; 0 for messages and local steps."""
    operand = node.all_input_nodes[0]
    size = bytes_of(operand) * share
    if node.target is move_rows:
        text: Any = node.args[1]
        exchange = Exchange.parse(text)
        rows = max(1, operand.meta["val"].shape[exchange.moves.dim])
        return seconds(exchange, mesh, size / rows)
    if node.target not in RESHARDS:
        return 0.0
    return float(along(kind_of(node), mesh, axes_of(node)).seconds(size))


@dataclass(frozen=True)
class Cut:
    """Holds how a value is split before and after a step."""

    # The global shape.
    shape: tuple[int, ...]
    # The axes of each dim before the step.
    before: tuple[Axes, ...]
    # The axes of each dim after it.
    after: tuple[Axes, ...]
    # Dims that are split evenly, whatever the shares of axes.
    even_dims: tuple[int, ...] = ()

    def is_even(self, mesh: Mesh) -> bool:
        """Return whether all dims are split evenly, before and after."""
        return all(self.is_even_in(mesh, d) for d in range(len(self.shape)))

    def is_even_in(self, mesh: Mesh, d: int) -> bool:
        """Return whether a dim is split evenly, before and after."""
        pair = self.before[d], self.after[d]
        return d in self.even_dims or all(
            shard_sizes.is_even(self.shape[d], mesh, axes) for axes in pair
        )

    def shard(self, mesh: Mesh, rank: int | None) -> list[int]:
        """Return the shape after the step on a rank; None: of the largest shard."""
        spec = Spec.of(self.after)
        if rank is None:
            shape = list(spec.local_shape(mesh, self.shape))
        else:
            shape = list(spec.rank_shape(mesh, self.shape, rank))
        for d in self.even_dims:
            shape[d] = self.shape[d] // mesh.count(self.after[d])
        return shape

    @property
    def fields(self) -> tuple[Any, ...]:
        """Return the fields as a step's node keeps them (``kwargs["cut"]``)."""
        fields = self.shape, self.before, self.after
        return (*fields, self.even_dims) if self.even_dims else fields


def cut_of(node: fx.Node) -> Cut | None:
    """Return how the value of a step is split if it is uneven, else None."""
    fields: Any = node.kwargs.get("cut")
    return None if fields is None else Cut(*fields)


# Key of ``meta`` for a step's operand whose shape is not the same on all ranks.
OWN_SHAPE = "fxpar_shape"


def local_shape(node: fx.Node) -> tuple[Size, ...]:
    """Return this rank's shape of a step's operand."""
    return tuple(node.meta.get(OWN_SHAPE) or node.meta["val"].shape)


def step(
    build: Builder,
    target: Callable[..., Any],
    x: fx.Node,
    *args: Any,
    cut: Cut | None = None,
) -> fx.Node:
    """Append one step, with its fake value. ``cut``: how the value is split around it;
    the node keeps it only if it is uneven."""
    uneven = cut is not None and not cut.is_even(build.mesh)
    kwargs = {"cut": cut.fields} if cut and uneven else {}
    node = build.graph.call_function(target, (x, *args), kwargs)
    value = x.meta["val"]
    shape = shape_after(node, value.shape, build.mesh)
    kind = {"dtype": value.dtype, "device": value.device}
    empty = torch.ops.aten.empty.memory_format
    node.meta["val"] = known_values.result(build.fake_mode, empty, (shape,), kind)
    build.stamp(node)
    return node


def shape_after(
    node: fx.Node, before: Shape, mesh: Mesh, rank: int | None = None
) -> list[int]:
    """Return the shape of a step's result on a rank, from its operand's shape there;
    None: of the largest shard."""
    shape, cut = list(before), cut_of(node)
    if cut is not None:
        shape = cut.shard(mesh, rank)
    elif node.target is send:
        shape = [0]
    elif node.target is move_rows:
        text: Any = node.args[1]
        exchange = Exchange.parse(text)
        shape[exchange.moves.dim] = (
            most_rows(exchange, mesh)
            if rank is None
            else own_rows(exchange, mesh, rank)
        )
    elif node.target is not recv:
        count = mesh.count(axes_of(node))
        shape = list(KINDS[kind_of(node)].shape(shape, changed_dims(node), count))
    return shape


def exchange_step(build: Builder, x: fx.Node, exchange: Exchange) -> fx.Node:
    """Append the step that moves rows of ``x``, the local operands joined."""
    return step(build, move_rows, x, exchange.text, exchange.axes)


def emit(
    build: Builder, x: fx.Node, steps: Iterable[Step], source: Spec, shape: Shape
) -> fx.Node:
    """Append the steps of a reshard of a value of global ``shape`` laid out as
    ``source``; return the last, or ``x`` itself if there are none."""
    trivial_axes = {axis for axis in build.mesh.names if build.mesh.sizes[axis] == 1}
    before = source.without(trivial_axes).dims
    for reshard_step in steps:
        target, args = call_of(reshard_step, build.mesh)
        after = reshard_step.spec.without(trivial_axes).dims
        cut = Cut(tuple(shape), before, after)
        x, before = step(build, target, x, *args, cut=cut), after
    return x
