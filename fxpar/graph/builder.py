"""Adds nodes with fake values to a graph, for passes that build and rewrite graphs.

In: a graph, and ops with arguments that hold nodes. Out: nodes. Every node made while
``at(node)`` or ``before(node)`` is active carries that node's provenance (stack trace,
module stack, recompute tags), so that an error, a profile or activation checkpointing
finds the user's line. Never: an op runs on real data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar._fast import known_values
from fxpar._torch import fake, inductor
from fxpar._torch.symbols import Inexpressible
from fxpar.graph import size_nodes
from fxpar.sharding import rank_ints, row_moves, shard_sizes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import phase_of
from fxpar.sharding.row_moves import Exchange

# A size among the arguments of an op in a local graph: a number, or a node that
# computes it where it differs between ranks.
Size: TypeAlias = int | fx.Node

# The second operand that leaves the first as it is.
_NEUTRAL: dict[Any, int] = {
    operator.add: 0,
    operator.sub: 0,
    operator.mul: 1,
    operator.floordiv: 1,
}

# Keys of ``meta`` in a program in stages: the stage of a node
# (``assign_stages.StageHome``), the place where it runs (``lay_out_stages``), and its
# part of the batch (``microbatches``).
STAGE, PLACE, PART = "fxpar_stage", "fxpar_place", inductor.PART

# Key of ``meta["custom"]``, which all passes keep: the region into which a schedule
# fused the node.
REGION = "fxpar_region"

# Keys of ``meta`` that a rewritten node keeps from the node it comes from.
PROVENANCE = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "seq_nr",
    "partitioner_tag",
    "recompute",
    "ac_graph_id",
    "custom",
    "original_aten",
    "from_node",
    "has_backward_hook",
    "quantization_tag",
    STAGE,
    PLACE,
    PART,
)

# fxpar's own such keys: the reshard and its cause; whether it is one of a parameter;
# whether it is one of the chunks in which a schedule runs a collective.
OURS = ("fxpar_reshard", "fxpar_cause", "fxpar_parameter", "fxpar_chunk")

# Key of ``meta`` on a joined collective: the names of the ops that its parts are for.
ORIGINS = "fxpar_origins"

# Keys in ``meta["custom"]`` of a node: the number that autograd gave it, and whether it
# is an op of the forward inside a checkpointed region.
_NUMBER, _CHECKPOINTED = "fxpar_number", "fxpar_checkpointed"

# Key of ``meta`` on the output of a local graph: whether the graph has uneven shards.
UNEVEN = "fxpar_uneven"

# Key of ``meta`` on an input of a local graph: axes over which it varies, though its
# spec has none.
VARIES = "fxpar_varies"


def value_of(arg: Any) -> Any:
    """Return arguments with nodes replaced by their fake values."""
    return fx.node.map_arg(arg, lambda node: node.meta["val"])


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor value, open sizes as symbols."""
    return tuple(node.meta["val"].shape)


def is_zeros(node: fx.Node) -> bool:
    """Return whether a node is a tensor of zeros made by ``full``."""
    return node.target is torch.ops.aten.full.default and node.args[1] == 0


def is_uneven(graph: fx.Graph) -> bool:
    """Return whether a local graph has values of other sizes on some ranks."""
    return any(
        node.target in rank_ints.SIZES or "fxpar_global_shape" in node.meta
        for node in graph.nodes
    )


def copy_of(graph: fx.Graph) -> fx.Graph:
    """Return a copy whose nodes have metadata of their own."""
    copied_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copied_graph.node_copy(node, copies.__getitem__)
    return copied_graph


def part_of(
    inputs: Iterable[fx.Node], calls: Iterable[fx.Node], results: Sequence[Any]
) -> fx.Graph:
    """Return a graph of copies of calls; ``inputs`` become its placeholders."""
    graph = fx.Graph()
    copies: dict[Any, Any] = {}
    for node in inputs:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
        else:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(type(results)(copies.get(r, r) for r in results))  # type: ignore[call-arg]
    return graph


def put_after_reads(
    graph: fx.Graph, before: Mapping[fx.Node, Sequence[fx.Node]] | None = None
) -> fx.Node | None:
    """Order nodes so that each is after what it reads, and after the nodes that
    ``before`` has for it; otherwise leave their order. If there is no such order,
    change nothing, and return a node that would have to wait for itself."""
    placed: dict[fx.Node, None] = {}
    waiting: dict[fx.Node, list[fx.Node]] = {}
    for first in graph.nodes:
        stack = [first]
        while stack:
            node = stack.pop()
            sources = (*node.all_input_nodes, *(before or {}).get(node, ()))
            unplaced = next((n for n in sources if n not in placed), None)
            if unplaced is not None:
                waiting.setdefault(unplaced, []).append(node)
            else:
                placed[node] = None
                stack += reversed(waiting.pop(node, []))
    if waiting:
        return next(node for node in graph.nodes if node not in placed)
    for earlier, node in pairwise(placed):
        if earlier.next is not node:
            earlier.append(node)
    return None


