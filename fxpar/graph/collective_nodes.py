"""Steps of reshards as nodes of a local graph: one node each, on any dim.

A local graph is first made with these, so that rewrites see one ``all_gather(x, dim,
axes)`` where later a collective stands between views and copies; ``lower`` makes it
those. What a node gives is contiguous. ``call_of`` writes a step of
``sharding.reshard`` as such a call, ``emit`` appends it. The functions only name what
is to be done: a graph runs once it is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar._fast import known_values
from fxpar.graph.builder import Builder
from fxpar.sharding import shard_sizes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.op import bytes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.steps import KINDS, Step, permutation
from fxpar.sharding.row_moves import Exchange, most_rows, seconds
from fxpar.sharding.spec import Spec

Axes = tuple[str, ...]
Shape = Sequence[int]


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


def move_rows(x: Any, exchange: str, axes: Axes) -> Any:
    """The rows that this rank has of what an op makes by moving rows of ``x``, all
    ranks' operands joined (``row_moves.Exchange``)."""
    _unlowered()


def send(x: Any, peer: int, tag: int, axes: Axes) -> Any:
    """Gives member ``peer`` of this rank's group the value; here, an empty tensor."""
    _unlowered()


def recv(x: Any, peer: int, tag: int, axes: Axes) -> Any:
    """What member ``peer`` of this rank's group sends, written over ``x``."""
    _unlowered()


# The node function of each kind of step, of rows that an op moves between ranks, and of
# messages between ranks that run different graphs.
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
# What reshards communicate by, and all that communicates.
RESHARDS = {
    function
    for kind, function in NODES.items()
    if kind in KINDS and not KINDS[kind].local
}
COLLECTIVE = RESHARDS | MESSAGES | {move_rows}
# How two summands of a reduction become one.
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
    """(function, its arguments after ``x``) of a step: dims, the reduction or the
    members a permute reads, axes."""
    args: tuple[Any, ...] = (*step.dims, step.op) if step.op else step.dims
    if step.kind == "permute":
        args = (permutation(step, mesh),)
    return NODES[step.kind], (*args, step.axes)


def is_step(node: fx.Node) -> bool:
    """Whether a node is a step."""
    return node.target in _KIND


def kind_of(node: fx.Node) -> str:
    """The kind of a step, a key of ``NODES``."""
    return _KIND[node.target]


def axes_of(node: fx.Node) -> Axes:
    """The axes that a step goes over."""
    axes: Any = node.args[-1]
    return axes


def changed_dims(node: fx.Node) -> list[int]:
    """The dims that a step cuts or joins, or whose rows it moves."""
    if node.target is move_rows:
        text: Any = node.args[1]
        return [Exchange.parse(text).moves.dim]
    return [arg for arg in node.args[1:-1] if isinstance(arg, int)]


def step_seconds(node: fx.Node, mesh: Mesh, share: float = 1.0) -> float:
    """How long the collective of a step takes for a share of its operand; of messages,
    and of what is local, nothing."""
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
    """How a value is cut around a step."""

    # The global shape.
    shape: tuple[int, ...]
    # The axes of each dim before the step.
    before: tuple[Axes, ...]
    # The axes of each dim after it.
    after: tuple[Axes, ...]
    # Dims of which each rank has as many rows, whatever the shares of axes.
    alike: tuple[int, ...] = ()

    def is_even(self, mesh: Mesh) -> bool:
        """Whether all ranks hold as much, before and after."""
        return all(self.is_even_in(mesh, d) for d in range(len(self.shape)))

    def is_even_in(self, mesh: Mesh, d: int) -> bool:
        """Whether all ranks hold as much of a dim, before and after."""
        pair = self.before[d], self.after[d]
        return d in self.alike or all(
            shard_sizes.is_even(self.shape[d], mesh, axes) for axes in pair
        )

    def largest(self, mesh: Mesh) -> list[int]:
        """The shape of the largest shard after the step."""
        return [
            rows // mesh.count(axes)
            if d in self.alike
            else shard_sizes.largest(rows, mesh, axes)
            for d, (rows, axes) in enumerate(zip(self.shape, self.after, strict=True))
        ]

    @property
    def fields(self) -> tuple[Any, ...]:
        """As the node of a step keeps it."""
        fields = self.shape, self.before, self.after
        return (*fields, self.alike) if self.alike else fields


def cut_of(node: fx.Node) -> Cut | None:
    """How the value of a step is cut, where not all ranks hold as much of it."""
    fields: Any = node.kwargs.get("cut")
    return None if fields is None else Cut(*fields)


def step(
    build: Builder,
    target: Callable[..., Any],
    x: fx.Node,
    *args: Any,
    cut: Cut | None = None,
) -> fx.Node:
    """Append one step, with its fake value. ``cut``: how the value is cut around it,
    kept where not all ranks hold as much."""
    uneven = cut is not None and not cut.is_even(build.mesh)
    kwargs = {"cut": cut.fields} if cut and uneven else {}
    node = build.graph.call_function(target, (x, *args), kwargs)
    value, shape = x.meta["val"], list(x.meta["val"].shape)
    if cut and uneven:
        shape = cut.largest(build.mesh)
    elif target is send:
        shape = [0]
    elif target is move_rows:
        exchange = Exchange.parse(args[0])
        shape[exchange.moves.dim] = most_rows(exchange, build.mesh)
    elif target is not recv:
        dims = [arg for arg in args if isinstance(arg, int)]
        shape = KINDS[_KIND[target]].shape(shape, dims, build.mesh.count(args[-1]))
    kind = {"dtype": value.dtype, "device": value.device}
    empty = torch.ops.aten.empty.memory_format
    node.meta["val"] = known_values.result(build.fake_mode, empty, (shape,), kind)
    build.stamp(node)
    return node


def exchange_step(build: Builder, x: fx.Node, exchange: Exchange) -> fx.Node:
    """Append the step that moves rows of ``x``, the local operands joined."""
    return step(build, move_rows, x, exchange.text, exchange.axes)


def emit(
    build: Builder, x: fx.Node, steps: Iterable[Step], source: Spec, shape: Shape
) -> fx.Node:
    """Append the steps of a reshard of a value of global ``shape`` that lies as
    ``source``; ``x`` itself if there are none."""
    trivial_axes = {axis for axis in build.mesh.names if build.mesh.sizes[axis] == 1}
    before = source.without(trivial_axes).dims
    for reshard_step in steps:
        target, args = call_of(reshard_step, build.mesh)
        after = reshard_step.spec.without(trivial_axes).dims
        cut = Cut(tuple(shape), before, after)
        x, before = step(build, target, x, *args, cut=cut), after
    return x


def chains(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The steps among ``nodes``, in runs: each but the last of a run is read by the
    next alone."""
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if not is_step(node):
            continue
        source: Any = node.args[0]
        only_reader = len(source.users) == 1
        out[node] = [*(out.pop(source, []) if only_reader else []), node]
    return list(out.values())