class Builder:
    """Adds nodes to a graph, each with a fake value computed from those of its inputs.

    ``mesh``: that of a local graph, whose nodes also carry fxpar's notes (their cause,
    their one-device node); None for a graph in global shapes.
    """

    def __init__(
        self, graph: fx.Graph, fake_mode: Any, mesh: Mesh | None = None
    ) -> None:
        self.graph, self.fake_mode, self._mesh = graph, fake_mode, mesh
        self._can_be_open = fake.can_have_symbols(fake_mode)
        self._origin: fx.Node | None = None

    @property
    def mesh(self) -> Mesh:
        assert self._mesh is not None, "of a graph in global shapes"
        return self._mesh

    @contextmanager
    def at(self, origin: fx.Node) -> Iterator[None]:
        """Give nodes made inside the provenance and fxpar's notes of ``origin``."""
        saved, self._origin = self._origin, origin
        try:
            yield
        finally:
            self._origin = saved

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Insert nodes made inside before ``node``, with its provenance."""
        with self.graph.inserting_before(node), self.at(node):
            yield

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add ``target(*args, **kwargs)``; arguments may hold nodes, and open sizes,
        which become nodes."""
        if self._can_be_open:
            args, kwargs = size_nodes.as_nodes(self.graph, (args, kwargs))
        node = self.graph.create_node("call_function", target, args, kwargs)
        values = value_of(args), value_of(kwargs)
        node.meta["val"] = known_values.result(self.fake_mode, target, *values)
        self.stamp(node)
        return node

    def stamp(self, node: fx.Node) -> None:
        """Give an added node the provenance and the notes that are active."""
        if self._origin is None:
            return
        meta = self._origin.meta
        node.meta.update({key: meta[key] for key in PROVENANCE if key in meta})
        if self._mesh is not None:
            node.meta.update({key: meta[key] for key in OURS if key in meta})
            node.meta["fxpar_origin"] = meta.get("fxpar_origin", self._origin.name)

    def replace(self, node: fx.Node, replacement: fx.Node) -> None:
        """Replace every use of ``node`` by ``replacement`` and erase the node."""
        node.replace_all_uses_with(replacement)
        self.graph.erase_node(node)

    def replace_as_it_is(self, node: fx.Node, replacement: fx.Node) -> None:
        """Replace ``node`` if the replacement has the same shape and strides, so that
        no reader sees another memory layout; else the replacement is left as dead
        code."""
        new, old = replacement.meta["val"], node.meta["val"]
        if (new.shape, new.stride()) == (old.shape, old.stride()):
            self.replace(node, replacement)

    def with_strides_of(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """Return ``x`` if it has the strides of ``node``, else a contiguous copy."""
        is_equal = x.meta["val"].stride() == node.meta["val"].stride()
        return x if is_equal else self.copied(x)

    def offset(
        self, axes: Sequence[str], stride: int, base: int = 0, around: int = 0
    ) -> Any:
        """Return ``base + stride * (this rank's shard index over axes)``, modulo
        ``around`` unless that is 0: an int, or a node that computes it."""
        base = base % around if around else base
        if not axes or stride == 0:
            return base
        rest = (around,) if around else ()
        return self._of_rank(rank_ints.offset, base, axes, stride, base, *rest)

    def _of_rank(
        self, target: Callable[..., int], value: int, axes: Sequence[str], *args: Any
    ) -> fx.Node:
        """Add a call of ``rank_ints``, a number that depends on the rank; ``value`` is
        its fake value."""
        if target is not rank_ints.offset and torch.SymInt in map(type, args):
            raise Inexpressible("shards of a dynamic size are unequal")
        args = str(self.mesh), tuple(axes), *args
        if self._can_be_open:
            args = size_nodes.as_nodes(self.graph, args)
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node

    def own_size(self, rows: Size, axes: Sequence[str]) -> Size:
        """Return the number of rows that this rank holds of a dim of ``rows``, split
        over axes; its fake value is that of the largest shard."""
        if not axes:
            return rows
        assert not isinstance(rows, fx.Node), "of a dim whose size is known"
        if shard_sizes.is_even(rows, self.mesh, axes):
            return rows // self.mesh.count(axes)
        largest = shard_sizes.largest(rows, self.mesh, axes)
        return self._of_rank(rank_ints.own_size, largest, axes, rows)

    def own_start(
        self, rows: Size, axes: Sequence[str], base: Size = 0, times: int = 1
    ) -> Size:
        """Return ``base`` + ``times`` the first row that this rank holds of a dim of
        ``rows``."""
        if not axes:
            return base
        assert not isinstance(rows, fx.Node), "of a dim whose size is known"
        if shard_sizes.is_even(rows, self.mesh, axes):
            assert not isinstance(base, fx.Node), "of equal shards"
            return self.offset(axes, rows // self.mesh.count(axes) * times, base)
        start = self._of_rank(rank_ints.own_start, 0, axes, rows)
        start = self.compute(operator.mul, start, times)
        return self.compute(operator.add, start, base)

    def own_end(self, rows: Size, axes: Sequence[str]) -> Size:
        """Return the row after this rank's last row of a dim of ``rows``."""
        return self.own_start(rows, axes, self.own_size(rows, axes))

    def part_sizes(self, rows: int, axes: Sequence[str], axis: str) -> list[Size]:
        """Return the sizes of the parts into which ``axis`` splits this rank's shard
        over ``axes`` of a dim of ``rows``, one for each rank along it."""
        own, ranks = self.own_size(rows, axes), range(self.mesh.axis_size(axis))
        if isinstance(own, fx.Node):
            own = shard_sizes.largest(rows, self.mesh, axes)
        else:
            axes, rows = (), own
        sizes = [shard_sizes.piece(own, self.mesh, axis, i)[1] for i in ranks]
        if not axes:
            return list(sizes)
        target = rank_ints.part_size
        return [
            self._of_rank(target, n, axes, rows, axis, i) for i, n in enumerate(sizes)
        ]

    def window_rows(self, exchange: Exchange) -> Size:
        """Return the rows of the window that this rank reads, or adds; its fake value
        is that of the largest."""
        members = self.mesh.group(0, exchange.axes)
        most = max(row_moves.window(exchange, self.mesh, r)[2] for r in members)
        moves = exchange.moves
        (count,) = moves.sources if moves.adds else moves.targets
        if shard_sizes.is_even(count, self.mesh, exchange.axes):
            return most
        target = rank_ints.window_rows
        return self._of_rank(target, most, exchange.axes, exchange.text)

    def window_start(self, exchange: Exchange) -> fx.Node:
        """Return the row of its dim at which this rank's window begins."""
        return self._of_rank(rank_ints.window_start, 0, exchange.axes, exchange.text)

    def compute(self, operation: Callable[[int, int], int], a: Size, b: Size) -> Size:
        """Return an operation of two sizes: a number if both are, else a node."""
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return operation(a, b)
        if operation in _NEUTRAL and b == _NEUTRAL[operation]:
            return a
        node = self.graph.call_function(
            operation, size_nodes.as_nodes(self.graph, (a, b))
        )
        node.meta["val"] = operation(value_of(a), value_of(b))
        return node

    def missing(self, room: Size, size: Size) -> Size:
        """Return ``room - size``, 0 if they are the same node."""
        return 0 if room is size else self.compute(operator.sub, room, size)

    def pad(self, x: fx.Node, amounts: Sequence[Size], fill: float = 0) -> fx.Node:
        """Return ``x`` with ``amounts`` more rows at the end of each dim."""
        rows = [n for size in reversed(amounts) for n in (0, size)]
        return self.pad_ends(x, rows, fill)

    def pad_dim(
        self, x: fx.Node, dim: int, before: Size, after: Size, fill: float = 0
    ) -> fx.Node:
        """Return ``x`` with more rows at both ends of one dim."""
        later = x.meta["val"].dim() - 1 - dim
        return self.pad_ends(x, [*[0, 0] * later, before, after], fill)

    def pad_ends(self, x: fx.Node, amounts: Sequence[Size], fill: float = 0) -> fx.Node:
        """Return ``x`` with more rows at both ends of each dim, ``amounts`` as in
        ``constant_pad_nd``; ``x`` itself if there are none. Booleans are padded as
        bytes: Inductor's (2.13) C++ for a padded comparison of 8-byte values does not
        compile."""
        if not any(amounts):
            return x
        dtype = x.meta["val"].dtype
        if dtype is torch.bool:
            x = self.cast(x, torch.uint8)
        padded = self.call(torch.ops.aten.constant_pad_nd.default, x, amounts, fill)
        return self.cast(padded, dtype)

    def first_rows(self, x: fx.Node, sizes: Iterable[tuple[int, Size]]) -> fx.Node:
        """Return ``x`` with only the first rows of some dims. ``sizes``: (dim, number
        of its rows)."""
        for dim, size in sizes:
            x = self.call(torch.ops.aten.slice.Tensor, x, dim, 0, size)
        return x

    def where(
        self, condition: fx.Node, x: fx.Node, other: bool | int | float
    ) -> fx.Node:
        """Return ``x`` where the condition holds, else the scalar ``other``."""
        like, aten = x.meta["val"], torch.ops.aten
        constant = self.call(
            aten.full.default, [], other, dtype=like.dtype, device=like.device
        )
        return self.call(aten.where.self, condition, x, constant)

    def reshape(self, x: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """Return ``x`` in another shape; if ``x`` is a reshape of a value that has this
        shape already, that value. Open sizes are not compared, which would fix them."""
        source: Any = x
        while all(type(n) is int for n in (*shape, *shape_of(source))):
            if shape_of(source) == tuple(shape):
                return source
            if not op_facts_of(source.target).reshapes:
                break
            source = source.args[0]
        return self.call(torch.ops.aten.reshape.default, x, list(shape))

    def copied(self, x: fx.Node) -> fx.Node:
        """Return a contiguous copy of ``x``."""
        layout = torch.contiguous_format
        return self.call(torch.ops.aten.clone.default, x, memory_format=layout)

    def contiguous(self, x: fx.Node) -> fx.Node:
        """Return ``x`` if it is contiguous, else a contiguous copy."""
        return x if x.meta["val"].is_contiguous() else self.copied(x)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return ``x`` in another dtype; ``x`` itself if it has that dtype."""
        if x.meta["val"].dtype == dtype:
            return x
        return self.call(torch.ops.prims.convert_element_type.default, x, dtype)

    def product(self, sizes: Iterable[Size]) -> Size:
        """Return the product of sizes."""
        out: Size = 1
        for size in sizes:
            out = size if out == 1 else self.compute(operator.mul, out, size)
        return out

    def iota(
        self, n: Size, device: torch.device, step: int = 1, start: Size = 0
    ) -> fx.Node:
        """Return the integers ``start, start + step, ..., start + (n - 1) * step``."""
        return self.call(
            torch.ops.prims.iota.default,
            n,
            start=start,
            step=step,
            dtype=torch.int64,
            device=device,
            requires_grad=False,
        )

    def wait(self, collective: fx.Node) -> fx.Node:
        """Return the finished result of a functional collective."""
        return self.call(torch.ops._c10d_functional.wait_tensor.default, collective)


def replace_items(node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replace every use of the items of ``node`` by ``results``, and erase it."""
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def joined(call: Callable[..., fx.Node], values: Sequence[fx.Node]) -> fx.Node:
    """Append one flat tensor with the numbers of several. ``call`` appends a node."""
    flat = [call(torch.ops.aten.reshape.default, x, [-1]) for x in values]
    return flat[0] if len(flat) == 1 else call(torch.ops.aten.cat.default, flat)


def split(
    call: Callable[..., fx.Node], flat: fx.Node, like: Iterable[fx.Node]
) -> list[fx.Node]:
    """Append tensors of the shapes of ``like``, split from one: inverse of
    ``joined``."""
    aten, out, start = torch.ops.aten, list[fx.Node](), 0
    for value in (node.meta["val"] for node in like):
        end, part = start + value.numel(), flat
        if end - start < flat.meta["val"].numel():
            part = call(aten.slice.Tensor, flat, 0, start, end)
        out.append(call(aten.reshape.default, part, list(value.shape)))
        start = end
    return out


def keep_meta(graph: fx.Graph) -> None:
    """Keep what must not be overwritten when the graph of a step is traced again,
    without autograd: the numbers that autograd gives ops, and which ops of the forward
    are in checkpointed regions. AOTAutograd (2.13) would compute these again itself,
    before anything is planned, and refuses random ops."""
    for node in graph.nodes:
        custom = custom_of(node)
        if "seq_nr" in node.meta:
            custom = custom | {_NUMBER: node.meta["seq_nr"]}
        if node.meta.pop("recompute", None) and phase_of(node) == "forward":
            custom = custom | {_CHECKPOINTED: True}
        node.meta["custom"] = custom


def restore_meta(graph: fx.Graph) -> None:
    """Give nodes of a step the numbers that autograd gave them, by which a backward op
    is known to differentiate a forward one, and the tags of checkpointed regions. In
    place."""
    for node in graph.nodes:
        custom = custom_of(node)
        if _NUMBER in custom:
            node.meta["seq_nr"] = custom[_NUMBER]
        if _CHECKPOINTED in custom:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def custom_of(node: fx.Node) -> dict[str, Any]:
    """Return what is in ``meta["custom"]``."""
    return node.meta.get("custom") or {}


def region_of(node: fx.Node) -> str | None:
    """Return the region into which a schedule's ``fuse`` put a node, else None."""
    return custom_of(node).get(REGION)
